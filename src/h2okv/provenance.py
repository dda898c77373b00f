"""The machine, and digests of weights and contents."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_SAMPLE = 4096  # elements of each parameter; training changes all of them, so a sample will do
_CHUNKS = 8  # of a sample that files are read for
_ROUNDING, _MIN_DIFFERENCE = 2**-8, 1e-6  # of a weight in bfloat16, and of a tiny one in float16

WeightPrint = tuple[str, float]
"""Of a weight: a digest of its signs, and the mean of its magnitudes."""


def processor() -> str:
    """Return the processor's name and number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def fingerprint(module: torch.nn.Module) -> str | None:
    """Return a digest of a module's weights; ``None`` if one of them is on the meta device."""
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        if parameter.device.type == "meta":
            return None
        flat = _flat(parameter)
        sample = flat[:: max(1, len(flat) // _SAMPLE)].contiguous().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    """Return a weight's numbers in one row, whatever packed them into another layout."""
    weight = parameter.detach()
    if weight.is_mkldnn:  # packed linear layers
        return weight.to_dense().reshape(-1)
    if is_traceable_wrapper_subclass(weight):  # torchao's tensors have no views
        return cast(Any, weight).dequantize().reshape(-1)
    return weight.reshape(-1)


def weight_prints(module: torch.nn.Module) -> dict[str, WeightPrint]:
    """Return the print of each parameter in memory, by name; those on the meta device have none."""
    prints = {}
    for name, parameter in module.named_parameters():
        if parameter.device.type != "meta":
            flat = _flat(parameter)
            sample = torch.cat([flat[chunk].cpu() for chunk in chunks_of(len(flat))])
            prints[name] = weight_print(parameter.shape, sample)
    return prints


def chunks_of(count: int) -> list[slice]:
    """Return the chunks of a flat weight of `count` elements that its print is of."""
    size = _SAMPLE // _CHUNKS
    if count <= _SAMPLE:
        return [slice(0, count)]
    starts = (number * (count - size) // (_CHUNKS - 1) for number in range(_CHUNKS))
    return [slice(start, start + size) for start in starts]


def weight_print(shape: Sequence[int], sample: torch.Tensor) -> WeightPrint:
    """Return a digest of a weight's signs, which rounding to another dtype keeps, and its size."""
    if not sample.is_floating_point():  # packed by another library
        return digest(repr([*shape]).encode() + sample.contiguous().numpy().tobytes()), 0.0
    signs = torch.signbit(sample.float()).numpy().tobytes()
    return digest(repr([*shape]).encode() + signs), float(f"{sample.double().abs().mean():.6g}")


def prints_agree(left: WeightPrint, right: WeightPrint) -> bool:
    """Return whether two prints are of the same weight, in any two dtypes."""
    difference, largest = abs(left[1] - right[1]), max(left[1], right[1])
    return left[0] == right[0] and difference <= _ROUNDING * largest + _MIN_DIFFERENCE


def weights_state(model: torch.nn.Module) -> list[tuple[int, int]]:
    """Return what changes when a model's weights are replaced or written to."""
    return [(id(p), 0 if p.is_inference() else p._version) for p in model.parameters()]


def digest(content: str | bytes) -> str:
    """Return a short hash of a content, which tells whether results may resume on it."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return hashlib.sha256(data).hexdigest()[:16]
