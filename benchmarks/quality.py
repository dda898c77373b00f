"""Shared by the scripts of docs/results/quality.md: options, samples, rows with intervals."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from h2okv.console import Progress
from h2okv.models.loading import describe, load_weights, parse_device
from h2okv_lab.evaluation.model import ModelUnderTest
from h2okv_lab.evaluation.task import Evaluation, Run, SampleFile
from h2okv_lab.evaluation.tasks.fidelity import bootstrap
from h2okv_lab.tables import write_csv

Result = Mapping[str, Any]


def parser_of(doc: str | None, example: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have."""
    parser = argparse.ArgumentParser(
        description=doc,
        epilog=f"example: python benchmarks/{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1 (auto)")
    parser.add_argument("--csv", type=Path, required=True)
    return parser


def run(
    parser: argparse.ArgumentParser,
    evaluate: Callable[[argparse.Namespace, ModelUnderTest], list[dict[str, Any]]],
) -> None:
    """Evaluate what the command line asks for, and write the table."""

    def write(args: argparse.Namespace) -> None:
        tested = under_test(args.model, getattr(torch, args.dtype), args.device)
        rows = evaluate(args, tested)
        path = Path(args.model)
        setting = {"model": path.stem if path.exists() else args.model, "dtype": args.dtype}
        write_csv(args.csv, [setting | row for row in rows], [*setting, *rows[0]])

    run_alone(parser, write)


def run_alone(
    parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], None]
) -> None:
    """Do what the command line asks for; end with a sentence and 2 for what it cannot be."""
    args = parser.parse_args()
    try:
        command(args)
    except (OSError, ValueError, KeyError, ImportError) as error:
        parser.error(" ".join(str(error).split()))


def under_test(model: str, dtype: torch.dtype | None = None, device: str = "cpu") -> ModelUnderTest:
    """Return a model as a model under test, which loads weights on demand."""
    described, chosen = describe(model), parse_device(device)
    return ModelUnderTest(
        lambda: load_weights(described, dtype, chosen),
        described.config, described.tokenizer, described.name, described.context,
    )  # fmt: skip


def samples(
    tested: ModelUnderTest, runs: Sequence[Run], path: Path, label: str
) -> list[dict[int, Result]]:
    """Return the results of each run by sample; the file at `path` resumes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with SampleFile(path) as file:
        evaluation = Evaluation(tested, list(runs), file)
        with Progress(label, evaluation.total, "samples") as bar:
            bar.update(evaluation.done)
            evaluation.run(lambda _, count: bar.update(count))
        return [file.results(run.label) for run in evaluation.runs]


def bytes_fraction(results: Sequence[Result]) -> str:
    """Return the bytes held, as a fraction of those of the full cache."""
    held_bytes, full_bytes = (sum(r[name] for r in results) for name in ("bytes", "full_bytes"))
    return f"{held_bytes / full_bytes:.4g}"


def measures(
    results: Sequence[Result], base: Mapping[str, Sequence[Result]], prefix: str = "kl_minus_"
) -> dict[str, str]:
    """Means with the ends of their 95 % intervals; differences of KL to each base are paired."""
    columns = {"kl": [r["kl"] for r in results]}
    for name, others in base.items():
        pairs = zip(results, others, strict=True)
        columns[f"{prefix}{name}"] = [r["kl"] - other["kl"] for r, other in pairs]
    columns["log_loss"] = [r["nll"] - r["full_nll"] for r in results]
    columns["agreement"] = [r["agreement"] for r in results]
    return {
        name + end: "" if value is None else f"{value:.5g}"
        for name, values in columns.items()
        for end, value in zip(("", "_low", "_high"), bootstrap(values), strict=True)
    }
