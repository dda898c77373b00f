"""How transformers models reach the H2O cache."""

from h2okv.integration.enabling import enable
from h2okv.integration.hf import register

__all__ = ["enable", "register"]
