"""Servers that are started for one measurement and stopped after it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.error import URLError
from urllib.request import urlopen

_HOST = "127.0.0.1"
# -P: nothing of the current folder is imported in place of an installed package.
_PYTHON = (sys.executable, "-P", "-m")
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
    """`h2okv serve`.

    Args:
        model: A folder, a Hub id, or the bundled model's name.
        options: Further options of that command.

    Returns:
        The command.
    """
    words = (*_PYTHON, "h2okv.cli", "serve", "--model", model, "--port", "{port}")
    return Command("h2okv", (*words, *options), options=" ".join(options))


def transformers_server(
    folder: str, dtype: str, device: str, size: PagedSize | None, batch_tokens: int = 1024
) -> Command:
    """`transformers serve`, with continuous batching or, without, one request after another.

    Args:
        folder: The model.
        dtype: Of weights and cache.
        device: Such as ``"cpu"``.
        size: Of the paged cache; ``None`` for no continuous batching: every request runs through
            `generate`, alone.
        batch_tokens: The most tokens of a step. Its attention mask has so many rows, each as long
            as the whole cache.

    Returns:
        The command.
    """
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
    """A server in a process of its own; `async with` starts it, waits for it and stops it.

    Args:
        command: How to start it.
        patience: Seconds that it may take to answer.
    """

    def __init__(self, command: Command, patience: float = 180.0) -> None:
        self.command = command
        self.url = ""
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    async def __aenter__(self) -> ChildServer:
        """Starts it.

        Raises:
            ValueError: If it ends, or does not answer in time.
        """
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
