"""Servers under load, measured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeAlias
from urllib.error import URLError
from urllib.request import urlopen

import numpy

from h2okv.benchmarking.serving_client import (
    INTERRUPTED,
    Cut,
    Endpoint,
    Mix,
    OpenAITarget,
    Outcome,
    Target,
    Workload,
    by_ratio,
    closed_loop,
    open_loop,
)
from h2okv.cli.serve import KEY_VARIABLE
from h2okv.console import Progress
from h2okv.integration.loading import describe

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class Percentiles:
    """Three points of a distribution, in seconds; between two values in proportion.

    Attributes:
        p50: The median.
        p95: 95 % are at most this.
        p99: 99 % are at most this.
    """

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Percentiles | None:
        """Takes the percentiles of the values that are there; ``None`` if none is."""
        there = [value for value in values if value is not None]
        if not there:
            return None
        return cls(*(float(value) for value in numpy.quantile(there, list(SHARES.values()))))


@dataclass(frozen=True)
class Summary:
    """What a load gave. Rates and times are of the requests that were answered in full.

    Attributes:
        requests: How many were sent.
        finished: Of these, answered in full.
        failed: Of these, not.
        interrupted: Of these, under way when the measurement was stopped; not among the failed.
        errors: Kinds of errors, and how many of each.
        messages: For each kind, what was said the first time.
        seconds: From the first request to the end of the last one.
        requests_per_second: Finished ones.
        new_tokens_per_second: Their new tokens.
        total_tokens_per_second: These, and the tokens of their prompts; ``None`` if not told.
        prompt_tokens: Mean tokens of their prompts; ``None`` if not told.
        new_tokens: Mean new tokens.
        counted_by: Where the number of new tokens is from: ``"usage"`` (the server), ``"pieces"``
            (one for each piece of a stream) or ``"both"``.
        first_token: Seconds to the first text.
        per_token: Seconds for each further token of a request.
        gap: Seconds between two pieces of any request.
        lateness: Seconds by which requests were sent too late; of this program, not the server.
    """

    requests: int
    finished: int
    failed: int
    interrupted: int
    errors: dict[str, int]
    messages: dict[str, str]
    seconds: float
    requests_per_second: float
    new_tokens_per_second: float
    total_tokens_per_second: float | None
    prompt_tokens: float | None
    new_tokens: float | None
    counted_by: str
    first_token: Percentiles | None
    per_token: Percentiles | None
    gap: Percentiles | None
    lateness: Percentiles | None

    def cells(self) -> dict[str, Any]:
        """Returns the values of a CSV row, by the names of `SUMMARY_COLUMNS`."""
        cells = asdict(self)
        cells["errors"] = json.dumps(self.errors)
        del cells["messages"]
        for name in _TIMES:
            point: dict[str, float] = cells.pop(name) or {}
            cells |= {f"{name}_{share}": point.get(share) for share in SHARES}
        return cells


_TIMES = ("first_token", "per_token", "gap", "lateness")
SUMMARY_COLUMNS = (
    "requests", "finished", "failed", "interrupted", "errors", "seconds", "requests_per_second",
    "new_tokens_per_second", "total_tokens_per_second", "prompt_tokens", "new_tokens", "counted_by",
    *(f"{name}_{share}" for name in _TIMES for share in SHARES),
)  # fmt: skip
"""The names of what `Summary.cells` tells."""


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Sums outcomes up."""
    good = [own for own in outcomes if own.error is None]
    bad = [own for own in outcomes if own.error not in (None, INTERRUPTED)]
    ends = [own.ended for own in outcomes]
    seconds = max(ends) - min(own.due for own in outcomes) if outcomes else 0.0
    new = sum(own.tokens for own in good)
    prompts = [own.prompt_tokens for own in good if own.prompt_tokens is not None]
    knows_prompts = bool(good) and len(prompts) == len(good)
    messages: dict[str, str] = {}
    for own in bad:
        messages.setdefault(str(own.error), own.message)

    def rate(amount: float) -> float:
        return amount / seconds if seconds > 0 else 0.0

    return Summary(
        requests=len(outcomes),
        finished=len(good),
        failed=len(bad),
        interrupted=len(outcomes) - len(good) - len(bad),
        errors=dict(Counter(str(own.error) for own in bad).most_common()),
        messages=messages,
        seconds=seconds,
        requests_per_second=rate(len(good)),
        new_tokens_per_second=rate(new),
        total_tokens_per_second=rate(new + sum(prompts)) if knows_prompts else None,
        prompt_tokens=statistics.mean(prompts) if knows_prompts else None,
        new_tokens=new / len(good) if good else None,
        counted_by=_counted_by(good),
        first_token=Percentiles.of(own.first_token for own in good),
        per_token=Percentiles.of(own.per_token for own in good),
        gap=Percentiles.of(gap for own in good for gap in own.gaps),
        lateness=Percentiles.of(own.lateness for own in outcomes),
    )


