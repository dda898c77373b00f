"""The exact H2O cache of one layer: a fixed number of slots."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from h2okv.cache.layer import ScoredLayer
from h2okv.cache.rope import ranks_of, rotate_to_ranks
from h2okv.cache.validation import check_finite
from h2okv.ops.attention import Visibility
from h2okv.ops.decode import (
    Priority,
    RotaryTables,
    Slots,
    StepRules,
    decode_step,
    keep_indices,
    protected_entries,
)
from h2okv.ops.dispatch import Operations, operations
from h2okv.ops.quant import Entries
from h2okv.ops.rope import relative

pad = torch.nn.functional.pad

GROWTH = 256
"""Slots added at a time when nothing is evicted (policy ``full``)."""


@dataclass(frozen=True)
class SlotBytes:
    """What one sequence takes in one layer of slots.

    Attributes:
        num_heads: KV heads.
        entry: bytes of a slot's key and value, for one head.
        has_ranks: whether slots have ranks, for positions that roll.
        has_norms: whether slots have the norm of their value.
        has_pattern: whether the policy marks entries by a rule of its own.
    """

    num_heads: int
    entry: int
    has_ranks: bool = False
    has_norms: bool = False
    has_pattern: bool = False

    def total(self, slots: float) -> float:
        """Bytes of so many slots, with what there is once for each sequence."""
        # Score (fp32) and position (int32); rank (int32) and norm (fp32) where they are needed.
        metadata = 4 + 4 + 4 * self.has_ranks + 4 * self.has_norms
        # The free slot of each head; tokens seen and the parts of the budget, all int64.
        once = 8 * self.num_heads + 8 * (4 + self.has_pattern)
        return slots * self.num_heads * (self.entry + metadata) + once


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """New tensors are ordinary even under inference_mode, so that a later step may write."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class SlotLayer(ScoredLayer):
    """Keys, values, scores and positions in ``S = K + 1`` slots, of which one is always free.

    The order of the slots means nothing. A decode step writes into the free slot, attends over
    all slots, adds to the scores and finds the slot to free next; nothing is moved or sorted.

    State, all on the layer's device: ``keys [B, H, S, D]``, ``values [B, H, S, Dv]``,
    ``scores [B, H, S]`` fp32, ``positions [B, H, S]`` int32 (-1 = empty), ``free [B, H, 1]`` int64.
    When positions roll, ``keys`` are as before the model's rotation (pairs
    next to each other), and ``ranks [B, H, S]`` int32 are
    the entries' places in the cache (S - 1 for an empty slot).

    Attributes:
        goes_on: Whether the next forward brings a part of a block that a later one ends; see
            `h2okv.cache.slot_pool`.
        is_open: Whether the last one did.
        checks_numbers: Whether a block whose attention is not finite is refused. Of several ranks
            that hold parts of a model one alone must not stop in the middle.
        is_packed: Whether `keys` and `values` are codes.
    """

    checks_numbers = True
    is_packed = False

    def _forget(self) -> None:
        super()._forget()
        self.free: torch.Tensor | None = None
        self.enabled: torch.Tensor | None = None
        self.ranks: torch.Tensor | None = None
        self.rotary: RotaryTables | None = None
        self.operations: Operations | None = None
        self.is_full = False
        self.steps_to_full = 0
        self.has_sinks = True
        self.last_growth = 0
        self.goes_on = False
        self.is_open = False

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether all steps are alike, so that ``generate`` may compile or record them on a GPU."""
        return self.policy.is_bounded and not self.rule.rewrites

    def row_tensors(self) -> tuple[str, ...]:
        """Names the attributes whose first dimension is the batch."""
        return (*super().row_tensors(), "free", "enabled", "ranks")

    def __getstate__(self) -> dict[str, Any]:
        """See `ScoredLayer.__getstate__`; what tokens run through is chosen anew."""
        return {**super().__getstate__(), "operations": None, "rotary": None}

    def move(self, device: torch.device) -> None:
        """See `RowLayer.move`."""
        super().move(device)
        self.operations = None

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        real: torch.Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `ScoredLayer.attend`."""
        in_pieces = self.is_open or self.goes_on
        if query.shape[2] == 1 and self.positions is not None and not in_pieces:
            return self._decode(query, key, value, real, scale, softcap)
        return self._block(query, key, value, real, scale, softcap)

    def _decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        real: torch.Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """A block of one token: tensor code without a host sync."""
        if not self.policy.is_bounded:
            self._grow()
        # In a compiled step a count that changes would compile it anew each time.
        if not torch.compiler.is_compiling():
            self.count_down()
        if not self.is_plain:
            self._prepare_step(value, real)
        run = decode_step
        # On a CPU inductor makes more of operations that it sees than of a package of its own.
        if query.is_cuda or not torch.compiler.is_compiling():
            if self.operations is None:
                self._choose(query)
            run = self.operations.step
        output = run(query, key, value, self._slots(), self._rules(scale, softcap), real)
        self.cumulative_length += 1
        return output

    def _choose(self, query: torch.Tensor) -> None:
        """Chooses what tokens run through until the next block; mutates the layer."""
        groups = query.shape[1] // self.num_kv_heads
        self.operations = operations(
            query.device, self.dtype, self.key_size, self.value_size, groups, self.is_packed
        )

    def _slots(self) -> Slots:
        """The layer's state as a step takes it."""
        return Slots(
            *self._entries(), self.scores, self.positions, self.free, self.num_real_tokens,
            self.enabled, self.ranks,
        )  # fmt: skip

    def _entries(self) -> tuple[Entries, Entries]:
        """Keys and values as a step takes them."""
        return self.keys, self.values

    def _readable(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as a block attends to them."""
        return self.keys, self.values

    def _rules(self, scale: float, softcap: float | None) -> StepRules:
        """What steps have in common until the next block."""
        if self.rotation is not None and self.rotary is None:
            self._set_rotary()
        sink = self.sink if self.has_sinks else None
        return StepRules(
            scale, self.recent, sink, softcap, self.rotary, self._priority(),
            self.is_full,
        )  # fmt: skip

    def _prepare_step(self, value: torch.Tensor, real: torch.Tensor | None) -> None:
        """What a scoring other than the sum does before a step; mutates the layer."""
        if self.scoring.decay is not None:
            one = self.num_real_tokens.new_ones(self.batch_size) if real is None else real[:, 0]
            self.scores.copy_(self.scoring.apply_decay(self.scores, one))
        if self.norms is not None:
            self.norms.scatter_(-1, self.free, self._norms_of(value))

    def _priority(self) -> Priority | None:
        """How the policy ranks entries; ``None`` if by their scores, which a kernel can do."""
        if self.ranks_by_scores:
            return None
        if not self.is_plain:
            return self._ranking
        return functools.partial(self.policy.priority, layer_idx=self.layer_idx)

    def _set_rotary(self) -> None:
        """Makes the tables that all decode steps share; mutates the layer."""
        self.set_rotary(self.rank_limit(1))

    def set_rotary(self, limit: int) -> None:
        """Makes the tables of steps over slots with ranks below a limit; mutates the layer."""
        to_rank = self.rotation.of_ranks(limit)
        self.rotary = RotaryTables(to_rank, relative(to_rank))

    def _block(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        real: torch.Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """A prompt, or a later turn: attends, scores, and evicts down to the budget once."""
        length = key.shape[2]
        scores, positions = self._block_entries(length, real)
        past = 0
        if self.positions is not None:
            past = self.positions.shape[2]
            held_keys, held_values = self._readable()
            key = torch.cat([held_keys, key], dim=2)
            value = torch.cat([held_values, value], dim=2)
            scores = torch.cat([self.scores, scores], dim=2)
            positions = torch.cat([self.positions, positions], dim=2)
        visibility = Visibility(
            past=past,
            entries=None if past == 0 and real is None else positions >= 0,
            queries=real,
        )
        rotated = key
        if self.rotation is not None:
            query, rotated = self._rotate_block(query, key, positions, past)
        self._choose(query)
        weights = self._query_weights(real, length)
        output, sums = self.operations.attend(
            query, rotated, value, visibility, scale, softcap, weights
        )
        del rotated
        if self.checks_numbers:
            check_finite(self, sums)
        self.num_real_tokens += length if real is None else real.sum(dim=1)
        self.cumulative_length += length
        self.is_open = self.goes_on
        if self.goes_on:
            self._keep_all(key, value, scores + sums, positions)
            return output
        self._compact(key, value, self._faded(scores, real, length) + sums, positions)
        self.last_growth = int(self.cumulative_length)
        return output

    def _rotate_block(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, past: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates a block's queries and all keys ``[B, H, past + T, D]`` to their ranks."""
        taken = positions >= 0
        held = taken[..., :past].sum(dim=-1, keepdim=True)
        ranks = held + taken[..., past:].cumsum(dim=-1) - 1
        # All heads of a row hold the same number of entries.
        own = ranks[:, :1]
        if past:
            ranks = torch.cat([self.ranks, ranks], dim=-1)
        factors = self.rotation.of_ranks(self.rank_limit(query.shape[2]))
        return rotate_to_ranks(query, own, factors), rotate_to_ranks(key, ranks, factors)

    def _block_entries(
        self, length: int, real: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores (zero) and positions of the block's tokens, ``[B, H, T]``."""
        shape = (self.batch_size, self.num_kv_heads, length)
        start = self.num_real_tokens.unsqueeze(1)
        if real is None:
            positions = start + torch.arange(length, device=self.device)
        else:
            positions = torch.where(real, start + real.cumsum(dim=1) - 1, -1)
        positions = positions.to(torch.int32).unsqueeze(1).expand(shape)
        return torch.zeros(shape, dtype=torch.float32, device=self.device), positions

    def _keep_all(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Holds a block of which more is to come, without slots for steps; mutates the layer."""
        with _ordinary_tensors():
            self.keys, self.values = key.clone(), value.clone()
            self.scores, self.positions = scores.clone(), positions.clone()

    def _compact(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Moves what stays into slots; mutates the layer."""
        newest = self.num_real_tokens.view(-1, 1, 1) - 1
        total, limit = self.total, max(tokens.total for tokens in self.row_budgets)
        if not self.policy.is_bounded:
            if not self.policy.evicts:
                total = (positions >= 0).sum(dim=-1, keepdim=True)
            limit = int(total.max())
        indices, kept = keep_indices(
            self._ranking(scores, positions, newest, self._norms_of(value)),
            positions,
            protected_entries(positions, newest, self.sink, self.recent),
            total,
            limit,
        )
        num_slots = limit + (1 if self.policy.is_bounded else GROWTH)
        with _ordinary_tensors():
            self._take(key, value, indices, num_slots)
            self._hold(
                scores.gather(2, indices), torch.where(kept, positions.gather(2, indices), -1)
            )
        if self.policy.is_bounded:
            self.enabled = self._slots_within_budget()
            self._look_ahead()
            self._stay_in_place()

    def _take(
        self, key: torch.Tensor, value: torch.Tensor, indices: torch.Tensor, num_slots: int
    ) -> None:
        """Makes slots of what was held and what is new; mutates the layer.

        Args:
            key: ``[B, H, N, D]``, what was held before the block first.
            value: ``[B, H, N, Dv]``, likewise.
            indices: int64 ``[B, H, K]``, what stays.
            num_slots: S.
        """
        compact = self.operations.compact
        self.keys = compact(key, indices, num_slots)
        self.values = compact(value, indices, num_slots)

    def _stay_in_place(self) -> None:
        """Tells CUDA graphs that steps write where they read; mutates marks on the tensors."""
        if self.device.type == "cuda" and not torch.compiler.is_compiling():
            for name in (*self.row_tensors(), "cumulative_length"):
                held = getattr(self, name, None)
                if held is not None:
                    torch._dynamo.mark_static_address(held)

    def count_down(self) -> None:
        """Looks again when enough steps have passed to fill the cache; mutates the layer."""
        if self.steps_to_full > 1:
            self.steps_to_full -= 1
        elif self.steps_to_full == 1:
            self._look_ahead()

    @property
    def is_ready(self) -> bool:
        """Whether a decode step needs nothing that only a block finds out."""
        known = self.rotation is None or self.rotary is not None
        return (
            self.positions is not None
            and self.policy.is_bounded
            and self.owner is not None
            and self.operations is not None
            and known
        )

    def _look_ahead(self) -> None:
        """Notes what a decode step may leave out, as Python bools known once for each block."""
        left = int((self.total - self._counts()).max())
        self.is_full = self.enabled is None and left == 0
        # Rows with budgets of their own are never full all together.
        self.steps_to_full = left if self.enabled is None else 0
        self.has_sinks = any(tokens.sink for tokens in self.row_budgets)

    def restore(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        """See `ScoredLayer.restore`."""
        super().restore(tensors, numbers)
        if self.policy.is_bounded:
            self._look_ahead()
        self.last_growth = int(self.cumulative_length)

    def _counts(self) -> torch.Tensor:
        """Entries held, int64 ``[B, H, 1]``."""
        return (self.positions >= 0).sum(dim=-1, keepdim=True)

    def _slots_within_budget(self) -> torch.Tensor | None:
        """Marks ``K + 1`` slots for each sequence; ``None`` if all sequences have one budget."""
        num_slots = self.positions.shape[2]
        if all(tokens.total + 1 == num_slots for tokens in self.row_budgets):
            return None
        taken = self.positions >= 0
        # Of the empty slots, as many stay open as the sequence's own budget leaves.
        rank = (~taken).cumsum(dim=-1)
        return taken | (rank <= self.total + 1 - taken.sum(dim=-1, keepdim=True))

    def _hold(self, scores: torch.Tensor, positions: torch.Tensor) -> None:
        """Fills the first slots with scores and positions; mutates the layer."""
        empty = (0, self.keys.shape[2] - positions.shape[2])
        self.scores, self.positions = pad(scores, empty), pad(positions, empty, value=-1)
        self.norms = self._held_norms()
        self.free = (self.positions < 0).to(torch.uint8).argmax(dim=-1, keepdim=True)
        if self.rotation is not None:
            self.ranks = ranks_of(self.positions)
            self._set_rotary()

    def _held_norms(self) -> torch.Tensor | None:
        """Norms of the values held; ``None`` if not asked for."""
        return self._norms_of(self.values)

    def _grow(self) -> None:
        """Makes room for one more entry when nothing is evicted; mutates the layer."""
        # An upper bound of the entries held: padding counts too.
        if int(self.cumulative_length) - self.last_growth >= GROWTH - 1:
            with _ordinary_tensors():
                self._add_slots(GROWTH)
                self._hold(self.scores, self.positions)
            self.last_growth = int(self.cumulative_length)

    def _add_slots(self, count: int) -> None:
        """Adds empty slots to keys and values; mutates the layer."""
        room = (0, 0, 0, count)
        self.keys, self.values = pad(self.keys, room), pad(self.values, room)

    @property
    def nbytes(self) -> int:
        """Bytes held: keys, values, scores, positions, ranks and norms."""
        held = (self.keys, self.values, self.scores, self.positions, self.ranks, self.norms)
        return sum(tensor.nbytes for tensor in held if tensor is not None)
