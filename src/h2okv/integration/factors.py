"""Measure the shares of a budget that a model's layers and heads need."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.cache.argument import CACHE
from h2okv.cache.layer import CacheLayer
from h2okv.config import BEST, BEST_HEAVY_FRACTION, CacheConfig, LayerBudgets
from h2okv.console import write_remark
from h2okv.integration.enable import input_device, prefill, restore_attention
from h2okv.integration.loading import context_of
from h2okv.records import first_line

_PROMPT, _FOLLOWING, _WINDOWS = 1024, 192, 4  # tokens of a window; windows of a text
WINDOW = _PROMPT + _FOLLOWING
_SINKS = CacheConfig(BEST).sink
_QUERIES_OF_A_GATE = 16
_AFTER_ALL = torch.iinfo(torch.int32).max


@contextmanager
def _threads_of_free_cores() -> Iterator[None]:
    """Leave out threads for whose cores other processes compete: short operations wait for all."""
    before = torch.get_num_threads()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    torch.set_num_threads(max(1, before - round(load)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_threads_of_free_cores()
@torch.inference_mode(False)
@torch.no_grad()
def measure_layer_budgets(
    model: PreTrainedModel,
    input_ids: Tensor,
    fraction: float = 0.17,
    least: float = 0.1,
    *,
    by_head: bool = False,
) -> LayerBudgets:
    """Measure the share of the budget that each layer needs, for ``H2OCache(layer_budgets=...)``.

    All layers compete for the same entries by their effect on the attention's output: the square
    of the attention that an entry may expect (`scoring="expected"`) times the norm of its value.
    Heads compete a second time by their effect on the predictions (`losses_by_entries`), and a
    head's factor is the mean of both. The result depends on the model more than on the text, so
    one measurement for each model is enough.

    Args:
        model: a loaded model; by head its attention is changed for the call.
        input_ids: int ``[1, T]``, a text of the kind that will be read, of several thousand tokens.
            At most four windows are read, of 1,024 tokens each and 192 more by head. Windows of
            different kinds of text give factors that hold for more texts.
        fraction: heavy hitters to divide, as a fraction of the text.
        least: guaranteed fraction of the equal share for every layer, or head.
        by_head: let all KV heads of all layers compete, not only the layers.

    Returns:
        A factor for each layer with H2O entries, or a tuple of one for each of its KV heads; their
        mean is 1.

    Raises:
        ValueError: if the text is too short to divide anything, or the model is not supported.
    """
    total = input_ids.shape[1]
    longest = min(total, context_of(model.config) or total)
    following = min(_FOLLOWING, longest // 6) if by_head else 0
    length = min(_PROMPT, longest - following)
    share = int(fraction * length)
    floor = int(least * share)
    if not 0 < fraction < 1 or not 0 <= least <= 1 or share - floor < 1:
        raise ValueError(
            f"a text of {longest} tokens, fraction={fraction:g} and least={least:g} leave nothing"
            " to divide among the layers; give a text of a thousand tokens."
        )
    recent = int(share / BEST_HEAVY_FRACTION) - share
    windows = list(_windows(input_ids, length + following))
    prompts = [_Prompt.read(model, window[:, :length], recent) for window in windows]
    sizes = [len(order) for order in prompts[0].orders.values()]
    gains = torch.stack([prompt.effects for prompt in prompts]).mean(0)
    if not by_head:
        means = torch.stack([heads.mean(0) for heads in gains.split(sizes)])
        return tuple(round(factor, 4) for factor in _divide(means, floor, share).tolist())
    factors = _divide(gains, floor, share)
    try:
        losses = []
        for window, prompt in zip(windows, prompts, strict=True):
            by_layer = losses_by_entries(model, window, prompt.orders, cache=prompt.cache)
            losses.append(torch.cat(list(by_layer.values())))
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        write_remark(f"note: the heads are measured by their attention alone ({first_line(error)})")
    else:
        # Recent tokens and sinks are kept anyway.
        mean = torch.stack(losses).mean(0)[:, min(recent + _SINKS, length - 1) :]
        factors = (factors + _divide(_slopes(mean), floor, share)) / 2
    rounded = iter([round(factor, 4) for factor in factors.tolist()])
    return tuple(tuple(islice(rounded, size)) for size in sizes)


def _windows(input_ids: Tensor, length: int) -> Iterator[Tensor]:
    """Yield a few windows of a text, spread over it; they overlap in a short one."""
    spare = input_ids.shape[1] - length
    count = min(_WINDOWS, 1 + spare // _FOLLOWING)
    for number in range(count):
        start = spare * number // max(1, count - 1)
        yield input_ids[:, start : start + length]


@dataclass(frozen=True)
class _Prompt:
    """What a full cache says about the entries of a prompt."""

    effects: Tensor  # [heads of all layers, T]: of each entry on the output, the largest first
    orders: dict[int, Tensor]  # by layer, [H, T]: positions, the first to be dropped last
    cache: DynamicCache | None  # of the prompt, where it can be had without another reading

    @classmethod
    def read(cls, model: PreTrainedModel, input_ids: Tensor, recent: int) -> _Prompt:
        """Read a prompt; its `recent` newest tokens do not compete, as every head keeps them."""
        length = input_ids.shape[1]
        cache = H2OCache(model.config, policy="full", scoring="expected")
        layers = {n: layer for n, layer in enumerate(cache.layers) if isinstance(layer, CacheLayer)}
        for layer in layers.values():
            # Factors by means are worse (docs/results/quality.md); this is done once for a model.
            layer.heads_of_mean = 1
        prefill(model, input_ids, cache, torch.ones_like(input_ids))
        effects, orders = [], {}
        for number, layer in layers.items():
            state = layer.state
            assert state.value_weights is not None
            is_empty = state.positions[0] < 0
            is_recent = state.positions[0] >= length - recent
            effect = state.scores[0].square() * state.value_weights[0]
            effect = effect.masked_fill(is_recent | is_empty, 0.0)
            effects.append(effect.sort(-1, descending=True).values[:, :length].cpu())
            is_kept = is_recent | (state.positions[0] < _SINKS)
            rank = state.scores[0].masked_fill(is_kept, torch.inf)
            rank = rank.masked_fill(is_empty, -torch.inf)
            best = rank.argsort(-1, descending=True)[:, :length]
            orders[number] = state.positions[0].gather(-1, best).long()
        return cls(torch.cat(effects), orders, _full_cache(model, cache))


def _full_cache(model: PreTrainedModel, cache: H2OCache) -> DynamicCache | None:
    """Return a cache that evicted nothing as transformers' own; ``None`` if it holds latents."""
    result = DynamicCache(config=model.config)
    if len(result.layers) != len(cache.layers):
        return None
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, CacheLayer):
            if type(layer) is not type(result.layers[number]):
                return None
            result.layers[number] = layer
            continue
        states = [t for t in (layer.state.keys, layer.state.values) if isinstance(t, Tensor)]
        if not layer.state.has_values or len(states) < 2:
            return None
        order = layer.state.positions.masked_fill(layer.state.positions < 0, _AFTER_ALL).argsort(-1)
        order = order[..., : cache.num_seen_tokens].unsqueeze(-1)
        keys, values = (
            tensor.gather(2, order.expand(-1, -1, -1, tensor.shape[-1])) for tensor in states
        )
        result.update(keys, values, number)
    return result


