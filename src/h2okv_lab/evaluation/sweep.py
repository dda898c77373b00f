"""Experiment files: policies by budgets by tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from h2okv import cache_spec
from h2okv.assets import sample_prompt
from h2okv.config import CacheConfig
from h2okv.console import optional
from h2okv.policy import get_rule
from h2okv.records import read_text_file, unknown_name
from h2okv_lab.evaluation.lm_eval import data_file
from h2okv_lab.evaluation.task import FULL, Line, Task, results_table
from h2okv_lab.evaluation.tasks.generation import Diversity, Summarization
from h2okv_lab.evaluation.tasks.harness import HarnessTask
from h2okv_lab.evaluation.tasks.perplexity import Perplexity
from h2okv_lab.evaluation.tasks.recall import COMPRESSIONS, NeedleTask, Recall
from h2okv_lab.masking import PER_QUERY

EXPERIMENTS = Path(__file__).parent / "experiments"  # the bundled ones
# The kinds of tasks; an entry has one of these names, with its file or harness task as value.
KINDS: dict[str, type[Task]] = {
    "harness": HarnessTask,
    "summarize": Summarization,
    "perplexity": Perplexity,
    "needle": NeedleTask,
    "recall": Recall,
    "diversity": Diversity,
}
# Fields of tasks that are not names of an entry.
_OURS = ("samples", "prompts", "input", "text", "data", "work", "limit", "seed")
_BOUNDED = ("windows", "tries", "limit")  # --limit bounds the first of these that a task has
# Fields that may have several values, a task for each; with their values by default.
_SEVERAL: dict[str, list[Any]] = {"shots": [0], "compression": list(COMPRESSIONS)}


@dataclass(frozen=True)
class Surroundings:
    """What tasks need in addition to their entries."""

    data: Path | None  # the folder with data files
    work: Path  # the folder for files that a task reuses between runs
    limit: int | None = None  # use the first samples of each task only
    batch_size: int | None = None  # None: the entry's

    def make(self, kind: str, entry: Mapping[str, Any], where: str) -> Iterator[Task]:
        task = KINDS[kind]
        names = [field.name for field in fields(task)]
        allowed = [kind, *(name for name in names if name not in _OURS)]
        for name in entry:
            if name not in allowed:
                raise ValueError(f"{where}: {unknown_name('name', name, allowed)}")
        options = dict(entry)
        options |= self._source(kind, options.pop(kind), entry, where)
        if self.batch_size is not None and "batch_size" in allowed:
            options["batch_size"] = self.batch_size
        limit = next(name for name in _BOUNDED if name in names)
        value = options.get(limit, getattr(task, limit))
        if self.limit is not None and (value is None or isinstance(value, int)):
            options[limit] = self.limit if value is None else min(self.limit, value)
        several = {name: options.get(name, v) for name, v in _SEVERAL.items() if name in names}
        for values in product(*(v if isinstance(v, list) else [v] for v in several.values())):
            yield _checked(task, options | dict(zip(several, values, strict=True)), where)

    def _source(self, kind: str, file: Any, entry: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the fields for a task's name and its data."""
        reads_text = kind in ("perplexity", "needle")
        if file is None and reads_text:
            return {"name": entry.get("name") or kind, "text": sample_prompt()}
        if not isinstance(file, str):
            raise ValueError(f"{where}: {kind} must be a name, got {file!r}")
        if kind == "harness":
            return {"name": file, "data": self.data, "work": self.work}
        if self.data is None:
            raise ValueError(
                f"{where}: {kind} {file!r} needs data files; give their folder by --data DIR"
            )
        if reads_text:
            name = entry.get("name") or f"{kind}, {Path(file).stem}"
            return {"name": name, "text": read_text_file(data_file(file, self.data))}
        inputs = {"input": file, "references": entry.get("references")}
        files = {key: data_file(n, self.data) for key, n in inputs.items() if isinstance(n, str)}
        return {"name": entry.get("name") or file, **files}


class Strict(BaseModel):
    """A section of an experiment file; unknown names are refused with similar ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, content: Any) -> Any:
        for name in content if isinstance(content, dict) else ():
            if name not in cls.model_fields:
                raise unknown_name("name", name, cls.model_fields)
        return content


class Published(Strict):
    """A published figure; policy and budget as in `CacheConfig`'s labels."""

    model: str
    task: str
    shots: int | None = None
    policy: str
    budget: str
    value: float


