"""Reads a text with several policies for the viewer."""

from __future__ import annotations

import base64
import gzip
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from h2okv.analysis.attention_stats import (
    Tick,
    full_attention_layers,
    no_tick,
    num_kv_heads,
    of_layers,
    strongest_queries,
)
from h2okv.analysis.eviction_trace import Trace, follow
from h2okv.analysis.study import make_sample, token_pieces
from h2okv.config import CacheConfig
from h2okv.integration.loading import Described
from h2okv.policy import get_policy

RECORDED = 48  # steps whose scores are sent; the page draws a line between two of them
_ARROWS = 3  # from a token to those that looked at it
_NOBODY = 65_535
LOWEST_SCORE = 0.01  # one at or below this is sent as 0 (no attention worth a colour)
_LEVELS = 254


def pack_trace(trace: Trace, highest: float) -> dict[str, Any]:
    """Packs a trace for the page, as a JSON object.

    ``gone`` is uint16 ``[L, H, T]`` and each layer's ``scores`` uint8 ``[C][H][step + 1]``, as gzip
    in base64; ``bytes`` lists ``[step, bytes]`` where what the cache takes changes.
    """
    held = trace.held_bytes
    changed = np.flatnonzero((held > 0) & (np.diff(held, prepend=0) != 0))
    levels = [quantise(part, highest).reshape(len(part), -1) for part in trace.scores]
    return {
        "first": trace.first,
        "steps": trace.recorded.tolist(),
        "gone": _blob(trace.gone_at.astype("<u2")),
        "scores": [_blob(layer) for layer in np.concatenate(levels, axis=1)],
        "bytes": [[step, held[step].item()] for step in changed.tolist()],
        "full_bytes": int(trace.full_bytes[-1]),
        "losses": [None if np.isnan(x) else round(float(x), 3) for x in trace.losses],
    }


def quantise(scores: np.ndarray, highest: float) -> np.ndarray:
    """Turn scores into 255 levels, even in their logarithm."""
    span = np.log(highest / LOWEST_SCORE)
    place = np.log(np.maximum(scores, LOWEST_SCORE) / LOWEST_SCORE) / span
    levels = 1 + np.rint(_LEVELS * np.clip(place, 0, 1))
    return np.where(scores > LOWEST_SCORE, levels, 0).astype(np.uint8)


def _blob(array: np.ndarray) -> str:
    # Without a time stamp, so that the same trace gives the same file.
    return base64.b64encode(gzip.compress(array.tobytes(), 6, mtime=0)).decode("ascii")


LEAST_TOKENS = 8
MOST_TOKENS = 65_000  # positions travel as 16 bits
_READ_AT_ONCE = 64
_KEPT_READINGS, _KEPT_TRACES = 4, 24


def tokens_a_step(length: int) -> int:
    """Tokens between two evictions: one up to 256; then 1,024 take 128 steps, and 4,096 take 32."""
    # A step takes much the same time with one token as with many, and longer the more are held;
    # more than 256 tokens at once would take too much memory.
    return 1 if length <= 256 else math.ceil(min(256, length / 128 * max(1, length / 1024)))


def check_new_tokens(new_tokens: int, most: int) -> None:
    """Refuse more than a text leaves room for."""
    if not 0 <= new_tokens <= most - LEAST_TOKENS:
        raise ValueError(
            f"{new_tokens} new tokens is out of range; choose 0 to {most - LEAST_TOKENS}."
        )


@dataclass(frozen=True)
class Reader:
    """Reads texts with a model."""

    model: PreTrainedModel
    described: Described
    max_tokens: int
    make_cache: Callable[[str, str], CacheConfig]  # of a policy and a budget, as the user says them

    def read(self, text: str, new_tokens: int = 0) -> Reading:
        """Turn a text into tokens and lets the model go on from it, with the full cache."""
        tokenizer = self.described.tokenizer
        most = min(self.max_tokens, self.described.context or MOST_TOKENS, MOST_TOKENS)
        check_new_tokens(new_tokens, most)
        sample = make_sample(tokenizer, text, most - new_tokens, LEAST_TOKENS)
        ids = sample.input_ids.to(self.model.device)
        if new_tokens:
            # transformers' types do not know that a causal model generates.
            model: Any = self.model
            ids = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
            )
        return Reading(self, ids.cpu(), sample.length)


