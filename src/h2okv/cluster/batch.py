"""A batch job on a Ray cluster."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from h2okv.cluster.ray_cluster import (
    cluster,
    count_workers,
    has_gpus,
    import_ray,
    reason,
    share_cpus,
)
from h2okv.console import Progress
from h2okv.integration.loading import parse_device
from h2okv.offload.job import (
    Job,
    JobResultFile,
    PromptFile,
    PromptLine,
    PromptList,
    ResultList,
    Summary,
)
from h2okv.offload.offload_engine import (
    BatchRequest,
    OffloadEngine,
    describe_for,
    interrupted,
    job_settings,
    make_codec,
)

if TYPE_CHECKING:
    from ray.data.context import DataContext


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


COLUMN = "line"
"""Of a block: a line of the prompts' file, as bytes."""


class PromptSource(Datasource):
    """Lines of a file, so many to a block, each block read when there is an actor for it.

    What travels with a read task are places in the file, 12 bytes for a prompt; the file itself is
    only opened on the driver's machine.
    """

    def __init__(self, path: Path, lines: Sequence[PromptLine], rows: int) -> None:
        super().__init__()
        self._path = path.resolve()
        self._starts = np.array([line.start for line in lines], dtype=np.int64)
        self._sizes = np.array([line.size for line in lines], dtype=np.int32)
        self._rows = rows

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return -(-len(self._starts) // self._rows)

    @property
    def supports_distributed_reads(self) -> bool:
        """Other machines need not have the file."""
        return False

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of all lines."""
        return int(self._sizes.sum())

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        """Makes a task for each block; its size is ours, whatever Ray Data asks for."""
        tasks = []
        for first in range(0, len(self._starts), self._rows):
            starts = self._starts[first : first + self._rows]
            sizes = self._sizes[first : first + self._rows]
            metadata = BlockMetadata(
                num_rows=len(starts),
                size_bytes=int(sizes.sum()),
                exec_stats=None,
                input_files=None,
            )
            read = _reader(str(self._path), starts, sizes)
            tasks.append(ReadTask(read, metadata, per_task_row_limit=per_task_row_limit))
        return tasks


def _reader(path: str, starts: np.ndarray, sizes: np.ndarray) -> Callable[[], Iterator[Any]]:
    def read() -> Iterator[pyarrow.Table]:
        lines = []
        with open(path, "rb") as file:
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
                file.seek(start)
                lines.append(file.read(size))
        yield pyarrow.table({COLUMN: pyarrow.array(lines, type=pyarrow.binary())})

    return read


_BATCH_SIZE = 32
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
        Interrupted: If Ctrl-C ended it.
    """
    import_ray()
    described = describe_for(request)
    prompts = PromptFile(request.input)
    with JobResultFile(request.output, job_settings(request, described)) as results:
        results.check_prompts(prompts.lines)
        job = Job(prompts, results, make_codec(request, described), request.max_new_tokens)
        summary = Summary(len(prompts), job.num_skipped, results.num_errors)
        if job.num_finished == len(prompts):
            return summary
        try:
            return _run(request, job, summary, device, actors)
        except KeyboardInterrupt:
            raise interrupted(job) from None


def _run(
    request: BatchRequest, job: Job, summary: Summary, device: str, actors: int | None
) -> Summary:
    pool = Pool(
        actors=actors,
        on_gpu=None if device == "auto" else device.startswith("cuda"),
        block=_BATCHES * (request.batch_size or _BATCH_SIZE),
    )
    start = time.perf_counter()
    new_tokens = prompt_tokens = 0
    bar = Progress("batch", summary.prompts, "prompts")
    # Ray tells stdout at length of every actor that dies, which is the command's own place; its
    # log files have that too.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), cluster() as ray, bar:
        written = run_on_pool(job, request.input, ray, pool, Worker, (request, device))
        for records in written:
            new_tokens += sum(record.get("new_tokens", 0) for record in records)
            prompt_tokens += sum(record.get("prompt_tokens", 0) for record in records)
            speed = new_tokens / max(time.perf_counter() - start, 1e-9)
            bar.update(job.num_finished, note=f"{speed:,.1f} tokens/s")
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
            request, device=parse_device(device), weight_placement={"device": 1.0}
        )
        described = describe_for(request)
        self._codec = make_codec(request, described)
        self._engine = OffloadEngine.open(request, described, self._job([], ResultList()))

    def __call__(self, batch: Any) -> Any:
        """Generates for a block of prompts.

        Args:
            batch: A table with the lines of the prompts' file.

        Returns:
            A table with the records.
        """
        import pyarrow

        results = ResultList()
        job = self._job(batch[COLUMN].to_pylist(), results)
        for _ in self._engine.generate(job, self._engine.make_runner()):
            pass
        # As JSON in ASCII: ids are texts or numbers, and half a pair of surrogates is no text.
        return pyarrow.table({RECORD: [json.dumps(record) for record in results.records]})

    def _job(self, lines: list[bytes], results: ResultList) -> Job:
        return Job(PromptList(lines), results, self._codec, self._request.max_new_tokens)
