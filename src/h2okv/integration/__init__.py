"""How transformers models reach the H2O cache."""

from h2okv.integration.enabling import enable
from h2okv.integration.hf import register
from h2okv.integration.reading import prefill
from h2okv.integration.recipe import recipe_path

__all__ = ["enable", "prefill", "recipe_path", "register"]
