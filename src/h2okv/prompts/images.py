"""Images in prompts: opened within limits, and encoded by the model's processor."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from h2okv.cache.argument import CACHE
from h2okv.console import optional
from h2okv.integration.enable import input_device
from h2okv.prompts import readers
from h2okv.prompts.chat_template import Pins, adds_special, chat_text
from h2okv.prompts.messages import MAX_IMAGE_BYTES, Conversation, ImagePart, read_pillow
from h2okv.prompts.readers import FieldError, Fields
from h2okv.records import first_line, naming

IMAGE_TYPES = ("gemma3", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm")
"""Model types whose images the tests compare with `generate`'s."""
MAX_PIXELS = 1 << 25
"""Pixels of all images of a prompt, before the processor resizes them."""
_pillow = partial(optional, feature="an image", extra="images")
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt's tokens, with the images' placeholders, the model's further inputs, and pins."""

    token_ids: tuple[int, ...]
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    pins: Pins = ()
    # Of a server's prompts: special tokens are not part of a text that came as text.
    text: str = ""
    is_text: bool = False
    stops: tuple[str, ...] = ()  # stop strings in addition to those of the request
    strips_start: bool = False  # whether a space before the output belongs to the template


class ImageEncoder:
    """Encodes prompts with images, one at a time; the processor is loaded with the first."""

    def __init__(self, config: PreTrainedConfig, tokenizer: Any, source: Any) -> None:
        """Take the name or folder of a model, or its processor, as `source`."""
        self._config, self._tokenizer, self._lock = config, tokenizer, threading.RLock()
        self._source, self._processor = source, None if isinstance(source, str) else source

    @property
    def reads_images(self) -> bool:
        """Whether the model's type is one of `IMAGE_TYPES`."""
        return self._config.model_type in IMAGE_TYPES

    def processor(self) -> Any:
        """Return the processor; raise ValueError with the reason if there is none."""
        if not self.reads_images:
            raise ValueError(
                f"images are not supported with model type {self._config.model_type!r}; leave them"
                f" out, or use a model of type {', '.join(IMAGE_TYPES)}"
            )
        if CACHE != "cache":  # whose processors need torchvision, and place images otherwise
            raise ValueError(
                f"images need transformers 5.24, got {transformers.__version__}; install it, or"
                " leave them out"
            )
        _pillow("PIL.Image")
        if self._processor is None and not self._source:
            raise ValueError(
                f"this {self._config.model_type} model has no name, so its processor is unknown;"
                " give it in place of the tokenizer, LLM(model, processor)"
            )
        with self._lock:
            if self._processor is None:
                try:
                    processor = _load_processor(self._source, self._config, self._tokenizer)
                    if not hasattr(processor, "image_processor"):
                        raise ValueError("it has none for images")
                except Exception as error:  # its type depends on the file at fault
                    raise ValueError(
                        f"images cannot be read, as the processor of {str(self._source)!r} cannot"
                        f" be loaded ({type(error).__name__}: {first_line(error)}); get the model"
                        " again, or install what is missing"
                    ) from error
                self._processor = processor
            # Older checkpoints have the template in the processor's files alone.
            if not self._tokenizer.chat_template:
                self._tokenizer.chat_template = self._processor.chat_template
        return self._processor

    def check(self, images: Sequence[ImagePart]) -> Any:
        """Return the processor; raise FieldError with the reason why it reads no images."""
        try:
            return self.processor()
        except ValueError as error:
            raise FieldError(images[0].path, f"={images[0]}: {error}") from error

    def encode(
        self, prompt: str | Conversation, images: Sequence[ImagePart] = (), special: bool = True
    ) -> EncodedPrompt:
        """Encode a conversation with images, or a text with a placeholder for each of `images`."""
        images = prompt.images if isinstance(prompt, Conversation) else images
        processor = self.check(images)
        with self._lock:  # one, so that the pixels of many do not fill the memory
            return self._encode(processor, prompt, images, special)

    def _encode(
        self, processor: Any, prompt: str | Conversation, images: Sequence[ImagePart], special: bool
    ) -> EncodedPrompt:
        pixels = open_images(images)
        text = prompt
        if isinstance(prompt, Conversation):
            text = chat_text(self._tokenizer, prompt, with_images=True)
            special = adds_special(self._tokenizer, text)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                encoded = processor(
                    text=text, images=pixels, add_special_tokens=special, return_tensors="pt"
                )
        except Exception as error:  # a count that does not fit, or a size, as each class says it
            problem = f": the model's processor does not take this prompt ({first_line(error)})"
            token = getattr(processor, "image_token", None) or "placeholder"
            raise FieldError(images[0].path, f"{problem}; give one {token} for each") from error
        inputs = dict(encoded)
        ids = inputs.pop("input_ids")
        inputs.pop("attention_mask", None)
        return EncodedPrompt(tuple(ids[0].tolist()), inputs)

    def encode_fields(self, fields: Mapping[str, Any]) -> EncodedPrompt:
        """Encode ``{"prompt": text, "images": [...]}``, the images being Pillow's."""
        read = _PROMPT_WITH_IMAGES(fields)
        if not read["images"]:
            raise FieldError(("images",), " is empty; give at least one image")
        return self.encode(read["prompt"], read["images"])


