"""Tasks from an experiment file's entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2okv.assets import sample_prompt
from h2okv.evaluation.articles import read_articles
from h2okv.evaluation.conversations import read_conversations
from h2okv.evaluation.decoding import Decoding
from h2okv.evaluation.diversity import Diversity
from h2okv.evaluation.generation_task import BatchOptions, TextPrompt
from h2okv.evaluation.harness_task import HarnessTask
from h2okv.evaluation.needle import Grid, Needle, NeedleTask
from h2okv.evaluation.perplexity import Perplexity, Windows
from h2okv.evaluation.recall import KNOWLEDGE, MOST_TOKENS, Recall, read_ruler
from h2okv.evaluation.summarization import Summarization
from h2okv.evaluation.sweep.experiment import Experiment, checked_fields
from h2okv.evaluation.task import Task
from h2okv.evaluation.text_file import read_text_file
from h2okv.evaluation.unknown_name import unknown

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Surroundings:
    """What tasks are made with, beside their entries.

    Attributes:
        data: The folder with data files; None if there is none.
        work: The folder for what a task keeps between runs.
        limit: Take the first so many samples of each task only; None for all.
        batch_size: Prompts or texts at a time; None for the entry's own.
    """

    data: Path | None
    work: Path
    limit: int | None = None
    batch_size: int | None = None

    def file(self, name: str, task: str) -> Path:
        """Finds a data file.

        Args:
            name: Its name.
            task: The task that needs it.

        Returns:
            The file.

        Raises:
            ValueError: If it is not there, naming the file and where it was looked for.
        """
        if self.data is None:
            raise ValueError(
                f"the task {task!r} needs {name!r}; say by --data DIR which folder it is in"
            )
        path = self.data / name
        if not path.is_file():
            raise ValueError(
                f"the task {task!r} needs {name!r}, and '{path}' does not exist; put it there or"
                " name another folder by --data"
            )
        return path

    def options(self, entry: Entry, batch_size: int = 8) -> BatchOptions:
        """Says how prompts are run; samples above the model's window are left out."""
        return BatchOptions(
            self.batch_size or entry.get("batch_size", batch_size),
            self.limit,
            entry.get("too_long", "skip"),
            entry.get("max_new_tokens"),
        )


def make_tasks(experiment: Experiment, around: Surroundings) -> list[Task]:
    """Makes all tasks of an experiment.

    Args:
        experiment: The experiment.
        around: Data, work folder and limits.

    Returns:
        The tasks in their order.

    Raises:
        ValueError: If an entry is not what it should be, or a data file is missing.
    """
    tasks: list[Task] = []
    for number, entry in enumerate(experiment.tasks):
        where = f"experiment {experiment.name!r}: tasks[{number}]"
        names = list(entry) if isinstance(entry, dict) else []
        kind = next((name for name in names if name in _KINDS), next(iter(names), None))
        if kind not in _KINDS:
            raise ValueError(f"{where}: {unknown('kind of task', kind, _KINDS)}")
        make, known = _KINDS[kind]
        checked_fields(entry, (kind, "name", *known), where)
        try:
            tasks += make(entry, around)
        except TypeError as error:
            raise ValueError(f"{where}: {error}") from error
    return tasks


def _harness(entry: Entry, around: Surroundings) -> list[Task]:
    own = bool(entry.get("own", True))
    if own and around.data is None:
        raise ValueError(
            f"the task {entry['harness']!r} needs data files; say by --data DIR which folder they"
            " are in"
        )
    return [
        HarnessTask(
            name=str(entry["harness"]),
            shots=shots,
            data=around.data,
            work=around.work,
            chunk=entry.get("chunk", 1),
            batch_size=around.batch_size or entry.get("batch_size", 16),
            limit=around.limit,
            own=own,
        )
        for shots in _several(entry.get("shots", 0))
    ]


