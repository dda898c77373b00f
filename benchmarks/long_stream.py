"""A book as one stream, far past the context window: perplexity by position and policy.

The whole book goes token by token through one cache that is never emptied. All policies that evict
hold the same number of entries, and sit at rolling positions:

- `sink_recent`: 4 first tokens and a window (StreamingLLM, arXiv 2309.17453);
- `h2o`: heavy hitters and a window (arXiv 2306.14048); `h2o+sink` with 4 of the heavy hitters'
  places for the first tokens;
- `recent`, if asked for: a window alone.

Beside them stand the full cache at original positions, until its collapse is plain, and, as what
the model can do at all, the full cache begun anew (`restarted`) at every context window of text.

With --turnover nothing is written: one stream with `h2o`, and at every window the share of heavy
hitters that are new since the window before, for each layer and head.

One call is one model; its rows replace those of an earlier call in the CSV file. No time is
written down: what is measured here holds on a busy machine as well.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from record import progress
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.evaluation.plots import draw_perplexity, new_figure, save_figure
from h2okv.evaluation.stream_data import TextSource
from h2okv.evaluation.streaming import Stream, StreamRow, StreamSettings
from h2okv.records import read_text_file

POLICIES = ("full", "restarted", "recent", "sink_recent", "h2o", "h2o+sink")
BY_DEFAULT = [name for name in POLICIES if name != "recent"]
SINK = 4
RESULTS = Path(__file__).parents[1] / "docs" / "results"
FIELDS = (
    "model", "window", "policy", "positions", "heavy", "recent", "sink", "chunk",
    "start", "position", "nll",
)  # fmt: skip
# Where the table's columns end, in context windows.
RANGES = (1, 2, 4, 8, 16, 64, 256)
# Rows are a quarter of a window up to this one, and then as long as COARSE.
FINE_WINDOWS, COARSE_WINDOWS = 16, 8
# A drawn point stands for at least this share of the positions before it; single rows, a few
# hundred tokens each, go up and down with the text.
DRAWN_SHARE = 0.2
# A line that is wrapped in the middle of a paragraph.
LINE_WRAP = re.compile(r"(?<=\S)[ ]*\n[ ]*(?=\S)")


def read_book(path: Path, begin: str) -> str:
    """Reads a book with its wrapped lines joined, as the bundled model's books are."""
    text = LINE_WRAP.sub(" ", read_text_file(path)).strip()
    if begin not in text:
        raise SystemExit(f"--begin {begin!r} does not stand in '{path}'")
    return text[text.index(begin) :]


def options(policy: str, args: argparse.Namespace) -> dict[str, Any]:
    """The cache's options of a policy; all that evict have one budget."""
    if policy in ("full", "restarted"):
        return {"policy": "full", "positions": "original", "heavy": 0, "recent": 0, "sink": 0}
    heavy, recent, name = args.heavy, args.recent, policy
    sink = 0
    if policy == "h2o+sink":
        name, sink, heavy = "h2o", SINK, heavy - SINK
    if policy in ("recent", "sink_recent"):
        sink = SINK if policy == "sink_recent" else 0
        heavy, recent = 0, heavy + recent - sink
    return {
        "policy": name, "positions": "rolling", "heavy": heavy, "recent": recent, "sink": sink,
    }  # fmt: skip


