"""The body of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator, model_validator

from h2okv.engine.serving.sampling_params import SamplingParams
from h2okv.server.sampled_request import SampledRequest, Strict, field_error
from h2okv.server.settings import ServerSettings

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_EMPTY: tuple[Any, ...] = (None, [], {}, "")


class ChatMessage(Strict):
    """A message; the fields of an answer are taken too, so that clients can send it back."""

    role: str
    content: Any = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None

    @field_validator("role")
    @classmethod
    def _known(cls, role: str) -> str:
        if role not in _ROLES:
            raise ValueError(
                f"role={role!r} is not taken; give {', '.join(_ROLES)} (there are no tools here)."
            )
        return _ROLES[role]

    @field_validator("content")
    @classmethod
    def _text(cls, content: Any) -> str:
        """A text, or text parts put together."""
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise ValueError(
                f"content={content!r} does not fit; give a text, or a list of parts such as"
                " {'type': 'text', 'text': '...'}."
            )
        return "".join(_part(part) for part in content)

    @field_validator("refusal", "annotations", "tool_calls", "function_call", "audio")
    @classmethod
    def _none(cls, value: Any, info: Any) -> None:
        if value not in _EMPTY:
            raise ValueError(
                f"{info.field_name} in a message: this server reads text only; leave it out."
            )


class ChatRequest(SampledRequest):
    """A chat to be answered."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @model_validator(mode="after")
    def _fit(self) -> ChatRequest:
        if not self.messages:
            raise field_error("messages", "messages is empty; give at least one.")
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error(
                "top_logprobs", "top_logprobs needs logprobs=true; set it, or leave this out."
            )
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise field_error(
                "max_tokens",
                f"max_tokens={self.max_tokens} and max_completion_tokens="
                f"{self.max_completion_tokens} contradict each other; give one of them.",
            )
        return self

    @property
    def turns(self) -> list[dict[str, str]]:
        """The messages as templates take them."""
        return [
            {"role": one.role, "content": one.content or ""}
            | ({} if one.name is None else {"name": one.name})
            for one in self.messages
        ]

    def params(self, settings: ServerSettings, stops: tuple[str, ...]) -> SamplingParams:
        """Makes what the engine takes; see `SampledRequest.sampling`.

        Args:
            settings: The server's limits.
            stops: Texts that end an answer beside those of the request.

        Returns:
            The parameters.
        """
        wanted = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return self.sampling(
            settings,
            max_tokens=wanted,
            stop=(*(self.stop or ()), *stops),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


def _part(part: Any) -> str:
    """The text of one part of a message."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise ValueError(
            f"content has a part of type {kind!r}; this server reads text only, so give parts such"
            " as {'type': 'text', 'text': '...'}."
        )
    if set(part) != {"type", "text"} or not isinstance(part["text"], str):
        raise ValueError("a text part of content needs 'type' and a string 'text', nothing else.")
    return part["text"]
