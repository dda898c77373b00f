"""A CUDA device without a GPU, which counts what would be launched and where the host would wait.

Tensors say that they are on ``cuda``, and their numbers are on the CPU. So the package takes its
way for GPUs, and every operation passes through one function here. Triton's kernels are counted;
where results matter they also run, in Triton's interpreter, which is slow.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
_WITHOUT_LAUNCH = {"_unsafe_view", "_local_scalar_dense", "is_same_size"}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class PretendedTensor(torch.Tensor):
    """A tensor that says it is on `DEVICE`."""

    numbers: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, device=DEVICE,
        )  # fmt: skip
        tensor.numbers = numbers
        return tensor

    def __init__(self, numbers):
        """Take the numbers, which `__new__` has noted."""

    def data_ptr(self):
        return self.numbers.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    def __repr__(self):
        return f"PretendedTensor({self.numbers!r})"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {}, None)


class Counts:
    """Launches and waits of the package, each with the line of the package that caused it."""

    def __init__(self):
        self.launches, self.waits = Counter(), Counter()

    def __sub__(self, other):
        """Return how many more there are of each, which may be fewer."""
        difference = Counts()
        for name in ("launches", "waits"):
            counter = Counter(getattr(self, name))
            counter.subtract(getattr(other, name))
            setattr(difference, name, counter)
        return difference

    @property
    def num_launches(self) -> int:
        return self.launches.total()

    @property
    def num_waits(self) -> int:
        return self.waits.total()

    def __str__(self):
        lines = [f"{self.num_launches} launches, {self.num_waits} waits"]
        for title, counter in (("wait", self.waits), ("launch", self.launches)):
            lines += [
                f"{title} {count} x {name} in {line}"
                for (name, line), count in counter.most_common()
                if count
            ]
        return "\n".join(lines)


class _Device(TorchDispatchMode):
    """Sends every operation through `_run`, those without tensors too."""

    def __init__(self, runs_kernels, everywhere):
        super().__init__()
        self.runs_kernels, self.everywhere, self.counts = runs_kernels, everywhere, None

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {}, self)

    def count(self, name, launches, waits):
        if self.counts is None:
            return
        line = "" if self.everywhere else _line_of_package()
        if line is None:
            return
        if launches:
            self.counts.launches[name, line] += 1
        if waits:
            self.counts.waits[name, line] += 1


def _line_of_package() -> str | None:
    """Return the innermost line of the package on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("h2okv."):
            return f"{module}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return None


def _numbers(tree):
    return tree_map(lambda leaf: leaf.numbers if isinstance(leaf, PretendedTensor) else leaf, tree)


