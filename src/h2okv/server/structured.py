"""Grammars of answers: JSON as a format, and tool calls that a request demands."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from h2okv.engine.structured import SchemaError, enforceable, json_grammar, raw_rule
from h2okv.prompts import readers
from h2okv.prompts.chat_template import CallForm, call_form
from h2okv.prompts.messages import read_schema
from h2okv.prompts.readers import EMPTY, FieldError, Fields, Reader
from h2okv.server.tools import CLOSE, MARKERS, OPEN, PYTHON_TAG

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS = {"type": "object"}
_BLANKS = r"[ \t\r\n]*"
_GAP = r"/[ \t\r\n]{1,4}/"
"""Whitespace after a complete call. It promises no further one: the answer may end there."""


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


_SCHEMA = Fields(
    {
        "name": readers.any_value,
        "description": readers.any_value,
        "schema": read_schema,
        "strict": readers.boolean,
    },
    {"schema": "a JSON schema"},
)
_NESTED = Fields({"json_schema": _SCHEMA}, {"json_schema": '{"name": "answer", "schema": {...}}'})
_ANY_OBJECT = Fields({"schema": read_schema})
_NO_SCHEMA = Fields({})


def _format(json_schema: Reader) -> Reader:
    """Return the reader of a format, as the JSON schema that answers must fit, if any."""
    read = readers.by_type(
        {
            "text": lambda value, path: _NO_SCHEMA(value, path).get("schema"),
            "json_object": lambda value, path: {
                "type": "object", **_ANY_OBJECT(value, path).get("schema", {}),
            },
            "json_schema": json_schema,
        }
    )  # fmt: skip
    return lambda value, path: None if value in EMPTY else read(value, path)


read_response_format = _format(lambda value, path: _NESTED(value, path)["json_schema"]["schema"])
"""Reads the format of a chat or completion as the schema that answers must fit."""
read_text_format = _format(lambda value, path: _SCHEMA(value, path)["schema"])
"""Reads the same field of a request in the format of OpenAI's Responses API."""


def answer_grammar(
    schema: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, str],
    is_parallel: bool,
    syntax: CallSyntax,
    strict: Collection[str] = (),
) -> str | None:
    """Return the grammar of an answer; ``None`` where any text is allowed.

    After a complete answer it always may end, with or without a call's closing marker: only an
    opening marker, or the beginning of a call's JSON, leads to a further call. `strict` are the
    functions whose arguments must fit their schemas in calls that the model is free to make; all
    else that the model may write stays as without them.
    """
    is_auto = choice == "auto"
    if not tools or choice == "none" or (is_auto and schema is None and not strict):
        return None if schema is None else json_grammar(schema)
    calls = _Calls(tools, choice, is_parallel, syntax, strict)
    if not is_auto:
        lines = ["start: calls", *calls.marked()]
    elif schema is None:
        lines = [*calls.among_text()]
    else:
        # A call without a marker and an answer begin alike: one JSON value may be either.
        lines = ["start: value", f"value: {calls.or_answer(schema)}"]
        if syntax.form == "hermes":
            lines = ["start: value | calls", *lines[1:], *calls.marked()]
    return "\n".join(lines)


