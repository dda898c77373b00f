"""The effect of pins: a chat's question that is never evicted, against random spans of its length.

Each line of a JSONL file has the messages of a chat that ends with a question. It is read once for
all caches and evicted from; their predictions of the full cache's greedy answer are compared as by
``h2okv eval fidelity``. Pins count for the heavy part of the budget: all rows have as many entries.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import quality
import torch

from h2okv.config import CacheConfig
from h2okv.console import Progress
from h2okv.integration.enable import enable
from h2okv.prompts.chat_template import message_spans
from h2okv_lab.evaluation.model import ModelUnderTest, make_cache
from h2okv_lab.evaluation.tasks.fidelity import _FULL, Source, _Comparison, _Sample

POLICIES = ("h2o", "best")
Spans = list[tuple[int, int]]


def pins_of(tokenizer: Any, messages: Any, length: int, seed: int) -> dict[str, Spans]:
    """Return the pinned spans by the name of their row."""
    question = message_spans(tokenizer, messages, ["last_user"])
    begin, end = question[0]
    if end - begin >= begin:
        raise ValueError(
            f"a chat must have more tokens before its question than in it, got {begin} and"
            f" {end - begin}."
        )
    at = random.Random(seed).randrange(begin - (end - begin))
    return {
        "nothing": [],
        "the last question": question,
        "a random span as long": [(at, at + end - begin)],
    }


@torch.no_grad()
def evaluate(args: argparse.Namespace, tested: ModelUnderTest) -> list[dict[str, Any]]:
    """Read the chats onto all caches; return the rows of the table."""
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    skipped = 0
    chats: Any = Source.read(args.chats).prompts
    lines = [[message._asdict() for message in chat] for chat in chats]
    with Progress("chats", len(lines), "chats") as bar, enable(tested.model):
        for number, messages in enumerate(lines):
            ids = tested.encode(messages)
            pins = pins_of(tested.tokenizer, messages, len(ids), number)
            keys = [(policy, name) for policy in POLICIES for name in pins]
            caches = [make_cache(_FULL, tested.config)]
            try:
                for policy, name in keys:
                    budget = args.budget if policy == "h2o" else args.best_budget
                    config = CacheConfig(budget=budget, min_tokens=0, policy=policy)
                    caches.append(make_cache(config, tested.config))
                    caches[-1].pin(pins[name], len(ids))
            except ValueError:  # more is pinned than heavy entries are kept
                skipped += 1
                continue
            compared = _Comparison(tested, caches, _Sample("chats", ids, []))
            for key, result in zip(keys, compared.run(args.new_tokens, "decode"), strict=True):
                results.setdefault(key, []).append(result)
            bar.advance(1)
    if not results:
        raise ValueError(f"'{args.chats}': every question is longer than the heavy part kept")
    rows = []
    for (policy, name), group in results.items():
        row = {"policy": policy, "pinned": name, "chats": len(group), "skipped": skipped}
        row["bytes_fraction"] = quality.bytes_fraction(group)
        rows.append(row | quality.measures(group, {"nothing": results[policy, "nothing"]}))
    return rows


def main() -> None:
    """Run what the command line asks for."""
    parser = quality.parser_of(__doc__, "pinned_quality.py chats.jsonl --csv pins.csv")
    parser.add_argument("chats", type=Path, help='JSONL of {"messages": [...]}')
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--best-budget", type=float, default=0.185, help="the same bytes")
    parser.add_argument("--new-tokens", type=int, default=64)
    quality.run(parser, evaluate)


if __name__ == "__main__":
    main()
