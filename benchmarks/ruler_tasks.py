"""Write RULER's 13 tasks (Hsieh et al., arXiv 2404.06654), generated from their definitions.

    python benchmarks/ruler_tasks.py --model MODEL --data DIR --out ruler --limit 10
    h2okv eval sweep ruler --model MODEL --data ruler --out results

A context, then a question that the cache has not seen when it is compressed. Sizes are the paper's
defaults, the words of the prompts are ours, in the chat template of the model if it has one. What
the paper takes from the network comes from files of DIR: a book in place of essays and word lists,
and SQuAD (dev-v2.0.json) and HotpotQA (hotpot_dev_distractor_v1.json) for the two tasks that ask
about documents; --only leaves tasks out. Lines are RULER's, with the field ``question`` beside.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import quality

from h2okv.assets import sample_prompt
from h2okv.models.loading import describe
from h2okv.prompts.chat_template import chat_text, encode
from h2okv.records import atomic_write, read_text_file
from h2okv_lab.evaluation.lm_eval import data_file

_SEED = 42
_NOISE = "Rain falls on the hills. The road is long and dry. A dog sleeps. No one passes by today."
_DEPTHS = 40  # places where needles may lie
_MARK = "<<<the question>>>"
_DOCUMENTS = "The documents below answer a question. Reply with the answer alone.\n\n"


class Sample(NamedTuple):
    """A context, a question that follows it, how the answer begins, and what it must contain."""

    context: str
    question: str
    prefix: str
    answers: Sequence[str]


Build = Callable[[int, random.Random], Sample]  # of a size, which the length decides


@dataclass(frozen=True)
class Sources:
    """What contexts are made of."""

    text: str  # a book
    data: Path | None  # the folder of the documents
    length: int  # tokens of all

    @cached_property
    def words(self) -> list[str]:
        """All words of the book, in order."""
        return self.text.split()

    @cached_property
    def vocabulary(self) -> list[str]:
        """Its distinct words in lower case."""
        return sorted({word for word in self.words if re.fullmatch("[a-z]{4,10}", word)})


def needles(
    n: int, rng: random.Random, sources: Sources, haystack: str = "essay", key: str = "words",
    value: str = "numbers", keys: int = 1, values: int = 1, queries: int = 1,
) -> Sample:  # fmt: skip
    """Hide values under keys, in n words of a book, lines of noise, or other needles."""

    def draw(kind: str) -> str:
        if kind == "numbers":
            return str(rng.randint(10**6, 10**7 - 1))
        if kind == "uuids":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return "-".join(rng.sample(sources.vocabulary, 2))

    def sentence(key: str, answer: str) -> str:
        return f"Note: the secret {value[:-1]} of {key} is {answer}."

    hidden = {draw(key): [draw(value) for _ in range(values)] for _ in range(max(keys, queries))}
    sentences = [sentence(name, answer) for name, drawn in hidden.items() for answer in drawn]
    queried = rng.sample(sorted(hidden), queries)
    rng.shuffle(sentences)
    depths = sorted(rng.sample(range(_DEPTHS), len(sentences)))
    if haystack == "essay":
        start = rng.randrange(max(1, len(sources.words) - n))
        lines = re.split(r"(?<=[.!?]) ", " ".join(sources.words[start : start + n]))
    elif haystack == "noise":
        lines = [_NOISE] * n
    else:
        lines = [sentence(draw(key), draw(value)) for _ in range(n)]
    for depth, line in zip(reversed(depths), reversed(sentences), strict=True):
        lines.insert(round(len(lines) * depth / (_DEPTHS - 1)), line)
    text = (" " if haystack == "essay" else "\n").join(lines)
    noun, verb = (value[:-1], "is") if queries * values == 1 else (value, "are")
    names = ", ".join(queried[:-1]) + (" and " if len(queried) > 1 else "") + queried[-1]
    context = f"The text below contains notes with secret {value}. Remember them.\n{text}\n"
    question = f"According to the notes in the text, which {verb} the secret {noun} of {names}?"
    prefix = f"According to the notes, the secret {noun} of {names} {verb}"
    return Sample(
        context, question, prefix, [answer for name in queried for answer in hidden[name]]
    )


def variables(n: int, rng: random.Random, sources: Sources, hops: int = 4) -> Sample:
    """Trace a chain of assignments in n lines of noise, after one solved example."""

    def chain(lines: int, letters: int) -> tuple[str, str, list[str]]:
        names: dict[str, None] = {}
        while len(names) <= hops:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        value = str(rng.randint(10000, 99999))
        ordered = list(names)
        steps = [f"VAR {ordered[0]} = {value}"]
        steps += [f"VAR {b} = VAR {a}" for a, b in zip(ordered, ordered[1:], strict=False)]
        text = [_NOISE] * max(lines, hops + 1)
        depths = sorted(rng.sample(range(len(text)), len(steps)))
        for depth, step in zip(reversed(depths), reversed(steps), strict=True):
            text.insert(depth, step)
        task = "The text below contains assignments of variables. Remember which has which value."
        return f"{task}\n\n" + "\n".join(text) + "\n", value, ordered

    def question_of(value: str) -> tuple[str, str]:
        return (
            f"Question: Which variables have the value {value}, directly or by other variables?",
            f"Answer: The {hops + 1} variables with the value {value} are:",
        )

    example, value, names = chain(5, 3)
    solved = f"{example}{' '.join(question_of(value))} {' '.join(names)}\n\n"
    context, value, names = chain(n, 5)
    return Sample(solved + context, *question_of(value), names)


def common_words(n: int, rng: random.Random, sources: Sources) -> Sample:
    """List ten words thirty times among n others three times, after one solved example.

    Below 4,096 tokens, which the paper does not have, the ten come less often.
    """
    question = "Question: Which 10 words are the most frequent ones of the list?"
    prefix = "Answer: The 10 most frequent words of the list are:"

    def listed(common: int, others: int, rare: int) -> tuple[str, list[str]]:
        drawn = rng.sample(sources.vocabulary, 10 + others)
        words = drawn[:10] * common + drawn[10:] * rare
        rng.shuffle(words)
        text = " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
        task = "Remember which words of this numbered list occur most often:"
        return f"{task}\n{text}\n", drawn[:10]

    example, answers = listed(min(5, 1 + sources.length // 1024), 10, 1)
    numbered = " ".join(f"{number}. {word}" for number, word in enumerate(answers, start=1))
    context, expected = listed(
        min(30, 30 * sources.length // 4096), min(n, len(sources.vocabulary) - 10), 3
    )
    return Sample(
        f"{example}{question} {prefix} {numbered}\n\n{context}", question, prefix, expected
    )


def frequent_words(n: int, rng: random.Random, sources: Sources) -> Sample:
    """Draw n coded words, of one for 50 tokens, by Zipf's law (exponent 2); the first is noise."""
    size = max(8, sources.length // 50)
    coded: dict[str, None] = {"....": None}
    while len(coded) < size:
        coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    counts = [int(n * rank**-2 / (math.pi**2 / 6)) for rank in range(1, size + 1)]
    words = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
    rng.shuffle(words)
    context = f"Count how often each word of this coded text occurs: {' '.join(words)}\n"
    question = (
        "Question: Which three words of the coded text are the most frequent ones, apart from"
        " '....'? Name the words alone."
    )
    prefix = "Answer: The three most frequent words of the coded text are:"
    return Sample(context, question, prefix, list(coded)[1:4])


def documents(n: int, rng: random.Random, sources: Sources, file: str) -> Sample:
    """Ask about one of n documents of a data set of questions."""
    texts, questions = _read_questions(data_file(file, sources.data))
    query, answers, gold = rng.choice(questions)
    others = [text for text in texts if text not in gold]
    shown = [*gold, *rng.sample(others, min(max(0, n - len(gold)), len(others)))]
    rng.shuffle(shown)
    listed = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(shown, start=1))
    context = f"{_DOCUMENTS}{listed}\n\n"
    return Sample(context, f"{_DOCUMENTS}Question: {query}", "Answer:", answers)


