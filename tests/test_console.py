import io
import re
import tomllib
from pathlib import Path

import pytest

from h2okv.console import Progress, format_bytes, format_table, optional


def test_progress_shows_count_note_and_time_left(replace_stderr):
    terminal = replace_stderr()
    with Progress("evaluating", 40, "samples") as progress:
        assert progress.is_drawn
        progress.advance(10, "h2o, [20%]")
        progress.advance(0, "recent")
        progress.advance(30)
    shown = terminal.getvalue()
    assert "evaluating" in shown
    assert "40/40 samples" in shown
    assert "recent" in shown
    assert "left" in shown


@pytest.mark.parametrize(
    ("unit", "total", "shown"),
    [
        ("", 4, "50 %"),
        ("bytes", 4096, "2.0 KiB of 4.0 KiB"),
        ("tokens", 6000, "3,000/6,000 tokens"),
    ],
)
def test_progress_writes_its_count_by_unit(replace_stderr, unit, total, shown):
    terminal = replace_stderr()
    with Progress("working", total, unit) as progress:
        progress.update(total / 2, note="half")
    assert shown in terminal.getvalue()


@pytest.mark.parametrize(("stream", "shown"), [(io.StringIO(), True), (None, False)])
def test_progress_writes_nothing_without_a_terminal_or_shown(replace_stderr, stream, shown):
    stderr = replace_stderr(stream)
    with Progress("working", 3, shown=shown) as progress:
        progress.advance()
        progress.close()
        progress.close()
    assert stderr.getvalue() == ""


def test_table_aligns_and_never_wraps():
    rows = [("h2o, heavy 10%", "1.6 MiB"), ("full", "12 MiB")]
    assert format_table(("cache", "held"), rows, left=("cache",)) == (
        "cache              held\n"
        "--------------  -------\n"
        "h2o, heavy 10%  1.6 MiB\n"
        "full             12 MiB\n"
    )
    assert format_table((), [("a", "1"), ("long", "22")]) == "a     1\nlong  22\n"


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**29, "1.5 GiB"), (2**42, "4.0 TiB")],
)
def test_format_bytes(count, expected):
    assert format_bytes(count) == expected


ROOT = Path(__file__).parents[1]


def test_a_missing_package_names_the_clone():
    """Check that no package index is named: h2okv is on none of them."""
    with pytest.raises(ValueError, match=r"in the clone of h2okv: pip install '\.\[plot\]'$"):
        optional("no_such_package", "a picture", "plot")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("src/h2okv/**/*.py")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "install 'h2okv[" not in text and "install h2okv" not in text, page
        for name in re.findall(r"pip install '\.\[([\w,]+)\]'", text):
            assert set(name.split(",")) <= set(extras), page
        if "from openai import" in text:
            assert "pip install openai" in text, page
