"""Whether what a benchmark asks for fits the memory, by arithmetic alone."""

from __future__ import annotations

from h2okv.benchmarking.footprint import Footprint
from h2okv.benchmarking.settings import CacheChoice, Settings

_SCORE_BYTES = 4


def cache_bytes(choice: CacheChoice, footprint: Footprint, batch: int, context: int) -> int:
    """Bytes that a cache holds after a prompt; for packed ones an upper bound.

    Args:
        choice: Which cache.
        footprint: Of the model.
        batch: Sequences.
        context: Tokens of each.

    Returns:
        Bytes.
    """
    entries = choice.entries(context)
    if choice.name == "h2o":
        # One slot is always free for the next token.
        return footprint.h2o_bytes(batch, entries + 1, context, choice.kv_bits)
    return footprint.full_bytes(batch, entries + 1 if choice.name == "static" else entries)


def wanted_bytes(
    settings: Settings, footprint: Footprint, batch: int, context: int, second_process: bool
) -> int:
    """A lower bound of what one combination needs: weights, all its caches, one prompt's block.

    Args:
        settings: What is asked for.
        footprint: Of the model.
        batch: Sequences.
        context: Tokens of each.
        second_process: Whether peak memory is measured in a process with weights of its own.

    Returns:
        Bytes.
    """
    choices = settings.choices()
    # Quantised caches are smaller than this by an amount that depends on their packing.
    whole = [choice for choice in choices if choice.name != "quantized"]
    sizes = [cache_bytes(choice, footprint, batch, context) for choice in whole]
    block = footprint.prompt_bytes(batch, min(context, settings.prefill_chunk or context))
    if any(choice.name == "kvpress" for choice in choices):
        # Eager attention makes the T x T matrix of a layer, in fp32 at that.
        block = max(block, batch * footprint.num_heads * context**2 * _SCORE_BYTES)
    together = footprint.weight_bytes + sum(sizes) + block
    if not (settings.peak and second_process):
        return together
    return max(together, 2 * footprint.weight_bytes + max(sizes, default=0) + block)


def check_fits(
    settings: Settings,
    footprint: Footprint,
    available: int | None,
    second_process: bool = False,
) -> None:
    """Refuses what cannot fit, before anything is allocated.

    Args:
        settings: What is asked for.
        footprint: Of the model.
        available: Bytes that are free; ``None`` if nobody knows.
        second_process: See `wanted_bytes`.

    Raises:
        ValueError: Naming the first combination that needs more, with both numbers.
    """
    if available is None:
        return
    for context in settings.contexts:
        for batch in settings.batches:
            wanted = wanted_bytes(settings, footprint, batch, context, second_process)
            if wanted > available:
                raise ValueError(
                    f"--contexts {context} with --batches {batch} needs at least {wanted} bytes"
                    f" ({wanted / 2**30:.1f} GiB: weights, caches and one block of the prompt), and"
                    f" {available} bytes ({available / 2**30:.1f} GiB) are available; give fewer"
                    " --layers, a smaller batch or context, or fewer --caches"
                )
