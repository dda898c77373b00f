"""A brute-force test of the paper's theorem, beside the report of ``h2okv analyze``.

    python benchmarks/theory.py --model smollm2 --text book.txt --out reports/book

Writes the tables theory*.csv, and draws them. Real attention over short excerpts and adversarial
matrices are compared with the best of all sets, and greedy eviction on the whole text with the
entries of the highest scores.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import quality
import torch
from transformers import LlamaConfig, PreTrainedModel

from h2okv.assets import sample_prompt
from h2okv.budget import TokenBudget
from h2okv.cache import H2OCache
from h2okv.integration.attention import h2o_attention
from h2okv.models.loading import describe, load_weights
from h2okv.records import read_text_file
from h2okv_lab.analysis import sections
from h2okv_lab.analysis.attention_stats import (
    LayerAttention,
    Tick,
    full_attention_layers,
    no_tick,
    of_layers,
)
from h2okv_lab.analysis.eviction_trace import split_budget
from h2okv_lab.analysis.study import (
    CACHE_FOLDER,
    DEFAULT_BUDGET,
    Study,
    Tables,
    make_sample,
    open_folder,
    tabulate,
)
from h2okv_lab.tables import BLUE, GREEN, PINK, RED, Row, save_figure, write_csv

_MOST_LAYERS = 8
# Greedy reaches at least this fraction of the optimum for a submodular function of a growing set.
FACTOR = 1 - 1 / math.e

# Columns that name a small attention matrix, and its logits, float64 [G, n, n]. `case` is `real` or
# the kind of adversarial matrix, whose layer, KV head and excerpt are -1.
Case = tuple[Row, np.ndarray]


def real_cases(
    model: PreTrainedModel, input_ids: torch.Tensor, size: int, excerpts: int
) -> list[Case]:
    """Return attention over short excerpts, which has every row from its first token on."""

    def measure(layer: LayerAttention) -> np.ndarray:
        return layer.logits(0, size, torch.float64).cpu().numpy()

    starts = np.linspace(0, input_ids.shape[1] - size, excerpts).astype(int)
    texts = (input_ids[:, start : start + size] for start in starts)
    logits_by_excerpt = [of_layers(model, text, measure) for text in texts]
    layers = full_attention_layers(model.config)
    indices = np.unique(np.linspace(0, len(layers) - 1, _MOST_LAYERS).round().astype(int))
    return [
        ({"case": "real", "layer": layers[index], "head": head, "excerpt": excerpt}, logits)
        for excerpt, by_layer in enumerate(logits_by_excerpt)
        for index in indices
        for head, logits in enumerate(by_layer[index])
    ]


def adversarial_cases(size: int, capacity: int) -> list[Case]:
    """Return attention matrices that are hard for eviction by past attention."""
    # Star: a token with no attention at first and all of it later. Bait: first tokens with all
    # attention at first and none later. Twins: the first tokens share half of each row, the other
    # half is on a different token each time, so all twins cover no row better than one does.
    star, bait, twins = np.full((3, size, size), 1e-4)
    for query in range(size):
        first = min(query + 1, capacity)
        star[query, :first] = 0.05
        bait[query, slice(first) if query < size // 2 else slice(query - 2, query)] = 1.0
        twins[query, :first] = 0.5 / first
        twins[query, max(capacity, query - 1)] = 0.5
    star[capacity + 1 :, capacity] = 1.0
    weights = {"late star": star, "bait": bait, "twins": twins, "even": np.ones((size, size))}
    names = {"layer": -1, "head": -1, "excerpt": -1}
    return [({"case": name, **names}, np.log(rows)[None]) for name, rows in weights.items()]


# Functions h: increasing, concave, 0 at 0.
CONCAVE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": np.positive, "sqrt": np.sqrt, "log": np.log1p,
}  # fmt: skip
# The argument of h: each token's accumulated attention, their sum, or each row's retained mass.
OBJECTIVES = ("tokens", "total", "rows")


def set_values(
    rows: np.ndarray, members: np.ndarray, step: int, objective: str, h: str
) -> np.ndarray:
    """Return the value of sets, bool ``[S, n]``, after a step by an objective: float64 ``[S]``."""
    concave = CONCAVE[h]
    seen = rows[:, : step + 1]
    sets = members.astype(np.float64)
    if objective == "rows":
        covered = np.einsum("gqs,ms->mgq", seen, sets, optimize=True)
        return concave(covered).sum(axis=(1, 2))
    received = seen.sum(axis=(0, 1))
    if objective == "total":
        return concave(sets @ received)
    return sets @ concave(received)


def attention_rows(logits: np.ndarray) -> np.ndarray:
    """Turn logits ``[G, n, n]`` into rows of causal attention, float64 ``[G, n, n]``."""
    masked = np.where(np.tri(logits.shape[-1], dtype=bool), logits, -np.inf)
    return torch.from_numpy(masked).softmax(dim=-1).numpy()


def cache_sets(logits: np.ndarray, policy: str, budget: TokenBudget) -> np.ndarray:
    """Return the entries of a cache on given logits ``[G, n, n]`` by step: bool ``[n, n]``."""
    group, size, _ = logits.shape
    queries = torch.from_numpy(np.ascontiguousarray(logits, dtype=np.float32))
    config = LlamaConfig(
        hidden_size=group, num_hidden_layers=1, num_attention_heads=group, num_key_value_heads=1
    )
    cache = H2OCache(config, budget.heavy, budget.recent, budget.sink, policy=policy)
    module = torch.nn.Module()
    entries = np.zeros((size, size), dtype=bool)
    for step in range(size):
        key = torch.zeros(1, 1, 1, size)
        key[..., step] = 1.0  # a unit vector: attention computes exactly these logits
        marked_key, value = cache.update(key, torch.zeros(1, 1, 1, 1), 0)
        row = queries[None, :, step : step + 1]
        h2o_attention(module, row, marked_key, value, None, scaling=1.0)
        positions = cache.kept_positions(0)[0, 0].numpy()
        entries[step, positions[positions >= 0]] = True
    return entries


def informed_sets(rows: np.ndarray, capacity: int, objective: str, h: str) -> np.ndarray:
    """Evict greedily, but by full attention: drop the token whose loss costs least."""

    def without(entries: np.ndarray, step: int) -> np.ndarray:
        sets = entries & ~np.eye(len(entries), dtype=bool)[entries]
        return set_values(rows, sets, step, objective, h)

    return _evict(rows.shape[-1], capacity, without)


def belady_sets(rows: np.ndarray, capacity: int) -> np.ndarray:
    """Apply Belady's rule (1966): drop the token that later queries attend to least."""
    total = rows.sum(axis=0)
    return _evict(
        len(total), capacity, lambda entries, step: -total[step + 1 :, entries].sum(axis=0)
    )


