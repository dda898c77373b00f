"""JSON schemas in a form that llguidance enforces as written; the rest is refused."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import permutations
from typing import Any
from urllib.parse import unquote

from h2okv.prompts.readers import FieldError
from h2okv.records import short_repr

_TYPES = {
    name: frozenset({name}) for name in ("null", "boolean", "object", "array", "string", "integer")
} | {"number": frozenset({"integer", "fraction"})}
_ALL_TYPES = frozenset().union(*_TYPES.values())
_CONTAINERS = frozenset({"object", "array"})

_MAPS = ("$defs", "definitions", "patternProperties", "properties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLES = ("additionalItems", "additionalProperties", "items")
"""Keywords whose values are schemas, by the form of these values."""
_BOUNDS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
_CONSTRAINTS = (
    *_MAPS, *_LISTS, *_SINGLES, *_BOUNDS, "$ref", "const", "contains", "dependentRequired",
    "dependentSchemas", "enum", "format", "maxContains", "maxItems", "maxLength", "maxProperties",
    "minContains", "minItems", "minLength", "minProperties", "multipleOf", "pattern",
    "propertyNames", "required", "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
)  # fmt: skip
_BESIDE_REF = frozenset(_CONSTRAINTS) - {"$ref", "$defs", "definitions"}
_BOUND_LIMIT = 9 * 10**18
"""llguidance computes with 64 bits: beyond this it clips, or ends the process."""
_INT64_MAX = 2**63 - 1
_COUNT_LIMITS = {
    f"{bound}{kind}": limit
    for bound, limit in (("min", 10**6), ("max", 2**32 - 1))
    for kind in ("Items", "Length", "Properties")
}
"""Least values that an output can reach, and greatest values that llguidance reads."""
_MULTIPLE_LIMIT = 2**16
"""llguidance has a state for each remainder: with more, a schema takes seconds and GiB."""
_REPEATS_LIMIT = 10**5
_NUMBER_FORMATS: dict[str, tuple[int, int] | None] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
    "int64": (-_BOUND_LIMIT, _BOUND_LIMIT), "uint64": (0, _BOUND_LIMIT),
    "float": None, "double": None,
}  # fmt: skip
"""Formats of numbers, which llguidance ignores, with their ranges."""
AS_ANY_OF = "coerce_one_of"
"""The one option of llguidance that a schema may set."""
OVERLAP = (
    "alternatives of a oneOf may share values, which cannot be excluded; use anyOf, or set"
    f' "x-guidance": {{"{AS_ANY_OF}": true}} in the schema to take oneOf as anyOf'
)
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
    """Return an equal schema that llguidance enforces as written.

    Alternatives of a ``oneOf`` are narrowed so that no value fits two of them.

    Raises:
        SchemaError: If the schema has no finite value, or llguidance would weaken it in silence.
    """
    try:
        if not _Values(schema).exist():
            raise SchemaError("the schema refers to itself without an end, so no value fits it")
        return _Rewriter(schema).root()
    except RecursionError as error:
        raise SchemaError("the schema is nested too deeply") from error


def _resolve(root: Mapping[str, Any], reference: Any) -> Any:
    """Return what a JSON pointer within the schema refers to; ``None`` for anything else."""
    if not isinstance(reference, str) or not (reference or "#").startswith("#"):
        return None
    target: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
        elif isinstance(target, Mapping) and step in target:
            target = target[step]
        else:
            return None
    return target if reference in ("", "#") or reference.startswith("#/") else None


def _types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema's own ``type``, ``const`` and ``enum`` allow."""
    stated = schema.get("type")
    types = _ALL_TYPES
    if stated is not None:
        names = stated if isinstance(stated, list) else [stated]
        types = frozenset().union(*(_TYPES.get(str(name), _ALL_TYPES) for name in names))
    values = _listed_values(schema)
    return types if values is None else types & frozenset(map(_type_of, values))


