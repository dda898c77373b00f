"""The H2O cache for transformers."""

from h2okv.cache.h2o_cache import H2OCache

__all__ = ["H2OCache"]
