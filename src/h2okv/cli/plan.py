"""`h2okv plan`: what `h2okv batch` would do with a model in so much memory, and how fast."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import h2okv
from h2okv.cli.args import (
    DTYPES,
    KV_BITS_HELP,
    MODEL_HELP,
    CacheChoice,
    parse_amount,
    parse_device,
    parse_dtype,
)
from h2okv.cli.batch import (
    CACHE_HELP,
    MEMORY_HELP,
    WEIGHT_BITS_HELP,
    WEIGHTS_HELP,
    check_weight_bits,
    parse_rows,
)
from h2okv.cli.batch_engine import own_memory
from h2okv.cli.streamed_model import find_room, measure_speeds, open_model
from h2okv.console import format_bytes, write_remark, write_text
from h2okv.engine.memory import give_memory_back, parse_memory
from h2okv.engine.placement import PLACES, parse_shares
from h2okv.engine.planner import Plan, Planner, Workload
from h2okv.engine.speeds import Speeds
from h2okv.engine.tiers import CACHE_PLACES
from h2okv.integration.loading import describe
from h2okv.integration.models import BUNDLED

_PATIENCE = 60.0
"""Seconds until the first result, above which the user hears of it."""

HELP = """Plan a job: where the weights go, how many prompts together, and the speed to expect.

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
    table = Table(show_header=False, box=None)
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
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, width=100)
    with console.capture() as captured:
        console.print(table)
    write_text(captured.get())


def _where(place: str) -> str:
    names = {"device": "in memory", "cpu": "in the CPU's memory", "disk": "on the disk"}
    return names.get(place, "in a file")