class _Calls:
    """The rules of a grammar for calls of some tools."""

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        choice: str | Mapping[str, str],
        is_parallel: bool,
        syntax: CallSyntax,
        strict: Collection[str],
    ) -> None:
        self._syntax, self._is_hermes = syntax, syntax.form == "hermes"
        self._is_parallel = is_parallel and not isinstance(choice, Mapping)
        self._key = "arguments" if self._is_hermes else "parameters"
        self._functions: dict[str, dict[str, Any]] = {}  # arguments by name; the first one counts
        for number, tool in enumerate(tools):
            function, name = tool["function"], tool["function"]["name"]
            if isinstance(choice, Mapping) and name != choice["name"]:
                continue
            # Which other arguments are right is left to the model, as in answers of plain text.
            is_bound = choice != "auto" or name in strict
            schema = parameters(function, number) if is_bound else _ANY_ARGUMENTS
            try:
                self._functions.setdefault(name, enforceable(schema))
            except SchemaError as error:
                path = ("tools", number, "function", "parameters")
                raise FieldError(path, f": {error.reason}") from error

    def marked(self) -> Iterator[str]:
        """Yield the rules of one or several calls, each with its markers if the model has some."""
        more = f" (more call)* {_GAP}?" if self._is_parallel else f" {_GAP}?"
        separator = f"{_GAP}?" if self._is_hermes else f"{_GAP} | /;[ \\t\\r\\n]{{0,4}}/"
        yield f"calls: call{more}"
        if self._is_parallel:
            yield f"more: {separator}"
        yield from self._call()

    def _call(self) -> Iterator[str]:
        """Yield the rules of one call, with markers if the model has some."""
        names = [f"call_{number}" for number in range(len(self._functions))]
        call = " | ".join(names)
        if self._is_hermes:
            opening, closing = map(self._syntax.marker, (OPEN, CLOSE))
            call = f"{opening} {_GAP}? ({call}) ({_GAP}? {closing})?"
        yield f"call: {call}"
        for rule, name in zip(names, self._functions, strict=True):
            written = json.dumps(name, ensure_ascii=False)
            head = f'{{"name": {written}, "{self._key}": '
            yield f'{rule}: {json.dumps(head)} arguments_{rule[5:]} "}}"'
        yield from self._arguments()

    def _arguments(self) -> Iterator[str]:
        for at, schema in enumerate(self._functions.values()):
            yield f"arguments_{at}: {raw_rule(schema)}"

    def or_answer(self, schema: Mapping[str, Any]) -> str:
        """Return the rule of JSON that fits a schema, or is a call without a marker."""
        alternatives: list[Mapping[str, Any]] = [_embedded(enforceable(schema), "answer")]
        for at, (name, arguments) in enumerate(self._functions.items()):
            written = {"name": {"const": name}, self._key: _embedded(arguments, f"arguments-{at}")}
            alternatives.append(
                {
                    "type": "object",
                    "properties": written,
                    "required": [*written],
                    "additionalProperties": False,
                }
            )
        return raw_rule({"anyOf": alternatives})

    def among_text(self) -> Iterator[str]:
        """Yield the rules of any text in which calls, in all forms that are read, are bound.

        A text may not begin as a call does, so that the rules of this call apply; only at the
        beginning, after a call and after a marker, since JSON within a text is no call.
        """
        heads = [_head(name) for name in self._functions]
        any_head = "|".join(heads)
        # The name decides about the arguments, so that it comes first.
        begin = f'/{_BEFORE_CALL}({any_head}|"(arguments|parameters))(?s:.*)/'
        plain = f"/(?s:.+)/ & ~{begin}"
        markers = (OPEN, PYTHON_TAG)
        written = [text for text in markers if text not in self._syntax.marker_tokens]
        if written:
            plain += " & ~/(?s:.*)(" + "|".join(map(_literal, written)) + ")(?s:.*)/"
        after = "begin" if self._is_parallel else "TEXT?"
        opening = {text: self._lead(text) for text in markers}
        calls = " | ".join(f"call_{number}" for number in range(len(heads)))
        marked = f"{opening[OPEN]} {_GAP}? ({calls}) ({_GAP}? {self._syntax.marker(CLOSE)})?"
        yield "start: begin"
        yield f"begin: TEXT? | {marked} {after} | {opening[PYTHON_TAG]} begin | bare {after}"
        yield f"TEXT: {plain}"
        for text in written:
            yield f"{self._lead(text).rstrip('?')}: TEXT? {json.dumps(text)}"
        bare = (f"HEAD_{at} arguments_{at} /{_BLANKS}\\}}/" for at in range(len(heads)))
        yield f"bare: {' | '.join(bare)}"
        for at, head in enumerate(heads):
            yield f"HEAD_{at}: /{_BEFORE_CALL}{head}{_BLANKS}/"
            yield f"call_{at}: CALL_{at} arguments_{at} /{_BLANKS}\\}}/"
            yield f"CALL_{at}: /\\{{{_BLANKS}{head}{_BLANKS}/"
        yield from self._arguments()

    def _lead(self, marker: str) -> str:
        """Return what a grammar has for a text and a marker behind it."""
        token = self._syntax.marker_tokens.get(marker)
        name = "OPENING" if marker == OPEN else "PYTHON_TAG"
        return name if token is None else f"TEXT? <[{token}]>"


_BEFORE_CALL = (
    rf"[ \t\r\n;,\]]*((```|<\/tool_call>)[ \t\r\n;,]*)?(```(json|tool_call)?)?"
    rf"{_BLANKS}\[?{_BLANKS}\{{{_BLANKS}"
    rf'("(type|id)"{_BLANKS}:{_BLANKS}"[^"\\]*"{_BLANKS},{_BLANKS})*'
)
"""What a call without a marker may begin with, up to its name."""


def _head(name: str) -> str:
    """Return the expression of a call's name and of the key of its arguments."""
    forms = {json.dumps(name), json.dumps(name, ensure_ascii=False)}
    written = "|".join(map(_literal, sorted(forms)))
    key = '"(arguments|parameters)"'
    return f'"name"{_BLANKS}:{_BLANKS}({written}){_BLANKS},{_BLANKS}{key}{_BLANKS}:'


def _literal(text: str) -> str:
    """Return the regular expression of a text."""
    return "".join(
        letter if letter.isalnum() or letter in "_-<>" else f"\\x{{{ord(letter):x}}}"
        for letter in text
    )


def _embedded(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a schema as part of another one, where its references still are its own."""
    return {**schema, "$id": f"urn:h2okv:{name}"}


def parameters(function: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, which are an object."""
    schema = function.get("parameters")
    if not schema:
        return _NO_PARAMETERS
    if schema.get("type", "object") != "object":
        path = ("tools", number, "function", "parameters", "type")
        raise readers.unlike("'object', as arguments are an object", schema["type"], path)
    return {"type": "object", **schema}
