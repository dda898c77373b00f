"""Roll back a layer's newest tokens: drafts that were rejected."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from h2okv.cache.slot_state import SlotState, ordinary_tensors

# Tokens that may be taken back; transformers drafts up to 20 by default.
_MOST_TOKENS = 32


class _Layer(Protocol):
    state: SlotState
    num_columns: int | None
    cumulative_length: Any  # as of `BaseLayer`

    @property
    def device(self) -> torch.device: ...
    def plan(self) -> dict[str, int | None] | None: ...
    def restore_plan(self, plan: dict[str, int | None]) -> None: ...


class StepLog:
    """The state before each of a layer's newest tokens, since `crop` was called.

    Of a step it holds the scores and positions, and the entries that the step overwrites in the
    free slots. Where entries move, in a block, at the end of a span or when slots are added, it
    holds the whole state.
    """

    def __init__(self) -> None:
        self.prompt_columns: int | None = None  # of the next forward, before its drafts
        self.num_drafts = 0  # of the last forward, which `crop` has not decided yet
        self._records: deque[tuple[SlotState | dict[str, Any], dict[str, int | None] | None]]
        self._records = deque(maxlen=_MOST_TOKENS)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, layer: _Layer, takes_step: bool) -> None:
        """Note a layer before it reads one token of each sequence; mutates the log."""
        state, plan = layer.state, layer.plan()
        with ordinary_tensors():
            is_all = not takes_step or plan is None or plan["steps_to_cut"] == 1
            if not is_all:  # a pool has all slots from the start
                is_all = plan["steps_left"] == 0 and state.num_slots != plan["capacity"]
            if is_all:
                self._records.append((state.map(Tensor.clone), plan or {}))
                return
            record: dict[str, Any] = {
                name: tensor.clone()
                for name, tensor in state.tensors().items()
                if (kind := state.kind_of(name)).changes or kind.is_metadata
            }
            free = record["free_slot"].unsqueeze(-1)
            if state.head_of_slot is not None:  # one row of slots, with a free one for each head
                free = free.transpose(1, 2).reshape(len(free), 1, -1, 1)
            for name, tensor in state.entry_tensors().items():
                index = free.expand(-1, -1, -1, tensor.shape[-1])
                record[name] = index, tensor.gather(2, index)
        self._records.append((record, plan))

    def forget(self) -> None:
        """Make the tokens read so far final; mutates the log."""
        self._records.clear()

    def select(self, indices: Tensor) -> None:
        """Follow `SlotState.index_select` with int64 indices; mutates the log."""

        def selected(record: Any) -> Any:
            if isinstance(record, SlotState):
                return record.index_select(indices)
            if isinstance(record, Tensor):
                return record.index_select(0, indices)
            if isinstance(record, tuple):
                return tuple(map(selected, record))
            return {name: selected(before) for name, before in record.items()}

        records = [(selected(record), plan) for record, plan in self._records]
        self._records = deque(records, maxlen=_MOST_TOKENS)

    def take_back(self, layer: _Layer, counts: Sequence[int]) -> None:
        """Restore each sequence of a layer as it was before its last `counts` tokens; mutates both.

        Where the counts differ, what the layer counts besides its state is up to the caller.
        """
        count = max(counts)
        if count > len(self._records):
            raise ValueError(
                f"H2OCache can take back its last {len(self._records)} tokens, got crop({-count});"
                f" draft up to {_MOST_TOKENS} tokens at a time, and call cache.expect(the prompt's"
                " length) before a first forward that brings drafts behind the prompt."
            )
        for number in range(count):
            record, plan = self._records.pop()
            rows = [row for row, times in enumerate(counts) if times > number]
            if len(rows) < len(counts):
                _restore(layer.state, record, torch.tensor(rows, device=layer.device))
                continue
            if isinstance(record, SlotState) and _shapes(record) != _shapes(layer.state):
                layer.state = record
            else:
                _restore(layer.state, record, slice(None))
            layer.restore_plan(plan)
        layer.cumulative_length -= min(counts)
        if count:
            layer.num_columns = None
            layer.state.forget_known()
        self.num_drafts = 0
        self.forget()


def _restore(state: SlotState, record: SlotState | dict[str, Any], rows: Tensor | slice) -> None:
    """Restore sequences of a state with as many slots as before; mutates the state."""
    tensors = state.tensors()
    before_all = record.tensors() if isinstance(record, SlotState) else record
    for name, before in before_all.items():
        tensor = tensors[name]
        if isinstance(before, tuple):
            index, before = before
            tensor[rows] = tensor[rows].scatter(2, index[rows], before[rows])
        else:
            tensor[rows] = before[rows]


def _shapes(state: SlotState) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.tensors().items()}
