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
from torch import Tensor

from h2okv.ops import flash_varlen
from h2okv.ops.attention import blockwise_attention_with_scores, expected_attention, mean_queries
from h2okv.ops.choice import CutRules, choose, protected_entries
from h2okv.ops.compaction import compact
from h2okv.ops.decode import QueryRing, Slots, StepRules, decode_step
from h2okv.ops.reference import AttentionSpec, Visibility, attention_with_scores, causal

VARIABLE = "H2OKV_OPS"  # of the environment: the implementation for a whole process
IMPLEMENTATIONS = ("auto", "plain", "triton")
_override: ContextVar[str | None] = ContextVar("h2okv_ops", default=None)
# Device, dtype, D, Dv, G, and whether heads share rows: what decides whether the kernels can run.
Case = tuple[torch.device, torch.dtype, int, int, int, bool]


class Cut(NamedTuple):
    """The kernels of `h2okv.ops.triton_cut`."""

    select: Callable[..., Any]
    move: Callable[..., None]
    join: Callable[..., Any]


class Operations(NamedTuple):
    """The operations of a layer: a block, its expected attention, a step, a cut."""

    name: str  # of the implementation
    why: str  # in a few words
    # As `blockwise_attention_with_scores`; None for sums that are not needed.
    attend: Callable[..., tuple[Tensor, Any]] = blockwise_attention_with_scores
    expect: Callable[..., Tensor] = expected_attention
    step: Callable[..., Tensor] = decode_step  # a single token
    cut: Cut | None = None  # of unpacked entries; None: `h2okv.ops.choice` and `compaction`


@contextmanager
def use(implementation: str) -> Iterator[None]:
    """Chooses the implementation of caches that read their prompt inside the block.

    Args:
        implementation: ``"auto"``; ``"plain"``: PyTorch alone; ``"triton"``: the GPU kernels, or
            an error.

    Raises:
        ValueError: if there is no such implementation.
    """
    token = _override.set(_checked_name(implementation, "ops"))
    try:
        yield
    finally:
        _override.reset(token)


def implementation_in_use() -> str:
    """Return the implementation set by `use`, else by the environment."""
    return _override.get() or _checked_name(os.environ.get(VARIABLE, "auto"), VARIABLE)


def _checked_name(name: str, where: str) -> str:
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"{where}={name!r} is not an implementation; choose one of"
            f" {', '.join(IMPLEMENTATIONS)}."
        )
    return name


def operations(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    value_size: int,
    groups: int,
    is_packed: bool = False,
    is_by_head: bool = False,
) -> Operations:
    """Chooses what the tokens of a layer run through, until its next block."""
    name, why, remedy = implementation_in_use(), None, "leave the choice to ops='auto'"
    case = device, dtype, size, value_size, groups, is_by_head
    if name == "plain":
        why = "asked for: plain"
    elif name == "triton" and is_packed:
        why, remedy = "the kernels do not read packed slots", f"{remedy}, or kv_bits out"
    else:
        why = _trouble(case)
    if name == "triton" and why is not None:
        raise ValueError(f"ops='triton': {why}; {remedy}.")
    if why is not None:
        return Operations("plain", why, blockwise_attention_with_scores)
    kernels = _load_kernels(device)
    if _flash_agrees(case):
        attend = functools.partial(kernels.attend, uses_flash=True)
        why = "the kernels, and flash, agreed with PyTorch"
        kernels = kernels._replace(attend=attend, why=why)
    return kernels._replace(step=decode_step, cut=None) if is_packed else kernels


def _trouble(case: Case) -> str | None:
    """Return why the Triton kernels cannot run here; ``None`` if they can."""
    device, dtype = case[:2]
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda" and not _interprets():
        return f"Triton has no kernels for {device.type}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the kernels do not take {dtype}"
    trouble = _disagreement(case)
    if trouble is not None and implementation_in_use() == "auto":
        warnings.warn(f"h2okv: Triton kernels are left out: {trouble}", stacklevel=2)
    return trouble


