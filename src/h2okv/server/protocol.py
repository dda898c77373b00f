"""Request bodies, checked field by field."""

from __future__ import annotations

import dataclasses
import difflib
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import Request
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from h2okv.config import Budget
from h2okv.engine.sampling_params import SamplingParams, short_repr
from h2okv.server.errors import ApiError, invalid
from h2okv.server.tokenization import off_the_loop

_SEEDS = 2**63
_TOKEN_DIGITS = 18
_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
_NAME = re.compile(r"(\w+)[\[=:]")

_REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "tools": ("calls no tools; leave it out", ([],)),
    "tool_choice": ("calls no tools; leave it out", ("none", "auto")),
    "functions": ("calls no functions; leave it out", ([],)),
    "function_call": ("calls no functions; leave it out", ("none", "auto")),
    "audio": ("writes text only; leave it out", ()),
    "web_search_options": ("searches nothing; leave it out", ()),
    "reasoning_effort": ("has no such setting; leave it out", ("none",)),
    "verbosity": ("has no such setting; leave it out", ("medium",)),
    "suffix": ("only continues a prompt; leave it out", ("",)),
    "response_format": (
        "writes plain text; leave it out, or give {'type': 'text'}",
        ({"type": "text"},),
    ),
    "modalities": ("writes text only; leave it out, or give ['text']", (["text"],)),
    "text": (
        "writes plain text; leave it out, or give {'format': {'type': 'text'}}",
        ({"format": {"type": "text"}}, {}),
    ),
    "previous_response_id": ("remembers no responses; send the whole conversation as input", ()),
    "conversation": ("remembers no conversations; send all of it as input", ()),
    "background": ("answers while the client waits; leave it out", (False,)),
    "truncation": ("shortens no prompts; leave it out", ("disabled",)),
    "reasoning": ("has no such setting; leave it out", ({},)),
    "include": ("has nothing more to tell; leave it out", ([],)),
}
"""OpenAI's fields for what this server lacks: why not, and the values that change nothing."""


class Strict(BaseModel):
    """A part of a request: unknown fields and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """What a stream says beside the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CacheChoice(Strict):
    """The cache budget of one request, and whether to tell what it still holds."""

    heavy: int | float | None = None
    recent: int | float | None = None
    sink: int | None = None
    kept_every: Annotated[int, Field(ge=1)] | None = None

    def budget(self, standard: Budget) -> Budget | None:
        """The server's budget with what is given; ``None`` if nothing is."""
        given = self.model_dump(include={"heavy", "recent", "sink"}, exclude_none=True)
        try:
            return dataclasses.replace(standard, **given) if given else None
        except ValueError as error:
            raise invalid(f"h2o: {error}", "h2o") from error


