"""Clients of an OpenAI-compatible server: requests, loads and their outcomes."""

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
from h2okv.integration.loading import describe
from h2okv.records import Row, read_jsonl

KEY_VARIABLE = "H2OKV_API_KEY"
INTERRUPTED = "interrupted"
"""Error of a request that was running when the measurement was stopped."""
_SHORTEST_PROMPT = 16
_LONGEST_ANSWER = 4  # times the median
_MESSAGE_LIMIT = 300
_LATE = 0.05

Cut = Callable[[str, int], str]  # truncates a text to a number of tokens


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

    @property
    def max_new_tokens(self) -> int:
        """Upper bound on requested tokens."""
        return self.new_tokens * (_LONGEST_ANSWER if self.spread else 1)

    def request(self, number: int, cut: Cut) -> tuple[str, int]:
        """Return one request: its prompt and its maximum number of new tokens."""
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
            text = cut(" ".join([f"({rng.randrange(10**6)})", text, *filler]), length)
        return text, min(max(1, round(new_tokens)), self.max_new_tokens)


def by_ratio(characters_per_token: float) -> Cut:
    """Return a function that truncates by an average number of characters per token."""
    return lambda text, tokens: text[: max(1, round(tokens * characters_per_token))]


def by_tokenizer(model: str) -> Cut:
    """Return a function that truncates with a model's tokenizer."""
    tokenizer = describe(model).tokenizer

    def cut(text: str, tokens: int) -> str:
        encoding = tokenizer(text, return_offsets_mapping=True, verbose=False)
        ends = [end for _, end in encoding["offset_mapping"]]
        return text[: ends[min(tokens, len(ends)) - 1]]

    return cut


def default_texts() -> list[str]:
    """Return the paragraphs of the bundled text that are long enough for a prompt."""
    paragraphs = (paragraph.strip() for paragraph in sample_prompt().splitlines())
    return [paragraph for paragraph in paragraphs if len(paragraph.split()) >= _SHORTEST_PROMPT]


def read_texts(path: Path) -> list[str]:
    """Read questions from a file of JSON lines."""
    texts = []
    for record in read_jsonl(path, "an object with turns, prompt, question or text"):
        name = next((n for n in ("prompt", "question", "text") if n in record.fields), "turns")
        texts.append(record.texts("turns" if record.fields.get("turns") else name)[0])
    return texts


@dataclass
class Outcome:
    """The outcome of a request; times are seconds of `time.perf_counter`."""

    due: float  # scheduled time: a late client of an open loop must not look fast
    started: float
    arrivals: list[float] = field(default_factory=list)  # of each chunk with new text
    ended: float = 0.0
    prompt_tokens: int | None = None  # as reported by the server, if at all
    new_tokens: int | None = None
    error: str | None = None  # the kind of error
    message: str = ""  # its details

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
            line = raw.decode("utf-8", "replace").strip()
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            try:
                event = json.loads(data)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise AnswerFailedError("not JSON", data[:200])
            if event.get("error"):
                raise AnswerFailedError("error in stream", json.dumps(event["error"])[:200])
            usage, choices = event.get("usage"), event.get("choices") or ()
            if isinstance(usage, dict):
                self.prompt_tokens = usage.get("prompt_tokens")
                self.new_tokens = usage.get("completion_tokens")
            # A chat's first event has only the role, no token.
            if any(
                choice.get("text") or (choice.get("delta") or {}).get("content")
                for choice in choices
            ):
                self.arrivals.append(time.perf_counter())
            is_complete |= any(choice.get("finish_reason") is not None for choice in choices)
        if not is_complete:
            reason = "the stream ended before a finish_reason or [DONE]"
            raise AnswerFailedError("cut off", reason)


class AnswerFailedError(RuntimeError):
    """A failed or truncated response; its arguments are the kind of failure and a message."""


def load_aiohttp() -> Any:
    """Import the HTTP client."""
    return optional("aiohttp", "h2okv bench serve", "serve")


