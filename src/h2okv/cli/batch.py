"""`h2okv batch` and `h2okv plan`."""

from __future__ import annotations

import json as json_format
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import h2okv
from h2okv.cli.args import (
    DECAY_HELP,
    DTYPES,
    KV_BITS_HELP,
    MODEL_HELP,
    SCORING_HELP,
    CacheChoice,
    Model,
    Sampling,
    check_copies,
    parse_amount,
    parse_device,
    parse_dtype,
    parse_positions,
)
from h2okv.cluster.batch import run_batch_on_ray
from h2okv.console import INTERRUPTED, format_bytes, format_table, write_remark, write_text
from h2okv.engine.memory import give_memory_back, parse_memory
from h2okv.integration.loading import describe
from h2okv.integration.models import BUNDLED
from h2okv.offload.kv_tiers import CACHE_PLACES
from h2okv.offload.offload_engine import (
    BatchRequest,
    Stopped,
    find_room,
    measure_speeds,
    open_model,
    own_memory,
    run_batch,
)
from h2okv.offload.planner import PLACES, Plan, Planner, Workload, parse_shares
from h2okv.offload.profile import Speeds
from h2okv.offload.quantized_linear import WEIGHT_BITS

HELP = """Generate for a file of prompts, as many at a time as there is room for.

The input has a line {"id": ..., "prompt": "..."} for each prompt, the output a line {"id", "text",
...} or {"id", "error"}. Every result is on the disk as soon as it is there: after Ctrl-C or a kill
the same command goes on with what is left.

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
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest with this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Random numbers; each prompt has its own.")] = 0,
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
    choice = CacheChoice(
        policy,
        parse_amount("heavy", heavy),
        parse_amount("recent", recent),
        sink,
        parse_positions(positions),
        prefill_chunk,
        scoring,
        decay,
        kv_bits,
    )
    request = BatchRequest(
        model=model,
        input=input,
        output=output,
        choice=choice,
        sampling=Sampling(max_new_tokens, temperature, top_p, seed),
        dtype=parse_dtype(dtype),
        device=parse_device("cpu" if ray else device),
        rows=parse_rows(batch),
        shares=parse_shares("weights", weights, PLACES),
        cache_shares=parse_shares("cache", cache, CACHE_PLACES),
        cache_folder=cache_folder,
        memory=None if memory is None else parse_memory(memory),
        converted=converted,
        weight_bits=check_weight_bits(weight_bits),
        keep_pages=keep_pages,
    )
    if cache_folder and not (cache_folder.is_dir() and os.access(cache_folder, os.W_OK)):
        raise ValueError(
            f"no file for the cache can be made in '{cache_folder}'; give another --cache-folder,"
            " one that exists"
        )
    check_copies("--actors", actors, ray, device)
    if ray:
        check_whole(request)
    try:
        summary = run_batch_on_ray(request, device, actors) if ray else run_batch(request)
    except Stopped as stopped:
        write_remark(str(stopped))
        return INTERRUPTED
    if json:
        write_text(summary.to_json() + "\n")
    else:
        write_remark(summary.to_text())
    return 0


def check_weight_bits(bits: int | None) -> int | None:
    """Refuses a number of bits that there is no format for."""
    if bits is not None and bits not in WEIGHT_BITS:
        raise ValueError(f"--weight-bits {bits} is not known; give 8 or 4, or leave it out")
    return bits


def check_whole(request: BatchRequest) -> None:
    """Refuses with --ray what is planned for one machine alone."""
    given = {
        "--memory": request.memory,
        "--weights": request.shares,
        "--cache": request.cache_shares,
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


def parse_rows(text: str) -> int | None:
    """Reads a number of prompts; None for `auto`."""
    if text == "auto":
        return None
    try:
        rows = int(text)
    except ValueError:
        rows = 0
    if rows < 1:
        raise ValueError(f"--batch {text!r} is no number of prompts; give 1 or more, or auto")
    return rows


_PATIENCE = 60.0
"""Seconds until the first result, above which the user hears of it."""

PLAN_HELP = """Plan a job: where the weights go, how many prompts together, and the speed to expect.

