"""Load a model and its tokenizer; every failure is a ValueError of one sentence."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.distributed import DistributedConfig

from h2okv.cache.support import auto_model, check_model
from h2okv.integration.enable import enable
from h2okv.models.gguf import check_complete, converted
from h2okv.models.names import BUNDLED, PACKAGED, check_name, find_model
from h2okv.models.packed_linear import check_weight_bits, int4_bytes, pack_linear_layers
from h2okv.models.tokenization import add_end_tokens
from h2okv.prompts.chat_template import encode, plain_template
from h2okv.prompts.images import ImageEncoder
from h2okv.prompts.messages import Conversation
from h2okv.prompts.readers import PromptLimits
from h2okv.provenance import digest
from h2okv.records import first_line, naming, refusing

_NUMBERS_AT_ONCE = 4 << 20  # numbers at a time
_SAMPLES = 64  # offsets in a file; another training run changes the bytes at all of them
_SAMPLE_BYTES = 4096  # read at each


def resolve_model(name: str) -> str:
    """Return the folder or Hub id of a model's name, converting a GGUF file the first time."""
    source = find_model(name)
    return str(converted(source)) if isinstance(source, Path) else source


def default_dtype(name: str, device: torch.device | str) -> torch.dtype | None:
    """Return the default dtype to compute in; None for that of the checkpoint."""
    # Packaged models are stored in half precision to be small, which many CPUs compute slowly.
    is_packaged = name == BUNDLED or name in PACKAGED
    return torch.float32 if is_packaged and torch.device(device).type == "cpu" else None


@dataclass(frozen=True)
class Described:
    """A model's config and tokenizer, before its weights are loaded."""

    name: str  # as the user wrote it
    source: str  # for `from_pretrained`: a folder or Hub id; empty for a model without a name
    config: PreTrainedConfig
    tokenizer: transformers.PreTrainedTokenizerBase
    context: int | None  # the context window in tokens; None for no fixed limit
    processor: Any = None  # of a loaded model, where its source has none

    @property
    def vocab_size(self) -> int:
        return self.config.get_text_config().vocab_size

    @property
    def limits(self) -> PromptLimits:
        return PromptLimits(self.vocab_size, self.context)

    @cached_property
    def image_encoder(self) -> ImageEncoder:
        """What encodes the model's prompts with images."""
        return ImageEncoder(self.config, self.tokenizer, self.processor or self.source)

    def add_end_tokens(self, model: transformers.PreTrainedModel) -> None:
        """Make the model stop at each token that ends a text or a turn. Mutates the model."""
        add_end_tokens(model.generation_config, self.tokenizer, self.vocab_size)

    def encode(self, prompt: str | Conversation | Sequence[Mapping[str, Any]]) -> list[int]:
        """Encode a text, or messages; refuse one that leaves no room for an answer."""
        return self.checked(encode(self.tokenizer, prompt))

    def checked(self, ids: list[int]) -> list[int]:
        """Return the tokens of a prompt; refuse those that leave no room for an answer."""
        self.limits.check_tokens(ids)
        self.limits.check_length(len(ids), remedy="shorten it, or add --cache positions=rolling")
        return ids


def describe(name: str) -> Described:
    """Read a model's config and tokenizer, to find most mistakes before the weights load."""
    check_name(name)  # transformers would try again for half a minute
    source = resolve_model(name)

    def read(component: str, kind: Any) -> Any:
        return _read(name, component, lambda: kind.from_pretrained(source, trust_remote_code=False))

    config = read("configuration", AutoConfig)
    check_model(config)
    return Described(name, source, config, read("tokenizer", AutoTokenizer), context_of(config))


def loaded_dtype(
    described: Described,
    dtype: torch.dtype | str | None,
    device: torch.device,
    weight_bits: int | None = None,
) -> torch.dtype | None:
    """Return the dtype that weights are loaded in; ``None`` for that of the checkpoint."""
    setting, dtype = dtype, getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    dtype = None if dtype == "auto" else dtype
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    if dtype is not None and not is_float:
        raise ValueError(f"dtype must be one such as 'bfloat16', got {setting!r}.")
    assert not isinstance(dtype, str)
    if weight_bits is not None:
        check_weight_bits(weight_bits, dtype, device)
        return torch.bfloat16
    return dtype or default_dtype(described.name, device)


def weight_bytes(described: Described, dtype: torch.dtype, weight_bits: int | None = None) -> int:
    """Return the bytes of a model's weights and buffers, without loading them."""
    with torch.device("meta"):
        config = copy.deepcopy(described.config)
        model: Any = auto_model(config).from_config(config, dtype=dtype)
    model.tie_weights()
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    total = sum(tensor.nbytes for tensor in tensors.values())
    return total + (0 if weight_bits is None else int4_bytes(model))


