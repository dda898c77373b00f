"""The measurements by name: each turns a study into tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from h2okv_lab.analysis.attention_stats import (
    Tick,
    activation_frequency,
    cost,
    heaviest,
    losses_with_hidden,
    no_tick,
    random_tokens,
    retained,
    sink_mass,
    small_entries,
)
from h2okv_lab.analysis.eviction_trace import (
    chance_similarity,
    durations,
    heavy_entries_after,
    overlap,
    similarity,
)
from h2okv_lab.analysis.score_stats import (
    LEAST_VALUES,
    by_word,
    count_words,
    fit_power_law,
    spearman,
)
from h2okv_lab.analysis.study import (
    BUDGETS,
    CACHE_FOLDER,
    DEFAULT_BUDGET,
    POLICIES,
    Sample,
    Study,
    Tables,
    tabulate,
)
from h2okv_lab.tables import Row, write_csv

HIDDEN = (0.05, 0.1, 0.2)
_SEEDS = 3
_RANKS = 120
_STEPS = 7
_SINKS = (1, 4, 16)
_AWAY = 64


def measure_sparsity(study: Study, tick: Tick = no_tick) -> Tables:
    """Measure the fraction of small attention entries by head, also of the second half."""
    small = study.of_layers(small_entries, tick)
    visible = np.arange(1, study.length + 1)
    hidden = study.length**2 - visible.sum()
    shares = {
        "share": small.sum(-1) / visible.sum(),
        "share_late": small[..., study.half :].sum(-1) / visible[study.half :].sum(),
        # With the keys that causality hides.
        "share_square": (small.sum(-1) + hidden) / study.length**2,
    }
    return {"sparsity": _by_head(study, shares)}


def measure_sinks(study: Study, tick: Tick = no_tick) -> Tables:
    """Measure attention on the first positions by layer and head, and that of even attention."""
    mass = study.of_layers(lambda layer: sink_mass(layer, _SINKS, _AWAY), tick)
    shares = {f"first_{count}": mass[..., index] for index, count in enumerate(_SINKS)}
    even = (1 / np.arange(_AWAY + 1, study.length + 1)).mean()
    return {"sinks": _by_head(study, {**shares, "even_first_1": even})}


def _by_head(study: Study, columns: dict[str, Any]) -> list[Row]:
    """Return the figures of each query head as rows, with its layer and KV head."""
    _, kv_heads, group, _ = study.accumulated().shape
    rows = tabulate({"layer": study.layers, "head": range(kv_heads * group)}, **columns)
    return [{"layer": row["layer"], "kv_head": row["head"] // group, **row} for row in rows]


def measure_accumulation(study: Study, tick: Tick = no_tick) -> Tables:
    """Measure accumulated scores by token and by word: rank plots and power laws, by layer."""
    scores = study.accumulated(tick).sum(axis=(1, 2))
    word_scores = by_word(scores, count_words(study.sample.input_ids[0].numpy()))
    axes = {"layer": study.layers, "position": range(study.length)}
    tokens = tabulate(axes, word=np.array(study.sample.pieces, dtype=object), score=scores)
    tables: Tables = {"token_scores": tokens, "score_ranks": [], "power_law": []}
    for index, layer_idx in enumerate(study.layers):
        for kind, values in (("tokens", scores[index]), ("words", word_scores[index])):
            names = {"of": kind, "layer": layer_idx}
            tables["score_ranks"] += _ranked(names, "score", values)
            # A text may have too few different words but enough tokens.
            if (values > 0).sum() >= LEAST_VALUES:
                tables["power_law"].append({**names, **fit_power_law(values)})
        tick((index + 1) / len(study.layers))
    return tables


def _ranked(names: Row, column: str, values: np.ndarray) -> list[Row]:
    """Return the largest values, evenly spaced in the logarithm of their rank."""
    ordered = np.sort(values)[::-1]
    ranks = np.unique(np.geomspace(1, len(ordered), _RANKS).astype(int))
    return [{**names, "rank": rank, column: ordered[rank - 1]} for rank in ranks]


def measure_cooccurrence(study: Study, tick: Tick = no_tick) -> Tables:
    """Measure rank correlations of words' scores with their counts and co-occurrence."""
    ids = study.sample.input_ids[0]
    scores, words = study.accumulated(tick).sum(axis=(1, 2)), count_words(ids.numpy())
    # Sums as in the paper, which favour frequent words; and means per token and visible query,
    # which correct for a word's count and for positions.
    sums = by_word(scores, words)
    means = by_word(scores / np.arange(study.length, 0, -1), words) / words.count
    pieces = dict(zip(ids.tolist(), study.sample.pieces, strict=True))
    counts = {"count": words.count, "together": words.together, "neighbours": words.neighbours}
    names = {"word": [pieces[token] for token in words.token_ids.tolist()]}
    rows: list[Row] = []
    for measure, values in (("sum", sums), ("each", means)):
        groups: dict[Any, np.ndarray] = {"all": values.mean(axis=0)}
        groups |= zip(study.layers, values, strict=True)
        rows += [
            {"measure": measure, "layer": layer, "against": against, **spearman(group, others)}
            for layer, group in groups.items()
            for against, others in counts.items()
        ]
    table = tabulate(names, **counts, score=sums.sum(axis=0), score_each=means.mean(axis=0))
    return {"word_scores": table, "cooccurrence": rows}


