"""`h2okv lm-eval`: the harness's own command line with our model type and tasks."""

import json
import sys

import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (h2okv[eval])")

from h2okv_lab.evaluation import lm_eval as launcher

RTE = '{{"premise": "The cat sat on mat {}.", "hypothesis": "The cat sat.", "label": "{}"}}\n'


@pytest.fixture
def data(tmp_path, add_task_files):
    folder = tmp_path / "data"
    folder.mkdir()
    add_task_files(folder)
    lines = [RTE.format(i, ("entailment", "not_entailment")[i % 2]) for i in range(4)]
    (folder / "rte_val.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def run(h2okv_command, model_folder, monkeypatch):
    monkeypatch.setenv("LMEVAL_LOG_LEVEL", "ERROR")

    def call(*args, task="rte", options="heavy=0.1,recent=0.1"):
        model = f"pretrained={model_folder},{options}"
        return h2okv_command("lm-eval", "--tasks", task, "--model_args", model, *args)

    return call


def results_in(folder):
    return json.loads(next(folder.rglob("results*.json")).read_text())


def test_lm_eval_prints_the_table_and_records_its_options(run, data, tmp_path):
    out = tmp_path / "out"
    outcome = run(
        "--data", data, "--num_fewshot", "1", "--output_path", out,
        options="heavy=0.1,recent=0.1,evict_every=1",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "|rte " in outcome.out and "|acc " in outcome.out
    results = results_in(out)
    assert results["config"]["model"] == "h2okv"
    record = results["config"]["h2okv"]
    assert record["cache"]["protocol"] == "whole"
    assert (record["cache"]["heavy"], record["cache"]["recent"]) == (0.1, 0.1)
    assert results["n-shot"] == {"rte": 1}
    assert results["n-samples"]["rte"] == {"original": 4, "effective": 4}


def test_a_stopped_run_continues_from_stored_answers(run, data, tmp_path, monkeypatch):
    store = tmp_path / "answers"
    args = ("--data", data, "--use_cache", store)
    assert run(*args).code == 0
    from h2okv_lab.evaluation.lm_eval.scorer import Scorer

    monkeypatch.delattr(Scorer, "after_prompts")  # nothing is left to be computed
    assert run(*args).code == 0
    refused = run(*args, options="heavy=0.2,recent=0.1")
    assert refused.code == 2 and "give another path" in refused.err


def test_ctrl_c_names_the_way_to_continue(run, data, monkeypatch):
    from h2okv_lab.evaluation.lm_eval.scorer import Scorer

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Scorer, "after_prompts", interrupt)
    outcome = run("--data", data)
    assert outcome.code == 130 and "--use_cache" in outcome.err


def test_the_tasks_run_with_a_model_of_the_harness(h2okv_command, model_folder, data, monkeypatch):
    monkeypatch.setenv("LMEVAL_LOG_LEVEL", "ERROR")
    args = ("--model", "hf", "--model_args", f"pretrained={model_folder}", "--tasks", "rte")
    outcome = h2okv_command("lm-eval", "run", "--data", data, *args)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("hf (")


@pytest.mark.parametrize(
    ("args", "changes", "words"),
    [
        (("--data", "nowhere"), {}, "--data 'nowhere' is not a folder"),
        (("--data", "DATA"), {"task": "opnbookqa"}, "did you mean openbookqa"),
        ((), {"options": "hevy=0.1"}, "perhaps 'heavy' is meant"),
        (("--data", "DATA"), {"options": "policy=h20"}, "did you mean h2o"),
        (
            ("--data", "DATA", "--limit", "2", "--samples", '{"rte": [0]}'),
            {},
            "--limit must be None",
        ),
    ],
)
def test_bad_input_is_one_sentence(run, data, args, changes, words):
    outcome = run(*[data if word == "DATA" else word for word in args], **changes)
    assert outcome.code == 2
    assert words in outcome.err
    assert "Traceback" not in outcome.err


def test_a_missing_file_is_named_with_its_folder(run, data):
    (data / "rte_val.jsonl").unlink()
    outcome = run("--data", data)
    assert outcome.code == 2
    assert f"'rte_val.jsonl' is not in '{data}'" in outcome.err


def test_unknown_options_are_an_error_of_the_harness(run, data, capsys):
    outcome = run("--data", data, "--bogus")
    assert outcome.code == 2 and "unrecognized arguments: --bogus" in outcome.err


def test_without_the_harness_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval._cli", None)
    outcome = run()
    assert outcome.code == 2 and "pip install '.[eval]'" in outcome.err


def test_help_has_an_example(h2okv_command):
    outcome = h2okv_command("lm-eval", "--help")
    assert outcome.code == 0
    assert "--tasks copa" in outcome.out and "--data" in outcome.out


@pytest.mark.parametrize(
    ("words", "command", "model", "tasks"),
    [
        (["ls", "tasks"], "ls", None, None),
        (["--model_args", "pretrained=bundled"], "run", "h2okv", None),
        (["run", "--model=hf", "--tasks", "x"], "run", "hf", ["x"]),
        (["--config", "run.yaml"], "run", None, None),
        (["--config", "run.yaml", "--tasks=x,hellaswag"], "run", None, ["x", "hellaswag"]),
        (["--model", "hf", "-t", "x", "y", "--limit", "3"], "run", "hf", ["x", "y"]),
    ],
)
def test_command_and_model_have_defaults(h2okv_command, monkeypatch, words, command, model, tasks):
    calls = []
    monkeypatch.setattr(launcher, "_evaluate", lambda parsed, data: calls.append(parsed))
    assert h2okv_command("lm-eval", *words).code == 0
    names = ("command", "model", "tasks")
    assert [getattr(calls[0], name, None) for name in names] == [command, model, tasks]


def test_lm_eval_without_options_shows_help(h2okv_command):
    outcome = h2okv_command("lm-eval")
    assert outcome.code == 0 and "usage: lm-eval" in outcome.out


def test_invalid_options_are_refused_before_the_harness_runs(run, monkeypatch):
    monkeypatch.setattr(launcher, "_evaluate", None)
    outcome = run(options="heavy=0.1,hevy=0.1")
    assert outcome.code == 2 and "'hevy' is unknown; perhaps 'heavy'" in outcome.err


def test_a_run_without_a_model_is_refused_and_its_help_is_not(h2okv_command, monkeypatch):
    calls = []
    monkeypatch.setattr(launcher, "_evaluate", lambda parsed, data: calls.append(parsed))
    refused = h2okv_command("lm-eval", "--model_args", "heavy=0.1", "--tasks", "rte")
    assert refused.code == 2 and "--model_args must name a model; add pretrained" in refused.err
    assert not calls
    assert h2okv_command("lm-eval", "run", "--help").code == 0
