"""Measure the shares of a budget that a model's layers and heads need."""

from __future__ import annotations

import functools
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from timeit import repeat
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from h2okv.budget import LayerBudgets, checked_factors, flat_factors
from h2okv.cache import H2OCache
from h2okv.cache.argument import CACHE
from h2okv.cache.layer import CacheLayer
from h2okv.cache.validation import check_ids
from h2okv.config import BEST, BEST_HEAVY_FRACTION, CacheConfig
from h2okv.console import write_remark
from h2okv.integration.enable import input_device, prefill, restore_attention
from h2okv.models.loading import context_of
from h2okv.records import first_line

_PROMPT, FOLLOWING, _WINDOWS = 1024, 192, 4  # tokens of a window; windows of a text
WINDOW = _PROMPT + FOLLOWING
_SINKS = CacheConfig(BEST).sink
_QUERIES_OF_A_GATE = 4
_DRAWS = 4  # of the labels by which losses are estimated; at a tenth one decides too much
_AFTER_ALL = torch.iinfo(torch.int32).max
_SAME_FRACTION = 1e-6  # fractions that differ by less are one, up to rounding
NUM_PASSES = _WINDOWS * 3  # over the weights
_WORK = 2.0  # of the passes over a window, in products of a prompt with all weights
_TRIES = 6
# Numbers of weights whose copies in bf16 take less time than they save, and not too much memory.
_COPIED = range(1 << 24, 1 << 31)
_PRODUCT = 512  # rows and columns of the matrix product that is timed
_ATTENTION = 7  # what else a layer takes, in fp32 products of all entries with a hidden state


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


# Heavy hitters that shares are measured for: `BEST`'s of these budgets, and a tenth.
_BUDGETS = (0.03, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75)
FRACTIONS = tuple(sorted([0.1, *(BEST_HEAVY_FRACTION * budget for budget in _BUDGETS)]))


@dataclass(frozen=True)
class Shares:
    """Factors of a model for several fractions of the text, of one measurement."""

    fractions: tuple[float, ...]  # of heavy hitters, ascending
    by_layer: tuple[LayerBudgets, ...]  # for each fraction
    by_head: tuple[LayerBudgets, ...]  # likewise; empty if not measured

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Shares:
        """Read the fields of a JSON object; raise an error of any kind if it has none."""
        return cls(
            tuple(map(float, content["fractions"])),
            tuple(map(checked_factors, content["by_layer"])),
            tuple(map(checked_factors, content["by_head"])),
        )

    def factors(self, fraction: float, by_head: bool) -> LayerBudgets:
        """Return the factors for a fraction.

        Between two that were measured, the number of entries of each layer or head is interpolated;
        outside, the factors are those of the nearest.
        """
        measured = self.by_head if by_head else self.by_layer
        upper = bisect_left(self.fractions, fraction - _SAME_FRACTION)
        if upper == len(self.fractions):
            return measured[-1]
        right = self.fractions[upper]
        if upper == 0 or right - fraction < _SAME_FRACTION:
            return measured[upper]
        left = self.fractions[upper - 1]
        weight = (fraction - left) / (right - left)
        lower, higher = (1 - weight) * left / fraction, weight * right / fraction
        pairs = zip(*map(flat_factors, measured[upper - 1 : upper + 1]), strict=True)
        flat = iter([round(lower * a + higher * b, 4) for a, b in pairs])
        return tuple(
            tuple(islice(flat, len(layer))) if isinstance(layer, Sequence) else next(flat)
            for layer in measured[upper]
        )


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
    Heads compete a second time by their effect on the predictions (`losses_by_orders`), and a
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
    shares = measure_shares(model, input_ids, (fraction,), least, with_heads=by_head)
    return shares.factors(fraction, by_head)


