"""Perplexity by position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from h2okv.config import CacheConfig
from h2okv.evaluation.model import ModelUnderTest, make_cache
from h2okv.evaluation.stream_data import TextSource
from h2okv.evaluation.streaming import Stream, StreamSettings
from h2okv.evaluation.task import Length, Result, Score, Task, filter_by_length
from h2okv.provenance import digest

BLOCK = 64
"""Tokens that are read at once unless the cache says otherwise."""
_LARGEST = 600.0
"""Above that a mean negative log-likelihood has no perplexity that a float can hold."""


@dataclass(frozen=True)
class Windows:
    """How a text is cut and read.

    Attributes:
        length: Tokens of a window, of which all but the first are scored.
        count: Windows, one after another from the text's beginning; None for all whole ones.
        every: Tokens of a range of positions.
    """

    length: int
    count: int | None = None
    every: int = 128

    def __post_init__(self) -> None:
        """Refuses what no text can be cut by."""
        for name, least in (("length", 2), ("count", 1), ("every", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                option = "windows" if name == "count" else name
                raise ValueError(f"--{option} {value} is too few; give {least} or more")


class Perplexity(Task):
    """A text is read window after window; each token is predicted from what the cache holds.

    A budget in fractions is of the whole window, as in the paper's own protocol.
    """

    metrics = ("perplexity",)
    higher_is_better = False

    def __init__(self, name: str, text: str, windows: Windows) -> None:
        self.name = name
        self.text = text
        self.windows = windows
        self._ids: list[torch.Tensor] = []

    def identity(self) -> Mapping[str, Any]:
        """Names the text and how it is read."""
        windows = self.windows
        return {
            "data": digest(self.text),
            "length": windows.length,
            "every": windows.every,
        }

    def prepare(self, model: ModelUnderTest, configs: Sequence[CacheConfig]) -> None:
        """Cuts the text."""
        length = self.windows.length
        ids = torch.tensor(model.encode(self.text))
        whole = len(ids) // length
        wanted = whole if self.windows.count is None else self.windows.count
        if whole < max(wanted, 1):
            raise ValueError(
                f"the text has {len(ids)} tokens for this model, which are {whole} windows of"
                f" {length}; give a longer text, a smaller --length, or fewer --windows"
            )
        self._ids = list(ids[: wanted * length].reshape(wanted, length))
        for config in configs:
            self._check_evicts(config)
        in_blocks = [_in_blocks(config) for config in configs]
        filter_by_length(model, in_blocks, [Length(length, "a window of the text")])

    def _check_evicts(self, config: CacheConfig) -> None:
        """Refuses windows whose tokens are all scored before the first eviction."""
        block, length = block_of(config), self.windows.length
        if not config.is_full and length - 1 <= block:
            raise ValueError(
                f"--length {length} is read as one block of {block} tokens, so that nothing is"
                " evicted before it is scored; give a larger --length or a smaller --prefill-chunk"
            )

    def samples(self) -> Sequence[int]:
        """Returns the windows' numbers."""
        return range(len(self._ids))

    def run(
        self, model: ModelUnderTest, config: CacheConfig, samples: Sequence[int], seed: int
    ) -> Iterator[dict[int, Result]]:
        """Reads windows."""
        reading = StreamSettings(prefill_chunk=block_of(config), every=self.windows.every)
        for sample in samples:
            cache = make_cache(_in_blocks(config), model.config, seed)
            source = TextSource(self._ids[sample], "")
            stream = Stream(model.model, cache, source, reading)
            rows = [row for step in stream.blocks() for row in step.rows]
            last = stream.last_row()
            rows += [] if last is None else [last]
            yield {
                sample: {
                    "positions": [row.position for row in rows],
                    "nlls": [row.nll for row in rows],
                }
            }

    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        """Returns the perplexity over all tokens of all windows."""
        total = sum(
            nll * count
            for result in results.values()
            for nll, count in zip(result["nlls"], _counts(result["positions"]), strict=True)
        )
        tokens = sum(result["positions"][-1] for result in results.values())
        return {"perplexity": Score(_perplexity(total / tokens))}

    def details(self, results: Mapping[int, Result]) -> list[dict[str, Any]]:
        """Makes a row for each range of positions, over all windows."""
        first = next(iter(results.values()))
        rows = []
        for place, position in enumerate(first["positions"]):
            nlls = [result["nlls"][place] for result in results.values()]
            nll = math.fsum(nlls) / len(nlls)
            rows.append({"position": position, "nll": nll, "perplexity": _perplexity(nll)})
        return rows


def _in_blocks(config: CacheConfig) -> CacheConfig:
    """The same cache; rolling positions know how long a block is."""
    if config.is_full or config.positions != "rolling":
        return config
    return replace(config, prefill_chunk=block_of(config))


def block_of(config: CacheConfig) -> int:
    """Tokens that are read at once, with eviction after them."""
    return config.prefill_chunk or BLOCK


def _counts(positions: Sequence[int]) -> list[int]:
    return [end - start for start, end in zip([0, *positions], positions, strict=False)]


def _perplexity(nll: float) -> float:
    return math.exp(nll) if nll < _LARGEST else math.inf
