"""The section "Serving" of docs/performance.md, made of the newest rows of serving.csv.

Nothing that was not measured gets in: a figure that is not in the file has no line.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "serving.csv"
START, END = "<!-- serving:start -->", "<!-- serving:end -->"
Row = dict[str, str]

LINES = {
    "prompts included: s per new token": (
        "tokens/s of {h2o}, prompts included, over {other}", 1.0, "new tokens/s",
    ),
    "steps only: s per new token": ("tokens/s of steps, over {other}", 1.0, "new tokens/s"),
    "over HTTP: s per new token": ("the same over HTTP, over {other}", 1.0, "new tokens/s"),
    "cache of a user": ("users in equal cache memory, over {other}", 2.0**-20, "MiB each"),
    "p95 time per token": ("p95 time per token, over {other}", 1e3, "ms"),
    "p95 gap": ("p95 of the time between two tokens, over {other}", 1e3, "ms"),
}  # fmt: skip
TEXT = """## Serving

    python benchmarks/serving.py

`h2okv.AsyncLLM` beside transformers' continuous batching (`ContinuousBatchingManager` with SDPA, which is what
`transformers serve --continuous-batching` runs on a CPU) and beside `generate`, one request after another: fp32, a budget
of {budget} of each prompt, {clients} clients that each wait for their answer; over HTTP with `h2okv serve` and `transformers
serve`. The bundled model has real text, prompts of {bundled} tokens, as its window of 2,048 must hold the answers
too; the other is the shape above with random tokens, {shape}. Its steps count while all are under way, without prompts:
SDPA's mask makes each token of a prompt meet the keys of all users, so that reading 32 of these into one batch would take
transformers longer than all the rest. Before anything was timed, the engine with a budget that holds everything said what
`generate` says. Ratios are medians of {rounds} rounds, with quartiles; {machine}, {threads} threads.

"""  # noqa: E501


def newest(path: Path) -> list[Row]:
    """The last row of each figure of serving.py; others write into the file too."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = {
            (row["model"], row["measure"], row["implementation"], row["batch"]): row
            for row in csv.DictReader(file)
            if row["measure"].endswith(tuple(LINES))
        }
    return list(rows.values())


def value(row: Row, unit: str, factor: float) -> str:
    """The median in a reader's unit."""
    median = float(row["median"])
    shown = 1 / median if unit == "new tokens/s" else factor * median
    return f"{shown:,.0f} {unit}" if shown >= 100 else f"{shown:.3g} {unit}"


def table(rows: list[Row]) -> list[str]:
    """The lines of the table."""
    lines = ["| | model | h2okv | the other | ratio | target |", "|---|---|---|---|---|---|"]
    own = {(row["model"], row["measure"]): row for row in rows if row["implementation"] == "h2o"}
    for measure, (heading, factor, unit) in LINES.items():
        for row in rows:
            if not row["measure"].endswith(measure) or not row["ratio"]:
                continue
            h2o = own[row["model"], row["measure"]]
            ratio = f"{row['ratio']} ({row['ratio_lower']} to {row['ratio_upper']})"
            if row["met"] == "no":
                ratio = f"**{ratio}: missed**"
            other = row["implementation"].removeprefix("h2o, ")
            bound = row["target"].replace(">=", "at least").replace("<=", "at most")
            name = heading.format(h2o="h2okv", other=other)
            cells = (name, row["model"], value(h2o, unit, factor), value(row, unit, factor))
            lines.append(f"| {' | '.join(cells)} | {ratio} | {bound} |")
    return lines


def section(rows: list[Row]) -> str:
    """The whole section."""
    bundled = next((row for row in rows if row["model"] == "bundled"), None)
    shape = next((row for row in rows if row["model"] != "bundled"), None)
    if bundled is None or shape is None:
        sys.exit("the file lacks one of the two models; run benchmarks/serving.py first")
    text = TEXT.format(
        budget=f"{100 * float(bundled['budget']):.0f} %", clients=bundled["batch"],
        bundled=bundled["prompt"].replace(":", " to "), shape=shape["prompt"].replace(":", " to "),
        rounds=f"{bundled['rounds']} (the bundled model) and {shape['rounds']}",
        machine=bundled["machine"], threads=bundled["threads"],
    )  # fmt: skip
    rows_link = "All rows are in [serving.csv](../benchmarks/results/serving.csv)."
    return "\n".join([START, text + "\n".join(table(rows)), "", rows_link, END])


def main() -> None:
    """Prints the section, or puts it into a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--into", type=Path, help="such as docs/performance.md")
    args = parser.parse_args()
    text = section(newest(args.csv))
    if args.into is None:
        print(text)
        return
    page = args.into.read_text(encoding="utf-8")
    if START in page:
        page = re.sub(f"{START}.*?{END}", lambda _: text, page, flags=re.S)
    else:
        page = f"{page.rstrip()}\n\n{text}\n"
    args.into.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
