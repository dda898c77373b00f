"""Policies by budgets by tasks, from one experiment file."""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, ValidationError
from pydantic import model_validator as validator

from h2okv.assets import sample_prompt
from h2okv.config import CacheConfig, Positions
from h2okv.engine.sampling_params import SamplingParams
from h2okv.evaluation.plots import FULL, sorted_budgets
from h2okv.evaluation.runner import Run
from h2okv.evaluation.stream_data import read_conversations
from h2okv.evaluation.task import (
    COMPRESSIONS,
    BatchOptions,
    Compression,
    Task,
    TextPrompt,
    TooLong,
)
from h2okv.evaluation.tasks.diversity import Diversity
from h2okv.evaluation.tasks.lm_eval_task import HarnessTask
from h2okv.evaluation.tasks.needle import Grid, Needle, NeedleTask
from h2okv.evaluation.tasks.perplexity import Perplexity, Windows
from h2okv.evaluation.tasks.ruler import MOST_TOKENS, Recall, read_ruler
from h2okv.evaluation.tasks.summarization import Summarization, read_articles
from h2okv.policy import get_policy
from h2okv.records import markdown_table, read_text_file, unknown_name

EXPERIMENTS = Path(__file__).parent / "experiments"
"""The folder of the files that come with the package."""

_MULTI_TURN_TOKENS = 64


@dataclass(frozen=True)
class Surroundings:
    """What tasks are made with, beside their entries.

    Attributes:
        data: The folder with data files; ``None`` if there is none.
        work: The folder for what a task keeps between runs.
        limit: Take the first so many samples of each task only; ``None`` for all.
        batch_size: Prompts or texts at a time; ``None`` for the entry's own.
    """

    data: Path | None
    work: Path
    limit: int | None = None
    batch_size: int | None = None

    def file(self, name: str, task: str) -> Path:
        """Finds a data file."""
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

    def least(self, own: int | None) -> int | None:
        """The smaller one of the limit and an entry's own."""
        return min((limit for limit in (self.limit, own) if limit is not None), default=None)


Part = TypeVar("Part", bound="Strict")


class Strict(BaseModel):
    """A part of an experiment file; unknown names are refused with the nearest ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @validator(mode="before")
    @classmethod
    def _check_names(cls, content: Any) -> Any:
        for name in content if isinstance(content, dict) else ():
            if name not in cls.model_fields:
                raise unknown_name("name", name, cls.model_fields)
        return content


Amounts = Annotated[list[StrictInt | StrictFloat | Literal["full"]], Field(min_length=1)]


class CacheEntry(Strict):
    """One policy with its budgets, which are the experiment's unless it has its own."""

    policy: str = "h2o"
    budgets: Amounts | None = None
    heavy_fraction: float = 0.5
    sink: int = 0
    scoring: str = "sum"
    decay: float | None = None
    positions: Positions = "original"
    prefill_chunk: int | None = None
    kv_bits: int | None = None

    def configs(self, budgets: Sequence[Any] | None) -> list[CacheConfig]:
        """Makes a cache of each budget."""
        get_policy(self.policy)
        amounts: Sequence[Any] = [FULL] if self.policy == FULL else self.budgets or budgets or ()
        if not amounts:
            raise ValueError("there are no budgets; give a list such as [0.2, 256, full]")
        options = self.model_dump(exclude={"budgets"})
        return [CacheConfig.from_budget(None if a == FULL else a, **options) for a in amounts]


class TaskEntry(Strict):
    """One task, or several that differ in one thing."""

    name: str | None = None

    @abstractmethod
    def tasks(self, around: Surroundings) -> list[Task]:
        """Makes the tasks."""


