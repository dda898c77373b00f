"""The options of a cache: policy, budget, scores, positions. Pure data, without torch."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from h2okv import cache_spec
from h2okv.budget import (
    Budget,
    LayerBudgets,
    check_tokens,
    checked_factors,
    flat_factors,
    limit_factors,
    parse_factors,
    partly_even,
    usual_minimum,
)  # fmt: skip
from h2okv.records import checked_arguments, read_text_file, refusing, short_repr

Positions = Literal["original", "rolling", "clamped"]
_UNPRINTED = re.compile("by-(layer|head)(-[0-9a-f]{8})?")  # a user's factors in labels
MEASURED: Literal["auto"] = "auto"  # layer budgets that are measured on the model
EVEN: Literal["even"] = "even"
_OF_POLICY: Literal["policy"] = "policy"  # `MEASURED` for `BEST`, `EVEN` for all others
SPAN = 256
"""`evict_every` of servers, chats and long prompts in vLLM, unless the user says otherwise."""
POSITIONS: tuple[Positions, ...] = ("original", "rolling", "clamped")

# H2O with the options that measured best (docs/quality.md). Configs name each of them, and labels
# the version: a text stays reproducible when a later version chooses others.
BEST = "best"
BEST_VERSION = 5  # of these options and of what they do
FACTORS_VERSION = 5  # of how factors are measured
_VERSIONED = re.compile(rf"{BEST}-v(\d+)")  # as results name it
_BEST_SINK, _BEST_SCORING, _SPAN_OF_BEST = 4, "expected", 32
BEST_HEAVY_FRACTION = 0.85
_BUDGET = 0.2  # without a budget, heavy and recent

POLICIES = (
    "full", "recent", "sink_recent", "h2o", "heavy", "random", "strided", "strided_heavy",
    "fixed", "fixed_heavy", "snapkv", "keydiff", BEST,
)  # fmt: skip
"""Policies that drop entries; listed here because the registry imports torch."""
_EVEN_FOR_PINS = 0.5  # of heavy: what each head has at least where tokens are pinned
KV_BITS = {8: (8, 8), 6: (8, 4), 4: (4, 4)}  # bits of keys and of values, by their mean

SCORINGS = ("sum", "mean", "decay", "last", "value_norm", "expected")


def resolve_policy(
    policy: str, sink: int | float | None = None, scoring: str | None = None
) -> tuple[str, int | float, str]:
    """Return policy, sinks and scoring of a name; `None` stands for the policy's default."""
    is_best = policy == BEST
    return (
        "h2o" if is_best else policy,
        (_BEST_SINK if is_best else 0) if sink is None else sink,
        (_BEST_SCORING if is_best else "sum") if scoring is None else scoring,
    )


