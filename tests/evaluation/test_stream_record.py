import errno
from types import SimpleNamespace

import pytest

from h2okv.engine.memory import resident_bytes
from h2okv.evaluation.streaming import COLUMNS, Row, RowFile, read_rows

ROWS = [Row(100, 0.1 + 0.2, 0.0125, 1000, 50), Row(200, 1 / 3, 0.25, None, 50)]


def test_rows_come_back_exactly(tmp_path):
    path = tmp_path / "rows.csv"
    file = RowFile(path)
    file.append(ROWS[:1])
    assert read_rows(path) == ROWS[:1]  # before it is closed, as after a kill
    file.append(ROWS[1:])
    assert read_rows(path) == ROWS
    assert path.read_text().splitlines()[0] == "position,nll,step_seconds,rss_bytes,cache_bytes"
    file.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.csv"]


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "rows.csv"
    file = RowFile(path)
    file.append([*ROWS, Row(250, 9.0, 1.0, 1, 1)])
    file.close()
    file = RowFile(path, ROWS[:1])
    file.append(ROWS[1:])
    file.close()
    assert read_rows(path) == ROWS


def test_a_lost_file_is_made_again(tmp_path):
    path = tmp_path / "rows.csv"
    RowFile(path, ROWS).close()
    assert read_rows(path) == ROWS


def test_what_is_there_is_not_overwritten(tmp_path):
    path = tmp_path / "rows.csv"
    RowFile(path).close()
    with pytest.raises(ValueError, match="exists already; go on with it by --resume"):
        RowFile(path)
    path.write_text("name,age\nAnn,7\n")
    with pytest.raises(ValueError, match="does not hold a stream's rows"):
        RowFile(path, ROWS)
    assert path.read_text() == "name,age\nAnn,7\n"
    with pytest.raises(ValueError, match="does not hold a stream's rows"):
        read_rows(path)
    path.write_text(",".join(COLUMNS) + "\n1,2,3,4,5\n1,x,3,4,5\n")
    with pytest.raises(ValueError, match="line 3 of"):
        read_rows(path)


def test_a_place_that_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="cannot be written"):
        RowFile(tmp_path / "nowhere" / "rows.csv")


def test_a_full_disk_brings_a_sentence(tmp_path, monkeypatch):
    file = RowFile(tmp_path / "rows.csv")

    def no_room():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file, "_file", SimpleNamespace(flush=no_room))
    with pytest.raises(ValueError, match=r"cannot be written \(No space left on device\)"):
        file.append(ROWS)
    monkeypatch.undo()
    file.close()


def test_resident_memory_grows_with_what_is_held():
    before = resident_bytes()
    if before is None:
        pytest.skip("this system has no /proc")
    block = bytearray(b"x") * (64 << 20)
    assert resident_bytes() - before > 0.9 * len(block)
