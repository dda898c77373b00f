"""Makes the tables of docs/results/observations.md and theory.md from the CSV files beside it.

    python docs/results/observations/tables.py              prints them
    python docs/results/observations/tables.py --write      puts them into the two pages
    python docs/results/observations/tables.py --collect D  makes the CSV files of D/*/, where
                                                            `h2okv analyze --neurons` wrote a
                                                            report for each book

The files hold what the tables show. The theorem is that of one book, `DETAILED`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from h2okv_lab.analysis.sections import Rows, column, distinct, where
from h2okv_lab.analysis.study import TEXT_COLUMNS
from h2okv_lab.tables import read_csv

FOLDER = Path(__file__).parent
PAGES = (FOLDER.parent / "observations.md", FOLDER.parent / "theory.md")
DETAILED = "sherlock_holmes"
LAYERS = ((0, 0), (1, 4), (5, 9), (10, 14), (15, 19), (20, 24), (25, 29))
"""The first and the last layer of each column or line; means are taken over them."""
POLICIES = ("h2o", "global", "recent", "sink_recent", "random")
COLUMNS = {
    "sparsity": "layer head share share_square",
    "power_law": "of layer values tail exponent p_value log_ratio log_ratio_p",
    "cooccurrence": "measure layer against rho low high words",
    "ablation": "condition share seed ratio low high",
    "perplexity": "policy share ratio low high",
    "sinks": "layer head first_1",
    "stays": "policy layer gone_at_once p90",
}
"""Tables that are kept row by row; of the others only what `SUMMARIES` makes of them."""


def books(name: str = "sparsity") -> list[str]:
    """Returns the names of the books that a table has rows of."""
    return sorted({row["book"] for row in read_csv(FOLDER / f"{name}.csv", text=("book",))})


def table(book: str, name: str) -> Rows:
    """Reads a book's rows of a table."""
    return where(read_csv(FOLDER / f"{name}.csv", text=("book", *TEXT_COLUMNS)), book=book)


def groups(rows: Rows, *keys: str) -> Iterator[tuple[dict[str, Any], Rows]]:
    """Yields the different values of some columns, and the rows that have them."""
    for values in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        chosen = dict(zip(keys, values, strict=True))
        yield chosen, where(rows, **chosen)


def means(rows: Rows, keys: tuple[str, ...], names: tuple[str, ...]) -> Rows:
    """Averages columns over the rows with the same keys."""
    return [k | {n: column(own, n).mean() for n in names} for k, own in groups(rows, *keys)]


def by_layer(rows: Rows) -> Rows:
    """Kept-set overlap: the mean with heads of the same layer, and with those of others."""
    found = []
    for key, own in groups(rows, "layer"):
        here = [row for row in own if row["other_layer"] == key["layer"]]
        same = [row for row in here if row["head"] != row["other_head"]]
        other = [row for row in own if row["other_layer"] != key["layer"]]
        pair = {"same": column(same, "jaccard").mean(), "other": column(other, "jaccard").mean()}
        found.append(key | pair)
    return found


def extremes(rows: Rows) -> Rows:
    """The theorem: how often the bound holds, and the worst case of each figure."""
    return [
        key
        | {"cases": len(own), "holds": int(column(own, "holds").sum())}
        | {"lowest_ratio": column(own, "lowest_ratio").min()}
        | {name: column(own, name).max() for name in ("alpha", "beta", "lost")}
        for key, own in groups(rows, "case", "policy", "objective", "h")
    ]


def ratios(rows: Rows) -> Rows:
    """The whole text: mean and lowest head."""
    return [
        key | {"mean": column(own, "ratio").mean(), "lowest": column(own, "ratio").min()}
        for key, own in groups(rows, "policy", "step")
    ]


SUMMARIES: dict[str, Callable[[Rows], Rows]] = {
    "retention": lambda rows: means(rows, ("policy", "share"), ("mass",)),
    "local_global": lambda rows: means(rows, ("share",), ("overlap", "chance")),
    "agreement": by_layer,
    "neurons": lambda rows: [
        key | {"share_of_top_tenth": own[0]["share_of_top_tenth"]}
        for key, own in groups(rows, "layer")
    ],
    "theory": extremes,
    "theory_mass": lambda rows: means(rows, ("case",), ("heavy", "h2o", "belady", "best")),
    "theory_long": ratios,
}


