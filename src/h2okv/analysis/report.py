"""The report page: what the paper found beside what this model does, then a section for each."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from h2okv.analysis import figures
from h2okv.analysis.figures import Rows, Tables, column, distinct, mean_by, where
from h2okv.analysis.measurements import MEASUREMENTS
from h2okv.analysis.study import DEFAULT_BUDGET, TEXT_COLUMNS, read_settings
from h2okv.analysis.theory import FACTOR
from h2okv.records import atomic_write, read_csv

Told = tuple[str, str]
"""What the tables hold, in words, and the verdict on the paper's finding if there is one."""


def percent(fraction: float) -> str:
    """Writes a fraction with three digits."""
    return f"{100 * fraction:.3g} %"


def _verdict(agrees: Any, partly: Any) -> str:
    return "agrees" if agrees else "in part" if partly else "differs"


def _mean(rows: Rows, key: str, **values: Any) -> float:
    return float(column(where(rows, **values), key).mean())


def _tell_sparsity(tables: Tables) -> Told:
    rows = tables["sparsity"]
    layers, shares = mean_by(rows, "layer", "share")
    means, heads = np.array(shares), column(rows, "share")
    sparse = int((means > 0.95).sum())
    told = (
        f"{percent(means.mean())} of them are below 1 % of their row's maximum (heads from"
        f" {percent(heads.min())} to {percent(heads.max())}); above 95 % in {sparse} of"
        f" {len(layers)} layers"
    )
    return told, _verdict(sparse >= 0.75 * len(layers), (means > 0.9).mean() >= 0.75)


def _tell_ranks(tables: Tables) -> Told:
    told, fits = [], []
    for kind in distinct(tables["power_law"], "of"):
        laws = where(tables["power_law"], of=kind)
        plausible, exponents = column(laws, "p_value") >= 0.1, column(laws, "exponent")
        told.append(
            f"plausible by {kind[:-1]} (p at least 0.1) in {plausible.sum()} of {len(laws)} layers,"
            f" with exponents {exponents.min():.1f} to {exponents.max():.1f}; a log-normal tail"
            f" fits better (p < 0.05) in {_better(laws, -1)}, the power law in {_better(laws, 1)}"
        )
        fits.append(plausible.mean())
    return "; ".join(told), _verdict(min(fits) >= 0.75, max(fits) >= 0.5)


def _better(laws: Rows, sign: int) -> int:
    """In how many layers the power law (1) or the log-normal (-1) is surely the better one."""
    ratio, chance = column(laws, "log_ratio"), column(laws, "log_ratio_p")
    return int(((sign * ratio > 0) & (chance < 0.05)).sum())


def _tell_words(tables: Tables) -> Told:
    rows = where(tables["cooccurrence"], layer="all", against="together")
    (total,), (each,) = (where(rows, measure=name) for name in ("sum", "each"))
    told = (
        f"rank correlation {total['rho']:.2f} ({total['low']:.2f} to {total['high']:.2f}) of a"
        f" word's sum, {each['rho']:.2f} ({each['low']:.2f} to {each['high']:.2f}) of a single"
        " token, fair to its place in the text"
    )
    rhos = (total["rho"], each["rho"])
    return told, _verdict(min(rhos) >= 0.5, max(rhos) >= 0.5)


def _tell_sinks(tables: Tables) -> Told:
    rows = tables["sinks"]
    first, even = column(rows, "first_1"), rows[0]["even_first_1"]
    told = (
        f"the first token gets {percent(first.mean())} (heads from {percent(first.min())} to"
        f" {percent(first.max())}; evenly {percent(even)})"
    )
    return told, _verdict(first.mean() >= 0.1, first.max() >= 0.1)


def _tell_ablation(tables: Tables) -> Told:
    rows = tables["ablation"]
    told, pairs = [], []
    for share in distinct(rows, "share"):
        heavy, random = (
            _mean(rows, "ratio", condition=f"{name} hidden", share=share)
            for name in ("heavy", "random")
        )
        pairs.append((heavy, random))
        told.append(
            f"with {percent(share)} of the tokens hidden perplexity is {heavy:.2f} times the full"
            f" one, with random ones {random:.2f} times"
        )
    far = all(heavy - 1 > 2 * max(0.0, random - 1) for heavy, random in pairs)
    return "; ".join(told), _verdict(far, all(heavy > random for heavy, random in pairs))