def _listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _type_of(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "integer" if value == value // 1 else "fraction"
    kinds = {bool: "boolean", str: "string", type(None): "null", dict: "object", list: "array"}
    return kinds.get(type(value), "object")


class _Values:
    """Finds whether a schema has a finite value, where references may go round in circles.

    A node holds when enough of its children hold: all of them, or one of several alternatives.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._missing: list[int] = []  # for each node, the number of children that it waits for
        self._parents: list[list[int]] = []
        self._nodes: dict[tuple[int, frozenset[str]], int] = {}
        self._pending: list[tuple[int, Any, frozenset[str]]] = []

    def exist(self) -> bool:
        """Return whether some finite value fits, as far as references decide it."""
        first = self._of(self._root, _ALL_TYPES)
        while self._pending:
            self._expand(*self._pending.pop())
        holding = [node for node, missing in enumerate(self._missing) if missing == 0]
        for node in holding:  # grows
            for parent in self._parents[node]:
                self._missing[parent] -= 1
                if self._missing[parent] == 0:
                    holding.append(parent)
        return self._missing[first] <= 0

    def _add(self, children: Sequence[int], needed: int) -> int:
        """Add a node that holds when a number of its children do."""
        node = len(self._missing)
        self._missing.append(needed)
        self._parents.append([])
        for child in children:
            self._parents[child].append(node)
        return node

    def _of(self, schema: Any, types: frozenset[str]) -> int:
        """Return the node of a schema for values of some types."""
        key = id(schema), types
        if key not in self._nodes:
            self._nodes[key] = self._add((), 1)
            self._pending.append((self._nodes[key], schema, types))
        return self._nodes[key]

    def _expand(self, node: int, schema: Any, types: frozenset[str]) -> None:
        if not isinstance(schema, Mapping):  # for llguidance to check
            self._missing[node] = 0
            return
        types &= _types_of(schema)
        if not types:
            self._missing[node] = 0
            return
        target = _resolve(self._root, schema.get("$ref"))
        conditions = [] if target is None else [self._of(target, types)]
        conditions += [self._of(subschema, types) for subschema in _listed(schema, "allOf")]
        for name in ("anyOf", "oneOf"):
            if alternatives := _listed(schema, name):
                conditions.append(
                    self._add([self._of(subschema, types) for subschema in alternatives], 1)
                )
        if _listed_values(schema) is None:
            forms = [self._add((), 0)] if types - _CONTAINERS else []
            for name, inner in (("object", _required_parts), ("array", _item_parts)):
                if name in types:
                    needs = [self._of(subschema, _ALL_TYPES) for subschema in inner(schema)]
                    forms.append(self._add(needs, len(needs)))
            conditions.append(self._add(forms, 1))
        self._missing[node] = len(conditions)
        for subschema in conditions:
            self._parents[subschema].append(node)


def _listed(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _mapped(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, Mapping) else {}


def _required_parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of the values that every object has."""
    properties, others = _mapped(schema, "properties"), schema.get("additionalProperties", True)
    required = [name for name in _listed(schema, "required") if isinstance(name, str)]
    yield from (properties[name] for name in required if name in properties)
    count = schema.get("minProperties")
    if type(count) is int and count > len(properties) and not _mapped(schema, "patternProperties"):
        yield others


def _item_parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of the items that every array has."""
    first, others = _listed(schema, "prefixItems"), schema.get("items", True)
    if isinstance(others, list):  # older drafts
        first, others = others, schema.get("additionalItems", True)
    count = schema.get("minItems")
    if type(count) is int and count > 0:
        yield from first[:count]
        if count > len(first):
            yield others


class _Rewriter:
    """Checks a schema and writes it in the form that llguidance enforces."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._narrow: dict[tuple[str, str], str] = {}  # names of narrowed definitions
        self._definitions: dict[str, Any] = {}
        self._is_any_of = _is_any_of(root)

    def root(self) -> dict[str, Any]:
        """Return the new form of the root."""
        new = self.rewrite(self._root, ())
        if self._definitions:
            new["$defs"] = {**_mapped(new, "$defs"), **self._definitions}
        new.pop("x-guidance", None)
        return dict(new)

    def rewrite(self, schema: Any, path: tuple[str | int, ...]) -> Any:
        """Return the new form of a schema at a path."""
        if not isinstance(schema, Mapping):
            return schema
        for name, value in schema.items():
            _check_keyword(name, value, path)
        new = {name: self._keyword(name, value, path) for name, value in schema.items()}
        _replace_format(new, path)
        alternatives = new.get("oneOf")
        if not self._is_any_of:
            alternatives = self._narrowed(alternatives, _types_of(schema))
        if isinstance(alternatives, list) and alternatives:
            del new["oneOf"]
            new["allOf"] = [*_listed(new, "allOf"), {"anyOf": alternatives}]
        return new

    def _keyword(self, name: str, value: Any, path: tuple[str | int, ...]) -> Any:
        """Return a keyword's value with the new forms of the schemas in it."""
        path = (*path, name)
        if name in _MAPS and isinstance(value, Mapping):
            return {key: self.rewrite(subschema, (*path, key)) for key, subschema in value.items()}
        if name in (*_LISTS, "items") and isinstance(value, list):
            return [self.rewrite(subschema, (*path, at)) for at, subschema in enumerate(value)]
        return self.rewrite(value, path) if name in _SINGLES else value

    def _narrowed(self, alternatives: Any, types: frozenset[str]) -> list[Any] | None:
        """Return alternatives of which no two share a value; ``None`` if that is not sure.

        Left out are values that fit several alternatives, which ``oneOf`` excludes, and objects
        without a property that tells the alternatives apart.
        """
        if not isinstance(alternatives, list) or len(alternatives) > _MAX_ALTERNATIVES:
            return None
        facts = [_Facts.of(schema, self._root, types) for schema in alternatives]
        if not all(first.exclude(second) for first, second in permutations(facts, 2)):
            return None
        return [
            self._with(schema, more) if (more := fact.added()) else schema
            for schema, fact in zip(alternatives, facts, strict=True)
        ]

    def _with(self, schema: Any, more: dict[str, Any]) -> dict[str, Any]:
        """Return an alternative with a further schema that its values must fit."""
        reference = schema.get("$ref")
        target = _resolve(self._root, reference)
        if not isinstance(target, Mapping) or "$ref" in target or schema.keys() & _BESIDE_REF:
            return {"allOf": [schema, more]}
        # A definition, since llguidance takes no reference in a circle beside other keywords.
        key = reference, json.dumps(more)
        if key not in self._narrow:
            self._narrow[key] = name = f"h2okv:{len(self._narrow)}"
            new = self.rewrite(target, (reference,))
            self._definitions[name] = {**new, "allOf": [*_listed(new, "allOf"), more]}
        return {"$ref": f"#/$defs/{self._narrow[key]}"}


_MAX_ALTERNATIVES = 200


class _Facts:
    """What a schema says of its values, as far as needed to tell it from another one."""

    def __init__(self, root: Mapping[str, Any], types: frozenset[str]) -> None:
        self._root = root
        self.types = types
        self.values: set[str] | None = None  # as JSON
        self.properties: dict[str, list[Any]] = {}
        self.items: list[Any] = []
        self.required: set[str] = set()
        self.closed: set[str] | None = None  # the only properties
        self._more: set[str] = set()  # required in addition
        self._forbidden: set[str] = set()
        self._has_items = False

    @classmethod
    def of(cls, schema: Any, root: Mapping[str, Any], types: frozenset[str] = _ALL_TYPES) -> _Facts:
        """Return the facts of a schema and of what it refers to."""
        facts = cls(root, types)
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, Mapping):
                break
            facts._take(schema)
            schema = _resolve(root, schema.get("$ref"))
        return facts

    def _take(self, schema: Mapping[str, Any]) -> None:
        self.types &= _types_of(schema)
        values = _listed_values(schema)
        if values is not None and all(not isinstance(value, (dict, list)) for value in values):
            listed = {  # equal numbers alike
                json.dumps(int(v) if isinstance(v, float) and v.is_integer() else v) for v in values
            }
            self.values = listed if self.values is None else self.values & listed
        for name, subschema in _mapped(schema, "properties").items():
            self.properties.setdefault(name, []).append(subschema)
        is_open = schema.get("additionalProperties", True) is not False
        if not is_open and not _mapped(schema, "patternProperties"):
            self.closed = set(_mapped(schema, "properties"))
        if isinstance(items := schema.get("items"), Mapping) and "prefixItems" not in schema:
            self.items.append(items)
        self.required |= {name for name in _listed(schema, "required") if isinstance(name, str)}

    def exclude(self, other: _Facts) -> bool:
        """Narrow these values to those that do not fit the other schema; return whether it can."""
        shared = self.types & other.types
        if self._are_apart(other):
            return True
        if shared - _CONTAINERS:
            return False
        if "array" in shared:
            if not any(_apart(a, b, self._root) for a in self.items for b in other.items):
                return False
            self._has_items = True
        return "object" not in shared or self._part_objects(other)

    def _are_apart(self, other: _Facts) -> bool:
        are_listed = self.values is not None and other.values is not None
        return not self.types & other.types or (
            are_listed and not (self.values or set()) & (other.values or set())
        )

    def _part_objects(self, other: _Facts) -> bool:
        needed = self.required | self._more
        if other.required & self._forbidden:
            return True
        if other.closed is not None and needed - other.closed:
            return True
        for name in self.properties.keys() & other.properties.keys() - self._forbidden:
            mine, others = self.properties[name], other.properties[name]
            if any(_apart(a, b, self._root) for a in mine for b in others):
                self._more.add(name)
                return True
        # First a property that these values do not mention.
        names = sorted(other.required - needed, key=lambda name: (name in self.properties, name))
        self._forbidden.update(names[:1])
        return bool(names)

    def added(self) -> dict[str, Any]:
        """Return the schema that narrows these values."""
        more: dict[str, Any] = {}
        if names := self._more - self.required:
            more["required"] = sorted(names)
        if self._forbidden:
            more["properties"] = {name: False for name in sorted(self._forbidden)}
        if self._has_items:
            more["minItems"] = 1
        return more


