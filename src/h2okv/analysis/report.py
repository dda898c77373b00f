"""The report page: what the paper found beside what this model does, then a section for each."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2okv.analysis import figures
from h2okv.analysis.figures import Rows, column, where
from h2okv.analysis.findings import FINDINGS, percent
from h2okv.analysis.measurements import MEASUREMENTS
from h2okv.analysis.run import TEXT_COLUMNS, read_settings
from h2okv.analysis.theory import FACTOR
from h2okv.records import atomic_write, read_csv

Tables = dict[str, Rows]


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        name: of the PNG file.
        title: the heading.
        about: a plain sentence on what is looked at.
        tables: the CSV files that it is made from, without ending.
        draw: makes the figure from the tables.
        tell: says in words what the tables hold.
    """

    name: str
    title: str
    about: str
    tables: tuple[str, ...]
    draw: Callable[[Tables], Any]
    tell: Callable[[Tables], str]


def _sparsity(tables: Tables) -> str:
    rows = tables["sparsity"]
    share, square = column(rows, "share"), column(rows, "share_square")
    return (
        f"{percent(share.mean())} of the entries are below 1 % of their row's maximum (heads from "
        f"{percent(share.min())} to {percent(share.max())}); {(share > 0.95).sum()} of "
        f"{len(rows)} heads are above 95 %. Counted over the whole square, with the keys that "
        f"causality hides, it would be {percent(square.mean())}."
    )


def _ranks(tables: Tables) -> str:
    laws = tables["power_law"]
    parts = []
    for kind in ("tokens", "words"):
        own = where(laws, of=kind)
        if not own:
            parts.append(f"The text has too few different {kind} for a fit.")
            continue
        exponents, plausible = column(own, "exponent"), column(own, "p_value") >= 0.1
        tails = column(own, "tail") / column(own, "values")
        normal = (column(own, "log_ratio") < 0) & (column(own, "log_ratio_p") < 0.05)
        power = (column(own, "log_ratio") > 0) & (column(own, "log_ratio_p") < 0.05)
        parts.append(
            f"By {kind[:-1]}: exponents {exponents.min():.1f} to {exponents.max():.1f}, on the "
            f"upper {percent(tails.min())} to {percent(tails.max())} of the values; the fit is "
            f"plausible (p at least 0.1) in {plausible.sum()} of {len(own)} layers. A log-normal "
            f"tail fits better (p < 0.05) in {normal.sum()}, the power law in {power.sum()}."
        )
    return " ".join(parts)


def _words(tables: Tables) -> str:
    rows = tables["cooccurrence"]

    def told(measure: str, against: str) -> str:
        (row,) = where(rows, measure=measure, layer="all", against=against)
        return f"{row['rho']:.2f} ({row['low']:.2f} to {row['high']:.2f})"

    return (
        f"Spearman's correlation over {rows[0]['words']} words, mean of the layers, with 95 % "
        f"intervals. Score of all of a word's tokens with co-occurrence: {told('sum', 'together')};"
        f" with mere frequency: {told('sum', 'count')}. Score of a single token, fair to its "
        f"place in the text, with co-occurrence: {told('each', 'together')}; with frequency: "
        f"{told('each', 'count')}."
    )


def _sinks(tables: Tables) -> str:
    first = column(tables["sinks"], "first_1")
    even = tables["sinks"][0]["even_first_1"]
    return (
        f"The first token gets {percent(first.mean())} of the attention (heads from "
        f"{percent(first.min())} to {percent(first.max())}); even attention would give it "
        f"{percent(even)}."
    )


def _ablation(tables: Tables) -> str:
    rows = tables["ablation"]
    shares = sorted({row["share"] for row in rows})

    def told(condition: str, share: float) -> str:
        ratio = column(where(rows, condition=condition, share=share), "ratio")
        return f"{ratio.mean():.2f}"

    return " ".join(
        f"{percent(share)} of the tokens: perplexity times {told('heavy hidden', share)} with the "
        f"heavy hitters hidden, {told('random hidden', share)} with random ones hidden; "
        f"{told('only heavy kept', share)} with only the heavy hitters kept and no recent window, "
        f"{told('only random kept', share)} with only random ones."
        for share in shares
    )


def _policies(tables: Tables) -> str:
    rows, masses = tables["perplexity"], tables["retention"]
    parts = []
    for row in where(rows, share=0.2):
        mass = column(where(masses, policy=row["policy"], share=0.2), "mass").mean()
        parts.append(
            f"{row['policy']} {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f}), "
            f"attention {percent(mass)}"
        )
    return "At 20 % of the text, perplexity times the full cache's: " + "; ".join(parts) + "."


