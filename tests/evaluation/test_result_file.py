import json

import pytest

from h2okv.evaluation.runner import SampleFile

NOW = {"h2okv": "1", "commit": "abc"}


@pytest.fixture
def path(tmp_path):
    with SampleFile(tmp_path / "r.jsonl", NOW) as file:
        file.open_cell("a", {"model": "m", "depths": (0, 1)})
        file.add("a", {0: {"x": 1.5}, 3: {"x": 2}})
    return tmp_path / "r.jsonl"


def reopened(path, versions=NOW):
    with SampleFile(path, versions) as file:
        return file.results("a")


def test_what_was_added_is_there_again(path):
    assert reopened(path) == {0: {"x": 1.5}, 3: {"x": 2}}


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_line_that_was_not_finished_is_dropped(path, cut):
    path.write_bytes(path.read_bytes()[:-cut])
    assert reopened(path) == {0: {"x": 1.5}}
    with SampleFile(path, NOW) as file:
        file.add("a", {3: {"x": 4}})
    assert reopened(path) == {0: {"x": 1.5}, 3: {"x": 4}}


def test_a_first_line_that_was_not_finished_is_written_again(path):
    path.write_bytes(path.read_bytes()[:10])
    assert reopened(path) == {}
    assert path.read_text().startswith('{"kind": "h2okv evaluation"')


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ('{"cell": "a", "sample": 1}', "is no result of h2okv evaluation"),
        ('{"cell": "a", "sample": "1", "result": {}}', "field sample is '1'"),
        ('{"cell": "b", "sample": 1, "result": {}}', "field cell is 'b'"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_line_and_stays(path, line, message):
    content = path.read_text()
    path.write_text(f"{content}{line}\n{content.splitlines()[-1]}\n")
    number = len(content.splitlines()) + 1
    with pytest.raises(ValueError, match=message) as caught:
        SampleFile(path, NOW)
    assert f"line {number} of '{path}'" in str(caught.value)
    assert line in path.read_text()


def test_another_file_is_not_touched(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("my notes")
    with pytest.raises(ValueError, match="is no result of h2okv evaluation"):
        SampleFile(path, NOW)
    assert path.read_text() == "my notes"


def test_results_of_something_else_are_refused(path):
    with SampleFile(path, NOW) as file:
        file.open_cell("a", {"model": "m", "depths": [0, 1]})
        with pytest.raises(ValueError, match="a was begun with model m, not n"):
            file.open_cell("a", {"model": "n", "depths": [0, 1]})


def test_all_code_that_took_part_is_named(path):
    with SampleFile(path, {"h2okv": "1", "commit": "def"}) as file:
        assert file.versions("a") == {"h2okv": "1", "commit": "abc"}
        file.add("a", {4: {}})
        assert file.versions("a") == {"h2okv": "1", "commit": "abc def"}
    with SampleFile(path, {"h2okv": "2", "commit": "ghi"}) as file:
        assert file.versions("a") == {"h2okv": "1", "commit": "abc def"}
        assert file.versions("new") == {"h2okv": "2", "commit": "ghi"}


def test_a_second_run_is_kept_away(path):
    pytest.importorskip("fcntl")
    with SampleFile(path, NOW), pytest.raises(ValueError, match="by another run"):
        SampleFile(path, NOW)


def test_lines_are_json_objects(path):
    assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())
