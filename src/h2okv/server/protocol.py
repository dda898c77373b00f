"""Request bodies, checked field by field."""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from fastapi import Request
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from h2okv.budget import Budget
from h2okv.config import CacheConfig
from h2okv.engine.request_fields import UNSUPPORTED, Unsupported, known_fields, sampling_values
from h2okv.engine.sampling_params import SamplingParams
from h2okv.engine.structured import json_grammar
from h2okv.prompts.messages import (
    Conversation,
    FieldError,
    Message,
    format_path,
    read_conversation,
)
from h2okv.records import short_repr
from h2okv.server import responses
from h2okv.server.errors import ApiError, as_api_error, invalid
from h2okv.server.structured import (
    CallSyntax,
    answer_grammar,
    check_fields,
    parameters,
    read_response_format,
    read_tool_choice,
)
from h2okv.server.tokenization import off_the_loop

BODY_PAUSE = 30.0
"""Seconds in which a client must send the next piece of a body."""
_NAME = re.compile(r"(\w+)[\[=:]")

Integer = Annotated[int, BeforeValidator(lambda value: _as_int(value))]
"""An integer; JSON does not distinguish 8.0 from 8."""
Stops = Annotated[list[str], Field(max_length=64)]
ONE_OR_MORE = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
TEXT_IS_MESSAGE = BeforeValidator(
    lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value
)
NULL_IS_EMPTY = BeforeValidator(lambda value: {} if value is None else value)
TEXT_IS_CACHE = BeforeValidator(
    lambda value: {"cache": value} if isinstance(value, str) else {} if value is None else value
)


