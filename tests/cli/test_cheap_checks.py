"""Checks without a model or tensors must refuse before torch is imported."""

import json
import subprocess
import sys

import pytest

MISSING = "no-such-file"
CACHE = {
    "--policy h20": "policy 'h20' is unknown; did you mean h2o",
    "--cache h20:20%": "policy 'h20' is unknown; did you mean h2o",
    "--cache scoring=means": "scoring 'means' is unknown",
    "--cache bits=3": "kv_bits must be 8, 6 or 4, got 3",
    "--cache bit=8": "option 'bit' is unknown; did you mean bits",
    "--budget much": "--budget 'much' is not an amount",
    "--budget 20% --cache h2o:64": "--budget 20% has no effect, as --cache has one",
    "--policy h2o --cache h2o": "--policy h2o has no effect, as --cache names one",
    "--heavy 64": "--heavy is gone; give --budget with heavy+recent, such as --budget 64+64",
    "--budget 20 % hello": "'20 %' of --budget is two arguments; leave out the space",
    "--budget=10+10 % hello": "'10+10 %' of --budget is two arguments",
    f"--cache layers={MISSING}": f"'{MISSING}' cannot be read",
}
MODEL = {
    "--model smolm2": "did you mean smollm2",
    "--model ./nowhere": "--model './nowhere' does not exist",
    "--model nowhere.gguf": "--model 'nowhere.gguf' does not exist",
    "--model no-gguf.gguf": "--model 'no-gguf.gguf' is not a GGUF file",
    "--model no-such-user/nothing": "the Hub cannot be reached",
    "--dtype int4": "--dtype must be auto, float32, bfloat16 or float16, got 'int4'",
    "--device cuda:1": "--device is gone; give the environment variable H2OKV_DEVICE=cuda:1",
}
TOPK = {"--policy topk": "policy topk chooses entries for each query"}
SAMPLING = {
    "--max-new-tokens 0": "--max-new-tokens must be a whole number",
    "--seed -1": "--seed -1",
}
BOTH = CACHE | MODEL
TEXT = {f"--text {MISSING}": f"--text '{MISSING}' cannot be read"}
COMMANDS = {
    "generate": BOTH | TOPK | SAMPLING | {
        f"--file {MISSING}": f"--file '{MISSING}' cannot be read",
        "--file .": "--file '.' cannot be read (it is a folder)",
        "--file empty.txt": "--file 'empty.txt' is empty",
        "--file latin1.txt": "--file 'latin1.txt' is not UTF-8",
        "--pin robot hello": "pin 'robot' is unknown",
        "--compare recent hello": "--compare must be full, got 'recent'",
        "--weight-bits 8 hello": "--weight-bits 8 is not known; give 4",
    },
    "demo": MODEL | {"--max-new-tokens 0": "--max-new-tokens must be a whole number"},
    "chat": BOTH | TOPK | SAMPLING | {
        f"--load {MISSING}": f"--load '{MISSING}' cannot be read",
        "--load latin1.txt": "--load 'latin1.txt' is not a saved chat",
        "--budget 20%": "is a fraction of a prompt, but a chat has no end",
        "--cache positions=rolled": "positions='rolled' is unknown",
    },
    "serve": BOTH | TOPK | {
        "--port 99999": "--port must be a whole number from 0 to 65535",
        "--pin robot": "pin 'robot' is unknown",
        "--max-prefill-tokens 0": "--max-prefill-tokens must be a whole number",
        "--timeout 0": "--timeout must be a number from",
        "--memory 8 GiB": "'8 GiB' of --memory is two arguments",
        "--memory much": "--memory 'much' is not an amount of memory",
    },
    "batch --input in.jsonl --output out.jsonl": BOTH | TOPK | SAMPLING | {
        "--weights moon": "--weights must be auto, device, cpu, disk, or percentages",
        "--weights file": "disk=60, got 'file'",
        "--batch 0": "--batch '0' is not a batch size; give 1 or more",
        "--batch many": "--batch 'many' is not a batch size; give 1 or more, or auto",
        "--weights disk=70,cpu=70": "adds up to 140 percent",
        "--weights disk=50,disk=50": "got 'disk=50,disk=50'",
        "--memory lots": "--memory 'lots' is not an amount of memory; give",
        "--replicas 2": "--replicas 2",
        "--ray --replicas 0": "--replicas must be a whole number of 1 or more, got 0",
        "--ray --memory 4GiB": "--memory is for one machine, and with --ray",
        "--ray --weights cpu": "--weights is for one machine, and with --ray",
        "--weight-bits 3": "--weight-bits 3 is not known",
        f"--input {MISSING}": f"--input '{MISSING}' cannot be read",
        "--input -": "--input '-' cannot be read (standard input is not a file)",
        "--output -": "--output '-' cannot be written (standard output is not a file)",
        "--output nowhere/out.jsonl": "--output 'nowhere/out.jsonl' cannot be written",
        "--output /dev/null": "--output '/dev/null' cannot be written (it is not a file)",
    },
    "plan": CACHE | {
        "smolm2": "did you mean smollm2",
        "--weights moon": "got 'moon'",
        "--weight-bits 5": "--weight-bits 5 is not known; give 8",
        "--prompt-tokens 0": "--prompt-tokens must be a whole number of 1 or more, got 0",
        "--memory much": "--memory 'much' is not an amount of memory",
    },
    "stream --text text.txt": BOTH | TOPK | TEXT | {
        f"--text text.txt --input {MISSING}": f"--input '{MISSING}' cannot be read",
        "--input in.jsonl": "both --text and --input are given",
        "--csv nowhere/rows.csv": "--csv 'nowhere/rows.csv' cannot be written",
        "--csv .": "is a folder",
        "--plot picture.bmp": "must end in .png, .svg, .pdf",
        "--every 0": "--every must be a whole number of 1 or more, got 0",
        "--tokens -1": "--tokens must be a whole number of 1 or more, got -1",
        "--cache h2o:8 --cache every=8": "several caches are chosen, and this command has one",
    },
    "eval needle --csv rows.csv": BOTH | TEXT | {
        "--compression none": "--compression must be query-aware, query-agnostic or both, got",
        "--lengths much": "--lengths 'much' is not a list",
        "--csv nowhere/rows.csv": "--csv 'nowhere/rows.csv' cannot be written",
    },
    "eval perplexity --csv rows.csv": BOTH | TEXT,
    "eval fidelity": BOTH | {
        f"--data {MISSING}": f"--data '{MISSING}' cannot be read",
        "--protocol none": "--protocol must be decode or block, got 'none'",
        "--plot curve.txt": "is not the name of a figure",
        "--csv text.txt": "--csv 'text.txt' is not a table of h2okv eval; choose another file",
        "--recommend 1.5": "--recommend must be a share such as 0.02 or '2%', got '1.5'",
    },
    "eval layers": MODEL | TEXT | {
        "--budget full": "--budget must be a fraction of the text below 1, got full",
        "--out nowhere/layers.json": "--out 'nowhere/layers.json' cannot be written",
    },
    "eval recall --csv rows.csv --input in.jsonl": BOTH | {
        f"--input {MISSING}": f"--input '{MISSING}' cannot be read",
    },
    "eval summarize --csv rows.csv --input in.jsonl": BOTH | {
        f"--input {MISSING}": f"--input '{MISSING}' cannot be read",
        f"--references {MISSING}": f"--references '{MISSING}' cannot be read",
        "--budget ,": "--budget is empty",
        "--too-long cut": "--too-long must be refuse or skip, got 'cut'",
        "--batch 0": "--batch must be a whole number of 1 or more, got 0",
        "--limit 0": "--limit must be a whole number of 1 or more, got 0",
        "--max-new-tokens 0": "--max-new-tokens must be a whole number of 1 or more, got 0",
        "--temperature -1": "--temperature must be a number from 0 to 100",
        "--csv none/x.csv": "its folder does not exist",
    },
    "eval sweep figure4 --out results": MODEL | {
        f"--data {MISSING}": f"--data '{MISSING}' is not a folder",
        "--batch 0": "--batch must be a whole number of 1 or more, got 0",
    },
    "eval sweep --out results": {
        "figure5": "experiment 'figure5' is unknown; did you mean",
        "nowhere.yaml": "experiment 'nowhere.yaml' cannot be read",
    },
    "lm-eval --tasks copa": {
        "--model_args pretrained=smolm2": "did you mean smollm2",
        "--model_args pretrained=bundled,policy=h20": "policy 'h20' is unknown",
        f"--data {MISSING}": f"--data '{MISSING}' is not a folder",
    },
    "bench": BOTH | TOPK | {
        "--shape giant": "--shape 'giant' is unknown",
        "--runners dynamic,none": "--runners must be dynamic, static, quantized or h2o, got",
        "--max-batch": "--max-batch is gone; give --memory alone",
        "--csv nowhere/rows.csv": "--csv 'nowhere/rows.csv' cannot be written",
    },
    "analyze --out report": MODEL | TEXT | {
        "--only sink": "--only: measurement 'sink' is unknown; did you mean sinks",
        "--tokens 127": "--tokens 127 is too few; give 128 or more",
        "--out text.txt/report": "--out 'text.txt/report' cannot be written",
    },
    "view": MODEL | TEXT | {
        "--tokens 7": "--tokens 7 is too few; give 8 or more",
        "--policy h20": "policy 'h20' is unknown",
        "--export nowhere/page.html": "--export 'nowhere/page.html' cannot be written",
        "--export .": "--export '.' cannot be written (it is a folder)",
        "--policy h2o,h3o": "policy 'h3o' is unknown",
        "--port 99999": "--port must be a whole number from 0 to 65535",
    },
    "models pull": {"smolm2": "did you mean smollm2"},
    "env": {"--model smolm2": "did you mean smollm2"},
}  # fmt: skip
_RUN = """
import contextlib, io, json, sys
from h2okv.cli.app import run
for line in sys.stdin.read().splitlines():
    with contextlib.redirect_stderr(io.StringIO()) as told:
        code = run(line.split())
    print(json.dumps([line, code, told.getvalue(), "torch" in sys.modules]), flush=True)
    assert "torch" not in sys.modules, line
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "in.jsonl").write_text('{"prompt": "some text"}')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin1.txt").write_bytes("caf\xe9 ".encode("latin-1") * 9)
    (tmp_path / "no-gguf.gguf").write_text("some text")
    return tmp_path


def test_cheap_checks_do_not_import_torch(folder):
    """Run all lines in one process, and check their refusals and that torch is not imported."""
    expected = {
        f"{command} {options}": sentence
        for command, location in COMMANDS.items()
        for options, sentence in location.items()
    }
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        cwd=folder,
        input="\n".join(expected),
        capture_output=True,
        text=True,
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [
        (line, code, error)
        for line, code, error, heavy in outcomes
        if heavy or code != 2 or expected[line] not in error or error.count("\n") != 1
    ]
    assert not wrong, done.stderr
    assert len(outcomes) == len(expected), done.stderr


def test_a_system_message_is_a_text_or_a_file_in_every_command(tmp_path, monkeypatch):
    from h2okv.cli.readers import text_or_file

    monkeypatch.chdir(tmp_path)
    (tmp_path / "brief.txt").write_text("Be brief.\n", encoding="utf-8")
    (tmp_path / "brief").write_text("Be short.\n", encoding="utf-8")
    texts = {
        "Answer briefly.": "Answer briefly.", "brief.txt": "Be brief.", "@brief.txt": "Be brief.",
        "brief": "Be short.", "": "", "a\nb": "a\nb", "Briefly.": "Briefly.",
        "x" * 5000: "x" * 5000,
    }  # fmt: skip
    for text, message in texts.items():
        assert text_or_file("--system", text) == message
    for missing in ("@nowhere", "nowhere.txt", "folder/nowhere"):
        name = missing.removeprefix("@")
        with pytest.raises(ValueError, match=f"--system '{name}' cannot be read"):
            text_or_file("--system", missing)


@pytest.mark.parametrize("name", ["./nowhere", "smolm2", "SmolLM2", "nowhere.gguf", " "])
def test_a_missing_model_is_named_by_argument_and_by_option(name, capsys):
    from h2okv.cli.app import run
    from h2okv.models.names import check_name

    with pytest.raises(ValueError, match="^model ") as caught:
        check_name(name)
    assert "--model" not in str(caught.value)
    assert run(["plan", name]) == 2
    assert capsys.readouterr().err.startswith("h2okv: model ")
    assert run(["generate", "--model", name, "hello"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("h2okv: --model ")
    assert ("did you mean smollm2" in err) == name.lower().startswith("smol")
