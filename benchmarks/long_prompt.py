"""A prompt of a million tokens through the bundled model: speed and memory by part.

Random tokens, read by `h2okv.prefill`'s way in blocks of the cache's own, at rolling positions.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.engine.memory import resident_bytes
from h2okv.integration.prefill import read_blocks


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/long_prompt.py --tokens 100000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=10, help="lines to print")
    parser.add_argument("--heavy", type=int, default=256)
    parser.add_argument("--recent", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a block")
    return parser.parse_args()


def main() -> None:
    """Reads the prompt and prints a line for each part."""
    args = parse()
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path(), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, args.tokens), generator=generator)
    cache = h2okv.H2OCache(
        model.config,
        heavy=args.heavy,
        recent=args.recent,
        positions="rolling",
        prefill_chunk=args.chunk,
    )
    part = args.tokens / args.parts
    done, began = 0, time.perf_counter()
    for read, _ in read_blocks(model, ids, cache):
        if read // part > done // part or read == args.tokens:
            now = time.perf_counter()
            resident = resident_bytes()
            memory = "" if resident is None else f"{resident / 2**20:7.1f} MiB resident"
            print(
                f"{read:>10,} tokens {(read - done) / (now - began):8,.0f} tokens/s {memory}"
                f"  cache {cache.nbytes / 2**20:.2f} MiB",
                flush=True,
            )
            done, began = read, now
    cache.check_integrity()


if __name__ == "__main__":
    main()
