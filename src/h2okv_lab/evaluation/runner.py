"""Evaluation of tasks by cache settings, with resumable results, and their table."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from h2okv.cache.checkpoint import CONTRACT
from h2okv.config import CacheConfig
from h2okv.console import write_remark
from h2okv.records import Record, ResultFile, check_settings
from h2okv_lab import tables
from h2okv_lab.evaluation.model import ModelUnderTest, make_cache
from h2okv_lab.evaluation.task import Result, Task
from h2okv_lab.tables import Entry, markdown_table

FULL = "full"
_RULE = "rule"  # its version is 1 in files that do not name it


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
            raise ValueError(
                f"{record.location} is not a result of {self.kind}; choose another file"
            )
        for name, value in fields.items():
            if not isinstance(value, {"run": str, "sample": int}.get(name, dict)):
                entry.refuse(name, f"is {value!r}; correct or remove the line")
        if "versions" in fields:
            self._current = fields["versions"]
        elif "identity" in fields:
            self._identities[fields["run"]] = fields["identity"]
            self._results.pop(fields["run"], None)  # of an earlier rule
            self._versions.pop(fields["run"], None)
        elif fields["run"] not in self._identities:
            entry.refuse("run", f"is {fields['run']!r}, which no earlier line describes")
        else:
            self._results[fields["run"]][fields["sample"]] = fields["result"]
            seen = self._versions[fields["run"]]
            if self._current not in seen:
                seen.append(self._current)

    def open_run(self, run: str, identity: Mapping[str, Any]) -> None:
        saved = self._identities.get(run)
        if saved is not None and saved.get(_RULE, 1) != identity.get(_RULE, 1):
            count = len(self._results[run])
            write_remark(
                f"note: {count} samples of {run} are of an earlier rule, and measured again"
            )
            saved = None
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
            rule = {} if run.config.is_full else {_RULE: CONTRACT}
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
