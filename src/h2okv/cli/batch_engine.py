"""The engine of a job: the model in memory, or from its files within a promised memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import h2okv
from h2okv.cli.batch_request import BatchRequest
from h2okv.cli.console import StageProgress
from h2okv.cli.streamed_model import (
    OpenModel,
    checkpoint_folder,
    make_planner,
    open_model,
    write_anew,
)
from h2okv.engine.assembly import Assembled, assemble
from h2okv.engine.demand import Demand, demand_of
from h2okv.engine.job import Job
from h2okv.engine.memory import available_bytes, give_memory_back
from h2okv.engine.passing import OneByOne, Passing
from h2okv.engine.placement import spread
from h2okv.engine.planner import Plan, Workload
from h2okv.engine.runner import Limits
from h2okv.engine.tiers import TieredStore
from h2okv.integration.loading import Described, load_weights

_ROWS = 32
_PROMPT_TOKENS = 8192
_LITTLE = 0.5
"""A model whose weights take less of the free memory than this is loaded without more ado."""


@dataclass(frozen=True)
class Engine:
    """A model that can run, and how.

    Attributes:
        model: The model.
        passing: Runs its forwards.
        limits: What is in memory at once.
        most_prompt: Tokens of the longest prompt that the memory allows; None for any.
        plan: Why; None if there was nothing to plan.
        assembled: Where weights come from; None if they are all in memory.
        store: Where caches are between two layers; None if they stay.
    """

    model: PreTrainedModel
    passing: Passing
    limits: Limits
    most_prompt: int | None = None
    plan: Plan | None = None
    assembled: Assembled | None = None
    store: TieredStore | None = None

    def close(self) -> None:
        """Ends reading."""
        if self.assembled is not None:
            self.assembled.close()

    def describe(self) -> dict[str, Any] | None:
        """The plan for machines."""
        if self.plan is None:
            return None
        described = asdict(self.plan)
        places = self.plan.placement.units
        described["placement"] = {place: places.count(place) for place in sorted(set(places))}
        return described


def make_engine(
    request: BatchRequest,
    described: Described,
    job: Job,
    make_cache: Callable[[], h2okv.H2OCache],
) -> Engine:
    """Brings the model to where the user, or the planner, wants it.

    Args:
        request: What the user asked for.
        described: The model.
        job: Its prompts are measured for the plan.
        make_cache: Makes an empty cache.

    Returns:
        The engine.

    Raises:
        ValueError: If something about the weights or the memory is wrong.
    """
    if _is_plain(request, described):
        model = load_weights(described, request.dtype, request.device)
        demand = demand_of(model.config, make_cache(), model.dtype)
        rows = request.rows or _ROWS
        return Engine(
            model,
            OneByOne(),
            Limits(
                rows=rows,
                prompt_tokens=_PROMPT_TOKENS,
                decode_rows=rows,
                cache_bytes=_cache_bytes(request.device),
                bytes_of=_sizes(demand, make_cache()),
            ),
        )
    if request.memory is not None:
        give_memory_back()
    opened = open_model(described, request.dtype, request.device, request.weight_bits)
    return _streamed(request, opened, job, make_cache)


def _streamed(
    request: BatchRequest,
    opened: OpenModel,
    job: Job,
    make_cache: Callable[[], h2okv.H2OCache],
) -> Engine:
    lengths = measure_prompts(job)
    cache = make_cache()
    plan, most = _choose(request, opened, lengths, cache)
    if opened.found is None:
        # Only now: what does not fit was refused before anything is written. And once more: what
        # writing has left in memory counts.
        opened = write_anew(opened, request.converted)
        plan, most = _choose(request, opened, lengths, cache)
    assert opened.found is not None
    store = _store(request, plan, cache)
    assembled = assemble(
        opened.skeleton,
        opened.files,
        opened.found,
        plan.placement,
        request.device,
        store,
        keep_pages=request.keep_pages,
    )
    limits = Limits(
        rows=plan.rows,
        prompt_tokens=plan.lane_tokens,
        decode_rows=plan.rows,
        pass_tokens=plan.pass_tokens,
        cache_bytes=plan.cache_bytes,
        bytes_of=_sizes(opened.demand(cache), cache, 1 - plan.cache_shares.get("device", 0.0)),
    )
    return Engine(opened.skeleton.model, assembled.passing, limits, most, plan, assembled, store)


def _choose(
    request: BatchRequest, opened: OpenModel, lengths: list[int], cache: h2okv.H2OCache
) -> tuple[Plan, int]:
    """The plan, and the tokens of the longest prompt that it has room for."""
    new = request.sampling.max_new_tokens
    planner = make_planner(opened, cache, _workload(lengths, new), request.memory)
    caches = own_memory(request.cache_shares, request.device)
    most = planner.longest_that_fits(request.shares, caches)
    if fitting := [length for length in lengths if length <= most]:
        planner = planner.with_work(_workload(fitting, new))
    # Without any, the planner says what would be needed.
    return planner.choose(request.rows, request.shares, caches), most


def _store(request: BatchRequest, plan: Plan, cache: h2okv.H2OCache) -> TieredStore | None:
    """Where keys and values are; None if they stay where the model computes."""
    places = spread(plan.cache_shares, len(cache.layers))
    if set(places) == {"device"}:
        return None
    folder = request.cache_folder or request.output.resolve().parent
    return TieredStore(places, folder, request.device)


def own_memory(shares: dict[str, float] | None, device: torch.device) -> dict[str, float] | None:
    """Knows that a model on the CPU computes in the CPU's memory.

    Args:
        shares: By place; None for what is best.
        device: Where the model computes.

    Returns:
        The same for a CPU, with ``"cpu"`` counted as ``"device"``.
    """
    if shares is None or device.type != "cpu" or "cpu" not in shares:
        return shares
    rest = {place: share for place, share in shares.items() if place not in ("cpu", "device")}
    return {"device": shares["cpu"] + shares.get("device", 0.0), **rest}


def measure_prompts(job: Job) -> list[int]:
    """Counts the tokens of all prompts that are left, for the plan.

    Args:
        job: The job.

    Returns:
        One number for each prompt that can be served, at least one.
    """
    total = len(job.prompts) - job.num_finished
    lengths = []
    with StageProgress("counting tokens") as progress:
        for index, length in enumerate(job.lengths()):
            lengths.append(length)
            if index % 64 == 0:
                progress.show(index, total)
    return lengths or [1]


def _workload(lengths: list[int], new: int) -> Workload:
    typical = -(-sum(lengths) // len(lengths))
    return Workload(typical=typical, longest=max(lengths), new=new, prompts=len(lengths))


def _is_plain(request: BatchRequest, described: Described) -> bool:
    """Whether all weights simply go into memory."""
    if request.weight_bits is not None or request.cache_shares not in (None, {"device": 1.0}):
        return False
    if request.shares is not None:
        only_device = set(request.shares) <= {"device"}
        return only_device and request.memory is None
    if request.memory is not None:
        return False
    free = available_bytes(request.device)
    return free is None or _weight_bytes(checkpoint_folder(described)) < _LITTLE * free


def _weight_bytes(folder: Path) -> int:
    """Size of a checkpoint's files, in whatever format."""
    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        paths = [folder / name for name in names]
    except (OSError, ValueError, LookupError, AttributeError):
        paths = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return sum(path.stat().st_size for path in paths if path.exists())


def _sizes(demand: Demand, cache: h2okv.H2OCache, away: float = 0.0) -> Callable[[int, int], int]:
    def bytes_of(prompt: int, new: int) -> int:
        slots = demand.slots_of(cache, prompt, new)
        return demand.sequence_bytes(slots, prompt + new, away)

    return bytes_of


def _cache_bytes(device: torch.device) -> int | None:
    free = available_bytes(device)
    return None if free is None else free // 4
