"""Fill the marked places of the pages from the CSV files, and draw the pictures.

A page marks a place with `<!-- table: NAME -->` and `<!-- end -->`; docs/results/tables.toml says
what stands there. An entry of `[tables]` has

    csv       a file, or several of which the rows are joined; each row's `file` is the name's stem
    derive    column = expression of columns, of all rows
    where     column = value, or a list of values, which orders the rows too
    latest    columns; of the rows that agree in them the newest (`date`) is read
    names     column = name of a `[names]` list: what a page calls its values
    mean      columns to average, `by` other columns
    base      rows to compare with (`where`), matched `by` columns: `nll` comes as `base_nll`
    compute   column = expression of columns, of the rows selected
    columns   [header, template] pairs, or for a cross table
    row       [header, template], `across` a template, `cell` a template
    value     a template instead, text within a line: one row, or several with `join` between
    intro     text above the table
    optional  the place stays empty while the file or its rows are missing

Templates are `str.format`'s; a template with an empty field gives an empty cell. An entry of
`[pictures]` reads rows the same way and draws `y` over `x`, a line for each `line` and a panel for
each `panel`; with `kind = "points"` a labelled point for each `line`; with `kind = "bars"` a bar
for each `line`, in a panel for each of its `measures` ([panel, column] pairs). A picture stores a
digest of what it shows, by which the check knows it. `[scripts]` names pages with places that a
script computes.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.util
import json
import math
import re
import string
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SPECS = ROOT / "docs" / "results" / "tables.toml"
MARK = re.compile(r"<!-- table: ([\w-]+) -->.*?<!-- end -->", re.DOTALL)
TEXTS = ("commit", "date", "revision")
FUNCTIONS = {"exp": math.exp, "float": float, "int": int, "str": str}
Row = dict[str, Any]
Spec = Mapping[str, Any]


class Template(string.Formatter):
    """`str.format` with a space before the percent sign, as the pages write it."""

    def format_field(self, value: Any, spec: str) -> str:
        """Format one value."""
        if value == "" or value is None:
            raise LookupError
        text = format(value, spec)
        return text[:-1] + " %" if spec.endswith("%") else text

    def fill(self, template: str, row: Row) -> str:
        """Fill a template; an empty field makes the whole cell empty."""
        try:
            return self.vformat(template, (), row)
        except LookupError:
            missing = [name for _, name, _, _ in self.parse(template) if name and name not in row]
            if missing:
                raise ValueError(f"no column {missing[0]!r} for {template!r}") from None
            return ""


def number(column: str, text: str) -> Any:
    """Return a cell of a CSV file as an int, a float or the text itself."""
    if column in TEXTS:
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def matches(row: Row, where: Mapping[str, Any]) -> bool:
    """Check whether a row has the values; a list means any of them."""
    for column, value in where.items():
        if column not in row:
            raise ValueError(f"no column {column!r} to select by")
        if row[column] not in (value if isinstance(value, list) else [value]):
            return False
    return True


def averages(rows: Iterable[Row], columns: Sequence[str], by: Sequence[str]) -> list[Row]:
    """Average columns over the rows that agree in others."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return [
        dict(zip(by, key, strict=True))
        | {name: sum(row[name] for row in group) / len(group) for name in columns}
        | {"rows": len(group)}
        for key, group in groups.items()
    ]


def load(spec: Spec) -> list[Row]:
    """Return all rows of a spec's files, with the derived columns."""
    rows: list[Row] = []
    for name in [spec["csv"]] if isinstance(spec["csv"], str) else spec["csv"]:
        path = ROOT / name
        if not path.is_file():
            if spec.get("optional"):
                continue
            raise ValueError(f"{name} is missing")
        with path.open(encoding="utf-8", newline="") as file:
            rows += [
                {k: number(k, v) for k, v in row.items()} | {"file": path.stem}
                for row in csv.DictReader(file)
            ]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    rows = [{name: row.get(name, "") for name in columns} for row in rows]
    for row in rows:
        evaluate(spec.get("derive", {}), row)
    return rows


def evaluate(expressions: Mapping[str, str], row: Row) -> None:
    """Add columns that are expressions of the others."""
    for column, expression in expressions.items():
        row[column] = eval(expression, {"__builtins__": FUNCTIONS}, row)


