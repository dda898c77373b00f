"""A needle in a haystack."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from h2okv.evaluation.cache_setting import CacheSetting, Subject
from h2okv.evaluation.generate import Prompt, answer_question
from h2okv.evaluation.plots import new_figure, save_figure
from h2okv.evaluation.task import Length, Score, Task, fitting, mean
from h2okv.evaluation.tasks.ruler import Knowledge, load_string_match
from h2okv.evaluation.tasks.summarization import Rouge
from h2okv.provenance import digest
from h2okv.records import Row as Result

_SENTENCE_ENDS = (".", "!", "?", '."', '!"', '?"', "\n")
_NAMES = (
    "Adelaide", "Barnaby", "Clement", "Dorothea", "Edmund", "Florence", "Gilbert", "Harriet",
    "Isabel", "Jasper", "Katherine", "Leopold", "Matilda", "Nicholas", "Ottilie", "Philip",
)  # fmt: skip
_CITIES = (
    "Vienna", "Lisbon", "Geneva", "Moscow", "Venice", "Dublin", "Naples", "Berlin", "Madrid",
    "Athens", "Rome", "Paris",
)  # fmt: skip


@dataclass(frozen=True)
class Needle:
    """What is hidden and how it is asked for; ``{name}`` and ``{answer}`` differ from try to try.

    Attributes:
        statement: The sentence that is hidden.
        question: What the text ends in.
        answer: The answer, if it is always the same one.
        max_new_tokens: The most tokens of an answer.
    """

    statement: str = "The city of {name} is {answer}."
    question: str = "\nThe city of {name} is"
    answer: str | None = None
    max_new_tokens: int = 16

    def __post_init__(self) -> None:
        """Refuses a needle that does not hold its answer."""
        answer = "{answer}" if self.answer is None else self.answer
        if answer not in self.statement:
            raise ValueError(
                f"--needle {self.statement!r} does not hold the answer {answer!r}; give both"
                " --needle and --answer, the one with the other in it"
            )
        if self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {self.max_new_tokens} is too few; give 1 or more")


@dataclass(frozen=True)
class Grid:
    """Where needles are hidden.

    Attributes:
        lengths: Tokens of the whole prompt.
        depths: Shares of the text that stand before the needle.
        tries: Needles for each length and depth, each in another part of the text.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    tries: int = 1

    def __post_init__(self) -> None:
        """Refuses what is no grid."""
        for name, values in (("lengths", self.lengths), ("depths", self.depths)):
            if not values:
                raise ValueError(f"--{name} names nothing; give at least one value")
            if len(set(values)) != len(values):
                raise ValueError(f"--{name} names a value twice; give each once")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"--depths {depth:g} is out of range; give shares from 0 to 1")
        if self.tries < 1:
            raise ValueError(f"--tries {self.tries} is too few; give 1 or more")

    def places(self) -> list[tuple[int, float, int]]:
        """Lists length, depth and try of every sample."""
        return [
            (length, depth, number)
            for length in self.lengths
            for depth in self.depths
            for number in range(self.tries)
        ]