class HarnessEntry(TaskEntry):
    """A task of lm-evaluation-harness, of this package's own unless ``own`` is false."""

    harness: str
    shots: int | list[int] = 0
    prefill_chunk: int | None = 1
    batch_size: int = 16
    own: bool = True

    def tasks(self, around: Surroundings) -> list[Task]:
        """Makes one for each number of examples in the prompt."""
        if self.own and around.data is None:
            raise ValueError(
                f"the task {self.harness!r} needs data files; say by --data DIR which folder they"
                " are in"
            )
        return [
            HarnessTask(
                name=self.harness,
                shots=shots,
                data=around.data,
                work=around.work,
                prefill_chunk=self.prefill_chunk,
                batch_size=around.batch_size or self.batch_size,
                limit=around.limit,
                own=self.own,
            )
            for shots in (self.shots if isinstance(self.shots, list) else [self.shots])
        ]


class GenerationEntry(TaskEntry):
    """A task of prompts; samples above the context window are left out."""

    batch_size: int = 8
    too_long: TooLong = "skip"
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0

    def options(self, around: Surroundings) -> BatchOptions:
        """How prompts are run."""
        size = around.batch_size or self.batch_size
        return BatchOptions(size, around.limit, self.too_long, self.max_new_tokens)

    @property
    def params(self) -> SamplingParams:
        """How tokens are chosen."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p)


class SummarizeEntry(GenerationEntry):
    """Articles to summarize."""

    summarize: str
    references: str | None = None
    template: str | None = None
    stemmer: bool = False

    def tasks(self, around: Surroundings) -> list[Task]:
        """Makes one."""
        name = self.name or self.summarize
        references = None if self.references is None else around.file(self.references, name)
        found = read_articles(around.file(self.summarize, name), references, self.template)
        return [Summarization(name, found, self.options(around), self.params, self.stemmer)]


class DiversityEntry(GenerationEntry):
    """Conversations whose first questions are answered several times."""

    diversity: str
    copies: int = 4
    temperature: float = 1.0

    def tasks(self, around: Surroundings) -> list[Task]:
        """Makes one."""
        name = self.name or self.diversity
        path = around.file(self.diversity, name)
        prompts = [
            TextPrompt(f"{messages[0].content}\n", _MULTI_TURN_TOKENS, (), f"line {n} of '{path}'")
            for n, messages in enumerate(read_conversations(path), start=1)
        ]
        return [Diversity(name, prompts, self.copies, self.options(around), self.params)]


class PerplexityEntry(TaskEntry):
    """A text to read in windows; the package's own sample if none is named."""

    perplexity: str | None
    length: int = 1024
    windows: int | None = None
    every: int = 128

    def tasks(self, around: Surroundings) -> list[Task]:
        """Makes one."""
        name, text = _named_text("perplexity", self.perplexity, self.name, around)
        windows = Windows(self.length, around.least(self.windows), self.every)
        return [Perplexity(name, text, windows)]


class NeedleEntry(TaskEntry):
    """A text to hide needles in; the package's own sample if none is named."""

    needle: str | None
    lengths: tuple[int, ...] = (512, 1024, 1536)
    depths: tuple[float, ...] = (0, 0.25, 0.5, 0.75, 1)
    tries: int = 4
    compression: Compression | list[Compression] = list(COMPRESSIONS)
    statement: str = Needle.statement
    question: str = Needle.question
    answer: str | None = None
    max_new_tokens: int = Needle.max_new_tokens

    def tasks(self, around: Surroundings) -> list[Task]:
        """Makes one for each way to compress."""
        name, text = _named_text("needle", self.needle, self.name, around)
        grid = Grid(self.lengths, self.depths, around.least(self.tries) or 1)
        hidden = Needle(self.statement, self.question, self.answer, self.max_new_tokens)
        return [NeedleTask(name, text, grid, hidden, own) for own in _several(self.compression)]


class RecallEntry(TaskEntry):
    """Questions of RULER."""

    recall: str
    compression: Compression | list[Compression] = list(COMPRESSIONS)
    max_new_tokens: int = MOST_TOKENS
    too_long: TooLong = "skip"

    def tasks(self, around: Surroundings) -> list[Task]:
        """Makes one for each way to compress."""
        name = self.name or self.recall
        questions = read_ruler(around.file(self.recall, name))
        return [
            Recall(name, questions, own, around.limit, self.too_long, self.max_new_tokens)
            for own in _several(self.compression)
        ]


