"""Write prompts in the manner of RULER (arXiv 2404.06654), for ``h2okv eval fidelity``.

Six tasks, hidden in sentences of a book: one number, one of several, all numbers of one name, the
numbers of two names, a variable that is passed on, and the most frequent word of a list. Each task
makes two files of the same questions: TASK-agnostic.jsonl, whose context is evicted from before the
question is known, and TASK-aware.jsonl, where it is read together with the question.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

NAMES = re.findall(
    r"\w+",
    "Anna Boris Clara David Elena Felix Greta Henry Irene Jonas Karin Louis Maria Nils Olga Peter",
)
WORDS = re.findall(
    r"\w+",
    "apple bridge candle desert engine forest garden hammer island jacket kitchen ladder mirror"
    " needle orange pencil rabbit saddle ticket window",
)
Item = tuple[list[str], str, str]
"""Sentences to hide, the question up to its answer, the answer."""


def _number(rng: random.Random) -> str:
    return str(rng.randint(10_000, 99_999))


def _fact(name: str, number: str) -> str:
    return f"The secret number of {name} is {number}."


def _several(rng: random.Random, names: int) -> Item:
    numbers = {name: _number(rng) for name in rng.sample(NAMES, names)}
    name = rng.choice(list(numbers))
    facts = [_fact(*pair) for pair in numbers.items()]
    return facts, f"The secret number of {name} is", f" {numbers[name]}"


def _single(rng: random.Random) -> Item:
    return _several(rng, 1)


def _multikey(rng: random.Random) -> Item:
    return _several(rng, 6)


def _multivalue(rng: random.Random) -> Item:
    name, numbers = rng.choice(NAMES), [_number(rng) for _ in range(3)]
    facts = [f"One of the secret numbers of {name} is {number}." for number in numbers]
    question = f"In the order of the text, the secret numbers of {name} are"
    return facts, question, f" {numbers[0]}, {numbers[1]} and {numbers[2]}"


def _multiquery(rng: random.Random) -> Item:
    names = rng.sample(NAMES, 4)
    numbers = {name: _number(rng) for name in names}
    facts = [_fact(name, number) for name, number in numbers.items()]
    first, second = names[:2]
    question = f"The secret numbers of {first} and {second} are"
    return facts, question, f" {numbers[first]} and {numbers[second]}"


def _tracking(rng: random.Random) -> Item:
    names, number = rng.sample(NAMES, 3), _number(rng)
    facts = [f"The secret number of {names[0]} is {number}."]
    for before, after in zip(names, names[1:], strict=False):
        facts.append(f"The secret number of {after} is the same as that of {before}.")
    return facts, f"So the secret number of {names[-1]} is", f" {number}"


def _common_words(rng: random.Random) -> Item:
    often, *others = rng.sample(WORDS, 9)
    facts = [f"The list says: {word}." for word in [often] * 6 + others]
    return facts, "The word that the list says most often is", f" {often}"


TASKS: dict[str, tuple[Callable[[random.Random], Item], bool]] = {
    # Whether the sentences keep their order.
    "single": (_single, False),
    "multikey": (_multikey, False),
    "multivalue": (_multivalue, True),
    "multiquery": (_multiquery, False),
    "tracking": (_tracking, True),
    "common_words": (_common_words, False),
}


def hide(rng: random.Random, sentences: list[str], facts: list[str], ordered: bool) -> str:
    """Put facts between sentences, none of them among the last tenth."""
    indices = [rng.randrange(1, max(2, len(sentences) * 9 // 10)) for _ in facts]
    if ordered:
        indices.sort()
    hidden = list(sentences)
    pairs = sorted(zip(indices, facts, strict=True), key=lambda pair: pair[0])
    # From the end: earlier indices stay valid.
    for index, fact in reversed(pairs):
        hidden.insert(index, fact)
    return " ".join(hidden)


def write_prompts(book: Path, out: Path, tokens: int, items: int, seed: int = 0) -> None:
    """Write two files of each task into a folder; a seed's first items are always the same."""
    text = re.sub(r"\s+", " ", book.read_text(encoding="utf-8"))
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", text) if 30 < len(s) < 250][500:]
    if len(sentences) < 2:
        raise ValueError(f"'{book}' is too short; give a book of some thousand sentences.")
    out.mkdir(parents=True, exist_ok=True)
    for task, (make, ordered) in TASKS.items():
        agnostic, aware = [], []
        for number in range(items):
            rng = random.Random(f"{task} {number} {seed}" if seed else f"{task} {number}")
            facts, question, answer = make(rng)
            room = tokens * 4.2 - sum(map(len, facts))
            start = at = rng.randrange(len(sentences) // 2)
            while room > 0 and at < len(sentences):
                room -= len(sentences[at]) + 1
                at += 1
            context = hide(rng, sentences[start:at], facts, ordered)
            agnostic.append({"context": context, "prompt": f"\n{question}", "answer": answer})
            aware.append({"prompt": f"{context}\n{question}", "answer": answer})
        for kind, records in (("agnostic", agnostic), ("aware", aware)):
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (out / f"{task}-{kind}.jsonl").write_text(lines, encoding="utf-8")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/recall_prompts.py moby_dick.txt prompts --tokens 1024",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("text", type=Path, help="a book")
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--tokens", type=int, default=1024, help="of a context, at 4.2 characters")
    parser.add_argument("--items", type=int, default=40, help="of each task")
    args = parser.parse_args()
    write_prompts(args.text, args.out, args.tokens, args.items)


if __name__ == "__main__":
    main()
