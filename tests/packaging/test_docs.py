"""The pages of docs: marked places and pictures equal the CSV files, links lead somewhere."""

import builtins
import itertools
import pkgutil
import re
from pathlib import Path

import pytest

import h2okv

ROOT = Path(__file__).parents[2]
NAMES = re.compile(r"<!-- table: ([\w-]+) -->")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def make_docs(load_script):
    return load_script("scripts/make_docs.py")


def test_marked_places_are_what_the_csv_files_give(make_docs):
    for page in make_docs.pages():
        text = page.read_text(encoding="utf-8")
        assert make_docs.filled(text) == text, f"{page.name} is out of date: run make docs"


def test_pictures_show_what_the_csv_files_give(make_docs):
    stale = [name for name in make_docs.specs()["pictures"] if not make_docs.is_current(name)]
    assert not stale, "run make docs"


def test_every_table_and_every_picture_is_on_a_page(make_docs):
    text = "".join(page.read_text(encoding="utf-8") for page in make_docs.pages())
    assert set(NAMES.findall(text)) == set(make_docs.specs()["tables"])
    for name in make_docs.specs()["pictures"]:
        assert make_docs.specs()["pictures"][name].get("optional") or f"{name}.svg)" in text


def test_a_changed_number_is_found(make_docs):
    page = ROOT / "docs" / "quality.md"
    text = page.read_text(encoding="utf-8")
    name, body = re.search(r"<!-- table: ([\w-]+) -->(.*?\d.*?)<!-- end -->", text, re.S).groups()
    changed = text.replace(body, body.replace(re.search(r"\d", body)[0], "7" + "1", 1), 1)
    assert make_docs.filled(changed) == text, name


def test_pages_are_short():
    for page in ROOT.glob("docs/*.md"):
        if page.name != "support-table.md":  # a row for each family
            lines = len(page.read_text(encoding="utf-8").splitlines())
            assert lines <= 150, f"{page.name} has {lines} lines: long tables go to docs/results"


def test_no_line_begins_with_a_value():
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        match = re.search(r"^<!-- table: [\w-]+ -->.+", page.read_text(encoding="utf-8"), re.M)
        assert not match, (
            f"{page.name}: a comment at the start of a line ends the paragraph: {match}"
        )


def test_tables_of_pages_are_short_and_have_headers():
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        lines = page.read_text(encoding="utf-8").splitlines()
        for i, line in enumerate(lines):
            if re.fullmatch(r"\|[ :|-]+", line):
                header, rows = (
                    lines[i - 1],
                    itertools.takewhile(lambda x: x[:1] == "|", lines[i + 1 :]),
                )
                assert re.search(r"\w", header), f"{page.name}:{i} is a table without a header"
                if page.name != "support-table.md":
                    assert len(list(rows)) <= 12, f"{page.name}:{i}: long tables go to docs/results"


def test_the_readme_is_short_and_has_few_links_by_task():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 125
    tasks = text.partition("## Read on")[2].partition("\n## ")[0]
    assert 0 < len(LINK.findall(tasks)) <= 8


def test_the_code_of_the_readme_is_narrow():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in "\n".join(re.findall(r"```.*?```", text, flags=re.DOTALL)).splitlines():
        assert len(line) <= (60 if "  # " in line else 93), f"a phone cuts this line: {line}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_links_between_pages_lead_somewhere(make_docs):
    pages = [*make_docs.pages(), *ROOT.glob("examples/**/*.md")]
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in LINK.findall(text):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page.name} links to {link}"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target), f"{page.name} links to {link}"


FENCES = re.compile(r"```.*?```", re.DOTALL)
OBJECTS = {
    "cache": h2okv.H2OCache, "H2OCache": h2okv.H2OCache, "CacheConfig": h2okv.CacheConfig,
    "LLM": h2okv.LLM, "AsyncLLM": h2okv.AsyncLLM, "SamplingParams": h2okv.SamplingParams,
    "EngineConfig": h2okv.EngineConfig,
}  # fmt: skip


def names_of_pages():
    """Return names that the pages mention as those of the package, with their pages."""
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        text = page.read_text(encoding="utf-8")
        inline = " ".join(re.findall(r"`([^`\n]+)`", FENCES.sub("", text)))
        for name in re.findall(r"(?<![\w./])h2okv\.([A-Za-z_][\w.]*)", text):
            yield page.name, f"h2okv.{name.rstrip('.')}"
        for name in re.findall(r"(?<![\w.])([A-Z]\w+Error)\b", inline):
            if not hasattr(builtins, name):
                yield page.name, f"h2okv.{name}"
        for kind, name in re.findall(r"(?<![\w.])(\w+)\.([a-z_]\w+)\b(?=\()", text):
            if kind in OBJECTS:
                yield page.name, f"{kind}.{name}"


def test_every_public_name_that_a_page_mentions_exists():
    mentioned = list(names_of_pages())
    assert {"h2okv.load", "h2okv.RequestFailedError", "cache.next_turn"} <= {
        n for _, n in mentioned
    }
    for page, name in mentioned:
        kind, _, attribute = name.partition(".")
        if kind in OBJECTS:
            assert hasattr(OBJECTS[kind], attribute), f"{page} names {name}"
        elif not re.search(r"\.(json|csv|md|jsonl)$", name):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError) as error:
                pytest.fail(f"{page} names {name}: {error}")


def test_the_api_page_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^::: h2okv\.(\w+)$", text, re.MULTILINE)) == set(h2okv.__all__)
    table = text.partition("## Caches")[0]
    missing = [name for name in h2okv.__all__ if f"`{name}`" not in table]
    assert all(name.endswith("Error") for name in missing), missing


def test_pages_that_code_names_exist():
    for folder in ("src", "tests", "benchmarks", "examples", "scripts"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".sh", ".yaml", ".toml", ".ipynb", ".txt"):
                text = path.read_text(encoding="utf-8")
                for page in re.findall(r"\bdocs/[\w/-]+\.md\b", text):
                    assert (ROOT / page).is_file(), f"{path.name} names {page}"


@pytest.mark.parametrize(
    ("row", "template", "cell"),
    [
        ({"share": 0.186}, "{share:.1%}", "18.6 %"),
        ({"kl": 0.25, "low": ""}, "{kl:.2f} ({low:.2f})", ""),
        ({"kl": -0.5}, "{kl:+.2f}", "-0.50"),
    ],
)
def test_templates(make_docs, row, template, cell):
    assert make_docs.Template().fill(template, row) == cell


def test_a_misspelled_column_is_an_error(make_docs):
    with pytest.raises(ValueError, match="no column 'kll'"):
        make_docs.Template().fill("{kll:.2f}", {"kl": 1.0})


def test_rows_are_averaged_and_compared(make_docs, tmp_path, monkeypatch):
    (tmp_path / "rows.csv").write_text("cache,at,nll\nfull,1,1.0\nfull,1,3.0\nh2o,1,2.5\n")
    monkeypatch.setattr(make_docs, "ROOT", tmp_path)
    spec = {
        "csv": "rows.csv",
        "mean": {"columns": ["nll"], "by": ["cache", "at"]},
        "base": {"where": {"cache": "full"}, "by": ["at"]},
        "where": {"cache": "h2o"},
        "compute": {"more": "nll - base_nll"},
    }
    (row,) = make_docs.read(spec, {})
    assert row["more"] == 0.5
    assert make_docs.read({"csv": "none.csv", "optional": True}, {}) == []
    with pytest.raises(ValueError, match=r"none\.csv is missing"):
        make_docs.read({"csv": "none.csv"}, {})
