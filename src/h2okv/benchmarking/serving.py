"""A load of requests on an OpenAI-compatible server, and the times that its clients see."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat
from pathlib import Path
from typing import Any

from h2okv.assets import sample_prompt
from h2okv.benchmarking.results import load_label, percentiles
from h2okv.console import check_least, optional
from h2okv.records import Row, read_jsonl

KEY_VARIABLE = "H2OKV_API_KEY"
INTERRUPTED = "interrupted"
"""Error of a request that was running when the measurement was stopped."""
_SHORTEST_PROMPT = 16
_LONGEST_ANSWER = 4  # times the median
_MESSAGE_LIMIT = 300
# English text in a common tokenizer, for servers that report no token counts.
_USUAL_RATIO = 4.0
# Characters of the first request: enough to estimate the ratio, and still a short prompt.
_PROBE = 600


def read_texts(path: Path | None) -> list[str]:
    """Read questions from a file of JSON lines; ``None`` for paragraphs of the bundled text."""
    if path is None:
        paragraphs = (paragraph.strip() for paragraph in sample_prompt().splitlines())
        return [p for p in paragraphs if len(p.split()) >= _SHORTEST_PROMPT]
    texts = []
    for record in read_jsonl(path, "an object with turns, prompt, question or text"):
        name = next((n for n in ("prompt", "question", "text") if n in record.fields), "turns")
        texts.append(record.texts("turns" if record.fields.get("turns") else name)[0])
    return texts


@dataclass(frozen=True)
class Workload:
    """Requests by number, the same for every server."""

    texts: Sequence[str]
    context: tuple[int, int] | None = None  # range of tokens to extend texts to
    new_tokens: int = 128  # the median of a log-normal distribution
    spread: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.context is not None and not _SHORTEST_PROMPT <= self.context[0] <= self.context[1]:
            raise ValueError(
                f"--context must be a range of {_SHORTEST_PROMPT} tokens or more, got"
                f" {self.context[0]}:{self.context[1]}; give for example 2048:4096"
            )
        check_least(new_tokens=self.new_tokens)
        if not 0 <= self.spread <= 3:
            raise ValueError(
                f"--spread must be from 0 to 3, got {self.spread}; give for example 0.8"
            )

    def request(self, number: int, ratio: float) -> tuple[str, int]:
        """Return a prompt, by characters per token, and its maximum number of new tokens."""
        rng = random.Random(f"{self.seed}:{number}")
        text = self.texts[number % len(self.texts)]
        length = None if self.context is None else rng.randint(*self.context)
        new_tokens = self.new_tokens * math.exp(self.spread * rng.gauss(0, 1))
        if length is not None:
            words = sample_prompt().split()
            start = rng.randrange(len(words))
            words = words[start:] + words[:start]
            # A word has at least one token: `length` words are enough.
            filler = (words * (length // len(words) + 1))[:length]
            text = " ".join([f"({rng.randrange(10**6)})", text, *filler])
            text = text[: max(1, round(length * ratio))]
        limit = self.new_tokens * (_LONGEST_ANSWER if self.spread else 1)
        return text, min(max(1, round(new_tokens)), limit)


class AnswerFailedError(RuntimeError):
    """A failed or truncated response: the kind of failure, a colon and a message."""


@dataclass
class Outcome:
    """The outcome of a request; times are seconds of `time.perf_counter`."""

    due: float  # scheduled time: a late client of an open loop must not look fast
    started: float
    arrivals: list[float] = field(default_factory=list)  # of each chunk with new text
    ended: float = 0.0
    prompt_tokens: int | None = None  # as reported by the server, if at all
    new_tokens: int | None = None
    error: str | None = None  # the kind of error, a colon and its details

    @property
    def tokens(self) -> int:
        """New tokens: as reported, otherwise the number of chunks."""
        return len(self.arrivals) if self.new_tokens is None else self.new_tokens

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

    async def read(self, lines: AsyncIterable[bytes]) -> None:
        """Read a stream of server-sent events to its end."""
        is_complete = False
        async for raw in lines:
            field_name, _, data = raw.decode("utf-8", "replace").strip().partition(":")
            if field_name != "data":
                continue
            if data.strip() == "[DONE]":
                return
            try:
                event = dict(json.loads(data))
            except (ValueError, TypeError):
                raise AnswerFailedError(f"not JSON: {data[:200]}") from None
            if event.get("error"):
                raise AnswerFailedError(f"error in stream: {json.dumps(event['error'])}")
            choices, usage = event.get("choices") or (), event.get("usage") or {}
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
            self.new_tokens = usage.get("completion_tokens", self.new_tokens)
            # A chat's first event has only the role, no token.
            if any(c.get("text") or (c.get("delta") or {}).get("content") for c in choices):
                self.arrivals.append(time.perf_counter())
            is_complete |= any(choice.get("finish_reason") is not None for choice in choices)
        if not is_complete:
            raise AnswerFailedError("cut off: the stream ended before a finish_reason or [DONE]")


@dataclass
class Client:
    """A streaming client of a server; use it with ``async with``."""

    url: str
    model: str | None = None  # name in requests; None for the server's first model
    is_chat: bool = False
    timeout: float = 600.0  # seconds per request
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request

    async def __aenter__(self) -> Client:
        self._http = optional("aiohttp", "h2okv bench serve", "serve")
        self._path = f"{self.url}/v1/{'chat/completions' if self.is_chat else 'completions'}"
        key = os.environ.get(KEY_VARIABLE)
        self._session = self._http.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # No limit on connections; each request has its own timeout.
            connector=self._http.TCPConnector(limit=0),
            timeout=self._http.ClientTimeout(total=None),
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def connect(self, text: str) -> float:
        """Find the model's name, and how many characters its tokens have on average."""
        if self.model is None:
            self.model = await self._first_model()
        outcome = await self.send(text, 1)
        if outcome.error is not None:
            raise ValueError(
                f"{self._path} failed a request ({outcome.error}); check the server and the model's"
                " name"
            )
        return len(text) / outcome.prompt_tokens if outcome.prompt_tokens else _USUAL_RATIO

    async def send(
        self,
        prompt: str,
        max_tokens: int,
        due: float | None = None,
        outcomes: list[Outcome] | None = None,
    ) -> Outcome:
        """Send a request and read its response; its outcome is listed when it is sent."""
        messages = [{"role": "user", "content": prompt}]
        body: dict[str, Any] = {"messages": messages} if self.is_chat else {"prompt": prompt}
        body |= {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **self.extra}
        started = time.perf_counter()
        outcome = Outcome(started if due is None else due, started)
        if outcomes is not None:
            outcomes.append(outcome)
        try:
            async with (
                asyncio.timeout(self.timeout),
                self._session.post(self._path, json=body) as response,
            ):
                if response.status != 200:
                    text = " ".join((await response.text(errors="replace")).split())
                    raise AnswerFailedError(f"HTTP {response.status}: {text}")
                await outcome.read(response.content)
        except AnswerFailedError as error:
            outcome.error = str(error)[:_MESSAGE_LIMIT]
        except TimeoutError:
            outcome.error = f"timed out: no end after {self.timeout:g} s"
        except asyncio.CancelledError:
            outcome.error = INTERRUPTED
            raise
        except (self._http.ClientError, ValueError, OSError) as error:
            is_refused = isinstance(error, self._http.ClientConnectorError)
            kind = "no connection" if is_refused else "connection broken"
            outcome.error = f"{kind}: {type(error).__name__}: {error}"[:_MESSAGE_LIMIT]
        finally:
            outcome.ended = time.perf_counter()
        return outcome

    async def _first_model(self) -> str:
        url = f"{self.url}/v1/models"
        try:
            async with asyncio.timeout(self.timeout), self._session.get(url) as response:
                return str(json.loads(await response.read())["data"][0]["id"])
        except (self._http.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"no answer from {url} ({type(error).__name__}: {error}); start the server, such as"
                " h2okv serve --model bundled, or check the URL and the key"
            ) from error


