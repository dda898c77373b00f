"""H2O against transformers' own caches on the CPU: decode step, prefill, peak memory.

A Llama with random weights (12 layers, hidden 768, 12 heads of 64, SwiGLU with intermediate 3072,
vocabulary 32000), batch 4, prompt 2048, a budget of 20 %. (--intermediate 2048 is the size that
Llama's own rule of 8/3 gives.) Four comparisons, each within one run:

- decode step: h2o against `StaticCache` with exactly as many entries, and against `DynamicCache`
  with SDPA over the whole context (the target is 0.9 of the speed-up that the bytes read allow);
- prefill: h2o against `DynamicCache` with SDPA;
- attention: of one layer's prompt, batch 1, with the scores and without (SDPA);
- peak memory (resident) of a long prompt, batch 1, each in a process of its own.

Correctness comes first: a failed check ends the run without a figure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import Target, append_csv, environment, interleave, progress, rows_for, show
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import h2okv
from h2okv.benchmarking.memory import speedup_limit
from h2okv.ops import dispatch
from h2okv.ops.attention import Visibility

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEASURES = ("decode", "prefill", "attention", "memory")
RESULTS = Path(__file__).parent / "results" / "cpu_generate.csv"
STATIC_TARGET = Target("static", 1.02)
SHARE_OF_LIMIT = 0.9
PREFILL_TARGETS = [Target("dynamic", 1.10)]
# The scores may take 0.9 of the time that attention takes without them.
ATTENTION_TARGETS = [Target("sdpa", 1.9)]
MEMORY_TARGETS = [Target("dynamic", 1.05)]


def build(args: argparse.Namespace, dtype: str) -> LlamaForCausalLM:
    """Makes the model, with the same weights every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=args.intermediate,
        num_hidden_layers=args.layers, num_attention_heads=12, num_key_value_heads=args.kv_heads,
        max_position_embeddings=32768,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(DTYPES[dtype]).eval()


def make_cache(model: LlamaForCausalLM, args: argparse.Namespace, **options: Any) -> h2okv.H2OCache:
    """Makes an H2O cache with half of the budget for heavy hitters, half for recent tokens."""
    half = args.budget / 2
    return h2okv.H2OCache(model.config, **{"heavy": half, "recent": half} | options)


def prompt_ids(batch: int, length: int) -> torch.Tensor:
    """Draws a prompt, int64 ``[B, T]``."""
    return torch.randint(0, 32000, (batch, length), generator=torch.Generator().manual_seed(1))


def forward(model: LlamaForCausalLM, ids: torch.Tensor, cache: Any, attention: str) -> torch.Tensor:
    """One forward pass as `generate` does it: logits ``[B, 1, V]`` of the last token."""
    model.config._attn_implementation = attention
    return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits


def check(model: LlamaForCausalLM, args: argparse.Namespace, dtype: str) -> None:
    """Holds h2o to full attention and to its masking simulation; exits if it differs.

    In bf16 two right results differ by rounding, which may swap near-equal entries further up;
    there the first layer, whose input is the same, is compared.
    """
    length, steps = 96, 8
    ids = prompt_ids(2, length + steps)
    tolerance = 1e-3 if dtype == "fp32" else 5e-2
    layers = range(args.layers if dtype == "fp32" else 1)

    def run(cache: Any, attention: str) -> torch.Tensor:
        steps_ids = [ids[:, :length], *ids[:, length:].split(1, dim=1)]
        return torch.cat([forward(model, part, cache, attention) for part in steps_ids], dim=1)

    full = run(DynamicCache(config=model.config), "sdpa")
    kept_all = run(make_cache(model, args, heavy=length, recent=length), "h2o")
    caches = [make_cache(model, args), make_cache(model, args, simulate=True)]
    dropped, simulated = (run(cache, "h2o") for cache in caches)
    largest = full.abs().max()
    errors = {"K >= length against full attention": (kept_all - full).abs().max() / largest}
    if dtype == "fp32":
        errors["dropping against simulation"] = (dropped - simulated).abs().max() / largest
    for name, error in errors.items():
        if not error < tolerance:
            sys.exit(f"{dtype}: {name}: relative error {error:.2g}; nothing was timed.")
    for layer in layers:
        real, mask = (cache.kept_positions(layer) for cache in caches)
        for row, expected in zip(real.flatten(0, 1), mask.flatten(0, 1), strict=True):
            if sorted(row[row >= 0].tolist()) != sorted(expected[expected >= 0].tolist()):
                sys.exit(f"{dtype}: layer {layer} keeps other entries than the simulation.")
    progress("")
    print(f"{dtype:>8}  checked: " + ", ".join(f"{k} {v:.1g}" for k, v in errors.items()))


def time_decode(
    model: LlamaForCausalLM, args: argparse.Namespace
) -> tuple[dict[str, list[float]], list[Target]]:
    """Times one decode step of each implementation; the samples and the targets."""
    ids, step = prompt_ids(args.batch, args.prompt), prompt_ids(args.batch, 1)
    progress("decode: reading the prompt")
    pruned, whole = make_cache(model, args), DynamicCache(config=model.config)
    forward(model, ids, pruned, "h2o")
    # What stands in a full cache does not matter for its speed.
    shape = args.batch, args.kv_heads, args.prompt, 64
    for layer in range(args.layers):
        whole.update(*(torch.randn(shape, dtype=model.dtype) for _ in range(2)), layer)
    entries = pruned.kept_positions(0).shape[-1]
    static = StaticCache(config=model.config, max_cache_len=entries)
    for layer in static.layers:
        layer.update(*(torch.randn(*shape[:2], 1, 64, dtype=model.dtype) for _ in range(2)))

    def static_step() -> None:
        # Back to its last free entry, so that every step attends to a full static cache.
        for layer in static.layers:
            layer.cumulative_length.fill_(entries - 1)
        forward(model, step, static, "sdpa")

    runs: dict[str, Callable[[], None]] = {
        "h2o": lambda: forward(model, step, pruned, "h2o"),
        "static": static_step,
        "dynamic": lambda: forward(model, step, whole, "sdpa"),
    }
    # The table of embeddings is looked up, not read.
    weights = (
        sum(part.nbytes for part in model.parameters()) - model.model.embed_tokens.weight.nbytes
    )
    limit = speedup_limit(weights, pruned.full_nbytes, pruned.nbytes)
    print(f"limit of the speed-up over dynamic: {limit:.3f}", flush=True)
    targets = [
        STATIC_TARGET,
        Target("dynamic", round(SHARE_OF_LIMIT * limit, 3), at_least=True),
    ]
    return interleave(runs, args.decode_rounds, 3, "decode"), targets