def _evict(
    size: int, capacity: int, without: Callable[[np.ndarray, int], np.ndarray]
) -> np.ndarray:
    """Evict by the value ``without`` of the entries, bool ``[n]``, without each token in turn."""
    entries = np.zeros(size, dtype=bool)
    after = np.zeros((size, size), dtype=bool)
    for step in range(size):
        entries[step] = True
        if entries.sum() > capacity:
            entries[np.flatnonzero(entries)[without(entries, step).argmax()]] = False
        after[step] = entries
    return after


@lru_cache(maxsize=64)
def all_sets(size: int, capacity: int, width: int) -> np.ndarray:
    """Return every set of tokens, bool ``[C(size, capacity), width]``; cached: do not modify it."""
    sets = combinations(np.eye(width, dtype=bool)[:size], capacity)
    return np.array([np.any(members, axis=0) for members in sets])


def best_value(
    rows: np.ndarray, capacity: int, step: int, objective: str, h: str
) -> tuple[float, np.ndarray]:
    """Find the best set of a size after a step: its value, and the set as bool ``[n]``."""
    members = all_sets(step + 1, capacity, rows.shape[-1])
    values = set_values(rows, members, step, objective, h)
    return float(values.max()), members[values.argmax()]


def retained_mass(rows: np.ndarray, entries: np.ndarray) -> float:
    """Return the mean fraction of full attention on what a query can still see."""
    size = rows.shape[-1]
    seen = np.eye(size, dtype=bool)
    seen[1:] |= entries[:-1]
    return float((rows.mean(axis=0) * seen).sum() / size)