def collect(reports: Path) -> None:
    """Makes the CSV files of the reports of `h2okv analyze`, a folder for each book."""
    import csv

    found: dict[str, Rows] = {name: [] for name in (*COLUMNS, *SUMMARIES)}
    for folder in sorted(path.parent for path in reports.glob("*/settings.json")):
        for name, all_rows in found.items():
            if name.startswith("theory") and folder.name != DETAILED:
                continue
            if not (folder / f"{name}.csv").is_file():  # a --quick report has fewer
                continue
            rows = read_csv(folder / f"{name}.csv", text=TEXT_COLUMNS)
            if name == "cooccurrence":
                rows = where(rows, layer="all")
            if name == "stays":
                rows = where(rows, policy="h2o")
            if name in COLUMNS:
                rows = [{key: row[key] for key in COLUMNS[name].split()} for row in rows]
            else:
                rows = SUMMARIES[name](rows)
            all_rows += [{"book": folder.name} | row for row in rows]
    for name, rows in found.items():
        if not rows:
            continue
        # With all digits: the tables round what is here.
        with (FOLDER / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Writes a table."""
    header = list(header)
    lines = [header, ["---"] * len(header), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def title(book: str) -> str:
    """Writes a book's name for people."""
    small = ("in", "of", "and")
    return " ".join(w if w in small else w.capitalize() for w in book.split("_"))


def percent(share: float) -> str:
    """Writes a share with one digit."""
    return f"{100 * share:.1f} %"


def layers_name(first: int, last: int) -> str:
    """Names some layers."""
    return f"layer {first}" if first == last else f"{first} to {last}"


def of_layers(rows: Rows, first: int, last: int) -> Rows:
    """Takes the rows of some layers."""
    return [row for row in rows if first <= row["layer"] <= last]


def span(values: np.ndarray, form: str = ".2f") -> str:
    """Writes the lowest and the highest of some values."""
    return f"{values.min():{form}} to {values.max():{form}}"


def sparsity() -> str:
    """Sparsity by layer, mean of the heads, and the heads above 95 %."""
    lines = []
    for book in books():
        rows = table(book, "sparsity")
        layers = [percent(column(of_layers(rows, *own), "share").mean()) for own in LAYERS]
        share, square = column(rows, "share"), column(rows, "share_square")
        above = f"{(share > 0.95).sum()} of {len(rows)}"
        lines.append([title(book), *layers, above, f"{(square > 0.95).sum()} of {len(rows)}"])
    header = ["book", *(layers_name(*own) for own in LAYERS)]
    header += ["heads above 95 %", "counted as a square"]
    return markdown(header, lines)


def power_law() -> str:
    """Fits by token and by word: ranges over the layers."""
    lines = []
    for kind in ("tokens", "words"):
        for book in books():
            rows = where(table(book, "power_law"), of=kind)
            sure = column(rows, "log_ratio_p") < 0.05
            ratio = column(rows, "log_ratio")
            lines.append(
                [
                    kind,
                    title(book),
                    span(column(rows, "exponent"), ".1f"),
                    span(100 * column(rows, "tail") / column(rows, "values"), ".0f") + " %",
                    f"{(column(rows, 'p_value') >= 0.1).sum()} of {len(rows)}",
                    f"{(sure & (ratio > 0)).sum()}, {(sure & (ratio < 0)).sum()}",
                ]
            )
    header = ["of", "book", "exponent", "tail", "plausible (p at least 0.1)"]
    return markdown([*header, "better: power law, log-normal"], lines)


def cooccurrence() -> str:
    """Spearman's correlations, mean score of the layers."""
    lines = []
    kinds = [("sum", "together"), ("sum", "count"), ("each", "together"), ("each", "count")]
    for book in books():
        rows = table(book, "cooccurrence")
        cells = []
        for measure, against in kinds:
            (row,) = where(rows, measure=measure, against=against, layer="all")
            cells.append(f"{row['rho']:.2f} ({row['low']:.2f} to {row['high']:.2f})")
        lines.append([title(book), str(rows[0]["words"]), *cells])
    header = ["book", "words", "sum, co-occurrence", "sum, frequency"]
    return markdown([*header, "each, co-occurrence", "each, frequency"], lines)


def ablation() -> str:
    """Perplexity with tokens hidden, times full attention's; random is the mean of its draws."""
    lines = []
    names = ("heavy hidden", "random hidden", "only heavy kept", "only random kept")
    for share in (0.05, 0.1, 0.2):
        for book in books():
            rows = where(table(book, "ablation"), share=share)
            cells = []
            for name in names:
                part = where(rows, condition=name)
                ratio = f"{column(part, 'ratio').mean():.2f}"
                if len(part) == 1:
                    ratio += f" ({part[0]['low']:.2f} to {part[0]['high']:.2f})"
                cells.append(ratio)
            lines.append([percent(share), title(book), *cells])
    return markdown(["tokens", "book", *names], lines)


def policies() -> str:
    """Perplexity of the second half, times the full cache's."""
    lines = []
    for share in (0.05, 0.1, 0.2, 0.4):
        for book in books("perplexity"):
            rows = where(table(book, "perplexity"), share=share)
            cells = []
            for policy in POLICIES:
                (row,) = where(rows, policy=policy)
                cells.append(f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})")
            lines.append([percent(share), title(book), *cells])
    return markdown(["budget", "book", *POLICIES], lines)