def _counted_by(outcomes: Sequence[Outcome]) -> str:
    told = sum(own.new_tokens is not None for own in outcomes)
    if told == len(outcomes):
        return "usage" if outcomes else ""
    return "both" if told else "pieces"


COLUMNS = ("server", "model", "settings", "loop", "clients", "rate", *SUMMARY_COLUMNS, "peak_bytes")
"""The columns of a CSV file of these measurements."""


@dataclass(frozen=True)
class Load:
    """How requests come.

    Attributes:
        clients: Of a closed loop: so many at any time.
        rate: Of an open loop: so many in a second on average.
        requests: How many in all.
    """

    clients: int | None
    rate: float | None
    requests: int

    @property
    def loop(self) -> str:
        """Which of the two it is."""
        return "closed" if self.rate is None else "open"


@dataclass(frozen=True)
class Measured:
    """What one load gave.

    Attributes:
        server: Its name.
        model: What the user calls the model.
        settings: How the server was set up.
        load: What was sent.
        summary: What came back.
        peak_bytes: The server's largest resident size so far, if known.
    """

    server: str
    model: str
    settings: str
    load: Load
    summary: Summary
    peak_bytes: int | None = None

    def cells(self) -> dict[str, Any]:
        """Returns the values of `COLUMNS`."""
        return {
            "server": self.server, "model": self.model, "settings": self.settings,
            "loop": self.load.loop, "clients": self.load.clients, "rate": self.load.rate,
            **self.summary.cells(), "peak_bytes": self.peak_bytes,
        }  # fmt: skip


def make_loads(
    clients: Sequence[int], rates: Sequence[float], requests: int | None
) -> Iterator[Load]:
    """Makes the loads that the options name, closed loops first."""
    if requests is not None and requests < 1:
        raise ValueError(f"--requests {requests} is too few; give 1 or more")
    for number in clients:
        if number < 1:
            raise ValueError(f"--clients {number} is too few; give 1 or more")
        yield Load(number, None, requests or 4 * number)
    for rate in rates:
        if not rate > 0:
            raise ValueError(
                f"--rate {rate:g} is too low; give requests for each second, such as 5"
            )
        yield Load(None, rate, requests or max(1, round(30 * rate)))


async def put_under(
    target: Target,
    load: Load,
    workload: Workload,
    outcomes: list[Outcome],
    done: Callable[[], None],
    seed: int = 0,
) -> None:
    """Sends one load and waits for its end."""
    requests = [workload.request(number) for number in range(load.requests)]
    if load.rate is None:
        assert load.clients is not None
        await closed_loop(target, requests, load.clients, outcomes, done)
    else:
        await open_loop(target, requests, load.rate, outcomes, done, seed)


async def warm_up(target: Target, workload: Workload, count: int) -> None:
    """Sends a few short requests that do not count, so that nothing is done for the first time."""
    ignored: list[Outcome] = []
    requests = [workload.request(10**6 + number) for number in range(count)]
    async with asyncio.TaskGroup() as group:
        for request in requests:
            group.create_task(target.send(request, time.perf_counter(), ignored))


# -P: nothing of the current folder is imported in place of an installed package.
_PYTHON = (sys.executable, "-P", "-m")
_HOST = "127.0.0.1"
_PAUSE = 0.2
_GRACE = 30.0