class Reading:
    """A text as tokens, int64 ``[1, T]``, of which the first ``given`` are the user's."""

    def __init__(self, reader: Reader, input_ids: torch.Tensor, given: int) -> None:
        self.reader, self.input_ids, self.length = reader, input_ids, input_ids.shape[1]
        config = reader.model.config
        self.pieces = token_pieces(reader.described.tokenizer, input_ids[0].tolist())
        heads = num_kv_heads(config)
        # The most that an entry can ever receive: all of every query of its group.
        query_heads = config.get_text_config(decoder=True).num_attention_heads
        self.highest = float(self.length * query_heads // heads)
        queries = of_layers(reader.model, input_ids, lambda own: strongest_queries(own, _ARROWS))
        # What the page must know besides the traces, as a JSON object.
        self.content = {
            "model": reader.described.name,
            "tokens": list(self.pieces),
            "given": given,
            "layers": list(full_attention_layers(config)),
            "heads": heads,
            "lowest": LOWEST_SCORE,
            "highest": self.highest,
            # uint16 [L, H, T, 3]: with full attention, the later tokens that look most at each.
            "readers": _blob(np.where(queries < 0, _NOBODY, queries).astype("<u2")),
        }

    def trace(self, policy: str, budget: str, tick: Tick = no_tick) -> dict[str, Any]:
        """Follow a policy through the text, as a JSON object."""
        reader = self.reader
        config = reader.make_cache(policy, budget)
        tokens = config.budget.resolve(self.length)
        block = tokens_a_step(self.length)
        trace = follow(
            reader.model,
            self.input_ids,
            config.policy,
            tokens,
            first=min(tokens.total, _READ_AT_ONCE),
            recorded=min(RECORDED, self.length),
            tick=tick,
            block=block,
        )
        parts = get_policy(config.policy).allocate_budget(tokens)
        return {
            "policy": config.policy,
            "budget": budget,
            "block": block,
            **{name: getattr(parts, name) for name in ("sink", "heavy", "recent")},
            "next": token_pieces(reader.described.tokenizer, trace.next_tokens.clip(0).tolist()),
            **pack_trace(trace, self.highest),
        }


class Desk:
    """Reads texts and follows policies for the page, one thing at a time."""

    def __init__(self, reader: Reader, choice: dict[str, Any]) -> None:
        self.reader, self.choice = reader, choice
        self.progress = 0.0
        self._lock = threading.Lock()
        self._readings: dict[int, Reading] = {}
        self._traces: dict[tuple[int, str, str], dict[str, Any]] = {}
        self._count = 0

    def read(self, body: Any) -> dict[str, Any]:
        """Read a text: ``{"text": "...", "new_tokens": 0}``; see `Reader.read`."""
        body = body if isinstance(body, dict) else {}
        text, new_tokens = body.get("text"), body.get("new_tokens", 0)
        if not isinstance(text, str) or not isinstance(new_tokens, int):
            raise ValueError('the request needs {"text": "...", "new_tokens": 0}.')
        with self._lock:
            reading = self.reader.read(text, new_tokens)
            self._count += 1
            _keep(self._readings, self._count, reading, _KEPT_READINGS)
            return {"id": self._count, **reading.content}

    def trace(self, query: dict[str, str]) -> dict[str, Any]:
        """Follow a policy: ``text`` (a number from `read`), ``policy`` and ``budget``."""
        try:
            number, policy, budget = int(query["text"]), query["policy"], query["budget"]
        except (KeyError, ValueError) as error:
            raise ValueError("a trace needs text, policy and budget.") from error
        with self._lock:
            if number not in self._readings:
                raise ValueError("this text is not held any more; read it again.")
            # A cache that keeps everything has no budget.
            key = (number, policy, "full" if policy == "full" else budget)
            self.progress = 0.0
            note, reading = partial(setattr, self, "progress"), self._readings[number]
            found = self._traces.pop(key, None) or reading.trace(policy, budget, note)
            _keep(self._traces, key, found, _KEPT_TRACES)
            return found


def _keep(held: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put a value behind the others, of which the oldest goes if there are too many."""
    held[key] = value
    if len(held) > most:
        del held[next(iter(held))]


def export_content(
    reader: Reader,
    choice: dict[str, Any],
    report: Callable[[str, float], None] = lambda label, done: None,
) -> dict[str, Any]:
    """What a page without a server holds: a trace for each policy and budget of the choice."""
    runs = [
        (policy, budget)
        for policy in choice["policies"]
        # A cache that keeps everything has no budget, and is followed once.
        for budget in (choice["budgets"][:1] if policy == "full" else choice["budgets"])
    ]
    reading = reader.read(choice["text"], choice["new_tokens"])
    traces = []
    for place, (policy, budget) in enumerate(runs):
        label = policy if policy == "full" else f"{policy} {budget}"

        def tick(part: float, place: int = place, label: str = label) -> None:
            report(label, (place + part) / len(runs))

        tick(0.0)
        traces.append(reading.trace(policy, budget, tick))
    return {"choice": {**choice, "text": ""}, "reading": reading.content, "traces": traces}
