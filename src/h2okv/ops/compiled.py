"""The decode step as machine code for this CPU, made once by inductor and kept for later processes.

Ahead-of-time packages (``torch._inductor.aoti_compile_and_package``) load in milliseconds and need
no tracing. Sequences and KV heads are folded into rows, so that one package serves every batch,
number of heads and budget; what cannot vary is in its `Spec`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from h2okv.ops import decode, packed_decode, packing, rotary, selection, step
from h2okv.ops.packing import Entries, Packed, pack
from h2okv.ops.step import Slots, StepRules, Turns

_STALE = 600.0
"""Seconds after which a compilation that left its mark counts as dead."""
_MOST_PACKAGES = 64
_MAX_ROWS, _MAX_SLOTS = 1 << 20, 1 << 24


_SOURCES = (decode, packed_decode, packing, rotary, selection, step)


class Spec(NamedTuple):
    """What a package is made for.

    Attributes:
        dtype: of a new token's key and value, and of those held if they are not packed, e.g.
            ``"float32"``.
        size: D.
        value_size: Dv.
        groups: G.
        scale: factor on the logits.
        softcap: soft cap of the logits or ``None``.
        width: R, how many numbers of a head the step itself turns; 0 if none.
        has_sink: whether first positions are protected.
        has_enabled: whether sequences have budgets of their own.
        full: whether all slots are taken.
        bits: of a number in packed slots; ``None`` if they are not packed.
    """

    dtype: str
    size: int
    value_size: int
    groups: int
    scale: float
    softcap: float | None
    width: int
    has_sink: bool
    has_enabled: bool
    full: bool
    bits: int | None = None


def spec_of(slots: Slots, rules: StepRules, groups: int, dtype: torch.dtype | None = None) -> Spec:
    """Says which package a layer's steps need.

    Args:
        slots: what the layer holds.
        rules: how it steps.
        groups: G.
        dtype: of new keys and values; ``None``: as in the slots.

    Returns:
        The spec.

    Raises:
        ValueError: if the slots are packed and no dtype is given.
    """
    keys = slots.keys
    if not isinstance(keys, Packed):
        dtype = keys.dtype
    if dtype is None:
        raise ValueError("packed slots do not tell the dtype of new tokens; give dtype.")
    return Spec(
        dtype=str(dtype).removeprefix("torch."),
        size=slots.keys.shape[-1],
        value_size=slots.values.shape[-1],
        groups=groups,
        scale=rules.scale,
        softcap=rules.softcap,
        width=0 if rules.turns is None else 2 * rules.turns.to_rank.shape[-2],
        has_sink=rules.sink is not None,
        has_enabled=slots.enabled is not None,
        full=rules.full,
        bits=keys.bits if isinstance(keys, Packed) else None,
    )


def _tensors(slots: Slots) -> list[torch.Tensor]:
    """What a step takes as tensors, in the order of `Slots`, but for `Slots.seen`."""
    tensors: list[torch.Tensor] = []
    for entries in (slots.keys, slots.values):
        tensors += entries[:2] if isinstance(entries, Packed) else [entries]
    parts = (slots.scores, slots.positions, slots.free, slots.enabled, slots.ranks)
    return tensors + [part for part in parts if part is not None]


class CompiledStep:
    """Runs one token of each sequence through a layer's slots; twin of `step.decode_step`.

    Args:
        package: what `load` gave.
    """

    def __init__(self, package: Any) -> None:
        self._package = package
        self._key: list[int] = []

    def _fold(self, slots: Slots, rules: StepRules) -> None:
        """Makes rows of sequences and KV heads, where they are not made yet."""
        parts = _tensors(slots)
        columns = [column for column in (rules.recent, rules.sink) if column is not None]
        # A view takes as long as a small operation, so it is not made in every step; what is
        # copied must not have been written since.
        key = [*map(id, parts), *map(id, columns), *(column._version for column in columns)]
        if key == self._key:
            return
        self._key, self._alive = key, (parts, columns)
        batch, self._heads = slots.scores.shape[:2]
        self._rows = batch * self._heads
        folded = [part.flatten(0, 1).unsqueeze(1) for part in parts]
        first = 7 if isinstance(slots.keys, Packed) else 5
        self._held, self._more = folded[:first], [self._by_row(column) for column in columns]
        self._more += folded[first:]
        if rules.turns is not None:
            self._more += rules.turns

    def _by_row(self, column: torch.Tensor) -> torch.Tensor:
        """One number of each sequence, int64, as ``[B * H, 1, 1]``."""
        return column.view(-1, 1).repeat(1, self._heads).view(-1, 1, 1)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: Slots,
        rules: StepRules,
        real: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs a step.

        Args:
            query: as in `step.decode_step`.
            key: likewise.
            value: likewise.
            slots: likewise; mutated.
            rules: likewise.
            real: likewise; a step with padding runs as plain PyTorch.

        Returns:
            ``[B, HQ, 1, Dv]``, in the dtype of `step.decode_step`.
        """
        if real is not None:
            return step.decode_step(query, key, value, slots, rules, real)
        self._fold(slots, rules)
        output = self._package(
            query.reshape(self._rows, -1, 1, query.shape[-1]),
            key.reshape(self._rows, 1, 1, -1),
            value.reshape(self._rows, 1, 1, -1),
            *self._held,
            self._by_row(slots.seen).view(-1),
            *self._more,
        )
        slots.seen.add_(1)
        return output.view(query.shape[0], query.shape[1], 1, -1)


