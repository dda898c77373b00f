"""Which models and inputs are supported, and what must always hold."""

from __future__ import annotations

import copy
import math
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from h2okv.cache.argument import CACHE
from h2okv.cache.rope import BY_LENGTH, ranks_of
from h2okv.ops.decode import protected_entries
from h2okv.policy.h2o import H2OPolicy

if TYPE_CHECKING:
    from h2okv.cache.layer import CacheLayer
    from h2okv.cache.rope import PositionRule
    from h2okv.cache.slot_state import SlotState
    from h2okv.config import CacheConfig
    from h2okv.policy import Policy
    from h2okv.policy.scoring import Scoring


_REASONS = tomllib.loads(Path(__file__).with_name("refused.toml").read_text(encoding="utf-8"))
REFUSED = {kind: reason for reason, kinds in _REASONS.items() for kind in kinds.split()}
"""Model types that are known not to work, with the reason."""
_OWN_ATTENTION, _INDEXER = REFUSED["gptj"], REFUSED["minimax_m3_vl_text"]


def check_model(model: PreTrainedModel | PreTrainedConfig) -> None:
    """Refuses a model, or a config, that H2O cannot serve exactly.

    Args:
        model: a loaded model or its config.

    Raises:
        ValueError: naming the model type and the reason.
    """
    config = config_of(model)
    text_config = config.get_text_config(decoder=True)
    reason = _refusal(config, text_config)
    if reason is not None:
        raise ValueError(
            f"model type {text_config.model_type!r} is not supported: {reason}; "
            "use transformers' own cache for it, or a model of docs/support-table.md."
        )


def unwrap(model: Any) -> PreTrainedModel:
    """The model inside what `torch.compile` or PEFT has made of it."""
    inner = model
    while not isinstance(inner, PreTrainedModel):
        _check_adapters(inner)
        if "_orig_mod" in getattr(inner, "_modules", {}):
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        else:
            raise ValueError(
                f"model={type(model).__name__} is no model of transformers; give a "
                "PreTrainedModel, or one that torch.compile or PEFT made of it."
            )
    return inner


def check_callers() -> None:
    """Refuse a forward that comes through prompt learning, however the cache was made.

    The model itself does not know the wrapper whose tokens it gets, so the callers are asked.
    """
    frame = sys._getframe() if "peft" in sys.modules else None
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("peft."):
            _check_adapters(frame.f_locals.get("self"))
        frame = frame.f_back


def _check_adapters(model: Any) -> None:
    """Refuse PEFT's prompt learning: prefix tuning, prompt tuning, p-tuning."""
    adapters = getattr(model, "active_peft_config", None)
    is_prompt_learning = getattr(adapters, "is_prompt_learning", False)
    if is_prompt_learning and not getattr(model, "_adapters_disabled", False):
        kind = str(getattr(adapters.peft_type, "value", adapters.peft_type))
        raise ValueError(
            f"prompt learning (PEFT's {kind}) puts tokens or keys of its own before the text, and "
            "with some versions of transformers again at every step; an H2OCache would evict text "
            "for them. Use transformers' own cache for this model, or LoRA or IA3."
        )


def config_of(model: Any) -> PreTrainedConfig:
    """The config itself, or that of a model."""
    return model if isinstance(model, PreTrainedConfig) else unwrap(model).config


