"""JSON schemas as llguidance takes them; refuses what it would ignore, change or not survive."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

from h2okv.prompts.readers import FieldError
from h2okv.records import short_repr

_MAPS = ("$defs", "definitions", "patternProperties", "properties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = ("additionalItems", "additionalProperties", "items")
"""Keywords whose values are schemas, by the form of these values."""
_NUMBERS = ("const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
_KEYWORDS = (
    *_MAPS, *_LISTS, *_SINGLES, *_NUMBERS, "$ref", "contains", "dependentRequired",
    "dependentSchemas", "format", "maxContains", "maxItems", "maxLength", "maxProperties",
    "minContains", "minItems", "minLength", "minProperties", "multipleOf", "pattern",
    "propertyNames", "required", "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
)  # fmt: skip
_LIMIT = 9 * 10**18
"""llguidance computes with 64 bits: beyond this it clips, or ends the process."""
_INT64_MAX = 2**63 - 1
_MULTIPLE_LIMIT = 2**16
"""llguidance has a state for each remainder: with more, a schema takes seconds and GiB."""
_FREE_FORMATS = ("directory-path", "file-path", "password", "path")
"""Formats of pydantic's that every string has."""


class SchemaError(FieldError):
    """A schema that has no value, or that cannot be enforced as written."""

    def __init__(self, problem: str, path: Sequence[str | int] = ()) -> None:
        where = "".join(f"[{json.dumps(step, ensure_ascii=False)}]" for step in path)
        location = f" (at schema{where})" if path else ""
        self.reason = f"{problem}{location}; change the schema"
        super().__init__(("grammar",), f": {self.reason}")


def enforceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that llguidance enforces as written, but for ``oneOf``, which is ``anyOf``.

    Raises:
        SchemaError: If llguidance would weaken it in silence, or not survive it.
    """
    try:
        return dict(_checked(schema, ()))
    except RecursionError as error:
        raise SchemaError("the schema is nested too deeply") from error


def _checked(schema: Any, path: tuple[str | int, ...]) -> Any:
    """Return a schema at a path without formats that every string has."""
    if not isinstance(schema, Mapping):  # for llguidance to check
        return schema
    new: dict[str, Any] = {}
    for name, value in schema.items():
        here = (*path, name)
        _check_keyword(name, value, path)
        if name == "format" and value in _FREE_FORMATS:
            continue
        if name in _MAPS and isinstance(value, Mapping):
            value = {key: _checked(inner, (*here, key)) for key, inner in value.items()}
        elif name in _LISTS and isinstance(value, list):
            value = [_checked(inner, (*here, at)) for at, inner in enumerate(value)]
        elif name in _SINGLES:
            value = _checked(value, here)
        new[name] = value
    return new


def _check_keyword(name: str, value: Any, path: tuple[str | int, ...]) -> None:
    """Refuse what llguidance would ignore or change without an error."""
    if name in _NUMBERS:
        for number in _numbers(value):
            is_widest = number == _INT64_MAX and name.endswith("aximum")
            if not (is_widest or (abs(number) <= _LIMIT and _is_exact(number))):
                such = f"numbers within {-_LIMIT} and {_LIMIT} that a double has exactly"
                raise SchemaError(f"{name} must have {such}, got {short_repr(number)}", path)
    elif name == "multipleOf":
        for number in _numbers(value):
            if number <= 0:
                raise SchemaError(f"multipleOf must be greater than 0, got {number}", path)
            digits = "".join(map(str, Decimal(str(number)).as_tuple().digits)).strip("0")
            if len(digits) > len(str(_MULTIPLE_LIMIT)) or int(digits) > _MULTIPLE_LIMIT:
                limit = f"must be at most {_MULTIPLE_LIMIT} times a power of ten"
                raise SchemaError(f"multipleOf {limit}, got {short_repr(number)}", path)
    elif name == "nullable" and value:
        remedy = 'write "type": [..., "null"], or an anyOf with {"type": "null"}'
        raise SchemaError(f"nullable is not a keyword of JSON Schema; {remedy}", path)
    elif name not in _KEYWORDS and (near := difflib.get_close_matches(name, _KEYWORDS, 1, 0.8)):
        raise SchemaError(f"{name} is not a keyword; did you mean {near[0]}?", path)


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield the numbers of a JSON value."""
    if isinstance(value, (list, Mapping)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(inner)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def _is_exact(number: int | float) -> bool:
    """Return whether the shortest digits of a double, which llguidance writes, are a number."""
    with suppress(OverflowError):
        return isinstance(number, float) or int(Decimal(repr(float(number)))) == number
    return False
