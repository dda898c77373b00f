"""How many sequences run at once, and where weights and caches go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from h2okv.engine.memory import MemoryModel
from h2okv.offload.meta_model import MetaModel
from h2okv.offload.profile import HardwareProfile
from h2okv.offload.weight_stream import arena_bytes

Place = Literal["device", "cpu", "disk"]
PLACES: tuple[Place, ...] = get_args(Place)
Fractions = dict[str, float]
"""Fractions by place that add up to 1."""


@dataclass(frozen=True)
class Traffic:
    """What a weight pass moves and computes.

    Attributes:
        disk_bytes: Weights read from the disk.
        host_bytes: Weights copied from the CPU's memory to the device.
        memory_bytes: Weights read from the device's memory: all of them.
        num_weights: Weights that each token is multiplied with.
        cache_bytes: Of one sequence, read from the device's memory by each step.
        host_cache_bytes: Of one sequence, copied from the CPU's memory by each step.
        file_cache_bytes: Of one sequence, read from the file by each step.
        num_layers: Forwards through a layer that each micro-batch takes.
    """

    disk_bytes: int
    host_bytes: int
    memory_bytes: int
    num_weights: int
    cache_bytes: int
    host_cache_bytes: int = 0
    file_cache_bytes: int = 0
    num_layers: int = 0


@dataclass(frozen=True)
class StepTime:
    """Seconds of a decode step's parts, which overlap: the longest is the step's."""

    weights: float
    cache: float
    compute: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max(self.weights, self.cache, self.compute)

    @property
    def limit(self) -> str:
        """The longest part."""
        parts = {"weights": self.weights, "cache": self.cache, "compute": self.compute}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Estimate:
    """A job's expected speed.

    Attributes:
        step: A decode step.
        prefill_seconds: Of one batch's prompts.
        first_result_seconds: Until the first sequences are finished.
        decode_tokens_per_second: Of decode steps alone.
        tokens_per_second: New tokens over the whole time, prefill included.
    """

    step: StepTime
    prefill_seconds: float
    first_result_seconds: float
    decode_tokens_per_second: float
    tokens_per_second: float


@dataclass(frozen=True)
class CostModel:
    """Seconds from bytes, operations and what the machine can do."""

    hardware: HardwareProfile

    def step(self, traffic: Traffic, batch_size: int) -> StepTime:
        """A decode step of a batch in one micro-batch."""
        own = self.hardware
        weights = self._weights(traffic)
        cache = batch_size * traffic.cache_bytes / own.memory
        # A disk, like a link, does one thing at a time: the caches come after the weights.
        if size := traffic.file_cache_bytes:
            cache = max(cache, (traffic.disk_bytes + batch_size * size) / own.disk)
        if size := traffic.host_cache_bytes:
            cache = max(cache, (traffic.host_bytes + batch_size * size) / own.host_device)
        gemm = batch_size * 2 * traffic.num_weights / own.gemm_rate(batch_size)
        compute = max(gemm, traffic.memory_bytes / own.memory) + self._overhead(traffic)
        return StepTime(weights, cache, compute)

    def estimate(
        self,
        traffic: Traffic,
        batch_size: int,
        prompt: int,
        max_new_tokens: int,
        prompts_per_pass: int,
        prompts_per_micro_batch: int,
    ) -> Estimate:
        """A batch of prompts from their prefill to their last tokens."""
        step = self.step(traffic, batch_size)
        passes = -(-batch_size // max(1, prompts_per_pass))
        micro_batches = -(-batch_size // max(1, prompts_per_micro_batch))
        rate = self.hardware.gemm_rate(prompt)
        compute = batch_size * prompt * 2 * traffic.num_weights / rate
        compute += micro_batches * self._overhead(traffic)
        prefill = max(passes * self._weights(traffic), compute)
        total = prefill + max(0, max_new_tokens - 1) * step.seconds
        # Each pass gives every running sequence a token, also while other prompts are prefilled.
        first = prefill * min(1.0, max_new_tokens / passes)
        first += max(0, max_new_tokens - passes) * step.seconds
        return Estimate(
            step=step,
            prefill_seconds=prefill,
            first_result_seconds=first,
            decode_tokens_per_second=batch_size / step.seconds if step.seconds else 0.0,
            tokens_per_second=batch_size * max_new_tokens / total if total else 0.0,
        )

    def _weights(self, traffic: Traffic) -> float:
        own = self.hardware
        return max(traffic.disk_bytes / own.disk, traffic.host_bytes / own.host_device)

    def _overhead(self, traffic: Traffic) -> float:
        """Fixed cost of a micro-batch's forward."""
        own = self.hardware
        return traffic.num_layers * own.layer_seconds + own.forward_seconds


@dataclass(frozen=True)
class Placement:
    """Where weights are: ``units`` in the order of a forward; of an embedding on the ``"disk"``
    only the rows in use are read.
    """  # noqa: D205

    units: tuple[Place, ...]
    embedding: Place

    def indices(self, place: Place) -> list[int]:
        """The units at a place."""
        return [index for index, own in enumerate(self.units) if own == place]

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
                f"--{option} {text!r} is no place; give auto, {', '.join(places)}, or percentages"
                f" such as {places[0]}=40,{places[-1]}=60"
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
    names = interleave(fractions, count)
    units = tuple(next(place for place in PLACES if place == name) for name in names)
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
    """Bytes that may be allocated.

    Attributes:
        device: For weights, caches and temporaries where the model computes.
        host: In the CPU's memory beside that; 0 if the model computes there.
        used: What the process has already, for messages about ``--memory``.
    """

    device: int
    host: int = 0
    used: int = 0


