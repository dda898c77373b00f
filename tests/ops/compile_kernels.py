"""Compiles every kernel for a GPU that need not be here; prints what each takes, as JSON lines.

Run as a script, without TRITON_INTERPRET: ``python tests/ops/compile_kernels.py 90``.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from h2okv.ops import triton_cut, triton_decode, triton_prefill
from h2okv.ops.choice import CutRules
from h2okv.ops.decode import QueryRing, RotaryTables, Slots, StepRules
from h2okv.ops.indexed import Indexed
from h2okv.ops.reference import AttentionSpec, Visibility
from h2okv.ops.rope import relative
from h2okv.ops.triton_cut import Rows

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8",
    torch.int64: "*i64", torch.int32: "*i32",
}  # fmt: skip
KERNELS = "_attend", "_finish", "_forward", "_sums", "_rotate", "_select", "_move", "_join"


class Compiler:
    """Takes a kernel's launches, and compiles it for their arguments instead."""

    def __init__(self, kernel, target):
        self.kernel, self.target = kernel, target

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps=4, num_stages=3, **constants):
        signature, attributes = {}, {}
        for index, (name, arg) in enumerate(zip(self.kernel.arg_names, args, strict=False)):
            is_tensor = isinstance(arg, torch.Tensor)
            kind = "i32" if isinstance(arg, int) else "fp32"
            signature[name] = POINTERS[arg.dtype] if is_tensor else kind
            if is_tensor or (isinstance(arg, int) and arg % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(self.kernel, signature, constants, attributes)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        compiled = triton.compile(source, target=self.target, options=options)
        name = self.kernel.__name__
        row = {"kernel": name, "shared": compiled.metadata.shared, **usage(compiled.asm["cubin"])}
        print(json.dumps({**row, "sizes": constants}))


def usage(cubin):
    """Return the registers of a thread, and the bytes of memory that stand in for more."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {"registers": "REG", "spilled": "STACK"}
    return {name: int(re.search(rf"{key}:(\d+)", text)[1]) for name, key in names.items()}


def step(
    dtype, size, groups, width, num_slots=70, batch=2, heads=2, indexed=False, sinks=None,
    by_head=False, span=0, in_blocks=False,
):  # fmt: skip
    def column(*shape):
        return torch.zeros(*shape, dtype=torch.int64)

    rotations = None
    ranks = torch.zeros(batch, heads, num_slots, dtype=torch.int32)
    if width:
        to_rank = torch.zeros(num_slots, width // 2, 2)
        rotations = RotaryTables(to_rank, relative(to_rank))
    slots = Slots(
        torch.zeros(batch, heads, num_slots, size, dtype=dtype),
        torch.zeros(batch, heads, num_slots, size, dtype=dtype),
        torch.zeros(batch, heads, num_slots), ranks.clone(), column(batch, heads, 1),
        column(batch), None, ranks if width else None,
    )  # fmt: skip
    if indexed:
        block_index = column(batch)
        slots.keys, slots.values = (
            Indexed(slots.keys, block_index),
            Indexed(slots.values, block_index),
        )
    if by_head:
        for name in ("keys", "values", "scores", "positions"):
            setattr(slots, name, getattr(slots, name)[:, :1])
        slots.free_slot = slots.free_slot.view(batch, 1, heads)
        slots.head_of_slot = torch.zeros(batch, 1, num_slots, dtype=torch.uint8)
    ring = weights = None
    if span:
        ring = QueryRing(
            torch.zeros(batch, heads, span, size, dtype=dtype), column(batch, span), column(1)
        )
    elif by_head:
        weights = slots.scores
    token = [torch.zeros(batch, heads * groups, 1, size, dtype=dtype)]
    token += [torch.zeros(batch, heads, 1, size, dtype=dtype) for _ in range(2)]
    spec = AttentionSpec(0.1, sinks=sinks)
    rules = StepRules(
        spec, column(batch, 1, 1), rotary=rotations, full=True, evicts=span == 0, adds=span == 0,
        weights=weights, ring=ring,
    )  # fmt: skip
    if in_blocks:
        slots.free_slot = slots.free_slot.to(torch.int32)
        for name in ("keys", "values", "scores", "positions", "free_slot"):
            setattr(slots, name, Indexed(getattr(slots, name), column(batch)))
    triton_decode.decode_step(*token, slots, rules, num_cores=132)


def block(dtype, size, groups=2, **visibility):
    query = torch.zeros(1, 2 * groups, 64, size, dtype=dtype)
    key = torch.zeros(1, 2, 64, size, dtype=dtype)
    spec = AttentionSpec(0.1)
    triton_prefill.attention_with_scores(query, key, key, Visibility(**visibility), spec)
    rotation = torch.zeros(1, 1, 64, size // 2 - 4, 2), "half"
    real = visibility.get("queries")
    triton_prefill.expected_attention(query, key, None, real, spec, rotation)


def cut(dtype, size, batch=2, heads=2, count=70):
    """Compile a cut of new slots, of shared ones, and of both in place; slots before a block."""
    states = torch.zeros(batch, heads, count, size, dtype=dtype)
    scores, seen = torch.zeros(batch, heads, count), torch.full((batch,), count)
    budget, totals = seen.view(-1, 1, 1), torch.full((batch, heads, 1), 16)
    rows = Rows(states, states, scores, scores.to(torch.int32), scores)
    shared = Rows(*(tensor.flatten(1, 2).unsqueeze(1).clone() for tensor in rows))
    rules, free = CutRules(seen, budget, budget, totals, seen // 3), totals.clone()
    owners = torch.zeros(batch, 1, heads * count, dtype=torch.uint8)
    rooms = triton_cut.Rooms(totals, count - 16, count)
    arguments = scores, scores, scores, rows.positions, rules, 16
    new, in_place = (triton_cut.select(*arguments, is_in_place) for is_in_place in (False, True))
    triton_cut.move(rows, rows, heads, new, free=free)
    triton_cut.move(rows, shared, heads, new, rooms, free, owners)
    triton_cut.move(rows, rows, heads, in_place, free=free)
    triton_cut.move(Rows(*shared[:2], *rows[2:]), shared, heads, in_place, rooms, free)
    triton_cut.move(shared, rows, heads, rooms=rooms)
    triton_cut.join(rows, rows, None)
    triton_cut.join(shared, rows, rooms)


def main():
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for module in (triton_decode, triton_prefill, triton_cut):
        for name in KERNELS:
            if hasattr(module, name):
                setattr(module, name, Compiler(getattr(module, name), target))
    # What differs between GPUs is the product of half precision; fp32 is slow to compile.
    some = (torch.bfloat16,) if target.arch < 90 else (torch.bfloat16, torch.float32)
    for dtype in some:
        for size, width in ((128, 0), (128, 128), (80, 32), (256, 0)):
            step(dtype, size, 4, width)
        step(dtype, 64, 3, 0, indexed=True)
        step(dtype, 64, 3, 0, sinks=torch.zeros(6, dtype=dtype))
        for size in (64, 128):
            step(dtype, size, 4, 0, by_head=True, span=32)
        step(dtype, 128, 4, 0, by_head=True)
        step(dtype, 64, 3, 0, in_blocks=True)
        step(dtype, 128, 4, 0, by_head=True, in_blocks=True)
        step(dtype, 64, 4, 0, by_head=True, span=32, in_blocks=True)
        for size in (64, 128, 256):
            block(dtype, size)
        cut(dtype, 80)
    block(torch.float16, 96, 1, queries=torch.ones(1, 64, dtype=torch.bool))


if __name__ == "__main__":
    main()
