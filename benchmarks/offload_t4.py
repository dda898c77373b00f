"""The H2O paper's T4 table by the planner's model of time, by arithmetic alone.

For the published figures (arXiv 2306.14048: one T4 with 16 GB, 512 tokens of prompt and
512 new ones): the step that t = max(weights / b_w, B K e / b_kv, B c) gives, the batch that the
figure then implies (tokens per second times seconds per step), the batch that fits in memory, and
the model's prediction for it. The machine's figures are assumptions, printed with
the table; nothing is measured here.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from h2okv.offload.profile import HardwareProfile

GIB = 2**30


@dataclass(frozen=True)
class Opt:
    """Sizes of an OPT model, fp16."""

    name: str
    layers: int
    hidden: int

    @property
    def parameters(self) -> int:
        """Of the layers and the head."""
        return self.layers * 12 * self.hidden**2 + 50_272 * self.hidden

    @property
    def entry_bytes(self) -> int:
        """Key and value of one token, in all layers."""
        return 2 * self.layers * self.hidden * 2


OPT_6B = Opt("OPT-6.7B", 32, 4096)
OPT_30B = Opt("OPT-30B", 48, 7168)
PUBLISHED = {
    # model, prompt, new: FlexGen, H2O (tokens in a second)
    (OPT_6B, 512, 512): (16.8, 51.7),
    (OPT_30B, 512, 512): (8.5, 18.83),
}


def profile(link: float, memory: float, flops: float) -> HardwareProfile:
    """Return the profile of a T4 and its host."""
    return HardwareProfile(3e9, link, memory, ((1, flops), (4096, flops)))


def largest(free: float, per_row: float) -> int:
    """Sequences that fit."""
    return max(1, int(free // per_row))


def row(
    args: argparse.Namespace, model: Opt, prompt: int, new: int, slots: int, published: float
) -> str:
    """Return one line of the table, without its first two cells."""
    machine = profile(args.link * 1e9, args.bandwidth * 1e9, args.tflops * 1e12)
    weights = model.parameters * 2
    per_row = slots * model.entry_bytes
    room = (args.memory - args.temporaries) * GIB
    linked = 0.0
    if weights + per_row <= room:
        rows = largest(room - weights, per_row)
        brought = weights / machine.memory
    else:
        # Weights and caches are in the CPU's memory, and come over the link in every step.
        rows = largest(args.host * GIB - weights, per_row)
        brought = linked = weights / machine.host_device
    bounds = {
        "weights": linked,
        "cache": rows * per_row / machine.memory,
        "compute": max(
            2 * rows * model.parameters / machine.gemm_rate(rows), weights / machine.memory
        ),
    }
    if linked:
        bounds["cache"] = max(bounds["cache"], linked + rows * per_row / machine.host_device)
    limit = max(bounds, key=bounds.__getitem__)
    step = bounds[limit]
    prefill = max(linked, 2 * rows * prompt * model.parameters / machine.gemm_rate(prompt))
    speed = rows * new / (prefill + (new - 1) * step)
    return (
        f"{brought:.3f} | {published} | {published * brought:.1f} | {rows} |"
        f" {step:.2f} ({limit}) | {speed:.1f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", type=float, default=15.0, help="GiB of the card in use")
    parser.add_argument("--host", type=float, default=200.0, help="GiB of the CPU's memory")
    parser.add_argument("--link", type=float, default=12.0, help="GB/s of PCIe 3.0 x16 in practice")
    parser.add_argument("--bandwidth", type=float, default=240.0, help="GB/s of the card's memory")
    parser.add_argument("--tflops", type=float, default=25.0, help="fp16 products in practice")
    parser.add_argument("--temporaries", type=float, default=1.5, help="GiB besides the cache")
    parser.add_argument("--share", type=float, default=0.2, help="of the prompt that H2O keeps")
    args = parser.parse_args()
    print(
        "| model | cache | weights alone (s) | published tok/s | implied batch | room for |"
        " step (s) | predicted tok/s |\n|---|---|---|---|---|---|---|---|"
    )
    for (model, prompt, new), published in PUBLISHED.items():
        both = (prompt + new, int(args.share * prompt) + 1)
        for name, slots, figure in zip(("full", "H2O, 20 %"), both, published, strict=True):
            line = row(args, model, prompt, new, slots, figure)
            print(f"| {model.name} | {name} | {line}")


if __name__ == "__main__":
    main()
