"""`h2okv batch --ray`: the same job, with a model in each of many Ray actors."""

from __future__ import annotations

import json
import os
import time
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import h2okv
from h2okv.cli.args import parse_device
from h2okv.cli.batch_engine import make_engine
from h2okv.cli.batch_job import described_of, settings_of, stopped, wording_of
from h2okv.cli.batch_request import BatchRequest, Summary
from h2okv.cli.console import BatchProgress
from h2okv.engine.chooser import Chooser
from h2okv.engine.job import Job
from h2okv.engine.prompt_file import PromptFile
from h2okv.engine.prompt_list import PromptList, ResultList
from h2okv.engine.ray_cluster import cluster, import_ray
from h2okv.engine.ray_job import RECORD, Pool, run_on_pool
from h2okv.engine.result_file import ResultFile
from h2okv.engine.runner import Runner

_ROWS = 32
_BATCHES = 8
"""Batches of prompts that an actor gets at once: at the end of each its rows run empty."""


def run_batch_on_ray(request: BatchRequest, device: str, actors: int | None) -> Summary:
    """Runs a job on a Ray cluster, or what an earlier run of it left.

    A job may be begun with Ray and gone on with without it, and the other way round.

    Args:
        request: What the user asked for; its device is not looked at.
        device: ``auto``, ``cpu`` or ``cuda``, on the machines of the actors.
        actors: How many models; None for one on each GPU, or on each machine without any.

    Returns:
        What was done.

    Raises:
        ValueError: If something about the input, the output, the model or the cluster is wrong.
        Stopped: If Ctrl-C ended it.
    """
    import_ray()
    described = described_of(request)
    prompts = PromptFile(request.input)
    with ResultFile(request.output, settings_of(request, described.config)) as results:
        job = Job(prompts, results, wording_of(request, described))
        summary = Summary(len(prompts), job.num_skipped, results.num_errors)
        if job.num_finished == len(prompts):
            return summary
        try:
            return _run(request, job, summary, device, actors)
        except KeyboardInterrupt:
            raise stopped(job) from None


def _run(
    request: BatchRequest, job: Job, summary: Summary, device: str, actors: int | None
) -> Summary:
    pool = Pool(
        actors=actors,
        on_gpu=None if device == "auto" else device.startswith("cuda"),
        block=_BATCHES * (request.rows or _ROWS),
    )
    start = time.perf_counter()
    new_tokens = prompt_tokens = 0
    longest = request.sampling.max_new_tokens
    bar = BatchProgress(summary.prompts, job.num_skipped, longest)
    # Ray tells stdout at length of every actor that dies, which is the command's own place; its
    # log files have that too.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), cluster() as ray, bar:
        written = run_on_pool(job, request.input, ray, pool, Worker, (request, device))
        for records in written:
            new_tokens += sum(record.get("new_tokens", 0) for record in records)
            prompt_tokens += sum(record.get("prompt_tokens", 0) for record in records)
            bar.update(job.num_finished, 0, new_tokens)
    return replace(
        summary,
        errors=job.results.num_errors,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        seconds=time.perf_counter() - start,
    )


class Worker:
    """An actor of the job: one model, and the engine of `h2okv batch`.

    Args:
        asked: What the user asked for, and on which kind of device.

    Raises:
        ValueError: If the model is not on this machine.
    """

    def __init__(self, asked: tuple[BatchRequest, str]) -> None:
        request, device = asked
        # The whole model in the actor's memory, which is what `device` says.
        self._request = request = replace(
            request, device=parse_device(device), shares={"device": 1.0}
        )
        described = described_of(request)
        self._config = described.config
        self._wording = wording_of(request, described)
        job = Job(PromptList([]), ResultList(), self._wording)
        self._engine = make_engine(request, described, job, self._make_cache)
        sampling = request.sampling
        self._chooser = Chooser(
            self._engine.model, sampling.temperature, sampling.top_p, sampling.seed
        )

    def __call__(self, batch: Any) -> Any:
        """Generates for a block of prompts.

        Args:
            batch: A table with the lines of the prompts' file.

        Returns:
            A table with the records.
        """
        import pyarrow

        from h2okv.engine.ray_prompts import COLUMN

        results = ResultList()
        job = Job(PromptList(batch[COLUMN].to_pylist()), results, self._wording)
        engine = self._engine
        runner = Runner(
            engine.model,
            engine.passing,
            self._chooser,
            self._make_cache,
            engine.limits,
            self._request.device,
        )
        with h2okv.enable(engine.model):
            for _ in job.run(runner):
                pass
        # As JSON in ASCII: ids are texts or numbers, and half a pair of surrogates is no text.
        return pyarrow.table({RECORD: [json.dumps(record) for record in results.records]})

    def _make_cache(self) -> h2okv.H2OCache:
        return self._request.choice.make(self._config, self._request.sampling.seed)
