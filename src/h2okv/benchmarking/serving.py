"""Servers under load: which ones, how to start them, and the loads in turn."""

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
from functools import partial
from typing import IO, Any
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
"""Assumed maximum tokens of a prompt that is sent unchanged, for the size of the paged cache."""
# English text in a common tokenizer, for servers that report no token counts.
_USUAL_RATIO = 4.0
# Characters of the first request: enough to estimate the ratio, and still a short prompt.
_PROBE = 600
# -P: do not import from the current folder.
_PYTHON = (sys.executable, "-P", "-m")
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Server:
    """A server to measure: at a URL, or started by a command."""

    name: str
    url: str = ""
    command: tuple[str, ...] = ()  # "{port}" is replaced by the port
    model: str | None = None  # the name for requests; None to ask the server
    options: str = ""  # a note on its configuration

    @asynccontextmanager
    async def running(self, patience: float = 180.0) -> AsyncIterator[tuple[str, int | None]]:
        """Start it if needed, wait until it is healthy, and stop it; yield URL and process."""
        if not self.command:
            yield self.url, None
            return
        port = free_port()
        url = f"http://{_HOST}:{port}"
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [word.replace("{port}", str(port)) for word in self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"HF_HUB_OFFLINE": "1", **os.environ},
                # Ctrl-C must not reach the server: this program stops it.
                start_new_session=True,
            )
            try:
                end = time.monotonic() + patience
                while not await asyncio.to_thread(_is_healthy, url):
                    code = process.poll()
                    if code is not None or time.monotonic() > end:
                        raise self._failure(code, log)
                    await asyncio.sleep(0.2)
                yield url, process.pid
            finally:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _failure(self, code: int | None, log: IO[bytes]) -> ValueError:
        log.seek(0)
        lines = log.read().decode("utf-8", "replace").split("\n")
        tail = " / ".join([line.strip() for line in lines if line.strip()][-2:])[-400:]
        reason = "does not answer" if code is None else f"ended with code {code}"
        return ValueError(
            f"the server {self.name!r} {reason} ({tail or 'no output'}); start it by hand to"
            " see why, and give its --url"
        )


def free_port() -> int:
    """Return a port of this machine on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _is_healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def paged_blocks(clients: int, tokens: int, page: int) -> int:
    """Return the blocks of a paged cache for all clients, with a reserve of a tenth."""
    return -(-clients * -(-tokens // page) * 11 // 10) + 1


def h2okv_server(model: str, options: Sequence[str] = ()) -> Server:
    """Return `h2okv serve`."""
    command = (*_PYTHON, "h2okv", "serve", "--model", model, "--port", "{port}", *options)
    return Server("h2okv", command=command, options=" ".join(options))


def transformers_server(folder: str, dtype: str, device: str, blocks: int | None) -> Server:
    """Return `transformers serve`, with continuous batching if ``blocks`` is given."""
    command = (
        *_PYTHON, "transformers.cli.transformers", "serve", folder, "--dtype", dtype,
        "--device", device, "--attn-implementation", "sdpa", "--host", _HOST, "--port", "{port}",
    )  # fmt: skip
    if blocks is None:
        return Server("sequential", command=command, model=folder, options="transformers serve")
    chosen = (
        "--continuous-batching", "--cb-block-size", "256", "--cb-num-blocks", str(blocks),
        "--cb-max-batch-tokens", "1024",
    )  # fmt: skip
    return Server("transformers", command=command + chosen, model=folder, options=" ".join(chosen))


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
    """Return the servers to measure: a running one, or those to start."""
    if (url is None) == (model is None):
        raise ValueError("give either --url of a running server or --model to start one")
    for name in others:
        if name not in OTHER_SERVERS:
            raise unknown_name("--against", name, OTHER_SERVERS)
    if url is not None:
        if others or serve_options:
            raise ValueError("--against and --serve-options go with --model, not with --url")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url must be a URL such as http://127.0.0.1:8000, got {url!r}")
        url = url.rstrip("/").removesuffix("/v1")
        return (Server(url, url, model=served_name),)
    assert model is not None
    serve_arguments = [
        *shlex.split(serve_options),
        *(("--device", device) if device != "auto" else ()),
    ]
    servers = [h2okv_server(model, serve_arguments)]
    if others:
        longest = _UNSTRETCHED if workload.context is None else workload.context[1]
        clients = max(load.clients or load.requests for load in loads)
        blocks = paged_blocks(clients, longest + workload.max_new_tokens, 256)
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = str(default_dtype(model, auto if device == "auto" else device) or "auto")
        for name in others:
            num_blocks = blocks if name == "transformers" else None
            options = describe(model).source, dtype.removeprefix("torch."), device
            servers.append(transformers_server(*options, num_blocks))
    return tuple(servers)


@dataclass
class ServeRun:
    """A measurement of every load on every server; Ctrl-C keeps the finished ones."""

    servers: Sequence[Server]
    model: str | None  # its tokenizer truncates prompts; None: by the server's counts
    workload: Workload
    loads: Sequence[Load]
    warmup: int  # requests before the first load of a server
    client: Mapping[str, Any]
    keep: Callable[[dict[str, Any]], None]  # receives each row when it is complete
    progress: Progress

    async def all(self) -> None:
        """Measure every server."""
        for server in self.servers:
            self.progress.advance(0, f"{server.name}: starting")
            async with (
                server.running() as (url, process),
                Client(url, server.model, **self.client) as client,
            ):
                await self._measure(server, client, process)

    async def _measure(self, server: Server, client: Client, process: int | None) -> None:
        workload = self.workload
        cut = by_ratio(await client.connect(workload.texts[0][:_PROBE]) or _USUAL_RATIO)
        if self.model is not None and workload.context is not None:
            cut = by_tokenizer(self.model)
        first = [workload.request(10**6 + number, cut) for number in range(self.warmup)]
        await Load(max(1, self.warmup), None, self.warmup).run(client, first, [])
        for load in self.loads:
            outcomes: list[Outcome] = []
            label = f"{server.name}: {load_label(vars(load))}"
            self.progress.advance(0, label)
            done = partial(self.progress.advance, 1, label)
            requests = [workload.request(number, cut) for number in range(load.requests)]
            try:
                await load.run(client, requests, outcomes, done, workload.seed)
            finally:  # also after an interrupted load
                names = {"server": server.name, "model": self.model or server.model or ""}
                row = {**names, "settings": server.options, **summarize(outcomes, load)}
                row["peak_bytes"] = process and peak_resident_bytes(process)
                if outcomes:
                    self.keep(row)
