"""Files that are whole or not there, results that survive kills."""

import json
import os

import pytest

from h2okv.provenance import digest
from h2okv.records import Record, ResultFile, atomic_write, parse_json, unknown_name, write_json

SETTINGS = {"policy": "h2o", "decay": None}


class Results(ResultFile):
    def __init__(self, path, settings=SETTINGS):
        self.names = []
        super().__init__(path, "a test", settings=settings)

    def take(self, record):
        if "id" not in record.fields:
            raise ValueError(f"{record.location} has no field id")
        self.names.append(record.fields["id"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


def begun(path, *names, **options):
    with Results(path, **options) as file:
        file.append([{"id": name, "text": "ä" * 9} for name in names])
    return path.read_bytes()


@pytest.mark.parametrize("settings", [SETTINGS, None])
def test_a_truncated_last_line_is_dropped(path, settings):
    complete = len(begun(path, "a", settings=settings))
    data = begun(path, "b", settings=settings)
    for cut in range(complete, len(data)):
        path.write_bytes(data[:cut])
        with Results(path, settings) as again:
            assert again.names == ["a"]
            again.append([{"id": "c"}])
            assert again.names == ["a", "c"]
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [json.loads(line).get("id") for line in lines][-2:] == ["a", "c"]


def test_a_run_killed_before_its_first_result(path):
    begun(path, "a")
    path.write_bytes(path.read_bytes()[:5])
    with Results(path) as again:
        assert not again.names
    assert path.read_bytes() == b""


class Full:
    """A file on a disk with room for ten more bytes."""

    def __init__(self, file):
        self.file, self.room = file, 10

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        written, self.room = self.file.write(data[: self.room]), 0
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_failed_write_leaves_the_file_as_before(path, monkeypatch):
    with Results(path) as file:
        file.append([{"id": "a"}])
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(file, "_file", Full(file._file))
            with pytest.raises(ValueError, match="No space left.*goes on from there"):
                file.append([{"id": "b"}])
        assert path.read_bytes() == before and file.names == ["a"]
        file.append([{"id": "b"}])
    with Results(path) as again:
        assert again.names == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"some notes of mine", "line 1 of .* is not a result of a test"),
        (b"some notes\nof mine\n", "line 1 of .* is not JSON"),
        (b'{"name": "a"}\n', "line 1 of .* has no field id"),
        (b'{"id": "a"}\n', "in the same folder, cannot be read"),
    ],
)
def test_a_foreign_file_is_not_changed(path, content, words):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        Results(path)
    assert path.read_bytes() == content


def test_other_settings_are_named_and_refused(path):
    begun(path, "a")
    with pytest.raises(ValueError, match="begun with policy h2o, not recent"):
        Results(path, {**SETTINGS, "policy": "recent"})
    with pytest.raises(ValueError, match="begun with sink unset, not 4"):
        Results(path, {**SETTINGS, "sink": 4})
    path.unlink()  # without results there is nothing to mix
    Results(path, {"policy": "recent"}).close()


def test_another_kind_or_version_is_refused(path):
    begun(path, "a", settings=None)
    with pytest.raises(ValueError, match="is not a result of another"):
        ResultFile(path, "another")
    with pytest.raises(ValueError, match="is not a result of a test"):
        ResultFile(path, "a test", version=2)


def test_half_a_surrogate_pair_is_replaced(path):
    begun(path, settings=None)
    with Results(path, None) as file:
        file.append([{"id": "a", "text": "\ud800"}])
    with Results(path, None) as again:
        assert again.names == ["a"]


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be written .* choose another path"):
        Results(tmp_path / "nowhere" / "out")


def test_atomic_write_replaces_or_keeps_the_file(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before"
    with atomic_write(path, "wb") as file:
        file.write(b"after")
    assert path.read_bytes() == b"after"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.txt"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_or_a_device_stays_in_its_place(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for write in (lambda: write_json(pipe, {}), lambda: Results(pipe)):
        with pytest.raises(ValueError, match="pipe' cannot be written .*; .*choose another path"):
            write()
        assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
        assert pipe.is_fifo()


def test_two_writers_of_one_file_have_separate_drafts(tmp_path):
    path, mine = tmp_path / "x.json", tmp_path / "x.json.tmp"
    mine.write_text("mine")
    with atomic_write(path) as first:
        first.write("first" * 100)
        with atomic_write(path) as second:
            second.write("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" * 100
    write_json(path, 1)
    assert mine.read_text() == "mine"
    assert {entry.name for entry in tmp_path.iterdir()} == {"x.json", "x.json.tmp"}


def test_a_draft_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "new").touch()
    write_json(tmp_path / "x.json", 1)
    assert (tmp_path / "x.json").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_deeply_nested_json_is_refused():
    with pytest.raises(json.JSONDecodeError, match="nested too deeply"):
        parse_json("[" * 200_000)


def test_a_record_is_an_object():
    with pytest.raises(ValueError, match="is not a JSON object; give a question"):
        Record.parse("[1]", "line 1", "a question")


def test_an_unknown_name_has_close_matches():
    error = unknown_name("policy", "h20", ["h2o", "recent"])
    assert str(error) == "policy 'h20' is unknown; did you mean h2o? choose from h2o, recent"


def test_digest_is_equal_for_text_and_bytes():
    assert digest("ä") == digest("ä".encode()) != digest("a")
    assert len(digest("\ud800")) == 16
