"""Folders of tiny random vision-language models, with tokenizer and image processor."""

import base64
import io
import json
import sys
from pathlib import Path

# pytest's importlib mode adds no folder.
sys.path.insert(0, str(Path(__file__).parent / "families"))

import pytest  # noqa: E402

from h2okv.cache.argument import CACHE  # noqa: E402

if CACHE != "cache":
    pytest.skip("images need transformers 5.24", allow_module_level=True)
import numpy  # noqa: E402
from PIL import Image  # noqa: E402
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING  # noqa: E402
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING  # noqa: E402
from vision_table import PIXELS, VISION_FAMILIES, VOCABULARY, tiny_vision_model  # noqa: E402

FAMILY = {family.model_type: family for family in VISION_FAMILIES}
_QWEN_TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
# Tokens 2 to 5: the image's, the video's, and what stands around an image.
_MARKS = {
    "llava": ["<image>", "<video>", "<a>", "<b>"],
    "smolvlm": ["<image>", "<video>", "<fake_token_around_image>", "<global-img>"],
    "gemma3": ["<image_soft_token>", "<video>", "<start_of_image>", "<end_of_image>"],
}
_SQUARE = {"height": PIXELS, "width": PIXELS}
_QWEN = {
    "patch_size": 2,
    "merge_size": 2,
    "temporal_patch_size": 1,
    # Between one and four times what `vision_table` makes.
    "size": {"shortest_edge": 128, "longest_edge": 512},
}
_IMAGES = {
    "llava": {"size": {"shortest_edge": PIXELS}, "crop_size": _SQUARE},
    "smolvlm": {
        "size": {"longest_edge": PIXELS},
        "max_image_size": {"longest_edge": PIXELS},
        "do_image_splitting": False,
    },
    "gemma3": {"size": _SQUARE},
}
_OPTIONS = {
    "llava": {
        "patch_size": 4,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    },
    "smolvlm": {"image_seq_len": 4},
    "gemma3": {"image_seq_length": 16},
}
_PLACES = {"gemma3": "<start_of_image>", "llava": "<image>", "smolvlm": "<image>"}
# As Qwen's: contents are texts or parts.
_EITHER = """\
{%- for message in messages %}{{ '[' + message.role + ']' }}\
{%- if message.content is string %}{{ message.content }}{% else %}\
{%- for part in message.content %}{% if part.type == 'image' %}{{ PLACE }}\
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""
# As Llava's: contents are parts, images first, and a text is left out.
_PARTS = """\
{%- for message in messages %}{{ '[' + message.role + ']' }}\
{%- for part in message.content | selectattr('type', 'equalto', 'image') %}{{ PLACE }}{% endfor %}\
{%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}\
{%- endfor %}{{ '\\n' }}{% endfor %}{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""


def tiny_tokenizer(model_type: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of single characters."""
    marks = _MARKS.get(model_type, _QWEN_TOKENS)
    special = ["<pad>", "<s>", *marks]
    characters = [*map(chr, range(32, 127)), "\n"]
    for letter in "QXZ@#$%^&*|~`":  # the vocabulary is small
        characters.remove(letter)
    vocabulary = {token: number for number, token in enumerate([*special, *characters])}
    assert len(vocabulary) <= VOCABULARY, len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    image, _, before, after = marks
    names = {"image_token": image}
    if model_type == "gemma3":
        names |= {"boi_token": before, "eoi_token": after}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="?",
        additional_special_tokens=marks, **names,
    )  # fmt: skip
    placeholder = _PLACES.get(model_type, "<|vision_start|><|image_pad|><|vision_end|>")
    template = _PARTS if model_type == "llava" else _EITHER
    fast.chat_template = template.replace("PLACE", repr(placeholder))
    return fast


def save_tiny_vlm(folder: Path, model_type: str) -> Path:
    """Write a model with its tokenizer and processor, as it would come from the Hub."""
    model = tiny_vision_model(FAMILY[model_type])
    model.save_pretrained(folder)
    tiny_tokenizer(model_type).save_pretrained(folder)
    kind = PROCESSOR_MAPPING[type(model.config)]
    images = IMAGE_PROCESSOR_MAPPING[type(model.config)]["pil"](**_IMAGES.get(model_type, _QWEN))
    images = {**images.to_dict(), "image_processor_type": type(images).__name__.removesuffix("Pil")}
    options = {"processor_class": kind.__name__, **_OPTIONS.get(model_type, {})}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps(options))
    return folder


def picture(width: int = 24, height: int = 16, seed: int = 0) -> Image.Image:
    """Return a picture of random colours."""
    colours = numpy.random.default_rng(seed).integers(0, 255, (height, width, 3))
    return Image.fromarray(colours.astype(numpy.uint8))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    """Return a picture's file."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    """Return a picture as clients send it."""
    text = base64.b64encode(encoded(image, kind)).decode()
    return f"data:image/{kind.lower()};base64,{text}"
