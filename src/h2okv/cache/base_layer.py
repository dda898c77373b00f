"""A layer as transformers sees it: batches, lengths, and the module that writes to it."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from h2okv.budget import Budget
from h2okv.cache.argument import CACHE
from h2okv.cache.drafting import Plan, StepLog
from h2okv.cache.explanation import Departures
from h2okv.cache.forward import Forward
from h2okv.cache.latent import Latents, LatentState, join
from h2okv.cache.rope import PositionRule, Rotation, Rotations
from h2okv.cache.slot_state import KVStorage, SlotState, is_cast, ordinary_tensors
from h2okv.cache.spans import Spans
from h2okv.ops.quant import KeyTransform
from h2okv.ops.reference import AttentionSpec
from h2okv.policy import Inputs, Rule
from h2okv.provenance import fingerprint

# Attribute on the key tensor by which the attention function finds the cache layer.
LAYER_ATTRIBUTE = "_h2okv_layer"


@dataclass
class Prompt:
    """What is known about the prompt before it is read."""

    expected_length: int | None = None  # real tokens, if they were announced
    pins: tuple[tuple[int, int], ...] = ()  # spans that must not be evicted, until they are read
    is_partial: bool = False  # whether the next forward brings a part of a block
    was_partial: bool = False  # whether the last one did

    @property
    def is_read(self) -> bool:
        """Whether the whole prompt was read, and its pins were set."""
        return not (self.was_partial or self.is_partial or self.pins)


@dataclass
class Writer:
    """The attention module that writes a layer's entries, and a file's fingerprint of one."""

    module: weakref.ref[torch.nn.Module] | None = None
    weights: str | None = None


class BaseLayer(CacheLayerMixin):
    """One attention layer's state, with the protocol of transformers' cache layers.

    The model calls `update` and then the attention function, which calls `attend` on the layer
    that it finds on the key tensor. All the work happens there (`h2okv.cache.layer.CacheLayer`).
    """

    is_sliding = False
    is_croppable = True
    # Whether a block sees its own entries as they are stored, however the text is cut into blocks.
    rounds_blocks = False
    departures: Departures | None = None  # of `H2OCache.record_evictions`
    begins_forward = ends_forward = False  # the first, the last layer of its cache
    latent: tuple[int, int] | None = None  # R and r of a model with latent attention
    window: int | None = None  # the sliding window that the entries stand for
    attention_spec: AttentionSpec | None = None  # of the last forward
    cumulative_length: Any  # transformers says int; its static layer holds a tensor too
    # The same on the host; None where compiled steps have counted alone.
    num_columns: int | None
    # How keys are transformed before they are packed, of tensors ``[1, H, 1, D]``.
    key_transform: KeyTransform | None = None

    def __init__(
        self,
        layer_idx: int,
        budget: Budget,
        rule: Rule,
        position_rule: PositionRule,
        kv_bits: int | None = None,
        head_budgets: Sequence[Budget] | None = None,
        spans: Spans | None = None,
    ) -> None:
        # Not the base's constructor: keys and values are the state's here.
        self.layer_idx, self.budget, self.rule = layer_idx, budget, rule
        self.head_budgets = head_budgets  # of each KV head, where they differ
        self.position_rule, self.spans = position_rule, spans
        self.span = 1 if spans is None else spans.length  # tokens between two evictions of steps
        # Whether entries are scored at the end of a span, by all its queries together.
        self.scores_spans = spans is not None and rule.effective_inputs is Inputs.QUERIES
        self.storage = KVStorage(kv_bits)
        self.rotations = Rotations(position_rule.rolls, rule.effective_inputs is Inputs.QUERIES)
        self.share_forward(Forward())
        # A tensor too: a Python int that changes with every step would recompile every step.
        self.cumulative_length = torch.zeros((), dtype=torch.int64)
        self.awaits_attention = False
        self.is_placed = False
        self._forget()

    def share_forward(self, forward: Forward) -> None:
        """Join the layers of `forward`, which synchronize with the device once; mutates both."""
        self.forward = forward
        self.number = forward.add_layer(self.rule, self.budget, self.head_budgets)

    def count_columns(self, length: int) -> None:
        """Count T tokens, padding included; mutates the layer."""
        self.cumulative_length += length
        self.note_columns(length)

    def note_columns(self, length: int) -> None:
        """Note on the host what the device has counted; mutates the layer."""
        if torch.compiler.is_compiling() or self.num_columns is None:
            self.num_columns = None  # without a look, as it would be compiled again
        else:
            self.num_columns += length

    def _forget(self) -> None:
        self.num_columns = 0
        if self.departures is not None:
            self.departures = Departures()
        vars(self).pop("state", None)
        self.is_cast = self.has_inner_padding = False
        self.counts_padding: bool | None = None  # whether the model's positions do, if known
        self.num_forwards = 0
        self.prompt = Prompt()
        self.writer = Writer()
        self.log: StepLog | None = None  # of the newest forward, once `crop` may be called
        self.rotations.forget()

    state: SlotState
    """The entries; no slots before the first block."""

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether shapes, dtype and device are known."""
        return "state" in vars(self)

    def learn_rotation(self, rotation: Rotation | None) -> None:
        """Note how the model rotates this layer's keys, if it does; mutates the layer."""
        self.rotations.learn(rotation)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled; the model's weights are compared when it goes on."""
        return {
            **vars(self),
            "attention_spec": None,
            "rotations": Rotations(self.rotations.rolls, self.rotations.looks_ahead),
            "writer": Writer(weights=self.weights()),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle, into ordinary tensors even under inference_mode, so that a step may write."""
        vars(self).update(state)
        with ordinary_tensors():
            self.cumulative_length = self.cumulative_length.clone()
            if self.is_initialized:
                self.state = self.state.map(Tensor.clone)

    def __deepcopy__(self, memo: dict[int, Any]) -> BaseLayer:
        duplicate = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.attention_spec)] = self.attention_spec  # sinks are the model's
        for name, value in vars(self).items():
            vars(duplicate)[name] = copy.deepcopy(value, memo)
        return duplicate

    @property
    def holds_entries(self) -> bool:
        """Whether a block has been read."""
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
        """``[B, H, S, Dv]`` like `keys`."""
        return self.state.stored("values") if self.holds_entries else None

    @property
    def batch_size(self) -> int:
        """B, the sequences."""
        return self.state.batch_size

    @property
    def key_size(self) -> int:
        """D of a key."""
        return self.state.entry_size("keys")

    @property
    def value_size(self) -> int:
        """Dv of a value."""
        return self.state.entry_size("values")

    @property
    def device(self) -> torch.device:
        """Device of the entries."""
        return self.state.device

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note shapes, dtype and device; the slots follow when the prompt's length is known."""
        self.dtype, self.num_kv_heads = key_states.dtype, key_states.shape[1]
        self.state = self.empty_state(key_states, value_states)
        with torch.inference_mode(False):
            self.cumulative_length = torch.zeros((), dtype=torch.int64, device=key_states.device)
            self.num_columns = 0

    def empty_state(self, key: Tensor, value: Tensor) -> SlotState:
        """Make a state without slots for keys ``[B, H, T, D]`` and values ``[B, H, T, Dv]``."""
        state = self.empty_slots(key, value)
        transform, (batch, heads, _, size) = self.key_transform, key.shape
        if transform is not None and transform.center.shape[1::2] == (heads, size):
            with ordinary_tensors():
                state.key_center, state.key_scale = (
                    tensor.to(key.device).repeat(batch, 1, 1, 1) for tensor in transform
                )
        return state

    def empty_slots(self, key: Tensor, value: Tensor) -> SlotState:
        """Make a state without slots and transforms; arguments as of `empty_state`."""
        state = SlotState.empty(key, value, self.storage)
        if not self.storage.is_packed and self.latent is not None:
            rank, width = self.latent
            # Latents, as attention with one KV head takes them.
            if (key.shape[1], key.shape[-1], value.shape[-1]) == (1, rank + width, rank):
                return LatentState.of(state, rank)
        return state

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass new keys and values ``[B, H, T, D]`` on, the keys marked with this layer.

        Latents, of which the model makes keys only now, are left with the layer in the options
        that the model passes on to its attention.
        """
        options = kwargs.get("kwargs")
        if options is not None and self.latent == (key_states.shape[-1], value_states.shape[-1]):
            latents = Latents(self, join(key_states, value_states), key_states)
            self._take(latents.key, latents.value)
            options[LAYER_ATTRIBUTE] = latents
            return key_states, value_states
        return self._take(key_states, value_states)

    def _take(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if self.awaits_attention:
            self.require_attention()
        if key_states.is_meta:
            raise ValueError(
                "H2OCache holds numbers and must get keys of a CPU or GPU, got the meta device's; "
                "`h2okv plan` says what a cache takes."
            )
        # Autocast gives some models (OPT) keys in another dtype inside than outside.
        self.is_cast = self.is_cast or is_cast(key_states.device)
        if self.is_initialized:
            if self.is_cast:
                key_states = key_states.to(self.dtype)
            check_match(self, key_states)
            if key_states.device != self.state.positions.device:  # after loading from a file
                self.move(key_states.device)
        else:
            self.lazy_initialization(key_states, value_states)
        setattr(key_states, LAYER_ATTRIBUTE, self)
        self.awaits_attention = True
        return key_states, value_states

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the sequences by int64 indices ``[B]``, scores included (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence; mutates the layer."""
        indices = torch.arange(self.batch_size, device=self.device)
        self.batch_select_indices(indices.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences of int64 indices, in that order, or those that bool ``[B]`` marks."""
        if not self.is_initialized:
            return
        indices = indices.to(self.device)
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.state = self.state.index_select(indices)
        for record in (self.log, self.departures):
            if record is not None:
                record.select(indices)

    def move(self, device: torch.device) -> None:
        """Move the state to a device; mutates the layer."""
        with ordinary_tensors():
            self.state = self.state.map(lambda tensor: tensor.to(device))
            self.cumulative_length = self.cumulative_length.to(device)
        self.rotations.forget()  # they have tables on the former device

    def get_mask_sizes(self, query_length: int) -> tuple[int, Tensor]:  # type: ignore[override]
        """Return the block's own size and offset; cached entries need no mask from the model."""
        if query_length == 0:
            check_new_tokens(self.get_seq_length(), query_length)
        return query_length, self.get_seq_length()

    def get_seq_length(self) -> Any:  # transformers says int; its static layer gives a tensor too
        """Return the tokens seen, padding included (not the tokens cached)."""
        if not self.is_initialized:
            return 0
        if torch.compiler.is_compiling():  # a number that changes would be compiled again
            return self.cumulative_length.clone()
        if self.num_columns is None:
            self.num_columns = int(self.cumulative_length)
        return self.num_columns

    def get_max_length(self) -> int:
        """Return -1, for no limit."""
        return -1

    def reset(self) -> None:
        """Forget everything; mutates the layer."""
        self._forget()
        self.awaits_attention = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens, 0 or minus their number, and make the others final; mutates."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes 0 or minus a number of tokens, got {tokens_to_remove}.")
        if self.log is not None:
            state, plan = self.log.take_back(vars(self).get("state"), -tokens_to_remove)
            self.cumulative_length += tokens_to_remove
            if tokens_to_remove:
                self.state, self.num_columns = state, None
            if plan is not None:
                self.restore_plan(plan)
            self.grow()
        elif tokens_to_remove:
            raise ValueError(
                "H2OCache takes tokens back (crop) only of a forward whose past it recorded; call"
                " cache.activate_past_recording() before, as assistant_model and"
                " prompt_lookup_num_tokens of transformers 5.24 do."
            )

    def activate_past_recording(self) -> None:
        """Record what each token changes, for `crop`; mutates the layer."""
        self.record_past = True

    def plan(self) -> Plan | None:
        """Return what steps count besides the state; ``None`` if they change more than slots."""
        return None

    def restore_plan(self, plan: Plan) -> None:
        """Take over what `plan` has returned; mutates the layer."""

    @property
    def record_past(self) -> bool:
        """Whether tokens may be taken back; transformers sets it to False where it ends this."""
        return self.log is not None

    @record_past.setter
    def record_past(self, records: bool) -> None:
        self.log = (self.log or StepLog()) if records else None

    def end_recording(self) -> None:
        """Record nothing from now on; tokens that were read stay. Mutates the layer."""
        if self.record_past and self.is_initialized:
            self.crop(0)
        self.record_past = False

    # --- the attention function's side ------------------------------------------------------------

    def require_attention(self) -> None:
        """Raise if keys were handed out and no H2O attention came back for them."""
        if self.awaits_attention:
            raise ValueError(
                f"H2OCache: layer {self.layer_idx} got keys, but the model's attention is not "
                "'h2o' (or an earlier forward was interrupted); call h2okv.enable(model), then "
                "cache.reset()."
            )

    def grow(self) -> None:
        """Note growing budgets, by the tokens at the last cut of each sequence; mutates."""
        if not self.rule.grows or not self.holds_budgets:
            return
        state = self.state
        seen = [*map(operator.sub, state.lengths(), state.phases(self.span))]
        has_prompts = isinstance(self.budget.sink, float)  # in the sinks, and needs them
        self._set_budgets([b.sink for b in state.budgets] if has_prompts else seen, seen)

    def _set_budgets(self, counts: list[int], seen: list[int] | None = None) -> None:
        """Note the budget of each sequence, by the real tokens of its prompt; mutates the state."""
        with ordinary_tensors():
            budgets = self.forward.budgets(self.number, counts, self.device, seen)
            self.state.set_budgets(budgets, self.rule.has_pattern)
            if self.rule.inputs is Inputs.WINDOW:  # its tokens change them
                self.state.recent = self.state.recent.clone()
                self.state.total = self.state.total.clone()

    def claim(self, module: torch.nn.Module) -> None:
        """Note which attention module writes the entries; refuse another one."""
        writer = self.writer
        if writer.module is None:
            # Weights that are offloaded have no fingerprint.
            actual = None if writer.weights is None else fingerprint(module)
            if actual not in (None, writer.weights):
                raise ValueError(
                    f"H2OCache: the entries of layer {self.layer_idx} were saved with other "
                    "weights; load the file with the model that wrote it, in the same dtype."
                )
            writer.module = weakref.ref(module)
        elif writer.module() is not module:
            raise ValueError(
                f"H2OCache: the entries of layer {self.layer_idx} were written by another model; "
                "call cache.reset() or make a new H2OCache."
            )

    @property
    def module(self) -> torch.nn.Module | None:
        """The attention module that writes the entries, while it exists."""
        return None if self.writer.module is None else self.writer.module()

    def weights(self) -> str | None:
        """Return the fingerprint of the module that wrote the entries."""
        module = self.module
        return self.writer.weights if module is None else fingerprint(module)

    def load_state(self, state: SlotState, seen: Tensor, weights: str | None) -> None:
        """Take over a state from a file; mutates the layer."""
        self.state, self.cumulative_length, self.num_columns = state, seen, None
        self.writer = Writer(weights=weights)

    def newest(self) -> Tensor:
        """Return the position of each sequence's newest token, int64 ``[B, 1, 1]``."""
        return self.state.num_real_tokens.view(-1, 1, 1) - 1

    # --- sizes ------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the entries: keys, values, scores, positions."""
        return self.state.nbytes if self.holds_entries else 0

    @property
    def full_nbytes(self) -> int:
        """Bytes of the keys and values that a full cache would hold for the tokens seen."""
        if not self.is_initialized:
            return 0
        seen = int(self.get_seq_length())
        return self.batch_size * self.num_kv_heads * seen * self.entry_bytes

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry's key and value in the model's dtype, for one head."""
        has_values = self.state.has_values
        return int((self.key_size + self.value_size * has_values) * self.dtype.itemsize)


def check_match(layer: BaseLayer, key_states: Tensor) -> None:
    """Refuse keys ``[B, H, T, D]`` of another batch or model than the cached entries."""
    batch, heads, _, size = key_states.shape
    if batch != layer.batch_size:
        raise ValueError(
            f"H2OCache holds a batch of {layer.batch_size} and got a batch of {batch}; "
            "call cache.reset() or make a new H2OCache."
        )
    expected = (layer.num_kv_heads, layer.key_size, layer.dtype)
    if (heads, size, key_states.dtype) != expected:
        raise ValueError(
            f"H2OCache holds layer {layer.layer_idx} of another model: (KV heads, head size, "
            f"dtype) = {expected} and got {(heads, size, key_states.dtype)}; "
            "call cache.reset() or make a new H2OCache."
        )


def check_new_tokens(seen: int, count: int) -> None:
    """Refuse a text without tokens behind those that were read."""
    if count <= 0:
        raise ValueError(
            f"H2OCache has seen {seen} tokens and got none after them; give generate the whole text"
            f" with more at its end, or generate(**cache.next_turn(input_ids), {CACHE}=cache), or"
            " call cache.reset() to read another text."
        )