def _local_global(tables: Tables) -> str:
    rows = where(tables["local_global"], share=0.2)
    return (
        f"At 20 % of the text {percent(column(rows, 'overlap').mean())} of H2O's heavy hitters "
        "are held by the policy that knows all future attention too; by chance it would be "
        f"{percent(column(rows, 'chance').mean())}."
    )


def _stays(tables: Tables) -> str:
    parts = []
    for policy in ("h2o", "global"):
        rows = where(tables["stays"], policy=policy)
        parts.append(
            f"{policy}: {percent(column(rows, 'gone_at_once').mean())} of the entries go when the "
            f"recent window has passed them, {percent(column(rows, 'held_at_end').mean())} are "
            "held at the end"
        )
    return "; ".join(parts) + "."


def _agreement(tables: Tables) -> str:
    rows = [
        row
        for row in tables["agreement"]
        if (row["layer"], row["head"]) != (row["other_layer"], row["other_head"])
    ]
    parts = []
    for words, is_same in (("Two heads of a layer", True), ("heads of different layers", False)):
        own = [row for row in rows if (row["layer"] == row["other_layer"]) == is_same]
        if own:
            parts.append(f"{words}: {column(own, 'jaccard').mean():.2f}")
    return f"{'; '.join(parts)}; by chance {tables['agreement'][0]['chance']:.2f}."


def _theory(tables: Tables) -> str:
    rows = tables["theory"]

    def told(case: str, policy: str) -> str:
        own = where(rows, case=case, policy=policy)
        held = column(own, "holds")
        return f"{int(held.sum())} of {len(own)} (lowest {column(own, 'lowest_ratio').min():.2f})"

    return (
        f"Comparisons in which the set held is worth at least 1 - 1/e = {FACTOR:.2f} of the best "
        f"one after every step, over all objectives: heavy on real rows {told('real', 'heavy')}, "
        f"h2o on real rows {told('real', 'h2o')}, heavy on rows made to fail "
        f"{told('late star', 'heavy')}."
    )


def _mass(tables: Tables) -> str:
    rows = where(tables["theory_mass"], case="real")
    named = (("heavy", "heavy"), ("h2o", "h2o"), ("belady", "Belady"), ("best", "best possible"))
    parts = [f"{label} {percent(column(rows, name).mean())}" for name, label in named]
    return "On real rows: " + ", ".join(parts) + "."


def _long(tables: Tables) -> str:
    parts = []
    for policy in ("heavy", "h2o", "global"):
        ratio = column(where(tables["theory_long"], policy=policy), "ratio")
        parts.append(f"{policy} {ratio.mean():.2f} (lowest {ratio.min():.2f})")
    return (
        "Accumulated score of what is held, as a share of the best set's, mean of heads and "
        f"steps: {', '.join(parts)}; the bound asks for {FACTOR:.2f}."
    )


def _neurons(tables: Tables) -> str:
    rows = tables["neurons"]
    tops = [where(rows, layer=layer)[0] for layer in sorted({row["layer"] for row in rows})]
    top = column(tops, "share_of_top_tenth")
    return (
        "The most active tenth of a layer's neurons has "
        f"{percent(top.min())} to {percent(top.max())} of all activations."
    )


SECTIONS = (
    Section(
        "sparsity", "Sparsity",
        "Most of a row of attention is nearly 0: how much, by layer and head.",
        ("sparsity",), figures.draw_sparsity, _sparsity,
    ),
    Section(
        "ranks", "Accumulated scores by rank",
        "A few tokens receive most of the attention: how steeply the rest falls off.",
        ("score_ranks", "power_law"), figures.draw_ranks, _ranks,
    ),
    Section(
        "words", "Scores and co-occurrence",
        "Whether the words with much attention are those that often stand near others.",
        ("word_scores", "cooccurrence"), figures.draw_words, _words,
    ),
    Section(
        "sinks", "Attention on the first tokens",
        "Whether the beginning of the text draws attention for being the beginning.",
        ("sinks",), figures.draw_sinks, _sinks,
    ),
    Section(
        "ablation", "What hiding tokens costs",
        "The heavy hitters are hidden from all later tokens, and as many random tokens instead.",
        ("ablation",), figures.draw_ablation, _ablation,
    ),
    Section(
        "policies", "Policies by budget",
        "How well the second half of the text is predicted when only part of the cache is kept.",
        ("perplexity", "retention"), figures.draw_policies, _policies,
    ),
    Section(
        "local_global", "What has been against what will be",
        "Whether attention so far picks the tokens that the whole text's attention picks.",
        ("local_global",), figures.draw_local_global, _local_global,
    ),
    Section(
        "stays", "How long entries stay",
        "How many tokens later an entry goes that the recent window has passed.",
        ("stays",), figures.draw_stays, _stays,
    ),
    Section(
        "agreement", "Heads and layers",
        "Whether heads keep the same tokens; if not, each needs a kept set of its own.",
        ("agreement",), figures.draw_agreement, _agreement,
    ),
    Section(
        "theory", "The theorem on small cases",
        "Greedy eviction against the best of all sets, found by trying every one.",
        ("theory", "theory_steps"), figures.draw_theory, _theory,
    ),
    Section(
        "theory_mass", "Attention retained on small cases",
        "The attention that eviction keeps, beside the most that any eviction could.",
        ("theory_mass",), figures.draw_mass, _mass,
    ),
    Section(
        "theory_long", "The theorem on the whole text",
        "The same comparison on the whole text, where the best set is that of the highest scores.",
        ("theory_long",), figures.draw_long, _long,
    ),
    Section(
        "neurons", "Neurons",
        "Whether a few neurons of the feed-forward layers do most of the work.",
        ("neurons",), figures.draw_neurons, _neurons,
    ),
)  # fmt: skip

