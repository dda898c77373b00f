"""`h2okv bench`: speed and memory beside other caches, and the largest batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from h2okv.benchmarking.bandwidth import measure_bandwidth
from h2okv.benchmarking.comparison import Comparison, count_units
from h2okv.benchmarking.correctness import CheckFailedError, check_h2o
from h2okv.benchmarking.environment import ENVIRONMENT_COLUMNS, environment
from h2okv.benchmarking.max_batch import MAX_BATCH_COLUMNS, MaxBatch, MaxBatchRow
from h2okv.benchmarking.roofline import plot_roofline
from h2okv.benchmarking.row import COLUMNS, Row
from h2okv.benchmarking.row_file import RowFile
from h2okv.benchmarking.settings import CACHES, CacheChoice, Settings
from h2okv.benchmarking.shape import SHAPES
from h2okv.benchmarking.trial import TrialFailedError
from h2okv.cli.bench_options import parse_budgets, parse_dtypes, parse_numbers, split_list
from h2okv.cli.bench_progress import BenchProgress
from h2okv.cli.bench_request import (
    Request,
    check_files,
    checked_request,
    choose_source,
    memory_for_batch,
)
from h2okv.cli.bench_table import comparison_table, left_out, max_batch_table, to_json
from h2okv.cli.exit_codes import INTERRUPTED
from h2okv.cli.options import parse_device, parse_positions
from h2okv.cli.output import write_remark, write_text
from h2okv.integration.compiled import check_compiler
from h2okv.integration.loading import BUNDLED

CHECK_FAILED = 1

HELP = """Measure H2O beside transformers' own caches, against the limit that memory traffic sets.

Correctness is checked first; if it fails, no speed is reported and the exit code is 1. Rows go to
the CSV file as they come, so that Ctrl-C keeps them.

Examples:

    h2okv bench --contexts 2048 --batches 1,4 --budgets 0.1,0.2 --csv bench.csv --plot bench.png

    h2okv bench --shape llama-3-8b --layers 4 --dtype bfloat16 --contexts 4096 --batches 1

    h2okv bench --max-batch --memory 8GiB --contexts 2048 --budgets 0.2 --prefill-chunk 512
"""


@dataclass
class _Results:
    """All that was found so far."""

    file: RowFile | None
    environment: dict[str, str]
    bandwidth: float | None = None
    checks: dict[str, Any] = field(default_factory=dict)
    rows: list[Any] = field(default_factory=list)

    def add(self, row: Row | MaxBatchRow) -> None:
        """Takes a row, and writes it at once."""
        self.rows.append(row)
        if self.file is not None:
            self.file.append({**self.environment, **row.cells()})


def bench(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Option(help=f"A folder, a Hub id, or {BUNDLED}, the bundled model.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help=f"Random weights: {', '.join(SHAPES)}, or hidden=..,layers=..,heads=..,"
            "kv_heads=..,head_dim=..,intermediate=..,vocab=.. [default: small]"
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Cut a shape to so many layers.")] = None,
    contexts: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "2048",
    batches: Annotated[str, typer.Option(help="Numbers of sequences.")] = "4",
    budgets: Annotated[
        str, typer.Option(help="Fractions of the prompt or tokens, half for heavy hitters.")
    ] = "0.2",
    caches: Annotated[str, typer.Option(help=f"{', '.join(CACHES)}.")] = (
        "dynamic,static,quantized,h2o"
    ),
    positions: Annotated[str, typer.Option(help="original or rolling.")] = "original",
    kv_bits: Annotated[
        str, typer.Option(help="8, 4 or 8,4: h2o once more with keys and values in so many bits.")
    ] = "",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16; auto: bfloat16 on a GPU.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    rounds: Annotated[int, typer.Option(help="In each, every cache takes its turn.")] = 5,
    steps: Annotated[int, typer.Option(help="Decode steps of one turn.")] = 8,
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Read prompts in blocks of so many tokens.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of torch.")] = None,
    peak: Annotated[
        bool, typer.Option(help="Measure peak memory, on a CPU in processes of its own.")
    ] = True,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the steps of static and h2o.")
    ] = False,
    max_batch: Annotated[
        bool, typer.Option("--max-batch", help="Find the largest batch in --memory instead.")
    ] = False,
    memory: Annotated[str | None, typer.Option(help="For --max-batch, such as 8GiB.")] = None,
    max_run_batch: Annotated[
        int, typer.Option(help="Run no larger batch than this to verify --max-batch.")
    ] = 256,
    csv: Annotated[Path | None, typer.Option(help="Add the rows to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture: .png, .svg, .pdf.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Runs the benchmark, as `HELP` tells the user."""
    if ctx.invoked_subcommand is not None:
        return 0
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads {threads} is too few; give 1 or more")
        torch.set_num_threads(threads)
    chosen_device = parse_device(device)
    settings = Settings(
        contexts=parse_numbers("contexts", contexts),
        batches=parse_numbers("batches", batches),
        budgets=parse_budgets(budgets),
        caches=split_list(caches),
        dtypes=parse_dtypes(dtype, chosen_device),
        positions=parse_positions(positions),
        rounds=rounds,
        steps=steps,
        prefill_chunk=prefill_chunk,
        peak=peak,
        compiled=compile,
        kv_bits=parse_numbers("kv-bits", kv_bits),
    )
    if compile:
        check_compiler(chosen_device)
    source = choose_source(model, shape, layers)
    wanted_memory = memory_for_batch(max_batch, memory, max_run_batch, plot)
    check_files(csv, plot)
    request = checked_request(source, settings, chosen_device, wanted_memory, max_run_batch)
    columns = COLUMNS if wanted_memory is None else MAX_BATCH_COLUMNS
    file = None if csv is None else RowFile(csv, (*ENVIRONMENT_COLUMNS, *columns))
    results = _Results(file, environment(chosen_device))
    code = _run(request, results)
    _show(request, results, plot, json)
    return code


