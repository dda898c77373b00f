"""Linear layers whose weights lie in memory as the CPU's products read them, or in 4 bits."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

_X86 = ("x86_64", "AMD64")  # elsewhere neither product was measured
_LAYERS_BETWEEN = 32  # giving memory back: the peak is that of loading then
_FEW_ROWS = 4  # from 8 on the product with 4 bits takes as long as that with 16
_GROUP, _CODES, _MIDDLE = 32, 16, 8
_OUTPUTS = 16  # the product takes multiples of it
_HOW = 1  # tiles of the inner dimension; CPUs take any number


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight, for inference; `pack_linear_layers` makes it.

    ``weight`` keeps shape, dtype and bytes, but is opaque: ``weight.to_dense()`` gives it back.
    """

    def forward(self, input: Tensor) -> Tensor:
        product: Any = torch.ops.mkldnn._linear_pointwise.default
        return product(input, self.weight, self.bias, "none", [], "")


class Int4Linear(PackedLinear):
    """The same with the weight in 4 bits beside it, which products of few rows read.

    ``weight`` is what the 4 bits stand for, so that a result depends on the number of rows by
    rounding only. ``codes`` are opaque too, ``scales`` of shape ``[inputs / 32, outputs, 2]``.
    """

    codes: Tensor
    scales: Tensor

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        if not 0 < rows <= _FEW_ROWS:
            return super().forward(input)
        product: Any = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        flat = input.reshape(rows, self.in_features).contiguous()
        output: Tensor = product(flat, self.codes, _GROUP, self.scales)
        output = output.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def check_weight_bits(bits: int, dtype: torch.dtype | None, device: torch.device) -> None:
    """Refuses what steps with weights of few bits cannot be, or where they do not pay.

    Raises:
        ValueError: If ``bits`` is not 4, or device, dtype or processor are others.
    """
    remedy = "leave out --weight-bits"
    if bits != 4:
        raise ValueError(
            f"--weight-bits {bits} is not known here (a product with 8 bits takes as long as with"
            f" 16); give 4, or {remedy}"
        )
    if device.type != "cpu" or platform.machine() not in _X86:
        where = platform.machine() if device.type == "cpu" else device.type
        raise ValueError(f"--weight-bits 4 is for x86 CPUs, not for {where}; {remedy}")
    if not _multiplies(torch.bfloat16):
        raise ValueError(
            f"--weight-bits 4 needs a CPU that multiplies bfloat16 (AVX-512); {remedy}"
        )
    if dtype not in (None, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"--weight-bits 4 is fast in bfloat16 only (in {name} a product takes many times as"
            " long as without it); add --dtype bfloat16, or leave it out"
        )


def pack_linear_layers(model: nn.Module, weight_bits: int | None = None) -> int:
    """Packs a model's linear weights for products on this processor.

    A product of few rows has to read the whole weight, and otherwise brings it into oneDNN's
    layout each time. Numbers stay what they were: in bf16 to the bit, in fp32 but for the order of
    sums. No memory is added: a weight that another module holds too, such as a head that is
    tied to the embedding, is left as it is.

    Args:
        model: a model that will only be used for inference; its ``nn.Linear`` modules are changed
            in place, and can then be neither trained, compiled, moved, copied nor saved.
        weight_bits: 4 rounds the weights to 4 bits, with a scale and a zero for each 32 numbers of
            a row, where inputs are a multiple of 32 and outputs of 16. Steps of up to four
            sequences read these, more rows the packed weight, which stays: 0.31 of its bytes are
            added. Weights that were rounded in the same way before (GGUF's Q4_1) change by the
            rounding of their scales to bf16 only.

    Returns:
        How many layers were packed: none on processors other than x86, on devices other than the
        CPU, without oneDNN, and in dtypes that its products on this processor do not take.

    Raises:
        ValueError: If ``weight_bits`` is given and no layer can have them.
    """
    if platform.machine() not in _X86:
        return 0
    owners = Counter(
        id(parameter) for module in model.modules() for parameter in module._parameters.values()
    )
    chosen = [
        module
        for module in model.modules()
        # Not a subclass, whose forward may be another.
        if type(module) is nn.Linear and owners[id(module.weight)] == 1 and _fits(module.weight)
    ]
    weights = {id(module.weight) for module in chosen}
    for parameter in model.parameters() if chosen else ():
        if id(parameter) not in weights:  # it alone would keep the checkpoint's file in memory
            parameter.data = parameter.data.clone()
    for number, module in enumerate(chosen, 1):
        module.__class__ = PackedLinear
        weight = module.weight.detach()
        if weight_bits is not None and not (weight.shape[1] % _GROUP or len(weight) % _OUTPUTS):
            module.__class__ = Int4Linear
            module.codes, module.scales, weight = _to_int4(weight)
        packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        module.weight = nn.Parameter(packed_weight, requires_grad=False)
        if number % _LAYERS_BETWEEN == 0 or number == len(chosen):
            _give_back()
    if weight_bits is not None and not any(type(own) is Int4Linear for own in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has no linear layers whose weights could have {weight_bits}"
            " bits; leave out --weight-bits"
        )
    return len(chosen)


def _to_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales as the product takes them, and the weight that they stand for."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // _GROUP, _GROUP)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    # Rounded first, for the product reads them in the weight's dtype.
    scale = ((high - low) / (_CODES - 1)).to(weight.dtype)
    zero = (low + _MIDDLE * scale.float()).to(weight.dtype)
    steps = (groups - zero.float()) / scale.float().clamp_min(torch.finfo(torch.float32).tiny)
    steps = steps.round().clamp(-_MIDDLE, _CODES - 1 - _MIDDLE)
    dense = (steps * scale.float() + zero.float()).view(outputs, inputs).to(weight.dtype)
    codes = (steps + _MIDDLE).to(torch.int32).view(outputs, inputs)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, _HOW)
    scales = torch.cat([scale, zero], -1).transpose(0, 1).contiguous()
    return packed, scales, dense


def _give_back() -> None:
    """Returns the old weights' memory, which would stay with the threads that loaded them."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _fits(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and _multiplies(weight.dtype)


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of a dtype for this processor."""
    ops: Any = torch.ops.mkldnn
    supported = {
        torch.float32: lambda: True,
        torch.bfloat16: ops._is_mkldnn_bf16_supported,
        torch.float16: ops._is_mkldnn_fp16_supported,
    }
    return torch.backends.mkldnn.is_available() and dtype in supported and supported[dtype]()
