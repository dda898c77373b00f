"""`h2okv bench` and `h2okv bench serve`."""

from __future__ import annotations

import asyncio
import inspect
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from h2okv.cli import args
from h2okv.cli.args import DEVICE_HELP, DTYPES, JSON, MODEL_HELP, ROWS, option
from h2okv.config import POSITIONS, CacheConfig
from h2okv.console import INTERRUPTED, Progress, check_least, write_json, write_remark, write_text
from h2okv.plots import check_plot

if TYPE_CHECKING:
    import torch

    from h2okv.benchmarking.comparison import Settings
    from h2okv.benchmarking.model import Footprint, ModelSource
    from h2okv.records import Row

FAILED = 1
"""The exit code if a check failed, or no request was finished."""
RUNNERS = ("dynamic", "static", "quantized", "h2o", "kvpress")
SHAPES = ("llama-3-8b", "llama-3.1-8b", "llama-3.2-1b", "llama-2-7b", "qwen2.5-7b", "small")
"""Written down, for the modules that define them import torch."""

bench_app = typer.Typer(name="bench", add_completion=False, pretty_exceptions_enable=False)


@args.cache_lists(
    "20%",
    policy="h2o",
    scoring="sum",
    positions="original",
    prefill_chunk=None,
    kv_bits=None,
    decay=None,
)
def bench(
    caches: list[CacheConfig],
    ctx: typer.Context,
    model: str | None = option(None, MODEL_HELP),
    shape: str | None = option(
        None,
        f"Random weights of a shape: {', '.join(SHAPES)}, or hidden=..,layers=..,heads=..,"
        "kv_heads=..,head_dim=..,intermediate=..,vocab=.. (small).",
    ),
    layers: int | None = option(None, "Use only the first layers of a shape."),
    contexts: str = option("2048", "Prompt lengths in tokens, comma-separated."),
    batches: str = option("4", "Batch sizes, comma-separated."),
    runners: str = option(
        "dynamic,static,quantized,h2o", f"Caches: {', '.join(RUNNERS)}.", "--caches"
    ),
    positions: str = option("original", "original or rolling."),
    kv_bits: str = option("", "8, 4 or 8,4: h2o once more with quantized keys and values."),
    dtype: str = option("auto", f"Data types: {', '.join(DTYPES)} (bfloat16 on a GPU)."),
    device: str = option("auto", DEVICE_HELP),
    rounds: int = option(5, "Rounds; in each, every cache is measured once."),
    steps: int = option(8, "Decode steps of one measurement."),
    prefill_chunk: int | None = option(None, "Prefill in blocks of this many tokens."),
    threads: int | None = option(None, "Number of torch threads."),
    peak: bool = option(True, "Measure peak memory; on a CPU in child processes."),
    compile: bool = option(False, "Compile the decode steps of static and h2o.", "--compile"),
    max_batch: bool = option(False, "Find the largest batch in --memory instead.", "--max-batch"),
    memory: str | None = option(None, "For --max-batch, such as 8GiB."),
    max_run_batch: int = option(256, "Largest batch that is run to verify --max-batch."),
    csv: Path | None = ROWS,
    plot: Path | None = option(None, "Plot decode steps: .png, .svg or .pdf."),
    as_json: bool = JSON,
) -> int:
    """Measure H2O against transformers' own caches, and the limit that memory traffic sets.

    Correctness is checked first; if it fails, no speed is reported and the exit code is 1. Rows go
    to the CSV file as they come, so that Ctrl-C keeps them.

    Examples:

        h2okv bench --contexts 2048 --batches 1,4 --budget 10%,20% --csv bench.csv --plot bench.png
        h2okv bench --shape llama-3-8b --layers 4 --dtype bfloat16 --contexts 4096 --batches 1
        h2okv bench --max-batch --memory 8GiB --contexts 2048 --budget 20% --prefill-chunk 512
    """
    if ctx.invoked_subcommand is not None:
        return 0
    import torch

    from h2okv.benchmarking import comparison, results
    from h2okv.benchmarking.comparison import Settings
    from h2okv.engine.memory import parse_memory
    from h2okv.integration.enable import check_compiler
    from h2okv.integration.loading import parse_device

    check_least(threads=threads, max_run_batch=max_run_batch)
    if threads is not None:
        torch.set_num_threads(threads)
    chosen_device = parse_device(device)
    settings = Settings(
        contexts=args.parse_numbers("contexts", contexts, int),
        batches=args.parse_numbers("batches", batches, int),
        configs=tuple(caches),
        caches=args.split_list(runners),
        dtypes=parse_dtypes(dtype, chosen_device),
        positions=args.parse_choice("positions", positions, POSITIONS),
        rounds=rounds,
        steps=steps,
        prefill_chunk=prefill_chunk,
        peak=peak,
        compiled=compile,
        kv_bits=args.parse_numbers("kv-bits", kv_bits, int),
    )
    if compile:
        check_compiler(chosen_device)
    source = choose_source(model, shape, layers)
    if max_batch != (memory is not None):
        raise ValueError("--max-batch and --memory go together; give both, such as --memory 8GiB")
    limit = None if memory is None else parse_memory(memory)
    args.check_file("csv", csv)
    args.check_file("plot", plot)
    if plot is not None and max_batch:
        raise ValueError("--plot draws steps by context, not --max-batch; leave one of them out")
    check_plot(plot)
    footprints = check_room(source, settings, chosen_device, limit)
    columns = comparison.COLUMNS if limit is None else comparison.MAX_BATCH_COLUMNS
    with _Rows(csv, columns, chosen_device) as rows:
        run = _Bench(source, settings, chosen_device, limit, max_run_batch, footprints, rows)
        code = run.measure()
    run.show(as_json)
    if plot is not None and any(row["decode"] is not None for row in rows.found):
        results.plot_roofline(plot, rows.found)
    return code


