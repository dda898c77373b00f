"""Recall of facts in long prompts by cache, for docs/results/quality.md, with one prefill for all.

Six tasks in the manner of RULER (`recall_prompts.py`), by length, the question known or not when
the prompt is evicted from. H2O, sinks and recent tokens, SnapKV, and ``best`` with even budgets and
with each file of budgets, at equal bytes: ``best`` gets less by the bytes of its sinks and norms.
Prompts and samples are in a folder; a stopped run resumes, and the table has all finished samples.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import quality
import torch
from recall_prompts import TASKS, write_prompts

from h2okv.budget import LayerBudgets
from h2okv.config import CacheConfig
from h2okv_lab.evaluation.model import ModelUnderTest
from h2okv_lab.evaluation.runner import Run
from h2okv_lab.evaluation.tasks.fidelity import Fidelity, Source

KINDS = ("agnostic", "aware")
BUDGETS = (0.5, 0.25, 0.1, 0.05)
SINK = 4


def caches_at(
    budget: float, tokens: int, entry: int, layer_budgets: Sequence[LayerBudgets]
) -> dict[str, Any]:
    """Return the caches with as many bytes as H2O with a budget; ``entry`` is an entry's bytes."""
    # An fp32 norm per entry, and the sinks.
    less = math.floor(1000 * (budget * entry / (entry + 4) - SINK / tokens)) / 1000
    configs = {"h2o": CacheConfig(budget=budget, min_tokens=0)}
    if budget == 0.25:
        configs["sink_recent"] = CacheConfig(budget=budget, min_tokens=0, policy="sink_recent")
        configs["snapkv"] = CacheConfig(budget=budget, min_tokens=0, policy="snapkv")
    configs["best"] = CacheConfig(budget=less, min_tokens=0, policy="best")
    for factors in layer_budgets:
        config = CacheConfig(budget=less, min_tokens=0, policy="best", layer_budgets=factors)
        configs[f"best, {'by head' if config.is_by_head else 'by layer'}"] = config
    return configs


def rows_of(
    setting: dict[str, Any], task: Fidelity, results_by_key: dict[tuple[str, float], Any]
) -> list[dict[str, Any]]:
    """Means over the prompts of each task, and of all, with intervals; differences are paired."""
    groups: dict[str, list[int]] = {"all": list(task.samples)}
    for number in task.samples:
        groups.setdefault(task._samples[number].source.rsplit("-", 1)[0], []).append(number)
    rows = []
    for (name, budget), by_sample in results_by_key.items():
        for group, numbers in groups.items():
            results, base = (
                [of_samples[n] for n in numbers]
                for of_samples in (by_sample, results_by_key["h2o", budget])
            )
            row = {**setting, "cache": name, "budget": budget, "task": group}
            row |= {"prompts": len(results), "bytes_fraction": quality.bytes_fraction(results)}
            rows.append(row | quality.measures(results, {"h2o": base}))
    return rows


def evaluate(args: argparse.Namespace, tested: ModelUnderTest) -> list[dict[str, Any]]:
    """Read the prompts onto all caches; return the rows of the table."""
    factors = [json.loads(path.read_text(encoding="utf-8")) for path in args.layer_budgets]
    config = tested.config
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    entry = 2 * size * getattr(torch, args.dtype).itemsize + 8  # with its score and its position
    rows = []
    for tokens, kind in product(args.tokens, args.kinds):
        folder = args.out / str(tokens)
        write_prompts(args.text, folder, tokens, args.items)
        sources = [Source.read(folder / f"{task}-{kind}.jsonl") for task in TASKS]
        task = Fidelity(sources=sources, texts=args.items, raw=True, protocol="block")
        caches = {
            (name, budget): cache
            for budget in args.budgets
            for name, cache in caches_at(budget, tokens, entry, factors).items()
        }
        path = args.out / f"{tokens}-{kind}-{args.items}.samples.jsonl"
        runs = [Run(task, cache) for cache in caches.values()]
        results = quality.samples(tested, runs, path, f"{tokens} tokens, {kind}")
        setting = {"tokens": tokens, "question": kind}
        rows += rows_of(setting, task, dict(zip(caches, results, strict=True)))
    return rows


def main() -> None:
    """Run what the command line asks for."""
    parser = quality.parser_of(
        __doc__,
        "recall_quality.py moby_dick.txt out --tokens 1024"
        " --layer-budgets docs/results/layers_smollm2.json --csv recall.csv",
    )
    parser.add_argument("text", type=Path, help="a book")
    parser.add_argument("out", type=Path, help="folder of prompts and samples")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--items", type=int, default=40, help="of each task")
    parser.add_argument("--budgets", type=float, nargs="+", default=list(BUDGETS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--layer-budgets", type=Path, nargs="+", required=True, help="of `h2okv eval layers`"
    )
    quality.run(parser, evaluate)


if __name__ == "__main__":
    main()
