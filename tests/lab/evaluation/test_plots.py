import sys

import pytest

from h2okv_lab.evaluation.plots import plot_needles, plot_stream
from h2okv_lab.evaluation.streaming import StreamRow
from h2okv_lab.tables import check_plot

ROWS = [StreamRow(1000 * i, 3.0 + 0.2 * i, 0.01, 10**9, 10**6) for i in range(1, 9)]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_picture_is_written(tmp_path, suffix):
    path = tmp_path / f"stream{suffix}"
    check_plot(path)
    plot_stream(path, ROWS, 2048, "a stream")
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    assert path.read_bytes().startswith(begins[suffix])


@pytest.fixture
def drawn(monkeypatch):
    """Return a list that receives the figures instead of files."""
    figures = []
    monkeypatch.setattr(
        "h2okv_lab.evaluation.plots.save_figure", lambda figure, path: figures.append(figure)
    )
    return figures


def test_the_picture_shows_the_rows_and_the_window(drawn, tmp_path):
    plot_stream(tmp_path / "stream.png", ROWS, 2048, "a stream")
    quality, speed, memory = drawn[0].axes
    curve, window = quality.get_lines()
    assert list(curve.get_xdata()) == [row.position for row in ROWS]
    assert curve.get_ydata()[0] == pytest.approx(24.53, abs=0.01)
    assert window.get_xdata()[0] == 2048
    assert [text.get_text() for text in quality.texts] == [" context window, 2,048"]
    assert quality.get_yscale() == memory.get_yscale() == "log"
    assert list(speed.get_lines()[0].get_ydata()) == [10.0] * len(ROWS)
    assert [text.get_text() for text in memory.get_legend().get_texts()] == ["process", "cache"]


def test_few_or_extreme_rows_are_plotted(tmp_path):
    path = tmp_path / "stream.png"
    plot_stream(
        path, [StreamRow(10, 5000.0, 0.0, None, 10**6)], None, "one row, no window, no memory"
    )
    assert path.stat().st_size > 0
    with pytest.raises(ValueError, match="there are no rows to plot"):
        plot_stream(path, [], None, "none")


def test_a_plot_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"must end in \.png, \.svg, \.pdf"):
        check_plot(tmp_path / "stream.jpeg2")
    with pytest.raises(ValueError, match="cannot be written"):
        plot_stream(tmp_path / "nowhere" / "stream.png", ROWS, None, "")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[plot\]'"):
        check_plot(tmp_path / "stream.png")


def test_needle_plot_has_a_row_of_panels_per_compression(drawn, tmp_path):
    rows = [
        {"compression": kind, "cache": cache, "length": 512, "depth": depth,
         "string_match": 1.0}
        for kind in ("query-aware", "query-agnostic")
        for cache in ("h2o:20%", "full")
        for depth in (0.0, 1.0)
    ]  # fmt: skip
    plot_needles(tmp_path / "n.png", rows, "needles")
    grid = [axes for axes in drawn[0].axes if axes.get_title()]
    specs = {axes.get_title(): axes.get_subplotspec() for axes in grid}
    assert {title: (spec.rowspan.start, spec.colspan.start) for title, spec in specs.items()} == {
        "h2o:20%\nquery-aware": (0, 0), "full\nquery-aware": (0, 1),
        "h2o:20%\nquery-agnostic": (1, 0), "full\nquery-agnostic": (1, 1),
    }  # fmt: skip
