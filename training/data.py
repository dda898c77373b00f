"""Windows of book text that begin with BOS, some with facts woven in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from training.facts import KINDS, Fact, draw_facts
from training.text import read_held_out_book, read_training_books

GOLDEN = (5**0.5 - 1) / 2
SENTENCE_ENDS = (".", "!", "?", '."', '!"', '?"', ".”", "!”", "?”", ".'", "!'", "?'")


@dataclass(frozen=True)
class Answer:
    """Where an answer stands in a window, and how far back it was said.

    Attributes:
        start: Index of its first token.
        stop: Index after its last token.
        distance: Tokens since the answer in the statement of the fact.
        gap: Tokens since the answer was last said.
        kind: "statement", "use" or "question".
        fact: Number of the fact in its window.
        occurrence: 0 for the statement, then 1, 2, ...
        rivals: Number of other facts of the window that are about the same property.
    """

    start: int
    stop: int
    distance: int
    gap: int
    kind: str
    fact: int
    occurrence: int
    rivals: int


@dataclass(frozen=True)
class Window:
    """Token ids (int64, BOS first) and the answers among them."""

    tokens: np.ndarray
    answers: tuple[Answer, ...] = ()


class Corpus:
    """Tokenized books with the places where a sentence or paragraph ends.

    Args:
        tokens: All books, each followed by EOS.
        tokenizer: The tokenizer that made them.
    """

    def __init__(self, tokens: np.ndarray, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokens = tokens
        self.tokenizer = tokenizer
        self.breaks = _find_breaks(tokens, tokenizer)
        if not len(self.breaks):
            raise ValueError(f"corpus of {len(tokens)} tokens has no sentence end; use more text")

    @classmethod
    def from_books(cls, books: list[str], tokenizer: PreTrainedTokenizerFast) -> Corpus:
        """Tokenize books, one EOS after each."""
        arrays = []
        for book in books:
            ids = tokenizer.encode(book, add_special_tokens=False, verbose=False)
            arrays.append(np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16))
        return cls(np.concatenate(arrays), tokenizer)

    @classmethod
    def training(
        cls, folder: Path, tokenizer: PreTrainedTokenizerFast, cache: Path | None = None
    ) -> Corpus:
        """Tokenize the training books.

        Args:
            folder: The folder that holds the archive.
            tokenizer: The tokenizer.
            cache: A `.npy` file that keeps the tokens from one start to the next.

        Returns:
            The corpus.
        """
        if cache is not None and cache.exists():
            return cls(np.load(cache), tokenizer)
        corpus = cls.from_books(read_training_books(folder), tokenizer)
        if cache is not None:
            np.save(cache, corpus.tokens)
        return corpus

    @classmethod
    def held_out(
        cls, folder: Path, names: tuple[str, ...], tokenizer: PreTrainedTokenizerFast
    ) -> Corpus:
        """Tokenize some of the held-out books."""
        return cls.from_books([read_held_out_book(folder, name) for name in names], tokenizer)

    def passage(self, at: float, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Cut a passage that begins where a sentence begins.

        Args:
            at: Where to cut, from 0 (start of the corpus) to 1 (its end).
            length: Number of tokens.

        Returns:
            The tokens and the sentence ends among them (offsets to insert at).
        """
        last = len(self.tokens) - length
        first = np.searchsorted(self.breaks, int(at * last))
        start = int(self.breaks[min(first, len(self.breaks) - 1)])
        start = min(start, last)
        low, high = np.searchsorted(self.breaks, [start + 1, start + length])
        return self.tokens[start : start + length].astype(np.int64), self.breaks[low:high] - start