def read(spec: Spec, names: Mapping[str, Mapping[str, str]]) -> list[Row]:
    """Return the rows of a table or picture, with computed columns and the pages' names."""
    rows = load(spec)
    where = dict(spec.get("where", {}))
    mean, base = spec.get("mean"), spec.get("base")
    if mean:
        early = {k: v for k, v in where.items() if k not in mean["by"]}
        rows = [row for row in rows if matches(row, early)]
        rows = averages(rows, mean["columns"], mean["by"])
        where = {k: v for k, v in where.items() if k in mean["by"]}
    if base:
        others = {
            tuple(row[k] for k in base["by"]): row for row in rows if matches(row, base["where"])
        }
        for row in rows:
            other = others.get(tuple(row[k] for k in base["by"]), {})
            row |= {f"base_{k}": v for k, v in other.items()}
    rows = [row for row in rows if matches(row, where)]
    if "latest" in spec:
        rows.sort(key=lambda row: row["date"])
        rows = list({tuple(row[k] for k in spec["latest"]): row for row in rows}.values())
    for column, value in reversed(where.items()):
        if isinstance(value, list):
            rows.sort(key=lambda row, column=column, value=value: value.index(row[column]))
    for row in rows:
        evaluate(spec.get("compute", {}), row)
        for column, group in spec.get("names", {}).items():
            row[column] = names[group].get(str(row[column]), row[column])
    if not rows and not spec.get("optional"):
        raise ValueError(f"no row is {where}")
    return rows


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table; columns of numbers are aligned to the right."""
    numeric = [
        all(re.fullmatch(r"[*+-]*[\d.,]*( %|×)?[*]*", line[i]) for line in lines)
        for i in range(len(header))
    ]
    rule = ["---:" if is_number and i else "---" for i, is_number in enumerate(numeric)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def cross(spec: Spec, rows: Sequence[Row]) -> str:
    """Return a cross table."""
    fill = Template().fill
    title, template = spec["row"]
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for row in rows:
        label, column = fill(template, row), fill(spec["across"], row)
        columns[column] = None
        line = cells.setdefault(label, {})
        if column in line:
            raise ValueError(f"two rows for {label!r}, {column!r}")
        line[column] = fill(spec["cell"], row)
    lines = [[label, *(line.get(c, "") for c in columns)] for label, line in cells.items()]
    return markdown([title, *columns], lines)


def rendered(spec: Spec, names: Mapping[str, Mapping[str, str]]) -> str:
    """Return what stands in a marked place."""
    rows = read(spec, names)
    if not rows:
        return ""
    fill = Template().fill
    if "value" in spec:
        if len(rows) > 1 and "join" not in spec:
            raise ValueError(f"{len(rows)} rows for the value {spec['value']!r}")
        return spec.get("join", "").join(fill(spec["value"], row) for row in rows)
    if "row" in spec:
        table = cross(spec, rows)
    else:
        lines = [[fill(template, row) for _, template in spec["columns"]] for row in rows]
        table = markdown([header for header, _ in spec["columns"]], lines)
    intro = f"\n{spec['intro']}\n" if "intro" in spec else ""
    return f"{intro}\n{table}\n\n"


@cache
def specs() -> dict[str, Any]:
    """Return the list of tables and pictures."""
    return tomllib.loads(SPECS.read_text(encoding="utf-8"))


@cache
def place(name: str) -> str:
    """Return the text of one marked place."""
    if name not in specs()["tables"]:
        raise ValueError(f"{SPECS.name} has no table {name!r}")
    try:
        return rendered(specs()["tables"][name], specs()["names"])
    except (ValueError, NameError, TypeError) as error:
        raise ValueError(f"table {name!r}: {error}") from error


@cache
def script(name: str) -> Any:
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def filled(text: str) -> str:
    """Return a page with its marked places filled."""

    def fill(match: re.Match[str]) -> str:
        body = place(match[1])
        return f"<!-- table: {match[1]} -->{body}<!-- end -->"

    return MARK.sub(fill, text)


def pages() -> list[Path]:
    """Return the pages that may have marked places."""
    names = (".", "docs", "docs/results", "benchmarks", "examples/helm")
    folders = [ROOT / name for name in names]
    return sorted(path for folder in folders for path in folder.glob("*.md"))


def series(spec: Spec) -> dict[str, dict[str, list[tuple[float, ...]]]]:
    """Return what a picture shows: the points of each line of each panel."""
    fill = Template().fill
    panels: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for row in read(spec, specs()["names"]):
        lists = spec.get("measures") or [[spec.get("panel", ""), spec["x"], spec["y"]]]
        for panel, *columns in lists:
            point = tuple(row[column] for column in columns)
            if "" not in point:
                points = panels.setdefault(fill(panel, row), {})
                points.setdefault(fill(spec["line"], row), []).append(point)
    return panels


def digest(spec: Spec) -> str:
    """Return a digest of what a picture shows."""
    text = json.dumps([spec, series(spec)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def draw(name: str, path: Path) -> None:
    """Draw one picture."""
    import matplotlib
    from matplotlib.ticker import MultipleLocator

    from h2okv_lab.tables import COLOURS, MARKERS, new_figure

    spec: Spec = specs()["pictures"][name]
    panels = series(spec)
    style = {"svg.hashsalt": name, "svg.fonttype": "path", "font.size": 11, "axes.axisbelow": True}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#555555"}
    with matplotlib.rc_context(style):
        width = spec.get("width", 3.3 * len(panels) + 0.4)
        figure = new_figure(width, spec.get("height", 3.6))
        kind = spec.get("kind")
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        drawn = dict.fromkeys(line for panel in panels.values() for line in panel)
        lines = list(dict.fromkeys((*specs()["looks"]["order"], *drawn)))
        for axes, (title, panel) in zip(all_axes, panels.items(), strict=True):
            side = "left" if kind == "bars" else "center"
            axes.set_title(title, loc=side, fontsize=11, fontweight="bold")
            for line, points in panel.items():
                i = lines.index(line)
                look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
                if kind == "bars":
                    (x,), *_ = points
                    colour = look["color"] if line in specs()["looks"]["order"] else "#8a8a8a"
                    axes.barh(line, x, color=colour, height=0.62)
                    label = spec["format"].format(x)
                    axes.annotate(label, (x, line), (5, 0), textcoords="offset points", va="center")
                elif kind == "points":
                    (x, y), *_ = points
                    named = line in spec["highlight"]
                    colour = COLOURS[i % len(COLOURS)] if named else "#8a8a8a"
                    axes.plot(x, y, "o", color=colour, markersize=8 if named else 5)
                    if line not in spec["labels"]:
                        continue
                    dx, dy, *align = spec.get("offsets", {}).get(line, [6, -3])
                    axes.annotate(
                        line, (x, y), (dx, dy), textcoords="offset points", fontsize=9,
                        color=colour if named else "#555555", ha=align[0] if align else "left",
                        fontweight="bold" if named else "normal",
                    )  # fmt: skip
                else:
                    axes.plot(*zip(*sorted(points), strict=True), label=line, linewidth=2, **look)
            if "level" in spec:
                axes.axhline(spec["level"], color="#555555", linewidth=1, linestyle="--")
            if spec.get("logx"):
                axes.set_xscale("log", base=2)
                axes.set_xticks(spec["xticks"], [f"{x:,}" for x in spec["xticks"]])
                axes.minorticks_off()
            if spec.get("logy"):
                axes.set_yscale("log")
                if "yticks" in spec:
                    axes.set_yticks(spec["yticks"])
                axes.yaxis.set_major_formatter("{x:,g}")
            if spec.get("percent"):
                axes.xaxis.set_major_formatter("{x:.0%}")
            if spec.get("percenty"):
                axes.yaxis.set_major_formatter("{x:.0%}")
            if "ylim" in spec:
                axes.set_ylim(*spec["ylim"])
            if "ystep" in spec:
                axes.yaxis.set_major_locator(MultipleLocator(spec["ystep"]))
            if "xlim" in spec:
                axes.set_xlim(*spec["xlim"])
            if kind == "bars":
                axes.margins(x=0.25)
                axes.set_xticks([])
                axes.tick_params("y", length=0)
                axes.spines["bottom"].set_visible(False)
                continue
            axes.grid(color="#dddddd", linewidth=0.7)
            axes.set_xlabel(spec["xlabel"])
        if kind == "bars":
            all_axes[0].invert_yaxis()
        else:
            all_axes[0].set_ylabel(spec["ylabel"])
        if kind not in ("bars", "points"):
            handles = {
                label: handle
                for axes in all_axes
                for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
            }
            figure.legend(
                handles.values(), handles, loc="outside lower center", frameon=False,
                ncols=spec.get("ncols", 3),
            )  # fmt: skip
        metadata = {"Description": f"shows {digest(spec)}", "Date": None, "Creator": None}
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata=metadata, facecolor="white")


def picture(name: str) -> Path:
    """Return the path of a picture."""
    return ROOT / "docs" / "images" / f"{name}.svg"


def is_current(name: str) -> bool:
    """Check whether a picture shows what its CSV file says."""
    spec: Spec = specs()["pictures"][name]
    if spec.get("optional") and not read(spec, specs()["names"]):
        return True
    path = picture(name)
    return path.is_file() and f"shows {digest(spec)}" in path.read_text(encoding="utf-8")


def main() -> int:
    """Fill the pages and draw the pictures, or check them; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    is_check, stale = parser.parse_args().check, []
    scripts = {ROOT / page: name for page, name in specs()["scripts"].items()}
    for path in pages():
        text = path.read_text(encoding="utf-8")
        new = filled(text)
        if path in scripts:
            new = script(scripts[path]).filled(new)
        if new != text:
            stale.append(path)
            if not is_check:
                path.write_text(new, encoding="utf-8")
    for name in specs().get("pictures", {}):
        if not is_current(name):
            stale.append(picture(name))
            if not is_check:
                draw(name, picture(name))
    for path in stale:
        print(path.relative_to(ROOT))
    return 1 if stale and is_check else 0


if __name__ == "__main__":
    sys.exit(main())