def _interprets() -> bool:
    """Tell whether Triton runs kernels in Python, for tests without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1" and implementation_in_use() == "triton"


@functools.cache
def _load_kernels(device: torch.device) -> Operations:
    from h2okv.ops import triton_cut, triton_decode, triton_prefill

    is_gpu = device.type == "cuda"
    cores = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1
    return Operations(
        "triton",
        "the kernels agreed with plain PyTorch here",
        _there(triton_prefill.attention_with_scores),
        _there(triton_prefill.expected_attention),
        _there(functools.partial(triton_decode.decode_step, num_cores=cores)),
        Cut(_there(triton_cut.select), _there(triton_cut.move), _there(triton_cut.join)),
    )


def _there(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Launch on the first tensor's device: Triton itself takes the current one."""

    def run(first: Any, *args: Any, **options: Any) -> Any:
        # A compiler sees to that itself.
        if not first.is_cuda or torch.compiler.is_compiling():
            return launch(first, *args, **options)
        with torch.cuda.device(first.device):
            return launch(first, *args, **options)

    return run


@functools.cache
def _flash_agrees(case: Case) -> bool:
    """Compare PyTorch's fused attention with the reference; its sums come from our kernel."""
    query, key, value, _ = _example_block(case)
    spec = AttentionSpec(query.shape[-1] ** -0.5)
    visibility = Visibility(key.shape[2] - query.shape[2])
    if not flash_varlen.applies(query, value, visibility, spec):
        return False
    try:
        attend = _load_kernels(case[0]).attend
        result = attend(query, key, value, visibility, spec, uses_flash=True)
    except Exception:  # a failure of any kind leaves the kernel of our own
        return False
    return _same(result, attention_with_scores(query, key, value, causal(query, key), spec))


@functools.cache
def _disagreement(case: Case) -> str | None:
    """Compare the kernels with PyTorch before use; return what is wrong, or ``None``."""
    device, dtype, size = case[:3]
    query, key, value, entries = _example_block(case)
    past, spec = key.shape[2] - query.shape[2], AttentionSpec(size**-0.5)
    token = query[:, :, :1], key[:, :, :1], value[:, :, :1]
    steps = [_example_step(query, key, value, spec, case[5], evicts) for evicts in (True, False)]
    cut, _ = _example_step(query, key, value, spec, False, True)
    try:
        kernels = _load_kernels(device)
        result = [
            *kernels.attend(query, key, value, Visibility(past, entries), spec),
            kernels.expect(query, key, entries, None, spec),
            *_cut_by(kernels.cut, cut),
        ]
        for slots, rules in steps:
            result += [kernels.step(*token, slots, rules), *_changed(slots, rules)]
    except Exception as error:  # a compiler's failures have as many types as there are drivers
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    visible = causal(query, key) & entries.unsqueeze(2)
    expected = [
        *attention_with_scores(query, key, value, visible, spec),
        expected_attention(query, key, entries, None, spec),
        *_cut_by(None, cut),
    ]
    for evicts in (True, False):
        slots, rules = _example_step(query, key, value, spec, case[5], evicts)
        expected += [decode_step(*token, slots, rules), *_changed(slots, rules)]
    if _same(result, expected):
        return None
    return f"they differ from plain PyTorch for {dtype} and heads of {size}"