@dataclass(frozen=True)
class Plan:
    """A decision, the device memory that it takes, and its expected speed.

    Attributes:
        placement: Where weights are.
        cache_placement: Where keys and values are, in fractions of the layers.
        batch_size: Running sequences.
        micro_batch_tokens: Prompt tokens of a micro-batch's prefill.
        pass_tokens: Prompt tokens that one weight pass prefills.
        cache_bytes: All caches.
        weight_bytes: Resident weights.
        buffer_bytes: The two stream buffers.
        temporary_bytes: Temporaries of a step or a prefill.
        estimate: Its speed.
    """

    placement: Placement
    cache_placement: Fractions
    batch_size: int
    micro_batch_tokens: int
    pass_tokens: int
    cache_bytes: int
    weight_bytes: int
    buffer_bytes: int
    temporary_bytes: int
    estimate: Estimate

    @property
    def total_bytes(self) -> int:
        """All device memory that it takes."""
        return self.cache_bytes + self.weight_bytes + self.buffer_bytes + self.temporary_bytes


@dataclass(frozen=True)
class Planner:
    """Trades batch size against resident weights.

    Attributes:
        meta: The model.
        memory: Bytes of its entries and temporaries.
        hardware: What the machine can do.
        budget: Memory that may be allocated.
        workload: The job.
        device: Where the model computes.
        batch_size: Given by the user; ``None`` for the best.
        weights: Placement of weights given by the user; ``None`` for the best.
        caches: Placement of keys and values given by the user; ``None`` for the best.
    """

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
        """Finds the fastest plan that fits.

        Raises:
            ValueError: If none fits; it says how much memory would do.
        """
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
        low, high = 0, self.workload.longest_prompt
        while low < high:
            tokens = (low + high + 1) // 2
            alone = Workload(tokens, tokens, self.workload.max_new_tokens, 1)
            if replace(self, workload=alone)._fit(1, self.caches or _IN_FILE) is None:
                high = tokens - 1
            else:
                low = tokens
        return low

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
        whole = self._plan(
            batch_size, place_by_fractions(self.weights or _IN_MEMORY, count), caches
        )
        if whole.total_bytes <= self.budget.device:
            return whole
        if self.weights is not None:
            return None
        # From as many resident layers as fit beside the two buffers, down.
        low, high, best = 0, count, None
        while low <= high:
            resident = (low + high) // 2
            plan = self._plan(batch_size, self._keep(resident), caches)
            if plan.total_bytes <= self.budget.device:
                best, low = plan, resident + 1
            else:
                high = resident - 1
        return best

    def _keep(self, resident: int) -> Placement:
        """Keeps some units on the device, evenly spread, and the others as near as possible."""
        count = len(self.meta.units)
        order = ["away"] * count
        if resident:
            order = interleave({"device": resident / count, "away": 1 - resident / count}, count)
        left = self.budget.host if self.device.type != "cpu" else 0
        units: list[Place] = []
        for own, unit in zip(order, self.meta.units, strict=True):
            if own == "device":
                units.append("device")
            elif unit.nbytes <= left:
                units.append("cpu")
                left -= unit.nbytes
            else:
                units.append("disk")
        return Placement(tuple(units), "disk")

    def _plan(self, batch_size: int, placement: Placement, caches: Fractions) -> Plan:
        memory, work = self.memory, self.workload
        weights = self._resident_bytes(placement)
        streamed = [
            unit.nbytes
            for unit, place in zip(self.meta.units, placement.units, strict=True)
            if place == "disk" or place == "cpu" and self.device.type != "cpu"
        ]
        buffers = arena_bytes(streamed)
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

    def _resident_bytes(self, placement: Placement) -> int:
        meta = self.meta
        units = placement.indices("device")
        if self.device.type == "cpu":
            units += placement.indices("cpu")
        size = sum(meta.units[index].nbytes for index in units)
        size += sum(slot.nbytes for slot in meta.others)
        is_shared = meta.is_tied and placement.units[-1] == "device"
        return size + (0 if placement.embedding == "disk" or is_shared else meta.embedding.nbytes)

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
        units, work = self.meta.units, self.workload
        slots = self.memory.slots_for(work.mean_prompt, work.max_new_tokens)
        moved = self.memory.kv_bytes(slots)
        on_host = placement.indices("cpu") if self.device.type != "cpu" else []
        traffic = Traffic(
            disk_bytes=sum(units[index].nbytes for index in placement.indices("disk")),
            host_bytes=sum(units[index].nbytes for index in on_host),
            memory_bytes=sum(unit.nbytes for unit in units),
            num_weights=sum(slot.num_weights for unit in units for slot in unit.slots),
            cache_bytes=self.memory.sequence_bytes(slots, work.mean_prompt + work.max_new_tokens),
            host_cache_bytes=int(caches.get("cpu", 0.0) * moved),
            file_cache_bytes=int(caches.get("file", 0.0) * moved),
            num_layers=len(units) - 1,
        )
        return CostModel(self.hardware).estimate(
            traffic,
            batch_size,
            work.mean_prompt,
            work.max_new_tokens,
            max(1, pass_tokens // work.mean_prompt),
            max(1, micro_batch_tokens // work.mean_prompt),
        )

    def _too_little(self, batch_size: int) -> ValueError:
        least = place_by_fractions(self.weights or {"disk": 1.0}, len(self.meta.units))
        plan = self._plan(batch_size, least, self.caches or _IN_FILE)
        needed, given = (self.budget.used + n for n in (plan.total_bytes, self.budget.device))
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
    slower = other.estimate.tokens_per_second
    return plan.estimate.tokens_per_second / slower if slower else float("inf")


def _mebibytes(num_bytes: int) -> str:
    return f"{-(-num_bytes // 2**20)}MiB"
