"""Evictions at multiples of `evict_every` tokens of a sequence, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h2okv.cache.block import Block
from h2okv.cache.forward import Forward
from h2okv.cache.slot_state import SlotState, ordinary_tensors
from h2okv.ops.attention import mean_queries, num_means
from h2okv.ops.decode import QueryRing
from h2okv.ops.reference import AttentionSpec


def to_device(numbers: Sequence[Any], state: SlotState) -> Tensor:
    """Copy numbers of the host to a state's device, which does not wait for what it runs."""
    return torch.tensor(numbers, device="cpu").to(state.device, non_blocking=True)


@dataclass(frozen=True)
class Spans:
    """What changes where a layer evicts every c real tokens of a sequence.

    A span is the c tokens between two evictions, of which all stay until it ends. Spans are counted
    from a sequence's first token, so that what is kept depends on the text and not on how blocks
    and steps cut it; or, with `whole_prompts`, from the end of its last block, after which the
    layer evicts too.
    """

    length: int  # c, at least 2; a span of one token is an ordinary step
    whole_prompts: bool = False

    def ended(self, state: SlotState, is_late: Tensor | None = None) -> list[bool]:
        """Tell of each sequence whether its span has just ended.

        `is_late` ``[B]`` marks those in which it ended with an image (`Block.split`).
        """
        late = [False] * state.batch_size if is_late is None else is_late.tolist()
        phases = state.phases(self.length)
        return [phase == 0 or waited for phase, waited in zip(phases, late, strict=True)]

    def totals(self, state: SlotState, positions: Tensor, is_late: Tensor | None = None) -> Tensor:
        """Return how many of the entries at ``[B, H, N]`` stay, int64 ``[B, H or 1, 1]``."""
        ended = self.ended(state, is_late)
        if all(ended):
            return state.total
        counts = (positions >= 0).sum(dim=-1, keepdim=True)
        if not any(ended):
            return counts
        return torch.where(to_device(ended, state).view(-1, 1, 1), state.total, counts)

    def start_after(self, state: SlotState, is_whole: Sequence[bool]) -> None:
        """Begin the spans of sequences behind what they have read; mutates the state."""
        if not any(is_whole):
            return
        lengths = state.lengths()

        def begun(before: Sequence[int]) -> tuple[int, ...]:
            rows = zip(lengths, before, is_whole, strict=True)
            return tuple(new if is_new else old for new, old, is_new in rows)

        state.span_starts = begun(state.span_starts or lengths)
        if state.scored_lengths is not None:  # a span without a token has nothing to score
            state.scored_lengths = begun(state.scored_lengths)

    # --- queries, for rules that score a span at its end ------------------------------------------

    def add_queries(self, state: SlotState, block: Block) -> None:
        """Note a block's queries, of a span the newest, before its tokens are counted; mutates.

        A step notes its query itself (`ring`).
        """
        length, num_kv_heads = block.length, block.key.shape[1]
        if state.queries is None:
            self.make_room(state, block)
        assert state.queries is not None
        assert state.query_positions is not None
        lengths = set() if torch.compiler.is_compiling() else set(state.known_lengths or ())
        first = min(lengths, default=0) % self.length
        if len(lengths) == 1 and block.real is None and first + length <= self.length:
            room = state.queries.narrow(2, first, length)
            if (query := mean_queries(block.query, num_kv_heads, out=room)) is not room:
                room.copy_(query)
            ids = 0 if block.position_ids is None else block.position_ids[:, 0, :, 0]
            state.query_positions[:, first : first + length] = ids
            return
        query = mean_queries(block.query, num_kv_heads)
        batch, heads, _, size = query.shape
        order, real = torch.arange(length, device=state.device).expand(batch, length), block.real
        if real is not None:
            order = real.cumsum(dim=1) - 1
        if length > self.length:  # the cut has waited for the end of an image
            newest = order > order[:, -1:] - self.length
            real = newest if real is None else real & newest
        columns = (state.num_real_tokens.unsqueeze(1) + order) % self.length
        position_ids = order  # of a model that rotates nothing: anything that is no -1
        if block.position_ids is not None:
            position_ids = block.position_ids[:, 0, :, 0].expand(batch, length)
        if real is None:
            sequences = torch.arange(batch, device=state.device).unsqueeze(1)
            index, query = (sequences, slice(None), columns), query.transpose(1, 2)
        else:
            sequences, tokens = real.nonzero(as_tuple=True)
            columns = columns[sequences, tokens]
            index, query = (sequences, slice(None), columns), query[sequences, :, tokens]
            position_ids = position_ids[sequences, tokens]
        state.queries[index] = query
        state.query_positions[index[0], index[2]] = position_ids

    def ring(self, state: SlotState, block: Block) -> QueryRing:
        """Return where a step notes its query, as `add_queries` does; mutates the state."""
        self.make_room(state, block)
        placed = None if block.position_ids is None else block.position_ids[:, 0, 0, 0]
        return QueryRing(state.queries, state.query_positions, placed)

    def make_room(self, state: SlotState, block: Block) -> None:
        """Allocate the queries of a span, if there are none yet; mutates the state."""
        if state.queries is not None:
            return
        query, heads = block.query, block.key.shape[1]
        batch, num_heads, _, size = query.shape
        heads *= num_means(num_heads // heads)
        with ordinary_tensors():
            state.queries = query.new_zeros(batch, heads, self.length, size)
            state.query_positions = torch.full((batch, self.length), -1, device=query.device)
        state.scored_lengths = (-1,) * batch

    def take_queries(
        self,
        state: SlotState,
        spec: AttentionSpec,
        ended: list[bool],
        is_short: bool,
        is_late: bool,
        forward: Forward,
    ) -> tuple[Tensor | None, Block | None]:
        """Return the sequences, int64 ``[B']``, whose span has ended, and its queries as a block.

        ``None`` for all sequences. Queries count once: a sequence that gets padding then has none
        left. `is_short` says that a span may have less than c tokens, `is_late` that it may have
        had more. Mutates the state.
        """
        assert state.queries is not None
        assert state.query_positions is not None
        lengths, scored = state.lengths(), state.scored_lengths
        is_begun = is_short and not is_late
        rows = self._unscored(state, ended, is_begun)
        if not rows:
            return None, None
        are_all = len(rows) == len(ended)
        sequences = None if are_all else to_device(rows, state)
        index: Any = slice(None) if sequences is None else sequences
        query, positions = state.queries[index], state.query_positions
        # All layers of a cache got them at the same places.
        key = state.device, lengths, scored, state.span_starts, tuple(rows)
        position_ids = forward.shared(key, lambda: positions[index].clone())
        positions[index] = -1
        may_lack = scored is None or is_short
        if is_begun:
            may_lack = len({state.phases(self.length)[row] for row in rows}) > 1
            columns, position_ids = forward.shared(
                (*key, "newest"), lambda: self._newest(state, rows, index, position_ids)
            )
            where = columns[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
            query = query.gather(2, where)
        real = position_ids >= 0 if may_lack else None
        if real is not None and bool(real.all()):
            real = None
        if is_late:
            state.scored_lengths = None
        else:
            self.note_scored(state, rows)
        placed = position_ids[:, None, :, None]
        return sequences, Block(query, query, query, real, None, placed, spec)

    @staticmethod
    def note_scored(state: SlotState, rows: Sequence[int]) -> None:
        """Note that the spans of some sequences were scored; mutates the state."""
        lengths, scored = state.lengths(), state.scored_lengths
        if scored is not None or len(rows) == len(lengths):
            pairs = enumerate(zip(lengths, scored or lengths, strict=True))
            state.scored_lengths = tuple(now if r in rows else old for r, (now, old) in pairs)

    def _unscored(self, state: SlotState, ended: list[bool], is_begun: bool) -> list[int]:
        """Return the sequences whose span has ended and has queries that were not scored."""
        scored, is_new = state.scored_lengths, [True] * len(ended)
        if not is_begun and scored is not None:
            is_new = [a != b for a, b in zip(state.lengths(), scored, strict=True)]
        elif not is_begun and any(ended):  # of a file; what drafts have left is not a whole span
            is_new = self._last_queries(state).tolist()
        return [row for row, is_over in enumerate(ended) if is_over and is_new[row]]

    def _newest(
        self, state: SlotState, rows: list[int], index: Any, position_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return columns and positions of begun spans, newest first.

        Other columns are of drafts that were taken back.
        """
        counts = [phase for row, phase in enumerate(state.phases(self.length)) if row in rows]
        ages = torch.arange(max(counts), device=state.device)
        columns = (state.num_real_tokens[index].unsqueeze(1) - 1 - ages) % self.length
        position_ids = position_ids.gather(1, columns)
        if len(set(counts)) > 1:
            is_older = ages >= to_device(counts, state).unsqueeze(1)
            position_ids = position_ids.masked_fill(is_older, -1)
        return columns, position_ids

    def _last_queries(self, state: SlotState) -> Tensor:
        """Tell of each sequence whether there is a query of the last token of its span."""
        assert state.query_positions is not None
        starts = state.span_starts or (0,) * state.batch_size
        columns = to_device([(start - 1) % self.length for start in starts], state).unsqueeze(1)
        return state.query_positions.gather(1, columns).squeeze(1) >= 0
