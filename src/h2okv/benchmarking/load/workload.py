"""What the clients ask: prompts and lengths as mixed as those of real conversations."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from h2okv.assets import sample_prompt
from h2okv.benchmarking.load.outcome import LoadRequest

_LONGEST = 4
_SHORTEST_PROMPT = 16

Cut = Callable[[str, int], str]
"""Takes a text and a number of tokens; gives the text's beginning of about so many."""


@dataclass(frozen=True)
class Mix:
    """How long prompts and answers are.

    Answers are drawn from a log-normal distribution, the shape that lengths of shared
    conversations have: many short ones, a few that are several times the median.

    Attributes:
        context: The fewest and the most tokens of a prompt, evenly drawn; ``None`` leaves the
            prompts as they are.
        new_tokens: The median of the new tokens asked for.
        spread: Standard deviation of their logarithm; 0 asks for the median every time.
        seed: Of all draws.
        longest: More new tokens are never asked for; ``None`` for four times the median.

    Raises:
        ValueError: If a length makes no sense.
    """

    context: tuple[int, int] | None = None
    new_tokens: int = 128
    spread: float = 0.8
    seed: int = 0
    longest: int | None = None

    def __post_init__(self) -> None:
        """Checks all values."""
        if self.context is not None and not _SHORTEST_PROMPT <= self.context[0] <= self.context[1]:
            raise ValueError(
                f"--context {self.context[0]}:{self.context[1]} is no range of"
                f" {_SHORTEST_PROMPT} tokens or more; give one such as 2048:4096"
            )
        if self.new_tokens < 1:
            raise ValueError(f"--new-tokens {self.new_tokens} is too few; give 1 or more")
        if not 0 <= self.spread <= 3:
            raise ValueError(f"--spread {self.spread} is out of range; give 0 to 3, such as 0.8")

    @property
    def most_new_tokens(self) -> int:
        """More than so many are never asked for."""
        if not self.spread:
            return self.new_tokens
        return self.longest or self.new_tokens * _LONGEST

    def draw(self, number: int) -> tuple[int | None, int, random.Random]:
        """Draws what one request is to be.

        Args:
            number: Of the request; the same one always gets the same draws.

        Returns:
            Tokens of the prompt (``None``: as it is), new tokens, and the generator for more.
        """
        source = random.Random(f"{self.seed}:{number}")
        length = None if self.context is None else source.randint(*self.context)
        drawn = self.new_tokens * math.exp(self.spread * source.gauss(0, 1))
        return length, min(max(1, round(drawn)), self.most_new_tokens), source


class Workload:
    """Requests by number, the same for every server that is measured.

    Args:
        texts: The questions, taken in turn.
        mix: The lengths.
        cut: How many tokens a text has is the model's affair.
        filler: What stretches a question; begun at another place for each request, so that
            prompts do not share beginnings.
    """

    def __init__(self, texts: Sequence[str], mix: Mix, cut: Cut, filler: str | None = None) -> None:
        self._texts = texts
        self._words = (sample_prompt() if filler is None else filler).split()
        self._mix = mix
        self._cut = cut

    def request(self, number: int) -> LoadRequest:
        """Makes one request.

        Args:
            number: From 0 on.

        Returns:
            The request.
        """
        length, new_tokens, source = self._mix.draw(number)
        text = self._texts[number % len(self._texts)]
        if length is not None:
            text = self._cut(self._stretched(text, length, source), length)
        return LoadRequest(number, text, new_tokens)

    def _stretched(self, text: str, length: int, source: random.Random) -> str:
        """The question, then words until there are certainly enough tokens."""
        start = source.randrange(len(self._words))
        turned = self._words[start:] + self._words[:start]
        # A word has at least one token, so as many words as tokens are enough.
        rounds = length // len(turned) + 1
        return " ".join([f"({source.randrange(10**6)})", text, *(turned * rounds)[:length]])


def by_ratio(characters_per_token: float) -> Cut:
    """Cuts by the number of characters that a token has on average.

    Args:
        characters_per_token: As measured on the server's own count.

    Returns:
        The cut.
    """
    return lambda text, tokens: text[: max(1, round(tokens * characters_per_token))]


def default_texts() -> list[str]:
    """Returns the paragraphs of the text in the package, long enough to be a prompt."""
    paragraphs = (part.strip() for part in sample_prompt().splitlines())
    return [part for part in paragraphs if len(part.split()) >= _SHORTEST_PROMPT]


def read_texts(path: Path) -> list[str]:
    """Reads questions from a file of JSON lines.

    Args:
        path: Each line an object with `turns` (as MT-Bench has them; the first counts), `prompt`,
            `question` or `text`.

    Returns:
        The questions.

    Raises:
        ValueError: If the file cannot be read, or a line has none of these.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--prompts '{path}' cannot be read as text ({error}); give a file of JSON lines"
        ) from error
    texts = [_text_of(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise ValueError(f"--prompts '{path}' is empty; give a file of JSON lines")
    return texts


def _text_of(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if isinstance(record, dict):
        turns = record.get("turns")
        found = turns[0] if isinstance(turns, list) and turns else None
        for name in ("prompt", "question", "text"):
            found = record.get(name) if found is None else found
        if isinstance(found, str) and found.strip():
            return found
    raise ValueError(
        f"--prompts '{path}' has no question in line {number}; give an object with turns, prompt,"
        " question or text in each line"
    )
