"""Perplexity by position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from h2okv.evaluation.cache_setting import CacheSetting, Subject
from h2okv.evaluation.stream_data import TextSource
from h2okv.evaluation.streaming import Stream, StreamSettings
from h2okv.evaluation.task import Length, Score, Task, fitting
from h2okv.provenance import digest
from h2okv.records import Row as Result

_LARGEST = 600.0
"""Above that a mean negative log-likelihood has no perplexity that a float can hold."""


@dataclass(frozen=True)
class Windows:
    """How a text is cut and read.

    Attributes:
        length: Tokens of a window, of which all but the first are scored.
        count: Windows, one after another from the text's beginning; None for all whole ones.
        chunk: Tokens of a block; 1 is the paper's Algorithm 1.
        every: Tokens of a range of positions.
    """

    length: int
    count: int | None = None
    chunk: int = 64
    every: int = 128

    def __post_init__(self) -> None:
        """Refuses what no text can be cut by."""
        for name, least in (("length", 2), ("count", 1), ("chunk", 1), ("every", 1)):
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
            "chunk": windows.chunk,
            "every": windows.every,
        }

    def prepare(self, subject: Subject, settings: Sequence[CacheSetting]) -> None:
        """Cuts the text."""
        length = self.windows.length
        ids = torch.tensor(subject.encode(self.text))
        whole = len(ids) // length
        wanted = whole if self.windows.count is None else self.windows.count
        if whole < max(wanted, 1):
            raise ValueError(
                f"the text has {len(ids)} tokens for this model, which are {whole} windows of"
                f" {length}; give a longer text, a smaller --length, or fewer --windows"
            )
        self._ids = list(ids[: wanted * length].reshape(wanted, length))
        chunked = [_in_blocks(setting, self.windows.chunk) for setting in settings]
        fitting(subject, chunked, [Length(length, "a window of the text")], "refuse")

    def samples(self) -> Sequence[int]:
        """Returns the windows' numbers."""
        return range(len(self._ids))

    def run(
        self, subject: Subject, setting: CacheSetting, samples: Sequence[int], seed: int
    ) -> Iterator[dict[int, Result]]:
        """Reads windows."""
        reading = StreamSettings(chunk=self.windows.chunk, every=self.windows.every)
        for sample in samples:
            cache = setting.make(subject.config, seed)
            source = TextSource(self._ids[sample], "")
            stream = Stream(subject.model, cache, source, reading)
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


def _in_blocks(setting: CacheSetting, chunk: int) -> CacheSetting:
    """The same cache, for checks that must know how long a block is."""
    rolls = setting.positions == "rolling" and not setting.is_full
    return replace(setting, prefill_chunk=chunk) if rolls else setting


def _counts(positions: Sequence[int]) -> list[int]:
    return [end - start for start, end in zip([0, *positions], positions, strict=False)]


def _perplexity(nll: float) -> float:
    return math.exp(nll) if nll < _LARGEST else math.inf
