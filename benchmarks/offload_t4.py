"""The H2O paper's T4 table by the planner's model of time: arithmetic, nothing is measured.

For each published throughput (arXiv 2306.14048, one T4 with 16 GB) the forecast of

    t = max(weights / b_w, B K e / b_kv, B c)

for a step, at the published batch B and with the published settings (``h2o_flexgen/benchmark`` of
the authors' code): what H2O keeps is a share of prompt and answer, OPT-6.7B and its cache are on
the card, and OPT-30B's cache is in the CPU's memory, where the CPU attends to it
(``--cpu-cache-compute``). Rows of CSV go to the standard output.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import dataclass

PROMPT = 512


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


@dataclass(frozen=True)
class Published:
    """One figure of the table, and how it was measured."""

    model: Opt
    new: int  # tokens after 512 of prompt
    heavy: float  # heavy hitters over the prompt, as many are recent; 0: the full cache
    batch: int
    on_card: float  # share of the weights
    speed: float  # tokens in a second, prompts included

    @property
    def entries(self) -> float:
        """Entries of a sequence, on average over the steps."""
        return 2 * int(self.heavy * PROMPT) if self.heavy else PROMPT + self.new / 2


OPT_6B = Opt("OPT-6.7B", 32, 4096)
OPT_30B = Opt("OPT-30B", 48, 7168)
TABLE = (
    Published(OPT_6B, 32, 0, 2, 1, 20.2),
    Published(OPT_6B, 32, 0.1, 4, 1, 35.1),
    Published(OPT_6B, 512, 0, 1, 1, 16.8),
    Published(OPT_6B, 512, 0.2, 4, 1, 51.7),
    Published(OPT_6B, 1024, 0, 1, 1, 16.9),
    Published(OPT_6B, 1024, 0.3, 4, 1, 52.1),
    Published(OPT_30B, 32, 0, 144, 0.2, 8.1),
    Published(OPT_30B, 32, 0.1, 728, 0, 12.7),
    Published(OPT_30B, 512, 0, 80, 0.2, 8.5),
    Published(OPT_30B, 512, 0.2, 416, 0, 18.83),
    Published(OPT_30B, 1024, 0, 48, 0.2, 7.1),
    Published(OPT_30B, 1024, 0.3, 264, 0, 13.82),
)


def forecast(run: Published, args: argparse.Namespace) -> dict[str, object]:
    """Return one row."""
    weights = 2 * run.model.parameters
    cached = run.batch * run.entries * run.model.entry_bytes
    compute = 2 * run.batch * run.model.parameters / (args.tflops * 1e12)
    linked = weights * (1 - run.on_card) / (args.link * 1e9)
    if linked:
        bounds = {"weights": linked, "cache": cached / (args.host * 1e9), "compute": compute}
    else:  # the card reads one after the other
        bounds = {"memory": (weights + cached) / (args.bandwidth * 1e9), "compute": compute}
    limit = max(bounds, key=bounds.__getitem__)
    prefill = max(linked, PROMPT * compute)
    speed = run.batch * run.new / (prefill + (run.new - 1) * bounds[limit])
    return {
        "model": run.model.name,
        "tokens": f"{PROMPT} + {run.new}",
        "cache": "H2O" if run.heavy else "full",
        "batch": run.batch,
        "entries": int(run.entries),
        "prefill_s": f"{prefill:.2f}",
        "step_s": f"{bounds[limit]:.3f}",
        "limit": limit,
        "forecast": f"{speed:.1f}",
        "published": run.speed,
        "ratio": f"{speed / run.speed:.2f}",
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--link", type=float, default=12.0, help="GB/s of PCIe 3.0 x16 in practice")
    parser.add_argument("--bandwidth", type=float, default=240.0, help="GB/s of the card's memory")
    parser.add_argument("--tflops", type=float, default=22.0, help="fp16, by the authors' logs")
    parser.add_argument("--host", type=float, default=7.5, help="GB/s of a cache on the CPU")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if not value > 0:
            parser.error(f"--{name} must be above 0, got {value:g}")
    rows = [forecast(run, args) for run in TABLE]
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


if __name__ == "__main__":
    main()
