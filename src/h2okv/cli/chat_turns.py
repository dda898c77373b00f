"""The next turn of a chat as tokens: what the model has not read yet, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from h2okv.integration.chat_text import ChatTemplateError, chat_text

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
    """How a model wants to be talked to.

    Args:
        tokenizer: The model's tokenizer.
        system: What stands before everything; empty for nothing.
    """

    stop_strings: tuple[str, ...] = ()
    keeps_end_token = True
    """Whether the token that ended an answer belongs to the chat."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str = "") -> None:
        self.tokenizer = tokenizer
        self.system = system

    def ask(self, transcript: Transcript, message: str) -> Transcript:
        """Adds a user's turn, up to where the answer begins.

        Args:
            transcript: The chat so far.
            message: What the user says.

        Returns:
            The transcript with the turn; its new tokens are the only ones to be read.

        Raises:
            ValueError: If the model's template cannot render the chat.
        """
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
    """Chooses the model's chat template, or the plain form for a model without one.

    Args:
        tokenizer: The model's tokenizer.
        system: What stands before everything; empty for nothing.

    Returns:
        The form.
    """
    if tokenizer.chat_template is None:
        return PlainForm(tokenizer, system)
    return TemplateForm(tokenizer, system)