def _summarize(entry: Entry, around: Surroundings) -> list[Task]:
    name = str(entry.get("name", entry["summarize"]))
    articles = around.file(str(entry["summarize"]), name)
    references = entry.get("references")
    found = read_articles(
        articles,
        None if references is None else around.file(str(references), name),
        entry.get("template"),
    )
    decoding = Decoding(entry.get("temperature", 0.0), entry.get("top_p", 1.0))
    stemmer = bool(entry.get("stemmer", False))
    return [Summarization(name, found, around.options(entry), decoding, stemmer)]


def _perplexity(entry: Entry, around: Surroundings) -> list[Task]:
    name, text = _text(entry, "perplexity", around)
    windows = Windows(
        entry.get("length", 1024),
        _least(around.limit, entry.get("windows")),
        entry.get("chunk", 64),
        entry.get("every", 128),
    )
    return [Perplexity(name, text, windows)]


def _needle(entry: Entry, around: Surroundings) -> list[Task]:
    name, text = _text(entry, "needle", around)
    grid = Grid(
        tuple(entry.get("lengths", (512, 1024, 1536))),
        tuple(float(depth) for depth in entry.get("depths", (0, 0.25, 0.5, 0.75, 1))),
        _least(around.limit, entry.get("tries", 4)) or 1,
    )
    names = {"statement": "statement", "asking": "question", "answer": "answer"}
    names["max_new_tokens"] = "max_new_tokens"
    hidden = Needle(**{names[key]: entry[key] for key in names if key in entry})
    return [
        NeedleTask(name, text, grid, hidden, knowledge)
        for knowledge in _several(entry.get("question", list(KNOWLEDGE)))
    ]


def _recall(entry: Entry, around: Surroundings) -> list[Task]:
    name = str(entry.get("name", entry["recall"]))
    questions = read_ruler(around.file(str(entry["recall"]), name))
    most = entry.get("max_new_tokens", MOST_TOKENS)
    too_long = entry.get("too_long", "skip")
    return [
        Recall(name, questions, knowledge, around.limit, too_long, most)
        for knowledge in _several(entry.get("question", list(KNOWLEDGE)))
    ]


def _diversity(entry: Entry, around: Surroundings) -> list[Task]:
    name = str(entry.get("name", entry["diversity"]))
    path = around.file(str(entry["diversity"]), name)
    prompts = [
        TextPrompt(f"{turns[0].content}\n", 64, (), f"conversation {number} of '{path}'")
        for number, turns in enumerate(read_conversations(path), start=1)
    ]
    decoding = Decoding(entry.get("temperature", 1.0), entry.get("top_p", 1.0))
    return [Diversity(name, prompts, entry.get("copies", 4), around.options(entry), decoding)]


def _text(entry: Entry, kind: str, around: Surroundings) -> tuple[str, str]:
    """A task's name and text; without a file that of the package's own sample."""
    file = entry[kind]
    name = str(entry.get("name", kind if file is None else f"{kind}, {Path(str(file)).stem}"))
    return name, sample_prompt() if file is None else read_text_file(around.file(str(file), name))


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


_NEEDLE = ("statement", "asking", "answer")
_GENERATION = ("batch_size", "too_long", "max_new_tokens", "temperature", "top_p")
_KINDS: dict[str, tuple[Callable[[Entry, Surroundings], list[Task]], tuple[str, ...]]] = {
    "harness": (_harness, ("shots", "chunk", "batch_size", "own")),
    "summarize": (_summarize, ("references", "template", "stemmer", *_GENERATION)),
    "perplexity": (_perplexity, ("length", "windows", "chunk", "every")),
    "needle": (
        _needle,
        (
            "lengths",
            "depths",
            "tries",
            "question",
            "statement",
            "asking",
            "answer",
            "max_new_tokens",
        ),
    ),
    "recall": (_recall, ("question", "max_new_tokens", "too_long")),
    "diversity": (_diversity, ("copies", *_GENERATION)),
}
