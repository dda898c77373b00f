"""The commands of `h2okv eval`, on the tiny random model of conftest.py."""

import csv
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from h2okv.cli.args import ModelOptions
from h2okv.config import CacheConfig
from h2okv_lab.cli.eval import DEFAULT_CSV, Trial
from h2okv_lab.cli.options import cache_lists, command_line
from h2okv_lab.evaluation import plots
from h2okv_lab.evaluation.task import Evaluation


@pytest.fixture
def articles(tmp_path, prompt):
    lines = [
        {"article": prompt[n : n + 90], "summary_gt": "the cat", "stop": ["###"], "max_tokens": 5}
        for n in range(6)
    ]
    path = tmp_path / "articles.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def novel_file(tmp_path, prompt):
    path = tmp_path / "novel.txt"
    path.write_text(prompt * 4)
    return path


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def summarize(h2okv_command, model_folder, articles, out, *more):
    return h2okv_command(
        "eval", "summarize", "--model", model_folder, "--input", articles, "--csv", out,
        "--budget", "8,0.5,full", *more,
    )  # fmt: skip


def test_summaries_have_a_row_for_each_cache(h2okv_command, model_folder, articles, tmp_path):
    done = summarize(h2okv_command, model_folder, articles, tmp_path / "s.csv", "--limit", 4)
    assert done.code == 0, done.err
    assert done.out.startswith("| cache | rouge1 | rouge2 | rougeL | samples |\n")
    rows = table(tmp_path / "s.csv")
    assert [(row["policy"], row["budget"], row["samples"]) for row in rows] == [
        ("best-v5", "8", "4"), ("best-v5", "50%", "4"), ("full", "full", "4"),
    ]  # fmt: skip
    assert {row["model"] for row in rows} == {str(model_folder)}
    assert all(row["revision"] and row["torch"] and row["transformers"] for row in rows)
    # The longer run adds to it.
    more = summarize(h2okv_command, model_folder, articles, tmp_path / "s.csv")
    assert "12 of 18 samples are already evaluated" in more.err
    outcome = summarize(h2okv_command, model_folder, articles, tmp_path / "s.csv", "--json")
    assert [row["samples"] for row in json.loads(outcome.out)["rows"]] == [6, 6, 6]
    assert {row["samples"] for row in table(tmp_path / "s.csv")} == {"6"}


def test_summaries_use_the_sampling_options(h2okv_command, model_folder, articles, tmp_path):
    sampling = ("--temperature", "0.8", "--limit", "2")
    for out in (tmp_path / "a.csv", tmp_path / "b.csv"):
        done = summarize(h2okv_command, model_folder, articles, out, *sampling)
        assert done.code == 0, done.err
    first, again = (tmp_path / f"{name}.samples.jsonl" for name in "ab")
    assert first.read_text() == again.read_text()
    assert '"temperature": 0.8' in first.read_text()
    greedy = summarize(h2okv_command, model_folder, articles, tmp_path / "g.csv", "--limit", 2)
    assert greedy.code == 0 and '"temperature": 0.0' in (tmp_path / "g.samples.jsonl").read_text()


def test_ctrl_c_keeps_finished_samples(
    h2okv_command, model_folder, articles, tmp_path, monkeypatch
):
    run = Evaluation.run
    monkeypatch.setattr(Evaluation, "run", lambda self, tell: run(self, stopping(tell)))
    out = tmp_path / "s.csv"
    stopped = summarize(h2okv_command, model_folder, articles, out, "--batch", 4)
    assert stopped.code == 130
    assert "stopped; 12 of 18 samples" in stopped.err and "continues from there" in stopped.err
    assert not out.exists()  # no cache has answered all
    monkeypatch.undo()
    assert summarize(h2okv_command, model_folder, articles, out).code == 0
    complete = summarize(h2okv_command, model_folder, articles, tmp_path / "whole.csv")
    assert complete.code == 0
    assert table(out) == table(tmp_path / "whole.csv")


def stopping(tell):
    calls = []

    def on_results(cell, count):
        tell(cell, count)
        calls.append(cell)
        if len(calls) == 3:
            raise KeyboardInterrupt

    return on_results


