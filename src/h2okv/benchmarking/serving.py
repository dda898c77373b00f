"""Servers under load, measured: which servers, which loads, and what came of them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any
from urllib.error import URLError
from urllib.request import urlopen

import torch

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
from h2okv.benchmarking.timing import Percentiles, ResultRow
from h2okv.console import Progress
from h2okv.integration.loading import describe
from h2okv.integration.models import default_dtype

KEY_VARIABLE = "H2OKV_API_KEY"
OTHER_SERVERS = ("transformers", "sequential")
_UNSTRETCHED = 1024
"""Tokens that a prompt has at most which is sent as it is; an assumption, for the paged cache."""
# -P: nothing of the current folder is imported in place of an installed package.
_PYTHON = (sys.executable, "-P", "-m")
_HOST = "127.0.0.1"
_PAUSE = 0.2
_GRACE = 30.0
# Common English in a common tokenizer, where a server does not count for us.
_USUAL_RATIO = 4.0
# Characters of the first request: enough to tell how many are a token, and no long prompt.
_PROBE = 600


@dataclass(frozen=True)
class Summary(ResultRow):
    """What a load gave. Rates and times are of the requests that were answered in full.

    Attributes:
        interrupted: Running when the measurement was stopped; not among the failed.
        errors: Kinds of errors, and how many of each.
        seconds: From the first request to the end of the last one.
        total_tokens_per_second: New tokens and those of the prompts; ``None`` if not told.
        prompt_tokens: Mean of a request; ``None`` if not told.
        new_tokens: Mean of a request.
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
        """The values of a CSV row, by the names of `columns`."""
        return super().cells() | {"errors": json.dumps(self.errors)}


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Sums outcomes up."""
    good = [own for own in outcomes if own.error is None]
    bad = [own for own in outcomes if own.error not in (None, INTERRUPTED)]
    seconds = 0.0
    if outcomes:
        seconds = max(own.ended for own in outcomes) - min(own.due for own in outcomes)
    new = sum(own.tokens for own in good)
    prompts = [own.prompt_tokens for own in good if own.prompt_tokens is not None]
    knows_prompts = bool(good) and len(prompts) == len(good)

    def rate(amount: float) -> float:
        return amount / seconds if seconds > 0 else 0.0

    return Summary(
        requests=len(outcomes),
        finished=len(good),
        failed=len(bad),
        interrupted=len(outcomes) - len(good) - len(bad),
        errors=dict(Counter(str(own.error) for own in bad).most_common()),
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


def first_messages(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """For each kind of error, what was said the first time."""
    return {str(own.error): own.message for own in reversed(outcomes) if own.error}


def _counted_by(outcomes: Sequence[Outcome]) -> str:
    told = sum(own.new_tokens is not None for own in outcomes)
    if told == len(outcomes):
        return "usage" if outcomes else ""
    return "both" if told else "pieces"


@dataclass(frozen=True)
class Load:
    """How requests come: `clients` of a closed loop at any time, or `rate` a second on average."""

    clients: int | None
    rate: float | None
    requests: int

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"{self.clients} clients" if self.rate is None else f"{self.rate:g}/s"

    async def put_on(
        self,
        target: Target,
        workload: Workload,
        outcomes: list[Outcome],
        done: Callable[[], None] = lambda: None,
        seed: int = 0,
    ) -> None:
        """Sends the requests and waits for their end."""
        requests = [workload.request(number) for number in range(self.requests)]
        if self.rate is None:
            assert self.clients is not None
            await closed_loop(target, requests, self.clients, outcomes, done)
        else:
            await open_loop(target, requests, self.rate, outcomes, done, seed)


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
        if not math.isfinite(rate):
            raise ValueError(f"--rate {rate:g} is not finite; give requests a second, such as 5")
        yield Load(None, rate, requests or max(1, round(30 * rate)))


COLUMNS = (
    "server",
    "model",
    "settings",
    "loop",
    "clients",
    "rate",
    *Summary.columns(),
    "peak_bytes",
)
"""The columns of a CSV file of these measurements."""


@dataclass(frozen=True)
class LoadResult:
    """What one load gave on one server.

    Attributes:
        server: Its name.
        model: What the user calls the model.
        settings: How the server was set up.
        load: What was sent.
        summary: What came back.
        messages: For each kind of error, what was said the first time.
        peak_bytes: The server's largest resident size so far, if known.
    """

    server: str
    model: str
    settings: str
    load: Load
    summary: Summary
    messages: Mapping[str, str]
    peak_bytes: int | None = None

    def cells(self) -> dict[str, Any]:
        """Returns the values of `COLUMNS`."""
        return {
            "server": self.server, "model": self.model, "settings": self.settings,
            "loop": "closed" if self.load.rate is None else "open",
            "clients": self.load.clients, "rate": self.load.rate,
            **self.summary.cells(), "peak_bytes": self.peak_bytes,
        }  # fmt: skip


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
    """How large a paged cache must be for so many clients with so many tokens each."""

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


def choose_servers(
    url: str | None,
    model: str | None,
    others: Sequence[str],
    served_name: str | None,
    serve_options: str,
    device: str,
    loads: Sequence[Load],
    mix: Mix,
) -> tuple[Command | Endpoint, ...]:
    """Finds out which servers to measure: a running one, or one to start and others beside it."""
    if (url is None) == (model is None):
        raise ValueError(
            "give either --url of a running server or --model, for which one is started"
        )
    for name in others:
        if name not in OTHER_SERVERS:
            raise ValueError(
                f"--against {name!r} is not known; choose from {', '.join(OTHER_SERVERS)}"
            )
    if url is not None:
        if others or serve_options:
            raise ValueError("--against and --serve-options go with --model, not with --url")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url {url!r} is no URL; give one such as http://127.0.0.1:8000")
        return (Endpoint(url.rstrip("/").removesuffix("/v1"), served_name),)
    assert model is not None
    options = [*shlex.split(serve_options), *(("--device", device) if device != "auto" else ())]
    servers: list[Command | Endpoint] = [own_server(model, options)]
    if others:
        described = describe(model)
        longest = _UNSTRETCHED if mix.context is None else mix.context[1]
        size = PagedSize(
            max(load.clients or load.requests for load in loads), longest + mix.most_new_tokens
        )
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = default_dtype(model, auto if device == "auto" else device)
        dtype_word = "auto" if dtype is None else str(dtype).removeprefix("torch.")
        for name in others:
            paged = size if name == "transformers" else None
            servers.append(transformers_server(described.source, dtype_word, device, paged))
    return tuple(servers)


class ChildServer:
    """A server in a process of its own; `async with` starts it, waits for it and stops it."""

    def __init__(self, command: Command, patience: float = 180.0) -> None:
        self.command = command
        self.url = ""
        self._patience = patience
        self._process: subprocess.Popen[bytes]
        self._log: IO[bytes]

    async def __aenter__(self) -> ChildServer:
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

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._stop)

    @property
    def peak_bytes(self) -> int | None:
        """The largest resident size of the process so far; ``None`` where it is not told."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        except OSError:
            return None
        found = re.search(r"^VmHWM:\s+(\d+)", status, re.MULTILINE)
        return int(found[1]) * 1024 if found else None

    async def _wait(self) -> None:
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
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def _last_words(self) -> str:
        """The end of what the server printed, on one line."""
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


