"""The options of `h2okv bench` that are lists."""

from __future__ import annotations

import torch

from h2okv.cli.options import DTYPES, parse_amount, parse_dtype


def split_list(text: str) -> tuple[str, ...]:
    """Takes a list with commas apart."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """Reads a list of whole numbers.

    Args:
        name: The option's name, for the message.
        text: What the user wrote.

    Returns:
        The numbers.

    Raises:
        ValueError: If one is none.
    """
    try:
        return tuple(int(part) for part in split_list(text))
    except ValueError:
        raise ValueError(
            f"--{name} {text!r} is no list of whole numbers; give one such as 2048,8192"
        ) from None


def parse_budgets(text: str) -> tuple[int | float, ...]:
    """Reads a list of budgets: tokens as `64`, fractions of the prompt as `0.1`."""
    return tuple(parse_amount("budgets", part) for part in split_list(text))


def parse_dtypes(text: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """Reads a list of data types.

    Args:
        text: What the user wrote; `auto` is float32 on a CPU and bfloat16 elsewhere.
        device: Where the model runs.

    Returns:
        The data types.

    Raises:
        ValueError: If one is not known.
    """
    if "auto" in split_list(text) and text.strip() != "auto":
        raise ValueError(
            f"--dtype {text!r} mixes auto with others; choose from {', '.join(DTYPES)}"
        )
    preferred = torch.float32 if device.type == "cpu" else torch.bfloat16
    return tuple(parse_dtype(part) or preferred for part in split_list(text))
