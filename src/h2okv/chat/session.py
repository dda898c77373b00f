"""A conversation on one cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from h2okv.cache import H2OCache
from h2okv.cache.checkpoint import read_notes
from h2okv.chat.generation import Generating, Generation
from h2okv.console import Interrupt
from h2okv.engine.sampler import eos_token_ids
from h2okv.engine.sampling_params import SamplingParams
from h2okv.integration.chat_template import (
    ChatTemplateError,
    chat_text,
    check_vocabulary,
    encode,
    message_spans,
)
from h2okv.integration.loading import Described
from h2okv.records import parse_json, refusing

Message = dict[str, str]

# Stands for an earlier answer when a turn is rendered alone; letters only, so that no template
# trims, escapes or splits it.
_PLACEHOLDER = "anearlieranswerstoodhere"
_ANCHOR = "a"
_SEPARATOR = "\n\nUser:"
_LOOK_BACK = 16
BROKEN = (
    "the last answer was cut in the middle of a token, so the cache is of no use any more; /reset"
    " begins a new chat, /load FILE goes back to a saved one"
)
_NOTE = "chat"
_VERSION = 1


@dataclass(frozen=True)
class Transcript:
    """A chat so far."""

    messages: list[Message] = field(default_factory=list)
    # Of the whole chat; the cache has seen the first `cache.num_seen_tokens` of them.
    token_ids: list[int] = field(default_factory=list)
    text: str = ""  # the same as text, in a template's form, special tokens included

    def then(self, role: str, content: str, token_ids: list[int], text: str) -> Transcript:
        messages = [*self.messages, {"role": role, "content": content}]
        return Transcript(messages, self.token_ids + token_ids, self.text + text)


class TurnForm:
    """How a model wants to be talked to.

    That is the chat template that it was trained with. It is rendered for the whole chat, and what
    follows the part that was read already is new. Where a template says something else about the
    past than it said before (many leave out earlier reasoning), the new turn is rendered behind a
    placeholder for the last answer.

    A model that was never taught to chat gets a plain dialogue. There an answer ends where the
    model would write the user's next line, and the token that ends it is no part of the chat.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str = "") -> None:
        self.tokenizer = tokenizer
        self.system = system
        self.is_plain = tokenizer.chat_template is None
        self.stop_strings = ("\nUser:",) if self.is_plain else ()

    def ask(self, transcript: Transcript, message: str) -> Transcript:
        """Adds a user's turn, up to where the answer begins."""
        if not transcript.messages and self.system:
            transcript = Transcript([{"role": "system", "content": self.system}])
        user = {"role": "user", "content": message}
        if transcript.token_ids:
            follow = self._follow_plain if self.is_plain else self._follow_template
            text = follow(transcript, user)
            token_ids = self._encode_behind(text)
        else:
            text = self._render([*transcript.messages, user])
            # The token that all texts begin with; a template has it itself.
            token_ids = encode(self.tokenizer, text, special=self.is_plain)
        return transcript.then("user", message, token_ids, text)

    def _follow_template(self, transcript: Transcript, user: Message) -> str:
        """The text of a user's turn behind the transcript."""
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
                "the chat template leaves earlier answers out; /reset before each question, or use"
                " another model"
            )
        # The answer may have brought the end of its turn itself.
        end = str(self.tokenizer.convert_ids_to_tokens(transcript.token_ids[-1]))
        return after.removeprefix(end) if transcript.text.endswith(end) else after

    def _follow_plain(self, transcript: Transcript, user: Message) -> str:
        """The same; the model may have begun the way to the user's line itself."""
        last = transcript.token_ids[-_LOOK_BACK:]
        end = str(self.tokenizer.decode(last, skip_special_tokens=True))
        ways = [
            (length, way[length:])
            for way in (_SEPARATOR, *self.stop_strings)
            for length in range(len(way))
            if end.endswith(way[:length])
        ]
        _, rest = max(ways, key=lambda way: way[0])
        return f"{rest} {user['content']}\n\nAssistant:"

    def _render(self, messages: list[Message]) -> str:
        try:
            return chat_text(self.tokenizer, messages)
        except ChatTemplateError as error:
            hint = "; leave out --system" if self.system else "; use another model"
            raise ValueError(
                f"the model's chat template does not take this chat ({error.reason}){hint}"
            ) from error

    def _encode_behind(self, text: str) -> list[int]:
        """Tokens of a text that stands behind another one."""
        # Some tokenizers put a space before whatever they get; then it stands before the anchor.
        texts = (_ANCHOR, _ANCHOR + text, text)
        before, whole, alone = (encode(self.tokenizer, own, special=False) for own in texts)
        return whole[len(before) :] if whole[: len(before)] == before else alone


