"""A conversation on one cache, and the text that the cache still holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from h2okv.cache import H2OCache
from h2okv.cache.checkpoint import read_notes
from h2okv.cache.layer import CacheLayer
from h2okv.console import Interrupt
from h2okv.engine.cache_engine import CacheEngine
from h2okv.engine.detokenizer import (
    THOUGHTS,
    THOUGHTS_END,
    Detokenizer,
    Thoughts,
    TokenText,
    is_inside_character,
)
from h2okv.engine.generation import Generation, GenerationRun
from h2okv.engine.model_runner import count_kept
from h2okv.engine.sampling_params import SamplingParams
from h2okv.models.loading import Described
from h2okv.prompts.chat_template import ChatTemplateError, chat_text, encode, message_spans
from h2okv.records import parse_json, refusing

if TYPE_CHECKING:
    from rich.text import Text

Message = dict[str, str]

# Replaces an earlier answer when a turn is rendered alone; letters only, because templates trim,
# escape or split other characters.
_PLACEHOLDER = "anearlieranswerstoodhere"
_ANCHOR = "a"
_SEPARATOR = "\n\nUser:"
_LOOK_BACK = 16
_TURNS_BYTES = 1 << 30  # of the caches before earlier turns
_NOTE = "chat"
_VERSION = 1
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}


@dataclass(frozen=True)
class Transcript:
    """Messages, tokens and text of a chat."""

    messages: list[Message] = field(default_factory=list)
    # All tokens of the chat; the cache has seen the first `cache.num_seen_tokens` of them.
    token_ids: list[int] = field(default_factory=list)
    text: str = ""  # as the template renders it, with special tokens

    def then(self, role: str, content: str, token_ids: list[int], text: str) -> Transcript:
        """Return the transcript with one more message."""
        messages = [*self.messages, {"role": role, "content": content}]
        return Transcript(messages, self.token_ids + token_ids, self.text + text)


class TurnForm:
    """The format of a model's turns.

    A chat template is rendered for the whole chat; the new turn is the text after what the cache
    has read. Some templates render earlier messages differently later (many leave out earlier
    reasoning); then the new turn is rendered after a placeholder for the last answer.

    A model without a chat template gets a plain dialogue. There an answer ends where the model
    would write the user's next line, and the token that ends it is not part of the chat.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str = "") -> None:
        self.tokenizer = tokenizer
        self.system = system
        self.is_plain = tokenizer.chat_template is None
        self.stop_strings = ("\nUser:",) if self.is_plain else ()

    def ask(self, transcript: Transcript, message: str) -> Transcript:
        """Add a user's turn, up to where the answer begins."""
        if not transcript.messages and self.system:
            transcript = Transcript([{"role": "system", "content": self.system}])
        user = {"role": "user", "content": message}
        if transcript.token_ids:
            follow = self._follow_plain if self.is_plain else self._follow_template
            text = follow(transcript, user)
            token_ids = self._encode_after(text)
        else:
            text = self._render([*transcript.messages, user])
            # Templates render the begin-of-text token themselves.
            token_ids = encode(self.tokenizer, text, special=self.is_plain)
        return transcript.then("user", message, token_ids, text)

    def _follow_template(self, transcript: Transcript, user: Message) -> str:
        """Return the text of a user's turn after the transcript, with a chat template."""
        try:
            rendered = self._render([*transcript.messages, user])
        except ValueError:
            rendered = ""
        if rendered.startswith(transcript.text):
            return rendered[len(transcript.text) :]
        question = {"role": "user", "content": "question"}
        answer = {"role": "assistant", "content": _PLACEHOLDER}
        before, _, after = self._render([question, answer, user]).partition(_PLACEHOLDER)
        if not before or not after:
            raise ValueError(
                "the chat template leaves earlier answers out; /reset before each question, or use"
                " another model"
            )
        # The answer may have ended with the end-of-turn token already.
        end = str(self.tokenizer.convert_ids_to_tokens(transcript.token_ids[-1]))
        return after.removeprefix(end) if transcript.text.endswith(end) else after

    def without_thoughts(
        self, before: Transcript, question: Transcript, answer: str
    ) -> Transcript | None:
        """Return a turn as the template shows it later; ``None`` if it has no thoughts or text."""
        if self.is_plain or THOUGHTS_END not in str(self.tokenizer.chat_template):
            return None
        is_open = question.text.rstrip().endswith(THOUGHTS)
        thoughts, content = Thoughts(is_open).split(answer, is_end=True)
        messages = [*question.messages, {"role": "assistant", "content": content.strip()}]
        rendered = self._render([*messages, {"role": "user", "content": _PLACEHOLDER}])
        head, content, _ = rendered.partition(_PLACEHOLDER)[0].rpartition(content.strip() or "\0")
        if not (thoughts and content and head.startswith(before.text)):
            return None
        text = head[len(before.text) :] + content
        token_ids = self._encode_after(text) if before.text else encode(
            self.tokenizer, text, special=False
        )  # fmt: skip
        return Transcript(messages, before.token_ids + token_ids, before.text + text)

    def _follow_plain(self, transcript: Transcript, user: Message) -> str:
        """Return the same for a plain dialogue, less what the model has begun of it."""
        last = transcript.token_ids[-_LOOK_BACK:]
        end = str(self.tokenizer.decode(last, skip_special_tokens=True))
        matches = [
            (length, text[length:])
            for text in (_SEPARATOR, *self.stop_strings)
            for length in range(len(text))
            if end.endswith(text[:length])
        ]
        _, remainder = max(matches, key=lambda match: match[0])
        return f"{remainder} {user['content']}\n\nAssistant:"

    def _render(self, messages: list[Message]) -> str:
        try:
            return chat_text(self.tokenizer, messages)
        except ChatTemplateError as error:
            hint = "; leave out --system" if self.system else "; use another model"
            raise ValueError(
                f"the model's chat template rejects this chat ({error.reason}){hint}"
            ) from error

    def _encode_after(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another one."""
        # Some tokenizers prepend a space to their input; here it precedes the anchor.
        texts = (_ANCHOR, _ANCHOR + text, text)
        before, joined, alone = (
            encode(self.tokenizer, content, special=False) for content in texts
        )
        return joined[len(before) :] if joined[: len(before)] == before else alone


@dataclass(frozen=True)
class SavedChat:
    """Contents of a saved chat's file besides the cache."""

    transcript: Transcript
    system: str

    @classmethod
    def from_note(cls, note: str) -> SavedChat:
        """Parse a note; raises any of the errors that `read_chat` handles if it is damaged."""
        saved = parse_json(note)
        if saved["version"] != _VERSION:
            raise ValueError(f"version {saved['version']} of the chat, not {_VERSION}")
        return cls(Transcript(**saved["transcript"]), str(saved["system"]))


def read_chat(path: Path, model: PreTrainedModel | PreTrainedConfig) -> tuple[H2OCache, SavedChat]:
    """Read the cache and the chat of a file that /save wrote."""
    if not path.is_file():
        raise ValueError(f"'{path}' is not a file; give one that /save wrote")
    note = read_notes(path).get(_NOTE)
    if note is None:
        raise ValueError(f"'{path}' holds a cache but no chat; give a file that /save wrote")
    kinds = (ValueError, TypeError, KeyError, AttributeError)
    with refusing(f"the chat in '{path}' is damaged", "use another file", *kinds):
        chat = SavedChat.from_note(note)
    return H2OCache.load(path, model), chat


class Chat:
    """A conversation on one cache, which reads no token twice."""

    def __init__(
        self,
        model: PreTrainedModel,  # with H2O attention
        described: Described,
        params: SamplingParams,  # `seed` and `max_tokens` are set
        cache: H2OCache,
        system: str = "",
        pin: Sequence[str] = (),  # messages of the first turn that are never evicted
        verify: bool = False,  # whether answers are read again with the full cache
    ) -> None:
        self.model, self.described, self.params, self.pin = model, described, params, pin
        self.verify = verify
        # One for the whole chat: /retry draws another answer.
        seed = int(params.seed or 0)
        self._generator = None if params.is_greedy else torch.Generator().manual_seed(seed)
        self._begin(cache, system, Transcript())

    def _begin(self, cache: H2OCache, system: str, transcript: Transcript) -> None:
        self.cache = cache
        self.form = TurnForm(self.described.tokenizer, system)
        self.transcript = transcript
        self._turns: list[tuple[Transcript, H2OCache]] = []  # what was before each

    def say(
        self, message: str, write: Callable[[str], None], show_progress: bool = False
    ) -> Generation:
        """Generate the answer to a message of the user. Mutates the cache and the transcript.

        Ctrl-C ends the answer early; the chat continues from there. A second one in the middle of
        a token takes the turn back.
        """
        seen, form = self.cache.num_seen_tokens, self.form
        transcript = form.ask(self.transcript, message)
        new = transcript.token_ids[seen:]
        if self.pin and not seen:
            self.cache.pin(message_spans(form.tokenizer, transcript.messages, self.pin))
        room = self._room(seen, new)
        params = replace(self.params, stop=(*form.stop_strings, *self.params.stop))
        with Interrupt() as interrupt:
            engine, draws = CacheEngine(self.model, form.tokenizer, self.cache), self._generator
            arguments = engine, transcript.token_ids, params, room, write
            options: dict[str, Any] = {"generator": draws, "verify": self.verify}
            generation = GenerationRun(*arguments, strips_start=True, **options)
            self._turns.append((self.transcript, self.cache.fork(1)))
            try:
                with suppress(KeyboardInterrupt):
                    generation.run(show_progress, lambda: interrupt.requested)
            finally:
                interrupt.settle()
                answer = generation.result()
                self._commit(transcript, answer, engine.is_broken)
        return answer

    def undo(self) -> str:
        """Return to before the last turn; return its message. Mutates the chat."""
        if not self._turns:
            raise ValueError("no earlier turn is kept; send a message, or /reset for a new chat")
        message = self.transcript.messages[-2]["content"]
        self.transcript, self.cache = self._turns.pop()
        return message

    def _commit(self, transcript: Transcript, answer: Generation, is_broken: bool) -> None:
        """Add a turn and its answer, unless the cache read none of it or is of no use."""
        earlier, before = self._turns[-1]
        if is_broken:
            self.cache = before
        if self.cache.num_seen_tokens == before.num_seen_tokens:
            self._turns.pop()
            return
        while sum(cache.nbytes for _, cache in self._turns) > _TURNS_BYTES:
            del self._turns[0]
        token_ids, is_eos = answer.token_ids, answer.finish_reason == "eos"
        # What the cache reads, so behind a stop string too.
        read = Detokenizer(self.form.tokenizer, transcript.token_ids)
        content = text = read.add(token_ids[:-1] if is_eos else token_ids) + read.end()
        if answer.finish_reason == "stop" or (is_eos and self.form.is_plain):
            # The cache has not read the token that ended the answer, so the chat can omit it.
            token_ids = token_ids[:-1]
        elif is_eos:
            text += str(self.form.tokenizer.convert_ids_to_tokens(token_ids[-1]))
        turn = self.form.without_thoughts(earlier, transcript, content)
        if turn is not None:  # the next turn reads this one again, without them
            self.transcript, self.cache = turn, before.fork(1)
            return
        self.transcript = transcript.then("assistant", content, token_ids, text)

    def _room(self, seen: int, new: Sequence[int]) -> int:
        """Return the maximum number of tokens of an answer to new tokens after those seen."""
        limits = self.described.limits
        if self.cache.position_rule.positions != "original":
            limits = replace(limits, max_context=None)
        limits.check_tokens(new, "this turn")
        name = f"a chat of {seen} tokens and this turn"
        option = "--cache positions=rolling (clamped for learned positions)"
        remedy = f"write less, /reset, or start with {option}"
        limits.check_length(seen + len(new), name=name, remedy=remedy)
        return limits.room(seen + len(new), int(self.params.max_tokens or 0))

    def reset(self) -> None:
        """Begin a new chat with the same system text."""
        self.cache.reset()
        self._begin(self.cache, self.form.system, Transcript())

    def save(self, path: Path) -> None:
        """Write the chat and its cache to one file atomically."""
        if not self.transcript.token_ids:
            raise ValueError("there is nothing to save yet; send a message first")
        if path.exists():
            problem = f"'{path}' exists and is not a saved chat"
            with refusing(problem, "choose another file", ValueError):
                read_notes(path)
        fields = {"transcript": asdict(self.transcript), "system": self.form.system}
        self.cache.save(path, notes={_NOTE: json.dumps({"version": _VERSION, **fields})})

    def load(self, path: Path) -> SavedChat:
        """Continue a saved chat; on an error the current one stays."""
        cache, saved = read_chat(path, self.model)
        self._begin(cache, saved.system, saved.transcript)
        return saved


class Level(Enum):
    """How many heads keep a token, with its colour and, for plain text, marks."""

    ALL = "kept by all", "bold green", "", ""
    SOME = "by some", "yellow", "{some:", "}"
    NONE = "evicted", "dim strike", "[-", "-]"
    WAITING = "not read yet", "italic cyan", "{next:", "}"

    @classmethod
    def of(cls, shares: Sequence[float]) -> Level:
        """Return the level of a character's tokens by their shares of heads; empty: not read."""
        if not shares:
            return cls.WAITING
        return cls.ALL if min(shares) == 1 else cls.SOME if max(shares) else cls.NONE


def kept_shares(cache: H2OCache, layer: int | None = None, head: int | None = None) -> list[float]:
    """Return for each token that was read the share of heads, 0 to 1, that keep it."""
    scored = [index for index, module in enumerate(cache.layers) if isinstance(module, CacheLayer)]
    positions = [cache.kept_positions(index)[0] for index in (scored if layer is None else [layer])]
    if head is not None:
        if not 0 <= head < len(positions[0]):
            last = len(positions[0]) - 1
            raise ValueError(f"head {head} is out of range; layer {layer} has KV heads 0 to {last}")
        positions = [layer_positions[head : head + 1] for layer_positions in positions]
    counts = count_kept(positions, cache.num_seen_tokens)
    num_heads = sum(map(len, positions))
    return [count / num_heads for count in counts]


def render_kept(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    shares: Sequence[float],
    with_marks: bool = False,
) -> Text:
    """Return a chat by levels, in colours, or with marks for plain text, below a legend."""
    from rich.text import Text

    data, first = [*map(TokenText(tokenizer).data, token_ids), b""], 0
    runs: list[list[Any]] = []  # level, bytes and number of tokens
    for end in range(1, len(data)):
        if not is_inside_character(data[end]):
            level, piece = Level.of(shares[first:end]), b"".join(data[first:end])
            if not runs or runs[-1][0] is not level:
                runs.append([level, b"", 0])
            runs[-1][1] += piece
            runs[-1][2] += end - first
            first = end
    text, body = Text(), Text("\n\n")
    for level in Level:
        meaning, style, before, after = level.value
        marks = (before, after) if with_marks else ("", "")
        if count := sum(run[2] for run in runs if run[0] is level):
            text.append(f"{marks[0]}{meaning}{marks[1]}: {count:,}", style).append("  ")
    for level, content, _ in runs:
        _, style, before, after = level.value
        # Show control characters; a terminal would obey them.
        shown = content.decode("utf-8", "replace").translate(_CONTROL)
        body.append(f"{before}{shown}{after}" if with_marks else shown, style)
    return text.append_text(body)
