"""`h2okv batch` and `h2okv plan`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from h2okv.cli import args
from h2okv.cli.args import (
    BUNDLED,
    JSON,
    MEMORY_HELP,
    MODEL_HELP,
    RAW,
    Command,
    ModelOptions,
    SamplingOptions,
    option,
)
from h2okv.config import CacheConfig
from h2okv.console import (
    INTERRUPTED,
    check_least,
    format_bytes,
    format_table,
    write_json,
    write_remark,
    write_text,
)

if TYPE_CHECKING:
    from h2okv.offload.offload_engine import PlannedJob


@dataclass(frozen=True)
class OffloadOptions:
    """Where a job's weights and caches may go; the fields are a command's options."""

    batch: str = option("auto", "Sequences that run together: a number, or auto.")
    memory: str | None = option(None, MEMORY_HELP)
    weights: str = option(
        "auto", "Place of weights: auto, device, cpu, disk, or device=40,disk=60."
    )
    cache_places: str = option(
        "auto", "Where keys and values are: auto, device, cpu, file, or percentages.", "--cache"
    )
    weight_bits: int | None = option(
        None, "Quantize linear layers to 8 or 4 bits (CPUs, bfloat16)."
    )

    def request(self, model: ModelOptions, cache: CacheConfig) -> dict[str, Any]:
        """Fields of an `OffloadRequest`."""
        from h2okv.engine.memory import parse_memory
        from h2okv.offload.meta_model import WEIGHT_BITS
        from h2okv.offload.planner import CACHE_TIERS, PLACES, parse_placement

        if self.batch != "auto" and not (self.batch.isdecimal() and int(self.batch)):
            raise ValueError(f"--batch {self.batch!r} is not a number; give 1 or more, or auto")
        bits = self.weight_bits
        if bits is not None and bits not in WEIGHT_BITS:
            raise ValueError(f"--weight-bits {bits} is not known; give 8 or 4, or leave it out")
        return {
            "model": model.name,
            "cache": cache,
            "dtype": model.dtype,
            "batch_size": None if self.batch == "auto" else int(self.batch),
            "weight_placement": parse_placement("weights", self.weights, PLACES),
            "cache_placement": parse_placement("cache", self.cache_places, CACHE_TIERS),
            "memory": None if self.memory is None else parse_memory(self.memory),
            "weight_bits": bits,
        }


def offload_options() -> Callable[[Command], Command]:
    """Gives a command the options of offloading, and hands it ``offload``, `OffloadOptions`."""
    return args.bundle("offload", OffloadOptions, OffloadOptions)


@args.cache_options()
@args.model_options()
@args.sampling_options()
@offload_options()
def batch(
    cache: CacheConfig,
    model: ModelOptions,
    sampling: SamplingOptions,
    offload: OffloadOptions,
    input: Path = option(..., "The prompts, a JSONL file."),
    output: Path = option(..., "The results, a JSONL file; made or continued."),
    cache_folder: Path | None = option(None, "Folder for a cache in a file (that of the output)."),
    converted: Path | None = option(None, "Folder for rewritten checkpoints (the user's cache)."),
    keep_pages: bool = option(False, "Let streamed weights stay in free memory.", "--keep-pages"),
    ray: bool = option(False, "Run on the Ray cluster of RAY_ADDRESS, or on this one.", "--ray"),
    actors: int | None = option(None, "With --ray: copies of the model (one a GPU or machine)."),
    raw: bool = RAW,
    as_json: bool = option(False, "Print the summary as JSON.", "--json"),
) -> int:
    """Generate for a file of prompts, as many at a time as fit into memory.

    The input has a line {"id": ..., "prompt": "..."} for each prompt, or {"id": ..., "messages":
    [...]} with messages as in OpenAI's API; the output a line {"id", "text", ...} or {"id",
    "error"}. If the model has a chat template, a prompt is a user's message to be answered; --raw
    continues its text. Every result is on the disk as soon as it is there: after Ctrl-C or a kill
    the same command continues with what is left.

    Examples:

        h2okv batch --input prompts.jsonl --output texts.jsonl --max-new-tokens 64
        h2okv batch --model ./large-model --memory 4GiB --input prompts.jsonl --output texts.jsonl
        h2okv batch --ray --actors 8 --model ./model --input prompts.jsonl --output texts.jsonl
    """
    import torch

    from h2okv.offload.offload_engine import BatchRequest, Interrupted, run

    cache, note = args.with_least_entries(cache)
    if sampling.stop:
        raise ValueError("--stop is not known to h2okv batch; cut the texts afterwards")
    request = BatchRequest(
        **offload.request(model, cache),
        input=input,
        output=output,
        sampling=sampling.params(),
        is_raw=raw,
        device=torch.device("cpu") if ray else model.device,
        cache_folder=cache_folder,
        converted=converted,
        keep_pages=keep_pages,
    )
    if cache_folder and not (cache_folder.is_dir() and os.access(cache_folder, os.W_OK)):
        raise ValueError(f"--cache-folder '{cache_folder}' cannot be written to; give another one")
    args.check_copies("actors", actors, ray, model.device_name)
    if ray:
        _check_for_ray(offload, cache_folder, converted, keep_pages)
    params = sampling.params(model.describe())
    request = replace(request, sampling=params, cache=cache.seeded(int(params.seed or 0)))
    try:
        if ray:  # imported here: a job on this machine alone needs neither Ray nor its memory
            from h2okv.cluster.batch import run_batch_on_ray

            summary = run_batch_on_ray(request, model.device_name, actors)
        else:
            summary = run(request)
    except Interrupted as stopped:
        write_remark(str(stopped))
        return INTERRUPTED
    if as_json:
        write_text(summary.to_json() + "\n")
    else:
        write_remark(summary.to_text())
        if note is not None:
            write_remark(note)
    return 0


def _check_for_ray(
    offload: OffloadOptions, cache_folder: Path | None, converted: Path | None, keep_pages: bool
) -> None:
    """Refuses with --ray what is planned for one machine alone."""
    given = {
        "--memory": offload.memory,
        "--weights": offload.weights != "auto",
        "--cache": offload.cache_places != "auto",
        "--cache-folder": cache_folder,
        "--converted": converted,
        "--weight-bits": offload.weight_bits,
        "--keep-pages": keep_pages,
    }
    for name, value in given.items():
        if value:
            raise ValueError(
                f"{name} is planned for one machine, and with --ray every actor holds the whole"
                f" model in its memory; leave out {name} or --ray"
            )


_PATIENCE = 60.0
"""Seconds until the first result, above which the user is told."""


@args.cache_options(prefill_chunk=None)
@args.model_options(name=typer.Argument(BUNDLED, metavar="MODEL", help=MODEL_HELP))
@offload_options()
def plan(
    cache: CacheConfig,
    model: ModelOptions,
    offload: OffloadOptions,
    prompt: int = option(512, "Tokens of a prompt."),
    gen: int = option(128, "New tokens for a prompt."),
    prompts: int = option(1000, "Prompts of the job."),
    as_json: bool = JSON,
) -> int:
    """Plan a batch job: where the weights go, the batch size, and the speed to expect.

    Bandwidths, GEMM throughput and the overhead of a layer are measured here, in a few seconds; a
    decode step takes the longest of loading the weights, reading the caches and computing.

    Examples:

        h2okv plan ./large-model --memory 4GiB --prompt 1024 --gen 256
        h2okv plan ./large-model --memory 4GiB --prompt 1024 --gen 256 --budget full
    """
    from h2okv.offload import offload_engine
    from h2okv.offload.planner import Workload

    check_least(prompt=prompt, gen=gen, prompts=prompts)
    cache, _ = args.with_least_entries(cache)
    request = offload_engine.OffloadRequest(**offload.request(model, cache), device=model.device)
    planned = offload_engine.plan(request, Workload(prompt, prompt, gen, prompts), _PATIENCE)
    if as_json:
        write_json(planned.to_dict())
    else:
        write_text(format_table((), _plan_rows(planned)))
    if planned.plan.estimate.first_result_seconds > _PATIENCE:
        write_remark(_warning(planned))
    return 0


def _warning(planned: PlannedJob) -> str:
    """Says that the first result is far off, and with which batch it is not."""
    estimate, sooner = planned.plan.estimate, planned.sooner
    text = f"the first result comes after about {_duration(estimate.first_result_seconds)}"
    if sooner is None:
        return text
    return (
        f"{text}; --batch {sooner.batch_size} gives one after"
        f" {_duration(sooner.estimate.first_result_seconds)}, with"
        f" {_number(sooner.estimate.tokens_per_second)} new tokens/s in place of"
        f" {_number(estimate.tokens_per_second)}"
    )


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{seconds / 3600:.1f} h"


def _number(value: float) -> str:
    """Three digits of a small number, all before the point of a large one."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _plan_rows(planned: PlannedJob) -> list[tuple[str, str]]:
    chosen, hardware, used = planned.plan, planned.planner.hardware, planned.planner.used
    estimate, step = chosen.estimate, chosen.estimate.step
    names = {"device": "in memory", "cpu": "in the CPU's memory", "disk": "on the disk"}
    names["file"] = "in a file"
    layers = ", ".join(f"{n} {names[place]}" for place, n in chosen.counts.items())
    caches = [f"{100 * own:.0f} % {names[place]}" for place, own in chosen.cache_placement.items()]
    gemm = [f"{_number(rate / 1e9)} ({n})" for n, rate in hardware.gemm]
    return [
        ("layers and head", layers),
        ("keys and values", ", ".join(caches)),
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
        ("matrix products", f"{', '.join(gemm)} GFLOP/s (of so many rows)"),
        ("overhead", f"{1e3 * hardware.layer_seconds:.2f} ms for each layer"),
        ("", ""),
        ("decode step: weights", f"{step['weights']:.3f} s"),
        ("caches", f"{step['cache']:.3f} s"),
        ("computing", f"{step['compute']:.3f} s"),
        ("the longest counts", f"{step[estimate.limit]:.3f} s ({estimate.limit})"),
        ("prefill", f"{estimate.prefill_seconds:.1f} s for each batch"),
        ("the first result", f"after {_duration(estimate.first_result_seconds)}"),
        ("decoding", f"{_number(estimate.decode_tokens_per_second)} tokens/s"),
        ("prefill included", f"{_number(estimate.tokens_per_second)} new tokens/s"),
    ]
