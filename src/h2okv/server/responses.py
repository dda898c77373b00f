"""Response bodies in OpenAI's types."""

from __future__ import annotations

import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from openai import BaseModel
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionTokenLogprob,
)
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails
from transformers import PreTrainedTokenizerBase

from h2okv.engine.outputs import Completion as Output
from h2okv.engine.outputs import OutputDelta, PromptRead, TokenLogprob
from h2okv.server.generation import PreparedRequest
from h2okv.server.protocol import SampledRequest
from h2okv.server.tokenization import Prompt

_UNFINISHED = "\ufffd"
_ANCHOR = "a"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """The text of single tokens, even where one is only a part of a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._anchor = list(tokenizer(_ANCHOR, add_special_tokens=False)["input_ids"])
        self._anchor_text = self._decode(self._anchor)
        self._bytes = lru_cache(maxsize=65536)(self._find_bytes)

    def data(self, token: int) -> bytes:
        """A token's bytes in UTF-8; a part of a character may be all there is."""
        return self._bytes(token)

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
        letters = _byte_letters()
        if all(letter in letters for letter in piece):
            return bytes(letters[letter] for letter in piece)
        return text.encode("utf-8")

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


@lru_cache(maxsize=1)
def _byte_letters() -> Mapping[str, int]:
    """The letters that byte-level tokenizers write for bytes, as GPT-2's code lays down."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(shown)]
    letters = {chr(byte): byte for byte in shown}
    letters.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return letters


FINGERPRINT = "h2okv"
"""OpenAI's ``system_fingerprint``: the same seed gives the same text only on the same server."""


class ResponseBuilder(ABC):
    """An answer in OpenAI's types, whole or as chunks of a stream, made while outputs come.

    Attributes:
        request: What was asked for.
        outputs: What has come so far, one for each choice, prompt by prompt.
    """

    id_prefix: ClassVar[str]

    def __init__(self, request: PreparedRequest, body: SampledRequest, tokens: TokenText) -> None:
        self.request, self._tokens = request, tokens
        self.outputs = [Output(index) for index in range(request.num_choices)]
        self._read: dict[int, PromptRead] = {}
        self._has_logprobs = request.params[0].logprobs is not None
        self._wants_usage = body.wants_usage
        self._shared: dict[str, Any] = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": FINGERPRINT,
        }

    def take(self, piece: OutputDelta) -> None:
        """Adds what has come to its output."""
        if piece.prompt is not None:
            self._read[piece.index // self.request.choices_per_prompt] = piece.prompt
        self.outputs[piece.index].add(piece)

    @abstractmethod
    def whole(self) -> BaseModel:
        """The answer to a finished request."""

    def opening(self) -> Iterable[BaseModel]:
        """The chunks that come before any text."""
        return ()

    @abstractmethod
    def chunks(self, piece: OutputDelta) -> Iterable[BaseModel]:
        """The chunks of a piece that was taken already."""

    def closing(self) -> Iterable[BaseModel]:
        """The chunks that come after all text."""
        if self._wants_usage:
            yield self._chunk(usage=self._usage())

    @abstractmethod
    def _chunk(self, *choices: BaseModel, **usage: Any) -> BaseModel:
        """A chunk of a stream, in its type."""

    def _choice_chunk(self, choice: BaseModel) -> BaseModel:
        # With the counts asked for, all chunks have the field, and only the last one a value.
        return self._chunk(choice, **({"usage": None} if self._wants_usage else {}))

    def _usage(self) -> CompletionUsage:
        read = sum(len(prompt.token_ids) for prompt in self.request.prompts)
        new = sum(len(output.token_ids) for output in self.outputs)
        reused = sum(prompt.num_reused for prompt in self._read.values())
        return CompletionUsage(
            prompt_tokens=read,
            completion_tokens=new,
            total_tokens=read + new,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=reused),
        )


