"""Runs tasks by cache settings, resuming."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2okv.evaluation.cache_setting import CacheSetting, Subject
from h2okv.evaluation.task import Score, Task
from h2okv.records import Record, ResultFile, check_settings
from h2okv.records import Row as Result


@dataclass(frozen=True)
class Cell:
    """One task with one cache and one seed.

    Attributes:
        task: What is evaluated.
        setting: The cache.
        seed: Where random numbers start.
    """

    task: Task
    setting: CacheSetting
    seed: int = 0

    @property
    def label(self) -> str:
        """Its name in files and progress bars."""
        seed = f", seed {self.seed}" if self.seed else ""
        return f"{self.task.label}: {self.setting.label}{seed}"


class SampleFile(ResultFile):
    """Results of samples, by run.

    Lines have, in any order: ``cell`` and ``identity`` (a run's name and all that its results
    depend on), ``versions`` (the code that wrote what follows), or ``cell``, ``sample`` and
    ``result``.
    """

    def __init__(self, path: Path, versions: Mapping[str, str]) -> None:
        self._identities: dict[str, dict[str, Any]] = {}
        self._results: dict[str, dict[int, Result]] = {}
        self._versions: dict[str, list[Mapping[str, str]]] = {}
        self._current: Mapping[str, str] = {}
        super().__init__(path, "h2okv evaluation", version=2)
        if dict(self._current) != dict(versions):
            self.append([{"versions": dict(versions)}])

    def take(self, record: Record) -> None:
        """Remembers who ran what, and what came of it."""
        fields = record.fields
        shapes = {
            ("versions",): (dict,),
            ("cell", "identity"): (str, dict),
            ("cell", "sample", "result"): (str, int, dict),
        }
        shape = shapes.get(tuple(fields))
        if shape is None:
            raise ValueError(f"{record.place} is no result of {self.kind}; choose another file")
        for (name, value), kind in zip(fields.items(), shape, strict=True):
            if not isinstance(value, kind):
                record.refuse(name, f"is {value!r}; correct or remove the line")
        if "versions" in fields:
            self._current = fields["versions"]
        elif "identity" in fields:
            self._identities[fields["cell"]] = fields["identity"]
        elif fields["cell"] not in self._identities:
            record.refuse("cell", f"is {fields['cell']!r}, a run that no line before describes")
        else:
            self._results.setdefault(fields["cell"], {})[fields["sample"]] = fields["result"]
            seen = self._versions.setdefault(fields["cell"], [])
            if self._current not in seen:
                seen.append(self._current)

    def open_cell(self, cell: str, identity: Mapping[str, Any]) -> None:
        """Begins a run, or resumes it if it is the same one."""
        if cell in self._identities:
            check_settings(self._identities[cell], identity, f"'{self.path}': {cell}")
        else:
            self.append([{"cell": cell, "identity": json.loads(json.dumps(identity))}])

    def results(self, cell: str) -> dict[int, Result]:
        """A run's results by sample."""
        return dict(self._results.get(cell, {}))

    def versions(self, cell: str) -> dict[str, str]:
        """The code that computed a run's results."""
        found = self._versions.get(cell) or [self._current]
        names = dict.fromkeys(name for one in found for name in one)
        return {name: " ".join(dict.fromkeys(one.get(name, "") for one in found)) for name in names}

    def add(self, cell: str, results: Mapping[int, Result]) -> None:
        """Appends results; they are on the disk when it returns."""
        self.append({"cell": cell, "sample": n, "result": dict(r)} for n, r in results.items())


class Evaluation:
    """Cells that are run one after another; what the file holds already is not run again."""

    def __init__(self, subject: Subject, cells: Sequence[Cell], file: SampleFile) -> None:
        self.subject = subject
        self.cells = cells
        self.file = file
        self._check_labels()
        for cell in cells:
            cell.setting.make(subject.config, cell.seed)  # a bad budget is heard about first
        for task in {id(cell.task): cell.task for cell in cells}.values():
            task.prepare(subject, [cell.setting for cell in cells if cell.task is task])
        self._model = subject.identity()
        for cell in cells:
            file.open_cell(cell.label, self._identity(cell))

    @property
    def total(self) -> int:
        """How many samples there are, in all cells."""
        return sum(len(cell.task.samples()) for cell in self.cells)

    @property
    def done(self) -> int:
        """How many of them have a result."""
        return sum(len(cell.task.samples()) - len(self._missing(cell)) for cell in self.cells)

    def run(self, on_results: Callable[[Cell, int], None] = lambda cell, count: None) -> None:
        """Evaluates what has no result yet; appends to the file."""
        for cell in self.cells:
            missing = self._missing(cell)
            if not missing:
                continue
            for results in cell.task.run(self.subject, cell.setting, missing, cell.seed):
                self.file.add(cell.label, results)
                on_results(cell, len(results))

    def rows(self) -> dict[str, dict[str, Any]]:
        """Makes one row for each cell whose samples are all done: what it is, and its scores."""
        found = {}
        for cell in self.cells:
            results = self._results(cell)
            if results is not None:
                scores = _headline(cell.task, cell.task.scores(results))
                row = {**self._head(cell, results), **scores, **self._code(cell)}
                found[cell.label] = row
        return found

    def details(self) -> list[dict[str, Any]]:
        """Makes the rows that a task's own table has, for each cell that is done."""
        found = []
        for cell in self.cells:
            results = self._results(cell)
            if results is None:
                continue
            for row in cell.task.details(results):
                found.append({**self._head(cell, results), **row, **self._code(cell)})
        return found

    def _results(self, cell: Cell) -> dict[int, Result] | None:
        """A cell's results, in the samples' order; None as long as some are missing."""
        if self._missing(cell):
            return None
        results = self.file.results(cell.label)
        return {sample: results[sample] for sample in cell.task.samples()}

    def _missing(self, cell: Cell) -> list[int]:
        have = self.file.results(cell.label)
        return [sample for sample in cell.task.samples() if sample not in have]

    def _identity(self, cell: Cell) -> dict[str, Any]:
        return {
            **self._model,
            **cell.setting.identity(),
            "seed": cell.seed,
            "task": cell.task.name,
            **cell.task.columns,
            **cell.task.identity(),
        }

    def _head(self, cell: Cell, results: Mapping[int, Result]) -> dict[str, Any]:
        return {
            "task": cell.task.name,
            **cell.task.columns,
            **cell.setting.identity(),
            "seed": cell.seed,
            "samples": cell.task.size(results),
        }

    def _code(self, cell: Cell) -> dict[str, Any]:
        return {**self._model, **self.file.versions(cell.label)}

    def _check_labels(self) -> None:
        labels = [cell.label for cell in self.cells]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} is asked for twice; give each policy and budget once")


def _headline(task: Task, scores: dict[str, Score]) -> dict[str, Any]:
    first = task.headline or task.metrics[0]
    named = {name: score.value for name, score in scores.items()}
    return {"metric": first, "value": scores[first].value, "stderr": scores[first].stderr, **named}
