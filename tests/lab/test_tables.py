"""Tables that come back, and the data of people's files."""

import pytest

from h2okv_lab.tables import CsvFile, markdown_table, read_csv, read_jsonl, write_csv


@pytest.mark.parametrize(
    "make", [lambda path: CsvFile(path, ["a"]), lambda path: write_csv(path, [])]
)
def test_a_missing_folder_is_refused(tmp_path, make):
    with pytest.raises(ValueError, match="cannot be written .* choose another path"):
        make(tmp_path / "nowhere" / "out")


def test_tables_round_trip(tmp_path):
    path = tmp_path / "t.csv"
    write_csv(path, [{"a": 1, "word": "7", "c": 1 / 3}, {"a": 2.0, "b": None, "word": "x,\n"}])
    assert path.read_text().splitlines()[0] == "a,b,word,c"
    assert read_csv(path, text=["word"]) == [
        {"a": 1, "b": None, "word": "7", "c": 0.333333},
        {"a": 2, "b": None, "word": "x,\n", "c": None},
    ]
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not a valid table"):
        read_csv(path)


def test_a_csv_file_is_continued_without_its_truncated_row(tmp_path):
    path = tmp_path / "t.csv"
    for value in (1, 2.5):
        file = CsvFile(path, ["a", "b"])
        file.append({"a": value, "b": "x"})
        file.close()
        with path.open("a") as torn:
            torn.write("3,")
    CsvFile(path, ["a", "b"]).close()
    assert path.read_text() == "a,b\n1,x\n2.5,x\n"
    with pytest.raises(ValueError, match="holds other columns"):
        CsvFile(path, ["a", "c"])
    path.write_text("my notes")
    with pytest.raises(ValueError, match="holds other columns"):
        CsvFile(path, ["a", "b"])
    assert path.read_text() == "my notes"


def test_lines_are_objects_with_a_location(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"n": 2, "kind": "b", "text": "line\u2028end"}\n\n{"n": 0}\n')
    first, second = read_jsonl(path)
    assert (first.number("n", 1), first.choice("kind", ("a", "b"))) == (2, 1)
    assert first.texts("text") == ("line\u2028end",) and second.number("m", 7) == 7
    for read, words in (
        (lambda: second.number("n", 1), "field n is 0; give a whole number"),
        (lambda: second.choice("kind", ("a",)), "field kind is 'None'; give one of a"),
        (lambda: second.text("text"), "has no field text"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            read()
        assert f"line 3 of '{path}'" in str(caught.value)


def test_a_bar_in_a_cell_is_escaped():
    table = markdown_table(["a", "b"], [["x|y", 1.0]])
    assert table == "| a | b |\n|---|---:|\n| x\\|y | 1.0000 |\n"
