"""Policies by budgets by tasks, from one experiment file."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from h2okv.assets import sample_prompt
from h2okv.evaluation.cache_setting import OPTIONAL, CacheSetting
from h2okv.evaluation.decoding import Decoding
from h2okv.evaluation.plots import line_look, new_figure, save_figure
from h2okv.evaluation.runner import Cell
from h2okv.evaluation.stream_data import read_conversations
from h2okv.evaluation.task import BatchOptions, Task, TextPrompt
from h2okv.evaluation.tasks.diversity import Diversity
from h2okv.evaluation.tasks.lm_eval_task import HarnessTask
from h2okv.evaluation.tasks.needle import Grid, Needle, NeedleTask
from h2okv.evaluation.tasks.perplexity import Perplexity, Windows
from h2okv.evaluation.tasks.ruler import KNOWLEDGE, MOST_TOKENS, Recall, read_ruler
from h2okv.evaluation.tasks.summarization import Summarization, read_articles
from h2okv.policy import get_policy
from h2okv.records import markdown_table, read_text_file, unknown_name

EXPERIMENTS = Path(__file__).parent / "experiments"
"""The folder of the files that come with the package."""

_KEYS = ("title", "source", "remark", "budgets", "caches", "seeds", "tasks", "published")
_CACHE_KEYS = ("policy", "budgets", "heavy_share", "sink", "positions", "prefill_chunk", *OPTIONAL)
_PUBLISHED_KEYS = ("model", "task", "shots", "policy", "budget", "value")


@dataclass(frozen=True)
class Published:
    """A published figure.

    Attributes:
        model: Whose it is.
        task: The task's name.
        shots: Examples in the prompt; None where there are none to count.
        policy: As `CacheSetting.policy_label` has it.
        budget: As `CacheSetting.budget_label` has it.
        value: The figure, in the unit that it was published in.
    """

    model: str
    task: str
    shots: int | None
    policy: str
    budget: str
    value: float


@dataclass(frozen=True)
class Experiment:
    """What to run.

    Attributes:
        name: The file's name without its ending.
        title: What is compared.
        source: Where it comes from.
        remark: What a reader of the results should know.
        settings: The caches.
        seeds: Where random numbers start; each a run of its own.
        tasks: Each as `make_tasks` takes it.
        published: What there is to stand beside.
        left_out: Caches that this version of the package does not have.
    """

    name: str
    title: str
    source: str
    remark: str
    settings: tuple[CacheSetting, ...]
    seeds: tuple[int, ...]
    tasks: tuple[Mapping[str, Any], ...]
    published: tuple[Published, ...]
    left_out: tuple[CacheSetting, ...]

    def placed(self, positions: str | None, prefill_chunk: int | None) -> Experiment:
        """Changes how entries are placed and texts are read, where something is given."""
        changes: dict[str, Any] = {"positions": positions, "prefill_chunk": prefill_chunk}
        given = {name: value for name, value in changes.items() if value is not None}
        return replace(self, settings=tuple(replace(s, **given) for s in self.settings))


def experiment_names() -> list[str]:
    """Returns the names of the files that come with the package."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.yaml"))


def load_experiment(name: str) -> Experiment:
    """Reads an experiment."""
    path = Path(name).expanduser()
    if name in experiment_names():
        path = EXPERIMENTS / f"{name}.yaml"
    elif path.suffix not in (".yaml", ".yml") and not path.is_file():
        raise unknown_name("experiment", name, experiment_names())
    return _experiment(path.stem, _read_yaml(path), str(path))


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


def _experiment(name: str, content: Any, where: str) -> Experiment:
    fields = checked_fields(content, _KEYS, f"'{where}'")
    settings: list[CacheSetting] = []
    for number, entry in enumerate(_list(fields, "caches", where)):
        settings += _settings(entry, fields.get("budgets"), f"'{where}': caches[{number}]")
    usable = _once(setting for setting in settings if not setting.missing())
    missing = _once(setting for setting in settings if setting.missing())
    if not usable:
        raise ValueError(f"'{where}': caches has none that this version of h2okv knows")
    seeds = fields.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or not all(_is_count(seed) for seed in seeds):
        raise ValueError(f"'{where}': seeds is {seeds!r}; give a list of whole numbers")
    tasks = _list(fields, "tasks", where)
    published = [
        _published(entry, f"'{where}': published[{number}]")
        for number, entry in enumerate(fields.get("published") or [])
    ]
    return Experiment(
        name=name,
        title=str(fields.get("title", name)),
        source=str(fields.get("source", "")),
        remark=" ".join(str(fields.get("remark", "")).split()),
        settings=usable,
        seeds=tuple(seeds),
        tasks=tuple(tasks),
        published=tuple(published),
        left_out=missing,
    )


