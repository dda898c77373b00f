"""Request bodies: the fields of each route, and what the server reads from them."""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi import Request
from pydantic_core import from_json

from h2okv.budget import Budget
from h2okv.config import CacheConfig
from h2okv.engine.sampling_params import SAMPLING, SamplingParams, sampling_values
from h2okv.engine.structured import json_grammar
from h2okv.prompts import readers
from h2okv.prompts.messages import (
    TEMPLATED,
    Conversation,
    make_conversation,
    read_input,
    read_messages,
)
from h2okv.prompts.readers import FieldError, Fields, Path, Reader, request_fields
from h2okv.records import short_repr
from h2okv.server import responses, structured
from h2okv.server.errors import ApiError, as_api_error, invalid
from h2okv.server.structured import CallSyntax
from h2okv.server.tokenization import off_the_loop

BODY_PAUSE = 30.0
"""Seconds in which a client must send the next piece of a body."""
_MAX_DEPTH = 200
"""Levels of JSON that the parser takes."""
_IN_TEXT = 'it is part of cache, a text such as "64+64,sink=4"', False
_LATE_USAGE = "usage comes with the last chunk; leave it out", False
_NO_LOGPROBS = "a response has no log-probabilities; leave it out"


@dataclasses.dataclass(frozen=True)
class CacheChoice:
    """The cache budget of one request, and what is reported of its cache."""

    cache: str | None = None  # such as 256, 10% or 64+64,sink=4
    kept_every: int | None = None  # new tokens between two reports
    # Whether to read the answer again with the full cache; "repair", "repair_all": and to make it
    # again.
    verify: bool | str | None = None

    def budget(self, server: CacheConfig) -> Budget | None:
        """Return the request's budget, divided as the server's; ``None`` without one."""
        try:
            return None if self.cache is None else server.request_budget(self.cache)
        except ValueError as error:
            raise invalid(f"h2o: {str(error).rstrip('.')}.", "h2o") from error


def _read_verify(value: Any, path: Path) -> bool | str:
    if isinstance(value, bool) or value in ("repair", "repair_all"):
        return value
    raise readers.unlike("true, false, repair or repair_all", value, path)


_CACHE = Fields(
    {"cache": readers.text, "kept_every": readers.integer(1), "verify": _read_verify},
    unsupported=dict.fromkeys(("heavy", "recent", "sink"), _IN_TEXT),
)


def _read_cache(value: Any, path: Path) -> CacheChoice:
    if isinstance(value, str):
        value = {"cache": value}
    elif not isinstance(value, Mapping):
        raise readers.unlike("a text such as '256' or '10%', or an object", value, path)
    return CacheChoice(**_CACHE(value, path))


_SAMPLED: Mapping[str, Reader] = {
    **SAMPLING,
    "model": readers.text,
    "stream": readers.boolean,
    "stream_options": Fields(
        {"include_usage": readers.boolean, "include_obfuscation": readers.boolean},
        unsupported={"continuous_usage_stats": _LATE_USAGE},
    ),
    "response_format": structured.read_response_format,
    "h2o": _read_cache,  # only of this server
}
_CALLING = {**_SAMPLED, **TEMPLATED, "parallel_tool_calls": readers.boolean}
_MODEL = {"model": "the name that /v1/models has"}


