import asyncio
import http.client
import json
import logging
import socket
import time
import urllib.error
import urllib.request
from functools import partial

import openai
import pytest
import uvicorn

from h2okv.engine.outputs import RequestFailedError
from h2okv.prompts.readers import PromptLimits
from h2okv.server.errors import LOG

PROMPT = "It was a bright morning, and the"
LONG = {"model": "fake", "prompt": PROMPT, "max_tokens": 1000}


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.fixture
def slow(fake):
    fake.pause = 0.02
    return fake


def send(served, body, path="/v1/completions"):
    """Sends a request and leaves the connection open."""
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize(
    ("streams", "pause"),
    [(False, 0.02), (True, 0.02), (True, 60)],
    ids=["whole", "stream", "before the first token"],
)
@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "a b"]], ids=["one prompt", "two"])
def test_disconnected_client_frees_its_slots(serve, slow, streams, pause, prompt):
    slow.pause = pause
    served = serve(slow)
    connection = send(served, {**LONG, "stream": streams, "prompt": prompt})
    wait_until(lambda: slow.running == (1 if prompt is PROMPT else 2))
    if streams and pause < 1:
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
    connection.close()
    wait_until(lambda: slow.running == 0, 1.0)
    assert slow.counts["aborted"] == (1 if prompt is PROMPT else 2)
    assert slow.counts["finished"] == 0


def test_full_queue_is_429_with_retry_after(serve, slow):
    slow.max_num_seqs, slow.max_waiting = 2, 2
    served = serve(slow)
    connections = [send(served, LONG) for _ in range(4)]
    wait_until(lambda: slow.running == 4)
    for streams in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            served.client().completions.create(**LONG, stream=streams)
        assert caught.value.response.headers["Retry-After"] == "3"  # 2.5 s, in whole seconds
        assert caught.value.body["code"] == "queue_full"
    assert slow.running == 4
    for connection in connections:
        connection.close()
    wait_until(lambda: slow.running == 0)
    slow.pause = 0
    assert served.client().completions.create(**{**LONG, "max_tokens": 3}).usage


def test_full_queue_refuses_all_prompts_of_a_request(serve, slow):
    slow.max_num_seqs, slow.max_waiting = 1, 1
    served = serve(slow)
    with pytest.raises(openai.RateLimitError):
        served.client().completions.create(**{**LONG, "prompt": ["a", "b", "c"]})
    wait_until(lambda: slow.running == 0, 1.0)


def test_openai_client_retries_after_429(serve, slow):
    slow.max_num_seqs, slow.max_waiting, slow.pause, slow.retry_after = 1, 0, 0.1, 0.5
    served = serve(slow)
    connection = send(served, {**LONG, "max_tokens": 3})
    wait_until(lambda: slow.running == 1)
    answer = served.client(max_retries=2).completions.create(**{**LONG, "max_tokens": 2})
    assert answer.usage.completion_tokens == 2
    connection.close()


def test_timeout_is_504(serve, fake):
    fake.pause = 60
    served = serve(fake, timeout=0.2)
    for streams in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            served.client().completions.create(**LONG, stream=streams)
        assert caught.value.status_code == 504 and caught.value.body["code"] == "timeout"
        assert "longer than 0.2 s" in caught.value.body["message"]
        assert fake.running == 0


def test_error_of_a_started_stream_is_an_event(serve, slow):
    served = serve(slow, timeout=0.3)
    stream = served.client().completions.create(**LONG, stream=True)
    texts = []
    with pytest.raises(openai.APIError, match="longer than 0.3 s") as caught:
        for chunk in stream:
            texts.append(chunk.choices[0].text)
    assert texts and caught.value.code == "timeout"
    assert slow.running == 0


def test_unfinished_body_times_out(serve, fake):
    served = serve(fake, timeout=0.2)
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 504


