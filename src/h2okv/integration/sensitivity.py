"""Estimate what a model's predictions lose when a head drops entries of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from h2okv.cache.argument import CACHE
from h2okv.integration.enable import input_device, restore_attention

_QUERIES_OF_A_GATE = 16


@torch.inference_mode(False)
@torch.no_grad()
def losses_by_entries(
    model: PreTrainedModel,
    input_ids: Tensor,
    orders: Mapping[int, Tensor],
    rounds: int = 2,
    seed: int = 0,
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

    Returns:
        For each layer float ``[H, T]``: the divergence, in nats a token, if only the entries before
        that rank are kept. It never grows from one rank to the next by more than the noise.

    Raises:
        ValueError: if the model's attention takes no mask, or has no gradients.
    """
    length = next(iter(orders.values())).shape[-1]
    following = input_ids[:, length:].to(input_device(model))
    generator = torch.Generator(following.device).manual_seed(seed)
    cache = DynamicCache(config=model.config)
    model(input_ids[:, :length].to(following.device), **{CACHE: cache})
    spans = -(-following.shape[1] // _QUERIES_OF_A_GATE)
    gates = {
        number: torch.zeros(order.shape[0], spans, length, device=following.device)
        for number, order in orders.items()
    }
    losses = {
        number: torch.zeros(order.shape, device=following.device)
        for number, order in orders.items()
    }
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
