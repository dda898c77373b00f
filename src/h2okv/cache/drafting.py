"""Drafts of a running ``generate``: the text before them, and when drafting ends."""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig

from h2okv.cache.argument import cache_in
from h2okv.cache.base_layer import BaseLayer

_DRAFTS = "_assisted_decoding"
# What records a cache's past: drafts, and steps that run ahead of the stopping criteria.
_CALLS = (_DRAFTS, "_sample")


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
    """Stop a layer of any kind from recording; mutates the layer."""
    # transformers sets attributes where a layer records; a layer of this package has properties.
    attributes: Any = vars(layer)
    if isinstance(layer, BaseLayer):
        attributes = {"record_past": layer.record_past, "is_initialized": layer.is_initialized}
    if not attributes.get("record_past"):
        return
    has_states = all(attributes.get("is_conv_states_initialized", {}).values())
    if has_states and attributes.get("is_initialized", True):
        layer.crop(0)  # down to what the next forward needs
    layer.record_past = False