class SampledRequest(Strict):
    """What chats and completions have in common.

    `null` is the same as leaving a field out, as clients of OpenAI's API expect.
    """

    default_max_tokens: ClassVar[int | None] = None
    is_chat: ClassVar[bool] = True

    model: str
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: Annotated[tuple[str, ...], Field(max_length=64)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    # As vLLM's server takes them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[tuple[int, ...], Field(max_length=1024)] | None = None
    # This server's own.
    h2o: CacheChoice | None = None
    # Taken, and of no effect here.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator(*_REFUSED, mode="after", check_fields=False)
    @classmethod
    def _refused(cls, value: Any, info: ValidationInfo) -> Any:
        why, harmless = _REFUSED[info.field_name or ""]
        if value is not None and value not in harmless:
            raise ValueError(f"{info.field_name}={short_repr(value)}: this server {why}.")
        return value

    @model_validator(mode="after")
    def _together(self) -> SampledRequest:
        if self.stream_options is not None and not self.stream:
            raise invalid(
                "stream_options needs stream=true; set it, or leave this out.", "stream_options"
            )
        return self

    @property
    @abstractmethod
    def prompts(self) -> list[Any]:
        """What is to be continued: texts, tokens, or one chat as templates take it."""

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer tells how likely its tokens were."""
        return self.logprobs is not None and self.logprobs is not False

    @property
    def kept_every(self) -> int | None:
        """New tokens between two reports of what the cache holds; ``None`` for no reports."""
        return None if self.h2o is None else self.h2o.kept_every

    def _own_params(self) -> dict[str, Any]:
        """What this kind of request has in place of fields of the same name."""
        return {}

    def params(self, max_new_tokens: int, standard: Mapping[str, float]) -> SamplingParams:
        """The parameters as the engine takes them; what is left out is the standard."""
        values = self.model_dump(include=_SAMPLING) | self._own_params()
        if self.logit_bias is not None:
            values["logit_bias"] = _biases(self.logit_bias)
        if self.top_k == -1:  # all tokens, in vLLM's requests
            values["top_k"] = 0
        if self.seed is not None:
            values["seed"] = self.seed % _SEEDS
        wanted = values["max_tokens"]
        if wanted is not None and wanted > max_new_tokens:
            raise invalid(
                f"max_tokens={short_repr(wanted)} is more than this server writes; give"
                f" {max_new_tokens} at most.",
                "max_tokens",
            )
        try:
            given = {name: value for name, value in values.items() if value is not None}
            return SamplingParams(**{**standard, **given})
        except ValueError as error:
            found = _NAME.match(str(error))
            name = found.group(1) if found and found.group(1) in type(self).model_fields else None
            raise invalid(str(error), name) from error


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    """Tokens, which are strings in JSON, as numbers."""
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) <= _TOKEN_DIGITS):
            raise invalid(
                f"logit_bias has the key {short_repr(token)}, which is not a token; give its"
                " number.",
                "logit_bias",
            )
    return {int(token): bias for token, bias in biases.items()}


_EMPTY: tuple[Any, ...] = (None, [], {}, "")


class ChatMessage(Strict):
    """A message; the fields of an answer are taken too, so that clients can send it back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Any = ""
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None

    parts: ClassVar[tuple[str, ...]] = ("text",)

    @property
    def turn(self) -> dict[str, str]:
        """The message as templates take it."""
        told = self.model_dump(include={"role", "content", "name"}, exclude_none=True)
        return told | {"role": self.role.replace("developer", "system")}

    @field_validator("content")
    @classmethod
    def _text(cls, content: Any) -> str:
        """A text, or text parts put together."""
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise ValueError(
                f"content={short_repr(content)} does not fit; give a text, or a list of parts such"
                f" as {{'type': '{cls.parts[0]}', 'text': '...'}}."
            )
        return "".join(_part(part, cls.parts) for part in content)

    @field_validator("refusal", "annotations", "tool_calls", "function_call", "audio")
    @classmethod
    def _none(cls, value: Any, info: ValidationInfo) -> None:
        if value not in _EMPTY:
            raise ValueError(
                f"{info.field_name} in a message: this server reads text only; leave it out."
            )


def _part(part: Any, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        raise ValueError(
            f"content has a part of type {short_repr(kind)}; this server reads text only, so give"
            f" parts such as {{'type': '{kinds[0]}', 'text': '...'}}."
        )
    # The last two are in what this server has written.
    if set(part) - {"annotations", "logprobs"} != {"type", "text"} or not isinstance(
        part["text"], str
    ):
        raise ValueError("a text part of content needs 'type' and a string 'text', nothing else.")
    return part["text"]


class ChatRequest(SampledRequest):
    """A chat to be answered."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @model_validator(mode="after")
    def _fit(self) -> ChatRequest:
        if not self.messages:
            raise invalid("messages is empty; give at least one.", "messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid(
                "top_logprobs needs logprobs=true; set it, or leave this out.", "top_logprobs"
            )
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise invalid(
                f"max_tokens={self.max_tokens} and max_completion_tokens="
                f"{self.max_completion_tokens} contradict each other; give one of them.",
                "max_tokens",
            )
        return self

    @property
    def prompts(self) -> list[Any]:
        return [[one.turn for one in self.messages]]

    def _own_params(self) -> dict[str, Any]:
        wanted = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return {"max_tokens": wanted, "logprobs": logprobs}


class CompletionRequest(SampledRequest):
    """A prompt or several, as text or as tokens, to be continued."""

    default_max_tokens: ClassVar[int | None] = 16
    is_chat: ClassVar[bool] = False

    prompt: Any
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[Any]:
        return list(self.prompt)

    @field_validator("prompt")
    @classmethod
    def _listed(cls, value: Any) -> list[str] | list[list[int]]:
        """Text, texts, tokens or lists of tokens, always as a list of prompts."""
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if all(isinstance(one, str) for one in value):
                return value
            if _are_tokens(value):
                return [value]
            if all(_are_tokens(one) for one in value):
                return value
        raise ValueError(
            f"prompt={short_repr(value)} does not fit; give a text, a list of texts, a list of"
            " tokens, or a list of lists of tokens, none of the lists empty."
        )

    @model_validator(mode="after")
    def _best(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid(
                f"best_of={short_repr(self.best_of)}: this server chooses among no outputs; leave"
                " it out, or give as many as n.",
                "best_of",
            )
        return self

    def _own_params(self) -> dict[str, Any]:
        return {"prompt_logprobs": self.logprobs if self.echo else None}


class InputMessage(ChatMessage):
    """A message in a response's input; what was an output fits too."""

    parts: ClassVar[tuple[str, ...]] = ("input_text", "output_text")

    type: str = "message"
    id: str | None = None
    status: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _message(cls, value: Any) -> Any:
        kind = value.get("type", "message") if isinstance(value, dict) else "message"
        if kind != "message":
            raise ValueError(f"type={short_repr(kind)}: this server takes messages only.")
        return value


class ResponsesRequest(SampledRequest):
    """A conversation to be answered, in the form of OpenAI's Responses API."""

    input: Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: Any = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    truncation: str | None = None
    reasoning: Any = None
    include: Any = None

    @field_validator("input", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _single(self) -> ResponsesRequest:
        for name, only in (("n", 1), ("max_tokens", None), ("logprobs", None)):
            value = getattr(self, name)
            if value not in (None, only):
                more = "; give max_output_tokens" if name == "max_tokens" else "; leave it out"
                raise invalid(
                    f"{name}={short_repr(value)}: a response has no such field{more}.", name
                )
        return self

    @property
    def prompts(self) -> list[Any]:
        system = {"role": "system", "content": self.instructions or ""}
        return [[*([system] if self.instructions else []), *(one.turn for one in self.input)]]

    def _own_params(self) -> dict[str, Any]:
        return {"max_tokens": self.max_output_tokens}


class TokenizeRequest(Strict):
    """A text or a chat of which the tokens are asked, as vLLM's server takes it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise invalid("give either prompt, a text, or messages, a chat.", "prompt")
        return self


class DetokenizeRequest(Strict):
    """Tokens of which the text is asked."""

    model: str | None = None
    tokens: list[int]


def _are_tokens(value: Any) -> bool:
    # bool is an int to isinstance, and no token.
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, model: type[Body]) -> Body:
    """Reads and checks a body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A page elsewhere cannot send this type without asking first, which no answer allows.
        raise ApiError(
            415,
            f"Content-Type {kind!r} is not JSON; send the header 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    raw = await request.body()
    return await off_the_loop(len(raw), lambda: _parse(raw, model))


def _parse(raw: bytes, model: type[Body]) -> Body:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # An unknown field explains more than what follows from it.
        first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
        raise _explained(first, model) from error


def _explained(problem: Mapping[str, Any], model: type[BaseModel]) -> ApiError:
    """Says what is wrong with a body in one sentence."""
    place, kind, context = problem["loc"], problem["type"], problem.get("ctx", {})
    field, code = _path(place), "invalid_value"
    if kind == "json_invalid":
        message = f"the body is not JSON in UTF-8 ({context['error']}); send one JSON object."
        return invalid(message, code="invalid_json")
    if kind == "extra_forbidden":
        message, code = f"{field} is not known; {_hint(place, model)}.", "unknown_field"
    elif kind == "missing":
        message, code = f"{field} is missing; give it.", "missing_field"
    elif kind == "too_short":
        message = f"{field} is empty; give at least one."
    elif kind == "too_long":
        count, most = context["actual_length"], context["max_length"]
        message = f"{field} has {count} entries; give {most} at most."
    elif kind == "value_error":
        message = f"{field}: {context['error']}" if len(place) > 1 else str(context["error"])
    elif not field:
        message = "the body is not a JSON object; send one."
    else:
        should = problem["msg"].removeprefix("Input should be ").rstrip(".")
        message = f"{field}={short_repr(problem['input'])} does not fit; give {should}."
    return invalid(message, field or None, code)


def _path(location: tuple[str | int, ...]) -> str:
    """A place in a body, as ``messages[0].content``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _hint(location: tuple[str | int, ...], model: type[BaseModel]) -> str:
    """What may be meant by an unknown field."""
    near = []
    if len(location) == 1:
        near = difflib.get_close_matches(str(location[0]), model.model_fields, n=1)
    return f"did you mean {near[0]}" if near else "leave it out"
