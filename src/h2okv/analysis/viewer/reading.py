"""A text that was read for the viewer, and its traces."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2okv.analysis.observing import check_layer, full_attention_layers, num_kv_heads
from h2okv.analysis.rows import Tick, no_tick
from h2okv.analysis.sample import make_sample, token_pieces
from h2okv.analysis.trace import follow
from h2okv.analysis.viewer.packing import LOWEST_SCORE, RECORDED, pack_trace
from h2okv.budget import TokenBudget
from h2okv.policy import get_policy

LEAST_TOKENS = 8
MOST_TOKENS = 65_000
"""Positions travel as 16 bits."""
_READ_AT_ONCE = 64


class Reader:
    """Reads texts with a model.

    Args:
        model: a loaded model.
        tokenizer: its tokenizer.
        name: what the user calls the model.
        context: the most tokens it can read; ``None`` for no limit.
        max_tokens: where to cut texts off.

    Raises:
        ValueError: if the model is not supported.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        context: int | None,
        max_tokens: int,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.max_tokens = min(max_tokens, context or MOST_TOKENS, MOST_TOKENS)
        self.layers = full_attention_layers(model)
        self.heads = num_kv_heads(model)

    def read(self, text: str, new_tokens: int = 0) -> Reading:
        """Turns a text into tokens and lets the model go on from it, with the full cache.

        Args:
            text: any text; cut off where the model's context, less the new tokens, ends.
            new_tokens: how many tokens the model shall add.

        Returns:
            The reading.

        Raises:
            ValueError: if the text is too short, or there is no room for so many new tokens.
        """
        if not 0 <= new_tokens <= self.max_tokens - LEAST_TOKENS:
            raise ValueError(
                f"{new_tokens} new tokens is out of range; choose 0 to "
                f"{self.max_tokens - LEAST_TOKENS}."
            )
        room = self.max_tokens - new_tokens
        sample = make_sample(self.tokenizer, text, room, LEAST_TOKENS)
        ids = sample.input_ids
        if new_tokens:
            with torch.inference_mode():
                # transformers' types do not know that a causal model generates.
                model: Any = self.model
                ids = model.generate(
                    ids.to(self.model.device),
                    attention_mask=torch.ones_like(ids).to(self.model.device),
                    max_new_tokens=new_tokens,
                    do_sample=False,
                    pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0,
                ).cpu()
        return Reading(self, ids, sample.length)


class Reading:
    """A text as tokens, ready for traces.

    Args:
        reader: whose model it is.
        input_ids: int64 ``[1, T]``, new tokens included.
        given: how many of them are the user's text.
    """

    def __init__(self, reader: Reader, input_ids: torch.Tensor, given: int) -> None:
        self.reader, self.input_ids, self.given = reader, input_ids, given
        self.pieces = token_pieces(reader.tokenizer, input_ids[0].tolist())

    @property
    def length(self) -> int:
        """All tokens, T."""
        return self.input_ids.shape[1]

    def describe(self) -> dict[str, Any]:
        """Returns what the page must know besides the traces, as a JSON object."""
        return {
            "model": self.reader.name,
            "tokens": list(self.pieces),
            "given": self.given,
            "layers": list(self.reader.layers),
            "heads": self.reader.heads,
            "lowest": LOWEST_SCORE,
            "highest": self._highest(),
        }

    def trace(self, policy: str, share: float, tick: Tick = no_tick) -> dict[str, Any]:
        """Follows a policy through the text; see `pack_trace`.

        Args:
            policy: a policy's name.
            share: the budget as a share of the text, half of it recent.
            tick: told the share of the tokens read.

        Returns:
            A JSON object.

        Raises:
            ValueError: if the policy is unknown or the share out of range.
        """
        total = budget_tokens(share, self.length)
        budget = TokenBudget(0, total - total // 2, total // 2)
        trace = follow(
            self.reader.model,
            self.input_ids,
            policy,
            budget,
            first=min(total, _READ_AT_ONCE),
            recorded=min(RECORDED, self.length),
            tick=tick,
        )
        following = token_pieces(self.reader.tokenizer, trace.next_tokens.clip(min=0).tolist())
        parts = get_policy(policy).apportion(budget)
        packed = pack_trace(trace, policy, parts, following, self._highest())
        return {**packed, "share": share, "full_bytes": int(trace.full_bytes[-1])}

    def _highest(self) -> float:
        """The most that an entry can ever receive: all of every query of its group."""
        config = self.reader.model.config.get_text_config(decoder=True)
        return float(self.length * config.num_attention_heads // self.reader.heads)


def budget_tokens(share: float, length: int) -> int:
    """Turns a share of the text into tokens, at least 2.

    Args:
        share: above 0 and at most 1.
        length: tokens of the text.

    Raises:
        ValueError: if the share is out of range.
    """
    if not 0 < share <= 1:
        raise ValueError(
            f"a budget of {share:g} is no share of the text; give a number above 0 and up to 1."
        )
    return max(2, int(share * length + 1e-6))


def check_choice(reader: Reader, layer: int, head: int, policies: list[str]) -> None:
    """Refuses what the page could not show.

    Args:
        reader: the model.
        layer: the layer to begin with.
        head: the KV head to begin with.
        policies: names of policies.

    Raises:
        ValueError: naming what there is to choose from.
    """
    check_layer(reader.model, layer, head)
    for policy in policies:
        get_policy(policy)
