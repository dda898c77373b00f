"""Which cache entries stay: one policy, one class, found by its name."""

from __future__ import annotations

from h2okv.config import BEST
from h2okv.policy.base import Policy
from h2okv.policy.baselines import FullPolicy, RandomPolicy, RecentPolicy, SinkRecentPolicy
from h2okv.policy.h2o import H2OPolicy, HeavyPolicy, TopKHeavyPolicy, TopKPolicy
from h2okv.policy.keydiff import KeyDiffPolicy
from h2okv.policy.snapkv import SnapKVPolicy
from h2okv.policy.strided import FixedHeavyPolicy, FixedPolicy, StridedHeavyPolicy, StridedPolicy
from h2okv.records import unknown_name

__all__ = ["Policy", "get_policy", "policy_names", "register_policy"]

_POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        FullPolicy,
        RecentPolicy,
        SinkRecentPolicy,
        H2OPolicy,
        HeavyPolicy,
        RandomPolicy,
        StridedPolicy,
        StridedHeavyPolicy,
        FixedPolicy,
        FixedHeavyPolicy,
        SnapKVPolicy,
        KeyDiffPolicy,
        TopKPolicy,
        TopKHeavyPolicy,
    )
}
_SEED_LIMIT = 1 << 32


def policy_names(*, dropping: bool = False) -> tuple[str, ...]:
    """Returns the names that ``H2OCache(policy=...)`` takes.

    Args:
        dropping: leave out those that need the whole cache and so ``simulate=True``.
    """
    return tuple(name for name, policy in _POLICIES.items() if not (dropping and policy.per_query))


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Makes a policy known by its ``name``; usable as a class decorator.

    Args:
        policy: the class; its instances are made without arguments.

    Returns:
        The class itself.

    Raises:
        ValueError: if the name belongs to another class already.
    """
    known = _POLICIES.setdefault(policy.name, policy)
    if known is not policy:
        raise ValueError(
            f"policy name {policy.name!r} is taken by {known.__name__}; choose another name."
        )
    return policy


def get_policy(policy: str | Policy, seed: int = 0) -> Policy:
    """Makes a policy from its name, or takes an object as it is; refuses a seed of no use."""
    if isinstance(seed, bool) or not isinstance(seed, int) or abs(seed) >= _SEED_LIMIT:
        raise ValueError(f"seed={seed!r} is no seed; give an int below {_SEED_LIMIT} (2**32).")
    if isinstance(policy, Policy):
        made = policy
    else:
        found = _POLICIES.get(policy)
        if found is None:
            raise unknown_name("policy", policy, (*_POLICIES, BEST))
        made = RandomPolicy(seed) if found is RandomPolicy else found()
    if seed and seed != getattr(made, "seed", 0):
        shown = repr(policy) if isinstance(policy, str) else f"{type(policy).__name__}(...)"
        raise ValueError(
            f"seed={seed} has no effect with policy={shown}; leave it out, or give it with "
            "policy='random'."
        )
    return made
