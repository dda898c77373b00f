"""Answers of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

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

from h2okv.engine.serving.outputs import Piece, TokenLogprob
from h2okv.server.generation import Progress
from h2okv.server.reply import FINGERPRINT, Reply, usage_of
from h2okv.server.token_text import TokenText


class ChatReply(Reply):
    """An assistant's messages.

    Args:
        model_name: What the client called the model.
        tokens: Writes tokens out.
        wants_usage: Whether the stream ends with the counts of tokens.
        logprobs: Whether log-probabilities are told.
        strips_start: Whether white space at an answer's start belongs to the form of the dialogue.
    """

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