_MAX_REFERENCES = 16


def _apart(first: Any, second: Any, root: Mapping[str, Any]) -> bool:
    """Return whether two schemas surely share no value."""
    return _Facts.of(first, root)._are_apart(_Facts.of(second, root))


def _is_any_of(root: Mapping[str, Any]) -> bool:
    """Return whether a schema says that its ``oneOf`` are taken as ``anyOf``."""
    stated = root.get("x-guidance", {})
    if not isinstance(stated, Mapping) or stated.keys() - {AS_ANY_OF}:
        raise SchemaError(f"x-guidance={short_repr(stated)} may only have {AS_ANY_OF}")
    if not all(isinstance(value, bool) for value in stated.values()):
        raise SchemaError(f"x-guidance: {AS_ANY_OF} must be true or false")
    return bool(stated.get(AS_ANY_OF))


def _check_keyword(name: str, value: Any, path: tuple[str | int, ...]) -> None:
    """Refuse what llguidance would ignore or change without an error."""
    if name in _BOUNDS and isinstance(value, (int, float)) and not isinstance(value, bool):
        is_wide = name in ("maximum", "exclusiveMaximum") and value == _INT64_MAX
        if abs(value) > _BOUND_LIMIT and not (is_wide and isinstance(value, int)):
            limit = f"must be within {-_BOUND_LIMIT} and {_BOUND_LIMIT}"
            raise SchemaError(f"{name} {limit}, got {short_repr(value)}", path)
        if isinstance(value, int) and not is_wide and int(float(value)) != value:
            raise SchemaError(
                f"{name} must be a number that a double has exactly, got {value}", path
            )
    elif name in _COUNT_LIMITS and type(value) is int and value > _COUNT_LIMITS[name]:
        limit = f"must be at most {_COUNT_LIMITS[name]}"
        raise SchemaError(f"{name} {limit}, got {short_repr(value)}", path)
    elif name == "multipleOf":
        _check_multiple(value, path)
    elif name == "pattern" or (name == "patternProperties" and isinstance(value, Mapping)):
        for pattern in value if isinstance(value, Mapping) else [value]:
            if isinstance(pattern, str) and (count := _nested_repeats(pattern)) > _REPEATS_LIMIT:
                limit = f"must repeat at most {_REPEATS_LIMIT} times in all"
                problem = f"{name}: repeats within repeats {limit}, got {short_repr(count)}"
                raise SchemaError(f"{problem} in {short_repr(pattern)}", path)
    elif name == "const" or (name == "enum" and isinstance(value, list)):
        for number in _numbers(value):
            if not _is_written_exactly(number):
                problem = f"{name} has the number {short_repr(number)}, which no double has exactly"
                raise SchemaError(problem, path)
    elif name == "nullable" and value:
        remedy = 'write "type": [..., "null"], or an anyOf with {"type": "null"}'
        raise SchemaError(f"nullable is not a keyword of JSON Schema; {remedy}", path)
    elif name not in _CONSTRAINTS and (
        near := difflib.get_close_matches(name, _CONSTRAINTS, 1, 0.8)
    ):
        raise SchemaError(f"{name} is not a keyword; did you mean {near[0]}?", path)


