"""`h2okv bench`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h2okv.cli.args import (
    DTYPES,
    MODEL_HELP,
    check_file,
    parse_budget,
    parse_dtype,
    parse_numbers,
    parse_positions,
    reflow,
    split_list,
)
from h2okv.cli.bench_serve import bench_serve
from h2okv.console import INTERRUPTED, Progress, write_remark, write_text

if TYPE_CHECKING:
    import torch

    from h2okv.benchmarking.comparison import Row, Settings
    from h2okv.benchmarking.max_batch import MaxBatchRow
    from h2okv.benchmarking.memory import Footprint
    from h2okv.benchmarking.model import ModelSource
    from h2okv.records import CsvFile

CHECK_FAILED = 1
RUNNERS = ("dynamic", "static", "quantized", "h2o", "kvpress")
SHAPES = ("llama-3-8b", "llama-3.1-8b", "llama-3.2-1b", "llama-2-7b", "qwen2.5-7b", "small")
"""Written down, for the modules that define them import torch."""


@dataclass(frozen=True)
class Request:
    """All that was asked for, checked.

    Attributes:
        source: The model.
        settings: What to measure.
        device: Where.
        memory: Bytes for the largest batch; ``None`` for a comparison.
        max_run_batch: The largest batch that is really run.
        footprints: The model's bytes, by dtype.
    """

    source: ModelSource
    settings: Settings
    device: torch.device
    memory: int | None
    max_run_batch: int
    footprints: dict[torch.dtype, Footprint]


def choose_source(model: str | None, shape: str | None, layers: int | None) -> ModelSource:
    """Finds the model that the options name."""
    from h2okv.benchmarking.model import ModelSource, parse_shape
    from h2okv.integration.models import resolve_model

    if model is None:
        chosen = parse_shape("small" if shape is None else shape, layers)
        return ModelSource(chosen.name, shape=chosen)
    if shape is not None:
        raise ValueError("both --model and --shape are given; give one of them")
    if layers is not None:
        raise ValueError("--layers cuts a --shape, not a --model; leave it out")
    folder = resolve_model(model)
    return ModelSource(model, folder=folder)


def memory_for_batch(
    max_batch: bool, memory: str | None, most: int, plot: Path | None
) -> int | None:
    """Reads the options of `--max-batch`."""
    from h2okv.engine.memory import parse_memory

    if max_batch != (memory is not None):
        raise ValueError("--max-batch and --memory go together; give both, such as --memory 8GiB")
    if most < 1:
        raise ValueError(f"--max-run-batch {most} is too few; give 1 or more")
    if max_batch and plot is not None:
        raise ValueError("--plot draws steps by context, not --max-batch; leave one of them out")
    return None if memory is None else parse_memory(memory)


def check_files(csv: Path | None, plot: Path | None) -> None:
    """Refuses files that could not be written at the end."""
    for name, path in (("csv", csv), ("plot", plot)):
        if path is not None:
            check_file(name, path)
    if plot is not None:
        from h2okv.benchmarking.roofline import check_plot

        check_plot(plot)


def checked_request(
    source: ModelSource,
    settings: Settings,
    device: torch.device,
    memory: int | None,
    max_run_batch: int,
) -> Request:
    """Finds out what can be known before anything is allocated."""
    import h2okv
    from h2okv.benchmarking.comparison import Settings
    from h2okv.benchmarking.memory import footprint_of
    from h2okv.cache.validation import context_window
    from h2okv.engine.memory import available_bytes

    config = source.config()
    h2okv.check_model(config)
    settings.check_window(context_window(config))
    for spec in settings.specs():
        if spec.name == "h2o" and spec.config is not None:
            h2okv.H2OCache.from_config(config, spec.config)
    rolls = settings.positions == "rolling"
    footprints = {dtype: footprint_of(config, dtype, rolls) for dtype in settings.dtypes}
    needed = settings
    if memory is not None:
        # Its straight line begins at batches of one and two, one cache at a time.
        needed = Settings(
            settings.contexts, (2,), settings.budgets, ("dynamic",), settings.dtypes,
            prefill_chunk=settings.prefill_chunk,
        )  # fmt: skip
    for footprint in footprints.values():
        needed.check_fits(footprint, available_bytes(device), device.type == "cpu")
        if memory is not None and footprint.weight_bytes >= memory:
            raise ValueError(
                f"--memory {memory} bytes do not hold the model's {footprint.weight_bytes} bytes of"
                " weights; give more, fewer --layers or another --dtype"
            )
    return Request(source, settings, device, memory, max_run_batch, footprints)


def to_json(
    environment: Mapping[str, str],
    bandwidth: float | None,
    checks: Mapping[str, Any],
    rows: Sequence[Row] | Sequence[MaxBatchRow],
) -> str:
    """Makes the object that `--json` prints."""
    result = {
        "environment": dict(environment),
        "bandwidth": bandwidth,
        "checks": dict(checks),
        "rows": [row.cells() for row in rows],
    }
    return json.dumps(result, allow_nan=False)


@dataclass
class _Results:
    """All that was found so far."""

    file: CsvFile | None
    environment: dict[str, str]
    bandwidth: float | None = None
    checks: dict[str, Any] = field(default_factory=dict)
    rows: list[Any] = field(default_factory=list)

    def add(self, row: Row | MaxBatchRow) -> None:
        """Takes a row, and writes it at once."""
        self.rows.append(row)
        if self.file is not None:
            self.file.append({**self.environment, **row.cells()})


bench_app = typer.Typer(name="bench", pretty_exceptions_enable=False)


def bench(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help=f"Random weights of a shape: {', '.join(SHAPES)}, or hidden=..,layers=..,"
            "heads=..,kv_heads=..,head_dim=..,intermediate=..,vocab=..",
            show_default="small",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Use only the first layers of a shape.")
    ] = None,
    contexts: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, comma-separated.")
    ] = "2048",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "4",
    budget: Annotated[
        str,
        typer.Option(help="Budgets, comma-separated: part of the prompt (20%) or tokens (512)."),
    ] = "20%",
    caches: Annotated[str, typer.Option(help=f"Caches, comma-separated: {', '.join(RUNNERS)}.")] = (
        "dynamic,static,quantized,h2o"
    ),
    positions: Annotated[str, typer.Option(help="original or rolling.")] = "original",
    kv_bits: Annotated[
        str, typer.Option(help="8, 4 or 8,4: h2o once more with quantized keys and values.")
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(help=f"Data types, comma-separated: {', '.join(DTYPES)} (bfloat16 on a GPU)."),
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    rounds: Annotated[int, typer.Option(help="Rounds; in each, every cache is measured once.")] = 5,
    steps: Annotated[int, typer.Option(help="Decode steps of one measurement.")] = 8,
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Prefill in blocks of this many tokens.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Number of torch threads.")] = None,
    peak: Annotated[
        bool, typer.Option(help="Measure peak memory; on a CPU in child processes.")
    ] = True,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the decode steps of static and h2o.")
    ] = False,
    max_batch: Annotated[
        bool, typer.Option("--max-batch", help="Find the largest batch in --memory instead.")
    ] = False,
    memory: Annotated[str | None, typer.Option(help="For --max-batch, such as 8GiB.")] = None,
    max_run_batch: Annotated[
        int, typer.Option(help="Largest batch that is run to verify --max-batch.")
    ] = 256,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot decode steps: .png, .svg or .pdf.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
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

    from h2okv.benchmarking.comparison import Row, Settings
    from h2okv.benchmarking.max_batch import MaxBatchRow
    from h2okv.integration.enable import check_compiler
    from h2okv.integration.loading import parse_device
    from h2okv.provenance import ENVIRONMENT_COLUMNS, environment
    from h2okv.records import CsvFile

    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads {threads} is too few; give 1 or more")
        torch.set_num_threads(threads)
    chosen_device = parse_device(device)
    settings = Settings(
        contexts=parse_numbers("contexts", contexts),
        batches=parse_numbers("batches", batches),
        budgets=parse_budgets(budget),
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
    columns = (Row if wanted_memory is None else MaxBatchRow).columns()
    file = None if csv is None else CsvFile(csv, (*ENVIRONMENT_COLUMNS, *columns))
    results = _Results(file, environment(chosen_device))
    code = _run(request, results)
    _show(request, results, plot, json)
    return code


bench_app.callback(invoke_without_command=True, help=reflow(bench.__doc__))(bench)
bench_app.command("serve", help=reflow(bench_serve.__doc__))(bench_serve)


def parse_budgets(text: str) -> tuple[int | float, ...]:
    """Reads a comma-separated list of budgets."""
    found = tuple(parse_budget(part) for part in split_list(text))
    known = tuple(part for part in found if part is not None)
    if len(known) < len(found):
        raise ValueError("--budget full has no meaning here; --caches dynamic is the full cache")
    return known


def parse_dtypes(text: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """Reads a comma-separated list of data types."""
    import torch

    if "auto" in split_list(text) and text.strip() != "auto":
        raise ValueError(
            f"--dtype {text!r} mixes auto with others; choose from {', '.join(DTYPES)}"
        )
    preferred = torch.float32 if device.type == "cpu" else torch.bfloat16
    return tuple(parse_dtype(part) or preferred for part in split_list(text))


def _run(request: Request, results: _Results) -> int:
    """Measures; whatever ends it, the rows so far are in the results."""
    import torch

    from h2okv.benchmarking.correctness import CheckFailedError
    from h2okv.benchmarking.peak import PeakRunFailedError
    from h2okv.offload.profile import measure_bandwidth

    with Progress("measuring", _total(request), "runs") as progress:
        try:
            progress.advance(0, "memory bandwidth")
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
        except PeakRunFailedError as error:
            raise ValueError(f"{error}; give a smaller context or fewer --layers") from error
        finally:
            if results.file is not None:
                results.file.close()
    return 0


def _total(request: Request) -> int:
    from h2okv.benchmarking.comparison import count_units
    from h2okv.benchmarking.max_batch import MaxBatch

    count = count_units if request.memory is None else MaxBatch.count_units
    return len(request.settings.dtypes) * count(request.settings)


def _rows(
    request: Request, results: _Results, dtype: torch.dtype, progress: Progress
) -> Iterator[Row | MaxBatchRow]:
    """Builds the model of one dtype, checks H2O on it, and only then measures."""
    from h2okv.benchmarking.comparison import Comparison
    from h2okv.benchmarking.correctness import check_h2o
    from h2okv.benchmarking.max_batch import MaxBatch
    from h2okv.benchmarking.peak import dtype_name

    progress.advance(0, "building the model")
    model = request.source.build(dtype, request.device)
    progress.advance(0, "checking correctness")
    for bits in (None, *request.settings.kv_bits):
        name = dtype_name(dtype) + ("" if bits is None else f", {bits} bits")
        check = check_h2o(model, positions=request.settings.positions, kv_bits=bits)
        results.checks[name] = asdict(check)

    def report(label: str) -> None:
        progress.advance(note=label)

    common = (model, request.source, request.footprints[dtype], request.settings)
    if request.memory is not None:
        yield from MaxBatch(*common, request.memory, request.max_run_batch, report).rows()
        return
    assert results.bandwidth is not None
    yield from Comparison(*common, results.bandwidth, report).rows()


def _show(request: Request, results: _Results, plot: Path | None, as_json: bool) -> None:
    """Prints what was found, and draws it."""
    from h2okv.benchmarking.roofline import plot_roofline
    from h2okv.benchmarking.tables import comparison_table, max_batch_table, missing_figures

    if as_json:
        line = to_json(results.environment, results.bandwidth, results.checks, results.rows)
        write_text(line + "\n")
    elif results.rows:
        is_batch = request.memory is not None
        write_text(max_batch_table(results.rows) if is_batch else comparison_table(results.rows))
        if not is_batch:
            for line in missing_figures(results.rows):
                write_remark(line)
        if results.bandwidth is not None:
            write_remark(f"memory bandwidth measured: {results.bandwidth / 1e9:.1f} GB/s")
    if plot is not None and any(row.decode is not None for row in results.rows):
        plot_roofline(plot, results.rows)
