"""The optimizers: Muon for the hidden matrices, AdamW for the embedding and the norms."""

from __future__ import annotations

import torch

KINDS = ("muon", "adamw")


class Optimizers:
    """Steps several optimizers as one.

    Args:
        model: The model to train.
        kind: "muon" or "adamw" (for everything).
        rate: Peak learning rate of the hidden matrices.
        embedding_rate: Peak learning rate of the embedding and the norms.
        weight_decay: Decay of the hidden matrices; the embedding and the norms have none.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        kind: str = "muon",
        rate: float = 4e-3,
        embedding_rate: float = 4e-3,
        weight_decay: float = 0.1,
    ) -> None:
        named = list(model.named_parameters())
        hidden = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        other = torch.optim.AdamW(
            others, lr=embedding_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        if kind == "muon":
            first = torch.optim.Muon(
                hidden, lr=rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        elif kind == "adamw":
            first = torch.optim.AdamW(
                hidden, lr=rate, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True
            )
        else:
            raise ValueError(f"kind={kind!r} is not an optimizer; choose from {KINDS}")
        self.optimizers = (first, other)
        self.peaks = (rate, embedding_rate)

    def step(self, share: float) -> None:
        """Update the weights at `share` of the peak rates and clear the gradients."""
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        """Give the state of all parts."""
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[dict]) -> None:
        """Take the state that `state_dict` gave."""
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
