"""One layer's contract: attend, score, evict."""

from __future__ import annotations

import copy
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from h2okv.cache.argument import CACHE
from h2okv.cache.rope import PositionRule, Rotation
from h2okv.cache.slot_state import KVStorage, SlotState, is_cast, ordinary_tensors
from h2okv.cache.validation import check_match, check_prompt, check_window
from h2okv.config import Budget, TokenBudget
from h2okv.ops.attention import expected_attention
from h2okv.ops.rope import interleave_pairs, rotate
from h2okv.policy import Policy
from h2okv.policy.scoring import Scoring, power
from h2okv.provenance import fingerprint


class Block(NamedTuple):
    """New tokens of one layer, and how they are attended to."""

    query: Tensor  # [B, HQ, T, D]
    key: Tensor  # [B, H, T, D]
    value: Tensor  # [B, H, T, Dv]
    real: Tensor | None  # bool [B, T], False for padding; None if there is none
    undo: Tensor | None  # fp32 [B or 1, 1, T, R / 2, 2], rotates back; None where keys stay rotated
    places: Tensor | None  # int [B or 1, 1, T, 1], where the model put them; None if nobody asks
    scale: float
    softcap: float | None

    def split(self, chunk: int) -> Iterator[tuple[tuple[Any, Any], Block]]:
        """Parts of a block, each sequence cut as if it were alone, and their indices ``[B, T]``."""
        batch, length, device = self.query.shape[0], self.query.shape[2], self.query.device
        if self.real is None:
            for start in range(0, length, chunk):
                index = (slice(None), slice(start, start + chunk))
                yield index, self._part(index, None)
            return
        # Real tokens first, in their order: shorter sequences get padding in the last parts.
        columns = (~self.real).to(torch.uint8).argsort(dim=1, stable=True)
        longest = int(self.real.sum(dim=1).max())
        sequences = torch.arange(batch, device=device).unsqueeze(1)
        for own in columns[:, :longest].split(chunk, dim=1):
            real = self.real.gather(1, own)
            yield (sequences, own), self._part((sequences, own), None if real.all() else real)

    def _part(self, index: tuple[Any, Any], real: Tensor | None) -> Block:
        """The columns of an index in ``[B, T, ...]``: a view if that is of slices."""

        def take(states: Tensor) -> Tensor:
            every = states.expand(self.query.shape[0], *states.shape[1:])
            return every.transpose(1, 2)[index].transpose(1, 2)

        query, key, value = take(self.query), take(self.key), take(self.value)
        undo, places = (None if own is None else take(own) for own in (self.undo, self.places))
        return Block(query, key, value, real, undo, places, self.scale, self.softcap)


# How far behind a block's last token its queries are asked again (`Scoring`, ``expected``).
AHEAD = 16
# Attribute on the key tensor by which the attention function finds the cache layer.
LAYER_ATTRIBUTE = "_h2okv_layer"
_NOT_PICKLED = ("owner", "rotation", "text_rotation", "rotary", "operations", "segments")


