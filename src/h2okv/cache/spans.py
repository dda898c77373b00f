"""Evictions at multiples of `evict_every` tokens of a sequence, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from h2okv.cache.block import Block, BlockEntries
from h2okv.cache.forward import Forward
from h2okv.cache.rope import Rotations, ranks_of, rotate_to_ranks
from h2okv.cache.slot_state import KVStorage, SlotState, ordinary_tensors
from h2okv.cache.slots import SlotPlan
from h2okv.ops.attention import mean_queries, num_means
from h2okv.ops.decode import QueryRing
from h2okv.ops.dispatch import Cut
from h2okv.ops.reference import AttentionSpec
from h2okv.policy import BlockView, Rule


class _Layer(Protocol):
    layer_idx: int
    dtype: torch.dtype
    rule: Rule
    state: SlotState
    storage: KVStorage
    rotations: Rotations
    forward: Forward
    checks_numbers: bool
    ends_forward: bool
    is_late: Tensor | None
    attention_spec: AttentionSpec | None

    @property
    def scores_spans(self) -> bool: ...
    def count(self, block: Block) -> None: ...
    def view(self, block: Block, entries: BlockEntries, sums: Tensor) -> BlockView: ...
    def choose(self, entries: BlockEntries, total: Tensor, limit: int) -> tuple[Tensor, Tensor]: ...


class _LayerOfSlots(_Layer, Protocol):
    slots: SlotPlan

    def grow(self) -> None: ...
    def cut_kernels(self, positions: Tensor) -> Cut | None: ...
    @property
    def select(self) -> Callable[..., Any]: ...


def to_device(numbers: Sequence[bool] | Sequence[int], state: SlotState) -> Tensor:
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

    def phases(self, state: SlotState) -> list[int]:
        """Return the tokens of its span that each sequence has read, 0 to c - 1."""
        return state.phases(self.length)

    def ended(self, state: SlotState, is_late: Tensor | None = None) -> list[bool]:
        """Tell of each sequence whether its span has just ended.

        `is_late` ``[B]`` marks those in which it ended with an image (`Block.split`).
        """
        late = [False] * state.batch_size if is_late is None else is_late.tolist()
        phases = self.phases(state)
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
        key = lengths, scored, state.span_starts, tuple(rows)
        position_ids = forward.shared(key, lambda: positions[index].clone())
        positions[index] = -1
        may_lack = scored is None or is_short
        if is_begun:
            may_lack = len({self.phases(state)[row] for row in rows}) > 1
            query, position_ids = self._newest(
                state, rows, state.num_real_tokens[index], query, position_ids
            )
        real = position_ids >= 0 if may_lack else None
        if real is not None and bool(real.all()):
            real = None
        state.scored_lengths = None
        if not is_late and (are_all or scored is not None):
            before = scored or lengths
            state.scored_lengths = tuple(
                length if row in rows else before[row] for row, length in enumerate(lengths)
            )
        placed = position_ids[:, None, :, None]
        return sequences, Block(query, query, query, real, None, placed, spec)

    def _unscored(self, state: SlotState, ended: list[bool], is_begun: bool) -> list[int]:
        """Return the sequences whose span has ended and has queries that were not scored."""
        scored, is_new = state.scored_lengths, [True] * len(ended)
        if not is_begun and scored is not None:
            is_new = [a != b for a, b in zip(state.lengths(), scored, strict=True)]
        elif not is_begun and any(ended):  # of a file; what drafts have left is not a whole span
            is_new = self._last_queries(state).tolist()
        return [row for row, is_over in enumerate(ended) if is_over and is_new[row]]

    def _newest(
        self, state: SlotState, rows: list[int], seen: Tensor, query: Tensor, position_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the queries of begun spans, newest first; others are of drafts taken back."""
        counts = [phase for row, phase in enumerate(self.phases(state)) if row in rows]
        ages = torch.arange(max(counts), device=state.device)
        columns = (seen.unsqueeze(1) - 1 - ages) % self.length
        where = columns[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        query, position_ids = query.gather(2, where), position_ids.gather(1, columns)
        if len(set(counts)) > 1:
            is_older = ages >= to_device(counts, state).unsqueeze(1)
            position_ids = position_ids.masked_fill(is_older, -1)
        return query, position_ids

    def _last_queries(self, state: SlotState) -> Tensor:
        """Tell of each sequence whether there is a query of the last token of its span."""
        assert state.query_positions is not None
        starts = state.span_starts or (0,) * state.batch_size
        columns = to_device([(start - 1) % self.length for start in starts], state).unsqueeze(1)
        return state.query_positions.gather(1, columns).squeeze(1) >= 0

    # --- scores and evictions of a layer ----------------------------------------------------------

    def score_block(
        self, layer: _Layer, block: Block, entries: BlockEntries, output: Tensor
    ) -> Tensor:
        """Count a block's tokens and return the scores ``[B, H, N]``; mutates the layer."""
        if layer.checks_numbers:
            layer.forward.check_later(layer.layer_idx, output[:, :, -1])
        self.add_queries(layer.state, block)
        layer.count(block)
        return self.score(layer, entries)

    def score(
        self, layer: _Layer, entries: BlockEntries, is_scored: Sequence[bool] | None = None
    ) -> Tensor:
        """Return entries' scores ``[B, H, N]``, with those of the spans that have just ended.

        But for sequences that `is_scored` marks.
        """
        ended = self.ended(layer.state, layer.is_late)
        if is_scored is not None:
            ended = [over and not done for over, done in zip(ended, is_scored, strict=True)]
        return self._score_queries(layer, entries, ended)

    def score_begun(self, layer: _Layer, entries: BlockEntries, is_whole: Sequence[bool]) -> Tensor:
        """Return the scores ``[B, H, N]`` with those of spans that whole blocks end early."""
        phases = self.phases(layer.state)
        begun = [is_over and phase > 0 for is_over, phase in zip(is_whole, phases, strict=True)]
        if layer.state.queries is None or not any(begun):
            return entries.scores
        past = entries.before_block()
        scores = entries.scores.clone()
        scores[..., : entries.past] = self._score_queries(layer, past, begun, True)
        return scores

    def _score_queries(
        self, layer: _Layer, entries: BlockEntries, has_ended: list[bool], is_short: bool = False
    ) -> Tensor:
        is_late = layer.is_late is not None  # the span after it is shorter
        sequences, span = self.take_queries(
            layer.state, layer.attention_spec, has_ended, is_short or is_late, is_late,
            layer.forward,
        )  # fmt: skip
        if span is None:
            return entries.scores
        ended = replace(entries) if sequences is None else entries.of_sequences(sequences)
        ended.query = span.query
        none = layer.forward.zeros(ended.scores.shape, layer.state.device)
        added = layer.rule.score_block(layer.view(span, ended, none))
        added = added.to(torch.float32)
        if sequences is None:
            return entries.scores + added
        return entries.scores.index_add(0, sequences, added)

    def evict(self, layer: _LayerOfSlots) -> None:
        """Evict after steps that ended a span, in place: slots may be views of a pool's."""
        state = layer.state
        if not any(self.ended(state)):
            return
        layer.grow()
        kernels = layer.cut_kernels(state.positions)
        if kernels is not None:
            self._evict_by(kernels, layer)
        else:
            self._evict_plainly(layer)
        if layer.ends_forward or layer.forward.num_layers == 1:
            layer.forward.forget_shared()

    def _evict_plainly(self, layer: _LayerOfSlots) -> None:
        state, slots = layer.state, layer.slots
        fields = "keys", "values", "scores", "positions"
        key, value, scores, positions = state.by_head(*fields, num_slots=slots.head_slots(state))
        past = positions.shape[2]
        key = layer.storage.keys.read(key, layer.dtype, state.key_transform)
        value = layer.storage.values.read(value, layer.dtype)
        entries = BlockEntries(past, key, value, scores, positions, key, key, value, positions >= 0)
        if layer.scores_spans:
            if layer.rotations.rolling is not None:
                factors = layer.rotations.rolling.of_ranks(past)
                entries.attended_key = rotate_to_ranks(key, ranks_of(positions), factors)
            entries.scores = self.score(layer, entries)
        total = self.totals(state, positions)
        indices, is_kept = layer.choose(entries, total, slots.most_entries(state))
        slots.compact(state, entries.scores, indices, is_kept)
        if state.value_weights is not None:
            values = layer.storage.values.read(state.values, layer.dtype)
            state.value_weights.copy_(layer.rule.value_weights(values))
        if state.ranks is not None:
            state.ranks.copy_(ranks_of(state.positions))

    def _evict_by(self, kernels: Cut, layer: _LayerOfSlots) -> None:
        state, slots = layer.state, layer.slots
        if state.value_weights is not None:
            values = layer.storage.values.read(state.values, layer.dtype)
            state.value_weights.copy_(layer.rule.value_weights(values))
        rows = slots.by_head(kernels, state)
        key, value, scores, positions, weights = rows
        past, is_entry = positions.shape[2], positions >= 0
        entries = BlockEntries(past, key, value, scores, positions, key, key, value, is_entry)
        if layer.scores_spans:
            entries.scores = self.score(layer, entries)
        total, limit = self.totals(state, positions), slots.most_entries(state)
        chosen = layer.select(kernels, entries, weights, total, limit, in_place=True)
        slots.compact_by(kernels, state, rows._replace(scores=entries.scores), chosen)
