"""Clients of an OpenAI-compatible server: what they ask, when, and what they saw."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from h2okv.assets import sample_prompt

if TYPE_CHECKING:
    import aiohttp

INTERRUPTED = "interrupted"
"""The error of a request that was running when the measurement was stopped."""
_LINE_LIMIT = 2**20
_MESSAGE_LIMIT = 300
_LONGEST = 4
_SHORTEST_PROMPT = 16


@dataclass(frozen=True)
class LoadRequest:
    """One request of a workload; the prompt is a text or the tokens themselves."""

    number: int
    prompt: str | tuple[int, ...]
    max_tokens: int


@dataclass
class Outcome:
    """What became of a request; times are seconds on the clock of `time.perf_counter`.

    Attributes:
        due: When it was to be sent: a client of an open loop that comes late must not look fast.
        started: When it was sent.
        arrivals: When each piece with new text (or tokens) came.
        ended: When it was over.
        prompt_tokens: Tokens of the prompt, if told.
        new_tokens: New tokens, if told; otherwise pieces are counted.
        token_ids: The new tokens themselves, if told.
        error: What went wrong, in two words, the same for the same kind; ``None`` if nothing.
        message: What was said about it.
    """

    due: float
    started: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    token_ids: list[int] | None = None
    error: str | None = None
    message: str = ""

    @property
    def tokens(self) -> int:
        """New tokens: as told, otherwise as many as pieces came."""
        return len(self.arrivals) if self.new_tokens is None else self.new_tokens

    @property
    def lateness(self) -> float:
        """Seconds by which it was sent later than it was due."""
        return self.started - self.due

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
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class AnswerFailedError(RuntimeError):
    """The answer is none, or not whole; `kind` is the same for the same kind of failure."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


async def read_answer(lines: AsyncIterable[bytes], outcome: Outcome) -> None:
    """Reads a stream of server-sent events to its end."""
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
        is_whole = _take(event, outcome) or is_whole
    if not is_whole:
        raise AnswerFailedError("cut off", "the stream ended before a finish_reason or [DONE]")


def _take(event: dict[str, Any], outcome: Outcome) -> bool:
    """Takes one event; whether it ends the answer."""
    usage = event.get("usage")
    if isinstance(usage, dict):
        outcome.prompt_tokens = usage.get("prompt_tokens")
        outcome.new_tokens = usage.get("completion_tokens")
    choices = event.get("choices") or ()
    # A chat's first event only names the role; it is no token.
    if any(own.get("text") or (own.get("delta") or {}).get("content") for own in choices):
        outcome.arrivals.append(time.perf_counter())
    return any(choice.get("finish_reason") is not None for choice in choices)


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, and what all of them have in common.

    Attributes:
        url: Of the server, without `/v1`.
        model: The name that requests give; ``None`` asks the server for its first model.
        is_chat: Whether prompts are sent as chat messages, not as texts to go on with.
        key: The API key, if the server wants one.
        timeout: Seconds after which a request is given up.
        extra: Further fields of every request.
    """

    url: str
    model: str | None = None
    is_chat: bool = False
    key: str | None = None
    timeout: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The URL of requests."""
        kind = "chat/completions" if self.is_chat else "completions"
        return f"{self.url.rstrip('/')}/v1/{kind}"


def load_aiohttp() -> Any:
    """Imports the HTTP client."""
    try:
        import aiohttp
    except ImportError as error:
        raise ValueError(
            "h2okv bench serve needs aiohttp, which is not installed; run"
            " pip install 'h2okv[serve]'"
        ) from error
    return aiohttp


class Target(Protocol):
    """Whatever answers requests."""

    async def send(self, request: LoadRequest, due: float, outcomes: list[Outcome]) -> None:
        """Sends a request and waits for the end of its answer."""


