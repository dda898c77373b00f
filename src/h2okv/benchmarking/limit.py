"""The limit that memory traffic sets to the speed-up of a decode step."""

from __future__ import annotations


def speedup_limit(weight_bytes: int, full_bytes: int, own_bytes: int) -> float:
    """How many times as fast as the full cache a step can be if reading bytes is all that counts.

    A decode step reads the weights once for the whole batch and every sequence's cache once:
    ``(W + B n e) / (W + B K e')``, where ``e'`` of H2O includes an entry's score and position.

    Args:
        weight_bytes: ``W``, bytes of the weights that a step reads.
        full_bytes: ``B n e``, bytes of a cache that holds all n tokens of B sequences.
        own_bytes: ``B K e'``, bytes of the cache in question.

    Returns:
        The limit; 1 for the full cache itself.

    Raises:
        ValueError: If a number of bytes is negative, or the step would read nothing.
    """
    if min(weight_bytes, full_bytes, own_bytes) < 0 or weight_bytes + own_bytes == 0:
        raise ValueError(
            f"a step over {weight_bytes} bytes of weights and {own_bytes} of cache reads nothing;"
            " give the bytes of a model"
        )
    return (weight_bytes + full_bytes) / (weight_bytes + own_bytes)
