"""Sequences that go through the model together, and their cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.engine.cache_store import CacheStore
from h2okv.engine.sequence import Sequence

_MASK_STEPS = 64


class MicroBatch:
    """Rows of one forward: a left-padded prompt first, then one token at a time.

    Args:
        sequences: B of them, none of which has begun.
        cache: Empty; mutated by every forward.
        device: Where the model's input goes.

    Attributes:
        row_bytes: What the cache of the largest row took that ever was among them.
    """

    row_bytes = 0

    def __init__(self, sequences: list[Sequence], cache: H2OCache, device: torch.device) -> None:
        self.sequences = sequences
        self.cache = cache
        self.device = device
        self.columns = max(len(sequence.prompt) for sequence in sequences)
        lengths = torch.tensor([len(sequence.prompt) for sequence in sequences])
        self._lengths = lengths.to(device)
        self._mask = self._room_for(0)
        self._mask[:, : self.columns] = torch.arange(self.columns) >= (
            self.columns - lengths.unsqueeze(1)
        )

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def is_prompt(self) -> bool:
        """Whether the next forward reads the prompts."""
        return not self.sequences[0].new_tokens

    @property
    def num_live(self) -> int:
        """Rows that are not finished."""
        return sum(not sequence.is_finished for sequence in self.sequences)

    def forward(self, model: PreTrainedModel) -> torch.Tensor:
        """Runs the model on what comes next; mutates the cache.

        Args:
            model: With H2O attention.

        Returns:
            The last column's logits, ``[B, V]``.
        """
        if self.is_prompt:
            tokens = self._padded_prompts()
            positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)
        else:
            newest = [sequence.new_tokens[-1] for sequence in self.sequences]
            tokens = torch.tensor(newest, device=self.device).unsqueeze(1)
            positions = (self._lengths - 1).unsqueeze(1)
        output: Any = model(
            input_ids=tokens,
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **({"position_ids": positions} if _takes_positions(model) else {}),
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    @property
    def mask(self) -> torch.Tensor:
        """int64 ``[B, columns]``, 0 for padding; a view."""
        return self._mask[:, : self.columns]

    def take(self, tokens: list[int], ends: frozenset[int]) -> None:
        """Adds a column of new tokens; mutates the sequences that are not finished.

        Args:
            tokens: One for each row.
            ends: Tokens that end a text.
        """
        for sequence, token in zip(self.sequences, tokens, strict=True):
            if not sequence.is_finished:
                sequence.take(token, ends)
        if self.columns == self._mask.shape[1]:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self), _MASK_STEPS)], dim=1)
        self.columns += 1
        self._lengths += 1

    def drop_finished(self, store: CacheStore | None = None) -> None:
        """Takes the finished rows out, of the cache too; at least one row must be left.

        Args:
            store: Where the cache is between two layers.
        """
        rows = [row for row, own in enumerate(self.sequences) if not own.is_finished]
        if len(rows) == len(self):
            return
        indices: Any = torch.tensor(rows, device=self.device)
        for index, layer in enumerate(self.cache.layers):
            if store is not None:
                store.bring(self.cache, index)
            # Unlike batch_select_indices, every kind of layer has it.
            layer.reorder_cache(indices)
            if store is not None:
                store.put_back(self.cache, index, is_new=True)
        self.sequences = [self.sequences[row] for row in rows]
        self._mask, self._lengths = self._mask[indices], self._lengths[indices]

    def append(self, other: MicroBatch, cache: H2OCache) -> None:
        """Takes another micro-batch's rows, both past their prompts; mutates this one.

        Args:
            other: To be forgotten by the caller.
            cache: The rows of both, this one's first.
        """
        columns = max(self.columns, other.columns)
        masks = [
            torch.nn.functional.pad(part.mask, (columns - part.columns, 0))
            for part in (self, other)
        ]
        self.row_bytes = max(self.row_bytes, other.row_bytes)
        self.sequences = self.sequences + other.sequences
        self.columns = columns
        self._mask = self._room_for(columns)
        self._mask[:, :columns] = torch.cat(masks)
        self._lengths = torch.cat([self._lengths, other._lengths])
        self.cache = cache

    def _room_for(self, columns: int) -> torch.Tensor:
        """A mask of ones with some columns to grow into."""
        columns = max(columns, self.columns)
        shape = (len(self), columns + _MASK_STEPS)
        return torch.ones(shape, dtype=torch.int64, device=self.device)

    def _padded_prompts(self) -> torch.Tensor:
        """int64 ``[B, columns]``; any token will do for padding, the mask says where it is."""
        rows = [
            [own.prompt[0]] * (self.columns - len(own.prompt)) + own.prompt
            for own in self.sequences
        ]
        return torch.tensor(rows, device=self.device)


def _takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model is told where its tokens are (some count for themselves)."""
    return "position_ids" in inspect.signature(model.forward).parameters
