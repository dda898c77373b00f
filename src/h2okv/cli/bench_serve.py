"""`h2okv bench serve`: what a server gives many clients."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from h2okv.benchmarking.environment import ENVIRONMENT_COLUMNS, environment
from h2okv.benchmarking.load.measurement import COLUMNS, Measured
from h2okv.benchmarking.load.openai_target import load_aiohttp
from h2okv.benchmarking.load.workload import Mix, default_texts, read_texts
from h2okv.benchmarking.row_file import RowFile
from h2okv.cli.bench_progress import BenchProgress
from h2okv.cli.bench_request import check_files
from h2okv.cli.bench_serve_run import ServeRun, Wanted
from h2okv.cli.bench_serve_table import serve_json, serve_remarks, serve_table
from h2okv.cli.bench_serve_wanted import (
    check_timeout,
    choose_servers,
    parse_context,
    parse_extra,
    parse_loads,
)
from h2okv.cli.exit_codes import INTERRUPTED
from h2okv.cli.output import write_remark, write_text
from h2okv.integration.loading import BUNDLED

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
        typer.Option(help=f"Start h2okv serve for the run: a folder, a Hub id or {BUNDLED}."),
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
    file = None if csv is None else RowFile(csv, (*ENVIRONMENT_COLUMNS, *COLUMNS))
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
    with BenchProgress(total) as progress:
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