def _refusal(config: PreTrainedConfig, text_config: PreTrainedConfig) -> str | None:
    """The reason why a model cannot be served; ``None`` if nothing speaks against it."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, and H2O is defined for decoder-only models"
    for candidate in (text_config, config):
        if candidate.model_type in REFUSED:
            return REFUSED[candidate.model_type]
    if not getattr(text_config, "is_causal", True):
        return "its config says is_causal=False, and H2O is defined for causal attention"
    if getattr(text_config, "kv_lora_rank", None):
        return (
            "it caches one compressed latent for all heads (MLA), so that a head cannot drop a "
            "token that another one keeps"
        )
    sharing = getattr(text_config, "kv_sharing_modes", None) or ()
    if getattr(text_config, "num_kv_shared_layers", 0) or any(sharing):
        return (
            "some of its layers attend to the keys of another layer, which evicts by its own scores"
        )
    if "indexed_attention" in (getattr(text_config, "layer_types", None) or ()):
        return _INDEXER
    for candidate in (config, text_config):
        # Remote-code models are not in the mapping; nothing is known about them in advance.
        if type(candidate) in MODEL_FOR_CAUSAL_LM_MAPPING:
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(candidate)]
            if not model_class._can_set_attn_implementation():
                return _OWN_ATTENTION
    return None


def context_window(config: PreTrainedConfig) -> int | None:
    """The positions that a model was trained on; ``None`` without a limit."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def window_by_length(config: PreTrainedConfig) -> int | None:
    """Tells up to which length of the batch's longest text a model rotates its tokens alike."""
    # Dynamic scaling and LongRoPE take other frequencies beyond it, for all rows of the batch.
    text_config = config.get_text_config(decoder=True)
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    lengths = [
        part.get("original_max_position_embeddings")
        or getattr(text_config, "original_max_position_embeddings", None)
        or context_window(config)
        for part in kinds
        if part.get("rope_type") in BY_LENGTH
    ]
    return min((length for length in lengths if length), default=None)


def check_positions(config: PreTrainedConfig, positions: str, policy: Policy) -> None:
    """Refuses a way of placing entries that the model or the policy has not."""
    text_config = config.get_text_config(decoder=True)
    rotary = bool(getattr(text_config, "rope_parameters", None))
    kind = text_config.model_type
    if positions == "rolling" and not rotary:
        raise ValueError(
            f"positions='rolling': model type {kind!r} has no rotary positions (RoPE). Learned "
            "positions are part of what a key was made from and cannot be moved afterwards; use "
            "positions='clamped', or 'original' within the context window."
        )
    if positions == "rolling" and not policy.evicts:
        raise ValueError(
            f"positions='rolling': policy={policy.name!r} evicts nothing, so that ranks are the "
            "places in the text; use positions='original'."
        )
    if positions == "clamped" and (rotary or context_window(config) is None):
        raise ValueError(
            f"positions='clamped': model type {kind!r} has no learned positions to stop at; use "
            "positions='rolling' for rotary positions, or 'original'."
        )


def check_policy(policy: Policy, rule: PositionRule, scoring: Scoring, simulate: bool) -> None:
    """Refuses ways of running a policy that it was not made for, and scores that it ignores."""
    name = f"policy={policy.name!r}"
    if policy.per_query and not simulate:
        raise ValueError(
            f"{name} chooses anew for every query among all tokens, so nothing can be dropped; in "
            "Python add simulate=True, which keeps the whole cache and masks it."
        )
    if policy.prompt_only and rule.prefill_chunk is not None:
        raise ValueError(
            f"{name} decides once, by the end of the whole prompt, so that it must come as one "
            f"block; leave out prefill_chunk={rule.prefill_chunk}, or use policy='h2o'."
        )
    if policy.prompt_only and rule.rolls:
        raise ValueError(
            f"{name} keeps all that follows the prompt, so that ranks would leave the context "
            "window too; use positions='original', or policy='h2o'."
        )
    if policy.uses_keys and policy.uses_scores:
        raise ValueError(
            f"{name} has uses_keys, so that no scores are made of prompts, and uses_scores too; "
            "set uses_scores = False."
        )
    if policy.uses_keys and rule.rolls:
        raise ValueError(
            f"{name} compares keys, and where positions roll those of equal tokens differ by "
            "rounding alone; use positions='original', or policy='h2o'."
        )
    if not scoring.is_sum and (policy.prompt_only or not policy.uses_scores):
        counts = "counts the attention of its own window of queries"
        raise ValueError(
            f"scoring={scoring.name!r} has no effect with {name}, which "
            f"{counts if policy.prompt_only else 'does not look at scores'}; leave it out, or use "
            "policy='h2o'."
        )


