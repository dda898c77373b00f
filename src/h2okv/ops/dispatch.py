"""Which implementation runs an operation: by device, dtype and shape, or as the user says."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from h2okv.ops import compiled, flash, step
from h2okv.ops.blockwise import Visibility, blockwise_attention_with_scores
from h2okv.ops.compaction import compact
from h2okv.ops.packing import Packed
from h2okv.ops.reference import attention_with_scores
from h2okv.ops.step import Slots, StepRules

VARIABLE = "H2OKV_OPS"
"""Environment variable that names the implementation for a whole process."""
IMPLEMENTATIONS = ("auto", "plain", "compiled", "triton")
_STEPS_BEFORE_COMPILING = 256
"""Plain steps of a layer after which machine code for the next run is worth its making."""

_override: ContextVar[str | None] = ContextVar("h2okv_ops", default=None)


class BlockOperations(NamedTuple):
    """What a block of tokens runs through.

    Attributes:
        name: of the implementation.
        why: in a few words.
        attend: as `blockwise_attention_with_scores`.
        compact: as `h2okv.ops.compaction.compact`.
    """

    name: str
    why: str
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    compact: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


class StepOperation(NamedTuple):
    """What a single token runs through.

    Attributes:
        name: of the implementation.
        why: in a few words.
        run: as `h2okv.ops.step.decode_step`.
    """

    name: str
    why: str
    run: Callable[..., torch.Tensor]


@contextmanager
def use(implementation: str) -> Iterator[None]:
    """Chooses the implementation of caches that read their prompt inside the block.

    Args:
        implementation: ``"auto"``; ``"plain"``: PyTorch alone; ``"compiled"``: machine code on a
            CPU, compiled now if it must be; ``"triton"``: the GPU kernels, or an error.

    Raises:
        ValueError: if there is no such implementation.
    """
    token = _override.set(_known(implementation, "ops"))
    try:
        yield
    finally:
        _override.reset(token)


def wanted() -> str:
    """Returns the implementation that was asked for: by `use`, else by the environment.

    Raises:
        ValueError: if the environment names one that does not exist.
    """
    return _override.get() or _known(os.environ.get(VARIABLE, "auto"), VARIABLE)


def _known(name: str, where: str) -> str:
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"{where}={name!r} is no implementation; choose one of {', '.join(IMPLEMENTATIONS)}."
        )
    return name


def block_operations(
    device: torch.device, dtype: torch.dtype, size: int, value_size: int, groups: int
) -> BlockOperations:
    """Chooses what reads the blocks of a layer.

    Args:
        device: where the layer is.
        dtype: of its keys and values.
        size: D.
        value_size: Dv.
        groups: G.

    Returns:
        The operations.

    Raises:
        ValueError: if an implementation was asked for that cannot work here.
    """
    kernels, why = _kernels(device, dtype, size, value_size, groups)
    if kernels is None:
        return BlockOperations("plain", why, blockwise_attention_with_scores, compact)
    return BlockOperations("triton", why, kernels.attend, kernels.compact)


def step_operation(
    slots: Slots, rules: StepRules, groups: int, dtype: torch.dtype | None = None
) -> StepOperation:
    """Chooses what runs the steps of a layer, until its next block.

    Args:
        slots: what the layer holds.
        rules: how it steps.
        groups: G.
        dtype: of the keys and values of new tokens; ``None``: as in the slots.

    Returns:
        The operation.

    Raises:
        ValueError: if an implementation was asked for that cannot work here.
    """
    device, keys = slots.scores.device, slots.keys
    if isinstance(keys, Packed):
        kernels, why = None, "the kernels do not read packed slots"
        if wanted() == "triton":
            raise ValueError(
                f"ops='triton': {why}; leave the choice to ops='auto', or kv_bits out."
            )
    else:
        sizes = keys.shape[-1], slots.values.shape[-1]
        kernels, why = _kernels(device, keys.dtype, *sizes, groups)
    if kernels is not None:
        return StepOperation("triton", why, kernels.step)
    if device.type != "cpu" or wanted() == "plain":
        return StepOperation("plain", why, step.decode_step)
    return _step_on_cpu(slots, rules, groups, dtype)


def _step_on_cpu(
    slots: Slots, rules: StepRules, groups: int, dtype: torch.dtype | None
) -> StepOperation:
    """Machine code where there is some, else plain PyTorch that has it made for the next run."""
    if rules.priority is not None:
        return StepOperation("plain", "the policy ranks by its own code", step.decode_step)
    if slots.scores.shape[0] * slots.scores.shape[1] < 2:
        return StepOperation("plain", "one head of one sequence is too little", step.decode_step)
    spec = compiled.spec_of(slots, rules, groups, dtype)
    try:
        if wanted() == "compiled" and not compiled.package_path(spec).exists():
            _check_compiler()
            compiled.compile_package(spec)
        package = compiled.load(spec)
    except FileNotFoundError:
        if compiled.compiler() is None:
            return StepOperation("plain", "there is no C++ compiler", step.decode_step)
        why = f"not compiled yet; will be after {_STEPS_BEFORE_COMPILING} steps"
        return StepOperation("plain", why, _Patience(spec))
    if package is None:
        return StepOperation("plain", "the compiled code disagrees", step.decode_step)
    return StepOperation(
        "compiled", "machine code from an earlier run", compiled.CompiledStep(package)
    )


def _check_compiler() -> None:
    if compiled.compiler() is None:
        raise ValueError(
            "ops='compiled' needs a C++ compiler such as g++, and there is none; install one, or "
            "leave the choice to ops='auto'."
        )


class _Patience:
    """Plain steps, which ask for machine code when there have been many."""

    def __init__(self, spec: compiled.Spec) -> None:
        self.spec = spec
        self.left = _STEPS_BEFORE_COMPILING

    def __call__(self, *args: Any) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            compiled.request(self.spec)
        return step.decode_step(*args)


class _Kernels(NamedTuple):
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    compact: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    step: Callable[..., torch.Tensor]


def _kernels(
    device: torch.device, dtype: torch.dtype, size: int, value_size: int, groups: int
) -> tuple[_Kernels | None, str]:
    """The Triton kernels if they are wanted and work here, and why or why not."""
    name = wanted()
    if name in ("plain", "compiled"):
        return None, f"asked for: {name}"
    trouble = None
    if importlib.util.find_spec("triton") is None:
        trouble = "Triton is not installed"
    elif device.type != "cuda" and not _interprets():
        trouble = f"Triton has no kernels for {device.type}"
    elif dtype not in (torch.float32, torch.bfloat16, torch.float16):
        trouble = f"the kernels do not take {dtype}"
    else:
        trouble = _disagreement(device, dtype, size, value_size, groups)
        if trouble is not None and name == "auto":
            warnings.warn(f"h2okv: Triton kernels are left out: {trouble}", stacklevel=2)
    if trouble is None:
        kernels = _load_kernels(device)
        if _flash_agrees(device, dtype, size, value_size, groups):
            attend = functools.partial(kernels.attend, uses_flash=True)
            return kernels._replace(attend=attend), "the kernels, and flash, agreed with PyTorch"
        return kernels, "the kernels agreed with plain PyTorch here"
    if name == "triton":
        raise ValueError(f"ops='triton': {trouble}; leave the choice to ops='auto'.")
    return None, trouble


def _interprets() -> bool:
    """Whether Triton runs kernels in Python, for tests without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1" and wanted() == "triton"


