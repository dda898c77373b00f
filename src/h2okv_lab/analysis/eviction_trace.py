"""When a policy evicts each token, and how sets of entries overlap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from h2okv.budget import TokenBudget
from h2okv.cache import CACHE, H2OCache
from h2okv.cache.support import num_kv_heads
from h2okv.integration.enable import enable, input_device
from h2okv.policy import Rule
from h2okv_lab.analysis.attention_stats import Tick, full_attention_layers, no_tick
from h2okv_lab.analysis.score_stats import load_scipy


@dataclass(frozen=True)
class Trace:
    """A policy's entries at every step; "step t" is the state after token t was read."""

    # int32 [L, H, T], the first query that does not see the token. A token that step t evicts is
    # gone at t + 1; an entry that is never evicted is gone at T + 1.
    gone_at: np.ndarray
    losses: np.ndarray  # float32 [T] in nats; NaN before the first token predicted with the cache
    next_tokens: np.ndarray  # int32 [T], the most likely token after each; -1 if not computed
    first: int  # the first token that was read alone
    recorded: np.ndarray  # int32 [C], the steps with recorded scores
    # For each of these float32 [L, H, t + 1]: each token's score, for an evicted one its last.
    scores: tuple[np.ndarray, ...]
    cache_bytes: np.ndarray  # int64 [T], of the cache after each step; 0 before the first one
    full_bytes: np.ndarray  # int64 [T], of a full cache


def split_budget(total: int) -> TokenBudget:
    """Split a budget in halves, as in the paper: heavy hitters and recent tokens."""
    return TokenBudget(sink=0, heavy=total - total // 2, recent=total // 2)


@torch.inference_mode()
def follow(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    policy: str | Rule,
    budget: TokenBudget,
    first: int | None = None,
    recorded: int = 0,
    tick: Tick = no_tick,
    block: int = 1,
) -> Trace:
    """Read a text token by token through an `H2OCache` and record its entries at every step.

    Args:
        model: a loaded model; its attention implementation is changed and restored.
        input_ids: int64 ``[1, T]``.
        policy: a name or a policy object.
        budget: in tokens.
        first: tokens to read in one block at the beginning; by default the budget's total: nothing
            is evicted before, so this is the paper's Algorithm 1, only faster.
        recorded: number of steps with recorded scores, with the first and the last.
        tick: receives the fraction of the tokens read.
        block: tokens between two evictions after these; more than one is faster.
    """
    length = input_ids.shape[1]
    ids = input_ids.to(input_device(model))
    cache = H2OCache(model.config, budget.heavy, budget.recent, budget.sink, policy=policy)
    start = max(1, min(budget.total if first is None else first, length))
    ends = [*range(start, length, block), length]
    marks = {ends[int(index)] for index in np.linspace(0, len(ends) - 1, recorded).round()}
    layers, heads = full_attention_layers(model.config), num_kv_heads(model.config)
    # Empty slots point to an extra column after the last token.
    gone = torch.zeros(len(layers), heads, length + 1, dtype=torch.int64)
    latest = torch.zeros(gone.shape)
    scores: list[np.ndarray] = []
    cache_bytes, full_bytes = np.zeros((2, length), dtype=np.int64)
    losses = torch.full((length,), torch.nan)
    following = torch.full((length,), -1, dtype=torch.int32)
    with enable(model):
        begin, positions = 0, torch.empty(len(layers), heads, 0, dtype=torch.int64)
        for end in ends:
            # Of the first block only the last token's prediction is used.
            new = min(block, end - begin) if begin else 1
            read = ids[:, begin:end]
            output = model(input_ids=read, logits_to_keep=new, **{CACHE: cache})
            logits = output.logits[0].float().cpu()
            following[end - new : end] = logits.argmax(-1).int()
            predicted = slice(end - new + 1, end + 1)
            true = ids[0, predicted].cpu()
            losses[predicted] = F.cross_entropy(logits[: len(true)], true, reduction="none")
            # All queries until now have seen the entries of the last step and the new tokens.
            gone.scatter_(-1, positions, end)
            gone[..., begin:end] = end
            positions = torch.cat([cache.kept_positions(i).cpu() for i in layers]).long()
            positions[positions < 0] = length
            gone.scatter_(-1, positions, end + 1)
            cache_bytes[end - new : end], full_bytes[end - 1] = cache.nbytes, cache.full_nbytes
            if marks:
                latest.scatter_(-1, positions, torch.cat([cache.scores(i).cpu() for i in layers]))
            if end in marks:
                scores.append(latest[..., :end].numpy().copy())
            if (end - start) // block % 16 == 0:
                tick(begin / length)
            begin = end
    return Trace(
        gone_at=gone[..., :length].to(torch.int32).numpy(),
        losses=losses.numpy(),
        next_tokens=following.numpy(),
        first=start,
        recorded=np.array(sorted(marks), dtype=np.int32) - 1,
        scores=tuple(scores),
        cache_bytes=cache_bytes,
        full_bytes=full_bytes,
    )


def entries_after(gone_at: np.ndarray, step: int) -> np.ndarray:
    """Return which tokens are entries after a step: bool ``[L, H, step + 1]``."""
    return gone_at[..., : step + 1] > step + 1


def heavy_entries_after(gone_at: np.ndarray, step: int, recent: int) -> np.ndarray:
    """Return the entries outside the recent window: bool ``[L, H, step + 1 - recent]``."""
    return entries_after(gone_at, step)[..., : step + 1 - recent]


def overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the fraction of the first set, bool ``[..., N]``, in the second; NaN if empty."""
    size = first.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (first & second).sum(axis=-1) / size


def similarity(sets: np.ndarray) -> np.ndarray:
    """Return the Jaccard similarity ``[S, S]`` of every pair of sets, bool ``[S, N]``."""
    return 1 - load_scipy("spatial.distance").cdist(sets, sets, "jaccard")


def chance_similarity(size: int, candidates: int) -> float:
    """Return the approximate mean Jaccard similarity of two random sets of one size."""
    common = size * size / candidates
    return common / (2 * size - common)


def durations(gone_at: np.ndarray, recent: int, first: int) -> np.ndarray:
    """Return how many tokens entries stayed after the recent window: int ``[L, H, T']``."""
    length = gone_at.shape[-1]
    # A token can be evicted from the step on at which it leaves the window.
    leaves = np.maximum(np.arange(length) + recent, first)
    candidates = leaves < length  # the others had no time to be evicted
    return (np.minimum(gone_at, length) - 1 - leaves)[..., candidates].clip(min=0)


class GlobalPolicy(Rule):
    """Rank entries by the attention of the whole text, including the future (paper, section 3.3).

    ``scores`` is float ``[L, H, T]`` for ``layers`` in order, attention received from all queries.
    """

    name = "global"

    def __init__(self, scores: np.ndarray, layers: tuple[int, ...]) -> None:
        self._scores = {
            layer_idx: torch.from_numpy(np.ascontiguousarray(layer_scores, dtype=np.float32))
            for layer_idx, layer_scores in zip(layers, scores, strict=True)
        }

    def priority(
        self, scores: torch.Tensor, positions: torch.Tensor, newest: torch.Tensor, layer_idx: int
    ) -> torch.Tensor:
        """Return the attention received in the whole text."""
        table = self._scores[layer_idx].to(positions.device)
        self._scores[layer_idx] = table
        indices = positions.clamp(min=0).to(torch.int64)
        return table.expand(positions.shape[0], -1, -1).gather(-1, indices)
