"""Which weights stay in memory and how many sequences go together, within a promised memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from h2okv.cache import H2OCache
from h2okv.engine.demand import Demand
from h2okv.engine.forecast import Forecast, Traffic, forecast
from h2okv.engine.placement import Place, Placement, place_by_shares, spread
from h2okv.engine.skeleton import Skeleton
from h2okv.engine.speeds import Speeds
from h2okv.engine.weight_stream import arena_bytes

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
    """Weighs batches against resident weights.

    Args:
        skeleton: The model.
        demand: Its sizes.
        cache: An empty cache of the kind that the job uses.
        speeds: Of the machine.
        room: Memory that may be taken.
        work: What the job asks for.
        device: Where the model computes.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        demand: Demand,
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
        self._slots = demand.slots_of(cache, work.typical, work.new)
        self._most_slots = demand.slots_of(cache, work.longest, work.new)
        self._sizes = [unit.nbytes for unit in skeleton.units]

    def with_work(self, work: Workload) -> Planner:
        """Makes a planner of the same memory and speeds for another job.

        Args:
            work: What it asks for.

        Returns:
            The planner.
        """
        return Planner(
            self._skeleton, self._demand, self._cache, self._speeds, self._room, work, self._device
        )

    def choose(
        self,
        rows: int | None = None,
        shares: dict[str, float] | None = None,
        cache_shares: dict[str, float] | None = None,
    ) -> Plan:
        """Chooses the fastest plan that fits.

        Args:
            rows: Sequences under way; ``None`` for as many as is best.
            shares: Where weights go; ``None`` for what is best.
            cache_shares: Where keys and values go; ``None`` for what is best.

        Returns:
            The plan.

        Raises:
            ValueError: If not even the least fits, or not what was asked for.
        """
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
        """Finds the largest batch whose first results are there in a given time.

        Args:
            plan: From `choose`.
            seconds: The time.
            shares: Where weights go; ``None`` for what is best.
            cache_shares: Where keys and values go; ``None`` for what is best.

        Returns:
            Its plan, or that of one prompt at a time if none is so quick; ``None`` if that is not
            sooner by half.
        """
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
        """Finds the longest prompt that the memory allows, alone.

        Args:
            shares: Where weights go; ``None`` for the least memory.
            cache_shares: Where keys and values go; ``None`` for the least memory.

        Returns:
            Tokens; 0 if there is none.
        """
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
        at_once = int(max(0, free) * _LANE_SHARE) // max(1, demand.prompt_bytes(1))
        wanted = rows * work.typical
        lane = max(work.longest, min(_LANE_TOKENS, at_once, wanted))
        # A long prompt may leave less than its share to those that wait.
        left = max(0, min(int(free * _WAITING_SHARE), free - demand.prompt_bytes(lane)))
        tokens = max(lane, min(left // max(1, demand.waiting_bytes(1)), wanted))
        temporary = (
            demand.fixed_bytes
            + workspaces
            + max(
                # A tensor of a layer is there twice when rows are put together.
                demand.decode_bytes(rows, mean) + rows * demand.layer_bytes(mean),
                demand.prompt_bytes(lane) + demand.waiting_bytes(tokens),
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
            far_bytes=int(shares.get("cpu", 0.0) * self._demand.moved_bytes(self._slots)),
            file_bytes=int(shares.get("file", 0.0) * self._demand.moved_bytes(self._slots)),
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
