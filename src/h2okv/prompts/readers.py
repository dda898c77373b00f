"""Reads the fields of requests: one table for each kind of object, one form of error.

The limits of prompts are here too, as every front end checks them.
"""

from __future__ import annotations

import copyreg
import difflib
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Self

from h2okv.records import short_repr

Path = tuple[str | int, ...]
Reader = Callable[[Any, Path], Any]
"""Returns a checked value; raises `FieldError` with the value's path, which it is given."""
Unsupported = Mapping[str, tuple[Any, ...]]
"""Unsupported fields: the reason, and the values that have no effect."""

EMPTY: tuple[Any, ...] = (None, [], {}, "")
"""Values that mean the same as leaving a field out."""
UNLIMITED = 2**63 - 1


class FieldError(ValueError):
    """An invalid field: its path, and the problem, which follows the path in the message."""

    usual_code = "invalid_value"

    def __init__(self, path: Sequence[str | int], problem: str, code: str | None = None) -> None:
        self.path, self.problem, self.code = tuple(path), problem, code or self.usual_code
        super().__init__(f"{self.name}{problem}" + ("" if problem.endswith("?") else "."))

    def __reduce__(self) -> Any:  # it crosses processes, without `__init__`
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]

    @classmethod
    def about(cls, name: str, problem: str) -> Self:
        """Return the error of a field, or of what some words describe, such as the prompt."""
        return cls((name,), problem) if name.isidentifier() else cls((), f"{name}{problem}")

    @property
    def name(self) -> str:
        """The field's path as in Python: ``messages[0].role``."""
        steps = (f"[{at}]" if isinstance(at, int) else f".{at}" for at in self.path)
        return "".join(steps).lstrip(".")


def unlike(expected: str, value: Any, path: Path) -> FieldError:
    """Return the error of a value that must be something else."""
    return FieldError(path, f" must be {expected}, got {short_repr(value)}")


@dataclass(frozen=True)
class Fields:
    """The fields that an object may have; reads it, and leaves out what changes nothing."""

    readers: Mapping[str, Reader]  # null, and what is read as `None`, is left out
    required: Mapping[str, str] = field(default_factory=dict)  # with what to give
    ignored: Container[str] = ()  # as they change no answer
    unsupported: Unsupported = field(default_factory=dict)  # takes precedence over `readers`
    is_open: bool = False  # whether unknown fields are ignored too

    def __call__(self, value: Any, path: Path = ()) -> dict[str, Any]:
        """Return the values by field."""
        if not isinstance(value, Mapping):
            raise unlike("an object", value, path)
        read: dict[str, Any] = {}
        for name, entry in value.items():
            if name in self.unsupported:
                reason, *harmless = self.unsupported[name]
                if entry not in EMPTY and entry not in harmless:
                    raise FieldError((*path, name), f"={short_repr(entry)}: {reason}")
            elif name in self.readers:
                if entry is not None:
                    read[name] = self.readers[name](entry, (*path, name))
            elif not self.is_open and name not in self.ignored and entry not in EMPTY:
                near = difflib.get_close_matches(str(name), self.readers, n=1)
                hint = f"did you mean {near[0]}?" if near else "leave it out"
                raise FieldError((*path, name), f" is not known; {hint}", "unknown_field")
        for name, such in self.required.items():
            if value.get(name) is None:
                raise FieldError((*path, name), f" is missing; give {such}", "missing_field")
        return {name: entry for name, entry in read.items() if entry is not None}


def any_value(value: Any, path: Path) -> Any:
    """Return the value as it is."""
    return value


def text(value: Any, path: Path) -> str:
    """Read a text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise unlike("a text", value, path)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise FieldError(path, " has half of a surrogate pair; correct the text") from error
    return value


def name(value: Any, path: Path) -> str:
    """Read a text that is not empty."""
    if not value or not isinstance(value, str):
        raise unlike("a text that is not empty", value, path)
    return text(value, path)


def text_or_nothing(value: Any, path: Path) -> str | None:
    """Read a text; leave out values of other types."""
    return text(value, path) if isinstance(value, str) else None


def instance(expected: str, kind: type) -> Reader:
    """Return the reader of a value of a type."""

    def read(value: Any, path: Path) -> Any:
        if not isinstance(value, kind):
            raise unlike(expected, value, path)
        return value

    return read


boolean = instance("true or false", bool)


def mapping(value: Any, path: Path) -> dict[str, Any]:
    """Read an object with any fields."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise unlike("an object", value, path)
    return dict(value)


