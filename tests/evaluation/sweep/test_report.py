from dataclasses import dataclass

from h2okv.evaluation.cache_setting import CacheSetting
from h2okv.evaluation.sweep import Experiment, Published, pivot, plot_sweep, report

ROW = {
    "samples": 40, "metric": "acc", "model": "m", "revision": "r", "dtype": "float32",
    "h2okv": "1", "commit": "abc", "torch": "2", "transformers": "5",
}  # fmt: skip


@dataclass
class FakeTask:
    label: str


@dataclass
class FakeCell:
    task: FakeTask
    setting: CacheSetting
    seed: int = 0

    @property
    def label(self):
        return f"{self.task.label} {self.setting.label} {self.seed}"


def results():
    """Two tasks, two policies, two budgets and the full cache, two seeds; one is not done."""
    settings = [CacheSetting(p, b) for p in ("h2o", "recent") for b in (0.1, 0.2)]
    cells = [
        FakeCell(FakeTask(task), setting, seed)
        for task in ("copa, shots 5", "rte, shots 5")
        for setting in [*settings, CacheSetting()]
        for seed in (0, 1)
    ]
    rows = {
        cell.label: {**ROW, "value": 0.5 + 0.1 * cell.seed, "stderr": 0.05} for cell in cells[:-1]
    }
    del rows["copa, shots 5 h2o, 10% 0"], rows["copa, shots 5 h2o, 10% 1"]
    return pivot(cells, rows)


def test_lines_have_a_policy_and_columns_a_budget():
    lines = results()
    assert [(line.task, line.policy) for line in lines] == [
        (task, policy)
        for task in ("copa, shots 5", "rte, shots 5")
        for policy in ("full", "h2o", "recent")
    ]
    assert lines[1].values == {"20%": 0.55}
    assert lines[3].values == {"full": 0.5}  # of the one seed that is done
    assert lines[5].values == {"10%": 0.55, "20%": 0.55}


def test_the_page_has_what_was_published_beside_what_was_found():
    experiment = Experiment(
        "e", "A title", "A source", "A remark", (), (0, 1), (),
        (Published("OPT", "copa", 5, "h2o", "20%", 84.0),),
        (CacheSetting("h2o", 0.2, more={"kv_bits": 4}),),
    )  # fmt: skip
    page = report(experiment, results(), ROW)
    assert "# A title\n\nA source\n\nA remark\n\nModel m (r, float32); h2okv 1 (abc)" in page
    assert "| copa, shots 5 | 40 | acc | h2o |  | 0.5500 |  |\n" in page
    assert "does not have it: h2o, kv_bits 4, 20%." in page
    assert "As published, OPT:\n\n| task | policy | 20% |\n|---|---|---:|\n" in page
    assert "| copa, shots 5 | h2o | 84.00 |\n" in page


def test_the_picture_is_drawn(tmp_path):
    plot_sweep(tmp_path / "s.png", results(), "title")
    assert (tmp_path / "s.png").stat().st_size > 10_000
