"""The Triton kernels on a GPU: a block's score sums and fused attention, the step's bandwidth.

First every kernel is held to plain PyTorch, then timed at the heads of Llama 3 8B (32 query heads,
8 KV heads of 128, bf16):

- score sums of a prompt, for several tiles, against SDPA's forward pass and our own;
- the decode step of one layer, recorded as a CUDA graph, against the memory's bandwidth, which is
  measured in the same run.

Whole models are measured by `h2okv bench`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, Target, environment, interleave, report, rows_for

from h2okv.offload.profile import measure_bandwidth
from h2okv.ops import dispatch, triton_prefill
from h2okv.ops import flash_varlen as flash
from h2okv.ops.decode import Slots, StepRules
from h2okv.ops.reference import AttentionSpec, Visibility
from h2okv.ops.triton_prefill import Tile

QUERY_HEADS, KV_HEADS, SIZE = 32, 8, 128
TILES = [
    Tile(queries, keys, warps, stages)
    for queries, keys in ((64, 128), (128, 128), (64, 64), (32, 128), (128, 64))
    for warps in (4, 8)
    for stages in (2, 3, 4)
]


def time_in_turn(
    runs: dict[str, Callable[[], Any]], rounds: int, device: torch.device, label: str
) -> dict[str, list[float]]:
    """Return samples by name; a run that does not fit the device is left out and reported."""
    able = {}
    for name, run in runs.items():
        try:
            run()
            able[name] = run
        except Exception as error:  # a tile that does not fit is no failure of the others
            print(f"{label}: {name} left out: {str(error).splitlines()[0][:100]}")
    return interleave(able, rounds, 0, label, device)


def score_sums(args: argparse.Namespace, length: int) -> dict[str, list[float]]:
    """Time the sums of a prompt for each tile, and attention alone."""

    def draw(heads: int) -> torch.Tensor:
        states = torch.randn(args.batch, length, heads, SIZE, device=args.device)
        return states.to(torch.bfloat16).transpose(1, 2)

    query, key, value = draw(QUERY_HEADS), draw(KV_HEADS), draw(KV_HEADS)
    spec, visibility = AttentionSpec(SIZE**-0.5), Visibility()
    _, limits = triton_prefill.forward(query, key, value, visibility, spec)

    def sums_by(tile: Tile | None) -> Callable[[], Any]:
        return lambda: triton_prefill.score_sums(query, key, limits, visibility, spec, tile=tile)

    runs: dict[str, Callable[[], Any]] = {
        "h2o": sums_by(None),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ),
        "own forward": lambda: triton_prefill.forward(query, key, value, visibility, spec),
    }
    if flash.applies(query, value, visibility, spec):
        runs["flash"] = lambda: flash.forward(query, key, value, spec.scale)
    if args.tune:
        runs |= {"/".join(map(str, tile)): sums_by(tile) for tile in TILES}
    return time_in_turn(runs, args.rounds, args.device, f"sums, {length}")


def step(args: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    """Time the step of one layer whose slots are all used; return samples and the bytes read."""
    batch, count, device = args.step_batch, args.entries + 1, args.device
    shape = batch, KV_HEADS, count
    positions = torch.arange(count, dtype=torch.int32, device=device).repeat(*shape[:2], 1)
    positions[..., -1] = -1
    slots = Slots(
        torch.randn(*shape, SIZE, device=device).to(torch.bfloat16),
        torch.randn(*shape, SIZE, device=device).to(torch.bfloat16),
        torch.rand(shape, device=device),
        positions,
        torch.full((*shape[:2], 1), count - 1, device=device),
        torch.full((batch,), count - 1, device=device),
    )
    half = torch.full((batch, 1, 1), args.entries // 2, device=device)
    rules = StepRules(AttentionSpec(SIZE**-0.5), half, full=True)
    groups = QUERY_HEADS // KV_HEADS
    operations = dispatch.operations(device, torch.bfloat16, SIZE, SIZE, groups)
    print(f"step: {operations.name}, {operations.why}")
    token = [
        torch.randn(batch, heads, 1, SIZE, device=device).to(torch.bfloat16)
        for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
    ]

    def run() -> Any:
        return operations.step(*token, slots, rules)

    runs: dict[str, Callable[[], Any]] = {"h2o": run}
    if device.type == "cuda":
        runs["recorded"] = record(run)
    return time_in_turn(runs, 4 * args.rounds, device, "step"), slots.keys.nbytes * 2


def record(run: Callable[[], Any]) -> Callable[[], None]:
    """Record a CUDA graph of a call; twenty of them in one replay, as a model has layers."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            run()
    return graph.replay


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="example: python benchmarks/gpu_kernels.py --tune",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--step-batch", type=int, default=32)
    parser.add_argument("--entries", type=int, default=1638)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tune", action="store_true", help="try other tiles for the sums too")
    parser.add_argument("--csv", type=Path, default=RESULTS / "gpu_kernels.csv")
    args = parser.parse_args()
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; run it on a machine with one")
    with torch.no_grad():
        benchmark(args)


def benchmark(args: argparse.Namespace) -> None:
    """Check, measure, show and write."""
    groups = QUERY_HEADS // KV_HEADS
    chosen = dispatch.operations(args.device, torch.bfloat16, SIZE, SIZE, groups)
    if chosen.name != "triton":
        raise SystemExit(f"nothing was timed: {chosen.why}")
    print(f"block: {chosen.why}")
    is_gpu = args.device.type == "cuda"
    name = torch.cuda.get_device_name(args.device) if is_gpu else "interpreted"
    setting = environment() | {
        "machine": name, "model": "heads of llama-3-8b", "dtype": "bf16", "kv_heads": KV_HEADS,
    }  # fmt: skip
    for length in args.lengths:
        rows = rows_for(
            "score sums", "s", score_sums(args, length), [Target("sdpa", 0.6)],
            setting | {"batch": args.batch, "prompt": length},
        )  # fmt: skip
        report(args.csv, rows)
    samples, num_bytes = step(args)
    if "recorded" in samples:
        samples["recorded"] = [seconds / 20 for seconds in samples["recorded"]]
        bandwidth = measure_bandwidth(args.device)
        best = num_bytes / sorted(samples["recorded"])[len(samples["recorded"]) // 2]
        print(f"step under a CUDA graph: {best / bandwidth:.1%} of {bandwidth / 1e9:.0f} GB/s")
        samples["bytes read"] = [num_bytes / bandwidth] * len(samples["recorded"])
    rows = rows_for(
        "decode step of a layer", "s", samples, [],
        setting | {"batch": args.step_batch, "budget": args.entries},
    )  # fmt: skip
    report(args.csv, rows)


if __name__ == "__main__":
    main()
