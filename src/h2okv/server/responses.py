"""Response bodies in OpenAI's types."""

from __future__ import annotations

import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

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

from h2okv.engine.outputs import Piece, TokenLogprob
from h2okv.server.generation import Progress
from h2okv.server.tokenization import Prompt

_UNFINISHED = "\ufffd"
_ANCHOR = "a"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """Says what a token stands for, even where it is only a part of a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._anchor = list(tokenizer(_ANCHOR, add_special_tokens=False)["input_ids"])
        self._anchor_text = self._decode(self._anchor)
        self._bytes = lru_cache(maxsize=65536)(self._find_bytes)

    def data(self, token: int) -> bytes:
        """Returns a token's bytes in UTF-8; a part of a character may be all there is."""
        return self._bytes(token)

    def text(self, token: int) -> str:
        """Returns a token's text; for a part of a character its bytes in hexadecimal."""
        data = self.data(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def length(self, token: int) -> int:
        """Returns how many characters begin in a token."""
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


class Reply(ABC):
    """An answer in OpenAI's types, whole or as a stream."""

    def __init__(
        self, prefix: str, model_name: str, tokens: TokenText, wants_usage: bool = False
    ) -> None:
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model_name, self.tokens, self.wants_usage = model_name, tokens, wants_usage

    @abstractmethod
    def whole(self, progress: Progress) -> BaseModel:
        """Makes the answer of a finished job."""

    @abstractmethod
    def opening(self, progress: Progress) -> Iterable[BaseModel]:
        """Makes the chunks that come before any text."""

    @abstractmethod
    def chunks(self, piece: Piece, progress: Progress) -> Iterable[BaseModel]:
        """Makes the chunks of a piece, which ``progress`` has taken already."""

    @abstractmethod
    def closing(self, progress: Progress) -> Iterable[BaseModel]:
        """Makes the chunks that come after all text."""


def usage_of(progress: Progress) -> CompletionUsage:
    """Counts a job's tokens."""
    read, new = progress.prompt_tokens, progress.new_tokens
    return CompletionUsage(
        prompt_tokens=read,
        completion_tokens=new,
        total_tokens=read + new,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=progress.reused_tokens),
    )