class OpenAITarget:
    """Streams answers from a server; use it with `async with`, and call `connect` first."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._aiohttp = load_aiohttp()
        self._model = endpoint.model
        self._asks_usage = True
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> OpenAITarget:
        headers = {"Authorization": f"Bearer {self.endpoint.key}"} if self.endpoint.key else {}
        self._session = self._aiohttp.ClientSession(
            headers=headers,
            # As many connections as clients; the time-out is each request's own.
            connector=self._aiohttp.TCPConnector(limit=0),
            timeout=self._aiohttp.ClientTimeout(total=None),
            read_bufsize=_LINE_LIMIT,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def connect(self, text: str) -> float | None:
        """Finds out the model's name, and how many characters a token has if the server tells."""
        if self._model is None:
            self._model = await self._first_model()
        outcome = await self._probe(text)
        if outcome.error in ("HTTP 400", "HTTP 422"):
            # Servers from before `stream_options` refuse it.
            self._asks_usage = False
            outcome = await self._probe(text)
        if outcome.error is not None:
            raise ValueError(
                f"{self.endpoint.path} does not answer a request ({outcome.error}:"
                f" {outcome.message}); check the server and the model's name"
            )
        return len(text) / outcome.prompt_tokens if outcome.prompt_tokens else None

    async def send(self, request: LoadRequest, due: float, outcomes: list[Outcome]) -> None:
        """Sends a request and reads its answer; see `Target.send`."""
        outcome = Outcome(due, time.perf_counter())
        outcomes.append(outcome)
        try:
            async with asyncio.timeout(self.endpoint.timeout):
                await self._stream(request, outcome)
        except AnswerFailedError as error:
            outcome.error, outcome.message = error.kind, error.message
        except TimeoutError:
            outcome.error = "timed out"
            outcome.message = f"no end after {self.endpoint.timeout:g} s"
        except asyncio.CancelledError:
            outcome.error = INTERRUPTED
            raise
        except self._aiohttp.ClientConnectorError as error:
            outcome.error, outcome.message = "no connection", str(error)
        except (self._aiohttp.ClientError, ValueError, OSError) as error:
            outcome.error = "connection broken"
            outcome.message = f"{type(error).__name__}: {error}"[:_MESSAGE_LIMIT]
        finally:
            outcome.ended = time.perf_counter()

    async def _stream(self, request: LoadRequest, outcome: Outcome) -> None:
        async with self._session.post(self.endpoint.path, json=self._body(request)) as response:
            if response.status != 200:
                said = (await response.text(errors="replace"))[:_MESSAGE_LIMIT]
                raise AnswerFailedError(f"HTTP {response.status}", " ".join(said.split()))
            await read_answer(response.content, outcome)

    def _body(self, request: LoadRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self.endpoint.is_chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        if self._asks_usage:
            body["stream_options"] = {"include_usage": True}
        return body | dict(self.endpoint.extra)

    async def _probe(self, text: str) -> Outcome:
        outcomes: list[Outcome] = []
        await self.send(LoadRequest(-1, text, 1), time.perf_counter(), outcomes)
        return outcomes[0]

    async def _first_model(self) -> str:
        url = self.endpoint.url.rstrip("/") + "/v1/models"
        try:
            async with (
                asyncio.timeout(self.endpoint.timeout),
                self._session.get(url) as response,
            ):
                if response.status != 200:
                    raise ValueError(
                        f"{url} answers with HTTP {response.status}; check the URL, and the key if"
                        " the server wants one"
                    )
                listed = json.loads(await response.text())
        except (self._aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"no answer from {url} ({type(error).__name__}: {error}); start the server, or give"
                " --model bundled, which starts one for the run"
            ) from error
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{url} does not answer with JSON; give the URL of a server"
            ) from error
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{url} lists no model; give its name with --served-name") from None


Cut = Callable[[str, int], str]
"""Takes a text and a number of tokens; gives the text's beginning of about so many."""


@dataclass(frozen=True)
class Mix:
    """How long prompts and answers are.

    Answers are drawn from a log-normal distribution, the shape that lengths of shared
    conversations have: many short ones, a few that are several times the median.

    Attributes:
        context: The fewest and the most tokens of a prompt, evenly drawn; ``None`` leaves the
            prompts as they are.
        new_tokens: The median of the new tokens asked for.
        spread: Standard deviation of their logarithm; 0 asks for the median every time.
        seed: Of all draws.
        longest: More new tokens are never asked for; ``None`` for four times the median.
    """

    context: tuple[int, int] | None = None
    new_tokens: int = 128
    spread: float = 0.8
    seed: int = 0
    longest: int | None = None

    def __post_init__(self) -> None:
        if self.context is not None and not _SHORTEST_PROMPT <= self.context[0] <= self.context[1]:
            raise ValueError(
                f"--context {self.context[0]}:{self.context[1]} is no range of"
                f" {_SHORTEST_PROMPT} tokens or more; give one such as 2048:4096"
            )
        if self.new_tokens < 1:
            raise ValueError(f"--new-tokens {self.new_tokens} is too few; give 1 or more")
        if not 0 <= self.spread <= 3:
            raise ValueError(f"--spread {self.spread} is out of range; give 0 to 3, such as 0.8")

    @property
    def most_new_tokens(self) -> int:
        """More than so many are never asked for."""
        if not self.spread:
            return self.new_tokens
        return self.longest or self.new_tokens * _LONGEST

    def draw(self, number: int) -> tuple[int | None, int, random.Random]:
        """Draws one request: tokens of its prompt, its new tokens, and the generator."""
        source = random.Random(f"{self.seed}:{number}")
        length = None if self.context is None else source.randint(*self.context)
        drawn = self.new_tokens * math.exp(self.spread * source.gauss(0, 1))
        return length, min(max(1, round(drawn)), self.most_new_tokens), source


