"""The support table that users read is the one that the tests run."""

from family_table import FAMILIES
from support_table import DOCUMENT, README, document, table


def test_the_document_is_up_to_date():
    assert DOCUMENT.read_text(encoding="utf-8") == document()


def test_the_readme_counts_the_families_and_links_to_them():
    text = README.read_text(encoding="utf-8")
    assert f"{len(FAMILIES)} families are tested" in text
    assert "](docs/support-table.md)" in text


def test_every_row_is_listed_once():
    rows = [line for line in table().splitlines() if line.startswith("| ")]
    for family in FAMILIES:
        assert sum(row.startswith(f"| {family.name} |") for row in rows) == 1
