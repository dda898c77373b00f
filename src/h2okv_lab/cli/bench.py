"""`h2okv bench`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from h2okv.cli import args, readers
from h2okv.cli.args import JSON, MODEL_HELP, Typed, option
from h2okv.config import CacheConfig
from h2okv.console import INTERRUPTED, Progress, write_json, write_remark, write_text
from h2okv.models.names import check_name
from h2okv.records import unknown_name
from h2okv_lab.cli import options
from h2okv_lab.tables import CsvFile, Row

if TYPE_CHECKING:
    import torch

    from h2okv_lab.benchmarking.comparison import Bench
    from h2okv_lab.benchmarking.model import ModelSource

# Listed here because the modules that define them import torch.
RUNNERS = ("dynamic", "static", "quantized", "h2o")
SHAPES = ("llama-3-8b", "llama-3.1-8b", "llama-3.2-1b", "llama-2-7b", "qwen2.5-7b", "small")


def _model(option: str, name: str) -> str:
    check_name(name)
    return name


def _shape(option: str, text: str) -> str:
    """Raise ValueError for a text that is neither the name of a shape nor sizes."""
    name = text.partition(",")[0].strip().lower()
    if "=" not in name and name not in SHAPES:
        raise unknown_name(option, text, SHAPES)
    return text


def _runners(option: str, text: str) -> tuple[str, ...]:
    """Parse names of caches."""
    return tuple(readers.choice(*RUNNERS)(option, name) for name in readers.names(option, text))


def _dtypes(option: str, text: str) -> list[str]:
    names = readers.names(option, text)
    if "auto" in names and len(names) > 1:
        raise ValueError(f"{option} {text!r} mixes auto with others; give auto alone, or others")
    return [readers.choice(*args.DTYPES)(option, name) for name in names]


def bench(
    caches: list[CacheConfig] = options.cache_lists("20%", ["h2o"]),
    model: str | None = option(None, MODEL_HELP, read=_model),
    shape: str | None = option(None, "Random weights of a shape (small).", read=_shape),
    contexts: Typed = option("1024", "Prompt lengths in tokens.", read=options.numbers),
    batches: Typed = option("1", "Batch sizes.", read=options.numbers),
    runners: Typed = option("dynamic,static,quantized,h2o", "All, or some.", read=_runners),
    dtypes: Typed = option("auto", f"{', '.join(args.DTYPES)}.", "--dtype", read=_dtypes),
    rounds: int = option(5, "Times that each cache is measured.", read=readers.count),
    peak: bool = option(True, "Measure peak memory."),
    compiled: bool = option(False, "Compile decode steps of static and h2o.", "--compile"),
    memory: Typed = option(None, "Find the largest batch in it: 8GiB.", read=readers.memory),
    csv: Path | None = options.ROWS,
    as_json: bool = JSON,
) -> int:
    import torch

    from h2okv.calibration.layer_budgets import even_budgets
    from h2okv.integration.enable import check_compiler
    from h2okv.models.loading import parse_device
    from h2okv_lab.benchmarking import comparison, results

    torch_device = parse_device(args.chosen_device())
    default_dtype = torch.float32 if torch_device.type == "cpu" else torch.bfloat16
    caches = [even_budgets(cache, "bench does not measure factors") for cache in caches]
    lists = {"configs": tuple(caches), "caches": runners}
    lists["dtypes"] = tuple(readers.torch_dtype(name) or default_dtype for name in dtypes)
    settings = args.build(comparison.Settings, locals(), **lists)
    if compiled:
        check_compiler(torch_device)
    source = _source(model, shape)
    benches = [
        comparison.Comparison(source, settings, dtype, torch_device)
        if memory is None
        else comparison.MaxBatch(source, settings, dtype, torch_device, memory)
        for dtype in settings.dtypes
    ]
    with closing(_Rows(csv, benches[0].columns, torch_device)) as rows:
        code = _measure(benches, rows)
    measured, bandwidth = rows.measured, benches[0].bandwidth
    if as_json:
        summary = {"environment": rows.environment, "bandwidth": bandwidth}
        write_json({**summary, "rows": measured})
    elif measured:
        table = results.comparison_table if memory is None else results.max_batch_table
        write_text(table(measured))
        for line in results.missing_figures(measured) if memory is None else ():
            write_remark(line)
        if bandwidth is not None:
            write_remark(f"memory bandwidth measured: {bandwidth / 1e9:.1f} GB/s")
    return code


class _Rows:
    """The measured rows, each written at once to a CSV file, if there is one."""

    def __init__(self, csv: Path | None, columns: Sequence[str], device: torch.device) -> None:
        from h2okv_lab.tables import environment

        self.measured: list[Row] = []
        self.environment = environment(device)
        self._file = None if csv is None else CsvFile(csv, (*self.environment, *columns))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, row: Row) -> None:
        """Add a row; the CSV file has dictionaries as JSON."""
        self.measured.append(row)
        if self._file is not None:
            cells = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()}
            self._file.append({**self.environment, **cells})


def _source(model: str | None, shape: str | None) -> ModelSource:
    from h2okv_lab.benchmarking.model import ModelSource, parse_shape

    if model is None:
        return parse_shape("small" if shape is None else shape)
    if shape is not None:
        raise ValueError("--model and --shape exclude each other; give one of them")
    return ModelSource(model)


def _measure(benches: Sequence[Bench], rows: _Rows) -> int:
    """Measure all benches; `rows` keeps the finished ones on errors and Ctrl-C."""
    import torch

    from h2okv.offload.profile import measure_bandwidth

    total = sum(bench.num_units for bench in benches)
    with Progress("measuring", total, "runs") as progress:
        try:
            progress.advance(0, "memory bandwidth")
            bandwidth = measure_bandwidth(benches[0].device)
            for bench in benches:
                for row in bench.rows(progress.advance, bandwidth):
                    rows.add(row)
        except KeyboardInterrupt:
            write_remark(f"stopped; {len(rows.measured)} rows were finished")
            return INTERRUPTED
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "memory" not in str(error):
                raise
            reason = " ".join(str(error).split())[:200]
            remedy = "give a smaller batch or context, or fewer layers"
            raise ValueError(f"the memory ran out ({reason}); {remedy}") from error
    return 0
