"""A job whose prompts are generated for by a pool of actors, each with a model of its own."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2okv.engine.job import Job
from h2okv.engine.prompt_file import PromptLine
from h2okv.engine.ray_cluster import count_workers, has_gpus, reason, share_cpus

RECORD = "record"
"""Of a batch of results: a record as JSON."""
_MOST_BLOCKS = 20_000
"""Ray Data keeps something in the driver's memory for each block."""
_IN_FLIGHT = 2
"""Blocks that an actor has or waits for, so that it never waits itself."""


@dataclass(frozen=True)
class Pool:
    """The actors of a job.

    Attributes:
        actors: How many; ``None`` for one on each GPU, or on each machine where there is none.
        on_gpu: Whether each takes a GPU; ``None`` for where there are any.
        block: Prompts that an actor gets at once, if there are that many for each.
    """

    actors: int | None
    on_gpu: bool | None
    block: int


def run_on_pool(
    job: Job, path: Path, ray: Any, pool: Pool, worker: type, argument: Any
) -> Iterator[list[dict[str, Any]]]:
    """Runs what is left of a job; every result is on the disk when it is told of.

    Results come in the order in which actors finish. A block whose actor dies is given to it again
    when it has been restarted, so that nothing is lost; a result whose id is there already is left
    out.

    Args:
        job: Its results are written here, on the driver; mutated.
        path: Of the file that the job's prompts are read from.
        ray: The module, connected to a cluster.
        pool: The actors.
        worker: A callable class for ``map_batches``: takes a batch with lines, gives a batch with
            records.
        argument: What its constructor takes.

    Yields:
        Records that were written.

    Raises:
        ValueError: If an actor fails with an error of its own, the results cannot be written, or
            the prompts' file has changed.
    """
    lines = list(job.unfinished())
    digests = {json.dumps(line.id): line.digest for line in lines}
    dataset = _dataset(lines, path, ray, pool, worker, argument)
    try:
        for batch in dataset.iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=0
        ):
            records = [json.loads(text) for text in batch[RECORD].to_pylist()]
            fresh = [record for record in records if _is_fresh(job, digests, record, path)]
            if fresh:
                job.results.append(fresh)
                yield fresh
    except ray.exceptions.RayError as error:
        raise ValueError(
            f"an actor of the job failed ({reason(error)}); what was finished before is kept, and"
            " the same command goes on from there"
        ) from error


def _is_fresh(job: Job, digests: dict[str, str], record: dict[str, Any], path: Path) -> bool:
    name = json.dumps(record["id"])
    if digests.get(name) != record["prompt_digest"]:
        raise ValueError(
            f"'{path}' has changed while it was read (id {name}); leave it as it is during a job,"
            " and run the command again"
        )
    return name not in job.results.finished


def _dataset(
    lines: list[PromptLine], path: Path, ray: Any, pool: Pool, worker: type, argument: Any
) -> Any:
    """Prompts, then actors; nothing runs yet."""
    import ray.data as ray_data

    from h2okv.engine.ray_prompts import PromptSource

    _quieten(ray_data)
    on_gpu = has_gpus(ray) if pool.on_gpu is None else pool.on_gpu
    actors = pool.actors or count_workers(ray, on_gpu)
    # At least two blocks for each actor, so that all have work to the end.
    rows = max(min(pool.block, -(-len(lines) // (2 * actors))), -(-len(lines) // _MOST_BLOCKS), 1)
    source = PromptSource(path, lines, rows)
    # Reading takes no processor of its own: all of them may belong to the actors.
    prompts = ray_data.read_datasource(source, override_num_blocks=source.num_blocks, num_cpus=0)
    return prompts.map_batches(
        worker,
        fn_constructor_args=(argument,),
        batch_size=rows,
        batch_format="pyarrow",
        compute=ray_data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=_IN_FLIGHT),
        num_cpus=1 if on_gpu else share_cpus(ray, actors),
        num_gpus=1 if on_gpu else 0,
    )


def _quieten(ray_data: Any) -> None:
    """Keeps Ray Data's bars and remarks away from the command's own."""
    context = ray_data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.verbose_progress = False
    # Its log file keeps everything.
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL + 1)
