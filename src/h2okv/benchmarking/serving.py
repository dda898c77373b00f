"""Servers under load: which ones, how they are started, and the loads put on them in turn."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import IO, Any
from urllib.error import URLError
from urllib.request import urlopen

import torch

from h2okv.benchmarking.results import load_label
from h2okv.benchmarking.serving_client import (
    Client,
    Load,
    Outcome,
    Workload,
    by_ratio,
    by_tokenizer,
    summarize,
)
from h2okv.console import Progress
from h2okv.engine.memory import peak_resident_bytes
from h2okv.integration.loading import describe
from h2okv.integration.models import default_dtype
from h2okv.records import unknown_name

OTHER_SERVERS = ("transformers", "sequential")
_UNSTRETCHED = 1024
"""Tokens that a prompt has at most which is sent as it is; an assumption, for the paged cache."""
# Common English in a common tokenizer, where a server does not count for us.
_USUAL_RATIO = 4.0
# Characters of the first request: enough to tell how many are a token, and no long prompt.
_PROBE = 600
# -P: nothing of the current folder is imported in place of an installed package.
_PYTHON = (sys.executable, "-P", "-m")
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Server:
    """A server to measure: one that runs at a URL, or one that a command line starts.

    ``{port}`` in a word becomes the port; ``model`` is the name that requests must give, ``None``
    if the server tells; ``options`` are remarks on how it was set up.
    """

    name: str
    url: str = ""
    words: tuple[str, ...] = ()
    model: str | None = None
    options: str = ""

    @asynccontextmanager
    async def running(self, patience: float = 180.0) -> AsyncIterator[tuple[str, int | None]]:
        """Starts it if need be, waits until it answers, and stops it; its URL and process."""
        if not self.words:
            yield self.url, None
            return
        port = free_port()
        url = f"http://{_HOST}:{port}"
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [word.replace("{port}", str(port)) for word in self.words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"HF_HUB_OFFLINE": "1", **os.environ},
                # Ctrl-C is for this program, which then stops the server itself.
                start_new_session=True,
            )
            try:
                await self._answering(url, process, log, time.monotonic() + patience)
                yield url, process.pid
            finally:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    async def _answering(
        self, url: str, process: subprocess.Popen[bytes], log: IO[bytes], end: float
    ) -> None:
        while not await asyncio.to_thread(_is_healthy, url):
            reason = ""
            if process.poll() is not None:
                reason = f"ended with code {process.returncode}"
            elif time.monotonic() > end:
                reason = "does not answer"
            if reason:
                log.seek(0)
                lines = log.read().decode("utf-8", "replace").split("\n")
                told = [line.strip() for line in lines if line.strip()]
                raise ValueError(
                    f"the server {self.name!r} {reason}"
                    f" ({' / '.join(told[-2:])[-400:] or 'it said nothing'}); start it by hand to"
                    " see why, and give its --url"
                )
            await asyncio.sleep(0.2)


def free_port() -> int:
    """Returns a port of this machine on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _is_healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, OSError, ValueError):
        return False


