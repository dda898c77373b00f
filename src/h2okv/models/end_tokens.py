"""Tokens that end a text, a turn, or a fill-in-the-middle."""

from __future__ import annotations

from typing import Any

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
