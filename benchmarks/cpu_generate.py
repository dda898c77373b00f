"""Measurements of H2O on the CPU beyond `h2okv bench`: attention alone, rolling steps, turns.

A Llama with random weights (12 layers, hidden 768, 12 heads of 64, SwiGLU with intermediate 3072,
vocabulary 32000). Comparisons, each within one run:

- attention: of one layer's prompt, batch 1, with the scores and without (SDPA);
- rolling: a step at rolling positions against original ones, a full cache of --entries each, and
  with --compile both once more in compiled steps (``h2okv.enable(model, compile=True)``);
- turns: time to the first token of turn 10 against turn 2, of equal length, on one rolling cache;
  beside it the same turns without a cache, by reading the whole text again with SDPA.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, Target, environment, interleave, progress, report, rows_for
from transformers import PreTrainedModel

from h2okv.cache.argument import CACHE
from h2okv.config import CacheConfig
from h2okv.integration.enable import with_compiled_steps
from h2okv.offload.profile import Clock
from h2okv.ops import dispatch
from h2okv.ops.reference import AttentionSpec, Visibility
from h2okv_lab.benchmarking.caches import CacheRunner, CacheSpec, prompt_ids
from h2okv_lab.benchmarking.model import parse_shape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEASURES = ("attention", "rolling", "turns")
ATTENTION_LIMIT, ROLLING_LIMIT, TURN_LIMIT = 1.3, 1.15, 1.2
Samples = dict[str, list[float]]
CPU = torch.device("cpu")


class Subject:
    """The model of one dtype, and what its measurements share."""

    def __init__(self, args: argparse.Namespace, dtype: str) -> None:
        self.args, self.dtype = args, dtype
        sizes = f"small,layers={args.layers},kv_heads={args.kv_heads}"
        self.source = parse_shape(f"{sizes},intermediate={args.intermediate}")
        self.model: PreTrainedModel = self.source.build(DTYPES[dtype], CPU)
        self.setting = environment() | {
            "model": f"llama-{args.layers}x768-{args.intermediate}", "dtype": dtype,
            "kv_heads": args.kv_heads, "batch": args.batch, "prompt": args.prompt,
        }  # fmt: skip

    def runner(self, name: str, budget: int | None = None, **options: Any) -> CacheRunner:
        """Make the runner of a cache."""
        config = None if budget is None else CacheConfig(budget=budget, min_tokens=0, **options)
        return CacheSpec(name, config).runner(self.model)

    def ready(self, runner: CacheRunner, batch: int, length: int) -> Callable[[], None]:
        """Read a prompt; return a function for one decode step."""
        progress(f"reading the prompt, {runner.spec.label}")
        token = prompt_ids(self.model, batch, 1)
        runner.prepare(length)
        runner.prefill(prompt_ids(self.model, batch, length))

        def step() -> None:
            with runner.decoding():
                runner.step(token)

        return step

    def report(self, measure: str, unit: str, samples: Samples, *targets: Target, **other: Any):
        """Show the rows of a measure and add them to the file."""
        subject = other.pop("own", "h2o")
        setting = self.setting | other
        report(self.args.csv, rows_for(measure, unit, samples, list(targets), setting, subject))


def attention(subject: Subject) -> None:
    """Time the attention of one layer's prompt, with scores and without."""
    args = subject.args
    torch.manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        states = torch.randn(1, args.prompt, heads, 64)
        return states.to(DTYPES[subject.dtype]).transpose(1, 2)

    query, key, value = draw(12), draw(args.kv_heads), draw(args.kv_heads)
    operations = dispatch.operations(query.device, query.dtype, 64, 64, 12 // args.kv_heads)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    runs = {
        "h2o": lambda: operations.attend(query, key, value, Visibility(), AttentionSpec(0.125)),
        "sdpa": lambda: sdpa(query, key, value, is_causal=True, enable_gqa=args.kv_heads < 12),
    }
    samples = interleave(runs, args.attention_rounds, 2, "attention")
    target = Target("sdpa", ATTENTION_LIMIT)
    subject.report("attention of a prompt", "s", samples, target, batch=1)