class ChatResponseBuilder(ResponseBuilder):
    """An assistant's messages."""

    id_prefix = "chatcmpl"

    def __init__(
        self,
        request: PreparedRequest,
        body: SampledRequest,
        tokens: TokenText,
        *,
        strips_start: bool,
    ) -> None:
        super().__init__(request, body, tokens)
        self._strips_start = strips_start
        self._begun: set[int] = set()

    def whole(self) -> ChatCompletion:
        """See `ResponseBuilder.whole`."""
        choices = [
            Choice.construct(
                index=output.index,
                message=ChatCompletionMessage(
                    role="assistant",
                    content=output.text.lstrip() if self._strips_start else output.text,
                ),
                # None is told where nothing was asked for.
                finish_reason=output.finish_reason or "length",
                logprobs=ChoiceLogprobs(content=self._table(output.logprobs))
                if self._has_logprobs
                else None,
            )
            for output in self.outputs
        ]
        return ChatCompletion.construct(
            object="chat.completion", choices=choices, usage=self._usage(), **self._shared
        )

    def opening(self) -> Iterable[BaseModel]:
        """See `ResponseBuilder.opening`: who speaks."""
        for index in range(self.request.num_choices):
            yield self._delta(index, ChoiceDelta(role="assistant", content=""))

    def chunks(self, piece: OutputDelta) -> Iterable[BaseModel]:
        """See `ResponseBuilder.chunks`."""
        text = piece.text
        if self._strips_start and piece.index not in self._begun:
            text = text.lstrip()
        if text:
            self._begun.add(piece.index)
        if text or (self._has_logprobs and piece.logprobs):
            yield self._delta(piece.index, ChoiceDelta(content=text), piece.logprobs)
        if piece.finish_reason is not None:
            yield self._delta(piece.index, ChoiceDelta(), finish_reason=piece.finish_reason)

    def _delta(
        self,
        index: int,
        delta: ChoiceDelta,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> BaseModel:
        told = None
        if self._has_logprobs and logprobs:
            told = ChunkLogprobs(content=self._table(logprobs))
        return self._choice_chunk(
            ChunkChoice.construct(
                index=index, delta=delta, finish_reason=finish_reason, logprobs=told
            )
        )

    def _chunk(self, *choices: BaseModel, **usage: Any) -> BaseModel:
        kind = "chat.completion.chunk"
        return ChatCompletionChunk.construct(
            object=kind, choices=[*choices], **self._shared, **usage
        )

    def _table(self, logprobs: Sequence[TokenLogprob]) -> list[ChatCompletionTokenLogprob]:
        def told(token: int, logprob: float) -> dict[str, Any]:
            data = list(self._tokens.data(token))
            return {"token": self._tokens.text(token), "bytes": data, "logprob": logprob}

        return [
            ChatCompletionTokenLogprob(
                **told(one.token, one.logprob),
                top_logprobs=[TopLogprob(**told(*other)) for other in one.top],
            )
            for one in logprobs
        ]


class CompletionResponseBuilder(ResponseBuilder):
    """Texts that go on from prompts."""

    id_prefix = "cmpl"

    def __init__(
        self, request: PreparedRequest, body: SampledRequest, tokens: TokenText, *, echo: bool
    ) -> None:
        super().__init__(request, body, tokens)
        self._echo = echo
        # Where the next token of each choice's text begins, for streams.
        self._offsets: dict[int, int] = {}
        self._echoed: set[int] = set()

    def whole(self) -> Completion:
        """See `ResponseBuilder.whole`."""
        choices = []
        for output in self.outputs:
            number = output.index // self.request.choices_per_prompt
            text, table = output.text, self._new_table()
            if self._echo:
                text = self.request.prompts[number].text + text
                self._add_prompt(table, number)
            if table is not None:
                table.add(output.logprobs)
            # No end is told of an output for which no token was asked.
            ending = output.finish_reason or "length"
            choices.append(self._choice(output.index, text, ending, table))
        return self._chunk(*choices, usage=self._usage())

    def chunks(self, piece: OutputDelta) -> Iterable[BaseModel]:
        """See `ResponseBuilder.chunks`; an echoed prompt comes with its first piece."""
        per_prompt = self.request.choices_per_prompt
        number = piece.index // per_prompt
        if self._echo and number not in self._echoed:
            self._echoed.add(number)
            for index in range(number * per_prompt, (number + 1) * per_prompt):
                yield self._echo_chunk(index, number)
        if not (piece.text or piece.logprobs or piece.finish_reason):
            return
        table = self._new_table(self._offsets.get(piece.index, 0))
        if table is not None:
            table.add(piece.logprobs)
            self._offsets[piece.index] = table.offset
        choice = self._choice(piece.index, piece.text, piece.finish_reason, table)
        yield self._choice_chunk(choice)

    def _echo_chunk(self, index: int, number: int) -> BaseModel:
        """A prompt as the first text of a choice."""
        table = self._new_table()
        self._add_prompt(table, number)
        if table is not None:
            self._offsets[index] = table.offset
        text = self.request.prompts[number].text
        return self._choice_chunk(self._choice(index, text, None, table))

    def _new_table(self, offset: int = 0) -> _LogprobTable | None:
        return _LogprobTable(self._tokens, offset) if self._has_logprobs else None

    def _add_prompt(self, table: _LogprobTable | None, number: int) -> None:
        if table is not None:
            read = self._read.get(number)
            table.add_prompt(self.request.prompts[number], (read and read.logprobs) or ())

    def _choice(
        self, index: int, text: str, finish_reason: str | None, table: _LogprobTable | None
    ) -> CompletionChoice:
        # Without validation: in a stream, OpenAI's own servers send choices without an end.
        return CompletionChoice.construct(
            index=index,
            text=text,
            finish_reason=finish_reason,
            logprobs=None if table is None else table.logprobs(),
        )

    def _chunk(self, *choices: BaseModel, **usage: Any) -> Completion:
        return Completion.construct(
            object="text_completion", choices=[*choices], **self._shared, **usage
        )


class _LogprobTable:
    """The parallel lists of OpenAI's older form, as they grow."""

    def __init__(self, tokens: TokenText, offset: int) -> None:
        self._tokens, self.offset = tokens, offset
        self._texts: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Adds tokens of an output."""
        for one in logprobs:
            self._add(one.token, one, self._tokens.length(one.token))

    def add_prompt(self, prompt: Prompt, logprobs: Sequence[TokenLogprob | None]) -> None:
        """Adds a prompt's tokens, the first of which has no probability."""
        for number, token in enumerate(prompt.token_ids):
            known = logprobs[number] if number < len(logprobs) else None
            length = self._tokens.length(token)
            if number == 0 and prompt.is_text:
                length = _length_in(prompt.text, self._tokens.text(token))
            self._add(token, known, length)

    def logprobs(self) -> Logprobs:
        """The lists."""
        return Logprobs.construct(
            tokens=self._texts,
            token_logprobs=self._logprobs,
            top_logprobs=self._tops,
            text_offset=self._offsets,
        )

    def _add(self, token: int, known: TokenLogprob | None, length: int) -> None:
        self._texts.append(self._tokens.text(token))
        self._offsets.append(self.offset)
        self.offset += length
        self._logprobs.append(None if known is None else known.logprob)
        tops: dict[str, float] = {}
        for one, logprob in () if known is None else (*known.top, (token, known.logprob)):
            # Where two tokens read the same, the likelier one is told.
            tops.setdefault(self._tokens.text(one), logprob)
        self._tops.append(None if known is None else tops)


def _length_in(prompt: str, first: str) -> int:
    """Characters of a text's first token; none of a special token that was put before the text."""
    for form in (first, first.lstrip()):
        if form and prompt.startswith(form):
            return len(form)
    return 0
