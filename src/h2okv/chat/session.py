"""A conversation on one cache."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

import h2okv
from h2okv.cache.checkpoint import read_notes
from h2okv.cli.args import Sampling
from h2okv.cli.generate import LONG_PROMPT, check_vocabulary, sampling_options
from h2okv.console import Interrupt, Progress
from h2okv.engine.detokenizer import StopText, TextStream
from h2okv.engine.sampler import RefuseNaN
from h2okv.integration.chat_template import ChatTemplateError, chat_text
from h2okv.integration.loading import Described
from h2okv.integration.prefill import read_blocks


@dataclass(frozen=True)
class Answer:
    """What the model said, and what it took.

    Attributes:
        shown: The text that the user saw.
        text: The text of all tokens, a stop string included, special tokens left out.
        token_ids: The new tokens; the last one has not been through the cache.
        finish_reason: `eos`, `stop` (a stop string), `length`, `context` (the context window is
            full), or `interrupted`.
        time_to_first_token: Seconds from the user's turn on; None if no token came.
        tokens_per_second: While decoding, the first token not counted; None below two tokens.
    """

    shown: str
    text: str
    token_ids: list[int]
    finish_reason: str
    time_to_first_token: float | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class Question:
    """What an answer is made from.

    Attributes:
        token_ids: What the cache has not seen; at least one.
        room: The most tokens to generate.
        stop_strings: What else ends the answer.
        end_tokens: Tokens that end it.
    """

    token_ids: list[int]
    room: int
    stop_strings: tuple[str, ...]
    end_tokens: list[int]


class Answering(StoppingCriteria):
    """Makes one answer, and keeps what there is of it if it is cut short.

    It takes the tokens as a stopping criterion and not as a streamer, for only a criterion hears
    of a token before it is decided whether another one follows, in every version of transformers.
    """

    def __init__(
        self,
        question: Question,
        tokenizer: PreTrainedTokenizerBase,
        interrupt: Interrupt,
        write: Callable[[str], None],
    ) -> None:
        self._question = question
        self._ids = torch.tensor([question.token_ids])
        self._tokenizer = tokenizer
        self._interrupt = interrupt
        self._shown = StopText(question.stop_strings, write)
        self._stream = TextStream(tokenizer, self._ids, self._shown.add, lambda: None)
        self._stream.put(self._ids)
        self._start = time.perf_counter()

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **options: Any
    ) -> torch.BoolTensor:
        """Takes the newest token, int `[1, T]`; tells whether the answer ends with it."""
        self._stream.put(input_ids[0, -1:].cpu())
        done = self._shown.stopped is not None or self._interrupt.requested
        return torch.full((1,), done, dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]

    def run(
        self,
        model: PreTrainedModel,
        cache: h2okv.H2OCache,
        sampling: Sampling,
        show_progress: bool = False,
    ) -> None:
        """Reads the question and generates; `answer` tells how far it came, also after an error.

        The question is read in blocks of `cache.prefill_chunk`, the last of which is the first
        forward of `generate`; so it is read exactly as `h2okv.prefill` would.
        """
        rest = self._ids
        chunk = cache.prefill_chunk
        before = 0 if chunk is None else (rest.shape[1] - 1) // chunk * chunk
        if before and not self._read(model, cache, before, show_progress):
            return
        rest = rest[:, before:].to(model.device)
        length = cache.num_seen_tokens + rest.shape[1]
        generate: Any = model.generate  # its type gets lost on the way through torch's Module
        generate(
            input_ids=rest,
            attention_mask=torch.ones(1, length, dtype=torch.long, device=model.device),
            past_key_values=cache,
            max_new_tokens=self._question.room,
            use_cache=True,
            num_beams=1,
            eos_token_id=self._question.end_tokens or None,
            logits_processor=[RefuseNaN()],
            stopping_criteria=[self],
            **sampling_options(sampling),
        )

    def _read(
        self, model: PreTrainedModel, cache: h2okv.H2OCache, count: int, show_progress: bool
    ) -> bool:
        """Reads all blocks but the last; returns whether nobody interrupted."""
        shown = show_progress and count >= LONG_PROMPT
        with Progress("reading", count, "tokens", shown=shown) as progress:
            for read, _ in read_blocks(model, self._ids[:, :count], cache):
                progress.update(read)
                if self._interrupt.requested:
                    return False
        return not self._interrupt.requested

    def answer(self) -> Answer:
        """Finishes the text and returns the answer as far as it came."""
        self._stream.end()
        self._shown.end()
        times = self._stream.arrival_times
        speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
        return Answer(
            shown=self._shown.text,
            text=self._stream.text,
            token_ids=self._stream.token_ids,
            finish_reason=self._finish_reason(),
            time_to_first_token=times[0] - self._start if times else None,
            tokens_per_second=speed,
        )

    def _finish_reason(self) -> str:
        tokens = self._stream.token_ids
        if tokens and tokens[-1] in self._question.end_tokens:
            return "eos"
        if self._shown.stopped is not None:
            return "stop"
        return "length" if len(tokens) == self._question.room else "interrupted"


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Lists the tokens that end an answer: the model's own, and the tokenizer's."""
    named = model.generation_config.eos_token_id if model.generation_config else None
    found: Sequence[int | None] = named if isinstance(named, list) else [named]
    return sorted({token for token in (*found, tokenizer.eos_token_id) if token is not None})


