"""Text and facts by rule, budget and bits on any model: docs/quality.md's tables of three models.

``text`` reads windows of each file and compares the predictions of the tokens that follow them;
``facts`` does so for the answers of prompts in the manner of RULER (`recall_prompts.py`), with the
question unknown when the prompt is evicted from. All caches share one reading of a prompt. A
stopped run resumes. ``--count`` limits the windows of a file, or the prompts of a task.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import quality
from recall_prompts import TASKS, write_prompts

from h2okv.config import BEST, BEST_VERSION, KV_BITS, CacheConfig
from h2okv_lab.evaluation.model import ModelUnderTest
from h2okv_lab.evaluation.task import Run
from h2okv_lab.evaluation.tasks.fidelity import Fidelity, Source, bootstrap

_ITEMS = 40  # prompts written for each task; a count uses the first of them
RULES = ("best", "best even", "h2o", "sink_recent", "snapkv", "recent")


def caches(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], CacheConfig]]:
    """Yield the caches, each with its columns of the table."""
    for bits in KV_BITS:
        columns = {"rule": "full", "kept": 1.0, "kv_bits": bits, "version": ""}
        yield columns, CacheConfig("full", kv_bits=bits)
    for fraction, rule in product(args.kept, args.rules):
        options: dict[str, Any] = {"policy": rule.split()[0]}
        if rule == "best even":
            options["layer_budgets"] = None
        for bits in (None, *KV_BITS) if rule == "best" else (None,):
            config = CacheConfig(budget=fraction, min_tokens=0, kv_bits=bits, **options)
            version = BEST_VERSION if options["policy"] == BEST else ""
            columns = {"rule": rule, "kept": fraction, "kv_bits": bits or "", "version": version}
            yield columns, config


def rows_of(
    task: Fidelity, by_cache: Sequence[tuple[dict[str, Any], Mapping[int, Any]]]
) -> list[dict[str, Any]]:
    """Means over all samples and those of each source, with 95 % bootstrap intervals."""
    groups: dict[str, list[int]] = {"all": list(task.samples)}
    for number in task.samples:
        name = task._samples[number].source.removesuffix("-agnostic")
        groups.setdefault(name, []).append(number)
    rows = []
    for (columns, results), (name, numbers) in product(by_cache, groups.items()):
        chosen = [results[number] for number in numbers]
        row = {**columns, "data": name, "samples": len(chosen)}
        row["tokens"] = sum(result["tokens"] for result in chosen)
        row["bytes_fraction"] = quality.bytes_fraction(chosen)
        differences = bootstrap([result["nll"] - result["full_nll"] for result in chosen])
        ratios = [None if value is None else math.exp(value) for value in differences]
        for measure, values in (
            ("kl", bootstrap([result["kl"] for result in chosen])),
            ("perplexity_ratio", ratios),
            ("agreement", bootstrap([result["agreement"] for result in chosen])),
        ):
            for end, value in zip(("", "_low", "_high"), values, strict=True):
                row[measure + end] = "" if value is None else f"{value:.5g}"
        rows.append(row)
    return rows


def evaluate(args: argparse.Namespace, tested: ModelUnderTest) -> list[dict[str, Any]]:
    """Read the prompts onto all caches; return the rows of the table."""
    columns, configs = zip(*caches(args), strict=True)
    rows = []
    for tokens in args.tokens:
        name = f"{args.measure}-{tokens}"
        if args.measure == "text":
            sources = [Source.read(path) for path in args.files]
        else:
            write_prompts(args.files[0], args.out / name, tokens, _ITEMS)
            sources = [Source.read(args.out / name / f"{t}-agnostic.jsonl") for t in TASKS]
        task = Fidelity(
            sources=sources, texts=args.count, raw=True, protocol="block",
            prompt_tokens=tokens, new_tokens=args.new_tokens,
        )  # fmt: skip
        label = f"{tested.name}, {name}"
        runs = [Run(task, config) for config in configs]
        path = args.out / f"{tested.config.model_type}-{name}.samples.jsonl"
        results = quality.samples(tested, runs, path, label)
        by_cache = list(zip(columns, results, strict=True))
        rows += [{"prompt_tokens": tokens} | row for row in rows_of(task, by_cache)]
    return rows


def main() -> None:
    """Run what the command line asks for."""
    parser = quality.parser_of(
        __doc__, "models_quality.py text out novel.txt code.txt --csv text.csv"
    )
    parser.add_argument("measure", choices=("text", "facts"))
    parser.add_argument("out", type=Path, help="folder of prompts and samples")
    parser.add_argument("files", type=Path, nargs="+", help="texts; one book for facts")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--count", type=int, default=6, help="windows a file, or prompts a task")
    parser.add_argument("--kept", type=float, nargs="+", default=[0.5, 0.2, 0.1, 0.05])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    quality.run(parser, evaluate)


if __name__ == "__main__":
    main()
