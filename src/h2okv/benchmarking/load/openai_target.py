"""A server that speaks OpenAI's API, asked over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from h2okv.benchmarking.load.answer_stream import AnswerFailedError, read_answer
from h2okv.benchmarking.load.outcome import INTERRUPTED, LoadRequest, Outcome

if TYPE_CHECKING:
    import aiohttp

_LINE_LIMIT = 2**20
_MESSAGE_LIMIT = 300
_REFUSED = (400, 422)


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, and what all of them have in common.

    Attributes:
        url: Of the server, without `/v1`.
        model: The name that requests give; ``None`` asks the server for its first model.
        is_chat: Whether prompts are sent as chat messages, not as texts to go on with.
        key: The API key, if the server wants one.
        timeout: Seconds after which a request is given up.
        extra: Further fields of every request.
    """

    url: str
    model: str | None = None
    is_chat: bool = False
    key: str | None = None
    timeout: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The URL of requests."""
        return self.url.rstrip("/") + (
            "/v1/chat/completions" if self.is_chat else "/v1/completions"
        )


def load_aiohttp() -> Any:
    """Imports the HTTP client.

    Raises:
        ValueError: If it is not installed.
    """
    try:
        import aiohttp
    except ImportError as error:
        raise ValueError(
            "h2okv bench serve needs aiohttp, which is not installed; run"
            " pip install 'h2okv[serve]'"
        ) from error
    return aiohttp


class OpenAITarget:
    """Streams answers from a server; use it with `async with`, and call `connect` first.

    Args:
        endpoint: The server.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._aiohttp = load_aiohttp()
        self._model = endpoint.model
        self._asks_usage = True
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> OpenAITarget:
        """Opens the client."""
        headers = {"Authorization": f"Bearer {self.endpoint.key}"} if self.endpoint.key else {}
        self._session = self._aiohttp.ClientSession(
            headers=headers,
            # As many connections as clients; the time-out is each request's own.
            connector=self._aiohttp.TCPConnector(limit=0),
            timeout=self._aiohttp.ClientTimeout(total=None),
            read_bufsize=_LINE_LIMIT,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes all connections."""
        await self._session.close()

    async def connect(self, text: str) -> float | None:
        """Finds out the model's name, and how the server counts tokens.

        Args:
            text: What a first request asks, for one new token.

        Returns:
            Characters of the text for each token that the server counted; ``None`` if it does not
            tell.

        Raises:
            ValueError: If the server does not answer, or refuses the request.
        """
        if self._model is None:
            self._model = await self._first_model()
        outcome = await self._probe(text)
        if outcome.error in [f"HTTP {code}" for code in _REFUSED]:
            # Servers from before `stream_options` refuse it.
            self._asks_usage = False
            outcome = await self._probe(text)
        if outcome.error is not None:
            raise ValueError(
                f"{self.endpoint.path} does not answer a request ({outcome.error}:"
                f" {outcome.message}); check the server and the model's name"
            )
        return len(text) / outcome.prompt_tokens if outcome.prompt_tokens else None

    async def send(self, request: LoadRequest, due: float, outcomes: list[Outcome]) -> None:
        """Sends a request and reads its answer; see `Target.send`."""
        outcome = Outcome(due, time.perf_counter())
        outcomes.append(outcome)
        try:
            async with asyncio.timeout(self.endpoint.timeout):
                await self._stream(request, outcome)
        except AnswerFailedError as error:
            outcome.error, outcome.message = error.kind, error.message
        except TimeoutError:
            outcome.error = "timed out"
            outcome.message = f"no end after {self.endpoint.timeout:g} s"
        except asyncio.CancelledError:
            outcome.error = INTERRUPTED
            raise
        except self._aiohttp.ClientConnectorError as error:
            outcome.error, outcome.message = "no connection", str(error)
        except (self._aiohttp.ClientError, ValueError, OSError) as error:
            outcome.error = "connection broken"
            outcome.message = f"{type(error).__name__}: {error}"[:_MESSAGE_LIMIT]
        finally:
            outcome.ended = time.perf_counter()

    async def _stream(self, request: LoadRequest, outcome: Outcome) -> None:
        async with self._session.post(self.endpoint.path, json=self._body(request)) as response:
            if response.status != 200:
                said = (await response.text(errors="replace"))[:_MESSAGE_LIMIT]
                raise AnswerFailedError(f"HTTP {response.status}", " ".join(said.split()))
            await read_answer(response.content, outcome)

    def _body(self, request: LoadRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self.endpoint.is_chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        if self._asks_usage:
            body["stream_options"] = {"include_usage": True}
        return body | dict(self.endpoint.extra)

    async def _probe(self, text: str) -> Outcome:
        outcomes: list[Outcome] = []
        await self.send(LoadRequest(-1, text, 1), time.perf_counter(), outcomes)
        return outcomes[0]

    async def _first_model(self) -> str:
        url = self.endpoint.url.rstrip("/") + "/v1/models"
        try:
            async with (
                asyncio.timeout(self.endpoint.timeout),
                self._session.get(url) as response,
            ):
                if response.status != 200:
                    raise ValueError(
                        f"{url} answers with HTTP {response.status}; check the URL, and the key if"
                        " the server wants one"
                    )
                listed = json.loads(await response.text())
        except (self._aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"no answer from {url} ({type(error).__name__}: {error}); start the server, or give"
                " --model bundled, which starts one for the run"
            ) from error
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{url} does not answer with JSON; give the URL of a server"
            ) from error
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{url} lists no model; give its name with --served-name") from None
