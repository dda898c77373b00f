"""The cache of a chat: which positions it takes, and how much is read at once."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from h2okv.cache.positions import POSITIONS, Positions
from h2okv.cache.support import trained_window
from h2okv.cli.cache_choice import CacheChoice
from h2okv.cli.options import parse_amount

# Enough to read fast, few enough to hear Ctrl-C soon.
_CHUNK = 512
_AUTO = "auto"


def parse_tokens(name: str, text: str) -> int:
    """Reads a part of the budget in tokens.

    Args:
        name: The option's name, for the message.
        text: What the user wrote.

    Returns:
        The tokens.

    Raises:
        ValueError: If it is a share, which a chat without an end has not.
    """
    amount = parse_amount(name, text)
    if isinstance(amount, float):
        raise ValueError(
            f"--{name} {text} is a share of a prompt, but a chat has no end; give tokens, such as"
            f" --{name} 256"
        )
    return amount


def plan_cache(
    config: PreTrainedConfig, choice: CacheChoice, positions: str, chunk: int | None
) -> tuple[CacheChoice, str | None]:
    """Settles what the user left open, and hears about mistakes before the weights load.

    Args:
        config: The model's configuration.
        choice: Policy and budget in tokens.
        positions: `auto`, or one of `POSITIONS`.
        chunk: The most tokens that are read at once; None for the default.

    Returns:
        The choice with positions and chunk, and a remark if `auto` could not be `rolling`.

    Raises:
        ValueError: If a part of it makes no sense for the model.
    """
    if positions not in (_AUTO, *POSITIONS):
        raise ValueError(
            f"--positions {positions!r} is not known; choose from {', '.join((_AUTO, *POSITIONS))}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"--prefill-chunk {chunk} reads nothing; give 1 or more")
    choice.make(config, seed=0)
    remark = None
    if positions == _AUTO:
        positions = "rolling"
        try:
            replace(choice, positions="rolling").make(config, seed=0)
        except ValueError as error:
            positions, remark = "original", _remark(error)
    most = _largest_chunk(config, choice) if positions == "rolling" else None
    if chunk is not None and most is not None and chunk > most:
        raise ValueError(
            f"--prefill-chunk {chunk} does not fit behind the cache's entries in the window that"
            f" --model was trained on; give {most} or less, or lower --heavy, --recent or --sink"
        )
    if chunk is None:
        chunk = _CHUNK if most is None else min(_CHUNK, most)
    planned = replace(choice, positions=cast(Positions, positions), prefill_chunk=chunk)
    planned.make(config, seed=0)
    return planned, remark


def probe_positions(
    model: PreTrainedModel, planned: CacheChoice, positions: str
) -> tuple[CacheChoice, str | None]:
    """Asks the loaded model whether its positions roll, for a config does not tell everything.

    Args:
        model: With H2O attention.
        planned: From `plan_cache`.
        positions: What the user asked for.

    Returns:
        The choice, with original positions if `auto` cannot be `rolling`, and then a remark.
    """
    if positions != _AUTO or planned.positions != "rolling":
        return planned, None
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            model(token, past_key_values=planned.make(model.config, seed=0))
    except ValueError as error:
        if "positions=" not in str(error):
            raise
        return replace(planned, positions="original"), _remark(error)
    return planned, None


def _largest_chunk(config: PreTrainedConfig, choice: CacheChoice) -> int | None:
    """The most tokens that fit behind a full cache; None for any number."""
    window = trained_window(config)
    if window is None:
        return None
    budget = int(choice.sink + choice.heavy + choice.recent)
    if budget >= window:
        raise ValueError(
            f"--sink, --heavy and --recent add up to {budget} tokens, which leaves no room for a"
            f" new one in the window of {window} that --model was trained on; lower them"
        )
    return window - budget


def _remark(error: ValueError) -> str:
    reason = str(error).rstrip(".")
    return f"note: positions stay original, so the chat ends with the model's context ({reason})"
