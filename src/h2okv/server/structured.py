"""Grammars of answers: JSON as a format, and tool calls that a request demands."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from h2okv.engine.structured import json_grammar, json_rule
from h2okv.integration.messages import EMPTY, FieldError
from h2okv.integration.tool_messages import CallForm, call_form
from h2okv.records import short_repr
from h2okv.server.tools import CLOSE, MARKERS, OPEN

_FORMATS = ("text", "json_object", "json_schema")
_CHOICES = ("auto", "none", "required")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class CallSyntax:
    """How a model writes tool calls, and which of their markers are tokens of their own to it."""

    form: CallForm
    marker_tokens: Mapping[str, int]
    has_special_markers: bool = False  # which texts leave out

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> CallSyntax:
        """Return the syntax of a tokenizer and its chat template."""
        added = tokenizer.get_added_vocab()
        tokens = {marker: added[marker] for marker in MARKERS if marker in added}
        decoder = tokenizer.added_tokens_decoder
        is_special = any(decoder[token].special for token in tokens.values())
        return cls(call_form(tokenizer), tokens, is_special)

    def marker(self, text: str) -> str:
        """Return a marker as a grammar has it."""
        # llguidance knows added tokens by their numbers only, special or not.
        token = self.marker_tokens.get(text)
        return json.dumps(text) if token is None else f"<[{token}]>"


def read_response_format(value: Any) -> Mapping[str, Any] | None:
    """Return the JSON schema that answers must fit; ``None`` for answers of plain text.

    Raises:
        FieldError: If the format is not one of OpenAI's.
    """
    if value in EMPTY:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in _FORMATS:
        kinds = ", ".join(_FORMATS)
        raise FieldError((), f"={short_repr(value)} does not fit; give a type of {kinds}")
    if kind != "json_schema":
        return None if kind == "text" else {"type": "object"}
    stated = value.get("json_schema")
    if not isinstance(stated, Mapping):
        example = '{"name": "answer", "schema": {...}}'
        raise FieldError(("json_schema",), f"={short_repr(stated)} does not fit; give {example}")
    schema = stated.get("schema")
    if not isinstance(schema, Mapping):
        problem = f"={short_repr(schema)} does not fit; give a JSON schema"
        raise FieldError(("json_schema", "schema"), problem)
    return schema


def read_tool_choice(value: Any, names: Sequence[str]) -> str | Mapping[str, str]:
    """Return ``"auto"``, ``"none"``, ``"required"``, or the function's ``{"name": ...}``.

    Raises:
        FieldError: If the choice is not one of OpenAI's, or needs a tool that is missing.
    """
    if value in EMPTY:
        return "auto"
    if isinstance(value, str) and value in _CHOICES:
        if value == "required" and not names:
            raise FieldError((), "='required' needs tools; give some, or leave it out")
        return value
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or value.get("type", "function") != "function":
        example = '{"type": "function", "function": {"name": "..."}}'
        choices = ", ".join((*_CHOICES, example))
        raise FieldError((), f"={short_repr(value)} does not fit; give one of {choices}")
    if name not in names:
        choices = ", ".join(names) or "there are none"
        problem = f"={short_repr(name)} is not one of the tools ({choices}); give one of them"
        raise FieldError(("function", "name"), problem)
    return {"name": name}


def answer_grammar(
    schema: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, str],
    is_parallel: bool,
    syntax: CallSyntax,
    strict: Collection[str] = (),
) -> str | None:
    """Return the grammar of an answer; ``None`` where any text is allowed.

    Args:
        schema: As `read_response_format` returns it.
        tools: As `read_tools` returns them.
        choice: As `read_tool_choice` returns it.
        is_parallel: Whether one answer may have several calls.
        syntax: How the model writes calls.
        strict: Functions whose arguments must fit their schemas in calls that the model is free to
            make. Only where a token of its own begins a call, which no other text can contain.
    """
    is_hermes = syntax.form == "hermes"
    masks_text = bool(strict) and is_hermes and OPEN in syntax.marker_tokens
    if not tools or choice == "none" or (choice == "auto" and schema is None and not masks_text):
        return None if schema is None else json_grammar(schema)
    functions = [tool["function"] for tool in tools]
    if choice == "auto" and schema is not None and syntax.form == "llama":
        return json_grammar(_either(schema, functions))
    if isinstance(choice, Mapping):
        functions = [entry for entry in functions if entry["name"] == choice["name"]][:1]
        is_parallel = False
    start = "calls"
    lines = []
    if choice == "auto":
        # Which arguments are right is left to the model here, as in answers of plain text.
        functions = [
            entry if entry["name"] in strict else {**entry, "parameters": {"type": "object"}}
            for entry in functions
        ]
        start = "TEXT? calls?" if schema is None else "answer | calls"
        lines = [r"TEXT: /(?s:.+)/" if schema is None else f"answer: {json_rule(schema)}"]
    key, separator = ("arguments", r"\n") if is_hermes else ("parameters", "; ")
    names = [f"call_{number}" for number in range(len(functions))]
    call = " | ".join(names)
    if is_hermes:
        call = rf'{syntax.marker(OPEN)} "\n" ({call}) "\n" {syntax.marker(CLOSE)}'
    more = f' ("{separator}" call)*' if is_parallel else ""
    lines = [f"start: {start}", *lines, f"calls: call{more}", f"call: {call}"]
    for number, (name, function) in enumerate(zip(names, functions, strict=True)):
        head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
        lines += [
            f'{name}: {json.dumps(head)} arguments_{number} "}}"',
            f"arguments_{number}: {json_rule(_parameters(function, number))}",
        ]
    return "\n".join(lines)


def _either(schema: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a schema of answers that fit another, or are a call: both begin alike."""
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": entry["name"]}, "parameters": {"type": "object"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for entry in functions
    ]
    return {**definitions, "anyOf": [schema, *calls]}


def _parameters(function: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, which are an object."""
    schema = function.get("parameters")
    if not schema:
        return _NO_PARAMETERS
    if schema.get("type", "object") != "object":
        path = ("tools", number, "function", "parameters", "type")
        problem = f"={short_repr(schema['type'])} does not fit; arguments are an object"
        raise FieldError(path, problem)
    return {"type": "object", **schema}