@dataclass(frozen=True)
class Load:
    """A closed loop of `clients`, or an open one of `rate` requests a second on average."""

    clients: int | None
    rate: float | None
    requests: int

    async def run(
        self,
        client: Client,
        requests: Sequence[tuple[str, int]],
        outcomes: list[Outcome],
        advance: Callable[[], None] = lambda: None,
        seed: int = 0,
    ) -> None:
        """Send prompts with their numbers of new tokens, and wait for the last response."""
        start = time.perf_counter()
        times = repeat(0.0) if self.rate is None else arrival_times(self.rate, seed)
        gate = asyncio.Semaphore(self.clients or max(1, len(requests)))

        async def send(after: float, request: tuple[str, int]) -> None:
            await asyncio.sleep(max(0.0, start + after - time.perf_counter()))
            async with gate:
                due = time.perf_counter() if self.rate is None else start + after
                await client.send(*request, due, outcomes)
            advance()

        async with asyncio.TaskGroup() as group:
            for after, request in zip(times, requests, strict=False):
                group.create_task(send(after, request))


def arrival_times(rate: float, seed: int) -> Iterator[float]:
    """Draw arrival times of a Poisson process, in seconds from the start; endless."""
    rng = random.Random(seed)
    return accumulate(rng.expovariate(rate) for _ in repeat(None))


