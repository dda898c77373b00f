"""Drafts: the ``generate`` that makes them, and the state before each of the newest tokens."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig

from h2okv.cache.argument import cache_in
from h2okv.cache.slot_state import SlotState, ordinary_tensors

_DRAFTS = "_assisted_decoding"
# What records a cache's past: drafts, and steps that run ahead of the stopping criteria.
_CALLS = (_DRAFTS, "_sample")
# Tokens that may be taken back; transformers drafts up to 20 by default.
_MOST_TOKENS = 32
Plan = dict[str, int | None]
"""What steps of a layer count besides its state (`SlotPlan.counters`)."""


class Drafting:
    """The call of transformers that lets a cache record its past.

    transformers says when a cache begins to record and never that it may end. It may when the call
    is no longer on the stack of its thread, whether it has returned or raised.

    Attributes:
        columns: columns of the text that drafts follow, padding and tokens seen included; ``None``
            if there are no drafts.
        length: real tokens of that text.
        gives_whole_text: whether the first forward would bring the tokens seen again.
        announced: whether the call has announced `length` to an empty cache.
    """

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        config: GenerationConfig = values["generation_config"]
        self.columns: int | None = None
        self.length: int | None = None
        self.gives_whole_text = self.announced = False
        self._thread, self._config = threading.get_ident(), weakref.ref(config)
        self._hook: RemovableHandle | None = None
        if name != _DRAFTS:
            return
        self._model = weakref.ref(values["self"])
        inputs = values.get("model_kwargs") or {}
        mask, position_ids = inputs.get("attention_mask"), inputs.get("position_ids")
        num_given = _num_tokens(inputs | {"input_ids": values["input_ids"]})
        if mask is not None:
            self.columns, self.length = mask.shape[1], int(mask.sum(dim=1).max())
        else:
            # `next_turn` gives the new tokens alone, and the positions are those of the whole text.
            num_placed = 0 if position_ids is None else position_ids.shape[-1]
            self.columns = self.length = max(num_given, num_placed)
        self.gives_whole_text = self.columns == num_given

    @classmethod
    def of_caller(cls) -> Drafting | None:
        """Return the call on this thread's stack, or ``None``."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            name = frame.f_code.co_name
            if name in _CALLS:
                values = frame.f_locals
                if isinstance(values.get("generation_config"), GenerationConfig):
                    return cls(name, values)
            frame = frame.f_back
        return None

    @property
    def is_running(self) -> bool:
        """Whether the call has neither returned nor raised."""
        config = self._config()
        frame = None if config is None else sys._current_frames().get(self._thread)
        while frame is not None:
            # Each call has a copy of its configuration.
            is_call = frame.f_code.co_name in _CALLS
            if is_call and frame.f_locals.get("generation_config") is config:
                return True
            frame = frame.f_back
        return False

    def skip(self, cache: object, seen: int) -> None:
        """Let the model's next forward leave out the tokens that a cache has seen.

        transformers does so in every ``generate`` but one with drafts.
        """

        def leave_out(
            module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            is_running, is_meant = self.is_running, cache_in(kwargs) is cache
            if is_running and not is_meant:  # the model drafts for itself
                return None
            self.end()
            return (args, _new_tokens(kwargs, seen)) if is_running else None

        model = self._model()
        assert model is not None
        self._hook = model.register_forward_pre_hook(leave_out, with_kwargs=True)

    def end(self) -> None:
        """Remove what `skip` has changed in the model."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _num_tokens(arguments: dict[str, Any]) -> int:
    """Return the columns of the tokens, or embeddings, among a forward's arguments."""
    embeds = arguments.get("inputs_embeds")
    return int((arguments["input_ids"] if embeds is None else embeds).shape[1])


def _new_tokens(arguments: dict[str, Any], seen: int) -> dict[str, Any]:
    """Return a forward's arguments without the first tokens of its text."""
    length, changed = _num_tokens(arguments), dict(arguments)
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        if name == "inputs_embeds":
            changed[name] = value[:, seen:]
        elif (name.endswith("_ids") or name == "cache_position") and value.shape[-1] == length:
            changed[name] = value[..., seen:]
    return changed


def end_recording(layer: Any) -> None:
    """Stop one of transformers' layers from recording; mutates the layer."""
    attributes = vars(layer)  # which it sets where it records
    if not attributes.get("record_past"):
        return
    has_states = all(attributes.get("is_conv_states_initialized", {}).values())
    if has_states and attributes.get("is_initialized", True):
        layer.crop(0)  # down to what the next forward needs
    layer.record_past = False


class StepLog:
    """The state before each of a layer's newest tokens, since `crop` was called.

    Of a step it holds the scores and positions, and the entries that the step overwrites in the
    free slots. Where entries move, in a block, at the end of a span or when slots are added, it
    holds the whole state.
    """

    def __init__(self) -> None:
        self.prompt_columns: int | None = None  # of the next forward, before its drafts
        self.num_drafts = 0  # of the last forward, which `crop` has not decided yet
        self._records: deque[tuple[SlotState | dict[str, Any], Plan]] = deque(maxlen=_MOST_TOKENS)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, state: SlotState, plan: Plan | None, takes_step: bool) -> None:
        """Note a layer's state before it reads one token of each sequence; mutates the log."""
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

    def take_back(self, state: SlotState, count: int) -> tuple[SlotState, Plan | None]:
        """Restore a state as it was before its last `count` tokens; mutates it and the log.

        Returns the state, and the plan of its layer.
        """
        if count > len(self._records):
            raise ValueError(
                f"H2OCache can take back its last {len(self._records)} tokens, got crop({-count});"
                f" draft up to {_MOST_TOKENS} tokens at a time, and call cache.expect(the prompt's"
                " length) before a first forward that brings drafts behind the prompt."
            )
        plan = None
        for _ in range(count):
            record, plan = self._records.pop()
            if isinstance(record, SlotState) and _shapes(record) != _shapes(state):
                state = record
            else:
                _restore(state, record)
        if count:
            state.known_lengths = state.known_totals = state.scored_lengths = None
        self.num_drafts = 0
        self.forget()
        return state, plan


def _restore(state: SlotState, record: SlotState | dict[str, Any]) -> None:
    """Restore a state with as many slots as before; mutates it."""
    tensors = state.tensors()
    before_all = record.tensors() if isinstance(record, SlotState) else record
    for name, before in before_all.items():
        tensor = tensors[name]
        if isinstance(before, tuple):
            tensor.scatter_(2, *before)
        else:
            tensor.copy_(before)


def _shapes(state: SlotState) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.tensors().items()}