def _run(request: Request, results: _Results) -> int:
    """Measures; whatever ends it, the rows so far are in the results."""
    with BenchProgress(_total(request)) as progress:
        try:
            progress.doing("memory bandwidth")
            results.bandwidth = measure_bandwidth(request.device)
            for dtype in request.settings.dtypes:
                for row in _rows(request, results, dtype, progress):
                    results.add(row)
        except KeyboardInterrupt:
            write_remark(f"stopped; {len(results.rows)} rows were finished")
            return INTERRUPTED
        except CheckFailedError as error:
            write_remark(f"h2okv: {error}.")
            return CHECK_FAILED
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"the memory ran out ({reason}); give a smaller batch or context, or fewer --layers"
            ) from error
        except TrialFailedError as error:
            raise ValueError(f"{error}; give a smaller context or fewer --layers") from error
        finally:
            if results.file is not None:
                results.file.close()
    return 0


def _total(request: Request) -> int:
    settings = request.settings
    per_dtype = count_units(settings)
    if request.memory is not None:
        caches = 1 + len(settings.budgets) * (1 + len(settings.kv_bits))
        per_dtype = len(settings.contexts) * caches * (3 + settings.rounds)
    return len(settings.dtypes) * per_dtype


def _rows(
    request: Request, results: _Results, dtype: torch.dtype, progress: BenchProgress
) -> Iterator[Row | MaxBatchRow]:
    """Builds the model of one dtype, checks H2O on it, and only then measures."""
    progress.doing("building the model")
    model = request.source.build(dtype, request.device)
    progress.doing("checking correctness")
    for bits in (None, *request.settings.kv_bits):
        choice = CacheChoice("h2o", positions=request.settings.positions, kv_bits=bits)
        name = str(dtype).removeprefix("torch.") + ("" if bits is None else f", {bits} bits")
        results.checks[name] = asdict(check_h2o(model, choice))
    common = (model, request.source, request.footprints[dtype], request.settings)
    if request.memory is not None:
        yield from MaxBatch(*common, request.memory, request.max_run_batch, progress.done).rows()
        return
    assert results.bandwidth is not None
    yield from Comparison(*common, results.bandwidth, progress.done).rows()


def _show(request: Request, results: _Results, plot: Path | None, as_json: bool) -> None:
    """Prints what was found, and draws it."""
    if as_json:
        line = to_json(results.environment, results.bandwidth, results.checks, results.rows)
        write_text(line + "\n")
    elif results.rows:
        is_batch = request.memory is not None
        write_text(max_batch_table(results.rows) if is_batch else comparison_table(results.rows))
        if not is_batch:
            for line in left_out(results.rows):
                write_remark(line)
        if results.bandwidth is not None:
            write_remark(f"memory bandwidth measured: {results.bandwidth / 1e9:.1f} GB/s")
    if plot is not None and any(row.decode is not None for row in results.rows):
        plot_roofline(plot, results.rows)
