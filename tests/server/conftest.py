"""A fake engine without tensors, and servers in threads and processes."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import openai
import pytest
from transformers import AutoTokenizer, LlamaConfig

from h2okv.assets import bundled_model_path
from h2okv.engine.agreement import AgreementReport
from h2okv.engine.outputs import (
    EngineStats,
    EngineStoppedError,
    KeptTokens,
    OutputDelta,
    PromptRead,
    QueueFullError,
    RequestFailedError,
    TokenLogprob,
)
from h2okv.prompts.images import ImageEncoder
from h2okv.prompts.readers import PromptLimits
from h2okv.server.app import make_app
from h2okv.server.config import ServerSettings
from h2okv.server.launch import Listener, open_port

MODEL = "fake"


class FakeEngine:
    """Continues a prompt with the prompt's own tokens, over and over.

    Attributes:
        image_encoder: That of a model of text.
        pause: Seconds before each token.
        is_held: Whether the next token waits until this is false again.
        running: Requests under way.
        requests: Prompt, parameters and budget of each request received.
        failing: Raised instead of the token with this number.
        ending: Finish reason of outputs.
    """

    def __init__(
        self, tokenizer, pause: float = 0.0, max_num_seqs: int = 4, max_waiting: int = 1000
    ):
        self.tokenizer, self.pause = tokenizer, pause
        self.image_encoder = ImageEncoder(LlamaConfig(), tokenizer, "fake")
        self.max_num_seqs, self.max_waiting = max_num_seqs, max_waiting
        self.limits, self.max_budget = PromptLimits(len(tokenizer), 2048, 2048), 400
        self.is_healthy, self.is_held, self.model_sampling = True, False, {}
        self.running = 0
        self.retry_after = 2.5
        self.ending = "length"
        self.requests = []
        self.failing: dict[int, Exception] = {}
        self.counts = dict.fromkeys(("new_tokens", "finished", "failed", "aborted"), 0)

    def agreement(self):
        return AgreementReport(0.0)

    async def generate(self, prompt, params, *, budget=None, kept_every=None, verify=False, kind):
        if not self.is_healthy:
            raise EngineStoppedError("the engine is shutting down.")
        if self.running >= self.max_num_seqs + self.max_waiting:
            raise QueueFullError(self.max_waiting, self.retry_after)
        prompt = prompt.token_ids
        self.requests.append((prompt, params, budget))
        self.running += 1
        outcome, num_new = "aborted", 0
        try:
            async for piece in self._pieces(prompt, params):
                is_due = kept_every and (piece.finish_reason or (num_new - 1) % kept_every == 0)
                if is_due and num_new:
                    kept_tokens = self._kept_tokens(len(prompt) + num_new)
                    piece = dataclasses.replace(piece, kept=kept_tokens)
                num_new += 1
                yield piece
            outcome = "finished"
        except RequestFailedError:
            outcome = "failed"
            raise
        finally:
            self.running -= 1
            self.counts[outcome] += 1

    def _kept_tokens(self, seen):
        """Return counts of four heads: all hold the first and last tokens, fewer hold others."""
        counts = tuple(4 if at < 1 or at > seen - 8 else at % 4 for at in range(seen))
        return KeptTokens(counts, 4, 600 * sum(counts), 2400 * seen)

    async def _pieces(self, prompt, params):
        def token_logprob(token, want):
            top = tuple((token + k, -1.0 - k) for k in range(want))
            return TokenLogprob(token, -1.0, top)

        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = (
                None,
                *(token_logprob(token, params.prompt_logprobs) for token in prompt[1:]),
            )
        read = PromptRead(prompt, 1, prompt_logprobs)
        for step in range(max(1, params.max_tokens)):
            await asyncio.sleep(self.pause)
            while self.is_held:
                await asyncio.sleep(0.01)
            if step in self.failing:
                raise self.failing[step]
            is_last = step + 1 >= params.max_tokens
            for index in range(params.n):
                tokens = (prompt[(step + 1) % len(prompt)],) if params.max_tokens else ()
                logprobs = ()
                if params.logprobs is not None:
                    logprobs = tuple(token_logprob(token, params.logprobs) for token in tokens)
                self.counts["new_tokens"] += len(tokens)
                yield OutputDelta(
                    index, self.tokenizer.decode(list(tokens)), tokens, logprobs,
                    self.ending if is_last else None, prompt=read if index == step == 0 else None,
                )  # fmt: skip

    def stats(self):
        zeros = dict.fromkeys((entry.name for entry in dataclasses.fields(EngineStats)), 0)
        decoding = min(self.running, self.max_num_seqs)
        counts = {"max_num_seqs": self.max_num_seqs, "running": decoding}
        counts["waiting"] = self.running - decoding
        return EngineStats(**{**zeros, **counts, **self.counts})

    async def aclose(self, drain=30.0):
        self.is_healthy = False
        end = asyncio.get_running_loop().time() + drain
        while self.running and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)


@dataclass
class Served:
    """A server in a thread: ``leave`` lets it end by itself, ``stop`` waits until it has."""

    engine: object
    address: str
    leave: Callable[[], None]
    stop: Callable[[], None]
    key: str = "none"
    clients: list = field(default_factory=list)

    def client(self, kind=openai.OpenAI, **options):
        options = {"max_retries": 0, "timeout": 30, "api_key": self.key, **options}
        return kind(base_url=f"{self.address}/v1", **options)

    @property
    def port(self):
        return int(self.address.rsplit(":", 1)[1])


@pytest.fixture(scope="session")
def bundled_tokenizer():
    return AutoTokenizer.from_pretrained(bundled_model_path())


@pytest.fixture(scope="session")
def start():
    """Return a function that starts a server in a thread; the caller must stop it."""

    def begin(engine, port=0, drain=5.0, **options) -> Served:
        settings = ServerSettings(**{"model_name": MODEL, "drain": drain, **options})
        listener = Listener(make_app(engine, settings), engine, settings)
        opened = open_port("127.0.0.1", port)
        address = f"http://127.0.0.1:{opened.getsockname()[1]}"
        thread = threading.Thread(target=listener.run, args=([opened],))
        thread.start()

        def leave():
            listener.should_exit = True

        def stop():
            leave()
            thread.join(30)
            assert not thread.is_alive()

        return Served(engine, address, leave, stop, settings.api_key or "none")

    return begin


@pytest.fixture(scope="session")
def make_fake(bundled_tokenizer):
    return lambda: FakeEngine(bundled_tokenizer)


@pytest.fixture
def fake(request, make_fake):
    return request.getfixturevalue("calm").engine if is_calm(request) else make_fake()


@pytest.fixture(scope="session")
def shared_server(start, make_fake):
    """Start a server for tests that do not change its state."""
    served = start(make_fake(), max_new_tokens=64)
    yield served
    served.stop()


def is_calm(request):
    """Tell whether a test is of the files that do not change the server's state."""
    calm = ("completions", "chats", "clients", "refusals", "responses_api")
    return request.path.stem.removeprefix("test_") in calm


@pytest.fixture
def calm(shared_server):
    shared_server.engine.requests.clear()
    return shared_server


@pytest.fixture(scope="module")
def left():
    """Return a list of servers that end by themselves, which the end of the module waits for."""
    servers = []
    yield servers
    for served in servers:
        served.stop()


@pytest.fixture
def serve(start, left):
    """Return a function that starts servers which are left at the end of the test."""
    running = []

    def begin(engine, **options) -> Served:
        running.append(start(engine, **options))
        return running[-1]

    yield begin
    for served in running:
        served.leave()
    left += running


@pytest.fixture
def served(request, serve, fake):
    return request.getfixturevalue("calm") if is_calm(request) else serve(fake)
