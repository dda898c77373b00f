"""What is evicted when, and how kept sets overlap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from h2okv.analysis.attention_stats import Tick, full_attention_layers, no_tick, num_kv_heads
from h2okv.analysis.score_stats import load_scipy
from h2okv.cache import H2OCache
from h2okv.cache.argument import CACHE
from h2okv.config import TokenBudget
from h2okv.integration.enable import enable
from h2okv.policy import Policy


@dataclass(frozen=True)
class Trace:
    """What a policy held at every step. "Step t" is the state after token t was read."""

    # int32 [L, H, T], the first query that does not see the token. A token that step t evicts is
    # gone at t + 1; what is held after the last token is gone at T + 1.
    gone_at: np.ndarray
    losses: np.ndarray  # float32 [T] in nats; NaN before the first token foreseen with the cache
    next_tokens: np.ndarray  # int32 [T], the likeliest token after each; -1 where it is not known
    first: int  # the first token that was read on its own
    recorded: np.ndarray  # int32 [C], the steps at which scores were noted
    # For each of these float32 [L, H, t + 1]: each token's score, for an evicted one its last.
    scores: tuple[np.ndarray, ...]
    held_bytes: np.ndarray  # int64 [T], what the cache took after each step; 0 before the first one
    full_bytes: np.ndarray  # int64 [T], what a full cache would take


def split_budget(total: int) -> TokenBudget:
    """Divide a budget in halves, as the paper does: heavy hitters and recent tokens."""
    return TokenBudget(sink=0, heavy=total - total // 2, recent=total // 2)


@torch.inference_mode()
def follow(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    policy: str | Policy,
    budget: TokenBudget,
    first: int | None = None,
    recorded: int = 0,
    tick: Tick = no_tick,
    block: int = 1,
) -> Trace:
    """Read a text token by token through an `H2OCache` and notes what it holds at every step.

    Args:
        model: a loaded model; its attention implementation is changed and restored.
        input_ids: int64 ``[1, T]``.
        policy: a name or a policy object.
        budget: in tokens.
        first: tokens that are read at once at the beginning; by default what the budget holds:
            nothing is evicted before, so this is the paper's Algorithm 1, only faster.
        recorded: at how many steps to note the scores, the first and the last among them.
        tick: told the fraction of the tokens read.
        block: tokens between two evictions after these; more than one is faster.
    """
    length = input_ids.shape[1]
    ids = input_ids.to(model.device)
    cache = H2OCache(model.config, budget.heavy, budget.recent, budget.sink, policy=policy)
    start = max(1, min(budget.total if first is None else first, length))
    ends = [*range(start, length, block), length]
    marks = {ends[int(place)] for place in np.linspace(0, len(ends) - 1, recorded).round()}
    layers, heads = full_attention_layers(model.config), num_kv_heads(model.config)
    # A slot that is empty points behind the last token, and so does one more column.
    gone = torch.zeros(len(layers), heads, length + 1, dtype=torch.int64)
    latest = torch.zeros(gone.shape)
    scores: list[np.ndarray] = []
    held_bytes, full_bytes = np.zeros((2, length), dtype=np.int64)
    losses = torch.full((length,), torch.nan)
    following = torch.full((length,), -1, dtype=torch.int32)
    with enable(model):
        begin, positions = 0, torch.empty(len(layers), heads, 0, dtype=torch.int64)
        for end in ends:
            # Of the first tokens, read at once, only the last one's prediction is looked at.
            new = min(block, end - begin) if begin else 1
            read = ids[:, begin:end]
            output = model(input_ids=read, logits_to_keep=new, **{CACHE: cache})
            logits = output.logits[0].float().cpu()
            following[end - new : end] = logits.argmax(-1).int()
            true = ids[0, end - new + 1 : end + 1].cpu()
            losses[end - new + 1 : end + 1] = F.cross_entropy(
                logits[: len(true)], true, reduction="none"
            )
            # What was held and what is new has been seen by all queries until now.
            gone.scatter_(-1, positions, end)
            gone[..., begin:end] = end
            positions = torch.cat([cache.kept_positions(i).cpu() for i in layers]).long()
            positions[positions < 0] = length
            gone.scatter_(-1, positions, end + 1)
            held_bytes[end - new : end], full_bytes[end - 1] = cache.nbytes, cache.full_nbytes
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
        held_bytes=held_bytes,
        full_bytes=full_bytes,
    )


def held_after(gone_at: np.ndarray, step: int) -> np.ndarray:
    """Tell which tokens were held after a step: bool ``[L, H, step + 1]``."""
    return gone_at[..., : step + 1] > step + 1


def heavy_after(gone_at: np.ndarray, step: int, recent: int) -> np.ndarray:
    """The same outside the recent window: bool ``[L, H, step + 1 - recent]``."""
    return held_after(gone_at, step)[..., : step + 1 - recent]


def overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The fraction of the first set, bool ``[..., N]``, that is in the second too; NaN if empty."""
    size = first.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (first & second).sum(axis=-1) / size


def similarity(sets: np.ndarray) -> np.ndarray:
    """Jaccard similarity ``[S, S]`` of every pair of sets, bool ``[S, N]``."""
    return 1 - load_scipy("spatial.distance").cdist(sets, sets, "jaccard")


def chance_similarity(kept: int, candidates: int) -> float:
    """The Jaccard similarity that two random sets of one size have on average, nearly."""
    common = kept * kept / candidates
    return common / (2 * kept - common)


def stays(gone_at: np.ndarray, recent: int, first: int) -> np.ndarray:
    """How long entries stayed after they left the recent window, in tokens: int ``[L, H, T']``."""
    length = gone_at.shape[-1]
    # At the step at which a token leaves the window it can go for the first time.
    leaves = np.maximum(np.arange(length) + recent, first)
    candidates = leaves < length  # the others had no time to be evicted
    return (np.minimum(gone_at, length) - 1 - leaves)[..., candidates].clip(min=0)


class GlobalPolicy(Policy):
    """Ranks entries by the attention of the whole text, future included (paper, section 3.3).

    ``scores`` is float ``[L, H, T]`` for ``layers`` in order, attention received from all queries.
    """

    name = "global"

    def __init__(self, scores: np.ndarray, layers: tuple[int, ...]) -> None:
        self._scores = {
            layer_idx: torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32))
            for layer_idx, part in zip(layers, scores, strict=True)
        }

    def priority(
        self, scores: torch.Tensor, positions: torch.Tensor, newest: torch.Tensor, layer_idx: int
    ) -> torch.Tensor:
        """The attention received from the whole text, whatever has been received so far."""
        table = self._scores[layer_idx].to(positions.device)
        self._scores[layer_idx] = table
        places = positions.clamp(min=0).to(torch.int64)
        return table.expand(positions.shape[0], -1, -1).gather(-1, places)
