"""H2O on states that a server keeps: one block for each request, for its whole life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig

from h2okv.cache.layer import Block
from h2okv.cache.rope import PositionRule, Rotation
from h2okv.cache.slot_state import SlotState, empty_value
from h2okv.cache.slots import SlotLayer
from h2okv.config import CacheConfig
from h2okv.ops.indexed import Indexed
from h2okv.ops.rope import Layout
from h2okv.policy import get_policy
from h2okv.policy.scoring import get_scoring

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor of a request's block in one layer, by its name."""


def state_spec(config: CacheConfig, num_kv_heads: int, size: int, dtype: torch.dtype) -> Spec:
    """What a block consists of, in the order in which it lies there."""
    slots = (num_kv_heads, config.budget.resolve(0).total + 1)
    # Numbers of four bytes come first, so that each tensor begins at a multiple of its own size.
    spec: Spec = {"scores": (slots, torch.float32), "positions": (slots, torch.int32)}
    if get_scoring(config.scoring, config.decay).uses_values:
        spec["norms"] = (slots, torch.float32)
    return spec | {"keys": ((*slots, size), dtype), "values": ((*slots, size), dtype)}


def block_bytes(spec: Spec) -> int:
    """Bytes of a request's block in one layer."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in spec.values())


def model_rotation(config: PreTrainedConfig, dtype: torch.dtype, in_halves: bool) -> Rotation:
    """How a model rotates its keys, by transformers' numbers for its configuration."""
    with torch.device("meta"):
        parts = list(AutoModel.from_config(config).modules())
    kind = next(type(part) for part in parts if type(part).__name__.endswith("RotaryEmbedding"))
    rotary: Any = kind(config)
    layout: Layout = "half" if in_halves else "interleaved"
    return Rotation(rotary, None, layout, dtype, rotary.inv_freq.device)


class StateLayer(SlotLayer):
    """A layer whose requests have their entries in blocks ``[N, ...]`` that are not its own.

    What a block held before is never read: a request's first tokens fill all of it. A prompt's
    block is `SlotLayer`'s, on a view of the request's block; single tokens of many requests are
    one step of `SlotLayer`, with keys and values read where they lie.
    """

    checks_numbers = False  # an error in the middle of a forward would end the server

    def __init__(
        self, config: CacheConfig, layer_idx: int, scale: float, softcap: float | None = None
    ) -> None:
        policy = get_policy(config.policy, config.seed)
        scoring = get_scoring(config.scoring, config.decay)
        super().__init__(layer_idx, config.budget, policy, PositionRule(), scoring)
        self.tokens = policy.allocate_budget(config.budget.resolve(0))
        self.scale, self.softcap = scale, softcap  # of the logits
        self.rotates: Rotation | None = None  # how the model does; for scorings that look ahead
        self.blocks: Mapping[str, Tensor] = {}  # the tensors of `state_spec`, each [N, ...]

    def run(
        self,
        query: Tensor,  # [T, HQ, D], of all requests, their tokens one after the other
        key: Tensor,  # [T, H, D]
        value: Tensor,  # [T, H, D]
        starts: Sequence[int],  # where each request's tokens begin, and T
        lengths: Sequence[int],  # tokens of each that have gone through, these included
        index: Sequence[int],  # each one's block; below zero if it only fills the batch up
    ) -> Tensor:
        """Attends, scores and evicts, ``[T, HQ, D]``; mutates the blocks."""
        output = value.new_zeros(query.shape)
        single = []
        for request, block in enumerate(index):
            own = slice(starts[request], starts[request + 1])
            count = own.stop - own.start
            seen = lengths[request] - count
            if count == 0 or block < 0:
                continue
            if count == 1 and seen > 0:
                single.append((own.start, seen, block))
                continue
            tokens = [part[own].transpose(0, 1).unsqueeze(0) for part in (query, key, value)]
            made = self._run_block(tokens, seen, block)
            output[own] = made[0].transpose(0, 1)
        if single:
            rows, counts, places = torch.tensor(single, device=query.device).T
            tokens = [part[rows].unsqueeze(2) for part in (query, key, value)]
            made = self._run_step(tokens, counts, places)
            output[rows] = made.squeeze(2)
        return output

    def _run_block(self, tokens: list[Tensor], seen: int, block: int) -> Tensor:
        """A prompt, or a later part of one, of one request: ``[1, H, T, D]``."""
        query, key, value = tokens
        self.reset()
        self.lazy_initialization(key, value)
        self.learn_rotation(self.rotates)
        self.cumulative_length += seen
        if seen:
            own = {name: tensor[block : block + 1] for name, tensor in self.blocks.items()}
            counts = torch.tensor([seen], device=key.device)
            self.state = self._state(own["keys"], own["values"], own, counts)
        output = self.attend(query, key, value, None, self.scale, self.softcap)
        for name, tensor in self.blocks.items():
            held, num_slots = getattr(self.state, name)[0], tensor.shape[2]
            tensor[block, :, : held.shape[1]] = held
            tensor[block, :, held.shape[1] :] = empty_value(name, num_slots)
        return output

    def _run_step(self, tokens: list[Tensor], seen: Tensor, index: Tensor) -> Tensor:
        """One token of each of B requests, ``[B, H, 1, D]``."""
        (query, key, value), blocks = tokens, self.blocks
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        self._choose_operations(query)
        small = {name: tensor[index] for name, tensor in blocks.items() if tensor.dim() == 3}
        keys, values = (Indexed(blocks[name], index) for name in ("keys", "values"))
        self.state = self._state(keys, values, small, seen)
        self.is_full = bool((seen >= self.tokens.total).all())
        self.has_sinks = self.tokens.sink > 0
        self.steps_left, self.filled = -1, None
        output = self._decode(Block(query, key, value, None, None, None, self.scale, self.softcap))
        for name in small:
            blocks[name][index] = getattr(self.state, name)
        return output

    def _state(
        self, keys: Any, values: Any, small: Mapping[str, Tensor], seen: Tensor
    ) -> SlotState:
        """What is held of B requests after so many tokens, int64 ``[B]``."""
        positions = small["positions"]

        def same(count: int) -> Tensor:
            return torch.full((len(seen), 1, 1), count, device=positions.device)

        own = self.tokens
        return SlotState(
            keys, values, small["scores"], positions,
            (positions < 0).to(torch.uint8).argmax(dim=-1, keepdim=True), seen.clone(),
            sink=same(own.sink), recent=same(own.recent), total=same(own.total),
            num_static=same(own.num_static) if self.has_static_mask else None,
            norms=small.get("norms"), budgets=[own] * len(seen),
        )  # fmt: skip
