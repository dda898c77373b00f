"""Which tokens end a text, a turn, or a part of a file that is filled in."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

# By their text, as llama.cpp finds them: a checkpoint often names only one of those that its model
# writes. Those with "<|" stand for nothing else; of the others ordinary text may consist too.
_TEXTS = """
    <|endoftext|> <|end_of_text|> <|end_of_sentence|> <｜end▁of▁sentence｜> <|eos|> <eos> [EOS] </s>
    <|im_end|> <|eot_id|> <|eom_id|> <|eot|> <|eom|> <|EOT|> <EOT> _<EOT> ▁<EOT> [EOT] <|end|>
    <end_of_turn> <|end_of_turn|> <|END_OF_TURN_TOKEN|> <|endofturn|> [|endofturn|] <turn|>
    <end_of_utterance> <|return|> <|call|> <|calls|> <|flush|> <|tool_response> [e~[
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]
    <|fim_repo|> <|repo_name|> <fim-repo> <repo_name> <reponame> <REPO> <|file_sep|> <file_sep>
"""
# What another token's presence makes a mark in the middle of a turn, or text.
_NOT_BESIDE = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|calls|>", "<|flush|>"}),
    ("</s>", {"<|tool_response>"}),
)


def end_token_ids(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> set[int]:
    """Find them in a tokenizer's vocabulary; only tokens that text is not split into by chance."""
    listed_texts, listed = _TEXTS.split(), dict[str, int]()
    for token, added in tokenizer.added_tokens_decoder.items():
        text = str(added.content)
        if text in listed_texts and (added.special or text.startswith(("<|", "<｜"))):
            listed[text] = token
    in_a_turn = {text for text, others in _NOT_BESIDE if others <= listed.keys()}
    for text in in_a_turn & listed.keys():
        del listed[text]
    ends = {*listed.values(), tokenizer.eos_token_id}
    return {token for token in ends if token is not None and token < vocab_size}


def add_end_tokens(
    config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> None:
    """Add them to those that a checkpoint names. Mutates the config."""
    if config is None:
        return
    stated: Any = config.eos_token_id
    before = stated if isinstance(stated, (list, tuple)) else [] if stated is None else [stated]
    # Those first that were first: the first one pads a batch where nothing else is named.
    ends = [*before, *sorted(end_token_ids(tokenizer, vocab_size) - set(before))]
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
