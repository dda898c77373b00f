"""H2O states in a server's memory: one block for each request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig

from h2okv.cache.block import Block
from h2okv.cache.rope import PositionRule, Rotation
from h2okv.cache.slot_layer import SlotLayer
from h2okv.cache.slot_state import SlotState, empty_value
from h2okv.config import CacheConfig
from h2okv.ops.indexed import Indexed
from h2okv.ops.rope import Layout
from h2okv.policy import Rule, get_rule

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor of a request's block in one layer, by its name."""


def state_spec(config: CacheConfig, num_kv_heads: int, size: int, dtype: torch.dtype) -> Spec:
    """Return the tensors of a block, in their order in memory."""
    slots = (num_kv_heads, config.budget.resolve(0).total + 1)
    # Four-byte dtypes come first: each tensor is aligned to its element size.
    spec: Spec = {"scores": (slots, torch.float32), "positions": (slots, torch.int32)}
    if _rule(config).weighs_values:
        spec["value_weights"] = (slots, torch.float32)
    return spec | {"keys": ((*slots, size), dtype), "values": ((*slots, size), dtype)}


def _rule(config: CacheConfig) -> Rule:
    return get_rule(config.policy, config.seed, config.scoring, config.decay)


def block_bytes(spec: Spec) -> int:
    """Return the bytes of a request's block in one layer."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in spec.values())


def model_rotation(config: PreTrainedConfig, dtype: torch.dtype, in_halves: bool) -> Rotation:
    """Return how a model rotates its keys, from transformers' implementation."""
    with torch.device("meta"):
        modules = list(AutoModel.from_config(config).modules())
    kind = next(
        type(module) for module in modules if type(module).__name__.endswith("RotaryEmbedding")
    )
    rotary: Any = kind(config)
    layout: Layout = "half" if in_halves else "interleaved"
    return Rotation(rotary, None, layout, dtype, rotary.inv_freq.device)


class StateLayer(SlotLayer):
    """A layer whose requests have their entries in blocks ``[N, ...]`` of the server.

    Old contents of a block are never read: a request's first tokens overwrite all of it. A prompt's
    chunk is `SlotLayer`'s block path, on a view of the request's block; single tokens of many
    requests are one step of `SlotLayer`, with keys and values read in place.
    """

    checks_numbers = False  # an error in the middle of a forward would end the server

    def __init__(
        self, config: CacheConfig, layer_idx: int, scale: float, softcap: float | None = None
    ) -> None:
        rule = _rule(config)
        super().__init__(layer_idx, config.budget, rule, PositionRule())
        self.tokens = rule.allocate_budget(config.budget.resolve(0))
        self.scale, self.softcap = scale, softcap  # of the logits
        self.rotates: Rotation | None = None  # of the model; for scorings that look ahead
        self.blocks: Mapping[str, Tensor] = {}  # the tensors of `state_spec`, each [N, ...]

    def run(
        self,
        query: Tensor,  # [T, HQ, D], the tokens of all requests, concatenated
        key: Tensor,  # [T, H, D]
        value: Tensor,  # [T, H, D]
        starts: Sequence[int],  # of each request's tokens, and T
        lengths: Sequence[int],  # tokens of each request so far, including these
        index: Sequence[int],  # each request's block; negative for padding
    ) -> Tensor:
        """Attend, score and evict, ``[T, HQ, D]``; mutates the blocks."""
        output = value.new_zeros(query.shape)
        single = []
        for request, block in enumerate(index):
            span = slice(starts[request], starts[request + 1])
            count = span.stop - span.start
            seen = lengths[request] - count
            if count == 0 or block < 0:
                continue
            if count == 1 and seen > 0:
                single.append((span.start, seen, block))
                continue
            tokens = [states[span].transpose(0, 1).unsqueeze(0) for states in (query, key, value)]
            outputs = self._run_block(tokens, seen, block)
            output[span] = outputs[0].transpose(0, 1)
        if single:
            rows, counts, blocks = torch.tensor(single, device=query.device).T
            tokens = [states[rows].unsqueeze(2) for states in (query, key, value)]
            outputs = self._run_step(tokens, counts, blocks)
            output[rows] = outputs.squeeze(2)
        return output

    def _run_block(self, tokens: list[Tensor], seen: int, block: int) -> Tensor:
        """Run a prompt, or a later chunk, of one request: ``[1, H, T, D]``."""
        query, key, value = tokens
        self.reset()
        self.lazy_initialization(key, value)
        self.learn_rotation(self.rotates)
        self.cumulative_length += seen
        if seen:
            tensors = {name: tensor[block : block + 1] for name, tensor in self.blocks.items()}
            counts = torch.tensor([seen], device=key.device)
            self.state = self._state(tensors["keys"], tensors["values"], tensors, counts)
        output = self.attend(query, key, value, None, self.scale, self.softcap)
        for name, tensor in self.blocks.items():
            entries, num_slots = getattr(self.state, name)[0], tensor.shape[2]
            tensor[block, :, : entries.shape[1]] = entries
            tensor[block, :, entries.shape[1] :] = empty_value(name, num_slots)
        return output

    def _run_step(self, tokens: list[Tensor], seen: Tensor, index: Tensor) -> Tensor:
        """Run one token of each of B requests, ``[B, H, 1, D]``."""
        (query, key, value), blocks = tokens, self.blocks
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        self._choose_operations(query)
        small = {name: tensor[index] for name, tensor in blocks.items() if tensor.dim() == 3}
        keys, values = (Indexed(blocks[name], index) for name in ("keys", "values"))
        self.state = self._state(keys, values, small, seen)
        slots = self.slots
        slots.is_full = bool((seen >= self.tokens.total).all())
        slots.has_sinks = self.tokens.sink > 0
        slots.steps_left, slots.filled = -1, None
        token = Block(query, key, value, None, None, None, self.scale, self.softcap)
        output = self._read_token(token)
        for name in small:
            blocks[name][index] = getattr(self.state, name)
        return output

    def _state(
        self, keys: Any, values: Any, small: Mapping[str, Tensor], seen: Tensor
    ) -> SlotState:
        """Return the state of B requests after ``seen`` tokens, int64 ``[B]``."""
        positions = small["positions"]

        def same(count: int) -> Tensor:
            return torch.full((len(seen), 1, 1), count, device=positions.device)

        budget = self.tokens
        return SlotState(
            keys, values, small["scores"], positions,
            (positions < 0).to(torch.uint8).argmax(dim=-1, keepdim=True), seen.clone(),
            sink=same(budget.sink), recent=same(budget.recent), total=same(budget.total),
            num_static=same(budget.num_static) if self.rule.has_pattern else None,
            value_weights=small.get("value_weights"), budgets=[budget] * len(seen),
        )  # fmt: skip