@dataclass(frozen=True)
class SavedChat:
    """What a file holds beside the cache."""

    transcript: Transcript
    system: str
    params: SamplingParams

    def to_note(self) -> str:
        transcript, sampling = asdict(self.transcript), sampling_fields(self.params)
        told = {"transcript": transcript, "system": self.system, "sampling": sampling}
        return json.dumps({"version": _VERSION, **told})

    @classmethod
    def from_note(cls, note: str) -> SavedChat:
        """Reads it back; what is missing or of another kind raises whatever it raises."""
        saved = parse_json(note)
        if saved["version"] != _VERSION:
            raise ValueError(f"version {saved['version']} of the chat, not {_VERSION}")
        transcript, sampling = Transcript(**saved["transcript"]), dict(saved["sampling"])
        if not all(isinstance(token, int) for token in transcript.token_ids):
            raise ValueError("a token that is not a number")
        if not all(set(message) == {"role", "content"} for message in transcript.messages):
            raise ValueError("a message without role or content")
        params = SamplingParams(max_tokens=sampling.pop("max_new_tokens"), **sampling)
        return cls(transcript, str(saved["system"]), params)


def read_chat(path: Path, model: PreTrainedModel | PreTrainedConfig) -> tuple[H2OCache, SavedChat]:
    """Reads a saved chat."""
    if not path.is_file():
        raise ValueError(f"'{path}' is not a file; give one that /save wrote")
    note = read_notes(path).get(_NOTE)
    if note is None:
        raise ValueError(f"'{path}' holds a cache but no chat; give a file that /save wrote")
    kinds = (ValueError, TypeError, KeyError, AttributeError)
    with refusing(f"the chat in '{path}' is damaged", "use another file", *kinds):
        chat = SavedChat.from_note(note)
    cache = H2OCache.load(path, model)
    if len(chat.transcript.token_ids) < cache.num_seen_tokens:
        raise ValueError(
            f"the chat in '{path}' is damaged (its cache has read {cache.num_seen_tokens} tokens,"
            f" its text has {len(chat.transcript.token_ids)}); use another file"
        )
    return cache, chat


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """What is not left at its default, by the names of the command line."""
    always = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed")
    default, told = vars(SamplingParams()), dict(vars(params))
    most = told.pop("max_tokens")
    said = {name: own for name, own in told.items() if name in always or own != default[name]}
    return {"max_new_tokens": most, **said}


