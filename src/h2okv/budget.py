"""How many tokens a cache keeps, and for which reason."""

from __future__ import annotations

from dataclasses import dataclass

# 0.29 of 100 is 28.999999999999996 in binary; without this it would lose a token.
_ROUNDING_SLACK = 1e-6


@dataclass(frozen=True)
class TokenBudget:
    """A budget in tokens: what one sequence keeps for each layer and KV head.

    Attributes:
        sink: first positions that are never evicted.
        heavy: entries kept for their score.
        recent: newest positions that are never evicted, the current token among them.
        chosen: entries that a policy keeps by a rule of its own: a pattern of positions, or, in a
            cache that keeps everything, anew for each query.
    """

    sink: int
    heavy: int
    recent: int
    chosen: int = 0

    @property
    def total(self) -> int:
        """The number of entries kept, ``K`` in the contract."""
        return self.sink + self.heavy + self.recent + self.chosen


@dataclass(frozen=True)
class Budget:
    """A cache budget as the user gives it: tokens, or fractions of the prompt.

    Args:
        heavy: heavy hitters to keep; an ``int`` counts tokens, a ``float`` in (0, 1] is a fraction
            of the prompt length (``heavy_ratio`` in the H2O paper, arXiv 2306.14048).
        recent: newest tokens to keep, given like ``heavy``.
        sink: first tokens to keep whatever their score, in tokens.
        max_tokens: upper limit for ``sink + heavy + recent`` in tokens, or ``None``.

    Raises:
        ValueError: if a part is negative, a fraction is above 1, everything is zero, or the sum is
            above 1 (fractions) or ``max_tokens`` (tokens).
    """

    heavy: int | float = 0.1
    recent: int | float = 0.1
    sink: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_part("heavy", self.heavy)
        _check_part("recent", self.recent)
        if isinstance(self.sink, bool) or not isinstance(self.sink, int) or self.sink < 0:
            raise ValueError(
                f"sink={self.sink!r} is not a number of tokens; give an int of 0 or more."
            )
        if self.heavy == 0 and self.recent == 0:
            raise ValueError(
                f"heavy={self.heavy!r} and recent={self.recent!r} keep nothing; "
                "give at least one of them a value above 0."
            )
        fractions = sum(part for part in (self.heavy, self.recent) if isinstance(part, float))
        if fractions > 1 + _ROUNDING_SLACK:
            raise ValueError(
                f"heavy={self.heavy!r} and recent={self.recent!r} add up to {fractions:g} of the "
                "prompt; fractions must add up to at most 1."
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(
                f"max_tokens={self.max_tokens!r} leaves no room; give at least 1, or None for no "
                "limit."
            )
        if not isinstance(self.heavy, float) and not isinstance(self.recent, float):
            self._check_total(TokenBudget(self.sink, self.heavy, self.recent))

    def resolve(self, prompt_length: int) -> TokenBudget:
        """Turns fractions into tokens for a prompt.

        Args:
            prompt_length: real tokens of the prompt, padding not counted.

        Returns:
            The budget in tokens. A fraction above 0 keeps at least one token.

        Raises:
            ValueError: if the sum is above ``max_tokens``.
        """
        tokens = TokenBudget(
            sink=self.sink,
            heavy=_to_tokens(self.heavy, prompt_length),
            recent=_to_tokens(self.recent, prompt_length),
        )
        self._check_total(tokens)
        return tokens

    def _check_total(self, tokens: TokenBudget) -> None:
        if self.max_tokens is not None and tokens.total > self.max_tokens:
            raise ValueError(
                f"sink + heavy + recent = {tokens.sink} + {tokens.heavy} + {tokens.recent} = "
                f"{tokens.total} tokens is above max_tokens={self.max_tokens}; lower the budget or "
                "raise max_tokens."
            )


def _check_part(name: str, value: int | float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(
            f"{name}={value!r} is not a budget; give an int (tokens) or a float (fraction)."
        )
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        raise ValueError(
            f"{name}={value!r} is not a fraction of the prompt; give a float in (0, 1], "
            "or an int for a number of tokens."
        )
    if value < 0:
        raise ValueError(f"{name}={value!r} is negative; give a number of tokens of 0 or more.")


def _to_tokens(value: int | float, prompt_length: int) -> int:
    if not isinstance(value, float):
        return value
    if value == 0:
        return 0
    return max(1, int(value * prompt_length + _ROUNDING_SLACK))
