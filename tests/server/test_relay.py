"""Requests handed on: what a client sees when the process that answers is lost."""

import asyncio
import json

import httpx2 as httpx
import pytest
from starlette.responses import JSONResponse, StreamingResponse

from h2okv.cluster import router as relay
from h2okv.cluster.router import CopyLostError, Relay, RelayCounts, messages_of
from h2okv.engine.outputs import QueueFullError


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(relay, "_PAUSE", 0.0)


async def whole(scope, receive, send):
    body = (await receive())["body"]
    await JSONResponse({"path": scope["path"], "body": body.decode()})(scope, receive, send)


async def streamed(scope, receive, send):
    async def events():
        for number in range(4):
            yield f"data: {number}\n\n"
            await asyncio.sleep(0)

    await StreamingResponse(events(), media_type="text/event-stream")(scope, receive, send)


async def stopped(scope, receive, send):
    await JSONResponse({"error": "stopped"}, 503)(scope, receive, send)


class Copies:
    """Copies of an application; each request gets the next one.

    Attributes:
        plan: For each of them the application and after how many messages it dies, if it does.
        closed: Requests whose answer was ended.
    """

    def __init__(self, *plan):
        self.plan = list(plan)
        self.asked = 0
        self.closed = 0

    async def ask(self, scope, body):
        app, lives = self.plan[min(self.asked, len(self.plan) - 1)]
        self.asked += 1
        count = 0
        try:
            async for messages in messages_of(app, scope, body):
                for message in messages:
                    if lives is not None and count >= lives:
                        raise CopyLostError
                    count += 1
                    yield [message]
        finally:
            self.closed += 1


@pytest.fixture
def call():
    """Sends one request through a relay to some copies."""

    def send(copies, timeout=5.0, body="hello"):
        counts = RelayCounts()
        app = Relay(copies.ask, timeout, counts)

        async def run():
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                return await client.post("/v1/completions", content=body)

        return asyncio.run(run()), counts

    return send


def test_an_answer_comes_through_as_it_is(call):
    answer, counts = call(Copies((whole, None)))
    assert answer.json() == {"path": "/v1/completions", "body": "hello"}
    assert (counts.retried, counts.broken) == (0, 0)


def test_a_stream_comes_through_as_it_is(call):
    answer, _ = call(Copies((streamed, None)))
    assert answer.text == "data: 0\n\ndata: 1\n\ndata: 2\n\ndata: 3\n\n"
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("lives", [0, 1])
@pytest.mark.parametrize("app", [whole, streamed])
def test_what_has_not_begun_is_asked_of_another_copy(call, app, lives):
    expected, _ = call(Copies((app, None)))
    copies = Copies((app, lives), (app, lives), (app, None))
    answer, counts = call(copies)
    assert (answer.status_code, answer.text) == (200, expected.text)
    assert (counts.retried, counts.broken) == (2, 0)
    assert copies.closed == 3


def test_a_stream_that_has_begun_ends_with_an_error(call):
    copies = Copies((streamed, 3), (streamed, None))
    answer, counts = call(copies)
    *events, last = answer.text.removesuffix("\n\n").split("\n\n")
    assert events == ["data: 0", "data: 1"]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert copies.asked == 1
    assert (counts.retried, counts.broken) == (0, 1)


def test_a_copy_that_has_stopped_is_left(call):
    answer, counts = call(Copies((stopped, None), (whole, None)))
    assert answer.status_code == 200
    assert counts.retried == 1


def test_all_copies_are_lost(call):
    answer, counts = call(Copies((whole, 0)))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "replica_lost"
    assert answer.headers["retry-after"] == "5"
    answer, _ = call(Copies((stopped, None)))
    assert (answer.status_code, answer.json()) == (503, {"error": "stopped"})


def test_no_room(call):
    class Full:
        async def ask(self, scope, body):
            raise QueueFullError(7, 3.2)
            yield

    answer, _ = call(Full())
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "4"
    assert answer.json()["error"]["code"] == "queue_full"


def test_a_request_that_takes_too_long(call, monkeypatch):
    monkeypatch.setattr(relay, "_GRACE", 0.0)

    async def slow(scope, receive, send):
        await asyncio.sleep(60)

    copies = Copies((slow, None))
    answer, _ = call(copies, timeout=0.05)
    assert answer.status_code == 504
    assert copies.closed == 1


def test_a_client_that_goes_away_ends_the_work():
    ended = []

    async def endless(scope, receive, send):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(scope["path"])

    copies = Copies((endless, None))
    incoming = [{"type": "http.request", "body": b""}, {"type": "http.disconnect"}]

    async def receive():
        return incoming.pop(0)

    async def send(message):
        raise AssertionError("nobody is there")

    scope = {"method": "POST", "path": "/", "headers": []}

    async def run():
        async with asyncio.timeout(5):
            await Relay(copies.ask, 60, RelayCounts())(scope, receive, send)

    asyncio.run(run())
    assert ended == ["/"]
    assert copies.closed == 1
