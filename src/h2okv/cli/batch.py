"""`h2okv batch`: a file of prompts in, a file of results out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import h2okv
from h2okv.cli.args import (
    DECAY_HELP,
    DTYPES,
    KV_BITS_HELP,
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
from h2okv.cli.batch_job import run_batch
from h2okv.cli.batch_ray import run_batch_on_ray
from h2okv.cli.batch_request import BatchRequest, Stopped
from h2okv.console import INTERRUPTED, write_remark, write_text
from h2okv.engine.memory import parse_memory
from h2okv.engine.packed_layers import WEIGHT_BITS
from h2okv.engine.placement import PLACES, parse_shares
from h2okv.engine.tiers import CACHE_PLACES
from h2okv.integration.models import BUNDLED

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
        str, typer.Option(help="original, rolling (past the trained window) or clamped (OPT).")
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
