"""Structured outputs: masks that leave only the tokens that a grammar allows next."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from h2okv.console import optional
from h2okv.engine.json_schemas import SchemaError, enforceable
from h2okv.engine.outputs import GrammarTooLargeError, RequestFailedError
from h2okv.prompts.readers import FieldError

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