class Chat:
    """A conversation on one cache; the past is never read again."""

    def __init__(
        self,
        model: PreTrainedModel,  # with H2O attention
        described: Described,
        params: SamplingParams,  # `seed` and `max_tokens` are set
        cache: H2OCache,
        system: str = "",
        pin: Sequence[str] = (),  # messages of the first turn that are never evicted
    ) -> None:
        self.model, self.described, self.params, self.pin = model, described, params, pin
        self._begin(cache, system, Transcript())
        self._end_tokens = eos_token_ids(model)
        torch.manual_seed(int(params.seed or 0))

    def _begin(self, cache: H2OCache, system: str, transcript: Transcript) -> None:
        self.cache = cache
        self.form = TurnForm(self.described.tokenizer, system)
        self.transcript = transcript
        self.is_broken = False

    def say(
        self, message: str, write: Callable[[str], None], show_progress: bool = False
    ) -> Generation:
        """Takes a turn of the user's and answers it. Mutates the cache and the transcript.

        Ctrl-C ends the answer with what there is of it; the chat goes on from there. A second one
        may leave a cache that has read a half of a token, and `is_broken`.
        """
        self.require_whole()
        seen, form, wanted = self.cache.num_seen_tokens, self.form, self.params
        asked = form.ask(self.transcript, message)
        new = asked.token_ids[seen:]
        if self.pin and not seen:
            self.cache.pin(message_spans(form.tokenizer, asked.messages, self.pin))
        check_vocabulary(new, self.described.vocab_size)
        room, stop = self._room(seen, len(new)), (*form.stop_strings, *wanted.stop)
        params = replace(wanted, stop=stop)
        with Interrupt(self.model.base_model) as interrupt:
            answering = Generating(
                form.tokenizer, new, params, room, write, self._end_tokens,
                should_stop=lambda: interrupt.requested, strips_start=True,
            )  # fmt: skip
            try:
                answering.run(self.model, self.cache, show_progress)
            except KeyboardInterrupt:
                self.is_broken = interrupt.in_forward
            finally:
                interrupt.settle()
                answer = answering.result(self.cache)
                self._commit(asked, answer, seen)
        return answer

    def _commit(self, asked: Transcript, answer: Generation, seen_before: int) -> None:
        """Notes what was read and said; nothing if none of the turn was read."""
        try:
            self.cache.check_integrity()
        except ValueError:
            self.is_broken = True
        if not self.is_broken and self.cache.num_seen_tokens == seen_before:
            return
        token_ids, text = answer.token_ids, answer.text
        is_eos = answer.finish_reason == "eos"
        if answer.finish_reason == "stop" or (is_eos and self.form.is_plain):
            # Only decided, never read, so that the chat can go on without it.
            token_ids = token_ids[:-1]
        elif is_eos:
            text += str(self.form.tokenizer.convert_ids_to_tokens(token_ids[-1]))
        self.transcript = asked.then("assistant", answer.text, token_ids, text)

    def _room(self, seen: int, new: int) -> int:
        """How many tokens an answer may have."""
        described, wanted = self.described, int(self.params.max_tokens or 0)
        if self.cache.position_rule.positions != "original":
            return wanted
        room = described.room(seen + new, wanted)
        if room < 1:
            raise ValueError(
                f"the chat has {seen} tokens and this turn brings {new} more, but the context of"
                f" --model {described.name!r} ends at {described.context}; say less, /reset, or"
                " start with --positions rolling (clamped for learned positions)"
            )
        return room

    def reset(self) -> None:
        """Forgets everything but the system text."""
        self.cache.reset()
        self._begin(self.cache, self.form.system, Transcript())

    def save(self, path: Path) -> None:
        """Writes the chat and its cache to one file, whole or not at all."""
        self.require_whole()
        if not self.transcript.token_ids:
            raise ValueError("there is nothing to save yet; say something first")
        if path.exists():
            try:
                read_notes(path)
            except ValueError as error:
                raise ValueError(
                    f"'{path}' exists and is not a saved chat; choose another file, to keep it"
                ) from error
        chat = SavedChat(self.transcript, self.form.system, self.params)
        self.cache.save(path, notes={_NOTE: chat.to_note()})

    def load(self, path: Path) -> SavedChat:
        """Takes up a saved chat; the one that was going on is gone, unless this fails."""
        cache, saved = read_chat(path, self.model)
        self._begin(cache, saved.system, saved.transcript)
        return saved

    def require_whole(self) -> None:
        if self.is_broken:
            raise ValueError(BROKEN)