class SampledRequest:
    """A request for text; its fields are attributes, ``None`` those that it does not have."""

    fields: ClassVar[Fields]
    path: ClassVar[str]
    builder: ClassVar[type[responses.ResponseBuilder]]
    kind: ClassVar[str] = "chat"
    default_max_tokens: ClassVar[int | None] = None

    model: str
    stream: bool | None
    stream_options: dict[str, Any] | None
    n: int | None
    h2o: CacheChoice
    response_format: Mapping[str, Any] | None  # the schema that answers must fit

    def __init__(self, body: Mapping[str, Any]) -> None:
        read = self.fields(body)
        vars(self).update(dict.fromkeys(self.fields.readers), **read)
        self.stated = body
        self._check()

    def _check(self) -> None:
        """Check what depends on several fields."""
        self.h2o = self.h2o or CacheChoice()
        self._need("stream_options", "stream")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool(self.stream_options and self.stream_options.get("include_usage"))

    def _need(self, name: str, other: str) -> None:
        if getattr(self, name) is not None and not getattr(self, other):
            raise FieldError((name,), f" needs {other}=true; set it, or leave this out")

    @property
    @abstractmethod
    def prompts(self) -> list[Any]:
        """Texts, tokens, or one conversation."""

    def _parameters(self) -> dict[str, Any]:
        """Return parameters that have other names, or values, than their fields."""
        return {}

    @property
    def may_call(self) -> bool:
        """Whether the answer may call tools."""
        return False

    @property
    def _schema(self) -> Mapping[str, Any] | None:
        return self.response_format

    def grammar(self, syntax: CallSyntax) -> str | None:
        """Return the grammar that answers must follow; ``None`` for any text."""
        return None if self._schema is None else json_grammar(self._schema)

    def params(self, standard: Mapping[str, float]) -> SamplingParams:
        """Return the sampling parameters; missing ones are taken from ``standard``."""
        values = sampling_values(vars(self)) | self._parameters()
        stated = {name: value for name, value in values.items() if value is not None}
        return SamplingParams(**{**standard, **stated})

    def field_of(self, parameter: str) -> str:
        """Return the field that a parameter of `SamplingParams` came from."""
        return "response_format" if parameter == "grammar" else parameter

    def refusal(self, error: ValueError) -> ApiError:
        """Translate the engine's error of a parameter into that of the field it came from."""
        if isinstance(error, FieldError) and error.path:
            parameter, *steps = error.path
            path = (self.field_of(str(parameter)), *steps)
            return as_api_error(FieldError(path, error.problem, error.code))
        return as_api_error(error)


class CallingRequest(SampledRequest):
    """A request whose answer may call tools."""

    tool_choice: str | Mapping[str, str] | None
    parallel_tool_calls: bool | None
    _conversation: Conversation

    def _check(self) -> None:
        super()._check()
        self._functions = [tool["function"] for tool in self._conversation.tools]
        names = [function["name"] for function in self._functions]
        self._choice = choice = self.tool_choice or "auto"
        if choice == "required" and not names:
            problem = "='required' needs tools; give some, or leave it out"
            raise FieldError(("tool_choice",), problem)
        if isinstance(choice, Mapping) and choice["name"] not in names:
            expected = f"one of the tools ({', '.join(names) or 'there are none'})"
            path = ("tool_choice", "function", "name")
            error = readers.unlike(expected, choice["name"], path)
            raise self._located(error, self.stated["tool_choice"])

    @property
    def call_options(self) -> dict[str, Any]:
        """What `ToolCallParser` must know of the request."""
        return {
            "names": {function["name"] for function in self._functions},
            "no_arguments": {
                function["name"]
                for function in self._functions
                if not (function.get("parameters") or {}).get("required")
            },
            "has_schema": self._schema is not None,
            "only_calls": self._choice not in ("auto", "none"),
            "strict": self._strict if self._choice == "auto" else None,
        }

    @property
    def prompts(self) -> list[Any]:
        return [self._conversation]

    @property
    def may_call(self) -> bool:
        return bool(self._functions)

    @property
    def max_calls(self) -> int | None:
        """How many calls an answer may have; ``None`` for any number."""
        return 1 if self.parallel_tool_calls is False else None

    def _grammar_field(self, of_schema: str) -> str:
        """Return the field that a grammar came from."""
        is_free = self._choice in ("auto", "none")
        return of_schema if is_free and self._schema is not None else "tools"

    @staticmethod
    def _located(error: FieldError, stated: Mapping[str, Any]) -> FieldError:
        """Return an error within a function as it is stated, flat or not."""
        steps = [at for at in error.path if "function" in stated or at != "function"]
        return FieldError(steps, error.problem, error.code)

    @property
    def _strict(self) -> dict[str, Mapping[str, Any]]:
        """Schemas of the functions whose arguments must fit in every call."""
        stated = [tool.get("function", tool) for tool in self.stated.get("tools") or ()]
        names = {function["name"] for function in stated if function.get("strict")}
        return {  # the first function of a name counts
            function["name"]: structured.parameters(function, number)
            for number, function in reversed([*enumerate(self._functions)])
            if function["name"] in names
        }

    def grammar(self, syntax: CallSyntax) -> str | None:
        tools, is_parallel = self._conversation.tools, self.max_calls is None
        try:
            return structured.answer_grammar(
                self._schema, tools, self._choice, is_parallel, syntax, self._strict
            )
        except FieldError as error:
            if error.path[0] != "tools":
                raise
            raise self._located(error, self.stated["tools"][error.path[1]]) from error


