"""A study: its text, the runs over it that measurements share, and its folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import h2okv
from h2okv.policy import Rule
from h2okv.prompts.chat_template import encode
from h2okv.records import Record, atomic_write, check_settings, refusing, write_json
from h2okv_lab.analysis import attention_stats
from h2okv_lab.analysis.attention_stats import (
    Tick,
    dense_losses,
    full_attention_layers,
    no_tick,
    of_layers,
)
from h2okv_lab.analysis.eviction_trace import GlobalPolicy, follow, split_budget
from h2okv_lab.tables import Row

Tables = dict[str, list[Row]]

MIN_TOKENS = 128


@dataclass(frozen=True)
class Sample:
    """A text as tokens, int64 ``[1, T]``, and the text of each token."""

    input_ids: torch.Tensor
    pieces: tuple[str, ...]

    @property
    def length(self) -> int:
        return self.input_ids.shape[1]


_CHARACTERS_A_TOKEN, _TOKENS_AT_A_CUT = 8, 64


def make_sample(
    tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int, min_tokens: int = MIN_TOKENS
) -> Sample:
    """Tokenize the beginning of a text."""
    if not text.strip():
        raise ValueError("the text is empty; give a text file with some pages of running text.")
    # A whole novel would take seconds. Tokens at a cut may differ from those of the whole text.
    size, enough = _CHARACTERS_A_TOKEN * max_tokens, max_tokens + _TOKENS_AT_A_CUT
    while True:
        ids = encode(tokenizer, text[:size])
        if len(ids) >= enough or size >= len(text):
            break
        size *= 4
    input_ids = torch.tensor([ids[:max_tokens]])
    length = input_ids.shape[1]
    if length < min_tokens:
        raise ValueError(
            f"the text must have at least {min_tokens} tokens for this model, got {length}; give a "
            "longer text."
        )
    return Sample(input_ids, token_pieces(tokenizer, input_ids[0].tolist()))


def token_pieces(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> tuple[str, ...]:
    """Decode each token alone, with its leading space."""
    pieces = []
    for token in token_ids:
        # Decoders that drop a leading space drop it from the first token only.
        pair = str(tokenizer.decode([token, token], clean_up_tokenization_spaces=False))
        alone = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        pieces.append(pair[len(alone) :] if pair.startswith(alone) else alone)
    return tuple(pieces)


# Shares of the text; all below one half, because policies are compared on the second half.
BUDGETS = (0.05, 0.1, 0.2, 0.4)
POLICIES = ("h2o", "global", "recent", "sink_recent", "random")
DEFAULT_BUDGET = 0.2


class Study:
    """The subject of an analysis; results that several measurements use are cached."""

    def __init__(self, model: PreTrainedModel, sample: Sample, folder: Path | None = None) -> None:
        self.model, self.sample, self.folder = model, sample, folder
        self.layers = full_attention_layers(model.config)
        self.length = sample.length
        self.half = sample.length // 2  # policies are compared on the second half
        self._results: dict[str, dict[str, np.ndarray]] = {}

    def tokens(self, share: float) -> int:
        """Return a fraction of the text in tokens, at least 2."""
        return max(2, int(share * self.length))

    def recent(self, share: float) -> int:
        return split_budget(self.tokens(share)).recent

    def of_layers(self, measure: Callable[..., Any], tick: Tick = no_tick) -> np.ndarray:
        """Return ``measure`` of each full-attention layer when the model reads the text."""
        return of_layers(self.model, self.sample.input_ids, measure, tick)

    def accumulated(self, tick: Tick = no_tick) -> np.ndarray:
        """Return the attention that each token receives: float32 ``[L, H, G, T]``."""
        measure = attention_stats.accumulated
        return self._cached("accumulated", lambda: {"scores": self.of_layers(measure, tick)})[
            "scores"
        ]

    def dense_losses(self) -> np.ndarray:
        ids = self.sample.input_ids
        return self._cached("dense", lambda: {"losses": dense_losses(self.model, ids)})["losses"]

    def gone_at(self, policy: str, share: float, tick: Tick = no_tick) -> np.ndarray:
        """Return the query at which each token is gone; see `Trace`."""
        return self._run(policy, share, tick)["gone_at"]

    def losses(self, policy: str, share: float) -> np.ndarray:
        """Return the losses under a policy: float ``[T]``, NaN at the beginning."""
        return self._run(policy, share)["losses"].astype(np.float64)

    def _run(self, policy: str, share: float, tick: Tick = no_tick) -> dict[str, np.ndarray]:
        def compute() -> dict[str, np.ndarray]:
            subject: str | Rule = policy
            if policy == GlobalPolicy.name:
                subject = GlobalPolicy(self.accumulated().sum(axis=2), self.layers)
            budget = split_budget(self.tokens(share))
            trace = follow(self.model, self.sample.input_ids, subject, budget, tick=tick)
            return {"gone_at": trace.gone_at, "losses": trace.losses}

        return self._cached(f"{policy}-{share:g}", compute)

    def _cached(
        self, name: str, compute: Callable[[], dict[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """Return arrays from memory or from the folder, or compute and store them."""
        path = None if self.folder is None else self.folder / f"{name}.npz"
        if name not in self._results and path is not None and path.is_file():
            with np.load(path) as stored:
                self._results[name] = dict(stored)
        if name not in self._results:
            self._results[name] = compute()
            if path is not None:
                with atomic_write(path, "wb") as file:
                    np.savez_compressed(file, allow_pickle=False, **self._results[name])
        return self._results[name]


def tabulate(axes: Mapping[str, Sequence[Any]], **columns: Any) -> list[Row]:
    """Return a row per combination of axis values; columns are arrays with the axes' lengths."""
    shape = [len(values) for values in axes.values()]
    cells = [np.broadcast_to(values, shape).ravel() for values in columns.values()]
    rows = zip(product(*axes.values()), *cells, strict=True)
    return [dict(zip((*axes, *columns), (*keys, *values), strict=True)) for keys, *values in rows]


SETTINGS_FILE = "settings.json"
CACHE_FOLDER = "working"
_OTHER_FOLDER = "choose another folder for the report"

TEXT_COLUMNS = ("word", "policy", "condition", "case", "of", "against", "measure", "h", "objective")
"""Columns of the tables that hold text, even where it reads as a number (a word may be "7")."""


def open_folder(folder: Path, model_name: str, text: str, tokens: int) -> None:
    """Create a report's folder, or check that an existing one has the same settings."""
    settings = {
        "model": model_name, "text_sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        "tokens": tokens, "h2okv": h2okv.__version__,
    }  # fmt: skip
    with refusing(f"'{folder}' cannot be written", _OTHER_FOLDER, OSError):
        (folder / CACHE_FOLDER).mkdir(parents=True, exist_ok=True)
    if not (folder / SETTINGS_FILE).is_file():
        write_json(folder / SETTINGS_FILE, settings)
    check_settings(read_settings(folder), settings, f"the report in '{folder}'")


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a report's folder."""
    path = folder / SETTINGS_FILE
    with refusing(f"'{path}' cannot be read", f"{_OTHER_FOLDER}, or delete this one", OSError):
        return Record.parse(path.read_bytes(), f"'{path}'", "the settings of a report").fields