def check_by_head(cache: CacheConfig, policy: Policy, config: PreTrainedConfig) -> None:
    """Refuses budgets that differ by head where heads must hold alike, or of another model."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    counts = sorted({len(own) for own in cache.layer_budgets or () if isinstance(own, Sequence)})
    if counts != [heads]:
        raise ValueError(
            f"layer_budgets has lists of {' and '.join(map(str, counts))} factors, and layers of"
            f" this model have {heads} KV heads; give one for each."
        )
    others = {
        f"policy={cache.policy!r}": not isinstance(policy, H2OPolicy),
        f"positions={cache.positions!r}": cache.positions == "rolling",
    }  # fmt: skip
    for name, is_other in others.items():
        if is_other:
            raise ValueError(
                f"{name} needs heads that hold alike, and layer_budgets has a factor for each; give"
                " one factor for each layer."
            )


def check_prompt(layer: CacheLayer, lengths: Sequence[int], block: int) -> None:
    """Refuses a first block, for prompts of so many real tokens, that cannot be read as asked."""
    if 0 in lengths:
        raise ValueError(
            f"sequence {lengths.index(0)} of the batch is all padding; give every sequence a "
            "token, or leave it out."
        )
    if layer.policy.prompt_only and (layer.expected_length or block) > block:
        raise ValueError(
            f"policy={layer.policy.name!r} decides once, by the end of the whole prompt, and got "
            f"{block} of its {layer.expected_length} tokens; read it in one forward."
        )
    check_pins(layer, lengths)


def parse_pins(spans: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Spans of tokens in their order, without those that are empty."""
    found = []
    if isinstance(spans, str) or not isinstance(spans, Iterable):
        raise ValueError(f"pins must be a list of (start, stop), got {spans!r}; give [(0, 4)].")
    for span in spans:
        ends = tuple(span) if isinstance(span, Sequence) else ()
        whole = [place for place in ends if isinstance(place, int) and not isinstance(place, bool)]
        if len(ends) != 2 or len(whole) != 2 or not 0 <= whole[0] <= whole[1]:
            shown = ends or span
            raise ValueError(
                f"pin {shown!r} is no span of tokens; give (start, stop) with 0 <= start <= stop,"
                " as in [(0, 4)]."
            )
        found += [(ends[0], ends[1])] if ends[0] < ends[1] else []
    found.sort()
    for before, after in pairwise(found):
        if after[0] < before[1]:
            raise ValueError(f"pins {before} and {after} overlap; give spans that do not.")
    return tuple(found)


def check_pins(layer: CacheLayer, lengths: Sequence[int]) -> None:
    """Refuses pins that are outside a prompt of so many tokens, or that heavy has no room for."""
    if not layer.pins or not layer.policy.evicts:
        return
    for length in lengths:
        budget = layer.policy.allocate_budget(layer.budget.resolve(length))
        count = sum(stop - max(start, min(stop, budget.sink)) for start, stop in layer.pins)
        if layer.pins[-1][1] > length:
            problem = f"pin {layer.pins[-1]} ends after the prompt of {length} tokens; shorten it."
        elif count > budget.heavy:
            problem = (
                f"{count} tokens are pinned and policy={layer.policy.name!r} keeps {budget.heavy}"
                " heavy ones of this prompt, pinned ones among them; raise heavy, or pin less."
            )
        else:
            continue
        raise ValueError(f"H2OCache: {problem}")