def paged_blocks(clients: int, tokens: int, page: int) -> int:
    """Blocks of a paged cache for so many clients, and a tenth that the scheduler keeps free."""
    return -(-clients * -(-tokens // page) * 11 // 10) + 1


def own_server(model: str, options: Sequence[str] = ()) -> Server:
    """`h2okv serve`."""
    words = (*_PYTHON, "h2okv.cli", "serve", "--model", model, "--port", "{port}", *options)
    return Server("h2okv", words=words, options=" ".join(options))


def transformers_server(folder: str, dtype: str, device: str, blocks: int | None) -> Server:
    """`transformers serve`, with continuous batching or, without, one request after another."""
    words = (
        *_PYTHON, "transformers.cli.transformers", "serve", folder, "--dtype", dtype,
        "--device", device, "--attn-implementation", "sdpa", "--host", _HOST, "--port", "{port}",
    )  # fmt: skip
    if blocks is None:
        return Server("sequential", words=words, model=folder, options="transformers serve")
    chosen = (
        "--continuous-batching", "--cb-block-size", "256", "--cb-num-blocks", str(blocks),
        "--cb-max-batch-tokens", "1024",
    )  # fmt: skip
    return Server("transformers", words=words + chosen, model=folder, options=" ".join(chosen))


def choose_servers(
    url: str | None,
    model: str | None,
    others: Sequence[str],
    served_name: str | None,
    serve_options: str,
    device: str,
    loads: Sequence[Load],
    workload: Workload,
) -> tuple[Server, ...]:
    """Finds out which servers to measure: a running one, or one to start and others beside it."""
    if (url is None) == (model is None):
        raise ValueError(
            "give either --url of a running server or --model, for which one is started"
        )
    for name in others:
        if name not in OTHER_SERVERS:
            raise unknown_name("--against", name, OTHER_SERVERS)
    if url is not None:
        if others or serve_options:
            raise ValueError("--against and --serve-options go with --model, not with --url")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url {url!r} is no URL; give one such as http://127.0.0.1:8000")
        url = url.rstrip("/").removesuffix("/v1")
        return (Server(url, url, model=served_name),)
    assert model is not None
    options = [*shlex.split(serve_options), *(("--device", device) if device != "auto" else ())]
    servers = [own_server(model, options)]
    if others:
        longest = _UNSTRETCHED if workload.context is None else workload.context[1]
        clients = max(load.clients or load.requests for load in loads)
        blocks = paged_blocks(clients, longest + workload.most_new_tokens, 256)
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = default_dtype(model, auto if device == "auto" else device)
        dtype_word = "auto" if dtype is None else str(dtype).removeprefix("torch.")
        source = describe(model).source
        for name in others:
            own = blocks if name == "transformers" else None
            servers.append(transformers_server(source, dtype_word, device, own))
    return tuple(servers)


@dataclass
class ServeRun:
    """Measures every load on every server; what was measured before Ctrl-C is not lost.

    ``tokenizer_of`` is the model whose tokenizer cuts prompts, ``None`` to go by the server's
    count; ``warmup`` requests come before the first load of a server; ``keep`` takes each row as it
    comes.
    """

    servers: Sequence[Server]
    model: str
    tokenizer_of: str | None
    workload: Workload
    loads: Sequence[Load]
    warmup: int
    client: Mapping[str, Any]
    keep: Callable[[dict[str, Any]], None]
    progress: Progress
    _unfinished: Callable[[], dict[str, Any]] | None = None

    async def all(self) -> None:
        """Measures every server."""
        for server in self.servers:
            self.progress.advance(0, f"{server.name}: starting")
            async with (
                server.running() as (url, process),
                Client(url, server.model, **self.client) as client,
            ):
                await self._one(server, client, process)

    def keep_unfinished(self) -> bool:
        """Keeps what the load that was interrupted gave; whether it gave anything."""
        row = self._unfinished and self._unfinished()
        if not row or not row["requests"]:
            return False
        self.keep(row)
        return True

    async def _one(self, server: Server, client: Client, process: int | None) -> None:
        ratio = await client.connect(self.workload.texts[0][:_PROBE])
        cut = by_ratio(ratio or _USUAL_RATIO)
        if self.tokenizer_of is not None and self.workload.context is not None:
            cut = by_tokenizer(self.tokenizer_of)
        first = [self.workload.request(10**6 + number, cut) for number in range(self.warmup)]
        await Load(max(1, self.warmup), None, self.warmup).run(client, first, [])
        for load in self.loads:
            outcomes: list[Outcome] = []
            label = f"{server.name}: {load_label(vars(load))}"

            def row(load: Load = load, outcomes: list[Outcome] = outcomes) -> dict[str, Any]:
                own = {"server": server.name, "model": self.model, "settings": server.options}
                peak = process and peak_resident_bytes(process)
                return own | summarize(outcomes, load) | {"peak_bytes": peak}

            def done(label: str = label) -> None:
                self.progress.advance(1, label)

            self._unfinished = row
            self.progress.advance(0, label)
            requests = [self.workload.request(number, cut) for number in range(load.requests)]
            await load.run(client, requests, outcomes, done, self.workload.seed)
            self._unfinished = None
            self.keep(row())
