"""One pass over the weights for all micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from transformers import PreTrainedModel

from h2okv.engine.cache_store import CacheStore
from h2okv.engine.micro_batch import MicroBatch


class Passing(Protocol):
    """How the forwards of several micro-batches share the weights.

    Attributes:
        store: Where their caches are between two layers; ``None`` if they stay.
    """

    store: CacheStore | None

    def run(
        self, model: PreTrainedModel, batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """Runs one forward of each micro-batch; mutates their caches.

        Args:
            model: With H2O attention.
            batches: One or more.

        Yields:
            Each micro-batch with its last column's logits, ``[B, V]``.
        """
        ...

    def forget(self, batch: MicroBatch) -> None:
        """Gives back what is held for a micro-batch.

        Args:
            batch: Will not be run again.
        """
        ...


class OneByOne:
    """All weights are in memory: one forward after the other."""

    store: CacheStore | None = None

    def run(
        self, model: PreTrainedModel, batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """See `Passing.run`."""
        for batch in batches:
            yield batch, batch.forward(model)

    def forget(self, batch: MicroBatch) -> None:
        """See `Passing.forget`."""
