"""The state of a layer, by sequence, and how keys and values are stored."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from h2okv.budget import TokenBudget
from h2okv.cache.forward import LayerBudgets
from h2okv.config import KV_BITS
from h2okv.ops.compaction import compact, pick
from h2okv.ops.decode import Kind, Slots
from h2okv.ops.quant import Entries, KeyTransform, Packed, pack, packed_bytes, unpack
from h2okv.ops.reference import compute_dtype

MIN_GROWN_SLOTS = 64  # a budget of fewer slots is never worth growing into


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make new tensors ordinary even under inference_mode: a later step may write to them."""
    if torch.compiler.is_compiling():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def is_cast(device: torch.device) -> bool:
    """Tell whether autocast is on for a device; never for ``meta``.

    torch 2.11 cannot compile `torch.amp.is_autocast_available`.
    """
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def slots_for(entries: int, capacity: int | None = None) -> int:
    """Return the slots to allocate for the fullest sequence's entries, with a free one.

    Some are there to grow into, up to the largest budget and one, the capacity: a sixteenth more
    each time copies 16 entries a step; a cache that concatenates copies all.
    """
    slots = entries + 1 + max(4, entries // 16)
    if capacity is None:
        return slots
    return capacity if capacity <= MIN_GROWN_SLOTS else min(capacity, slots)


@dataclass(frozen=True)
class EntryStorage:
    """Keys, or values, as they are stored: in the model's dtype, or packed into 8 or 4 bits.

    A number is rounded once, when its token becomes an entry. A block attends to its own tokens in
    full precision and to cached entries unpacked; a single token is stored before it attends.
    """

    bits: int | None = None

    def store(self, states: Tensor, transform: KeyTransform | None = None) -> Entries:
        if self.bits is None:
            return states
        return pack(states if transform is None else transform.apply(states), self.bits)

    def read(
        self, entries: Entries, dtype: torch.dtype, transform: KeyTransform | None = None
    ) -> Tensor:
        """Unpack entries to the dtype in which a block attends to them."""
        if not isinstance(entries, Packed):
            return entries
        numbers = unpack(entries).to(compute_dtype(dtype))
        return (numbers if transform is None else transform.undo(numbers)).to(dtype)

    def round(self, states: Tensor, transform: KeyTransform | None = None) -> Tensor:
        return self.read(self.store(states, transform), states.dtype, transform)

    def as_stored(self, states: Tensor, past: int, transform: KeyTransform | None = None) -> Tensor:
        """Return keys or values ``[B, H, P + T, D]`` as they are stored; the first P are cached.

        Entries are ranked by these numbers, at every cut by the same ones.
        """
        if self.bits is None:
            return states
        return torch.cat([states[:, :, :past], self.round(states[:, :, past:], transform)], dim=2)

    def as_attended(
        self, states: Tensor, past: int, real: Tensor | None, transform: KeyTransform | None = None
    ) -> Tensor:
        """Return the same as the block attends to them: its own tokens in full precision.

        A sequence with a single real token attends to it as it is stored, whatever the other
        sequences of the batch read.
        """
        length = states.shape[2] - past
        if self.bits is None or past == 0 or (real is None and length > 1):
            return states
        rounded = self.as_stored(states, past, transform)
        if real is None or length == 1:
            return rounded
        return torch.where((real.sum(dim=1) == 1).view(-1, 1, 1, 1), rounded, states)

    def compact(
        self,
        states: Tensor,
        cached: Entries,
        indices: Tensor,
        num_slots: int,
        heads: Tensor | None = None,
        transform: KeyTransform | None = None,
    ) -> Entries:
        """Fill S new slots with the K entries that stay; cached ones keep their codes.

        Args:
            states: ``[B, H, N, D]``; the first P are the cached ones.
            cached: the same P entries, as they are stored.
            indices: int64 ``[B, H, K]``, below N.
            num_slots: S.
            heads: as in `h2okv.ops.compaction.compact`.
            transform: of 4-bit keys.
        """
        if transform is not None:
            states = transform.apply(states)
        # Only what stays is packed.
        stored = self.store(compact(states, indices, num_slots, heads))
        past, count = cached.shape[2], indices.shape[2]
        if isinstance(stored, Packed) and isinstance(cached, Packed) and past:
            old = (indices < past).unsqueeze(-1)
            cached_indices = indices.clamp(max=past - 1)
            for new, before in ((stored.codes, cached.codes), (stored.grid, cached.grid)):
                filled = new[:, :, :count]
                filled.copy_(
                    torch.where(old, compact(before, cached_indices, count, heads), filled)
                )
        return stored

    def head_bytes(self, size: int, dtype: torch.dtype) -> int:
        """Bytes of one head's key, or value, of an entry."""
        return size * dtype.itemsize if self.bits is None else packed_bytes(size, self.bits)


class KVStorage:
    """How a layer stores keys and how it stores values, by `CacheConfig.kv_bits`."""

    def __init__(self, kv_bits: int | None = None) -> None:
        self.is_packed = kv_bits is not None
        self.keys, self.values = map(EntryStorage, KV_BITS.get(kv_bits, (None, None)))

    def entry_bytes(self, size: int, dtype: torch.dtype, is_latent: bool) -> int:
        """Return the bytes of one head's key and value; latents in full are keys alone."""
        key_bytes = self.keys.head_bytes(size, dtype)
        if is_latent and not self.is_packed:
            return key_bytes
        return key_bytes + self.values.head_bytes(size, dtype)


@dataclass(frozen=True)
class SlotBytes:
    """The bytes of one sequence in one layer of slots."""

    num_heads: int
    entry: int  # bytes of a slot's key and value, for one head
    metadata: int  # bytes of what else an entry has, of one head (`SlotState.metadata_bytes`)
    has_static_mask: bool = False
    is_by_head: bool = False  # whose slots, of one row, have owners; their mean is what counts
    key_transform: int = 0  # bytes of the center and scale of a head's keys
    queries: int = 0  # bytes of a span's queries, of rules that score a span at its end

    def total(self, slots: float) -> float:
        """Return the bytes of a number of slots, with what each sequence has once."""
        # The free slot of each head; tokens seen and the parts of the budget, all int64.
        once = 8 * self.num_heads + 8 * (4 + self.has_static_mask)
        if self.is_by_head:
            once += 8 * (self.num_heads - 1)
        return self.entries(slots) + once + self.key_transform * self.num_heads + self.queries

    def entries(self, slots: float) -> float:
        """Return the bytes of a number of slots alone, as `SlotState.nbytes` counts them."""
        return slots * self.num_heads * (self.entry + self.metadata + self.is_by_head)


@dataclass
class SlotState(Slots):
    """The state of a layer; the first dimension of every tensor is the sequence."""

    _: KW_ONLY
    # [B, 1, 1], protected first and newest positions.
    sink: Annotated[Tensor, Kind(torch.int64, "sequence")]
    recent: Annotated[Tensor, Kind(torch.int64, "sequence", changes=True)]
    # K, likewise; [B, H, 1] by head.
    total: Annotated[Tensor, Kind(torch.int64, "sequence", changes=True)]
    # Entries that a policy keeps by a rule of its own, likewise.
    num_static: Annotated[Tensor | None, Kind(torch.int64, "sequence", iff="rule.has_pattern")] = (
        None
    )
    # Weights of the values, of rules that multiply scores by them.
    value_weights: Annotated[
        Tensor | None, Kind(torch.float32, "derived", iff="rule.weighs_values", file_name="norms")
    ] = None
    # Queries of the span that is read, n means a KV head, ``[B, H * n, c, D]``, and where the model
    # put them, ``[B, c]``, of rules that score a span at its end (`h2okv.cache.spans.Spans`).
    queries: Annotated[Tensor | None, Kind(per="span")] = None
    query_positions: Annotated[Tensor | None, Kind(torch.int64, "span")] = None
    budgets: list[TokenBudget] = field(default_factory=list)
    # What the host knows of the tensors of these names, so that it need not wait for a device;
    # None where it must ask once.
    known_lengths: tuple[int, ...] | None = None  # num_real_tokens
    known_totals: tuple[tuple[int, ...], ...] | None = None
    # Tokens of each sequence when its span was last scored; None: look at `query_positions`.
    scored_lengths: tuple[int, ...] | None = None
    # Tokens of each sequence before its first span; None: spans begin with the text.
    span_starts: tuple[int, ...] | None = None
    # Whether only the device knows how many entries there are, as tokens have left that no cut has
    # evicted, or a cut has waited for the end of an image.
    has_gaps: bool = False

    @classmethod
    def empty(cls, key: Tensor, value: Tensor, storage: KVStorage) -> SlotState:
        """Make a state without slots, for keys ``[B, H, T, D]`` and values ``[B, H, T, Dv]``."""
        batch, heads = key.shape[:2]
        with ordinary_tensors():
            keys, values = (
                kind.store(states.new_empty(batch, heads, 0, states.shape[-1]))
                for kind, states in ((storage.keys, key), (storage.values, value))
            )
            scores, positions = (
                torch.empty(batch, heads, 0, dtype=dtype, device=key.device)
                for dtype in (torch.float32, torch.int32)
            )
            seen = torch.zeros(batch, dtype=torch.int64, device=key.device)
            # The first block replaces these before anything writes to them.
            none = seen.view(-1, 1, 1)
            return cls(
                keys, values, scores, positions, none.expand(-1, heads, 1), seen, sink=none,
                recent=none, total=none, known_lengths=(0,) * batch,
            )  # fmt: skip

    def set_budgets(self, layer: LayerBudgets, has_pattern: bool) -> None:
        """Note each sequence's budget, and K of each head if they differ; mutates the state."""
        self.budgets, self.known_totals = layer.budgets, layer.totals
        amounts = layer.numbers.view(-1, len(layer.budgets), 1, 1)
        self.sink, self.recent, static = amounts[:3]
        self.num_static = static if has_pattern else None
        self.total = amounts[3:].view(len(layer.budgets), -1, 1)

    def lengths(self) -> tuple[int, ...]:
        """Return the real tokens that each sequence has read; may synchronize with the device."""
        if self.known_lengths is None:
            self.known_lengths = tuple(self.num_real_tokens.tolist())
        return self.known_lengths

    def phases(self, span: int) -> list[int]:
        """Return the tokens of its span that each sequence has read, 0 to ``span - 1``."""
        lengths, starts = self.lengths(), self.span_starts or (0,) * self.batch_size
        return [(length - start) % span for length, start in zip(lengths, starts, strict=True)]

    def written(self) -> tuple[int, ...]:
        """Return the tokens of each sequence behind the start of its spans."""
        lengths = self.lengths()
        return tuple(map(operator.sub, lengths, self.span_starts or lengths))

    def totals(self) -> tuple[tuple[int, ...], ...]:
        """Return K by sequence, or by sequence and head; may synchronize with the device."""
        if self.known_totals is None:
            self.known_totals = tuple(map(tuple, self.total.squeeze(-1).tolist()))
        return self.known_totals

    def note_count(self, counts: Sequence[int] | None) -> None:
        """Add tokens to the host's copy of a count that is kept on the device."""
        if torch.compiler.is_compiling() or counts is None or self.known_lengths is None:
            self.known_lengths = None  # without a look: a number that changes is compiled again
            return
        self.known_lengths = tuple(map(operator.add, self.known_lengths, counts))

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
        is_filled = self.positions >= 0
        if self.head_of_slot is not None:
            is_filled = is_filled & ~self.of_others()
        return is_filled.sum(dim=-1, keepdim=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots: keys, values, scores, positions, ranks and weights."""
        others = "mask", "head", "sequence"
        return sum(t.nbytes for n, t in self.tensors().items() if self.kind_of(n).per not in others)

    def by_head(self, *names: str, num_slots: int | None = None) -> tuple[Any, ...]:
        """Return fields with a row of slots for each head, ``[B, H, S', ...]``.

        Shared rows are copied, and padded with empty slots to `num_slots` (S'); without it, this
        synchronizes with the device. A field that the state lacks is ``None``.
        """
        fields = tuple(getattr(self, name) for name in names)
        if self.head_of_slot is None:
            return fields
        others = self.of_others()
        num_slots = num_slots or int((~others).sum(dim=-1).max())
        index = others.to(torch.uint8).argsort(dim=-1, stable=True)[..., :num_slots]
        missing = others.gather(-1, index)
        row = torch.zeros_like(index)

        def of_heads(name: str, value: Any) -> Any:
            if value is None:
                return None
            if isinstance(value, Packed):
                codes, grid = of_heads(name, value.codes), of_heads(name, value.grid)
                return value._replace(codes=codes, grid=grid)
            picked = pick(value, index, row)
            beyond = missing.view(*missing.shape, *[1] * (picked.dim() - 3))
            return picked.masked_fill_(beyond, self.kinds[name].empty_value(num_slots))

        return tuple(map(of_heads, names, fields))

    def unshare(self, num_slots: int | None = None) -> None:
        """Give each head a row of its own, for a block that will `share` again; mutates."""
        if self.head_of_slot is None:
            return
        names = [n for n, kind in self.kinds.items() if kind.has_slots and n != "head_of_slot"]
        with ordinary_tensors():
            for name, value in zip(names, self.by_head(*names, num_slots=num_slots), strict=True):
                setattr(self, name, value)
            self.head_of_slot = None

    @classmethod
    def metadata_bytes(cls, layer: Any = None) -> int:
        """Return the bytes of what an entry has in each head besides key and value."""
        kinds = (kind for kind in cls.kinds.values() if kind.is_metadata and kind.is_of(layer))
        return sum(kind.dtype.itemsize for kind in kinds if kind.dtype is not None)

    @classmethod
    def kind_of(cls, name: str) -> Kind:
        """Return the `Kind` of a tensor, by its name in `tensors`."""
        return cls.kinds[name.partition(".")[0]]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name; of packed entries ``keys.codes`` and ``keys.grid``."""
        tensors: dict[str, Tensor] = {}
        for name, value in vars(self).items():
            if isinstance(value, Packed):
                tensors[f"{name}.codes"], tensors[f"{name}.grid"] = value.codes, value.grid
            elif torch.is_tensor(value):
                tensors[name] = value
        return tensors

    def entry_size(self, name: str) -> int:
        """Return the size D of an entry of keys or values."""
        value = getattr(self, name)
        return int(value.size if isinstance(value, Packed) else value.shape[-1])

    def stored(self, name: str) -> Tensor:
        """Return a field's numbers; of packed entries their codes."""
        value = getattr(self, name)
        codes: Tensor = value.codes if isinstance(value, Packed) else value
        return codes

    def entry_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of keys and values, in the form in which they are stored."""
        return {n: t for n, t in self.tensors().items() if n.partition(".")[0] in self.entries}

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors in the place of others, by the names of `tensors`; mutates the state."""
        if "num_real_tokens" in tensors:
            self.known_lengths = self.scored_lengths = None
        if "total" in tensors:
            self.known_totals = None
        for name, tensor in tensors.items():
            field_name, _, attribute = name.partition(".")
            if attribute:
                tensor = vars(self)[field_name]._replace(**{attribute: tensor})
            setattr(self, field_name, tensor)

    def map(self, change: Callable[[Tensor], Tensor]) -> SlotState:
        """Return the state with every tensor changed, for the same sequences."""
        changed = copy.copy(self)
        changed.set_tensors({name: change(tensor) for name, tensor in self.tensors().items()})
        return changed

    def with_rows(self, num_rows: int) -> SlotState:
        """Return the first rows of the pool to which this state's rows belong."""
        rows = self.map(lambda t: t.as_strided((num_rows, *t.shape[1:]), t.stride()))
        vars(rows).update({name: getattr(self, name) for name in _OF_HOST})
        return rows

    def store_cut(self, indices: Tensor, source: SlotState) -> None:
        """Store what a cut has changed of sequences, int64 ``[n]``; mutates the state."""
        for tensor, changed in zip(self.of_cuts(), source.of_cuts(), strict=True):
            tensor.index_copy_(0, indices, changed)

    def of_cuts(self) -> list[Tensor]:
        """Return the tensors that a cut changes."""
        others, tensors = ("free_slot", "query_positions"), self.tensors()
        kinds = {name: self.kind_of(name).per for name in tensors}
        return [t for n, t in tensors.items() if n in others or kinds[n] in ("entry", "derived")]

    def change(self, change: Callable[[Kind, Tensor], Tensor]) -> None:
        """Replace tensors one by one, so that memory holds one twice; mutates the state."""
        with ordinary_tensors():
            for name, tensor in self.tensors().items():
                self.set_tensors({name: change(self.kind_of(name), tensor)})

    def index_select(self, indices: Tensor, order: Sequence[int] | None = None) -> SlotState:
        """Return the sequences of indices, int64 ``[B']``, in this order; may repeat.

        `order` are the same numbers, if the host knows them.
        """
        with ordinary_tensors():
            selected = self.map(lambda tensor: tensor.index_select(0, indices))
        if self.budgets:
            order = indices.tolist() if order is None else order
            selected.budgets = [self.budgets[index] for index in order]
            for name in _OF_HOST:
                counts = getattr(self, name)
                setattr(selected, name, counts and tuple(counts[index] for index in order))
        return selected

    def like(self, num_sequences: int, num_slots: int) -> SlotState:
        """Empty slots of the same kind, for other numbers of sequences and slots; no slot mask."""
        empty = copy.copy(self)
        empty.slot_mask = empty.span_starts = None
        empty.budgets, empty.has_gaps = [], False

        def emptied(kind: Kind, tensor: Tensor) -> Tensor:
            tensor = kind.resized(tensor[:0], num_slots)
            return tensor.new_full((num_sequences, *tensor.shape[1:]), kind.empty_value(num_slots))

        empty.change(emptied)
        return empty

    def resize(self, num_slots: int) -> None:
        """Add empty slots, or drop some behind the others; mutates the state."""
        self.change(lambda kind, tensor: kind.resized(tensor, num_slots))
        if self.ranks is not None:
            self.ranks.masked_fill_(self.positions < 0, num_slots - 1)

    def drop_queries(self) -> None:
        """Forget the queries of a span that has ended; mutates the state."""
        self.queries = self.query_positions = self.scored_lengths = None

    def cat(self, other: SlotState) -> None:
        """Append another state's sequences, tensor by tensor; the other state is consumed."""
        num_slots = max(self.num_slots, other.num_slots)
        counts = {}
        for name in _OF_HOST:
            mine, others = getattr(self, name), getattr(other, name)
            counts[name] = mine + others if mine and others else None
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
        self.has_gaps |= other.has_gaps
        vars(self).update(counts)

    def copy_sequence(self, row: int, source: SlotState, sequence: int) -> None:
        """Copy a sequence of another state to a row, and empty the row's other slots."""
        sources, num_slots = source.tensors(), self.num_slots
        for name, tensor in self.tensors().items():
            # What a request before has left in other slots may not even be a number.
            copied = sources[name][sequence : sequence + 1]
            tensor[row] = self.kind_of(name).resized(copied, num_slots)[0]
        if self.ranks is not None:
            self.ranks[row].masked_fill_(self.positions[row] < 0, num_slots - 1)


# What the host knows of each sequence.
_OF_HOST = ("known_lengths", "known_totals", "scored_lengths", "span_starts")
