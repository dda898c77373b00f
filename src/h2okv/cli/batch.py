"""`h2okv batch` and `h2okv plan`."""

from __future__ import annotations

import json as json_format
import os
from pathlib import Path
from typing import Annotated

import typer

import h2okv
from h2okv.cli.args import (
    DECAY_HELP,
    DTYPES,
    KV_BITS_HELP,
    MODEL_HELP,
    SCORING_HELP,
    Model,
    Sampling,
    check_copies,
    parse_amount,
    parse_device,
    parse_dtype,
    parse_positions,
)
from h2okv.cluster.batch import run_batch_on_ray
from h2okv.config import CacheConfig
from h2okv.console import INTERRUPTED, format_bytes, format_table, write_remark, write_text
from h2okv.engine.memory import parse_memory
from h2okv.engine.sampling_params import SamplingParams
from h2okv.integration.models import BUNDLED
from h2okv.offload.kv_tiers import CACHE_TIERS
from h2okv.offload.offload_engine import (
    BatchRequest,
    Interrupted,
    OffloadRequest,
    PlannedJob,
)
from h2okv.offload.offload_engine import plan as plan_job
from h2okv.offload.offload_engine import run as run_job
from h2okv.offload.planner import PLACES, Workload, parse_placement
from h2okv.offload.quantized_linear import WEIGHT_BITS

HELP = """Generate for a file of prompts, as many at a time as there is room for.

The input has a line {"id": ..., "prompt": "..."} for each prompt, or {"id": ..., "messages": [...]}
with messages as in OpenAI's API; the output a line {"id", "text", ...} or {"id", "error"}. If the
model has a chat template, a prompt is a user's message to be answered; --raw continues its text.
Every result is on the disk as soon as it is there: after Ctrl-C or a kill the same command goes on
with what is left.

Examples:

    h2okv batch --input prompts.jsonl --output texts.jsonl --max-new-tokens 64

    h2okv batch --model ./large-model --memory 4GiB --input prompts.jsonl --output texts.jsonl

    h2okv batch --ray --actors 8 --model ./model --input prompts.jsonl --output texts.jsonl
"""

WEIGHTS_HELP = "Where weights are: auto, device, cpu, disk, or percentages: device=40,disk=60."
CACHE_HELP = "Where keys and values are: auto, device, cpu, file, or percentages of the layers."
WEIGHT_BITS_HELP = "8 or 4 (CPUs, bfloat16): weights of the layers in so many bits."
RAY_HELP = "Run on a Ray cluster: that of RAY_ADDRESS, or this machine alone."
ACTORS_HELP = "With --ray: how many models."
MEMORY_HELP = "All memory that the process may take, such as 4GiB; on a GPU that of the GPU."