def best_retained_mass(rows: np.ndarray, capacity: int) -> float:
    """Return the highest mass that any eviction can retain, by dynamic programming over sets."""
    mean = rows.mean(axis=0)
    states: dict[frozenset[int], float] = {frozenset(): 0.0}
    for step in range(len(mean)):
        later: dict[frozenset[int], float] = {}
        for entries, mass in states.items():
            seen = entries | {step}
            gained = mass + mean[step, list(seen)].sum()
            for result in [seen - {token} for token in seen] if len(seen) > capacity else [seen]:
                later[result] = max(gained, later.get(result, 0.0))
        states = later
    return float(max(states.values()) / len(mean))


SIZE, CAPACITY, EXCERPTS = 14, 4, 4

_BUDGETS = {"heavy": TokenBudget(sink=0, heavy=CAPACITY, recent=0), "h2o": split_budget(CAPACITY)}
_TOLERANCE = 1e-9


def check_bound(
    rows: np.ndarray, entries: np.ndarray, capacity: int, objective: str, h: str
) -> tuple[np.ndarray, Row]:
    """Compare a policy's entries, bool ``[n, n]``, with the best sets after each evicting step.

    Returns the ratios of its value to the best, float ``[n - k]``, and columns of the theory page.
    """
    steps = range(capacity, rows.shape[-1])
    best = [best_value(rows, capacity, step, objective, h) for step in steps]
    tops, sets = np.array([top for top, _ in best]), np.stack([best_set for _, best_set in best])
    # The entries of the previous step and of this one, valued at this step.
    pairs = [set_values(rows, entries[step - 1 : step + 1], step, objective, h) for step in steps]
    before, values = np.array(pairs).T
    ratios = values / tops
    is_past = np.tri(len(entries), k=-1, dtype=bool)[capacity:]  # tokens before the step's new one
    lost = (sets & is_past & ~entries[capacity - 1 : -1]).sum(axis=1) / capacity
    return ratios, {
        "lowest_ratio": ratios.min(), "mean_ratio": ratios.mean(), "last_ratio": ratios[-1],
        "holds": int(ratios.min() >= FACTOR - _TOLERANCE),
        "alpha": max(0.0, float(1 - ratios.min() / FACTOR)),
        "beta": max(0.0, float((FACTOR * tops - values).max() / tops[-1])),
        # The largest fall of the value, and change of the best set, in a step.
        "drift": max([0.0, *(1 - before[1:] / values[:-1])]),
        "moves": int((sets[1:] & ~sets[:-1]).sum(axis=1).max(initial=0)), "lost": lost.max(),
    }  # fmt: skip


