"""What a job is asked for, and what it says of itself at the end."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from h2okv.cli.args import CacheChoice, Sampling
from h2okv.console import format_bytes


class Stopped(Exception):
    """Ctrl-C ended the job; says how far it is."""


@dataclass(frozen=True)
class BatchRequest:
    """What the user asked for.

    Attributes:
        model: What `resolve_model` takes.
        input: The prompts.
        output: The results.
        choice: The cache.
        sampling: How tokens are chosen, and how many.
        dtype: Of the weights; None for the checkpoint's own.
        device: Where the model runs.
        rows: Prompts under way; None for as many as is best.
        shares: Where weights are, by place; None for what is best.
        cache_shares: Where keys and values are, by place; None for what is best.
        cache_folder: Where the cache's file is made; None for the output's folder.
        memory: Bytes that are not to be exceeded; None for what is free.
        converted: Where converted checkpoints are kept; None for the user's cache folder.
        weight_bits: 8 for int8 weights in the layers; None leaves them.
        keep_pages: Whether the system may keep streamed weights in memory that is free.
    """

    model: str
    input: Path
    output: Path
    choice: CacheChoice
    sampling: Sampling
    dtype: torch.dtype | None
    device: torch.device
    rows: int | None
    shares: dict[str, float] | None = None
    cache_shares: dict[str, float] | None = None
    cache_folder: Path | None = None
    memory: int | None = None
    converted: Path | None = None
    weight_bits: int | None = None
    keep_pages: bool = False


@dataclass(frozen=True)
class Summary:
    """What a job did in this run.

    Attributes:
        prompts: Of the whole job.
        skipped: Finished by an earlier run.
        errors: Prompts with an error record, those of earlier runs too.
        prompt_tokens: Of the prompts read in this run.
        new_tokens: Generated in this run.
        passes: Over the weights.
        seconds: From the first pass to the last.
        predicted: New tokens in a second by the planner; None without a plan.
        bytes_read: Weights read from the disk while it ran.
        cache_bytes_read: Keys and values read from the file.
        wait_seconds: Time that computing waited for weights.
        plan: What was planned, for machines; None without a plan.
        peak_bytes: The largest resident memory; None where nobody tells.
        data_bytes: The process's data at the end; None where nobody tells.
    """

    prompts: int
    skipped: int
    errors: int
    prompt_tokens: int = 0
    new_tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    predicted: float | None = None
    bytes_read: int = 0
    cache_bytes_read: int = 0
    wait_seconds: float = 0.0
    plan: dict[str, Any] | None = None
    peak_bytes: int | None = None
    data_bytes: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens of this run, the reading of prompts included in the time."""
        return self.new_tokens / max(self.seconds, 1e-9)

    def to_json(self) -> str:
        """Writes it for machines."""
        return json.dumps({**asdict(self), "tokens_per_second": self.tokens_per_second})

    def to_text(self) -> str:
        """Writes it for people, in one line."""
        parts = [f"{self.prompts} prompts"]
        if self.skipped:
            parts.append(f"{self.skipped} of them finished before")
        if self.errors:
            parts.append(f"{self.errors} with an error record")
        parts.append(f"{self.new_tokens} new tokens in {self.seconds:.1f} s")
        speed = f"{self.tokens_per_second:,.1f} tokens/s"
        if self.predicted is not None:
            speed += f" ({self.predicted:,.1f} predicted)"
        parts.append(speed)
        if self.bytes_read:
            parts.append(f"{format_bytes(self.bytes_read)} of weights read")
        if self.peak_bytes is not None:
            parts.append(f"peak memory {format_bytes(self.peak_bytes)}")
        return ", ".join(parts)
