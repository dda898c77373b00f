"""A batch job on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from h2okv.cluster import cluster, import_ray, place_copies, reason
from h2okv.console import Progress
from h2okv.models.loading import Described, parse_device
from h2okv.offload.job import Job, Prompt, PromptFile, Summary, TextCodec, generate_records
from h2okv.offload.offload_engine import BATCH_SIZE, BatchRequest, describe_for, open_runner, run

_BATCHES = 8
"""Batches of prompts in an actor's block: at the end of each block its slots run empty."""


def run_batch_on_ray(
    request: BatchRequest, device: str, actors: int | None, prompts: PromptFile | None = None
) -> Summary:
    """Run a job on ``actors`` models; ``device`` is auto, cpu or cuda on their machines."""
    import_ray()

    def execute(request: BatchRequest, described: Described, job: Job) -> Summary:
        bar = Progress("batch", len(job.prompts.lines), "prompts")

        def on_progress(seconds: float, new_tokens: int) -> None:
            bar.update(len(job.finished), note=f"{new_tokens / max(seconds, 1e-9):,.1f} tokens/s")

        with cluster() as ray, bar:
            return job.collect(_results(ray, job, request, device, actors), on_progress)

    return run(request, execute, prompts)


def _results(
    ray: Any, job: Job, request: BatchRequest, device: str, actors: int | None
) -> Iterator[list[dict[str, Any]]]:
    """Yield results by blocks; an actor that dies is restarted and gets its block again."""
    unfinished = job.unfinished()
    count, resources = place_copies(ray, device, actors)
    # At least two blocks per actor: all have work until the end.
    largest = _BATCHES * (request.batch_size or BATCH_SIZE)
    size = max(1, min(largest, -(-len(unfinished) // (2 * count))))
    blocks = [unfinished[first : first + size] for first in range(0, len(unfinished), size)]
    remote = ray.remote(Worker).options(max_restarts=-1, max_task_retries=-1, **resources)
    workers = [remote.remote(request, device) for _ in range(count)]
    try:
        yield from ray.util.ActorPool(workers).map_unordered(
            lambda worker, block: worker.generate.remote(block), blocks
        )
    except ray.exceptions.RayError as error:
        raise ValueError(
            f"an actor of the job failed ({reason(error)}); finished results are saved, and the"
            " same command resumes from them"
        ) from error
    finally:
        for worker in workers:
            ray.kill(worker)


class Worker:
    """An actor of the job: one model, and the engine of `h2okv batch`."""

    def __init__(self, request: BatchRequest, device: str) -> None:
        # The model is in the memory of `device`, without offloading.
        request = replace(request, device=parse_device(device), weight_placement={"device": 1.0})
        described = describe_for(request)
        self._codec = TextCodec(described, request.sampling, request.is_raw)
        self._runner, _ = open_runner(request, described, [])

    def generate(self, prompts: list[Prompt]) -> list[dict[str, Any]]:
        results = generate_records(prompts, self._codec, self._runner)
        return [record for records in results for record in records]
