"""An experiment file: which caches, which tasks, and what was published about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from h2okv.evaluation.cache_setting import OPTIONAL, CacheSetting
from h2okv.evaluation.text_file import read_text_file
from h2okv.evaluation.unknown_name import unknown
from h2okv.policy import get_policy

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
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
        """Changes how entries are placed and texts are read, where something is given.

        Args:
            positions: For all caches that evict.
            prefill_chunk: For all caches.

        Returns:
            The changed experiment.
        """
        changes: dict[str, Any] = {"positions": positions, "prefill_chunk": prefill_chunk}
        given = {name: value for name, value in changes.items() if value is not None}
        return replace(self, settings=tuple(replace(s, **given) for s in self.settings))


def experiment_names() -> list[str]:
    """Returns the names of the files that come with the package."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.yaml"))


def load_experiment(name: str) -> Experiment:
    """Reads an experiment.

    Args:
        name: One of `experiment_names`, or the path of a YAML file.

    Returns:
        The experiment.

    Raises:
        ValueError: If there is none of that name, or the file is not what it should be, naming
            the place and what may stand there.
    """
    path = Path(name).expanduser()
    if name in experiment_names():
        path = EXPERIMENTS / f"{name}.yaml"
    elif path.suffix not in (".yaml", ".yml") and not path.is_file():
        raise unknown("experiment", name, experiment_names())
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
    """Makes sure that a part of an experiment file has known names only.

    Args:
        content: What YAML gave.
        known: The names.
        where: Which part it is, for the message.

    Returns:
        The part.

    Raises:
        ValueError: If it is no mapping or has a name that is not known, with the nearest ones.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{where} is {content!r}; give names and values ({', '.join(known)})")
    for name in content:
        if name not in known:
            raise ValueError(f"{where}: {unknown('name', name, known)}")
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
