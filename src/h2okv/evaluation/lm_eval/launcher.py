"""lm-evaluation-harness: its command line, and its tasks as evaluation tasks."""

from __future__ import annotations

import difflib
import importlib.metadata
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tqdm import tqdm

from h2okv.config import CacheConfig
from h2okv.console import check_least, optional
from h2okv.evaluation.model import ModelUnderTest, resolve_config
from h2okv.evaluation.shared_prefill import shares_prompt
from h2okv.evaluation.task import CacheResults, Configs, Result, Score, Task
from h2okv.provenance import digest
from h2okv.records import unknown_name

if TYPE_CHECKING:
    from h2okv.evaluation.lm_eval.scorer import Scorer

DATA_VARIABLE = "H2OKV_EVAL_DATA"  # names the data folder; ``h2okv lm-eval --data`` sets it
TASKS = Path(__file__).parent / "task_files"  # for ``lm_eval --include_path``
MODEL = "h2okv"
_PREFIX = f"{MODEL}_"  # of the names of this package's tasks
# The files in the data folder that this package's tasks need.
_FILES = {
    "copa": ("copa_balanced_dev.xml",),
    "rte": ("rte_val.jsonl",),
    "piqa": ("piqa/valid.jsonl", "piqa/valid-labels.lst"),
    "openbookqa": ("openbookqa_test.tsv", "openbookqa_dev.tsv"),
    "winogrande": ("llm_adapters/winogrande_test.json",),
    "mathqa": ("llm_adapters/mathqa_test.json",),
}
# The arguments of the model type that the harness does not know.
SETTINGS = ("protocol", *(field.name for field in fields(CacheConfig)))
# The harness's seed for the examples of a prompt; a run's seed is added to it.
_FEWSHOT_SEED = 1234


def data_file(name: str, folder: Path | None = None) -> Path:
    """Return the path of a task's data file, by default in the folder of `DATA_VARIABLE`."""
    root = folder or os.environ.get(DATA_VARIABLE, "")
    if not root:
        raise ValueError(
            f"this task reads {name!r} from a data folder, and none is set; give h2okv lm-eval "
            f"--data DIR, or set the environment variable {DATA_VARIABLE}."
        )
    path = Path(root) / name
    if not path.is_file():
        raise ValueError(
            f"the data file {name!r} is not in '{root}'; put it there (docs/lm-eval.md has the "
            "sources) or name another folder by --data."
        )
    return path


def check_arguments(names: Iterable[str]) -> None:
    """Raise ValueError for an unknown name that resembles one of `SETTINGS`."""
    for name in names:
        near = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.7)
        if near and name not in SETTINGS:
            raise ValueError(f"model argument {name!r} is unknown; perhaps {near[0]!r} is meant.")


def run_harness(args: Sequence[str], data: Path | None = None) -> int:
    """Run lm-evaluation-harness's command with this package's model type and tasks."""
    command = optional("lm_eval._cli", "h2okv lm-eval")
    if data is not None and not data.is_dir():
        raise ValueError(f"--data {str(data)!r} is not a folder; name the one with the data files.")
    words = list(args)
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words.insert(0, "run")
    try:
        with patch.object(sys, "argv", ["lm_eval", *words]):
            parsed = command.HarnessCLI().parse_args()
        with _data_folder(data):
            if parsed.command == "run":
                _check_early(parsed)
            _evaluate(parsed)
    except SystemExit as exit_error:  # after its help, or with its own message
        return (
            exit_error.code
            if isinstance(exit_error.code, int)
            else int(exit_error.code is not None)
        )
    return 0


def _check_early(parsed: Namespace) -> None:
    """Refuse wrong arguments before the harness and the model are loaded."""
    if not parsed.config:
        parsed.model = parsed.model or MODEL
    if parsed.model == MODEL:
        arguments = parsed.model_args or {}
        if "pretrained" not in arguments and not parsed.config:
            raise ValueError("--model_args must name a model; add pretrained=bundled or another.")
        check_arguments(arguments)
    for task, files in _FILES.items():
        if {f"{_PREFIX}{task}", f"{_PREFIX}tasks"} & set(parsed.tasks or ()):
            for name in files:
                data_file(name)


def _evaluate(parsed: Namespace) -> None:
    from lm_eval.utils import setup_logging

    import h2okv.evaluation.lm_eval.model  # noqa: F401  registers the model type

    setup_logging()
    tasks = getattr(parsed, "tasks", None) or ()
    tasks = tasks.split(",") if isinstance(tasks, str) else tasks  # as `validate` has them
    # The harness lists its own tasks only if one of them may be needed: that takes seconds.
    ours_only = bool(tasks) and all(name.startswith(_PREFIX) for name in tasks)
    try:
        with _task_manager(ours_only):
            parsed.func(parsed)
    except (KeyError, FileNotFoundError) as error:
        raise ValueError(f"lm_eval: {error.args[0] if error.args else error}") from error


def _task_manager(ours_only: bool) -> AbstractContextManager[Any]:
    """Patch the harness's task manager, which then finds this package's tasks too."""
    import lm_eval.tasks

    class Tasks(lm_eval.tasks.TaskManager):
        """The harness's tasks and ours; the error for an unknown name suggests similar ones."""

        def __init__(self, *args: Any, include_path: Any = None, **options: Any) -> None:
            others = include_path if isinstance(include_path, (list, tuple)) else [include_path]
            options.setdefault("include_defaults", not ours_only)
            super().__init__(*args, include_path=[TASKS, *filter(None, others)], **options)

        def match_tasks(self, task_list: list[str]) -> list[str]:
            matches = super().match_tasks(task_list)
            if not matches and not all(Path(name).exists() for name in task_list):
                near = difflib.get_close_matches(task_list[0], self.all_tasks, n=3)
                hint = f"did you mean {', '.join(near)}? " if near else ""
                raise ValueError(
                    f"--tasks {task_list[0]!r} is unknown; {hint}`h2okv lm-eval ls tasks` lists "
                    "all."
                )
            return matches

    return patch.object(lm_eval.tasks, "TaskManager", Tasks)


