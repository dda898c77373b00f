"""How transformers models reach the H2O cache."""

from h2okv.integration.attention import register
from h2okv.integration.enable import enable, recipe_path
from h2okv.integration.prefill import prefill

__all__ = ["enable", "prefill", "recipe_path", "register"]

register()