class NeedleTask(Task):
    """Needles in a text."""

    metrics = ("string_match", "rouge1_recall")

    def __init__(
        self,
        name: str,
        text: str,
        grid: Grid,
        needle: Needle,
        knowledge: Knowledge = "unknown",
        seed: int = 0,
    ) -> None:
        self.name = name
        self.columns = {"question": knowledge}
        self.text, self.grid, self.needle = text, grid, needle
        self.knowledge = knowledge
        self.seed = seed
        self._match, self._rouge = load_string_match(), Rouge()
        self._encoded: list[tuple[list[int], list[int], str]] = []

    def identity(self) -> Mapping[str, Any]:
        """Names the text, the needle and its places."""
        return {"data": digest(self.text), **asdict(self.grid), **asdict(self.needle)}

    def prepare(self, subject: Subject, settings: Sequence[CacheSetting]) -> None:
        """Hides the needles."""
        ids = subject.encode(self.text, special=False)
        opening = subject.encode("")
        ends = [n + 1 for n, token in enumerate(ids) if _ends_sentence(subject, token)]
        draw = random.Random(self.seed)
        self._encoded = []
        for length, depth, number in self.grid.places():
            words = {"name": draw.choice(_NAMES), "answer": draw.choice(_CITIES)}
            answer = self.needle.answer or words["answer"]
            statement = subject.encode(f" {_filled(self.needle.statement, words)}", special=False)
            question = subject.encode(_filled(self.needle.question, words), special=False)
            room = length - len(opening) - len(statement) - len(question)
            if room < 1:
                raise ValueError(
                    f"--lengths {length} has no room for the needle and the question; give"
                    f" {length - room + 1} or more"
                )
            if room > len(ids):
                raise ValueError(
                    f"the text has {len(ids)} tokens for this model, too few to hide a needle at"
                    f" --lengths {length}; give a longer text"
                )
            start = number * room % (len(ids) - room + 1)
            cut = _sentence_end(ends, start, start + round(depth * room), start + room)
            hay = [*ids[start:cut], *statement, *ids[cut : start + room]]
            self._encoded.append(([*opening, *hay], question, answer))
        most = self.needle.max_new_tokens
        lengths = [
            Length(length + most, f"a text of --lengths {length}") for length in self.grid.lengths
        ]
        fitting(subject, settings, lengths, "refuse")

    def samples(self) -> Sequence[int]:
        """Returns the needles' numbers."""
        return range(len(self._encoded))

    def run(
        self, subject: Subject, setting: CacheSetting, samples: Sequence[int], seed: int
    ) -> Iterator[dict[int, Result]]:
        """Asks for needles."""
        places = self.grid.places()
        for sample in samples:
            context, question, expected = self._encoded[sample]
            prompt = Prompt(question, self.needle.max_new_tokens, ("\n",))
            known = self.knowledge == "known"
            answer = answer_question(subject, setting, context, prompt, known, seed)
            length, depth, _ = places[sample]
            yield {
                sample: {
                    "length": length,
                    "depth": depth,
                    "string_match": self._match([answer.text], [[expected]]),
                    "rouge1_recall": self._rouge.recall(expected, answer.text),
                    "text": answer.text,
                    "expected": expected,
                }
            }

    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        """Averages over all needles."""
        return {name: mean(results, name) for name in self.metrics}

    def details(self, results: Mapping[int, Result]) -> list[dict[str, Any]]:
        """Makes a row for each length and depth."""
        rows = []
        for length in self.grid.lengths:
            for depth in self.grid.depths:
                here = {
                    n: r for n, r in results.items() if (r["length"], r["depth"]) == (length, depth)
                }
                scores = {name: mean(here, name).value for name in self.metrics}
                rows.append({"length": length, "depth": depth, **scores})
        return rows


def _filled(template: str, words: Mapping[str, str]) -> str:
    for name, word in words.items():
        template = template.replace(f"{{{name}}}", word)
    return template


def _ends_sentence(subject: Subject, token: int) -> bool:
    return subject.decode([token]).rstrip(" ").endswith(_SENTENCE_ENDS)


def _sentence_end(ends: Sequence[int], start: int, wanted: int, stop: int) -> int:
    """The end of a sentence nearest to a place, or an end of the text if that is nearer."""
    return min(
        [start, stop, *(end for end in ends if start < end < stop)],
        key=lambda end: abs(end - wanted),
    )


_COLOURS = "viridis"
_COLUMNS = 3
_PANEL = 3.2
_DARK = 0.6


def plot_needles(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draws what share of the needles was found."""
    panels: dict[str, dict[tuple[int, float], float]] = {}
    for row in rows:
        panel = panels.setdefault(_name(row), {})
        panel[row["length"], row["depth"]] = row["string_match"]
    columns = min(_COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = new_figure(max(_PANEL * columns, 5), _PANEL * lines + 0.8)
    figure.suptitle(title)
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    all_axes = grid.flatten().tolist()
    for axes, (name, cells) in zip(all_axes, panels.items(), strict=False):
        lengths = sorted({length for length, _ in cells})
        depths = sorted({depth for _, depth in cells})
        image = _draw(axes, cells, lengths, depths)
        axes.set_title(name, fontsize="medium")
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("length, tokens")
    figure.supylabel("depth of the needle, %")
    figure.colorbar(image, ax=all_axes, label="share found")
    save_figure(figure, path)


def _draw(
    axes: Any,
    cells: Mapping[tuple[int, float], float],
    lengths: Sequence[int],
    depths: Sequence[float],
) -> Any:
    """Draws one map, with the number in each of its cells."""
    values = [[cells[length, depth] for length in lengths] for depth in depths]
    image = axes.imshow(values, cmap=_COLOURS, vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{100 * depth:g}" for depth in depths])
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            colour = "black" if value > _DARK else "white"
            axes.text(x, y, f"{value:.2g}", ha="center", va="center", color=colour, fontsize=8)
    return image


def _name(row: Mapping[str, Any]) -> str:
    cache = "full" if row["policy"] == "full" else f"{row['policy']} {row['budget']}"
    return f"{cache}\nquestion {row['question']}"