def check_match(layer: CacheLayer, key_states: Tensor) -> None:
    """Refuses keys ``[B, H, T, D]`` of another batch or model than the entries held."""
    batch, heads, _, size = key_states.shape
    if layer.device.type == "meta" and not key_states.is_meta:
        raise ValueError(
            "H2OCache was sized on the meta device and holds no numbers; call cache.reset() or make"
            " a new H2OCache."
        )
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
    layer: CacheLayer, position_ids: Tensor | None, real: Tensor | None, length: int
) -> None:
    """Refuses a later block that does not go on where the last one ended.

    ``generate(use_cache=False)`` reads the whole text anew at every step, which would count
    every token again. Reads the device, so it asks only for blocks of more than one token.
    """
    if position_ids is None or position_ids.dim() != 2 or length == 1 or not layer.holds_budgets:
        return
    last = position_ids.to(layer.device).amax(dim=1)
    new = torch.full_like(layer.state.num_real_tokens, length) if real is None else real.sum(dim=1)
    # Positions count the real tokens (generate) or all of them (a bare forward).
    follows = (last == layer.state.num_real_tokens + new - 1) | (new == 0)
    follows |= last == layer.cumulative_length + length - 1
    if not bool(follows.all()):
        row = int((~follows).nonzero()[0])
        seen = int(layer.state.num_real_tokens[row])
        raise ValueError(
            f"H2OCache has seen {seen} tokens of sequence {row} and got {int(new[row])} "
            f"more that end at position {int(last.expand_as(new)[row])}, which does not "
            "go on from there; for a further turn call "
            f"generate(**cache.next_turn(input_ids), {CACHE}=cache) or give it the whole text, "
            "leave out use_cache=False, or call cache.reset() to read a new text."
        )


def check_window(layer: CacheLayer, length: int) -> None:
    """Refuses a block whose ranks would go past the positions that the model was trained on."""
    window, chunk = layer.rule.window, layer.rule.prefill_chunk
    if window is None:
        return
    budget = max(tokens.total for tokens in layer.state.budgets)
    if budget >= window:
        raise ValueError(
            f"positions='rolling' with a budget of {budget} tokens leaves no room for a new one in "
            f"the model's window of {window}; lower heavy, recent or sink."
        )
    block = length if chunk is None else min(length, chunk)
    held = int((layer.state.positions >= 0).sum(dim=-1).max()) if layer.holds_entries else 0
    # What is there when the last block comes.
    held = min(budget, held + length - block)
    if held + block > window:
        raise ValueError(
            f"positions='rolling' cannot place a block of {block} tokens after {held} entries in "
            f"the model's window of {window}; give H2OCache(prefill_chunk={window - budget}) or "
            "less."
        )


def check_finite(layer: CacheLayer, sums: Tensor) -> None:
    """Refuses sums, or an output, that are no numbers; for blocks, which can afford a host sync."""
    # One number tells of all, in a third of the operations.
    if not math.isfinite(sums.sum(dtype=torch.float32)):
        raise ValueError(
            f"attention of layer {layer.layer_idx} is not finite (NaN or infinity); check the "
            f"model's weights, or use a wider dtype than {layer.dtype}."
        )


def check_integrity(layer: CacheLayer) -> None:
    """Checks a layer that holds entries against the contract."""
    layer.require_attention()
    held, newest = layer.state, layer.newest()
    positions, scores = held.by_head("positions", "scores")
    taken = positions >= 0
    counts = taken.sum(dim=-1, keepdim=True)
    expected = newest + 1
    if layer.policy.evicts:
        expected = torch.minimum(expected, held.total)
    ordered = positions.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    protected = protected_entries(positions, newest, held.sink, held.recent) & taken
    due = torch.minimum(newest + 1, held.sink + held.recent)
    problems = {
        "holds another number of entries than the budget": counts != expected,
        "holds a token twice": twice,
        "holds a token that it has not seen": positions > newest,
        "lost a sink or a recent token": protected.sum(dim=-1, keepdim=True) < due,
        "has a score that is negative or not a number": taken & ~(scores >= 0),
    }
    if held.ranks is not None:
        is_misplaced = taken & (held.ranks != ranks_of(positions))
        problems["holds an entry at another place than its rank"] = is_misplaced
    for problem, found in problems.items():
        if bool(found.any()):
            raise ValueError(f"layer {layer.layer_idx} {problem}; call cache.reset().")


