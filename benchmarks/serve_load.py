"""Load on a server that speaks OpenAI's completions API, and the times that its clients see.

In a closed loop (``--clients 8,32``) each client sends its next request when it has its answer; in
an open loop (``--rate 5``) requests come as a Poisson process, and times count from when a request
was due: a generator that is late does not hide waiting. docs/results/bench.md explains the columns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat
from pathlib import Path
from typing import Any

import aiohttp
import numpy
import torch
from record import progress

from h2okv.assets import sample_prompt
from h2okv.console import format_table
from h2okv_lab.tables import CsvFile, environment, read_jsonl

INTERRUPTED = "interrupted"
LONGEST_ANSWER = 4  # times the median
SHORTEST_PROMPT = 16
PROBE = 600  # characters of the first request, which tells how many a token has
Request = tuple[str, int]
"""A prompt, and the maximum number of new tokens."""


def read_texts(path: Path | None) -> list[str]:
    """Read questions from a file of JSON lines; ``None`` for paragraphs of the bundled text."""
    if path is None:
        paragraphs = (paragraph.strip() for paragraph in sample_prompt().splitlines())
        return [p for p in paragraphs if len(p.split()) >= SHORTEST_PROMPT]
    texts = []
    for record in read_jsonl(path, "an object with turns, prompt, question or text"):
        name = next((n for n in ("prompt", "question", "text") if n in record.fields), "turns")
        texts.append(record.texts("turns" if record.fields.get("turns") else name)[0])
    return texts


def make_request(
    number: int, texts: Sequence[str], ratio: float, args: argparse.Namespace
) -> Request:
    """Return a request by its number, the same for every server; ``ratio``: characters a token.

    With ``--context`` its prompt is extended to a length drawn from that range, by text that
    begins elsewhere for every request: no prefix can be reused.
    """
    rng = random.Random(f"{args.seed}:{number}")
    text = texts[number % len(texts)]
    length = None if args.context is None else rng.randint(*args.context)
    new_tokens = round(args.new_tokens * math.exp(args.spread * rng.gauss(0, 1)))
    if length is not None:
        words = sample_prompt().split()
        start = rng.randrange(len(words))
        words = words[start:] + words[:start]
        # A word has at least one token: `length` words are enough.
        filler = (words * (length // len(words) + 1))[:length]
        text = " ".join([f"({rng.randrange(10**6)})", text, *filler])[: round(length * ratio)]
    limit = args.new_tokens * (LONGEST_ANSWER if args.spread else 1)
    return text, min(max(1, new_tokens), limit)


@dataclass
class Outcome:
    """The outcome of a request; times are seconds of `time.perf_counter`."""

    due: float
    started: float
    arrivals: list[float] = field(default_factory=list)  # of each chunk with new text
    ended: float = 0.0
    usage: dict[str, int] = field(default_factory=dict)  # token counts, if the server reports them
    error: str | None = None  # the kind of error, a colon and its details

    @property
    def tokens(self) -> int:
        """New tokens: as reported, otherwise the number of chunks."""
        return self.usage.get("completion_tokens", len(self.arrivals))

    @property
    def first_token(self) -> float | None:
        """Seconds from the scheduled time to the first text; ``None`` without text."""
        return self.arrivals[0] - self.due if self.arrivals else None

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first one; ``None`` with fewer than two."""
        if len(self.arrivals) < 2 or self.tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive chunks."""
        return [b - a for a, b in pairwise(self.arrivals)]

    async def read(self, lines: AsyncIterable[bytes]) -> str | None:
        """Read a stream of server-sent events to its end; return the error, if there is one."""
        is_complete = False
        async for line in lines:
            name, _, data = line.partition(b":")
            if name != b"data" or data.strip() == b"[DONE]":
                is_complete |= name == b"data"
                continue
            try:
                event = dict(json.loads(data))
            except (ValueError, TypeError):
                return f"not JSON: {data!r}"
            if event.get("error"):
                return f"error in stream: {json.dumps(event['error'])}"
            choices = event.get("choices") or ()
            self.usage |= event.get("usage") or {}
            # A chat's first event has only the role, no token.
            if any(c.get("text") or (c.get("delta") or {}).get("content") for c in choices):
                self.arrivals.append(time.perf_counter())
            is_complete |= any(choice.get("finish_reason") is not None for choice in choices)
        return None if is_complete else "cut off: the stream ended before a finish_reason or [DONE]"


class Client:
    """A streaming client of a server; use it with ``async with``."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.url = args.url.rstrip("/").removesuffix("/v1")
        self.model, self._args = args.served_name, args

    async def __aenter__(self) -> Client:
        key = os.environ.get("H2OKV_API_KEY")
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # No limit on connections; each request has its own timeout.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def connect(self, text: str) -> float:
        """Find the model's name, and return how many characters its tokens have on average."""
        if self.model is None:
            try:
                async with self._session.get(f"{self.url}/v1/models") as response:
                    self.model = (await response.json())["data"][0]["id"]
            except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{self.url}/v1/models lists no model ({error})") from error
        outcome = await self.send(text, 1)
        if outcome.error is not None:
            raise ValueError(f"{self.url} failed a request ({outcome.error})")
        return len(text) / outcome.usage.get("prompt_tokens", len(text) / 4)

    async def send(
        self,
        prompt: str,
        max_tokens: int,
        due: float | None = None,
        outcomes: list[Outcome] | None = None,
    ) -> Outcome:
        """Send a request and read its response; its outcome is listed when it is sent."""
        messages = [{"role": "user", "content": prompt}]
        body = {"messages": messages} if self._args.chat else {"prompt": prompt}
        body |= {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **self._args.extra}
        path = f"{self.url}/v1/{'chat/completions' if self._args.chat else 'completions'}"
        started = time.perf_counter()
        outcome = Outcome(started if due is None else due, started)
        if outcomes is not None:
            outcomes.append(outcome)
        try:
            async with (
                asyncio.timeout(self._args.timeout),
                self._session.post(path, json=body) as response,
            ):
                if response.status == 200:
                    outcome.error = await outcome.read(response.content)
                else:
                    text = " ".join((await response.text(errors="replace")).split())
                    outcome.error = f"HTTP {response.status}: {text[:300]}"
        except TimeoutError:
            outcome.error = f"timed out: no end after {self._args.timeout:g} s"
        except asyncio.CancelledError:
            outcome.error = INTERRUPTED
            raise
        except (aiohttp.ClientError, ValueError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        finally:
            outcome.ended = time.perf_counter()
        return outcome


@dataclass(frozen=True)
class Load:
    """A closed loop of `clients`, or an open one of `rate` requests a second on average."""

    clients: int | None
    rate: float | None
    requests: int

    def __str__(self) -> str:
        return f"{self.clients} clients" if self.rate is None else f"{self.rate:g}/s"

    async def run(
        self,
        client: Client,
        requests: Sequence[Request],
        outcomes: list[Outcome],
        report: Callable[[], None] = lambda: None,
        seed: int = 0,
    ) -> None:
        """Send all requests, and wait for the last response."""
        start = time.perf_counter()
        times = repeat(0.0) if self.rate is None else arrival_times(self.rate, seed)
        gate = asyncio.Semaphore(self.clients or max(1, len(requests)))

        async def send(after: float, request: Request) -> None:
            await asyncio.sleep(max(0.0, start + after - time.perf_counter()))
            async with gate:
                due = time.perf_counter() if self.rate is None else start + after
                await client.send(*request, due, outcomes)
            report()

        async with asyncio.TaskGroup() as group:
            for after, request in zip(times, requests, strict=False):
                group.create_task(send(after, request))


def arrival_times(rate: float, seed: int) -> Iterator[float]:
    """Draw arrival times of a Poisson process, in seconds from the start; endless."""
    rng = random.Random(seed)
    return accumulate(rng.expovariate(rate) for _ in repeat(None))


def summarize(outcomes: Sequence[Outcome], load: Load) -> dict[str, Any]:
    """Summarize a load's outcomes; rates and times are of complete responses."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    bad = [str(x.error).partition(":")[0] for x in outcomes if x.error not in (None, INTERRUPTED)]
    ends, starts = [outcome.ended for outcome in outcomes], [outcome.due for outcome in outcomes]
    seconds = max(ends) - min(starts) if outcomes else math.inf
    new = sum(outcome.tokens for outcome in good)
    prompts = [x.usage["prompt_tokens"] for x in good if "prompt_tokens" in x.usage]
    knows_prompts = bool(good) and len(prompts) == len(good)
    kinds = {"usage" if "completion_tokens" in x.usage else "pieces" for x in good}
    row: dict[str, Any] = {
        "loop": "closed" if load.rate is None else "open",
        "clients": load.clients,
        "rate": load.rate,
        "requests": len(outcomes),
        "finished": len(good),
        "failed": len(bad),
        "interrupted": len(outcomes) - len(good) - len(bad),
        "errors": dict(Counter(bad)),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "new_tokens_per_second": new / seconds,
        "total_tokens_per_second": (new + sum(prompts)) / seconds if knows_prompts else None,
        "prompt_tokens": statistics.mean(prompts) if knows_prompts else None,
        "new_tokens": new / len(good) if good else None,
        # The server's usage, chunks of the stream, or a mixture of both.
        "counted_by": "both" if len(kinds) == 2 else "".join(kinds),
    }
    times: dict[str, list[Any]] = {
        "first_token": [x.first_token for x in good],
        "per_token": [x.per_token for x in good],
        "gap": [gap for x in good for gap in x.gaps],
        "lateness": [x.started - x.due for x in outcomes],
    }
    for name, values in times.items():
        present = [value for value in values if value is not None]
        points = numpy.quantile(present, (0.5, 0.95, 0.99)).tolist() if present else (None,) * 3
        row |= zip((f"{name}_p50", f"{name}_p95", f"{name}_p99"), points, strict=True)
    return row


COLUMNS = ("server", "model", *summarize((), Load(1, None, 1)))


async def measure(args: argparse.Namespace, add: Callable[[dict[str, Any]], None]) -> None:
    """Put the server under every load; ``add`` gets each row, also of an interrupted load."""
    texts = read_texts(args.prompts)
    closed = [Load(n, None, args.requests or 4 * n) for n in args.clients]
    opened = [Load(None, x, args.requests or max(1, round(30 * x))) for x in args.rate]
    async with Client(args) as client:
        ratio = await client.connect(texts[0][:PROBE])
        first = [make_request(10**6 + n, texts, ratio, args) for n in range(args.warmup)]
        await Load(max(1, args.warmup), None, args.warmup).run(client, first, [])
        for load in closed + opened or [Load(8, None, args.requests or 32)]:
            outcomes: list[Outcome] = []
            requests = [make_request(n, texts, ratio, args) for n in range(load.requests)]

            def report(load: Load = load, outcomes: list[Outcome] = outcomes) -> None:
                progress(f"{load}: {sum(x.ended > 0 for x in outcomes)} of {load.requests}")

            try:
                await load.run(client, requests, outcomes, report, args.seed)
            finally:
                progress("")
                for error in dict.fromkeys(x.error for x in outcomes if x.error):
                    print(f"{load}: {error}", file=sys.stderr)
                if outcomes:
                    names = {"server": client.url, "model": client.model}
                    add(names | summarize(outcomes, load))


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table."""

    def points(row: dict[str, Any], name: str, factor: float) -> str:
        values = [row[f"{name}_{point}"] for point in ("p50", "p95", "p99")]
        return "-" if None in values else "/".join(f"{factor * value:.3g}" for value in values)

    header = ["load", "done", "new\ntokens/s", "first token\ns, p50/95/99"]
    lines = [
        [
            str(Load(row["clients"], row["rate"], 0)), f"{row['finished']}/{row['requests']}",
            f"{row['new_tokens_per_second']:.3g}", points(row, "first_token", 1),
            points(row, "per_token", 1e3),
        ]
        for row in rows
    ]  # fmt: skip
    print(format_table([*header, "per token\nms, p50/95/99"], lines, header[:1]), end="")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""

    def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/serve_load.py http://127.0.0.1:8000 --clients 8,32",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", help="of the server; its key is read from H2OKV_API_KEY")
    parser.add_argument("--served-name", help="the model's name in requests; default: the first")
    parser.add_argument("--clients", type=numbers(int), default=[], help="closed loops, as 8,32")
    parser.add_argument("--rate", type=numbers(float), default=[], help="open loops, as 2,5")
    parser.add_argument("--requests", type=int, help="of each loop")
    parser.add_argument("--prompts", type=Path, help="JSONL with turns, prompt, question or text")
    parser.add_argument("--context", help="extend prompts to these tokens, as 2048:4096")
    parser.add_argument("--new-tokens", type=int, default=128, help="median of a request")
    parser.add_argument("--spread", type=float, default=0.8, help="log-normal; 0: the median")
    parser.add_argument("--chat", action="store_true", help="send chat messages")
    parser.add_argument("--extra", type=json.loads, default={}, help="more fields, as JSON")
    parser.add_argument("--warmup", type=int, default=2, help="requests before the first loop")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="file to add rows to")
    args = parser.parse_args(words)
    if args.context is not None:
        first, _, last = args.context.partition(":")
        args.context = int(first), int(last or first)
    return args


def main() -> None:
    """Measure, show and write the rows."""
    args = parse()
    rows: list[dict[str, Any]] = []
    setting = environment(torch.device("cpu"))
    with ExitStack() as stack:
        try:
            file = None
            if args.csv is not None:
                file = stack.enter_context(closing(CsvFile(args.csv, (*setting, *COLUMNS))))

            def add(row: dict[str, Any]) -> None:
                rows.append(row)
                if file is not None:
                    file.append(setting | row | {"errors": json.dumps(row["errors"])})

            asyncio.run(measure(args, add))
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
        except ValueError as error:
            print(error, file=sys.stderr)
            raise SystemExit(2) from None
        finally:
            if rows:
                show(rows)


if __name__ == "__main__":
    main()
