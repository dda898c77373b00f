"""`h2okv batch` and `h2okv plan`."""

from __future__ import annotations

import json as json_format
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from h2okv.cli.args import (
    BUNDLED,
    MODEL_HELP,
    ModelOptions,
    SamplingOptions,
    cache_options,
    check_copies,
    model_options,
    own_generation_config,
    sampling_options,
)
from h2okv.config import CacheConfig
from h2okv.console import INTERRUPTED, format_bytes, format_table, write_remark, write_text

if TYPE_CHECKING:
    from h2okv.offload.offload_engine import BatchRequest, PlannedJob

WEIGHTS_HELP = "Where weights are: auto, device, cpu, disk, or percentages: device=40,disk=60."
CACHE_HELP = "Where keys and values are: auto, device, cpu, file, or percentages of the layers."
WEIGHT_BITS_HELP = "Quantize the layers' weights to 8 or 4 bits (CPUs, bfloat16)."
MEMORY_HELP = "Memory limit of the process, such as 4GiB; on a GPU that of the GPU."
BATCH_HELP = "Sequences that run together: a number, or auto."


@cache_options()
@model_options()
@sampling_options()
def batch(
    cache: CacheConfig,
    model: ModelOptions,
    sampling: SamplingOptions,
    input: Annotated[Path, typer.Option(help="The prompts, a JSONL file.")],
    output: Annotated[Path, typer.Option(help="The results, a JSONL file; made or continued.")],
    batch: Annotated[str, typer.Option(help=BATCH_HELP)] = "auto",
    memory: Annotated[
        str | None, typer.Option(help=MEMORY_HELP, show_default="what is free")
    ] = None,
    weights: Annotated[str, typer.Option(help=WEIGHTS_HELP)] = "auto",
    kv_cache: Annotated[str, typer.Option("--cache", help=CACHE_HELP)] = "auto",
    cache_folder: Annotated[
        Path | None,
        typer.Option(help="Folder for a cache in a file.", show_default="that of the output"),
    ] = None,
    weight_bits: Annotated[
        int | None, typer.Option(help=WEIGHT_BITS_HELP, show_default="the checkpoint's own")
    ] = None,
    converted: Annotated[
        Path | None,
        typer.Option(
            help="Folder for checkpoints that must be rewritten to be streamed.",
            show_default="the user's cache folder",
        ),
    ] = None,
    keep_pages: Annotated[
        bool,
        typer.Option("--keep-pages", help="Let the system keep streamed weights in free memory."),
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run on the Ray cluster of RAY_ADDRESS, or on this one.")
    ] = False,
    actors: Annotated[
        int | None,
        typer.Option(
            help="With --ray: copies of the model.", show_default="one on each GPU or machine"
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompts: no chat template, if there is one.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
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

    from h2okv.engine.memory import parse_memory
    from h2okv.offload.kv_tiers import CACHE_TIERS
    from h2okv.offload.offload_engine import BatchRequest, Interrupted
    from h2okv.offload.offload_engine import run as run_job
    from h2okv.offload.planner import PLACES, parse_placement

    if sampling.given.get("stop"):
        raise ValueError("--stop is not known to h2okv batch; cut the texts afterwards")
    request = BatchRequest(
        model=model.name,
        input=input,
        output=output,
        cache=cache,
        sampling=sampling.params(),
        is_raw=raw,
        dtype=model.dtype,
        device=torch.device("cpu") if ray else model.device,
        batch_size=_parse_batch(batch),
        weight_placement=parse_placement("weights", weights, PLACES),
        cache_placement=parse_placement("cache", kv_cache, CACHE_TIERS),
        cache_folder=cache_folder,
        memory=None if memory is None else parse_memory(memory),
        converted=converted,
        weight_bits=_check_weight_bits(weight_bits),
        keep_pages=keep_pages,
    )
    if cache_folder and not (cache_folder.is_dir() and os.access(cache_folder, os.W_OK)):
        raise ValueError(
            f"no file for the cache can be made in '{cache_folder}'; give another --cache-folder,"
            " one that exists"
        )
    device = model.device_name
    check_copies("--actors", actors, ray, device)
    if ray:
        _check_for_ray(request)
    params = sampling.params(own_generation_config(model.describe()))
    cache = cache.seeded(int(params.seed or 0))
    request = replace(request, sampling=params, cache=cache)
    try:
        if ray:  # imported here: a job on this machine alone needs neither Ray nor its memory
            from h2okv.cluster.batch import run_batch_on_ray

            summary = run_batch_on_ray(request, device, actors)
        else:
            summary = run_job(request)
    except Interrupted as stopped:
        write_remark(str(stopped))
        return INTERRUPTED
    if json:
        write_text(summary.to_json() + "\n")
    else:
        write_remark(summary.to_text())
    return 0


def _check_weight_bits(bits: int | None) -> int | None:
    """Refuses a number of bits that there is no format for."""
    from h2okv.offload.quantized_linear import WEIGHT_BITS

    if bits is not None and bits not in WEIGHT_BITS:
        raise ValueError(f"--weight-bits {bits} is not known; give 8 or 4, or leave it out")
    return bits


def _check_for_ray(request: BatchRequest) -> None:
    """Refuses with --ray what is planned for one machine alone."""
    given = {
        "--memory": request.memory,
        "--weights": request.weight_placement,
        "--cache": request.cache_placement,
        "--cache-folder": request.cache_folder,
        "--converted": request.converted,
        "--weight-bits": request.weight_bits,
        "--keep-pages": request.keep_pages or None,
    }
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} is planned for one machine, and with --ray every actor holds the whole"
                f" model in its memory; leave out {name} or --ray"
            )


def _parse_batch(text: str) -> int | None:
    """Parses a batch size; ``None`` for ``auto``."""
    if text == "auto":
        return None
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size < 1:
        raise ValueError(f"--batch {text!r} is not a number of prompts; give 1 or more, or auto")
    return size


_PATIENCE = 60.0
"""Seconds until the first result, above which the user is told."""


@cache_options(without=("prefill_chunk",))
@model_options(without=("model",))
def plan(
    cache: CacheConfig,
    model: ModelOptions,
    name: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = BUNDLED,
    memory: Annotated[
        str | None, typer.Option(help=MEMORY_HELP, show_default="what is free")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    gen: Annotated[int, typer.Option(help="New tokens for a prompt.")] = 128,
    prompts: Annotated[int, typer.Option(help="Prompts of the job.")] = 1000,
    batch: Annotated[str, typer.Option(help=BATCH_HELP)] = "auto",
    weights: Annotated[str, typer.Option(help=WEIGHTS_HELP)] = "auto",
    kv_cache: Annotated[str, typer.Option("--cache", help=CACHE_HELP)] = "auto",
    weight_bits: Annotated[
        int | None, typer.Option(help=WEIGHT_BITS_HELP, show_default="the checkpoint's own")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Plan a batch job: where the weights go, the batch size, and the speed to expect.

    Bandwidths, GEMM throughput and the overhead of a layer are measured here, in a few seconds; a
    decode step takes the longest of loading the weights, reading the caches and computing.

    Examples:

        h2okv plan ./large-model --memory 4GiB --prompt 1024 --gen 256

        h2okv plan ./large-model --memory 4GiB --prompt 1024 --gen 256 --budget full
    """
    from h2okv.engine.memory import parse_memory
    from h2okv.offload.kv_tiers import CACHE_TIERS
    from h2okv.offload.offload_engine import OffloadRequest
    from h2okv.offload.offload_engine import plan as plan_job
    from h2okv.offload.planner import PLACES, Workload, parse_placement

    for option, value in (("prompt", prompt), ("gen", gen), ("prompts", prompts)):
        if value < 1:
            raise ValueError(f"--{option} {value} is too few; give 1 or more")
    request = OffloadRequest(
        model=name,
        cache=cache,
        dtype=model.dtype,
        device=model.device,
        batch_size=_parse_batch(batch),
        weight_placement=parse_placement("weights", weights, PLACES),
        cache_placement=parse_placement("cache", kv_cache, CACHE_TIERS),
        memory=None if memory is None else parse_memory(memory),
        weight_bits=_check_weight_bits(weight_bits),
    )
    planned = plan_job(request, Workload(prompt, prompt, gen, prompts), _PATIENCE)
    if json:
        write_text(json_format.dumps(planned.to_dict()) + "\n")
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
    chosen, hardware, used = planned.plan, planned.hardware, planned.budget.used
    estimate, step = chosen.estimate, chosen.estimate.step
    names = {"device": "in memory", "cpu": "in the CPU's memory", "disk": "on the disk"}
    names["file"] = "in a file"
    layers = ", ".join(f"{n} {names[place]}" for place, n in chosen.placement.counts().items())
    caches = [f"{100 * own:.0f} % {names[place]}" for place, own in chosen.cache_placement.items()]
    gemm = [f"{_number(rate / 1e9)} GFLOP/s at {n} rows" for n, rate in hardware.gemm]
    return [
        ("layers and head", layers),
        ("keys and values", ", ".join(caches)),
        (
            "batch size",
            f"{chosen.batch_size}, prefill of {chosen.micro_batch_tokens} tokens",
        ),
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
        ("matrix products", ", ".join(gemm)),
        ("overhead", f"{1e3 * hardware.layer_seconds:.2f} ms for each layer"),
        ("", ""),
        ("decode step: weights", f"{step.weights:.3f} s"),
        ("caches", f"{step.cache:.3f} s"),
        ("computing", f"{step.compute:.3f} s"),
        ("the longest counts", f"{step.seconds:.3f} s ({step.limit})"),
        ("prefill", f"{estimate.prefill_seconds:.1f} s for each batch"),
        ("the first result", f"after {_duration(estimate.first_result_seconds)}"),
        ("decoding", f"{_number(estimate.decode_tokens_per_second)} tokens/s"),
        ("prefill included", f"{_number(estimate.tokens_per_second)} new tokens/s"),
    ]
