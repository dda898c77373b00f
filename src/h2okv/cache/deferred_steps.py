"""The ends of decode steps that the layers of a cache leave to the last one."""

from __future__ import annotations

from typing import Any

import torch

from h2okv.cache.slot_state import ordinary_tensors
from h2okv.ops.decode import StepRules
from h2okv.ops.deferred import Segments, evict_segments, evict_together

# Slots of a layer, of all sequences and heads, above which the number of operations no longer
# decides the time, and copies of all layers would be large.
_LARGEST = 1 << 15


class DeferredSteps:
    """Steps of a forward that are not ended yet; one object for all layers of a cache.

    A step of one sequence takes as long as its operations are many, not as they are large. On a CPU
    the last layer therefore ends the steps of all; a GPU has a kernel.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Any, StepRules]] = []
        self._segments: dict[Any, Segments] = {}

    def waits_for(self, layer: Any) -> bool:
        """Tell whether a layer begins again, though the last one has not ended its step."""
        return bool(self._pending) and self._pending[0][0] is layer

    def takes(self, layer: Any, rules: StepRules) -> bool:
        """Tell whether the end of a layer's step may wait."""
        state, slots = layer.state, layer.slots
        if torch.compiler.is_compiling() or state.device.type != "cpu":
            return False
        # A rule that ranks by more than scores may look at a layer's other tensors.
        by_scores = slots.ranks_by_scores or not layer.rule.is_bounded
        is_plain = by_scores and rules.full and rules.rotary is None
        return is_plain and state.positions.numel() <= _LARGEST

    def add(self, layer: Any, rules: StepRules) -> None:
        """Note a layer's step, if it is deferred; the last layer's ends all."""
        if rules.deferred:
            self._pending.append((layer, rules))
        if layer.ends_forward:
            self.end()

    def end(self) -> None:
        """End all steps that wait; mutates their layers' states."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        alike: dict[Any, list[tuple[Any, StepRules]]] = {}
        for layer, rules in pending:
            # Layers that protect the same entries.
            alike.setdefault(layer.slots.protected, []).append((layer, rules))
        for protected, steps in alike.items():
            self._end_alike(protected, [layer for layer, _ in steps], steps[0][1])

    def _end_alike(self, protected: Any, layers: list[Any], rules: StepRules) -> None:
        states = [layer.state for layer in layers]
        shapes = {state.positions.shape for state in states}
        is_even = len(shapes) == 1 and all(state.head_of_slot is None for state in states)
        if rules.priority is not None and states[0].value_weights is not None:
            weights = [
                state.value_weights if is_even else state.value_weights.flatten(1)
                for state in states
            ]
            joined = torch.cat(weights) if is_even else torch.cat(weights, dim=1).unsqueeze(1)
            rule = layers[0].rule

            def rank(scores: Any, positions: Any, newest: Any) -> Any:
                return rule.eviction_scores(scores, positions, newest, joined)

            rules = rules._replace(priority=rank)
        if is_even:
            evict_together(states, rules)
            return
        segments = self._segments.get(protected)
        if segments is None or not segments.fits(states):
            with ordinary_tensors():
                segments = self._segments[protected] = Segments(states)
        evict_segments(states, rules, segments)