def _tell_policies(tables: Tables) -> Told:
    rows = where(tables["perplexity"], share=DEFAULT_BUDGET)
    told = [
        f"{row['policy']} {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        for row in rows
    ]
    (own,) = where(rows, policy="h2o")
    here = f"at 20 % of the text, perplexity times the full cache's: {', '.join(told)}"
    return here, _verdict(own["low"] <= 1, own["ratio"] <= 1.05)


def _tell_local_global(tables: Tables) -> Told:
    rows = where(tables["local_global"], share=DEFAULT_BUDGET)
    overlap, chance = _mean(rows, "overlap"), _mean(rows, "chance")
    told = f"{percent(overlap)} of the heavy hitters are the same (by chance {percent(chance)})"
    return told, _verdict(overlap >= 0.75, overlap > chance + 0.1)


def _tell_stays(tables: Tables) -> Told:
    rows = tables["stays"]
    told = []
    for policy in ("h2o", "global"):
        gone, held = (_mean(rows, name, policy=policy) for name in ("gone_at_once", "held_at_end"))
        told.append(
            f"under {policy} {percent(gone)} of the entries go when the recent window has passed"
            f" them, {percent(held)} are held at the end"
        )
    return "; ".join(told), ""


def _tell_agreement(tables: Tables) -> Told:
    told = []
    for words, is_same in (("two heads of a layer", True), ("heads of different layers", False)):
        own = [
            row
            for row in tables["agreement"]
            if (row["layer"] == row["other_layer"]) == is_same
            and (row["layer"], row["head"]) != (row["other_layer"], row["other_head"])
        ]
        if own:
            told.append(f"{words}: {_mean(own, 'jaccard'):.2f}")
    return f"{'; '.join(told)}; by chance {tables['agreement'][0]['chance']:.2f}", ""


def _tell_theory(tables: Tables) -> Told:
    told = []
    for policy, case, name in (
        ("heavy", "real", "on real rows"), ("h2o", "real", "on real rows"),
        ("heavy", "late star", "on rows made to fail"),
    ):  # fmt: skip
        own = where(tables["theory"], case=case, policy=policy)
        held, lowest = int(column(own, "holds").sum()), column(own, "lowest_ratio").min()
        told.append(f"{policy} {name} {held} of {len(own)} (lowest {lowest:.2f})")
    return (
        f"comparisons in which the set held is worth at least 1 - 1/e = {FACTOR:.2f} of the best"
        f" one after every step, over all objectives: {', '.join(told)}"
    ), ""


def _tell_mass(tables: Tables) -> Told:
    rows = where(tables["theory_mass"], case="real")
    names = {"heavy": "heavy", "h2o": "h2o", "belady": "Belady", "best": "best possible"}
    told = [f"{label} {percent(_mean(rows, name))}" for name, label in names.items()]
    return f"on real rows: {', '.join(told)}", ""


def _tell_long(tables: Tables) -> Told:
    told = []
    for policy in ("heavy", "h2o", "global"):
        ratio = column(where(tables["theory_long"], policy=policy), "ratio")
        told.append(f"{policy} {ratio.mean():.2f} (lowest {ratio.min():.2f})")
    return (
        "accumulated score of what is held, as a share of the best set's, mean of heads and"
        f" steps: {', '.join(told)}; the bound asks for {FACTOR:.2f}"
    ), ""


def _tell_neurons(tables: Tables) -> Told:
    _, tops = mean_by(tables["neurons"], "layer", "share_of_top_tenth")
    return (
        f"the most active tenth of a layer's neurons has {percent(min(tops))} to"
        f" {percent(max(tops))} of all activations"
    ), ""