@pytest.mark.parametrize("at", [0, 3], ids=["at once", "on the way"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_failed_request_leaves_others_unchanged(serve, slow, at, streams):
    served = serve(slow)
    client = served.client()

    async def neighbours():
        async with served.client(openai.AsyncOpenAI) as others:
            completions = [
                others.completions.create(model="fake", prompt=PROMPT, max_tokens=15)
                for _ in range(2)
            ]
            running = [asyncio.create_task(completion) for completion in completions]
            while slow.running < 2:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(fail)
            return [answer.usage.completion_tokens for answer in await asyncio.gather(*running)]

    def fail():
        failing = type(slow)(slow.tokenizer)
        failing.failing[at] = RequestFailedError("the logits are not finite; ask again.")
        slow.generate, generate = failing.generate, slow.generate
        try:
            with pytest.raises(openai.APIError, match="the logits are not finite") as caught:
                got = client.completions.create(**LONG, stream=streams)
                if streams:
                    list(got)
        finally:
            slow.generate = generate
        if not (streams and at):
            assert caught.value.status_code == 500
        assert caught.value.body["code"] == "request_failed"

    assert asyncio.run(neighbours()) == [15, 15]


@pytest.fixture
def log(caplog, monkeypatch):
    """Capture the server's log, even if other packages have disabled its logger."""
    monkeypatch.setattr(LOG, "disabled", False)
    monkeypatch.setattr(LOG, "propagate", False)
    caplog.set_level(logging.ERROR, LOG.name)
    LOG.addHandler(caplog.handler)
    yield caplog
    LOG.removeHandler(caplog.handler)


def test_internal_error_reveals_no_details(serve, fake, log):
    fake.failing[0] = KeyError("/a/secret/path")
    with pytest.raises(openai.InternalServerError) as caught:
        serve(fake).client().completions.create(**LONG)
    body = caught.value.body
    assert "secret" not in str(body) and "log has the details" in body["message"]
    assert "/a/secret/path" in log.text


def test_stopped_engine_is_503(served, fake):
    fake.is_healthy = False
    for streams in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            served.client().completions.create(**LONG, stream=streams)
        assert caught.value.status_code == 503 and caught.value.body["code"] == "engine_stopped"


def test_shutdown_finishes_running_requests(start, slow):
    served = start(slow)
    connection = send(served, {**LONG, "max_tokens": 20})
    wait_until(lambda: slow.running == 1)
    served.stop()
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    assert answer.status == 200 and json.loads(answer.read())["usage"]["completion_tokens"] == 20
    with pytest.raises(ConnectionRefusedError):
        send(served, LONG)


def test_many_prompts_at_once_leave_the_server_responsive(serve, fake):
    # Reading a prompt of half a megabyte must not hold up the others.
    fake.limits = PromptLimits(len(fake.tokenizer), 10**6, 10**6)
    served = serve(fake)
    text = "word " * 100_000

    async def ask():
        async with served.client(openai.AsyncOpenAI) as client:
            big = asyncio.create_task(
                client.completions.create(model="fake", prompt=text, max_tokens=1)
            )
            answered = 0
            while not big.done():
                await client.completions.create(model="fake", prompt="a b", max_tokens=1)
                answered += 1
            await big
            return answered

    assert asyncio.run(ask()) > 1


def ends_within(connection, seconds):
    """Return what a connection sends before the server closes it."""
    connection.settimeout(seconds)
    data = b""
    while piece := connection.recv(4096):
        data += piece
    return data


@pytest.fixture
def impatient(monkeypatch):
    """Shorten what a server waits for, of ours and of uvicorn's; ask for it before the server."""
    monkeypatch.setattr("h2okv.server.launch.HEAD_SECONDS", 0.2)
    monkeypatch.setattr("h2okv.server.protocol.BODY_PAUSE", 0.2)
    monkeypatch.setattr("h2okv.server.errors._LINGER", 0.2)
    monkeypatch.setattr(uvicorn, "Config", partial(uvicorn.Config, timeout_keep_alive=0.2))


REQUEST = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize("head", [b"", REQUEST[:35], REQUEST[:8], REQUEST + REQUEST[:9]])
def test_half_a_head_does_not_hold_a_connection(impatient, served, head):
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(head)

        assert ends_within(connection, 10).count(b"200 OK") == head.count(REQUEST)


def test_half_a_body_does_not_hold_a_connection(impatient, served):
    path = "/v1/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert b"408" in ends_within(connection, 20).partition(b"\r\n")[0]


def test_a_body_that_is_nested_too_deeply(served):
    body = b'{"model": "fake", "messages": ' + b"[" * 300 + b"]" * 300 + b"}"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{served.address}/v1/chat/completions", body, headers, method="POST"
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    assert caught.value.code == 400
    assert "nested deeper than 200 levels" in caught.value.read().decode()
