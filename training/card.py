"""Measures the exported model and writes its card, with one CSV for each table.

Example:
    python -m training.card --model src/h2okv/assets/books-llama --text ../shared/data/text \
        --log training/results/train_log.csv --results training/results
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import platform
import time
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

import h2okv
from training import eviction, quality
from training.data import Corpus, held_out_windows
from training.tables import (
    EVICTION,
    FIRST_POSITION,
    HEAVY,
    PERPLEXITY,
    RECALL,
    Row,
    markdown,
    write_csv,
)
from training.text import HELD_OUT_BOOKS

SHARES = (0.1, 0.2, 0.4, 0.5)
MARGIN = 1.02  # the aim: perplexity at most 2 % above that of the full cache
AIM_SHARE = 0.2
AIM_SHARES = {AIM_SHARE: "20 % of the prompt", 0.4: "20 % of the window"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure and where to write it."""

    model: Path
    text: Path
    log: Path
    results: Path
    length: int
    windows: int
    seed: int
    threads: int


def load(settings: Settings, attention: str) -> transformers.PreTrainedModel:
    """Load the exported weights in fp32 with one of transformers' attentions."""
    net = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=torch.float32, attn_implementation=attention
    )
    return net.eval()


def measure(settings: Settings, console: Console) -> dict[str, list[Row]]:
    """Measure everything that the card tells.

    Args:
        settings: What to measure.
        console: Where progress is shown.

    Returns:
        The rows of each table by its name.
    """
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    corpus = Corpus.held_out(settings.text, HELD_OUT_BOOKS, tokenizer)
    plain = held_out_windows(corpus, settings.windows, settings.length)
    facts = held_out_windows(corpus, settings.windows, settings.length, settings.seed, facts=True)
    more = held_out_windows(
        corpus, 2 * settings.windows, settings.length, settings.seed, facts=True
    )
    net = load(settings, "sdpa")
    tables = {
        "perplexity": quality.perplexity_by_book(
            net, tokenizer, settings.text, settings.windows // 2, settings.length
        ),
        "recall": quality.recall_by_distance(net, more),
        "first_position": quality.first_position_mass(load(settings, "eager"), plain[::2]),
    }
    net = load(settings, "h2o")  # registered by importing h2okv
    jobs = [("full", 1.0), *((name, budget) for budget in SHARES for name in eviction.POLICIES)]
    rows = [
        eviction.measure(net, plain, facts, name, budget)
        for name, budget in track(jobs, "eviction", console=console)
    ]
    tables["eviction"] = [dataclasses.asdict(row) for row in rows]
    mixed = [*plain[::2], *facts[::2]]
    tables["heavy"] = eviction.heavy_positions(net, mixed, AIM_SHARE)
    return tables


def verdict(rows: list[Row]) -> str:
    """Say whether the aim is met: H2O near the full cache and ahead of the recent window."""
    full = next(row for row in rows if row["policy"] == "full")
    lines = []
    for share, budget in AIM_SHARES.items():
        at = {row["policy"]: row for row in rows if row["share"] == share}
        for text, column in (("text", "text_perplexity"), ("facts", "fact_perplexity")):
            h2o, recent = (at[name][column] / full[column] for name in ("h2o", "recent"))
            lines.append(
                f"- {budget}, perplexity on {text}: H2O {h2o:.4f} times full "
                f"({'within' if h2o <= MARGIN else 'not within'} 2 %), recent only {recent:.4f}; "
                f"H2O is {'ahead' if h2o < recent else 'not ahead'}."
            )
        named = {"full": full} | {name: at[name] for name in ("h2o", "recent", "random")}
        recalls = ", ".join(f"{name} {row['recall']:.1%}" for name, row in named.items())
        lines.append(f"- {budget}, recall: {recalls}.")
    return "\n".join(lines)


def training_summary(log: Path) -> str:
    """Tell from the log of the run what it took."""
    with log.open(newline="") as file:
        last = list(csv.DictReader(file))[-1]
    tokens, seconds = int(last["tokens"]), float(last["seconds"])
    return (
        f"{tokens:,} tokens in {int(last['step']):,} steps and {seconds / 3600:.2f} hours on two "
        f"CPU cores shared with other work, {tokens / seconds:,.0f} tokens per second on average, "
        "compilation and checks included."
    )


