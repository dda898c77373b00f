"""How many sequences run at once, and where weights and caches go."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from h2okv.engine.memory import MemoryModel
from h2okv.offload.meta_model import MetaModel
from h2okv.offload.profile import HardwareProfile
from h2okv.offload.weight_stream import arena_bytes

PLACES = ("device", "cpu", "disk")
Fractions = dict[str, float]
"""Fractions by place that add up to 1."""


@dataclass(frozen=True)
class Estimate:
    """A job's expected speed."""

    step: dict[str, float]  # seconds of a decode step's parts, which overlap
    prefill_seconds: float  # of one batch's prompts
    first_result_seconds: float  # until the first sequences are finished
    decode_tokens_per_second: float  # of decode steps alone
    tokens_per_second: float  # new tokens over the whole time, prefill included

    @property
    def limit(self) -> str:
        """The longest part of a step, which takes as long as the step."""
        return max(self.step, key=self.step.__getitem__)


@dataclass(frozen=True)
class Placement:
    """Where the units are; of an embedding on the disk only the rows in use are read."""

    units: tuple[str, ...]  # in the order of a forward
    embedding: str

    def counts(self) -> dict[str, int]:
        """Units by place."""
        return {place: self.units.count(place) for place in PLACES if place in self.units}


def parse_placement(option: str, text: str, places: tuple[str, ...]) -> Fractions | None:
    """Parses ``auto`` (``None``), a place, or percentages such as ``device=40,disk=60``."""
    if text == "auto":
        return None
    if text in places:
        return {text: 1.0}
    fractions: Fractions = {}
    for part in text.split(","):
        place, _, number = part.strip().partition("=")
        try:
            percent = float(number.removesuffix("%"))
        except ValueError:
            percent = -1.0
        if place not in places or place in fractions or not 0 <= percent <= 100:
            raise ValueError(
                f"--{option} {text!r} is not a place; give auto, {', '.join(places)}, or"
                f" percentages such as {places[0]}=40,{places[-1]}=60"
            )
        fractions[place] = percent / 100
    if abs(sum(fractions.values()) - 1) > 1e-6:
        raise ValueError(
            f"--{option} {text!r} adds up to {100 * sum(fractions.values()):g} percent; give 100"
        )
    return fractions


def interleave(fractions: Fractions, count: int) -> list[str]:
    """Assigns places evenly, so that reading and computing alternate."""
    assigned = dict.fromkeys(fractions, 0)
    order = []
    for number in range(1, count + 1):
        place = max(fractions, key=lambda own: fractions[own] * number - assigned[own])
        assigned[place] += 1
        order.append(place)
    return order


def place_by_fractions(fractions: Fractions, count: int) -> Placement:
    """Places units by percentages."""
    units = tuple(interleave(fractions, count))
    return Placement(units, units[-1] if units[-1] != "cpu" else "device")


_MAX_BATCH = 1024
_MIN_GAIN = 1.02
"""A larger batch must be so much faster, or the smaller one is chosen."""
_MIN_FILE_GAIN = 1.1
"""Entries go to the file only where that is so much faster; it wears the disk."""
_MICRO_BATCH_TOKENS = 4096
"""Of a prefill; more do not compute faster."""
_MICRO_BATCH_FRACTION = 0.3
"""Of the free memory, for a micro-batch's prefill."""
_WAITING_FRACTION = 0.1
"""Of the free memory, for the hidden states of prompts between two layers."""
_IN_MEMORY = {"device": 1.0}
_IN_FILE = {"file": 1.0}


