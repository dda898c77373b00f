"""How transformers models reach the H2O cache."""

from h2okv.integration.attention import register
from h2okv.integration.enable import enable, prefill, read_blocks, recipe_path
from h2okv.integration.layer_budgets import measure_layer_budgets

__all__ = ["enable", "measure_layer_budgets", "prefill", "read_blocks", "recipe_path", "register"]

register()