class _Rows:
    """Rows of a measurement; each is in the CSV file, if there is one, as soon as it is known."""

    def __init__(self, csv: Path | None, columns: Sequence[str], device: torch.device) -> None:
        from h2okv.provenance import environment
        from h2okv.records import CsvFile

        self.found: list[Row] = []
        self.environment = environment(device)
        self._file = None if csv is None else CsvFile(csv, (*self.environment, *columns))

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, row: Row) -> None:
        """Takes a row; what is an object in JSON is one in its cell, too."""
        self.found.append(row)
        if self._file is not None:
            cells = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()}
            self._file.append({**self.environment, **cells})


def choose_source(model: str | None, shape: str | None, layers: int | None) -> ModelSource:
    """Finds the model that the options name."""
    from h2okv.benchmarking.model import ModelSource, parse_shape

    if model is None:
        return parse_shape("small" if shape is None else shape, layers)
    if shape is not None:
        raise ValueError("both --model and --shape are given; give one of them")
    if layers is not None:
        raise ValueError("--layers cuts a --shape, not a --model; leave it out")
    return ModelSource(model)


def parse_dtypes(text: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """Reads a comma-separated list of data types."""
    import torch

    if "auto" in args.split_list(text) and text.strip() != "auto":
        raise ValueError(f"--dtype {text!r} mixes auto with others; give auto alone, or others")
    preferred = torch.float32 if device.type == "cpu" else torch.bfloat16
    return tuple(args.parse_dtype(part) or preferred for part in args.split_list(text))


def check_room(
    source: ModelSource, settings: Settings, device: torch.device, memory: int | None
) -> dict[torch.dtype, Footprint]:
    """Refuses what cannot be measured, before anything is allocated; the model's bytes by dtype."""
    import h2okv
    from h2okv.benchmarking.comparison import Settings
    from h2okv.benchmarking.model import Footprint
    from h2okv.cache.validation import context_window
    from h2okv.engine.memory import available_bytes

    config = source.config()
    h2okv.check_model(config)
    settings.check_window(context_window(config))
    for spec in settings.specs():
        if spec.name == "h2o" and spec.config is not None:
            h2okv.H2OCache.from_config(config, spec.config)
    positions = settings.positions
    footprints = {dtype: Footprint(config, dtype, positions) for dtype in settings.dtypes}
    needed = settings
    if memory is not None:
        # Its straight line begins at batches of one and two, one cache at a time.
        needed = Settings(
            settings.contexts, (2,), settings.configs, ("dynamic",), settings.dtypes,
            prefill_chunk=settings.prefill_chunk,
        )  # fmt: skip
    for footprint in footprints.values():
        needed.check_fits(footprint, available_bytes(device), device.type == "cpu")
        if memory is not None and footprint.weight_bytes >= memory:
            raise ValueError(
                f"--memory {memory} bytes do not hold the model's {footprint.weight_bytes} bytes of"
                " weights; give more, fewer --layers or another --dtype"
            )
    return footprints


@dataclass
class _Bench:
    source: ModelSource
    settings: Settings
    device: torch.device
    memory: int | None  # for the largest batch; None for a comparison
    max_run_batch: int
    footprints: dict[torch.dtype, Footprint]
    rows: _Rows
    bandwidth: float | None = None
    checks: dict[str, Any] = field(default_factory=dict)

    def measure(self) -> int:
        """Measures; whatever ends it, the rows so far are there."""
        import torch

        from h2okv.benchmarking.caches import PeakRunFailedError
        from h2okv.benchmarking.comparison import CheckFailedError, Comparison, MaxBatch
        from h2okv.offload.profile import measure_bandwidth

        count = Comparison.count_units if self.memory is None else MaxBatch.count_units
        total = len(self.settings.dtypes) * count(self.settings)
        with Progress("measuring", total, "runs") as progress:
            try:
                progress.advance(0, "memory bandwidth")
                self.bandwidth = measure_bandwidth(self.device)
                for dtype in self.settings.dtypes:
                    for row in self._rows_of(dtype, progress):
                        self.rows.add(row)
            except KeyboardInterrupt:
                write_remark(f"stopped; {len(self.rows.found)} rows were finished")
                return INTERRUPTED
            except CheckFailedError as error:
                write_remark(f"h2okv: {error}.")
                return FAILED
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError) or "memory" not in str(error):
                    raise
                reason = " ".join(str(error).split())[:200]
                raise ValueError(
                    f"the memory ran out ({reason}); give a smaller batch or context, or fewer"
                    " --layers"
                ) from error
            except PeakRunFailedError as error:
                raise ValueError(f"{error}; give a smaller context or fewer --layers") from error
        return 0

    def _rows_of(self, dtype: torch.dtype, progress: Progress) -> Iterator[Row]:
        """Builds the model of one dtype, checks H2O on it, and only then measures."""
        from h2okv.benchmarking.comparison import Comparison, MaxBatch, check_h2o, dtype_name

        progress.advance(0, "building the model")
        model = self.source.build(dtype, self.device)
        progress.advance(0, "checking correctness")
        for bits in (None, *self.settings.kv_bits):
            name = dtype_name(dtype) + ("" if bits is None else f", {bits} bits")
            positions = self.settings.positions
            self.checks[name] = check_h2o(model, positions=positions, kv_bits=bits)

        def report(label: str) -> None:
            progress.advance(note=label)

        common = (model, self.source, self.footprints[dtype], self.settings, report)
        if self.memory is not None:
            yield from MaxBatch(*common, self.memory, self.max_run_batch).rows()
            return
        assert self.bandwidth is not None
        yield from Comparison(*common, self.bandwidth).rows()

    def show(self, as_json: bool) -> None:
        from h2okv.benchmarking.results import comparison_table, max_batch_table, missing_figures

        rows = self.rows.found
        if as_json:
            told = {"environment": self.rows.environment, "bandwidth": self.bandwidth}
            write_json({**told, "checks": self.checks, "rows": rows})
        elif rows:
            is_batch = self.memory is not None
            write_text(max_batch_table(rows) if is_batch else comparison_table(rows))
            for line in [] if is_batch else missing_figures(rows):
                write_remark(line)
            if self.bandwidth is not None:
                write_remark(f"memory bandwidth measured: {self.bandwidth / 1e9:.1f} GB/s")


