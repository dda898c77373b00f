"""Clients of an OpenAI-compatible server: what they ask, when, and what they saw."""

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
"""The error of a request that was running when the measurement was stopped."""
_SHORTEST_PROMPT = 16
_LONGEST_ANSWER = 4  # times the median
_MESSAGE_LIMIT = 300
_LATE = 0.05

Cut = Callable[[str, int], str]  # cuts a text to a number of tokens


@dataclass(frozen=True)
class Workload:
    """Requests by number, the same for every server that is measured."""

    texts: Sequence[str]
    context: tuple[int, int] | None = None  # the range of tokens that texts are stretched to
    new_tokens: int = 128  # the median of a log-normal distribution
    spread: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.context is not None and not _SHORTEST_PROMPT <= self.context[0] <= self.context[1]:
            raise ValueError(
                f"--context {self.context[0]}:{self.context[1]} is not a range of"
                f" {_SHORTEST_PROMPT} tokens or more; give one such as 2048:4096"
            )
        check_least(new_tokens=self.new_tokens)
        if not 0 <= self.spread <= 3:
            raise ValueError(f"--spread {self.spread} is out of range; give 0 to 3, such as 0.8")

    @property
    def most_new_tokens(self) -> int:
        """More than so many are never asked for."""
        return self.new_tokens * (_LONGEST_ANSWER if self.spread else 1)

    def request(self, number: int, cut: Cut) -> tuple[str, int]:
        """Make one request: its prompt, and the most new tokens."""
        source = random.Random(f"{self.seed}:{number}")
        text = self.texts[number % len(self.texts)]
        length = None if self.context is None else source.randint(*self.context)
        drawn = self.new_tokens * math.exp(self.spread * source.gauss(0, 1))
        if length is not None:
            words = sample_prompt().split()
            start = source.randrange(len(words))
            words = words[start:] + words[:start]
            # A word has at least one token, so as many words as tokens are enough.
            filler = (words * (length // len(words) + 1))[:length]
            text = cut(" ".join([f"({source.randrange(10**6)})", text, *filler]), length)
        return text, min(max(1, round(drawn)), self.most_new_tokens)


def by_ratio(characters_per_token: float) -> Cut:
    """Cut by the number of characters that a token has on average."""
    return lambda text, tokens: text[: max(1, round(tokens * characters_per_token))]


def by_tokenizer(model: str) -> Cut:
    """Cut with a model's own tokenizer."""
    tokenizer = describe(model).tokenizer

    def cut(text: str, tokens: int) -> str:
        found = tokenizer(text, return_offsets_mapping=True, verbose=False)
        ends = [end for _, end in found["offset_mapping"]]
        return text[: ends[min(tokens, len(ends)) - 1]]

    return cut


def default_texts() -> list[str]:
    """Return the paragraphs of the text in the package, long enough to be a prompt."""
    paragraphs = (part.strip() for part in sample_prompt().splitlines())
    return [part for part in paragraphs if len(part.split()) >= _SHORTEST_PROMPT]


def read_texts(path: Path) -> list[str]:
    """Read questions from a file of JSON lines."""
    texts = []
    for record in read_jsonl(path, "an object with turns, prompt, question or text"):
        name = next((n for n in ("prompt", "question", "text") if n in record.fields), "turns")
        texts.append(record.texts("turns" if record.fields.get("turns") else name)[0])
    return texts


@dataclass
class Outcome:
    """What became of a request; times are seconds on the clock of `time.perf_counter`."""

    due: float  # when it was to be sent: an open loop's client that is late must not look fast
    started: float
    arrivals: list[float] = field(default_factory=list)  # of each piece with new text
    ended: float = 0.0
    prompt_tokens: int | None = None  # as the server told, if it did
    new_tokens: int | None = None
    error: str | None = None  # two words, the same for the same kind
    message: str = ""  # what was said

    @property
    def tokens(self) -> int:
        """New tokens: as told, otherwise as many as pieces came."""
        return len(self.arrivals) if self.new_tokens is None else self.new_tokens

    @property
    def first_token(self) -> float | None:
        """Seconds from when it was due to its first text; ``None`` if none came."""
        return self.arrivals[0] - self.due if self.arrivals else None

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first one; ``None`` if there is none."""
        if len(self.arrivals) < 2 or self.tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece and the next."""
        return [b - a for a, b in pairwise(self.arrivals)]

    async def read(self, lines: AsyncIterable[bytes]) -> None:
        """Read a stream of server-sent events to its end."""
        is_whole = False
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
            # A chat's first event only names the role; it is no token.
            if any(own.get("text") or (own.get("delta") or {}).get("content") for own in choices):
                self.arrivals.append(time.perf_counter())
            is_whole |= any(own.get("finish_reason") is not None for own in choices)
        if not is_whole:
            reason = "the stream ended before a finish_reason or [DONE]"
            raise AnswerFailedError("cut off", reason)


class AnswerFailedError(RuntimeError):
    """The answer is none, or not whole: of which kind, the same for the same failure, and why."""


def load_aiohttp() -> Any:
    """Import the HTTP client."""
    return optional("aiohttp", "h2okv bench serve", "serve")


@dataclass
class Client:
    """Streams answers from a server; use it with ``async with``."""

    url: str
    model: str | None = None  # the name that requests give; None for the server's first
    is_chat: bool = False
    timeout: float = 600.0  # seconds after which a request is given up
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request
    asks_usage: bool = True

    async def __aenter__(self) -> Client:
        self._http = load_aiohttp()
        self._path = f"{self.url}/v1/{'chat/completions' if self.is_chat else 'completions'}"
        key = os.environ.get(KEY_VARIABLE)
        self._session = self._http.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # As many connections as clients; the time-out is each request's own.
            connector=self._http.TCPConnector(limit=0),
            timeout=self._http.ClientTimeout(total=None),
            read_bufsize=2**20,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def connect(self, text: str) -> float | None:
        """Find out the model's name, and how many characters a token has if the server tells."""
        if self.model is None:
            self.model = await self._first_model()
        outcome = await self.send(text, 1)
        if outcome.error in ("HTTP 400", "HTTP 422"):
            # Servers from before `stream_options` refuse it.
            self.asks_usage = False
            outcome = await self.send(text, 1)
        if outcome.error is not None:
            raise ValueError(
                f"{self._path} does not answer a request ({outcome.error}: {outcome.message});"
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
        """Send a request and reads its answer; an outcome is listed as soon as it is sent."""
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
                    said = (await response.text(errors="replace"))[:_MESSAGE_LIMIT]
                    raise AnswerFailedError(f"HTTP {response.status}", " ".join(said.split()))
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
    """How requests come: `clients` of a closed loop at any time, or `rate` a second on average."""

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
        """Send prompts with their numbers of new tokens, and waits for the last answer."""
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
    """Draw when requests of a Poisson process come, in seconds from the start, without end."""
    source = random.Random(seed)
    return accumulate(source.expovariate(rate) for _ in repeat(None))


def make_loads(
    clients: Sequence[int], rates: Sequence[float], requests: int | None
) -> Iterator[Load]:
    """Make the loads that the options name, closed loops first."""
    check_least(requests=requests)
    for number in clients:
        check_least(clients=number)
        yield Load(number, None, requests or 4 * number)
    for rate in rates:
        if not 0 < rate < math.inf:
            raise ValueError(
                f"--rate {rate:g} is out of range; give requests for each second, such as 5"
            )
        yield Load(None, rate, requests or max(1, round(30 * rate)))


def summarize(outcomes: Sequence[Outcome], load: Load) -> dict[str, Any]:
    """Sum up what a load gave; rates and times are of the requests answered in full."""
    good = [own for own in outcomes if own.error is None]
    bad = [own for own in outcomes if own.error not in (None, INTERRUPTED)]
    ends, starts = [own.ended for own in outcomes], [own.due for own in outcomes]
    seconds = max(ends) - min(starts) if outcomes else 0.0
    new = sum(own.tokens for own in good)
    prompts = [own.prompt_tokens for own in good if own.prompt_tokens is not None]
    knows_prompts = bool(good) and len(prompts) == len(good)
    kinds = {"pieces" if own.new_tokens is None else "usage" for own in good}

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
        "errors": dict(Counter(str(own.error) for own in bad).most_common()),
        "seconds": seconds,
        "requests_per_second": rate(len(good)),
        "new_tokens_per_second": rate(new),
        "total_tokens_per_second": rate(new + sum(prompts)) if knows_prompts else None,
        "prompt_tokens": statistics.mean(prompts) if knows_prompts else None,
        "new_tokens": new / len(good) if good else None,
        # The server's count, the pieces of the stream, or the one here and the other there.
        "counted_by": "both" if len(kinds) == 2 else "".join(kinds),
        **percentiles("first_token", (own.first_token for own in good)),
        **percentiles("per_token", (own.per_token for own in good)),
        **percentiles("gap", (gap for own in good for gap in own.gaps)),
        **percentiles("lateness", (own.started - own.due for own in outcomes)),
        # The first of each kind of error, and no column.
        "messages": {own.error: own.message for own in reversed(outcomes) if own.error},
    }


_SUMMED = tuple(name for name in summarize((), Load(1, None, 1)) if name != "messages")
COLUMNS = ("server", "model", "settings", *_SUMMED, "peak_bytes")
"""The columns of a CSV file of loads; docs/benchmarking.md says what each is."""


def remarks(row: Row) -> list[str]:
    """What a reader of the table must know: errors, how tokens were counted, lateness."""
    where = f"{row['server']}, {load_label(row)}"
    lines = [
        f"{where}: {count} x {kind}: {row['messages'][kind]}"
        for kind, count in row["errors"].items()
    ]
    if row["interrupted"]:
        lines.append(
            f"{where}: stopped; {row['interrupted']} requests were running, which count nowhere"
        )
    if row["counted_by"] in ("pieces", "both"):
        told = "not" if row["counted_by"] == "pieces" else "not always"
        lines.append(
            f"{row['server']}: the server does {told} tell token counts; pieces of the stream are"
            " counted instead"
        )
    if (row["lateness_p95"] or 0) > _LATE:
        lines.append(
            f"{where}: requests were sent up to {row['lateness_p95']:.2f} s late (p95); this"
            " machine is too slow for the rate"
        )
    return lines
