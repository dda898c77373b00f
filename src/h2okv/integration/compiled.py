"""Decode steps through ``torch.compile``; prompts and turns stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from h2okv.cache import H2OCache


def check_compiler(device: torch.device) -> None:
    """Tries the compiler on next to nothing.

    Args:
        device: where the model is.

    Raises:
        ValueError: if it does not work there.
    """
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

    Args:
        model: a loaded model; unchanged.

    Returns:
        What takes the place of ``model.forward``, with its signature.
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