@dataclass(frozen=True)
class Command:
    """How a server is started.

    Attributes:
        name: What it is called in tables.
        words: The command line; `{port}` in a word becomes the port.
        model: The name that requests must give; ``None`` if the server tells.
        options: Remarks on how it was set up, for the table.
    """

    name: str
    words: tuple[str, ...]
    model: str | None = None
    options: str = ""


@dataclass(frozen=True)
class PagedSize:
    """How large a paged cache for full contexts must be.

    Attributes:
        clients: Requests at the same time.
        tokens: The most that one of them has, prompt and new ones.
        page: Tokens of a block.
    """

    clients: int
    tokens: int
    page: int = 256

    @property
    def blocks(self) -> int:
        """Blocks that hold all of them, with a tenth more, which the scheduler keeps free."""
        whole = self.clients * -(-self.tokens // self.page)
        return -(-whole * 11 // 10) + 1


def own_server(model: str, options: Sequence[str] = ()) -> Command:
    """`h2okv serve`."""
    words = (*_PYTHON, "h2okv.cli", "serve", "--model", model, "--port", "{port}")
    return Command("h2okv", (*words, *options), options=" ".join(options))


def transformers_server(
    folder: str, dtype: str, device: str, size: PagedSize | None, batch_tokens: int = 1024
) -> Command:
    """`transformers serve`, with continuous batching or, without, one request after another."""
    common = (
        *_PYTHON, "transformers.cli.transformers", "serve", folder, "--dtype", dtype,
        "--device", device, "--attn-implementation", "sdpa", "--host", _HOST, "--port", "{port}",
    )  # fmt: skip
    if size is None:
        return Command("sequential", common, folder, "transformers serve")
    chosen = (
        "--continuous-batching", "--cb-block-size", str(size.page),
        "--cb-num-blocks", str(size.blocks), "--cb-max-batch-tokens", str(batch_tokens),
    )  # fmt: skip
    return Command("transformers", common + chosen, folder, " ".join(chosen))


class ChildServer:
    """A server in a process of its own; `async with` starts it, waits for it and stops it."""

    def __init__(self, command: Command, patience: float = 180.0) -> None:
        self.command = command
        self.url = ""
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    async def __aenter__(self) -> ChildServer:
        """Starts it."""
        port = free_port()
        self.url = f"http://{_HOST}:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the server stops)
        self._process = subprocess.Popen(
            [word.replace("{port}", str(port)) for word in self.command.words],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")},
            # Ctrl-C is for this program, which then stops the server itself.
            start_new_session=True,
        )
        try:
            await self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops it."""
        await asyncio.to_thread(self._stop)

    @property
    def peak_bytes(self) -> int | None:
        """The largest resident size of the process so far; ``None`` where it is not told."""
        if self._process is None:
            return None
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        except OSError:
            return None
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None

    async def _wait(self) -> None:
        assert self._process is not None
        end = time.monotonic() + self._patience
        while not await asyncio.to_thread(_answers, f"{self.url}/health"):
            if self._process.poll() is not None:
                raise ValueError(
                    f"the server {self.command.name!r} ended with code {self._process.returncode}"
                    f" ({self._last_words()}); start it by hand to see why"
                )
            if time.monotonic() > end:
                raise ValueError(
                    f"the server {self.command.name!r} does not answer after {self._patience:g} s"
                    f" ({self._last_words()}); start it by hand and give its --url"
                )
            await asyncio.sleep(_PAUSE)

    def _stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _last_words(self) -> str:
        """The end of what the server printed, on one line."""
        assert self._log is not None
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        told = [line.strip() for line in lines if line.strip()]
        return " / ".join(told[-2:])[-400:] or "it said nothing"


def free_port() -> int:
    """Returns a port of this machine on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    """Whether a server answers there, whatever it says."""
    try:
        with urlopen(url, timeout=5) as response:  # noqa: S310
            return bool(response.status == 200)
    except (URLError, OSError, ValueError):
        return False


# Common English in a common tokenizer, where a server does not count for us.
_USUAL_RATIO = 4.0
# Characters of the first request: enough to tell how many are a token, and no long prompt.
_PROBE = 600


@dataclass(frozen=True)
class Wanted:
    """All that was asked for, checked.

    Attributes:
        servers: Those to start, and those that run.
        model: What the user calls the model.
        tokenizer_of: The model whose tokenizer cuts prompts; ``None`` to go by the server's count.
        texts: The questions.
        mix: The lengths.
        loads: The loads of each server.
        is_chat: Whether to send chat messages.
        extra: Further fields of every request.
        warmup: Requests before the first load of a server.
        timeout: Seconds that a request may take.
    """

    servers: tuple[Command | Endpoint, ...]
    model: str
    tokenizer_of: str | None
    texts: Sequence[str]
    mix: Mix
    loads: tuple[Load, ...]
    is_chat: bool
    extra: Mapping[str, Any]
    warmup: int
    timeout: float


class ServeRun:
    """Measures; what was measured before Ctrl-C is not lost."""

    Keep: TypeAlias = Callable[[Measured], None]

    def __init__(self, wanted: Wanted, keep: Keep, progress: Progress) -> None:
        self._wanted = wanted
        self._keep = keep
        self._progress = progress
        self._outcomes: list[Outcome] = []
        self._make_row: Callable[[], Measured] | None = None

    async def all(self) -> None:
        """Measures every server."""
        for server in self._wanted.servers:
            await self._one(server)

    def keep_unfinished(self) -> bool:
        """Keeps what the load that was interrupted gave; whether it gave anything."""
        if self._make_row is None or not self._outcomes:
            return False
        self._keep(self._make_row())
        return True

    async def _one(self, server: Command | Endpoint) -> None:
        wanted = self._wanted
        async with AsyncExitStack() as stack:
            child = None
            name, settings = "", ""
            if isinstance(server, Command):
                name, settings = server.name, server.options
                self._progress.advance(0, f"{name}: starting the server")
                child = await stack.enter_async_context(ChildServer(server))
                server = Endpoint(child.url, server.model)
            endpoint = replace(
                server,
                is_chat=wanted.is_chat,
                key=os.environ.get(KEY_VARIABLE) or None,
                timeout=wanted.timeout,
                extra=wanted.extra,
            )
            target = await stack.enter_async_context(OpenAITarget(endpoint))
            self._progress.advance(0, f"{name or endpoint.url}: first requests")
            ratio = await target.connect(wanted.texts[0][:_PROBE])
            workload = Workload(wanted.texts, wanted.mix, self._cut(ratio))
            await warm_up(target, workload, wanted.warmup)
            for load in wanted.loads:
                await self._load(target, load, workload, name or endpoint.url, settings, child)

    async def _load(
        self,
        target: OpenAITarget,
        load: Load,
        workload: Workload,
        name: str,
        settings: str,
        child: ChildServer | None,
    ) -> None:
        outcomes: list[Outcome] = []
        kind = f"{load.clients} clients" if load.rate is None else f"{load.rate:g} requests/s"
        label = f"{name}: {kind}"

        def make_row() -> Measured:
            peak = None if child is None else child.peak_bytes
            summary = summarize(outcomes)
            return Measured(name, self._wanted.model, settings, load, summary, peak)

        self._outcomes, self._make_row = outcomes, make_row
        self._progress.advance(0, label)
        done = lambda: self._progress.advance(1, label)  # noqa: E731
        await put_under(target, load, workload, outcomes, done, self._wanted.mix.seed)
        self._make_row = None
        self._keep(make_row())

    def _cut(self, ratio: float | None) -> Cut:
        """How prompts are cut to their number of tokens."""
        if self._wanted.tokenizer_of is None or self._wanted.mix.context is None:
            return by_ratio(ratio or _USUAL_RATIO)
        tokenizer = describe(self._wanted.tokenizer_of).tokenizer

        def cut(text: str, tokens: int) -> str:
            found = tokenizer(text, return_offsets_mapping=True, verbose=False)
            ends = [end for _, end in found["offset_mapping"]]
            return text[: ends[min(tokens, len(ends)) - 1]]

        return cut