@functools.cache
def _load_kernels(device: torch.device) -> _Kernels:
    from h2okv.ops import triton_compaction, triton_decode, triton_prefill

    cores = 1
    if device.type == "cuda":
        cores = torch.cuda.get_device_properties(device).multi_processor_count
    return _Kernels(
        _there(triton_prefill.attention_with_scores),
        _there(triton_compaction.compact),
        _there(functools.partial(triton_decode.decode_step, num_cores=cores)),
    )


def _there(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Launches on the first tensor's device: Triton takes the current one, whatever it is."""

    def run(first: torch.Tensor, *args: Any, **options: Any) -> Any:
        # A compiler sees to that itself.
        if not first.is_cuda or torch.compiler.is_compiling():
            return launch(first, *args, **options)
        with torch.cuda.device(first.device):
            return launch(first, *args, **options)

    return run


@functools.cache
def _flash_agrees(
    device: torch.device, dtype: torch.dtype, size: int, value_size: int, groups: int
) -> bool:
    """Tries PyTorch's own fused attention, whose sums come from our kernel, likewise."""
    query, key, value, _ = _example_block(device, dtype, size, value_size, groups)
    past = key.shape[2] - query.shape[2]
    if not flash.applies(query, value, Visibility(past), None):
        return False
    try:
        attend = functools.partial(_load_kernels(device).attend, uses_flash=True)
        made = attend(query, key, value, Visibility(past), size**-0.5)
    except Exception:  # a failure of any kind leaves the kernel of our own
        return False
    return _same(made, attention_with_scores(query, key, value, _causal(query, key), size**-0.5))


@functools.cache
def _disagreement(
    device: torch.device, dtype: torch.dtype, size: int, value_size: int, groups: int
) -> str | None:
    """Tries the kernels on next to nothing; what is wrong with them, or ``None``.

    No kernel decides a user's text before it has agreed with plain PyTorch on this very device.
    """
    query, key, value, entries = _example_block(device, dtype, size, value_size, groups)
    length, heads = query.shape[2], key.shape[1]
    past = key.shape[2] - length
    visible = _causal(query, key) & entries.unsqueeze(2)
    indices = torch.arange(past, past + length, device=device).expand(1, heads, -1).contiguous()
    scale = size**-0.5
    held = _example_slots(key, value)
    twins = [part.clone() for part in held]
    column = torch.full((1, 1, 1), 30, device=device)
    rules = StepRules(scale, column, full=True)
    token = query[:, :, :1], key[:, :, :1], value[:, :, :1]
    try:
        kernels = _load_kernels(device)
        made = (
            *kernels.attend(query, key, value, Visibility(past, entries), scale),
            kernels.compact(key, indices, length + 1),
            kernels.step(*token, Slots(*held), rules),
            *held,
        )
    except Exception as error:  # a compiler's failures have as many types as there are drivers
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    expected = (
        *attention_with_scores(query, key, value, visible, scale),
        compact(key, indices, length + 1),
        step.decode_step(*token, Slots(*twins), rules),
        *twins,
    )
    if _same(made, expected):
        return None
    return f"they differ from plain PyTorch for {dtype} and heads of {size}"


def _same(made: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> bool:
    return all(
        torch.allclose(one.float(), other.float(), atol=3e-2, rtol=3e-2)
        for one, other in zip(made, expected, strict=True)
    )


def _example_block(
    device: torch.device, dtype: torch.dtype, size: int, value_size: int, groups: int
) -> tuple[torch.Tensor, ...]:
    """Query, key and value of 70 tokens after 20, and which keys are entries, ``[1, H, N]``."""
    generator = torch.Generator().manual_seed(0)
    length, num_keys, heads = 70, 90, 2

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    entries = torch.arange(num_keys, device=device) % 7 > 0
    return (
        draw(1, heads * groups, length, size),
        draw(1, heads, num_keys, size),
        draw(1, heads, num_keys, value_size),
        entries.expand(1, heads, -1),
    )


def _causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Which keys each query may see, bool ``[T, N]``; the last query sees the last key."""
    columns = torch.arange(key.shape[2], device=key.device)
    return columns <= columns[-query.shape[2] :].unsqueeze(1)


def _example_slots(key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """The first parts of `Slots` of which all but one are taken."""
    shape = key.shape[:3]
    positions = torch.arange(shape[2], dtype=torch.int32, device=key.device).repeat(*shape[:2], 1)
    positions[..., -1] = -1
    return [
        key.clone(),
        value.clone(),
        (positions % 13).float(),
        positions,
        torch.full((*shape[:2], 1), shape[2] - 1, device=key.device),
        torch.full(shape[:1], shape[2] - 1, device=key.device),
    ]