def batch(
    input: Annotated[Path, typer.Option(help="The prompts, a JSONL file.")],
    output: Annotated[Path, typer.Option(help="The results, a JSONL file; made or gone on with.")],
    model: Model = BUNDLED,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens for a prompt.")] = 128,
    batch: Annotated[str, typer.Option(help="Prompts under way: a number, or auto.")] = "auto",
    weights: Annotated[str, typer.Option(help=WEIGHTS_HELP)] = "auto",
    cache: Annotated[str, typer.Option(help=CACHE_HELP)] = "auto",
    cache_folder: Annotated[
        Path | None,
        typer.Option(help="Where the cache's file is made.", show_default="beside the output"),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help=MEMORY_HELP, show_default="what is free")
    ] = None,
    policy: Annotated[str, typer.Option(help=f"{', '.join(h2okv.policy_names())}.")] = "h2o",
    heavy: Annotated[
        str, typer.Option(help="Heavy hitters to keep: tokens (64) or a share of the prompt (0.1).")
    ] = "0.1",
    recent: Annotated[
        str, typer.Option(help="Newest tokens to keep: tokens (64) or a share (0.1).")
    ] = "0.1",
    sink: Annotated[int, typer.Option(help="First tokens to keep whatever their score.")] = 0,
    scoring: Annotated[str, typer.Option(help=SCORING_HELP)] = "sum",
    decay: Annotated[float | None, typer.Option(help=DECAY_HELP, show_default=False)] = None,
    positions: Annotated[
        str, typer.Option(help="original, rolling (past the context window) or clamped (OPT).")
    ] = "original",
    prefill_chunk: Annotated[
        int | None,
        typer.Option(help="The most tokens that are attended to at once.", show_default="all"),
    ] = None,
    kv_bits: Annotated[int | None, typer.Option(help=KV_BITS_HELP, show_default=False)] = None,
    temperature: Annotated[float, typer.Option(help="0: greedy decoding.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus (top-p) sampling.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed; each prompt draws with its own.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue prompts as they are, without a chat template.")
    ] = False,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    weight_bits: Annotated[
        int | None, typer.Option(help=WEIGHT_BITS_HELP, show_default="the checkpoint's own")
    ] = None,
    converted: Annotated[
        Path | None,
        typer.Option(
            help="Where checkpoints go that must be written anew to be streamed.",
            show_default="the user's cache folder",
        ),
    ] = None,
    keep_pages: Annotated[
        bool,
        typer.Option("--keep-pages", help="Let the system keep streamed weights in free memory."),
    ] = False,
    ray: Annotated[bool, typer.Option("--ray", help=RAY_HELP)] = False,
    actors: Annotated[
        int | None, typer.Option(help=ACTORS_HELP, show_default="one on each GPU or machine")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The summary as JSON on stdout.")] = False,
) -> int:
    """Runs a job, as `HELP` tells the user."""
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    request = BatchRequest(
        model=model,
        input=input,
        output=output,
        cache=CacheConfig(
            policy=policy,
            heavy=parse_amount("heavy", heavy),
            recent=parse_amount("recent", recent),
            sink=sink,
            scoring=scoring,
            decay=decay,
            positions=parse_positions(positions),
            prefill_chunk=prefill_chunk,
            kv_bits=kv_bits,
            seed=seed,
        ),
        sampling=SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
        ),
        is_raw=raw,
        dtype=parse_dtype(dtype),
        device=parse_device("cpu" if ray else device),
        batch_size=_parse_batch(batch),
        weight_placement=parse_placement("weights", weights, PLACES),
        cache_placement=parse_placement("cache", cache, CACHE_TIERS),
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
    check_copies("--actors", actors, ray, device)
    if ray:
        _check_for_ray(request)
    try:
        summary = run_batch_on_ray(request, device, actors) if ray else run_job(request)
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
        raise ValueError(f"--batch {text!r} is no number of prompts; give 1 or more, or auto")
    return size


PLAN_HELP = """Plan a job: where the weights go, the batch size, and the speed to expect.

Bandwidths, GEMM throughput and the overhead of a layer are measured here, in a few seconds; a
decode step takes the longest of loading the weights, reading the caches and computing.

Examples:

    h2okv plan ./large-model --memory 4GiB --prompt 1024 --gen 256

    h2okv plan ./large-model --memory 4GiB --prompt 1024 --gen 256 --policy full
"""


def plan(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = (BUNDLED),
    memory: Annotated[
        str | None, typer.Option(help=MEMORY_HELP, show_default="what is free")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    gen: Annotated[int, typer.Option(help="New tokens for a prompt.")] = 128,
    prompts: Annotated[int, typer.Option(help="Prompts of the job.")] = 1000,
    batch: Annotated[str, typer.Option(help="Prompts under way: a number, or auto.")] = "auto",
    weights: Annotated[str, typer.Option(help=WEIGHTS_HELP)] = "auto",
    cache: Annotated[str, typer.Option(help=CACHE_HELP)] = "auto",
    policy: Annotated[str, typer.Option(help=f"{', '.join(h2okv.policy_names())}.")] = "h2o",
    heavy: Annotated[str, typer.Option(help="Heavy hitters: tokens or a share.")] = "0.1",
    recent: Annotated[str, typer.Option(help="Newest tokens: tokens or a share.")] = "0.1",
    kv_bits: Annotated[int | None, typer.Option(help=KV_BITS_HELP, show_default=False)] = None,
    weight_bits: Annotated[
        int | None, typer.Option(help=WEIGHT_BITS_HELP, show_default="the checkpoint's own")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """Plans a job, as `HELP` tells the user."""
    for name, value in (("prompt", prompt), ("gen", gen), ("prompts", prompts)):
        if value < 1:
            raise ValueError(f"--{name} {value} is too few; give 1 or more")
    amounts = parse_amount("heavy", heavy), parse_amount("recent", recent)
    request = OffloadRequest(
        model=model,
        cache=CacheConfig(policy, *amounts, kv_bits=kv_bits),
        dtype=parse_dtype(dtype),
        device=parse_device(device),
        batch_size=_parse_batch(batch),
        weight_placement=parse_placement("weights", weights, PLACES),
        cache_placement=parse_placement("cache", cache, CACHE_TIERS),
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


_PATIENCE = 60.0
"""Seconds until the first result, above which the user is told."""


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
