"""Generation with the H2O cache, as a recipe for ``generate(custom_generate=...)``."""

from typing import Any

import h2okv


def generate(
    model: Any,
    heavy: int | float = 0.1,
    recent: int | float = 0.1,
    sink: int = 0,
    policy: str = "h2o",
    scoring: str = "sum",
    decay: float | None = None,
    positions: Any = "original",
    prefill_chunk: int | None = None,
    kv_bits: int | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """Runs ``model.generate`` with an ``H2OCache`` and H2O attention.

    Args:
        model: the model; its attention is H2O's during the call and its own again afterwards.
        heavy: heavy hitters to keep: tokens (int) or a fraction of the prompt (float).
        recent: newest tokens to keep, given like ``heavy``.
        sink: first tokens to keep whatever their score, in tokens.
        policy: eviction policy, a name of ``h2okv.policy_names()``.
        scoring: what attention counts for: ``"sum"``, ``"mean"``, ``"decay"`` or ``"value_norm"``,
            as in ``H2OCache``.
        decay: with ``scoring="decay"``, the factor per later token.
        positions: ``"original"``, ``"rolling"`` or ``"clamped"``, as in ``H2OCache``.
        prefill_chunk: the most tokens of a block, as in ``H2OCache``; also the most tokens that
            pass the model at once.
        kv_bits: 8 or 4 keeps keys and values in so many bits, as in ``H2OCache``.
        past_key_values: an ``H2OCache`` to go on with (mutated); a new one if ``None``.
        **kwargs: what ``generate`` takes.

    Returns:
        What ``model.generate`` returns.

    Raises:
        ValueError: if the budget makes no sense or the model is not supported.
    """
    if past_key_values is None:
        past_key_values = h2okv.H2OCache(
            model.config,
            heavy=heavy,
            recent=recent,
            sink=sink,
            policy=policy,
            scoring=scoring,
            decay=decay,
            positions=positions,
            prefill_chunk=prefill_chunk,
            kv_bits=kv_bits,
        )
    elif not isinstance(past_key_values, h2okv.H2OCache):
        raise ValueError(
            f"past_key_values is a {type(past_key_values).__name__}; this recipe goes on with an "
            "h2okv.H2OCache, or makes one if past_key_values is left out."
        )
    prompt = kwargs.get("input_ids", kwargs.get("inputs"))
    # The rows of a batch may be padded, and are then cut inside the layers, each by its own tokens.
    if past_key_values.prefill_chunk is not None and prompt is not None and prompt.shape[0] == 1:
        kwargs.setdefault("prefill_chunk_size", past_key_values.prefill_chunk)
        past_key_values.expect(prompt.shape[1])
    with h2okv.enable(model):
        return model.generate(past_key_values=past_key_values, **kwargs)