def _data_folder(folder: Path | None) -> AbstractContextManager[Any]:
    """Set `DATA_VARIABLE` to the folder if there is one."""
    return patch.dict(os.environ, {} if folder is None else {DATA_VARIABLE: str(folder)})


@dataclass(eq=False)
class HarnessTask(Task):
    """A task of lm-evaluation-harness, as one sample: its examples depend on earlier ones."""

    data: Path | None  # the folder with the data files of this package's tasks
    work: Path  # the folder of the harness's store
    shots: int = 0  # examples in a prompt
    prefill_chunk: int | None = 1  # None evicts once, after the prompt
    batch_size: int = 16
    limit: int | None = None  # use the first documents only
    own: bool = True  # whether it is this package's task; word-ok: a field of experiment files
    metrics = ("acc", "acc_norm")

    def __post_init__(self) -> None:
        optional("lm_eval", "a task of the harness")
        if self.own and self.name not in _FILES:
            raise unknown_name("task of the harness", self.name, sorted(_FILES))
        check_least(0, shots=self.shots)
        check_least(batch_size=self.batch_size, limit=self.limit, prefill_chunk=self.prefill_chunk)
        self.samples = (0,)
        self._task_name = f"{_PREFIX}{self.name}" if self.own else self.name

    @property
    def columns(self) -> Mapping[str, Any]:
        # Published figures evict from the whole text, token by token.
        return {"shots": self.shots} | ({} if self.prefill_chunk else {"protocol": "prompt"})

    def identity(self) -> Mapping[str, Any]:
        return {
            "task_prefill_chunk": self.prefill_chunk,
            "limit": self.limit,
            "lm_eval": importlib.metadata.version("lm_eval"),
        }

    def prepare(self, model: ModelUnderTest, configs: Configs) -> None:
        with quietly(), _data_folder(self.data):
            self._manager().load([self._task_name])

    def run(
        self, model: ModelUnderTest, configs: Configs, samples: Sequence[int], seed: int
    ) -> CacheResults:
        """Run the task with each cache; caches that can share them read contexts together."""
        from h2okv.evaluation.lm_eval.scorer import Scorer

        scorers = {
            number: Scorer(model.model, resolve_config(config, model.config).seeded(seed))
            for number, config in enumerate(configs)
            if (config.is_full or self.prefill_chunk is None) and shares_prompt(config)
        }
        for scorer in scorers.values():
            scorer.group = list(scorers.values())
        for number, config in enumerate(configs):
            yield number, {0: self._run(model, config, seed, scorers.pop(number, None))}

    def _run(
        self, model: ModelUnderTest, config: CacheConfig, seed: int, scorer: Scorer | None
    ) -> Result:
        from lm_eval.evaluator import simple_evaluate

        from h2okv.evaluation.lm_eval.model import H2OLM

        cache = resolve_config(config, model.config).seeded(seed)
        protocol = None
        if not config.is_full:
            cache = replace(cache, prefill_chunk=self.prefill_chunk or cache.prefill_chunk)
            protocol = None if self.prefill_chunk in (None, 1) else "whole"
        stored = {**config.identity(), "seed": seed, "block": self.prefill_chunk}
        options = {"protocol": protocol, "batch_size": self.batch_size, **cache.to_dict()}
        attention, name = model.config._attn_implementation, self._task_name
        with quietly(), _data_folder(self.data):
            harness_model = H2OLM(model.model, tokenizer=model.tokenizer, **options)
            harness_model.scorer = scorer or harness_model.scorer
            try:
                report: Any = simple_evaluate(
                    harness_model,
                    tasks=[name],
                    num_fewshot=self.shots,
                    limit=self.limit,
                    use_cache=str(self.work / f"{self.name}-{self.shots}-{digest(dumps(stored))}"),
                    task_manager=self._manager(),
                    fewshot_random_seed=_FEWSHOT_SEED + seed,
                    log_samples=False,
                )
            finally:
                model.model.set_attn_implementation(attention)
        scores = {
            metric.removesuffix(",none"): value
            for metric, value in report["results"][name].items()
            if metric.endswith(",none") and isinstance(value, float)
        }
        return {**scores, "documents": report["n-samples"][name]["effective"]}

    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        result = results[0]
        return {
            name: Score(value, result.get(f"{name}_stderr"))
            for name, value in result.items()
            if name != "documents" and not name.endswith("_stderr")
        }

    def size(self, results: Mapping[int, Result]) -> int:
        return int(results[0]["documents"])

    def _manager(self) -> Any:
        from lm_eval.tasks import TaskManager

        return TaskManager(include_path=str(TASKS), include_defaults=not self.own)


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the harness's progress bars and log, and skip its survey of the machine."""
    from lm_eval import evaluator

    logger, init = logging.getLogger("lm_eval"), tqdm.__init__
    level = logger.level
    logger.setLevel(logging.ERROR)

    def silent(bar: tqdm, *args: Any, **options: Any) -> None:
        init(bar, *args, **{**options, "disable": True})

    try:
        with (
            patch.object(tqdm, "__init__", silent),
            patch.object(evaluator, "add_env_info", lambda results: None),
            patch.object(evaluator, "get_git_commit_hash", lambda: ""),
        ):
            yield
    finally:
        logger.setLevel(level)
