"""Perplexity and recall under eviction: dense prefill, then teacher-forced token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

import h2okv
from h2okv.cache.argument import CACHE
from training.data import Window
from training.quality import answer_recalled, share, stack

POLICIES = ("recent", "sink_recent", "random", "heavy", "h2o")
FAR = 256  # tokens since an answer was last said, from which its recall counts as "far"


@dataclass(frozen=True)
class Measured:
    """What a policy does at one budget.

    Attributes:
        policy: Name of the policy.
        share: Budget as share of the prompt.
        tokens: Budget in tokens; for "full" the whole window.
        text_perplexity: On plain windows, second half.
        fact_perplexity: On windows with facts, second half.
        recall: Share of the answers recalled that are asked for in the second half.
        alone_recall: The same for facts whose property is asked of one person in the window.
        far_recall: The same as `recall` for answers last said `FAR` tokens ago or more.
        answers: Number of answers in `recall`.
        alone_answers: Number of answers in `alone_recall`.
        far_answers: Number of answers in `far_recall`.
    """

    policy: str
    share: float
    tokens: int
    text_perplexity: float
    fact_perplexity: float
    recall: float
    alone_recall: float
    far_recall: float
    answers: int
    alone_answers: int
    far_answers: int


def make_cache(net: LlamaForCausalLM, policy: str, tokens: int) -> h2okv.H2OCache:
    """Make a cache that keeps `tokens` entries, half of them recent where the policy has both."""
    return h2okv.H2OCache(net.config, heavy=tokens - tokens // 2, recent=tokens // 2, policy=policy)


@torch.inference_mode()
def second_half(
    net: LlamaForCausalLM, tokens: torch.Tensor, cache: h2okv.H2OCache
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the first half at once, then feeds the second half one token at a time.

    Args:
        net: A model whose attention is "h2o".
        tokens: Windows [B, T].
        cache: An empty cache.

    Returns:
        Loss and hit [B, T / 2] of the tokens of the second half.
    """
    half = tokens.shape[1] // 2
    losses, hits = [], []
    block = tokens[:, :half]
    for target in tokens[:, half:].unbind(1):
        output = net(input_ids=block, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        logits = output.logits[:, -1].float()
        losses.append(F.cross_entropy(logits, target, reduction="none"))
        hits.append(logits.argmax(-1) == target)
        block = target[:, None]
    return torch.stack(losses, 1), torch.stack(hits, 1)


def measure(
    net: LlamaForCausalLM, plain: list[Window], facts: list[Window], policy: str, budget: float
) -> Measured:
    """Measure one policy at one budget.

    Args:
        net: A model whose attention is "h2o".
        plain: Windows of book text.
        facts: Windows with facts, of the same length.
        policy: Name of the policy.
        budget: Share of the prompt to keep; the prompt is the first half of the window.

    Returns:
        The measured values.
    """
    tokens = stack([*plain, *facts])
    half = tokens.shape[1] // 2
    capacity = tokens.shape[1] if policy == "full" else round(budget * half)
    loss, hits = second_half(net, tokens, make_cache(net, policy, capacity))
    hits = torch.cat([hits.new_zeros(len(tokens), half - 1), hits], dim=1)[len(plain) :]
    every, alone, far = [], [], []
    for row, window in enumerate(facts):
        stated = {a.fact for a in window.answers if a.occurrence == 0 and a.stop <= half}
        for answer in window.answers:
            if answer.start < half or answer.fact not in stated:
                continue
            hit = answer_recalled(hits, row, answer.start, answer.stop)
            every.append(hit)
            if not answer.rivals:
                alone.append(hit)
            if answer.gap >= FAR:
                far.append(hit)
    return Measured(
        policy=policy,
        share=budget,
        tokens=capacity,
        text_perplexity=math.exp(loss[: len(plain)].mean().item()),
        fact_perplexity=math.exp(loss[len(plain) :].mean().item()),
        recall=share(every),
        alone_recall=share(alone),
        far_recall=share(far),
        answers=len(every),
        alone_answers=len(alone),
        far_answers=len(far),
    )


def heavy_positions(net: LlamaForCausalLM, windows: list[Window], budget: float) -> list[dict]:
    """Tell where in the window the entries stand that H2O holds at its end.

    Args:
        net: A model whose attention is "h2o".
        windows: Windows of one length.
        budget: Share of the prompt to keep; the prompt is the first half of the window.

    Returns:
        For each layer the median position of the entries outside the recent window, and the share
        of them that came with the prompt and with its first quarter.
    """
    tokens = stack(windows)
    half = tokens.shape[1] // 2
    capacity = round(budget * half)
    cache = make_cache(net, "h2o", capacity)
    second_half(net, tokens, cache)
    rows = []
    for layer in range(net.config.num_hidden_layers):
        positions = cache.kept_positions(layer)
        heavy = positions[(positions >= 0) & (positions <= positions.max() - capacity // 2)].float()
        rows.append(
            {
                "layer": layer,
                "median_position": heavy.median().item(),
                "from_prompt": (heavy < half).float().mean().item(),
                "from_first_quarter": (heavy < half // 4).float().mean().item(),
            }
        )
    return rows
