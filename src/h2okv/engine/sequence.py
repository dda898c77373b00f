"""One prompt on its way through the model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

import torch

PromptId = str | int
"""What a job's file may call a prompt."""


@dataclass
class Sequence:
    """A prompt and what was generated for it so far.

    Attributes:
        id: The prompt's name in the job.
        prompt: Its tokens.
        room: The most tokens that may be generated for it.
        digest: A short name of the prompt's text, by which a resumed job knows it again.
        is_cut: Whether `room` is what the model's context leaves, not what was asked for.
        new_tokens: What was generated.
        finish_reason: ``"eos"``, ``"length"`` or ``"context"``; ``None`` while it goes on.
        generator: Where its random numbers come from; ``None`` until the first one is drawn.
    """

    id: PromptId
    prompt: list[int]
    room: int
    digest: str = ""
    is_cut: bool = False
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    generator: torch.Generator | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is generated for it."""
        return self.finish_reason is not None

    def take(self, token: int, ends: frozenset[int]) -> None:
        """Takes the next token; mutates the sequence.

        Args:
            token: What was chosen.
            ends: Tokens that end a text.
        """
        self.new_tokens.append(token)
        if token in ends:
            self.finish_reason = "eos"
        elif len(self.new_tokens) >= self.room:
            self.finish_reason = "context" if self.is_cut else "length"


def seed_of(seed: int, prompt_id: PromptId) -> int:
    """Derives a prompt's own seed, the same in every batch, order and run.

    Args:
        seed: The job's.
        prompt_id: The prompt's.

    Returns:
        An int of 63 bits.
    """
    name = json.dumps([seed, prompt_id]).encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1
