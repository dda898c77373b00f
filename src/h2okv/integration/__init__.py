"""How transformers models reach the H2O cache."""

from h2okv.integration.attention import register
from h2okv.integration.enable import enable, prefill, read_blocks, recipe_path

__all__ = ["enable", "prefill", "read_blocks", "recipe_path", "register"]

register()
