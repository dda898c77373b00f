"""One layer's contract: attend, score, evict."""

from __future__ import annotations

import copy
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from h2okv.cache.rope import PositionRule, Rotation
from h2okv.cache.validation import check_match, check_whole_prompt, check_window
from h2okv.config import Budget, TokenBudget
from h2okv.ops.rope import interleave_pairs, rotate
from h2okv.policy import Policy
from h2okv.policy.h2o import H2OPolicy
from h2okv.policy.scoring import Scoring
from h2okv.provenance import fingerprint


@dataclass(frozen=True)
class Block:
    """New tokens of one layer.

    Attributes:
        query: ``[B, HQ, T, D]``.
        key: ``[B, H, T, D]``.
        value: ``[B, H, T, Dv]``.
        real: bool ``[B, T]``, False for padding; ``None`` if there is none.
        undo: fp32 ``[B or 1, 1, T, R / 2, 2]``, factors that rotate queries and keys back; ``None``
            where they stay as the model rotated them.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    real: torch.Tensor | None
    undo: torch.Tensor | None


def split_block(block: Block, chunk: int) -> Iterator[tuple[torch.Tensor, Block]]:
    """Cuts a long block; every row by its own real tokens, whatever its padding.

    A row is then cut at the same tokens as alone. Rows with fewer real tokens than others get
    padding in the last pieces.

    Yields:
        ``(columns, piece)``: int64 ``[B, c]``, the columns of the block that the piece holds.
    """
    batch, _, length, _ = block.query.shape
    columns = torch.arange(length, device=block.query.device).expand(batch, length)
    if block.real is None:
        for part in columns.split(chunk, dim=1):
            at = slice(int(part[0, 0]), int(part[0, -1]) + 1)
            yield part, _columns(block, at)
        return
    # Real tokens first, in their order.
    columns = (~block.real).to(torch.uint8).argsort(dim=1, stable=True)
    longest = int(block.real.sum(dim=1).max())
    for part in columns[:, :longest].split(chunk, dim=1):
        yield part, _gathered(block, part)


def _columns(block: Block, at: slice) -> Block:
    """A view of the same columns of every row."""
    query, key, value = (part[:, :, at] for part in (block.query, block.key, block.value))
    undo = None if block.undo is None else block.undo[:, :, at]
    return Block(query, key, value, None, undo)


def _gathered(block: Block, columns: torch.Tensor) -> Block:
    """A copy of each row's own columns, int64 ``[B, c]``."""
    assert block.real is not None
    rows = torch.arange(columns.shape[0], device=columns.device).unsqueeze(1)

    def take(states: torch.Tensor) -> torch.Tensor:
        """Each row's columns, of ``[B, H, T, ...]``."""
        own_rows = rows if states.shape[0] > 1 else torch.zeros_like(rows)
        return states.transpose(1, 2)[own_rows, columns].transpose(1, 2)

    query, key, value = (take(part) for part in (block.query, block.key, block.value))
    real = block.real.gather(1, columns)
    undo = None if block.undo is None else take(block.undo)
    return Block(query, key, value, None if bool(real.all()) else real, undo)


_EMPTY: dict[str, int] = {"positions": -1, "enabled": False}


def empty_value(name: str, num_slots: int) -> int:
    """Says what stands in a slot that holds nothing."""
    # The rank of an empty slot is the last one.
    return num_slots - 1 if name == "ranks" else _EMPTY.get(name, 0)


class RowLayer(CacheLayerMixin):
    """What a layer holds for each sequence, whatever is done with it.

    Subclasses name the tensors in `row_tensors`; an attribute that is ``None`` or missing is not
    there yet.
    """

    row_budgets: list[TokenBudget]
    batch_size: int

    def row_tensors(self) -> tuple[str, ...]:
        """Names the attributes whose first dimension is the batch."""
        return (
            "keys", "values", "scores", "positions", "num_real_tokens", "sink", "recent", "total",
        )  # fmt: skip

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Takes each row from another one, scores included (beam search).

        Args:
            beam_idx: int64 ``[B]``, source row of each row.
        """
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        rows = torch.arange(self.batch_size, device=self.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the named rows, in this order.

        Args:
            indices: int64 ``[B']``, rows to keep; may repeat. Or bool ``[B]``, True to keep.
        """
        if not self.is_initialized:
            return
        indices = indices.to(self.device)
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        for name in self.row_tensors():
            held = getattr(self, name, None)
            if held is not None:
                with torch.inference_mode(False):
                    chosen = held.new_empty((len(indices), *held.shape[1:]))
                torch.index_select(held, 0, indices, out=chosen)
                setattr(self, name, chosen)
        if self.row_budgets:
            self.row_budgets = [self.row_budgets[row] for row in indices.tolist()]
        self.batch_size = len(indices)

    def move(self, device: torch.device) -> None:
        """Brings all entries to another device; mutates the layer."""
        for name in (*self.row_tensors(), "cumulative_length"):
            held = getattr(self, name, None)
            if held is not None:
                setattr(self, name, held.to(device))
        self.device = device


