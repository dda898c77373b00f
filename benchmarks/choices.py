"""Scorings and policies side by side on the bundled model: perplexity and recall at one budget.

The windows and the way of reading are those of the model's card: windows of 1,024 tokens, the
first half read at once, the second half one token at a time, on a share of the first half. Every
choice is a policy, followed by options of `H2OCache`: ``h2o:scoring=decay:decay=0.9``.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from h2okv.assets import bundled_model_path
from training.data import Corpus, Window, held_out_windows
from training.eviction import second_half
from training.quality import answer_recalled, share, stack
from training.text import HELD_OUT_BOOKS

CHOICES = (
    *h2okv.policy_names(), "h2o:scoring=mean", "h2o:scoring=value_norm",
    "h2o:scoring=value_norm:sink=8", "h2o:sink=8",
    *(f"h2o:scoring=decay:decay={decay}" for decay in (0.5, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)),
)  # fmt: skip


def make_cache(model: torch.nn.Module, choice: str, tokens: int) -> h2okv.H2OCache:
    """Makes the cache of a choice with a total budget, half of it recent."""
    policy, *rest = choice.split(":")
    options: dict = dict(part.split("=") for part in rest)
    options["simulate"] = policy not in h2okv.policy_names(dropping=True)
    for name in ("decay", "sink"):
        if name in options:
            options[name] = float(options[name]) if name == "decay" else int(options[name])
    left = tokens - options.get("sink", 0)
    return h2okv.H2OCache(model.config, left - left // 2, left // 2, policy=policy, **options)


def recalled(hits: torch.Tensor, windows: list[Window], half: int) -> float:
    """Share of the answers recalled that were stated in the first half and asked for later."""
    found = []
    for row, window in enumerate(windows):
        stated = {a.fact for a in window.answers if a.occurrence == 0 and a.stop <= half}
        for answer in window.answers:
            if answer.start >= half and answer.fact in stated:
                found.append(answer_recalled(hits, row, answer.start, answer.stop))
    return share(found)


def measure(
    model: torch.nn.Module, plain: list[Window], facts: list[Window], choice: str, budget: float
) -> dict[str, object]:
    """Measures one choice at one budget; one row of the CSV."""
    tokens = stack([*plain, *facts])
    half = tokens.shape[1] // 2
    kept = tokens.shape[1] if choice == "full" else round(budget * half)
    loss, hits = second_half(model, tokens, make_cache(model, choice, kept))
    hits = torch.cat([hits.new_zeros(len(tokens), half - 1), hits], dim=1)[len(plain) :]
    return {
        "choice": choice,
        "budget": budget,
        "entries": kept,
        "text_perplexity": round(math.exp(loss[: len(plain)].mean().item()), 2),
        "fact_perplexity": round(math.exp(loss[len(plain) :].mean().item()), 2),
        "recall": round(recalled(hits, facts, half), 4),
    }


def main() -> None:
    """Writes one row for each choice and budget, each as soon as it is there."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python -m benchmarks.choices --text ../shared/data/text --out choices.csv",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--text", type=Path, required=True, help="folder with the held-out books")
    parser.add_argument("--out", type=Path, required=True, help="the CSV")
    parser.add_argument("--choice", nargs="+", default=CHOICES)
    parser.add_argument("--budget", nargs="+", type=float, default=[0.2])
    parser.add_argument("--windows", type=int, default=32, help="of plain text, and of facts")
    parser.add_argument("--seed", type=int, default=1, help="of the facts")
    args = parser.parse_args()
    path = bundled_model_path()
    corpus = Corpus.held_out(args.text, HELD_OUT_BOOKS, AutoTokenizer.from_pretrained(path))
    plain = held_out_windows(corpus, args.windows, 1024)
    facts = held_out_windows(corpus, args.windows, 1024, args.seed, facts=True)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="h2o"
    ).eval()
    jobs = [(choice, budget) for budget in args.budget for choice in args.choice]
    with args.out.open("w", newline="") as file:
        writer = None
        for choice, budget in track(jobs, "choices"):
            row = measure(model, plain, facts, choice, budget)
            if writer is None:
                writer = csv.DictWriter(file, row)
                writer.writeheader()
            writer.writerow(row)
            file.flush()


if __name__ == "__main__":
    main()
