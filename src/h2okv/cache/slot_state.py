"""What a layer holds of each sequence, and how keys and values are stored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from h2okv.config import TokenBudget
from h2okv.ops.decode import NO_HEAD, Slots, compact, pick
from h2okv.ops.quant import BITS, Entries, Packed, pack, packed_bytes, unpack

# Fields ``[B, H, S, ...]``.
PER_SLOT = (
    "keys",
    "values",
    "scores",
    "positions",
    "slot_mask",
    "ranks",
    "value_weights",
    "head_of_slot",
)
_COUNTED = {*PER_SLOT} - {"slot_mask"}
MIN_GROWN_SLOTS = 64  # a budget of fewer slots is never worth growing into


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """New tensors are ordinary even under inference_mode, so that a later step may write."""
    if torch.compiler.is_compiling():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def is_cast(device: torch.device) -> bool:
    """Tell whether autocast is on for a device, some of which (meta) it does not know."""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def slots_for(entries: int, capacity: int | None = None) -> int:
    """Slots that a layer makes for the entries of its fullest sequence; the last one is free.

    Some are there to grow into, up to the largest budget and one, the capacity: a sixteenth more
    each time copies 16 entries a step; a cache that concatenates copies all.
    """
    slots = entries + 1 + max(4, entries // 16)
    if capacity is None:
        return slots
    return capacity if capacity <= MIN_GROWN_SLOTS else min(capacity, slots)


@dataclass(frozen=True)
class KVStorage:
    """Keys and values as they are held: in the model's dtype, or packed into few bits.

    A number is rounded once, when its token becomes an entry. A block attends to itself in full
    precision, and to what is held as it unpacks; a single token is an entry from its own step on.
    """

    bits: int | None = None

    def __post_init__(self) -> None:
        if self.bits is not None and (type(self.bits) is not int or self.bits not in BITS):
            raise ValueError(
                f"kv_bits={self.bits!r} is no format of keys and values; give 8 or 4, or leave it "
                "out to keep them in the model's dtype."
            )

    def store(self, states: Tensor) -> Entries:
        return states if self.bits is None else pack(states, self.bits)

    def read(self, entries: Entries, dtype: torch.dtype) -> Tensor:
        """Entries as a block attends to them."""
        return unpack(entries).to(dtype) if isinstance(entries, Packed) else entries

    def round(self, states: Tensor) -> Tensor:
        return self.read(self.store(states), states.dtype)

    def as_held(self, states: Tensor, past: int) -> Tensor:
        """Keys or values ``[B, H, P + T, D]``, of which P are held, as they are after the block.

        By these entries are ranked, so that a number that is rounded counts alike all its life.
        """
        if self.bits is None:
            return states
        return torch.cat([states[:, :, :past], self.round(states[:, :, past:])], dim=2)

    def as_attended(self, states: Tensor, past: int, real: Tensor | None) -> Tensor:
        """The same as the block attends to them: its own in full precision.

        But where the block of a sequence is a single token, which is an entry from its own step on,
        whatever the batch brings beside it.
        """
        length = states.shape[2] - past
        if self.bits is None or past == 0 or (real is None and length > 1):
            return states
        rounded = self.as_held(states, past)
        if real is None or length == 1:
            return rounded
        return torch.where((real.sum(dim=1) == 1).view(-1, 1, 1, 1), rounded, states)

    def compact(
        self,
        states: Tensor,
        held: Entries,
        indices: Tensor,
        num_slots: int,
        heads: Tensor | None = None,
    ) -> Entries:
        """Fills S new slots with the K entries that stay; what was held keeps its codes.

        Of the states ``[B, H, N, D]`` the first P are those held, as `held` has them; `indices` is
        int64 ``[B, H, K]``, of the heads of their rows or of `heads`.
        """
        # Only what stays is packed.
        made = self.store(compact(states, indices, num_slots, heads))
        past, count = held.shape[2], indices.shape[2]
        if isinstance(made, Packed) and isinstance(held, Packed) and past:
            old = (indices < past).unsqueeze(-1)
            places = indices.clamp(max=past - 1)
            for new, before in ((made.codes, held.codes), (made.grid, held.grid)):
                own = new[:, :, :count]
                own.copy_(torch.where(old, compact(before, places, count, heads), own))
        return made

    def head_bytes(self, size: int, dtype: torch.dtype) -> int:
        """Bytes of one head's key, or value, of an entry."""
        return size * dtype.itemsize if self.bits is None else packed_bytes(size, self.bits)


