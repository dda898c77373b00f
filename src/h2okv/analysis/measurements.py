"""The measurements by name: each turns a study into tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from h2okv.analysis.ablation import activation_frequency, cost, drawn, heaviest, losses_with_hidden
from h2okv.analysis.attention_stats import Retention, Sinks, Sparsity, Tick, no_tick, watch_rows
from h2okv.analysis.eviction_trace import chance_similarity, heavy_after, overlap, similarity, stays
from h2okv.analysis.score_stats import LEAST_VALUES, by_word, count_words, fit_power_law, spearman
from h2okv.analysis.study import BUDGETS, DEFAULT_BUDGET, POLICIES, Study
from h2okv.analysis.theory import measure_long, measure_theory
from h2okv.records import Row

Tables = dict[str, list[Row]]

HIDDEN = (0.05, 0.1, 0.2)
_SEEDS = 3
_RANKS = 120
_STEPS = 7


@dataclass(frozen=True)
class Measurement:
    """A measurement and the tables that it gives.

    Attributes:
        name: what `--only` and the progress bar call it.
        tables: names of the CSV files, without ending.
        run: computes them.
        is_quick: whether full attention is all that it looks at.
        is_option: whether it only runs when asked for.
    """

    name: str
    tables: tuple[str, ...]
    run: Callable[[Study, Tick], Tables]
    is_quick: bool = False
    is_option: bool = False


def measure_sparsity(study: Study, tick: Tick = no_tick) -> Tables:
    """Attention sparsity by layer and head; see `Sparsity`."""
    watcher = Sparsity()
    watch_rows(study.model, study.sample.input_ids, [watcher], tick)
    return {"sparsity": [_named(study, row) for row in watcher.rows()]}


def measure_sinks(study: Study, tick: Tick = no_tick) -> Tables:
    """Attention on the first positions by layer and head; see `Sinks`."""
    watcher = Sinks()
    watch_rows(study.model, study.sample.input_ids, [watcher], tick)
    return {"sinks": [_named(study, row) for row in watcher.rows()]}


def _named(study: Study, row: dict[str, float]) -> Row:
    """Adds the KV head that a query head belongs to."""
    group = study.accumulated().shape[2]
    return {"layer": row.pop("layer"), "kv_head": int(row["head"]) // group, **row}


def measure_accumulation(study: Study, tick: Tick = no_tick) -> Tables:
    """Accumulated score by token and by word: rank plots and power laws, by layer."""
    scores = study.accumulated(tick).sum(axis=(1, 2))
    words = count_words(study.sample.input_ids[0].numpy())
    word_scores = by_word(scores, words)
    tokens: list[Row] = []
    ranks: list[Row] = []
    laws: list[Row] = []
    for place, layer_idx in enumerate(study.layers):
        for position, (piece, score) in enumerate(
            zip(study.sample.pieces, scores[place], strict=True)
        ):
            row = {"layer": layer_idx, "position": position, "word": piece, "score": score}
            tokens.append(row)
        for kind, values in (("tokens", scores[place]), ("words", word_scores[place])):
            ordered = np.sort(values)[::-1]
            chosen = np.unique(np.geomspace(1, len(ordered), _RANKS).astype(int))
            ranks += [
                {"of": kind, "layer": layer_idx, "rank": rank, "score": ordered[rank - 1]}
                for rank in chosen
            ]
            # A text with few different words still has tokens enough.
            if (values > 0).sum() >= LEAST_VALUES:
                laws.append({"of": kind, "layer": layer_idx, **vars(fit_power_law(values))})
        tick((place + 1) / len(study.layers))
    return {"token_scores": tokens, "score_ranks": ranks, "power_law": laws}


def measure_cooccurrence(study: Study, tick: Tick = no_tick) -> Tables:
    """Rank correlation of words' scores with their counts and co-occurrence in the text.

    Two scores are looked at: the sum over a word's tokens, as in the paper, which a frequent word
    leads for being frequent; and the mean of a single token, divided by the number of queries that
    could see it, which says whether a word draws attention each time.
    """
    scores = study.accumulated(tick).sum(axis=(1, 2))
    words = count_words(study.sample.input_ids[0].numpy())
    sums = by_word(scores, words)
    fair = scores / np.arange(study.length, 0, -1)
    means = by_word(fair, words) / words.count
    pieces = dict(zip(study.sample.input_ids[0].tolist(), study.sample.pieces, strict=True))
    table: list[Row] = [
        {
            "word": pieces[int(token)],
            "count": words.count[w],
            "together": words.together[w],
            "neighbours": words.neighbours[w],
            "score": sums[:, w].sum(),
            "score_each": means[:, w].mean(),
        }
        for w, token in enumerate(words.token_ids)
    ]
    counts = {"count": words.count, "together": words.together, "neighbours": words.neighbours}
    rows: list[Row] = []
    for measure, values in (("sum", sums), ("each", means)):
        parts = [("all", values.mean(axis=0))]
        parts += [(str(i), values[place]) for place, i in enumerate(study.layers)]
        for layer, part in parts:
            for against, others in counts.items():
                found = spearman(part, others)
                rows.append({"measure": measure, "layer": layer, "against": against, **vars(found)})
    return {"word_scores": table, "cooccurrence": rows}


def measure_ablation(study: Study, tick: Tick = no_tick) -> Tables:
    """Perplexity with heavy hitters hidden, with random tokens hidden, with only them kept."""
    scores = study.accumulated().sum(axis=2)
    base = study.dense_losses()
    rows: list[Row] = []

    def add(condition: str, share: float, seed: int, hidden: np.ndarray) -> None:
        losses = losses_with_hidden(study.model, study.sample.input_ids, hidden, study.layers)
        number = int(hidden[0, 0].sum())
        found = vars(cost(losses, base))
        rows.append(
            {"condition": condition, "share": share, "hidden": number, "seed": seed, **found}
        )
        tick(len(rows) / (len(HIDDEN) * (2 + 2 * _SEEDS)))

    for share in HIDDEN:
        count = study.tokens(share)
        heavy = heaviest(scores, count)
        add("heavy hidden", share, 0, heavy)
        add("only heavy kept", share, 0, ~heavy)
        for seed in range(_SEEDS):
            chosen = drawn(scores.shape, count, seed)
            add("random hidden", share, seed, chosen)
            add("only random kept", share, seed, ~chosen)
    return {"ablation": rows}


def measure_policies(study: Study, tick: Tick = no_tick) -> Tables:
    """Perplexity of the second half under each policy and budget, token by token."""
    base = study.dense_losses()
    rows: list[Row] = []
    pairs = [(policy, share) for policy in POLICIES for share in BUDGETS]
    for done, (policy, share) in enumerate(pairs):
        losses = study.losses(policy, share, _part(tick, done, len(pairs)))
        row = {"policy": policy, "share": share, "tokens": study.tokens(share)}
        rows.append({**row, **vars(cost(losses, base, study.half))})
    return {"perplexity": rows}


def _part(tick: Tick, done: int, count: int) -> Tick:
    """Turns the progress of one of several equal parts into that of all."""
    return lambda share: tick((done + share) / count)


def measure_local_and_global(study: Study, tick: Tick = no_tick) -> Tables:
    """Overlap of what H2O holds with what the policy that knows the future holds."""
    steps = np.linspace(study.half, study.length - 1, _STEPS).astype(int)
    rows: list[Row] = []
    for share in BUDGETS:
        recent = study.recent(share)
        traces = [study.gone_at(policy, share) for policy in ("h2o", "global")]
        for step in steps:
            local, future = (heavy_after(gone, step, recent) for gone in traces)
            common = overlap(local, future).mean(axis=1)
            chance = future.mean(axis=(1, 2))
            for place, layer_idx in enumerate(study.layers):
                rows.append(
                    {
                        "layer": layer_idx,
                        "share": share,
                        "step": int(step),
                        "overlap": common[place],
                        "chance": chance[place],
                    }
                )
    return {"local_global": rows}


def measure_retention(study: Study, tick: Tick = no_tick) -> Tables:
    """The share of full attention's mass that falls on what each policy holds, by layer."""
    pairs = [(policy, share) for policy in POLICIES for share in BUDGETS]
    gone = {f"{policy} {share}": study.gone_at(policy, share) for policy, share in pairs}
    watcher = Retention(gone, study.layers, study.half)
    watch_rows(study.model, study.sample.input_ids, [watcher], tick)
    found = watcher.shares()
    return {
        "retention": [
            {
                "policy": policy,
                "share": share,
                "layer": layer_idx,
                "mass": found[f"{policy} {share}", layer_idx],
            }
            for policy, share in pairs
            for layer_idx in study.layers
        ]
    }