def _cut_by(kernels: Cut | None, slots: Slots) -> list[Tensor]:
    """Cut an example's slots to ten, by PyTorch or by kernels: into new slots, and in place."""
    keys, values, scores, positions = slots.keys, slots.values, slots.scores, slots.positions
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    columns = [torch.full((1, 1, 1), number, device=keys.device) for number in (1, 3, 10)]
    sink, recent, total = columns
    rules = CutRules(torch.full((1,), 89, device=keys.device), sink, recent, total)
    if kernels is None:
        newest = rules.num_real_tokens.view(-1, 1, 1) - 1
        protected = protected_entries(positions, newest, rules.sink, rules.recent)
        indices, _ = choose(scores, positions, protected, rules.total, 10)
        survivors = [compact(states, indices, 12) for states in (keys, values)]
        survivors.append(scores.gather(-1, indices))
        survivors.append(positions.gather(-1, indices))
        return [*survivors, survivors[-1], keys, values, scores, positions]
    from h2okv.ops.triton_cut import Rows

    results, source = [], Rows(keys, values, scores, positions)
    for in_place in (False, True):
        chosen = kernels.select(scores, None, scores, positions, rules, 10, in_place)
        target = Rows(*(tensor[:, :, : 90 if in_place else 12].clone() for tensor in source[:4]))
        kernels.move(
            target if in_place else source,
            target,
            keys.shape[1],
            chosen,
            free=columns[0].repeat(1, 2, 1),
        )
        results.append(target)
    new, same = results
    survivors = [*new[:2], new.scores[..., :10], new.positions[..., :10]]
    first, last = slice(0, 60), slice(60, None)  # the last come as a block behind slots
    slots_before = Rows(*(tensor[:, :, first].contiguous() for tensor in source[:4]))
    joined, _ = kernels.join(slots_before, Rows(*(t[:, :, last] for t in source[:4])), None)
    return [*survivors, same.positions[..., :10].sort(dim=-1).values, *joined[:4]]


def _same(result: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return all(
        torch.allclose(actual.float(), reference.float(), atol=3e-2, rtol=3e-2)
        for actual, reference in zip(result, expected, strict=True)
    )


def _example_block(case: Case) -> tuple[Tensor, ...]:
    """Query, key and value of 70 tokens after 20, and which keys are entries, ``[1, H, N]``."""
    device, dtype, size, value_size, groups, _ = case
    generator = torch.Generator().manual_seed(0)
    shapes = ((2 * groups, 70, size), (2, 90, size), (2, 90, value_size))
    drawn = [torch.randn(1, *shape, generator=generator).to(device, dtype) for shape in shapes]
    entries = torch.arange(90, device=device) % 7 > 0
    return (*drawn, entries.expand(1, 2, -1))


def _example_step(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, is_by_head: bool, evicts: bool
) -> tuple[Slots, StepRules]:
    """Return slots that hold entries of ``[1, H, N, ...]`` but one of each head, and rules."""
    heads, num_slots, device = *key.shape[1:3], key.device

    def rows(tensor: Tensor) -> Tensor:
        # In a row that heads share the first one has fewer slots.
        return (tensor.flatten(1, 2)[:, None, 20:] if is_by_head else tensor).clone()

    head = torch.arange(heads, device=device).view(1, -1, 1)
    positions = torch.arange(num_slots, dtype=torch.int32, device=device).repeat(1, heads, 1)
    positions[..., -1] = -1
    scores, weights = (positions % 13).float(), (positions % 7 + 1).float()
    free, seen = torch.full_like(head, num_slots - 1), torch.full_like(head[0, 0], num_slots - 1)
    if is_by_head:
        free = (free + head * num_slots - 20).view(1, 1, -1)
    slots = Slots(rows(key), rows(value), rows(scores), rows(positions), free, seen)
    if is_by_head:
        slots.head_of_slot = rows(head.expand_as(positions).to(torch.uint8))
    recent = torch.full((1, 1, 1), 30, device=device)
    rules = StepRules(
        spec, recent, full=evicts, evicts=evicts, adds=evicts, columns=torch.zeros_like(seen[0])
    )
    if evicts:
        return slots, rules._replace(weights=rows(weights))
    queries = mean_queries(query, heads)[:, :, :5].clone()
    placed = torch.arange(5, device=device)
    return slots, rules._replace(ring=QueryRing(queries, placed.repeat(1, 1), placed[:1] + 7))


def _changed(slots: Slots, rules: StepRules) -> list[Tensor]:
    """Return the tensors that a step changes."""
    tensors = (*list(vars(slots).values())[:6], rules.weights, *(rules.ring or ())[:2])
    return [tensor for tensor in tensors if tensor is not None]
