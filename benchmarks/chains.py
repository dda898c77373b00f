"""Long answers that can be checked: the entries of a list are numbered and doubled, line by line.

The prompt shows one list that is done already, and another one. Each line of the answer needs the
number of the line before, the next entry of a prompt that is evicted from meanwhile, and a sum.
``--fractions`` are of prompt and answer together; with ``sink=100%`` the prompt stays, and they are
of the answer; with ``of=seen`` they are of what has been read and written so far. A list is solved
if every line is right. Models that solve no list with the full cache show nothing: give fewer
``--entries``.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

import quality
from humaneval import complete

from h2okv.config import CacheConfig
from h2okv.console import Progress
from h2okv.policy import get_rule
from h2okv_lab.evaluation.model import ModelUnderTest

SHOWN = 6  # entries of the list that is done already
STOPS = ("end",)
CACHES = (
    "best", "h2o", "sink_recent", "random", "h2okv_lab.masking:ValueExtremes,sink=4",
    "best,sink=100%", "random,sink=100%", "best,of=seen", "random,sink=100%,of=seen",
)  # fmt: skip
WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty",
    "kayak", "lotus", "maple", "nylon", "ocean", "pearl", "quartz", "river", "slate", "tulip",
    "umber", "villa", "willow", "xenon", "yacht", "zebra", "acorn", "bison", "coral", "daisy",
    "eagle", "flint", "goose", "hazel", "ivory", "jewel", "koala", "lemon", "mango", "nacho",
    "olive", "panda", "robin", "salmon", "tiger", "union", "viola", "wagon", "yodel", "zesty",
    "apron", "basil", "cabin", "dingo", "elbow", "ferry", "ginger", "honey", "igloo", "joker",
    "kiosk", "ladder", "magnet", "needle", "oyster", "pepper", "quiver", "ribbon", "saddle",
    "tunnel", "urchin", "velvet",
)  # fmt: skip


def doubled(names: Sequence[str], numbers: Sequence[int]) -> tuple[str, list[str]]:
    """Return a list as the prompt shows it, and its lines."""
    entries = list(zip(names, numbers, strict=True))
    lines = [f"{k}. {name}: {n} + {n} = {2 * n}" for k, (name, n) in enumerate(entries, 1)]
    listed = ", ".join(f"{name} {number}" for name, number in entries)
    return f"List: {listed}\nAll of them, doubled:\n", lines


def problem(seed: int, entries: int) -> tuple[str, list[str]]:
    """Return a prompt and the lines of its answer."""
    draw = random.Random(seed)
    names = draw.sample(WORDS, SHOWN + entries)
    numbers = [draw.randint(2, 9) for _ in names]
    shown, lines = doubled(names[:SHOWN], numbers[:SHOWN])
    prompt, answer = doubled(names[SHOWN:], numbers[SHOWN:])
    return "\n".join([shown.rstrip(), *lines, "end", "", prompt]), answer


def evaluate(args: argparse.Namespace, tested: ModelUnderTest) -> list[dict[str, Any]]:
    """Answer all lists with each cache; return the rows of the table."""
    largest = len(WORDS) - SHOWN
    if not 0 < args.entries <= largest:
        raise ValueError(f"--entries must be 1 to {largest}, got {args.entries}")
    problems = [problem(seed, args.entries) for seed in range(args.count)]
    prompts = [prompt for prompt, _ in problems]
    longest = max(len(tested.encode(prompt)) for prompt in prompts)
    answers = ["\n".join(lines) for _, lines in problems]
    written = max(len(tested.encode(answer, special=False)) for answer in answers)
    caches = [("full", 1.0, CacheConfig("full"))]
    for fraction, cache in product(args.fractions, args.caches):
        policy, _, options = cache.partition(",")
        length = written if "sink=100%" in options else longest + written
        budget = f"{fraction:%}" if "of=seen" in options else round(fraction * length)
        text = f"{policy}:{budget},{options}".rstrip(",")
        caches.append((cache, fraction, CacheConfig.from_spec(text, min_tokens=0)))
        get_rule(caches[-1][2].policy)  # an error before the first answer, not after it
    rows, full_bytes = [], 0
    with Progress(f"{tested.name}, chains", len(caches), "caches") as bar:
        for cache, fraction, config in caches:
            completions, nbytes = complete(tested, prompts, config, written + 8, STOPS)
            full_bytes = full_bytes or nbytes
            lines = [text.strip().splitlines() for text in completions]
            right = [
                [a.strip() == b for a, b in zip(line, answer, strict=False)]
                for line, (_, answer) in zip(lines, problems, strict=True)
            ]
            shares = [sum(row) / args.entries for row in right]
            error = statistics.stdev(shares) / len(shares) ** 0.5 if shares[1:] else math.nan
            firsts = [row.index(False) if False in row else len(row) for row in right]
            rows.append({
                "cache": cache, "kept": fraction, "entries": args.entries, "lists": len(problems),
                "prompt_tokens": longest, "answer_tokens": written,
                "solved": sum(first == args.entries for first in firsts),
                "lines_right": f"{statistics.mean(shares):.4f}", "standard_error": f"{error:.4f}",
                "lines_before_the_first_error": f"{sum(firsts) / args.entries / len(firsts):.4f}",
                "bytes_fraction": f"{nbytes / full_bytes:.4g}",
            })  # fmt: skip
            print(rows[-1], flush=True)
            bar.update(1)
    return rows


def main() -> None:
    """Run what the command line asks for."""
    parser = quality.parser_of(__doc__, "chains.py --model smollm2 --csv chains.csv")
    parser.add_argument("--entries", type=int, default=40, help="entries of a list (40)")
    parser.add_argument("--count", type=int, default=8, help="lists (8)")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--caches", nargs="+", default=list(CACHES), help="without their budgets")
    quality.run(parser, evaluate)


if __name__ == "__main__":
    main()