def measure_stays(study: Study, tick: Tick = no_tick) -> Tables:
    """How long entries stay after the recent window has passed them, by layer."""
    rows: list[Row] = []
    for policy in ("h2o", "global", "random"):
        gone = study.gone_at(policy, DEFAULT_BUDGET)
        times = stays(gone, study.recent(DEFAULT_BUDGET), study.tokens(DEFAULT_BUDGET))
        for place, layer_idx in enumerate(study.layers):
            part = times[place]
            row: dict[str, object] = {"policy": policy, "layer": layer_idx, "entries": part.size}
            row["gone_at_once"] = (part == 0).mean()
            for name, share in (("median", 0.5), ("upper_quartile", 0.75), ("p90", 0.9)):
                row[name] = np.quantile(part, share)
            row["held_at_end"] = (gone[place] > study.length).mean()
            rows.append(row)
    return {"stays": rows}


def measure_agreement(study: Study, tick: Tick = no_tick) -> Tables:
    """Jaccard similarity of the heavy hitters that heads and layers hold at the end."""
    recent = study.recent(DEFAULT_BUDGET)
    held = heavy_after(study.gone_at("h2o", DEFAULT_BUDGET), study.length - 1, recent)
    names = [(layer, head) for layer in study.layers for head in range(held.shape[1])]
    pairs = similarity(held.reshape(len(names), -1))
    chance = chance_similarity(int(held[0, 0].sum()), held.shape[-1])
    return {
        "agreement": [
            {
                "layer": layer,
                "head": head,
                "other_layer": other_layer,
                "other_head": other_head,
                "jaccard": pairs[i, j],
                "chance": chance,
            }
            for i, (layer, head) in enumerate(names)
            for j, (other_layer, other_head) in enumerate(names)
        ]
    }