class CacheLayer(CacheLayerMixin):
    """One attention layer's cache with scores; subclasses hold the entries.

    The model calls `update` and then the attention function, which calls `attend` on the layer
    that it finds on the key tensor. All the work happens in `attend`.
    """

    is_sliding = False
    is_croppable = False
    drops = True  # what is evicted, and stores the rest as `storage` says; else it masks
    window: int | None = None  # the sliding window that the entries stand for
    rotation: Rotation | None
    text_rotation: Rotation | None
    cumulative_length: Any  # transformers says int; its static layer holds a tensor too

    def __init__(
        self,
        layer_idx: int,
        budget: Budget,
        policy: Policy,
        rule: PositionRule,
        scoring: Scoring = Scoring(),  # noqa: B008  # immutable
        kv_bits: int | None = None,
        head_budgets: Sequence[Budget] | None = None,
    ) -> None:
        # Not that of the base, whose keys and values are the state's here.
        self.layer_idx, self.budget, self.policy = layer_idx, budget, policy
        self.head_budgets = head_budgets  # of each KV head, where they differ
        self.rule, self.scoring = rule, scoring
        self.storage = KVStorage(kv_bits)
        # Whether the policy keeps entries by a rule of its own: in all its caches or in none,
        # whatever the prompts, so that caches can be joined.
        self.has_static_mask = policy.allocate_budget(TokenBudget(0, 2, 2)).num_static > 0
        # One list for all layers of a cache, so that they share what is the same.
        self.known_rotations: list[Rotation] = []
        # Likewise: layers whose step is not ended yet, which the last layer of the cache does.
        self.deferred: list[Any] | None = None
        self.ends_forward = False
        # Tensors, not ints: a Python int that changes with every step would recompile every step.
        self.cumulative_length = torch.zeros((), dtype=torch.int64)
        self.awaits_attention = False
        self.is_placed = False
        self._forget()

    def _forget(self) -> None:
        vars(self).pop("_held", None)
        self.is_initialized = self.is_deferred = False
        self.is_cast = self.has_inner_padding = False
        self.num_forwards = 0
        self.expected_length: int | None = None
        # Spans of the prompt that shall never be evicted, until they have been read.
        self.pins: tuple[tuple[int, int], ...] = ()
        self.owner: weakref.ref[torch.nn.Module] | None = None
        self.expected_weights: str | None = None
        self._forget_rotation()

    @property
    def state(self) -> SlotState:
        """What is held; no slots before the first block."""
        if self.is_deferred:
            self.end_steps()
        return self._held

    @state.setter
    def state(self, state: SlotState) -> None:
        self._held, self.is_deferred = state, False

    def end_steps(self) -> None:
        """Ends the steps of all layers that have left that to the last one; mutates them."""

    def _forget_rotation(self) -> None:
        """Has the model asked anew, at its next forward, how it rotates this layer's keys."""
        # The other one is for queries that are asked again, where keys stay rotated.
        self.rotation = self.text_rotation = None
        self.knows_rotation = not (self.rule.rolls or self.scoring.looks_ahead)

    def learn_rotation(self, found: Rotation | None) -> None:
        """Notes how the model rotates this layer's keys, if it does; mutates the layer."""
        self.rotation, self.text_rotation = (found, None) if self.rule.rolls else (None, found)
        self.knows_rotation = True

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: not what was learned of the model, whose weights are compared later."""
        self.end_steps()
        learned = dict.fromkeys(_NOT_PICKLED) | {"known_rotations": [], "deferred": None}
        return {**vars(self), **learned, "expected_weights": self.weights()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickles; ordinary tensors even under inference_mode, so that a step may write."""
        vars(self).update(state)
        self._forget_rotation()
        with ordinary_tensors():
            self.cumulative_length = self.cumulative_length.clone()
            if self.is_initialized:
                self.state = self.state.map(Tensor.clone)

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheLayer:
        self.end_steps()
        twin = memo[id(self)] = type(self).__new__(type(self))
        vars(twin).update({name: copy.deepcopy(held, memo) for name, held in vars(self).items()})
        return twin

    @property
    def holds_entries(self) -> bool:
        return self.is_initialized and self.state.num_slots > 0

    @property
    def holds_budgets(self) -> bool:
        """Whether the prompt's length is known, and with it what each sequence keeps."""
        return self.is_initialized and bool(self.state.budgets)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """``[B, H, S, D]`` in the order of the slots, or their codes; ``None`` before a block."""
        return self.state.stored("keys") if self.holds_entries else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self.state.stored("values") if self.holds_entries else None

    @property
    def batch_size(self) -> int:
        return self.state.batch_size

    @property
    def device(self) -> torch.device:
        return self.state.device

    # --- transformers' side: batches, lengths, going back -----------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Notes shapes, dtype and device; the slots follow when the prompt's length is known."""
        self.dtype, self.num_kv_heads = key_states.dtype, key_states.shape[1]
        self.key_size, self.value_size = key_states.shape[-1], value_states.shape[-1]
        self.state = self.empty_state(key_states, value_states)
        with torch.inference_mode(False):
            device = "cpu" if key_states.is_meta else key_states.device  # slots are counted by it
            self.cumulative_length = torch.zeros((), dtype=torch.int64, device=device)
        self.is_initialized = True

    def empty_state(self, key: Tensor, value: Tensor) -> SlotState:
        """A state without slots for keys ``[B, H, T, D]`` and values ``[B, H, T, Dv]``."""
        return SlotState.empty(key, value, self.storage if self.drops else KVStorage())

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Passes new keys and values ``[B, H, T, D]`` on, the keys marked with this layer."""
        self.require_attention()
        # Autocast gives some models (OPT) keys in another dtype inside than outside.
        self.is_cast = self.is_cast or is_cast(key_states.device)
        if self.is_initialized:
            if self.is_cast:
                key_states = key_states.to(self.dtype)
            check_match(self, key_states)
            if key_states.device != self.device:  # after loading from a file
                self.move(key_states.device)
        else:
            self.lazy_initialization(key_states, value_states)
        if key_states.is_meta:  # whatever the attention, there is nothing but sizes
            self._count_on_meta(key_states.shape[2])
            return key_states, value_states
        setattr(key_states, LAYER_ATTRIBUTE, self)
        self.awaits_attention = True
        return key_states, value_states

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Takes each sequence from another one, scores included (beam search); int64 ``[B]``."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        indices = torch.arange(self.batch_size, device=self.device)
        self.batch_select_indices(indices.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps sequences: those named, in that order (int64), or those marked (bool ``[B]``)."""
        if not self.is_initialized:
            return
        indices = indices.to(self.device)
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.state = self.state.index_select(indices)

    def move(self, device: torch.device) -> None:
        with ordinary_tensors():
            self.state = self.state.map(lambda tensor: tensor.to(device))
            self.cumulative_length = self.cumulative_length.to(device)
        # Its tables are on the device of before.
        self._forget_rotation()

    def get_mask_sizes(self, query_length: int) -> tuple[int, Tensor]:  # type: ignore[override]
        """Returns the block's own size and offset; kept entries need no mask from the model."""
        if query_length == 0:
            raise ValueError(
                f"H2OCache has seen {self.get_seq_length()} tokens and got none after them; give "
                "generate the whole text with more at its end, or generate(**cache.next_turn("
                f"input_ids), {CACHE}=cache), or call cache.reset() to read another text."
            )
        return query_length, self.cumulative_length

    def get_seq_length(self) -> Any:  # transformers says int; its static layer gives a tensor too
        """Returns the tokens seen, padding included (not the tokens held)."""
        if not self.is_initialized:
            return 0
        if torch.compiler.is_compiling():  # where a number that changes would be compiled anew
            return self.cumulative_length.clone()
        return int(self.cumulative_length)

    def get_max_length(self) -> int:
        return -1  # any number of tokens may pass

    def reset(self) -> None:
        self._forget()
        self.awaits_attention = False

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "H2OCache cannot take tokens back (crop), because what it evicted for them is gone; "
            "generate without assistant_model, prompt_lookup_num_tokens or other speculative modes."
        )

    def activate_past_recording(self) -> None:
        self.crop(0)  # transformers asks for it before it generates tokens that it may take back

    # --- the attention function's side ------------------------------------------------------------

    def require_attention(self) -> None:
        """Raises if keys were handed out and no H2O attention came back for them."""
        if self.awaits_attention:
            raise ValueError(
                f"H2OCache: layer {self.layer_idx} got keys, but the model's attention is not "
                "'h2o' (or an earlier forward was interrupted); call "
                "model.set_attn_implementation('h2o') or use h2okv.enable(model), then "
                "cache.reset()."
            )

    def claim(self, module: torch.nn.Module) -> None:
        if self.owner is None:
            expected, found = self.expected_weights, None
            if expected is not None:
                found = fingerprint(module)  # none of weights that are offloaded
            if found not in (None, expected):
                raise ValueError(
                    f"H2OCache: the entries of layer {self.layer_idx} were saved with other "
                    "weights; load the file with the model that wrote it, in the same dtype."
                )
            self.owner = weakref.ref(module)
        elif self.owner() is not module:
            raise ValueError(
                f"H2OCache: the entries of layer {self.layer_idx} were written by another model; "
                "call cache.reset() or make a new H2OCache."
            )

    def weights(self) -> str | None:
        """Fingerprint of the module that wrote the entries."""
        owner = None if self.owner is None else self.owner()
        return self.expected_weights if owner is None else fingerprint(owner)

    @torch.no_grad()
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        real: Tensor | None,
        scale: float,
        softcap: float | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Attends, scores and evicts, block by block of the contract; ``[B, HQ, T, Dv]``.

        Shapes as in `Block`. The positions ``[B or 1, T]`` are where the model put the tokens, one
        after the other if ``None``. Mutates the layer. No gradient passes: what is evicted could
        not be trained through.
        """
        if is_cast(query.device):  # which would round logits and scores
            with torch.autocast(query.device.type, enabled=False):
                return self.attend(query, key, value, real, scale, softcap, position_ids)
        self.awaits_attention = False
        length, dtype = query.shape[2], value.dtype
        query, key, value = (states.to(self.dtype) for states in (query, key, value))
        is_first = not self.state.budgets
        if is_first:
            counts = [self.expected_length or length] * self.batch_size
            if real is not None and self.expected_length is None:
                counts = real.sum(dim=1).tolist()
            check_prompt(self, counts, length)
            self._set_budgets(counts)
        undo = places = None
        if self.rule.rolls and (is_first or length > 1):  # a single token always finds room
            try:
                check_window(self, length)
            except ValueError:
                if is_first:  # the budget of a refused prompt must not be the next one's
                    self.reset()
                raise
        if position_ids is None and (self.rotation or self.text_rotation) is not None:
            position_ids = self._next_positions(real, length)
        if self.rotation is not None:
            # Of all tokens at once: some frequencies depend on the largest position of a forward.
            undo = self.rotation.of_text(position_ids)
        elif self.text_rotation is not None and length > 1:
            places = position_ids[:, None, :, None]
        block = Block(query, key, value, real, undo, places, scale, softcap)
        chunk = self.rule.prefill_chunk
        if chunk is None or length <= chunk:
            output = self._attend_block(block)
        else:
            output = query.new_zeros(*query.shape[:3], value.shape[-1])
            end = self.cumulative_length + length
            for index, part in block.split(chunk):
                output.transpose(1, 2)[index] = self._attend_block(part).transpose(1, 2)
            self.cumulative_length.copy_(end)  # with columns that are padding in every sequence
            # The next layer begins with the first of these tokens, this one has seen the last.
            self.end_steps()
        if self.pins and int(self.state.num_real_tokens.min()) >= self.pins[-1][1]:
            self.pins = ()
        # In a compiled step a number that changes would compile it anew each time.
        if not torch.compiler.is_compiling():
            self.num_forwards += 1
        return output.to(dtype)

    def _set_budgets(self, counts: list[int]) -> None:
        """Says what each sequence keeps, by the real tokens of its prompt; mutates the state."""
        own, totals = self.head_budgets, None
        if own is None:
            budgets = [self.policy.allocate_budget(self.budget.resolve(n)) for n in counts]
        else:
            allocate = self.policy.allocate_budget
            by_head = [[allocate(budget.resolve(n)) for budget in own] for n in counts]
            budgets = [max(heads, key=lambda budget: budget.total) for heads in by_head]
            totals = [[budget.total for budget in heads] for heads in by_head]
        self.state.set_budgets(budgets, self.has_static_mask, totals)

    def _attend_block(self, block: Block) -> Tensor:
        if self.policy.prompt_only and self.holds_entries:  # which keeps what follows the prompt
            length, real = block.query.shape[2], block.real
            count = length if real is None else real.sum(dim=1).view(-1, 1, 1)
            self.state.recent += count
            self.state.total += count
        if self.rotation is not None:
            width, layout = self.rotation.width, self.rotation.layout
            # Together: for a single token it is the number of operations that takes time.
            both = torch.cat([block.query, block.key], dim=1)
            both = rotate(interleave_pairs(both, width, layout), block.undo)
            query, key = both.split([block.query.shape[1], block.key.shape[1]], dim=1)
            block = block._replace(query=query, key=key.to(self.dtype))
        return self._attend(block).to(self.dtype)

    def _next_positions(self, real: Tensor | None, length: int) -> Tensor:
        """Positions of tokens that follow those seen, ``[1, T]``, for models that tell none."""
        if real is not None and not bool(real.all()):
            raise ValueError(
                "positions='rolling' and scoring='expected': this model does not tell its attention"
                " the position_ids, which a padded batch needs; run each sequence alone."
            )
        return (self.cumulative_length + torch.arange(length, device=self.device)).unsqueeze(0)

    def _count_on_meta(self, length: int) -> None:
        """Counts T more tokens of a model on the meta device; mutates the layer."""
        raise ValueError("simulate=True needs numbers, which a model on the meta device has not.")

    @abstractmethod
    def _attend(self, block: Block) -> Tensor:
        """The subclass's part of `attend`; rolling layers get queries and keys un-rotated."""

    # --- policy and scoring; H2O's own sums (`is_plain`) need none of it -----------------------

    @property
    def is_plain(self) -> bool:
        """Whether it is H2O's frame and no more: plain sums, nothing kept by a rule of its own."""
        return self.scoring.is_sum and not self.has_static_mask and not self.policy.prompt_only

    @property
    def ranks_by_scores(self) -> bool:
        """Whether a decode step may evict by the accumulated scores as they stand."""
        if self.policy.prompt_only:  # which evicts nothing then
            return True
        return self._is_ranked_by_scores and self.scoring.is_incremental

    @property
    def _is_ranked_by_scores(self) -> bool:
        """Whether the policy's ranks are the scores of the scoring, and nothing else counts."""
        by_scores = type(self.policy).priority is Policy.priority and self.policy.uses_scores
        return by_scores and not self.has_static_mask and not self.policy.prompt_only

    def newest(self) -> Tensor:
        """Position of each sequence's newest token, int64 ``[B, 1, 1]``."""
        return self.state.num_real_tokens.view(-1, 1, 1) - 1

    def eviction_scores(self) -> Tensor:
        """The scores of what each head holds as the policy sees them, fp32 ``[B, H, S]``.

        In the order of `SlotState.by_head`; 0 in an empty slot.
        """
        positions, scores, norms = self.state.by_head("positions", "scores", "norms")
        scores = self.scoring.eviction_scores(scores, positions, self.newest(), norms)
        return scores.masked_fill(positions < 0, 0.0)

    def _query_weights(self, real: Tensor | None, length: int) -> Tensor | None:
        """What each query of a block of T counts for in the scores, ``[B, T]``; `None`: one."""
        if self.is_plain:
            return None
        if real is None:
            later = torch.arange(length - 1, -1, -1, device=self.device)
            later = later.expand(self.batch_size, length)
        else:
            later = real.sum(dim=1, keepdim=True) - real.cumsum(dim=1)
        if self.policy.prompt_only:
            return (later < self.state.recent.flatten(1)).to(torch.float32)
        return self.scoring.query_weights(later)

    def _block_entries(self, length: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scores so far and positions of a block's tokens, ``[B, H, T]``."""
        seen = self.state.num_real_tokens.unsqueeze(1)
        if real is None:
            positions = seen + torch.arange(length, device=self.device)
        else:
            positions = torch.where(real, seen + real.cumsum(dim=1) - 1, -1)
        positions = positions.to(torch.int32).unsqueeze(1)
        positions = positions.expand(self.batch_size, self.num_kv_heads, length)
        scores = torch.zeros(positions.shape, dtype=torch.float32, device=self.device)
        # An infinite score stays so whatever is added to it, and none is lower, so that no step
        # needs to know of pins; and it goes wherever the entry goes.
        for start, stop in self.pins:
            scores.masked_fill_((positions >= start) & (positions < stop), torch.inf)
        return scores, positions

    def _expected(
        self, block: Block, sums: Tensor, keys: Tensor, entries: Tensor | None, limit: int
    ) -> Tensor:
        """What a block adds to the scores if its queries are asked again behind all entries.

        Instead of the sums ``[B, H, N]``, but for a sequence's single token. All ranks of the keys
        ``[B, H, N, D]`` are below `limit`.
        """
        query, real = block.query, block.real
        if self.rotation is not None:
            end = keys.new_tensor(keys.shape[2] - 1, dtype=torch.int64).view(1, 1, 1)
            if entries is not None:
                end = entries[:, :1].sum(dim=-1, keepdim=True) - 1
            query = rotate(query, self.rotation.of_ranks(limit + AHEAD)[end + AHEAD])
        elif self.text_rotation is not None:
            places = block.places[:, 0, :, 0]
            if real is not None:
                places = places.expand_as(real)
            last = places if real is None else places.masked_fill(~real, 0)
            width, layout = self.text_rotation.width, self.text_rotation.layout
            factors = self.text_rotation.moved(places, last.amax(dim=1, keepdim=True) + AHEAD)
            query = rotate(interleave_pairs(query, width, layout), factors)
            keys = interleave_pairs(keys, width, layout)
        expected = expected_attention(query, keys, entries, real, block.scale, block.softcap)
        if real is None:
            return expected
        return torch.where((real.sum(dim=1) > 1).view(-1, 1, 1), expected, sums)

    def _decayed(self, scores: Tensor, real: Tensor | None, length: int) -> Tensor:
        """What scores from before a block are worth after it, ``[B, H, N]``."""
        factor = self.scoring.factor
        if factor is None:
            return scores
        count = scores.new_full((self.batch_size,), length) if real is None else real.sum(dim=1)
        return scores * power(factor, count).view(-1, 1, 1)

    def _ranking(
        self,
        scores: Tensor,
        positions: Tensor,
        newest: Tensor,
        norms: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Ranks entries ``[B, H, N]`` as `Policy.priority` does; infinite where one is pinned.

        Norms ``[B, H, N]`` and keys ``[B, H, N, D]`` are those held, if they are not given.
        """
        if not self.scoring.is_sum:
            norms = self.state.norms if norms is None else norms
            scores = self.scoring.eviction_scores(scores, positions, newest, norms)
        if self._is_ranked_by_scores:
            return scores
        pinned = scores.isinf()
        scores = scores.masked_fill(pinned, 0.0)
        if self.policy.prompt_only:
            # Of the window itself nothing is to be decided, so it has no say in its neighbours.
            scores = scores.masked_fill(positions > newest - self.state.recent, 0.0)
        if self.policy.uses_keys:
            if keys is None:
                keys = self.storage.read(self.state.keys, self.dtype)
            ranks = self.policy.key_priority(keys, positions)
        else:
            ranks = self.policy.priority(scores, positions, newest, self.layer_idx)
        if self.state.num_static is not None:
            marked = self.policy.static_mask(positions, newest, self.state.num_static)
            pinned = pinned if marked is None else pinned | marked
        return ranks.masked_fill(pinned, torch.inf)

    def _norms_of(self, values: Tensor) -> Tensor | None:
        """L1 norms of values ``[B, H, N, Dv]``, fp32 ``[B, H, N]``; ``None`` if not asked for."""
        if not self.scoring.uses_values:
            return None
        wide = torch.promote_types(values.dtype, torch.float32)  # a float64 is not narrowed before
        norms = torch.linalg.vector_norm(values, ord=1, dim=-1, dtype=wide).to(torch.float32)
        return norms.clamp_(min=torch.finfo(torch.float32).tiny)  # infinity times zero is no score

    # --- sizes ------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes held: keys, values, and what there is beside them."""
        return self.state.nbytes if self.holds_entries else 0

    @property
    def full_nbytes(self) -> int:
        """Bytes of the keys and values that a full cache would hold for the tokens seen."""
        if not self.is_initialized:
            return 0
        seen = int(self.cumulative_length)
        return self.batch_size * self.num_kv_heads * seen * self.entry_bytes

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry's key and value in the model's dtype, for one head."""
        return int((self.key_size + self.value_size) * self.dtype.itemsize)

    def load_state(self, state: SlotState, seen: Tensor, weights: str | None) -> None:
        self.state, self.cumulative_length, self.expected_weights = state, seen, weights
