"""Recall of facts in long prompts by cache: docs/quality.md's table, with one prefill for all.

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

import torch
from recall_prompts import TASKS, write_prompts

from h2okv.config import CacheConfig, LayerBudgets
from h2okv.console import Progress
from h2okv.evaluation.model import ModelUnderTest
from h2okv.evaluation.runner import Evaluation, Run, SampleFile
from h2okv.evaluation.tasks.fidelity import Fidelity, Source, bootstrap
from h2okv.integration.loading import describe, load_weights
from h2okv.records import write_csv

KINDS = ("agnostic", "aware")
BUDGETS = (0.5, 0.25, 0.1, 0.05)
SINK = 4


def caches_at(
    budget: float, tokens: int, entry: int, layer_budgets: Sequence[LayerBudgets]
) -> dict[str, Any]:
    """Return the caches with as many bytes as H2O with a budget; ``entry`` is an entry's bytes."""
    # An fp32 norm per entry, and the sinks.
    less = math.floor(1000 * (budget * entry / (entry + 4) - SINK / tokens)) / 1000
    configs = {"h2o": CacheConfig.from_budget(budget)}
    if budget == 0.25:
        configs["sink_recent"] = CacheConfig.from_budget(budget, policy="sink_recent")
        configs["snapkv"] = CacheConfig.from_budget(budget, policy="snapkv")
    configs["best"] = CacheConfig.from_budget(less, policy="best")
    for factors in layer_budgets:
        config = CacheConfig.from_budget(less, policy="best", layer_budgets=factors)
        configs[f"best, {'by head' if config.is_by_head else 'by layer'}"] = config
    return configs


def rows_of(
    setting: dict[str, Any], task: Fidelity, runs: dict[tuple[str, float], Run], file: SampleFile
) -> list[dict[str, Any]]:
    """Means over the prompts of each task, and of all, with intervals; differences are paired."""
    results_by_key = {key: file.results(run.label) for key, run in runs.items()}
    groups: dict[str, list[int]] = {"all": list(task.samples)}
    for number in task.samples:
        groups.setdefault(task._samples[number].source.rsplit("-", 1)[0], []).append(number)
    rows = []
    for (name, budget), by_sample in results_by_key.items():
        for group, numbers in groups.items():
            results, base = (
                [samples[n] for n in numbers]
                for samples in (by_sample, results_by_key["h2o", budget])
            )
            values = {
                "kl": [r["kl"] for r in results],
                "kl_minus_h2o": [
                    r["kl"] - b["kl"] for r, b in zip(results, base, strict=True)
                ],
                "log_loss": [r["nll"] - r["full_nll"] for r in results],
                "agreement": [r["agreement"] for r in results],
            }  # fmt: skip
            fraction = sum(r["bytes"] for r in results) / sum(r["full_bytes"] for r in results)
            row = {**setting, "cache": name, "budget": budget, "task": group}
            row |= {"prompts": len(results), "bytes_fraction": f"{fraction:.4g}"}
            rows.append(row | with_intervals(values))
    return rows


def with_intervals(measures: dict[str, list[float]]) -> dict[str, str]:
    """Means by name, and the ends of their 95 % intervals."""
    return {
        name + end: "" if value is None else f"{value:.5g}"
        for name, values in measures.items()
        for end, value in zip(("", "_low", "_high"), bootstrap(values), strict=True)
    }


def under_test(described: Any, dtype: torch.dtype) -> ModelUnderTest:
    """Return a described model as a model under test, which loads weights on demand."""
    return ModelUnderTest(
        lambda: load_weights(described, dtype, torch.device("cpu")),
        described.config, described.tokenizer, described.name, described.context,
    )  # fmt: skip


def evaluate(args: argparse.Namespace) -> None:
    """Read the prompts onto all caches, and write the table."""
    factors = [json.loads(path.read_text(encoding="utf-8")) for path in args.layer_budgets]
    described, dtype = describe(args.model), getattr(torch, args.dtype)
    tested = under_test(described, dtype)
    size = described.config.head_dim or (
        described.config.hidden_size // described.config.num_attention_heads
    )
    entry = 2 * size * dtype.itemsize + 8  # with its score and its position
    rows = []
    for tokens, kind in product(args.tokens, args.kinds):
        folder = args.out / str(tokens)
        write_prompts(args.text, folder, tokens, args.items)
        sources = [Source.read(folder / f"{task}-{kind}.jsonl") for task in TASKS]
        task = Fidelity(sources=sources, texts=args.items, raw=True, protocol="block")
        runs = {
            (name, budget): Run(task, config)
            for budget in args.budgets
            for name, config in caches_at(budget, tokens, entry, factors).items()
        }
        path = args.out / f"{tokens}-{kind}-{args.items}.samples.jsonl"
        with SampleFile(path) as file:
            evaluation = Evaluation(tested, list(runs.values()), file)
            with Progress(f"{tokens} tokens, {kind}", evaluation.total, "samples") as bar:
                bar.update(evaluation.done)
                evaluation.run(lambda _, count, bar=bar: bar.update(count))
            setting = {"model": args.model, "dtype": args.dtype, "tokens": tokens, "question": kind}
            rows += rows_of(setting, task, runs, file)
    write_csv(args.csv, rows, list(rows[0]))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/recall_quality.py moby_dick.txt out --tokens 1024"
        " --layer-budgets docs/results/layers_smollm2.json --csv recall.csv",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("text", type=Path, help="a book")
    parser.add_argument("out", type=Path, help="folder of prompts and samples")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--items", type=int, default=40, help="of each task")
    parser.add_argument("--budgets", type=float, nargs="+", default=list(BUDGETS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--layer-budgets", type=Path, nargs="+", required=True, help="of `h2okv eval layers`"
    )
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    try:
        evaluate(args)
    except (OSError, ValueError, KeyError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