def check_loaded(layer: CacheLayer, state: SlotState, seen: Tensor) -> None:
    """Refuses numbers from a file with which a step would read or write what is not there."""
    name, mask = f"layer {layer.layer_idx}", state.slot_mask
    if seen.shape != () or seen.dtype != torch.int64:
        raise ValueError(f"{name} does not tell how many tokens it has seen")
    if state.batch_size == 0 or state.num_slots == 0 or len(state.budgets) != state.batch_size:
        raise ValueError(f"{name} holds {state.batch_size} sequences, which are not those it tells")
    for part, tensor, is_wanted in (
        ("norms", state.norms, layer.scoring.uses_values),
        ("num_static", state.num_static, layer.has_static_mask),
        # A layer may have no rotary positions though the model has.
        ("ranks", state.ranks, state.ranks is not None and layer.rule.rolls and layer.drops),
        ("slot_mask", mask, mask is not None and layer.drops and layer.policy.is_bounded),
        ("owner", state.owner, layer.head_budgets is not None and layer.drops),
    ):
        if is_wanted != (tensor is not None):
            raise ValueError(f"{name} has {part}, or has none, against its options")
    for own in state.budgets:
        parts = astuple(own)
        if any(type(part) is not int or not 0 <= part < 1 << 60 for part in parts) or not own.total:
            raise ValueError(f"{name} has the budget {parts}, which is none")
        budgets = layer.head_budgets or (layer.budget,)
        wanted = [layer.policy.allocate_budget(budget.resolve(1)) for budget in budgets]
        if not layer.budget.is_relative and own != max(wanted, key=lambda one: one.total):
            raise ValueError(f"{name} has the budget {parts}, not its options'")
    told = copy.copy(state)
    told.set_budgets(state.budgets, layer.has_static_mask)
    # The largest of a layer's heads; what the others keep, only the file knows.
    total = state.total.amax(dim=1, keepdim=True)
    # Where whatever follows the prompt is kept, the budget has grown with it.
    grown = total - told.total if layer.policy.prompt_only else torch.zeros_like(told.total)
    differs = (state.sink != told.sink) | (state.recent != told.recent + grown) | (grown < 0)
    differs |= total != told.total + grown
    if state.num_static is not None:
        differs |= state.num_static != told.num_static
    numbers = [tensor for tensor in state.entry_tensors().values() if tensor.is_floating_point()]
    numbers += [] if state.norms is None else [state.norms]
    real, free, last = state.num_real_tokens, state.free_slot, state.num_slots - 1
    problems = {
        "contradicts its budgets": differs,
        "has seen another number of tokens": (real < 1) | (real > seen) | (seen >= 1 << 30),
        "has positions that are none": state.positions < -1,
        "holds numbers that are not finite": torch.stack([~n.isfinite().all() for n in numbers]),
        # Those that are pinned are infinite.
        "holds scores that are none": ~(state.scores >= 0),
    }
    if layer.drops:
        is_taken = (state.positions >= 0).gather(-1, free.clamp(0, last))
        problems["has a free slot that is none"] = (free < 0) | (free > last) | is_taken
        if state.owner is not None:
            of_head = ~state.of_others()
            is_free = of_head.gather(-1, free.clamp(0, last).view(*of_head.shape[:2], 1))
            counts = of_head.sum(dim=-1, keepdim=True)
            problems["has shared slots that are no head's"] = ~is_free | (counts > state.total + 1)
    else:
        problems["holds more tokens than it has seen"] = seen < state.num_slots
    if state.ranks is not None:
        problems["has ranks beyond its slots"] = (state.ranks < 0) | (state.ranks > last)
    for problem, found in problems.items():
        if bool(found.any()):
            raise ValueError(f"{name} {problem}")