@dataclass(frozen=True)
class Section:
    """A part of the report, and a finding of the paper (arXiv 2306.14048) if it is about one.

    ``name`` is that of the PNG file. ``tables`` are CSV files, without ending: the sentence is made
    from the first one, the figure from all. ``rule`` says when the verdict is "agrees", and when
    "in part".
    """

    name: str
    title: str
    about: str
    tables: tuple[str, ...]
    draw: Callable[[Tables], Any]
    tell: Callable[[Tables], Told]
    paper: str = ""
    rule: str = ""


SECTIONS = (
    Section(
        "sparsity", "Sparsity",
        "Most of a row of attention is nearly 0: how much, by layer and head.",
        ("sparsity",), figures.draw_sparsity, _tell_sparsity,
        "More than 95 % of attention entries are small, in almost all layers",
        "in three quarters of the layers; in part: more than 90 % in as many",
    ),
    Section(
        "ranks", "Accumulated scores by rank",
        "A few tokens receive most of the attention: how steeply the rest falls off.",
        ("power_law", "score_ranks"), figures.draw_ranks, _tell_ranks,
        "Accumulated scores follow a power law",
        "p at least 0.1 in three quarters of the layers, by token and by word; in part: in half of"
        " them by one of the two",
    ),
    Section(
        "words", "Scores and co-occurrence",
        "Whether the words with much attention are those that often stand near others.",
        ("cooccurrence", "word_scores"), figures.draw_words, _tell_words,
        "Words that often occur together with others have the high scores",
        "rank correlation of 0.5 or more for both; in part: for one",
    ),
    Section(
        "sinks", "Attention on the first tokens",
        "Whether the beginning of the text draws attention for being the beginning.",
        ("sinks",), figures.draw_sinks, _tell_sinks,
        "The first tokens are attention sinks (arXiv 2309.17453)",
        "10 % of all attention on the first token; in part: in some head",
    ),
    Section(
        "ablation", "What hiding tokens costs",
        "The heavy hitters are hidden from all later tokens, and as many random tokens instead.",
        ("ablation",), figures.draw_ablation, _tell_ablation,
        "Hiding the heavy hitters hurts far more than hiding random tokens",
        "hiding them costs more than twice as much, at every share; in part: more",
    ),
    Section(
        "policies", "Policies by budget",
        "How well the second half of the text is predicted when only part of the cache is kept.",
        ("perplexity", "retention"), figures.draw_policies, _tell_policies,
        "20 % of the cache is as good as all of it",
        "the 95 % interval of h2o includes 1; in part: at most 5 % higher",
    ),
    Section(
        "local_global", "What has been against what will be",
        "Whether attention so far picks the tokens that the whole text's attention picks.",
        ("local_global",), figures.draw_local_global, _tell_local_global,
        "Attention so far predicts the heavy hitters of the whole text",
        "75 % are the same at a budget of 20 %; in part: 10 points above chance",
    ),
    Section(
        "stays", "How long entries stay",
        "How many tokens later an entry goes that the recent window has passed.",
        ("stays",), figures.draw_stays, _tell_stays,
    ),
    Section(
        "agreement", "Heads and layers",
        "Whether heads keep the same tokens; if not, each needs a kept set of its own.",
        ("agreement",), figures.draw_agreement, _tell_agreement,
    ),
    Section(
        "theory", "The theorem on small cases",
        "Greedy eviction against the best of all sets, found by trying every one.",
        ("theory", "theory_steps"), figures.draw_theory, _tell_theory,
    ),
    Section(
        "theory_mass", "Attention retained on small cases",
        "The attention that eviction keeps, beside the most that any eviction could.",
        ("theory_mass",), figures.draw_mass, _tell_mass,
    ),
    Section(
        "theory_long", "The theorem on the whole text",
        "The same comparison on the whole text, where the best set is that of the highest scores.",
        ("theory_long",), figures.draw_long, _tell_long,
    ),
    Section(
        "neurons", "Neurons",
        "Whether a few neurons of the feed-forward layers do most of the work.",
        ("neurons",), figures.draw_neurons, _tell_neurons,
    ),
)  # fmt: skip

REPORT_FILE = "report.html"
_FIRST = ("ablation", "policies", "ranks", "sinks", "sparsity")
"""Of these the first three that there are stand beside the summary."""

