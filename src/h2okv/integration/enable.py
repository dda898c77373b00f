"""`enable`: H2O attention on a model for the length of a with block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.cache.validation import check_model
from h2okv.integration.attention import ATTENTION_NAME


def check_compiler(device: torch.device) -> None:
    """Tries the compiler on next to nothing."""
    try:
        torch.compile(lambda numbers: numbers + 1)(torch.ones(2, device=device))
    except Exception as error:  # its failures have as many types as there are tool chains
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"compile=True: torch.compile does not work here ({lines[0][:200]}); on a CPU it needs "
            "a C++ compiler such as g++. Install one, or leave out compile=True."
        ) from error


def with_compiled_steps(model: PreTrainedModel) -> Callable[..., Any]:
    """Makes a forward that compiles the steps of a single token on an `H2OCache`.

    Everything else, prompts, turns and other caches, runs as before: their shapes change, and so
    every one of them would be compiled anew.
    """
    plain = model.forward
    compiled = torch.compile(plain, fullgraph=True)

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # on a GPU ``generate`` does so by itself
            return plain(*args, **kwargs)
        cache = kwargs.get("past_key_values")
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None or tokens.shape[1] > 1 or not isinstance(cache, H2OCache):
            return plain(*args, **kwargs)
        if not cache.prepare_step():
            return plain(*args, **kwargs)
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            # What was seen before is in the cache; a mask that grows would be compiled again.
            mask = mask[:, -1:]
            readable = mask.device.type == "cpu"
            kwargs["attention_mask"] = None if readable and bool(mask.all()) else mask.clone()
        return compiled(*args, **kwargs)

    return forward


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


def recipe_path() -> Path:
    """Returns the folder for ``model.generate(custom_generate=...)``.

    It can be uploaded to the Hub as it is, or used from here with ``trust_remote_code=True``.
    """
    return Path(__file__).with_name("hub_recipe")
