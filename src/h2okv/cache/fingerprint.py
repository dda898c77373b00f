"""A short name for a module's weights."""

from __future__ import annotations

import hashlib

import torch

_SAMPLE = 4096
"""Numbers read of each parameter; another training changes all of them."""


def fingerprint(module: torch.nn.Module) -> str | None:
    """Sums up a module's weights.

    Args:
        module: an attention module; unchanged.

    Returns:
        A hexadecimal digest, the same on every device; ``None`` if the weights are elsewhere
        (offloaded).
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        if parameter.device.type == "meta":
            return None
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLE)].contiguous().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
