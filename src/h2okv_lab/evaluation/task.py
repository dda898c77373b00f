"""What an evaluation task is, its runs by cache with results that resume, and their table."""

from __future__ import annotations

import hashlib
import json
import statistics
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from h2okv.cache.checkpoint import CONTRACT
from h2okv.config import CacheConfig
from h2okv.engine.sampling_params import SamplingParams
from h2okv.records import Record, ResultFile, check_settings
from h2okv_lab import tables
from h2okv_lab.evaluation.model import Answer, ModelUnderTest, Prompt, answer_batch, make_cache
from h2okv_lab.tables import Entry, check_minimum, markdown_table

Configs = Sequence[CacheConfig]
Result = Mapping[str, Any]  # of one sample: JSON values by name
CacheResults = Iterator[tuple[int, dict[int, Result]]]  # (index of a cache, results by sample)
TooLong = Literal["refuse", "skip"]


class Score(NamedTuple):
    """One figure; its standard error is ``None`` where it is not a mean over samples."""

    value: float
    stderr: float | None = None


@dataclass(eq=False)
class Task(ABC):
    """An evaluation task; its fields are its options, in experiment files too."""

    name: str  # in tables
    samples: Sequence[int] = field(init=False)  # sample numbers, set by `prepare`
    metrics: ClassVar[tuple[str, ...]]  # the names of its scores
    headline: ClassVar[str] = ""  # the metric in plots; the first one if empty

    @property
    def columns(self) -> Mapping[str, Any]:
        """Columns that distinguish tasks of the same name."""
        return {}

    @property
    def label(self) -> str:
        """The name with the columns."""
        return ", ".join([self.name, *(f"{name} {value}" for name, value in self.columns.items())])

    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """Return everything its results depend on but the model, the cache and the seed."""

    @abstractmethod
    def prepare(self, model: ModelUnderTest, configs: Configs) -> None:
        """Prepare the samples for a model, without loading its weights."""

    @abstractmethod
    def run(
        self, model: ModelUnderTest, configs: Configs, samples: Sequence[int], seed: int
    ) -> CacheResults:
        """Evaluate samples with several caches, which may share forwards."""

    def within_window(
        self,
        model: ModelUnderTest,
        configs: Configs,
        lengths: Sequence[tuple[int, str]],  # of all samples: tokens with the answer's, location
        too_long: TooLong | None = None,  # None: refuse, with no option to skip
    ) -> list[int]:
        """Return the numbers of the samples within the context window."""
        numbers = list(range(len(lengths)))
        if too_long == "skip" and model.window is not None:
            numbers = [n for n in numbers if lengths[n][0] <= model.window]
            if not numbers:
                raise ValueError(
                    f"every sample is above the model's context window of {model.window} tokens"
                    f" (the shortest has {min(lengths)[0]}, its answer included); use"
                    " --cache positions=rolling"
                )
        for config, n in product(configs, numbers):
            tokens, location = lengths[n]
            reason = model.too_long(config, tokens)
            if reason is not None:
                skip = ", or --too-long skip" if too_long == "refuse" else ""
                raise ValueError(
                    f"{location} has up to {tokens} tokens with its answer; for the cache"
                    f" {config.label!r} {reason}{skip}"
                )
        return numbers

    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        """Return the scores by metric; means over the samples unless a task overrides it."""
        return {name: mean(result[name] for result in results.values()) for name in self.metrics}

    def size(self, results: Mapping[int, Result]) -> int:
        """Return the number of samples behind the scores."""
        return len(results)

    def details(self, results: Mapping[int, Result]) -> list[dict[str, Any]]:
        """Return the rows of a more detailed table than `scores`; one row by default."""
        return [{name: score.value for name, score in self.scores(results).items()}]


def mean(values: Iterable[float]) -> Score:
    """Average a figure over samples."""
    numbers = [float(value) for value in values]
    if len(numbers) < 2:
        return Score(numbers[0])
    return Score(statistics.fmean(numbers), statistics.stdev(numbers) / len(numbers) ** 0.5)


