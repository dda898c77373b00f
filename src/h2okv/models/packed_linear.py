"""Linear layers with weights in the layout of the CPU's matrix products, or in 4 bits."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from h2okv.cache.latent import EXPANDS_LATENTS
from h2okv.ops.attention import onednn_linear
from h2okv.prompts.readers import FieldError

_X86 = ("x86_64", "AMD64")  # the products were not measured elsewhere
_READ_BY_OTHERS = (EXPANDS_LATENTS, "dt_proj")  # attention (MLA), Jamba's mixers
_TRIM_INTERVAL = 32  # layers; with it the peak of memory is that of loading
_FEW_ROWS = 4  # from 8 on the product with 4 bits takes as long as that with 16
_GROUP, _CODES, _MIDPOINT = 32, 16, 8
_OUTPUTS = 16  # the product takes multiples of it
_INNER_TILES = 1  # tiles of the inner dimension; CPUs take any number
_MOST_KERNELS = 128  # of all batch sizes in use and of some prompts


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight, for inference; `pack_linear_layers` makes it.

    ``weight`` keeps shape, dtype and bytes, but is opaque: ``weight.to_dense()`` gives it back.
    """

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and input.requires_grad:
            output: Tensor = _Product.apply(input, self.weight, self.bias)
            return output
        return onednn_linear(input, self.weight, self.bias)


class _Product(torch.autograd.Function):
    """The product with its gradient by the input, which PyTorch leaves out."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return onednn_linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return onednn_linear(grad_outputs[0], ctx.weight.to_dense().t(), None), None, None


class Int4Linear(PackedLinear):
    """A packed linear layer with a second, 4-bit copy of its weight for inputs of few rows.

    ``weight`` is the dequantized copy, so a result depends on the number of rows by rounding
    only. ``codes`` are opaque too; ``scales`` have the shape ``[inputs / 32, outputs, 2]``.
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
    """Refuse ``weight_bits`` where they are not supported or not faster."""
    problem = ""
    if bits != 4:
        problem = "is not known here (a product with 8 bits takes as long as with 16); give 4"
    elif device.type != "cpu" or platform.machine() not in _X86:
        where = platform.machine() if device.type == "cpu" else device.type
        problem = f"is for x86 CPUs, not for {where}; choose such a device"
    elif not _multiplies(torch.bfloat16):
        problem = "needs a CPU that multiplies bfloat16 (AVX-512); use another machine"
    elif dtype not in (None, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        problem = f"is fast in bfloat16 only, not in {name}; give dtype bfloat16"
    if problem:
        raise FieldError(("weight_bits",), f"={bits} {problem}, or leave it out")


def limit_kernels(number: int = _MOST_KERNELS) -> None:
    """Limit the kernels that oneDNN and PyTorch cache, which is 1,024 for each by default.

    There is one for each shape of a product, so each length of a prompt adds some: 0.8 MiB a piece
    in bfloat16, and a process that reads prompts would grow for hours. Variables that are set stay,
    and they work only if there was no product before this call.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(number))


def pack_linear_layers(model: nn.Module, weight_bits: int | None = None) -> int:
    """Pack a model's linear weights for products on this processor.

    A product of few rows has to read the entire weight, and without packing reorders it into
    oneDNN's layout each time. Results stay the same: in bf16 bit by bit, in fp32 up to the order
    of sums. No memory is added: a weight that another module shares, such as a head tied to the
    embedding, is not packed.

    Args:
        model: a model that will only be used for inference; its ``nn.Linear`` modules are changed
            in place, and can then be neither trained, compiled, moved, copied nor saved.
        weight_bits: 4 rounds the weights to 4 bits, with a scale and a zero point for each 32
            numbers of a row, if inputs are a multiple of 32 and outputs of 16. Steps of up to four
            sequences read these, more rows the packed weight, which stays: 0.31 of its bytes are
            added. Weights that were quantized in the same way before (GGUF's Q4_1) change only by
            the rounding of their scales to bf16.

    Returns:
        The number of packed layers: 0 on processors other than x86, on devices other than the CPU,
        without oneDNN, and in dtypes that its products do not support on this processor.

    Raises:
        ValueError: If ``weight_bits`` is set and no layer supports it.
    """
    if platform.machine() not in _X86:
        return 0
    layers = _packable(model)
    if layers:
        limit_kernels()
    weights = {id(module.weight) for module in layers}
    for parameter in model.parameters() if layers else ():
        if id(parameter) not in weights:  # a view would keep the checkpoint's file in memory
            parameter.data = parameter.data.clone()
    for number, module in enumerate(layers, 1):
        module.__class__ = PackedLinear
        weight = module.weight.detach()
        if weight_bits is not None and not (weight.shape[1] % _GROUP or len(weight) % _OUTPUTS):
            module.__class__ = Int4Linear
            module.codes, module.scales, weight = _to_int4(weight)
        packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        module.weight = nn.Parameter(packed_weight, requires_grad=False)
        if number % _TRIM_INTERVAL == 0 or number == len(layers):
            _trim_memory()
    has_int4 = any(type(module) is Int4Linear for module in model.modules())
    if weight_bits is not None and not has_int4:
        name = type(model).__name__
        problem = f"={weight_bits}: {name} has no linear layers that it fits; leave it out"
        raise FieldError(("weight_bits",), problem)
    return len(layers)


def _packable(model: nn.Module) -> list[Any]:
    """Return the layers whose weights no other module reads and products here take packed."""
    owners = Counter(
        id(parameter) for module in model.modules() for parameter in module._parameters.values()
    )
    return [
        module
        for name, module in model.named_modules()
        # Not a subclass, whose forward may differ.
        if type(module) is nn.Linear
        and not name.endswith(_READ_BY_OTHERS)
        and owners[id(module.weight)] == 1
        and module.weight.device.type == "cpu"
        and _multiplies(module.weight.dtype)
    ]


def int4_bytes(model: nn.Module) -> int:
    """Return the bytes that weights of 4 bits take besides the dense ones."""
    weights = [m.weight for m in model.modules() if type(m) is nn.Linear]
    fitting = [w for w in weights if not (w.shape[1] % _GROUP or len(w) % _OUTPUTS)]
    return sum(w.numel() // 2 + 2 * w.numel() // _GROUP * w.element_size() for w in fitting)


def _to_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes and scales, and the dequantized weight ``[outputs, inputs]``."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // _GROUP, _GROUP)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    # Rounded first, because the product reads them in the weight's dtype.
    scale = ((high - low) / (_CODES - 1)).to(weight.dtype)
    zero = (low + _MIDPOINT * scale.float()).to(weight.dtype)
    steps = (groups - zero.float()) / scale.float().clamp_min(torch.finfo(torch.float32).tiny)
    steps = steps.round().clamp(-_MIDPOINT, _CODES - 1 - _MIDPOINT)
    dense = (steps * scale.float() + zero.float()).view(outputs, inputs).to(weight.dtype)
    codes = (steps + _MIDPOINT).to(torch.int32).view(outputs, inputs)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, _INNER_TILES)
    scales = torch.cat([scale, zero], -1).transpose(0, 1).contiguous()
    return packed, scales, dense


def _trim_memory() -> None:
    """Return the old weights' memory to the system; loader threads would keep it."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has matrix products of a dtype for this processor."""
    ops: Any = torch.ops.mkldnn
    supported = {
        torch.float32: lambda: True,
        torch.bfloat16: ops._is_mkldnn_bf16_supported,
        torch.float16: ops._is_mkldnn_fp16_supported,
    }
    return torch.backends.mkldnn.is_available() and dtype in supported and supported[dtype]()