Bandwidths and products are measured here, in a few seconds; the step takes the longest of bringing
the weights, reading the caches and computing.

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
    choice = CacheChoice(policy, *amounts, sink=0, kv_bits=kv_bits)
    promised = None if memory is None else parse_memory(memory)
    shares = parse_shares("weights", weights, PLACES)
    cache_shares = parse_shares("cache", cache, CACHE_PLACES)
    wanted_device = parse_device(device)
    described = describe(model)
    empty = choice.make(described.config, 0)
    if promised is not None:
        give_memory_back()
    bits = check_weight_bits(weight_bits)
    opened = open_model(described, parse_dtype(dtype), wanted_device, bits)
    demand = opened.demand(empty)
    room = find_room(wanted_device, promised)
    speeds = measure_speeds(opened, demand, room)
    work = Workload(typical=prompt, longest=prompt, new=gen, prompts=prompts)
    planner = Planner(opened.skeleton, demand, empty, speeds, room, work, wanted_device)
    rows, caches = parse_rows(batch), own_memory(cache_shares, wanted_device)
    chosen = planner.choose(rows, shares, caches)
    if json:
        write_text(json_format.dumps(_as_json(chosen, speeds, room.used)) + "\n")
    else:
        _show(chosen, speeds, room.used)
    if chosen.forecast.first_seconds > _PATIENCE:
        write_remark(_warning(chosen, planner.sooner(chosen, _PATIENCE, shares, caches)))
    return 0


def _warning(chosen: Plan, sooner: Plan | None) -> str:
    """Says that the first result is far off, and with which batch it is not."""
    first, speed = chosen.forecast.first_seconds, chosen.forecast.tokens_per_second
    text = f"the first result comes after about {_duration(first)}"
    if sooner is None:
        return text
    return (
        f"{text}; --batch {sooner.rows} gives one after {_duration(sooner.forecast.first_seconds)},"
        f" with {_number(sooner.forecast.tokens_per_second)} new tokens/s in place of"
        f" {_number(speed)}"
    )


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{seconds / 3600:.1f} h"


def _number(value: float) -> str:
    """Three digits of a small number, all before the point of a large one."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _as_json(chosen: Plan, speeds: Speeds, used: int) -> dict[str, Any]:
    places = chosen.placement.units
    return {
        **asdict(chosen),
        "placement": {place: places.count(place) for place in sorted(set(places))},
        "process_bytes": used,
        "total_bytes": chosen.total_bytes,
        "limit": chosen.forecast.step.limit,
        "speeds": asdict(speeds),
    }


def _show(chosen: Plan, speeds: Speeds, used: int) -> None:
    step = chosen.forecast.step
    places = chosen.placement.units
    layers = ", ".join(f"{places.count(p)} {_where(p)}" for p in PLACES if p in places)
    caches = ", ".join(f"{100 * s:.0f} % {_where(p)}" for p, s in chosen.cache_shares.items() if s)
    rows = [
        ("layers and head", layers),
        ("keys and values", caches),
        (
            "prompts under way",
            f"{chosen.rows}, {chosen.lane_tokens} tokens of prompts read at once",
        ),
        ("", ""),
        ("process before", format_bytes(used)),
        ("weights that stay", format_bytes(chosen.weight_bytes)),
        ("two buffers", format_bytes(chosen.buffer_bytes)),
        ("caches", format_bytes(chosen.cache_bytes)),
        ("temporaries", format_bytes(chosen.temporary_bytes)),
        ("together", format_bytes(used + chosen.total_bytes)),
        ("", ""),
        ("measured: disk", f"{speeds.disk / 1e9:.2f} GB/s"),
        ("memory", f"{speeds.memory / 1e9:.2f} GB/s"),
        (
            "products",
            ", ".join(f"{_number(r / 1e9)} GFLOP/s at {n} rows" for n, r in speeds.products),
        ),
        ("", ""),
        ("a step: weights", f"{step.weights:.3f} s"),
        ("caches", f"{step.cache:.3f} s"),
        ("computing", f"{step.compute:.3f} s"),
        ("the longest counts", f"{step.seconds:.3f} s ({step.limit})"),
        ("reading the prompts", f"{chosen.forecast.prompt_seconds:.1f} s for each batch"),
        ("the first result", f"after {_duration(chosen.forecast.first_seconds)}"),
        ("while decoding", f"{_number(chosen.forecast.decode_tokens_per_second)} tokens/s"),
        ("prompts included", f"{_number(chosen.forecast.tokens_per_second)} new tokens/s"),
    ]
    write_text(format_table((), rows))


def _where(place: str) -> str:
    names = {"device": "in memory", "cpu": "in the CPU's memory", "disk": "on the disk"}
    return names.get(place, "in a file")
