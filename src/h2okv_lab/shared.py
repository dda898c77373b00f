"""One forward over a prompt for several caches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from h2okv.cache import H2OCache
from h2okv.cache.base_layer import LAYER_ATTRIBUTE, BaseLayer
from h2okv.cache.layer import CacheLayer
from h2okv.cache.rope import Rotation
from h2okv.config import CacheConfig
from h2okv.ops.reference import AttentionSpec, Visibility
from h2okv.policy import Inputs

Attended = tuple[Tensor, Tensor]


def shares_prompt(config: CacheConfig) -> bool:
    """Return whether this cache can reuse a full cache's attention over the prompt."""
    return config.positions == "original" and config.chunk is None


class SharedAttention:
    """A block's attention, computed once for each weighting of its queries."""

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
        spec: AttentionSpec,
        weights: Tensor | None,
    ) -> Attended:
        if self._attended is None:
            self._attended = attend(query, key, value, visibility, spec, None)
        output, sums = self._attended
        if weights is None:
            return output, sums
        for weighting, sums in self._weighted:
            if torch.equal(weighting, weights):
                return output, sums
        first = 0
        if visibility.queries is visibility.entries is spec.reach is None:
            # Queries of weight zero before a window at the end need no second pass.
            first = int((weights != 0).any(dim=0).to(torch.uint8).argmax())
        seen = replace(visibility, past=visibility.past + first)
        _, sums = attend(query[:, :, first:], key, value, seen, spec, weights[:, first:])
        self._weighted.append((weights, sums))
        return output, sums

    def once(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return ``compute()``, computed by the first caller and shared with the others."""
        if self._once is None:
            self._once = compute()
        return self._once


class SharedLayer(BaseLayer):
    """One layer of several caches: all read the first block, then each decodes its sequences."""

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        first = layers[0]
        rules = (layer.rule for layer in layers if layer.rule.effective_inputs is Inputs.QUERIES)
        super().__init__(
            first.layer_idx, first.budget, next(rules, first.rule), first.position_rule
        )
        self.layers = list(layers)

    def learn_rotation(self, rotation: Rotation | None) -> None:
        super().learn_rotation(rotation)
        for layer in self.layers:
            if not layer.rotations.is_known:
                layer.learn_rotation(rotation)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.require_attention()
        setattr(key_states, LAYER_ATTRIBUTE, self)
        self.awaits_attention = True
        return key_states, value_states

    def claim(self, module: torch.nn.Module) -> None:
        for layer in self.layers:
            layer.claim(module)

    def get_seq_length(self) -> Any:
        return self.layers[0].get_seq_length()

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
        """Read the prompt for all caches, or the tokens of each cache's sequences.

        Arguments and result as for `CacheLayer.attend`.
        """
        self.awaits_attention, self.attention_spec = False, spec
        self.count_columns(query.shape[2])
        self.num_forwards += 1
        if self.num_forwards == 1:
            return self._read_prompt(query, key, value, real, spec, position_ids)
        spec = spec if spec.reach is None else spec._replace(reach=None)
        count = len(self.layers)
        states = [tensor.chunk(count) for tensor in (query, key, value)]
        masks = [None] * count if real is None else real.chunk(count)
        outputs = [
            layer.attend(query, *layer.update(key, value), mask, spec)
            for layer, query, key, value, mask in zip(self.layers, *states, masks, strict=True)
        ]
        return torch.cat(outputs)

    def _read_prompt(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        real: Tensor | None,
        spec: AttentionSpec,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Let every cache read the prompt with its budget and its rule."""
        attention, outputs = SharedAttention(), []
        for layer in self.layers:
            if real is None and layer.prompt.expected_length is None:
                layer.prompt.expected_length = query.shape[2]  # the prompt ends here
            with layer.share_attention(attention):
                states = layer.update(key, value)
                outputs.append(layer.attend(query, *states, real, spec, position_ids))
        return outputs[0]


class SharedPrefill(H2OCache):
    """Empty caches of one model that read a prompt in one forward.

    After `split` each cache is as if it had read the prompt alone. Then use each cache by itself,
    or decode all in one batch: the prompt's sequences repeated for each cache, in the order of
    ``caches``. Each copy is decoded on its cache, and a step reads the weights once.
    """

    def __init__(self, caches: Sequence[H2OCache]) -> None:
        super().__init__(caches[0].config, policy="full")
        self._window = None  # each cache warns by itself
        for config in (cache.cache_config for cache in caches):
            if not shares_prompt(config):
                raise ValueError(
                    f"{config.label!r} cannot share the prompt with other caches (positions="
                    f"{config.positions!r}, evict_every={config.evict_every}); leave them out,"
                    " or run it alone."
                )
        self.caches = list(caches)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, BaseLayer):
                layers: list[Any] = [cache.layers[index] for cache in self.caches]
                self.layers[index] = SharedLayer(layers)
        self._scored = [layer for layer in self.layers if isinstance(layer, BaseLayer)]

    def split(self) -> None:
        """End the prompt; then the caches are independent."""
        scored: Any = self.caches[0].layers[self._scored[0].layer_idx]
        # All sequences of the first cache, then of the next one.
        order: Any = torch.arange(scored.batch_size, device=scored.device).repeat(len(self.caches))
        for index, layer in enumerate(self.layers):
            if isinstance(layer, BaseLayer):
                continue
            # A sliding-window layer, for example, is the same for all caches.
            for cache in self.caches:
                cache.layers[index] = copy.deepcopy(layer)
            layer.reorder_cache(order)


def read_together(caches: Sequence[H2OCache], read: Callable[[H2OCache], object]) -> None:
    """Let ``read`` read a prompt onto empty caches, once for all that can share it."""
    sharing = [cache for cache in caches if shares_prompt(cache.cache_config)]
    if len(sharing) > 1:
        shared = SharedPrefill(sharing)
        read(shared)
        shared.split()
    for cache in caches:
        if not cache.num_seen_tokens:
            read(cache)
