"""How many sequences run at once, and where weights and caches go."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

import torch

from h2okv.engine.memory import MemoryModel
from h2okv.offload.meta_model import MetaModel
from h2okv.offload.placement import PLACES, Fractions
from h2okv.offload.profile import HardwareProfile
from h2okv.offload.tiers import arena_bytes

MICRO_BATCH_TOKENS = 2048  # of a prefill; more do not compute faster
Places = tuple[str, ...]
"""Of the units in the order of a forward, and of the embedding: on the disk, only the rows in use
are read of it."""


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
        """The longest part of a step, which takes at least as long."""
        return max(self.step, key=self.step.__getitem__)


def interleave(fractions: Fractions, count: int) -> list[str]:
    """Assigns places evenly, so that reading and computing alternate."""
    assigned = dict.fromkeys(fractions, 0)
    order = []
    for number in range(1, count + 1):
        place = max(fractions, key=lambda own: fractions[own] * number - assigned[own])
        assigned[place] += 1
        order.append(place)
    return order


def place_by_fractions(fractions: Fractions, count: int) -> Places:
    """Places units by percentages, and the embedding where the head is."""
    units = interleave(fractions, count)
    return (*units, units[-1] if units[-1] != "cpu" else "device")


_MAX_BATCH = 1024
_MIN_GAIN = 1.02  # a larger batch must be so much faster, or the smaller one is chosen
_MIN_FILE_GAIN = 1.1  # entries go to the file only where that is so much faster; it wears the disk
_MICRO_BATCH_FRACTION = 0.3  # of the free memory, for a micro-batch's prefill
_WAITING_FRACTION = 0.1  # of the free memory, for the hidden states of prompts between two layers
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
        mean = -(-sum(lengths) // len(lengths))
        return cls(mean, max(lengths), max_new_tokens, len(lengths))


@dataclass(frozen=True)
class Plan:
    """A decision, the device memory that it takes, and its expected speed."""

    placement: Places
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
        return self.cache_bytes + self.weight_bytes + self.buffer_bytes + self.temporary_bytes

    @property
    def counts(self) -> dict[str, int]:
        units = self.placement[:-1]
        return {place: units.count(place) for place in PLACES if place in units}

    def gain(self, other: Plan) -> float:
        return self.estimate.tokens_per_second / other.estimate.tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "placement": self.counts}


@dataclass(frozen=True)
class Planner:
    """Trades batch size against resident weights; what the user leaves open is ``None``."""

    meta: MetaModel
    memory: MemoryModel
    hardware: HardwareProfile
    room: int  # bytes for weights, caches and temporaries where the model computes
    workload: Workload
    device: torch.device
    host_room: int = 0  # in the CPU's memory beside that; 0 if the model computes there
    used: int = 0  # what the process has already, for messages about --memory
    spare: int = 0  # by which that may be more in another run, for which an amount is told
    batch_size: int | None = None
    weights: Fractions | None = None
    caches: Fractions | None = None

    def plan(self) -> Plan:
        """Finds the fastest plan that fits; if none does, says how much memory would do."""
        sizes = [self.batch_size] if self.batch_size is not None else self._batch_sizes()
        best = self._best(sizes, self.caches or _IN_MEMORY)
        other = self._best(sizes, _IN_FILE) if self.caches is None else None
        if other is not None and (best is None or other.gain(best) > _MIN_FILE_GAIN):
            best = other
        if best is None:
            raise self._too_little(sizes[0])
        return best

    def sooner(self, plan: Plan, seconds: float) -> Plan | None:
        """Finds the largest smaller batch whose first results are there in a given time."""
        found, first = None, plan.estimate.first_result_seconds
        for size in reversed([own for own in self._batch_sizes() if own < plan.batch_size]):
            with suppress(ValueError):
                found = replace(self, batch_size=size).plan()
                if found.estimate.first_result_seconds <= seconds:
                    break
        is_sooner = found is not None and found.estimate.first_result_seconds <= first / 2
        return found if is_sooner else None

    def cache_limit(self, plan: Plan) -> int:
        """What the caches of a planned batch may take.

        Sequences that are decoded together have as many slots each as the longest needs. A plan
        counts with the mean; of the room that it leaves, half may make up for the rest.
        """
        longest, new = self.workload.longest_prompt, self.workload.max_new_tokens
        away = 1 - plan.cache_placement.get("device", 0.0)
        one = self.memory.sequence_bytes(self._slots(longest), longest + new, away)
        spare = max(0, self.room - plan.total_bytes) // 2
        return max(plan.cache_bytes, min(plan.batch_size * one, plan.cache_bytes + spare))

    def is_ample(self, plan: Plan) -> bool:
        """Whether the C library may keep what a plan gives back, at most as much again."""
        caches = self.cache_limit(plan) - plan.cache_bytes
        return self.room >= plan.total_bytes + caches + plan.temporary_bytes

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
            if plan is not None and (best is None or plan.gain(best) > _MIN_GAIN):
                best = plan
        return best

    def _batch_sizes(self) -> list[int]:
        most = max(1, min(self.workload.num_prompts, _MAX_BATCH))
        found, size = [], 1
        while size < most:
            found.append(size)
            size += max(1, size // 8)
        return [*found, most]

    def _fit(self, batch_size: int, caches: Fractions) -> Plan | None:
        """The plan with the most resident weights that fits; ``None`` if none does."""
        count = len(self.meta.units)

        def plan_with(placement: Places) -> Plan | None:
            plan = self._plan(batch_size, placement, caches)
            return plan if plan.total_bytes <= self.room else None

        whole = plan_with(place_by_fractions(self.weights or _IN_MEMORY, count))
        if whole is not None or self.weights is not None:
            return whole
        too_many = bisect_left(
            range(count + 1), True, key=lambda resident: plan_with(self._keep(resident)) is None
        )
        return plan_with(self._keep(too_many - 1)) if too_many else None

    def _keep(self, resident: int) -> Places:
        """Keeps some units on the device, evenly spread, and the others as near as possible."""
        count = len(self.meta.units)
        places = interleave({"device": resident / count, "disk": 1 - resident / count}, count)
        left = self.host_room if self.device.type != "cpu" else 0
        for index, unit in enumerate(self.meta.units):
            if places[index] == "disk" and unit.nbytes <= left:
                places[index] = "cpu"
                left -= unit.nbytes
        return (*places, "disk")

    def _plan(self, batch_size: int, placement: Places, caches: Fractions) -> Plan:
        memory, work, meta = self.memory, self.workload, self.meta
        # On a CPU, units in its memory are on the device.
        near = ("device", "cpu") if self.device.type == "cpu" else ("device",)
        placed = list(zip(meta.units, placement[:-1], strict=True))
        weights = sum(unit.nbytes for unit, place in placed if place in near)
        weights += sum(slot.nbytes for slot in meta.others)
        is_shared = meta.is_tied and placement[-2] == "device"
        if placement[-1] != "disk" and not is_shared:
            weights += meta.embedding.nbytes
        buffers = arena_bytes([unit for unit, place in placed if place not in near])
        away = 1 - caches.get("device", 0.0)
        slots, most = self._slots(work.mean_prompt), self._slots(work.longest_prompt)
        new = work.max_new_tokens
        # The longest prompt must fit; most are shorter.
        cache_bytes = max(
            batch_size * memory.sequence_bytes(slots, work.mean_prompt + new, away),
            memory.sequence_bytes(most, work.longest_prompt + new, away),
        )
        mean = max(batch_size * slots, most) / batch_size
        # What is stored elsewhere is read into one of two workspaces.
        workspaces = int(2 * batch_size * mean * memory.entry_bytes) if away else 0
        fixed = memory.fixed_bytes + workspaces
        free = max(0, self.room - weights - buffers - cache_bytes - fixed)
        # Prompt tokens of a micro-batch, and of a weight pass.
        wanted, at_once = batch_size * work.mean_prompt, int(free * _MICRO_BATCH_FRACTION)
        at_once //= max(1, memory.prefill_bytes(1))
        micro_batch = max(work.longest_prompt, min(MICRO_BATCH_TOKENS, at_once, wanted))
        # A long prompt may leave less than its fraction to those that wait.
        left = max(0, min(int(free * _WAITING_FRACTION), free - memory.prefill_bytes(micro_batch)))
        tokens = max(micro_batch, min(left // max(1, memory.waiting_bytes(1)), wanted))
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

    def _slots(self, prompt: int) -> int:
        return self.memory.cache.slots_for(prompt, self.workload.max_new_tokens)

    def _estimate(
        self,
        batch_size: int,
        placement: Places,
        caches: Fractions,
        pass_tokens: int,
        micro_batch_tokens: int,
    ) -> Estimate:
        machine, units = self.hardware, self.meta.units
        prompt, new = self.workload.mean_prompt, self.workload.max_new_tokens
        sizes = dict.fromkeys(PLACES, 0)
        for unit, place in zip(units, placement[:-1], strict=True):
            sizes[place] += unit.nbytes
        # A disk, like a link, does one thing at a time: the caches come after the weights. On a
        # CPU its reading and the computing slow each other.
        on_cpu = self.device.type == "cpu"
        on_host = 0 if on_cpu else sizes["cpu"]
        roads = {"file": (sizes["disk"], machine.disk), "cpu": (on_host, machine.host_device)}
        weights = max(held / speed for held, speed in roads.values())
        slots = self._slots(prompt)
        moved = batch_size * self.memory.kv_bytes(slots)
        cache = batch_size * self.memory.sequence_bytes(slots, prompt + new) / machine.memory
        for place, (held, speed) in roads.items():
            if part := caches.get(place):
                cache = max(cache, (held + part * moved) / speed)
        # Multiplications and additions of a token, and the fixed cost of a micro-batch's forward.
        *layers, head = (2 * sum(slot.num_weights for slot in unit.slots) for unit in units)
        overhead = len(layers) * machine.layer_seconds + machine.forward_seconds
        gemm = batch_size * (sum(layers) + head) / machine.gemm_rate(batch_size)
        attention = len(layers) * batch_size * slots * machine.entry_seconds
        compute = max(gemm, sum(sizes.values()) / machine.memory) + attention + overhead
        step = {"weights": weights, "cache": cache, "compute": compute}
        # On a CPU the thread that computes copies the caches too, out of the file's pages.
        copying = caches.get("file", 0.0) * moved / machine.disk if on_cpu else 0.0
        step["compute"] += copying
        together = machine.slowdown.together
        from_disk = (sizes["disk"] + caches.get("file", 0.0) * moved) / machine.disk
        seconds = max(together(from_disk, step["compute"]), *step.values())
        passes = -(-batch_size // max(1, pass_tokens // prompt))
        micro_batches = -(-batch_size // max(1, micro_batch_tokens // prompt))
        # Of a prompt only the last token passes the head.
        operations = batch_size * (prompt * sum(layers) + head)
        compute = operations / machine.gemm_rate(min(batch_size * prompt, micro_batch_tokens))
        compute += len(layers) * batch_size * prompt * machine.token_seconds
        prefill = together(passes * weights, compute + micro_batches * overhead)
        batches = max(1.0, self.workload.num_prompts / batch_size)
        return Estimate(
            step=step,
            prefill_seconds=prefill,
            # Each pass gives every running sequence a token, also while others are prefilled.
            first_result_seconds=prefill * min(1.0, new / passes) + max(0, new - passes) * seconds,
            decode_tokens_per_second=batch_size / seconds,
            # A last batch that is not full takes as many steps.
            tokens_per_second=batches
            * batch_size
            * new
            / (batches * prefill + ceil(batches) * (new - 1) * seconds),
        )

    def _too_little(self, batch_size: int) -> ValueError:
        least = place_by_fractions(self.weights or {"disk": 1.0}, len(self.meta.units))
        plan = self._plan(batch_size, least, self.caches or _IN_FILE)
        needed = self.used + plan.total_bytes + self.spare
        given = self.used + self.room
        what, remedy = "a batch of one needs", "more"
        if batch_size > 1:
            what, remedy = f"a batch of {batch_size} needs", "a smaller --batch or more memory"
        elif self.weights is None:
            what = "one layer of this model at a time and a batch of one need"
        if self.weights is not None and set(self.weights) != {"disk"}:
            remedy += ", or --weights disk"
        told, enough = (f"{-(-amount // 2**20)}MiB" for amount in (given, needed))
        return ValueError(
            f"--memory {told} is too little: {what} {enough} with prompts of"
            f" {self.workload.longest_prompt} tokens; give {remedy}"
        )