class Experiment(Strict):
    """What to run; docs/evaluation.md explains the fields."""

    name: str
    title: str = ""
    source: str = ""
    remark: str = ""
    caches: list[str] = Field(min_length=1)
    budgets: list[StrictInt | StrictFloat | str] = []  # of caches that have none
    seeds: list[Annotated[StrictInt, Field(ge=0)]] = Field([0], min_length=1)
    tasks: list[Any] = Field(min_length=1)
    published: list[Published] = []

    @field_validator("caches", mode="before")
    @classmethod
    def _check_texts(cls, content: Any) -> Any:
        for entry in content if isinstance(content, list) else ():
            if isinstance(entry, dict):
                raise ValueError(f"give a text such as h2o:20%,scoring=decay, got {entry}")
        return content

    @model_validator(mode="after")
    def _check_caches(self) -> Experiment:
        assert self.configs is not None
        return self

    @cached_property
    def configs(self) -> tuple[CacheConfig, ...]:
        """The distinct caches; the full one is the same for every policy."""
        configs: dict[str, CacheConfig] = {}
        for number, text in enumerate(self.caches):
            try:
                for config in self._configs_of(text):
                    if configs.setdefault(config.label, config) != config and not config.is_full:
                        raise ValueError(f"{text!r} must differ from an earlier entry in its label")
            except ValueError as error:
                raise ValueError(f"caches[{number}]: {error}") from error
        return tuple(configs.values())

    def _configs_of(self, text: str) -> Iterator[CacheConfig]:
        """Return the caches of an entry: one, or one for each budget."""
        named = cache_spec.parse(text)
        has_budget = "budget" in named or named.get("policy") == FULL
        if not has_budget and not self.budgets:
            raise ValueError(f"{text!r} has no budget; give one, as {text}:20%, or budgets: [20%]")
        for budget in [None] if has_budget else self.budgets:
            config = CacheConfig.from_spec(text, budget=budget, min_tokens=0)
            if config.policy not in PER_QUERY:
                get_rule(config.policy)
            yield config

    def with_options(self, text: str) -> tuple[CacheConfig, ...]:
        """Return the caches with the options of a text, such as ``positions=rolling``."""
        named = cache_spec.parse(text) if text else {}
        if named.keys() & {"policy", "budget"}:
            raise ValueError(
                f"--cache {text} must have only options, as the file has policies and budgets;"
                " give such as positions=rolling"
            )
        return tuple(config.with_options(**named) for config in self.configs)

    def make_tasks(self, surroundings: Surroundings) -> list[Task]:
        tasks: list[Task] = []
        for number, entry in enumerate(self.tasks):
            where = f"experiment {self.name!r}: tasks[{number}]"
            names = list(entry) if isinstance(entry, dict) else []
            kind = next((name for name in names if name in KINDS), next(iter(names), None))
            if kind not in KINDS:
                raise ValueError(f"{where}: {unknown_name('kind of task', kind, KINDS)}")
            tasks += surroundings.make(kind, entry, where)
        return tasks


Section = TypeVar("Section")


def _checked(kind: type[Section], content: Any, where: str) -> Section:
    """Validate a section of a file; the error is one sentence with its location."""
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]]
        location = "".join(steps).removeprefix(".")
        problem = first["msg"].removeprefix("Value error, ")
        received = "" if first["type"] == "value_error" else f" (there is {first['input']!r})"
        prefix = f"{where}: {location}: " if location else f"{where}: "
        raise ValueError(f"{prefix}{problem}{received}") from error


def experiment_names() -> list[str]:
    """Return the names of the bundled experiments."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.yaml"))


def load_experiment(name: str) -> Experiment:
    """Read a bundled experiment, or a YAML file."""
    yaml = optional("yaml", "an experiment file")
    included = EXPERIMENTS / f"{name}.yaml"
    path = included if included.is_file() else Path(name).expanduser()
    try:
        content = yaml.safe_load(read_text_file(path))
    except yaml.YAMLError as error:
        raise ValueError(f"'{path}' is not YAML ({' '.join(str(error).split())})") from error
    if isinstance(content, dict):
        content = {"name": path.stem, "title": path.stem, **content}
    return _checked(Experiment, content, f"'{path}'")


def report(experiment: Experiment, lines: Sequence[Line], row: Mapping[str, Any]) -> str:
    """Write the page: provenance, results, published figures."""
    versions = (
        f"Model {row['model']} ({row['revision']}, {row['dtype']}); h2okv {row['h2okv']}"
        f" ({row['commit'] or 'no checkout'}), torch {row['torch']}, transformers"
        f" {row['transformers']}; seeds {', '.join(map(str, experiment.seeds))}."
    )
    remark = " ".join(experiment.remark.split())
    header = (f"# {experiment.title}", experiment.source, remark, versions)
    sections = [*(f"{paragraph}\n" for paragraph in header if paragraph), results_table(lines)]
    models: dict[str, dict[tuple[str, str], Line]] = {}
    for figure in experiment.published:
        label = figure.task if figure.shots is None else f"{figure.task}, shots {figure.shots}"
        published_lines = models.setdefault(figure.model, {})
        line = published_lines.setdefault((label, figure.policy), Line(label, "", figure.policy))
        line.by_budget[figure.budget].append(figure.value)
    for model, published in models.items():
        table = results_table(list(published.values()), ("task", "policy"))
        sections.append(f"As published, {model}:\n\n{table}")
    return "\n".join(sections)
