"""How clients send their requests: each waiting for its answer, or as they come."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from h2okv.benchmarking.load.outcome import LoadRequest, Outcome


class Target(Protocol):
    """Whatever answers requests."""

    async def send(self, request: LoadRequest, due: float, outcomes: list[Outcome]) -> None:
        """Sends a request and waits for the end of its answer.

        Args:
            request: What to ask.
            due: When it was to be sent, on the clock of `time.perf_counter`.
            outcomes: Gets what became of it, also if this is cancelled; mutated.
        """
        ...


Done = Callable[[], None]


def no_step() -> None:
    """Counts nothing."""


async def closed_loop(
    target: Target,
    requests: Sequence[LoadRequest],
    clients: int,
    outcomes: list[Outcome],
    done: Done = no_step,
) -> None:
    """So many clients, each of which sends its next request when it has its answer.

    Args:
        target: Who answers.
        requests: All that is to be sent, in this order.
        clients: How many are under way at any time.
        outcomes: Gets what became of each; mutated.
        done: Called after each.

    Raises:
        ValueError: If there are no clients.
    """
    if clients < 1:
        raise ValueError(f"--clients {clients} is too few; give 1 or more")
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
    done: Done = no_step,
    seed: int = 0,
) -> None:
    """Requests that come when they come, however long earlier ones take.

    Args:
        target: Who answers.
        requests: All that is to be sent, in this order.
        rate: Requests for each second on average; the times between them are exponentially
            distributed (a Poisson process).
        outcomes: Gets what became of each; mutated.
        done: Called after each.
        seed: Of the times.

    Raises:
        ValueError: If the rate is not positive.
    """
    start = time.perf_counter()

    async def at(due: float, request: LoadRequest) -> None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await target.send(request, due, outcomes)
        done()

    async with asyncio.TaskGroup() as group:
        for after, request in zip(arrival_times(rate, seed), requests, strict=False):
            group.create_task(at(start + after, request))


def arrival_times(rate: float, seed: int) -> Iterator[float]:
    """Draws when requests come, in seconds from the start, without end.

    Args:
        rate: Requests for each second on average.
        seed: Of the draws.

    Raises:
        ValueError: If the rate is not positive.
    """
    if not rate > 0:
        raise ValueError(f"--rate {rate:g} is too low; give requests a second, such as 5")
    source = random.Random(seed)
    now = 0.0
    while True:
        now += source.expovariate(rate)
        yield now
