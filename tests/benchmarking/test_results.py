import pytest

from h2okv.benchmarking.results import (
    comparison_table,
    interleaved,
    max_batch_table,
    missing_figures,
    percentiles,
    quartiles,
    ratios,
    serving_table,
    triple,
)
from h2okv.benchmarking.serving import COLUMNS


def test_interleaved_alternates_the_order():
    turns = [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert list(interleaved("ab", 3)) == turns


def test_quartiles():
    columns = quartiles("t", [5.0, 1.0, 3.0, 2.0, 4.0])
    assert columns == {"t": 3.0, "t_lower": 2.0, "t_upper": 4.0}
    assert set(quartiles("t", [7.0]).values()) == {7.0}
    assert quartiles("t", []) == {}


def test_ratios_are_within_rounds():
    # The ratio of the medians would be 1; in two of three rounds it is 2.
    assert quartiles("r", ratios([2.0, 4.0, 3.0], [1.0, 2.0, 30.0]))["r"] == 2.0


def test_percentiles():
    columns = percentiles("t", [float(n) for n in range(101)])
    assert columns == pytest.approx({"t_p50": 50.0, "t_p95": 95.0, "t_p99": 99.0})
    columns = percentiles("t", [None, 3.0, None, 1.0])
    assert columns == pytest.approx({"t_p50": 2.0, "t_p95": 2.9, "t_p99": 2.98})
    assert set(percentiles("t", [None]).values()) == {None}


def spread(name, lower, median, upper):
    return dict(zip(triple(name), (median, lower, upper), strict=True))


LARGE = spread("prefill", 1234.5678, 2345.6789, 3456.789)
STEP = spread("decode", 0.12345, 1.23456, 2.34567)


def row(cache="h2o", **values):
    common = {
        "dtype": "bfloat16", "context": 131_072, "batch": 256, "budget": 0.125, "cache": cache,
        "kv_bits": 8, "status": "ok", "cache_bytes": 123 * 2**30, **LARGE, **STEP,
        "tokens_per_second": 12_345.6, "peak_bytes": 139 * 2**30,
        **spread("prefill_ratio", 1.1, 1.234, 1.3), **spread("speedup", 1.234, 2.345, 3.456),
        "limit": 12.345, "share": 1.234,
    }  # fmt: skip
    return common | values


def max_batch_row():
    return row() | {
        "cache_bytes": 2**33, "activation_bytes": 2**33, "max_batch": 1234, "is_verified": False,
        "run_batch": 256, **spread("throughput_ratio", 1.234, 2.345, 3.456),
    }  # fmt: skip


def load_result(**values):
    times = (0.12345, 1.23456, 3.45678)
    numbers = {
        "server": "http://127.0.0.1:8000", "clients": None, "rate": 1234.5, "requests": 1024,
        "finished": 1000, "failed": 3, "interrupted": 0, "errors": {"HTTP 500": 3},
        "messages": {"HTTP 500": "NaN"}, "new_tokens_per_second": 12_345.6,
        "prompt_tokens": 32_768.4, "new_tokens": 512.5, "counted_by": "usage",
    }  # fmt: skip
    for name in ("first_token", "per_token", "gap", "lateness"):
        numbers |= zip(triple(name, "_p50", "_p95", "_p99"), times, strict=True)
    return numbers | values


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


def test_a_cache_without_figures_is_reported_once():
    rows = [
        row(),
        row("quantized", status="not installed"),
        row("quantized", status="not installed"),
    ]
    assert missing_figures(rows) == ["quantized: not installed"]
    assert "quantized" not in comparison_table(rows)


def test_a_file_of_loads_keeps_its_columns():
    points = [
        f"{name}_{point}"
        for name in ("first_token", "per_token", "gap", "lateness")
        for point in ("p50", "p95", "p99")
    ]
    expected = (
        "server", "model", "loop", "clients", "rate", "requests", "finished", "failed",
        "interrupted", "errors", "seconds", "requests_per_second", "new_tokens_per_second",
        "total_tokens_per_second", "prompt_tokens", "new_tokens", "counted_by", *points,
    )  # fmt: skip
    assert expected == COLUMNS
