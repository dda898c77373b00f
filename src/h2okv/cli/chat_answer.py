"""One answer on a cache that has seen the chat before it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

import h2okv
from h2okv.cli.chat_interrupt import Interrupt
from h2okv.cli.generation import sampling_options
from h2okv.cli.options import Sampling
from h2okv.cli.prefill_progress import LONG_PROMPT
from h2okv.cli.text_stream import TextStream
from h2okv.engine.stop_text import StopText
from h2okv.evaluation.numbers_only import NumbersOnly
from h2okv.integration.reading import read_blocks


@dataclass(frozen=True)
class Answer:
    """What the model said, and what it took.

    Attributes:
        shown: The text that the user saw.
        text: The text of all tokens, a stop string included, special tokens left out.
        token_ids: The new tokens; the last one has not been through the cache.
        finish_reason: `eos`, `stop` (a stop string), `length`, `context` (the trained window is
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

    Args:
        question: What to answer.
        tokenizer: The model's tokenizer.
        interrupt: Whether Ctrl-C came.
        write: Takes the text while it is made.
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

        Args:
            model: With H2O attention.
            cache: Mutated.
            sampling: How the tokens are chosen.
            show_progress: Whether to draw a bar while a long question is read.

        Raises:
            ValueError: If the numbers overflow, or the cache refuses the tokens.
            KeyboardInterrupt: After the second Ctrl-C.
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
            logits_processor=[NumbersOnly()],
            stopping_criteria=[self],
            **sampling_options(sampling),
        )

    def _read(
        self, model: PreTrainedModel, cache: h2okv.H2OCache, count: int, show_progress: bool
    ) -> bool:
        """Reads all blocks but the last; returns whether nobody interrupted."""
        shown = show_progress and count >= LONG_PROMPT and sys.stderr.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
            task = progress.add_task(f"reading {self._ids.shape[1]:,} tokens", total=count)
            for read, _ in read_blocks(model, self._ids[:, :count], cache):
                progress.update(task, completed=read)
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
    """Lists the tokens that end an answer: the model's own, and the tokenizer's.

    Args:
        model: Its generation config may name one, several or none.
        tokenizer: Its end-of-text token ends a turn in most chat templates.

    Returns:
        The tokens, in order, each once.
    """
    named = model.generation_config.eos_token_id if model.generation_config else None
    found: Sequence[int | None] = named if isinstance(named, list) else [named]
    return sorted({token for token in (*found, tokenizer.eos_token_id) if token is not None})