def make_loads(
    clients: Sequence[int], rates: Sequence[float], requests: int | None
) -> Iterator[Load]:
    """Yield the loads that the options request, closed loops first."""
    check_least(requests=requests)
    for number in clients:
        check_least(clients=number)
        yield Load(number, None, requests or 4 * number)
    for rate in rates:
        if not 0 < rate < math.inf:
            raise ValueError(
                f"--rate must be a positive number of requests per second, got {rate:g}"
            )
        yield Load(None, rate, requests or max(1, round(30 * rate)))


async def measure(
    client: Client,
    workload: Workload,
    loads: Sequence[Load],
    warmup: int,
    keep: Callable[[Row, Sequence[str]], None],
    advance: Callable[[int, str], None],
) -> None:
    """Put a server under every load; `keep` receives each row, and its errors, at once."""
    async with client:
        ratio = await client.connect(workload.texts[0][:_PROBE])
        first = [workload.request(10**6 + number, ratio) for number in range(warmup)]
        await Load(max(1, warmup), None, warmup).run(client, first, [])
        for load in loads:
            outcomes: list[Outcome] = []
            label = load_label(vars(load))
            advance(0, label)
            requests = [workload.request(number, ratio) for number in range(load.requests)]
            try:
                await load.run(client, requests, outcomes, lambda: advance(1, label), workload.seed)  # noqa: B023
            finally:  # also after an interrupted load
                if outcomes:
                    names = {"server": client.url, "model": client.model or ""}
                    errors = [f"{label}: {x.error}" for x in outcomes if x.error]
                    keep(names | summarize(outcomes, load), errors)


def summarize(outcomes: Sequence[Outcome], load: Load) -> dict[str, Any]:
    """Summarize a load's outcomes; rates and times are of complete responses."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    bad = [str(x.error).partition(":")[0] for x in outcomes if x.error not in (None, INTERRUPTED)]
    ends, starts = [outcome.ended for outcome in outcomes], [outcome.due for outcome in outcomes]
    seconds = max(ends) - min(starts) if outcomes else 0.0
    new = sum(outcome.tokens for outcome in good)
    prompts = [outcome.prompt_tokens for outcome in good if outcome.prompt_tokens is not None]
    knows_prompts = bool(good) and len(prompts) == len(good)
    kinds = {"pieces" if outcome.new_tokens is None else "usage" for outcome in good}

    def rate(amount: float) -> float:
        return amount / seconds if seconds > 0 else 0.0

    return {
        "loop": "closed" if load.rate is None else "open",
        "clients": load.clients,
        "rate": load.rate,
        "requests": len(outcomes),
        "finished": len(good),
        "failed": len(bad),
        "interrupted": len(outcomes) - len(good) - len(bad),
        "errors": dict(Counter(bad).most_common()),
        "seconds": seconds,
        "requests_per_second": rate(len(good)),
        "new_tokens_per_second": rate(new),
        "total_tokens_per_second": rate(new + sum(prompts)) if knows_prompts else None,
        "prompt_tokens": statistics.mean(prompts) if knows_prompts else None,
        "new_tokens": new / len(good) if good else None,
        # The server's usage, chunks of the stream, or a mixture of both.
        "counted_by": "both" if len(kinds) == 2 else "".join(kinds),
        **percentiles("first_token", (outcome.first_token for outcome in good)),
        **percentiles("per_token", (outcome.per_token for outcome in good)),
        **percentiles("gap", (gap for outcome in good for gap in outcome.gaps)),
        **percentiles("lateness", (outcome.started - outcome.due for outcome in outcomes)),
    }


COLUMNS = ("server", "model", *summarize((), Load(1, None, 1)))
"""Columns of a CSV file of loads; docs/benchmarking.md explains them."""
