"""Verdicts on tables whose answer is known."""

import pytest

from h2okv_lab.analysis.report import SECTIONS

JUDGES = {section.tables[0]: section.tell for section in SECTIONS if section.paper}


def shares(*means):
    return [{"layer": layer, "share": mean} for layer, mean in enumerate(means)]


def laws(tokens, words):
    return [
        {"of": kind, "p_value": p, "exponent": 2.0, "log_ratio": -1.0, "log_ratio_p": 0.01}
        for kind, ps in (("tokens", tokens), ("words", words))
        for p in ps
    ]


def correlations(total, each):
    common = {"layer": "all", "against": "together", "low": 0.0, "high": 1.0}
    return [{"measure": "sum", "rho": total, **common}, {"measure": "each", "rho": each, **common}]


def hidden(*pairs):
    return [
        {"condition": f"{kind} hidden", "share": share, "ratio": ratio}
        for share, pair in zip((0.05, 0.1), pairs, strict=True)
        for kind, ratio in zip(("heavy", "random"), pair, strict=True)
    ]


def ratio(value, low):
    row = {"share": 0.2, "ratio": value, "low": low, "high": value + 0.01}
    return [{"policy": "h2o", **row}, {"policy": "recent", **row}]


def first(*heads):
    return [{"first_1": mass, "even_first_1": 0.001} for mass in heads]


@pytest.mark.parametrize(
    ("table", "rows", "verdict"),
    [
        ("sparsity", shares(0.96, 0.97, 0.99, 0.5), "agrees"),
        ("sparsity", shares(0.91, 0.92, 0.96, 0.5), "in part"),
        ("sparsity", shares(0.89, 0.89, 0.99, 0.99), "differs"),
        ("power_law", laws([0.2, 0.3], [0.5, 0.1]), "agrees"),
        ("power_law", laws([0.0, 0.0], [0.5, 0.0]), "in part"),
        ("power_law", laws([0.0, 0.0], [0.0, 0.0]), "differs"),
        ("cooccurrence", correlations(0.8, 0.6), "agrees"),
        ("cooccurrence", correlations(0.8, 0.1), "in part"),
        ("cooccurrence", correlations(0.3, 0.1), "differs"),
        ("ablation", hidden((3.0, 1.2), (9.0, 1.5)), "agrees"),
        ("ablation", hidden((1.3, 1.2), (9.0, 1.5)), "in part"),
        ("ablation", hidden((1.1, 1.2), (9.0, 1.5)), "differs"),
        ("local_global", [{"share": 0.2, "overlap": 0.9, "chance": 0.2}], "agrees"),
        ("local_global", [{"share": 0.2, "overlap": 0.4, "chance": 0.2}], "in part"),
        ("local_global", [{"share": 0.2, "overlap": 0.25, "chance": 0.2}], "differs"),
        ("perplexity", ratio(1.02, 0.99), "agrees"),
        ("perplexity", ratio(1.04, 1.01), "in part"),
        ("perplexity", ratio(1.12, 1.05), "differs"),
        ("sinks", first(0.3, 0.2), "agrees"),
        ("sinks", first(0.15, 0.01), "in part"),
        ("sinks", first(0.02, 0.01), "differs"),
    ],
)
def test_a_verdict_follows_its_rule(table, rows, verdict):
    here, verdict = JUDGES[table]({table: rows})
    assert verdict == verdict
    assert "nan" not in here