@dataclass(frozen=True)
class TextPrompt:
    """A prompt before tokenization."""

    text: str
    max_new_tokens: int
    stops: tuple[str, ...]  # strings that end the answer
    location: str  # file and line, for messages
    references: tuple[str, ...] = ()  # reference answers


# The fields of `SamplingParams` that are options of a `GenerationTask`.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")


@dataclass(eq=False, kw_only=True)
class GenerationTask(Task):
    """Prompts to answer, each a sample; subclasses read them and score the answers."""

    batch_size: int = 8
    limit: int | None = None  # use the first samples only
    too_long: TooLong = "skip"  # how to treat samples above the context window
    max_new_tokens: int | None = None  # None: the sample's own limit
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()  # in addition to those of the prompt
    prompts: Sequence[TextPrompt] = field(init=False)

    def __post_init__(self) -> None:
        check_minimum(
            batch_size=self.batch_size, limit=self.limit, max_new_tokens=self.max_new_tokens
        )
        self._params = SamplingParams(**{name: getattr(self, name) for name in SAMPLING})

    @abstractmethod
    def result(self, sample: int, answer: Answer) -> Result:
        """Score an answer."""

    def identity(self) -> Mapping[str, Any]:
        options = {name: getattr(self._params, name) for name in SAMPLING}
        return {"max_new_tokens": self.max_new_tokens, **options}

    def prepare(self, model: ModelUnderTest, configs: Configs) -> None:
        self._encoded: list[Prompt] = []
        lengths: list[tuple[int, str]] = []
        for prompt in self.prompts[: self.limit]:
            limit = self.max_new_tokens or prompt.max_new_tokens
            ids = model.encode(prompt.text)
            stop = tuple(dict.fromkeys((*prompt.stops, *self.stop)))
            self._encoded.append(Prompt(ids, replace(self._params, max_tokens=limit, stop=stop)))
            lengths.append((len(ids) + limit, prompt.location))
        self.samples = self.within_window(model, configs, lengths, self.too_long)

    def run(
        self, model: ModelUnderTest, configs: Configs, samples: Sequence[int], seed: int
    ) -> CacheResults:
        """Answer prompts, batching those of similar length."""
        stops = {n: self._encoded[n].params.stop for n in samples}
        order = sorted(samples, key=lambda n: (stops[n], -len(self._encoded[n].ids)))
        alike = [list(group) for _, group in groupby(order, stops.__getitem__)]
        size = self.batch_size
        starts = ((group, start) for group in alike for start in range(0, len(group), size))
        for batch in (group[start : start + size] for group, start in starts):
            seeded = [(self._encoded[n], sample_seed(seed, n)) for n in batch]
            prompts = [Prompt(p.ids, replace(p.params, seed=own_seed)) for p, own_seed in seeded]
            for number, answers in enumerate(answer_batch(model, configs, prompts, seed)):
                scored = zip(batch, answers, strict=True)
                yield number, {n: self.result(n, answer) for n, answer in scored}


