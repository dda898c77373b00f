"""Generation with the H2O cache, as a recipe for ``generate(custom_generate=...)``."""

import inspect
from typing import Any

import h2okv
from h2okv.cache.argument import CACHE

_OPTIONS = tuple(inspect.signature(h2okv.H2OCache).parameters)[1:]


def generate(
    inputs: Any = None, *, model: Any, past_key_values: Any = None, cache: Any = None, **kwargs: Any
) -> Any:
    """Run ``model.generate`` with an ``H2OCache`` and H2O attention.

    Args:
        inputs: tokens ``[B, T]``, or ``None`` if `kwargs` have them as ``input_ids``.
        model: the model; its attention is replaced during the call and restored afterwards.
        past_key_values: the text of a new cache, such as ``"best:20%"``; or an ``H2OCache`` to
            continue with (mutated); ``None`` for a new one of the options.
        cache: the same, by its name in transformers since 5.24.
        **kwargs: arguments of ``generate``, and the options of a new ``H2OCache``: ``heavy``,
            ``recent`` and all others.

    Returns:
        The result of ``model.generate``.

    Raises:
        ValueError: if the text or the budget is invalid, the model is not supported, or options are
            passed together with a cache, or say what the text says.
    """
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    argument = "past_key_values" if cache is None else "cache"
    cache = past_key_values if cache is None else cache
    if cache is None or isinstance(cache, str):
        cache = h2okv.H2OCache(model, *([cache] if cache else []), **options)
    elif not isinstance(cache, h2okv.H2OCache):
        raise ValueError(
            f"{argument} is a {type(cache).__name__}; this recipe makes a cache from "
            f"a text such as {argument}='best:20%', or goes on with an h2okv.H2OCache."
        )
    elif options:
        raise ValueError(
            f"{', '.join(options)} would have no effect on the cache in {argument}; give them to "
            f"that H2OCache, or leave {argument} out."
        )
    prompt, mask = kwargs.get("input_ids", inputs), kwargs.get("attention_mask")
    # Rows that may be padded are cut into blocks inside the layers, each by its own tokens.
    is_cut = cache.read_chunk is not None and (mask is None or bool(mask.all()))
    if is_cut and prompt is not None and prompt.shape[0] == 1:
        kwargs.setdefault("prefill_chunk_size", cache.read_chunk)
        cache.expect(prompt.shape[1])
    with h2okv.enable(model):
        # The class's: of a model whose folder has this recipe, `model.generate` is this function.
        return type(model).generate(model, inputs, **{CACHE: cache}, **kwargs)
