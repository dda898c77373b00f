"""Structured outputs: masks that leave only the tokens that a grammar allows next."""

from __future__ import annotations

import difflib
import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from h2okv.console import optional
from h2okv.engine.outputs import GrammarTooLargeError, RequestFailedError
from h2okv.prompts.readers import FieldError
from h2okv.records import short_repr

_LOCATION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_BITS = torch.arange(8, dtype=torch.uint8)
_SPACES = r" |\n[ \t]{0,20}"
"""Whitespace between two tokens of JSON: a space, or a line break with its indentation. With more,
small models may write nothing else."""


def raw_rule(schema: Mapping[str, Any]) -> str:
    """Return what a grammar has in place of a JSON value of a schema from `enforceable`."""
    options = {"whitespace_pattern": _SPACES, "coerce_one_of": True}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def json_grammar(schema: Mapping[str, Any] | None = None) -> str:
    """Return the grammar of JSON values of a schema; of any JSON object without one."""
    return f"start: {raw_rule(enforceable({'type': 'object'} if schema is None else schema))}"


def fits(schema: Mapping[str, Any], text: str) -> bool:
    """Return whether JSON as `json.dumps` writes it fits a schema, in the schema's order."""
    guidance = optional("llguidance", "structured output", "serve")
    matcher = guidance.LLMatcher(guidance.LLTokenizer("byte"), json_grammar(schema), log_level=0)
    data = [*text.replace("\x7f", "\\u007f").encode()]
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


class GrammarCompiler:
    """Compiles grammars for one tokenizer; may be called from any thread."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos: Collection[int]
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos)
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def compile(self, grammar: str) -> GrammarMask:
        """Return the mask before the first token."""
        guidance = optional("llguidance", "structured output", "serve")
        if not self._eos:
            problem = ": the model has no end token, so that no output could end"
            raise FieldError(("grammar",), problem)
        with self._lock:
            if self._vocabulary is None:  # takes a second or more
                size = max(self._vocab_size, len(self._tokenizer))
                read = optional("llguidance.hf", "structured output", "serve").from_tokenizer
                self._vocabulary = read(self._tokenizer, size, self._eos)
        if any(text in grammar for text in self._tokenizer.get_added_vocab()):
            # A constant with the text of an added token would be forced as that token, which then
            # does not fit.
            grammar = f'%llguidance {{"no_forcing": true}}\n{grammar}'
        # No text of a request in the log of the server.
        limits = guidance.LLParserLimits(verbose_errors=False)
        matcher = guidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            first, *others = _LOCATION.sub("", matcher.get_error()).splitlines()
            reasons = [first, *(line for line in others if line.startswith("error: "))]
            reason = " ".join(reasons).rstrip(".")
            raise SchemaError(reason)
        mask = GrammarMask(matcher, self._vocab_size, self._eos)
        with suppress(RequestFailedError):
            if mask.mask(()).any():
                return mask.copy()
        raise SchemaError("no output fits it")


class GrammarMask:
    """Which tokens may come next in one output, by a grammar."""

    def __init__(self, matcher: Any, vocab_size: int, eos: Sequence[int]) -> None:
        self._matcher, self._vocab_size, self._eos = matcher, vocab_size, eos
        self._token_ids: list[int] = []

    def copy(self) -> GrammarMask:
        """Return a mask before the first token, for another output."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return GrammarMask(matcher, self._vocab_size, self._eos)

    def mask(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return which tokens may follow the output's tokens, as bool ``[V]`` on the CPU."""
        count = len(self._token_ids)
        if list(token_ids[:count]) != self._token_ids:  # drafted tokens were rejected
            self._token_ids, count = [], 0
            self._matcher.reset()
        for token in token_ids[count:]:
            self.accept(token)
        if self._matcher.is_stopped():
            allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
            allowed[self._eos] = True
            return allowed
        data = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self._check()
        bits = (data.unsqueeze(1) >> _BITS) & 1
        return bits.flatten()[: self._vocab_size].bool()

    def accept(self, token: int) -> None:
        """Take the next token of the output."""
        self._token_ids.append(token)
        if token in self._eos:  # with ignore_eos, more than one of them
            return
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            if reason.startswith("lexer error") or "TooComplex" in self._matcher.stop_reason():
                remedy = "give a simpler one, such as patterns with smaller repeats"
                raise GrammarTooLargeError(f"grammar: it needs too much ({reason}); {remedy}.")
            raise RequestFailedError(f"the output left its grammar: {reason}")


# --- JSON schemas as llguidance takes them --------------------------------------------------------

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
