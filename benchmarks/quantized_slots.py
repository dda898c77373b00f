"""A decode step with slots in 8 and 4 bits against slots in bf16, on the CPU.

The foundation's shape: a Llama with random weights (12 layers, hidden 768, 12 heads of 64 and 4 KV
heads), bf16, batch 4, prompt 2048, a budget of 20 %: the whole model's step of one token.
Correctness comes first: a failed check ends the run without a figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from cpu_generate import build, forward, make_cache, prompt_ids
from record import Target, append_csv, environment, interleave, progress, rows_for, show

from h2okv.ops.quant import BITS

RESULTS = Path(__file__).parent / "results" / "quantized_slots.csv"
MEASURE = "decode step"
LIMITS = {8: 1.1, 4: 1.3}
CLOSE = {8: 0.02, 4: 0.2}
"""Difference of logits, by the largest logit, that counts as an error of the code."""


def check(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Holds packed slots to masking, and to slots in bf16; exits if they differ."""
    length, steps = 96, 8
    ids = prompt_ids(2, length + steps)
    parts = [ids[:, :length], *ids[:, length:].split(1, dim=1)]

    def run(**options: object) -> tuple[torch.Tensor, torch.Tensor]:
        cache = make_cache(model, args, **options)
        logits = torch.cat([forward(model, part, cache, "h2o") for part in parts], dim=1)
        return logits.float(), cache.kept_positions(0)

    whole, _ = run()
    for bits in BITS:
        (packed, held), (masked, alive) = (run(kv_bits=bits, simulate=s) for s in (False, True))
        for row, expected in zip(held.flatten(0, 1), alive.flatten(0, 1), strict=True):
            if sorted(row[row >= 0].tolist()) != sorted(expected[expected >= 0].tolist()):
                sys.exit(f"{bits} bits: other entries are kept than by masking; nothing was timed.")
        for name, other in (("masking", masked), ("bf16", whole)):
            error = float((packed - other).abs().max() / whole.abs().max())
            print(f"{bits} bits against {name}: relative difference {error:.2g}")
            if not error < CLOSE[bits]:
                sys.exit("that is too much; nothing was timed.")


def steps_of(model: torch.nn.Module, args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """One decode step of the model with each kind of slots."""
    ids, step = prompt_ids(args.batch, args.prompt), prompt_ids(args.batch, 1)
    runs: dict[str, Callable[[], None]] = {}
    for name, bits in (("bf16", None), *((f"int{bits}", bits) for bits in BITS)):
        progress(f"{name}: reading the prompt")
        cache = make_cache(model, args, kv_bits=bits)
        forward(model, ids, cache, "h2o")
        print(f"\r\033[K{name}: {cache.nbytes / cache.full_nbytes:.4f} of the full cache's bytes, "
              f"{cache.layers[0].operations.name}")  # fmt: skip
        runs[name] = partial(forward, model, step, cache, "h2o")
    return runs


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/quantized_slots.py --rounds 40",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--intermediate", type=int, default=3072, help="size of the MLP")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each sequence")
    parser.add_argument("--budget", type=float, default=0.2, help="fraction of the prompt")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's choice")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="file to add rows to")
    return parser.parse_args()


def main() -> None:
    """Checks, measures, shows and writes the rows."""
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    setting = environment() | {
        "model": f"llama-{args.layers}x768-{args.intermediate}", "dtype": "bf16",
        "kv_heads": args.kv_heads, "batch": args.batch, "prompt": args.prompt,
        "budget": args.budget,
    }  # fmt: skip
    with torch.inference_mode():
        model = build(args, "bf16")
        check(model, args)
        report(steps_of(model, args), args, setting)


def report(
    runs: dict[str, Callable[[], None]], args: argparse.Namespace, setting: dict[str, object]
) -> None:
    """Times steps; each kind of packed slots is held to the same rounds of bf16."""
    samples = interleave(runs, args.rounds, 3, MEASURE)
    for bits in BITS:
        # `record` calls what is held to a target h2o.
        pair = {"h2o": samples[f"int{bits}"], "bf16": samples["bf16"]}
        rows = rows_for(MEASURE, "s", pair, [Target("bf16", LIMITS[bits])], setting)
        for row in rows:
            row["implementation"] = str(row["implementation"]).replace("h2o", f"int{bits}")
            row["against"] = str(row.get("against", "")).replace("h2o", f"int{bits}")
        show(rows)
        append_csv(args.csv, rows)


if __name__ == "__main__":
    main()
