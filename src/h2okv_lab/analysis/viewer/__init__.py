"""The viewer: the entries that each policy keeps of a text, step by step, in the browser.

The page's server is the standard library's, with four routes for one user on this machine, so that
`h2okv view` needs no extra.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch
from transformers import PreTrainedModel

from h2okv.cache.support import num_kv_heads
from h2okv.config import CacheConfig
from h2okv.integration.enable import input_device
from h2okv.models.loading import Described
from h2okv.policy import get_rule
from h2okv.records import refusing
from h2okv_lab.analysis.attention_stats import (
    Tick,
    full_attention_layers,
    no_tick,
    of_layers,
    strongest_queries,
)
from h2okv_lab.analysis.eviction_trace import Trace, follow
from h2okv_lab.analysis.study import make_sample, token_pieces

RECORDED = 48  # steps whose scores are sent; the page interpolates between them
_ARROWS = 3  # from a token to its strongest queries
_NO_QUERY = 65_535
LOWEST_SCORE = 0.01  # scores at or below this are sent as 0 (no colour)
_LEVELS = 254


def pack_trace(trace: Trace, highest: float) -> dict[str, Any]:
    """Pack a trace for the page, as a JSON object.

    ``gone`` is uint16 ``[L, H, T]`` and each layer's ``scores`` uint8 ``[C][H][step + 1]``, as gzip
    in base64; ``bytes`` lists ``[step, bytes]`` at each change of the cache's size.
    """
    sizes = trace.cache_bytes
    changed = np.flatnonzero((sizes > 0) & (np.diff(sizes, prepend=0) != 0))
    levels = [quantise(layer, highest).reshape(len(layer), -1) for layer in trace.scores]
    return {
        "first": trace.first,
        "steps": trace.recorded.tolist(),
        "gone": _blob(trace.gone_at.astype("<u2")),
        "scores": [_blob(layer) for layer in np.concatenate(levels, axis=1)],
        "bytes": [[step, sizes[step].item()] for step in changed.tolist()],
        "full_bytes": int(trace.full_bytes[-1]),
        "losses": [None if np.isnan(x) else round(float(x), 3) for x in trace.losses],
    }


def quantise(scores: np.ndarray, highest: float) -> np.ndarray:
    """Quantise scores to 255 levels, evenly spaced in their logarithm."""
    span = np.log(highest / LOWEST_SCORE)
    fraction = np.log(np.maximum(scores, LOWEST_SCORE) / LOWEST_SCORE) / span
    levels = 1 + np.rint(_LEVELS * np.clip(fraction, 0, 1))
    return np.where(scores > LOWEST_SCORE, levels, 0).astype(np.uint8)


def _blob(array: np.ndarray) -> str:
    # No time stamp: the same trace gives the same file.
    return base64.b64encode(gzip.compress(array.tobytes(), 6, mtime=0)).decode("ascii")


MIN_TOKENS = 8
MOST_TOKENS = 65_000  # positions travel as 16 bits
_READ_AT_ONCE = 64
_MAX_READINGS, _MAX_TRACES = 4, 24


def tokens_a_step(length: int) -> int:
    """Return the tokens between two evictions: 1 up to 256; 1,024 take 128 steps, 4,096 take 32."""
    # A step's time hardly depends on its number of tokens and grows with that of the entries; more
    # than 256 tokens at once would take too much memory.
    return 1 if length <= 256 else math.ceil(min(256, length / 128 * max(1, length / 1024)))


@dataclass(frozen=True)
class Reader:
    """A model that reads texts for the viewer."""

    model: PreTrainedModel
    described: Described
    max_tokens: int
    # From a policy and a budget as the user wrote them.
    make_cache: Callable[[str, str], CacheConfig]

    def read(self, text: str, new_tokens: int = 0) -> Reading:
        """Tokenize a text and let the model continue it, with the full cache."""
        tokenizer = self.described.tokenizer
        limit = min(self.max_tokens, self.described.context or MOST_TOKENS, MOST_TOKENS)
        if not 0 <= new_tokens <= limit - MIN_TOKENS:
            room = limit - MIN_TOKENS
            raise ValueError(f"new tokens must be from 0 to {room}, got {new_tokens}.")
        sample = make_sample(tokenizer, text, limit - new_tokens, MIN_TOKENS)
        ids = sample.input_ids.to(input_device(self.model))
        if new_tokens:
            # transformers' type of a model lacks `generate`.
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
    """The tokens of a text, int64 ``[1, T]``; the first ``num_given`` are the user's."""

    def __init__(self, reader: Reader, input_ids: torch.Tensor, num_given: int) -> None:
        self.reader, self.input_ids, self.length = reader, input_ids, input_ids.shape[1]
        config = reader.model.config
        self.pieces = token_pieces(reader.described.tokenizer, input_ids[0].tolist())
        heads = num_kv_heads(config)
        # The highest possible score: all attention of every query of the group.
        query_heads = config.get_text_config(decoder=True).num_attention_heads
        self.highest = float(self.length * query_heads // heads)
        queries = of_layers(reader.model, input_ids, partial(strongest_queries, count=_ARROWS))
        # The page's data besides the traces, as a JSON object.
        self.content = {
            "model": reader.described.name,
            "tokens": list(self.pieces),
            "given": num_given,
            "layers": list(full_attention_layers(config)),
            "heads": heads,
            "lowest": LOWEST_SCORE,
            "highest": self.highest,
            # uint16 [L, H, T, 3]: with full attention, the later tokens that attend most to each.
            "readers": _blob(np.where(queries < 0, _NO_QUERY, queries).astype("<u2")),
        }

    def trace(self, policy: str, budget: str, tick: Tick = no_tick) -> dict[str, Any]:
        """Follow a policy through the text; returns a JSON object."""
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
        resolved = get_rule(config.policy).allocate_budget(tokens)
        return {
            "policy": config.policy,
            "budget": budget,
            "block": block,
            **{name: getattr(resolved, name) for name in ("sink", "heavy", "recent")},
            "next": token_pieces(reader.described.tokenizer, trace.next_tokens.clip(0).tolist()),
            **pack_trace(trace, self.highest),
        }


class Desk:
    """The page's requests, one at a time: texts to read and policies to follow."""

    def __init__(self, reader: Reader, choice: dict[str, Any]) -> None:
        self.reader, self.choice = reader, choice
        self.progress = 0.0
        self._lock = threading.Lock()
        self._readings: dict[int, Reading] = {}
        self._traces: dict[tuple[int, str, str], dict[str, Any]] = {}
        self._count = 0

    @property
    def is_busy(self) -> bool:
        """Whether a text is read or a policy followed."""
        return self._lock.locked()

    def read(self, body: Any) -> dict[str, Any]:
        """Read a text: ``{"text": "...", "new_tokens": 0}``; see `Reader.read`."""
        body = body if isinstance(body, dict) else {}
        text, new_tokens = body.get("text"), body.get("new_tokens", 0)
        if not isinstance(text, str) or not isinstance(new_tokens, int):
            raise ValueError('the request needs {"text": "...", "new_tokens": 0}.')
        with self._lock:
            reading = self.reader.read(text, new_tokens)
            self._count += 1
            _remember(self._readings, self._count, reading, _MAX_READINGS)
            return {"id": self._count, **reading.content}

    def trace(self, query: dict[str, str]) -> dict[str, Any]:
        """Follow a policy: ``text`` (a number from `read`), ``policy`` and ``budget``."""
        try:
            number, policy, budget = int(query["text"]), query["policy"], query["budget"]
        except (KeyError, ValueError) as error:
            raise ValueError("a trace needs text, policy and budget.") from error
        with self._lock:
            if number not in self._readings:
                raise ValueError("this text is not in memory any more; read it again.")
            # The full cache has no budget.
            key = (number, policy, "full" if policy == "full" else budget)
            self.progress = 0.0
            on_progress, reading = partial(setattr, self, "progress"), self._readings[number]
            trace = self._traces.pop(key, None) or reading.trace(policy, budget, on_progress)
            _remember(self._traces, key, trace, _MAX_TRACES)
            return trace


def _remember(items: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Add a value to a dict of limited size, dropping the oldest."""
    items[key] = value
    if len(items) > limit:
        del items[next(iter(items))]


def export_content(
    reader: Reader,
    choice: dict[str, Any],
    report: Callable[[str, float], None] = lambda label, done: None,
) -> dict[str, Any]:
    """Return the data of a page without a server: a trace per policy and budget of the choice."""
    runs = [
        (policy, budget)
        for policy in choice["policies"]
        # The full cache has no budget: follow it once.
        for budget in (choice["budgets"][:1] if policy == "full" else choice["budgets"])
    ]
    reading = reader.read(choice["text"], choice["new_tokens"])
    traces = []
    for index, (policy, budget) in enumerate(runs):
        label = policy if policy == "full" else f"{policy} {budget}"

        def tick(fraction: float, index: int = index, label: str = label) -> None:
            report(label, (index + fraction) / len(runs))

        tick(0.0)
        traces.append(reading.trace(policy, budget, tick))
    return {"choice": {**choice, "text": ""}, "reading": reading.content, "traces": traces}


HOST = "127.0.0.1"
_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("data.js", "pane.js", "map.js", "app.js")
_LARGEST_BODY = 4_000_000
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def build_page(content: dict[str, Any]) -> str:
    """Return the page with its style, its scripts and its data inside."""
    page, style, *scripts = (
        (_FOLDER / name).read_text("utf-8") for name in ("index.html", "style.css", *_SCRIPTS)
    )
    # "</script" in a text would end the script around it.
    data = json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    page = page.replace("/*STYLE*/", style).replace("/*SCRIPT*/", "\n".join(scripts))
    return page.replace("/*CONTENT*/", data)


class PageServer(ThreadingHTTPServer):
    """A server of the page, on this machine only."""

    daemon_threads = True
    # On Windows it would let a second server listen on the same port unnoticed.
    allow_reuse_address = os.name == "posix"

    def __init__(self, port: int, desk: Desk | None = None) -> None:
        self.desk = desk
        remedy = "choose another one, or --port 0 for a free one."
        with refusing(f"--port {port} cannot be opened", remedy, OSError, OverflowError):
            super().__init__((HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a page that was closed before its response."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


_ROUTES: dict[tuple[str, str], Callable[..., str | dict[str, Any]]] = {
    ("GET", "/"): lambda desk, query, body: build_page({"choice": desk.choice}),
    ("GET", "/api/progress"): lambda desk, query, body: {"share": desk.progress},
    ("GET", "/api/trace"): lambda desk, query, body: desk.trace(query),
    ("POST", "/api/text"): lambda desk, query, body: desk.read(body()),
}


class _Handler(BaseHTTPRequestHandler):
    """Handler of the page's requests."""

    server: PageServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        # Refuse DNS rebinding: another site whose name points to this machine.
        if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in (HOST, "localhost"):
            return self._send(403, {"error": "wrong host."})
        route = _ROUTES.get((self.command, url.path))
        if route is None:
            return self._send(404, {"error": "page not found."})
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        try:
            return self._send(200, route(self.server.desk, query, self._body))
        except ValueError as error:
            return self._send(400, {"error": str(error)})

    do_POST = do_GET

    def _body(self) -> Any:
        length = int(self.headers.get("Content-Length", 0))
        if not 0 < length <= _LARGEST_BODY:
            raise ValueError(f"the text is empty or larger than {_LARGEST_BODY} bytes.")
        return json.loads(self.rfile.read(length))

    def _send(self, code: int, content: str | dict[str, Any]) -> None:
        kind = "text/html; charset=utf-8"
        if not isinstance(content, str):
            content, kind = json.dumps(content, allow_nan=False), "application/json"
        data = content.encode("utf-8")
        self.send_response(code)
        for name, value in {**_HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing; the terminal is the user's."""