REPORT_FILE = "report.html"

_CSS = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; background: #fff; }
section { margin-bottom: 3rem; } small, .missing { opacity: .8; } h1, h2 { line-height: 1.2; }
table { border-collapse: collapse; } th, td { padding: .35rem .8rem .35rem 0; text-align: left;
  vertical-align: top; border-bottom: 1px solid #8886; } td:last-child { white-space: nowrap; }
"""


def write_report(folder: Path) -> list[str]:
    """Draws what there are tables for, and writes the figures and the page."""
    settings = read_settings(folder)
    names = {name for part in (*SECTIONS, *FINDINGS) for name in part.tables}
    tables = {
        name: read_csv(folder / f"{name}.csv", text=TEXT_COLUMNS)
        for name in sorted(names)
        if (folder / f"{name}.csv").is_file()
    }
    parts, missing = [], []
    for section in SECTIONS:
        if not tables.keys() >= set(section.tables):
            missing.append(section)
            continue
        picture = _png(section.draw(tables))
        (folder / f"{section.name}.png").write_bytes(picture)
        parts.append(_section(section, tables, picture))
    with atomic_write(folder / REPORT_FILE) as file:
        file.write(_page(settings, tables, parts, missing))
    return [section.title for section in missing]


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    # Without a date or a version, so that the same tables give the same file.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _section(section: Section, tables: Tables, picture: bytes) -> str:
    told = html.escape(section.tell(tables))
    data = base64.b64encode(picture).decode("ascii")
    files = ", ".join(f"{table}.csv" for table in section.tables)
    return (
        f"<section><h2>{html.escape(section.title)}</h2><p>{html.escape(section.about)}</p>"
        f'<p>{told}</p><figure><img alt="{told}" src="data:image/png;base64,{data}"></figure>'
        f"<small>{files}</small></section>"
    )


def _summary(tables: Tables) -> str:
    """The first screen: the paper's findings, this model's figures, and a verdict for each."""
    lines = []
    for finding in FINDINGS:
        here, verdict = "not measured", ""
        if tables.keys() >= set(finding.tables):
            here, verdict = finding.judge(tables)
        cells = (finding.paper, here, verdict)
        lines.append(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
    rules = "; ".join(f"{finding.paper}: {finding.rule}" for finding in FINDINGS)
    return (
        "<table><thead><tr><th>What the paper found</th><th>What this model does</th>"
        f"<th>Verdict</th></tr></thead><tbody>{''.join(lines)}</tbody></table>"
        "<details><summary>When a verdict is &quot;agrees&quot;, and when &quot;in part&quot;"
        f"</summary><p><small>{html.escape(rules)}.</small></p></details>"
    )


def _missing(sections: list[Section], tables: Tables) -> str:
    """Names what was not measured, and the option that measures it."""
    told = []
    for section in sections:
        lacking = set(section.tables) - tables.keys()
        options = [
            "--neurons" if measurement.is_option else f"--only {measurement.name}"
            for measurement in MEASUREMENTS
            if lacking & set(measurement.tables)
        ]
        told.append(f"{section.title} ({', '.join(options)})")
    return f'<p class="missing">Not measured: {html.escape(", ".join(told))}.</p>' if told else ""


def _page(
    settings: dict[str, Any], tables: Tables, parts: list[str], missing: list[Section]
) -> str:
    about = f"Model {settings['model']}, the first {settings['tokens']} tokens of the text."
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>What attention keeps</title><style>{_CSS}</style></head><body>"
        f"<h1>What attention keeps</h1><p>{html.escape(about)}</p>{_summary(tables)}"
        f"{_missing(missing, tables)}{''.join(parts)}</body></html>\n"
    )