class _Step(torch.nn.Module):
    """The plain step on folded arguments."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *folded: torch.Tensor) -> torch.Tensor:
        query, key, value = folded[:3]
        rest = list(folded[3:])
        keys = self._entries(rest, self.spec.size)
        values = self._entries(rest, self.spec.value_size)
        scores, positions, free, seen, recent = (rest.pop(0) for _ in range(5))
        sink = rest.pop(0) if self.spec.has_sink else None
        enabled = rest.pop(0) if self.spec.has_enabled else None
        ranks = rest.pop(0) if self.spec.width else None
        turns = Turns(*rest) if self.spec.width else None
        return step.decode_step(
            query, key, value,
            Slots(keys, values, scores, positions, free, seen, enabled, ranks),
            StepRules(
                self.spec.scale, recent, sink, self.spec.softcap, turns,
                full=self.spec.full,
            ),
        )  # fmt: skip

    def _entries(self, rest: list[torch.Tensor], size: int) -> Entries:
        """Takes keys or values off the arguments; mutates the list."""
        if self.spec.bits is None:
            return rest.pop(0)
        return Packed(rest.pop(0), rest.pop(0), self.spec.bits, size)


def example(spec: Spec, rows: int = 4, num_slots: int = 70) -> tuple[torch.Tensor, ...]:
    """Makes folded arguments to try a package on.

    Args:
        spec: what for.
        rows: sequences times KV heads.
        num_slots: S.

    Returns:
        Random tensors of a state that could be, from the default generator.
    """
    dtype = getattr(torch, spec.dtype)
    held = num_slots - 1 if spec.full else num_slots // 2
    ages = torch.rand(rows, 1, num_slots).argsort(dim=-1)
    positions = torch.where(ages < held, ages, -1).to(torch.int32)
    folded = [
        # Rolling layers get queries turned back, which are fp32; a package takes them as they were.
        torch.randn(rows, spec.groups, 1, spec.size).to(torch.float32 if spec.width else dtype),
        torch.randn(rows, 1, 1, spec.size).to(dtype),
        torch.randn(rows, 1, 1, spec.value_size).to(dtype),
        *_example_entries(spec, rows, num_slots, spec.size),
        *_example_entries(spec, rows, num_slots, spec.value_size),
        torch.rand(rows, 1, num_slots),
        positions,
        (positions < 0).to(torch.uint8).argmax(dim=-1, keepdim=True),
        torch.full((rows,), held),
        torch.full((rows, 1, 1), held // 2),
    ]
    if spec.has_sink:
        folded.append(torch.full((rows, 1, 1), 2))
    if spec.has_enabled:
        folded.append(torch.ones(rows, 1, num_slots, dtype=torch.bool))
    if spec.width:
        angles = torch.arange(num_slots).unsqueeze(1) * torch.rand(spec.width // 2)
        to_rank = torch.stack([angles.cos(), angles.sin()], dim=-1)
        ranks = torch.where(positions < 0, num_slots - 1, positions)
        folded += [ranks, to_rank, rotary.relative(to_rank)]
    return tuple(folded)


def _example_entries(spec: Spec, rows: int, num_slots: int, size: int) -> list[torch.Tensor]:
    entries = torch.randn(rows, 1, num_slots, size).to(getattr(torch, spec.dtype))
    return [entries] if spec.bits is None else list(pack(entries, spec.bits)[:2])


def folder() -> Path:
    """Where packages are kept: ``h2okv/ops`` in ``$XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "h2okv" / "ops"


def package_path(spec: Spec) -> Path:
    """Where a spec's package is, or will be.

    Args:
        spec: what for.

    Returns:
        A path that changes with torch, the processor and the code of the step.
    """
    key = json.dumps([*_surroundings(), *spec])
    return folder() / f"step-{hashlib.sha256(key.encode()).hexdigest()[:24]}.pt2"


