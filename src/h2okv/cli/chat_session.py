"""A chat: its transcript, and the one cache that has read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

import h2okv
from h2okv.cli.chat_answer import Answer, Answering, Question, end_tokens
from h2okv.cli.chat_file import SavedChat, read_chat, write_chat
from h2okv.cli.chat_interrupt import Interrupt
from h2okv.cli.chat_turns import Transcript, TurnForm, form_for
from h2okv.cli.options import Sampling
from h2okv.cli.prompt import check_vocabulary
from h2okv.integration.loading import Described

_BROKEN = (
    "the last answer was cut in the middle of a token, so the cache is of no use any more;"
    " /reset begins a new chat, /load FILE goes back to a saved one"
)


@dataclass(frozen=True)
class Partner:
    """Who answers, and how.

    Attributes:
        model: With H2O attention.
        described: Its description.
        sampling: How its tokens are chosen.
    """

    model: PreTrainedModel
    described: Described
    sampling: Sampling


class Chat:
    """A conversation on one cache; the past is never read again.

    Args:
        partner: Who answers.
        cache: Empty; mutated with every turn.
        system: What stands before everything; empty for nothing.
    """

    def __init__(self, partner: Partner, cache: h2okv.H2OCache, system: str = "") -> None:
        self.partner = partner
        self.cache = cache
        self.form: TurnForm = form_for(partner.described.tokenizer, system)
        self.transcript = Transcript()
        self.is_broken = False
        self._end_tokens = end_tokens(partner.model, partner.described.tokenizer)
        torch.manual_seed(partner.sampling.seed)

    def say(
        self, message: str, write: Callable[[str], None], show_progress: bool = False
    ) -> Answer:
        """Takes a turn of the user's and answers it. Mutates the cache and the transcript.

        Ctrl-C ends the answer with what there is of it; the chat goes on from there. A second one
        may leave a cache that has read a half of a token, and `is_broken`.

        Args:
            message: What the user says.
            write: Takes the answer while it is made.
            show_progress: Whether to draw a bar while a long turn is read.

        Returns:
            The answer.

        Raises:
            ValueError: If the turn does not fit or the template does not take it (then nothing has
                changed), or the model's numbers overflow (then the answer ends there).
        """
        self._require_whole()
        seen = self.cache.num_seen_tokens
        asked = self.form.ask(self.transcript, message)
        new = asked.token_ids[seen:]
        check_vocabulary(self.partner.described, max(new))
        wanted = self.partner.sampling.max_new_tokens
        room = min(wanted, self._room(seen, len(new)))
        question = Question(new, room, self.form.stop_strings, self._end_tokens)
        model, tokenizer = self.partner.model, self.partner.described.tokenizer
        with Interrupt(model.base_model) as interrupt:
            answering = Answering(question, tokenizer, interrupt, write)
            try:
                answering.run(model, self.cache, self.partner.sampling, show_progress)
            except KeyboardInterrupt:
                self.is_broken = interrupt.in_forward
            finally:
                interrupt.settle()
                answer = answering.answer()
                if answer.finish_reason == "length" and room < wanted:
                    answer = replace(answer, finish_reason="context")
                self._commit(asked, answer, seen)
        return answer

    def _commit(self, asked: Transcript, answer: Answer, seen_before: int) -> None:
        """Notes what was read and said; nothing if none of the turn was read."""
        self.is_broken = self.is_broken or not self._is_whole()
        if not self.is_broken and self.cache.num_seen_tokens == seen_before:
            return
        token_ids, text = answer.token_ids, answer.text
        if answer.finish_reason == "stop" or (
            answer.finish_reason == "eos" and not self.form.keeps_end_token
        ):
            # Only decided, never read, so that the chat can go on without it.
            token_ids = token_ids[:-1]
        elif answer.finish_reason == "eos":
            text += str(self.partner.described.tokenizer.convert_ids_to_tokens(token_ids[-1]))
        self.transcript = asked.answered(answer.text, token_ids, text)

    def _room(self, seen: int, new: int) -> int:
        """How many tokens an answer may have."""
        described, wanted = self.partner.described, self.partner.sampling.max_new_tokens
        if self.cache.rule.positions != "original" or described.context is None:
            return wanted
        room = described.context - seen - new
        if room < 1:
            raise ValueError(
                f"the chat has {seen} tokens and this turn brings {new} more, but with"
                f" --positions original the context of --model {described.name!r} ends at"
                f" {described.context}; say less, /reset, or start with --positions rolling"
                " (clamped for learned positions)"
            )
        return min(wanted, room)

    def reset(self) -> None:
        """Forgets everything but the system text."""
        self.cache.reset()
        self.transcript = Transcript()
        self.is_broken = False

    def save(self, path: Path) -> None:
        """Writes the chat and its cache to one file.

        Args:
            path: A new file, or a saved chat, which is replaced.

        Raises:
            ValueError: If there is nothing to save, or the file cannot be written.
        """
        self._require_whole()
        if not self.transcript.token_ids:
            raise ValueError("there is nothing to save yet; say something first")
        write_chat(path, self.cache, self._saved())

    def load(self, path: Path) -> SavedChat:
        """Takes up a saved chat; the one that was going on is gone, unless this fails.

        Args:
            path: A file that `save` wrote, with the same model.

        Returns:
            What the file holds.

        Raises:
            ValueError: If it cannot be read or is not a chat of this model; nothing has changed.
        """
        cache, saved = read_chat(path, self.partner.model)
        self.cache = cache
        self.form = form_for(self.partner.described.tokenizer, saved.system)
        self.transcript = saved.transcript
        self.is_broken = False
        return saved

    def _saved(self) -> SavedChat:
        return SavedChat(self.transcript, self.form.system, self.partner.sampling)

    def _is_whole(self) -> bool:
        try:
            self.cache.check_integrity()
        except ValueError:
            return False
        return True

    def _require_whole(self) -> None:
        if self.is_broken:
            raise ValueError(_BROKEN)