def measure_neurons(study: Study, tick: Tick = no_tick) -> Tables:
    """Activation frequency of the MLP's neurons, by layer."""
    frequency = activation_frequency(study.model, study.sample.input_ids)
    rows: list[Row] = []
    for layer_idx, part in enumerate(frequency):
        ordered = np.sort(part)[::-1]
        top = ordered[: max(1, len(ordered) // 10)].sum() / ordered.sum()
        rows += [
            {
                "layer": layer_idx,
                "rank": rank,
                "frequency": ordered[rank - 1],
                "share_of_top_tenth": top,
            }
            for rank in np.unique(np.geomspace(1, len(ordered), _RANKS).astype(int))
        ]
    return {"neurons": rows}


def _measure_theory(study: Study, tick: Tick) -> Tables:
    return measure_theory(study.model, study.sample, tick)


MEASUREMENTS = (
    Measurement("sparsity", ("sparsity",), measure_sparsity, is_quick=True),
    Measurement(
        "scores", ("token_scores", "score_ranks", "power_law"), measure_accumulation, is_quick=True
    ),
    Measurement("words", ("word_scores", "cooccurrence"), measure_cooccurrence, is_quick=True),
    Measurement("sinks", ("sinks",), measure_sinks, is_quick=True),
    Measurement("ablation", ("ablation",), measure_ablation, is_quick=True),
    Measurement("policies", ("perplexity",), measure_policies),
    Measurement("predicted", ("local_global",), measure_local_and_global),
    Measurement("retention", ("retention",), measure_retention),
    Measurement("lifetimes", ("stays",), measure_stays),
    Measurement("overlap", ("agreement",), measure_agreement),
    Measurement("theory", ("theory", "theory_steps", "theory_mass"), _measure_theory),
    Measurement("theory-long", ("theory_long",), measure_long),
    Measurement("neurons", ("neurons",), measure_neurons, is_option=True),
)
"""In the order in which they run."""
