"""The support table that users read is the one that the tests run."""

from family_table import FAMILIES
from support_table import DOCUMENT, README, document, refreshed, table


def test_the_document_is_up_to_date():
    assert DOCUMENT.read_text(encoding="utf-8") == document()


def test_the_readme_is_up_to_date():
    text = README.read_text(encoding="utf-8")
    assert text == refreshed(text)


def test_every_row_is_listed_once():
    rows = [line for line in table().splitlines() if line.startswith("| ")]
    for family in FAMILIES:
        assert sum(row.startswith(f"| {family.name} |") for row in rows) == 1
