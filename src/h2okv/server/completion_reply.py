"""Answers of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs

from h2okv.engine.serving.outputs import Piece, TokenLogprob
from h2okv.server.generation import Progress
from h2okv.server.prompt import Prompt
from h2okv.server.reply import FINGERPRINT, Reply, usage_of
from h2okv.server.token_text import TokenText


class CompletionReply(Reply):
    """Texts that go on from prompts.

    Args:
        model_name: What the client called the model.
        tokens: Writes tokens out.
        wants_usage: Whether the stream ends with the counts of tokens.
        echo: Whether each text begins with its prompt.
        logprobs: Whether log-probabilities are told.
    """

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
    """The parallel lists of OpenAI's older form, as they grow.

    Args:
        tokens: Writes tokens out.
        offset: Characters of the text before the first token.
    """

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
