"""The tokenizer of a GGUF file: how text is split before it is merged, and which tokens end it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerBase

try:
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    _KNOWN: Mapping[str, str] = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS
except ImportError:  # earlier releases choose by architecture
    _KNOWN = dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "qwen2"), "")

# By `tokenizer.ggml.pre`, whose names and expressions llama.cpp has. What transformers does for
# names that it does not know is right for these only.
_GPT2 = frozenset(
    ["gpt-2", "gpt2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de",
     "jina-v2-code", "roberta-bpe", "gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4",
     "mpt", "olmo", "jais", "trillion", "granite-docling"]
)  # fmt: skip
_DIGITS = frozenset(
    ["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"]
)
"""As GPT-2, but each digit alone."""
_SAME = {"stablelm2": "qwen2", "hunyuan": "qwen2", "solar-open": "qwen2", "grok-2": "qwen2"}
_SAME |= {"glm4": "llama-bpe", "chatglm-bpe": "llama-bpe"}
_METADATA_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def check_split(fields: Mapping[str, Any]) -> str | None:
    """Refuse a file whose way to split text is not known; return what is doubtful about it.

    Args:
        fields: The file's metadata, of a list its length.

    Raises:
        ValueError: With what is wrong, to stand behind the file's name.
    """
    if fields.get("tokenizer.ggml.model") != "gpt2":
        return None
    split = fields.get("tokenizer.ggml.pre") or "default"
    if split == "default":
        return "does not say how its tokenizer splits text (tokenizer.ggml.pre); taking GPT-2's way"
    if split in _GPT2 | _DIGITS or split in _KNOWN or _KNOWN.get(_SAME.get(split, "")):
        return None
    raise ValueError(
        f"splits text in a way that transformers {transformers.__version__} does not know"
        f" (tokenizer.ggml.pre is {split!r}): taking GPT-2's, the model would read tokens that it"
        " was not trained on; get the model as safetensors, with its own tokenizer"
    )


def correct_split(tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, Any]) -> None:
    """Make a tokenizer that transformers read split text as its model's does. Mutates it."""
    if fields.get("tokenizer.ggml.model") != "gpt2":
        return
    split = fields.get("tokenizer.ggml.pre")
    if split in _DIGITS:
        first, rest = r"\p{N}", pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif split in _SAME:
        first = _KNOWN[_SAME[split]]
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        return
    parts = [pre_tokenizers.Split(Regex(first), behavior="isolated"), rest]
    backend: Any = tokenizer
    backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)


def metadata_ends(fields: Mapping[str, Any]) -> list[int]:
    """List the tokens that the file says end a text, a turn, or a part that is filled in."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in _METADATA_ENDS]
    count = fields.get("tokenizer.ggml.tokens", 0)
    ends = dict.fromkeys(int(fields[key]) for key in keys if key in fields)
    return [token for token in ends if token < count]