def _named_text(
    kind: str, file: str | None, name: str | None, around: Surroundings
) -> tuple[str, str]:
    name = name or (kind if file is None else f"{kind}, {Path(file).stem}")
    return name, sample_prompt() if file is None else read_text_file(around.file(file, name))


def _several(own: Compression | list[Compression]) -> list[Compression]:
    return own if isinstance(own, list) else [own]


KINDS: dict[str, type[TaskEntry]] = {
    "harness": HarnessEntry,
    "summarize": SummarizeEntry,
    "perplexity": PerplexityEntry,
    "needle": NeedleEntry,
    "recall": RecallEntry,
    "diversity": DiversityEntry,
}
"""The kinds of tasks; an entry has one of these names."""


class Published(Strict):
    """A published figure, in its own unit; policy and budget as `CacheConfig` labels them."""

    model: str
    task: str
    shots: int | None = None
    policy: str
    budget: str
    value: float


class Experiment(Strict):
    """What to run.

    Attributes:
        name: The file's name without its ending.
        title: What is compared.
        source: Where it comes from.
        remark: What a reader of the results should know.
        budgets: Of the caches that have none of their own.
        caches: The caches.
        seeds: Of random numbers; each a run of its own.
        tasks: The tasks.
        published: What there is to compare with.
    """

    name: str
    title: str = ""
    source: str = ""
    remark: str = ""
    budgets: Amounts | None = None
    caches: list[CacheEntry] = Field(min_length=1)
    seeds: list[Annotated[StrictInt, Field(ge=0)]] = Field([0], min_length=1)
    tasks: list[Any] = Field(min_length=1)
    published: list[Published] = []

    @validator(mode="after")
    def _check_caches(self) -> Experiment:
        assert self.configs is not None
        return self

    @cached_property
    def configs(self) -> tuple[CacheConfig, ...]:
        """Each cache once: whatever the policy, the full one is the same."""
        found: list[CacheConfig] = []
        for number, entry in enumerate(self.caches):
            try:
                found += entry.configs(self.budgets)
            except ValueError as error:
                raise ValueError(f"caches[{number}]: {error}") from error
        return tuple({config.label: config for config in found}.values())

    def placed(self, positions: str | None, prefill_chunk: int | None) -> tuple[CacheConfig, ...]:
        """The caches, with other positions or blocks where something is given."""
        changes: dict[str, Any] = {"positions": positions, "prefill_chunk": prefill_chunk}
        given = {name: value for name, value in changes.items() if value is not None}
        return tuple(replace(config, **given) for config in self.configs)

    def make_tasks(self, around: Surroundings) -> list[Task]:
        """Makes all tasks."""
        made: list[Task] = []
        for number, entry in enumerate(self.tasks):
            where = f"experiment {self.name!r}: tasks[{number}]"
            names = list(entry) if isinstance(entry, dict) else []
            kind = next((name for name in names if name in KINDS), next(iter(names), None))
            if kind not in KINDS:
                raise ValueError(f"{where}: {unknown_name('kind of task', kind, KINDS)}")
            made += _checked(KINDS[kind], entry, where).tasks(around)
        return made


def _checked(kind: type[Part], content: Any, where: str) -> Part:
    """Reads a part of a file; what is wrong with it is one sentence with its place."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]]
        place = "".join(steps).removeprefix(".")
        problem = first["msg"].removeprefix("Value error, ")
        given = "" if first["type"] == "value_error" else f" (there is {first['input']!r})"
        raise ValueError(f"{where}: {place}{': ' if place else ''}{problem}{given}") from error


def experiment_names() -> list[str]:
    """The names of the files that come with the package."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.yaml"))