def rolling(subject: Subject) -> None:
    """Time a decode step at rolling and at original positions."""
    args = subject.args
    length = args.entries + 200
    runs: dict[str, Callable[[], Any]] = {}
    for name, positions in (("h2o", "rolling"), ("original", "original")):
        runner = subject.runner("h2o", args.entries, positions=positions)
        runs[name] = subject.ready(runner, args.batch, length)
        if args.compile:
            again = subject.runner("h2o", args.entries, positions=positions)
            subject.ready(again, args.batch, length)
            runs["compiled" if name == "h2o" else "original, compiled"] = partial(
                with_compiled_steps(subject.model),
                input_ids=prompt_ids(subject.model, args.batch, 1), **{CACHE: again.cache},
                use_cache=True, logits_to_keep=1,
            )  # fmt: skip
    samples = interleave(runs, args.decode_rounds, 3, "rolling")
    other = {"prompt": length, "budget": args.entries}
    subject.report("rolling step", "s", samples, Target("original", ROLLING_LIMIT), **other)


def turns(subject: Subject) -> None:
    """Time turns 2 and 10 of conversations; turn 1 is long and fills the cache."""
    args, clock = subject.args, Clock(CPU)
    names = ("h2o", "turn 2", "turn 10, read anew", "turn 2, read anew")  # word-ok: in CSVs
    samples: Samples = {name: [] for name in names}
    text = prompt_ids(subject.model, 1, args.context + 9 * (args.turn + args.answer))
    for round_ in range(-1, args.turn_rounds):
        cached = subject.runner("h2o", args.entries, positions="rolling")
        cached.prepare(args.context)
        cached.prefill(text[:, : args.context])
        at = args.context
        for turn in range(2, 11):
            progress(f"turns: round {round_ + 1} of {args.turn_rounds}, turn {turn}")
            subject.model.set_attn_implementation(cached.attention)
            seconds = clock.seconds(partial(cached.prefill, text[:, at : at + args.turn]))
            if turn in (2, 10):
                full = subject.runner("dynamic")
                full.prepare(at + args.turn)
                reading = clock.seconds(partial(full.prefill, text[:, : at + args.turn]))
                if round_ >= 0:
                    samples["h2o" if turn == 10 else "turn 2"].append(seconds)
                    samples[f"turn {turn}, read anew"].append(reading)  # word-ok
            at += args.turn
            with cached.decoding():
                for token in text[:, at : at + args.answer].split(1, dim=1):
                    cached.step(token)
            at += args.answer
        cached.cache.check_integrity()
    progress("")
    other = {"batch": 1, "prompt": args.context, "budget": args.entries}
    subject.report("turn 10", "s", samples, Target("turn 2", TURN_LIMIT), **other)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/cpu_generate.py --dtype bf16 --measure turns",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=list(MEASURES))
    for name, size, text in (
        ("kv-heads", 12, "12 (MHA) or 4 (GQA)"), ("layers", 12, "at most 12"),
        ("intermediate", 3072, "size of the MLP"), ("batch", 4, "sequences"),
        ("prompt", 2048, "tokens of each sequence"),
        ("entries", 1024, "of rolling and turns, heavy and recent"),
        ("context", 2048, "tokens of the first turn"), ("turn", 128, "tokens of a later turn"),
        ("answer", 8, "tokens of an answer"), ("decode-rounds", 60, "of rolling"),
        ("attention-rounds", 20, "of attention"),
        ("turn-rounds", 5, "conversations"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=size, help=f"{text} [{size}]")
    parser.add_argument("--compile", action="store_true", help="compiled rolling steps too")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's choice")
    parser.add_argument("--csv", type=Path, default=RESULTS / "cpu_generate.csv")
    return parser.parse_args()


def main() -> None:
    """Run what the command line asks for."""
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    by_name = dict(zip(MEASURES, (attention, rolling, turns), strict=True))
    with torch.inference_mode():
        for dtype in args.dtype:
            try:
                subject = Subject(args, dtype)
            except ValueError as error:
                raise SystemExit(f"cpu_generate.py: {error}") from None
            for name in args.measure:
                by_name[name](subject)


if __name__ == "__main__":
    main()