def sample_seed(seed: int, sample: int) -> int:
    """Derive the seed of one sample of a run."""
    digest = hashlib.sha256(f"{seed} {sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


FULL = "full"


@dataclass(frozen=True)
class Run:
    """One task with one cache and one seed."""

    task: Task
    config: CacheConfig
    seed: int = 0

    @property
    def label(self) -> str:
        seed = f", seed {self.seed}" if self.seed else ""  # a label has that of a random policy
        return f"{self.task.label}: {self.config.label}{seed}"

    def columns(self) -> dict[str, Any]:
        cache = self.config.identity()
        cache.pop("policy")
        head = {"task": self.task.name, **self.task.columns, "policy": self.config.policy_name}
        return {
            **head,
            "budget": self.config.budget_label,
            **cache,
            "seed": self.seed or self.config.seed,
        }


class SampleFile(ResultFile):
    """Results of samples by run, after lines with the versions and each run's identity."""

    def __init__(self, path: Path, versions: Mapping[str, str] | None = None) -> None:
        versions = tables.versions() if versions is None else versions
        self._identities: dict[str, dict[str, Any]] = {}
        self._results: dict[str, dict[int, Result]] = defaultdict(dict)
        self._versions: dict[str, list[Mapping[str, str]]] = defaultdict(list)
        self._current: Mapping[str, str] = {}
        super().__init__(path, "h2okv evaluation", version=2)
        if dict(self._current) != dict(versions):
            self.append([{"versions": dict(versions)}])

    def take(self, record: Record) -> None:
        fields, entry = record.fields, Entry(**vars(record))
        if tuple(fields) not in (("versions",), ("run", "identity"), ("run", "sample", "result")):
            raise self.foreign(record.location)
        for name, value in fields.items():
            if not isinstance(value, {"run": str, "sample": int}.get(name, dict)):
                entry.refuse(name, f"is {value!r}; correct or remove the line")
        if "versions" in fields:
            self._current = fields["versions"]
        elif "identity" in fields:
            self._identities[fields["run"]] = fields["identity"]
        elif fields["run"] not in self._identities:
            entry.refuse("run", f"is {fields['run']!r}, which no earlier line describes")
        else:
            self._results[fields["run"]][fields["sample"]] = fields["result"]
            seen = self._versions[fields["run"]]
            if self._current not in seen:
                seen.append(self._current)

    def open_run(self, run: str, identity: Mapping[str, Any]) -> None:
        saved = self._identities.get(run)
        if saved is not None:
            check_settings(saved, identity, f"'{self.path}': {run}")
        else:
            self.append([{"run": run, "identity": json.loads(json.dumps(identity))}])

    def results(self, run: str) -> dict[int, Result]:
        return dict(self._results[run])

    def versions(self, run: str) -> dict[str, str]:
        versions = self._versions[run] or [self._current]
        names = dict.fromkeys(name for entry in versions for name in entry)
        values = {name: dict.fromkeys(entry.get(name, "") for entry in versions) for name in names}
        return {name: " ".join(entries) for name, entries in values.items()}

    def add(self, run: str, results: Mapping[int, Result]) -> None:
        """Append results; they are on the disk when it returns."""
        self.append({"run": run, "sample": n, "result": dict(r)} for n, r in results.items())


class Evaluation:
    """A sequence of runs; results that the file already has are not computed again."""

    def __init__(self, model: ModelUnderTest, runs: Sequence[Run], file: SampleFile) -> None:
        self.model = model
        self.file = file
        for label, count in Counter(run.label for run in runs).items():
            if count > 1:
                raise ValueError(f"{label} is requested twice; give each policy and budget once")
        # Refuse a bad budget and bad samples early, before the weights are loaded to be measured.
        early = [replace(run, config=run.config.before_measuring) for run in runs]
        for run in early:
            make_cache(run.config, model.config, run.seed)
        for task in {id(run.task): run.task for run in runs}.values():
            task.prepare(model, [run.config for run in early if run.task is task])
        self.runs = runs = [replace(run, config=model.measured(run.config)) for run in runs]
        self._identity = model.identity()
        for run in runs:
            identity = {**self._identity, **run.columns(), **run.task.identity()}
            rule = {} if run.config.is_full else {"rule": CONTRACT}
            file.open_run(run.label, identity | rule)

    @property
    def total(self) -> int:
        """The number of samples in all runs."""
        return sum(len(run.task.samples) for run in self.runs)

    @property
    def done(self) -> int:
        return self.total - sum(len(self._missing(run)) for run in self.runs)

    def _missing(self, run: Run) -> list[int]:
        have = self.file.results(run.label)
        return [sample for sample in run.task.samples if sample not in have]

    def run(self, on_results: Callable[[Run, int], None] = lambda run, count: None) -> None:
        groups: dict[tuple[int, int], list[Run]] = defaultdict(list)
        for run in self.runs:
            groups[id(run.task), run.seed].append(run)
        for runs in groups.values():
            task, seed = runs[0].task, runs[0].seed
            # Group samples by the runs that lack them: these runs share forwards.
            missing = [set(self._missing(run)) for run in runs]
            lacking: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for sample in task.samples:
                numbers = tuple(n for n, absent in enumerate(missing) if sample in absent)
                lacking[numbers].append(sample)
            lacking.pop((), None)
            for numbers, samples in lacking.items():
                configs = [runs[n].config for n in numbers]
                for index, results in task.run(self.model, configs, samples, seed):
                    self.file.add(runs[numbers[index]].label, results)
                    on_results(runs[numbers[index]], len(results))

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return one row per finished run: its columns and scores."""
        rows = {}
        for run, results in self._finished():
            scores = run.task.scores(results)
            metric = run.task.headline or run.task.metrics[0]
            head = {"metric": metric, **scores[metric]._asdict()}
            values = {name: score.value for name, score in scores.items()}
            rows[run.label] = self._row(run, results, {**head, **values})
        return rows

    def details(self) -> list[dict[str, Any]]:
        """Return the rows of the tasks' detailed tables, for each finished run."""
        return [
            self._row(run, results, row)
            for run, results in self._finished()
            for row in run.task.details(results)
        ]

    def _finished(self) -> Iterator[tuple[Run, dict[int, Result]]]:
        for run in self.runs:
            if not self._missing(run):
                results = self.file.results(run.label)
                yield run, {sample: results[sample] for sample in run.task.samples}

    def _row(
        self, run: Run, results: Mapping[int, Result], scores: Mapping[str, Any]
    ) -> dict[str, Any]:
        head = {**run.columns(), "cache": run.config.label, "samples": run.task.size(results)}
        return {**head, **scores, **self._identity, **self.file.versions(run.label)}


@dataclass
class Line:
    """One policy on one task: each seed's value by budget, and a seed's standard error."""

    task: str
    metric: str
    policy: str
    by_budget: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    stderrs: dict[str, float] = field(default_factory=dict)
    samples: int = 0

    @property
    def values(self) -> dict[str, float]:
        return {budget: statistics.fmean(values) for budget, values in self.by_budget.items()}


def pivot(runs: Sequence[Run], rows: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Arrange the available results as lines."""
    lines: dict[tuple[str, str], Line] = {}
    for run, row in ((run, rows[run.label]) for run in runs if run.label in rows):
        key = run.task.label, run.config.policy_label
        line = lines.setdefault(key, Line(key[0], row["metric"], key[1]))
        line.by_budget[run.config.budget_label].append(row["value"])
        line.samples = row["samples"]
        if row["stderr"] is not None:
            line.stderrs[run.config.budget_label] = row["stderr"]
    tasks = [line.task for line in lines.values()]
    return sorted(lines.values(), key=lambda line: (tasks.index(line.task), line.policy != FULL))


def sorted_budgets(lines: Sequence[Line]) -> list[str]:
    """Return the budgets of lines: tokens, then fractions, the smallest first, then full."""

    def size(budget: str) -> tuple[int, float]:
        if budget == FULL:
            return 2, 0.0
        return int(budget.endswith("%")), float(budget.removesuffix("%"))

    return sorted({budget for line in lines for budget in line.values}, key=size)


def results_table(
    lines: Sequence[Line], names: Sequence[str] = ("task", "samples", "metric", "policy")
) -> str:
    """Render results as a table: a row per task and policy, a column per budget."""
    budgets = sorted_budgets(lines)
    rows = [
        [*(getattr(line, name) for name in names), *map(line.values.get, budgets)] for line in lines
    ]
    return markdown_table([*names, *budgets], rows)
