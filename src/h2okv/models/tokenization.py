"""Tokens that end a text, a turn or a fill-in-the-middle; and the tokenizer of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from tokenizers import Regex, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerBase

# By their text, as in llama.cpp: a checkpoint often lists only one of those that its model writes.
# Tokens with "<|" have no other meaning; the others may also be ordinary text.
_TEXTS = """
    <|endoftext|> <|end_of_text|> <|end_of_sentence|> <｜end▁of▁sentence｜> <|eos|> <eos> [EOS] </s>
    <|im_end|> <|eot_id|> <|eom_id|> <|eot|> <|eom|> <|EOT|> <EOT> _<EOT> ▁<EOT> [EOT] <|end|>
    <end_of_turn> <|end_of_turn|> <|END_OF_TURN_TOKEN|> <|endofturn|> [|endofturn|] <turn|>
    <end_of_utterance> <|return|> <|call|> <|calls|> <|flush|> <|tool_response> [e~[
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]
    <|fim_repo|> <|repo_name|> <fim-repo> <repo_name> <reponame> <REPO> <|file_sep|> <file_sep>
"""
# Tokens that do not end a turn if the vocabulary also has all of these others.
_EXCLUDED_BY = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|calls|>", "<|flush|>"}),
    ("</s>", {"<|tool_response>"}),
)


def end_token_ids(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> set[int]:
    """Find the end tokens of a vocabulary; tokens that ordinary text may yield do not count."""
    listed_texts, listed = _TEXTS.split(), dict[str, int]()
    for token, added in tokenizer.added_tokens_decoder.items():
        text = str(added.content)
        if text in listed_texts and (added.special or text.startswith(("<|", "<｜"))):
            listed[text] = token
    in_a_turn = {text for text, others in _EXCLUDED_BY if others <= listed.keys()}
    for text in in_a_turn & listed.keys():
        del listed[text]
    ends = {*listed.values(), tokenizer.eos_token_id}
    return {token for token in ends if token is not None and token < vocab_size}


def add_end_tokens(
    config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> None:
    """Add the vocabulary's end tokens to those that a checkpoint lists. Mutates the config."""
    if config is None:
        return
    eos: Any = config.eos_token_id
    listed = eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos]
    # Their order stays: the first one pads a batch if no padding token is set.
    ends = [*listed, *sorted(end_token_ids(tokenizer, vocab_size) - set(listed))]
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None


# --- GGUF files: how text is split before it is merged --------------------------------------------

# Values of `tokenizer.ggml.pre`. The default of transformers for unknown names is right for these
# only.
_GPT2 = frozenset(
    ["gpt-2", "gpt2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de",
     "jina-v2-code", "roberta-bpe", "gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4",
     "mpt", "olmo", "jais", "trillion", "granite-docling"]
)  # fmt: skip
_DIGITS = frozenset(
    ["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"]
)
"""As GPT-2, but each digit alone."""
_SAME = dict.fromkeys(["glm4", "chatglm-bpe"], "llama-bpe")
_SAME |= dict.fromkeys(["stablelm2", "hunyuan", "solar-open", "grok-2"], "qwen2")
"""Names that transformers does not know, and those that it does with the same expression."""
_METADATA_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def check_split(fields: Mapping[str, Any]) -> str | None:
    """Refuse a file whose pre-tokenizer is unknown; return a remark if its fields name none."""
    if fields.get("tokenizer.ggml.model") != "gpt2":
        return None
    split = fields.get("tokenizer.ggml.pre") or "default"
    if split == "default":
        return "does not say how its tokenizer splits text (tokenizer.ggml.pre); taking GPT-2's way"
    if split in _GPT2 | _DIGITS | {*_SAME, *_splits_of_transformers()}:
        return None
    raise ValueError(
        f"splits text in a way that transformers {transformers.__version__} does not know"
        f" (tokenizer.ggml.pre is {split!r}): taking GPT-2's, the model would read tokens that it"
        " was not trained on; get the model as safetensors, with its own tokenizer"
    )


def _splits_of_transformers() -> Mapping[str, str]:
    """Return transformers' expressions by the values of `tokenizer.ggml.pre`."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping  # slow to import

    splits: Mapping[str, str] = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS
    return splits


def correct_tokenizer(tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, Any]) -> None:
    """Set the pre-tokenizer that the file names. Mutates the tokenizer."""
    if fields.get("tokenizer.ggml.model") != "gpt2":
        return
    split = fields.get("tokenizer.ggml.pre")
    if split in _DIGITS:
        first, byte_level = r"\p{N}", pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif split in _SAME:
        first = _splits_of_transformers()[_SAME[split]]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        return
    steps = [pre_tokenizers.Split(Regex(first), behavior="isolated"), byte_level]
    backend: Any = tokenizer
    backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


def metadata_ends(fields: Mapping[str, Any]) -> list[int]:
    """List the tokens that end a text, a turn or a fill-in-the-middle, by the file's metadata."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in _METADATA_ENDS]
    count = fields.get("tokenizer.ggml.tokens", 0)
    ends = dict.fromkeys(int(fields[key]) for key in keys if key in fields)
    return [token for token in ends if token < count]
