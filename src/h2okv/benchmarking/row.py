"""The rows of a benchmark."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from h2okv.benchmarking.clock import Spread


@dataclass(frozen=True)
class Row:
    """What was measured of one cache in one combination; ``None`` where nothing was.

    Times are in seconds, sizes in bytes; ``_lower`` and ``_upper`` are quartiles. Ratios are
    medians of the ratios within a round.

    Attributes:
        model: Name of the model.
        dtype: Of weights and cache.
        positions: How H2O places its entries.
        context: Tokens of each prompt.
        batch: Sequences.
        budget: Tokens or a fraction of the prompt; ``None`` for a cache that holds everything.
        cache: Which cache.
        kv_bits: Bits of a number of H2O's keys and values; ``None`` for the dtype.
        status: ``"ok"``, or why there is no figure.
        rounds: In each of which every cache took its turn.
        steps: Decode steps of one sample.
        prefill_chunk: Tokens of a block of the prompt.
        compiled: Whether its steps ran through ``torch.compile``.
        entries: Held by one KV head after the prompt.
        cache_bytes: Held by the cache after the last step.
        weight_bytes: ``W``, the weights that a step reads.
        prefill: Reading the prompt.
        decode: One decode step.
        tokens_per_second: Of the whole batch while decoding, by the median.
        peak_bytes: Largest memory of the process, or allocated on the GPU.
        prefill_ratio: This prefill over that of the full cache.
        speedup: The full cache's decode step over this one.
        limit: What that speed-up could be at most; see `h2okv.benchmarking.limit`.
        share: ``speedup / limit``.
        step_bytes: What a step must read: weights, and the cache.
        achieved: ``step_bytes`` over the median step, in bytes for each second.
        bandwidth: What this machine can read, measured in the same run.
    """

    model: str
    dtype: str
    positions: str
    context: int
    batch: int
    budget: int | float | None
    cache: str
    kv_bits: int | None
    status: str
    rounds: int
    steps: int
    prefill_chunk: int | None
    compiled: bool
    entries: int | None = None
    cache_bytes: int | None = None
    weight_bytes: int | None = None
    prefill: Spread | None = None
    decode: Spread | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    prefill_ratio: Spread | None = None
    speedup: Spread | None = None
    limit: float | None = None
    share: float | None = None
    step_bytes: int | None = None
    achieved: float | None = None
    bandwidth: float | None = None

    def cells(self) -> dict[str, Any]:
        """The row as plain columns, a spread as three."""
        return flat(self, _SPREADS)


def flat(row: Any, spreads: tuple[str, ...]) -> dict[str, Any]:
    """Turns a row into plain columns.

    Args:
        row: A dataclass.
        spreads: Its attributes that hold a `Spread`; each becomes its median and two quartiles.

    Returns:
        Name to value, in the order of the attributes.
    """
    cells: dict[str, Any] = {}
    for name, value in asdict(row).items():
        if name in spreads:
            value = value or {}
            cells[name] = value.get("median")
            cells[f"{name}_lower"] = value.get("lower")
            cells[f"{name}_upper"] = value.get("upper")
        else:
            cells[name] = value
    return cells


def flat_names(kind: Any, spreads: tuple[str, ...]) -> tuple[str, ...]:
    """The names that `flat` gives for rows of a dataclass."""
    names: list[str] = []
    for field in fields(kind):
        names.append(field.name)
        if field.name in spreads:
            names += [f"{field.name}_lower", f"{field.name}_upper"]
    return tuple(names)


_SPREADS = ("prefill", "decode", "prefill_ratio", "speedup")
COLUMNS = flat_names(Row, _SPREADS)
"""The columns of a row, in order."""
