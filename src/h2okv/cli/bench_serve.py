"""`h2okv bench serve`."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from h2okv.benchmarking.serving import (
    COLUMNS,
    Command,
    Load,
    Measured,
    PagedSize,
    Percentiles,
    ServeRun,
    Wanted,
    make_loads,
    own_server,
    transformers_server,
)
from h2okv.benchmarking.serving_client import Endpoint, Mix, default_texts, load_aiohttp, read_texts
from h2okv.cli.args import MODEL_HELP, parse_device, parse_numbers, split_list
from h2okv.cli.bench import check_files
from h2okv.console import INTERRUPTED, Progress, format_table, write_remark, write_text
from h2okv.integration.loading import describe
from h2okv.integration.models import default_dtype
from h2okv.provenance import ENVIRONMENT_COLUMNS, environment
from h2okv.records import CsvFile

_NONE = "-"
_LATE = 0.05


def serve_table(rows: Sequence[Measured]) -> str:
    """Sets the loads side by side."""
    cells: dict[str, Callable[[Measured], str]] = {
        "server": lambda r: r.server,
        "load": _load,
        "done": lambda r: f"{r.summary.finished}/{r.summary.requests}",
        "errors": lambda r: str(r.summary.failed),
        "prompt": lambda r: _count(r.summary.prompt_tokens),
        "new": lambda r: _count(r.summary.new_tokens),
        "requests/s": lambda r: f"{r.summary.requests_per_second:.3g}",
        "new tokens/s": lambda r: _number(r.summary.new_tokens_per_second),
        "all tokens/s": lambda r: _number(r.summary.total_tokens_per_second),
        "first token, s": lambda r: _points(r.summary.first_token, 1),
        "per token, ms": lambda r: _points(r.summary.per_token, 1e3),
        "gap, ms": lambda r: _points(r.summary.gap, 1e3),
    }
    table = [[cell(row) for cell in cells.values()] for row in rows]
    return format_table(list(cells), table, left=("server", "load")) + "times: p50 / p95 / p99\n"


def serve_remarks(rows: Sequence[Measured]) -> list[str]:
    """Says what a reader of the table must know: errors, how tokens were counted, lateness."""
    lines: dict[str, None] = {}
    for row in rows:
        summary = row.summary
        for kind, count in summary.errors.items():
            lines[f"{row.server}, {_load(row)}: {count} x {kind}: {summary.messages[kind]}"] = None
        if summary.interrupted:
            lines[
                f"{row.server}, {_load(row)}: stopped; {summary.interrupted} requests were under"
                " way, which count nowhere"
            ] = None
        if summary.counted_by in ("pieces", "both"):
            told = "not" if summary.counted_by == "pieces" else "not always"
            lines[
                f"{row.server}: the server does {told} tell token counts; pieces of the stream are"
                " counted instead"
            ] = None
        if summary.lateness is not None and summary.lateness.p95 > _LATE:
            lines[
                f"{row.server}, {_load(row)}: requests were sent up to"
                f" {summary.lateness.p95:.2f} s late (p95); this machine is too slow for the rate"
            ] = None
    return list(lines)


def serve_json(environment: Mapping[str, str], rows: Sequence[Measured]) -> str:
    """Makes the object that `--json` prints."""
    told = []
    for row in rows:
        errors = {"errors": row.summary.errors, "messages": row.summary.messages}
        told.append({**row.cells(), **errors})
    return json.dumps({"environment": dict(environment), "rows": told}, allow_nan=False)


def _load(row: Measured) -> str:
    load = row.load
    return f"{load.clients} clients" if load.rate is None else f"{load.rate:g}/s"


def _points(value: Percentiles | None, factor: float) -> str:
    if value is None:
        return _NONE
    return " / ".join(f"{factor * point:.3g}" for point in (value.p50, value.p95, value.p99))


def _number(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _count(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}"


OTHERS = ("transformers", "sequential")
_CLIENTS = "8"
_UNSTRETCHED = 1024


def parse_context(text: str) -> tuple[int, int] | None:
    """Reads a range of tokens: `2048:4096`, `2048`, or nothing for prompts as they are."""
    if not text.strip():
        return None
    parts = text.split(":")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ValueError(f"--context {text!r} is no range of tokens; give one such as 2048:4096")
    return numbers[0], numbers[-1]


def parse_loads(clients: str, rates: str, requests: int | None) -> tuple[Load, ...]:
    """Reads which loops to run."""
    try:
        found = tuple(float(part) for part in split_list(rates))
    except ValueError:
        raise ValueError(f"--rate {rates!r} is no list of numbers; give one such as 2,5") from None
    if any(not math.isfinite(rate) for rate in found):
        raise ValueError(f"--rate {rates!r} is not finite; give requests a second, such as 5")
    chosen = clients or ("" if found else _CLIENTS)
    return tuple(make_loads(parse_numbers("clients", chosen), found, requests))


def parse_extra(text: str) -> dict[str, Any]:
    """Reads further fields of every request."""
    if not text.strip():
        return {}
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(
            f"--extra {text!r} is no JSON object; give one such as '{{\"top_p\": 0.9}}'"
        )
    return fields


def check_timeout(seconds: float) -> float:
    """Returns the time-out if it is one."""
    if not seconds > 0:
        raise ValueError(f"--timeout {seconds:g} leaves no time; give seconds, such as 600")
    return seconds


def choose_servers(
    url: str | None,
    model: str | None,
    against: str,
    served_name: str | None,
    serve_options: str,
    device: str,
    loads: Sequence[Load],
    mix: Mix,
) -> tuple[Command | Endpoint, ...]:
    """Finds out which servers to measure."""
    if (url is None) == (model is None):
        raise ValueError(
            "give either --url of a running server or --model, for which one is started"
        )
    others = split_list(against)
    for name in others:
        if name not in OTHERS:
            raise ValueError(f"--against {name!r} is not known; choose from {', '.join(OTHERS)}")
    if url is not None:
        if others or serve_options:
            raise ValueError("--against and --serve-options go with --model, not with --url")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url {url!r} is no URL; give one such as http://127.0.0.1:8000")
        return (Endpoint(url.rstrip("/").removesuffix("/v1"), served_name),)
    assert model is not None
    options = [*shlex.split(serve_options), *(("--device", device) if device != "auto" else ())]
    servers: list[Command | Endpoint] = [own_server(model, options)]
    if others:
        described = describe(model)
        longest = _UNSTRETCHED if mix.context is None else mix.context[1]
        size = PagedSize(
            max(load.clients or load.requests for load in loads), longest + mix.most_new_tokens
        )
        dtype = str(default_dtype(model, parse_device(device)) or "auto").removeprefix("torch.")
        for name in others:
            paged = size if name == "transformers" else None
            servers.append(transformers_server(described.source, dtype, device, paged))
    return tuple(servers)


NOTHING_FINISHED = 1

SERVE_HELP = """Put a server that speaks OpenAI's API under load, and report what its clients saw.

