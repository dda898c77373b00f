"""Measurements on the rows of full attention: each sees a block of queries at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from h2okv.analysis.observing import LayerAttention, read_observed

Tick = Callable[[float], None]
"""Is told the share that is done, from 0 to 1."""


def no_tick(share: float) -> None:
    """Tells nobody."""


class RowWatcher(Protocol):
    """Adds up something over the rows of attention."""

    def see(self, layer_idx: int, first: int, probabilities: torch.Tensor) -> None:
        """Takes one block; see `LayerAttention.rows` for its shape."""


def watch_rows(
    model: PreTrainedModel, input_ids: torch.Tensor, watchers: list[Any], tick: Tick = no_tick
) -> None:
    """Lets a model read a text and shows every block of attention rows to the watchers.

    Args:
        model: a loaded model.
        input_ids: int64 ``[1, T]``.
        watchers: `RowWatcher` objects; mutated.
        tick: told how far the model is.
    """
    total = model.config.get_text_config(decoder=True).num_hidden_layers

    def handler(layer: LayerAttention) -> None:
        for first, probabilities in layer.rows():
            for watcher in watchers:
                watcher.see(layer.layer_idx, first, probabilities)
        tick((layer.layer_idx + 1) / total)

    read_observed(model, input_ids, handler)


class Sparsity:
    """Counts entries below 1 % of their row's maximum (arXiv 2306.14048, section 3.1).

    Args:
        threshold: the share of the row's maximum below which an entry counts as nothing.
    """

    def __init__(self, threshold: float = 0.01) -> None:
        self.threshold = threshold
        self._small: dict[int, np.ndarray] = {}
        self._length = 0

    def see(self, layer_idx: int, first: int, probabilities: torch.Tensor) -> None:
        """See `RowWatcher`."""
        top = probabilities.amax(dim=-1, keepdim=True)
        # The keys after a query have probability 0 and count as small here; `rows` takes them out.
        small = (probabilities < self.threshold * top).sum(dim=-1).flatten(0, 1).cpu().numpy()
        last = probabilities.shape[-1]
        own = np.arange(first, last)
        small = small - (last - 1 - own)
        before = self._small.get(layer_idx, np.zeros((small.shape[0], 0), dtype=np.int64))
        self._small[layer_idx] = np.concatenate([before, small], axis=1)
        self._length = max(self._length, last)

    def rows(self) -> list[dict[str, float]]:
        """Returns for each layer and query head the share of small entries.

        ``share`` counts the keys that a query may see; ``share_late`` the same for the second half
        of the text, whose rows are long; ``share_square`` also counts the keys that causality
        hides, as a count over the whole square matrix would.
        """
        result = []
        visible = np.arange(1, self._length + 1)
        half = self._length // 2
        for layer_idx, small in sorted(self._small.items()):
            for head, counts in enumerate(small):
                hidden = self._length**2 - visible.sum()
                result.append(
                    {
                        "layer": layer_idx,
                        "head": head,
                        "share": counts.sum() / visible.sum(),
                        "share_late": counts[half:].sum() / visible[half:].sum(),
                        "share_square": (counts.sum() + hidden) / self._length**2,
                    }
                )
        return result


class Accumulation:
    """Adds up the attention that each key receives from all queries (the scores of H2O)."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}

    def see(self, layer_idx: int, first: int, probabilities: torch.Tensor) -> None:
        """See `RowWatcher`."""
        received = probabilities.sum(dim=2)
        last = received.shape[-1]
        total = torch.zeros(*received.shape[:2], last, device=received.device)
        before = self._sums.get(layer_idx)
        if before is not None:
            total[..., : before.shape[-1]] = before
        self._sums[layer_idx] = total + received

    def scores(self) -> np.ndarray:
        """Returns float32 ``[L, H, G, T]``, layers in order."""
        return torch.stack([self._sums[i].cpu() for i in sorted(self._sums)]).numpy()


class Sinks:
    """The share of attention that goes to the first positions, from queries far from them.

    Args:
        counts: how many first positions to add up.
        away: the first query that counts.
    """

    def __init__(self, counts: tuple[int, ...] = (1, 4, 16), away: int = 64) -> None:
        self.counts, self.away = counts, away
        self._mass: dict[int, np.ndarray] = {}
        self._queries: dict[int, int] = {}
        self._even: dict[int, float] = {}

    def see(self, layer_idx: int, first: int, probabilities: torch.Tensor) -> None:
        """See `RowWatcher`."""
        start = max(0, self.away - first)
        late = probabilities[:, :, start:].flatten(0, 1)
        if late.shape[1] == 0:
            return
        mass = torch.stack([late[..., :count].sum(dim=(1, 2)) for count in self.counts], dim=1)
        own = np.arange(first + start, probabilities.shape[-1]) + 1
        self._mass[layer_idx] = self._mass.get(layer_idx, 0) + mass.cpu().numpy()
        self._queries[layer_idx] = self._queries.get(layer_idx, 0) + late.shape[1]
        self._even[layer_idx] = self._even.get(layer_idx, 0.0) + float((1 / own).sum())

    def rows(self) -> list[dict[str, float]]:
        """Returns for each layer and query head the mean mass, and what even attention gives."""
        result = []
        for layer_idx, mass in sorted(self._mass.items()):
            queries = self._queries[layer_idx]
            for head, sums in enumerate(mass):
                row: dict[str, float] = {"layer": layer_idx, "head": head}
                for count, total in zip(self.counts, sums, strict=True):
                    row[f"first_{count}"] = total / queries
                row["even_first_1"] = self._even[layer_idx] / queries
                result.append(row)
        return result


class Retention:
    """The share of full attention's mass that falls on what a policy would still hold.

    Args:
        gone_at: for each name int ``[L, H, T]``, the first query that does not see a token.
        layers: the layers of these arrays, in order.
        first: the first query that counts.
    """

    def __init__(self, gone_at: dict[str, np.ndarray], layers: tuple[int, ...], first: int) -> None:
        self._gone = {name: torch.from_numpy(gone) for name, gone in gone_at.items()}
        self._index = {layer_idx: place for place, layer_idx in enumerate(layers)}
        self._first = first
        self._mass: dict[tuple[str, int], float] = {}
        self._rows: dict[int, int] = {}

    def see(self, layer_idx: int, first: int, probabilities: torch.Tensor) -> None:
        """See `RowWatcher`."""
        start = max(0, self._first - first)
        late = probabilities[:, :, start:].cpu()
        if late.shape[2] == 0:
            return
        last = late.shape[-1]
        queries = torch.arange(first + start, last).unsqueeze(1)
        self._rows[layer_idx] = self._rows.get(layer_idx, 0) + late.shape[2]
        summed = late.mean(dim=1)
        for name, gone in self._gone.items():
            held = gone[self._index[layer_idx], :, None, :last] > queries
            mass = float((summed * held).sum()) / late.shape[0]
            key = (name, layer_idx)
            self._mass[key] = self._mass.get(key, 0.0) + mass

    def shares(self) -> dict[tuple[str, int], float]:
        """Returns the mean share for each name and layer."""
        return {key: mass / self._rows[key[1]] for key, mass in self._mass.items()}
