"""Tasks of lm-evaluation-harness as evaluation tasks."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tqdm import tqdm

from h2okv.config import CacheConfig
from h2okv.console import optional
from h2okv.provenance import digest
from h2okv.records import refusing
from h2okv_lab.evaluation.lm_eval import task_manager
from h2okv_lab.evaluation.lm_eval.scorer import Scorer
from h2okv_lab.evaluation.model import ModelUnderTest, resolve_config
from h2okv_lab.evaluation.task import CacheResults, Configs, Result, Score, Task
from h2okv_lab.shared import shares_prompt
from h2okv_lab.tables import check_minimum

# The harness's seed for the examples of a prompt; a run's seed is added to it.
_FEWSHOT_SEED = 1234


@dataclass(eq=False)
class HarnessTask(Task):
    """A task of lm-evaluation-harness, as one sample: its examples depend on earlier ones."""

    data: Path | None  # a folder of task files, which come before those of the harness
    work: Path  # the folder of the harness's store
    shots: int = 0  # examples in a prompt
    evict_every: int | None = 1  # None evicts once, after the prompt
    batch_size: int = 16
    limit: int | None = None  # use the first documents only
    metrics = ("acc", "acc_norm")

    def __post_init__(self) -> None:
        optional("lm_eval", "a task of the harness")
        check_minimum(0, shots=self.shots)
        check_minimum(batch_size=self.batch_size, limit=self.limit, evict_every=self.evict_every)
        self.samples = (0,)

    @property
    def columns(self) -> Mapping[str, Any]:
        # Published figures evict from the whole text, token by token.
        return {"shots": self.shots} | ({} if self.evict_every else {"protocol": "prompt"})

    def identity(self) -> Mapping[str, Any]:
        return {
            "task_evict_every": self.evict_every,
            "limit": self.limit,
            "lm_eval": importlib.metadata.version("lm_eval"),
        }

    def prepare(self, model: ModelUnderTest, configs: Configs) -> None:
        problem = f"harness: {self.name!r} cannot be loaded"
        remedy = "give a folder with its task file by --data, or check the network"
        with quietly(), refusing(problem, remedy, OSError):
            manager = self._manager()
            manager.match_tasks([self.name])
            manager.load([self.name])

    def run(
        self, model: ModelUnderTest, configs: Configs, samples: Sequence[int], seed: int
    ) -> CacheResults:
        """Run the task with each cache; caches that can share them read contexts together."""
        scorers = {
            number: Scorer(model.model, resolve_config(config, model.config).seeded(seed))
            for number, config in enumerate(configs)
            if (config.is_full or self.evict_every is None) and shares_prompt(config)
        }
        for scorer in scorers.values():
            scorer.group = list(scorers.values())
        for number, config in enumerate(configs):
            yield number, {0: self._run(model, config, seed, scorers.pop(number, None))}

    def _run(
        self, model: ModelUnderTest, config: CacheConfig, seed: int, scorer: Scorer | None
    ) -> Result:
        from lm_eval.evaluator import simple_evaluate

        from h2okv_lab.evaluation.lm_eval.model import H2OLM

        cache = resolve_config(config, model.config).seeded(seed)
        protocol = None
        if not config.is_full:
            cache = cache.with_cuts(self.evict_every)
            protocol = None if self.evict_every in (None, 1) else "whole"
        stored = {**config.identity(), "seed": seed, "block": self.evict_every}
        options = {"protocol": protocol, "batch_size": self.batch_size, **cache.to_dict()}
        attention, name = model.config._attn_implementation, self.name
        with quietly():
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
        return task_manager(self.data, [self.name], "harness:")()


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
