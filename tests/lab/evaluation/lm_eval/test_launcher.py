import pytest

from h2okv_lab.evaluation import lm_eval as launcher


@pytest.mark.parametrize(("tasks", "alone"), [("h2okv_copa,h2okv_rte", True), ("h2okv_x,x", False)])
def test_the_harness_s_tasks_are_not_listed_for_ours_alone(tasks, alone, monkeypatch):
    flags = []

    def fail(ours_only):
        flags.append(ours_only)
        raise ValueError("looked up")

    monkeypatch.setattr(launcher, "_task_manager", fail)
    with pytest.raises(ValueError, match="looked up"):
        launcher.run_harness(["validate", "--tasks", tasks])
    assert flags == [alone]
