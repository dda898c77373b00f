"""A CUDA device without a GPU, which counts what would be launched and where the host would wait.

Tensors say that they are on ``cuda``, and their numbers are on the CPU. So the package takes its
way for GPUs, and every operation passes through one function here. Triton's kernels are counted;
where results matter they also run, in Triton's interpreter, which is slow.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import LlamaConfig, LlamaForCausalLM

from h2okv.ops import dispatch

DEVICE = torch.device("cuda", 0)
_Generator = torch.Generator
_WITHOUT_LAUNCH = {"_unsafe_view", "_local_scalar_dense", "is_same_size"}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


def _flash(query, key, value, dropout=0.0, is_causal=False, mask=False, scale=None):
    """Do SDPA's attention for GPUs, with fewer KV heads than query heads as there."""
    key, value = (s.repeat_interleave(query.shape[1] // s.shape[1], dim=1) for s in (key, value))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, limits = flash(query, key, value, dropout, is_causal, scale=scale)
    none = torch.zeros(0)
    return output, limits, none, none, query.shape[2], key.shape[2], none, none, none


# The check takes seconds in the interpreter; the kernels are the same in all tests.
_check_once = functools.cache(dispatch._disagreement.__wrapped__)

_ON_CPU = {"_scaled_dot_product_flash_attention": _flash}


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

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), PretendedTensor(self.numbers.clone()))

    def __repr__(self):
        return f"PretendedTensor({self.numbers!r})"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {}, None)