def run(model: PreTrainedModel, ids: torch.Tensor, policy: str, args: Any) -> list[StreamRow]:
    """Streams tokens through one policy's cache: rows of a quarter of a window."""
    window = model.config.max_position_embeddings
    chosen = {name: value for name, value in options(policy, args).items()}
    if policy == "full":
        chosen.update(heavy=1, recent=1)  # they say nothing to a cache that keeps everything
        ids = ids[: args.full_windows * window + 1]
    settings = StreamSettings(prefill_chunk=args.chunk, every=window // 4)
    cache = h2okv.H2OCache(model.config, **chosen)
    stream = Stream(model, cache, TextSource(ids, "book"), settings)
    for step in stream.blocks():
        if step.rows:
            show(policy, stream.state.position, len(ids) - 1, step.rows[-1].nll)
    last = stream.last_row()
    return [*stream.state.rows, *([last] if last else [])]


def run_restarted(model: PreTrainedModel, ids: torch.Tensor) -> list[StreamRow]:
    """Reads every window of text with a cache of its own: what the model can do at all."""
    window = model.config.max_position_embeddings
    rows: list[StreamRow] = []
    for start in range(0, len(ids) - 1, window):
        part = ids[start : start + window + 1]
        if len(part) < 2:
            break
        cache = h2okv.H2OCache(model.config, policy="full", heavy=1, recent=1)
        settings = StreamSettings(prefill_chunk=window, every=window // 4)
        stream = Stream(model, cache, TextSource(part, "window"), settings)
        for _ in stream.blocks():
            pass
        last = stream.last_row()
        found = [*stream.state.rows, *([last] if last else [])]
        rows += [
            StreamRow(
                start + row.position, row.nll, row.step_seconds, row.rss_bytes, row.cache_bytes
            )
            for row in found
        ]
        show("restarted", rows[-1].position, len(ids) - 1, rows[-1].nll)
    return rows


def show(policy: str, position: int, total: int, nll: float) -> None:
    """Shows where a policy's stream is."""
    progress(f"{policy}: {position:,} of {total:,} tokens, perplexity {math.exp(nll):.4g}")


def tidy(rows: list[StreamRow], window: int, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Makes CSV rows: fine ones at the beginning, then joined to long ones."""
    joined = []
    start, total = 0, 0.0
    before = 0
    for row in rows:
        total += row.nll * (row.position - before)
        before = row.position
        step = window // 4 if row.position <= FINE_WINDOWS * window else COARSE_WINDOWS * window
        if row.position % step == 0 or row is rows[-1]:
            nll = total / (row.position - start)
            joined.append(
                {**setting, "start": start, "position": row.position, "nll": f"{nll:.6f}"}
            )
            start, total = row.position, 0.0
    return joined


def replace_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Puts rows into the CSV file in place of those of the same model and policy."""
    new = {(row["model"], row["policy"]) for row in rows}
    kept = [row for row in read(path) if (row["model"], row["policy"]) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(kept + rows)


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the CSV file; nothing if it is not there."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def by_model(rows: list[dict[str, Any]]) -> Iterator[tuple[str, int, dict[str, list[dict]]]]:
    """Yields each model's name, its window, and its rows by policy in the order of POLICIES."""
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        policies = {name: [row for row in own if row["policy"] == name] for name in POLICIES}
        yield model, int(own[0]["window"]), {k: v for k, v in policies.items() if v}


def table(rows: list[dict[str, Any]]) -> str:
    """Makes the tables: perplexity by range of positions, and over all of it."""
    lines = []
    for model, window, policies in by_model(rows):
        end = max(int(row["position"]) for group in policies.values() for row in group)
        edges = [0, *(n * window for n in RANGES if n * window < end), end]
        names = [f"to {edge:,}" for edge in edges[1:]]
        lines += [f"### {model}", "", "| | " + " | ".join(names) + " | all |"]
        lines += ["|---" * (len(names) + 2) + "|"]
        for policy, group in policies.items():
            reached = int(group[-1]["position"])
            cells = []
            for low, high in [*zip(edges[:-1], edges[1:], strict=True), (0, end)]:
                inside = [row for row in group if low < int(row["position"]) <= high]
                cells.append(perplexity(inside) if reached >= high else "")
            lines.append(f"| `{policy}` | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def perplexity(rows: list[dict[str, Any]]) -> str:
    """The perplexity over rows, weighted by their tokens."""
    sizes = [int(row["position"]) - int(row["start"]) for row in rows]
    total = sum(float(row["nll"]) * size for row, size in zip(rows, sizes, strict=True))
    return f"{math.exp(total / sum(sizes)):.2f}"


def smooth(rows: list[dict[str, Any]]) -> list[StreamRow]:
    """Joins rows to points that are about evenly spaced on a logarithmic axis."""
    points = []
    start, total = 0, 0.0
    for row in rows:
        position = int(row["position"])
        total += float(row["nll"]) * (position - int(row["start"]))
        if position - start >= DRAWN_SHARE * start or row is rows[-1]:
            points.append(StreamRow(position, total / (position - start), 0.0, None, 0))
            start, total = position, 0.0
    return points


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws each model's perplexity by position, on logarithmic scales."""
    models = list(by_model(rows))
    figure = new_figure(8, 4.2 * len(models))
    for axes, (model, window, policies) in zip(
        figure.subplots(len(models), 1, squeeze=False)[:, 0], models, strict=True
    ):
        curves = {name: smooth(group) for name, group in policies.items()}
        draw_perplexity(axes, curves, window)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_title(model)
        axes.set_xlabel("position in the book, tokens")
    save_figure(figure, path)


def print_turnover(model: PreTrainedModel, ids: torch.Tensor, args: Any) -> None:
    """Prints how many heavy hitters (what is kept besides the recent window) are new."""
    cache = h2okv.H2OCache(model.config, **options("h2o", args))
    every = model.config.max_position_embeddings
    stream = Stream(model, cache, TextSource(ids, "book"), StreamSettings(args.chunk, every=every))
    before: list[set[int]] = []
    for step in stream.blocks():
        if not step.rows:
            continue
        start = cache.num_seen_tokens - args.recent
        held = [
            {position for position in head if 0 <= position < start}
            for layer in range(len(cache.layers))
            for head in cache.kept_positions(layer)[0].tolist()
        ]
        if before:
            new = [len(now - then) for now, then in zip(held, before, strict=True)]
            total = sum(map(len, held))
            print(
                f"{step.rows[-1].position:,} tokens: {sum(new)} of {total} heavy hitters are new"
                f" ({100 * sum(new) / total:.2f} %), in {sum(map(bool, new))} of {len(new)} heads",
                flush=True,
            )
        before = held


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/long_stream.py --text book.txt --heavy 256 --recent 256",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--text", type=Path, help="the book; without it only table and picture")
    parser.add_argument("--begin", default="", help="where in the book the stream begins")
    parser.add_argument("--model", type=Path, default=bundled_model_path(), help="a folder")
    parser.add_argument("--name", default="bundled", help="what the results call the model")
    parser.add_argument("--heavy", type=int, default=256)
    parser.add_argument("--recent", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=64, help="tokens of a block")
    parser.add_argument("--tokens", type=int, help="how much of the book; else all of it")
    parser.add_argument("--full-windows", type=int, default=4, help="how long `full` is run")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=BY_DEFAULT)
    parser.add_argument("--turnover", action="store_true", help="how heavy hitters change")
    parser.add_argument("--csv", type=Path, default=RESULTS / "long_stream.csv")
    parser.add_argument("--plot", type=Path, default=RESULTS / "long_stream.png")
    return parser.parse_args()


def main() -> None:
    """Runs what the command line asks for."""
    args = parse()
    if args.text is not None:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
        window = model.config.max_position_embeddings
        book = read_book(args.text, args.begin)
        source = TextSource.of_text(book, tokenizer, model.config.vocab_size)
        ids = source.ids if args.tokens is None else source.ids[: args.tokens + 1]
        if args.turnover:
            return print_turnover(model, ids, args)
        for policy in args.policies:
            restarted = policy == "restarted"
            rows = run_restarted(model, ids) if restarted else run(model, ids, policy, args)
            setting = {"model": args.name, "window": window, "chunk": args.chunk}
            setting |= options(policy, args) | {"policy": policy}
            progress("")
            print(f"{policy}: {rows[-1].position:,} tokens", flush=True)
            replace_rows(args.csv, tidy(rows, window, setting))
    rows = read(args.csv)
    plot(rows, args.plot)
    print(table(rows))


if __name__ == "__main__":
    main()
