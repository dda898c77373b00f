"""Generation with the H2O cache, as a recipe for ``generate(custom_generate=...)``."""

import inspect
from typing import Any

import h2okv
from h2okv.cache.argument import CACHE

_OPTIONS = tuple(inspect.signature(h2okv.H2OCache).parameters)[1:]


def generate(model: Any, past_key_values: Any = None, cache: Any = None, **kwargs: Any) -> Any:
    """Runs ``model.generate`` with an ``H2OCache`` and H2O attention.

    Args:
        model: the model; its attention is H2O's during the call and its own again afterwards.
        past_key_values: an ``H2OCache`` to go on with (mutated); a new one if ``None``.
        cache: the same, as transformers calls it from 5.24 on.
        **kwargs: what ``generate`` takes, and the options of a new ``H2OCache``: ``heavy``,
            ``recent``, ``simulate`` and all others.

    Returns:
        What ``model.generate`` returns.

    Raises:
        ValueError: if the budget makes no sense, the model is not supported, or options come with
            a cache that has its own.
    """
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    given = "past_key_values" if cache is None else "cache"
    cache = past_key_values if cache is None else cache
    if cache is None:
        cache = h2okv.H2OCache(model, **options)
    elif not isinstance(cache, h2okv.H2OCache):
        raise ValueError(
            f"{given} is a {type(cache).__name__}; this recipe goes on with an "
            f"h2okv.H2OCache, or makes one if {given} is left out."
        )
    elif options:
        raise ValueError(
            f"{', '.join(options)} would have no effect on the cache in {given}; give them to that "
            f"H2OCache, or leave {given} out."
        )
    prompt, mask = kwargs.get("input_ids", kwargs.get("inputs")), kwargs.get("attention_mask")
    # Rows that may be padded are cut inside the layers, each by its own tokens.
    is_cut = cache.prefill_chunk is not None and (mask is None or bool(mask.all()))
    if is_cut and prompt is not None and prompt.shape[0] == 1:
        kwargs.setdefault("prefill_chunk_size", cache.prefill_chunk)
        cache.expect(prompt.shape[1])
    with h2okv.enable(model):
        return model.generate(**{CACHE: cache}, **kwargs)