def measure_ablation(study: Study, tick: Tick = no_tick, seeds: int = _SEEDS) -> Tables:
    """Measure perplexity with heavy hitters or random tokens hidden, or only them visible."""
    scores = study.accumulated().sum(axis=2)
    base = study.dense_losses()
    runs = []
    for share in HIDDEN:
        count, shape = study.tokens(share), scores.shape
        chosen = [("heavy", 0, heaviest(scores, count))]
        chosen += [("random", seed, random_tokens(shape, count, seed)) for seed in range(seeds)]
        for kind, seed, tokens in chosen:
            runs.append((f"{kind} hidden", share, seed, tokens))
            runs.append((f"only {kind} kept", share, seed, ~tokens))
    rows: list[Row] = []
    for condition, share, seed, hidden in runs:
        losses = losses_with_hidden(study.model, study.sample.input_ids, hidden, study.layers)
        number = int(hidden[0, 0].sum())
        names = {"condition": condition, "share": share, "hidden": number, "seed": seed}
        rows.append({**names, **cost(losses, base)})
        tick(len(rows) / len(runs))
    return {"ablation": rows}


def measure_policies(study: Study, tick: Tick = no_tick) -> Tables:
    """Measure perplexity of the second half under each policy and budget, token by token."""
    rows: list[Row] = []
    pairs = list(product(POLICIES, BUDGETS))
    for policy, share in pairs:
        losses = study.losses(policy, share)
        row = {"policy": policy, "share": share, "tokens": study.tokens(share)}
        rows.append({**row, **cost(losses, study.dense_losses(), study.half)})
        tick(len(rows) / len(pairs))
    return {"perplexity": rows}


def measure_local_and_global(study: Study, tick: Tick = no_tick) -> Tables:
    """Measure the overlap of H2O's entries with those of the policy that knows the future."""
    rows: list[Row] = []
    for share in BUDGETS:
        recent = study.recent(share)
        traces = [study.gone_at(policy, share) for policy in ("h2o", "global")]
        for step in np.linspace(study.half, study.length - 1, _STEPS).astype(int).tolist():
            local, future = (heavy_entries_after(gone, step, recent) for gone in traces)
            rows += tabulate(
                {"layer": study.layers},
                share=share,
                step=step,
                overlap=overlap(local, future).mean(axis=1),
                chance=future.mean(axis=(1, 2)),
            )
    return {"local_global": rows}


def measure_retention(study: Study, tick: Tick = no_tick) -> Tables:
    """Measure the fraction of full attention's mass on each policy's entries, by layer."""
    runs = list(product(POLICIES, BUDGETS))
    gone = np.stack([study.gone_at(*run) for run in runs], axis=1)
    indices = {layer_idx: index for index, layer_idx in enumerate(study.layers)}
    mass = study.of_layers(
        lambda layer: retained(layer, gone[indices[layer.layer_idx]], study.half), tick
    )
    axes = {"policy": POLICIES, "share": BUDGETS, "layer": study.layers}
    return {"retention": tabulate(axes, mass=mass.T.reshape(len(POLICIES), len(BUDGETS), -1))}


def measure_stays(study: Study, tick: Tick = no_tick) -> Tables:
    """Measure how long entries stay after the recent window has passed them, by layer."""
    rows: list[Row] = []
    for policy in ("h2o", "global", "random"):
        gone = study.gone_at(policy, DEFAULT_BUDGET)
        times = durations(gone, study.recent(DEFAULT_BUDGET), study.tokens(DEFAULT_BUDGET))
        times = times.reshape(len(gone), -1)
        median, upper, p90 = np.quantile(times, (0.5, 0.75, 0.9), axis=1)[:, None]
        rows += tabulate(
            {"policy": [policy], "layer": study.layers},
            entries=times.shape[1],
            gone_at_once=(times == 0).mean(axis=1),
            median=median,
            upper_quartile=upper,
            p90=p90,
            held_at_end=(gone > study.length).mean(axis=(1, 2)),
        )
    return {"stays": rows}