def measure_theory(study: Study, tick: Tick = no_tick) -> Tables:
    """Test the theorem on real and on adversarial attention."""
    cases = real_cases(study.model, study.sample.input_ids, SIZE, EXCERPTS)
    cases += adversarial_cases(SIZE, CAPACITY)
    tables: Tables = {"theory": [], "theory_steps": [], "theory_mass": []}
    series: dict[tuple[str, ...], list[np.ndarray]] = {}
    for done, (names, logits) in enumerate(cases):
        rows = attention_rows(logits)
        sets_by_policy = {
            name: cache_sets(logits, name, budget) for name, budget in _BUDGETS.items()
        }
        sets_by_policy["belady"] = belady_sets(rows, CAPACITY)
        masses = {name: retained_mass(rows, sets) for name, sets in sets_by_policy.items()}
        best = best_retained_mass(rows, CAPACITY)
        tables["theory_mass"].append({**names, **masses, "best": best})
        for objective, h in product(OBJECTIVES, CONCAVE):
            informed = informed_sets(rows, CAPACITY, objective, h)
            for policy, sets in {**sets_by_policy, "informed": informed}.items():
                ratios, bound = check_bound(rows, sets, CAPACITY, objective, h)
                kind = {"policy": policy, "objective": objective, "h": h}
                tables["theory"].append({**names, **kind, **bound})
                series.setdefault((names["case"], policy, objective, h), []).append(ratios)
        tick((done + 1) / len(cases))
    for (case, policy, objective, h), ratios_by_case in series.items():
        names = {"case": [case], "policy": [policy], "objective": [objective], "h": [h]}
        axes = {**names, "step": range(CAPACITY + 1, SIZE + 1)}
        tables["theory_steps"] += tabulate(
            axes, mean=np.mean(ratios_by_case, 0), lowest=np.min(ratios_by_case, 0)
        )
    return tables


POLICIES = ("heavy", "h2o", "global")
_STEPS = 8


def value_of_entries(
    layer: LayerAttention, gone_at: np.ndarray, capacity: int, steps: list[int]
) -> np.ndarray:
    """Compare a policy's entries, ``gone_at`` int ``[H, T]``, with the highest scores.

    ``steps`` are the newest tokens at which to compare, ascending. Returns float ``[steps, H]``.
    """
    gone = torch.from_numpy(gone_at)
    total = torch.zeros(gone.shape, dtype=torch.float64)
    ratios = []
    for first, probabilities in layer.rows():
        received = probabilities.sum(dim=1).double().cpu()
        last = received.shape[-1]
        for step in steps:
            if first <= step < last:
                rows = received[:, : step - first + 1].sum(dim=1)
                scores = (total[:, :last] + rows)[:, : step + 1]
                best = scores.topk(capacity, dim=-1).values.sum(dim=-1)
                ratios.append((scores * (gone[:, : step + 1] > step + 1)).sum(dim=-1) / best)
        total[:, :last] += received.sum(dim=1)
    return torch.stack(ratios).numpy()


def measure_long(study: Study, tick: Tick = no_tick) -> Tables:
    """Compare greedy eviction with the best sets on the whole text, at a 20 % budget."""
    capacity = study.tokens(DEFAULT_BUDGET)
    steps = np.linspace(capacity, study.length - 1, _STEPS).round().astype(int).tolist()
    rows: list[Row] = []
    for policy in POLICIES:
        gone = study.gone_at(policy, DEFAULT_BUDGET, tick if policy == "heavy" else no_tick)
        by_layer = dict(zip(study.layers, gone, strict=True))

        def measure(
            layer: LayerAttention, gone_by_layer: dict[int, np.ndarray] = by_layer
        ) -> np.ndarray:
            return value_of_entries(layer, gone_by_layer[layer.layer_idx], capacity, steps)

        axes = {"policy": [policy], "layer": study.layers, "head": range(gone.shape[1])}
        ratios = study.of_layers(measure).swapaxes(1, 2)
        rows += tabulate({**axes, "step": steps}, ratio=ratios)
    return {"theory_long": rows}


# --- pictures -------------------------------------------------------------------------------------

_COLOURS = {"heavy": RED, "h2o": BLUE, "global": PINK, "belady": GREEN, "best": sections.GREY}
_LABELS = {"heavy": "heavy (the paper's greedy)", "belady": "Belady (future)"}
_WORTH = {"xlabel": "tokens read", "ylabel": "worth, share of the best set's", "ylim": (0, 1.04)}
_CASES = {
    "real rows, h = identity": {"case": "real", "h": "identity"},
    "real rows, h = sqrt of each row": {"case": "real", "h": "sqrt"},
    "made to fail: 'late star'": {"case": "late star", "h": "identity"},
}


