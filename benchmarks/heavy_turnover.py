"""Do heavy hitters still change late in a stream? The share that is new since the mark before.

One stream of a text on the bundled model with `h2o` at rolling positions. At every mark the heavy
hitters of each layer and head (what is kept besides the recent window) are compared with those of
the mark before.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from long_stream import read_book
from record import progress
from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.evaluation.stream_data import TextSource
from h2okv.evaluation.streaming import Stream, StreamSettings


def heavy_hitters(cache: h2okv.H2OCache, recent: int) -> list[set[int]]:
    """Positions of the heavy hitters, a set for each layer and head."""
    window_start = cache.num_seen_tokens - recent
    return [
        {position for position in head if 0 <= position < window_start}
        for layer in range(len(cache.layers))
        for head in cache.kept_positions(layer)[0].tolist()
    ]


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/heavy_turnover.py --text book.txt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--text", type=Path, required=True, help="the book")
    parser.add_argument("--begin", default="", help="where in the book the stream begins")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--every", type=int, default=10_000, help="tokens between two marks")
    parser.add_argument("--heavy", type=int, default=256)
    parser.add_argument("--recent", type=int, default=256)
    return parser.parse_args()


def main() -> None:
    """Prints one line for each mark."""
    args = parse()
    path = bundled_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    book = read_book(args.text, args.begin)
    ids = TextSource.of_text(book, tokenizer, model.config.vocab_size).ids[: args.tokens + 1]
    cache = h2okv.H2OCache(model.config, heavy=args.heavy, recent=args.recent, positions="rolling")
    stream = Stream(model, cache, TextSource(ids, "book"), StreamSettings(every=args.every))
    before: list[set[int]] = []
    for step in stream.blocks():
        progress(f"{stream.state.position:,} of {len(ids) - 1:,} tokens")
        if step.rows:
            held = heavy_hitters(cache, args.recent)
            progress("")
            if before:
                new = [len(now - then) for now, then in zip(held, before, strict=True)]
                total = sum(map(len, held))
                print(
                    f"{step.rows[-1].position:,} tokens: {sum(new)} of {total} heavy hitters are"
                    f" new ({100 * sum(new) / total:.2f} %), in {sum(map(bool, new))} of"
                    f" {len(new)} heads",
                    flush=True,
                )
            before = held


if __name__ == "__main__":
    main()
