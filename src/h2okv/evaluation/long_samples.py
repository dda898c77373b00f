"""Samples that are longer than what a model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from h2okv.evaluation.cache_setting import CacheSetting
from h2okv.evaluation.subject import Subject

TooLong = Literal["refuse", "skip"]
TOO_LONG: tuple[TooLong, ...] = ("refuse", "skip")


@dataclass(frozen=True)
class Length:
    """A sample's length.

    Attributes:
        tokens: Of the prompt and the most of the answer, together.
        where: The sample, for messages.
    """

    tokens: int
    where: str


def fitting(
    subject: Subject,
    settings: Sequence[CacheSetting],
    lengths: Sequence[Length],
    too_long: TooLong,
) -> list[int]:
    """Chooses the samples that are run, the same ones for all caches.

    Args:
        subject: The model.
        settings: The caches.
        lengths: Of all samples.
        too_long: Whether to refuse a sample that one of the caches cannot be run with, or to leave
            out all samples above the model's window.

    Returns:
        The numbers of the samples.

    Raises:
        ValueError: If one is too long, or none is left.
    """
    kept = list(range(len(lengths)))
    if too_long == "skip" and subject.window is not None:
        kept = [n for n in kept if lengths[n].tokens <= subject.window]
        if not kept:
            shortest = min(length.tokens for length in lengths)
            raise ValueError(
                f"every sample is above the model's window of {subject.window} tokens (the"
                f" shortest has {shortest}, its answer included), so that none is left; use"
                " --positions rolling"
            )
    for setting in settings:
        for n in kept:
            tokens = lengths[n].tokens
            reason = setting.too_long(subject.config, subject.window, tokens)
            if reason is not None:
                raise ValueError(
                    f"{lengths[n].where} has {tokens} tokens, the most of its answer included; for"
                    f" the cache {setting.label!r} {reason}"
                )
    return kept