@lru_cache
def _read_questions(path: Path) -> tuple[list[str], list[tuple[str, list[str], list[str]]]]:
    """Read the JSON of SQuAD or of HotpotQA: all documents; questions, answers, documents."""
    content = json.loads(read_text_file(path))
    questions: list[tuple[str, list[str], list[str]]] = []
    texts: dict[str, None] = {}
    if isinstance(content, dict):
        for paragraph in (p for article in content["data"] for p in article["paragraphs"]):
            texts[paragraph["context"]] = None
            for entry in paragraph["qas"]:
                answers = [answer["text"] for answer in entry["answers"]]
                if answers:
                    questions.append((entry["question"], answers, [paragraph["context"]]))
        return list(texts), questions
    for entry in content:
        shown = [f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]]
        texts |= dict.fromkeys(shown)
        questions.append((entry["question"], [entry["answer"]], shown))
    return list(texts), questions


class _Kind(NamedTuple):
    build: Callable[..., Sample]
    max_new_tokens: int
    options: Mapping[str, Any] = {}


_IN_NEEDLES = {"haystack": "needles"}
KINDS = {
    "niah_single_1": _Kind(needles, 128, {"haystack": "noise"}),
    "niah_single_2": _Kind(needles, 128),
    "niah_single_3": _Kind(needles, 128, {"value": "uuids"}),
    "niah_multikey_1": _Kind(needles, 128, {"keys": 4}),
    "niah_multikey_2": _Kind(needles, 128, _IN_NEEDLES),
    "niah_multikey_3": _Kind(needles, 128, _IN_NEEDLES | {"key": "uuids", "value": "uuids"}),
    "niah_multivalue": _Kind(needles, 128, {"values": 4}),
    "niah_multiquery": _Kind(needles, 128, {"queries": 4}),
    "vt": _Kind(variables, 30),
    "cwe": _Kind(common_words, 120),
    "fwe": _Kind(frequent_words, 50),
    "qa_1": _Kind(documents, 32, {"file": "dev-v2.0.json"}),
    "qa_2": _Kind(documents, 32, {"file": "hotpot_dev_distractor_v1.json"}),
}