_CSS = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; background: #fff; }
section { margin-bottom: 3rem; } small, .missing { opacity: .8; } h1, h2 { line-height: 1.2; }
table { border-collapse: collapse; } th, td { padding: .35rem .8rem .35rem 0; text-align: left;
  vertical-align: top; border-bottom: 1px solid #8886; } td:last-child { white-space: nowrap; }
thead + tbody td { font-size: .9rem; } .first { display: flex; gap: 1rem; margin: 1rem 0; }
.first a { flex: 1 1 0; min-width: 0; } @media (max-width: 40rem) { .first { display: block; } }
"""


def write_report(folder: Path) -> list[str]:
    """Draws what there are tables for, and writes the figures and the page; what is missing."""
    settings = read_settings(folder)
    names = {name for section in SECTIONS for name in section.tables}
    tables = {
        name: read_csv(folder / f"{name}.csv", text=TEXT_COLUMNS)
        for name in sorted(names)
        if (folder / f"{name}.csv").is_file()
    }
    parts, missing, lacking, pictures = "", [], [], {}
    for section in SECTIONS:
        absent = set(section.tables) - tables.keys()
        if absent:
            options = [
                "--neurons" if measurement.is_option else f"--only {measurement.name}"
                for measurement in MEASUREMENTS
                if absent & set(measurement.tables)
            ]
            missing.append(section.title)
            lacking.append(f"{section.title} ({', '.join(options)})")
            continue
        picture = io.BytesIO()
        # Without a date or a version, so that the same tables give the same file.
        section.draw(tables).savefig(picture, format="png", metadata={"Software": None})
        (folder / f"{section.name}.png").write_bytes(picture.getvalue())
        pictures[section.name] = _image(section, picture.getvalue())
        parts += _section(section, tables, pictures[section.name])
    about = f"Model {settings['model']}, the first {settings['tokens']} tokens of the text."
    gaps = f"Not measured: {html.escape(', '.join(lacking))}."
    with atomic_write(folder / REPORT_FILE) as file:
        file.write(
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"<title>What attention keeps</title><style>{_CSS}</style></head><body>"
            f"<h1>What attention keeps</h1><p>{html.escape(about)}</p>{_summary(tables, pictures)}"
            + (f'<p class="missing">{gaps}</p>' if lacking else "")
            + f"{parts}</body></html>\n"
        )
    return missing


def _image(section: Section, picture: bytes) -> str:
    data = base64.b64encode(picture).decode("ascii")
    return f'<img alt="{html.escape(section.about)}" src="data:image/png;base64,{data}">'


def _section(section: Section, tables: Tables, image: str) -> str:
    told = html.escape(section.tell(tables)[0])
    told = f"{told[0].upper()}{told[1:]}."
    files = ", ".join(f"{table}.csv" for table in section.tables)
    return (
        f'<section id="{section.name}"><h2>{html.escape(section.title)}</h2>'
        f"<p>{html.escape(section.about)}</p><p>{told}</p><figure>{image}</figure>"
        f"<small>{files}</small></section>"
    )


def _summary(tables: Tables, pictures: dict[str, str]) -> str:
    """The first screen: the paper's findings, this model's figures, verdicts, three pictures."""
    first = [name for name in _FIRST if name in pictures][:3]
    row = "".join(f'<a href="#{name}">{pictures[name]}</a>' for name in first)
    lines, rules = "", []
    for section in filter(lambda section: section.paper, SECTIONS):
        told = section.tell(tables) if section.tables[0] in tables else ("not measured", "")
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in (section.paper, *told))
        lines += f"<tr>{cells}</tr>"
        rules.append(f"{section.paper}: {section.rule}")
    return (
        "<table><thead><tr><th>What the paper found</th><th>What this model does</th>"
        f"<th>Verdict</th></tr></thead><tbody>{lines}</tbody></table>"
        f'<div class="first">{row}</div>'
        "<details><summary>When a verdict is &quot;agrees&quot;, and when &quot;in part&quot;"
        f"</summary><p><small>{html.escape('; '.join(rules))}.</small></p></details>"
    )
