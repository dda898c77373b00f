"""`h2okv batch` and `h2okv plan`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from h2okv.cli import args, readers
from h2okv.cli.args import JSON, RAW, ModelOptions, SamplingOptions, Typed, option
from h2okv.cli.readers import count
from h2okv.console import (
    format_bytes,
    format_duration,
    format_number,
    format_table,
    write_json,
    write_remark,
    write_text,
)

if TYPE_CHECKING:
    from h2okv.offload.planner import Plan
    from h2okv.offload.profile import HardwareProfile


def _batch_size(option: str, text: str) -> int | None:
    if text != "auto" and not (text.isdecimal() and int(text)):
        raise ValueError(f"{option} {text!r} is not a batch size; give 1 or more, or auto")
    return None if text == "auto" else int(text)


def _placement(option: str, text: str) -> dict[str, float] | None:
    """Parse ``auto`` (``None``), a tier, or percentages such as ``device=40,disk=60``."""
    tiers = ("device", "cpu", "disk")
    if text == "auto":
        return None
    if text in tiers:
        return {text: 1.0}
    matches = [re.fullmatch(r"(\w+)=(\d*\.?\d+)%?", entry.strip()) for entry in text.split(",")]
    fractions = {match[1]: float(match[2]) / 100 for match in matches if match is not None}
    if len(fractions) < len(matches) or not fractions.keys() <= set(tiers):
        raise ValueError(
            f"{option} must be auto, {', '.join(tiers)}, or percentages such as"
            f" {tiers[0]}=40,{tiers[-1]}=60, got {text!r}"
        )
    if abs(sum(fractions.values()) - 1) > 1e-6:
        raise ValueError(
            f"{option} {text!r} adds up to {100 * sum(fractions.values()):g} percent; give 100"
        )
    return fractions


@dataclass(frozen=True)
class OffloadOptions:
    """Tiers of weights, batch and memory: options of a command, fields of an `OffloadRequest`."""

    batch_size: Typed = option(
        "auto", "Sequences that run together, or auto.", "--batch", read=_batch_size
    )
    memory: Typed = option(None, args.MEMORY_HELP, read=readers.memory)
    weight_placement: Typed = option(
        "auto", "auto, device, cpu, disk or percentages.", "--weights", read=_placement
    )
    weight_bits: int | None = option(
        None, "8: linear layers in int8.", read=readers.bits, allowed=8
    )


_OFFLOAD: Any = args.Bundle(OffloadOptions, "Offload")


def batch(
    choice: args.Choice = args.cache_options(),
    model: ModelOptions = args.model_options(),
    sampling: SamplingOptions = args.sampling_options(few=True),
    offload: OffloadOptions = _OFFLOAD,
    input: Path = option(..., "The prompts, a JSONL file.", read=readers.readable),
    output: Path = option(
        ..., "The results, a JSONL file; continued if there.", read=readers.writable
    ),
    ray: bool = option(False, "Run on the Ray cluster of RAY_ADDRESS, or here.", "--ray"),
    replicas: int | None = option(None, "With --ray: copies (one per GPU).", read=count),
    raw: bool = RAW,
    as_json: bool = option(False, "Print the summary as JSON.", "--json"),
) -> int:
    cache = choice.cache
    note = args.minimum_entries_note(cache)
    args.check_copies(replicas, ray, args.chosen_device())
    if ray:
        _check_for_ray(offload)
    import torch

    from h2okv.offload.job import PromptFile
    from h2okv.offload.offload_engine import BatchRequest, run

    fields = {
        "model": model.name, "dtype": model.dtype, "sampling": sampling.params(), "is_raw": raw,
        "device": torch.device("cpu") if ray else model.device,
    }  # fmt: skip
    request = args.build(BatchRequest, locals(), **vars(offload), **fields)
    prompts = PromptFile(input)  # mistakes in the file show before the model is read
    params = sampling.params(model.describe())
    request = replace(request, sampling=params, cache=cache.seeded(int(params.seed or 0)))
    if ray:  # imported here: a job on one machine needs neither Ray nor its memory
        from h2okv.cluster.batch import run_batch_on_ray

        summary = run_batch_on_ray(request, args.chosen_device(), replicas, prompts)
    else:
        summary = run(request, prompts=prompts)
    if as_json:
        write_json({**asdict(summary), "tokens_per_second": summary.tokens_per_second})
    else:
        write_remark(summary.to_text())
        if note is not None:
            write_remark(note)
    return 1 if summary.errors else 0


def _check_for_ray(offload: OffloadOptions) -> None:
    """Raise ValueError for options that --ray does not support."""
    for name, value in vars(offload).items():
        if value and name != "batch_size":
            name = "--weights" if name == "weight_placement" else f"--{name.replace('_', '-')}"
            reason = "is for one machine, and with --ray every actor holds the whole model"
            raise ValueError(f"{name} {reason}; leave out {name} or --ray")


def plan(
    choice: args.Choice = args.cache_options(),
    model: ModelOptions = args.model_options(
        name=typer.Argument(args.BUNDLED, metavar="MODEL", help=args.MODEL_HELP)
    ),
    offload: OffloadOptions = _OFFLOAD,
    prompt_tokens: int = option(512, "Tokens of a prompt.", read=count),
    new_tokens: int = option(128, "New tokens for a prompt.", read=count),
    prompts: int = option(1000, "Prompts of the job.", read=count),
    as_json: bool = JSON,
) -> None:
    from h2okv.offload import offload_engine
    from h2okv.offload.planner import Workload

    model_fields: Any = {"model": model.name, "dtype": model.dtype, "device": model.device}
    request = offload_engine.OffloadRequest(
        cache=choice.cache.before_measuring, **model_fields, **vars(offload)
    )
    workload = Workload(prompt_tokens, prompt_tokens, new_tokens, prompts)
    chosen, planner = offload_engine.plan(request, workload)
    if as_json:
        measured = {"process_bytes": planner.used, "hardware": asdict(planner.hardware)}
        totals = {"total_bytes": chosen.total_bytes, "limit": chosen.estimate.limit}
        write_json({**chosen.to_dict(), **measured, **totals})
    else:
        write_text(format_table((), _plan_rows(chosen, planner.hardware, planner.used)))


def _plan_rows(chosen: Plan, hardware: HardwareProfile, used: int) -> list[tuple[str, str]]:
    estimate, step = chosen.estimate, chosen.estimate.step
    names = {"device": "in memory", "cpu": "in the CPU's memory", "disk": "on the disk"}
    layers = ", ".join(f"{n} {names[tier]}" for tier, n in chosen.counts.items())
    gemm = [f"{format_number(rate / 1e9)} ({n})" for n, rate in hardware.gemm]
    return [
        ("layers and head", layers),
        ("batch size", f"{chosen.batch_size}, prefill of {chosen.micro_batch_tokens} tokens"),
        ("", ""),
        ("process before", format_bytes(used)),
        ("resident weights", format_bytes(chosen.weight_bytes)),
        ("stream buffers", format_bytes(chosen.buffer_bytes)),
        ("caches", format_bytes(chosen.cache_bytes)),
        ("temporaries", format_bytes(chosen.temporary_bytes)),
        ("total", format_bytes(used + chosen.total_bytes)),
        ("", ""),
        ("measured: disk", f"{hardware.disk / 1e9:.2f} GB/s"),
        ("memory", f"{hardware.memory / 1e9:.2f} GB/s"),
        ("matrix products", f"{', '.join(gemm)} GFLOP/s (rows in brackets)"),
        ("overhead", f"{1e3 * hardware.layer_seconds:.2f} ms for each layer"),
        ("", ""),
        ("decode step: weights", f"{step['weights']:.3f} s"),
        ("caches", f"{step['cache']:.3f} s"),
        ("computing", f"{step['compute']:.3f} s"),
        ("slowest of them", f"{step[estimate.limit]:.3f} s ({estimate.limit})"),
        ("prefill", f"{estimate.prefill_seconds:.1f} s for each batch"),
        ("the first result", f"after {format_duration(estimate.first_result_seconds)}"),
        ("decoding", f"{format_number(estimate.decode_tokens_per_second)} tokens/s"),
        ("prefill included", f"{format_number(estimate.tokens_per_second)} new tokens/s"),
    ]
