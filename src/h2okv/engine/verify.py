"""Reads finished answers again with the full cache, and compares the next tokens.

Compared at each token of an answer is the most likely next token after all tokens before it as they
were written: of the model with its evicting cache, when the answer was written, and of the same
model with the full cache, in one teacher-forced pass. Both are taken after what the request itself
demands (penalties, biases, a grammar) and before temperature and sampling, so that a sampled answer
is judged like a greedy one, and a token that a schema forces agrees. The divergence is that of the
full cache's distribution from the other one over the `_MOST_LIKELY` tokens of the latter and all
others as one: a lower bound of the one over the whole vocabulary.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import DynamicCache

from h2okv.config import Budget
from h2okv.console import warn
from h2okv.engine.agreement import FACTORS, AgreementLog, BudgetLevels
from h2okv.engine.config import EngineConfig
from h2okv.engine.model_runner import ModelRunner
from h2okv.engine.outputs import OutputDelta, VerifiedAnswer
from h2okv.engine.request import Output, Request

_MOST_LIKELY = 16
_LEAST_PROBABILITY = 1e-9
_MOST_WAITING = 256
"""Answers that wait to be read again; while there are so many, no further one is sampled."""
_PATIENCE = 10.0
"""Seconds after which an answer is read again although requests run, and then for `_BUSY_SHARE` of
the time."""
_BUSY_SHARE = 0.1


class Trace:
    """What an evicting cache predicted at each token of an answer."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []  # int64 [1, k]; the first is the most likely
        self.logprobs: list[Tensor] = []  # fp32 [1, k]

    def add(self, logits: Tensor) -> None:
        """Note the prediction of fp32 logits ``[1, V]``."""
        logprobs = torch.log_softmax(logits, dim=-1)
        top = logprobs.topk(min(_MOST_LIKELY, logits.shape[1]))
        # Of equal ones topk may put any first, and greedy decoding takes the argmax.
        indices, values = top.indices, top.values
        best = logits.argmax(dim=-1, keepdim=True)
        at = (indices == best).int().argmax(dim=-1, keepdim=True)
        indices = indices.scatter(1, at, indices[:, :1]).scatter(
            1, torch.zeros_like(at), best.to(indices.dtype)
        )
        self.tokens.append(indices.cpu())
        self.logprobs.append(values.cpu())

    def compare(self, number: int, logits: Tensor) -> tuple[bool, float]:
        """Return whether full logits, fp32 ``[1, V]``, agree at a token, and the divergence."""
        indices = self.tokens[number].to(logits.device)
        agrees = int(logits.argmax()) == int(indices[0, 0])
        full = torch.log_softmax(logits, dim=-1).gather(1, indices).exp().double().flatten().cpu()
        evicted = self.logprobs[number].double().exp().flatten()
        full, evicted = (
            torch.cat([p, (1 - p.sum()).clamp(min=0).reshape(1)]).clamp(min=_LEAST_PROBABILITY)
            for p in (full, evicted)
        )
        return agrees, max(0.0, float((full * (full / evicted).log()).sum()))
