"""The tokens of a text that the cache still holds, in colours."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from rich.text import Text
from transformers import PreTrainedTokenizerBase

import h2okv
from h2okv.cache.layer import CacheLayer
from h2okv.engine.model_runner import count_kept

# Number of earlier tokens decoded with a span: tokenizers drop a leading space.
_LEAD = 4
_UNFINISHED = "\ufffd"
# A character has at most four bytes, and so at most as many tokens.
_LONGEST_CHARACTER = 4
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}


class Level(Enum):
    """The share of heads that keep a token, with its colour and, for plain text, marks."""

    ALL = "kept by all", "bold green"
    MOST = "by most (two thirds or more)", "green", "{most:", "}"
    SOME = "by some", "yellow", "{some:", "}"
    FEW = "by few (less than a third)", "dim yellow", "{few:", "}"
    NONE = "evicted", "dim strike", "[-", "-]"
    WAITING = "not read yet", "italic cyan", "{next:", "}"

    def __init__(self, meaning: str, style: str, before: str = "", after: str = "") -> None:
        self.meaning, self.style, self.before, self.after = meaning, style, before, after

    @classmethod
    def of(cls, share: float | None) -> Level:
        """Return the level of a share from 0 to 1; ``None`` is the share of an unread token."""
        if share is None:
            return cls.WAITING
        if share in (0.0, 1.0):
            return cls.ALL if share else cls.NONE
        if share >= 2 / 3:
            return cls.MOST
        return cls.FEW if share < 1 / 3 else cls.SOME


class Run(NamedTuple):
    """Consecutive tokens of one level; their text includes special tokens."""

    level: Level
    text: str
    num_tokens: int


def kept_shares(
    cache: h2okv.H2OCache, layer: int | None = None, head: int | None = None
) -> list[float]:
    """Return for each token that was read the share of heads, 0 to 1, that keep it."""
    scored = [index for index, module in enumerate(cache.layers) if isinstance(module, CacheLayer)]
    positions = [cache.kept_positions(index)[0] for index in (scored if layer is None else [layer])]
    if head is not None:
        if not 0 <= head < len(positions[0]):
            last = len(positions[0]) - 1
            raise ValueError(f"head {head} is out of range; layer {layer} has KV heads 0 to {last}")
        positions = [layer_positions[head : head + 1] for layer_positions in positions]
    counts = count_kept(positions, cache.num_seen_tokens)
    num_heads = sum(map(len, positions))
    return [count / num_heads for count in counts]


def runs_of(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    shares: Sequence[float],
    shorten_above: int | None = None,
) -> Iterator[Run]:
    """Group consecutive tokens of one level."""

    def text_of(start: int, end: int) -> str:
        lead = max(0, start - _LEAD)
        before = str(tokenizer.decode(list(token_ids[lead:start])))
        text = str(tokenizer.decode(list(token_ids[lead:end])))[len(before) :]
        # Show control characters; a terminal would obey them.
        return text.translate(_CONTROL)

    spans = _characters(tokenizer, token_ids, shares)
    for level, group in groupby(spans, key=lambda span: Level.of(span[2])):
        starts, ends, _ = zip(*group, strict=True)
        start, end = starts[0], ends[-1]
        count = end - start
        if level is Level.NONE and shorten_above is not None and count > shorten_above:
            side = shorten_above // 3
            left_out = f" ... {count - 2 * side:,} more evicted tokens ..."
            text = text_of(start, start + side) + left_out + text_of(end - side, end)
        else:
            text = text_of(start, end)
        yield Run(level, text, count)


def _characters(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], shares: Sequence[float]
) -> Iterator[tuple[int, int, float | None]]:
    """Yield the spans of tokens that form whole characters: first, end, mean share."""

    @functools.cache  # long chats repeat the tokens of their vocabulary
    def is_text(*ids: int) -> bool:
        return _UNFINISHED not in str(tokenizer.decode(list(ids)))

    first = 0
    while first < len(token_ids):
        longest = range(first + 1, min(first + _LONGEST_CHARACTER, len(token_ids)) + 1)
        end = next((end for end in longest if is_text(*token_ids[first:end])), first + 1)
        span_shares = shares[first:end]
        yield first, end, sum(span_shares) / len(span_shares) if span_shares else None
        first = end


def render_runs(runs: Sequence[Run], with_marks: bool = False) -> Text:
    """Return the runs in colours, or with marks for plain text, below a legend."""

    def marked(level: Level, content: str) -> str:
        return f"{level.before}{content}{level.after}" if with_marks else content

    text = Text()
    for level in Level:
        if tokens := sum(run.num_tokens for run in runs if run.level is level):
            text.append(f"{marked(level, level.meaning)}: {tokens:,}", style=level.style)
            text.append("  ")
    text.append("\n\n")
    for run in runs:
        text.append(marked(run.level, run.text), style=run.level.style)
    return text