class Counts:
    """Launches, waits and hazards, each with the line of the package that caused it.

    A hazard is what a CUDA graph cannot record: a number or a size that the host learns from the
    device, or a copy between them.
    """

    def __init__(self):
        self.launches, self.waits, self.hazards = Counter(), Counter(), Counter()

    def __sub__(self, other):
        """Return how many more there are of each, which may be fewer."""
        difference = Counts()
        for name in ("launches", "waits", "hazards"):
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
        counters = {"hazard": self.hazards, "wait": self.waits, "launch": self.launches}
        for title, counter in counters.items():
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
        self.recording = None  # of a graph: calls that do again what was done
        self.before = {}  # by address, memory that they have changed, as it was
        self.sync_debug_mode = 0
        self.on_the_way = []  # copies to the host that it does not wait for, and their numbers

    def copy_later(self, numbers):
        """Return what a copy to the host has before the host waits for an event behind it."""
        copy = torch.full_like(numbers, -99)
        self.on_the_way.append((copy, numbers))
        return copy

    def keep(self, tensors):
        """Note memory that a recording will write, which runs nothing on a GPU."""
        with torch.utils._python_dispatch._disable_current_modes():
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.before:
                    self.before[storage.data_ptr()] = storage, storage.clone()

    def put_back(self):
        with torch.utils._python_dispatch._disable_current_modes():
            for storage, numbers in self.before.values():
                storage.copy_(numbers)
        self.before = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {}, self)

    def count(self, name, launches, waits=False, hazard=None):
        if waits and self.sync_debug_mode:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        if self.counts is None:
            return
        line = _line_of_package()
        if line is None and not self.everywhere:
            return
        if launches:
            self.counts.launches[name, line] += 1
        if waits:
            self.counts.waits[name, line] += 1
        if hazard is not None:
            self.counts.hazards[hazard, line] += 1


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
        hazard, waits = _hazard(operation, name, args, kwargs, target)
        is_copy = bool(inputs) and target not in (None, "cuda")  # to the host
        is_free = operation.is_view or name in _WITHOUT_LAUNCH | _ALLOCATIONS
        mode.count(name, not is_free or is_copy, waits, hazard)
    if target == "cuda":
        kwargs = kwargs | {"device": torch.device("cpu")}
    operation = _ON_CPU.get(name, operation)
    if mode is not None and mode.recording is not None:
        mode.keep(_written(operation, args, kwargs))
    if name == "_pin_memory":
        return args[0].clone()
    result = operation(*_numbers(args), **_numbers(kwargs))
    if name == "_to_copy" and kwargs.get("non_blocking") and mode is not None and not on_device:
        return mode.copy_later(result) if inputs else result
    if name in _ALLOCATIONS and result.is_floating_point():
        # Nothing may rely on memory that was not written, except by kernels that do not run.
        result.fill_(torch.nan if mode is not None and mode.runs_kernels else 0.0)
    if not on_device:
        return result

    def wrap(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return inputs[id(leaf)] if id(leaf) in inputs else PretendedTensor(leaf)

    result = tree_map(wrap, result)
    if mode is not None and mode.recording is not None:
        if hazard is not None:
            raise RuntimeError(f"a graph cannot record {name}: {hazard}")
        if name not in _ALLOCATIONS:
            mode.recording.append(functools.partial(_repeat, operation, args, kwargs, result))
    return result


def _written(operation, args, kwargs):
    """Return the numbers of the arguments that an operation writes."""
    schema = getattr(operation, "_schema", None)
    for index, argument in enumerate(() if schema is None else schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            yield from (x for x in tree_leaves(_numbers(value)) if isinstance(x, torch.Tensor))


def _repeat(operation, args, kwargs, result):
    """Run an operation of a graph again, into the tensors that it gave when it was recorded."""
    again = operation(*_numbers(args), **_numbers(kwargs))
    for before, leaf in zip(tree_leaves(result), tree_leaves(again), strict=True):
        if isinstance(before, PretendedTensor) and before.numbers.data_ptr() != leaf.data_ptr():
            before.numbers.copy_(leaf)


class _Graph:
    """A CUDA graph. It runs what it records, and puts back what that has changed."""

    device: _Device
    num_replays = 0

    def capture_begin(self, **options):
        self.calls = self.device.recording = []

    def capture_end(self):
        self.device.recording = None
        self.device.put_back()

    @contextmanager
    def record(self, **options):
        self.capture_begin()
        try:
            yield
        finally:
            self.capture_end()

    def replay(self):
        _Graph.num_replays += 1
        with torch.utils._python_dispatch._disable_current_modes():
            for call in self.calls:
                call()


class _Event:
    """An event, which knows the copies before it."""

    device: _Device

    def __init__(self, enable_timing=False):
        self.copies = []

    def record(self, stream=None):
        self.copies, self.time = list(self.device.on_the_way), time.perf_counter()

    def synchronize(self):
        for copy, numbers in self.copies:
            copy.copy_(numbers)
        done = {id(pair) for pair in self.copies}
        on_the_way = self.device.on_the_way
        self.device.on_the_way, self.copies = [p for p in on_the_way if id(p) not in done], []

    def elapsed_time(self, end):
        return 1000 * (end.time - self.time)


class _OnTheHost:
    """Stand in for `torch.Generator`: a class, since annotations join it with `|`."""

    def __new__(cls, device=None):
        return _Generator()


class _Stream:
    def __init__(self, device=None):
        """Take the device that a stream is for."""

    def wait_stream(self, stream):
        """Do nothing: all runs in order."""


def _record_callable(run, arguments):
    """Do what `torch.cuda.make_graphed_callables` does."""
    graph = _Graph()
    run(*arguments)
    with graph.record():
        output = run(*arguments)

    def replay(*args):
        for target, source in zip(arguments, args, strict=True):
            target.copy_(source)
        graph.replay()
        return output

    return replay


def _hazard(operation, name, args, kwargs, target) -> tuple[str | None, bool]:
    """Return why a CUDA graph cannot record an operation, and whether the host would wait."""
    if name in ("_to_copy", "copy_"):
        source = args[0] if name == "_to_copy" else args[1]
        is_from = isinstance(source, PretendedTensor)
        is_to = isinstance(args[0], PretendedTensor) if name == "copy_" else target == "cuda"
        if name == "_to_copy" and target is None:
            is_to = is_from
        if is_from == is_to:
            return None, False
        is_blocking = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
        return "copy to the host" if is_from else "copy from the host", is_blocking
    if name in _INDEXING:
        return ("nonzero", True) if _has_mask(args[1]) else (None, False)
    if name == "repeat_interleave":
        is_unknown = kwargs.get("output_size") is None and len(args) == 1
        return ("unknown size", True) if is_unknown else (None, False)
    if torch.Tag.dynamic_output_shape in operation.tags:
        return "nonzero" if name == "nonzero" else "unknown size", True
    return ("item", True) if torch.Tag.data_dependent_output in operation.tags else (None, False)


def _has_mask(indices) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


class _Kernel:
    """A kernel of Triton whose launches count."""

    def __init__(self, name, kernel, device, runs):
        self._name, self._kernel, self._device, self._runs = name, kernel, device, runs

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self._device.count(self._name, True)
            if not self._runs:
                arguments = dict(zip(self._kernel.arg_names, args, strict=False))
                for name in arguments.keys() & {"seen", "columns"}:  # as later blocks rely on them
                    arguments[name].numbers.add_(self._name == "_finish")
                return

            def run():
                with torch.utils._python_dispatch._disable_current_modes():
                    self._kernel[grid](*_numbers(args), **_numbers(kwargs))

            if self._device.recording is not None:
                tensors = tree_leaves(_numbers((args, kwargs)))
                self._device.keep(t for t in tensors if isinstance(t, torch.Tensor))
                self._device.recording.append(run)
            run()

        return launch


class PretendedDevice:
    """What tests use: `to` moves a model, `count` counts inside a block."""

    def __init__(self, mode):
        self._mode = mode

    @property
    def num_replays(self):
        """Graphs that were replayed."""
        return _Graph.num_replays

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


def make_model(dtype=torch.float32, layers=2, attention="h2o", **options):
    """Make a tiny model on the CPU."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, max_position_embeddings=512, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.set_attn_implementation(attention)
    return model


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
    from h2okv.ops import triton_cut, triton_decode, triton_prefill

    guards, device = _device_guards(), _Device(runs_kernels, everywhere)
    patch.setattr(torch.cuda, "_lazy_init", lambda: None)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: _Properties)
    # Too old for PyTorch's fused attention that keeps the log-sum-exp: our kernel runs.
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    patch.setattr(torch._dynamo, "mark_static_address", lambda tensor: None)
    patch.setattr(_Graph, "device", device, raising=False)
    patch.setattr(_Graph, "num_replays", 0)
    patch.setattr(torch.cuda, "CUDAGraph", _Graph)
    patch.setattr(_Event, "device", device, raising=False)
    patch.setattr(torch.cuda, "Event", _Event)
    patch.setattr(torch, "Generator", _OnTheHost)
    patch.setattr(torch.cuda, "graph", lambda graph, **options: graph.record())
    patch.setattr(torch.cuda, "make_graphed_callables", _record_callable)
    patch.setattr(torch.cuda, "Stream", _Stream)
    patch.setattr(torch.cuda, "device", lambda device: nullcontext())
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 36, 1 << 36))
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.recording is not None)
    patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: device.sync_debug_mode)
    patch.setattr(
        torch.cuda, "set_sync_debug_mode",
        lambda mode: setattr(device, "sync_debug_mode", mode if mode != "warn" else 1),
    )  # fmt: skip
    stream = _Stream()
    patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for module in (torch.accelerator, torch.cuda):
        patch.setattr(module, "synchronize", lambda device=None: None)
    patch.setattr(dispatch, "_there", lambda launch: launch)
    patch.setenv(dispatch.VARIABLE, "auto")
    for module, *names in (
        (triton_decode, "_attend", "_finish"), (triton_prefill, "_forward", "_sums", "_rotate"),
        (triton_cut, "_select", "_move", "_join"),
    ):  # fmt: skip
        for name in names:
            patch.setattr(module, name, _Kernel(name, getattr(module, name), device, runs_kernels))
    caches = dispatch._load_kernels, dispatch._flash_agrees
    for cached in caches:
        cached.cache_clear()
    patch.setattr(dispatch, "_disagreement", _check_once if runs_kernels else lambda case: None)
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
