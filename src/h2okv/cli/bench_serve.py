"""`h2okv bench serve`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h2okv.cli.args import MODEL_HELP, check_file, parse_numbers, split_list
from h2okv.console import INTERRUPTED, Progress, write_remark, write_text

if TYPE_CHECKING:
    from h2okv.benchmarking.serving import Load, LoadResult, ServeSettings


def serve_json(environment: Mapping[str, str], rows: Sequence[LoadResult]) -> str:
    """Makes the object that `--json` prints."""
    told = []
    for row in rows:
        errors = {"errors": row.summary.errors, "messages": dict(row.messages)}
        told.append({**row.cells(), **errors})
    return json.dumps({"environment": dict(environment), "rows": told}, allow_nan=False)


_CLIENTS = "8"


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
        raise ValueError(f"--context {text!r} is not a range of tokens; give one such as 2048:4096")
    return numbers[0], numbers[-1]


def parse_loads(clients: str, rates: str, requests: int | None) -> tuple[Load, ...]:
    """Reads which loops to run."""
    try:
        found = tuple(float(part) for part in split_list(rates))
    except ValueError:
        raise ValueError(
            f"--rate {rates!r} is not a list of numbers; give one such as 2,5"
        ) from None
    from h2okv.benchmarking.serving import make_loads

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
            f"--extra {text!r} is not a JSON object; give one such as '{{\"top_p\": 0.9}}'"
        )
    return fields


def check_timeout(seconds: float) -> float:
    """Returns the time-out if it is one."""
    if not seconds > 0:
        raise ValueError(f"--timeout {seconds:g} leaves no time; give seconds, such as 600")
    return seconds


NOTHING_FINISHED = 1


def bench_serve(
    ctx: typer.Context,
    url: Annotated[str | None, typer.Option(help="URL of a running server, without /v1.")] = None,
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
        str | None,
        typer.Option(help="The model's name in requests.", show_default="the server's first"),
    ] = None,
    serve_options: Annotated[
        str, typer.Option(help='With --model, for h2okv serve, such as "--budget 512".')
    ] = "",
    device: Annotated[str, typer.Option(help="With --model: auto, cpu, cuda ...")] = "auto",
    clients: Annotated[
        str,
        typer.Option(
            help="Closed loops: numbers of clients, comma-separated.",
            show_default="8 without --rate",
        ),
    ] = "",
    rate: Annotated[
        str, typer.Option(help="Open loops: requests per second, comma-separated.")
    ] = "",
    requests: Annotated[
        int | None,
        typer.Option(help="Requests in each loop.", show_default="4 per client, 30 s of a rate"),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with turns (MT-Bench), prompt, question or text."),
    ] = None,
    context: Annotated[
        str, typer.Option(help="Stretch prompts to this many tokens, such as 2048:4096.")
    ] = "",
    new_tokens: Annotated[int, typer.Option(help="Median of the new tokens asked for.")] = 128,
    spread: Annotated[
        float, typer.Option(help="Log-normal spread of the new tokens; 0: all ask for the median.")
    ] = 0.8,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send chat messages instead of text completions.")
    ] = False,
    extra: Annotated[
        str, typer.Option(help="Further fields of every request, such as '{\"h2o\": ...}'.")
    ] = "",
    warmup: Annotated[int, typer.Option(help="Requests before each server's first loop.")] = 2,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    seed: Annotated[
        int, typer.Option(help="Random seed of lengths, places in texts and times.")
    ] = 0,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Put a server that speaks OpenAI's API under load, and report what its clients saw.

    A closed loop (--clients) has a fixed number of clients; an open one (--rate) sends requests at
    a mean rate, whatever becomes of earlier ones. Answers are streamed.

    Examples:

        h2okv bench serve --url http://127.0.0.1:8000 --clients 8,32 --prompts mt_bench.jsonl

        h2okv bench serve --model bundled --context 1024:1792 --clients 8,32 --against transformers

        h2okv bench serve --url http://127.0.0.1:8000 --rate 2,5 --requests 200 --csv load.csv
    """
    import torch

    from h2okv.benchmarking.serving import COLUMNS, ServeSettings, choose_servers
    from h2okv.benchmarking.serving_client import Mix, default_texts, load_aiohttp, read_texts
    from h2okv.provenance import ENVIRONMENT_COLUMNS, environment
    from h2okv.records import CsvFile

    _refuse_options_before(ctx)
    load_aiohttp()
    mix = Mix(parse_context(context), new_tokens, spread, seed)
    loads = parse_loads(clients, rate, requests)
    if warmup < 0:
        raise ValueError(f"--warmup {warmup} is negative; give 0 or more")
    if csv is not None:
        check_file("csv", csv)
    wanted = ServeSettings(
        servers=choose_servers(
            url, model, split_list(against), served_name, serve_options, device, loads, mix
        ),
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
    rows: list[LoadResult] = []

    def keep(row: LoadResult) -> None:
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


def _run(wanted: ServeSettings, keep: Callable[[LoadResult], None]) -> bool:
    """Measures; whether Ctrl-C ended it."""
    from h2okv.benchmarking.serving import ServeRun

    with Progress("load", wanted.num_requests, "requests") as progress:
        run = ServeRun(wanted, keep, progress)
        try:
            asyncio.run(run.all())
        except KeyboardInterrupt:
            if not run.keep_unfinished():
                write_remark("stopped before a load was finished")
            return True
    return False


def _show(rows: Sequence[LoadResult], told: dict[str, str], as_json: bool) -> None:
    from h2okv.benchmarking.tables import serving_remarks, serving_table

    if as_json:
        write_text(serve_json(told, rows) + "\n")
        return
    write_text(serving_table(rows))
    for line in serving_remarks(rows):
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