def time_attention(args: argparse.Namespace, dtype: str) -> dict[str, list[float]]:
    """Times the attention of one layer's prompt, with scores and without."""
    torch.manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(1, args.prompt, heads, 64).to(DTYPES[dtype]).transpose(1, 2)

    query, key, value = draw(12), draw(args.kv_heads), draw(args.kv_heads)
    operations = dispatch.operations(query.device, query.dtype, 64, 64, 12 // args.kv_heads)

    def sdpa() -> None:
        torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=args.kv_heads < 12
        )

    runs: dict[str, Callable[[], Any]] = {
        "h2o": lambda: operations.attend(query, key, value, Visibility(), 0.125),
        "sdpa": sdpa,
    }
    return interleave(runs, 4 * args.prefill_rounds, 2, "attention")


def time_prefill(model: LlamaForCausalLM, args: argparse.Namespace) -> dict[str, list[float]]:
    """Times the forward pass over the prompt."""
    ids = prompt_ids(args.batch, args.prompt)
    runs: dict[str, Callable[[], None]] = {
        "h2o": lambda: forward(model, ids, make_cache(model, args), "h2o"),
        "dynamic": lambda: forward(model, ids, DynamicCache(config=model.config), "sdpa"),
    }
    return interleave(runs, args.prefill_rounds, 1, "prefill")


def peak_bytes() -> int:
    """The largest resident size of this process."""
    # Not ru_maxrss: a spawned process inherits its parent's there.
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not report VmHWM; leave out --measure memory")


def measure_memory(args: argparse.Namespace, dtype: str) -> dict[str, list[float]]:
    """Peak resident memory of a long prompt in GiB, each implementation in a fresh process."""
    samples: dict[str, list[float]] = {}
    for name in ("h2o", "dynamic", "loaded"):
        progress(f"memory: {name}, prompt of {args.long_prompt}")
        command = [
            sys.executable, __file__, "--memory-of", name, "--dtype", dtype,
            "--kv-heads", str(args.kv_heads), "--layers", str(args.layers),
            "--intermediate", str(args.intermediate),
            "--budget", str(args.budget), "--long-prompt", str(args.long_prompt),
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        samples[name] = [int(done.stdout) / 2**30]
    progress("")
    return samples


def memory_of(args: argparse.Namespace) -> None:
    """The process that `measure_memory` starts: prints its peak in bytes."""
    model = build(args, args.dtype[0])
    if args.memory_of != "loaded":
        ids = prompt_ids(1, args.long_prompt)
        if args.memory_of == "h2o":
            forward(model, ids, make_cache(model, args), "h2o")
        else:
            forward(model, ids, DynamicCache(config=model.config), "sdpa")
    print(peak_bytes())


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/cpu_generate.py --dtype bf16 --measure decode prefill",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--kv-heads", type=int, default=12, help="12 (MHA) or 4 (GQA)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--intermediate", type=int, default=3072, help="size of the MLP")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each sequence")
    parser.add_argument("--long-prompt", type=int, default=32768, help="tokens for peak memory")
    parser.add_argument("--budget", type=float, default=0.2, help="fraction of the prompt")
    parser.add_argument("--decode-rounds", type=int, default=60)
    parser.add_argument("--prefill-rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's choice")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="file to add rows to")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Runs what the command line asks for."""
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    with torch.inference_mode():
        if args.memory_of:
            memory_of(args)
            return
        for dtype in args.dtype:
            benchmark(args, dtype)


def benchmark(args: argparse.Namespace, dtype: str) -> None:
    """Checks, measures, shows and writes the rows of one dtype."""
    setting = environment() | {
        "model": f"llama-{args.layers}x768-{args.intermediate}", "dtype": dtype,
        "kv_heads": args.kv_heads, "batch": args.batch, "prompt": args.prompt,
        "budget": args.budget,
    }  # fmt: skip

    def report(measure: str, unit: str, samples: Any, targets: Any, **other: Any) -> None:
        rows = rows_for(measure, unit, samples, targets, setting | other)
        show(rows)
        append_csv(args.csv, rows)

    model = build(args, dtype)
    check(model, args, dtype)
    if "decode" in args.measure:
        report("decode step", "s", *time_decode(model, args))
    if "prefill" in args.measure:
        report("prefill", "s", time_prefill(model, args), PREFILL_TARGETS)
    del model
    if "attention" in args.measure:
        samples = time_attention(args, dtype)
        report("attention of a prompt", "s", samples, ATTENTION_TARGETS, batch=1)
    if "memory" in args.measure:
        report(
            "peak memory", "GiB", measure_memory(args, dtype), MEMORY_TARGETS,
            batch=1, prompt=args.long_prompt,
        )  # fmt: skip


if __name__ == "__main__":
    main()
