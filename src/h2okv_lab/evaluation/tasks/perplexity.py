"""Perplexity by position."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from h2okv.config import CacheConfig
from h2okv.provenance import digest
from h2okv_lab.evaluation.model import ModelUnderTest, make_cache
from h2okv_lab.evaluation.streaming import Stream, StreamSettings, TextSource
from h2okv_lab.evaluation.task import CacheResults, Configs, Result, Score, Task
from h2okv_lab.tables import check_minimum

# Tokens that are read before each eviction, unless the cache has a `block`.
_BLOCK = 64
# Above this mean negative log-likelihood the perplexity overflows a float.
_LARGEST = 600.0


@dataclass(eq=False)
class Perplexity(Task):
    """Perplexity of a text by windows; fractional budgets are of a window, as in the paper."""

    text: str
    length: int = 1024  # tokens of a window; all but the first are scored
    windows: int | None = None  # from the text's beginning; None for all
    every: int = 128  # tokens of a range of positions
    metrics = ("perplexity",)

    def __post_init__(self) -> None:
        check_minimum(2, length=self.length)
        check_minimum(windows=self.windows, every=self.every)

    def identity(self) -> Mapping[str, Any]:
        return {"data": digest(self.text), "length": self.length, "every": self.every}

    def prepare(self, model: ModelUnderTest, configs: Configs) -> None:
        length = self.length
        ids = torch.tensor(model.encode(self.text))
        available = len(ids) // length
        num_windows = available if self.windows is None else self.windows
        if available < max(num_windows, 1):
            raise ValueError(
                f"the text has {len(ids)} tokens for this model, enough for {available} windows of"
                f" {length}; give a longer text, a smaller --length, or fewer --windows"
            )
        self._ids = list(ids[: num_windows * length].reshape(num_windows, length))
        self.samples = range(num_windows)
        for config in configs:
            block = config.chunk or _BLOCK
            if not config.is_full and length - 1 <= block:
                raise ValueError(
                    f"--length {length} is read as one block of {block} tokens, so nothing would be"
                    " evicted before it is scored; give a larger --length or a smaller"
                    " --cache every=N"
                )
        in_blocks = [_in_blocks(config) for config in configs]
        self.within_window(model, in_blocks, [(length, "a window of the text")])

    def run(
        self, model: ModelUnderTest, configs: Configs, samples: Sequence[int], seed: int
    ) -> CacheResults:
        for (number, config), sample in product(enumerate(configs), samples):
            settings = StreamSettings(config.chunk or _BLOCK, self.every)
            cache = make_cache(_in_blocks(config), model.model, seed)
            stream = Stream(model.model, cache, TextSource(self._ids[sample]), settings)
            for _ in stream.blocks():
                pass
            rows = stream.all_rows()
            positions, nlls = [row.position for row in rows], [row.nll for row in rows]
            yield number, {sample: {"positions": positions, "nlls": nlls}}

    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        total, tokens = 0.0, 0
        for result in results.values():
            ends = result["positions"]
            for nll, start, end in zip(result["nlls"], [0, *ends[:-1]], ends, strict=True):
                total += nll * (end - start)
            tokens += ends[-1]
        return {"perplexity": Score(_perplexity(total / tokens))}

    def details(self, results: Mapping[int, Result]) -> list[dict[str, Any]]:
        rows = []
        positions = next(iter(results.values()))["positions"]
        ranges = zip(*(result["nlls"] for result in results.values()), strict=True)
        for position, nlls in zip(positions, ranges, strict=True):
            nll = math.fsum(nlls) / len(nlls)
            rows.append({"position": position, "nll": nll, "perplexity": _perplexity(nll)})
        return rows


def _in_blocks(config: CacheConfig) -> CacheConfig:
    """Return the config with a block size if its positions roll, which need one."""
    if config.is_full or config.positions != "rolling":
        return config
    return config.with_cuts(_BLOCK)


def _perplexity(nll: float) -> float:
    return math.exp(nll) if nll < _LARGEST else math.inf
