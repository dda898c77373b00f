"""Request bodies, checked field by field."""

from __future__ import annotations

import dataclasses
import difflib
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import Request
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from h2okv.config import Budget
from h2okv.engine.sampling_params import SamplingParams, short_repr
from h2okv.server import responses
from h2okv.server.errors import ApiError, invalid
from h2okv.server.tokenization import off_the_loop

_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
_NAME = re.compile(r"(\w+)[\[=:]")

Seed = Annotated[int, AfterValidator(lambda seed: seed % 2**63)]
TopK = Annotated[int, AfterValidator(lambda count: 0 if count == -1 else count)]
"""-1 is all tokens, in vLLM's requests."""
Token = Annotated[str, Field(pattern=r"^[0-9]{1,18}$"), AfterValidator(int)]
"""As a key in JSON, which is always a string."""
Stops = Annotated[list[str], Field(max_length=64)]
ONE_OR_MORE = BeforeValidator(lambda given: [given] if isinstance(given, str) else given)
TEXT_IS_SAID = BeforeValidator(
    lambda given: [{"role": "user", "content": given}] if isinstance(given, str) else given
)
NULL_IS_EMPTY = BeforeValidator(lambda given: {} if given is None else given)


def lacking(why: str, *harmless: Any) -> Any:
    """A field of OpenAI's for what this server lacks; some values of it change nothing."""
    return Field(default=None, json_schema_extra={"why": why, "harmless": list(harmless)})


class Strict(BaseModel):
    """A part of a request: unknown fields and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _refused(cls, value: Any, info: ValidationInfo) -> Any:
        lacked: Any = cls.model_fields[str(info.field_name)].json_schema_extra
        if lacked and value is not None and value not in lacked["harmless"]:
            raise ValueError(f"this server {lacked['why']}.")
        return value


class StreamOptions(Strict):
    """What a stream says beside the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CacheChoice(Strict):
    """The cache budget of one request, and whether to tell what it still holds."""

    heavy: int | float | None = None
    recent: int | float | None = None
    sink: int | None = None
    kept_every: Annotated[int, Field(ge=1)] | None = None  # new tokens between two reports

    def budget(self, standard: Budget) -> Budget | None:
        """The server's budget with what is given; ``None`` if nothing is."""
        given = self.model_dump(include={"heavy", "recent", "sink"}, exclude_none=True)
        try:
            return dataclasses.replace(standard, **given) if given else None
        except ValueError as error:
            raise invalid(f"h2o: {error}", "h2o") from error


class SampledRequest(Strict):
    """What chats and completions have in common; `null` is the same as leaving a field out."""

    path: ClassVar[str]
    builder: ClassVar[type[responses.ResponseBuilder]]
    default_max_tokens: ClassVar[int | None] = None

    model: str
    response_format: Any = lacking("writes plain text; leave it out", {"type": "text"})
    tools: Any = lacking("calls no tools; leave it out", [])
    tool_choice: Any = lacking("calls no tools; leave it out", "none", "auto")
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: Seed | None = None
    stop: Annotated[Stops | None, ONE_OR_MORE] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Token, float] | None = None
    logprobs: int | None = None
    # As vLLM's server takes them.
    top_k: TopK | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[tuple[int, ...], Field(max_length=1024)] | None = None
    # This server's own.
    h2o: Annotated[CacheChoice, NULL_IS_EMPTY] = CacheChoice()
    # Taken, and of no effect here.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @model_validator(mode="after")
    def _streams(self) -> Self:
        return self._need("stream_options", self.stream_options is None, "stream")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _need(self, name: str, is_unused: bool, other: str) -> Self:
        if not is_unused and not getattr(self, other):
            raise invalid(f"{name} needs {other}=true; set it, or leave this out.", name)
        return self

    @abstractmethod
    def _asked(self) -> tuple[list[Any], dict[str, Any]]:
        """Texts, tokens, or one chat as templates take it; parameters in place of fields."""

    def asked(self, standard: Mapping[str, float]) -> tuple[list[Any], SamplingParams]:
        """What is to be continued, and how; parameters that are left out are the standard."""
        prompts, own = self._asked()
        values = {name: value for name, value in self if name in _SAMPLING} | own
        given = {name: value for name, value in values.items() if value is not None}
        try:
            return prompts, SamplingParams(**{**standard, **given})
        except ValueError as error:
            found = _NAME.match(str(error))
            name = found.group(1) if found and found.group(1) in type(self).model_fields else None
            raise invalid(str(error), name) from error