class Workload:
    """Requests by number, the same for every server that is measured."""

    def __init__(self, texts: Sequence[str], mix: Mix, cut: Cut, filler: str | None = None) -> None:
        self._texts = texts
        self._words = (sample_prompt() if filler is None else filler).split()
        self._mix = mix
        self._cut = cut

    def request(self, number: int) -> LoadRequest:
        """Makes one request."""
        length, new_tokens, source = self._mix.draw(number)
        text = self._texts[number % len(self._texts)]
        if length is not None:
            text = self._cut(self._stretched(text, length, source), length)
        return LoadRequest(number, text, new_tokens)

    def _stretched(self, text: str, length: int, source: random.Random) -> str:
        """The question, then words until there are certainly enough tokens."""
        start = source.randrange(len(self._words))
        words = self._words[start:] + self._words[:start]
        # A word has at least one token, so as many words as tokens are enough.
        rounds = length // len(words) + 1
        return " ".join([f"({source.randrange(10**6)})", text, *(words * rounds)[:length]])


def by_ratio(characters_per_token: float) -> Cut:
    """Cuts by the number of characters that a token has on average."""
    return lambda text, tokens: text[: max(1, round(tokens * characters_per_token))]


def default_texts() -> list[str]:
    """Returns the paragraphs of the text in the package, long enough to be a prompt."""
    paragraphs = (part.strip() for part in sample_prompt().splitlines())
    return [part for part in paragraphs if len(part.split()) >= _SHORTEST_PROMPT]


def read_texts(path: Path) -> list[str]:
    """Reads questions from a file of JSON lines."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--prompts '{path}' cannot be read as text ({error}); give a file of JSON lines"
        ) from error
    texts = [_text_of(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise ValueError(f"--prompts '{path}' is empty; give a file of JSON lines")
    return texts


def _text_of(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if isinstance(record, dict):
        turns = record.get("turns")
        found = turns[0] if isinstance(turns, list) and turns else None
        for name in ("prompt", "question", "text"):
            found = record.get(name) if found is None else found
        if isinstance(found, str) and found.strip():
            return found
    raise ValueError(
        f"--prompts '{path}' has no question in line {number}; give an object with turns, prompt,"
        " question or text in each line"
    )


Done = Callable[[], None]


async def closed_loop(
    target: Target,
    requests: Sequence[LoadRequest],
    clients: int,
    outcomes: list[Outcome],
    done: Done = lambda: None,
) -> None:
    """So many clients, each of which sends its next request when it has its answer."""
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:
            await target.send(request, time.perf_counter(), outcomes)
            done()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(requests))):
            group.create_task(client())


async def open_loop(
    target: Target,
    requests: Sequence[LoadRequest],
    rate: float,
    outcomes: list[Outcome],
    done: Done = lambda: None,
    seed: int = 0,
) -> None:
    """Requests that come when they come, however long earlier ones take."""
    start = time.perf_counter()

    async def at(due: float, request: LoadRequest) -> None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await target.send(request, due, outcomes)
        done()

    async with asyncio.TaskGroup() as group:
        for after, request in zip(arrival_times(rate, seed), requests, strict=False):
            group.create_task(at(start + after, request))


def arrival_times(rate: float, seed: int) -> Iterator[float]:
    """Draws when requests of a Poisson process come, in seconds from the start, without end."""
    source = random.Random(seed)
    now = 0.0
    while True:
        now += source.expovariate(rate)
        yield now
