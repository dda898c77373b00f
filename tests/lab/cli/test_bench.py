import csv
import json
import re

import pytest
import torch

import h2okv.offload.profile as profile
import h2okv_lab.benchmarking.caches as peer
import h2okv_lab.benchmarking.comparison as comparison
from h2okv.offload.profile import measure_bandwidth
from h2okv_lab.benchmarking.comparison import COLUMNS
from h2okv_lab.tables import environment

SHAPE = "hidden=64,layers=2,heads=4,kv_heads=2,intermediate=96,vocab=300,window=1024"
TINY = ("bench", "--shape", SHAPE, "--contexts", "64", "--batches", "1", "--budget", "0.25",
        "--rounds", "1", "--no-peak")  # fmt: skip


@pytest.fixture(autouse=True)
def _small_buffer(monkeypatch):
    monkeypatch.setattr(
        profile, "measure_bandwidth", lambda device: measure_bandwidth(device, 2**20)
    )


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_bench_writes_table_and_csv(h2okv_command, tmp_path):
    rows = tmp_path / "rows.csv"
    done = h2okv_command(
        *TINY, "--contexts", "32,64", "--runners", "dynamic,static,h2o", "--csv", rows
    )
    assert done.code == 0, done.err
    assert "h2o:25%" in done.out and "speed-up" in done.out
    assert "memory bandwidth measured" in done.err
    measured = rows_of(rows)
    assert tuple(measured[0]) == (*environment(torch.device("cpu")), *COLUMNS)
    assert [(row["context"], row["cache"]) for row in measured] == [
        (context, cache) for context in ("32", "64") for cache in ("dynamic", "static", "h2o")
    ]
    assert all(float(row["decode"]) > 0 for row in measured)
    assert {row["threads"] for row in measured} == {"1"}


def test_a_second_run_appends_rows(h2okv_command, tmp_path):
    rows = tmp_path / "rows.csv"
    for _ in range(2):
        assert h2okv_command(*TINY, "--runners", "h2o", "--csv", rows).code == 0
    assert len(rows_of(rows)) == 2


def test_bench_json_has_rows_and_environment(h2okv_command):
    done = h2okv_command(*TINY, "--runners", "dynamic,h2o", "--dtype", "float32,bfloat16", "--json")
    result = json.loads(done.out)
    assert [(row["dtype"], row["cache"]) for row in result["rows"]] == [
        (dtype, cache) for dtype in ("float32", "bfloat16") for cache in ("dynamic", "h2o")
    ]
    assert result["bandwidth"] > 0
    assert result["rows"][1]["positions"] == "original"


def test_kv_bits_add_rows(h2okv_command, tmp_path):
    rows = tmp_path / "rows.csv"
    caches = [word for text in ("h2o", "bits=8", "bits=4") for word in ("--cache", text)]
    options = ("--runners", "dynamic,static,h2o", *caches, "--csv", rows)
    done = h2okv_command(*TINY, *options)
    assert done.code == 0, done.err
    assert "h2o:25%,bits=8" in done.out and "h2o:25%,bits=4" in done.out
    measured = rows_of(rows)
    assert [(row["cache"], row["kv_bits"]) for row in measured] == [
        ("dynamic", ""), ("static", ""), ("h2o", ""), ("h2o", "8"), ("h2o", "4"),
    ]  # fmt: skip
    sizes = [int(row["cache_bytes"]) for row in measured if row["cache"] != "static"]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4


def test_ctrl_c_keeps_finished_rows(h2okv_command, tmp_path, monkeypatch):
    measure = comparison.Comparison._time

    def interrupted(self, contestants, context, batch):
        if batch == 2:
            raise KeyboardInterrupt
        return measure(self, contestants, context, batch)

    monkeypatch.setattr(comparison.Comparison, "_time", interrupted)
    rows = tmp_path / "rows.csv"
    options = ("--batches", "1,2", "--runners", "dynamic,h2o")
    done = h2okv_command(*TINY, *options, "--csv", rows)
    assert done.code == 130
    assert "stopped; 2 rows were finished" in done.err
    assert "h2o:25%" in done.out
    assert [row["cache"] for row in rows_of(rows)] == ["dynamic", "h2o"]


def test_a_checkpoint_is_measured_too(h2okv_command, model_folder):
    done = h2okv_command("bench", "--model", model_folder, *TINY[3:], "--runners", "h2o", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["rows"][0]["model"] == str(model_folder)


def test_missing_packages_are_named_below_the_table(h2okv_command, monkeypatch):
    monkeypatch.setattr(peer, "is_optimum_quanto_available", lambda: False)
    monkeypatch.setattr(peer, "is_hqq_available", lambda: False)
    done = h2okv_command(*TINY)
    assert done.code == 0, done.err
    assert "quantized: not installed (optimum-quanto or hqq)" in done.err


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--contexts", "2000"), "context window of 1024"),
        (("--contexts", "many"), "--contexts 'many'"),
        (("--budget", "2.5"), "budget 2.5"),
        (("--budget", "full"), "--runners dynamic is the full cache"),
        (("--cache", "h2o", "--cache", "every=8"), "evict_every must be the same"),
        (("--model", "bundled"), "--model and --shape exclude each other"),
        (("--batches", "100000000"), "bytes (.*) are available"),
        (("--memory", "lots"), "'lots'"),
        (("--memory", "1KiB"), "bytes of weights"),
    ],
)
def test_bad_input_is_one_sentence(h2okv_command, options, word):
    done = h2okv_command(*TINY, *options)
    assert done.code == 2
    assert done.err.count("\n") == 1 and done.out == ""
    assert re.search(word, done.err), done.err


def test_heavy_recent_and_sink_are_options_of_bench(h2okv_command, tmp_path):
    run = tuple(word for word in TINY if word not in ("--budget", "0.25"))
    options = ("--runners", "h2o", "--budget", "8+16", "--cache", "sink=4", "--json")
    done = h2okv_command(*run, *options)
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)["rows"]
    assert (row["budget"], row["entries"]) == ("4+8+16", 28)
