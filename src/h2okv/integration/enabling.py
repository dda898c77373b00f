"""Switching a loaded model to H2O attention and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.cache.support import check_model
from h2okv.integration.compiled import check_compiler, with_compiled_steps
from h2okv.integration.hf import ATTENTION_NAME


@contextmanager
def enable(model: PreTrainedModel, *, compile: bool = False) -> Iterator[PreTrainedModel]:
    """Gives a loaded model H2O attention inside a ``with`` block.

    The model's attention implementation is changed on entry and restored on exit, also after an
    error. Inside, a padded batch without an attention mask is refused, and the positions that the
    model gets are those that a cache with ``positions="clamped"`` asks for.

    Args:
        model: a loaded model; its config's attention implementation, and with ``compile`` its
            ``forward``, are mutated for the block.
        compile: run steps of a single token through ``torch.compile``. The first one takes some
            tens of seconds; after that all small operations of a layer are one. Needs layers that
            all keep H2O entries; others run as they are.

    Yields:
        The model.

    Raises:
        ValueError: if the model is not supported, or the compiler does not work here.
    """
    check_model(model)
    if compile:
        check_compiler(model.device)
    before = model.config._attn_implementation
    own_forward = vars(model).get("forward")
    model.set_attn_implementation(ATTENTION_NAME)
    if compile:
        vars(model)["forward"] = with_compiled_steps(model)
    hooks = [
        model.register_forward_pre_hook(_check_padding, with_kwargs=True),
        model.register_forward_pre_hook(_place_tokens, with_kwargs=True),
    ]
    try:
        yield model
    finally:
        for hook in hooks:
            hook.remove()
        if compile:
            del vars(model)["forward"]
            if own_forward is not None:
                vars(model)["forward"] = own_forward
        model.set_attn_implementation(before)


def _check_padding(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    input_ids = kwargs.get("input_ids", args[0] if args else None)
    if input_ids is not None and input_ids.shape[-1] > 1:
        mask = kwargs.get("attention_mask")
        check_padded_batch(input_ids, mask, getattr(module.config, "pad_token_id", None))


def _place_tokens(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Gives the model the positions that the cache asks for, where it asks for others."""
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, H2OCache) or not cache.needs_enabling:
        return None
    position_ids = kwargs.get("position_ids")
    if position_ids is None:
        position_ids = _positions(args, kwargs, cache)
    return args, {**kwargs, "position_ids": cache.place(position_ids)}


def _positions(args: tuple[Any, ...], kwargs: dict[str, Any], cache: H2OCache) -> torch.Tensor:
    """Positions of a forward's tokens in the text, int64 ``[B or 1, T]``."""
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if tokens is None:
        tokens = kwargs["inputs_embeds"]
    length = tokens.shape[1]
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        return (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -length:]
    return (cache.num_seen_tokens + torch.arange(length, device=tokens.device)).unsqueeze(0)


def check_padded_batch(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pad_token_id: int | None
) -> None:
    """Refuses a batch that is padded but whose mask calls the padding text.

    Args:
        input_ids: ``[B, T]``.
        attention_mask: ``[B, tokens seen + T]``, or as `h2o_mask` makes it, or ``None``.
        pad_token_id: the padding token, or ``None`` if the model has none.

    Raises:
        ValueError: if some rows, and not all, begin or end with the padding token, unmasked.
    """
    if pad_token_id is None or input_ids.shape[0] == 1:
        return
    real = torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask is not None:
        if attention_mask.dim() == 4:  # ``generate`` has made a mask of what concerns this forward
            attention_mask = attention_mask[:, 0, -1]
        real = attention_mask[:, -input_ids.shape[1] :].to(torch.bool).to(input_ids.device)
    padding = (input_ids == pad_token_id) & real
    for side, column in (("left", 0), ("right", -1)):
        rows = padding[:, column]
        if bool(rows.any()) and not bool(rows.all()):
            row = int(rows.nonzero()[0])
            raise ValueError(
                f"row {row} of the batch is padded on the {side} with token {pad_token_id}, but "
                "the attention mask does not say so; pass attention_mask with 0 for padding."
            )
