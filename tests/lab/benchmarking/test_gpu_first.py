"""`benchmarks/gpu_first.py` on tiny sizes: on a CPU, and on a pretended GPU."""

import csv
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def script(import_benchmark):
    return import_benchmark("gpu_first")


@pytest.fixture
def run(script, tmp_path):
    """Return a function that runs the script and returns the rows of its file."""

    def run(*words, device="cpu"):
        path = tmp_path / "rows.csv"
        script.main(["--tiny", "--device", device, "--output", str(path), *words])
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    return run


@pytest.mark.filterwarnings("ignore:.*too few for good text")
@pytest.mark.parametrize(
    "letters", ["A,B,D", pytest.param("C,E,F,G,H,I,J,K", marks=pytest.mark.slow)]
)
def test_every_part_runs_on_a_cpu_or_says_that_it_needs_cuda(run, letters):
    rows = run("--parts", letters)
    assert {row["part"] for row in rows} == set(letters.split(","))
    assert {row["status"] for row in rows} == {"ok", "needs CUDA"}
    timed = [row for row in rows if row["status"] == "ok" and row["unit"] == "s"]
    assert {row["part"] for row in timed} == set(letters.split(",")) - {"J"}
    assert all(float(row["median"]) > 0 for row in timed)
    steps = [row for row in timed if row["measure"] == "step"]
    assert all(row["sdpa"] and float(row["gb_per_s"]) > 0 for row in steps)
    baselines = [row for row in steps if row["against"] == row["implementation"]]
    assert baselines and all(float(row["ratio"]) == 1 for row in baselines)


@pytest.fixture
def gpu(script, monkeypatch):
    """Pretend a GPU, whose kernels run nowhere."""
    pytest.importorskip("triton")
    pretended = pytest.importorskip("pretended_device")
    monkeypatch.setattr(script, "_part_a_again", lambda bench: None)  # a separate process
    monkeypatch.setattr(torch, "compile", lambda run, **options: run)
    timing = importlib.import_module("gpu_timing")
    monkeypatch.setattr(timing, "measure_bandwidth", lambda device, size: 1e12)
    with pretended.pretended_device(monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "pretended")
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        yield


# What only the real device has.
ABSENT = ("forward, cudnn", "a row for each KV head")


@pytest.mark.parametrize(
    "letters", ["A,D,G,J", *(pytest.param(name, marks=pytest.mark.slow) for name in "CEH")]
)
def test_the_parts_for_gpus_record_graphs(gpu, run, letters):
    rows = run("--parts", letters, device="cuda")
    failed = {row["implementation"] for row in rows if row["status"] not in ("ok", "")}
    assert failed <= {*ABSENT, *(row["implementation"] for row in rows if row["part"] == "J")}
    if "A" in letters:
        graphs = [row for row in rows if row["implementation"].endswith("graph")]
        assert {row["sdpa"] for row in graphs} == {"flash_attention", "cudnn_attention"}


def test_an_error_is_a_row_and_the_next_part_runs(script, run, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(script, "choose", fail)
    rows = run("--parts", "G,F")
    assert rows[0]["part"] == "G" and rows[0]["status"] == "RuntimeError: no such"
    assert rows[-1]["part"] == "F" and rows[-1]["status"] == "ok"


def test_a_part_ends_in_time(script, run, monkeypatch):
    def last_for_ever(_):
        while True:
            try:
                torch.ones(10).sum()
            except Exception:  # as libraries do
                continue

    monkeypatch.setitem(script.PARTS, "G", (1, last_for_ever))
    rows = run("--parts", "G", "--limit", "0.2")
    assert [row["status"] for row in rows] == ["stopped after 0 s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--parts", "A,Z"), "must be letters of A,B"), (("--device", "cuda"), "there is no GPU")],
)
def test_bad_words_are_refused(script, words, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        script.main(list(words))
    assert message in capsys.readouterr().err


FLEX_OPT = """
def add_parser_arguments(parser):
    for name in ("model", "path", "prompt-len", "gen-len", "log-file", "offload-dir", "overlap"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--percent", nargs=6)

def run_flexgen(args):
    tokens = AutoTokenizer.from_pretrained("facebook/opt-30b")(["a"], max_length=int(args.gen_len))
    if len(tokens.input_ids[0]) != 4:
        raise RuntimeError("no CUDA here")
    with open(args.log_file, "w") as file:
        file.write("prefill latency: 1.250 s\\tx: 1.0 token/s\\ndecode latency: 2.500 s\\t")
"""


def test_the_authors_command_runs_in_a_process_and_its_log_is_read(script, tmp_path, monkeypatch):
    authors_code = importlib.import_module("authors_code")

    def in_this_process(command, **_):
        authors_code.run_authors(command[2], command[3:])
        for name in ("flexgen", "flexgen.flex_opt"):
            del sys.modules[name]
        return SimpleNamespace(returncode=0)

    (tmp_path / "flexgen").mkdir()
    (tmp_path / "flexgen" / "flex_opt.py").write_text(FLEX_OPT, encoding="utf-8")
    words = f"{authors_code.FLAGS} --prompt-len 8 --gen-len".split()
    with pytest.raises(RuntimeError, match="no CUDA here"):
        authors_code.seconds_of_authors(tmp_path, [*words, "5"])
    monkeypatch.setattr(authors_code.subprocess, "run", in_this_process)
    assert authors_code.seconds_of_authors(tmp_path, [*words, "4"]) == (1.25, 2.5)
