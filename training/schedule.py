"""The schedule: learning rate and context as functions of the share of the time that is spent."""

from __future__ import annotations

STAGES = ((0.15, 256), (0.40, 512), (0.88, 1024), (1.01, 2048))
WARMUP = 0.01
DECAY_FROM = 0.35


def learning_rate_share(progress: float) -> float:
    """Give the learning rate as share of its peak: up, flat, then straight down to zero.

    Args:
        progress: Share of the training time that is spent, 0 to 1.

    Returns:
        A factor from 0 to 1.
    """
    if progress < WARMUP:
        return progress / WARMUP
    if progress < DECAY_FROM:
        return 1.0
    return max(0.0, (1.0 - progress) / (1.0 - DECAY_FROM))


def context(progress: float) -> int:
    """Give the window length at this share of the time."""
    return next(length for until, length in STAGES if progress < until)
