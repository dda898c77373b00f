import pytest
import yaml

import h2okv
from h2okv.evaluation.sweep import Surroundings, experiment_names, load_experiment, make_tasks


def loaded(tmp_path, **content):
    given = {"budgets": [0.2, "full"], "caches": [{"policy": "h2o"}], "tasks": [{"needle": None}]}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(given | content))
    return load_experiment(str(path))


@pytest.mark.parametrize("name", experiment_names())
def test_what_comes_along_can_be_made(name, shared, tmp_path):
    experiment = load_experiment(name)
    tasks = make_tasks(experiment, Surroundings(shared / "data" / "eval", tmp_path))
    assert len({task.label for task in tasks}) == len(tasks)
    assert {setting.policy for setting in experiment.settings} <= set(h2okv.policy_names())
    labels = {task.label for task in tasks}
    for one in experiment.published:
        label = one.task if one.shots is None else f"{one.task}, shots {one.shots}"
        assert label in labels
        assert any(
            (one.policy, one.budget) == (setting.policy_label, setting.budget_label)
            for setting in experiment.settings
        )


def test_the_paper_s_experiments_are_there():
    assert set(experiment_names()) >= {
        "diversity", "figure4", "figure9", "scoring", "table1", "table10", "table2", "table6",
        "table8", "table9",
    }  # fmt: skip


def test_the_full_cache_is_run_once(tmp_path):
    caches = [{"policy": "h2o"}, {"policy": "recent"}, {"policy": "full"}]
    experiment = loaded(tmp_path, caches=caches)
    assert [s.label for s in experiment.settings] == ["h2o, 20%", "full", "recent, 20%"]


def test_caches_that_this_version_lacks_are_left_out_and_named(tmp_path, monkeypatch):
    class Lesser:
        def __init__(self, config, heavy, recent, scoring="sum"):
            """Takes fewer options."""

    monkeypatch.setattr(h2okv, "H2OCache", Lesser)
    caches = [{"policy": "h2o", "kv_bits": 4}, {"policy": "h2o", "scoring": "mean"}]
    experiment = loaded(tmp_path, caches=caches, budgets=[0.2])
    assert [s.label for s in experiment.settings] == ["h2o, scoring mean, 20%"]
    assert [s.label for s in experiment.left_out] == ["h2o, kv_bits 4, 20%"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"chaches": []}, "did you mean caches"),
        ({"caches": [{"policy": "h20"}]}, r"caches\[0\].*'h2o'"),
        ({"caches": [{"polcy": "h2o"}]}, r"caches\[0\].*did you mean policy"),
        ({"caches": []}, "caches is"),
        ({"budgets": []}, "budgets is"),
        ({"budgets": ["most"]}, "budget 'most' is no amount"),
        ({"budgets": [3.0]}, "budget 3 is out of range"),
        ({"seeds": [-1]}, "seeds is"),
        ({"tasks": None}, "tasks is None"),
        ({"published": [{"model": "m"}]}, r"published\[0\] has no task"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path, **content)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"needel": None}, "did you mean needle"),
        ({"needle": None, "dephts": [0]}, "did you mean depths"),
        ({"summarize": "none.jsonl"}, "needs 'none.jsonl', and .* does not exist"),
        ({"harness": "coppa"}, "did you mean copa"),
    ],
)
def test_a_mistake_in_a_task_is_named(tmp_path, task, message):
    experiment = loaded(tmp_path, tasks=[task])
    with pytest.raises(ValueError, match=message):
        make_tasks(experiment, Surroundings(tmp_path, tmp_path))


def test_without_a_folder_the_file_that_is_needed_is_named(tmp_path):
    experiment = loaded(tmp_path, tasks=[{"summarize": "x.jsonl"}])
    with pytest.raises(ValueError, match="needs 'x.jsonl'; say by --data"):
        make_tasks(experiment, Surroundings(None, tmp_path))


def test_an_unknown_experiment_has_near_ones():
    with pytest.raises(ValueError, match="did you mean figure4"):
        load_experiment("figure_4")


def test_what_is_no_yaml_is_refused(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: [")
    with pytest.raises(ValueError, match="is not YAML"):
        load_experiment(str(path))
