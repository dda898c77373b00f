"""All micro-batches pass a layer while its weights are there.

Each micro-batch runs transformers' own forward in a greenlet. Before every unit it hands control
back, so that a forward becomes a row of stops, and the scheduler decides who goes on. So no model's
code is repeated here, and the order of the computations of one micro-batch is that of its forward:
its numbers are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from h2okv.engine.cache_store import CacheStore
from h2okv.engine.micro_batch import MicroBatch
from h2okv.engine.skeleton import Unit
from h2okv.engine.weight_stream import WeightStream


class ZigZag:
    """A `Passing` over units of which some are streamed.

    Args:
        units: Decoder layers and the head; their modules get hooks.
        streamed: Indices of those that come through the stream.
        stream: Brings them; ``None`` if all are in memory.
        store: Where the caches are between two layers; ``None`` if they stay.
    """

    def __init__(
        self,
        units: tuple[Unit, ...],
        streamed: list[int],
        stream: WeightStream | None,
        store: CacheStore | None = None,
    ) -> None:
        self._units = units
        self._streamed = frozenset(streamed)
        self._stream = stream
        self.store = store
        self._greenlets = load_greenlet()
        for index, unit in enumerate(units):
            unit.module.register_forward_pre_hook(self._stop_before(index), with_kwargs=True)

    def run(
        self, model: PreTrainedModel, batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """See `Passing.run`."""
        lanes = [_Lane(batch, self._greenlets, model) for batch in batches]
        try:
            for lane in lanes:
                lane.go_on()
            while any(lane.stop is not None for lane in lanes):
                index = min(lane.stop for lane in lanes if lane.stop is not None)
                if index in self._streamed:
                    assert self._stream is not None
                    self._stream.bring(self._units[index])
                self._pass_unit(index, [lane for lane in lanes if lane.stop == index])
            if self._stream is not None:
                self._stream.release()
        finally:
            for lane in lanes:
                lane.end()
        for lane in lanes:
            yield lane.batch, lane.logits

    def forget(self, batch: MicroBatch) -> None:
        """See `Passing.forget`."""
        if self.store is not None:
            self.store.forget(batch.cache)

    def close(self) -> None:
        """Ends reading."""
        if self._stream is not None:
            self._stream.close()
        if self.store is not None:
            self.store.close()

    def _pass_unit(self, index: int, lanes: list[_Lane]) -> None:
        layer = self._units[index].layer_idx
        if self.store is None or layer is None:
            for lane in lanes:
                lane.go_on()
            return
        following = [(lane, layer) for lane in lanes[1:]] + [(lanes[0], layer + 1)]
        for lane, (other, later) in zip(lanes, following, strict=True):
            self.store.bring(lane.batch.cache, layer)
            if later < len(lane.batch.cache.layers):
                self.store.expect(other.batch.cache, later)
            lane.go_on()
            self.store.put_back(lane.batch.cache, layer)

    def _stop_before(self, index: int) -> Callable[..., Any]:
        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            lane = self._greenlets.getcurrent()
            if lane.parent is not None:
                lane.parent.switch(index)
            # With strided input a bf16 product on a CPU copies the weights once for each sequence.
            return tuple(a.contiguous() if torch.is_tensor(a) else a for a in args), kwargs

        return stop


class _Lane:
    """One micro-batch's forward, stopped before a unit or over.

    Attributes:
        stop: Index of the unit that it stands before; ``None`` when it is over.
        logits: Of the last column, when it is over.
    """

    def __init__(self, batch: MicroBatch, greenlets: Any, model: PreTrainedModel) -> None:
        self.batch = batch
        self.stop: int | None = None
        self._greenlet = greenlets.greenlet(lambda: batch.forward(model))

    def go_on(self) -> None:
        """Runs up to the next unit, or to the end."""
        result = self._greenlet.switch()
        if self._greenlet.dead:
            self.stop, self.logits = None, result
        else:
            self.stop = result

    def end(self) -> None:
        """Unwinds a forward that did not come to its end."""
        if not self._greenlet.dead:
            self._greenlet.throw()


def load_greenlet() -> Any:
    """Imports greenlet, which is part of an extra.

    Returns:
        The module.

    Raises:
        ValueError: If it is not installed.
    """
    try:
        import greenlet
    except ImportError as error:
        raise ValueError(
            "weights and caches outside the memory need greenlet; install it with pip install"
            " 'h2okv[offload]'"
        ) from error
    return greenlet
