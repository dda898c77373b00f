"""Linear layers whose weights lie in memory as oneDNN's products read them: the same, sooner."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

_X86 = ("x86_64", "AMD64")  # elsewhere the packed product was not measured


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight, for inference; `pack_linear_layers` makes it.

    ``weight`` keeps shape, dtype and bytes, but is opaque: ``weight.to_dense()`` gives it back.
    """

    def forward(self, input: Tensor) -> Tensor:
        product: Any = torch.ops.mkldnn._linear_pointwise.default
        return product(input, self.weight, self.bias, "none", [], "")


def pack_linear_layers(model: nn.Module) -> int:
    """Packs a model's linear weights for products on this processor.

    A product of few rows has to read the whole weight, and otherwise brings it into oneDNN's
    layout each time. Numbers stay what they were: in bf16 to the bit, in fp32 but for the order of
    sums. No memory is added: a weight that another module holds too, such as a head that is
    tied to the embedding, is left as it is.

    Args:
        model: a model that will only be used for inference; its ``nn.Linear`` modules are changed
            in place, and can then be neither trained, compiled, moved, copied nor saved.

    Returns:
        How many layers were packed: none on processors other than x86, on devices other than the
        CPU, without oneDNN, and in dtypes that its products on this processor do not take.
    """
    if platform.machine() not in _X86 or not torch.backends.mkldnn.is_available():
        return 0
    owners = Counter(
        id(parameter) for module in model.modules() for parameter in module._parameters.values()
    )
    packed = 0
    for module in model.modules():
        # Not a subclass, whose forward may be another.
        if type(module) is nn.Linear and owners[id(module.weight)] == 1 and _fits(module.weight):
            weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), None)
            module.weight = nn.Parameter(weight, requires_grad=False)
            module.__class__ = PackedLinear
            packed += 1
    library = ctypes.CDLL(None) if packed and sys.platform.startswith("linux") else None
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)  # else the old weights stay with the threads that loaded them
    return packed


def _fits(weight: Tensor) -> bool:
    if weight.device.type != "cpu":
        return False
    ops: Any = torch.ops.mkldnn
    supported = {
        torch.float32: lambda: True,
        torch.bfloat16: ops._is_mkldnn_bf16_supported,
        torch.float16: ops._is_mkldnn_fp16_supported,
    }
    return weight.dtype in supported and supported[weight.dtype]()