def _as_int(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Strict(BaseModel):
    """A part of a request: unknown fields and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unsupported: ClassVar[Unsupported] = {}

    @model_validator(mode="before")
    @classmethod
    def _read_fields(cls, value: Any) -> Any:
        is_object = isinstance(value, dict)
        return known_fields(value, cls.model_fields, cls.unsupported) if is_object else value


def _without(unsupported: Unsupported, *names: str) -> Unsupported:
    return {name: reason for name, reason in unsupported.items() if name not in names}


class StreamOptions(Strict):
    """Options of a stream."""

    unsupported: ClassVar[Unsupported] = {
        "continuous_usage_stats": ("usage comes with the last chunk; leave it out", False)
    }
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


_IN_TEXT = 'it is part of cache, a text such as "64+64,sink=4"', False


class CacheChoice(Strict):
    """The cache budget of one request, and what is reported of its cache."""

    unsupported: ClassVar[Unsupported] = dict.fromkeys(("heavy", "recent", "sink"), _IN_TEXT)
    cache: str | None = None  # such as 256, 10% or 64+64,sink=4
    kept_every: Annotated[int, Field(ge=1)] | None = None  # new tokens between two reports
    verify: bool | None = None  # whether to read the answer again with the full cache

    def budget(self, server: CacheConfig) -> Budget | None:
        """Return the request's budget, divided as the server's; ``None`` without one."""
        try:
            return None if self.cache is None else server.request_budget(self.cache)
        except ValueError as error:
            raise invalid(f"h2o: {error}", "h2o") from error


class SampledRequest(Strict):
    """Common fields of all requests for text; ``null`` means the same as a missing field."""

    unsupported: ClassVar[Unsupported] = _without(UNSUPPORTED, "response_format")
    path: ClassVar[str]
    builder: ClassVar[type[responses.ResponseBuilder]]
    kind: ClassVar[str] = "chat"
    default_max_tokens: ClassVar[int | None] = None

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Integer | None = None
    seed: Integer | None = None
    stop: Annotated[Stops | None, ONE_OR_MORE] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: Integer | None = None
    # As in vLLM's server.
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Integer], Field(max_length=1024)] | None = None
    response_format: Any = None
    # Only of this server.
    h2o: Annotated[CacheChoice, TEXT_IS_CACHE] = CacheChoice()

    _schema: Mapping[str, Any] | None = PrivateAttr(default=None)  # that answers must fit

    @model_validator(mode="after")
    def _streams(self) -> Self:
        try:
            self._schema = read_response_format(self.response_format)
        except FieldError as error:
            raise error.within("response_format") from error
        return self._need("stream_options", self.stream_options is None, "stream")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _need(self, name: str, is_unused: bool, other: str) -> Self:
        if not is_unused and not getattr(self, other):
            raise invalid(f"{name} needs {other}=true; set it, or leave this out.", name)
        return self

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

    def grammar(self, syntax: CallSyntax) -> str | None:
        """Return the grammar that answers must follow; ``None`` for any text."""
        return None if self._schema is None else json_grammar(self._schema)

    def params(self, standard: Mapping[str, float]) -> SamplingParams:
        """Return the sampling parameters; missing ones are taken from ``standard``."""
        try:
            values = sampling_values(dict(self)) | self._parameters()
            stated = {name: value for name, value in values.items() if value is not None}
            return SamplingParams(**{**standard, **stated})
        except FieldError as error:
            raise as_api_error(error) from error
        except ValueError as error:
            raise self.refusal(error) from error

    def field_of(self, parameter: str) -> str:
        """Return the field that a parameter of `SamplingParams` came from."""
        names = {"prompt_logprobs": "logprobs", "grammar": "response_format"}
        return names.get(parameter, parameter)

    def refusal(self, error: ValueError) -> ApiError:
        """Translate the error of a parameter into that of the field that it came from."""
        text, match = str(error), _NAME.match(str(error))
        if match is None:
            return invalid(text)
        name = self.field_of(match[1])
        is_field = name in type(self).model_fields
        return invalid(name + text[match.end(1) :], name) if is_field else invalid(text)


class Templated(Strict):
    """Messages, and how the model's chat template is applied to them."""

    messages: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # a variable of some templates

    _conversation: Conversation = PrivateAttr()

    @model_validator(mode="after")
    def _read_messages(self) -> Self:
        self._check()
        if self.messages is not None:
            self._conversation = read_conversation(dict(self))
        return self

    def _check(self) -> None:
        """Raise an error that does not depend on the messages."""

    @property
    def conversation(self) -> Conversation:
        """The messages that were read."""
        return self._conversation


class CallingRequest(SampledRequest):
    """A request whose answer may call tools."""

    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    _conversation: Conversation = PrivateAttr()
    _choice: str | Mapping[str, str] = PrivateAttr("auto")

    @property
    def call_options(self) -> dict[str, Any]:
        """What `ToolCallParser` must know of the request."""
        functions = [tool["function"] for tool in self._conversation.tools]
        return {
            "names": {function["name"] for function in functions},
            "no_arguments": {
                function["name"]
                for function in functions
                if not (function.get("parameters") or {}).get("required")
            },
            "has_schema": self._schema is not None,
            "only_calls": self._choice not in ("auto", "none"),
            "strict": self._strict if self._choice == "auto" else None,
        }

    def _located(self, error: FieldError) -> FieldError:
        """Return an error of a chat's fields with the path that it has in this request."""
        return error

    def _read_choice(self) -> None:
        names = [tool["function"]["name"] for tool in self._conversation.tools]
        try:
            self._choice = read_tool_choice(nested(self.tool_choice), names)
        except FieldError as error:
            raise self._located(error.within("tool_choice")) from error

    @property
    def may_call(self) -> bool:
        return bool(self._conversation.tools)

    @property
    def max_calls(self) -> int | None:
        """How many calls an answer may have; ``None`` for any number."""
        return 1 if self.parallel_tool_calls is False else None

    def _grammar_field(self, of_schema: str) -> str:
        """Return the field that a grammar came from."""
        is_free = self._choice in ("auto", "none")
        return of_schema if is_free and self._schema is not None else "tools"

    @property
    def _strict(self) -> dict[str, Mapping[str, Any]]:
        """Schemas of the functions whose arguments must fit in every call."""
        stated = (nested(tool)["function"] for tool in self.tools or () if self.may_call)
        names = {function["name"] for function in stated if function.get("strict")}
        functions = [tool["function"] for tool in self._conversation.tools]
        return {  # the first function of a name counts
            function["name"]: parameters(function, number)
            for number, function in reversed([*enumerate(functions)])
            if function["name"] in names
        }

    def grammar(self, syntax: CallSyntax) -> str | None:
        tools, is_parallel = self._conversation.tools, self.max_calls is None
        try:
            return answer_grammar(
                self._schema, tools, self._choice, is_parallel, syntax, self._strict
            )
        except FieldError as error:
            raise as_api_error(self._located(error)) from error


class ChatRequest(CallingRequest, Templated):
    """A request for the next message of a chat."""

    unsupported: ClassVar[Unsupported] = _without(
        SampledRequest.unsupported, "tools", "tool_choice"
    )
    path: ClassVar[str] = "/v1/chat/completions"
    builder: ClassVar[type[responses.ResponseBuilder]] = responses.ChatResponseBuilder

    messages: list[Any]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None

    @model_validator(mode="after")
    def _fit(self) -> Self:
        self._read_choice()
        return self._need("top_logprobs", self.top_logprobs is None, "logprobs")

    @property
    def prompts(self) -> list[Any]:
        return [self.conversation]

    def _parameters(self) -> dict[str, Any]:
        return {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    def field_of(self, parameter: str) -> str:
        if parameter == "max_tokens" and self.max_tokens is None:
            return "max_completion_tokens"
        if parameter == "grammar":
            return self._grammar_field("response_format")
        return "top_logprobs" if parameter == "logprobs" else parameter


class CompletionRequest(SampledRequest):
    """A request to continue one or several prompts, texts or tokens."""

    path: ClassVar[str] = "/v1/completions"
    kind: ClassVar[str] = "text"
    builder: ClassVar[type[responses.ResponseBuilder]] = responses.CompletionResponseBuilder
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Any
    echo: bool | None = None
    best_of: Integer | None = None

    @field_validator("prompt")
    @classmethod
    def _listed(cls, value: Any) -> list[str] | list[list[int]]:
        """Check texts, or lists of tokens; return a list of prompts."""
        listed = value if isinstance(value, list) and not _are_tokens(value) else [value]
        if listed and (all(isinstance(o, str) for o in listed) or all(map(_are_tokens, listed))):
            return listed
        raise PydanticCustomError(
            "prompt",
            "Input should be a text, a list of texts, a list of tokens, or a list of lists of"
            " tokens, none of the lists empty",
        )

    @model_validator(mode="after")
    def _best(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid(
                f"best_of={short_repr(self.best_of)}: this server does not rank outputs; leave it"
                " out, or give the value of n.",
                "best_of",
            )
        return self

    @property
    def prompts(self) -> list[Any]:
        return self.prompt

    def _parameters(self) -> dict[str, Any]:
        return {"prompt_logprobs": self.logprobs if self.echo else None}


def _are_tokens(value: Any) -> bool:
    # isinstance would accept a bool as an int.
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


class ResponsesRequest(CallingRequest):
    """A request for the next message, in the format of OpenAI's Responses API."""

    path: ClassVar[str] = "/v1/responses"
    builder: ClassVar[type[responses.ResponseBuilder]] = responses.ResponsesBuilder
    unsupported: ClassVar[Unsupported] = {
        **_without(UNSUPPORTED, "tools", "tool_choice"),
        "response_format": ("a response has no such field; give text.format",),
        "n": ("a response has one output; leave it out", 1),
        "max_tokens": ("a response has no such field; give max_output_tokens",),
        "logprobs": ("a response has no log-probabilities; leave it out", False),
        "top_logprobs": ("a response has no log-probabilities; leave it out", 0),
    }

    input: Annotated[list[Any], TEXT_IS_MESSAGE]
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    metadata: Any = None
    text: dict[str, Any] | None = None
    include: list[Any] | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _read(self) -> Self:
        fields = {**dict(self), "reasoning_effort": (self.reasoning or {}).get("effort")}
        chat = read_response_conversation(fields)
        if self.instructions:
            system = {"role": "system", "content": self.instructions}
            chat = dataclasses.replace(chat, messages=[system, *chat.messages])
        self._conversation = chat
        self._read_choice()
        text = self.text or {}
        stated = text.get("format")
        if isinstance(stated, dict) and stated.get("type") == "json_schema":
            nested_format = {name: value for name, value in stated.items() if name != "type"}
            stated = {"type": "json_schema", "json_schema": nested_format}
        try:
            check_fields(text, ("format", "verbosity"))  # the latter is only a hint
        except FieldError as error:
            raise error.within("text") from error
        try:
            self._schema = read_response_format(stated)
        except FieldError as error:
            path = [step for step in error.path if step != "json_schema"]
            problem = FieldError(("text", "format", *path), error.problem, error.code)
            raise problem from error
        return self

    @field_validator("include")
    @classmethod
    def _included(cls, value: list[Any] | None) -> list[Any] | None:
        """Raise an error for log-probabilities; searches and reasoning would be empty anyway."""
        if "message.output_text.logprobs" in (value or []):
            reason = "a response has no log-probabilities; leave it out"
            raise FieldError((), f"={short_repr(value)}: {reason}")
        return value

    @property
    def prompts(self) -> list[Any]:
        return [self._conversation]

    def _located(self, error: FieldError) -> FieldError:
        path = [step for step in error.path if step != "function"]
        return FieldError(path, error.problem, error.code)

    def _parameters(self) -> dict[str, Any]:
        return {"max_tokens": self.max_output_tokens}

    def field_of(self, parameter: str) -> str:
        names = {"max_tokens": "max_output_tokens", "grammar": self._grammar_field("text")}
        return names.get(parameter, parameter)


def read_response_conversation(fields: Mapping[str, Any]) -> Conversation:
    """Read the conversation of a request with ``input``, ``tools`` and ``tool_choice``.

    Raises:
        FieldError: If a field is invalid; its path is that of the request.
    """
    items, tools = fields["input"], fields.get("tools")
    listed = isinstance(tools, (list, tuple))
    chat = {
        **fields,
        "input": [_as_message(item, at) for at, item in enumerate(items)],
        "tools": [nested(tool) for tool in tools] if listed and tools else tools,
    }
    try:
        conversation = read_conversation(chat, "input")
    except FieldError as error:
        raise FieldError(_path_in_response(error.path, items), error.problem, error.code) from error
    return dataclasses.replace(conversation, messages=_with_calls_joined(conversation.messages))


def nested(value: Any) -> Any:
    """Return a flat function as chats have it; other values as they are."""
    is_flat = isinstance(value, Mapping) and value.get("type") == "function"
    if not is_flat or "function" in value:
        return value
    function = {name: entry for name, entry in value.items() if name != "type"}
    return {"type": "function", "function": function}


def _as_message(item: Any, at: int) -> Any:
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind == "function_call":
        function = {name: item.get(name) for name in ("name", "arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind != "function_call_output":
        return item
    if "output" not in item:
        raise FieldError(("input", at, "output"), " is missing; give it", "missing_field")
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item["output"]}


def _path_in_response(path: Sequence[str | int], items: Sequence[Any]) -> list[str | int]:
    """Return the path of a chat's field as a request of responses has it."""
    if path[0] != "input" or len(path) < 3:
        return [step for step in path if step != "function"]
    item: Any = items[int(path[1])]
    if isinstance(item, Mapping) and item.get("type") == "function_call":
        return [*path[:2], path[-1]]
    if isinstance(item, Mapping) and item.get("type") == "function_call_output":
        names = {"content": "output", "tool_call_id": "call_id"}
        return [names.get(str(step), step) for step in path]
    return list(path)


def _with_calls_joined(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages with each call in the message of the answer that it belongs to."""
    joined: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls and not message["content"] and joined and joined[-1]["role"] == "assistant":
            calls = [*joined[-1].get("tool_calls", ()), *calls]
            joined[-1] = {**joined[-1], "tool_calls": calls}
        else:
            joined.append(dict(message))
    return joined


class TokenizeRequest(Templated):
    """A request for the tokens of a text or a chat, as in vLLM's server."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    def _check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("give either prompt, a text, or messages, a chat.", "prompt")


class DetokenizeRequest(Strict):
    """A request for the text of tokens."""

    model: str | None = None
    tokens: list[int]


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


async def read_body(request: Request, model: type[BaseModel], limit: int) -> tuple[Any, int]:
    """Read and validate a body; return it with its size in bytes."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Pages of other sites cannot send this type without a preflight request, which fails.
        remedy = "send the header 'Content-Type: application/json'"
        message = f"Content-Type {kind!r} is not JSON; {remedy}."
        raise ApiError(415, message, code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = f"Content-Encoding {encoding!r} is not supported; send the body uncompressed."
        raise ApiError(415, message, code="unsupported_media_type")
    raw = (await read_limited(request, limit)).removeprefix(codecs.BOM_UTF8)
    return await off_the_loop(len(raw), lambda: _parse(raw, model)), len(raw)


def _parse(raw: bytes, model: type[BaseModel]) -> BaseModel:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise _explained(error.errors(include_url=False)[0], model) from error


_MAX_DEPTH = 200
"""Levels of JSON that pydantic's parser takes."""
_CODES = {"json_invalid": "invalid_json", "missing": "missing_field"}
"""Error codes by pydantic's error types; all others are ``invalid_value``."""
_MESSAGES = {
    "json_invalid": "the body is not JSON in UTF-8 ({error}); send one object.",
    "missing": "{field} is missing; give it.",
    "too_long": "{field} has {actual_length} entries; give {max_length} at most.",
    "value_error": "{field}={value}: {error}",
    "model_type": "{field} is not a JSON object, but {value}; send one.",
}


def _explained(problem: Mapping[str, Any], model: type[BaseModel]) -> ApiError:
    """Translate a validation error of pydantic's into an error of one sentence."""
    context, path = problem.get("ctx", {}), problem["loc"]
    if isinstance(context.get("error"), FieldError):
        return as_api_error(context["error"].within(*path))
    field = format_path(path)
    if "recursion limit" in str(context.get("error")):
        message = f"the body is nested deeper than {_MAX_DEPTH} levels; send fewer levels."
        return invalid(message, code="invalid_json")
    message = _MESSAGES.get(problem["type"], "{field}={value} does not fit; give {should}.").format(
        **context,
        field=field or "the body",
        value=short_repr(problem["input"]),
        should=problem["msg"].removeprefix("Input should be ").rstrip("."),
    )
    return invalid(message, field or None, _CODES.get(problem["type"], "invalid_value"))
