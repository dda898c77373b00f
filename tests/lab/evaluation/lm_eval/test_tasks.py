"""The tasks' documents out of their files, and files that are not right."""

import json

import pytest

pytest.importorskip("datasets", reason="lm-evaluation-harness is not installed (h2okv[eval])")

from lm_eval.tasks._yaml_loader import load_yaml

TASKS = ("copa", "rte", "piqa", "openbookqa", "winogrande", "mathqa")


def read(folder, task, split="test"):
    return list(load_yaml(folder / f"{task}.yaml")["custom_dataset"](version=1.0)[split])


@pytest.mark.parametrize(
    ("task", "count"), list(zip(TASKS, (500, 277, 1838, 500, 1267, 2985), strict=True))
)
def test_the_published_files_are_read_to_their_end(published_data, task, count):
    splits = read(published_data, task)
    assert len(splits) == count
    for document in splits:
        choices = document.get("choices", ["True", "False"])
        assert 0 <= document["label"] < len(choices)
        assert all(choice.strip() for choice in choices)


def test_documents_of_each_task(tiny_data):
    assert read(tiny_data, "copa")[0] == {
        "text": "The ground was wet because", "choices": ["it had rained.", "the sun shone."],
        "label": 0,
    }  # fmt: skip
    assert read(tiny_data, "copa")[1]["text"] == "The boy was tired therefore"
    assert len(read(tiny_data, "copa")) == 4  # the mirrored item is not COPA's own
    assert [document["label"] for document in read(tiny_data, "rte")] == [0, 1, 0, 1]
    assert read(tiny_data, "piqa")[2]["goal"] == "Cool wine."
    assert read(tiny_data, "openbookqa")[3]["choices"] == ["a star", "a moon", "wet", "cold"]
    assert "split dev" in read(tiny_data, "openbookqa", "validation")[0]["question"]
    assert read(tiny_data, "winogrande")[0] == {
        "choices": ["John saw Mary because John", "John saw Mary because Mary"],
        "after": "looked up.", "label": 0,
    }  # fmt: skip
    assert read(tiny_data, "mathqa")[0]["choices"] == ["1", "2", "1 , 000", "none", "5 cm"]
    assert read(tiny_data, "mathqa")[1]["choices"] == ["1", "2", "3", "4", "5"]
    assert read(tiny_data, "mathqa")[1]["problem"] == "what is 1 + 1 ?"


def test_a_missing_file_is_named_with_its_folder(add_task_files, tmp_path):
    with pytest.raises(ValueError, match=f"'rte_val.jsonl' is not in '{tmp_path}'.*--data"):
        read(add_task_files(tmp_path), "rte")


@pytest.mark.parametrize(
    ("task", "name", "before", "after", "words"),
    [
        ("rte", "rte_val.jsonl", "{", "[", "line 1"),
        ("rte", "rte_val.jsonl", '"premise"', '"text"', "line 1 of .* has no field premise"),
        ("rte", "rte_val.jsonl", '"entailment"', '"yes"', "line 1 of .*: field label is 'yes'"),
        ("piqa", "piqa/valid-labels.lst", "0\n", "", "3 labels for 4 questions"),
        ("piqa", "piqa/valid-labels.lst", "0", "2", "field label is '2'"),
        ("copa", "copa_balanced_dev.xml", "</copa-corpus>", "", "not a readable XML"),
        ("copa", "copa_balanced_dev.xml", "<p>The ground was wet.</p>", "", "item 1 .* no field p"),
        ("openbookqa", "openbookqa_test.tsv", "(B)", "B", "line 2 of .*: field Choices"),
        ("winogrande", "llm_adapters/winogrande_test.json", " _ ", " he ", "entry 1 of .*a blank"),
        ("mathqa", "llm_adapters/mathqa_test.json", "The options", "Options", "entry 1 .*A to E"),
        ("mathqa", "llm_adapters/mathqa_test.json", "[{", "{", "get the file again"),
    ],
)
def test_a_malformed_entry_is_named(tiny_data, task, name, before, after, words):
    path = tiny_data / name
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(ValueError, match=words):
        read(tiny_data, task)


def test_a_file_without_documents_is_refused(tiny_data):
    (tiny_data / "llm_adapters/mathqa_test.json").write_text(json.dumps([]))
    with pytest.raises(ValueError, match="has no documents"):
        read(tiny_data, "mathqa")
