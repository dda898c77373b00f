"""Local copies of harness tasks."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from datasets import Dataset

from h2okv.evaluation.lm_eval.launcher import data_file
from h2okv.records import Record, read_jsonl, read_text_file


def _read_json_list(path: Path) -> Iterator[Record]:
    """Reads a file that is one JSON list of objects."""
    try:
        entries = json.loads(read_text_file(path))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"line {error.lineno} of '{path}': {error.msg}; get the file again"
        ) from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"'{path}' is not a JSON list of objects; get the file again")
    for number, entry in enumerate(entries, start=1):
        yield Record(entry, f"entry {number} of '{path}'")


def _read_tsv(path: Path) -> Iterator[Record]:
    """Reads a table with tabs between the columns and their names in the first line."""
    rows = csv.DictReader(read_text_file(path).split("\n"), delimiter="\t", quoting=csv.QUOTE_NONE)
    for row in rows:
        yield Record(dict(row), f"line {rows.line_num} of '{path}'")


def _read_items(path: Path) -> Iterator[Record]:
    """Reads an XML file's ``item`` elements: attributes and the texts of its children."""
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, OSError) as error:
        raise ValueError(
            f"'{path}' is not a readable XML file ({error}); get the file again"
        ) from error
    for number, item in enumerate(root.iter("item"), start=1):
        fields = dict(item.attrib) | {child.tag: child.text for child in item}
        yield Record(fields, f"item {item.get('id', number)} of '{path}'")


Splits = dict[str, Dataset]

_LAST_ORIGINAL_COPA = 500
"""Balanced COPA numbers the mirrored items, which are not COPA's own, from 1001."""

_LETTERED = re.compile(r"\(([A-D])\) (.*?)(?= \([A-D]\) |$)")
_MATH_OPTION = re.compile(r"([A-E]) \) (.*?)(?= , [A-E] \) |$)")
_BLANK = re.compile(
    r"complete the given sentence: (?P<sentence>.*?)\s*\n+"
    r"Option1: (?P<first>.*?) Option2: (?P<second>.*?) Answer format:",
    re.DOTALL,
)


def copa(**_: Any) -> Splits:
    """COPA's development set (Roemmele et al. 2011) out of ``copa_balanced_dev.xml``."""
    documents = []
    for record in _read_items(data_file("copa_balanced_dev.xml")):
        if not record.text("id").isdigit():
            record.refuse("id", "is not a number")
        if int(record.text("id")) > _LAST_ORIGINAL_COPA:
            continue
        word = ("because", "therefore")[record.choice("asks-for", ("cause", "effect"))]
        documents.append(
            {
                "text": f"{record.text('p').strip().rstrip('.')} {word}",
                "choices": [_lowered(record.text("a1")), _lowered(record.text("a2"))],
                "label": record.choice("most-plausible-alternative", ("1", "2")),
            }
        )
    return {"test": _dataset(documents, "copa_balanced_dev.xml")}


def rte(**_: Any) -> Splits:
    """RTE's validation set (SuperGLUE) from ``rte_val.jsonl``."""
    documents = [
        {
            "premise": record.text("premise"),
            "hypothesis": record.text("hypothesis"),
            "label": record.choice("label", ("entailment", "not_entailment")),
        }
        for record in read_jsonl(data_file("rte_val.jsonl"))
    ]
    return {"test": _dataset(documents, "rte_val.jsonl")}


def piqa(**_: Any) -> Splits:
    """PIQA's validation set (Bisk et al. 2020) from ``piqa/valid.jsonl`` and its labels."""
    path = data_file("piqa/valid-labels.lst")
    labels = path.read_text(encoding="utf-8").split()
    records = list(read_jsonl(data_file("piqa/valid.jsonl")))
    if len(labels) != len(records):
        raise ValueError(
            f"{path} has {len(labels)} labels for {len(records)} questions; get both files again."
        )
    documents = []
    for record, label in zip(records, labels, strict=True):
        labelled = Record({"label": label}, f"{path}, of {record.place}")
        documents.append(
            {
                "goal": record.text("goal"),
                "choices": [record.text("sol1"), record.text("sol2")],
                "label": labelled.choice("label", ("0", "1")),
            }
        )
    return {"test": _dataset(documents, "piqa/valid.jsonl")}


def openbookqa(**_: Any) -> Splits:
    """OpenBookQA's test and development sets from ``openbookqa_test.tsv`` and ``_dev.tsv``."""
    return {
        split: _dataset(map(_open_book, _read_tsv(data_file(name))), name)
        for split, name in (("test", "openbookqa_test.tsv"), ("validation", "openbookqa_dev.tsv"))
    }


def winogrande(**_: Any) -> Splits:
    """WinoGrande's validation set from ``llm_adapters/winogrande_test.json``."""
    name = "llm_adapters/winogrande_test.json"
    return {"test": _dataset(map(_winogrande, _read_json_list(data_file(name))), name)}


def mathqa(**_: Any) -> Splits:
    """MathQA's test set from ``llm_adapters/mathqa_test.json``."""
    name = "llm_adapters/mathqa_test.json"
    return {"test": _dataset(map(_math, _read_json_list(data_file(name))), name)}


def _open_book(record: Record) -> dict[str, Any]:
    found = _LETTERED.findall(record.text("Choices"))
    if [letter for letter, _ in found] != list("ABCD"):
        record.refuse("Choices", "does not list (A) to (D)")
    return {
        "question": record.text("Question Stem"),
        "choices": [choice.strip() for _, choice in found],
        "label": record.choice("Answer Key", tuple("ABCD")),
    }


def _winogrande(record: Record) -> dict[str, Any]:
    found = _BLANK.search(record.text("instruction"))
    before, blank, after = found["sentence"].partition("_") if found else ("", "", "")
    if found is None or not blank or not after.strip():
        record.refuse("instruction", "holds no sentence with a blank, Option1 and Option2")
    assert found is not None
    return {
        "choices": [before + found["first"], before + found["second"]],
        "after": after.strip(),
        "label": record.choice("answer", ("option1", "option2")),
    }


def _math(record: Record) -> dict[str, Any]:
    problem, mark, options = record.text("instruction").rpartition(" The options: ")
    if options.startswith("["):  # some entries have the options as a printed Python list
        options = " , ".join(re.findall(r"['\"]([A-E] \) .*?)['\"](?=, ['\"]|\]$)", options))
    found = _MATH_OPTION.findall(options)
    if not mark or [letter for letter, _ in found] != list("ABCDE"):
        record.refuse("instruction", "does not list the options A to E")
    return {
        "problem": problem,
        # MathQA is in small letters; the making of this file has capitalised a to e in the options.
        "choices": [choice.strip().lower() for _, choice in found],
        "label": record.choice("answer", tuple("ABCDE")),
    }


def _lowered(choice: str) -> str:
    """A choice as the second half of a sentence."""
    choice = choice.strip()
    return choice[:1].lower() + choice[1:]


def _dataset(documents: Iterable[dict[str, Any]], name: str) -> Dataset:
    found = list(documents)
    if not found:
        raise ValueError(f"{data_file(name)} holds no documents; get the file again.")
    return Dataset.from_list(found)