def _settings(entry: Any, budgets: Any, where: str) -> list[CacheSetting]:
    """One policy with all its budgets."""
    fields = dict(checked_fields(entry, _CACHE_KEYS, where))
    more = {key: fields.pop(key) for key in OPTIONAL if fields.get(key) is not None}
    amounts = fields.pop("budgets", budgets)
    if fields.get("policy") == "full":
        amounts = ["full"]
    if not isinstance(amounts, list) or not amounts:
        raise ValueError(f"{where}: budgets is {amounts!r}; give a list such as [0.2, 256, full]")
    found = []
    for amount in amounts:
        if amount != "full" and (isinstance(amount, bool) or not isinstance(amount, (int, float))):
            raise ValueError(
                f"{where}: budget {amount!r} is no amount; give tokens (256), a fraction of the"
                " prompt (0.2), or full"
            )
        try:
            get_policy(fields.get("policy", "h2o"))
            budget = None if amount == "full" else amount
            setting = CacheSetting(budget=budget, more=more, **fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
        found.append(setting)
    return found


def _published(entry: Any, where: str) -> Published:
    fields = checked_fields(entry, _PUBLISHED_KEYS, where)
    try:
        return Published(
            model=str(fields["model"]),
            task=str(fields["task"]),
            shots=fields.get("shots"),
            policy=str(fields["policy"]),
            budget=str(fields["budget"]),
            value=float(fields["value"]),
        )
    except KeyError as error:
        raise ValueError(f"{where} has no {error.args[0]}; add it") from error


def checked_fields(content: Any, known: Sequence[str], where: str) -> Mapping[str, Any]:
    """Makes sure that a part of an experiment file has known names only."""
    if not isinstance(content, dict):
        raise ValueError(f"{where} is {content!r}; give names and values ({', '.join(known)})")
    for name in content:
        if name not in known:
            raise ValueError(f"{where}: {unknown_name('name', name, known)}")
    return content


def _list(fields: Mapping[str, Any], name: str, where: str) -> list[Any]:
    found = fields.get(name)
    if not isinstance(found, list) or not found:
        raise ValueError(f"'{where}': {name} is {found!r}; give a list with at least one entry")
    return found


def _once(settings: Any) -> tuple[CacheSetting, ...]:
    """Each cache once: whatever the policy, the full one is the same."""
    return tuple({setting.label: setting for setting in settings}.values())


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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

    def options(self, entry: Entry, batch_size: int = 8) -> BatchOptions:
        """Says how prompts are run; samples above the model's window are left out."""
        return BatchOptions(
            self.batch_size or entry.get("batch_size", batch_size),
            self.limit,
            entry.get("too_long", "skip"),
            entry.get("max_new_tokens"),
        )


def make_tasks(experiment: Experiment, around: Surroundings) -> list[Task]:
    """Makes all tasks of an experiment."""
    tasks: list[Task] = []
    for number, entry in enumerate(experiment.tasks):
        where = f"experiment {experiment.name!r}: tasks[{number}]"
        names = list(entry) if isinstance(entry, dict) else []
        kind = next((name for name in names if name in _KINDS), next(iter(names), None))
        if kind not in _KINDS:
            raise ValueError(f"{where}: {unknown_name('kind of task', kind, _KINDS)}")
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


FULL = "full"


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


def pivot(cells: Sequence[Cell], rows: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Puts results in lines."""
    lines: dict[tuple[str, str], Line] = {}
    found: dict[tuple[str, str, str], list[float]] = {}
    for cell in cells:
        row = rows.get(cell.label)
        if row is None:
            continue
        task, policy = cell.task.label, cell.setting.policy_label
        line = lines.setdefault((task, policy), Line(task, row["metric"], policy))
        budget = cell.setting.budget_label
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


def budgets_of(lines: Sequence[Line]) -> list[str]:
    """Lists the budgets of lines: tokens, then fractions, the smallest first, and the full one."""
    return sorted({budget for line in lines for budget in line.values}, key=_size)


def _size(budget: str) -> tuple[int, float]:
    if budget == FULL:
        return 2, 0.0
    return int(budget.endswith("%")), float(budget.removesuffix("%"))


def report(experiment: Experiment, lines: Sequence[Line], row: Mapping[str, Any]) -> str:
    """Writes the page."""
    parts = [f"# {experiment.title}\n"]
    if experiment.source:
        parts.append(f"{experiment.source}\n")
    if experiment.remark:
        parts.append(f"{experiment.remark}\n")
    versions = f"h2okv {row['h2okv']} ({row['commit'] or 'no checkout'}), torch {row['torch']}"
    parts.append(
        f"Model {row['model']} ({row['revision']}, {row['dtype']}); {versions}, transformers"
        f" {row['transformers']}; seeds {', '.join(map(str, experiment.seeds))}.\n"
    )
    parts += [
        f"Left out, for this version does not have it: {s.label}.\n" for s in experiment.left_out
    ]
    parts.append(results_table(lines))
    for model, published in published_lines(experiment.published).items():
        parts.append(f"As published, {model}:\n")
        parts.append(_table(published, ["task", "policy"], lambda line: [line.task, line.policy]))
    return "\n".join(parts)


def results_table(lines: Sequence[Line]) -> str:
    """Sets results side by side: a line for each task and policy, a column for each budget."""
    return _table(
        lines,
        ["task", "samples", "metric", "policy"],
        lambda line: [line.task, line.samples, line.metric, line.policy],
    )


def _table(lines: Sequence[Line], names: Sequence[str], cells: Any) -> str:
    budgets = budgets_of(lines)
    return markdown_table(
        [*names, *budgets],
        [[*cells(line), *(line.values.get(budget) for budget in budgets)] for line in lines],
    )


_COLUMNS = 3
_PANEL = (4.0, 3.0)
_MARKERS = "osD^vPX*"


def plot_sweep(path: Path, lines: Sequence[Line], title: str) -> None:
    """Draws scores against budgets, with the full cache as a dashed line."""
    tasks = list(dict.fromkeys(line.task for line in lines))
    policies = list(dict.fromkeys(line.policy for line in lines if set(line.values) - {FULL}))
    columns = min(_COLUMNS, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    figure = new_figure(max(_PANEL[0] * columns, 6), _PANEL[1] * rows + 1.2)
    figure.suptitle(title)
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes, task in zip(panels, tasks, strict=False):
        _draw(axes, [line for line in lines if line.task == task], policies)
        axes.set_title(task, fontsize="medium")
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    for axes in panels[: len(tasks)]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4)
    save_figure(figure, path)


def _draw(axes: Any, lines: Sequence[Line], policies: Sequence[str]) -> None:
    """Draws one task; mutates the axes."""
    budgets = [budget for budget in budgets_of(lines) if budget != FULL]
    place = {budget: number for number, budget in enumerate(budgets)}
    for line in lines:
        known = [budget for budget in budgets if budget in line.values]
        if not known:
            _draw_full(axes, line)
            continue
        number = policies.index(line.policy)
        axes.errorbar(
            [place[budget] for budget in known],
            [line.values[budget] for budget in known],
            yerr=[line.stderrs.get(budget, 0.0) for budget in known],
            marker=_MARKERS[number % len(_MARKERS)],
            capsize=2,
            label=line.policy,
            **line_look(number),
        )
    axes.set_xticks(range(len(budgets)), budgets)
    axes.set_xlabel("budget")
    axes.set_ylabel(lines[0].metric)
    axes.grid(alpha=0.3)


def _draw_full(axes: Any, line: Line) -> None:
    style = "--" if line.policy == FULL else ":"
    axes.axhline(line.values[FULL], color="#555555", linestyle=style, label=line.policy)