def retention() -> str:
    """Attention retained and overlap with the oracle, means over layers and books."""
    lines = []
    for share in (0.05, 0.1, 0.2, 0.4):
        cells = []
        for policy in POLICIES:
            means = [
                column(where(table(b, "retention"), policy=policy, share=share), "mass").mean()
                for b in books("retention")
            ]
            cells.append(percent(float(np.mean(means))))
        parts = [where(table(b, "local_global"), share=share) for b in books("local_global")]
        overlap = [column(part, "overlap").mean() for part in parts]
        chance = [column(part, "chance").mean() for part in parts]
        lines.append(
            [percent(share), *cells, percent(float(np.mean(overlap))), percent(np.mean(chance))]
        )
    return markdown(["budget", *POLICIES, "overlap, h2o with global", "by chance"], lines)


def layers() -> str:
    """Sinks, stays and agreement by layer, means over books."""
    lines = []
    for own in LAYERS:
        sinks = [of_layers(table(book, "sinks"), *own) for book in books()]
        heads = np.mean([column(rows, "first_1") for rows in sinks], axis=0)
        stays, agreement, neurons = (
            [row for book in books(name) for row in of_layers(table(book, name), *own)]
            for name in ("stays", "agreement", "neurons")
        )
        lines.append(
            [
                layers_name(*own),
                f"{percent(heads.mean())} ({percent(heads.max())})",
                percent(float(column(stays, "gone_at_once").mean())),
                f"{column(stays, 'p90').mean():.0f}",
                f"{column(agreement, 'same').mean():.2f}",
                f"{column(agreement, 'other').mean():.2f}",
                percent(float(column(neurons, "share_of_top_tenth").mean())),
            ]
        )
    header = ["layer", "first token (highest head)", "gone at once", "a tenth stay longer than"]
    header += ["heads of the layer share", "with other layers", "top tenth of neurons"]
    return markdown(header, lines)


def theorem() -> str:
    """How often the bound holds, by policy, objective and h, on real rows."""
    rows = where(table(DETAILED, "theory"), case="real")
    lines = []
    for objective in distinct(rows, "objective"):
        for h in distinct(rows, "h"):
            if h == "identity" and objective != "tokens":
                continue
            part = where(rows, objective=objective, h=h)
            cells = []
            for policy in ("heavy", "informed", "h2o", "belady"):
                (own,) = where(part, policy=policy)
                cells.append(f"{own['holds']} of {own['cases']} ({own['lowest_ratio']:.2f})")
            name = "all three" if h == "identity" else objective
            lines.append([name, h, *cells])
    return markdown(["objective", "h", "heavy", "informed", "h2o", "Belady"], lines)


def adversaries() -> str:
    """The made-up cases for h = identity: ratios, what the bound needs, attention retained."""
    rows = table(DETAILED, "theory")
    masses = table(DETAILED, "theory_mass")
    lines = []
    for case in distinct(rows, "case"):
        part = where(rows, case=case, objective="tokens", h="identity")
        (heavy,), (window,) = where(part, policy="heavy"), where(part, policy="h2o")
        (mass,) = where(masses, case=case)
        cells = [*(f"{heavy[name]:.2f}" for name in ("lowest_ratio", "alpha", "beta"))]
        cells += [percent(heavy["lost"]), f"{window['lowest_ratio']:.2f}"]
        kept = [percent(mass[name]) for name in ("heavy", "h2o", "belady", "best")]
        lines.append([case, *cells, *kept])
    header = ["case", "heavy: lowest", "alpha", "beta", "lost", "h2o: lowest"]
    header += ["attention: heavy", "h2o", "Belady", "best"]
    return markdown(header, lines)


def long() -> str:
    """Accumulated score held on the whole text, share of the best set's: mean, lowest head."""
    rows = table(DETAILED, "theory_long")
    lines = []
    for step in distinct(rows, "step"):
        cells = []
        for policy in ("heavy", "h2o", "global"):
            (own,) = where(rows, policy=policy, step=step)
            cells.append(f"{own['mean']:.2f} ({own['lowest']:.2f})")
        lines.append([f"{step + 1:,}", *cells])
    return markdown(["tokens read", "heavy", "h2o", "global"], lines)


PARTS = {
    "sparsity": sparsity,
    "power-law": power_law,
    "cooccurrence": cooccurrence,
    "ablation": ablation,
    "policies": policies,
    "retention": retention,
    "layers": layers,
    "theorem": theorem,
    "adversaries": adversaries,
    "long": long,
}


def filled(page: str) -> str:
    """Puts the tables between their marks in a page."""

    def fill(found: re.Match[str]) -> str:
        name = found.group(1)
        return f"<!-- {name}:start -->\n{PARTS[name]()}\n<!-- {name}:end -->"

    return re.sub(r"<!-- ([a-z-]+):start -->.*?<!-- \1:end -->", fill, page, flags=re.S)


def main() -> None:
    """Prints the tables, writes them into the pages, or makes the files."""
    if "--collect" in sys.argv[1:]:
        collect(Path(sys.argv[-1]))
        return
    if "--write" in sys.argv[1:]:
        for path in PAGES:
            path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for name, make in PARTS.items():
        print(f"{name}\n\n{make()}\n")


if __name__ == "__main__":
    main()