def weights_digest(source: str | None, config: PreTrainedConfig) -> str | None:
    """Return a digest of samples of a folder's weights, or the Hub's commit of a config."""
    folder = Path(source or "")
    if not source or not folder.is_dir():
        return getattr(config, "_commit_hash", None)
    samples = []
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        with naming(path, "read", "get the model again"), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            samples.append(f"{path.name} {size} ".encode())
            for index in range(_SAMPLES):
                file.seek(index * size // _SAMPLES)
                samples.append(file.read(_SAMPLE_BYTES))
    return digest(b"".join(samples))


def load_weights(
    described: Described,
    dtype: torch.dtype | str | None,
    device: torch.device,
    tensor_parallel: bool = False,
    packed: bool = False,
    weight_bits: int | None = None,
) -> transformers.PreTrainedModel:
    """Load a described model, ready to generate.

    ``packed`` and ``weight_bits`` are for inference that is not compiled; see `packed_linear`.
    """
    dtype = loaded_dtype(described, dtype, device, weight_bits)
    options: dict[str, Any] = {"config": described.config, "dtype": dtype or "auto"}
    if tensor_parallel:
        options["distributed_config"] = DistributedConfig(tp_plan="auto")

    def load() -> Any:
        return auto_model(described.config).from_pretrained(
            described.source, output_loading_info=True, trust_remote_code=False, **options
        )

    model, info = _read(described.name, "weights", load)
    check_complete(described.name, sorted(info["missing_keys"]))
    _check_finite(described.name, model)
    drop_stored_modes(model)
    described.add_end_tokens(model)
    if not tensor_parallel:
        model.to(device)
        if packed:
            pack_linear_layers(model, weight_bits)
    model.eval()
    return model


def load(
    name: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """Load a model with H2O attention, and its tokenizer, ready to generate.

        model, tokenizer = h2okv.load("smollm2")  # after: h2okv models pull smollm2

    Args:
        name: ``"smollm2"``, ``"bundled"``, a folder, a GGUF file (converted once) or a Hub id.
        dtype: of the weights, such as ``torch.bfloat16`` or ``"bfloat16"``; ``None`` for the
            checkpoint's, and float32 on a CPU for h2okv's models.
        device: where to; ``None`` for the first GPU, or the CPU.

    Returns:
        The model, which `disable` gives its usual attention, and the tokenizer, which pads on the
        left and, without a chat template, takes messages as a dialogue.

    Raises:
        ValueError: if there is no such model, or it is not supported.
    """
    if not isinstance(name, str | Path):
        raise ValueError(f"name must be a model's name or folder, got {name!r}.")
    described = describe(str(name))
    model = load_weights(described, dtype, parse_device(str(device or "auto")))
    enable(model)
    tokenizer = described.tokenizer
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template = tokenizer.chat_template or plain_template(tokenizer)
    return model, tokenizer


# Fields of a checkpoint's generation config that do not decide which token comes next.
_STORED_MODES = (
    "cache_implementation", "max_cache_len", "use_cache", "prefill_chunk_size", "compile_config",
    "num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping",
    "num_return_sequences", "constraints", "force_words_ids", "penalty_alpha", "dola_layers",
    "use_mtp", "prompt_lookup_num_tokens", "assistant_early_exit", "speculation_type",
    "token_healing", "max_time", "guidance_scale", "forced_eos_token_id", "output_attentions",
    "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
)  # fmt: skip


def drop_stored_modes(model: transformers.PreTrainedModel) -> None:
    """Drop a checkpoint's caches, beams, search modes and outputs; the command decides these.

    Fields that decide the next token (penalties, bans, temperature) stay.
    """
    for name in _STORED_MODES:
        if getattr(model.generation_config, name, None) is not None:
            setattr(model.generation_config, name, None)
    # `generate` reads a forward's outputs by name, whatever the model's config says.
    model.config.return_dict = True
    model.config.output_hidden_states = False


def _check_finite(name: str, model: torch.nn.Module) -> None:
    """Refuse weights with NaN or infinity, whose output would be arbitrary."""
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        # In chunks, because `isfinite` needs more memory for a vocabulary than the weight itself.
        chunks = tensor.reshape(-1).split(_NUMBERS_AT_ONCE) if tensor.is_floating_point() else ()
        if not all(bool(torch.isfinite(chunk).all()) for chunk in chunks):
            raise ValueError(
                f"model {name!r} has NaN or infinity in {tensor_name}; its weights are damaged"
                " or do not fit the data type, so get it again or try --dtype float32"
            )


def _read(name: str, component: str, load: Callable[[], Any]) -> Any:
    """Run a loader; raise ValueError for any failure, whose type depends on the file format."""
    try:
        return load()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "connect" in str(error) and isinstance(error, OSError):
            raise ValueError(
                f"model {name!r} is not a folder here, and the Hub cannot be reached for it;"
                " check the name and the network, or give a folder"
            ) from error
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(
            f"the {component} of model {name!r} cannot be loaded ({reason}); get the model again"
            " or choose another"
        ) from error


def context_of(config: PreTrainedConfig) -> int | None:
    """Return the context window in tokens, or None if the config sets no limit."""
    text_config = config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if limit is None or not isinstance(rope, dict):
        return limit
    original = rope.get("original_max_position_embeddings", limit)
    return max(limit, int(original * (rope.get("factor") or 1)))


def parse_device(text: str) -> torch.device:
    """Parse a device and check that it can allocate memory."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    problem = f"device {text!r} cannot be used on this machine"
    remedy = "choose auto, cpu or a GPU that torch can see, such as cuda:0"
    with refusing(problem, remedy, RuntimeError, AssertionError, NotImplementedError):
        device = torch.device(text)
        if device.type == "meta":
            raise RuntimeError("a device without memory")
        # Only an allocation shows whether the device works here.
        torch.empty(1, device=device)
    return device