@dataclass(frozen=True)
class ServeSettings:
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
        warmup: Requests before the first load of a server, so that nothing is done for the first
            time while it counts.
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

    @property
    def num_requests(self) -> int:
        """Of all loads on all servers."""
        return len(self.servers) * sum(load.requests for load in self.loads)


class ServeRun:
    """Measures; what was measured before Ctrl-C is not lost.

    Args:
        settings: What to measure.
        keep: Takes each result as it comes.
        progress: Counts requests.
    """

    def __init__(
        self,
        settings: ServeSettings,
        keep: Callable[[LoadResult], None],
        progress: Progress,
    ) -> None:
        self._settings, self._keep, self._progress = settings, keep, progress
        self._outcomes: list[Outcome] = []
        self._result: Callable[[], LoadResult] | None = None

    async def all(self) -> None:
        """Measures every server."""
        for server in self._settings.servers:
            await self._one(server)

    def keep_unfinished(self) -> bool:
        """Keeps what the load that was interrupted gave; whether it gave anything."""
        if self._result is None or not self._outcomes:
            return False
        self._keep(self._result())
        return True

    async def _one(self, server: Command | Endpoint) -> None:
        settings = self._settings
        async with AsyncExitStack() as stack:
            child, options = None, ""
            if isinstance(server, Command):
                name, options = server.name, server.options
                self._progress.advance(0, f"{name}: starting the server")
                child = await stack.enter_async_context(ChildServer(server))
                server = Endpoint(child.url, server.model)
            else:
                name = server.url
            endpoint = replace(
                server,
                is_chat=settings.is_chat,
                key=os.environ.get(KEY_VARIABLE) or None,
                timeout=settings.timeout,
                extra=settings.extra,
            )
            target = await stack.enter_async_context(OpenAITarget(endpoint))
            self._progress.advance(0, f"{name}: first requests")
            ratio = await target.connect(settings.texts[0][:_PROBE])
            workload = Workload(settings.texts, settings.mix, self._cut(ratio))
            async with asyncio.TaskGroup() as group:
                for number in range(settings.warmup):
                    request = workload.request(10**6 + number)
                    group.create_task(target.send(request, time.perf_counter(), []))
            for load in settings.loads:
                await self._load(target, load, workload, name, options, child)

    async def _load(
        self,
        target: OpenAITarget,
        load: Load,
        workload: Workload,
        name: str,
        options: str,
        child: ChildServer | None,
    ) -> None:
        outcomes: list[Outcome] = []
        label = f"{name}: {load.label}"

        def result() -> LoadResult:
            peak = None if child is None else child.peak_bytes
            summary, messages = summarize(outcomes), first_messages(outcomes)
            return LoadResult(name, self._settings.model, options, load, summary, messages, peak)

        self._outcomes, self._result = outcomes, result
        self._progress.advance(0, label)
        await load.put_on(
            target,
            workload,
            outcomes,
            lambda: self._progress.advance(1, label),
            self._settings.mix.seed,
        )
        self._result = None
        self._keep(result())

    def _cut(self, ratio: float | None) -> Cut:
        """How prompts are cut to their number of tokens."""
        if self._settings.tokenizer_of is None or self._settings.mix.context is None:
            return by_ratio(ratio or _USUAL_RATIO)
        tokenizer = describe(self._settings.tokenizer_of).tokenizer

        def cut(text: str, tokens: int) -> str:
            found = tokenizer(text, return_offsets_mapping=True, verbose=False)
            ends = [end for _, end in found["offset_mapping"]]
            return text[: ends[min(tokens, len(ends)) - 1]]

        return cut