Message = dict[str, str]

# Stands for an earlier answer when a turn is rendered alone; letters only, so that no template
# trims, escapes or splits it.
_PLACEHOLDER = "anearlieranswerstoodhere"
_ANCHOR = "a"


@dataclass(frozen=True)
class Transcript:
    """A chat so far.

    Attributes:
        messages: `role` and `content` of each message, as templates take them.
        token_ids: All tokens of the chat in order. The cache has seen the first
            `cache.num_seen_tokens` of them; the others wait for the next turn.
        text: The same as text, in a template's form, special tokens included.
    """

    messages: list[Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""

    def asked(self, message: str, token_ids: list[int], text: str) -> Transcript:
        """Returns the transcript with a user's turn at its end."""
        messages = [*self.messages, {"role": "user", "content": message}]
        return replace(
            self,
            messages=messages,
            token_ids=self.token_ids + token_ids,
            text=self.text + text,
        )

    def answered(self, content: str, token_ids: list[int], text: str) -> Transcript:
        """Returns the transcript with an answer at its end."""
        messages = [*self.messages, {"role": "assistant", "content": content}]
        return replace(
            self,
            messages=messages,
            token_ids=self.token_ids + token_ids,
            text=self.text + text,
        )


class TurnForm(ABC):
    """How a model wants to be talked to."""

    stop_strings: tuple[str, ...] = ()
    keeps_end_token = True
    """Whether the token that ended an answer belongs to the chat."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str = "") -> None:
        self.tokenizer = tokenizer
        self.system = system

    def ask(self, transcript: Transcript, message: str) -> Transcript:
        """Adds a user's turn, up to where the answer begins."""
        if not transcript.messages:
            opening = [{"role": "system", "content": self.system}] if self.system else []
            transcript = replace(transcript, messages=opening)
        text, token_ids = self._new_part(transcript, message)
        return transcript.asked(message, token_ids, text)

    @abstractmethod
    def _new_part(self, transcript: Transcript, message: str) -> tuple[str, list[int]]:
        """Text and tokens of a user's turn after the transcript."""

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        """Tokens of a text by itself, with the first token of all texts if `special`."""
        encoded = self.tokenizer(text, add_special_tokens=special, verbose=False)
        return [int(token) for token in encoded["input_ids"]]

    def _encode_behind(self, text: str) -> list[int]:
        """Tokens of a text that stands behind another one."""
        # Some tokenizers put a space before whatever they get; then it stands before the anchor.
        before, whole = self._encode(_ANCHOR), self._encode(_ANCHOR + text)
        if whole[: len(before)] == before:
            return whole[len(before) :]
        return self._encode(text)


class TemplateForm(TurnForm):
    """The chat template that the model was trained with.

    The template is rendered for the whole chat, and what follows the part that was read already is
    new. Where a template says something else about the past than it said before (many leave out
    earlier reasoning), the new turn is rendered behind a placeholder for the last answer.
    """

    def _new_part(self, transcript: Transcript, message: str) -> tuple[str, list[int]]:
        user = {"role": "user", "content": message}
        if not transcript.token_ids:
            text = self._render([*transcript.messages, user])
            return text, self._encode(text)
        text = self._continuation(transcript, user)
        return text, self._encode_behind(text)

    def _continuation(self, transcript: Transcript, user: Message) -> str:
        try:
            whole = self._render([*transcript.messages, user])
        except ValueError:
            whole = ""
        if whole.startswith(transcript.text):
            return whole[len(transcript.text) :]
        question = {"role": "user", "content": "question"}
        answer = {"role": "assistant", "content": _PLACEHOLDER}
        before, _, after = self._render([question, answer, user]).partition(_PLACEHOLDER)
        if not before or not after:
            raise ValueError(
                "the model's chat template leaves earlier answers out, so a chat cannot go on;"
                " use /reset for each question, or another model"
            )
        # The answer may have brought the end of its turn itself.
        end = str(self.tokenizer.convert_ids_to_tokens(transcript.token_ids[-1]))
        return after.removeprefix(end) if transcript.text.endswith(end) else after

    def _render(self, messages: list[Message]) -> str:
        try:
            return chat_text(self.tokenizer, messages)
        except ChatTemplateError as error:
            hint = "; leave out --system" if self.system else "; use another model"
            raise ValueError(
                f"the model's chat template does not take this chat ({error.reason}){hint}"
            ) from error


class PlainForm(TurnForm):
    """A plain dialogue, for a model that was never taught to chat.

    An answer ends where the model would write the user's next line.
    """

    stop_strings = ("\nUser:",)
    keeps_end_token = False

    _SEPARATOR = "\n\nUser:"
    _LOOK_BACK = 16

    def _new_part(self, transcript: Transcript, message: str) -> tuple[str, list[int]]:
        turn = f" {message}\n\nAssistant:"
        if not transcript.token_ids:
            user = {"role": "user", "content": message}
            text = chat_text(self.tokenizer, [*transcript.messages, user])
            return text, self._encode(text, special=True)
        end = self.tokenizer.decode(
            transcript.token_ids[-self._LOOK_BACK :], skip_special_tokens=True
        )
        text = self._rest_of_separator(str(end)) + turn
        return text, self._encode_behind(text)

    def _rest_of_separator(self, end: str) -> str:
        """What is missing of the way to the user's line; the model may have begun it itself."""
        endings = (self._SEPARATOR, *self.stop_strings)
        for length in range(len(self._SEPARATOR) - 1, 0, -1):
            for ending in endings:
                if length < len(ending) and end.endswith(ending[:length]):
                    return ending[length:]
        return self._SEPARATOR


def form_for(tokenizer: PreTrainedTokenizerBase, system: str = "") -> TurnForm:
    """Chooses the model's chat template, or the plain form for a model without one."""
    if tokenizer.chat_template is None:
        return PlainForm(tokenizer, system)
    return TemplateForm(tokenizer, system)


_NOTE = "chat"
_VERSION = 1


@dataclass(frozen=True)
class SavedChat:
    """What a file holds beside the cache.

    Attributes:
        transcript: The chat so far.
        system: What stood before everything.
        sampling: How its tokens were chosen.
    """

    transcript: Transcript
    system: str
    sampling: Sampling


def write_chat(path: Path, cache: h2okv.H2OCache, chat: SavedChat) -> None:
    """Writes a chat and its cache to one file, whole or not at all."""
    path = path.expanduser()
    if path.exists():
        _require_saved_cache(path)
    note = json.dumps({"version": _VERSION, **asdict(chat)})
    cache.save(path, notes={_NOTE: note})


def read_chat(path: Path, model: PreTrainedModel) -> tuple[h2okv.H2OCache, SavedChat]:
    """Reads a saved chat."""
    path = path.expanduser()
    if not path.is_file():
        raise ValueError(f"'{path}' is not a file; give one that /save wrote")
    note = read_notes(path).get(_NOTE)
    if note is None:
        raise ValueError(f"'{path}' holds a cache but no chat; give a file that /save wrote")
    try:
        chat = _parse(json.loads(note))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the chat in '{path}' is damaged ({error}); use another file") from error
    cache = h2okv.H2OCache.load(path, model)
    if len(chat.transcript.token_ids) < cache.num_seen_tokens:
        raise ValueError(
            f"the chat in '{path}' is damaged (its cache has read {cache.num_seen_tokens} tokens,"
            f" its text has {len(chat.transcript.token_ids)}); use another file"
        )
    return cache, chat


def _parse(fields: dict[str, Any]) -> SavedChat:
    if fields["version"] != _VERSION:
        raise ValueError(f"version {fields['version']} of the chat, not {_VERSION}")
    transcript = Transcript(**fields["transcript"])
    if not all(isinstance(token, int) for token in transcript.token_ids):
        raise ValueError("a token that is no number")
    if not all(set(message) == {"role", "content"} for message in transcript.messages):
        raise ValueError("a message without role or content")
    return SavedChat(transcript, str(fields["system"]), Sampling(**fields["sampling"]))


def _require_saved_cache(path: Path) -> None:
    """Refuses to write over a file that is not a saved cache."""
    try:
        read_notes(path)
    except ValueError as error:
        raise ValueError(
            f"'{path}' exists and is no saved chat; choose another file, so that it is not lost"
        ) from error


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
    """A conversation on one cache; the past is never read again."""

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
        """Writes the chat and its cache to one file."""
        self._require_whole()
        if not self.transcript.token_ids:
            raise ValueError("there is nothing to save yet; say something first")
        write_chat(path, self.cache, self._saved())

    def load(self, path: Path) -> SavedChat:
        """Takes up a saved chat; the one that was going on is gone, unless this fails."""
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
