import pytest

from h2okv.benchmarking.comparison import Row
from h2okv.benchmarking.max_batch import MaxBatchRow
from h2okv.benchmarking.serving import Load, LoadResult, Summary
from h2okv.benchmarking.tables import (
    comparison_table,
    max_batch_table,
    missing_figures,
    serving_remarks,
    serving_table,
)
from h2okv.benchmarking.timing import Percentiles, Spread

LARGE = Spread(1234.5678, 2345.6789, 3456.789)
STEP = Spread(0.12345, 1.23456, 2.34567)


def row(cache="h2o", **values):
    common = {
        "model": "llama-3-8b", "dtype": "bfloat16", "positions": "rolling", "context": 131_072,
        "batch": 256, "budget": 0.125, "cache": cache, "kv_bits": 8, "status": "ok", "rounds": 5,
        "steps": 8, "prefill_chunk": None, "compiled": True, "entries": 26_214,
        "cache_bytes": 123 * 2**30, "weight_bytes": 2**34, "prefill": LARGE, "decode": STEP,
        "tokens_per_second": 12_345.6, "peak_bytes": 139 * 2**30,
        "prefill_ratio": Spread(1.1, 1.234, 1.3),
        "speedup": Spread(1.234, 2.345, 3.456), "limit": 12.345, "share": 1.234,
        "step_bytes": 2**36, "achieved": 3.35e12, "bandwidth": 3.35e12,
    }  # fmt: skip
    return Row(**(common | values))


def max_batch_row():
    return MaxBatchRow(
        model="llama-3-8b", dtype="bfloat16", positions="rolling", context=131_072, budget=0.125,
        cache="h2o", kv_bits=8, rounds=5, steps=8, prefill_chunk=512, compiled=True,
        memory_bytes=2**37, weight_bytes=2**34, runtime_bytes=2**30, constant_bytes=2**30,
        cache_bytes=2**33, activation_bytes=2**33, max_batch=1234, is_verified=False,
        peak_bytes=139 * 2**30, run_batch=256, prefill=LARGE, decode=STEP,
        tokens_per_second=12_345.6, throughput_ratio=Spread(1.234, 2.345, 3.456),
    )  # fmt: skip


def load_result(**values):
    times = Percentiles(0.12345, 1.23456, 3.45678)
    numbers = {
        "requests": 1024, "finished": 1000, "failed": 3, "interrupted": 0,
        "errors": {"HTTP 500": 3}, "seconds": 1234.5, "requests_per_second": 12.34,
        "new_tokens_per_second": 12_345.6, "total_tokens_per_second": 123_456.7,
        "prompt_tokens": 32_768.4, "new_tokens": 512.5, "counted_by": "usage",
        "first_token": times, "per_token": times, "gap": times, "lateness": times,
    }  # fmt: skip
    summary = Summary(**(numbers | values))
    load = Load(None, 1234.5, 1024)
    return LoadResult("http://127.0.0.1:8000", "m", "", load, summary, {"HTTP 500": "NaN"})


@pytest.mark.parametrize(
    ("table", "units"),
    [
        (comparison_table([row(), row("dynamic", budget=None, kv_bits=None)]), ("ms", "MiB")),
        (max_batch_table([max_batch_row()]), ("ms", "MiB", "by arithmetic")),
        (serving_table([load_result()]), ("ms", "p50/95/99")),
    ],
    ids=["comparison", "max_batch", "serving"],
)
def test_a_table_fits_a_terminal_and_names_its_units(table, units):
    lines = table.splitlines()
    assert max(map(len, lines)) <= 100
    assert all(unit in table for unit in units)


def test_no_figure_is_wrapped():
    table = comparison_table([row()])
    assert "h2o 12.5%, 8 bits" in table and "2.35 [1.23, 3.46]" in table
    assert "bfloat16, context 131,072, batch 256" in table
    assert "1,234" in max_batch_table([max_batch_row()])
    assert "32,768 + 512" in serving_table([load_result()])


def test_a_cache_without_figures_is_said_once():
    rows = [
        row(),
        row("quantized", status="not installed"),
        row("quantized", status="not installed"),
    ]
    assert missing_figures(rows) == ["quantized: not installed"]
    assert "quantized" not in comparison_table(rows)


def test_what_a_reader_must_know_of_a_load():
    told = serving_remarks([load_result(interrupted=2, counted_by="pieces")])
    assert any("3 x HTTP 500: NaN" in line for line in told)
    assert any("2 requests were running" in line for line in told)
    assert any("pieces of the stream" in line for line in told)
    assert any("late (p95)" in line for line in told)
