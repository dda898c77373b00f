"""One server under several loads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from h2okv.benchmarking.load.loops import Target, closed_loop, open_loop
from h2okv.benchmarking.load.outcome import Outcome
from h2okv.benchmarking.load.summary import SUMMARY_COLUMNS, Summary
from h2okv.benchmarking.load.workload import Workload

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
    """Makes the loads that the options name, closed loops first.

    Args:
        clients: Of closed loops.
        rates: Of open loops.
        requests: In each; ``None`` for four for each client, and 30 seconds' worth of a rate.

    Raises:
        ValueError: If a number makes no sense.
    """
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
    """Sends one load and waits for its end.

    Args:
        target: Who answers.
        load: How requests come.
        workload: Which requests.
        outcomes: Gets what became of each; mutated.
        done: Called after each.
        seed: Of the times of an open loop.
    """
    requests = [workload.request(number) for number in range(load.requests)]
    if load.rate is None:
        assert load.clients is not None
        await closed_loop(target, requests, load.clients, outcomes, done)
    else:
        await open_loop(target, requests, load.rate, outcomes, done, seed)


async def warm_up(target: Target, workload: Workload, count: int) -> None:
    """Sends a few short requests that do not count, so that nothing is done for the first time.

    Args:
        target: Who answers.
        workload: Gives the requests; others than those that are measured.
        count: How many, all at once.
    """
    ignored: list[Outcome] = []
    requests = [workload.request(10**6 + number) for number in range(count)]
    async with asyncio.TaskGroup() as group:
        for request in requests:
            group.create_task(target.send(request, time.perf_counter(), ignored))
