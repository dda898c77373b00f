"""Plan how many sequences run at once, and where weights are stored."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

import torch

from h2okv.engine.memory import MemoryModel
from h2okv.offload.meta_model import MetaModel
from h2okv.offload.profile import HardwareProfile
from h2okv.offload.tiers import arena_bytes

WEIGHT_TIERS = ("device", "cpu", "disk")
Fractions = dict[str, float]  # by tier; they add up to 1
MICRO_BATCH_TOKENS = 2048  # of a prefill; more do not compute faster
Placement = tuple[str, ...]
"""Tiers of the units in the order of a forward, then of the embedding; of one on the disk, only the
rows in use are read."""


@dataclass(frozen=True)
class Estimate:
    """A job's expected speed."""

    step: dict[str, float]  # seconds of a decode step's activities, which overlap
    prefill_seconds: float  # of one batch's prompts
    first_result_seconds: float  # until the first sequences are finished
    decode_tokens_per_second: float  # of decode steps alone
    tokens_per_second: float  # new tokens over the total time, prefill included

    @property
    def limit(self) -> str:
        """The longest activity of a step, a lower bound of its time."""
        return max(self.step, key=self.step.__getitem__)


def interleave(fractions: Fractions, count: int) -> list[str]:
    """Spread tiers evenly over the units, to make reading and computing alternate."""
    assigned = dict.fromkeys(fractions, 0)
    order = []
    for number in range(1, count + 1):
        tier = max(fractions, key=lambda name: fractions[name] * number - assigned[name])
        assigned[tier] += 1
        order.append(tier)
    return order


def place_by_fractions(fractions: Fractions, count: int) -> Placement:
    """Assign tiers to units by percentages, and the head's tier to the embedding."""
    units = interleave(fractions, count)
    return (*units, units[-1] if units[-1] != "cpu" else "device")


_MAX_BATCH = 1024
_MIN_GAIN = 1.02  # a larger batch is chosen only if it is faster by this factor
_MICRO_BATCH_FRACTION = 0.3  # of the free memory, for a micro-batch's prefill
_WAITING_FRACTION = 0.1  # of the free memory, for the hidden states of prompts between two layers
_IN_MEMORY = {"device": 1.0}


@dataclass(frozen=True)
class Workload:
    """A job's load: its prompts' mean and greatest length in tokens, and their number."""

    mean_prompt: int
    longest_prompt: int
    max_new_tokens: int
    num_prompts: int

    @classmethod
    def of(cls, lengths: list[int], max_new_tokens: int) -> Workload:
        mean = -(-sum(lengths) // len(lengths))
        return cls(mean, max(lengths), max_new_tokens, len(lengths))


@dataclass(frozen=True)
class Plan:
    """Placement and batch size, the device memory that they take, and their expected speed."""

    placement: Placement
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
        return self.cache_bytes + self.weight_bytes + self.buffer_bytes + self.temporary_bytes

    @property
    def counts(self) -> dict[str, int]:
        units = self.placement[:-1]
        return {tier: units.count(tier) for tier in WEIGHT_TIERS if tier in units}

    def gain(self, other: Plan) -> float:
        return self.estimate.tokens_per_second / other.estimate.tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "placement": self.counts}


