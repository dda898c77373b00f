"""Input that would give a wrong text, and the sentence that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from h2okv.ops.packing import BITS

if TYPE_CHECKING:
    from h2okv.cache.positions import PositionRule
    from h2okv.cache.scored import ScoredLayer
    from h2okv.policy import Policy
    from h2okv.policy.scoring import Scoring


def check_kv_bits(kv_bits: int | None) -> None:
    """Refuses numbers of bits that there is no format for.

    Args:
        kv_bits: what the user asked for.

    Raises:
        ValueError: naming what there is.
    """
    if kv_bits is not None and (type(kv_bits) is not int or kv_bits not in BITS):
        raise ValueError(
            f"kv_bits={kv_bits!r} is no format of keys and values; give 8 or 4, or leave it out to "
            "keep them in the model's dtype."
        )


def check_policy(policy: Policy, rule: PositionRule, simulate: bool) -> None:
    """Refuses ways of running a policy that it was not made for.

    Args:
        policy: the eviction policy.
        rule: where entries sit and how long a block may be.
        simulate: whether a full cache is masked.

    Raises:
        ValueError: naming the remedy.
    """
    if policy.per_query and not simulate:
        raise ValueError(
            f"policy={policy.name!r} chooses anew for every query among all tokens, so nothing can "
            "be dropped; in Python add simulate=True, which keeps the whole cache and masks it."
        )
    if policy.prompt_only and rule.prefill_chunk is not None:
        raise ValueError(
            f"policy={policy.name!r} decides once, by the end of the whole prompt, so that it must "
            f"come as one block; leave out prefill_chunk={rule.prefill_chunk}, or use policy='h2o'."
        )
    if policy.prompt_only and rule.rolls:
        raise ValueError(
            f"policy={policy.name!r} keeps all that follows the prompt, so that ranks would leave "
            "the trained window too; use positions='original', or policy='h2o'."
        )


def check_whole_prompt(layer: ScoredLayer, length: int) -> None:
    """Refuses the first part of a prompt where a policy must see all of it.

    Args:
        layer: the layer that gets its first block.
        length: T.

    Raises:
        ValueError: if more of the prompt was announced.
    """
    if layer.policy.prompt_only and (layer.expected_length or length) > length:
        raise ValueError(
            f"policy={layer.policy.name!r} decides once, by the end of the whole prompt, and got "
            f"{length} of its {layer.expected_length} tokens; read it in one forward."
        )


def check_scoring(policy: Policy, scoring: Scoring) -> None:
    """Refuses a scoring that decides nothing.

    Args:
        policy: the eviction policy.
        scoring: what the user asked for.

    Raises:
        ValueError: if the policy does not look at scores, or only at those of its own window.
    """
    if not scoring.is_plain and policy.prompt_only:
        raise ValueError(
            f"scoring={scoring.name!r}: policy={policy.name!r} counts the attention of its own "
            "window of queries; leave it out, or use policy='h2o'."
        )
    if not scoring.is_plain and not policy.uses_scores:
        raise ValueError(
            f"scoring={scoring.name!r} has no effect with policy={policy.name!r}, which does not "
            "look at scores; leave it out, or use policy='h2o'."
        )


def check_match(layer: ScoredLayer, key_states: torch.Tensor) -> None:
    """Refuses keys of another batch or another model than the entries held.

    Args:
        layer: the layer that gets them.
        key_states: ``[B, H, T, D]``.

    Raises:
        ValueError: naming what differs.
    """
    batch, heads, _, size = key_states.shape
    if batch != layer.batch_size:
        raise ValueError(
            f"H2OCache holds a batch of {layer.batch_size} and got a batch of {batch}; "
            "call cache.reset() or make a new H2OCache."
        )
    held = (layer.num_kv_heads, layer.key_size, layer.dtype)
    if (heads, size, key_states.dtype) != held:
        raise ValueError(
            f"H2OCache holds layer {layer.layer_idx} of another model: (KV heads, head size, "
            f"dtype) = {held} and got {(heads, size, key_states.dtype)}; "
            "call cache.reset() or make a new H2OCache."
        )


def check_follows(
    layer: ScoredLayer,
    position_ids: torch.Tensor | None,
    real: torch.Tensor | None,
    length: int,
) -> None:
    """Refuses a later block that does not go on where the last one ended.

    ``generate(use_cache=False)`` reads the whole text anew at every step, which would count
    every token again. Reads the device, so it asks only for blocks of more than one token.

    Args:
        layer: the layer that gets the block.
        position_ids: ``[B, T]`` or ``[1, T]`` as the model got them, or ``None``.
        real: bool ``[B, T]``, False for padding; ``None`` if there is none.
        length: T.

    Raises:
        ValueError: if the block's positions do not follow the tokens seen.
    """
    if position_ids is None or position_ids.dim() != 2 or length == 1 or not layer.row_budgets:
        return
    last = position_ids.to(layer.device).amax(dim=1)
    new = torch.full_like(layer.num_real_tokens, length) if real is None else real.sum(dim=1)
    # Positions count the real tokens (generate) or all of them (a bare forward).
    follows = (last == layer.num_real_tokens + new - 1) | (new == 0)
    follows |= last == layer.cumulative_length + length - 1
    if not bool(follows.all()):
        row = int((~follows).nonzero()[0])
        raise ValueError(
            f"H2OCache has seen {int(layer.num_real_tokens[row])} tokens of row {row} and got "
            f"{int(new[row])} more that end at position {int(last.expand_as(new)[row])}, which "
            "does not go on from there; for a further turn call "
            "generate(**cache.next_turn(input_ids)) or give it the whole text, leave out "
            "use_cache=False, or call cache.reset() to read a new text."
        )


def check_placed(layer: ScoredLayer) -> None:
    """Refuses a forward whose positions nobody has set as the cache needs them.

    Args:
        layer: the layer that gets the block; its mark is taken off.

    Raises:
        ValueError: naming the remedy.
    """
    if not layer.is_placed:
        raise ValueError(
            f"positions={layer.rule.positions!r} changes the positions that this model gets; run "
            "it inside `with h2okv.enable(model):`."
        )
    layer.is_placed = False


def check_window(layer: ScoredLayer, length: int) -> None:
    """Refuses a block whose ranks would go past the positions that the model was trained on.

    Args:
        layer: the layer that gets the block.
        length: T.

    Raises:
        ValueError: naming the remedy.
    """
    window, chunk = layer.rule.window, layer.rule.prefill_chunk
    if window is None:
        return
    budget = max(tokens.total for tokens in layer.row_budgets)
    if budget >= window:
        raise ValueError(
            f"positions='rolling' with a budget of {budget} tokens leaves no room for a new one in "
            f"the model's window of {window}; lower heavy, recent or sink."
        )
    if length == 1:  # always finds room, and must not wait for the device
        return
    block = length if chunk is None else min(length, chunk)
    held = 0 if layer.positions is None else int((layer.positions >= 0).sum(dim=-1).max())
    # What is there when the last block comes.
    held = min(budget, held + length - block)
    if held + block > window:
        raise ValueError(
            f"positions='rolling' cannot place a block of {block} tokens after {held} entries in "
            f"the model's window of {window}; give H2OCache(prefill_chunk={window - budget}) or "
            "less."
        )


def check_finite(layer: ScoredLayer, sums: torch.Tensor) -> None:
    """Refuses attention that is not a number; for blocks, where a host sync is affordable.

    Args:
        layer: the layer that attended.
        sums: probabilities received in this block, fp32 ``[B, H, N]``.

    Raises:
        ValueError: if one of them is NaN or infinite.
    """
    if not bool(torch.isfinite(sums).all()):
        raise ValueError(
            f"attention of layer {layer.layer_idx} is not finite (NaN or infinity); check the "
            f"model's weights, or use a wider dtype than {layer.dtype}."
        )