@dataclass(frozen=True)
class Workload:
    """What a job asks for: its prompts' mean and greatest length in tokens, and their number."""

    mean_prompt: int
    longest_prompt: int
    max_new_tokens: int
    num_prompts: int

    @classmethod
    def of(cls, lengths: list[int], max_new_tokens: int) -> Workload:
        """The workload of prompts of these lengths."""
        mean = -(-sum(lengths) // len(lengths))
        return cls(mean, max(lengths), max_new_tokens, len(lengths))


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that may be allocated."""

    device: int  # for weights, caches and temporaries where the model computes
    host: int = 0  # in the CPU's memory beside that; 0 if the model computes there
    used: int = 0  # what the process has already, for messages about --memory
    spare: int = 0  # by which that may be more in another run, for which an amount is told


@dataclass(frozen=True)
class Plan:
    """A decision, the device memory that it takes, and its expected speed."""

    placement: Placement
    cache_placement: Fractions  # of the layers whose keys and values are in each place
    batch_size: int
    micro_batch_tokens: int  # prompt tokens of a micro-batch's prefill
    pass_tokens: int  # prompt tokens that one weight pass prefills
    cache_bytes: int
    weight_bytes: int  # resident
    buffer_bytes: int  # of the weight stream
    temporary_bytes: int  # of a step or a prefill
    estimate: Estimate

    @property
    def total_bytes(self) -> int:
        """All device memory that it takes."""
        return self.cache_bytes + self.weight_bytes + self.buffer_bytes + self.temporary_bytes

    def to_dict(self) -> dict[str, Any]:
        """By field, ready for JSON."""
        return {**asdict(self), "placement": self.placement.counts()}


@dataclass(frozen=True)
class Planner:
    """Trades batch size against resident weights; what the user leaves open is ``None``."""

    meta: MetaModel
    memory: MemoryModel
    hardware: HardwareProfile
    budget: MemoryBudget
    workload: Workload
    device: torch.device
    batch_size: int | None = None
    weights: Fractions | None = None
    caches: Fractions | None = None

    def plan(self) -> Plan:
        """Finds the fastest plan that fits; if none does, says how much memory would do."""
        sizes = [self.batch_size] if self.batch_size is not None else self._batch_sizes()
        best = self._best(sizes, self.caches or _IN_MEMORY)
        if self.caches is None:
            other = self._best(sizes, _IN_FILE)
            if other is not None and (best is None or _gain(other, best) > _MIN_FILE_GAIN):
                best = other
        if best is None:
            raise self._too_little(sizes[0])
        return best

    def sooner(self, plan: Plan, seconds: float) -> Plan | None:
        """Finds the largest smaller batch whose first results are there in a given time."""
        found = None
        for size in reversed([own for own in self._batch_sizes() if own < plan.batch_size]):
            try:
                found = replace(self, batch_size=size).plan()
            except ValueError:
                continue
            if found.estimate.first_result_seconds <= seconds:
                break
        first = plan.estimate.first_result_seconds
        if found is None or found.estimate.first_result_seconds > first / 2:
            return None
        return found

    def longest_that_fits(self) -> int:
        """Finds the longest prompt that the memory allows, alone."""

        def is_too_long(tokens: int) -> bool:
            alone = Workload(tokens, tokens, self.workload.max_new_tokens, 1)
            return replace(self, workload=alone)._fit(1, self.caches or _IN_FILE) is None

        return bisect_left(range(1, self.workload.longest_prompt + 1), True, key=is_too_long)

    def _best(self, sizes: list[int], caches: Fractions) -> Plan | None:
        best = None
        for size in sizes:
            plan = self._fit(size, caches)
            if plan is not None and (best is None or _gain(plan, best) > _MIN_GAIN):
                best = plan
        return best

    def _batch_sizes(self) -> list[int]:
        """Candidates, about an eighth apart."""
        most = max(1, min(self.workload.num_prompts, _MAX_BATCH))
        found, size = [], 1
        while size < most:
            found.append(size)
            size += max(1, size // 8)
        return [*found, most]

    def _fit(self, batch_size: int, caches: Fractions) -> Plan | None:
        """The plan with the most resident weights that fits; ``None`` if none does."""
        count = len(self.meta.units)

        def plan_with(placement: Placement) -> Plan | None:
            plan = self._plan(batch_size, placement, caches)
            return plan if plan.total_bytes <= self.budget.device else None

        whole = plan_with(place_by_fractions(self.weights or _IN_MEMORY, count))
        if whole is not None or self.weights is not None:
            return whole
        too_many = bisect_left(
            range(count + 1), True, key=lambda resident: plan_with(self._keep(resident)) is None
        )
        return plan_with(self._keep(too_many - 1)) if too_many else None

    def _keep(self, resident: int) -> Placement:
        """Keeps some units on the device, evenly spread, and the others as near as possible."""
        count = len(self.meta.units)
        places = interleave({"device": resident / count, "disk": 1 - resident / count}, count)
        left = self.budget.host if self.device.type != "cpu" else 0
        for index, unit in enumerate(self.meta.units):
            if places[index] == "disk" and unit.nbytes <= left:
                places[index] = "cpu"
                left -= unit.nbytes
        return Placement(tuple(places), "disk")

    def _plan(self, batch_size: int, placement: Placement, caches: Fractions) -> Plan:
        memory, work, meta = self.memory, self.workload, self.meta
        # On a CPU, units in its memory are on the device.
        near = ("device", "cpu") if self.device.type == "cpu" else ("device",)
        placed = list(zip(meta.units, placement.units, strict=True))
        weights = sum(unit.nbytes for unit, place in placed if place in near)
        weights += sum(slot.nbytes for slot in meta.others)
        is_shared = meta.is_tied and placement.units[-1] == "device"
        if placement.embedding != "disk" and not is_shared:
            weights += meta.embedding.nbytes
        buffers = arena_bytes([unit for unit, place in placed if place not in near])
        away = 1 - caches.get("device", 0.0)
        slots = memory.slots_for(work.mean_prompt, work.max_new_tokens)
        most = memory.slots_for(work.longest_prompt, work.max_new_tokens)
        # The longest prompt must fit; most are shorter.
        cache_bytes = max(
            batch_size * memory.sequence_bytes(slots, work.mean_prompt + work.max_new_tokens, away),
            memory.sequence_bytes(most, work.longest_prompt + work.max_new_tokens, away),
        )
        mean = max(batch_size * slots, most) / batch_size
        # What is stored elsewhere is read into one of two workspaces.
        workspaces = int(2 * batch_size * mean * memory.entry_bytes) if away else 0
        fixed = memory.fixed_bytes + workspaces
        free = max(0, self.budget.device - weights - buffers - cache_bytes - fixed)
        micro_batch, tokens = self._prefill_tokens(free, batch_size * work.mean_prompt)
        # While sequences are merged, one tensor of a layer is there twice.
        decode = memory.decode_bytes(batch_size, mean) + batch_size * memory.layer_bytes(mean)
        prefill = memory.prefill_bytes(micro_batch) + memory.waiting_bytes(tokens)
        return Plan(
            placement=placement,
            cache_placement=caches,
            batch_size=batch_size,
            micro_batch_tokens=micro_batch,
            pass_tokens=tokens,
            cache_bytes=cache_bytes,
            weight_bytes=weights,
            buffer_bytes=buffers,
            temporary_bytes=fixed + max(decode, prefill),
            estimate=self._estimate(batch_size, placement, caches, tokens, micro_batch),
        )

    def _prefill_tokens(self, free: int, wanted: int) -> tuple[int, int]:
        """Prompt tokens of a micro-batch, and of a weight pass."""
        memory, longest = self.memory, self.workload.longest_prompt
        at_once = int(free * _MICRO_BATCH_FRACTION) // max(1, memory.prefill_bytes(1))
        micro_batch = max(longest, min(_MICRO_BATCH_TOKENS, at_once, wanted))
        # A long prompt may leave less than its fraction to those that wait.
        left = max(0, min(int(free * _WAITING_FRACTION), free - memory.prefill_bytes(micro_batch)))
        return micro_batch, max(micro_batch, min(left // max(1, memory.waiting_bytes(1)), wanted))

    def _estimate(
        self,
        batch_size: int,
        placement: Placement,
        caches: Fractions,
        pass_tokens: int,
        micro_batch_tokens: int,
    ) -> Estimate:
        """A batch of prompts from their prefill to their last tokens."""
        machine, work, units = self.hardware, self.workload, self.meta.units
        sizes = dict.fromkeys(PLACES, 0)
        for unit, place in zip(units, placement.units, strict=True):
            sizes[place] += unit.nbytes
        on_host = 0 if self.device.type == "cpu" else sizes["cpu"]
        # A disk, like a link, does one thing at a time: the caches come after the weights.
        weights = max(sizes["disk"] / machine.disk, on_host / machine.host_device)
        slots = self.memory.slots_for(work.mean_prompt, work.max_new_tokens)
        moved = batch_size * self.memory.kv_bytes(slots)
        length = work.mean_prompt + work.max_new_tokens
        cache = batch_size * self.memory.sequence_bytes(slots, length) / machine.memory
        if part := caches.get("file"):
            cache = max(cache, (sizes["disk"] + part * moved) / machine.disk)
        if part := caches.get("cpu"):
            cache = max(cache, (on_host + part * moved) / machine.host_device)
        # Multiplications and additions of a token, and the fixed cost of a micro-batch's forward.
        *layers, head = (2 * sum(slot.num_weights for slot in unit.slots) for unit in units)
        overhead = (len(units) - 1) * machine.layer_seconds + machine.forward_seconds
        gemm = batch_size * (sum(layers) + head) / machine.gemm_rate(batch_size)
        compute = max(gemm, sum(sizes.values()) / machine.memory) + overhead
        step = {"weights": weights, "cache": cache, "compute": compute}
        seconds = max(step.values())
        passes = -(-batch_size // max(1, pass_tokens // work.mean_prompt))
        micro_batches = -(-batch_size // max(1, micro_batch_tokens // work.mean_prompt))
        tokens, new = batch_size * work.mean_prompt, work.max_new_tokens
        # Of a prompt only the last token passes the head.
        operations = tokens * sum(layers) + batch_size * head
        compute = operations / machine.gemm_rate(min(tokens, micro_batch_tokens))
        prefill = max(passes * weights, compute + micro_batches * overhead)
        total = prefill + (new - 1) * seconds
        # Each pass gives every running sequence a token, also while other prompts are prefilled.
        first = prefill * min(1.0, new / passes) + max(0, new - passes) * seconds
        return Estimate(
            step=step,
            prefill_seconds=prefill,
            first_result_seconds=first,
            decode_tokens_per_second=batch_size / seconds,
            tokens_per_second=batch_size * new / total,
        )

    def _too_little(self, batch_size: int) -> ValueError:
        least = place_by_fractions(self.weights or {"disk": 1.0}, len(self.meta.units))
        plan = self._plan(batch_size, least, self.caches or _IN_FILE)
        needed = self.budget.used + plan.total_bytes + self.budget.spare
        given = self.budget.used + self.budget.device
        what, remedy = "a batch of one needs", "more"
        if batch_size > 1:
            what, remedy = f"a batch of {batch_size} needs", "a smaller --batch or more memory"
        elif self.weights is None:
            what = "one layer of this model at a time and a batch of one need"
        if self.weights is not None and set(self.weights) != {"disk"}:
            remedy += ", or --weights disk"
        return ValueError(
            f"--memory {_mebibytes(given)} is too little: {what} {_mebibytes(needed)} with prompts"
            f" of {self.workload.longest_prompt} tokens; give {remedy}"
        )


def _gain(plan: Plan, other: Plan) -> float:
    return plan.estimate.tokens_per_second / other.estimate.tokens_per_second


def _mebibytes(num_bytes: int) -> str:
    return f"{-(-num_bytes // 2**20)}MiB"
