"""The H2O cache for transformers."""

from h2okv.cache.argument import CACHE
from h2okv.cache.h2o_cache import H2OCache
from h2okv.cache.layer import CacheLayer

__all__ = ["CACHE", "CacheLayer", "H2OCache"]
