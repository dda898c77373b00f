"""The options that are more than a word: amounts, sampling, data type, device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch

import h2okv
from h2okv.cache.positions import POSITIONS, Positions
from h2okv.policy.scoring import DEFAULT_DECAY, SCORINGS

POLICY_HELP = f"{', '.join(h2okv.policy_names(dropping=True))}."
SCORING_HELP = f"What attention counts for: {', '.join(SCORINGS)}."
DECAY_HELP = f"With --scoring decay: the factor per later token, {DEFAULT_DECAY} if left out."
KV_BITS_HELP = "8 or 4: keep keys and values in so many bits; the model's own if left out."
Choice = TypeVar("Choice", bound=str)
COMPILE_HELP = "Compile the steps of one token: slow to start, then faster (torch.compile)."
DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and how many.

    Attributes:
        max_new_tokens: The most tokens to generate.
        temperature: 0 takes the likeliest token, anything above draws from the distribution.
        top_p: Draws among the likeliest tokens that hold this much of the probability.
        seed: Where the random numbers start.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what no generation can be run with."""
        if self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {self.max_new_tokens} is too few; give 1 or more")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"--temperature {self.temperature:g} is out of range; give 0 (always the likeliest"
                " token) or a positive number such as 0.8"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"--top-p {self.top_p:g} is out of range; give a share above 0 and up to 1"
            )
        if self.top_p < 1 and self.temperature == 0:
            raise ValueError(
                f"--top-p {self.top_p:g} has no effect at temperature 0; add --temperature 0.8"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed {self.seed} is out of range; give 0 to {2**63 - 1}")


def parse_amount(name: str, text: str) -> int | float:
    """Reads a part of the budget: tokens as `64`, a fraction of the prompt as `0.1`.

    Args:
        name: The option's name, for the message.
        text: What the user wrote.

    Returns:
        An int for tokens, a float for a fraction.

    Raises:
        ValueError: If it is neither.
    """
    try:
        return int(text)
    except ValueError:
        pass
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not math.isfinite(fraction):
        raise ValueError(
            f"--{name} {text!r} is not an amount; give tokens (--{name} 64) or a fraction of the"
            f" prompt with a point (--{name} 0.1)"
        )
    return fraction


def parse_positions(text: str) -> Positions:
    """Reads a way of placing entries.

    Args:
        text: What the user wrote.

    Returns:
        One of `POSITIONS`.

    Raises:
        ValueError: If it is not one of them.
    """
    return parse_choice("positions", text, POSITIONS)


def parse_choice(option: str, text: str, choices: tuple[Choice, ...]) -> Choice:
    """Reads an option that has a few words to choose from.

    Args:
        option: Its name.
        text: What the user wrote.
        choices: The words.

    Returns:
        The word.

    Raises:
        ValueError: If it is none of them.
    """
    for word in choices:
        if word == text:
            return word
    raise ValueError(f"--{option} {text!r} is not known; choose from {', '.join(choices)}")


def parse_dtype(text: str) -> torch.dtype | None:
    """Reads a data type.

    Args:
        text: One of `DTYPES`.

    Returns:
        The data type; None for `auto`, the checkpoint's own.

    Raises:
        ValueError: If it is not one of them.
    """
    if text not in DTYPES:
        raise ValueError(f"--dtype {text!r} is not known; choose from {', '.join(DTYPES)}")
    return DTYPES[text]


def parse_device(text: str) -> torch.device:
    """Reads a device and looks whether it is there.

    Args:
        text: `auto`, or what `torch.device` takes.

    Returns:
        The device; for `auto` the first GPU, or the CPU without one.

    Raises:
        ValueError: If torch does not know it, or this machine does not have it.
    """
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        if device.type == "meta":
            raise RuntimeError("a device without memory")
        # Only an allocation tells whether the device really works here.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"--device {text!r} cannot be used on this machine; choose auto, cpu or a GPU that"
            " torch can see, such as cuda:0"
        ) from error
    return device