@functools.cache
def _surroundings() -> tuple[str, ...]:
    sources = [Path(str(module.__file__)) for module in _SOURCES]
    code = b"".join(path.read_bytes() for path in (*sources, Path(__file__)))
    flags = ""
    if Path("/proc/cpuinfo").exists():
        # Code for one processor may hold instructions that another lacks.
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return (
        torch.__version__, platform.machine(), platform.system(), flags,
        hashlib.sha256(code).hexdigest(),
    )  # fmt: skip


@functools.cache
def compiler() -> str | None:
    """Finds the C++ compiler that inductor would take.

    Returns:
        Its path, or ``None`` if there is none.
    """
    named = os.environ.get("CXX")
    candidates = [named] if named else ["g++", "clang++"]
    return next((path for name in candidates if (path := shutil.which(name))), None)


def compile_package(spec: Spec) -> Path:
    """Compiles a package, which takes some seconds, and keeps it.

    Args:
        spec: what for.

    Returns:
        Its path.

    Raises:
        OSError: if the folder cannot be written.
    """
    path = package_path(spec)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    rows = torch.export.Dim("rows", min=2, max=_MAX_ROWS)
    slots = torch.export.Dim("slots", min=2, max=_MAX_SLOTS)
    args = example(spec)
    last = 2 if spec.width else 0  # tables of turns have no rows
    shapes: list[dict[int, Any]] = [{0: rows} for _ in args]
    for index, arg in enumerate(args[: len(args) - last]):
        if arg.dim() > 2 and arg.shape[2] == args[3].shape[2]:
            shapes[index][2] = slots
    for index in range(len(args) - last, len(args)):
        shapes[index] = {0: slots}
    draft = path.with_name(f"{path.stem}.{os.getpid()}.pt2")
    with torch.no_grad(), torch._inductor.config.patch({"cpp.dynamic_threads": True}):
        program = torch.export.export(_Step(spec), args, dynamic_shapes=(tuple(shapes),))
        torch._inductor.aoti_compile_and_package(program, package_path=str(draft))
    draft.replace(path)
    _drop_oldest(path.parent)
    return path


def _drop_oldest(packages: Path) -> None:
    """Keeps the newest packages: each update of torch or h2okv leaves old ones behind."""
    by_age = sorted(packages.glob("*.pt2"), key=lambda path: path.stat().st_mtime)
    for path in by_age[:-_MOST_PACKAGES]:
        path.unlink(missing_ok=True)


@functools.cache
def _load(path: Path) -> Any:
    return torch._inductor.aoti_load_package(str(path))


@functools.cache
def load(spec: Spec) -> Any | None:
    """Loads a package, and tries it against plain PyTorch.

    Args:
        spec: what for.

    Returns:
        What `decode_step` takes, or ``None`` if the package does not load or does not agree.

    Raises:
        FileNotFoundError: if nothing was compiled for this spec.
    """
    path = package_path(spec)
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        package = _load(path)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            args = example(spec, rows=6, num_slots=90)
        twins = [arg.clone() for arg in args]
        output, expected = package(*args), _Step(spec)(*twins)
    except RuntimeError:
        return None
    same = all(
        torch.allclose(one.float(), other.float(), atol=2e-2, rtol=2e-2)
        for one, other in zip((output, *args), (expected, *twins), strict=True)
    )
    return package if same else None


_requested: dict[Spec, subprocess.Popen[bytes] | None] = {}


def request(spec: Spec) -> None:
    """Has a package compiled by a process of low priority that nobody waits for.

    Args:
        spec: what for; a second request does nothing, in this process or another.
    """
    if spec in _requested or compiler() is None:
        return
    _requested[spec] = None
    mark = package_path(spec).with_suffix(".compiling")
    try:
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if mark.exists() and time.time() - mark.stat().st_mtime < _STALE:
            return
        mark.touch()
        with open(mark, "wb") as log:
            _requested[spec] = subprocess.Popen(
                [sys.executable, "-m", "h2okv.ops.compiled", json.dumps(spec)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
    except OSError:
        return  # a read-only home is no reason to stop generating


def main() -> None:
    """Compiles the package named by the JSON argument; what `request` starts."""
    if hasattr(os, "nice"):
        os.nice(10)
    spec = Spec(*json.loads(sys.argv[1]))
    compile_package(spec)
    # A mark that stays, with its error, keeps others from failing in the same way for a while.
    package_path(spec).with_suffix(".compiling").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
