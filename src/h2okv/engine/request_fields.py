"""Fields of a text request, the same in a server's body and in a line of a batch."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any

from h2okv.engine.sampling_params import SamplingParams
from h2okv.prompts.messages import EMPTY, FieldError
from h2okv.records import short_repr

Unsupported = Mapping[str, tuple[Any, ...]]
"""Unsupported fields: the reason, and the values that have no effect."""

SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - {
    "prompt_logprobs",
    "grammar",
    "skip_special_tokens",
}
_TOOLS = "tools are for /v1/chat/completions and /v1/responses; leave it out"
_FUNCTIONS = "functions are given as tools, and function_call as tool_choice; use these"
_PLAIN_TEXT = "answers are plain text; leave it out"
_TEXT_ONLY = "answers are text only; leave it out, or give ['text']"
_STORED = "no responses are stored; send the whole conversation"
_UNKNOWN = "this is not supported; leave it out"
UNSUPPORTED: Unsupported = {
    "tools": (_TOOLS,),
    "tool_choice": (_TOOLS, "none", "auto"),
    "functions": (_FUNCTIONS,),
    "function_call": (_FUNCTIONS, "none", "auto"),
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
IGNORED = frozenset(
    {"add_generation_prompt", "cache_control", "cache_prompt", "chat_template_kwargs",
     "continue_final_message", "include", "include_reasoning", "max_tool_calls", "metadata",
     "parallel_tool_calls", "prediction", "priority", "prompt_cache_key", "prompt_cache_options",
     "prompt_cache_retention", "reasoning", "reasoning_effort", "request_id", "safety_identifier",
     "service_tier", "spaces_between_special_tokens", "store", "thinking", "user", "verbosity"}
)  # fmt: skip
"""Bookkeeping, hints to other servers, fields of chats alone: they change no completion."""


def known_fields(
    fields: Mapping[str, Any], names: Collection[str], unsupported: Unsupported = UNSUPPORTED
) -> dict[str, Any]:
    """Leave out the fields that change nothing; `unsupported` takes precedence over `names`.

    Raises:
        FieldError: If a field is unknown or unsupported.
    """
    read = {}
    for name, value in fields.items():
        if name in unsupported:
            reason, *harmless = unsupported[name]
            if value not in EMPTY and value not in harmless:
                raise FieldError((name,), f"={short_repr(value)}: {reason}")
        elif name in names:
            read[name] = value
        elif name not in IGNORED and value not in EMPTY:
            near = difflib.get_close_matches(name, [*names], n=1)
            hint = f"did you mean {near[0]}" if near else "leave it out"
            raise FieldError((name,), f" is not known; {hint}", "unknown_field")
    return read


def sampling_values(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sampling fields of a request, for `SamplingParams`; what is null is left out.

    Raises:
        FieldError: If ``max_tokens`` and ``max_completion_tokens`` differ, or a key of
            ``logit_bias`` is not a token.
    """
    values = {name: fields[name] for name in SAMPLING if fields.get(name) is not None}
    limit = fields.get("max_completion_tokens")
    if limit is not None and values.setdefault("max_tokens", limit) != limit:
        other = f"={short_repr(values['max_tokens'])} and max_completion_tokens={limit!r}"
        problem = f"{other} contradict each other; give one of them"
        raise FieldError(("max_tokens",), problem)
    if values.get("top_k") == -1:  # all tokens, in vLLM's requests
        values["top_k"] = 0
    if type(values.get("seed")) is int:
        values["seed"] %= 2**63
    if isinstance(biases := values.get("logit_bias"), Mapping):
        values["logit_bias"] = {_token(key): bias for key, bias in biases.items()}
    return values


def _token(key: Any) -> int:
    """Read a token that is a key in JSON, and so a string."""
    if not str(key).isdecimal() or len(str(key)) > 18:
        problem = f" has the key {short_repr(key)}, which is not a token; give its number"
        raise FieldError(("logit_bias",), problem)
    return int(key)
