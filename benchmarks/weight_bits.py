"""Products with weights in bf16, int8 and int4 on the CPU, as of `h2okv batch --weight-bits`.

One linear layer of 4096 outputs and 1536 inputs, for numbers of rows from one sequence's step to a
prompt; it needs the extra `quant`. Correctness comes first: a product that is too far
from that in bf16 ends the run without a figure.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from record import Target, environment, interleave, report, rows_for

from h2okv.offload.meta_model import PackedSlot, ParameterSlot

RESULTS = Path(__file__).parent / "results" / "weight_bits.csv"
KINDS = {"int8": 8, "int4": 4}
CLOSE = {"int8": 0.02, "int4": 0.2}
"""Norm of the difference, by that of the product, that counts as an error of the code."""


def packed(bits: int, weight: torch.Tensor) -> tuple[torch.nn.Linear, int]:
    """Return a layer with a quantized weight, and its bytes."""
    outputs, inputs = weight.shape
    layer = torch.nn.Linear(inputs, outputs, bias=False, device="meta", dtype=weight.dtype)
    slot = ParameterSlot("layer.weight", layer, "weight", weight.shape, weight.dtype)
    slot = PackedSlot.of(slot, bits)
    stored = slot.to_bytes(weight)
    slot.fill(stored)
    return layer, stored.nbytes


def main() -> None:
    """Check, measure, show and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/weight_bits.py --rounds 40",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's choice")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="file to add rows to")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4096, 1536, generator=generator).bfloat16()
    layers = {name: packed(bits, weight) for name, bits in KINDS.items()}
    print(
        ", ".join(
            f"{name}: {size / weight.nbytes:.3f} of the bytes" for name, (_, size) in layers.items()
        )
    )
    setting = environment() | {"model": "linear-4096x1536", "dtype": "bf16"}
    with torch.inference_mode():
        for count in args.rows:
            rows = torch.randn(count, 1536, generator=generator).bfloat16()
            product = torch.nn.functional.linear(rows, weight)
            for name, (layer, _) in layers.items():
                error = float((layer(rows) - product).float().norm() / product.float().norm())
                if not error < CLOSE[name]:
                    sys.exit(f"{name} is {error:.2g} from the product in bf16; nothing was timed.")
            runs = {"bf16": partial(torch.nn.functional.linear, rows, weight)}
            runs |= {name: partial(layer, rows) for name, (layer, _) in layers.items()}
            samples = interleave(runs, args.rounds, 3, f"{count} rows")
            for name in KINDS:
                pair = {name: samples[name], "bf16": samples["bf16"]}
                setting["batch"] = count
                report(args.csv, rows_for("product", "s", pair, [Target("bf16")], setting, name))


if __name__ == "__main__":
    main()
