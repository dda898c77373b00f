"""An embedding table that stays in its file: only the rows of a forward's tokens are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from h2okv.engine.checkpoint_files import CheckpointFiles, Stored, bytes_of
from h2okv.engine.skeleton import Slot


class RowTable:
    """Gives the embedding module the rows that it is about to look up.

    The module's own forward runs on them, so that families that scale their embeddings do.

    Args:
        slot: The embedding's weight; its module gets hooks.
        stored: Where the table lies.
        files: The checkpoint.
        device: Where the model computes.
    """

    def __init__(
        self, slot: Slot, stored: Stored, files: CheckpointFiles, device: torch.device
    ) -> None:
        self._slot = slot
        self._stored = stored
        self._files = files
        self._device = device
        self._row_bytes = stored.nbytes // stored.shape[0]
        self.bytes_read = 0
        module: Any = slot.owner
        # It only stops gradients, and would be out of range in a table of a few rows.
        module.padding_idx = None
        self._leave_nothing()
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, places = torch.unique(args[0], return_inverse=True)
        rows = torch.empty((len(tokens), *self._slot.shape[1:]), dtype=self._slot.dtype)
        target = bytes_of(rows)
        size = self._row_bytes
        for index, token in enumerate(tokens.tolist()):
            part = target[index * size : (index + 1) * size]
            self._files.read_into(self._stored.file, self._stored.start + token * size, part)
        self.bytes_read += len(tokens) * size
        self._slot.fill(rows.to(self._device))
        return (places, *args[1:])

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._leave_nothing()

    def _leave_nothing(self) -> None:
        """A table without rows; on the device, for some models ask where it is."""
        shape = (0, *self._slot.shape[1:])
        self._slot.fill(torch.empty(shape, dtype=self._slot.dtype, device=self._device))
