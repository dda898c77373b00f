import pytest

from h2okv_lab.benchmarking.results import (
    comparison_table,
    interleaved,
    max_batch_table,
    missing_figures,
    quartiles,
    ratios,
    triple,
)


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


def spread(name, lower, median, upper):
    return dict(zip(triple(name), (median, lower, upper), strict=True))


LARGE = spread("prefill", 1234.5678, 2345.6789, 3456.789)
STEP = spread("decode", 0.12345, 1.23456, 2.34567)


def row(cache="h2o", **values):
    common = {
        "dtype": "bfloat16", "context": 131_072, "batch": 256, "budget": 0.125, "cache": cache,
        "spec": f"{cache}:12.5%,bits=8" if cache == "h2o" else cache,
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


@pytest.mark.parametrize(
    ("table", "units"),
    [
        (comparison_table([row(), row("dynamic", spec="dynamic, flash")]), ("ms", "MiB")),
        (max_batch_table([max_batch_row()]), ("ms", "MiB", "by arithmetic")),
    ],
    ids=["comparison", "max_batch"],
)
def test_a_table_fits_a_terminal_and_names_its_units(table, units):
    lines = table.splitlines()
    assert max(map(len, lines)) <= 100
    assert all(unit in table for unit in units)


def test_no_figure_is_wrapped():
    table = comparison_table([row()])
    assert "h2o:12.5%,bits=8" in table and "2.35 [1.23, 3.46]" in table
    assert "bfloat16, context 131,072, batch 256" in table
    assert "1,234" in max_batch_table([max_batch_row()])


def test_a_cache_without_figures_is_reported_once():
    rows = [
        row(),
        row("quantized", status="not installed"),
        row("quantized", status="not installed"),
    ]
    assert missing_figures(rows) == ["quantized: not installed"]
    assert "quantized" not in comparison_table(rows)
