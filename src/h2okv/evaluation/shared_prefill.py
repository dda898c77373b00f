"""One reading of a prompt for many cache settings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import h2okv
from h2okv.cache import H2OCache
from h2okv.cache.layer import LAYER_ATTRIBUTE, Block, CacheLayer
from h2okv.cache.rope import Rotation
from h2okv.cache.slots import SlotLayer
from h2okv.config import CacheConfig
from h2okv.ops.reference import Visibility

Attended = tuple[Tensor, Tensor]


def shares_prompt(config: CacheConfig) -> bool:
    """Whether the prompt's attention is that of a full cache, whatever is evicted after it."""
    return config.positions == "original" and config.prefill_chunk is None


class _Attention:
    """A block's attention, computed once for each way of counting its queries."""

    def __init__(self) -> None:
        self._attended: Attended | None = None
        self._weighted: list[tuple[Tensor, Tensor]] = []
        self._once: Tensor | None = None

    def __call__(
        self,
        attend: Callable[..., Attended],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visibility: Visibility,
        scale: float,
        softcap: float | None,
        weights: Tensor | None,
    ) -> Attended:
        how = (scale, softcap)
        if self._attended is None:
            self._attended = attend(query, key, value, visibility, *how, None)
        output, sums = self._attended
        if weights is None:
            return output, sums
        for known, own in self._weighted:
            if torch.equal(known, weights):
                return output, own
        first = 0
        if visibility.queries is None and visibility.entries is None:
            # Queries that count for nothing, all but a window at the end, need not be asked again.
            first = int((weights != 0).any(dim=0).to(torch.uint8).argmax())
        rest = replace(visibility, past=visibility.past + first)
        _, own = attend(query[:, :, first:], key, value, rest, *how, weights[:, first:])
        self._weighted.append((weights, own))
        return output, own

    def once(self, ask: Callable[[], Tensor]) -> Tensor:
        """What it gives, which is the same for all."""
        if self._once is None:
            self._once = ask()
        return self._once


class SharedLayer(CacheLayer):
    """One layer of several caches: the first block is read by all, then each has its sequences."""

    def __init__(self, parts: Sequence[CacheLayer]) -> None:
        own = parts[0]
        scoring = next((part.scoring for part in parts if part.scoring.looks_ahead), own.scoring)
        super().__init__(own.layer_idx, own.budget, own.policy, own.rule, scoring)
        self.parts = list(parts)

    def learn_rotation(self, found: Rotation | None) -> None:
        super().learn_rotation(found)
        for part in self.parts:
            if not part.knows_rotation:
                part.learn_rotation(found)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.require_attention()
        setattr(key_states, LAYER_ATTRIBUTE, self)
        self.awaits_attention = True
        return key_states, value_states

    def claim(self, module: torch.nn.Module) -> None:
        for part in self.parts:
            part.claim(module)

    def get_seq_length(self) -> Any:
        return self.parts[0].get_seq_length()

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
        self.awaits_attention = False
        self.cumulative_length += query.shape[2]
        self.position_ids = position_ids
        output = self._attend(Block(query, key, value, real, None, None, scale, softcap))
        self.num_forwards += 1
        return output

    def _attend(self, block: Block) -> Tensor:
        """A prompt for all, or the sequences of each."""
        if self.num_forwards == 0:
            return self._read_prompt(block)
        count, real = len(self.parts), block.real
        states = [part.chunk(count) for part in (block.query, block.key, block.value)]
        masks = [None] * count if real is None else real.chunk(count)
        outputs = []
        for part, query, key, value, mask in zip(self.parts, *states, masks, strict=True):
            own = part.attend(query, *part.update(key, value), mask, block.scale, block.softcap)
            outputs.append(own)
        return torch.cat(outputs)

    def _read_prompt(self, block: Block) -> Tensor:
        """Have every cache take the prompt, each by its own budget and its own scores."""
        query, real, how = block.query, block.real, (block.scale, block.softcap)
        shared, outputs = _Attention(), []
        for part in self.parts:
            if isinstance(part, SlotLayer):
                part.shared = shared
            if real is None and part.expected_length is None:
                part.expected_length = query.shape[2]  # what comes next is no more of the prompt
            own = part.update(block.key, block.value)
            outputs.append(part.attend(query, *own, real, *how, self.position_ids))
            if isinstance(part, SlotLayer):
                part.shared = None
        return outputs[0]


class SharedPrefill(H2OCache):
    """Empty caches of one model that read one prompt together, in one forward.

    After `split` each holds what it would hold had it read the prompt by itself. Then go on with
    each cache alone, or give the model a batch of as many times the prompt's sequences as there are
    caches: each is decoded on its own cache, and the weights are read once a step for all.
    """

    def __init__(self, caches: Sequence[H2OCache]) -> None:
        super().__init__(caches[0].config, policy="full")
        for own in (cache.cache_config for cache in caches):
            if not shares_prompt(own):
                raise ValueError(
                    f"{own.label!r} reads the prompt in its own way (positions={own.positions!r}, "
                    f"prefill_chunk={own.prefill_chunk}); leave both out, or run it by itself."
                )
        self.caches = list(caches)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, CacheLayer):
                parts: list[Any] = [cache.layers[index] for cache in self.caches]
                self.layers[index] = SharedLayer(parts)
        self._scored = [layer for layer in self.layers if isinstance(layer, CacheLayer)]

    def split(self) -> None:
        """End the prompt; every cache may then go on by itself."""
        part: Any = self.caches[0].layers[self._scored[0].layer_idx]
        # Cache by cache, and of each all sequences of the prompt.
        order: Any = torch.arange(part.batch_size, device=part.device).repeat(len(self.caches))
        for index, layer in enumerate(self.layers):
            if isinstance(layer, CacheLayer):
                continue
            # A sliding window, say, is the same for all.
            for cache in self.caches:
                cache.layers[index] = copy.deepcopy(layer)
            layer.reorder_cache(order)


def read_together(model: PreTrainedModel, input_ids: Tensor, caches: Sequence[H2OCache]) -> None:
    """Read a prompt ``[B, T]`` without padding onto empty caches, once for all that can share."""
    sharing = [cache for cache in caches if shares_prompt(cache.cache_config)]
    if len(sharing) > 1:
        shared = SharedPrefill(sharing)
        h2okv.prefill(model, input_ids, shared)
        shared.split()
    for cache in caches:
        if not cache.num_seen_tokens:
            h2okv.prefill(model, input_ids, cache)