class WeighingLayer(RowLayer):
    """The part of a layer that knows its policy and its scoring.

    `ScoredLayer` is made of it; nothing here is done for H2O's own sums (`is_plain`).
    """

    layer_idx: int
    policy: Policy
    scoring: Scoring
    scores: torch.Tensor | None
    positions: torch.Tensor | None
    num_real_tokens: torch.Tensor | None
    norms: torch.Tensor | None
    recent: torch.Tensor
    total: torch.Tensor
    num_static: torch.Tensor | None

    def row_tensors(self) -> tuple[str, ...]:
        """Names the attributes whose first dimension is the batch."""
        return (*super().row_tensors(), "norms", "num_static")

    @property
    def has_static_mask(self) -> bool:
        """Whether the policy keeps entries by a rule of its own, in every cache it is used for."""
        return self.policy.allocate_budget(TokenBudget(0, 2, 2)).num_static > 0

    @property
    def is_plain(self) -> bool:
        """Whether it is H2O's frame and no more: plain sums, nothing kept by a rule of its own."""
        return self.scoring.is_sum and self.num_static is None and not self.policy.prompt_only

    @property
    def ranks_by_scores(self) -> bool:
        """Whether a decode step may evict by the accumulated scores as they stand."""
        if self.policy.prompt_only:  # which evicts nothing then
            return True
        by_scores = type(self.policy).priority is H2OPolicy.priority
        return by_scores and self.scoring.is_incremental and self.num_static is None

    def eviction_scores(self) -> torch.Tensor:
        """The scores of what is held as the policy sees them, fp32 ``[B, H, S]``."""
        newest = self.num_real_tokens.view(-1, 1, 1) - 1
        return self.scoring.eviction_scores(self.scores, self.positions, newest, self.norms)

    def _query_weights(self, real: torch.Tensor | None, length: int) -> torch.Tensor | None:
        """What each query of a block counts for in the scores.

        Args:
            real: bool ``[B, T]``, False for padding; ``None`` if there is none.
            length: T.

        Returns:
            fp32 ``[B, T]``; ``None`` if each counts for one.
        """
        if self.is_plain:
            return None
        if real is None:
            later = torch.arange(length - 1, -1, -1, device=self.device)
            later = later.expand(self.batch_size, length)
        else:
            later = real.sum(dim=1, keepdim=True) - real.cumsum(dim=1)
        if self.policy.prompt_only:
            return (later < self.recent.flatten(1)).to(torch.float32)
        return self.scoring.query_weights(later)

    def _faded(self, scores: torch.Tensor, real: torch.Tensor | None, length: int) -> torch.Tensor:
        """What scores from before a block are worth after it, ``[B, H, N]``."""
        if self.scoring.decay is None:
            return scores
        if real is None:
            count = torch.full((self.batch_size,), length, device=self.device)
        else:
            count = real.sum(dim=1)
        return self.scoring.apply_decay(scores, count)

    def _ranking(
        self,
        scores: torch.Tensor,
        positions: torch.Tensor,
        newest: torch.Tensor,
        norms: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ranks entries as `Policy.priority` does, by the scores that the scoring makes.

        Args:
            scores: accumulated, fp32 ``[B, H, N]``.
            positions: int32 ``[B, H, N]``.
            newest: int64 ``[B, 1, 1]``.
            norms: of the values, fp32 ``[B, H, N]``; ``None`` for those of the layer.

        Returns:
            fp32 ``[B, H, N]``; infinite where the policy's pattern keeps an entry.
        """
        if not self.scoring.is_sum:
            norms = self.norms if norms is None else norms
            scores = self.scoring.eviction_scores(scores, positions, newest, norms)
        if self.policy.prompt_only:
            # Of the window itself nothing is to be decided, so it has no say in its neighbours.
            scores = scores.masked_fill(positions > newest - self.recent, 0.0)
        ranks = self.policy.priority(scores, positions, newest, self.layer_idx)
        if self.num_static is not None:
            marked = self.policy.static_mask(positions, newest, self.num_static)
            ranks = ranks if marked is None else ranks.masked_fill(marked, torch.inf)
        return ranks

    def _admit(self, real: torch.Tensor | None, length: int) -> None:
        """Makes room in the budget for tokens that stay whatever comes; mutates the layer."""
        count = length if real is None else real.sum(dim=1).view(-1, 1, 1)
        self.recent += count
        self.total += count

    def _norms_of(self, values: torch.Tensor) -> torch.Tensor | None:
        """L1 norms of values ``[B, H, N, Dv]``, fp32 ``[B, H, N]``; ``None`` if not asked for."""
        if not self.scoring.uses_values:
            return None
        return torch.linalg.vector_norm(values, ord=1, dim=-1, dtype=torch.float32)


LAYER_ATTRIBUTE = "_h2okv_layer"
"""Attribute on the key tensor by which the attention function finds the cache layer."""

_NO_WAY_BACK = (
    "H2OCache cannot take tokens back (crop), because what it evicted for them is gone; generate "
    "without assistant_model, prompt_lookup_num_tokens and other speculative modes."
)


class ScoredLayer(WeighingLayer):
    """One attention layer's cache with scores; subclasses hold the entries.

    The model calls `update` and then the attention function, which calls `attend` on the layer
    that it finds on the key tensor. All the work happens in `attend`.
    """

    is_sliding = False
    is_croppable = False
    window: int | None = None
    """The sliding window that the entries stand for; ``None`` for full attention."""
    cumulative_length: Any  # transformers says int; its static layer holds a tensor too

    def __init__(
        self,
        layer_idx: int,
        budget: Budget,
        policy: Policy,
        rule: PositionRule,
        scoring: Scoring = Scoring(),  # noqa: B008  # immutable
    ) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.budget = budget
        self.policy = policy
        self.rule = rule
        self.scoring = scoring
        # One list for all layers of a cache, so that they share what is the same.
        self.known_rotations: list[Rotation] = []
        # Tensors, not ints: a Python int that changes with every step would recompile every step.
        self.cumulative_length = torch.zeros((), dtype=torch.int64)
        self.awaits_attention = False
        self.is_placed = False
        self._forget()

    def _forget(self) -> None:
        """Drops all entries; the subclass drops its own state too."""
        self.is_initialized = False
        self.is_cast = False
        self.num_forwards = 0
        self.keys = self.values = None
        self.scores: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None
        self.norms: torch.Tensor | None = None
        self.num_static: torch.Tensor | None = None
        self.row_budgets: list[TokenBudget] = []
        self.expected_length: int | None = None
        self.num_real_tokens: torch.Tensor | None = None
        self.owner: weakref.ref[torch.nn.Module] | None = None
        self.expected_weights: str | None = None
        # How the model rotates this layer's keys; learned from the model at its first block.
        self.rotation: Rotation | None = None
        self.knows_rotation = not self.rule.rolls

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: not what was learned of the model, whose weights are compared later."""
        return {
            **vars(self),
            "owner": None,
            "expected_weights": self._weights(),
            "rotation": None,
            "knows_rotation": not self.rule.rolls,
            "known_rotations": [],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickles; ordinary tensors even under inference_mode, so that a step may write."""
        with torch.inference_mode(False), torch.no_grad():
            for name, held in state.items():
                is_fixed = torch.is_tensor(held) and held.is_inference()
                setattr(self, name, held.clone() if is_fixed else held)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScoredLayer:
        """A copy goes on with the same model."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update({name: copy.deepcopy(held, memo) for name, held in vars(self).items()})
        return twin

    def _weights(self) -> str | None:
        """Fingerprint of the module that wrote the entries."""
        owner = None if self.owner is None else self.owner()
        return self.expected_weights if owner is None else fingerprint(owner)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Notes shapes, dtype and device; the slots follow when the prompt's length is known."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_kv_heads = key_states.shape[:2]
        self.key_size, self.value_size = key_states.shape[-1], value_states.shape[-1]
        # Ordinary tensors even under torch.inference_mode, so that a later step outside may write.
        with torch.inference_mode(False):
            self.cumulative_length = torch.zeros((), dtype=torch.int64, device=self.device)
            self.num_real_tokens = torch.zeros(
                self.batch_size, dtype=torch.int64, device=self.device
            )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Passes the new keys and values on, marked with this layer.

        Args:
            key_states: ``[B, H, T, D]``.
            value_states: ``[B, H, T, Dv]``.
            *args: ignored, as in transformers' layers.
            **kwargs: ignored, as in transformers' layers.
        """
        self.require_attention()
        # Autocast gives some models (OPT) keys in another dtype inside than outside.
        self.is_cast = self.is_cast or torch.is_autocast_enabled(key_states.device.type)
        if self.is_initialized:
            if self.is_cast:
                key_states = key_states.to(self.dtype)
            check_match(self, key_states)
            if key_states.device != self.device:  # after loading from a file
                self.move(key_states.device)
        else:
            self.lazy_initialization(key_states, value_states)
        setattr(key_states, LAYER_ATTRIBUTE, self)
        self.awaits_attention = True
        return key_states, value_states

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
        """Ties the entries to the attention module that wrote them."""
        if self.owner is None:
            expected = self.expected_weights
            if expected is not None and expected != fingerprint(module):
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

    @torch.no_grad()
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        real: torch.Tensor | None,
        scale: float,
        softcap: float | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends, scores and evicts, block by block of the contract. Mutates the layer.

        No gradient passes: what is evicted could not be trained through.

        Args:
            query: ``[B, HQ, T, D]``.
            key: ``[B, H, T, D]``, the new tokens' keys.
            value: ``[B, H, T, Dv]``, the new tokens' values.
            real: bool ``[B, T]``, False for padding; ``None`` if there is none.
            scale: factor on the logits.
            softcap: soft cap of the logits (Gemma 2) or ``None``.
            position_ids: int ``[B, T]`` or ``[1, T]``, where the model put the tokens; only read
                when positions roll. ``None``: one after the other.

        Returns:
            ``[B, HQ, T, Dv]`` in the dtype of the values given.
        """
        if torch.is_autocast_enabled(query.device.type):  # which would round logits and scores
            with torch.autocast(query.device.type, enabled=False):
                return self.attend(query, key, value, real, scale, softcap, position_ids)
        self.awaits_attention = False
        length, dtype = query.shape[2], value.dtype
        query, key, value = (states.to(self.dtype) for states in (query, key, value))
        is_first = not self.row_budgets
        if is_first:
            counts = [self.expected_length or length] * self.batch_size
            if real is not None and self.expected_length is None:
                counts = real.sum(dim=1).tolist()
            check_whole_prompt(self, length)
            self._resolve_budget(counts)
        undo = None
        if self.rule.rolls:
            try:
                check_window(self, length)
            except ValueError:
                if is_first:  # the budget of a refused prompt must not be the next one's
                    self.reset()
                raise
        if self.rotation is not None:
            # Of all tokens at once: some frequencies depend on the largest position of a forward.
            if position_ids is None:
                position_ids = self._next_positions(real, length)
            undo = self.rotation.of_text(position_ids)
        whole = Block(query, key, value, real, undo)
        chunk = self.rule.prefill_chunk
        if chunk is None or length <= chunk:
            output = self._attend_block(whole, scale, softcap)
            self._count_forward()
            return output.to(dtype)
        output = query.new_zeros(*query.shape[:3], value.shape[-1])
        for columns, block in split_block(whole, chunk):
            own = self._attend_block(block, scale, softcap)
            output.scatter_(2, columns[:, None, :, None].expand_as(own), own)
        self._count_forward()
        return output.to(dtype)

    def _count_forward(self) -> None:
        """Notes that a forward came through, by which an interrupted one is noticed."""
        # In a compiled step a number that changes would compile it anew each time.
        if not torch.compiler.is_compiling():
            self.num_forwards += 1

    def _attend_block(self, block: Block, scale: float, softcap: float | None) -> torch.Tensor:
        """One block: attend, score, evict; ``[B, HQ, T, Dv]``."""
        query, key = block.query, block.key
        if self.policy.prompt_only and self.positions is not None:
            self._admit(block.real, query.shape[2])
        if self.rotation is not None and block.undo is not None:
            width, layout = self.rotation.width, self.rotation.layout
            # Together: for a single token it is the number of operations that takes time.
            both = rotate(
                interleave_pairs(torch.cat([query, key], dim=1), width, layout), block.undo
            )
            query, key = both.split([query.shape[1], key.shape[1]], dim=1)
            key = key.to(self.dtype)
        output = self._attend(query, key, block.value, block.real, scale, softcap)
        return output.to(self.dtype)

    def _next_positions(self, real: torch.Tensor | None, length: int) -> torch.Tensor:
        """Positions of tokens that follow those seen, ``[1, T]``, for models that tell none."""
        if real is not None and not bool(real.all()):
            raise ValueError(
                "positions='rolling': this model does not tell its attention the position_ids, "
                "which a padded batch needs; run each row alone."
            )
        return (self.cumulative_length + torch.arange(length, device=self.device)).unsqueeze(0)

    @abstractmethod
    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        real: torch.Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """The subclass's part of `attend`; rolling layers get queries and keys un-rotated."""

    def rank_limit(self, length: int) -> int:
        """Entries and new tokens that a block's ranks are below."""
        if self.positions is None:
            return length
        if length == 1:  # not by the budgets: a larger one's row may have been taken out
            return self.positions.shape[2]
        return int((self.positions >= 0).sum(dim=-1).max()) + length

    def _resolve_budget(self, lengths: list[int]) -> None:
        """Fixes the budget of each sequence from its prompt's real tokens; mutates the layer."""
        if 0 in lengths:
            raise ValueError(
                f"row {lengths.index(0)} of the batch is all padding; give every row a token, or "
                "leave the row out."
            )
        self.row_budgets = [self.policy.allocate_budget(self.budget.resolve(n)) for n in lengths]

        def column(part: str) -> torch.Tensor:
            values = [getattr(tokens, part) for tokens in self.row_budgets]
            return torch.tensor(values, dtype=torch.int64, device=self.device).view(-1, 1, 1)

        with torch.inference_mode(False):
            self.sink, self.recent, self.total = column("sink"), column("recent"), column("total")
            self.num_static = None
            # All caches of a policy have it or none, whatever their prompts, so that rows can join.
            if self.has_static_mask:
                self.num_static = column("num_static")

    def get_mask_sizes(self, query_length: int) -> tuple[int, torch.Tensor]:  # type: ignore[override]
        """Returns the block's own size and offset; kept entries need no mask from the model."""
        return query_length, self.cumulative_length

    def get_seq_length(self) -> Any:  # transformers says int; its static layer gives a tensor too
        """Returns the tokens seen, padding included (not the tokens held): an int.

        Under ``torch.compile`` a tensor, as a number that changes would be compiled anew.
        """
        if not self.is_initialized:
            return 0
        if torch.compiler.is_compiling():
            return self.cumulative_length.clone()
        return int(self.cumulative_length)

    def get_max_length(self) -> int:
        """Returns -1: any number of tokens may pass."""
        return -1

    def reset(self) -> None:
        """Forgets everything; the next forward is a prompt."""
        self._forget()
        self.awaits_attention = False

    def crop(self, tokens_to_remove: int) -> None:
        """Refuses: evicted entries cannot come back."""
        raise ValueError(_NO_WAY_BACK)

    def activate_past_recording(self) -> None:
        """Refuses what transformers asks for before it generates tokens that it may take back."""
        raise ValueError(_NO_WAY_BACK)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What a file must hold to go on from here."""
        tensors = {name: getattr(self, name, None) for name in self.row_tensors()}
        tensors["cumulative_length"] = self.cumulative_length
        budgets = [list(astuple(tokens)) for tokens in self.row_budgets]
        return (
            {name: tensor for name, tensor in tensors.items() if tensor is not None},
            {
                "row_budgets": budgets,
                "weights": self._weights(),
            },
        )

    def restore(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        """Takes what `state` gave; mutates the layer."""
        keys, values = tensors["keys"], tensors["values"]
        self.lazy_initialization(keys, values)
        for name, tensor in tensors.items():
            # Files written before the field was renamed.
            setattr(self, "num_static" if name == "chosen" else name, tensor)
        self.row_budgets = [TokenBudget(*parts) for parts in numbers["row_budgets"]]
        self.expected_weights = numbers["weights"]

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held: keys, values, scores and positions."""

    @property
    def full_nbytes(self) -> int:
        """Bytes of the keys and values that a full cache would hold for the tokens seen."""
        if not self.is_initialized:
            return 0
        entry = (self.key_size + self.value_size) * torch.empty((), dtype=self.dtype).element_size()
        return self.batch_size * self.num_kv_heads * int(self.cumulative_length) * entry