def _check_multiple(value: Any, path: tuple[str | int, ...]) -> None:
    """Refuse multiples that llguidance takes too long for, or that it takes for others."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return  # llguidance refuses it
    if value <= 0:
        raise SchemaError(f"multipleOf must be greater than 0, got {short_repr(value)}", path)
    digits = "".join(map(str, Decimal(str(value)).as_tuple().digits)).strip("0")
    if len(digits) > len(str(_MULTIPLE_LIMIT)) or int(digits or 0) > _MULTIPLE_LIMIT:
        limit = f"must be at most {_MULTIPLE_LIMIT} times a power of ten"
        raise SchemaError(f"multipleOf {limit}, got {short_repr(value)}", path)


def _nested_repeats(pattern: str) -> int:
    """Return the largest product of counted repeats that are within one another in a pattern."""
    largest, last, is_set = 1, 1, False  # last: the product in the last item
    groups = [1]  # the largest product in each open group
    for symbol in re.findall(r"\\.|\{\d+(?:,\d*)?\}|.", pattern, re.DOTALL):
        if is_set:
            is_set, last = symbol != "]", 1
        elif symbol == "(":
            groups.append(1)
        elif symbol == ")" and len(groups) > 1:
            last = groups.pop()
        elif symbol[0] == "{" and len(symbol) > 1:
            counts = [int(count[:_COUNT_DIGITS] or 0) for count in symbol[1:-1].split(",")]
            count = max(1, *counts)
            if last > 1 and count > 1:
                largest = max(largest, last * count)
            last *= count
        elif symbol not in "*+?":
            last, is_set = 1, symbol == "["
        groups[-1] = max(groups[-1], last)
    return largest


_COUNT_DIGITS = 10


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield the numbers of a JSON value."""
    if isinstance(value, (list, Mapping)):
        for subschema in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(subschema)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def _is_written_exactly(number: int | float) -> bool:
    """Return whether llguidance writes a number as it is: it writes the digits of a double."""
    if isinstance(number, float):
        return number != -(2.0**63)  # ends the process
    try:
        return int(Decimal(repr(float(number)))) == number
    except OverflowError:
        return False


def _replace_format(schema: dict[str, Any], path: tuple[str | int, ...]) -> None:
    """Write formats of numbers as ranges. Mutates the schema."""
    form = schema.get("format")
    types = _types_of(schema) if "type" in schema else _ALL_TYPES
    if isinstance(form, str) and not types - _TYPES["number"]:
        if form not in _NUMBER_FORMATS:
            raise SchemaError(f"format {short_repr(form)} is not known for numbers", path)
        del schema["format"]
        if (limits := _NUMBER_FORMATS[form]) is not None:
            bounds = {"minimum": limits[0], "maximum": limits[1]}
            schema["allOf"] = [*_listed(schema, "allOf"), bounds]
    elif form in _FREE_FORMATS and types == _TYPES["string"]:
        del schema["format"]