def test_perplexity_has_a_row_for_each_range(h2okv_command, model_folder, novel_file, tmp_path):
    done = h2okv_command(
        "eval", "perplexity", "--model", model_folder, "--text", novel_file, "--length", 64,
        "--windows", 2, "--every", 24, "--cache", "every=16", "--budget", "0.25,100,full",
        "--csv", tmp_path / "p.csv",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "note: best:100,every=16 keeps all 64 tokens of a window, as full does\n" in done.err
    rows = table(tmp_path / "p.csv")
    assert [(row["budget"], row["position"]) for row in rows] == [
        (budget, position) for budget in ("25%", "100", "full") for position in ("24", "48", "63")
    ]


def test_needles_have_a_cell_for_each_length_and_depth(
    h2okv_command, model_folder, novel_file, tmp_path
):
    done = h2okv_command(
        "eval", "needle", "--model", model_folder, "--text", novel_file, "--lengths", "100,150",
        "--depths", "0,1", "--tries", 1, "--budget", "0.5,full", "--compression", "both",
        "--csv", tmp_path / "n.csv", "--plot", tmp_path / "n.png", "--max-new-tokens", 4,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert len(table(tmp_path / "n.csv")) == 2 * 2 * 4
    assert (tmp_path / "n.png").is_file()


def fidelity(h2okv_command, model_folder, novel_file, out, *more):
    return h2okv_command(
        "eval", "fidelity", "--model", model_folder, "--data", novel_file, "--prompt-tokens", 60,
        "--new-tokens", 4, "--texts", 2, "--csv", out, *more,
    )  # fmt: skip


def test_fidelity_compares_all_caches_and_recommends_one(
    h2okv_command, model_folder, novel_file, tmp_path, monkeypatch
):
    drawn, plot = [], plots.plot_fidelity

    def record(path, rows, title):
        drawn.extend(row["cache"] for row in rows)
        plot(path, rows, title)

    monkeypatch.setattr(plots, "plot_fidelity", record)
    caches = ["h2o", "h2o,scoring=decay", "recent"]
    options = ("--budget", "50%,12,full", *(word for text in caches for word in ("--cache", text)))
    out, picture = tmp_path / "f.csv", tmp_path / "f.png"
    done = fidelity(
        h2okv_command, model_folder, novel_file, out, *options, "--plot", picture,
        "--recommend", 0.01,
    )  # fmt: skip
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "| cache | bytes | agreement | KL | perplexity ratio | texts |"
    shown = [line.split("|")[1].strip() for line in lines[2:9]]
    assert shown == [
        "h2o:50%", "h2o:50%,scoring=decay", "recent:50%",
        "h2o:12", "h2o:12,scoring=decay", "recent:12", "full",
    ]  # fmt: skip
    assert "| full | 1" in lines[8] and "| 1.000 (1.000 to 1.000) |" in lines[8]
    assert picture.is_file()
    bits = [f"{text},bits={number}" for text in caches for number in (8, 6, 4)]
    assert list(dict.fromkeys(drawn)) == [*caches, *bits]
    rows = table(out)
    assert [(row["policy"], row["scoring"]) for row in rows[:3]] == [
        ("h2o", "sum"), ("h2o", "decay"), ("recent", "sum"),
    ]  # fmt: skip
    assert all(float(row["kl_low"]) <= float(row["kl"]) <= float(row["kl_high"]) for row in rows)
    # All of them agree enough, so each is tried with fewer bits too.
    assert [row["kv_bits"] for row in rows] == [""] * 7 + ["8", "6", "4"] * 7
    # Of equally small ones that with the best agreement.
    smallest = min(rows, key=lambda row: (float(row["bytes"]), -float(row["agreement"])))
    command, text = lines[-1].split(" --cache ")
    flags = f"--cache {text}"
    assert command == f"h2okv generate --model {model_folder}" and smallest["kv_bits"] == "4"
    assert text.startswith(f"{smallest['policy']}:12") and text.endswith(",bits=4")
    assert ("scoring=decay" in text) is (smallest["scoring"] == "decay")
    share = 100 * float(smallest["bytes_fraction"])
    assert lines[-2].startswith(f"4 bits and 12: {share:.1f} % of the bytes, perplexity ")
    assert f", agreement {100 * float(smallest['agreement']):.1f} % on 2 texts" in lines[-2]
    again = fidelity(
        h2okv_command, model_folder, novel_file, out, *options, "--recommend", 0.01, "--json"
    )
    report = json.loads(again.out)
    assert report["recommended"] == flags and len(report["rows"]) == len(rows)
    # One more cache is measured alone, on the texts of before.
    more = fidelity(h2okv_command, model_folder, novel_file, out, "--policy", "h2o,heavy",
                    "--budget", "50%", "--recommend", "100%")  # fmt: skip
    assert "2 of 4 samples are already evaluated" in more.err
    again = {row["policy"]: row["kl"] for row in table(out) if not row["kv_bits"]}
    assert again["h2o"] == rows[0]["kl"]
    agreements = {row["policy"]: float(row["agreement"]) for row in table(out)}
    verdict = "the smallest with" if 1 in agreements.values() else "no cache reaches"
    assert f"{verdict} an agreement of 1" in more.out


def test_fidelity_shows_caches_that_differ_in_one_option_once(
    h2okv_command, model_folder, novel_file, tmp_path
):
    caches = ["h2o:50%,every=8", "h2o:50%,of=seen", "h2o:50%"]
    options = (word for text in caches for word in ("--cache", text))
    done = fidelity(h2okv_command, model_folder, novel_file, tmp_path / "f.csv", *options)
    assert done.code == 0, done.err
    assert [line.split("|")[1].strip() for line in done.out.splitlines()[2:5]] == caches
    assert len(done.out.split("| h2o:50%")) == 4


def test_fidelity_refuses_before_any_work(
    h2okv_command, model_folder, novel_file, tmp_path, monkeypatch
):
    monkeypatch.setattr("h2okv_lab.evaluation.model.ModelUnderTest.model", None)
    done = fidelity(h2okv_command, model_folder, novel_file, tmp_path / "f.csv", "--texts", 50)
    message = "give a longer text, or smaller numbers, or --texts "
    assert done.code == 2 and message in done.err, done.err


@pytest.mark.parametrize(
    "config",
    [
        CacheConfig("full"),
        CacheConfig(budget=0.25, min_tokens=0, sink=4, scoring="decay", decay=0.99),
        CacheConfig(budget=9, policy="recent", kv_bits=8),
        CacheConfig("h2o", 0.3, 0.1, scoring="value_norm", min_tokens=0),
        CacheConfig("snapkv", 8, 0.2, min_tokens=0),
    ],
)
def test_a_label_is_an_option_of_the_same_cache(config):
    build = cache_lists("20%").build
    assert [cache.identity() for cache in build(None, None, [config.label])] == [config.identity()]
    name, text = shlex.split(command_line(config))
    assert (name, text) == ("--cache", config.label)


def test_recall_compresses_query_aware_and_query_agnostic(
    h2okv_command, model_folder, prompt, tmp_path
):
    line = {"input": f"{prompt[:120]}\nwhere sat the dog? on", "outputs": ["the log"]}
    (tmp_path / "r.jsonl").write_text(json.dumps(line) + "\n")
    done = h2okv_command(
        "eval", "recall", "--model", model_folder, "--input", tmp_path / "r.jsonl", "--budget",
        "0.5,full", "--csv", tmp_path / "r.csv",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert [row["compression"] for row in table(tmp_path / "r.csv")] == [
        "query-aware", "query-aware", "query-agnostic", "query-agnostic",
    ]  # fmt: skip


def test_sweep_writes_its_folder(h2okv_command, model_folder, articles, tmp_path):
    experiment = tmp_path / "mine.yaml"
    content = {
        "title": "Mine",
        "budgets": [8, 0.5, "full"],
        "caches": ["h2o", "recent"],
        "seeds": [0, 1],
        "tasks": [{"summarize": articles.name, "name": "cats", "temperature": 1.0}],
    }
    experiment.write_text(yaml.safe_dump(content))
    words = ("eval", "sweep", experiment, "--model", model_folder, "--data", tmp_path, "--out")
    done = h2okv_command(*words, tmp_path / "out", "--limit", 3)
    assert done.code == 0, done.err
    rows = table(tmp_path / "out" / "results.csv")
    assert [(row["policy"], row["budget"], row["seed"]) for row in rows] == [
        (policy, budget, seed)
        for policy, budget in (
            ("h2o", "8"), ("h2o", "50%"), ("full", "full"), ("recent", "8"), ("recent", "50%"),
        )
        for seed in ("0", "1")
    ]  # fmt: skip
    assert done.out in (tmp_path / "out" / "results.md").read_text()
    assert (tmp_path / "out" / "results.png").is_file()
    again = h2okv_command(*words, tmp_path / "out", "--limit", 3)
    assert "30 of 30 samples are already evaluated" in again.err
    assert again.out == done.out


def test_bad_input_is_one_sentence(h2okv_command, model_folder, articles, tmp_path):
    for words, message in (
        (("--batch", "0"), "--batch must be a whole number of 1 or more, got 0"),
        (("--max-new-tokens", "250"), "more than the model's context window of 256"),
    ):
        done = summarize(h2okv_command, model_folder, articles, tmp_path / "s.csv", *words)
        assert done.code == 2 and message in done.err
        assert done.err.count("\n") == 1


def test_samples_of_other_settings_are_refused(h2okv_command, model_folder, articles, tmp_path):
    assert summarize(h2okv_command, model_folder, articles, tmp_path / "s.csv").code == 0
    done = summarize(h2okv_command, model_folder, articles, tmp_path / "s.csv", "--cache", "sink=2")
    assert done.code == 0  # another sink is another cache, beside the first
    rolling = ("--cache", "positions=rolling,scoring=decay:0.9")
    done = summarize(h2okv_command, model_folder, articles, tmp_path / "s.csv", *rolling)
    assert done.code == 0, done.err
    samples = (tmp_path / "s.samples.jsonl").read_text()
    assert "h2o:6+2,sink=4,scoring=decay:0.9,positions=rolling,layers=auto" in samples
    bits = ("--cache", "min=2")
    done = summarize(h2okv_command, model_folder, articles, tmp_path / "s.csv", *bits)
    assert done.code == 0 and "are already evaluated" in done.err


def test_a_window_that_evicts_nothing_is_refused(h2okv_command, novel_file, tmp_path, monkeypatch):
    # Refused before the weights load.
    monkeypatch.setattr("h2okv.models.loading.load_weights", None)
    done = h2okv_command(
        "eval", "perplexity", "--text", novel_file, "--length", 64, "--csv", tmp_path / "p.csv"
    )
    assert done.code == 2
    assert "--length 64 is read as one block of 64 tokens" in done.err


def test_a_needle_that_is_too_long_is_refused_early(h2okv_command, tmp_path, monkeypatch):
    monkeypatch.setattr("h2okv.models.loading.load_weights", None)
    done = h2okv_command("eval", "needle", "--lengths", "2048", "--csv", tmp_path / "n.csv")
    assert done.code == 2
    assert "add --cache positions=rolling,every=64." in done.err
    assert "--too-long" not in done.err


def test_a_sweep_replaces_no_table_of_others(h2okv_command, tmp_path):
    (tmp_path / "results.csv").write_text("name,price\n")
    ended = h2okv_command("eval", "sweep", "table1", "--out", tmp_path)
    assert ended.code == 2 and "results.csv' is not a table of h2okv eval" in ended.err
    assert (tmp_path / "results.csv").read_text() == "name,price\n"


def test_sweep_names_missing_files(h2okv_command, tmp_path):
    done = h2okv_command("eval", "sweep", "figure44", "--out", tmp_path / "o")
    assert done.code == 2 and "did you mean figure4" in done.err
    done = h2okv_command("eval", "sweep", "figure9", "--out", tmp_path / "o", "--data", tmp_path)
    assert done.code == 2
    assert f"'longbench_multi_news.jsonl' is not in '{tmp_path}'; put it there" in done.err


def test_by_default_each_model_and_text_has_its_file_of_samples(model_folder):
    def path(name="bundled", data="a text", csv=DEFAULT_CSV):
        task = SimpleNamespace(identity=lambda: {"data": data})
        return Trial([], ModelOptions(name, "auto"), csv, 0, False)._samples_path([task])

    assert path() == path() and re.fullmatch(r"fidelity\.\w{8}\.samples\.jsonl", path().name)
    assert len({path(), path(data="another"), path(name=str(model_folder))}) == 3
    assert path(csv=Path("f.csv")) == Path("f.samples.jsonl")
