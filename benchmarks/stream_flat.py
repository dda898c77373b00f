"""Step time and resident memory of one stream at token 10,000 and at token 1,000,000.

One stream on the bundled model with `h2o` at rolling positions: tokens are drawn at random, read in
large blocks up to the early position, noted there, and read on to the late one. Then steps of a
single token are timed on both caches in turn, in one process: the early one was saved to a file
and loaded again for that, so that a slow moment of the machine hits both. Resident memory is read
on the way, at both positions, after the same kind of steps; speed and memory are printed for every
tenth of the tokens in between.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import Target, environment, interleave, progress, report, rows_for
from transformers import AutoModelForCausalLM, PreTrainedModel

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.engine.memory import resident_bytes
from h2okv.integration.enable import read_blocks

RESULTS = Path(__file__).parent / "results" / "stream_flat.csv"
LIMIT = 1.03
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Reader:
    """Reads random tokens onto a cache, the same ones every time."""

    def __init__(self, model: PreTrainedModel, cache: h2okv.H2OCache) -> None:
        self.model = model
        self.cache = cache
        self._generator = torch.Generator().manual_seed(0)
        self._tenth = (0, time.perf_counter())

    def read(self, count: int, chunk: int) -> None:
        """Read `count` further tokens in blocks; one large draw would take extra memory."""
        total = self.cache.num_seen_tokens + count
        while count > 0:
            size = min(count, chunk)
            vocab = self.model.config.vocab_size
            ids = torch.randint(vocab, (1, size), generator=self._generator)
            for _ in read_blocks(self.model, ids, self.cache, chunk):
                pass
            count -= size
            if chunk > 1:
                self._tell(total - count, total)

    def _tell(self, done: int, total: int) -> None:
        """Print a line for each tenth."""
        progress(f"reading: {done:,} of {total:,} tokens")
        before, began = self._tenth
        if 10 * done // total > 10 * before // total:
            speed = (done - before) / (time.perf_counter() - began)
            resident = (resident_bytes() or 0) / 2**20
            progress("")
            print(f"{done:>10,} tokens {speed:8,.0f} tokens/s {resident:7.1f} MiB resident  cache "
                  f"{self.cache.nbytes / 2**20:.2f} MiB", flush=True)  # fmt: skip
            self._tenth = (done, time.perf_counter())


def resident_after_steps(reader: Reader, position: int, args: argparse.Namespace) -> list[float]:
    """Read up to a position, the last tokens one by one; return resident GiB after each."""
    reader.read(position - args.rounds - reader.cache.num_seen_tokens, args.chunk)
    samples = []
    for _ in range(args.rounds):
        reader.read(1, 1)
        resident = resident_bytes()
        if resident is None:
            raise SystemExit("this system does not tell the resident memory of a process")
        samples.append(resident / 2**30)
    return samples


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Measure both positions: resident memory in GiB and step time in seconds."""
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path(), dtype=DTYPES[args.dtype])
    model.eval()
    cache = h2okv.H2OCache(model.config, heavy=args.heavy, recent=args.recent, positions="rolling")
    reader = Reader(model, cache)
    early_name = f"at {args.early:,}"
    with h2okv.enable(model), tempfile.TemporaryDirectory() as folder:
        memory = {early_name: resident_after_steps(reader, args.early, args)}
        saved = Path(folder) / "early.safetensors"
        cache.save(saved)
        memory["h2o"] = resident_after_steps(reader, args.tokens, args)
        check(cache, args)
        early = Reader(model, h2okv.H2OCache.load(saved, model))
        runs: dict[str, Callable[[], None]] = {
            "h2o": lambda: reader.read(1, 1),
            early_name: lambda: early.read(1, 1),
        }
        steps = interleave(runs, args.rounds, 10, "steps")
    return {"memory": memory, "step": steps}


def check(cache: h2okv.H2OCache, args: argparse.Namespace) -> None:
    """End the run without a figure if the cache is not what it should be."""
    cache.check_integrity()
    entries, seen = cache.num_cached_tokens, cache.num_seen_tokens
    if (entries, seen) != (args.heavy + args.recent, args.tokens):
        raise SystemExit(
            f"the cache holds {entries} entries after {seen} tokens; nothing was timed."
        )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/stream_flat.py --tokens 1000000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--early", type=int, default=10_000, help="the early position")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="the late position")
    parser.add_argument("--heavy", type=int, default=256)
    parser.add_argument("--recent", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a block in between")
    parser.add_argument("--rounds", type=int, default=300, help="steps of each position")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's choice")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="file to add rows to")
    args = parser.parse_args()
    budget = args.heavy + args.recent
    if not budget + args.rounds < args.early < args.tokens - args.rounds:
        parser.error("--early must lie above budget and rounds, and --tokens as far above it")
    return args


def main() -> None:
    """Run what the command line asks for."""
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    measured = measure(args)
    setting: dict[str, Any] = environment() | {
        "model": "bundled", "dtype": args.dtype, "kv_heads": 2, "batch": 1,
        "prompt": args.tokens, "budget": args.heavy + args.recent,
    }  # fmt: skip
    targets = [Target(f"at {args.early:,}", LIMIT)]
    for name, unit in (("step", "s"), ("memory", "GiB")):
        measure_name = {"step": "stream step", "memory": "resident memory"}[name]
        rows = rows_for(measure_name, unit, measured[name], targets, setting)
        report(args.csv, rows)


if __name__ == "__main__":
    main()