class ChatReply(Reply):
    """An assistant's messages."""

    def __init__(
        self,
        model_name: str,
        tokens: TokenText,
        wants_usage: bool = False,
        *,
        logprobs: bool = False,
        strips_start: bool = False,
    ) -> None:
        super().__init__("chatcmpl", model_name, tokens, wants_usage)
        self.logprobs, self.strips_start = logprobs, strips_start
        self._begun: set[int] = set()

    def whole(self, progress: Progress) -> ChatCompletion:
        """See `Reply.whole`."""
        choices = []
        for completion in progress.completions:
            text = completion.text.lstrip() if self.strips_start else completion.text
            logprobs = None
            if self.logprobs:
                logprobs = ChoiceLogprobs(content=self._table(completion.logprobs))
            choices.append(
                Choice.construct(
                    index=completion.index,
                    message=ChatCompletionMessage(role="assistant", content=text),
                    # None is told where nothing was asked for.
                    finish_reason=completion.finish_reason or "length",
                    logprobs=logprobs,
                )
            )
        return ChatCompletion.construct(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.model_name,
            system_fingerprint=FINGERPRINT,
            choices=choices,
            usage=usage_of(progress),
        )

    def opening(self, progress: Progress) -> Iterable[ChatCompletionChunk]:
        """See `Reply.opening`: who speaks."""
        for index in range(progress.job.num_choices):
            yield self._chunk(index, ChoiceDelta(role="assistant", content=""))

    def chunks(self, piece: Piece, progress: Progress) -> Iterable[ChatCompletionChunk]:
        """See `Reply.chunks`."""
        text = piece.text
        if self.strips_start and piece.index not in self._begun:
            text = text.lstrip()
        if text:
            self._begun.add(piece.index)
        if text or (self.logprobs and piece.logprobs):
            yield self._chunk(piece.index, ChoiceDelta(content=text), piece.logprobs)
        if piece.finish_reason is not None:
            yield self._chunk(piece.index, ChoiceDelta(), finish_reason=piece.finish_reason)

    def closing(self, progress: Progress) -> Iterable[ChatCompletionChunk]:
        """See `Reply.closing`."""
        if self.wants_usage:
            yield self._chunks([], usage=usage_of(progress))

    def _chunk(
        self,
        index: int,
        delta: ChoiceDelta,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> ChatCompletionChunk:
        told = None
        if self.logprobs and logprobs:
            told = ChunkLogprobs(content=self._table(logprobs))
        choice = ChunkChoice.construct(
            index=index, delta=delta, finish_reason=finish_reason, logprobs=told
        )
        # With the counts asked for, all chunks have the field, and only the last one a value.
        return self._chunks([choice], **({"usage": None} if self.wants_usage else {}))

    def _chunks(self, choices: list[ChunkChoice], **usage: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk.construct(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model_name,
            system_fingerprint=FINGERPRINT,
            choices=choices,
            **usage,
        )

    def _table(self, logprobs: Sequence[TokenLogprob]) -> list[ChatCompletionTokenLogprob]:
        return [
            ChatCompletionTokenLogprob(
                token=self.tokens.text(one.token),
                bytes=list(self.tokens.data(one.token)),
                logprob=one.logprob,
                top_logprobs=[
                    TopLogprob(
                        token=self.tokens.text(token),
                        bytes=list(self.tokens.data(token)),
                        logprob=logprob,
                    )
                    for token, logprob in one.top
                ],
            )
            for one in logprobs
        ]


class CompletionReply(Reply):
    """Texts that go on from prompts."""

    def __init__(
        self,
        model_name: str,
        tokens: TokenText,
        wants_usage: bool = False,
        *,
        echo: bool = False,
        logprobs: bool = False,
    ) -> None:
        super().__init__("cmpl", model_name, tokens, wants_usage)
        self.echo, self.logprobs = echo, logprobs
        # Where the next token of each choice's text begins, for streams.
        self._offsets: dict[int, int] = {}
        self._echoed: set[int] = set()

    def whole(self, progress: Progress) -> Completion:
        """See `Reply.whole`."""
        choices = []
        for completion in progress.completions:
            number = completion.index // progress.job.choices_per_prompt
            text = completion.text
            table = _LogprobTable(self.tokens) if self.logprobs else None
            if self.echo:
                text = progress.job.prompts[number].text + text
                if table is not None:
                    self._add_prompt(table, progress, number)
            if table is not None:
                table.add(completion.logprobs)
            # No end is told of an output for which no token was asked.
            ending = completion.finish_reason or "length"
            choices.append(self._choice(completion.index, text, ending, table))
        return self._completion(choices, usage=usage_of(progress))

    def opening(self, progress: Progress) -> Iterable[Completion]:
        """See `Reply.opening`; echoed prompts come with their first piece instead."""
        return ()

    def chunks(self, piece: Piece, progress: Progress) -> Iterable[Completion]:
        """See `Reply.chunks`."""
        per_prompt = progress.job.choices_per_prompt
        number = piece.index // per_prompt
        if self.echo and number not in self._echoed:
            self._echoed.add(number)
            for index in range(number * per_prompt, (number + 1) * per_prompt):
                yield self._echo_chunk(index, number, progress)
        if not (piece.text or piece.logprobs or piece.finish_reason):
            return
        table = None
        if self.logprobs:
            table = _LogprobTable(self.tokens, self._offsets.get(piece.index, 0))
            table.add(piece.logprobs)
            self._offsets[piece.index] = table.offset
        yield self._chunk(self._choice(piece.index, piece.text, piece.finish_reason, table))

    def closing(self, progress: Progress) -> Iterable[Completion]:
        """See `Reply.closing`."""
        if self.wants_usage:
            yield self._completion([], usage=usage_of(progress))

    def _echo_chunk(self, index: int, number: int, progress: Progress) -> Completion:
        """A prompt as the first text of a choice."""
        table = _LogprobTable(self.tokens) if self.logprobs else None
        if table is not None:
            self._add_prompt(table, progress, number)
            self._offsets[index] = table.offset
        return self._chunk(self._choice(index, progress.job.prompts[number].text, None, table))

    def _add_prompt(self, table: _LogprobTable, progress: Progress, number: int) -> None:
        prompt, read = progress.job.prompts[number], progress.read.get(number)
        known = read.logprobs if read is not None and read.logprobs is not None else ()
        table.add_prompt(prompt, known)

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

    def _chunk(self, choice: CompletionChoice) -> Completion:
        # With the counts asked for, all chunks have the field, and only the last one a value.
        return self._completion([choice], **({"usage": None} if self.wants_usage else {}))

    def _completion(self, choices: list[CompletionChoice], **usage: Any) -> Completion:
        return Completion.construct(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model_name,
            system_fingerprint=FINGERPRINT,
            choices=choices,
            **usage,
        )


class _LogprobTable:
    """The parallel lists of OpenAI's older form, as they grow."""

    def __init__(self, tokens: TokenText, offset: int = 0) -> None:
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
        """Returns the lists."""
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
        self._tops.append(None if known is None else self._alternatives(known))

    def _alternatives(self, known: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens by text, and the chosen one among them."""
        found: dict[str, float] = {}
        for token, logprob in (*known.top, (known.token, known.logprob)):
            # Where two tokens read the same, the likelier one is told.
            found.setdefault(self._tokens.text(token), logprob)
        return found


def _length_in(prompt: str, first: str) -> int:
    """Characters of a text's first token; none of a special token that was put before the text."""
    for form in (first, first.lstrip()):
        if form and prompt.startswith(form):
            return len(form)
    return 0