def _find_breaks(tokens: np.ndarray, tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Find the offsets between a sentence end and a token that begins with a space or line."""
    size = len(tokenizer)
    texts = [tokenizer.decode([index]) for index in range(size)]
    ends = np.array([text.endswith(SENTENCE_ENDS) for text in texts])
    begins = np.array([text[:1] in (" ", "\n") and text != "\n" for text in texts])
    newline = np.array([text.startswith("\n") for text in texts])
    begins |= newline
    return np.flatnonzero(ends[tokens[:-1]] & begins[tokens[1:]]) + 1


def plain_window(corpus: Corpus, at: float, length: int) -> Window:
    """Cut a window of book text.

    Args:
        corpus: The text.
        at: Where to cut, from 0 to 1.
        length: Number of tokens, BOS among them.

    Returns:
        The window, without answers.
    """
    tokens, _ = corpus.passage(at, length - 1)
    return Window(np.concatenate([[corpus.tokenizer.bos_token_id], tokens]))


@dataclass(frozen=True)
class _Event:
    at: float  # share of the window
    fact: int
    kind: str
    pieces: tuple[list[int], list[int], list[int]]


def _plan_events(
    rng: np.random.Generator, facts: list[Fact], tokenizer: PreTrainedTokenizerFast
) -> list[_Event]:
    """Plans for each fact one statement early, then two to eight uses, the last one a question."""
    events = []
    for number, fact in enumerate(facts):
        stated = rng.uniform(0.0, 0.4)
        uses = np.sort(rng.uniform(stated + 0.02, 1.0, size=rng.integers(2, 9)))
        kinds = ["statement", *("use" if rng.random() < 0.7 else "question" for _ in uses[1:])]
        for at, kind in zip([stated, *uses], [*kinds, "question"], strict=True):
            template = KINDS[kind][rng.integers(len(KINDS[kind]))]
            head, answer, tail = fact.sentence(template)
            pieces = tokenizer([" " + head, answer, tail], add_special_tokens=False)["input_ids"]
            events.append(_Event(float(at), number, kind, tuple(pieces)))
    return sorted(events, key=lambda event: event.at)


def fact_window(
    corpus: Corpus,
    at: float,
    length: int,
    rng: np.random.Generator,
    held_out: bool = False,
    one_property: bool = False,
) -> Window:
    """Cut a window and weave facts into it at sentence ends.

    Args:
        corpus: The text.
        at: Where to cut, from 0 to 1.
        length: Number of tokens, BOS among them.
        rng: Where chance comes from.
        held_out: Whether to use pairs of name and answer that training never shows.
        one_property: Whether all its facts are about one property.

    Returns:
        The window with the places of all answers.
    """
    tokenizer = corpus.tokenizer
    limit = max(1, length // 170)
    facts = draw_facts(rng, int(rng.integers(1, limit + 1)), held_out, one_property)
    events = _plan_events(rng, facts, tokenizer)
    room = length - 1 - sum(len(piece) for event in events for piece in event.pieces)
    while room < length // 3:  # too much woven in: let the last events go
        room += sum(len(piece) for piece in events.pop().pieces)
    text, breaks = corpus.passage(at, room)

    used = {event.fact for event in events}
    rivals = {
        first: sum(facts[first].relation == facts[second].relation for second in used - {first})
        for first in used
    }
    tokens = [tokenizer.bos_token_id]
    answers: list[Answer] = []
    positions: dict[int, list[int]] = {}
    done = 0
    for event in events:
        end = done
        if len(breaks):
            nearest = breaks[np.abs(breaks - event.at * room).argmin()]
            end = max(done, int(nearest))
        tokens.extend(text[done:end])
        done = end
        head, answer, tail = event.pieces
        start = len(tokens) + len(head)
        earlier = positions.setdefault(event.fact, [])
        answers.append(
            Answer(
                start=start,
                stop=start + len(answer),
                distance=start - earlier[0] if earlier else 0,
                gap=start - earlier[-1] if earlier else 0,
                kind=event.kind,
                fact=event.fact,
                occurrence=len(earlier),
                rivals=rivals[event.fact],
            )
        )
        earlier.append(start)
        tokens.extend([*head, *answer, *tail])
    tokens.extend(text[done:])
    return Window(np.array(tokens, dtype=np.int64), tuple(answers))


class TrainingWindows:
    """The endless, repeatable row of training windows.

    Window n depends on the seed and n alone, so training resumes at any n. The cuts walk through
    the books in steps of the golden ratio, which covers the text evenly at every length.

    Args:
        corpus: The training text.
        seed: Seed of all choices.
        fact_share: Share of the windows with facts.
        one_property_share: Share of those whose facts only the name tells apart.
    """

    def __init__(
        self,
        corpus: Corpus,
        seed: int = 0,
        fact_share: float = 0.45,
        one_property_share: float = 0.5,
    ) -> None:
        self.corpus = corpus
        self.seed = seed
        self.fact_share = fact_share
        self.one_property_share = one_property_share

    def window(self, number: int, length: int) -> Window:
        """Make window `number` of `length` tokens."""
        rng = np.random.default_rng((self.seed, number))
        at = (number * GOLDEN) % 1.0
        if rng.random() < self.fact_share:
            one_property = rng.random() < self.one_property_share
            return fact_window(self.corpus, at, length, rng, one_property=one_property)
        return plain_window(self.corpus, at, length)

    def batch(self, number: int, count: int, length: int) -> np.ndarray:
        """Make windows `number` to `number + count - 1` as one int64 array [count, length]."""
        return np.stack([self.window(number + i, length).tokens for i in range(count)])


def held_out_windows(
    corpus: Corpus, count: int, length: int, seed: int = 0, facts: bool = False
) -> list[Window]:
    """Make evaluation windows, spread evenly over the corpus.

    Args:
        corpus: Held-out text.
        count: Number of windows.
        length: Number of tokens of each.
        seed: Seed of the facts.
        facts: Whether to weave in facts, from pairs that training never shows.

    Returns:
        The windows; with facts, their answers tell where recall is to be measured.
    """
    return list(_held_out_windows(corpus, count, length, seed, facts))


def _held_out_windows(
    corpus: Corpus, count: int, length: int, seed: int, facts: bool
) -> Iterator[Window]:
    for number in range(count):
        at = (number + 0.5) / count
        if facts:
            rng = np.random.default_rng((seed, number, 1))
            yield fact_window(corpus, at, length, rng, held_out=True)
        else:
            yield plain_window(corpus, at, length)
