"""The command: its imports, the list of commands and their help."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import h2okv
from h2okv.cli.app import COMMANDS, main
from h2okv.cli.args import PER_QUERY, helps
from h2okv.cli.help_page import PANELS
from h2okv.cli.readers import memory
from h2okv.config import BEST, POLICIES, SCORINGS
from h2okv.policy.scoring import SCORINGS as CLASSES
from h2okv_lab import masking
from h2okv_lab.cli.analyze import MEASUREMENTS, MIN_TOKENS, MIN_VIEWED
from h2okv_lab.cli.bench import RUNNERS, SHAPES
from h2okv_lab.cli.eval import COMPRESSIONS, EXPERIMENTS

_HEAVY = """
import json, sys
from h2okv.cli.app import run
code = run(sys.argv[1:])
heavy = sorted({"torch", "transformers", "numpy"} & set(sys.modules))
print(json.dumps([code, heavy]), file=sys.stderr)
"""


def test_help_and_version_import_neither_torch_nor_transformers():
    for args in (["--version"], ["--help"], ["generate", "--help"], ["serve", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", _HEAVY, *args], capture_output=True, text=True, check=True
        )
        assert json.loads(done.stderr) == [0, []], args
        assert done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_summary_and_an_example(h2okv_command, name):
    outcome = h2okv_command(name, "--help")
    assert outcome.code == 0
    assert f"h2okv {name} " in outcome.out.split("Usage:")[1]
    assert f"    h2okv {name}" in helps()[name].partition("Example")[2]
    listed = h2okv_command("--help").out
    assert name in listed


def test_listed_names_match_the_registries():
    assert (*h2okv.policy_names(), BEST) == POLICIES
    assert h2okv.policy_names() == POLICIES[:-1]
    assert tuple(masking.PER_QUERY) == PER_QUERY
    assert tuple(scoring.name for scoring in CLASSES) == SCORINGS
    from h2okv_lab.analysis.measurements import MEASUREMENTS as measurements
    from h2okv_lab.analysis.study import MIN_TOKENS as min_tokens
    from h2okv_lab.analysis.viewer import MIN_TOKENS as min_viewed
    from h2okv_lab.benchmarking.caches import RUNNERS as runners
    from h2okv_lab.benchmarking.model import SHAPES as shapes
    from h2okv_lab.cli.eval import NEEDLE, QUESTION
    from h2okv_lab.evaluation import sweep
    from h2okv_lab.evaluation.tasks import recall
    from h2okv_lab.evaluation.tasks.recall import NeedleTask, Recall

    assert tuple(measurement.name for measurement in measurements) == MEASUREMENTS
    assert (min_tokens, min_viewed) == (MIN_TOKENS, MIN_VIEWED)
    assert recall.COMPRESSIONS == COMPRESSIONS
    assert EXPERIMENTS == sweep.EXPERIMENTS
    assert (NeedleTask.statement, NeedleTask.question) == (NEEDLE, QUESTION)
    assert (NeedleTask.max_new_tokens, Recall.max_new_tokens) == (16, 128)
    assert (tuple(runners), tuple(shapes)) == (RUNNERS, SHAPES)


def test_an_interrupt_before_anything_is_imported_is_one_line(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    paths = os.pathsep.join((str(tmp_path), str(Path(h2okv.__file__).parents[1])))
    done = subprocess.run(
        [sys.executable, "-m", "h2okv", "--help"],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "h2okv: interrupted.\n")


def test_a_further_interrupt_while_the_process_ends_has_no_traceback(monkeypatch):
    monkeypatch.setattr("h2okv.cli.app.run", lambda _: 3)
    monkeypatch.setattr("threading.enumerate", list)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit, match="3"):
            main()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
@pytest.mark.parametrize("option", ["--version", "--help"])
def test_a_full_disk_under_stdout_is_one_line(option):
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "h2okv", option],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("h2okv: the output has an error (No space left on device)")


def test_shell_completion_lists_commands(monkeypatch):
    done = subprocess.run(
        [sys.executable, "-m", "h2okv"],
        env={
            "_H2OKV_COMPLETE": "complete_bash",
            "COMP_WORDS": "h2okv ge",
            "COMP_CWORD": "1",
            "PYTHONPATH": ":".join(sys.path),
        },
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["generate"]


_ONLY_IMPORTED = """
import sys
import h2okv
assert "transformers" not in sys.modules and "torch" not in sys.modules
from transformers import LlamaConfig, LlamaForCausalLM
import torch
config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=20,
                     num_attention_heads=2, num_key_value_heads=2, eos_token_id=None)
model = LlamaForCausalLM._from_config(config, attn_implementation="h2o").eval()
ids = torch.tensor([[1, 2, 3]])
assert model(ids).logits.shape == (1, 3, 20)
cache = h2okv.H2OCache(config, 2, 2)
assert model.generate(ids, past_key_values=cache, max_new_tokens=5).shape == (1, 8)
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_importing_the_package_alone_registers_its_attention(order):
    code = _ONLY_IMPORTED
    if order == "after":
        code = "import transformers.modeling_utils\n" + code.replace('assert "', 'True or "')
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dir_lists_public_names_and_unknown_names_raise():
    assert set(h2okv.__all__) <= set(dir(h2okv))
    with pytest.raises(AttributeError, match="no attribute 'H3OCache'"):
        h2okv.H3OCache  # noqa: B018


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GiB", 8 * 2**30), ("500 MB", 500_000_000), ("1.5kib", 1536), ("12345", 12345)],
)
def test_amounts_of_memory(text, expected):
    assert memory("--memory", text) == expected


@pytest.mark.parametrize("text", ["", "much", "8 GiBs", "-1GiB", "0"])
def test_an_invalid_amount_of_memory_is_refused(text):
    with pytest.raises(ValueError, match="--memory"):
        memory("--memory", text)


def test_without_arguments_it_shows_five_things_to_do(h2okv_command):
    outcome = h2okv_command()
    assert outcome.code == 0
    commands = [line.split()[1] for line in outcome.out.splitlines() if line.startswith("    ")]
    assert len(commands) == 5 and set(commands) <= set(COMMANDS)
    assert max(map(len, outcome.out.splitlines())) <= 80


ON_MORE_LINES = {"--policy", "--cache"}  # they list names


@pytest.mark.parametrize("name", [*COMMANDS, *(key for key in helps() if " " in key)])
def test_help_has_a_line_for_each_option(h2okv_command, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    text = h2okv_command(*name.split(), "--help").out
    option = None
    for line in text[text.find("╭") :].splitlines():
        if match := re.match(r"│ \*? *(--[\w-]+)", line):
            option = match[1]
        elif line.startswith("│  ") and option is not None:
            assert option in ON_MORE_LINES, line
        else:
            option = None
        assert "<" not in line and len(line) <= 80
    panels = re.findall(r"╭─ (\w+)", text)
    assert panels == sorted(panels, key=(("Arguments", *PANELS, "Options", "Commands")).index)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "5000 None"), ({"GOMP_SPINCOUNT": "7"}, "7 None"),
     ({"OMP_WAIT_POLICY": "active"}, "None active")],
    ids=str,
)  # fmt: skip
def test_threads_do_not_spin_for_long_unless_told_to(chosen, expected):
    script = (
        "import os, sys; from h2okv.cli.app import run; run(['--version']);"
        "assert 'torch' not in sys.modules;"
        "print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP", "OMP"))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environ | chosen
    )
    assert done.stdout.splitlines()[-1] == expected, done.stderr