def measure_agreement(study: Study, tick: Tick = no_tick) -> Tables:
    """Measure the Jaccard similarity of heads' heavy hitters at the end."""
    recent = study.recent(DEFAULT_BUDGET)
    heavy = heavy_entries_after(study.gone_at("h2o", DEFAULT_BUDGET), study.length - 1, recent)
    layers, heads = study.layers, range(heavy.shape[1])
    axes = {"layer": layers, "head": heads, "other_layer": layers, "other_head": heads}
    pairs = similarity(heavy.reshape(-1, heavy.shape[-1])).reshape(2 * heavy.shape[:2])
    chance = chance_similarity(int(heavy[0, 0].sum()), heavy.shape[-1])
    return {"agreement": tabulate(axes, jaccard=pairs, chance=chance)}


def measure_neurons(study: Study, tick: Tick = no_tick) -> Tables:
    """Measure the activation frequency of the MLP's neurons, by layer."""
    rows: list[Row] = []
    frequencies = activation_frequency(study.model, study.sample.input_ids)
    for layer_idx, frequency in enumerate(frequencies):
        top = np.sort(frequency)[-max(1, len(frequency) // 10) :].sum() / frequency.sum()
        ranked = _ranked({"layer": layer_idx}, "frequency", frequency)
        rows += [{**row, "share_of_top_tenth": top} for row in ranked]
    return {"neurons": rows}


@dataclass(frozen=True)
class Measurement:
    """A measurement and its tables."""

    name: str  # for `--only` and the progress bar
    tables: tuple[str, ...]  # names of CSV files, without ending
    run: Callable[[Study, Tick], Tables]
    quick: Callable[[Study, Tick], Tables] | None = None  # for `--quick`: full attention only
    is_option: bool = False  # runs only on request


_SCORE_TABLES = ("token_scores", "score_ranks", "power_law")
_WORD_TABLES = ("word_scores", "cooccurrence")
MEASUREMENTS = (
    Measurement("sparsity", ("sparsity",), measure_sparsity, measure_sparsity),
    Measurement("scores", _SCORE_TABLES, measure_accumulation, measure_accumulation),
    Measurement("words", _WORD_TABLES, measure_cooccurrence, measure_cooccurrence),
    Measurement("sinks", ("sinks",), measure_sinks, measure_sinks),
    # Each random draw costs a forward over the text per row of the table.
    Measurement("ablation", ("ablation",), measure_ablation, partial(measure_ablation, seeds=1)),
    Measurement("policies", ("perplexity",), measure_policies),
    Measurement("predicted", ("local_global",), measure_local_and_global),
    Measurement("retention", ("retention",), measure_retention),
    Measurement("lifetimes", ("stays",), measure_stays),
    Measurement("overlap", ("agreement",), measure_agreement),
    Measurement("neurons", ("neurons",), measure_neurons, is_option=True),
)
"""In the order in which they run."""

OnProgress = Callable[[Measurement, float], None]
"""Receives the current measurement and its progress, a fraction."""


def choose_measurements(
    only: Sequence[str] = (), quick: bool = False, neurons: bool = False
) -> tuple[Measurement, ...]:
    """Return the measurements that the options choose."""
    names = set(only) or {m.name for m in MEASUREMENTS if not m.is_option}
    if quick:
        names = {m.name for m in MEASUREMENTS if m.quick}
    if neurons:
        names |= {m.name for m in MEASUREMENTS if m.is_option}
    chosen = (measurement for measurement in MEASUREMENTS if measurement.name in names)
    return tuple(replace(m, run=m.quick) if quick and m.quick else m for m in chosen)


def is_finished(folder: Path, measurement: Measurement) -> bool:
    """Return whether all tables of a measurement exist."""
    return all((folder / f"{table}.csv").is_file() for table in measurement.tables)


def analyze(
    model: PreTrainedModel,
    sample: Sample,
    folder: Path,
    measurements: Sequence[Measurement],
    on_progress: OnProgress = lambda measurement, fraction: None,
) -> None:
    """Run every measurement whose tables are missing in the folder, and write them there."""
    study = Study(model, sample, folder / CACHE_FOLDER)
    for measurement in measurements:
        if not is_finished(folder, measurement):
            on_progress(measurement, 0.0)
            for name, rows in measurement.run(study, partial(on_progress, measurement)).items():
                write_csv(folder / f"{name}.csv", rows)
        on_progress(measurement, 1.0)
