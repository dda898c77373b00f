"""Documents of the harness's tasks from files in the folder of this one.

A folder with these task files and the data (docs/results/paper.md) is what ``h2okv lm-eval`` and
``h2okv eval sweep`` take by ``--data``; its tasks come before the harness's of the same names.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from datasets import Dataset

from h2okv.records import parse_json, read_text_file, refusing
from h2okv_lab.evaluation.lm_eval import data_file
from h2okv_lab.tables import Entry, read_jsonl

FOLDER = Path(__file__).parent

Splits = dict[str, Dataset]
Document = dict[str, Any]

# Balanced COPA numbers the mirrored items, which are not COPA's own, from 1001.
_LAST_ORIGINAL_COPA = 500
_LETTERED = re.compile(r"\(([A-D])\) (.*?)(?= \([A-D]\) |$)")
_MATH_OPTION = re.compile(r"([A-E]) \) (.*?)(?= , [A-E] \) |$)")
_BLANK = re.compile(
    r"complete the given sentence: (?P<sentence>.*?)\s*\n+"
    r"Option1: (?P<first>.*?) Option2: (?P<second>.*?) Answer format:",
    re.DOTALL,
)


def _splits(convert: Callable[[Entry], Document | None], **files: str) -> Splits:
    """Read each split's file; ``convert`` returns None for a record to skip."""
    splits = {}
    for split, name in files.items():
        path = data_file(name, FOLDER)
        problem = f"'{path}' is not a readable {path.suffix[1:].upper()} file"
        kinds = (json.JSONDecodeError, ElementTree.ParseError, OSError)
        with refusing(problem, "get the file again", *kinds):
            converted = [convert(record) for record in _READERS[path.suffix](path)]
        documents = [document for document in converted if document is not None]
        if not documents:
            raise ValueError(f"{path} has no documents; get the file again.")
        splits[split] = Dataset.from_list(documents)
    return splits


def _read_json_list(path: Path) -> list[Entry]:
    entries = parse_json(read_text_file(path))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"'{path}' is not a JSON list of objects; get the file again")
    return [Entry(entry, f"entry {n} of '{path}'") for n, entry in enumerate(entries, start=1)]


def _read_tsv(path: Path) -> list[Entry]:
    """Read a tab-separated table with a header line."""
    rows = csv.DictReader(read_text_file(path).split("\n"), delimiter="\t", quoting=csv.QUOTE_NONE)
    return [Entry(dict(row), f"line {rows.line_num} of '{path}'") for row in rows]


def _read_items(path: Path) -> list[Entry]:
    """Read an XML file's ``item`` elements: attributes and children's texts."""
    records = []
    for number, item in enumerate(ElementTree.parse(path).getroot().iter("item"), start=1):
        fields = dict(item.attrib) | {child.tag: child.text for child in item}
        records.append(Entry(fields, f"item {item.get('id', number)} of '{path}'"))
    return records


_READERS: dict[str, Callable[[Path], Iterable[Entry]]] = {
    ".json": _read_json_list, ".jsonl": read_jsonl, ".tsv": _read_tsv, ".xml": _read_items,
}  # fmt: skip


def _copa(record: Entry) -> Document | None:
    if not record.text("id").isdigit():
        record.refuse("id", "is not a number")
    if int(record.text("id")) > _LAST_ORIGINAL_COPA:
        return None
    word = ("because", "therefore")[record.choice("asks-for", ("cause", "effect"))]
    choices = [record.text(name).strip() for name in ("a1", "a2")]
    return {
        "text": f"{record.text('p').strip().rstrip('.')} {word}",
        # As the second half of the sentence.
        "choices": [choice[:1].lower() + choice[1:] for choice in choices],
        "label": record.choice("most-plausible-alternative", ("1", "2")),
    }


def _rte(record: Entry) -> Document:
    return {
        "premise": record.text("premise"),
        "hypothesis": record.text("hypothesis"),
        "label": record.choice("label", ("entailment", "not_entailment")),
    }


def _open_book(record: Entry) -> Document:
    lettered = _LETTERED.findall(record.text("Choices"))
    if [letter for letter, _ in lettered] != list("ABCD"):
        record.refuse("Choices", "does not list (A) to (D)")
    return {
        "question": record.text("Question Stem"),
        "choices": [choice.strip() for _, choice in lettered],
        "label": record.choice("Answer Key", tuple("ABCD")),
    }


def _winogrande(record: Entry) -> Document:
    match = _BLANK.search(record.text("instruction"))
    before, blank, after = match["sentence"].partition("_") if match else ("", "", "")
    if match is None or not blank or not after.strip():
        record.refuse("instruction", "has no sentence with a blank, Option1 and Option2")
    return {
        "choices": [before + match["first"], before + match["second"]],
        "after": after.strip(),
        "label": record.choice("answer", ("option1", "option2")),
    }


def _math(record: Entry) -> Document:
    problem, mark, options = record.text("instruction").rpartition(" The options: ")
    if options.startswith("["):  # some entries have the options as a printed Python list
        options = " , ".join(re.findall(r"['\"]([A-E] \) .*?)['\"](?=, ['\"]|\]$)", options))
    lettered = _MATH_OPTION.findall(options)
    if not mark or [letter for letter, _ in lettered] != list("ABCDE"):
        record.refuse("instruction", "does not list the options A to E")
    return {
        "problem": problem,
        # MathQA is in lower case; this copy has capital A to E in the options.
        "choices": [choice.strip().lower() for _, choice in lettered],
        "label": record.choice("answer", tuple("ABCDE")),
    }


def _task(convert: Callable[[Entry], Document | None], **files: str) -> Callable[..., Splits]:
    """Return the ``custom_dataset`` function of a task file; it ignores the harness's options."""
    return lambda **_: _splits(convert, **files)


copa = _task(_copa, test="copa_balanced_dev.xml")  # Roemmele et al. 2011, development set
rte = _task(_rte, test="rte_val.jsonl")  # SuperGLUE, validation set
openbookqa = _task(_open_book, test="openbookqa_test.tsv", validation="openbookqa_dev.tsv")
winogrande = _task(_winogrande, test="llm_adapters/winogrande_test.json")  # validation set
mathqa = _task(_math, test="llm_adapters/mathqa_test.json")


def piqa(**_: Any) -> Splits:
    """Read PIQA's validation set (Bisk et al. 2020) and its labels."""
    path = data_file("piqa/valid-labels.lst", FOLDER)
    labels = path.read_text(encoding="utf-8").split()
    records = read_jsonl(data_file("piqa/valid.jsonl", FOLDER))
    if len(labels) != len(records):
        raise ValueError(
            f"{path} has {len(labels)} labels for {len(records)} questions; get both files again."
        )
    remaining = iter(labels)

    def convert(record: Entry) -> Document:
        labelled = Entry({"label": next(remaining)}, f"{path}, of {record.location}")
        return {
            "goal": record.text("goal"),
            "choices": [record.text("sol1"), record.text("sol2")],
            "label": labelled.choice("label", ("0", "1")),
        }

    return _splits(convert, test="piqa/valid.jsonl")