def largest(
    build: Callable[[int], Sample], fits: Callable[[Sample], bool], largest_size: int
) -> Sample:
    """Return the sample of the largest size that fits, up to `largest_size`."""
    low = 1
    while 2 * low <= largest_size and fits(build(2 * low)):
        low *= 2
    high = min(largest_size, 2 * low - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(build(middle)) else (low, middle - 1)
    return build(low)


def rendered(tokenizer: Any, sample: Sample) -> tuple[str, str]:
    """Return context and question, in a chat if the tokenizer has a template."""
    if not tokenizer.chat_template:
        return sample.context, f"{sample.question} {sample.prefix}"
    content = sample.context + _MARK
    text = chat_text(tokenizer, [{"role": "user", "content": content}], to_answer=True)
    context, _, suffix = text.partition(_MARK)
    # Where a tokenizer begins a text with this token, it is not written twice.
    is_doubled = tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
    start = tokenizer.bos_token if is_doubled else ""
    return context.removeprefix(start), sample.question + suffix + sample.prefix


def generate(name: str, number: int, sources: Sources, tokenizer: Any) -> dict[str, Any]:
    """Generate a line of a task's file, as long as the length allows.

    Raises:
        ValueError: if not even the smallest one fits, or the book is too short.
    """
    kind = KINDS[name]
    room = sources.length - kind.max_new_tokens

    def build(size: int) -> Sample:
        rng = random.Random(f"{_SEED} {name} {number}")
        return kind.build(size, rng, sources, **kind.options)

    def count(sample: Sample) -> int:
        context, question = rendered(tokenizer, sample)
        return len(encode(tokenizer, context)) + len(encode(tokenizer, question, special=False))

    sample = largest(build, lambda sample: count(sample) <= room, sources.length)
    tokens = count(sample)
    if not room // 2 <= tokens <= room:
        raise ValueError(
            f"{name} makes {tokens} tokens for a length of {sources.length}; give another"
            " --length, or a longer --book"
        )
    context, question = rendered(tokenizer, sample)
    answers = list(sample.answers)
    return {"input": context + question, "question": question, "outputs": answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="whose tokenizer counts")
    parser.add_argument("--data", type=Path, help="folder of the book and the documents")
    parser.add_argument("--book", help="a file there (the sample text, for short lengths)")
    parser.add_argument("--length", type=int, default=4096, help="tokens with the answer's")
    parser.add_argument("--limit", type=int, default=500, help="samples of each task")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    quality.run_alone(parser, write)


def write(args: argparse.Namespace) -> None:
    """Write the files that the command line asks for."""
    book = None if args.book is None else read_text_file(data_file(args.book, args.data))
    sources = Sources(book or sample_prompt(), args.data, args.length)
    tokenizer = describe(args.model).tokenizer
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        with atomic_write(args.out / f"{name}.jsonl") as file:
            for number in range(args.limit):
                file.write(json.dumps(generate(name, number, sources, tokenizer)) + "\n")
        print(args.out / f"{name}.jsonl", flush=True)


if __name__ == "__main__":
    main()
