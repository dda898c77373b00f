import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from h2okv_lab.analysis.measurements import MEASUREMENTS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    words = [*"etaoinshrdlu", "the", "cat", "mat", "dog", "log"]
    torch.manual_seed(0)
    chosen = [words[i] for i in torch.randint(len(words), (200,)).tolist()]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(chosen), encoding="utf-8")
    return path


def test_analyze_writes_a_report(h2okv_command, model_folder, text_file, tmp_path):
    out = tmp_path / "new" / "report"
    done = h2okv_command("analyze", "--model", model_folder, "--text", text_file, "--out", out)
    assert (done.code, done.out) == (0, f"{out / 'report.html'}\n"), done.err
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("<img ") == 9 + 3
    assert "Not measured: Neurons (--neurons)." in page
    tables = {table for m in MEASUREMENTS if not m.is_option for table in m.tables}
    assert {path.stem for path in out.glob("*.csv")} == tables


def test_quick_runs_only_measurements_of_full_attention(
    h2okv_command, model_folder, text_file, tmp_path
):
    done = h2okv_command(
        "analyze", "--model", model_folder, "--text", text_file, "--out", tmp_path, "--quick"
    )
    assert done.code == 0, done.err
    tables = {table for m in MEASUREMENTS if m.quick for table in m.tables}
    assert {path.stem for path in tmp_path.glob("*.csv")} == tables
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Policies by budget (--only policies, --only retention)" in page


def test_only_runs_the_named_measurements(h2okv_command, model_folder, text_file, tmp_path):
    base = ["analyze", "--model", model_folder, "--text", text_file, "--out", tmp_path / "new"]
    done = h2okv_command(*base, "--only", "sinks,ablation")
    assert done.code == 0, done.err
    assert {path.stem for path in (tmp_path / "new").glob("*.csv")} == {"sinks", "ablation"}
    done = h2okv_command(*base, "--only", "sinks", "--quick")
    assert done.code == 2 and "give one of them" in done.err


def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    h2okv_command, monkeypatch, tmp_path
):
    def load(*_):
        raise AssertionError("the folder was to be looked at first")

    monkeypatch.setattr("h2okv.models.loading.describe", load)
    (tmp_path / "file").write_text("x")
    for folder in ("/proc/x", "/proc/x/y", tmp_path / "file", tmp_path / "file" / "report"):
        done = h2okv_command("analyze", "--out", folder)
        assert done.code == 2 and done.err.count("\n") == 1
        assert f"--out '{folder}' cannot be written" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_ctrl_c_keeps_finished_measurements(model_folder, text_file, tmp_path):
    command = [sys.executable, "-m", "h2okv", "analyze", "--model", str(model_folder)]
    command += ["--text", str(text_file), "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "ablation.csv").is_file() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "measurements are finished" in err and "the same command continues" in err
    assert "Traceback" not in err
    assert (tmp_path / "sparsity.csv").is_file()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "is empty; give a file"),
        (" \n \n", "is empty; give a file"),
        ("the cat", "must have at least 128 tokens"),
    ],
)
def test_a_too_short_text_is_refused(h2okv_command, model_folder, tmp_path, content, sentence):
    path = tmp_path / "short.txt"
    path.write_text(content)
    out = tmp_path / "report"
    done = h2okv_command("analyze", "--model", model_folder, "--text", path, "--out", out)
    assert done.code == 2
    assert done.err.startswith("h2okv: ") and done.err.count("\n") == 1
    assert sentence in done.err
    assert not out.exists()


def test_bad_options(h2okv_command, model_folder, text_file, tmp_path):
    base = ["analyze", "--model", model_folder, "--out", tmp_path / "report"]
    done = h2okv_command(*base, "--text", text_file, "--tokens", 5)
    assert done.code == 2 and "--tokens 5 is too few; give 128 or more" in done.err
    done = h2okv_command("analyze", "--model", model_folder, "--text", text_file)
    assert done.code == 2 and "--out" in done.err


@pytest.mark.parametrize("name", ["scipy", "matplotlib"])
def test_a_missing_extra_is_named_before_the_work(
    h2okv_command, model_folder, text_file, tmp_path, monkeypatch, name
):
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "report"
    done = h2okv_command("analyze", "--model", model_folder, "--text", text_file, "--out", out)
    assert done.code == 2
    assert f"{name} is not installed" in done.err and "'.[analysis]'" in done.err
    assert not out.exists()


def test_a_folder_of_another_model_is_refused(
    h2okv_command, model_folder, save_model, text_file, tmp_path
):
    (tmp_path / "settings.json").write_text('{"model": "another"}')
    done = h2okv_command("analyze", "--model", model_folder, "--text", text_file, "--out", tmp_path)
    assert done.code == 2
    assert "was begun with model another, not " in done.err


def test_a_model_without_attention_access(h2okv_command, text_file, tokenizer, tmp_path):
    folder = tmp_path / "bloom"
    config = BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=300)
    BloomForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    done = h2okv_command(
        "analyze", "--model", folder, "--text", text_file, "--out", tmp_path / "report"
    )
    assert done.code == 2
    assert "computes attention itself" in done.err