@dataclass(frozen=True)
class SlotBytes:
    """What one sequence takes in one layer of slots."""

    num_heads: int
    entry: int  # bytes of a slot's key and value, for one head
    has_ranks: bool = False
    has_norms: bool = False
    has_static_mask: bool = False
    is_by_head: bool = False  # whose slots, of one row, have owners; their mean is what counts

    def total(self, slots: float) -> float:
        """Bytes of so many slots, with what there is once for each sequence."""
        # Score (fp32) and position (int32); rank (int32) and norm (fp32) where they are needed.
        metadata = 4 + 4 + 4 * self.has_ranks + 4 * self.has_norms
        # The free slot of each head; tokens seen and the parts of the budget, all int64.
        once = 8 * self.num_heads + 8 * (4 + self.has_static_mask)
        if self.is_by_head:
            metadata, once = metadata + 1, once + 8 * (self.num_heads - 1)
        return slots * self.num_heads * (self.entry + metadata) + once


@dataclass
class SlotState(Slots):
    """All that a layer holds of each sequence, which is the first dimension of every tensor."""

    sink: Tensor = field(kw_only=True)  # protected first positions, int64 [B, 1, 1]
    recent: Tensor = field(kw_only=True)  # protected newest positions, likewise
    total: Tensor = field(kw_only=True)  # K, likewise; [B, H, 1] where heads' budgets differ
    # Entries that a policy keeps by a rule of its own, likewise.
    num_static: Tensor | None = field(default=None, kw_only=True)
    # Weights of the values, fp32 [B, H, S], of rules that multiply scores by them.
    value_weights: Tensor | None = field(default=None, kw_only=True)
    budgets: list[TokenBudget] = field(default_factory=list, kw_only=True)

    @classmethod
    def empty(cls, key: Tensor, value: Tensor, storage: KVStorage) -> SlotState:
        """No slots yet, for keys ``[B, H, T, D]`` and values ``[B, H, T, Dv]`` like these."""
        batch, heads = key.shape[:2]
        with ordinary_tensors():
            keys, values = (
                storage.store(states.new_zeros(batch, heads, 0, states.shape[-1]))
                for states in (key, value)
            )
            scores = torch.zeros(batch, heads, 0, dtype=torch.float32, device=key.device)
            seen = torch.zeros(batch, dtype=torch.int64, device=key.device)
            free, positions = seen.view(-1, 1, 1).repeat(1, heads, 1), scores.to(torch.int32)
            sink, recent, total = (seen.view(-1, 1, 1).clone() for _ in range(3))
            return cls(
                keys, values, scores, positions, free, seen, sink=sink, recent=recent, total=total
            )

    def set_budgets(
        self,
        budgets: list[TokenBudget],
        has_pattern: bool,
        totals: list[list[int]] | None = None,
    ) -> None:
        """Notes each sequence's budget, and K of each head if they differ; mutates the state."""
        self.budgets = budgets
        parts = [(own.sink, own.recent, own.total, own.num_static) for own in budgets]
        with ordinary_tensors():
            counts = torch.tensor(parts, dtype=torch.int64, device=self.device).view(-1, 4, 1, 1)
            self.sink, self.recent, self.total, static = (part.clone() for part in counts.unbind(1))
            self.num_static = static if has_pattern else None
            if totals is not None:
                self.total = self.total.new_tensor(totals).unsqueeze(-1)

    @property
    def batch_size(self) -> int:
        return self.positions.shape[0]

    @property
    def num_slots(self) -> int:
        return self.positions.shape[2]

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def counts(self) -> Tensor:
        """Return the entries of each sequence and head, int64 ``[B, H, 1]``."""
        (positions,) = self.by_head("positions")
        return (positions >= 0).sum(dim=-1, keepdim=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots: keys, values, scores, positions, ranks and weights."""
        return sum(t.nbytes for name, t in self.tensors().items() if _field(name) in _COUNTED)

    def by_head(self, *names: str) -> tuple[Any, ...]:
        """Fields with a row of slots for each head, ``[B, H, S', ...]``; copies of shared ones.

        A head that holds less than another has empty slots behind its own. What a state has not is
        `None`.
        """
        fields = tuple(vars(self)[name] for name in names)
        if self.head_of_slot is None:
            return fields
        others = self.of_others()
        most = int((~others).sum(dim=-1).max())
        index = others.to(torch.uint8).argsort(dim=-1, stable=True)[..., :most]
        missing = others.gather(-1, index)
        row = torch.zeros_like(index)

        def of_heads(name: str, tensor: Tensor) -> Tensor:
            own = pick(tensor, index, row)
            beyond = missing.view(*missing.shape, *[1] * (own.dim() - 3))
            return own.masked_fill_(beyond, empty_value(name, most))

        def of_field(name: str, own: Any) -> Any:
            if isinstance(own, Packed):
                return own._replace(codes=of_heads(name, own.codes), grid=of_heads(name, own.grid))
            return None if own is None else of_heads(name, own)

        return tuple(map(of_field, names, fields))

    def unshare(self) -> None:
        """Gives each head a row of its own, for a block that will `share` again; mutates."""
        if self.head_of_slot is None:
            return
        names = [name for name in PER_SLOT if name != "head_of_slot"]
        with ordinary_tensors():
            for name, own in zip(names, self.by_head(*names), strict=True):
                setattr(self, name, own)
            self.head_of_slot = None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name; of packed entries ``keys.codes`` and ``keys.grid``."""
        found: dict[str, Tensor] = {}
        for name, held in vars(self).items():
            if isinstance(held, Packed):
                found[f"{name}.codes"], found[f"{name}.grid"] = held.codes, held.grid
            elif torch.is_tensor(held):
                found[name] = held
        return found

    def stored(self, name: str) -> Tensor:
        """A field's numbers; of packed entries their codes."""
        held = vars(self)[name]
        codes: Tensor = held.codes if isinstance(held, Packed) else held
        return codes

    def entry_tensors(self) -> dict[str, Tensor]:
        """The large ones: keys and values, whatever they are stored as."""
        return {n: t for n, t in self.tensors().items() if _field(n) in ("keys", "values")}

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts tensors in the place of others, by the names of `tensors`; mutates the state."""
        for name, tensor in tensors.items():
            whole, _, part = name.partition(".")
            held = vars(self)[whole]
            setattr(self, whole, held._replace(**{part: tensor}) if part else tensor)

    def map(self, change: Callable[[Tensor], Tensor]) -> SlotState:
        """The state with every tensor changed, for the same sequences."""
        made = copy.copy(self)
        made.set_tensors({name: change(tensor) for name, tensor in self.tensors().items()})
        return made

    def index_select(self, indices: Tensor) -> SlotState:
        """The named sequences, int64 ``[B']``, in this order; may repeat."""
        with ordinary_tensors():
            made = self.map(lambda tensor: tensor.index_select(0, indices))
        made.budgets = [self.budgets[index] for index in indices.tolist()] if self.budgets else []
        return made

    def like(self, num_sequences: int, num_slots: int) -> SlotState:
        """Empty slots of the same kind, for other numbers of sequences and slots; no slot mask."""
        made = copy.copy(self)
        made.slot_mask = None
        with ordinary_tensors():
            for name, tensor in made.tensors().items():
                shape = [num_sequences, *tensor.shape[1:]]
                if _field(name) in PER_SLOT:
                    shape[2] = num_slots
                made.set_tensors({name: tensor.new_full(shape, empty_value(name, num_slots))})
        made.budgets = []
        return made

    def resize(self, num_slots: int) -> None:
        """Adds empty slots; mutates the state, one tensor after the other."""
        with ordinary_tensors():
            for name, tensor in self.tensors().items():
                if _field(name) in PER_SLOT:
                    room = (0, 0) * (tensor.dim() - 3) + (0, num_slots - tensor.shape[2])
                    value = empty_value(name, num_slots)
                    self.set_tensors({name: torch.nn.functional.pad(tensor, room, value=value)})
            if self.ranks is not None:
                self.ranks.masked_fill_(self.positions < 0, num_slots - 1)

    def cat(self, other: SlotState) -> None:
        """Puts another's sequences behind these, tensor by tensor; uses up the other."""
        num_slots = max(self.num_slots, other.num_slots)
        for state in (self, other):
            if state.num_slots < num_slots:
                state.resize(num_slots)
        for name, tensor in self.tensors().items():
            with ordinary_tensors():
                joined = torch.cat([tensor, other.tensors()[name]])
            del tensor
            self.set_tensors({name: joined})
            other.set_tensors({name: joined[:0]})
        self.budgets = self.budgets + other.budgets

    def copy_sequence(self, place: int, source: SlotState, sequence: int) -> None:
        """Copies one of another state's sequences to a place here, whose other slots it empties."""
        num_held, num_slots = source.num_slots, self.num_slots
        theirs = source.tensors()
        for name, tensor in self.tensors().items():
            target, held = tensor[place], theirs[name][sequence]
            if _field(name) not in PER_SLOT:
                target.copy_(held)
                continue
            target[:, :num_held] = held
            # What a request before has left there may not even be a number.
            target[:, num_held:] = empty_value(name, num_slots)
            if name == "ranks":
                target.masked_fill_(self.positions[place] < 0, num_slots - 1)


def empty_value(name: str, num_slots: int) -> int:
    """What stands in a slot that holds nothing."""
    # The rank of an empty slot is the last one.
    return {"ranks": num_slots - 1, "positions": -1, "head_of_slot": NO_HEAD}.get(name, 0)


def _field(name: str) -> str:
    return name.partition(".")[0]
