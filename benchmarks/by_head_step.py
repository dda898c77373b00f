"""A layer's decode step by how its heads share the budget, with the heads of Llama 3 8B.

One layer with 8 KV heads of 4 query heads, 128 numbers each, in bf16 and fp32, random keys and 20 %
of each prompt. "h2o" is `best` by head, with budgets from 0.3 to 1.7 of the mean; "even" is `best`
with equal budgets; "masked" is by head where all query heads meet all slots in one product; "full"
is SDPA over all tokens, without what a cache does. A step is what the layer does with a token:
append, attend, keep the query. Runs are interleaved.

python benchmarks/by_head_step.py [--prompts 2048,8192] [--threads 1] [--csv FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, Target, environment, interleave, report, rows_for
from transformers import LlamaConfig

from h2okv import H2OCache
from h2okv.ops import append
from h2okv.ops.reference import AttentionSpec

KV_HEADS, GROUPS, SIZE = 8, 4, 128
FACTORS = torch.linspace(0.3, 1.7, KV_HEADS).tolist()
WARMUP = 8
TARGETS = [Target("even"), Target("masked"), Target("full", at_least=True)]
SPEC = AttentionSpec(SIZE**-0.5)


def draw(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return random queries, keys and values of some tokens."""
    heads = KV_HEADS * GROUPS, KV_HEADS, KV_HEADS
    return [torch.randn(1, count, length, SIZE, dtype=dtype) for count in heads]


def make_step(
    length: int, dtype: torch.dtype, by_head: bool, masked: bool = False
) -> Callable[[], Any]:
    """Return a step of a layer that has read a prompt."""
    config = LlamaConfig(
        hidden_size=KV_HEADS * GROUPS * SIZE, num_attention_heads=KV_HEADS * GROUPS,
        num_key_value_heads=KV_HEADS, num_hidden_layers=1,
    )  # fmt: skip
    factors = [FACTORS] if by_head else "even"
    cache = H2OCache(config, "best", budget=0.2, layer_budgets=factors)
    layer: Any = cache.layers[0]
    limit = sys.maxsize if masked else append._WASTED_PRODUCTS

    def read(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        layer.update(key, value)
        layer.attend(query, key, value, None, SPEC)

    def step() -> None:
        usual, append._WASTED_PRODUCTS = append._WASTED_PRODUCTS, limit
        read(*token)
        append._WASTED_PRODUCTS = usual

    read(*draw(length, dtype))
    token = draw(1, dtype)
    return step


@torch.inference_mode()
def measure(length: int, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """Measure all steps behind a prompt of some tokens."""
    query, key, value = draw(1, dtype)[0], *draw(length, dtype)[1:]
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = query.view(1, KV_HEADS, GROUPS, SIZE)
    runs = {
        "h2o": make_step(length, dtype, True),
        "even": make_step(length, dtype, False),
        "masked": make_step(length, dtype, True, masked=True),
        "full": lambda: attend(grouped, key, value),
    }
    samples = interleave(runs, rounds, WARMUP, f"{dtype} {length}")
    setting = environment() | {
        "model": "llama-3-8b, a layer", "dtype": str(dtype).removeprefix("torch."), "batch": 1,
        "kv_heads": KV_HEADS, "prompt": length, "budget": 0.2,
    }  # fmt: skip
    samples = {name: [1e6 * seconds for seconds in each] for name, each in samples.items()}
    return rows_for("step of a layer", "us", samples, TARGETS, setting)


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=numbers, default=[2048, 8192], help="tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--csv", type=Path, default=RESULTS / "by_head_step.csv")
    args = parser.parse_args()
    if min(*args.prompts, args.threads, args.rounds) < 1:
        parser.error("--prompts, --threads and --rounds must be 1 or more")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for length in args.prompts:
            report(args.csv, measure(length, dtype, args.rounds))


if __name__ == "__main__":
    main()
