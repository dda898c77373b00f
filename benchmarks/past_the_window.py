"""What rolling positions and long conversations cost, on the CPU.

- decode step: rolling positions against original ones, each on a full cache of the same budget, and
  with --compile both once more in compiled steps (``h2okv.enable(model, compile=True)``);
- turns: time to the first token of turn 10 against turn 2, of equal length, on one cache; beside it
  the same turns by reading the whole text anew with SDPA, as without a kept cache.

The model is that of cpu_generate.py (random weights). Correctness comes first: a failed check ends
the run without a figure.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cpu_generate import DTYPES, build, forward, prompt_ids
from record import Target, append_csv, environment, interleave, progress, rows_for, show
from transformers import DynamicCache, LlamaForCausalLM

import h2okv
from h2okv.integration.enable import with_compiled_steps

MEASURES = ("decode", "turns")
RESULTS = Path(__file__).parent / "results" / "past_the_window.csv"
DECODE_TARGETS = [Target("original", 1.15)]
TURN_TARGETS = [Target("turn 2", 1.2)]


def make_cache(model: LlamaForCausalLM, budget: int, **options: Any) -> h2okv.H2OCache:
    """Makes an H2O cache with half of the budget for heavy hitters, half for recent tokens."""
    return h2okv.H2OCache(model.config, heavy=budget // 2, recent=budget // 2, **options)


def check(model: LlamaForCausalLM, dtype: str) -> None:
    """Holds rolling positions to their masking simulation; exits if they differ."""
    ids = prompt_ids(2, 200)

    def run(simulate: bool) -> torch.Tensor:
        cache = make_cache(model, 32, positions="rolling", simulate=simulate)
        parts = [ids[:, :160], *ids[:, 160:192].split(1, dim=1), ids[:, 192:]]
        return torch.cat([forward(model, part, cache, "h2o") for part in parts], dim=1)

    dropped, masked = run(simulate=False), run(simulate=True)
    error = float((dropped - masked).abs().max() / masked.abs().max())
    # In bf16 two right results differ by rounding, which may swap near-equal entries further up.
    if not error < (1e-3 if dtype == "fp32" else 1e-1):
        sys.exit(f"{dtype}: dropping differs from masking by {error:.2g}; nothing was timed.")
    print(f"{dtype:>8}  checked: rolling against its simulation {error:.1g}")


def time_decode(model: LlamaForCausalLM, args: argparse.Namespace) -> dict[str, list[float]]:
    """Times one decode step at rolling and at original positions."""
    ids, step = prompt_ids(args.batch, args.budget + 200), prompt_ids(args.batch, 1)
    runs: dict[str, Callable[[], Any]] = {}
    variants = [("h2o", "rolling", False), ("original", "original", False)]
    if args.compile:
        variants += [("compiled", "rolling", True), ("original, compiled", "original", True)]
    for name, positions, is_compiled in variants:
        progress(f"decode: reading the prompt, {name}")
        cache = make_cache(model, args.budget, positions=positions)
        forward(model, ids, cache, "h2o")
        own = with_compiled_steps(model) if is_compiled else model.forward
        runs[name] = lambda cache=cache, own=own: own(
            input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
    return interleave(runs, args.decode_rounds, 3, "decode")


def first_token(model: LlamaForCausalLM, ids: torch.Tensor, cache: Any, attention: str) -> float:
    """Seconds until the logits of a turn's first new token are there."""
    start = time.perf_counter()
    forward(model, ids, cache, attention)
    return time.perf_counter() - start


def time_turns(model: LlamaForCausalLM, args: argparse.Namespace) -> dict[str, list[float]]:
    """Times turns 2 and 10 of whole conversations; turn 1 is the long one that fills the cache."""
    names = ("h2o", "turn 2", "turn 10, read anew", "turn 2, read anew")
    samples: dict[str, list[float]] = {name: [] for name in names}
    text = prompt_ids(1, args.context + 9 * (args.turn + args.answer))
    for round_ in range(-1, args.turn_rounds):
        cache = make_cache(model, args.budget, positions="rolling")
        forward(model, text[:, : args.context], cache, "h2o")
        at = args.context
        for turn in range(2, 11):
            progress(f"turns: round {round_ + 1} of {args.turn_rounds}, turn {turn}")
            kept = first_token(model, text[:, at : at + args.turn], cache, "h2o")
            if turn in (2, 10):
                whole = DynamicCache(config=model.config)
                anew = first_token(model, text[:, : at + args.turn], whole, "sdpa")
                if round_ >= 0:
                    samples["h2o" if turn == 10 else "turn 2"].append(kept)
                    samples[f"turn {turn}, read anew"].append(anew)
            at += args.turn
            for step in text[:, at : at + args.answer].split(1, dim=1):
                forward(model, step, cache, "h2o")
            at += args.answer
        cache.check_integrity()
    progress("")
    return samples


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/past_the_window.py --dtype fp32 --kv-heads 4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--kv-heads", type=int, default=12, help="12 (MHA) or 4 (GQA)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--intermediate", type=int, default=3072, help="size of the MLP")
    parser.add_argument("--batch", type=int, default=4, help="sequences of the decode step")
    parser.add_argument("--budget", type=int, default=1024, help="entries, heavy and recent")
    parser.add_argument("--context", type=int, default=2048, help="tokens of the first turn")
    parser.add_argument("--turn", type=int, default=128, help="tokens of a later turn")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--decode-rounds", type=int, default=60)
    parser.add_argument("--turn-rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="compiled steps too")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's choice")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="file to add rows to")
    return parser.parse_args()


def main() -> None:
    """Runs what the command line asks for."""
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    with torch.inference_mode():
        for dtype in args.dtype:
            model = build(args, dtype)
            check(model, dtype)
            setting = environment() | {
                "model": f"llama-{args.layers}x768-{args.intermediate}", "dtype": dtype,
                "kv_heads": args.kv_heads, "budget": args.budget,
            }  # fmt: skip
            if "decode" in args.measure:
                where = setting | {"batch": args.batch, "prompt": args.budget + 200}
                samples = time_decode(model, args)
                report(args, rows_for("rolling step", "s", samples, DECODE_TARGETS, where))
            if "turns" in args.measure:
                where = setting | {"batch": 1, "prompt": args.context}
                samples = time_turns(model, args)
                report(args, rows_for("turn 10", "s", samples, TURN_TARGETS, where))


def report(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Shows rows and keeps them."""
    show(rows)
    append_csv(args.csv, rows)


if __name__ == "__main__":
    main()
