"""The contract of one layer: place, attend, score, evict (docs/algorithm.md, the contract)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from h2okv.cache.base_layer import BaseLayer
from h2okv.cache.block import Block, BlockEntries
from h2okv.cache.drafting import StepLog
from h2okv.cache.explanation import Explanation, standing
from h2okv.cache.forward import place_of
from h2okv.cache.rope import Rotations, options_of_rotation
from h2okv.cache.slot_state import is_cast
from h2okv.cache.spans import to_device
from h2okv.cache.validation import check_prompt, check_window
from h2okv.ops.attention import expected_attention, mean_queries
from h2okv.ops.choice import choose, protected_entries, recent_with_written
from h2okv.ops.reference import AttentionSpec
from h2okv.ops.rope import Layout, interleave_pairs, rotate
from h2okv.policy import BlockView, Inputs

# Tokens behind a block's last one at which its queries are re-evaluated (`Inputs.QUERIES`).
AHEAD = 16


class BlockAttention(Protocol):
    """A block's attention, which several caches share."""

    def __call__(
        self, attend: Callable[..., tuple[Tensor, Tensor]], /, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]: ...

    def once(self, compute: Callable[[], Tensor], /) -> Tensor: ...


class CacheLayer(BaseLayer):
    """One attention layer's entries; subclasses say where entries are and what evicting means."""

    checks_numbers = True  # refuses attention that is not finite; one rank alone must not stop
    # Of the block that is read, as in `Block`.
    is_late: Tensor | None = None
    is_inner = False
    # Whether cached entries are in the order of the text: an inner block came before.
    is_in_order = False
    # Called with the operation and its arguments in place of a block's attention.
    _shared_attention: BlockAttention | None = None

    @contextmanager
    def share_attention(self, attention: BlockAttention) -> Iterator[None]:
        """Take a block's attention from `attention`, for caches that read the same block."""
        self._shared_attention = attention
        try:
            yield
        finally:
            del self._shared_attention

    @torch.no_grad()
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        real: Tensor | None,
        spec: AttentionSpec,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Read new tokens: place, attend, score and evict, block by block of the contract.

        No gradient passes: what has been evicted could not be trained through.

        Args:
            query: ``[B, HQ, T, D]``.
            key: ``[B, H, T, D]``.
            value: ``[B, H, T, Dv]``.
            real: bool ``[B, T]``, False for padding; ``None`` if all tokens are real.
            spec: how; cuts wait for the ends of images (its reach).
            position_ids: where the model put the tokens, ``[B or 1, T]``; one after the other if
                ``None``.

        Returns:
            ``[B, HQ, T, Dv]``. Mutates the layer.
        """
        if is_cast(query.device):  # which would round logits and scores
            with torch.autocast(query.device.type, enabled=False):
                return self.attend(query, key, value, real, spec, position_ids)
        self.awaits_attention, self.attention_spec = False, spec
        dtype = value.dtype
        if dtype != self.dtype or query.dtype != dtype:
            query, key, value = (states.to(self.dtype) for states in (query, key, value))
        is_plain = real is None and query.shape[2] == 1 and self._takes_plain_step()
        if is_plain:
            self.is_late = None
        else:
            self._begin(query.shape[2], real)
        block = self._block(query, key, value, real, spec, position_ids)
        if self.forward.live is not None:
            block = block._replace(real=self.forward.live)
        self.awaits_attention = True  # an error or Ctrl-C from here on leaves half a forward
        blocks = None if is_plain else self._split(block)
        if blocks is None:
            output = self._read_token(block) if is_plain else self._read(block)
        else:
            output = query.new_zeros(*query.shape[:3], value.shape[-1])
            end, device_end = self.num_columns, self.cumulative_length + block.length
            for small_block in blocks:
                small_block.put(self._read(small_block), output)
            # With columns that are padding in every sequence.
            self.cumulative_length.copy_(device_end)
            self.num_columns = None if end is None else end + block.length
        pins = self.prompt.pins
        if pins and min(self.state.lengths()) >= pins[-1][1]:
            self.prompt.pins = ()
        if self.ends_forward or self.forward.num_layers == 1:
            self.forward.end(self.dtype)
        self.awaits_attention = False
        # In a compiled step a number that changes would compile it again each time.
        if not (torch.compiler.is_compiling() or self.forward.leaves_host):
            self.num_forwards += 1
        return output.to(dtype)

    def _takes_plain_step(self) -> bool:
        """Tell whether a step needs nothing but attention and an append."""
        return False

    def _split(self, block: Block) -> Iterable[Block] | None:
        """Return the blocks of the contract that a forward brings; ``None`` for one."""
        if self.log is not None:
            num_read = self._prompt_columns(self.log, block)
            # A forward without a prompt begins with the text's newest token, which is no draft.
            self.log.num_drafts = block.length - (num_read or 1)
            if num_read < block.length > 1:
                return self._with_drafts(block, num_read)
        return self._split_prompt(block)

    def _split_prompt(self, block: Block) -> Iterable[Block] | None:
        chunk = self.position_rule.chunk
        phases = self.state.phases(self.span) if self.span > 1 and block.length > 1 else []
        if chunk is None or block.length + max(phases, default=0) <= chunk:
            return None
        return block.split_prompt(chunk, phases)

    def _prompt_columns(self, log: StepLog, block: Block) -> int:
        """Return the columns of a block before its drafts, which are read as a block."""
        columns, log.prompt_columns = log.prompt_columns, None
        expected = self.prompt.expected_length
        if columns is not None:
            return min(columns, block.length)
        if self.holds_entries:
            return 0
        if expected is None:
            return block.length
        real = max(self._lengths(block) or (block.length,))
        return block.length - max(0, real - expected)

    def _with_drafts(self, block: Block, num_read: int) -> Iterator[Block]:
        """Yield a prompt and then each token that may be taken back, as a step would bring it."""
        if num_read:
            prompt = block.columns(0, num_read)
            yield from self._split_prompt(prompt) or [prompt]
        for column in range(num_read, block.length):
            yield block.columns(column, column + 1)

    def _begin(self, length: int, real: Tensor | None) -> None:
        """Set the budgets by the prompt's length, and refuse what cannot be read; mutates."""
        is_first = not self.state.budgets
        expected = self.prompt.expected_length
        if is_first:
            counts = [expected or length] * self.batch_size
            if real is not None and expected is None:
                counts = list(self.forward.counts(real))
            check_prompt(self, counts, length)
            self._set_budgets(counts)
        if self.position_rule.rolls and (is_first or length > 1):  # a single token finds room
            try:
                check_window(self, length)
            except ValueError:
                if is_first:  # the next prompt must not get the budget of a refused one
                    self.reset()
                raise

    def _block(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        real: Tensor | None,
        spec: AttentionSpec,
        position_ids: Tensor | None,
    ) -> Block:
        """Build a block from new tokens and the positions that the model gave them."""
        undo = placed = None
        length, rotations = query.shape[2], self.rotations
        looks_again = length > 1 or self.span > 1  # queries are re-evaluated
        if position_ids is None and (rotations.rolling or rotations.text) is not None:
            position_ids = self._next_positions(real, length)
        if position_ids is not None and rotations.rolling is not None:
            # Of all tokens at once: some frequencies depend on the largest position of a forward.
            undo = rotations.rolling.of_text(position_ids)
        elif position_ids is not None and rotations.text is not None and looks_again:
            placed = position_ids[:, None, :, None]
        block = Block(query, key, value, real, undo, placed, spec)
        return block if length == 1 else block._replace(counted=self._lengths(block))

    def _next_positions(self, real: Tensor | None, length: int) -> Tensor:
        """Return the positions of tokens that follow those of each sequence, ``[B, T]``."""
        if real is not None and not bool(real.all()):
            options, remedy = options_of_rotation(self.rotations, self.rule)
            raise ValueError(
                f"{options}: this model does not tell its attention the position_ids, which a"
                f" padded batch needs; run each sequence alone, or {remedy}."
            )
        seen = self.state.num_real_tokens.unsqueeze(1)  # sequences of a pool differ in length
        return seen + torch.arange(length, device=self.device)

    def _read(self, block: Block) -> Tensor:
        self.is_late, self.is_inner = block.is_late, block.is_inner
        takes_step = self._takes_step(block)
        if self.log is not None:
            if block.length == 1 and self.holds_entries:
                self.log.add(self.state, self.plan(), takes_step)
            else:
                self.log.forget()
        if self.rule.inputs is Inputs.WINDOW and self.holds_entries:  # tokens after the prompt stay
            count = block.counts()
            count = count if isinstance(count, int) else count.view(-1, 1, 1)
            self.state.recent += count
            self.state.total += count
            self.state.known_totals = None
        rolling = self.rotations.rolling
        if rolling is not None:
            # Together: for a single token it is the number of operations that takes time.
            both = torch.cat([block.query, block.key], dim=1)
            both = rotate(interleave_pairs(both, rolling.width, rolling.layout), block.undo)
            query, key = both.split([block.query.shape[1], block.key.shape[1]], dim=1)
            block = block._replace(query=query, key=key.to(self.dtype))
        read = self._read_token if takes_step else self._read_block
        output = read(block).to(self.dtype)
        self.forward.finish_steps()
        if self.departures is not None:
            self.departures.note(self.state.by_head("positions")[0], self.state.num_real_tokens)
        return output

    # --- a block: a prompt, a chunk of it, a later turn -------------------------------------------

    def _read_block(self, block: Block) -> Tensor:
        entries = self._place(block)
        output, sums = self._attend(block, entries)
        entries.scores = self._score(block, entries, sums, output)
        self.grow()
        self._evict(entries)
        return output

    def _as_attended(
        self, key: Tensor, value: Tensor, past: int, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[B, H, P + T, D]`` as the block attends to them."""
        keys, values, transform = self.storage.keys, self.storage.values, self.state.key_transform
        if self.rounds_blocks:  # the same for a token that comes alone and one in a block
            return keys.as_stored(key, past, transform), values.as_stored(value, past)
        attended_key = keys.as_attended(key, past, real, transform)
        return attended_key, values.as_attended(value, past, real)

    @abstractmethod
    def _place(self, block: Block) -> BlockEntries:
        """Put the block's tokens behind the cached entries."""

    @abstractmethod
    def _attend(self, block: Block, entries: BlockEntries) -> tuple[Tensor, Tensor]:
        """Return the output ``[B, HQ, T, Dv]`` and the entries' sums, fp32 ``[B, H, N]``."""

    @abstractmethod
    def _evict(self, entries: BlockEntries) -> None:
        """Evict down to the budget; mutates the state."""

    def _score(self, block: Block, entries: BlockEntries, sums: Tensor, output: Tensor) -> Tensor:
        """Return the scores after the block, fp32 ``[B, H, N]``, and count its tokens."""
        rule, count = self.rule, block.counts()
        is_whole = self.whole_blocks(block)
        if self.scores_spans:
            if not any(is_whole):
                self._check_numbers(output[:, :, -1])
                self.spans.add_queries(self.state, block)
                self._count(block)
                return self._score_ended(entries)
            entries.scores = self._score_begun(entries, is_whole)
            self.spans.make_room(self.state, block)  # from here on shapes stay
        is_block = block.length > 1 or self.span > 1
        by_keys = is_block and rule.effective_inputs is Inputs.KEYS
        if block.length > 1 and not rule.is_plain_sum:
            added = rule.score_block(self._view(block, entries, sums))
            if rule.effective_inputs is Inputs.QUERIES and not isinstance(count, int):
                # A sequence's only token adds its probabilities, with or without padding.
                added = torch.where((count > 1).view(-1, 1, 1), added, sums)
            if self.scores_spans and not all(is_whole):  # the others' at the end of their spans
                added = added * to_device(is_whole, self.state).view(-1, 1, 1)
            sums = added.to(sums.dtype)
        self._check_numbers(output[:, :, -1] if by_keys else sums)  # the last query sees every key
        if by_keys:
            sums = torch.zeros_like(sums)
        if self.scores_spans and not all(is_whole):
            self.spans.add_queries(self.state, block.of_others(is_whole))
        self._count(block)
        if self.spans is not None:
            self.spans.start_after(self.state, is_whole)
        scores = entries.scores
        if not self.prompt.is_partial:
            scores = self._decayed(scores, count)
        sums = sums.to(torch.float32)
        is_new = entries.past == 0 and not self.prompt.pins  # whose scores are 0
        entries.scores = sums if is_new else scores + sums
        if self.scores_spans and not all(is_whole):
            return self._score_ended(entries, is_whole)
        return entries.scores

    def _check_numbers(self, sums: Tensor) -> None:
        """Refuse numbers that are not finite when the forward ends."""
        if self.checks_numbers:
            self.forward.check_later(self.layer_idx, sums)

    def _score_ended(self, entries: BlockEntries, is_scored: Iterable[bool] = ()) -> Tensor:
        """Return entries' scores ``[B, H, N]``, with those of the spans that have just ended.

        But for sequences that `is_scored` marks.
        """
        pairs = zip_longest(self.spans.ended(self.state, self.is_late), is_scored)
        return self._score_queries(entries, [over and not done for over, done in pairs])

    def _score_begun(self, entries: BlockEntries, is_whole: Sequence[bool]) -> Tensor:
        """Return the scores ``[B, H, N]`` with those of spans that whole blocks end early."""
        phases = self.state.phases(self.span)
        begun = [is_over and phase > 0 for is_over, phase in zip(is_whole, phases, strict=True)]
        if self.state.queries is None or not any(begun):
            return entries.scores
        scores = entries.scores.clone()
        scores[..., : entries.past] = self._score_queries(entries.before_block(), begun, True)
        return scores

    def _score_queries(
        self, entries: BlockEntries, has_ended: list[bool], is_short: bool = False
    ) -> Tensor:
        is_late = self.is_late is not None  # the span after it is shorter
        sequences, span = self.spans.take_queries(
            self.state, self.attention_spec, has_ended, is_short or is_late, is_late, self.forward
        )
        if span is None:
            return entries.scores
        ended = replace(entries) if sequences is None else entries.of_sequences(sequences)
        ended.query = span.query
        zeros = self.forward.zeros(ended.scores.shape, self.device)
        added = self.rule.score_block(self._view(span, ended, zeros)).to(torch.float32)
        if sequences is not None:
            added = torch.zeros_like(entries.scores).index_copy(0, sequences, added)
        # Where spans cut the prompt too, a sum would favour old entries.
        return entries.scores + added if self.spans.whole_prompts else entries.scores.maximum(added)

    def _lengths(self, block: Block) -> tuple[int, ...] | None:
        """Return the real tokens of a block's sequences; ``None`` if only the device knows."""
        if torch.compiler.is_compiling():
            return None
        if block.real is None:
            return (block.length,) * self.batch_size
        if block.counted is not None or (block.length == 1 and self.holds_entries):
            return block.counted
        return self.forward.counts(block.real)

    def whole_blocks(self, block: Block) -> list[bool]:
        """Tell for each sequence whether a block is a whole prompt or turn, evicted from once.

        A single token behind others is a step, whatever the batch brings beside it.
        """
        continues = self.holds_entries and not self.prompt.was_partial
        is_whole = self.spans is not None and self.spans.whole_prompts
        if not is_whole or (block.length == 1 and continues):
            return [False] * self.batch_size
        counts = self._lengths(block) if continues else None
        return [count > 1 for count in counts] if counts else [True] * self.batch_size

    def _count(self, block: Block) -> None:
        """Count a block's tokens; mutates the layer."""
        tokens, state = block.counts(), self.state
        if isinstance(tokens, int) and not torch.compiler.is_compiling():  # in one launch
            torch._foreach_add_([state.num_real_tokens, self.cumulative_length], tokens)
        else:
            state.num_real_tokens += tokens
            self.cumulative_length += block.length
        state.note_count(self._lengths(block))
        self.note_columns(block.length)

    def _decayed(self, scores: Tensor, count: Tensor | int) -> Tensor:
        """Return scores ``[B, H, N]`` after `count` further tokens of each sequence."""
        if self.rule.scoring.factor is None:
            return scores
        if isinstance(count, int):
            count = scores.new_full((self.batch_size,), count)
        return self.rule.scoring.decayed(scores, count)

    def _view(self, block: Block, entries: BlockEntries, sums: Tensor) -> BlockView:
        """Return a block and its entries as a rule sees them."""
        return BlockView(
            entries.query, entries.attended_key, entries.attended_value, entries.is_entry,
            block.real, block.spec, sums, self.layer_idx, self.module,
            lambda: self._attend_from_behind(block, entries),
        )  # fmt: skip

    def _attend_from_behind(self, block: Block, entries: BlockEntries) -> Tensor:
        """Re-evaluate a block's queries behind its end; fp32 ``[B, H, N]`` (`BlockView`)."""
        query, keys, real = block.query, entries.attended_key, block.real
        is_entry, rotations, spec = entries.is_entry, self.rotations, block.spec
        rotation = None
        if spec.sinks is not None and block.is_span:  # of which means of heads are stored
            sinks = mean_queries(spec.sinks.unsqueeze(0), keys.shape[1]).squeeze(0)
            spec = spec._replace(sinks=sinks)
        if rotations.rolling is not None:
            limit = keys.shape[2] if block.is_span else self._rank_limit(block.length)
            num_ranks = limit + AHEAD
            query = rotations.rolled_behind(query, keys, is_entry, num_ranks, AHEAD)
        elif rotations.text is not None:
            assert block.position_ids is not None
            position_ids = block.position_ids[:, 0, :, 0]
            rotation = self._rotation_behind(rotations, position_ids, real)
        return self._expect(query, keys, is_entry, real, spec, rotation)

    def _rotation_behind(
        self, rotations: Rotations, position_ids: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Layout]:
        if torch.compiler.is_compiling():
            return rotations.moved_behind(real, position_ids, AHEAD)
        # Layers get views of one tensor, which is kept lest another takes its place.
        key = id(rotations.text), place_of(position_ids), place_of(real)
        rotation, _ = self.forward.shared(
            key, lambda: (rotations.moved_behind(real, position_ids, AHEAD), (position_ids, real))
        )
        return rotation

    def _expect(self, query: Tensor, *arguments: Any) -> Tensor:
        """Run `h2okv.ops.attention.expected_attention`, or a kernel."""
        return expected_attention(query, *arguments)

    @abstractmethod
    def _rank_limit(self, length: int) -> int:
        """Return an upper bound of the ranks that a block of T tokens needs."""

    def _query_weights(self, block: Block) -> Tensor | None:
        """Return what each query counts for in the sums, fp32 ``[B, T]``; ``None`` for one."""
        if not self.rule.weighs_queries:
            return None
        if block.real is None:
            later = torch.arange(block.length - 1, -1, -1, device=self.device)
            later = later.expand(self.batch_size, block.length)
        else:
            later = block.real.sum(dim=1, keepdim=True) - block.real.cumsum(dim=1)
        return self.rule.query_weights(later, self.state.recent.flatten(1))

    def _block_entries(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return scores so far and positions of a block's tokens, ``[B, H, T]``."""
        seen, length = self.state.num_real_tokens.unsqueeze(1), block.length
        lengths = None if torch.compiler.is_compiling() else self.state.known_lengths

        def count() -> Tensor:
            if lengths and len({*lengths}) == 1 and self.forward.sums is None:
                ends = lengths[0], lengths[0] + length
                return torch.arange(*ends, dtype=torch.int32, device=self.device)
            return (seen + torch.arange(length, device=self.device)).to(torch.int32)

        if block.real is None and lengths:
            positions = self.forward.shared(("count", lengths, length, self.device), count)
        elif block.real is None:
            positions = count()
        else:
            positions = torch.where(block.real, seen + block.real.cumsum(dim=1) - 1, -1)
        positions = positions.to(torch.int32).view(-1, 1, length)
        positions = positions.expand(self.batch_size, self.num_kv_heads, length)
        scores = self.forward.zeros(positions.shape, self.device)
        # An infinite score stays infinite whatever is added, and none is lower: no step needs to
        # know of pins, and the score moves with its entry.
        for start, stop in self.prompt.pins:
            is_pinned = (positions >= start) & (positions < stop)
            scores = scores.masked_fill(is_pinned, torch.inf)
        return scores, positions

    def _written(self) -> Tensor | None:
        """Return the tokens of each sequence since its last whole prompt, int64 ``[B]``, if any."""
        state = self.state
        if self.spans is None or not self.spans.whole_prompts or not any(state.written()):
            return None
        written, seen = state.written(), state.num_real_tokens

        def numbers() -> Tensor:
            is_one = len(set(written)) == 1  # which needs no copy
            return seen.new_full(seen.shape, written[0]) if is_one else to_device(written, state)

        return self.forward.shared(("written", state.device, written), numbers)

    def protected(self, positions: Tensor, scores: Tensor) -> Tensor:
        """Mark the entries ``[B, H, N]`` that a cut must not touch, by positions and scores.

        Where spans follow a whole prompt, what the model has written since counts as recent too.
        """
        state, recent = self.state, self.state.recent
        if (written := self._written()) is not None:
            recent = recent_with_written(recent, state.sink, state.total, written, scores)
        return protected_entries(positions, self.newest(), state.sink, recent)

    # --- ranks ------------------------------------------------------------------------------------

    def eviction_scores(self) -> Tensor:
        """Return the scores of each head's entries as the rule ranks them, fp32 ``[B, H, S]``.

        In the order of `SlotState.by_head`; 0 in an empty slot.
        """
        positions, scores, weights = self.state.by_head("positions", "scores", "value_weights")
        scores = self.rule.eviction_scores(scores, positions, self.newest(), weights)
        return scores.masked_fill(positions < 0, 0.0)

    def explain(self, sequence: int, head: int, position: int) -> Explanation:
        """Explain a token's place; arguments and errors as of `H2OCache.explain`."""
        state, newest = self.state, self.newest()
        positions, scores, weights = state.by_head("positions", "scores", "value_weights")
        limits = {"sequence": (sequence, self.batch_size), "head": (head, self.num_kv_heads)}
        for name, (number, limit) in limits.items():
            if not isinstance(number, int) or not 0 <= number < limit:
                raise ValueError(f"{name} must be from 0 to {limit - 1}, got {number!r}.")
        last = int(newest[sequence])
        if not isinstance(position, int) or not 0 <= position <= last:
            raise ValueError(f"position must be from 0 to {last}, got {position!r}.")
        at = sequence, head
        if not bool((positions[at] == position).any()):
            record = self.departures
            left_at = None if record is None else record.of(sequence, head, position)
            return Explanation(position, False, left_at=left_at)
        ranks = self._rank(scores, positions, newest, weights)
        total, protected = None, torch.zeros_like(positions, dtype=torch.bool)
        if self.rule.evicts:
            total = int(state.total.expand_as(positions[..., :1])[at])
            protected = self.protected(positions, scores)
        budget = state.budgets[sequence]
        return standing(position, positions[at], ranks[at], protected[at], budget, total)

    def choose(self, entries: BlockEntries, total: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """Choose the entries that stay at a cut, by numbers as they will be stored.

        Arguments and result as of `ops.choice.choose`.
        """
        scores, positions, weights, keys = entries.scores, entries.positions, None, None
        if self.rule.weighs_values:
            values = self.storage.values.as_stored(entries.value, entries.past)
            weights = self.rule.value_weights(values)
        if self.rule.effective_inputs is Inputs.KEYS:
            keys = self.storage.keys.as_stored(entries.key, entries.past, self.state.key_transform)
        ranks = self._rank(scores, positions, self.newest(), weights, keys)
        is_in_order = self.is_in_order or entries.past == 0
        protected = self.protected(positions, scores)
        return choose(ranks, positions, protected, total, limit, is_in_order)

    def _rank(
        self,
        scores: Tensor,
        positions: Tensor,
        newest: Tensor,
        weights: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Rank entries ``[B, H, N]`` as `Rule.priority` does; infinite where one is pinned.

        Weights ``[B, H, N]`` and keys ``[B, H, N, D]`` are those of the state, if not given.
        """
        rule = self.rule
        weights = self.state.value_weights if weights is None else weights
        scores = rule.eviction_scores(scores, positions, newest, weights)
        if rule.ranks_by_scores:
            return scores
        pinned = scores.isinf()
        scores = scores.masked_fill(pinned, 0.0)
        if rule.inputs is Inputs.WINDOW:
            # The window's own entries stay, so they have no say in their neighbours.
            scores = scores.masked_fill(positions > newest - self.state.recent, 0.0)
        if rule.inputs is Inputs.KEYS:
            if keys is None:
                keys = self.storage.keys.read(self.state.keys, self.dtype, self.state.key_transform)
            ranks = rule.key_priority(keys, positions)
        else:
            ranks = rule.priority(scores, positions, newest, self.layer_idx)
        if self.state.num_static is not None:
            marked = rule.static_mask(positions, newest, self.state.num_static)
            pinned = pinned if marked is None else pinned | marked
        return ranks.masked_fill(pinned, torch.inf)

    # --- a single token ---------------------------------------------------------------------------

    def _takes_step(self, block: Block) -> bool:
        """Tell whether a block is a decode step."""
        return False

    def _read_token(self, block: Block) -> Tensor:
        """Read one token of each sequence: place, attend, score and evict in one operation."""
        raise AssertionError("only layers of slots take steps")