def draw_value(axes: Any, rows: Sequence[Row], value: str, lowest: str) -> None:
    """Draw the value of a policy's entries, a band down to the lowest, and the theorem's bound."""
    for policy in sections.distinct(rows, "policy"):
        policy_rows, look = sections.where(rows, policy=policy), {"color": _COLOURS[policy]}
        steps, means = sections.mean_by(policy_rows, "step", value)
        axes.plot(steps, means, marker="o", label=_LABELS.get(policy, policy), **look)
        groups = [sections.where(policy_rows, step=step) for step in steps]
        low, high = (
            [extreme(sections.column(group, name)) for group in groups]
            for extreme, name in ((min, lowest), (max, value))
        )
        axes.fill_between(steps, low, high, alpha=0.13, **look)
    axes.axhline(FACTOR, color="black", ls="--", lw=1, label="1 - 1/e")


def draw_mass(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the attention that eviction retains, and the maximum of any eviction."""
    for index, name in enumerate(("heavy", "h2o", "belady", "best")):
        cases, means = sections.mean_by(rows, "case", name)
        x, label = np.arange(len(cases)) + 0.2 * (index - 1.5), _LABELS.get(name, name)
        axes.bar(x, 100 * means, 0.18, color=_COLOURS[name], label=label)
    axes.set_xticks(range(len(cases)), cases)


def draw(tables: Tables, folder: Path) -> None:
    """Write theory.png, theory_mass.png and theory_long.png."""
    figure, panels = sections.new_figure((11, 3.7), [_WORTH | {"title": title} for title in _CASES])
    for axes, case in zip(panels, _CASES.values(), strict=True):
        rows = sections.where(tables["theory_steps"], objective="rows", **case)
        draw_value(axes, [row for row in rows if row["policy"] != "informed"], "mean", "lowest")
    _save(figure, panels, folder / "theory.png")
    about = {"title": "Attention retained, 4 of 14 tokens held", "ylim": (0, 102)}
    figure, panels = sections.new_figure((7.5, 3.6), [about])
    panels[0].set_ylabel("of full attention's mass (%)")
    draw_mass(panels[0], tables["theory_mass"])
    _save(figure, panels, folder / "theory_mass.png")
    title = "The whole text at a 20 % budget, mean and range of heads"
    figure, panels = sections.new_figure((7, 3.6), [_WORTH | {"title": title}])
    draw_value(panels[0], tables["theory_long"], "ratio", "ratio")
    _save(figure, panels, folder / "theory_long.png")


def _save(figure: Any, panels: Sequence[Any], path: Path) -> None:
    sections.put_legend(figure, panels)
    save_figure(figure, path)
    print(path, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, help="text file (the opening of a novel)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the text")
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    quality.run_alone(parser, measure)


def measure(args: argparse.Namespace) -> None:
    """Measure what the command line asks for, and write the tables."""
    warnings.filterwarnings("ignore", ".* too few for good text")  # meant: sets are to be counted
    text = sample_prompt() if args.text is None else read_text_file(args.text)
    described = describe(args.model)
    sample = make_sample(
        described.tokenizer, text, min(args.tokens, described.context or args.tokens)
    )
    open_folder(args.out, described.name, text, sample.length)
    model = load_weights(described, None, torch.device("cpu"))
    study = Study(model, sample, args.out / CACHE_FOLDER)
    tables = measure_theory(study) | measure_long(study)
    for name, rows in tables.items():
        write_csv(args.out / f"{name}.csv", rows)
        print(args.out / f"{name}.csv", flush=True)
    draw(tables, args.out)


if __name__ == "__main__":
    main()