def _run(operation, args, kwargs, mode):
    name = operation._schema.name.partition("::")[2]
    device = kwargs.get("device")
    target = None if device is None else torch.device(device).type
    target = "cuda" if target == "meta" else target  # as the guard of `_device_guards` says
    inputs = {
        id(leaf.numbers): leaf
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, PretendedTensor)
    }
    on_device = target == "cuda" or (bool(inputs) and target is None)
    if mode is not None and (inputs or on_device):
        waits = _waits(operation, name, args, kwargs, target)
        is_copy = bool(inputs) and target not in (None, "cuda")  # to the host
        is_free = operation.is_view or name in _WITHOUT_LAUNCH | _ALLOCATIONS
        mode.count(name, not is_free or is_copy, waits)
    if target == "cuda":
        kwargs = kwargs | {"device": torch.device("cpu")}
    result = operation(*_numbers(args), **_numbers(kwargs))
    if name in _ALLOCATIONS and result.is_floating_point():
        # Nothing may rely on memory that was not written, except by kernels that do not run.
        result.fill_(torch.nan if mode is not None and mode.runs_kernels else 0.0)
    if not on_device:
        return result

    def wrap(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return inputs[id(leaf)] if id(leaf) in inputs else PretendedTensor(leaf)

    return tree_map(wrap, result)


def _waits(operation, name, args, kwargs, target) -> bool:
    """Tell whether the host would wait for the device in an operation on its tensors."""
    if name in ("_to_copy", "copy_"):
        source = args[0] if name == "_to_copy" else args[1]
        is_blocking = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
        if name == "copy_":
            return isinstance(args[0], PretendedTensor) != isinstance(source, PretendedTensor) and (
                is_blocking or isinstance(source, PretendedTensor)
            )
        if isinstance(source, PretendedTensor):
            return target not in (None, "cuda")
        return target == "cuda" and is_blocking
    if name in _INDEXING:
        kinds = {index.dtype for index in args[1] if index is not None}
        return bool(kinds & {torch.bool, torch.uint8})
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and len(args) == 1
    shaped_by_data = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return bool(shaped_by_data & set(operation.tags))


class _Kernel:
    """A kernel of Triton whose launches count."""

    def __init__(self, name, kernel, device):
        self._name, self._kernel, self._device = name, kernel, device

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self._device.count(self._name, True, False)
            if not self._device.runs_kernels:
                return
            with torch.utils._python_dispatch._disable_current_modes():
                self._kernel[grid](*_numbers(args), **_numbers(kwargs))

        return launch


class PretendedDevice:
    """What tests use: `to` moves a model, `count` counts inside a block."""

    def __init__(self, mode):
        self._mode = mode

    def to(self, module):
        """Move a module's parameters and buffers; mutates it."""
        for child in module.modules():
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    moved = PretendedTensor(parameter.data)
                    child._parameters[name] = torch.nn.Parameter(moved, requires_grad=False)
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[name] = PretendedTensor(buffer)
        return module

    @contextmanager
    def count(self):
        """Count what the package launches inside the block, and where it waits."""
        self._mode.counts = counts = Counts()
        try:
            yield counts
        finally:
            self._mode.counts = None


# Numbers of c10::DeviceType.
_CUDA, _META = 1, 14


def _device_guards():
    """Return what torch calls to change the device, by number; that of ``meta`` does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        guards = (ctypes.c_void_p * (_META + 1)).in_dll(
            library, "_ZN3c104impl26device_guard_impl_registryE"
        )
    except (OSError, ValueError):
        pytest.skip("this build of torch does not show its device guards")
    if torch.cuda.is_available() or guards[_CUDA] is not None or guards[_META] is None:
        pytest.skip("this build of torch has devices of its own")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's kernels do not run in Python here")
    return guards


class _Properties:
    multi_processor_count = 132


@contextmanager
def pretended_device(patch, runs_kernels=False, everywhere=False):
    """Make a pretended device for a block.

    Args:
        patch: pytest's `monkeypatch`.
        runs_kernels: whether Triton's kernels run; else what they would write is left as it is.
        everywhere: whether to count what is launched by others than the package too.

    Yields:
        `PretendedDevice`.
    """
    from h2okv.ops import dispatch, triton_decode, triton_prefill

    guards, device = _device_guards(), _Device(runs_kernels, everywhere)
    patch.setattr(torch.cuda, "_lazy_init", lambda: None)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: _Properties)
    # Too old for PyTorch's fused attention that keeps the log-sum-exp: our kernel runs.
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    patch.setattr(torch._dynamo, "mark_static_address", lambda tensor: None)
    patch.setattr(dispatch, "_there", lambda launch: launch)
    patch.setenv(dispatch.VARIABLE, "auto")
    for module, name in (
        (triton_decode, "_attend"), (triton_decode, "_finish"),
        (triton_prefill, "_forward"), (triton_prefill, "_sums"),
    ):  # fmt: skip
        patch.setattr(module, name, _Kernel(name, getattr(module, name), device))
    caches = dispatch._load_kernels, dispatch._flash_agrees, dispatch._disagreement
    for cached in caches:
        cached.cache_clear()
    if not runs_kernels:
        patch.setattr(dispatch, "_disagreement", lambda case: None)
    guards[_CUDA] = guards[_META]
    torch._C._set_only_lift_cpu_tensors(True)  # then a tensor of Python numbers is a copy
    try:
        with device:
            yield PretendedDevice(device)
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        guards[_CUDA] = None
        for cached in caches:
            cached.cache_clear()
