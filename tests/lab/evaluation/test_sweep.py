from dataclasses import dataclass

import pytest
import yaml

import h2okv
from h2okv.config import CacheConfig
from h2okv_lab.cli.eval import _experiment
from h2okv_lab.evaluation.plots import plot_sweep
from h2okv_lab.evaluation.sweep import (
    Experiment,
    Published,
    Surroundings,
    experiment_names,
    load_experiment,
    report,
)
from h2okv_lab.evaluation.task import pivot
from h2okv_lab.masking import PER_QUERY


def loaded(tmp_path, **overrides):
    content = {"budgets": [0.2, "full"], "caches": ["h2o"], "tasks": [{"needle": None}]}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content | overrides))
    return load_experiment(str(path))


# RULER's files are written by a script, and read in its test.
@pytest.mark.parametrize("name", sorted({*experiment_names()} - {"ruler"}))
def test_bundled_experiments_can_be_built(name, shared, tmp_path):
    experiment = load_experiment(name)
    tasks = experiment.make_tasks(Surroundings(shared / "data" / "eval", tmp_path))
    assert len({task.label for task in tasks}) == len(tasks)
    assert {config.policy for config in experiment.configs} <= {*h2okv.policy_names(), *PER_QUERY}
    labels = {task.label for task in tasks}
    for figure in experiment.published:
        label = figure.task if figure.shots is None else f"{figure.task}, shots {figure.shots}"
        assert label in labels
        assert any(
            (figure.policy, figure.budget) == (config.policy_label, config.budget_label)
            for config in experiment.configs
        )


def test_the_paper_s_experiments_are_there():
    assert set(experiment_names()) >= {
        "diversity", "figure4", "figure9", "ruler", "scoring", "table1", "table10", "table2",
        "table6", "table8", "table9",
    }  # fmt: skip


def test_the_full_cache_is_run_once(tmp_path):
    caches = ["h2o", "recent", "full"]
    experiment = loaded(tmp_path, caches=caches)
    assert [s.label for s in experiment.configs] == ["h2o:20%", "full", "recent:20%"]


def test_options_of_a_cache_reach_it(tmp_path):
    caches = ["h2o:5%+15%,bits=4", "h2o,scoring=mean", "best", "64"]
    experiment = loaded(tmp_path, caches=caches, budgets=["20%"])
    labels = ["h2o:5%+15%,bits=4", "h2o:20%,scoring=mean", "best:20%", "h2o:64"]
    assert [config.label for config in experiment.configs] == labels
    assert experiment.configs[0].heavy == 0.05 and experiment.configs[0].min_tokens == 0
    *placed, _ = experiment.with_options("positions=rolling,every=64")
    assert [(config.positions, config.evict_every) for config in placed] == [("rolling", 64)] * 3


def test_entries_of_one_label_are_the_same_cache(tmp_path):
    twice = loaded(tmp_path, caches=["h2o", "h2o:20%"])
    assert [config.label for config in twice.configs] == ["h2o:20%", "full"]
    with pytest.raises(ValueError, match=r"caches\[1\]: .* must differ from an earlier entry"):
        loaded(tmp_path, caches=["h2o", "h2o,seed=3"])


def test_caches_that_differ_in_their_layers_have_different_labels(tmp_path):
    caches = ["h2o,layers=[[0.5,1.5]]", "h2o,layers=[[1.5,0.5]]", "h2o,layers=[0.5,1.5]"]
    labels = [config.label for config in loaded(tmp_path, caches=caches).configs]
    assert len({label.removesuffix("full") for label in labels}) == len(labels) == 4
    assert labels[0].startswith("h2o:20%,layers=by-head-")
    again = loaded(tmp_path, caches=["h2o,layers=[[0.50, 1.5]]"])
    assert again.configs[0].label == labels[0]


