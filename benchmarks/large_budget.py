"""Step time and bytes of a budget far above the text, against DynamicCache.

Both caches read the same prompt and write the same greedy text; the steps alternate: a slow moment
of the machine affects both. Ends without a figure if the texts differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import Target, environment, interleave, load_pair, report, rows_for
from transformers import DynamicCache, PreTrainedModel

import h2okv
from h2okv.cache.argument import CACHE

RESULTS = Path(__file__).parent / "results" / "large_budget.csv"
LIMIT = 1.1
WARMUP = 8


class Writer:
    """A greedy text on one cache."""

    def __init__(self, model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> None:
        self.model, self.cache, self.text = model, cache, []
        self.token = ids
        self.step()

    @torch.no_grad()
    def step(self) -> None:
        """Read the last token and take the most likely next one."""
        logits = self.model(self.token, **{CACHE: self.cache}, logits_to_keep=1).logits
        self.token = logits.argmax(-1)
        self.text.append(int(self.token))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/large_budget.py --model smollm2 --threads 1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=int, default=64, help="tokens, drawn at random")
    parser.add_argument("--budget", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=150, help="steps of each cache")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's choice")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="file to add rows to")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    plain, evicting = load_pair(args.model, torch.float32)
    ids = torch.randint(5, 1000, (1, args.prompt), generator=torch.Generator().manual_seed(0))
    half = args.budget // 2
    cache = h2okv.H2OCache(plain.config, half, half)
    writers = {
        "h2o": Writer(evicting, cache, ids),
        "dynamic": Writer(plain, DynamicCache(config=plain.config), ids),
    }
    runs: dict[str, Callable[[], Any]] = {name: writer.step for name, writer in writers.items()}
    seconds = interleave(runs, args.rounds, WARMUP, "steps")
    if writers["h2o"].text != writers["dynamic"].text:
        raise SystemExit("the two caches write different texts; no figure.")
    mebibytes = {"h2o": [cache.nbytes / 2**20], "dynamic": [cache.full_nbytes / 2**20]}
    setting = environment() | {
        "model": args.model, "dtype": "fp32", "kv_heads": plain.config.num_key_value_heads,
        "batch": 1, "prompt": args.prompt, "budget": args.budget,
    }  # fmt: skip
    targets = [Target("dynamic", LIMIT)]
    report(args.csv, rows_for("step", "s", seconds, targets, setting))
    report(args.csv, rows_for("bytes held", "MiB", mebibytes, targets, setting))


if __name__ == "__main__":
    main()
