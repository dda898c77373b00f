"""Answers in OpenAI's form, whole or as chunks of a stream, made while outputs come."""

from __future__ import annotations

import codecs
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from h2okv.engine.outputs import Completion, KeptTokens, OutputDelta, PromptRead, TokenLogprob
from h2okv.server.tokenization import Prompt

_UNFINISHED = "\ufffd"
_ANCHOR = "a"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""What byte-level tokenizers write for bytes."""
_FINGERPRINT = "h2okv"
"""OpenAI's ``system_fingerprint``: the same seed gives the same text only on the same server."""


class TokenText:
    """The text of single tokens, even where one is only a part of a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._anchor = list(tokenizer(_ANCHOR, add_special_tokens=False)["input_ids"])
        self._anchor_text = self._decode(self._anchor)
        # A token's bytes in UTF-8; a part of a character may be all there is.
        self.data = lru_cache(maxsize=65536)(self._find_bytes)

    def text(self, token: int) -> str:
        """A token's text; for a part of a character its bytes in hexadecimal."""
        data = self.data(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def length(self, token: int) -> int:
        """The number of characters that begin in a token."""
        return sum(byte & 0xC0 != 0x80 for byte in self.data(token))

    def _find_bytes(self, token: int) -> bytes:
        # Behind another token, for a decoder may drop the space at a text's start.
        text = self._decode([*self._anchor, token])[len(self._anchor_text) :]
        if _UNFINISHED not in text:
            return text.encode("utf-8")
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        written = _BYTE.fullmatch(piece)
        if written:
            return bytes([int(written.group(1), 16)])
        if all(letter in _LETTERS for letter in piece):
            return bytes(_LETTERS[letter] for letter in piece)
        return text.encode("utf-8")

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


class ResponseBuilder(ABC):
    """An answer, as objects for JSON: what OpenAI's own servers leave out is left out."""

    kinds: ClassVar[tuple[str, str, str]]
    """What the id begins with, and ``object`` of the whole answer and of a chunk."""
    says_done: ClassVar[bool] = True
    """Whether a stream ends with ``[DONE]``."""

    def __init__(
        self, body: Any, prompts: Sequence[Prompt], tokens: TokenText, *, strips_start: bool = False
    ) -> None:
        self.body, self.prompts, self.num_outputs = body, prompts, body.n or 1
        # One for each choice, prompt by prompt.
        self.outputs = [Completion(index) for index in range(self.num_outputs * len(prompts))]
        self._tokens, self._strips_start = tokens, strips_start
        self._read: dict[int, PromptRead] = {}
        # For each output, how many tokens were told beside what is kept of them, and what makes
        # text of their bytes.
        self._told: dict[int, int] = defaultdict(int)
        self._decoders: dict[int, codecs.IncrementalDecoder] = defaultdict(
            lambda: codecs.getincrementaldecoder("utf-8")("replace")
        )
        self._shared = {
            "id": f"{self.kinds[0]}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": _FINGERPRINT,
        }

    def take(self, delta: OutputDelta) -> None:
        if delta.prompt is not None:
            self._read[delta.index // self.num_outputs] = delta.prompt
        self.outputs[delta.index].add(delta)

    def whole(self) -> dict[str, Any]:
        """The answer to a finished request."""
        # No end is told of an output for which no token was asked.
        choices = [self._choice(own, own.finish_reason or "length") for own in self.outputs]
        usage = self._usage()
        return {"object": self.kinds[1], "choices": choices, "usage": usage, **self._shared}

    def opening(self) -> Iterable[dict[str, Any]]:
        """The chunks that come before any text."""
        return ()

    def closing(self) -> Iterable[dict[str, Any]]:
        """The chunks that come after all text."""
        if self.body.wants_usage:
            chunk = {"object": self.kinds[2], "choices": [], "usage": self._usage()}
            yield {**chunk, **self._shared}

    def _text(self, output: Completion) -> str:
        return output.text.lstrip() if self._strips_start else output.text

    def _new_text(self, delta: OutputDelta) -> str:
        """What a delta that was taken already adds to the text."""
        before = self.outputs[delta.index].text.removesuffix(delta.text)
        is_start = self._strips_start and not before.strip()
        return delta.text.lstrip() if is_start else delta.text

    @abstractmethod
    def _choice(self, output: Completion, finish_reason: str) -> dict[str, Any]:
        """An output as a choice of the whole answer."""

    @abstractmethod
    def chunks(self, delta: OutputDelta) -> Iterable[dict[str, Any]]:
        """The chunks of a delta that was taken already."""

    def _chunk(self, index: int, finish_reason: str | None, **choice: Any) -> dict[str, Any]:
        choice |= {"index": index, "finish_reason": finish_reason}
        # With the counts asked for, all chunks have the field, and only the last one a value.
        usage = {"usage": None} if self.body.wants_usage else {}
        return {"object": self.kinds[2], "choices": [choice], **usage, **self._shared}

    def _kept(self, index: int, kept: KeptTokens | None) -> dict[str, Any]:
        """What the cache holds, with the texts of the tokens that were not told yet.

        A character that is spread over several tokens is the last one's.
        """
        if kept is None:
            return {}
        before, self._told[index] = self._told[index], len(kept.counts)
        prompt, output = self.prompts[index // self.num_outputs], self.outputs[index]
        tokens = [*prompt.token_ids, *output.token_ids][before : len(kept.counts)]
        decode = self._decoders[index].decode
        told: dict[str, Any] = {"tokens": [decode(self._tokens.data(token)) for token in tokens]}
        told |= {"kept": kept.counts, "num_heads": kept.num_heads}
        return {"h2o": told | {"cache_bytes": kept.cache_bytes, "full_bytes": kept.full_bytes}}

    def _usage(self) -> dict[str, Any]:
        read = sum(len(prompt.token_ids) for prompt in self.prompts)
        new = sum(len(output.token_ids) for output in self.outputs)
        reused = sum(prompt.num_reused for prompt in self._read.values())
        return {
            "prompt_tokens": read,
            "completion_tokens": new,
            "total_tokens": read + new,
            "prompt_tokens_details": {"cached_tokens": reused},
        }


class ChatResponseBuilder(ResponseBuilder):
    """An assistant's messages."""

    kinds = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def _choice(self, output: Completion, finish_reason: str) -> dict[str, Any]:
        return {
            "index": output.index,
            "message": {"role": "assistant", "content": self._text(output)},
            "finish_reason": finish_reason,
            "logprobs": self._logprobs(output.logprobs),
            **self._kept(output.index, output.kept),
        }

    def opening(self) -> Iterable[dict[str, Any]]:
        """See `ResponseBuilder.opening`: who speaks."""
        for output in self.outputs:
            delta = {"role": "assistant", "content": ""}
            yield self._chunk(output.index, None, delta=delta, logprobs=None)

    def chunks(self, delta: OutputDelta) -> Iterable[dict[str, Any]]:
        text = self._new_text(delta)
        kept = self._kept(delta.index, delta.kept)
        if text or kept or (self.body.has_logprobs and delta.logprobs):
            logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
            yield self._chunk(delta.index, None, delta={"content": text}, logprobs=logprobs, **kept)
        if delta.finish_reason is not None:
            yield self._chunk(delta.index, delta.finish_reason, delta={}, logprobs=None)

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        def told(token: int, logprob: float) -> dict[str, Any]:
            data = list(self._tokens.data(token))
            return {"token": self._tokens.text(token), "bytes": data, "logprob": logprob}

        if not self.body.has_logprobs:
            return None
        content = [
            {**told(one.token, one.logprob), "top_logprobs": [told(*other) for other in one.top]}
            for one in logprobs
        ]
        return {"content": content}


Entry = tuple[int, TokenLogprob | None, int]
"""A token, how likely it was if that is known, and its characters."""


class CompletionResponseBuilder(ResponseBuilder):
    """Texts that go on from prompts, after these where they are to be echoed."""

    kinds = ("cmpl", "text_completion", "text_completion")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Where the next token of each choice's text begins.
        self._offsets: dict[int, int] = defaultdict(int)
        self._echoes = bool(self.body.echo)
        self._echoed: set[int] = set()

    def _choice(self, output: Completion, finish_reason: str | None) -> dict[str, Any]:
        text, entries = self._echo(output.index // self.num_outputs)
        entries += self._entries(output.logprobs)
        return {
            "index": output.index,
            "text": text + output.text,
            "finish_reason": finish_reason,
            "logprobs": self._logprobs(output.index, entries),
            **self._kept(output.index, output.kept),
        }

    def chunks(self, delta: OutputDelta) -> Iterable[dict[str, Any]]:
        number = delta.index // self.num_outputs
        if self._echoes and number not in self._echoed:
            self._echoed.add(number)
            text, entries = self._echo(number)
            for index in range(number * self.num_outputs, (number + 1) * self.num_outputs):
                yield self._chunk(index, None, text=text, logprobs=self._logprobs(index, entries))
        more = self._kept(delta.index, delta.kept)
        if delta.text or delta.logprobs or delta.finish_reason or more:
            more["logprobs"] = self._logprobs(delta.index, self._entries(delta.logprobs))
            yield self._chunk(delta.index, delta.finish_reason, text=delta.text, **more)

    def _entries(self, logprobs: Sequence[TokenLogprob]) -> list[Entry]:
        return [(one.token, one, self._tokens.length(one.token)) for one in logprobs]

    def _echo(self, number: int) -> tuple[str, list[Entry]]:
        """A prompt's text and tokens, the first of which has no probability."""
        if not self._echoes:
            return "", []
        prompt, read = self.prompts[number], self._read.get(number)
        known = (read and read.logprobs) or ()
        entries: list[Entry] = []
        for place, token in enumerate(prompt.token_ids):
            length = self._tokens.length(token)
            if place == 0 and prompt.is_text:
                length = _length_in(prompt.text, self._tokens.text(token))
            entries.append((token, known[place] if place < len(known) else None, length))
        return prompt.text, entries

    def _logprobs(self, index: int, entries: Sequence[Entry]) -> dict[str, list[Any]] | None:
        """The parallel lists of OpenAI's older form, for the next tokens of a choice."""
        if not self.body.has_logprobs:
            return None
        columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        table: dict[str, list[Any]] = {name: [] for name in columns}
        for token, known, length in entries:
            tops: dict[str, float] = {}
            for one, logprob in (*known.top, (token, known.logprob)) if known else ():
                # Where two tokens read the same, the likelier one is told.
                tops.setdefault(self._tokens.text(one), logprob)
            table["tokens"].append(self._tokens.text(token))
            table["token_logprobs"].append(known and known.logprob)
            table["top_logprobs"].append(tops if known else None)
            table["text_offset"].append(self._offsets[index])
            self._offsets[index] += length
        return table


def _length_in(prompt: str, first: str) -> int:
    """Characters of a text's first token; none of a special token that was put before the text."""
    for form in (first, first.lstrip()):
        if form and prompt.startswith(form):
            return len(form)
    return 0