def write_card(settings: Settings, tables: dict[str, list[Row]], seconds: float) -> str:
    """Write the text of the card."""
    net = load(settings, "sdpa")
    config = net.config
    parameters = sum(parameter.numel() for parameter in net.parameters())
    half = settings.length // 2
    full = tables["eviction"][0]
    ratio_rows = [
        {
            **row,
            "text_ratio": row["text_perplexity"] / full["text_perplexity"],
            "fact_ratio": row["fact_perplexity"] / full["fact_perplexity"],
        }
        for row in tables["eviction"]
    ]
    return f"""# books-llama

A small Llama for trying out and testing KV-cache eviction, trained from nothing on 63 public-domain
books by the scripts in `training/`. It writes book-like English without much sense; it recalls
facts that its context states. It is no assistant.

- {parameters / 1e6:.2f} M parameters (bf16), {config.num_hidden_layers} layers, hidden \
{config.hidden_size}, {config.num_attention_heads} query heads and {config.num_key_value_heads} \
KV heads of {config.head_dim}, tied embeddings, byte-level BPE of {config.vocab_size} entries.
- Trained on windows of up to {config.max_position_embeddings} tokens, most of the time 1024 or \
less. Every window begins with `<|bos|>`; the tokenizer adds it.
- {training_summary(settings.log)}
- 45 % of the windows have facts woven in, each stated once early and then used or asked for two
  to eight times in the running text: "The city of Maria is Vienna."
- Text: public domain; the list with sources stands beside the training archive. Weights: the
  licence of this repository.

## Held-out perplexity

{settings.windows // 2} windows of {settings.length} tokens from each of seven books that training
never saw, dense attention, fp32.

{markdown(tables["perplexity"], PERPLEXITY)}

## Recall by distance

{2 * settings.windows} held-out windows of {settings.length} with facts; their pairs of name and
answer are not in the training data. An answer counts if every token of it is the model's first
choice; guessing among the answers of a property would give 0.3 to 2.3 %. Distance is counted in
tokens from the statement; most facts are used again in between. "One" are answers with a property
asked of one person in the window: the property alone finds them; "several" those where
only the name tells which of two or more answers is right.

{markdown(tables["recall"], RECALL)}

## Attention on the first position

{len(range(0, settings.windows, 2))} plain windows, queries from position 128 on: mean over heads,
and the head that has most.

{markdown(tables["first_position"], FIRST_POSITION)}

## Under eviction

{settings.windows} plain and {settings.windows} fact windows of {settings.length}, fp32. The first
{half} tokens are read at once (the prompt), the other {half} one by one, teacher-forced, through
`h2okv.H2OCache`; figures are about the second half. The budget is a share of the prompt of {half},
as `heavy` and `recent` are in the contract; half of it is recent where a policy has both parts.
So 40 % of the prompt is 20 % of the window. Recall counts answers with
a fact stated in the prompt ({full["answers"]} answers); "one" those with a property asked of
one person ({full["alone_answers"]}); "far" those last said {eviction.FAR} or more tokens ago
({full["far_answers"]}).

{markdown(ratio_rows, EVICTION)}

The aim was H2O at 20 % within 2 % of the full cache's perplexity, and ahead of a recent window:

{verdict(tables["eviction"])}

## Why

Two measurements suggest what holds H2O back on this model; neither was varied on its own. No
strong sink has formed (the table of the first position), so no few tokens carry most of the
attention. And a sum of attention favours what has been there for long: at the end of the window,
after {half} tokens one by one, most of what H2O at {AIM_SHARE:.0%} of the prompt holds outside
its recent window still stands in the prompt, in the first layer at its very beginning. On book text
a longer recent window is then worth as much or more; where the text asks for facts, the old entries
are what pays. The policy `heavy`, with no recent window at all, loses most.
Half-and-half shares are the paper's; they were not tuned here.

{markdown(tables["heavy"], HEAVY)}

Measured by `python -m training.card` in {seconds / 60:.0f} minutes on {platform.machine()} \
({settings.threads} threads) with torch {torch.__version__}, transformers \
{transformers.__version__}, h2okv {h2okv.__version__}.
"""


def parse_arguments() -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="exported model folder; CARD.md goes there")
    add("--text", type=Path, required=True, help="folder of the held-out books")
    add("--log", type=Path, required=True, help="CSV log of the training")
    add("--results", type=Path, required=True, help="folder for the CSV tables")
    add("--length", type=int, default=1024, help="tokens of a window (default 1024)")
    add("--windows", type=int, default=32, help="windows of each kind (default 32)")
    add("--seed", type=int, default=1, help="seed of the facts (default 1)")
    add("--threads", type=int, default=2, help="CPU threads (default 2)")
    return Settings(**vars(parser.parse_args()))


def main() -> None:
    """Run the command line."""
    settings = parse_arguments()
    torch.set_num_threads(settings.threads)
    console = Console()
    began = time.monotonic()
    tables = measure(settings, console)
    settings.results.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        write_csv(settings.results / f"{name}.csv", rows)
    card = write_card(settings, tables, time.monotonic() - began)
    (settings.model / "CARD.md").write_text(card, encoding="utf-8")
    console.print(f"wrote {settings.model / 'CARD.md'}")
    console.print(verdict(tables["eviction"]))


if __name__ == "__main__":
    main()