def _divide(gains: Tensor, floor: int, share: int) -> Tensor:
    """Divide a budget among rows by what each further entry gains.

    Args:
        gains: float ``[rows, N]``, the largest first.
        floor: entries that every row gets.
        share: entries of a row in the mean, more than `floor`.

    Returns:
        Each row's number of entries as a fraction of `share`, ``[rows]``.
    """
    candidates = gains[:, floor:]
    chosen = candidates.flatten().topk((share - floor) * len(gains)).indices
    counts = torch.bincount(chosen // candidates.shape[1], minlength=len(gains))
    return (floor + counts) / share


def _slopes(losses: Tensor) -> Tensor:
    """Return what each further entry saves of the losses by entries kept, ``[rows, N]``.

    A row's losses are replaced by their lower convex hull, because a head may save nothing until it
    gets several entries more. The last entry saves the last loss.
    """
    rows = []
    for row in torch.nn.functional.pad(losses, (0, 1)).tolist():
        corners = [0]
        for right in range(1, len(row)):
            while len(corners) > 1:
                left, middle = corners[-2:]
                before, after = row[middle] - row[left], row[right] - row[middle]
                if before * (right - middle) < after * (middle - left):
                    break
                corners.pop()
            corners.append(right)
        slopes: list[float] = []
        for left, right in pairwise(corners):
            slopes += [(row[left] - row[right]) / (right - left)] * (right - left)
        rows.append(slopes)
    return torch.tensor(rows)


# --- what predictions lose when a head drops entries ----------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def losses_by_entries(
    model: PreTrainedModel,
    input_ids: Tensor,
    orders: Mapping[int, Tensor],
    rounds: int = 2,
    seed: int = 0,
    cache: DynamicCache | None = None,
) -> dict[int, Tensor]:
    """Estimate the divergence of the predictions if each head drops the end of its order.

    A gate is added to the attention logits of each entry of a KV head. The gradient of the
    log-likelihood by the gates says what the predictions after the prompt lose with an entry. The
    labels are drawn from the predictions themselves, because the expected square of such a
    gradient is the Fisher information: half of it is the KL divergence to second order. The
    gradients of all dropped entries are summed before they are squared, as entries cancel out or
    add up. A span of queries has its gates for itself: one backward pass is many samples.

    Args:
        model: a loaded model; its attention is changed for the call.
        input_ids: int ``[1, T + N]``, the prompt of T tokens and the text that follows it.
        orders: for each layer with H2O entries, the prompt's positions by rank, the first to be
            dropped last: int ``[H, T]``.
        rounds: backward passes, each with other labels.
        seed: of the labels.
        cache: of the prompt, mutated; read if not given.

    Returns:
        For each layer float ``[H, T]``: the divergence, in nats a token, if only the entries before
        that rank are kept. It never grows from one rank to the next by more than the noise.

    Raises:
        ValueError: if the model's attention takes no mask, or has no gradients.
    """
    length = next(iter(orders.values())).shape[-1]
    following = input_ids[:, length:].to(input_device(model))
    generator = torch.Generator(following.device).manual_seed(seed)
    if cache is None:
        cache = DynamicCache(config=model.config)
        prompt = input_ids[:, :length].to(following.device)
        model(prompt, logits_to_keep=1, **{CACHE: cache})
    spans = -(-following.shape[1] // _QUERIES_OF_A_GATE)
    gates, losses = {}, {}
    for number, order in orders.items():
        gates[number] = torch.zeros(order.shape[0], spans, length, device=following.device)
        losses[number] = torch.zeros(order.shape, device=following.device)
    with _gated(model, gates), torch.enable_grad():
        for gate in gates.values():
            gate.requires_grad_()
        logits = model(following, **{CACHE: cache}).logits[0].float()
        log_p = logits.log_softmax(-1)
        for number in range(rounds):
            labels = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
            gradients = torch.autograd.grad(
                log_p.gather(-1, labels).sum(), list(gates.values()),
                retain_graph=number < rounds - 1, allow_unused=True,
            )  # fmt: skip
            for (layer, order), gradient in zip(orders.items(), gradients, strict=True):
                if gradient is None or not gradient.isfinite().all():
                    raise ValueError(f"layer {layer} has no gradient of its attention's mask")
                indices = order[:, None].expand_as(gradient).to(gradient.device)
                dropped = gradient.gather(-1, indices).flip(-1).cumsum(-1).flip(-1)
                losses[layer] += dropped.square().sum(1) / (2 * rounds * following.shape[1])
    return {layer: values.cpu() for layer, values in losses.items()}


@contextmanager
def _gated(model: PreTrainedModel, gates: Mapping[int, Tensor]) -> Iterator[None]:
    """Add gates to the masks of the layers' attention, which runs in plain PyTorch meanwhile."""

    def gate(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is None:
            raise ValueError(f"{type(module).__name__} takes no attention mask")
        values = gates[module.layer_idx]
        heads, spans, length = values.shape
        queries, keys = mask.shape[-2:]
        values = values.repeat_interleave(_QUERIES_OF_A_GATE, dim=1)[:, :queries]
        values = torch.nn.functional.pad(values, (0, keys - length))
        group = model.config.get_text_config().num_attention_heads // heads
        values = values.repeat_interleave(group, dim=0)
        return args, kwargs | {"attention_mask": mask + values.to(mask.dtype)}

    with ExitStack() as undo:
        restore_attention(model, undo)
        model.set_attn_implementation("eager")
        for parameter in model.parameters():
            if parameter.requires_grad:
                undo.callback(parameter.requires_grad_)
                parameter.requires_grad_(False)
        for module in model.modules():
            if getattr(module, "layer_idx", None) in gates and hasattr(module, "is_causal"):
                undo.callback(module.register_forward_pre_hook(gate, with_kwargs=True).remove)
        yield
