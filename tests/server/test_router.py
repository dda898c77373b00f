"""Requests handed on: what a client sees when the process that answers is lost."""

import asyncio
import json

import httpx2 as httpx
import pytest
from starlette.responses import JSONResponse, StreamingResponse

from h2okv.cluster.router import ReplicaLostError, Router, messages_of
from h2okv.engine.outputs import QueueFullError


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("h2okv.cluster.router._PAUSE", 0.0)


async def complete(scope, receive, send):
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


class Replicas:
    """Replicas of an application; each request gets the next one.

    Attributes:
        plan: For each of them the application and after how many messages it dies, if it does.
        closed: Requests whose answer was ended.
    """

    def __init__(self, *plan):
        self.plan = list(plan)
        self.num_requests = 0
        self.closed = 0

    async def ask(self, scope, body):
        app, lives = self.plan[min(self.num_requests, len(self.plan) - 1)]
        self.num_requests += 1
        count = 0
        try:
            async for messages in messages_of(app, scope, body):
                for message in messages:
                    if lives is not None and count >= lives:
                        raise ReplicaLostError
                    count += 1
                    yield [message]
        finally:
            self.closed += 1


@pytest.fixture
def call():
    """Sends one request through a router to some replicas."""

    def send(replicas, timeout=5.0, body="hello"):
        router = Router(replicas.ask, timeout)

        async def run():
            transport = httpx.ASGITransport(app=router)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                return await client.post("/v1/completions", content=body)

        return asyncio.run(run()), router

    return send


@pytest.mark.parametrize(
    ("app", "kind", "text"),
    [(complete, "application/json", '{"path":"/v1/completions","body":"hello"}'),
     (streamed, "text/event-stream", "".join(f"data: {number}\n\n" for number in range(4)))],
)  # fmt: skip
def test_unstarted_response_is_retried_on_another_replica(call, app, kind, text):
    for plan, retried in (((), 0), (((app, 0),) * 2, 2), (((app, 1),) * 2, 2)):
        replicas = Replicas(*plan, (app, None))
        answer, router = call(replicas)
        assert (answer.status_code, answer.text) == (200, text)
        assert answer.headers["content-type"].startswith(kind)
        assert (router.retried, router.broken) == (retried, 0)
        assert replicas.closed == retried + 1


def test_started_stream_ends_with_an_error(call):
    replicas = Replicas((streamed, 3), (streamed, None))
    answer, router = call(replicas)
    *events, last = answer.text.removesuffix("\n\n").split("\n\n")
    assert events == ["data: 0", "data: 1"]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert replicas.num_requests == 1
    assert (router.retried, router.broken) == (0, 1)


def test_stopped_replica_is_skipped(call):
    answer, router = call(Replicas((stopped, None), (complete, None)))
    assert answer.status_code == 200
    assert router.retried == 1


def test_loss_of_all_replicas(call):
    answer, router = call(Replicas((complete, 0)))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "replica_lost"
    assert answer.headers["retry-after"] == "5"
    answer, _ = call(Replicas((stopped, None)))
    assert (answer.status_code, answer.json()) == (503, {"error": "stopped"})


def test_full_queues_of_all_replicas(call):
    class Full:
        async def ask(self, scope, body):
            raise QueueFullError(7, 3.2)
            yield

    answer, _ = call(Full())
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "4"
    assert answer.json()["error"]["code"] == "queue_full"


def test_a_request_that_takes_too_long(call, monkeypatch):
    monkeypatch.setattr("h2okv.cluster.router._GRACE", 0.0)

    async def slow(scope, receive, send):
        await asyncio.sleep(60)

    replicas = Replicas((slow, None))
    answer, _ = call(replicas, timeout=0.05)
    assert answer.status_code == 504
    assert replicas.closed == 1


def test_disconnected_client_cancels_the_request():
    ended = []

    async def endless(scope, receive, send):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(scope["path"])

    replicas = Replicas((endless, None))
    incoming = [{"type": "http.request", "body": b""}, {"type": "http.disconnect"}]

    async def receive():
        return incoming.pop(0)

    async def send(message):
        raise AssertionError("no client is connected")

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}

    async def run():
        async with asyncio.timeout(5):
            await Router(replicas.ask, 60)(scope, receive, send)

    asyncio.run(run())
    assert ended == ["/"]
    assert replicas.closed == 1