def load_experiment(name: str) -> Experiment:
    """Reads an experiment that comes with the package, or a YAML file.

    Args:
        name: Its name, or the file.

    Returns:
        The experiment.

    Raises:
        ValueError: If it is unknown, or a value in it makes no sense.
    """
    path = Path(name).expanduser()
    if name in experiment_names():
        path = EXPERIMENTS / f"{name}.yaml"
    elif path.suffix not in (".yaml", ".yml") and not path.is_file():
        raise unknown_name("experiment", name, experiment_names())
    content = _read_yaml(path)
    if isinstance(content, dict):
        content = {"name": path.stem, "title": path.stem, **content}
    return _checked(Experiment, content, f"'{path}'")


def _read_yaml(path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ValueError(
            "an experiment file needs PyYAML, which is not installed; pip install 'h2okv[eval]'"
        ) from error
    try:
        return yaml.safe_load(read_text_file(path))
    except yaml.YAMLError as error:
        raise ValueError(f"'{path}' is not YAML ({' '.join(str(error).split())})") from error


@dataclass
class Line:
    """One policy on one task.

    Attributes:
        task: The task's label.
        metric: What is counted.
        policy: The policy's label.
        values: By budget; the mean over seeds.
        stderrs: By budget; of one seed, where it is known.
        samples: How many samples or documents each value is made of.
    """

    task: str
    metric: str
    policy: str
    values: dict[str, float] = field(default_factory=dict)
    stderrs: dict[str, float] = field(default_factory=dict)
    samples: int = 0


def pivot(runs: Sequence[Run], rows: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Puts results in lines."""
    lines: dict[tuple[str, str], Line] = {}
    found: dict[tuple[str, str, str], list[float]] = {}
    for run in runs:
        row = rows.get(run.label)
        if row is None:
            continue
        task, policy = run.task.label, run.config.policy_label
        line = lines.setdefault((task, policy), Line(task, row["metric"], policy))
        budget = run.config.budget_label
        values = found.setdefault((task, policy, budget), [])
        values.append(row["value"])
        line.values[budget] = statistics.fmean(values)
        line.samples = row["samples"]
        if row["stderr"] is not None:
            line.stderrs[budget] = row["stderr"]
    tasks = list(dict.fromkeys(line.task for line in lines.values()))
    return sorted(lines.values(), key=lambda line: (tasks.index(line.task), line.policy != FULL))


def published_lines(published: Sequence[Published]) -> dict[str, list[Line]]:
    """Puts published figures in lines, by model."""
    models: dict[str, dict[tuple[str, str], Line]] = {}
    for one in published:
        task = one.task if one.shots is None else f"{one.task}, shots {one.shots}"
        lines = models.setdefault(one.model, {})
        line = lines.setdefault((task, one.policy), Line(task, "", one.policy))
        line.values[one.budget] = one.value
    return {model: list(lines.values()) for model, lines in models.items()}


def report(experiment: Experiment, lines: Sequence[Line], row: Mapping[str, Any]) -> str:
    """Writes the page."""
    remark = " ".join(experiment.remark.split())
    head = [f"# {experiment.title}", experiment.source, remark]
    parts = [f"{part}\n" for part in head if part]
    versions = f"h2okv {row['h2okv']} ({row['commit'] or 'no checkout'}), torch {row['torch']}"
    parts.append(
        f"Model {row['model']} ({row['revision']}, {row['dtype']}); {versions}, transformers"
        f" {row['transformers']}; seeds {', '.join(map(str, experiment.seeds))}.\n"
    )
    parts.append(results_table(lines))
    for model, published in published_lines(experiment.published).items():
        parts.append(f"As published, {model}:\n")
        parts.append(_table(published, ["task", "policy"]))
    return "\n".join(parts)


def results_table(lines: Sequence[Line]) -> str:
    """Sets results side by side: a line for each task and policy, a column for each budget."""
    return _table(lines, ["task", "samples", "metric", "policy"])


def _table(lines: Sequence[Line], names: Sequence[str]) -> str:
    budgets = sorted_budgets(lines)
    return markdown_table(
        [*names, *budgets],
        [
            [*(getattr(line, name) for name in names), *map(line.values.get, budgets)]
            for line in lines
        ],
    )
