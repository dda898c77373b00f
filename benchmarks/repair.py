"""Measure what `verify="repair"` repairs, and how often the next token is the full cache's then.

Facts are the prompts of `recall_prompts.py`, with the question behind a text that the cache has
evicted from; plain texts are passages of books that go on. Adds rows to a CSV file, one for each
kind and task: agreement of the first answers, of those delivered, and the share that was repaired.
Another seed has other facts and passages than those by which the thresholds were chosen.

    python benchmarks/repair.py moby_dick.txt war_and_peace.txt --csv docs/results/repair.csv

Ctrl-C ends it early: the file has what was measured until then.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from recall_prompts import TASKS, write_prompts

import h2okv
from h2okv_lab.tables import write_csv

NEW = 24  # tokens after a plain text


def prompts_of(llm: h2okv.LLM, texts: list[Path], options: Any) -> list[tuple[str, Any, int]]:
    """Return the kind, the prompt and the number of new tokens of each request."""
    requests: list[tuple[str, Any, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_prompts(texts[0], Path(folder), options.tokens, options.items, options.seed)
        for task in TASKS:
            for line in Path(folder, f"{task}-agnostic.jsonl").read_text("utf-8").splitlines():
                record = json.loads(line)
                answer = llm.tokenizer(record["answer"], add_special_tokens=False)["input_ids"]
                requests.append((task, record["context"] + record["prompt"], len(answer)))
    books = [llm.tokenizer(path.read_text("utf-8")[:500_000])["input_ids"] for path in texts[1:]]
    for number in range(options.texts):
        start = 5_000 + 2_000 * number + 700 * options.seed
        tokens = books[number % len(books)][start : start + options.tokens]
        requests.append(("text", tokens, NEW))
    # In turns, so that a run that ends early has some of each.
    random.Random(0).shuffle(requests)
    return requests


def measured(llm: h2okv.LLM, kind: str, prompt: Any, new: int) -> dict[str, int]:
    """Return the numbers of a prompt: tokens, those that agree at first and delivered, repairs."""
    sampling: dict[str, Any] = {"max_tokens": new, "temperature": 0, "ignore_eos": True}
    before = agreed(llm, kind)
    output = llm.generate([prompt], verify="repair", kind=kind, show_progress=False, **sampling)[0]
    delivered = output.verified
    assert delivered is not None
    return {
        "prompts": 1, "tokens": new, "first": agreed(llm, kind) - before,
        "delivered": delivered.agreed, "repaired": int(delivered.repaired),
    }  # fmt: skip


def agreed(llm: h2okv.LLM, kind: str) -> int:
    """Return how many tokens of the first answers to a kind of requests agree."""
    rows = [row for row in llm.agreement().rows if row.kind == kind]
    return sum(round(row.agreement * row.tokens) for row in rows)


def main() -> None:
    """Run and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", type=Path, nargs="+", help="a book for facts, and others")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cache", default="best:10%,every=256,min=0")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--items", type=int, default=10, help="prompts of each task")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of facts and passages")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    if missing := [str(path) for path in options.text if not path.is_file()]:
        parser.error(f"text must be files, got {', '.join(missing)}")
    if options.texts and len(options.text) < 2:
        parser.error("plain texts need a second book; give one, or --texts 0")
    rows: dict[str, dict[str, int]] = {}
    settings = {"cache": options.cache, "max_num_seqs": 1, "max_prompt_tokens": 2 * options.tokens}
    settings["verify"] = 1.0  # the report has the first answers
    with h2okv.LLM(options.model, **settings) as llm, suppress(KeyboardInterrupt):
        for kind, prompt, new in prompts_of(llm, options.text, options):
            counts = measured(llm, kind, prompt, new)
            for name in ("text",) if kind == "text" else (kind, "facts"):
                row = rows.setdefault(name, dict.fromkeys(counts, 0))
                rows[name] = {column: row[column] + count for column, count in counts.items()}
            print(kind, counts, flush=True)
    names = {"model": Path(options.model).stem, "cache": options.cache, "seed": str(options.seed)}
    table = [names | {"kind": kind} | row for kind, row in rows.items()]
    if table:
        others = csv.DictReader(options.csv.open(encoding="utf-8")) if options.csv.exists() else ()
        before = [row for row in others if names.items() - row.items()]
        write_csv(options.csv, [*before, *table], list(table[0]))


if __name__ == "__main__":
    main()