def test_options_for_all_caches_are_options_only(tmp_path):
    experiment = loaded(tmp_path)
    assert experiment.with_options("") == experiment.configs
    with pytest.raises(ValueError, match="--cache h2o,bits=8 must have only options"):
        experiment.with_options("h2o,bits=8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"chaches": []}, "did you mean caches"),
        ({"caches": ["h20"]}, r"caches\[0\].*did you mean h2o"),
        ({"caches": [{"policy": "h2o"}]}, r"caches: give a text such as h2o:20%,scoring=decay"),
        ({"caches": ["h2o,entropy=4"]}, r"caches\[0\].*'entropy' is unknown"),
        ({"caches": []}, "caches: List should have at least 1 item"),
        ({"budgets": []}, r"caches\[0\]: 'h2o' has no budget; give one, as h2o:20%, or budgets"),
        ({"budgets": ["most"]}, r"caches\[0\]: budget='most' is not a budget"),
        ({"budgets": [True]}, r"budgets\[0\].*: .* \(there is True\)"),
        ({"budgets": [3.0]}, r"caches\[0\]: budget 3 is out of range"),
        ({"seeds": [-1]}, r"seeds\[0\]: Input should be greater than or equal to 0"),
        ({"tasks": None}, "tasks: Input should be a valid list"),
        ({"published": [{"model": "m"}]}, r"published\[0\].task: Field required"),
    ],
)
def test_an_error_names_its_place_in_the_file(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path, **content)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"needel": None}, "did you mean needle"),
        ({"needle": None, "dephts": [0]}, "did you mean depths"),
        ({"needle": None, "tries": "many"}, r"tasks\[0\]: tries: Input should be a valid integer"),
        ({"needle": None, "compression": "both"}, "query-aware"),
        ({"perplexity": None, "name": ["a", "b"]}, "name: Input should be a valid string"),
        ({"summarize": "none.jsonl"}, "'none.jsonl' is not in .*; put it there"),
        ({"harness": 3}, "harness must be a name, got 3"),
    ],
)
def test_an_error_in_a_task_names_the_task(tmp_path, task, message):
    experiment = loaded(tmp_path, tasks=[task])
    with pytest.raises(ValueError, match=message):
        experiment.make_tasks(Surroundings(tmp_path, tmp_path))


def test_without_a_data_folder_the_missing_file_is_named(tmp_path):
    experiment = loaded(tmp_path, tasks=[{"summarize": "x.jsonl"}])
    with pytest.raises(
        ValueError, match="summarize 'x.jsonl' needs data files; give their folder by"
    ):
        experiment.make_tasks(Surroundings(None, tmp_path))


def test_an_unknown_experiment_is_refused_with_suggestions():
    with pytest.raises(ValueError, match="did you mean figure4"):
        _experiment("figure_4")


def test_a_file_that_is_not_yaml_is_refused(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: [")
    with pytest.raises(ValueError, match="is not YAML"):
        load_experiment(str(path))


ROW = {
    "samples": 40, "metric": "acc", "model": "m", "revision": "r", "dtype": "float32",
    "h2okv": "1", "commit": "abc", "torch": "2", "transformers": "5",
}  # fmt: skip


@dataclass
class FakeTask:
    label: str


@dataclass
class FakeRun:
    task: FakeTask
    config: CacheConfig
    seed: int = 0

    @property
    def label(self):
        return f"{self.task.label} {self.config.label} {self.seed}"


def results():
    """Two tasks, two policies, two budgets and the full cache, two seeds; one is not done."""
    configs = [CacheConfig(budget=b, policy=p) for p in ("h2o", "recent") for b in (0.1, 0.2)]
    runs = [
        FakeRun(FakeTask(task), config, seed)
        for task in ("copa, shots 5", "rte, shots 5")
        for config in [*configs, CacheConfig("full")]
        for seed in (0, 1)
    ]
    rows = {run.label: {**ROW, "value": 0.5 + 0.1 * run.seed, "stderr": 0.05} for run in runs[:-1]}
    del rows["copa, shots 5 h2o:10% 0"], rows["copa, shots 5 h2o:10% 1"]
    return pivot(runs, rows)


def test_results_table_has_a_row_per_policy_and_a_column_per_budget():
    lines = results()
    assert [(line.task, line.policy) for line in lines] == [
        (task, policy)
        for task in ("copa, shots 5", "rte, shots 5")
        for policy in ("full", "h2o", "recent")
    ]
    assert lines[1].values == {"20%": 0.55}
    assert lines[3].values == {"full": 0.5}  # of the one seed that is done
    assert lines[5].values == {"10%": 0.55, "20%": 0.55}


def test_the_page_has_published_figures_and_results():
    published = Published(model="OPT", task="copa", shots=5, policy="h2o", budget="20%", value=84.0)
    experiment = Experiment(
        name="e", title="A title", source="A source", remark="A\n remark", budgets=[0.2],
        caches=["h2o"], seeds=[0, 1], tasks=[{"needle": None}], published=[published],
    )  # fmt: skip
    page = report(experiment, results(), ROW)
    assert "# A title\n\nA source\n\nA remark\n\nModel m (r, float32); h2okv 1 (abc)" in page
    assert "| copa, shots 5 | 40 | acc | h2o |  | 0.5500 |  |\n" in page
    assert "As published, OPT:\n\n| task | policy | 20% |\n|---|---|---:|\n" in page
    assert "| copa, shots 5 | h2o | 84.00 |\n" in page


def test_the_picture_is_drawn(tmp_path):
    plot_sweep(tmp_path / "s.png", results(), "title")
    assert (tmp_path / "s.png").stat().st_size > 10_000