def integer(minimum: float, maximum: float = UNLIMITED) -> Reader:
    """Return the reader of an int; 8.0 is one too, as JSON does not distinguish it from 8."""
    return number(minimum, maximum, int)


def number(minimum: float, maximum: float, kind: type = float) -> Reader:
    """Return the reader of a finite number."""
    expected = "a whole number" if kind is int else "a number"
    if maximum < UNLIMITED:
        expected += f" from {minimum:.12g} to {maximum:.12g}"
    elif maximum == UNLIMITED:
        expected += f" of {minimum:g} or more"

    def read(value: Any, path: Path) -> Any:
        is_kind = isinstance(value, Integral if kind is int else Real)
        is_kind = is_kind or (isinstance(value, float) and value.is_integer())
        # A bool is not a number here; comparisons are false for NaN.
        if isinstance(value, bool) or not is_kind or not minimum <= value <= maximum:
            is_large = is_kind and value > maximum == UNLIMITED
            raise unlike("less than 2**63" if is_large else expected, value, path)
        return kind(value)

    return read


def share(value: Any, path: Path) -> float:
    """Read a share of 1, also as a text such as ``2%``."""
    read = value
    if isinstance(value, str):
        with suppress(ValueError):
            read = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    if type(read) not in (int, float) or not 0 <= read <= 1:
        raise unlike("a share such as 0.02 or '2%'", value, path)
    return float(read)


def one_of(*choices: str) -> Reader:
    """Return the reader of a text that is one of a few."""
    expected = " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))

    def read(value: Any, path: Path) -> str:
        if not isinstance(value, str) or value not in choices:
            raise unlike(expected, value, path)
        return value

    return read


def list_of(reader: Reader, expected: str = "a list", limit: int = UNLIMITED) -> Reader:
    """Return the reader of a list with up to `limit` entries."""

    def read(value: Any, path: Path) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise unlike(expected, value, path)
        if len(value) > limit:
            raise FieldError(path, f" must have at most {limit} entries, got {len(value)}")
        return [reader(entry, (*path, at)) for at, entry in enumerate(value)]

    return read


def one_or_more(reader: Reader, limit: int = UNLIMITED) -> Reader:
    """Return the reader of a list of texts, or of a single one."""
    read = list_of(reader, "a text or a list of texts", limit)
    return lambda value, path: read([value] if isinstance(value, str) else value, path)


def by_type(readers: Mapping[str, Reader]) -> Reader:
    """Return the reader of an object that is read, without its ``type``, as that says."""
    find = one_of(*readers)

    def read(value: Any, path: Path) -> Any:
        fields = mapping(value, path)
        kind = find(fields.pop("type", None), (*path, "type"))
        return readers[kind](fields, path)

    return read


def check_settings(settings: Any, readers: Mapping[str, Reader]) -> None:
    """Check and convert fields of a frozen dataclass; a default of ``None`` may stay."""
    for name, reader in readers.items():
        value = getattr(settings, name)
        if value is not None or getattr(type(settings), name, ()) is not None:
            vars(settings)[name] = reader(value, (name,))


# --- prompts --------------------------------------------------------------------------------------


class PromptTooLongError(FieldError):
    """A prompt is longer than can be read, or leaves no room for its output."""

    usual_code = "context_length_exceeded"