@_threads_of_free_cores()
@torch.inference_mode(False)
@torch.no_grad()
def measure_shares(
    model: PreTrainedModel,
    input_ids: Tensor,
    fractions: Sequence[float] = FRACTIONS,
    least: float = 0.1,
    *,
    with_heads: bool = True,
    report: Callable[[float], None] = lambda done: None,
) -> Shares:
    """Measure factors for several fractions, by layer and by head, in one pass over the text.

    Arguments are those of `measure_layer_budgets`. Fractions for which the text is too short are
    left out, up to half of them. ``report`` gets the part of the work that is done.
    """
    check_ids(input_ids)
    longest = min(input_ids.shape[1], context_of(model.config) or input_ids.shape[1])
    following = min(FOLLOWING, longest // 6)
    length = min(_PROMPT, longest - following)
    usable = [d for fraction in fractions if (d := _Divided.of(fraction, least, length))]
    if 2 * len(usable) < len(fractions):
        raise ValueError(
            f"a text of {longest} tokens, fraction={fractions[-1]:g} and least={least:g} leave"
            " nothing to divide among the layers; give a thousand tokens, and shares from 0 to 1."
        )
    windows = list(_windows(input_ids, length + following))
    gains: list[list[Tensor]] = [[] for _ in usable]
    losses: list[list[Tensor]] = [[] for _ in usable]
    passes = len(windows) * (1 + with_heads)
    with _in_fast_dtype(model), _reporting(model, passes, report) as begin_pass:
        for window in windows:
            begin_pass()
            prompt = _Prompt.read(model, window[:, :length])
            for entry, measured in zip(usable, gains, strict=True):
                measured.append(prompt.effects(entry.recent))
            if not with_heads:
                continue
            orders = [prompt.orders(entry.recent) for entry in usable]
            begin_pass()
            by_order = _losses_or_none(model, window, orders, prompt.cache)
            if by_order is None:
                with_heads, losses = False, []
                continue
            for divergences, measured in zip(by_order, losses, strict=True):
                measured.append(torch.cat(list(divergences.values())))
    sizes = [len(scores) for scores in prompt.scores.values()]
    measurements = zip(usable, gains, losses or gains, strict=True)
    divisions = [
        entry.factors(gained, lost if losses else [], sizes, length)
        for entry, gained, lost in measurements
    ]
    return Shares(tuple(entry.fraction for entry in usable), *zip(*divisions, strict=True))


def _losses_or_none(
    model: PreTrainedModel, window: Tensor, orders: Sequence[Any], cache: Any
) -> list[dict[int, Tensor]] | None:
    """Return `losses_by_orders`; ``None``, with a line on stderr, of a model without gradients."""
    try:
        return losses_by_orders(model, window, orders, _DRAWS, cache=cache)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        reason = first_line(error)
        write_remark(f"note: the heads are measured by their attention alone ({reason})")
        return None


@dataclass(frozen=True)
class _Divided:
    """A budget in tokens of a prompt, of each head in the mean."""

    fraction: float
    share: int  # heavy hitters
    floor: int  # of them, guaranteed
    recent: int

    @classmethod
    def of(cls, fraction: float, least: float, length: int) -> _Divided | None:
        """Resolve a fraction; ``None`` if it leaves nothing to divide."""
        share = int(fraction * length)
        floor = int(least * share)
        recent = int(share / BEST_HEAVY_FRACTION) - share
        if not 0 < fraction < 1 or not 0 <= least <= 1 or share - floor < 1:
            return None
        if share > length - recent - _SINKS:  # more than there is to choose from
            return None
        return cls(fraction, share, floor, recent)

    def factors(
        self, gains: list[Tensor], losses: list[Tensor], sizes: list[int], length: int
    ) -> tuple[LayerBudgets, LayerBudgets]:
        """Divide it by layer and by head, `sizes` heads a layer, by what the windows have shown."""
        effects = torch.stack(gains).mean(0)
        means = torch.stack([heads.mean(0) for heads in effects.split(sizes)])
        by_layer = _divide(means, self.floor, self.share).round(decimals=4).tolist()
        factors = _divide(effects, self.floor, self.share)
        if losses:
            # Recent tokens and sinks are kept anyway.
            always = min(self.recent + _SINKS, length - 1)
            slopes = _slopes(torch.stack(losses).mean(0)[:, always:])
            factors = (factors + _divide(slopes, self.floor, self.share)) / 2
        rounded = iter(factors.round(decimals=4).tolist())
        return tuple(by_layer), tuple(tuple(islice(rounded, size)) for size in sizes)


@_threads_of_free_cores()
def expected_seconds(model: PreTrainedModel) -> float:
    """Return about how long `measure_shares` will compute, by the speed of a matrix product."""
    text, embedding = model.config.get_text_config(), model.get_input_embeddings()
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    active = (getattr(text, "num_experts_per_tok", None) or 1) / experts if experts else 1.0
    table = id(getattr(embedding, "weight", None))
    weights = sum(
        parameter.numel() * (active if ".experts." in name else 1.0)
        for name, parameter in model.named_parameters()
        if id(parameter) != table
    )
    device = input_device(model)
    weighted = weights * _product_seconds(_fast_dtype(model), device)
    attended = _ATTENTION * text.num_hidden_layers * text.hidden_size * _PROMPT
    seconds = weighted + attended * _product_seconds(torch.float32, device)
    return _WORK * _WINDOWS * _PROMPT * seconds / _PRODUCT**3


@functools.cache
def _product_seconds(dtype: torch.dtype, device: torch.device) -> float:
    left = torch.zeros(_PRODUCT, _PRODUCT, dtype=dtype, device=device)
    # On a CPU without the time of others, so that a busy machine decides nothing.
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    return min(repeat(lambda: (left @ left)[0, 0].item(), timer=clock, repeat=_TRIES, number=1))


def _fast_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return bf16 for fp32 weights on a CPU that multiplies it faster, else a model's dtype."""
    kinds = {(parameter.dtype, parameter.device) for parameter in model.parameters()}
    if kinds != {(torch.float32, torch.device("cpu"))} or model.num_parameters() not in _COPIED:
        return model.dtype
    dtypes = torch.float32, torch.bfloat16
    return min(dtypes, key=lambda dtype: _product_seconds(dtype, torch.device("cpu")))


@contextmanager
def _in_fast_dtype(model: PreTrainedModel) -> Iterator[None]:
    """Give a model copies of its weights in `_fast_dtype`; factors hold for all dtypes."""
    dtype, copies = _fast_dtype(model), dict[int, torch.nn.Parameter]()
    with ExitStack() as undo:
        for module in model.modules() if dtype != model.dtype else ():
            for name, weight in [*module.named_parameters(recurse=False)]:
                copy = torch.nn.Parameter(weight.detach().to_dense().to(dtype), False)
                undo.callback(setattr, module, name, weight)
                setattr(module, name, copies.setdefault(id(weight), copy))
        yield


@contextmanager
def _reporting(
    model: PreTrainedModel, passes: int, report: Callable[[float], None]
) -> Iterator[Callable[[], None]]:
    """Report the part of the passes that is done, after each layer's attention.

    Gives a function that begins a pass over the layers, and so ends the last.
    """
    layers = [module for module in model.modules() if _is_attention(module)]
    done = end = 0

    def begin() -> None:
        nonlocal done, end
        done, end = end, end + len(layers)

    def advance(*_: object) -> None:
        nonlocal done
        done = min(done + 1, end)
        report(done / (passes * len(layers)))

    with ExitStack() as undo:
        for layer in layers:
            undo.callback(layer.register_forward_hook(advance).remove)
        yield begin


def _is_attention(module: Any) -> bool:
    return hasattr(module, "layer_idx") and hasattr(module, "is_causal")


def _windows(input_ids: Tensor, length: int) -> Iterator[Tensor]:
    """Yield a few windows of a text, spread over it; they overlap in a short one."""
    spare = input_ids.shape[1] - length
    count = min(_WINDOWS, 1 + spare // FOLLOWING)
    for number in range(count):
        start = spare * number // max(1, count - 1)
        yield input_ids[:, start : start + length]


@dataclass(frozen=True)
class _Prompt:
    """What a full cache says about the entries of a prompt; by layer, ``[H, slots]`` each."""

    length: int
    scores: dict[int, Tensor]
    weights: dict[int, Tensor]  # norms of values
    positions: dict[int, Tensor]  # negative where a slot is empty
    cache: DynamicCache | None  # of the prompt, where it can be had without another reading

    @classmethod
    def read(cls, model: PreTrainedModel, input_ids: Tensor) -> _Prompt:
        cache = H2OCache(model.config, policy="full", scoring="expected")
        layers = {n: layer for n, layer in enumerate(cache.layers) if isinstance(layer, CacheLayer)}
        prefill(model, input_ids, cache, torch.ones_like(input_ids))
        scores, weights, positions = {}, {}, {}
        for number, layer in layers.items():
            assert layer.state.value_weights is not None
            scores[number], positions[number] = layer.state.scores[0], layer.state.positions[0]
            weights[number] = layer.state.value_weights[0]
        full = _full_cache(model, cache)
        return cls(input_ids.shape[1], scores, weights, positions, full)

    def effects(self, recent: int) -> Tensor:
        """Return the effect of each entry on the output, ``[heads of all layers, T]``.

        The largest come first. The `recent` newest do not compete, as every head keeps them.
        """
        effects = []
        for number, positions in self.positions.items():
            has_none = (positions >= self.length - recent) | (positions < 0)
            effect = self.scores[number].square() * self.weights[number]
            effect = effect.masked_fill(has_none, 0.0).sort(-1, descending=True).values
            effects.append(effect[:, : self.length].cpu())
        return torch.cat(effects)

    def orders(self, recent: int) -> dict[int, Tensor]:
        """Return by layer the positions ``[H, T]``, the first to be dropped last."""
        orders = {}
        for number, positions in self.positions.items():
            is_kept = (positions >= self.length - recent) | (positions < _SINKS)
            rank = self.scores[number].masked_fill(is_kept, torch.inf)
            rank = rank.masked_fill(positions < 0, -torch.inf)
            best = rank.argsort(-1, descending=True)[:, : self.length]
            orders[number] = positions.gather(-1, best)
        return orders


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
    """Divide a budget among rows by what each further entry gains, ``[rows, N]``, largest first.

    Every row gets `floor` entries, and `share` in the mean. Returns parts of `share`, ``[rows]``.
    """
    candidates = gains[:, floor:]
    chosen = candidates.flatten().topk((share - floor) * len(gains)).indices
    counts = torch.bincount(chosen // candidates.shape[1], minlength=len(gains))
    return (floor + counts).double() / share


def _slopes(losses: Tensor) -> Tensor:
    """Return what each further entry saves of the losses by entries kept, ``[rows, N]``.

    A row's losses are replaced by their lower convex hull, because a head may save nothing until it
    gets several entries more. The last entry saves the last loss.
    """
    savings = torch.nn.functional.pad(losses.double(), (0, 1)).diff().neg()
    starts = torch.ones_like(savings, dtype=torch.bool)
    while True:  # pieces that save more than those before them become one with these
        piece, zeros = starts.cumsum(-1) - 1, torch.zeros_like(savings)
        counts = zeros.scatter_add(-1, piece, torch.ones_like(savings))
        slopes = (zeros.scatter_add(-1, piece, savings) / counts).gather(-1, piece)
        rises = slopes.diff() > 0
        if not rises.any():
            return slopes
        starts[:, 1:] &= ~rises


# --- what predictions lose when a head drops entries ----------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def losses_by_orders(
    model: PreTrainedModel,
    input_ids: Tensor,
    orders: Sequence[Mapping[int, Tensor]],
    rounds: int = 1,
    seed: int = 0,
    cache: DynamicCache | None = None,
) -> list[dict[int, Tensor]]:
    """Estimate the divergence of the predictions if each head drops the end of an order.

    A gate is added to the attention logits of each entry of a KV head. The gradient of the
    log-likelihood by the gates says what the predictions after the prompt lose with an entry. The
    labels are drawn from the predictions themselves, because the expected square of such a
    gradient is the Fisher information: half of it is the KL divergence to second order. The
    gradients of all dropped entries are summed before they are squared, as entries cancel out or
    add up. A span of queries has its gates for itself: one backward pass is many samples.

    Orders have int ``[H, T]`` of each layer: the first T of the tokens ``[1, T + N]`` by rank, the
    first to be dropped last. The cache is of these T, mutated. Returns of each float ``[H, T]``,
    nats a token if only the entries before a rank stay.
    """
    length = next(iter(orders[0].values())).shape[-1]
    following = input_ids[:, length:].to(input_device(model))
    generator = torch.Generator(following.device).manual_seed(seed)
    if cache is None:
        cache = DynamicCache(config=model.config)
        prompt = input_ids[:, :length].to(following.device)
        model(prompt, logits_to_keep=1, **{CACHE: cache})
    spans = -(-following.shape[1] // _QUERIES_OF_A_GATE)
    gates = {
        number: torch.zeros(order.shape[0], spans, length, device=following.device)
        for number, order in orders[0].items()
    }
    losses = [{number: torch.zeros(o.shape) for number, o in order.items()} for order in orders]
    with _gated(model, gates), torch.enable_grad():
        for gate in gates.values():
            gate.requires_grad_()
        logits = model(following, **{CACHE: cache}).logits[0].float()
        log_p = logits.log_softmax(-1)
        # A single draw would take as long as many layers, by an algorithm of its own.
        draws = torch.multinomial(log_p.detach().exp(), 1 + rounds, True, generator=generator)
        for number, labels in enumerate(draws[:, 1:].split(1, dim=1)):
            gradients = torch.autograd.grad(
                log_p.gather(-1, labels).sum(), list(gates.values()),
                retain_graph=number < rounds - 1, allow_unused=True,
            )  # fmt: skip
            for layer, gradient in zip(gates, gradients, strict=True):
                if gradient is None or not gradient.isfinite().all():
                    raise ValueError(f"layer {layer} has no gradient of its attention's mask")
                for by_layer, order in zip(losses, orders, strict=True):
                    last_first = order[layer].long().flip(-1)[:, None].to(gradient.device)
                    dropped = gradient.gather(-1, last_first.expand_as(gradient)).cumsum_(-1)
                    loss = dropped.square_().sum(1) / (2 * rounds * following.shape[1])
                    by_layer[layer] += loss.flip(-1).cpu()
    return losses


class _Gate(torch.autograd.Function):
    """The mask of a layer's attention, as if gates of 0, ``[H, spans, N]``, were added to it."""

    @staticmethod
    def forward(ctx: Any, mask: Tensor, gates: Tensor, num_heads: int) -> Tensor:
        ctx.shape = gates.shape
        return mask.expand(-1, num_heads, -1, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        heads, spans, length = ctx.shape
        of_heads = gradient[0, ..., :length].unflatten(0, (heads, -1)).sum(1, dtype=torch.float32)
        missing = spans * _QUERIES_OF_A_GATE - of_heads.shape[1]
        if missing:
            of_heads = torch.nn.functional.pad(of_heads, (0, 0, 0, missing))
        return None, of_heads.unflatten(1, (spans, -1)).sum(2), None


@contextmanager
def _gated(model: PreTrainedModel, gates: Mapping[int, Tensor]) -> Iterator[None]:
    """Add gates to the masks of the layers' attention, which runs in plain PyTorch meanwhile."""

    def gate(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is None:
            raise ValueError(f"{type(module).__name__} takes no attention mask")
        num_heads = model.config.get_text_config().num_attention_heads
        return args, kwargs | {
            "attention_mask": _Gate.apply(mask, gates[module.layer_idx], num_heads)
        }

    with ExitStack() as undo:
        restore_attention(model, undo)
        model.set_attn_implementation("eager")
        for parameter in model.parameters():
            if parameter.requires_grad:
                undo.callback(parameter.requires_grad_)
                parameter.requires_grad_(False)
        for module in model.modules():
            if _is_attention(module) and module.layer_idx in gates:
                undo.callback(module.register_forward_pre_hook(gate, with_kwargs=True).remove)
        yield
