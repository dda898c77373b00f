"""A batch job on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from h2okv.cluster.ray_cluster import cluster, import_ray, place_copies, reason
from h2okv.console import Progress
from h2okv.integration.loading import Described, parse_device
from h2okv.offload.job import Job, Prompt, Summary, TextCodec, generate_records
from h2okv.offload.offload_engine import BATCH_SIZE, BatchRequest, describe_for, open_runner, run

_BATCHES = 8
"""Batches of prompts that an actor gets at once: at the end of each its slots run empty."""


def run_batch_on_ray(request: BatchRequest, device: str, actors: int | None) -> Summary:
    """Run a job on ``actors`` models; ``device`` is auto, cpu or cuda on their machines."""
    import_ray()

    def execute(request: BatchRequest, described: Described, job: Job) -> Summary:
        bar = Progress("batch", len(job.prompts.lines), "prompts")

        def told(seconds: float, new_tokens: int) -> None:
            bar.update(len(job.finished), note=f"{new_tokens / max(seconds, 1e-9):,.1f} tokens/s")

        with cluster() as ray, bar:
            return job.collect(_results(ray, job, request, device, actors), told)

    return run(request, execute)


def _results(
    ray: Any, job: Job, request: BatchRequest, device: str, actors: int | None
) -> Iterator[list[dict[str, Any]]]:
    """Results by blocks; an actor that dies is restarted, and gets its block again."""
    left = job.unfinished()
    count, resources = place_copies(ray, device, actors)
    # At least two blocks for each actor, so that all have work to the end.
    most = _BATCHES * (request.batch_size or BATCH_SIZE)
    size = max(1, min(most, -(-len(left) // (2 * count))))
    blocks = [left[first : first + size] for first in range(0, len(left), size)]
    remote = ray.remote(Worker).options(max_restarts=-1, max_task_retries=-1, **resources)
    workers = [remote.remote(request, device) for _ in range(count)]
    try:
        # The file is read on this machine alone, and a block when there is an actor for it.
        yield from ray.util.ActorPool(workers).map_unordered(
            lambda worker, block: worker.generate.remote([*map(job.prompts.read, block)]), blocks
        )
    except ray.exceptions.RayError as error:
        raise ValueError(
            f"an actor of the job failed ({reason(error)}); what was finished before is kept, and"
            " the same command goes on from there"
        ) from error
    finally:
        for worker in workers:
            ray.kill(worker)


class Worker:
    """An actor of the job: one model, and the engine of `h2okv batch`."""

    def __init__(self, request: BatchRequest, device: str) -> None:
        # The whole model in the actor's memory, which is what `device` says.
        request = replace(request, device=parse_device(device), weight_placement={"device": 1.0})
        described = describe_for(request)
        self._codec = TextCodec(described, request.max_new_tokens, request.is_raw)
        self._runner, _ = open_runner(request, described, [])

    def generate(self, prompts: list[Prompt]) -> list[dict[str, Any]]:
        results = generate_records(prompts, self._codec, self._runner)
        return [record for records in results for record in records]