A closed loop (--clients) has so many clients at any time; an open one (--rate) sends so many
requests a second on average, whatever becomes of earlier ones. Answers are streamed.

Examples:

    h2okv bench serve --url http://127.0.0.1:8000 --clients 8,32 --prompts mt_bench.jsonl

    h2okv bench serve --model bundled --context 1024:1792 --clients 8,32 --against transformers

    h2okv bench serve --url http://127.0.0.1:8000 --rate 2,5 --requests 200 --csv load.csv
"""


def bench_serve(
    ctx: typer.Context,
    url: Annotated[str | None, typer.Option(help="A running server's, without /v1.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help=f"Start h2okv serve for the run. {MODEL_HELP}"),
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            help="With --model, others under the same load: transformers (transformers serve with"
            " continuous batching), sequential (the same, without)."
        ),
    ] = "",
    served_name: Annotated[
        str | None, typer.Option(help="The model's name in requests (default: the server's first).")
    ] = None,
    serve_options: Annotated[
        str, typer.Option(help='With --model, for h2okv serve, such as "--heavy 0.1 --recent 0.1".')
    ] = "",
    device: Annotated[str, typer.Option(help="With --model: auto, cpu, cuda ...")] = "auto",
    clients: Annotated[
        str, typer.Option(help="Clients of closed loops (default: 8, if there is no --rate).")
    ] = "",
    rate: Annotated[str, typer.Option(help="Open loops: requests a second.")] = "",
    requests: Annotated[
        int | None,
        typer.Option(help="In each loop (default: 4 for each client; 30 s of a rate)."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with turns (MT-Bench), prompt, question or text."),
    ] = None,
    context: Annotated[
        str, typer.Option(help="Stretch prompts to so many tokens, such as 2048:4096.")
    ] = "",
    new_tokens: Annotated[int, typer.Option(help="Median of the new tokens asked for.")] = 128,
    spread: Annotated[
        float, typer.Option(help="Of their logarithm; 0: all ask for the median.")
    ] = 0.8,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send chat messages, not texts to go on with.")
    ] = False,
    extra: Annotated[
        str, typer.Option(help="Further fields of every request, such as '{\"h2o\": ...}'.")
    ] = "",
    warmup: Annotated[int, typer.Option(help="Requests before each server's first loop.")] = 2,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of lengths, places in texts and times.")] = 0,
    csv: Annotated[Path | None, typer.Option(help="Add the rows to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Runs the loads, as `SERVE_HELP` tells the user."""
    _refuse_options_before(ctx)
    load_aiohttp()
    mix = Mix(parse_context(context), new_tokens, spread, seed)
    loads = parse_loads(clients, rate, requests)
    if warmup < 0:
        raise ValueError(f"--warmup {warmup} is negative; give 0 or more")
    check_files(csv, None)
    wanted = Wanted(
        servers=choose_servers(url, model, against, served_name, serve_options, device, loads, mix),
        model=model or served_name or "",
        tokenizer_of=model,
        texts=default_texts() if prompts is None else read_texts(prompts),
        mix=mix,
        loads=loads,
        is_chat=chat,
        extra=parse_extra(extra),
        warmup=warmup,
        timeout=check_timeout(timeout),
    )
    told = environment(torch.device("cpu"))
    file = None if csv is None else CsvFile(csv, (*ENVIRONMENT_COLUMNS, *COLUMNS))
    rows: list[Measured] = []

    def keep(row: Measured) -> None:
        rows.append(row)
        if file is not None:
            file.append({**told, **row.cells()})

    try:
        stopped = _run(wanted, keep)
    finally:
        # Also when a later server fails: what the earlier ones gave is there.
        if file is not None:
            file.close()
        if rows:
            _show(rows, told, json)
    if stopped:
        return INTERRUPTED
    return 0 if all(row.summary.finished for row in rows) else NOTHING_FINISHED


def _run(wanted: Wanted, keep: ServeRun.Keep) -> bool:
    """Measures; whether Ctrl-C ended it."""
    total = len(wanted.servers) * sum(load.requests for load in wanted.loads)
    with Progress("load", total, "requests") as progress:
        run = ServeRun(wanted, keep, progress)
        try:
            asyncio.run(run.all())
        except KeyboardInterrupt:
            if not run.keep_unfinished():
                write_remark("stopped before a load was finished")
            return True
    return False


def _show(rows: Sequence[Measured], told: dict[str, str], as_json: bool) -> None:
    if as_json:
        write_text(serve_json(told, rows) + "\n")
        return
    write_text(serve_table(rows))
    for line in serve_remarks(rows):
        write_remark(line)


def _refuse_options_before(ctx: typer.Context) -> None:
    """Refuses options of `h2okv bench` before the word `serve`, which would have no effect."""
    parent = ctx.parent
    if parent is None:
        return
    for name in parent.params:
        source = parent.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option} stands before the word serve, where it belongs to 'h2okv bench'; put the"
                " options of 'h2okv bench serve' behind that word"
            )