_PROMPT_WITH_IMAGES = Fields(
    {"prompt": readers.text, "images": readers.list_of(read_pillow)},
    {"prompt": "a text with a placeholder for each image", "images": "a list of Pillow's"},
)


def images_for(model: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return inputs on a model's device, pixels in its dtype."""
    device = input_device(model) if inputs else None
    return {
        name: value.to(device, model.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }


def _load_processor(source: str, config: PreTrainedConfig, tokenizer: Any) -> Any:
    """Load a model's processor; without torchvision, which only videos need, one of images."""
    # Which takes a while, and most prompts are texts.
    from transformers import AutoImageProcessor, AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.utils import is_torchvision_available

    kind: Any = PROCESSOR_MAPPING[type(config)]
    names = kind.get_attributes()
    if "video_processor" not in names or is_torchvision_available():
        return AutoProcessor.from_pretrained(source, trust_remote_code=False)

    class WithoutVideos(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name != "video_processor":
                return super().check_argument_for_proper_class(argument_name, argument)
            return None

    WithoutVideos.__name__ = kind.__name__
    images = AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
    loaded = {"image_processor": images, "tokenizer": tokenizer}
    options, _ = kind.get_processor_dict(source)
    return WithoutVideos.from_args_and_dict([loaded.get(name) for name in names], options)


def read_image_file(option: str, path: Path) -> ImagePart:
    """Read an image's file; `option` names it in errors."""
    shown = repr(str(path))
    with naming(path, "read", "give an image"):
        size = path.stat().st_size
        data = path.read_bytes() if size <= MAX_IMAGE_BYTES else b""
    if not data:
        problem = f" has {size:,} bytes; give an image of 1 to {MAX_IMAGE_BYTES:,}"
        raise ValueError(f"{option} {shown}{problem}")
    return ImagePart(data, (option,), shown)


def open_images(images: Sequence[ImagePart]) -> list[Any]:
    """Decode images as RGB, of an animation its first one."""
    library, operations = _pillow("PIL.Image"), _pillow("PIL.ImageOps")
    opened, total = [], 0
    for file in images:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's own limit, which is larger
                image = file.data
                if isinstance(image, bytes):
                    image = library.open(io.BytesIO(image), formats=_FORMATS)
                total += image.width * image.height
                if total <= MAX_PIXELS:
                    opened.append(operations.exif_transpose(image).convert("RGB"))
        except Exception as error:  # decoders of broken files raise anything
            kinds = ", ".join(_FORMATS)
            raise FieldError(
                file.path, f"={file} is not an image that can be read; give a {kinds} file"
            ) from error
        if total > MAX_PIXELS:
            raise FieldError(
                file.path,
                f"={file} of {image.width} x {image.height} pixels brings the prompt's images to"
                f" {total:,}, and {MAX_PIXELS:,} are allowed; give smaller images, or fewer",
            )
    return opened