class ChatMessage(Strict):
    """A message; the fields of an answer are taken too, so that clients can send it back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Any = ""
    name: str | None = None
    refusal: Any = lacking("reads text only; leave it out", [], {}, "")
    annotations: Any = lacking("reads text only; leave it out", [], {}, "")
    tool_calls: Any = lacking("reads text only; leave it out", [], {}, "")
    function_call: Any = lacking("reads text only; leave it out", [], {}, "")
    audio: Any = lacking("reads text only; leave it out", [], {}, "")

    parts: ClassVar[tuple[str, ...]] = ("text",)

    @property
    def turn(self) -> dict[str, str]:
        """The message as templates take it."""
        told = self.model_dump(include={"role", "content", "name"}, exclude_none=True)
        return told | {"role": self.role.replace("developer", "system")}

    @field_validator("content")
    @classmethod
    def _text(cls, content: Any) -> str:
        if content is None or isinstance(content, str):
            return content or ""
        such = f"parts such as {{'type': '{cls.parts[0]}', 'text': '...'}}"
        if not isinstance(content, list):
            raise PydanticCustomError("content", f"Input should be a text, or a list of {such}")
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in cls.parts:
                raise ValueError(
                    f"part of type {short_repr(kind)}; this server reads text only, so give {such}."
                )
            # The last two are in what this server has written.
            is_text = set(part) - {"annotations", "logprobs"} == {"type", "text"}
            if not is_text or not isinstance(part["text"], str):
                raise ValueError("a text part needs 'type' and a string 'text', nothing else.")
        return "".join(part["text"] for part in content)


class ChatRequest(SampledRequest):
    """A chat to be answered."""

    path: ClassVar[str] = "/v1/chat/completions"
    builder: ClassVar[type[responses.ResponseBuilder]] = responses.ChatResponseBuilder

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    functions: Any = lacking("calls no functions; leave it out", [])
    function_call: Any = lacking("calls no functions; leave it out", "none", "auto")
    modalities: Any = lacking("writes text only; leave it out, or give ['text']", ["text"])
    audio: Any = lacking("writes text only; leave it out")
    prediction: Any = None
    reasoning_effort: Any = lacking("has no such setting; leave it out", "none")
    verbosity: Any = lacking("has no such setting; leave it out", "medium")
    web_search_options: Any = lacking("searches nothing; leave it out")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise invalid(
                f"max_tokens={self.max_tokens} and max_completion_tokens="
                f"{self.max_completion_tokens} contradict each other; give one of them.",
                "max_tokens",
            )
        return self._need("top_logprobs", self.top_logprobs is None, "logprobs")

    def _asked(self) -> tuple[list[Any], dict[str, Any]]:
        wanted = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        own = {"max_tokens": wanted, "logprobs": logprobs}
        return [[one.turn for one in self.messages]], own


class CompletionRequest(SampledRequest):
    """A prompt or several, as text or as tokens, to be continued."""

    path: ClassVar[str] = "/v1/completions"
    builder: ClassVar[type[responses.ResponseBuilder]] = responses.CompletionResponseBuilder
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Any
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = lacking("only continues a prompt; leave it out", "")

    @field_validator("prompt")
    @classmethod
    def _listed(cls, value: Any) -> list[str] | list[list[int]]:
        """Text, texts, tokens or lists of tokens, always as a list of prompts."""
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
                f"best_of={short_repr(self.best_of)}: this server chooses among no outputs; leave"
                " it out, or give as many as n.",
                "best_of",
            )
        return self

    def _asked(self) -> tuple[list[Any], dict[str, Any]]:
        return self.prompt, {"prompt_logprobs": self.logprobs if self.echo else None}


def _are_tokens(value: Any) -> bool:
    # bool is an int to isinstance, and no token.
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


class InputMessage(ChatMessage):
    """A message in a response's input; what was an output fits too."""

    parts: ClassVar[tuple[str, ...]] = ("input_text", "output_text")

    type: str = "message"
    id: str | None = None
    status: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _message(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type", "message") != "message":
            raise ValueError("this server takes messages only.")
        return value


class ResponsesRequest(SampledRequest):
    """A conversation to be answered, in the form of OpenAI's Responses API."""

    path: ClassVar[str] = "/v1/responses"
    builder: ClassVar[type[responses.ResponseBuilder]] = responses.ResponsesBuilder

    input: Annotated[list[InputMessage], Field(min_length=1), TEXT_IS_SAID]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: Any = lacking("writes plain text; leave it out", {"format": {"type": "text"}}, {})
    previous_response_id: Any = lacking("remembers no responses; send all that was said as input")
    conversation: Any = lacking("remembers no conversations; send all that was said as input")
    background: bool | None = lacking("answers while the client waits; leave it out", False)
    truncation: str | None = lacking("shortens no prompts; leave it out", "disabled")
    reasoning: Any = lacking("has no such setting; leave it out", {})
    include: Any = lacking("has nothing more to tell; leave it out", [])
    n: int | None = lacking("gives one output: a response has no such field; leave it out", 1)
    max_tokens: int | None = lacking("has no such field in a response; give max_output_tokens")
    logprobs: int | None = lacking("has no such field in a response; leave it out")

    def _asked(self) -> tuple[list[Any], dict[str, Any]]:
        chat = [one.turn for one in self.input]
        if self.instructions:
            chat.insert(0, {"role": "system", "content": self.instructions})
        return [chat], {"max_tokens": self.max_output_tokens}


class TokenizeRequest(Strict):
    """A text or a chat of which the tokens are asked, as vLLM's server takes it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise invalid("give either prompt, a text, or messages, a chat.", "prompt")
        return self


class DetokenizeRequest(Strict):
    """Tokens of which the text is asked."""

    model: str | None = None
    tokens: list[int]


async def read_limited(request: Request, most: int) -> bytes:
    """Reads a body of so many bytes at most, whether or not its length is told before."""
    remedy = "send less, or start the server with a larger --max-body"
    told = f"the body has more than {most} bytes; {remedy}."
    too_large = ApiError(413, told, code="body_too_large")
    length, data = request.headers.get("content-length", "0"), bytearray()
    if length.isdecimal() and int(length) > most:
        raise too_large
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise too_large
    return bytes(data)


async def read_body(request: Request, model: type[BaseModel], most: int) -> tuple[Any, int]:
    """Reads and checks a body; tells its size too."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A page elsewhere cannot send this type without asking first, which no answer allows.
        remedy = "send the header 'Content-Type: application/json'"
        told = f"Content-Type {kind!r} is not JSON; {remedy}."
        raise ApiError(415, told, code="unsupported_media_type")
    raw = await read_limited(request, most)
    return await off_the_loop(len(raw), lambda: _parse(raw, model)), len(raw)


def _parse(raw: bytes, model: type[BaseModel]) -> BaseModel:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # An unknown field explains more than what follows from it.
        first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
        raise _explained(first, model) from error


_CODES = {
    "json_invalid": "invalid_json",
    "extra_forbidden": "unknown_field",
    "missing": "missing_field",
}
"""Of errors of pydantic's; all others are of a value."""
_TOLD = {
    "json_invalid": "the body is not JSON in UTF-8 ({error}); send one object.",
    "extra_forbidden": "{field} is not known; {hint}.",
    "missing": "{field} is missing; give it.",
    "too_short": "{field} is empty; give at least one.",
    "too_long": "{field} has {actual_length} entries; give {max_length} at most.",
    "value_error": "{field}={value}: {error}",
    "string_pattern_mismatch": (
        "{field} has the key {value}, which is not a token; give its number."
    ),
    "model_type": "{field} is not a JSON object, but {value}; send one.",
}


def _explained(problem: Mapping[str, Any], model: type[BaseModel]) -> ApiError:
    """Says what is wrong with a body in one sentence."""
    place = problem["loc"]
    if place[-1:] == ("[key]",):  # not the value, but its key
        place = place[:-2]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
    near = difflib.get_close_matches(field, model.model_fields, n=1) if len(place) == 1 else []
    told = _TOLD.get(problem["type"], "{field}={value} does not fit; give {should}.").format(
        **problem.get("ctx", {}),
        field=field or "the body",
        value=short_repr(problem["input"]),
        hint=f"did you mean {near[0]}" if near else "leave it out",
        should=problem["msg"].removeprefix("Input should be ").rstrip("."),
    )
    return invalid(told, field or None, _CODES.get(problem["type"], "invalid_value"))
