"""Results survive kills, torn lines and full disks, and two jobs do not mix."""

import json
import os

import pytest

from h2okv.offload.job import JobResultFile as ResultFile
from h2okv.offload.job import PromptFile

SETTINGS = {"max_new_tokens": 4, "policy": "h2o"}


def record(name, **values):
    return {"id": name, "text": "…", "prompt_digest": "d"} | values


def results(path, **changed):
    return ResultFile(path, SETTINGS | changed)


def test_results_are_there_again(tmp_path):
    path = tmp_path / "out.jsonl"
    with results(path) as first:
        first.append([record("a"), record(1, error="no")])
        first.append([record("b")])
    with results(path) as second:
        assert list(second.finished) == ['"a"', "1", '"b"']
        assert second.num_errors == 1


def test_a_torn_line_is_dropped_wherever_it_was_cut(tmp_path):
    path = tmp_path / "out.jsonl"
    with results(path) as first:
        first.append([record("a")])
        whole = path.stat().st_size
        first.append([record("b", text="ä" * 9)])
    data = path.read_bytes()
    for cut in range(whole, len(data)):
        path.write_bytes(data[:cut])
        with results(path) as again:
            assert list(again.finished) == ['"a"']
            again.append([record("c")])
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["id"] for line in lines] == ["a", "c"]


def test_a_job_killed_before_its_first_result(tmp_path):
    path = tmp_path / "out.jsonl"
    with results(path) as first:
        first.append([record("a")])
    path.write_bytes(path.read_bytes()[:5])
    with results(path) as again:
        assert not again.finished
    assert path.read_bytes() == b""


def test_a_failed_write_leaves_the_file_as_before(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    with results(path) as file:
        file.append([record("a")])
        before = path.read_bytes()
        real_write, room = os.pwrite, 10

        def write_until_full(descriptor, data, offset):
            if offset >= len(before) + room:
                raise OSError(28, "No space left on device")
            return real_write(descriptor, data[:room], offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", write_until_full)
            with pytest.raises(ValueError, match="No space left.*goes on from there"):
                file.append([record("b")])
        assert path.read_bytes() == before
        file.append([record("b")])
        assert list(file.finished) == ['"a"', '"b"']


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"some notes of mine", "no result of h2okv batch"),
        (b"some notes\nof mine\n", "line 1, is no result"),
        (b'{"id": "a", "text": "x"}\n', "line 1, is no result"),
        (b'{"id": "a", "text": "x", "prompt_digest": "d"}\n', "cannot be read"),
    ],
)
def test_a_file_of_somebody_else_is_left_alone(tmp_path, content, words):
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        results(path)
    assert path.read_bytes() == content


def test_other_settings(tmp_path):
    path = tmp_path / "out.jsonl"
    with results(path) as file:
        file.append([record("a")])
    with pytest.raises(ValueError, match="begun with max_new_tokens 4, not 5"):
        results(path, max_new_tokens=5)
    path.unlink()  # without results there is nothing to mix
    results(path, max_new_tokens=5).close()


def test_other_prompts(tmp_path):
    path, prompts = tmp_path / "out.jsonl", tmp_path / "in.jsonl"
    prompts.write_text('{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two"}\n')
    lines = PromptFile(prompts).lines
    with results(path) as file:
        file.append([record("a", prompt_digest=lines[0].digest)])
        file.check_prompts(lines)
        prompts.write_text('{"id": "a", "prompt": "changed"}\n')
        with pytest.raises(ValueError, match='another prompt with id "a"'):
            file.check_prompts(PromptFile(prompts).lines)
        with pytest.raises(ValueError, match='id "a", which is not in the input'):
            file.check_prompts(lines[1:])


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot be written"):
        results(tmp_path / "nowhere" / "out.jsonl")
