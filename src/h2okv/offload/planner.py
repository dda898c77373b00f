"""How many sequences at once, and where weights and caches go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from h2okv.cache import H2OCache
from h2okv.engine.memory import MemoryModel
from h2okv.offload.meta_model import Skeleton
from h2okv.offload.profile import Speeds
from h2okv.offload.weight_stream import arena_bytes


@dataclass(frozen=True)
class Traffic:
    """What one pass moves and computes, for a model and where its parts are.

    Attributes:
        disk_bytes: Weights read from the disk.
        link_bytes: Weights copied from the CPU's memory to the device.
        memory_bytes: Weights that a pass reads in the device's memory: all of them.
        parameters: Numbers of the weights that a token is multiplied with.
        cache_bytes: Of one sequence, read in every step from the device's memory.
        far_bytes: Of one sequence, brought in every step over the link.
        file_bytes: Of one sequence, brought in every step from the disk.
    """

    disk_bytes: int
    link_bytes: int
    memory_bytes: int
    parameters: int
    cache_bytes: int
    far_bytes: int = 0
    file_bytes: int = 0


@dataclass(frozen=True)
class Step:
    """The parts of a step's time, in seconds; the longest of them is the step's.

    Attributes:
        weights: Bringing the weights.
        cache: Reading all sequences' caches.
        compute: Products, or reading the weights for them in memory.
    """

    weights: float
    cache: float
    compute: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max(self.weights, self.cache, self.compute)

    @property
    def limit(self) -> str:
        """What the step waits for."""
        parts = {"weights": self.weights, "cache": self.cache, "compute": self.compute}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Forecast:
    """What a job does if the model of its time holds.

    Attributes:
        step: Of one decode step.
        prompt_seconds: Reading the prompts of one batch.
        first_seconds: Until the first results are there.
        decode_tokens_per_second: Of steps alone.
        tokens_per_second: New tokens over the whole time, prompts included.
    """

    step: Step
    prompt_seconds: float
    first_seconds: float
    decode_tokens_per_second: float
    tokens_per_second: float


def forecast(
    traffic: Traffic, speeds: Speeds, rows: int, prompt: int, new: int, prompts_in_pass: int
) -> Forecast:
    """Predicts a batch."""
    brought = max(traffic.disk_bytes / speeds.disk, traffic.link_bytes / speeds.link)
    cache = rows * traffic.cache_bytes / speeds.memory
    # One disk, and one link, does one thing at a time: the caches come after the weights.
    if traffic.file_bytes:
        cache = max(cache, (traffic.disk_bytes + rows * traffic.file_bytes) / speeds.disk)
    if traffic.far_bytes:
        cache = max(cache, (traffic.link_bytes + rows * traffic.far_bytes) / speeds.link)
    work = 2 * traffic.parameters
    products = rows * work / speeds.product_rate(rows)
    compute = max(products, traffic.memory_bytes / speeds.memory)
    step = Step(brought, cache, compute)
    passes = -(-rows // max(1, prompts_in_pass))
    reading = rows * prompt * work / speeds.product_rate(prompt)
    prompt_seconds = max(passes * brought, reading)
    steps = max(0, new - 1)
    total = prompt_seconds + steps * step.seconds
    return Forecast(
        step=step,
        prompt_seconds=prompt_seconds,
        # A pass brings each prompt that is under way a token, also while others are still read.
        first_seconds=prompt_seconds * min(1.0, new / passes) + max(0, new - passes) * step.seconds,
        decode_tokens_per_second=rows / step.seconds if step.seconds else 0.0,
        tokens_per_second=rows * new / total if total else 0.0,
    )


Place = Literal["device", "cpu", "disk"]
PLACES: tuple[Place, ...] = get_args(Place)


@dataclass(frozen=True)
class Placement:
    """Where weights are.

    Attributes:
        units: For every unit in the order of a forward (layers, then the head).
        table: Of the input embedding; on the ``"disk"`` only its rows in use are read.
    """

    units: tuple[Place, ...]
    table: Place

    def indices(self, place: Place) -> list[int]:
        """The units at a place."""
        return [index for index, own in enumerate(self.units) if own == place]


def parse_shares(option: str, text: str, places: tuple[str, ...]) -> dict[str, float] | None:
    """Reads where something goes."""
    if text == "auto":
        return None
    if text in places:
        return {text: 1.0}
    shares: dict[str, float] = {}
    for part in text.split(","):
        place, _, number = part.strip().partition("=")
        try:
            share = float(number.removesuffix("%"))
        except ValueError:
            share = -1.0
        if place not in places or place in shares or not 0 <= share <= 100:
            raise ValueError(
                f"--{option} {text!r} is no place; give auto, {', '.join(places)}, or percentages"
                f" such as {places[0]}=40,{places[-1]}=60"
            )
        shares[place] = share / 100
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise ValueError(
            f"--{option} {text!r} adds up to {100 * sum(shares.values()):g} percent; give 100"
        )
    return shares


def spread(shares: dict[str, float], count: int) -> list[str]:
    """Deals places out evenly, so that reading and computing take turns."""
    dealt = dict.fromkeys(shares, 0)
    order = []
    for number in range(1, count + 1):
        # Whoever is furthest behind its share is next.
        place = max(shares, key=lambda own: shares[own] * number - dealt[own])
        dealt[place] += 1
        order.append(place)
    return order


def place_by_shares(shares: dict[str, float], count: int) -> Placement:
    """Places units by percentages."""
    units: list[Place] = [_as_place(own) for own in spread(shares, count)]
    return Placement(tuple(units), units[-1] if units[-1] != "cpu" else "device")


def _as_place(text: str) -> Place:
    return next(place for place in PLACES if place == text)


_MOST_ROWS = 1024
_WORTH = 1.02
"""A larger batch must be so much faster, or the smaller one is taken."""
_LANE_TOKENS = 4096
"""Prompts of a micro-batch; longer ones read alone do not compute faster."""
_FILE_WORTH = 1.1
"""Entries go to the file only where that is so much faster; it wears the disk."""
_WAITING_SHARE = 0.1
"""Of the free memory, for the states of prompts between two layers."""
_LANE_SHARE = 0.3
"""Of the free memory, for what a micro-batch of prompts computes with."""


@dataclass(frozen=True)
class Workload:
    """What a job asks for.

    Attributes:
        typical: Tokens of a prompt, on average.
        longest: Tokens of the longest prompt.
        new: The most new tokens.
        prompts: How many; more are not under way.
    """

    typical: int
    longest: int
    new: int
    prompts: int


@dataclass(frozen=True)
class Room:
    """Memory that may be taken.

    Attributes:
        device: Bytes for weights, caches and temporaries where the model computes.
        host: Bytes in the CPU's memory beside that; 0 if the model computes there.
        used: Bytes that the process has already, for messages about the promise.
    """

    device: int
    host: int = 0
    used: int = 0


@dataclass(frozen=True)
class Plan:
    """A decision, and what it takes.

    Attributes:
        placement: Where weights are.
        cache_shares: Where keys and values are, as shares of the layers by place.
        rows: Sequences under way.
        lane_tokens: Tokens of the prompts that a micro-batch reads.
        pass_tokens: Tokens of the prompts that one pass reads.
        cache_bytes: For all caches.
        weight_bytes: Weights that stay in the device's memory.
        buffer_bytes: The two buffers.
        temporary_bytes: What a step or a prompt takes beside that.
        forecast: Its speed.
    """

    placement: Placement
    cache_shares: dict[str, float]
    rows: int
    lane_tokens: int
    pass_tokens: int
    cache_bytes: int
    weight_bytes: int
    buffer_bytes: int
    temporary_bytes: int
    forecast: Forecast

    @property
    def total_bytes(self) -> int:
        """All that it takes in the memory of the device."""
        return self.cache_bytes + self.weight_bytes + self.buffer_bytes + self.temporary_bytes


_IN_MEMORY = {"device": 1.0}


class Planner:
    """Weighs batches against resident weights."""

    def __init__(
        self,
        skeleton: Skeleton,
        demand: MemoryModel,
        cache: H2OCache,
        speeds: Speeds,
        room: Room,
        work: Workload,
        device: torch.device,
    ) -> None:
        self._skeleton = skeleton
        self._demand = demand
        self._cache = cache
        self._speeds = speeds
        self._room = room
        self._work = work
        self._device = device
        self._slots = demand.slots_for(work.typical, work.new)
        self._most_slots = demand.slots_for(work.longest, work.new)
        self._sizes = [unit.nbytes for unit in skeleton.units]

    def with_work(self, work: Workload) -> Planner:
        """Makes a planner of the same memory and speeds for another job."""
        return Planner(
            self._skeleton, self._demand, self._cache, self._speeds, self._room, work, self._device
        )

    def choose(
        self,
        rows: int | None = None,
        shares: dict[str, float] | None = None,
        cache_shares: dict[str, float] | None = None,
    ) -> Plan:
        """Chooses the fastest plan that fits."""
        candidates = [rows] if rows is not None else self._candidates()
        best = self._best(candidates, shares, cache_shares or _IN_MEMORY)
        if cache_shares is None:
            other = self._best(candidates, shares, {"file": 1.0})
            if other is not None and (
                best is None
                or other.forecast.tokens_per_second > _FILE_WORTH * best.forecast.tokens_per_second
            ):
                best = other
        if best is None:
            raise self._too_little(candidates[0], shares, cache_shares)
        return best

    def sooner(
        self,
        plan: Plan,
        seconds: float,
        shares: dict[str, float] | None = None,
        cache_shares: dict[str, float] | None = None,
    ) -> Plan | None:
        """Finds the largest batch whose first results are there in a given time."""
        found = None
        for rows in reversed([own for own in self._candidates() if own < plan.rows]):
            try:
                found = self.choose(rows, shares, cache_shares)
            except ValueError:
                continue
            if found.forecast.first_seconds <= seconds:
                break
        if found is None or found.forecast.first_seconds > plan.forecast.first_seconds / 2:
            return None
        return found

    def _best(
        self, candidates: list[int], shares: dict[str, float] | None, caches: dict[str, float]
    ) -> Plan | None:
        best = None
        for rows in candidates:
            plan = self._fit(rows, shares, caches)
            if plan is None:
                continue
            if best is None or (
                plan.forecast.tokens_per_second > _WORTH * best.forecast.tokens_per_second
            ):
                best = plan
        return best

    def longest_that_fits(
        self,
        shares: dict[str, float] | None = None,
        cache_shares: dict[str, float] | None = None,
    ) -> int:
        """Finds the longest prompt that the memory allows, alone."""
        low, high = 0, self._work.longest
        while low < high:
            tokens = (low + high + 1) // 2
            other = self.with_work(Workload(tokens, tokens, self._work.new, 1))
            if other._fit(1, shares, cache_shares or {"file": 1.0}) is None:
                high = tokens - 1
            else:
                low = tokens
        return low

    def _candidates(self) -> list[int]:
        """Numbers of sequences, about an eighth apart."""
        most = max(1, min(self._work.prompts, _MOST_ROWS))
        found, rows = [], 1
        while rows < most:
            found.append(rows)
            rows += max(1, rows // 8)
        return [*found, most]

    def _fit(
        self, rows: int, shares: dict[str, float] | None, caches: dict[str, float]
    ) -> Plan | None:
        """A plan for a number of rows; ``None`` if it does not fit."""
        count = len(self._sizes)
        if shares is not None:
            plan = self._plan(rows, place_by_shares(shares, count), caches)
            return plan if plan.total_bytes <= self._room.device else None
        everything = place_by_shares({"device": 1.0}, count)
        plan = self._plan(rows, everything, caches)
        if plan.total_bytes <= self._room.device:
            return plan
        # From as many layers in memory as fit without the two buffers, down.
        low, high = 0, count
        best = None
        while low <= high:
            kept = (low + high) // 2
            plan = self._plan(rows, self._keep(kept), caches)
            if plan.total_bytes <= self._room.device:
                best, low = plan, kept + 1
            else:
                high = kept - 1
        return best

    def _keep(self, kept: int) -> Placement:
        """Keeps some units on the device, evenly spread; the next best place takes the rest."""
        count = len(self._sizes)
        if kept == 0:
            order = ["away"] * count
        else:
            order = spread({"device": kept / count, "away": 1 - kept / count}, count)
        left = self._room.host if self._device.type != "cpu" else 0
        units: list[Place] = []
        for own, size in zip(order, self._sizes, strict=True):
            if own == "device":
                units.append("device")
            elif size <= left:
                units.append("cpu")
                left -= size
            else:
                units.append("disk")
        return Placement(tuple(units), "disk")

    def _plan(self, rows: int, placement: Placement, shares: dict[str, float]) -> Plan:
        demand, skeleton = self._demand, self._skeleton
        resident = [self._sizes[index] for index in placement.indices("device")]
        coming = [i for i, own in enumerate(placement.units) if self._comes(own)]
        weights = sum(resident) + sum(slot.nbytes for slot in skeleton.rest)
        if placement.table != "disk" and not (skeleton.is_tied and placement.units[-1] == "device"):
            weights += skeleton.table.nbytes
        if self._device.type == "cpu":
            weights += sum(self._sizes[index] for index in placement.indices("cpu"))
        buffers = arena_bytes([self._sizes[index] for index in coming])
        away = 1 - shares.get("device", 0.0)
        work, slots, most = self._work, self._slots, self._most_slots
        # The longest prompt must find room; most are shorter.
        caches = max(
            rows * demand.sequence_bytes(slots, work.typical + work.new, away),
            demand.sequence_bytes(most, work.longest + work.new, away),
        )
        mean = max(rows * slots, most) / rows
        # What lies elsewhere is brought into one of two workspaces.
        workspaces = int(2 * rows * mean * demand.entry_bytes) if away else 0
        free = self._room.device - weights - buffers - caches - workspaces - demand.fixed_bytes
        at_once = int(max(0, free) * _LANE_SHARE) // max(1, demand.prefill_bytes(1))
        wanted = rows * work.typical
        lane = max(work.longest, min(_LANE_TOKENS, at_once, wanted))
        # A long prompt may leave less than its share to those that wait.
        left = max(0, min(int(free * _WAITING_SHARE), free - demand.prefill_bytes(lane)))
        tokens = max(lane, min(left // max(1, demand.waiting_bytes(1)), wanted))
        temporary = (
            demand.fixed_bytes
            + workspaces
            + max(
                # A tensor of a layer is there twice when rows are put together.
                demand.decode_bytes(rows, mean) + rows * demand.layer_bytes(mean),
                demand.prefill_bytes(lane) + demand.waiting_bytes(tokens),
            )
        )
        return Plan(
            placement=placement,
            cache_shares=shares,
            rows=rows,
            lane_tokens=lane,
            pass_tokens=tokens,
            cache_bytes=caches,
            weight_bytes=weights,
            buffer_bytes=buffers,
            temporary_bytes=temporary,
            forecast=self._forecast(rows, placement, shares, tokens),
        )

    def _comes(self, place: Place) -> bool:
        """Whether a unit there comes through the buffers."""
        return place == "disk" or place == "cpu" and self._device.type != "cpu"

    def _forecast(
        self, rows: int, placement: Placement, shares: dict[str, float], tokens: int
    ) -> Forecast:
        on_disk = sum(self._sizes[index] for index in placement.indices("disk"))
        on_host = 0
        if self._device.type != "cpu":
            on_host = sum(self._sizes[index] for index in placement.indices("cpu"))
        traffic = Traffic(
            disk_bytes=on_disk,
            link_bytes=on_host,
            memory_bytes=sum(self._sizes),
            parameters=sum(s.count for unit in self._skeleton.units for s in unit.slots),
            cache_bytes=self._demand.sequence_bytes(
                self._slots, self._work.typical + self._work.new
            ),
            far_bytes=int(shares.get("cpu", 0.0) * self._demand.kv_bytes(self._slots)),
            file_bytes=int(shares.get("file", 0.0) * self._demand.kv_bytes(self._slots)),
        )
        prompts = max(1, tokens // self._work.typical)
        return forecast(traffic, self._speeds, rows, self._work.typical, self._work.new, prompts)

    def _too_little(
        self, rows: int, shares: dict[str, float] | None, cache_shares: dict[str, float] | None
    ) -> ValueError:
        count = len(self._sizes)
        least = place_by_shares(shares or {"disk": 1.0}, count)
        plan = self._plan(rows, least, cache_shares or {"file": 1.0})
        needed = self._room.used + plan.total_bytes
        given = self._room.used + self._room.device
        what = "a batch of one needs"
        if rows > 1:
            what = f"a batch of {rows} needs"
        elif shares is None:
            what = "one layer of this model at a time and a batch of one need"
        remedy = "a smaller --batch or more memory" if rows > 1 else "more"
        if shares is not None and set(shares) != {"disk"}:
            remedy += ", or --weights disk"
        return ValueError(
            f"--memory {_mebibytes(given)} is too little: {what} {_mebibytes(needed)} with prompts"
            f" of {self._work.longest} tokens; give {remedy}"
        )


def _mebibytes(num_bytes: int) -> str:
    return f"{-(-num_bytes // 2**20)}MiB"