def divided(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ``budget`` in a cache's options by the fields it sets, and texts by their values."""
    options = dict(values)
    if match := _VERSIONED.fullmatch(str(options.get("policy"))):
        if int(match[1]) != BEST_VERSION:
            raise ValueError(
                f"policy={match[0]!r} is of another version of h2okv, whose {BEST!r} is"
                f" v{BEST_VERSION} here; give {BEST!r}, or install that version."
            )
        options["policy"] = BEST
    every = options.get("evict_every")
    if isinstance(every, str) and every != _OF_POLICY:
        options |= cache_spec.parse_cuts(every, "evict_every")
    if isinstance(options.get("layer_budgets"), str):
        options["layer_budgets"] = _read_factors(options["layer_budgets"])
    budget = options.pop("budget", None)
    if budget is None:
        return options
    amounts = ("heavy", "recent")
    duplicates = [f"{n}={options[n]!r}" for n in amounts if options.get(n) is not None]
    if duplicates:
        raise ValueError(
            f"budget={budget!r} cannot be combined with {' and '.join(duplicates)}; leave one"
            " of them out"
        )
    if isinstance(budget, Budget):
        return options | {name: value for name, value in vars(budget).items() if value is not None}
    parsed = cache_spec.parse_budget(budget)
    if isinstance(parsed, tuple):
        return options | dict(zip(amounts, parsed, strict=True))
    is_tokens = isinstance(parsed, int)
    if parsed is None or (parsed == 1 and not is_tokens):
        return options | {"policy": "full"}
    if is_tokens and parsed < 2:
        raise ValueError(f"budget {parsed} is too small; give 2 tokens or more, or a fraction")
    if not is_tokens and not 0 < parsed < 1:
        written = budget if isinstance(budget, str) else f"{budget:g}"
        raise ValueError(
            f"budget {written} is out of range; give a fraction above 0 and up to 1 (100 %),"
            " tokens (64), or full"
        )
    heavy = parsed * (BEST_HEAVY_FRACTION if options.get("policy") == BEST else 0.5)
    heavy = int(heavy) if is_tokens else heavy
    return options | {"heavy": heavy, "recent": parsed - heavy}


def _read_factors(text: str) -> LayerBudgets | str:
    """Return the factors that a text has as JSON or whose file it names; other words unchanged."""
    if text in (MEASURED, EVEN, _OF_POLICY):
        return text
    remedy = "give auto, even or a file of h2okv eval layers"
    if _UNPRINTED.fullmatch(text):
        raise ValueError(f"layer_budgets={text!r} says no factors, as labels do; {remedy}")
    problem = f"layer_budgets must be auto, even or factors in JSON, got {short_repr(text)}"
    with refusing(problem, remedy, ValueError, TypeError):
        is_list = text.lstrip().startswith("[")
        return parse_factors(text if is_list else read_text_file(Path(text), "JSON"))


def check_bits(kv_bits: int | None) -> None:
    """Refuse bits of keys and values that no storage has."""
    if kv_bits is not None and (type(kv_bits) is not int or kv_bits not in KV_BITS):
        raise ValueError(
            f"kv_bits must be 8, 6 or 4, got {kv_bits!r}; leave it out to keep keys and values in"
            " the model's dtype."
        )


# Of a field that files of earlier versions lack: `None` and 0 are not written to results.
LATER = {"is_later": True}


@checked_arguments(divided, "budget")
@dataclass(frozen=True)
class CacheConfig:
    """All options of a cache; `H2OCache.from_config` builds the cache.

    The fields are the arguments of `H2OCache`. Command line, engine, server, evaluation and saved
    files all carry this one object, and take their lists of options from its fields.
    ``budget=0.2`` (or ``"20%"``, ``512``, ``"full"``) sets heavy and recent: the policy divides it.
    `from_spec` reads the same from one text, such as ``"best:20%,bits=8"``, and `spec` writes it.

    Attributes:
        policy: a name of `h2okv.policy_names()`; ``"full"`` keeps everything. ``"best"`` becomes
            ``"h2o"`` with ``scoring="expected"``, ``sink=4`` and ``layer_budgets="auto"`` as
            defaults.
        heavy: heavy hitters to keep: tokens (int) or a fraction of the prompt (float); default 0.1,
            or 0.17 with ``policy="best"``.
        recent: newest tokens to keep, given like ``heavy``; default 0.1, or 0.03 with
            ``policy="best"``.
        sink: first tokens to keep regardless of their score, given like ``heavy``; default 0, or 4
            with ``policy="best"``. 1.0 keeps the whole prompt, and heavy and recent are for what
            follows it.
        scoring: how received attention counts: ``"sum"`` (H2O), ``"mean"`` (divided by the number
            of queries that could attend to the entry), ``"decay"`` (A2SF, arXiv 2407.20485),
            ``"last"`` (the newest query alone), ``"value_norm"`` (VATP, arXiv 2406.12335) or
            ``"expected"`` (what a block's queries would give from behind its end); see
            `h2okv.policy`. Default ``"sum"``, or ``"expected"`` with ``policy="best"``.
        decay: the factor in (0, 1] by which every further query lowers the attention received
            before, with ``scoring="decay"`` (default 0.995) or ``"value_norm"`` (default: none).
        positions: ``"original"``: every token keeps its position in the text. ``"rolling"``: every
            entry sits at its rank in the cache and the new tokens after them, so that a model with
            rotary positions reads and writes past its context window (H2O, section 5.3 and
            arXiv 2309.17453, section 3.2). ``"clamped"``: learned positions (OPT) stop at the
            last one, on a model that `h2okv.enable` was called with.
        evict_every: tokens of a sequence between two evictions, counted from its first token, in
            prompts and while decoding; nothing is evicted at other places. Up to
            ``K + evict_every`` entries are cached, and which ones depends on the text alone, not on
            the forwards that brought it. A longer input is read in blocks that end there, so that
            a prompt takes no more memory than these. 1 is Algorithm 1 of the paper. ``None``: evict
            once after each block (a prompt is one), then after each token. ``"prompt+32"`` sets
            ``whole_prompts`` too. Default ``None``, or ``"prompt+32"`` with
            ``scoring="expected"``, which judges a single token badly.
        kv_bits: 8 or 4 bits for each number of keys and values, by groups of up to 64 with a scale
            and a low each; 6: keys in 8 bits and values in 4; ``None``: the model's dtype. What a
            block reads of itself is in full precision; it is rounded once, when it becomes an
            entry. 4-bit keys are centered, scaled and rotated first, which needs the model and
            not only its config (`h2okv.ops.quant.KeyTransform`).
        max_tokens: upper limit of each layer's budget in tokens; a larger budget is an error.
        min_tokens: lower limit, in tokens, for each of heavy and recent that is a fraction, as far
            as ``max_tokens`` allows; default 64, as a few entries are too few for any text. 0 keeps
            the exact fraction of a short prompt too, as measurements and the paper do.
        seed: seed of policies that draw at random.
        layer_budgets: a factor on heavy for each layer with H2O entries, or a list of one for each
            of its KV heads, of mean 1; `h2okv.measure_layer_budgets` measures a model's.
            ``None`` or ``"even"``: all are equal. The excess of a fraction above the prompt goes to
            the others. ``"auto"``: measured on the model, once, and kept in the user's cache
            folder. A text also names a file of factors. Default ``"auto"`` with ``policy="best"``,
            else ``None``.
        whole_prompts: evict once after each block whatever its length, and count ``evict_every``
            from there: a prompt is judged as a whole, and what the model writes in spans.
        grows: fractions are of all tokens seen at each eviction, so that the cache grows with the
            text (``of=seen``); with ``sink=1.0``, of those behind the prompt.
        measured: version of the measurement that ``layer_budgets`` are from; ``None`` for factors
            of the user's. Set by what measures them.

    Raises:
        ValueError: if the budget, the positions or the layer budgets are invalid.
    """

    policy: str = "h2o"
    # `__post_init__` replaces the defaults: readers never see `None`.
    heavy: int | float = None  # type: ignore[assignment]
    recent: int | float = None  # type: ignore[assignment]
    sink: int | float = None  # type: ignore[assignment]
    scoring: str = None  # type: ignore[assignment]
    decay: float | None = None
    positions: Positions = "original"
    evict_every: int | None = field(default=_OF_POLICY, metadata=LATER)  # type: ignore[assignment]
    kv_bits: int | None = None
    max_tokens: int | None = None
    min_tokens: int = field(default=None, metadata=LATER)  # type: ignore[assignment]
    seed: int = 0
    layer_budgets: LayerBudgets | Literal["auto", "even", "policy"] | None = field(
        default=_OF_POLICY, metadata=LATER
    )
    measured: int | None = field(default=None, metadata=LATER)
    whole_prompts: bool = field(default=False, metadata=LATER)
    grows: bool = field(default=False, metadata=LATER)
    if TYPE_CHECKING:  # of `checked_arguments`, with the argument that only `divided` knows

        def __init__(
            self, *fields: Any, budget: int | float | str | Budget | None = None, **named: Any
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str):
            raise ValueError(
                f"policy must be a name such as 'best' or 'h2o', got {short_repr(self.policy)}."
            )
        usual = divided({"policy": self.policy, "budget": _BUDGET})
        for name in ("heavy", "recent"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual[name])
        if self.min_tokens is None:
            object.__setattr__(self, "min_tokens", usual_minimum(self.heavy, self.recent))
        factors = self.layer_budgets
        if factors == _OF_POLICY:
            factors = MEASURED if self.policy == BEST else None
        elif factors == EVEN:
            factors = None
        if factors is None or factors == MEASURED:
            object.__setattr__(self, "measured", None)
        else:
            factors = checked_factors(factors)
        object.__setattr__(self, "layer_budgets", factors)
        resolved = resolve_policy(self.policy, self.sink, self.scoring)
        for name, value in zip(("policy", "sink", "scoring"), resolved, strict=True):
            object.__setattr__(self, name, value)
        if self.positions not in POSITIONS:
            raise ValueError(
                f"positions={self.positions!r} is unknown; choose one of {', '.join(POSITIONS)}."
            )
        check_bits(self.kv_bits)
        self._set_cuts()
        if not self.is_full:
            _ = self.budget

    def _set_cuts(self) -> None:
        """Check where entries are evicted; by default where the scoring asks for it."""
        every, is_whole = self.evict_every, self.whole_prompts
        if every == _OF_POLICY:
            # Rolling entries and a span must fit into a window that is not known here.
            scores_spans = self.scoring == _BEST_SCORING and self.positions != "rolling"
            every, is_whole = (_SPAN_OF_BEST, True) if scores_spans else (None, is_whole)
        if every is not None:
            check_tokens("evict_every", every, 1)
        elif is_whole:
            raise ValueError(
                "whole_prompts must have an evict_every, got None; give such as evict_every=64."
            )
        if is_whole and (every == 1 or self.is_full):  # evicting after each token, or never
            every, is_whole = None, False
        object.__setattr__(self, "evict_every", every)
        object.__setattr__(self, "whole_prompts", is_whole)

    @classmethod
    def from_spec(cls, text: str, **defaults: Any) -> CacheConfig:
        """Build a config from its text.

        Args:
            text: policy, budget and options, such as ``"best:20%"``, ``"h2o:64+10%,sink=4"``,
                ``"512,bits=8,every=256"`` or ``"full"``; each may be left out. The options are
                ``sink``, ``scoring`` (also ``decay:0.99``), ``positions``, ``every``
                (`evict_every`), ``bits`` (`kv_bits`), ``layers`` (`layer_budgets`), ``min``
                and ``max`` (`min_tokens`, `max_tokens`), ``of`` (`grows`), ``seed``.
            **defaults: arguments of this class where the text says nothing.

        Raises:
            ValueError: if the text is not one of a cache, or the config is invalid.
        """
        named = cache_spec.parse(text)
        if "budget" in named:
            defaults = {n: v for n, v in defaults.items() if n not in ("heavy", "recent")}
        return cls(**(defaults | named))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CacheConfig:
        """Build a config from named values, as `to_dict` and `to_record` return them.

        Raises:
            ValueError: if a name is unknown, or a value is invalid.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"values must be an object with names, got {values!r}.")
        values = {"min_tokens": 0, "evict_every": None, **values}  # if files lack them
        return cls(**values)

    def with_options(self, **options: Any) -> CacheConfig:
        """Return a config with fields replaced, or with a ``budget``.

        A new policy also sets its default amounts, sinks, scoring and layer budgets, unless they
        are among ``options`` or differ from the former policy's defaults.
        """
        unset: dict[str, Any] = {}
        if self.min_tokens == usual_minimum(self.heavy, self.recent):
            unset["min_tokens"] = None
        if "policy" in options:
            usual = CacheConfig(self.policy)
            names = ("heavy", "recent", "sink", "scoring")
            unset |= {n: None for n in names if getattr(self, n) == getattr(usual, n)}
            if self.layer_budgets is None:
                unset["layer_budgets"] = _OF_POLICY
        elif "budget" in options:  # the policy divides it
            options["policy"] = BEST if self.is_best else self.policy
        if self.cuts == self.usual_cuts:
            unset |= {"evict_every": _OF_POLICY, "whole_prompts": False}
        return replace(self, **(unset | divided(options)))

    def request_budget(self, budget: Budget | int | float | str) -> Budget:
        """Return the budget of one request, divided as this config's policy does.

        Args:
            budget: the budget; a text may also have ``sink``, ``min`` and ``max``, and this
                config's policy.

        Raises:
            ValueError: if it is invalid, not a limit, or a text has other options.
        """
        if isinstance(budget, Budget):
            return budget
        named: dict[str, Any] = {"budget": budget}
        if isinstance(budget, str):
            named = cache_spec.parse(budget)
        policy = named.pop("policy", self._base)
        others = named.keys() - {"budget", "sink", "min_tokens", "max_tokens"}
        if others or policy not in (self._base, self.policy_name, "full"):
            problem = f"{', '.join(sorted(others))}" if others else f"policy {policy}"
            raise ValueError(
                f"budget={budget!r} of a request has {problem}, which only the engine's cache can"
                " set; give a budget only, such as 256 or 64+64,sink=4."
            )
        if policy == "full":
            named["budget"] = "full"
        config = self.with_options(**named)
        if config.is_full:
            raise ValueError(
                f"budget={budget!r} of a request must be a fraction or tokens, up to the engine's"
                " budget; give such as budget=0.1, or leave it out."
            )
        return config.budget

    def seeded(self, seed: int) -> CacheConfig:
        """Return the config with a seed, if its policy draws at random and has none yet."""
        return replace(self, seed=seed) if self.policy == "random" and not self.seed else self

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, ready for JSON."""
        return asdict(self)

    def to_record(self) -> dict[str, Any]:
        """Return the fields by name, as results of every version have them."""
        later = [field.name for field in fields(self) if field.metadata]
        return {n: v for n, v in self.to_dict().items() if n not in later or v}

    def with_cuts(self, length: int | None) -> CacheConfig:
        """Return the config with `evict_every`, unless it has one that is not the default."""
        is_usual = self.evict_every is None or self.cuts == self.usual_cuts
        return self.cut_every(length) if is_usual else self

    def cut_every(self, every: int | str | None) -> CacheConfig:
        """Return the config with `evict_every`: tokens, 0 or ``None``, or a text of `cuts`."""
        cuts: Any = None if every in (0, "0") else every
        return replace(self, evict_every=cuts, whole_prompts=False)

    @property
    def cuts(self) -> str:
        """The text of `evict_every`: ``0``, ``256`` or ``prompt+32``."""
        return cache_spec.cuts_text(self.evict_every, self.whole_prompts)

    @property
    def usual_cuts(self) -> str:
        """The `cuts` that the scoring asks for by default."""
        return CacheConfig(scoring=self.scoring, positions=self.positions).cuts

    @property
    def span(self) -> int:
        """Tokens between two evictions while decoding."""
        return self.evict_every or 1

    @property
    def chunk(self) -> int | None:
        """Tokens of a prompt between two evictions; ``None`` where a block is evicted from once."""
        return None if self.whole_prompts else self.evict_every

    @property
    def is_full(self) -> bool:
        """Whether nothing is ever evicted."""
        return self.policy == "full"

    @property
    def budget(self) -> Budget:
        """The budget without the other options."""
        return self._budget(self.heavy)

    def _budget(self, heavy: int | float) -> Budget:
        return Budget(heavy, self.recent, self.sink, self.max_tokens, self.min_tokens, self.grows)

    @property
    def is_by_head(self) -> bool:
        """Whether the heads of a layer have separate budgets."""
        return not self.is_full and isinstance((self.layer_budgets or (None,))[0], tuple)

    @property
    def before_measuring(self) -> CacheConfig:
        """The config with even budgets, if they are still to be measured."""
        return replace(self, layer_budgets=None) if self.layer_budgets == MEASURED else self

    @property
    def with_room_for_pins(self) -> CacheConfig:
        """The config with half of heavy divided evenly, as every head has the pins."""
        if not isinstance(self.layer_budgets, tuple):
            return self
        return replace(self, layer_budgets=partly_even(self.layer_budgets, _EVEN_FOR_PINS))

    def layer_budget(self, index: int) -> Budget:
        """Return the budget of a layer with H2O entries; by head, the smallest of the layer."""
        factor = self._factor(index)
        if factor is None:
            return self.budget
        return self._scaled(min(factor) if isinstance(factor, Sequence) else factor)

    def head_budgets(self, index: int) -> tuple[Budget, ...] | None:
        """Return the budgets of a layer's KV heads; ``None`` if they are equal."""
        factors = self._factor(index)
        if not isinstance(factors, Sequence):
            return None
        return tuple(map(self._scaled, factors))

    def _factor(self, index: int) -> float | Sequence[float] | None:
        return None if self._factors is None else self._factors[index]

    @cached_property
    def _factors(self) -> LayerBudgets | None:
        """The factors on heavy, limited so that no fraction exceeds the prompt."""
        budgets = self.layer_budgets
        if self.is_full or budgets is None or isinstance(budgets, str):
            return None
        if not isinstance(self.heavy, float) or not self.heavy:
            return budgets
        limit = self._heavy_limit / self.heavy
        limited = iter(limit_factors(flat_factors(budgets), limit))
        return tuple(
            tuple(islice(limited, len(layer))) if isinstance(layer, Sequence) else next(limited)
            for layer in budgets
        )

    @property
    def _heavy_limit(self) -> float:
        """Largest fraction of the prompt that recent leaves for heavy hitters."""
        return 1.0 - self.recent if isinstance(self.recent, float) else 1.0

    def _scaled(self, factor: float) -> Budget:
        heavy = self.heavy * factor
        heavy = round(heavy) if isinstance(self.heavy, int) else min(heavy, self._heavy_limit)
        if heavy == 0 == self.recent:
            raise ValueError(
                f"layer_budgets: a factor of {factor:g} on heavy={self.heavy!r} keeps nothing of a"
                " layer or head, as recent=0; give larger factors, or recent tokens."
            )
        problem = f"layer_budgets: a factor of {factor:g} makes heavy={self.heavy!r} too large"
        with refusing(problem, "or give smaller factors.", ValueError):
            return self._budget(heavy)

    def entries(self, length: int) -> int:
        """Return the entries left of a prompt of `length` tokens, per layer and KV head."""
        return length if self.is_full else self.budget.resolve(length).total

    def past_window(self, entries: int, block: int, window: int | None) -> str | None:
        """Return why entries and a block cannot roll in a context window; ``None`` if they can."""
        if self.positions != "rolling" or window is None or entries + block <= window:
            return None
        room = f" (to {window - entries} at most)" if entries < window else ""
        return (
            f"a budget of {entries} entries and every={block} are more than the context"
            f" window of {window}; lower the budget, sink or every{room}"
        )

    @property
    def budget_label(self) -> str:
        """The budget in a few characters: ``full``, ``20%``, ``512``, or heavy and recent."""
        if self.is_full:
            return "full"
        total = self.heavy + self.recent
        for amount in (round(total, 10), total) if type(self.heavy) is type(self.recent) else ():
            with suppress(ValueError):  # too small a budget, for one
                options = divided({"policy": self._base, "budget": amount})
                if (options.get("heavy"), options.get("recent")) == (self.heavy, self.recent):
                    return cache_spec.amount_text(amount)
        return f"{cache_spec.amount_text(self.heavy)}+{cache_spec.amount_text(self.recent)}"

    @property
    def is_best(self) -> bool:
        """Whether these are the options of `BEST`, with layer budgets of a measurement."""
        is_measured = self.measured is not None or self.layer_budgets == MEASURED
        policy, sink, scoring = resolve_policy(BEST)
        is_usual = isinstance(self.sink, float) or self.sink == sink
        return is_measured and is_usual and (self.policy, self.scoring) == (policy, scoring)

    @property
    def policy_name(self) -> str:
        """The policy in tables: ``best-v5`` for `BEST` with measured layer budgets."""
        if not self.is_best:
            return self.policy
        return BEST if self.measured is None else f"{BEST}-v{self.measured}"

    @property
    def spec(self) -> str:
        """The text from which `from_spec` builds this config; measured factors are ``auto``."""
        budget = "" if self.is_full else self.budget_label
        return cache_spec.write(self._base, budget, self._options(exact=True))

    @property
    def label(self) -> str:
        """The name in tables and progress bars, which ``--cache`` reads.

        As `spec`, but for what commands set themselves (``min=0``), the version of measured
        factors, and a digest of others.
        """
        return cache_spec.write(*self._labels)

    @property
    def policy_label(self) -> str:
        """The `label` without the budget."""
        policy, _, options = self._labels
        return cache_spec.write(policy, "", options)

    @property
    def _labels(self) -> tuple[str, str, dict[str, str]]:
        policy = self.policy_name if self.is_best else self._base
        return policy, "" if self.is_full else self.budget_label, self._options(exact=False)

    @property
    def _base(self) -> str:
        """The policy whose defaults `spec` leaves out."""
        is_best = (self.policy, self.sink, self.scoring) == resolve_policy(BEST)
        return BEST if is_best or self.is_best else self.policy

    def _options(self, exact: bool) -> dict[str, str]:
        """Return the texts of options that differ from the policy's defaults."""
        usual = CacheConfig(self._base, self.heavy, self.recent)
        names = cache_spec.OPTIONS.items()
        options = {n: getattr(self, f) for n, f in names if getattr(self, f) != getattr(usual, f)}
        options.pop("every", None)
        if self.cuts != self.usual_cuts:
            options["every"] = self.cuts
        if self.decay is not None:
            options["scoring"] = f"{self.scoring}:{self.decay!r}"
        if "sink" in options:
            options["sink"] = cache_spec.amount_text(self.sink)
        if "of" in options:
            options["of"] = cache_spec.OF[self.grows]
        if self.policy != "random":
            options.pop("seed", None)
        if not exact and self.min_tokens == 0:
            options.pop("min", None)
        if "layers" in options:
            options["layers"] = self._layers_text(exact)
            if self.layer_budgets is not None and options["layers"] == usual.layer_budgets:
                del options["layers"]
        if self.is_full:  # nothing else has an effect
            options = {n: value for n, value in options.items() if n in ("every", "bits")}
        return {name: str(value) for name, value in options.items()}

    def _layers_text(self, exact: bool) -> str:
        if self.layer_budgets is None or isinstance(self.layer_budgets, str):
            return self.layer_budgets or EVEN
        if self.measured is not None:
            return MEASURED
        factors = json.dumps(self.layer_budgets, separators=(",", ":"))
        name = f"by-{'head' if self.is_by_head else 'layer'}-{zlib.crc32(factors.encode()):08x}"
        return factors if exact else name

    def identity(self) -> dict[str, Any]:
        """Return the fields that a result depends on; for a full cache only those that apply."""
        values = self.to_record()
        if self.is_full:
            return {n: values[n] for n in ("policy", "evict_every", "kv_bits") if n in values}
        return values
