import re
import shutil

import numpy as np
import pytest

from h2okv_lab.analysis import measurements as module
from h2okv_lab.analysis.attention_stats import activation_frequency
from h2okv_lab.analysis.measurements import MEASUREMENTS, analyze, choose_measurements, is_finished
from h2okv_lab.analysis.report import SECTIONS, write_report
from h2okv_lab.analysis.study import (
    TEXT_COLUMNS,
    Study,
    make_sample,
    open_folder,
    token_pieces,
)
from h2okv_lab.tables import read_csv, write_csv

pytestmark = pytest.mark.slow

FINDINGS = [section for section in SECTIONS if section.paper]

TEXT = "the text"


@pytest.fixture(scope="module")
def folder(model, sample, tmp_path_factory):
    """Return the folder of a finished analysis; do not modify it."""
    path = tmp_path_factory.mktemp("analysis")
    open_folder(path, "tiny", TEXT, sample.length)
    analyze(model, sample, path, MEASUREMENTS)
    return path


def test_every_measurement_has_its_tables(folder):
    assert all(is_finished(folder, measurement) for measurement in MEASUREMENTS)


def test_a_second_run_computes_nothing(folder, model, sample, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setattr(module, "write_csv", None)
    analyze(model, sample, folder, MEASUREMENTS)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_stopped_analysis_resumes(folder, model, sample, tmp_path):
    open_folder(tmp_path, "tiny", TEXT, sample.length)
    stop_in = MEASUREMENTS[5]
    calls = []

    def stop(measurement, share):
        if measurement is stop_in and share > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        analyze(model, sample, tmp_path, choose_measurements(), stop)
    done = [m for m in MEASUREMENTS if is_finished(tmp_path, m)]
    assert done == list(MEASUREMENTS[:5])
    assert not list(tmp_path.rglob("*.tmp"))
    names = {path.name for path in (tmp_path / "working").iterdir()}
    assert {"h2o-0.05.npz", "dense.npz"} <= names
    missing = write_report(tmp_path)
    assert "Policies by budget" in missing
    open_folder(tmp_path, "tiny", TEXT, sample.length)
    analyze(
        model,
        sample,
        tmp_path,
        choose_measurements(),
        lambda m, share: calls.append((m.name, share)),
    )
    assert [name for name, done in calls if done == 0.0][0] == stop_in.name
    for path in folder.glob("*.csv"):
        if path.stem != "neurons":
            assert (tmp_path / path.name).read_text() == path.read_text(), path.name


def test_a_folder_of_another_text_is_refused(folder, sample):
    with pytest.raises(ValueError, match="begun with text_sha256 .* choose another"):
        open_folder(folder, "tiny", "other text", sample.length)
    with pytest.raises(ValueError, match="begun with model tiny, not large"):
        open_folder(folder, "large", TEXT, sample.length)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(ValueError, match="cannot be written .* choose another folder"):
        open_folder(path, "tiny", TEXT, 100)


def test_the_report_is_one_page_with_all_figures(folder):
    assert write_report(folder) == []
    page = (folder / "report.html").read_text(encoding="utf-8")
    # Three of them are shown at the summary too.
    assert page.count("<img ") == 10 + 3 and len(list(folder.glob("*.png"))) == 10
    assert "nan" not in re.sub(r'src="[^"]*"', "", page)
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert "http" not in re.sub(r'src="[^"]*"', "", page)
    # The same tables give the same figures.
    first = (folder / "ablation.png").read_bytes()
    write_report(folder)
    assert (folder / "ablation.png").read_bytes() == first


def test_the_report_begins_with_the_paper_s_findings(folder):
    write_report(folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    head = page[: page.index("<section ")]
    assert re.findall(r'<a href="#(\w+)"><img ', head) == ["ablation", "policies", "ranks"]
    assert "<th>What the paper found</th><th>What this model does</th><th>Verdict</th>" in head
    verdicts = re.findall(r"<td>(agrees|in part|differs)</td></tr>", head)
    assert len(verdicts) == len(FINDINGS) == head.count("<tr><td>")
    assert "Not measured" not in page


def test_missing_measurements_name_their_option(folder, tmp_path):
    for name in ("settings.json", "sparsity.csv", "perplexity.csv"):
        shutil.copy(folder / name, tmp_path)
    assert len(write_report(tmp_path)) == 9
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Neurons (--neurons)" in page and "Heads and layers (--only overlap)" in page
    assert "Policies by budget (--only retention)" in page
    assert page.count("<td>not measured</td><td></td>") == len(FINDINGS) - 2


def test_legends_cover_no_point(folder):
    tables = {path.stem: read_csv(path, text=TEXT_COLUMNS) for path in folder.glob("*.csv")}
    num_drawn = 0
    for section in SECTIONS:
        figure = section.draw(tables)
        figure.draw_without_rendering()
        panels = [axes.get_window_extent() for axes in figure.axes]
        assert not any(axes.get_legend() for axes in figure.axes)
        for legend in figure.legends:
            num_drawn += 1
            box = legend.get_window_extent()
            assert not any(box.overlaps(panel) for panel in panels), section.name
            assert figure.bbox.contains(box.x0, box.y0) and figure.bbox.contains(box.x1, box.y1)
    assert num_drawn >= 8


def test_tables_are_consistent(folder, sample):
    rows = read_csv(folder / "perplexity.csv")
    assert {row["policy"] for row in rows} == {"h2o", "global", "recent", "sink_recent", "random"}
    assert all(row["low"] <= row["ratio"] <= row["high"] for row in rows)
    tokens = read_csv(folder / "token_scores.csv")
    total = sum(row["score"] for row in tokens if row["layer"] == 0)
    assert total == pytest.approx(4 * sample.length, rel=1e-3)
    masses = read_csv(folder / "retention.csv")
    assert all(0 < row["mass"] <= 1 for row in masses)
    for policy in ("h2o", "recent"):
        by_share = [
            np.mean([r["mass"] for r in masses if (r["policy"], r["share"]) == (policy, share)])
            for share in (0.05, 0.1, 0.2, 0.4)
        ]
        assert by_share == sorted(by_share)


def test_measurements_work_without_a_folder(model, sample):
    tables = MEASUREMENTS[0].run(Study(model, sample), lambda share: None)
    assert len(tables["sparsity"]) == 8


def test_neurons_are_counted(model, sample):
    frequency = activation_frequency(model, sample.input_ids)
    assert frequency.shape == (2, 64)
    assert (frequency > 0).any() and frequency.max() <= 1


def test_tables_round_trip(tmp_path):
    rows = [{"word": "7", "score": 0.5, "count": 3}, {"word": 'a,"b', "score": 2.0, "count": 1}]
    write_csv(tmp_path / "t.csv", rows)
    assert read_csv(tmp_path / "t.csv", text=TEXT_COLUMNS) == rows


class SpacelessTokenizer:
    """Decodes as tokenizers do that drop the first token's space."""

    words = {1: "▁the", 2: "▁cat", 3: "s"}

    def decode(self, token_ids, **_):
        return "".join(self.words[t] for t in token_ids).replace("▁", " ").removeprefix(" ")

    def __call__(self, text, **_):
        raise AssertionError


def test_token_pieces_have_their_leading_space():
    assert token_pieces(SpacelessTokenizer(), [1, 2, 3]) == (" the", " cat", "s")


class WordTokenizer(SpacelessTokenizer):
    """A token for each word; remembers the longest text."""

    longest = 0

    def __call__(self, text, **_):
        self.longest = max(self.longest, len(text))
        return {"input_ids": [len(word) for word in text.split()]}

    def decode(self, tokens, **_):
        return " ".join(map(str, tokens))


@pytest.mark.parametrize("longest", [5, 100])
def test_make_sample_tokenizes_only_the_beginning_of_a_novel(longest):
    tokenizer = WordTokenizer()
    lengths = [1 + index * 7 % longest for index in range(20_000)]
    text = " ".join("x" * length for length in lengths)
    sample = make_sample(tokenizer, text, 200)
    assert sample.input_ids[0].tolist() == lengths[:200]
    assert tokenizer.longest < len(text) // 2


def test_an_empty_text_is_refused():
    with pytest.raises(ValueError, match="the text is empty"):
        make_sample(SpacelessTokenizer(), " \n", 100)
