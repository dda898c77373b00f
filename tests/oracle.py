"""Caches that drop, and the oracle that masks what they would have dropped."""

import h2okv
from h2okv_lab.masking import MaskedCache


def cache_of(model, *amounts, masks=False, **options):
    """Return an empty cache for a model or its config."""
    return (MaskedCache if masks else h2okv.H2OCache)(model, *amounts, **options)