class ChatRequest(CallingRequest):
    """A request for the next message of a chat."""

    path: ClassVar[str] = "/v1/chat/completions"
    builder: ClassVar[type[responses.ResponseBuilder]] = responses.ChatResponseBuilder
    fields: ClassVar[Fields] = request_fields(
        {
            **_CALLING,
            "messages": read_messages,
            "max_completion_tokens": SAMPLING["max_tokens"],
            "logprobs": readers.boolean,
            "top_logprobs": SAMPLING["logprobs"],
        },
        {**_MODEL, "messages": '[{"role": "user", "content": "..."}]'},
    )

    messages: list[dict[str, Any]]
    max_tokens: int | None
    logprobs: bool | None
    top_logprobs: int | None

    def _check(self) -> None:
        self._conversation = make_conversation(self.messages, vars(self))
        super()._check()
        self._need("top_logprobs", "logprobs")

    def _parameters(self) -> dict[str, Any]:
        return {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    def field_of(self, parameter: str) -> str:
        if parameter == "max_tokens" and self.max_tokens is None:
            return "max_completion_tokens"
        return self._grammar_field("response_format") if parameter == "grammar" else parameter


def _read_prompt(value: Any, path: Path) -> list[str] | list[list[int]]:
    """Check texts, or lists of tokens; return a list of prompts."""
    listed = value if isinstance(value, list) and not _are_tokens(value) else [value]
    if listed and (all(isinstance(o, str) for o in listed) or all(map(_are_tokens, listed))):
        return listed
    expected = "a text, tokens, or a list of texts or of lists of tokens, none of the lists empty"
    raise readers.unlike(expected, value, path)


def _are_tokens(value: Any) -> bool:
    # isinstance would accept a bool as an int.
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


class CompletionRequest(SampledRequest):
    """A request to continue one or several prompts, texts or tokens."""

    path: ClassVar[str] = "/v1/completions"
    kind: ClassVar[str] = "text"
    builder: ClassVar[type[responses.ResponseBuilder]] = responses.CompletionResponseBuilder
    default_max_tokens: ClassVar[int | None] = 16
    fields: ClassVar[Fields] = request_fields(
        {**_SAMPLED, "prompt": _read_prompt, "echo": readers.boolean},
        {**_MODEL, "prompt": "a text or tokens"},
        {"best_of": ("this server does not rank outputs; leave it out", 1)},
    )

    prompt: list[Any]
    echo: bool | None
    logprobs: int | None

    @property
    def prompts(self) -> list[Any]:
        return self.prompt

    def _parameters(self) -> dict[str, Any]:
        return {"prompt_logprobs": self.logprobs if self.echo else None}


def _read_include(value: Any, path: Path) -> None:
    """Raise an error for log-probabilities; searches and reasoning would be empty anyway."""
    if "message.output_text.logprobs" in readers.list_of(readers.any_value)(value, path):
        raise FieldError(path, f"={short_repr(value)}: {_NO_LOGPROBS}")


class ResponsesRequest(CallingRequest):
    """A request for the next message, in the format of OpenAI's Responses API."""

    path: ClassVar[str] = "/v1/responses"
    builder: ClassVar[type[responses.ResponseBuilder]] = responses.ResponsesBuilder
    fields: ClassVar[Fields] = request_fields(
        {
            **_CALLING,
            "input": read_input,
            "instructions": readers.text,
            "max_output_tokens": SAMPLING["max_tokens"],
            "metadata": readers.any_value,
            "reasoning": Fields({"effort": readers.text}, is_open=True),
            "text": Fields({"format": structured.read_text_format, "verbosity": readers.any_value}),
            "include": _read_include,
        },
        {**_MODEL, "input": "a text or a list of messages"},
        {
            "response_format": ("a response has no such field; give text.format",),
            "n": ("a response has one output; leave it out", 1),
            "max_tokens": ("a response has no such field; give max_output_tokens",),
            "logprobs": (_NO_LOGPROBS, False),
            "top_logprobs": (_NO_LOGPROBS, 0),
        },
    )

    input: list[dict[str, Any]]
    instructions: str | None
    max_output_tokens: int | None
    metadata: Any
    text: dict[str, Any] | None
    reasoning: dict[str, str] | None

    def _check(self) -> None:
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        read = {**vars(self), "reasoning_effort": (self.reasoning or {}).get("effort")}
        self._conversation = make_conversation([*system, *self.input], read)
        super()._check()

    @property
    def _schema(self) -> Mapping[str, Any] | None:
        return (self.text or {}).get("format")

    def _parameters(self) -> dict[str, Any]:
        return {"max_tokens": self.max_output_tokens}

    def field_of(self, parameter: str) -> str:
        names = {"max_tokens": "max_output_tokens", "grammar": self._grammar_field("text")}
        return names.get(parameter, parameter)


async def read_limited(request: Request, limit: int) -> bytes:
    """Read a body up to a limit, with or without a Content-Length header."""
    remedy = "send less, or start the server with a larger --max-body"
    message = f"the body has more than {limit} bytes; {remedy}."
    too_large = ApiError(413, message, code="body_too_large")
    length, data = request.headers.get("content-length", "0"), bytearray()
    if length.isdecimal() and int(length) > limit:
        raise too_large
    chunks = request.stream()
    try:
        while True:
            async with asyncio.timeout(BODY_PAUSE):
                data += await anext(chunks)
            if len(data) > limit:
                raise too_large
    except StopAsyncIteration:
        return bytes(data)
    except TimeoutError as error:
        late = f"no more of the body came in {BODY_PAUSE:g} s; send the request again, whole."
        raise ApiError(408, late, code="body_incomplete") from error


async def read_body(request: Request, kind: type[SampledRequest], limit: int) -> tuple[Any, int]:
    """Read and check a body; return it with its size in bytes."""
    stated = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if stated != "application/json":
        # Pages of other sites cannot send this type without a preflight request, which fails.
        remedy = "send the header 'Content-Type: application/json'"
        message = f"Content-Type {stated!r} is not JSON; {remedy}."
        raise ApiError(415, message, code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = f"Content-Encoding {encoding!r} is not supported; send the body uncompressed."
        raise ApiError(415, message, code="unsupported_media_type")
    raw = (await read_limited(request, limit)).removeprefix(codecs.BOM_UTF8)
    return await off_the_loop(len(raw), lambda: _parse(raw, kind)), len(raw)


def _parse(raw: bytes, kind: type[SampledRequest]) -> Any:
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        message = f"the body is not JSON in UTF-8 ({error}); send one object."
        if "recursion limit" in str(error):
            message = f"the body is nested deeper than {_MAX_DEPTH} levels; send fewer levels."
        raise invalid(message, code="invalid_json") from error
    if not isinstance(body, dict):
        raise invalid(f"the body must be a JSON object, got {short_repr(body)}.")
    return kind(body)
