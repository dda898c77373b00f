"""Work that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from starlette.types import Receive

Result = TypeVar("Result")
Item = TypeVar("Item")


class ClientGoneError(Exception):
    """The client closed its connection, so nobody waits for the answer."""


async def while_present(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Does some work, and drops it at once if the client goes away.

    Args:
        receive: Of a request whose body has been read.
        work: Cancelled if the client goes.

    Returns:
        What the work returns.

    Raises:
        ClientGoneError: If the client goes.
        Exception: What the work raises.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_departure(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def closed_after(stream: AsyncIterator[Item]) -> AsyncIterator[AsyncIterator[Item]]:
    """Closes an asynchronous generator when the block is left, whichever way."""
    try:
        yield stream
    finally:
        if hasattr(stream, "aclose"):
            await cast("AsyncGenerator[Item, None]", stream).aclose()
