"""A budget in tokens or fractions, and its division among layers and heads. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from h2okv.records import checked_arguments, parse_json

LayerBudgets = Sequence[float | Sequence[float]]

MIN_ENTRIES = 64
"""Default minimum of heavy and of recent where they are fractions; measurements use none."""
# 0.29 of 100 is 28.999999999999996 in binary; without this it would lose a token.
_ROUNDING_SLACK = 1e-6


@dataclass(frozen=True)
class TokenBudget:
    """A budget in tokens, for one sequence in each layer and KV head."""

    sink: int  # first positions that are never evicted
    heavy: int  # entries kept for their score
    recent: int  # newest positions that are never evicted, the current token among them
    # Entries that a policy keeps by another rule: a static pattern of positions, or, in a cache
    # that keeps everything, a choice for each query.
    num_static: int = 0

    @property
    def total(self) -> int:
        """Number of entries, ``K`` in the contract."""
        return self.sink + self.heavy + self.recent + self.num_static


@checked_arguments()
@dataclass(frozen=True)
class Budget:
    """A cache budget as the user writes it: tokens, or fractions of the prompt.

    Args:
        heavy: heavy hitters to keep; an ``int`` counts tokens, a ``float`` in (0, 1] is a fraction
            of the prompt length (``heavy_ratio`` in the H2O paper, arXiv 2306.14048).
        recent: newest tokens to keep, given like ``heavy``.
        sink: first tokens to keep regardless of their score, given like ``heavy``; 1.0 keeps the
            whole prompt, and the rest of the budget is for what follows it.
        max_tokens: upper limit for ``sink + heavy + recent`` in tokens, or ``None``.
        min_tokens: lower limit, in tokens, for each of ``heavy`` and ``recent`` that is a fraction,
            as far as ``max_tokens`` allows; default 64, as a few entries are too few for any text.
        grows: whether fractions are of all tokens seen, so that the cache grows with the text;
            with ``sink=1.0``, of those behind the prompt.

    Raises:
        ValueError: if a value is negative, a fraction is above 1, all are zero, or the sum is above
            1 (fractions) or ``max_tokens`` (tokens); if what grows is no fraction, or limited.
    """

    heavy: int | float = 0.1
    recent: int | float = 0.1
    sink: int | float = 0
    max_tokens: int | None = None
    min_tokens: int = None  # type: ignore[assignment]  # readers never see `None`
    grows: bool = False

    def __post_init__(self) -> None:
        for name in ("heavy", "recent", "sink"):
            _check_share(name, getattr(self, name))
        if self.min_tokens is None:
            object.__setattr__(self, "min_tokens", usual_minimum(self.heavy, self.recent))
        check_tokens("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_tokens("max_tokens", self.max_tokens, 1)
        if self.heavy == 0 and self.recent == 0:
            raise ValueError(
                f"heavy={self.heavy!r} and recent={self.recent!r} keep nothing; give at least one"
                " of them a value above 0."
            )
        fractions = sum(share for share in (self.heavy, self.recent) if isinstance(share, float))
        if fractions > 1 + _ROUNDING_SLACK:
            raise ValueError(
                f"heavy={self.heavy!r} and recent={self.recent!r} add up to {fractions:g} of the "
                "prompt; fractions must add up to at most 1."
            )
        if self.grows is not False:
            self._check_growth()
        if not self.is_relative:
            self.resolve(0)  # checks the sum, which no prompt changes

    @property
    def is_relative(self) -> bool:
        """Whether heavy, recent or sink is a fraction of the prompt."""
        return any(isinstance(share, float) for share in (self.heavy, self.recent, self.sink))

    def _check_growth(self) -> None:
        """Refuse a growing budget of tokens, or one with a limit."""
        if self.grows is not True:
            problem = f"got grows={self.grows!r}; give True or False"
        elif not isinstance(self.heavy, float) and not isinstance(self.recent, float):
            problem = f"heavy={self.heavy} and recent={self.recent} are tokens; give a fraction"
        elif self.max_tokens is not None:
            problem = f"max_tokens={self.max_tokens} would stop the text; leave one of them out"
        elif isinstance(self.sink, float) and self.sink != 1:
            problem = f"sink={self.sink:g} is a part of the prompt; give tokens or 100%"
        else:
            return
        raise ValueError(f"of=seen (grows=True) is for fractions of all tokens seen: {problem}.")

    def resolve(self, prompt_length: int, seen: int | None = None) -> TokenBudget:
        """Turn fractions into tokens for a prompt.

        Args:
            prompt_length: tokens of the prompt without padding.
            seen: tokens of prompt and answer, if there are more; a budget that `grows` counts them.

        Returns:
            The budget in tokens. A fraction above 0 keeps at least ``max(1, min_tokens)``, and no
            more for ``min_tokens`` than ``max_tokens`` allows.

        Raises:
            ValueError: if the sum is above ``max_tokens``.
        """
        length = prompt_length

        def to_tokens(share: int | float, minimum: int) -> int:
            if not isinstance(share, float) or share == 0:
                return int(share)
            return max(minimum, int(share * length + _ROUNDING_SLACK))

        sink, minimum = to_tokens(self.sink, 0), self.min_tokens
        if self.grows:
            length = (length if seen is None else seen) - isinstance(self.sink, float) * sink
        shares = (self.heavy, self.recent)
        if self.max_tokens is not None and minimum:
            fixed = sink + sum(share for share in shares if isinstance(share, int))
            fractions = sum(isinstance(share, float) and share > 0 for share in shares)
            minimum = min(minimum, (self.max_tokens - fixed) // max(1, fractions))
        tokens = TokenBudget(sink, *(to_tokens(share, max(1, minimum)) for share in shares))
        if self.max_tokens is not None and tokens.total > self.max_tokens:
            raise ValueError(
                f"sink + heavy + recent = {tokens.sink} + {tokens.heavy} + {tokens.recent} = "
                f"{tokens.total} tokens is above max_tokens={self.max_tokens}; lower the budget or "
                "raise max_tokens."
            )
        return tokens


def usual_minimum(heavy: int | float, recent: int | float) -> int:
    """Return the default of ``min_tokens``."""
    return MIN_ENTRIES if isinstance(heavy, float) or isinstance(recent, float) else 0


def _check_share(name: str, value: int | float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        problem = "is not a budget; give an int (tokens) or a float (fraction)"
    elif isinstance(value, float) and not 0.0 <= value <= 1.0:
        problem = "is not a fraction of the prompt; give a float in (0, 1], or an int for tokens"
    elif not 0 <= value <= 2**53:
        problem = f"is {'negative' if value < 0 else 'too large'}; give tokens, 0 to {2**53}"
    else:
        return
    raise ValueError(f"{name}={value!r} {problem}.")


def check_tokens(name: str, value: int, minimum: int) -> None:
    """Raise ValueError unless `value` is an int of `minimum` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(
            f"{name}={value!r} is not a number of tokens; give an int of {minimum} or more."
        )


