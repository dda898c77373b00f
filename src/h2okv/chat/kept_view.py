"""What the cache still holds of a text, in colours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cache
from itertools import groupby
from typing import NamedTuple

from rich.text import Text
from transformers import PreTrainedTokenizerBase

import h2okv
from h2okv.cache.layer import CacheLayer
from h2okv.engine.model_runner import count_kept

# Tokens before a piece that the decoder sees, so that it keeps the space between both.
_LEAD = 4
_UNFINISHED = "\ufffd"
# A character has at most four bytes, and so at most as many tokens.
_LONGEST_CHARACTER = 4
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}


class Level(Enum):
    """How much of a token is kept, with its colours, or marks where there are none."""

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
        """Returns the level of a share from 0 to 1; None for a token that was not read yet."""
        if share is None:
            return cls.WAITING
        if share in (0.0, 1.0):
            return cls.ALL if share else cls.NONE
        if share >= 2 / 3:
            return cls.MOST
        return cls.FEW if share < 1 / 3 else cls.SOME


class Run(NamedTuple):
    """Neighbouring tokens of one level; their text has the special tokens too."""

    level: Level
    text: str
    num_tokens: int


def kept_shares(
    held: h2okv.H2OCache, layer: int | None = None, head: int | None = None
) -> list[float]:
    """Tells for each token that was read how many layers and heads still hold it."""
    scored = [index for index, own in enumerate(held.layers) if isinstance(own, CacheLayer)]
    places = [held.kept_positions(index)[0] for index in (scored if layer is None else [layer])]
    if head is not None:
        if not 0 <= head < len(places[0]):
            raise ValueError(
                f"head {head} is out of range; layer {layer} has KV heads 0 to {len(places[0]) - 1}"
            )
        places = [own[head : head + 1] for own in places]
    counts = count_kept(places, held.num_seen_tokens)
    num_heads = sum(map(len, places))
    return [count / num_heads for count in counts]


def runs_of(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    shares: Sequence[float],
    shorten_above: int | None = None,
) -> Iterator[Run]:
    """Puts tokens of one level together."""

    def text_of(start: int, end: int) -> str:
        lead = max(0, start - _LEAD)
        before = str(tokenizer.decode(list(token_ids[lead:start])))
        text = str(tokenizer.decode(list(token_ids[lead:end])))[len(before) :]
        # A terminal obeys control characters, and here they are only to be seen.
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
    """The tokens, those of one character together: first, end, mean share."""

    @cache  # a long chat has more tokens than a vocabulary
    def is_text(*ids: int) -> bool:
        return _UNFINISHED not in str(tokenizer.decode(list(ids)))

    first = 0
    while first < len(token_ids):
        longest = range(first + 1, min(first + _LONGEST_CHARACTER, len(token_ids)) + 1)
        end = next((end for end in longest if is_text(*token_ids[first:end])), first + 1)
        known = shares[first:end]
        yield first, end, sum(known) / len(known) if known else None
        first = end


def shown(runs: Sequence[Run], with_marks: bool = False) -> Text:
    """The runs in colours, or with marks where there are none, below a legend."""

    def look(level: Level, own: str) -> str:
        return f"{level.before}{own}{level.after}" if with_marks else own

    text = Text()
    for level in Level:
        if tokens := sum(run.num_tokens for run in runs if run.level is level):
            text.append(f"{look(level, level.meaning)}: {tokens:,}", style=level.style).append("  ")
    text.append("\n\n")
    for run in runs:
        text.append(look(run.level, run.text), style=run.level.style)
    return text
