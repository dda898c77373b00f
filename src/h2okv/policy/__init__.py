"""Which cache entries stay: one policy, one class, one method."""

from h2okv.policy.base import Policy
from h2okv.policy.registry import get_policy, policy_names, register_policy

__all__ = ["Policy", "get_policy", "policy_names", "register_policy"]
