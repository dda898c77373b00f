import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (h2okv[eval])")

from lm_eval.tasks import TaskManager

from h2okv_lab.evaluation.lm_eval import task_manager


def manager(folder, names, monkeypatch):
    """Make a task manager, and note whether it lists the harness's own tasks."""
    listed, init = [], TaskManager.__init__

    def note(self, *args, include_defaults=True, **options):
        listed.append(include_defaults)
        init(self, *args, include_defaults=False, **options)  # the others take seconds

    monkeypatch.setattr(TaskManager, "__init__", note)
    return task_manager(folder, names, "--tasks")(), listed


@pytest.mark.parametrize(("names", "alone"), [(["copa", "rte"], True), (["copa", "x"], False)])
def test_the_harness_s_tasks_are_not_listed_for_a_folder_s_alone(
    add_task_files, tmp_path, monkeypatch, names, alone
):
    tasks, listed = manager(add_task_files(tmp_path), names, monkeypatch)
    assert "copa" in tasks.all_tasks
    assert listed == ([False] if alone else [False, True])


def test_without_a_folder_the_tasks_are_the_harness_s(monkeypatch):
    tasks, listed = manager(None, ["copa"], monkeypatch)
    assert listed == [False, True] and not tasks.all_tasks


def test_a_folder_s_task_comes_before_the_harness_s(add_task_files, tmp_path):
    tasks = task_manager(add_task_files(tmp_path), ["copa", "hellaswag"], "--tasks")()
    assert tasks.task_index["copa"].yaml_path == tmp_path / "copa.yaml"
    assert "hellaswag" in tasks.all_tasks
