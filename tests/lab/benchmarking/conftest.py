"""A tiny model with random weights, and a server that answers as it is told."""

import asyncio
import importlib
import json
import sys
import threading
from pathlib import Path

import pytest
import torch

from h2okv_lab.benchmarking.model import ModelSource, parse_shape

try:
    from aiohttp import web
except ImportError:
    web = None

SIZES = "hidden=64,layers=2,heads=4,kv_heads=2,intermediate=96,vocab=300,window=1024"


@pytest.fixture
def import_benchmark(monkeypatch):
    """Return a function that imports a script of ``benchmarks/`` and what stands beside it."""
    folder = Path(__file__).resolve().parents[3] / "benchmarks"
    if not folder.is_dir():
        pytest.skip("the benchmarks are not beside these tests")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return importlib.import_module


@pytest.fixture(scope="session")
def source() -> ModelSource:
    return parse_shape(SIZES)


@pytest.fixture(scope="session")
def build(source):
    """Build the model; shared by all tests, which set its attention before they use it."""
    models = {}

    def make(dtype=torch.float32):
        if dtype not in models:
            models[dtype] = source.build(dtype, torch.device("cpu"))
        return models[dtype]

    return make


class FakeServer:
    """A server that answers with `max_tokens` chunks, in a thread; `with` starts and stops it.

    Attributes:
        first, gap: Seconds before the first piece, and between two.
        tells_usage: Whether it counts tokens for its clients.
        knows_options: Whether it takes `stream_options`, or refuses it as older servers do.
        faults: What happens to the requests of these numbers, counted from 0.
        bodies: All requests that came.
    """

    def __init__(self, first=0.0, gap=0.0, tells_usage=True, knows_options=True, faults=None):
        self.first, self.gap = first, gap
        self.tells_usage, self.knows_options = tells_usage, knows_options
        self.faults = faults or {}
        self.bodies = []
        self.keys = []
        self.running = self.most_running = 0

    def __enter__(self):
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(20)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    def _run(self, ready):
        asyncio.run(self._serve(ready))

    async def _serve(self, ready):
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request):
        return web.json_response({"object": "list", "data": [{"id": "the-model"}]})

    async def _answer(self, request):
        body = await request.json()
        self.keys.append(request.headers.get("Authorization"))
        if "stream_options" in body and not self.knows_options:
            return web.json_response({"error": {"message": "unknown field"}}, status=422)
        number = len(self.bodies)
        self.bodies.append(body)
        fault = self.faults.get(number)
        if isinstance(fault, int):
            return web.json_response({"error": {"message": "too much"}}, status=fault)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(request, body, fault)
        finally:
            self.running -= 1

    async def _stream(self, request, body, fault):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = "messages" in body
        if is_chat:
            await self._send(response, {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        await asyncio.sleep(self.first)
        for number in range(body["max_tokens"]):
            if number:
                await asyncio.sleep(self.gap)
            if number == 1 and fault == "cut":
                return response
            if number == 1 and fault == "told":
                await self._send(response, {"error": {"message": "NaN"}})
                return response
            if number == 1 and fault == "nonsense":
                await response.write(b"data: {never closed\n\n")
                return response
            if number == 1 and fault == "hang":
                await asyncio.sleep(60)
            if number == 1 and fault == "reset":
                request.transport.abort()
                return response
            choice = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": "a "}} if is_chat else {"text": "a "}
            await self._send(response, {"choices": [choice]})
        last = {"choices": [{"index": 0, "finish_reason": "length"} | self._nothing(is_chat)]}
        await self._send(response, last)
        if self.tells_usage and body.get("stream_options", {}).get("include_usage"):
            prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
            # This server's tokens are five characters long.
            usage = {"prompt_tokens": len(prompt) // 5, "completion_tokens": body["max_tokens"]}
            await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _nothing(self, is_chat):
        return {"delta": {}} if is_chat else {"text": ""}

    async def _send(self, response, event):
        await response.write(f"data: {json.dumps(event)}\n\n".encode())


@pytest.fixture(scope="session")
def fake_server():
    """Return the class; its arguments say how the server answers."""
    return FakeServer
