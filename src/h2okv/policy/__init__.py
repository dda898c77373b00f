"""Which cache entries stay: one rule, one class, found by its name."""

from __future__ import annotations

import copy
import importlib
import os
import sys

from h2okv.config import BEST
from h2okv.policy.baselines import RULES, Fixed, Random, SnapKV
from h2okv.policy.rule import H2O, Rule
from h2okv.policy.scoring import SCORINGS, BlockView, Decay, Inputs, Scoring
from h2okv.records import unknown_name

__all__ = [
    "BlockView", "Fixed", "H2O", "Inputs", "Policy", "Rule", "Scoring", "SnapKV", "get_rule",
    "get_scoring", "policy_names", "register_policy",
]  # fmt: skip

_RULES = {rule.name: rule for rule in RULES}
_SCORINGS = {scoring.name: scoring for scoring in SCORINGS}
_SEED_LIMIT = 1 << 32

Policy = Rule  # the former name


def policy_names() -> tuple[str, ...]:
    """Return the names that ``H2OCache(policy=...)`` takes."""
    return tuple(_RULES)


def register_policy(rule: type[Rule]) -> type[Rule]:
    """Make a rule known by its ``name``; usable as a class decorator.

    Args:
        rule: the class; its instances are made without arguments.

    Returns:
        The class itself.

    Raises:
        ValueError: if the name belongs to another class already.
    """
    present = _RULES.setdefault(rule.name, rule)
    if present is not rule:
        raise ValueError(
            f"policy name {rule.name!r} is taken by {present.__name__}; choose another name."
        )
    return rule


def get_rule(
    policy: str | Rule, seed: int = 0, scoring: str = "sum", decay: float | None = None
) -> Rule:
    """Make a rule from its name, or take a copy of an object, with its scoring."""
    if isinstance(seed, bool) or not isinstance(seed, int) or abs(seed) >= _SEED_LIMIT:
        raise ValueError(f"seed must be an int below {_SEED_LIMIT} (2**32), got {seed!r}.")
    if isinstance(policy, Rule):
        rule = copy.copy(policy)
    else:
        kind = load_rule(policy) if ":" in policy else _RULES.get(policy)
        if kind is None:
            raise unknown_name("policy", policy, (*_RULES, BEST))
        rule = Random(seed) if kind is Random else kind()
    if seed and seed != getattr(rule, "seed", 0):
        shown = repr(policy) if isinstance(policy, str) else f"{type(policy).__name__}(...)"
        raise ValueError(
            f"seed={seed} has no effect with policy={shown}; leave it out, or give it with "
            "policy='random'."
        )
    # A rule object may bring a scoring of its own.
    if (scoring, decay) != ("sum", None) or type(rule).scoring is Rule.scoring:
        rule.scoring = get_scoring(scoring, decay)
    return rule


def load_rule(spec: str) -> type[Rule]:
    """Import a rule named ``module:Class``, of the working directory or an installed package."""
    module_name, _, class_name = spec.partition(":")
    remedy = "give module:Class of a file in this folder, such as my_rules:Oldest"
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"policy {spec!r} cannot be imported ({error}); {remedy}.") from error
    if not (isinstance(kind, type) and issubclass(kind, Rule)):
        raise ValueError(f"policy {spec!r} must be a subclass of h2okv.Rule, got {kind!r}.")
    return kind


def get_scoring(name: str, decay: float | None = None) -> Scoring:
    """Make a scoring from its name."""
    kind = _SCORINGS.get(name)
    if kind is None:
        raise unknown_name("scoring", name, _SCORINGS)
    if decay is None:
        return kind()
    if not kind.takes_decay:
        raise ValueError(
            f"decay={decay!r} has no effect with scoring={name!r}; add scoring='decay' or "
            "'value_norm', or leave it out."
        )
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay <= 1:
        raise ValueError(
            f"decay must be a factor above 0 and up to 1 such as {Decay.default_decay}, got "
            f"{decay!r}."
        )
    return kind(float(decay))