@dataclass(frozen=True)
class Planner:
    """Trades batch size against resident weights; ``None`` leaves a choice to the planner."""

    meta: MetaModel
    memory: MemoryModel
    hardware: HardwareProfile
    room: int  # bytes for weights, caches and temporaries where the model computes
    workload: Workload
    device: torch.device
    host_room: int = 0  # further bytes in the CPU's memory; 0 if the model computes there
    used: int = 0  # bytes that the process already has, for messages about --memory
    spare: int = 0  # margin for variation of `used` between runs, in suggested amounts
    batch_size: int | None = None
    weights: Fractions | None = None

    def plan(self) -> Plan:
        """Find the fastest plan that fits; raise ValueError with the memory needed if none does."""
        sizes = [self.batch_size] if self.batch_size is not None else self._batch_sizes()
        best = None
        for size in sizes:
            plan = self._fit(size)
            if plan is not None and (best is None or plan.gain(best) > _MIN_GAIN):
                best = plan
        if best is None:
            raise self._too_little(sizes[0])
        return best

    def cache_limit(self, plan: Plan) -> int:
        """Return the bytes that the caches of a planned batch may take.

        Sequences that are decoded together have as many slots each as the longest needs. A plan
        counts with the mean; half of the memory that it leaves may be used for longer ones.
        """
        longest, new = self.workload.longest_prompt, self.workload.max_new_tokens
        sequence_bytes = self.memory.sequence_bytes(self._slots(longest), longest + new)
        limit = plan.cache_bytes + max(0, self.room - plan.total_bytes) // 2
        return max(plan.cache_bytes, min(plan.batch_size * sequence_bytes, limit))

    def is_ample(self, plan: Plan) -> bool:
        """Return whether the C library may keep freed memory, at most as much again."""
        caches = self.cache_limit(plan) - plan.cache_bytes
        return self.room >= plan.total_bytes + caches + plan.temporary_bytes

    def longest_that_fits(self) -> int:
        """Return the length of the longest prompt that fits into the memory alone."""

        def is_too_long(tokens: int) -> bool:
            alone = Workload(tokens, tokens, self.workload.max_new_tokens, 1)
            return replace(self, workload=alone)._fit(1) is None

        return bisect_left(range(1, self.workload.longest_prompt + 1), True, key=is_too_long)

    def _batch_sizes(self) -> list[int]:
        largest = max(1, min(self.workload.num_prompts, _MAX_BATCH))
        sizes, size = [], 1
        while size < largest:
            sizes.append(size)
            size += max(1, size // 8)
        return [*sizes, largest]

    def _fit(self, batch_size: int) -> Plan | None:
        """Return the plan with the most resident weights that fits, or ``None``."""
        count = len(self.meta.units)

        def plan_with(placement: Placement) -> Plan | None:
            plan = self._plan(batch_size, placement)
            return plan if plan.total_bytes <= self.room else None

        everything = plan_with(place_by_fractions(self.weights or _IN_MEMORY, count))
        if everything is not None or self.weights is not None:
            return everything
        too_many = bisect_left(
            range(count + 1), True, key=lambda resident: plan_with(self._keep(resident)) is None
        )
        return plan_with(self._keep(too_many - 1)) if too_many else None

    def _keep(self, resident: int) -> Placement:
        """Keep units on the device, evenly spread, and the others in the fastest tier with room."""
        count = len(self.meta.units)
        placement = interleave({"device": resident / count, "disk": 1 - resident / count}, count)
        left = self.host_room if self.device.type != "cpu" else 0
        for index, unit in enumerate(self.meta.units):
            if placement[index] == "disk" and unit.nbytes <= left:
                placement[index] = "cpu"
                left -= unit.nbytes
        return (*placement, "disk")

    def _plan(self, batch_size: int, placement: Placement) -> Plan:
        memory, work, meta = self.memory, self.workload, self.meta
        # On a CPU, units in its memory are on the device.
        near = ("device", "cpu") if self.device.type == "cpu" else ("device",)
        placed = list(zip(meta.units, placement[:-1], strict=True))
        weights = sum(unit.nbytes for unit, tier in placed if tier in near)
        weights += sum(slot.nbytes for slot in meta.others)
        is_shared = meta.is_tied and placement[-2] == "device"
        if placement[-1] != "disk" and not is_shared:
            weights += meta.embedding.nbytes
        buffers = arena_bytes([unit for unit, tier in placed if tier not in near])
        slots, longest_slots = self._slots(work.mean_prompt), self._slots(work.longest_prompt)
        new = work.max_new_tokens
        # The longest prompt must fit as well.
        cache_bytes = max(
            batch_size * memory.sequence_bytes(slots, work.mean_prompt + new),
            memory.sequence_bytes(longest_slots, work.longest_prompt + new),
        )
        mean = max(batch_size * slots, longest_slots) / batch_size
        fixed = memory.fixed_bytes
        free = max(0, self.room - weights - buffers - cache_bytes - fixed)
        # Prompt tokens of a micro-batch, and of a weight pass.
        prompt_tokens, at_once = batch_size * work.mean_prompt, int(free * _MICRO_BATCH_FRACTION)
        at_once //= max(1, memory.prefill_bytes(1))
        micro_batch = max(work.longest_prompt, min(MICRO_BATCH_TOKENS, at_once, prompt_tokens))
        # A long prompt may leave less than its fraction to waiting prompts.
        left = max(0, min(int(free * _WAITING_FRACTION), free - memory.prefill_bytes(micro_batch)))
        tokens = max(micro_batch, min(left // max(1, memory.waiting_bytes(1)), prompt_tokens))
        # While sequences are merged, one tensor of a layer exists twice.
        decode = memory.decode_bytes(batch_size, mean) + batch_size * memory.layer_bytes(mean)
        prefill = memory.prefill_bytes(micro_batch) + memory.waiting_bytes(tokens)
        return Plan(
            placement=placement,
            batch_size=batch_size,
            micro_batch_tokens=micro_batch,
            pass_tokens=tokens,
            cache_bytes=cache_bytes,
            weight_bytes=weights,
            buffer_bytes=buffers,
            temporary_bytes=fixed + max(decode, prefill),
            estimate=self._estimate(batch_size, placement, tokens, micro_batch),
        )

    def _slots(self, prompt: int) -> int:
        return self.memory.cache.slots_for(prompt, self.workload.max_new_tokens)

    def _estimate(
        self,
        batch_size: int,
        placement: Placement,
        pass_tokens: int,
        micro_batch_tokens: int,
    ) -> Estimate:
        machine, units = self.hardware, self.meta.units
        prompt, new = self.workload.mean_prompt, self.workload.max_new_tokens
        sizes = dict.fromkeys(WEIGHT_TIERS, 0)
        for unit, tier in zip(units, placement[:-1], strict=True):
            sizes[tier] += unit.nbytes
        on_host = 0 if self.device.type == "cpu" else sizes["cpu"]
        weights = max(sizes["disk"] / machine.disk, on_host / machine.host_device)
        slots = self._slots(prompt)
        cache = batch_size * self.memory.sequence_bytes(slots, prompt + new) / machine.memory
        # Operations of a token, and the fixed cost of a micro-batch's forward.
        operations = [2 * sum(slot.num_weights for slot in unit.slots) for unit in units]
        num_layers = len(units) - 1
        overhead = num_layers * machine.layer_seconds + machine.forward_seconds
        gemm = batch_size * sum(operations) / machine.gemm_rate(batch_size)
        attention = num_layers * batch_size * slots * machine.entry_seconds
        compute = max(gemm, sum(sizes.values()) / machine.memory) + attention + overhead
        step = {"weights": weights, "cache": cache, "compute": compute}
        seconds = max(step.values())
        passes = -(-batch_size // max(1, pass_tokens // prompt))
        compute = self._prefill_compute(batch_size, operations, overhead, micro_batch_tokens)
        prefill = max(passes * weights, compute)
        batches = max(1.0, self.workload.num_prompts / batch_size)
        # A partial last batch takes as many steps.
        job_seconds = batches * prefill + ceil(batches) * (new - 1) * seconds
        return Estimate(
            step=step,
            prefill_seconds=prefill,
            # Each pass gives every running sequence a token, also while others are prefilled.
            first_result_seconds=prefill * min(1.0, new / passes) + max(0, new - passes) * seconds,
            decode_tokens_per_second=batch_size / seconds,
            tokens_per_second=batches * batch_size * new / job_seconds,
        )

    def _prefill_compute(
        self, batch_size: int, operations: list[int], overhead: float, micro_batch_tokens: int
    ) -> float:
        """Return the seconds that computing takes, by each unit's operations a token."""
        prompt, (*layers, head) = self.workload.mean_prompt, operations
        micro_batches = -(-batch_size // max(1, micro_batch_tokens // prompt))
        # Only the last token of a prompt passes the head.
        total = batch_size * (prompt * sum(layers) + head)
        compute = total / self.hardware.gemm_rate(min(batch_size * prompt, micro_batch_tokens))
        compute += len(layers) * batch_size * prompt * self.hardware.token_seconds
        return compute + micro_batches * overhead

    def _too_little(self, batch_size: int) -> ValueError:
        lightest = place_by_fractions(self.weights or {"disk": 1.0}, len(self.meta.units))
        plan = self._plan(batch_size, lightest)
        needed = self.used + plan.total_bytes + self.spare
        available = self.used + self.room
        subject, remedy = "a batch of one needs", "more"
        if batch_size > 1:
            subject, remedy = f"a batch of {batch_size} needs", "a smaller --batch or more memory"
        elif self.weights is None:
            subject = "one layer of this model at a time and a batch of one need"
        if self.weights is not None and set(self.weights) != {"disk"}:
            remedy += ", or --weights disk"
        amounts = (available, needed)
        available_text, needed_text = (f"{-(-amount // 2**20)}MiB" for amount in amounts)
        return ValueError(
            f"--memory {available_text} is too little: {subject} {needed_text} with prompts of"
            f" {self.workload.longest_prompt} tokens; give {remedy}"
        )
