"""A task of lm-evaluation-harness."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tqdm import tqdm

from h2okv.config import CacheConfig
from h2okv.evaluation.lm_eval.launcher import TASKS, data_folder
from h2okv.evaluation.model import ModelUnderTest, settled
from h2okv.evaluation.shared_prefill import shares_prompt
from h2okv.evaluation.task import Result, Score, SharingTask, check_counts
from h2okv.provenance import digest
from h2okv.records import unknown_name

if TYPE_CHECKING:
    from h2okv.evaluation.lm_eval.scoring import Scorer

PREFIX = "h2okv_"
"""What the names of this package's own tasks begin with."""
_FEWSHOT_SEED = 1234
"""The harness's own seed for the examples of a prompt; a run's seed is added to it."""


class HarnessTask(SharingTask):
    """A task of lm-evaluation-harness with so many examples in the prompt, as one sample.

    The harness makes the prompts and the scores. It is one sample, because the examples that a
    prompt gets depend on the prompts before it; answers that the model has given are kept in the
    harness's own store, so that a stopped task does not ask for them again.
    """

    metrics: ClassVar[tuple[str, ...]] = ("acc", "acc_norm")

    def __init__(
        self,
        name: str,
        shots: int,
        data: Path | None,
        work: Path,
        prefill_chunk: int | None = 1,
        batch_size: int = 16,
        limit: int | None = None,
        own: bool = True,
    ) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            raise ValueError(
                f"the task {name!r} is run by lm-evaluation-harness, which is not installed; pip"
                " install 'h2okv[eval]'"
            )
        own_names = [path.stem.removeprefix(PREFIX) for path in sorted(TASKS.glob("*.yaml"))]
        if own and name not in own_names:
            raise unknown_name("task of the harness", name, own_names)
        if shots < 0:
            raise ValueError(f"shots {shots} is too few; give 0 or more")
        check_counts(batch_size=batch_size, limit=limit, prefill_chunk=prefill_chunk)
        self.name = name
        self.columns = {"shots": shots}
        self.shots, self.data, self.work = shots, data, work
        self.prefill_chunk, self.batch_size = prefill_chunk, batch_size
        self.limit, self.own = limit, own

    def identity(self) -> Mapping[str, Any]:
        """Names the protocol, the number of documents and the harness's version."""
        return {
            "task_prefill_chunk": self.prefill_chunk,
            "limit": self.limit,
            "lm_eval": importlib.metadata.version("lm_eval"),
        }

    def prepare(self, model: ModelUnderTest, configs: Sequence[CacheConfig]) -> None:
        """Looks whether all that the harness needs is there."""
        with self._quietly():
            self._manager().load([self._task_name])

    def samples(self) -> Sequence[int]:
        """Returns the one sample that the whole task is."""
        return (0,)

    def run_together(
        self,
        model: ModelUnderTest,
        configs: Sequence[CacheConfig],
        samples: Sequence[int],
        seed: int,
    ) -> Iterator[tuple[int, dict[int, Result]]]:
        """Runs the task with each cache; contexts that are read at once are read once for all."""
        from h2okv.evaluation.lm_eval.scoring import Scorer

        scorers = {
            number: Scorer(model.model, replace(settled(config, model.config), seed=seed))
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
        """Runs the task with one cache."""
        from lm_eval.evaluator import simple_evaluate

        from h2okv.evaluation.lm_eval.model import H2OLM

        cache = replace(settled(config, model.config), seed=seed)
        protocol = None
        if not config.is_full:
            cache = replace(cache, prefill_chunk=self.prefill_chunk or cache.prefill_chunk)
            protocol = None if self.prefill_chunk in (None, 1) else "whole"
        attention = model.config._attn_implementation
        with self._quietly():
            harness_model = H2OLM(
                model.model,
                tokenizer=model.tokenizer,
                batch_size=self.batch_size,
                protocol=protocol,
                **cache.to_dict(),
            )
            harness_model.scorer = scorer or harness_model.scorer
            try:
                found: Any = simple_evaluate(
                    harness_model,
                    tasks=[self._task_name],
                    num_fewshot=self.shots,
                    limit=self.limit,
                    use_cache=str(self._store(config, seed)),
                    task_manager=self._manager(),
                    fewshot_random_seed=_FEWSHOT_SEED + seed,
                    log_samples=False,
                )
            finally:
                model.model.set_attn_implementation(attention)
        scores = {
            name.removesuffix(",none"): value
            for name, value in found["results"][self._task_name].items()
            if name.endswith(",none") and isinstance(value, float)
        }
        return {**scores, "documents": found["n-samples"][self._task_name]["effective"]}

    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        """Returns the harness's scores with its standard errors."""
        result = results[0]
        return {
            name: Score(value, result.get(f"{name}_stderr"))
            for name, value in result.items()
            if name != "documents" and not name.endswith("_stderr")
        }

    def size(self, results: Mapping[int, Result]) -> int:
        """Returns how many documents the scores are made of."""
        return int(results[0]["documents"])

    @property
    def _task_name(self) -> str:
        return f"{PREFIX}{self.name}" if self.own else self.name

    def _manager(self) -> Any:
        from lm_eval.tasks import TaskManager

        return TaskManager(include_path=str(TASKS), include_defaults=not self.own)

    def _store(self, config: CacheConfig, seed: int) -> Path:
        content = {**config.identity(), "seed": seed, "block": self.prefill_chunk}
        return self.work / f"{self.name}-{self.shots}-{digest(json.dumps(content))}"

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Names the data folder to the tasks, and keeps the harness's bars and remarks back."""
        from lm_eval import evaluator

        logger = logging.getLogger("lm_eval")
        level = logger.level
        logger.setLevel(logging.ERROR)
        init = tqdm.__init__

        def silent(bar: tqdm, *args: Any, **options: Any) -> None:
            init(bar, *args, **{**options, "disable": True})

        # What the harness would find out about the machine takes seconds and is not used here.
        places = (
            (tqdm, "__init__", silent),
            (evaluator, "add_env_info", lambda results: None),
            (evaluator, "get_git_commit_hash", lambda: ""),
        )
        kept = [getattr(owner, name) for owner, name, _ in places]
        for owner, name, value in places:
            setattr(owner, name, value)
        try:
            with data_folder(self.data):
                yield
        finally:
            for (owner, name, _), value in zip(places, kept, strict=True):
                setattr(owner, name, value)
            logger.setLevel(level)