@dataclass(frozen=True)
class PromptLimits:
    """Limits of the prompts of a model, or of an engine with this model."""

    vocab_size: int
    max_context: int | None = None  # tokens of a prompt and its output together
    max_prompt_tokens: int = sys.maxsize

    def room(self, length: int, max_tokens: int) -> int:
        """Return how many tokens may follow ``length`` ones, at most ``max_tokens``."""
        context = self.max_context
        return max_tokens if context is None else min(max_tokens, context - length)

    def check_tokens(self, tokens: Iterable[Any], name: str = "the prompt") -> None:
        """Raise FieldError for anything but a token of the model's vocabulary."""
        for token in tokens:
            is_int = isinstance(token, Integral) and not isinstance(token, bool)
            if not is_int or not 0 <= token < self.vocab_size:
                raise FieldError.about(
                    name,
                    f": token must be 0 to {self.vocab_size - 1} for this model, got"
                    f" {short_repr(token)}; use the model's own tokenizer",
                )

    def check_length(
        self,
        length: int,
        num_new: int = 1,
        name: str = "the prompt",
        remedy: str = "shorten it",
        got: str | None = None,
    ) -> None:
        """Raise FieldError for a prompt without tokens, or too long for ``num_new`` more."""
        if not length:
            raise FieldError.about(name, " has no tokens; give at least one")
        if length > (limit := self.max_prompt_tokens):
            raise PromptTooLongError.about(
                name, f" must have at most {limit} tokens, got {got or length}; {remedy}"
            )
        if self.room(length, num_new) < num_new:
            raise PromptTooLongError.about(
                name,
                f" and its output must fit the model's context of {self.max_context} tokens,"
                f" got {got or length} and {num_new}; {remedy}",
            )


# --- requests -------------------------------------------------------------------------------------

_TOOLS = "tools are for /v1/chat/completions and /v1/responses; leave it out"
_FUNCTIONS = "functions are given as tools, and function_call as tool_choice; use these"
_PLAIN_TEXT = "answers are plain text; leave it out"
_TEXT_ONLY = "answers are text only; leave it out, or give ['text']"
_STORED = "no responses are stored; send the whole conversation"
_UNKNOWN = "this is not supported; leave it out"
_UNSUPPORTED: Unsupported = {
    "tools": (_TOOLS,),
    "tool_choice": (_TOOLS, "none", "auto"),
    "functions": (_FUNCTIONS,),
    "function_call": (_FUNCTIONS, "none", "auto"),
    "system": ("a system message is the first of messages; give it there",),
    "web_search_options": ("there is no web search; leave it out",),
    "response_format": (_PLAIN_TEXT, {"type": "text"}),
    "structured_outputs": (_PLAIN_TEXT,),
    "modalities": (_TEXT_ONLY, ["text"]),
    "audio": (_TEXT_ONLY,),
    "suffix": ("prompts are only continued; leave it out",),
    "previous_response_id": (_STORED,),
    "conversation": (_STORED,),
    "background": ("answers come while the client waits; leave it out", False),
    "truncation": ("prompts are not shortened; leave it out", "disabled"),
    # vLLM's, whose clients may write out the defaults.
    "add_special_tokens": (_UNKNOWN, True),
    "chat_template": ("the template is the model's own; leave it out",),
    "documents": (_UNKNOWN,),
    "include_stop_str_in_output": (_UNKNOWN, False),
    "length_penalty": (_UNKNOWN, 1),
    "min_tokens": (_UNKNOWN, 0),
    "skip_special_tokens": (_UNKNOWN, True),
    "use_beam_search": (_UNKNOWN, False),
}
_IGNORED = frozenset(
    {"add_generation_prompt", "cache_control", "cache_prompt", "chat_template_kwargs",
     "continue_final_message", "include", "include_reasoning", "max_tool_calls", "metadata",
     "parallel_tool_calls", "prediction", "priority", "prompt_cache_key", "prompt_cache_options",
     "prompt_cache_retention", "reasoning", "reasoning_effort", "request_id", "safety_identifier",
     "service_tier", "spaces_between_special_tokens", "store", "thinking", "user", "verbosity"}
)  # fmt: skip
"""Bookkeeping, hints to other servers, fields of chats alone: they change no completion."""


def request_fields(
    readers: Mapping[str, Reader],
    required: Mapping[str, str],
    unsupported: Unsupported | None = None,
) -> Fields:
    """Return the fields of a request; those of `unsupported` are refused with a reader too."""
    refused = {name: reason for name, reason in _UNSUPPORTED.items() if name not in readers}
    return Fields(readers, required, _IGNORED, {**refused, **(unsupported or {})})
