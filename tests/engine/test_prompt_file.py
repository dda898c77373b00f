"""The job's prompts: what is refused, and a file that changes under the job."""

import pytest

from h2okv.offload.job import PromptFile


def write(tmp_path, text):
    path = tmp_path / "in.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_prompts_come_back(tmp_path):
    path = write(tmp_path, '\ufeff{"id": 1, "prompt": "ä"}\r\n\n{"id": "1", "prompt": ["?"]}')
    file = PromptFile(path)
    assert [line.id for line in file.lines] == [1, "1"]
    assert [file.read(line) for line in reversed(file.lines)] == [["?"], "ä"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"id": 1, "prompt": "a"}\n{"id": 2', "line 2: this is no JSON object"),
        ('["id", "prompt"]\n', "line 1: this is no JSON object"),
        (b'{"id": 1, "prompt": "\xe9"}\n', "line 1: this is not UTF-8"),
        ('{"prompt": "a"}\n', "line 1: id null is no name"),
        ('{"id": true, "prompt": "a"}\n', "id true is no name"),
        ('{"id": 1.5, "prompt": "a"}\n', "id 1.5 is no name"),
        (
            '{"id": 1, "prompt": "a"}\n\n{"id": 1, "prompt": "b"}\n',
            "line 3: id 1 is that of line 1",
        ),
        ("\n\n", "has no prompts"),
    ],
)
def test_bad_lines(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        PromptFile(write(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot be read.*JSONL"):
        PromptFile(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("change", ["other text", "shorter", "gone"])
def test_a_file_that_changes(tmp_path, change):
    path = write(tmp_path, '{"id": 1, "prompt": "a"}\n{"id": 2, "prompt": "b"}\n')
    file = PromptFile(path)
    if change == "gone":
        path.unlink()
    else:
        path.write_text('{"id": 1, "prompt": "x"}\n' if change == "other text" else "{}\n")
    with pytest.raises(ValueError, match="has changed while it was read|cannot be read"):
        file.read(file.lines[1])