@dataclass
class Client:
    """A streaming client of a server; use it with ``async with``."""

    url: str
    model: str | None = None  # name in requests; None for the server's first model
    is_chat: bool = False
    timeout: float = 600.0  # seconds per request
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request
    asks_usage: bool = True

    async def __aenter__(self) -> Client:
        self._http = load_aiohttp()
        self._path = f"{self.url}/v1/{'chat/completions' if self.is_chat else 'completions'}"
        key = os.environ.get(KEY_VARIABLE)
        self._session = self._http.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # No limit on connections; each request has its own timeout.
            connector=self._http.TCPConnector(limit=0),
            timeout=self._http.ClientTimeout(total=None),
            read_bufsize=2**20,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def connect(self, text: str) -> float | None:
        """Find the model's name, and the characters per token if the server reports counts."""
        if self.model is None:
            self.model = await self._first_model()
        outcome = await self.send(text, 1)
        if outcome.error in ("HTTP 400", "HTTP 422"):
            # Servers from before `stream_options` refuse it.
            self.asks_usage = False
            outcome = await self.send(text, 1)
        if outcome.error is not None:
            raise ValueError(
                f"{self._path} failed a request ({outcome.error}: {outcome.message});"
                " check the server and the model's name"
            )
        return len(text) / outcome.prompt_tokens if outcome.prompt_tokens else None

    async def send(
        self,
        prompt: str,
        max_tokens: int,
        due: float | None = None,
        outcomes: list[Outcome] | None = None,
    ) -> Outcome:
        """Send a request and read its response; its outcome is listed when it is sent."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0}
        body["prompt"] = prompt
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        if self.asks_usage:
            body["stream_options"] = {"include_usage": True}
        body |= {"stream": True, **self.extra}
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
                    text = (await response.text(errors="replace"))[:_MESSAGE_LIMIT]
                    raise AnswerFailedError(f"HTTP {response.status}", " ".join(text.split()))
                await outcome.read(response.content)
        except AnswerFailedError as error:
            outcome.error, outcome.message = error.args
        except TimeoutError:
            outcome.error, outcome.message = "timed out", f"no end after {self.timeout:g} s"
        except asyncio.CancelledError:
            outcome.error = INTERRUPTED
            raise
        except (self._http.ClientError, ValueError, OSError) as error:
            is_refused = isinstance(error, self._http.ClientConnectorError)
            outcome.error = "no connection" if is_refused else "connection broken"
            outcome.message = f"{type(error).__name__}: {error}"[:_MESSAGE_LIMIT]
        finally:
            outcome.ended = time.perf_counter()
        return outcome

    async def _first_model(self) -> str:
        url = f"{self.url}/v1/models"
        try:
            async with asyncio.timeout(self.timeout), self._session.get(url) as response:
                return str(json.loads(await response.text(errors="replace"))["data"][0]["id"])
        except (self._http.ClientError, TimeoutError, OSError) as error:
            raise ValueError(
                f"no answer from {url} ({type(error).__name__}: {error}); start the server, or give"
                " --model bundled, which starts one for the run"
            ) from error
        except (ValueError, KeyError, IndexError, TypeError):
            raise ValueError(
                f"{url} lists no model (HTTP {response.status}); check the URL and the key, or give"
                " the model's name with --served-name"
            ) from None


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
        done: Callable[[], None] = lambda: None,
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
            done()

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


def summarize(outcomes: Sequence[Outcome], load: Load) -> dict[str, Any]:
    """Summarize a load's outcomes; rates and times are of complete responses."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    bad = [outcome for outcome in outcomes if outcome.error not in (None, INTERRUPTED)]
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
        "errors": dict(Counter(str(outcome.error) for outcome in bad).most_common()),
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
        # The first message of each kind of error; not a column.
        "messages": {
            outcome.error: outcome.message for outcome in reversed(outcomes) if outcome.error
        },
    }


_SUMMED = tuple(name for name in summarize((), Load(1, None, 1)) if name != "messages")
COLUMNS = ("server", "model", "settings", *_SUMMED, "peak_bytes")
"""Columns of a CSV file of loads; docs/benchmarking.md explains them."""


def remarks(row: Row) -> list[str]:
    """Return remarks on a row: errors, how tokens were counted, lateness."""
    label = f"{row['server']}, {load_label(row)}"
    lines = [
        f"{label}: {count} x {kind}: {row['messages'][kind]}"
        for kind, count in row["errors"].items()
    ]
    if row["interrupted"]:
        lines.append(f"{label}: stopped; {row['interrupted']} running requests are not counted")
    if row["counted_by"] in ("pieces", "both"):
        how_often = "not" if row["counted_by"] == "pieces" else "not always"
        lines.append(
            f"{row['server']}: the server does {how_often} report token counts; chunks of the"
            " stream are counted instead"
        )
    if (row["lateness_p95"] or 0) > _LATE:
        lines.append(
            f"{label}: requests were sent up to {row['lateness_p95']:.2f} s late (p95); this"
            " machine is too slow for the rate"
        )
    return lines