def bench_serve(
    ctx: typer.Context,
    url: str | None = option(None, "URL of a running server, without /v1."),
    model: str | None = option(None, f"Start h2okv serve for the run. {MODEL_HELP}"),
    against: str = option(
        "",
        "With --model, others under the same load: transformers (transformers serve with"
        " continuous batching), sequential (the same, without).",
    ),
    served_name: str | None = option(None, "The model's name in requests (the server's first)."),
    serve_options: str = option("", 'With --model, for h2okv serve, such as "--budget 512".'),
    device: str = option("auto", "With --model: auto, cpu, cuda ..."),
    clients: str = option("", "Closed loops: clients, comma-separated (8 without --rate)."),
    rate: str = option("", "Open loops: requests per second, comma-separated."),
    requests: int | None = option(None, "Requests in each loop (4 per client, 30 s of a rate)."),
    prompts: Path | None = option(None, "JSONL with turns (MT-Bench), prompt, question or text."),
    context: str = option("", "Stretch prompts to this many tokens, such as 2048:4096."),
    new_tokens: int = option(128, "Median of the new tokens asked for."),
    spread: float = option(0.8, "Log-normal spread of the new tokens; 0: all ask for the median."),
    chat: bool = option(False, "Send chat messages instead of text completions.", "--chat"),
    extra: str = option("", "Further fields of every request, such as '{\"h2o\": ...}'."),
    warmup: int = option(2, "Requests before each server's first loop."),
    timeout: float = option(600.0, "Seconds that a request may take."),
    seed: int = option(0, "Random seed of lengths, places in texts and times."),
    csv: Path | None = ROWS,
    as_json: bool = JSON,
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

    from h2okv.benchmarking.serving import ServeRun, choose_servers
    from h2okv.benchmarking.serving_client import (
        COLUMNS,
        Workload,
        default_texts,
        load_aiohttp,
        make_loads,
        read_texts,
    )

    _refuse_options_before(ctx)
    load_aiohttp()
    stretched = parse_context(context)
    texts = default_texts() if prompts is None else read_texts(prompts)
    workload = Workload(texts, stretched, new_tokens, spread, seed)
    open_loops = args.parse_numbers("rate", rate, float, "2,5")
    closed_loops = args.parse_numbers("clients", clients or ("" if open_loops else "8"), int)
    loads = tuple(make_loads(closed_loops, open_loops, requests))
    if warmup < 0:
        raise ValueError(f"--warmup {warmup} is negative; give 0 or more")
    if not timeout > 0:
        raise ValueError(f"--timeout {timeout:g} leaves no time; give seconds, such as 600")
    args.check_file("csv", csv)
    if model is not None:
        check_serve_options(model, serve_options)
    servers = choose_servers(
        url, model, args.split_list(against), served_name, serve_options, device, loads, workload
    )
    client = {"is_chat": chat, "extra": parse_extra(extra), "timeout": timeout}
    name, code = model or served_name or "", 0
    total = len(servers) * sum(load.requests for load in loads)
    with (
        _Rows(csv, COLUMNS, torch.device("cpu")) as rows,
        Progress("load", total, "requests") as progress,
    ):
        run = ServeRun(servers, name, model, workload, loads, warmup, client, rows.add, progress)
        try:
            asyncio.run(run.all())
        except KeyboardInterrupt:
            if not rows.found:
                write_remark("stopped before a load was finished")
            code = INTERRUPTED
        finally:
            # Also when a later server fails: what the earlier ones gave is there.
            progress.close()
            _show_loads(rows, as_json)
    return code or (0 if all(row["finished"] for row in rows.found) else FAILED)


def check_serve_options(model: str, text: str) -> None:
    """Refuses a cache that the server would refuse, before it is started for the run."""
    from h2okv.cache import H2OCache
    from h2okv.cli.app import load_command
    from h2okv.integration.loading import describe

    with load_command("serve").make_context("h2okv serve", shlex.split(text)) as given:
        names = inspect.signature(args.make_cache).parameters
        values = {name: given.params.get(name) for name in names}
    H2OCache.from_config(describe(model).config, args.make_cache(**values))


def parse_context(text: str) -> tuple[int, int] | None:
    """Reads a range of tokens: `2048:4096`, `2048`, or nothing for prompts as they are."""
    if not text.strip():
        return None
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ValueError(f"--context {text!r} is not a range of tokens; give one such as 2048:4096")
    return numbers[0], numbers[-1]


def parse_extra(text: str) -> dict[str, Any]:
    """Reads further fields of every request."""
    try:
        fields = json.loads(text) if text.strip() else {}
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(
            f"--extra {text!r} is not a JSON object; give one such as '{{\"top_p\": 0.9}}'"
        )
    return fields


def _show_loads(rows: _Rows, as_json: bool) -> None:
    from h2okv.benchmarking.results import serving_table
    from h2okv.benchmarking.serving_client import remarks

    if as_json and rows.found:
        write_json({"environment": rows.environment, "rows": rows.found})
    elif rows.found:
        write_text(serving_table(rows.found))
        for line in dict.fromkeys(line for row in rows.found for line in remarks(row)):
            write_remark(line)


def _refuse_options_before(ctx: typer.Context) -> None:
    """Refuses options of `h2okv bench` before the word `serve`, which would have no effect."""
    parent = ctx.parent
    if parent is None:
        return
    for own in parent.command.params:
        source = parent.get_parameter_source(str(own.name))
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(
                f"{own.opts[0]} stands before the word serve, where it belongs to 'h2okv bench';"
                " put the options of 'h2okv bench serve' behind that word"
            )


bench_app.callback(invoke_without_command=True, help=args.reflow(bench.__doc__))(bench)
bench_app.command("serve", help=args.reflow(bench_serve.__doc__))(bench_serve)