def checked_factors(budgets: LayerBudgets) -> LayerBudgets:
    """Return factors on heavy as tuples."""
    try:
        factors = tuple(
            tuple(map(_number, layer)) if isinstance(layer, list | tuple) else _number(layer)
            for layer in budgets
        )
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            "layer_budgets must be a number for each layer, or a list of one for each of its KV"
            f" heads, got {budgets!r}; h2okv.measure_layer_budgets returns such factors."
        ) from None
    if len({isinstance(layer, tuple) for layer in factors}) > 1:
        raise ValueError(
            "layer_budgets must be numbers only or lists only, got both; give one kind for all."
        )
    flat = flat_factors(factors)
    mean = sum(flat) / max(1, len(flat))
    if min(flat, default=-1) < 0 or not abs(mean - 1) <= 0.01:
        raise ValueError(
            f"layer_budgets must be non-negative with mean 1, got mean {mean:g} and least"
            f" {min(flat, default=0):g}; h2okv.measure_layer_budgets returns such factors."
        )
    return factors


def _number(value: Any) -> float:
    if isinstance(value, bool | str | bytes):
        raise TypeError
    return float(value)


def flat_factors(budgets: LayerBudgets) -> list[float]:
    """Return the factors of all layers, or of all their heads, in one list."""
    layers = (layer if isinstance(layer, Sequence) else (layer,) for layer in budgets)
    return [factor for layer in layers for factor in layer]


def parse_factors(text: str) -> LayerBudgets:
    """Return the factors of a file of ``h2okv eval layers``, or of the cache folder."""
    content = parse_json(text)
    return checked_factors(content.get("factors", ()) if isinstance(content, dict) else content)


def partly_even(budgets: LayerBudgets, share: float) -> LayerBudgets:
    """Mix factors with even ones, so that every layer or head gets this share of the budget."""

    def mixed(factor: float) -> float:
        return round(share + (1 - share) * factor, 4)

    return tuple(
        tuple(map(mixed, layer)) if isinstance(layer, Sequence) else mixed(layer)
        for layer in budgets
    )


def limit_factors(factors: Sequence[float], limit: float) -> list[float]:
    """Lower factors to `limit`; the excess goes to the others in proportion to theirs."""
    limited, total = list(factors), sum(factors)
    while max(limited) > limit:
        at_limit = [factor >= limit for factor in limited]
        if all(at_limit):  # their mean is not quite 1
            return [limit] * len(limited)
        left_over = total - limit * sum(at_limit)
        below = sum(factor for factor in limited if factor < limit)
        even = left_over / at_limit.count(False)
        limited = [
            min(factor, limit) if is_limited else factor * left_over / below if below else even
            for factor, is_limited in zip(limited, at_limit, strict=True)
        ]
    return limited
