"""The fused decode step against the plain one: every tensor that it changes."""

from dataclasses import replace

import pytest
import torch

from h2okv.cache.rope import ranks_of
from h2okv.ops import decode as step
from h2okv.ops import triton_decode
from h2okv.ops.compaction import NO_HEAD
from h2okv.ops.decode import RotaryTables, Slots, StepRules
from h2okv.ops.indexed import Indexed
from h2okv.ops.reference import AttentionSpec
from h2okv.ops.rope import relative

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("garbage")]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
BATCH, HEADS = 2, 2


def state(device, num_slots, num_entries, size, value_size, dtype, rolls):
    shape = BATCH, HEADS, num_slots
    ages = torch.rand(shape, device=device).argsort(dim=-1)
    positions = torch.where(ages < num_entries, ages + 3, -1).to(torch.int32)
    free = (positions < 0).to(torch.uint8).argmax(dim=-1, keepdim=True)
    # What an empty slot holds must not matter.
    empty = (positions < 0).unsqueeze(-1)
    keys = torch.randn(*shape, size, device=device).masked_fill(empty, torch.nan)
    values = torch.randn(*shape, value_size, device=device).masked_fill(empty, 1e4)
    scores = torch.rand(shape, device=device).mul(4).round()  # with ties
    return Slots(
        keys.to(dtype), values.to(dtype), scores, positions, free,
        torch.full((BATCH,), num_entries + 3, device=device), None,
        ranks_of(positions) if rolls else None,
    )  # fmt: skip


def share(slots, sizes):
    """Put the first slots of heads, as many as `sizes` say, into one row for each sequence."""

    def joined(tensor, fill=0):
        row = torch.cat([tensor[:, [head], :size] for head, size in enumerate(sizes)], dim=2)
        room = (0, 0) * (row.dim() - 3) + (0, 3)
        return torch.nn.functional.pad(row, room, value=fill)

    device = slots.positions.device
    counts = torch.tensor(sizes, device=device)
    free = torch.rand(BATCH, HEADS, device=device).mul(counts).long()
    slots.positions.scatter_(-1, free.unsqueeze(-1), -1)
    heads = torch.arange(HEADS, device=device).repeat_interleave(counts)
    heads = torch.nn.functional.pad(heads, (0, 3), value=NO_HEAD).to(torch.uint8)
    return replace(
        slots, keys=joined(slots.keys), values=joined(slots.values, 1e4),
        scores=joined(slots.scores), positions=joined(slots.positions, -1),
        free_slot=(free + counts.cumsum(0) - counts).unsqueeze(1),
        head_of_slot=heads.view(1, 1, -1).repeat(BATCH, 1, 1),
    )  # fmt: skip


def tables_of(device, num_slots, width):
    angles = torch.arange(num_slots).unsqueeze(1) * torch.rand(width // 2)
    to_rank = torch.stack([angles.cos(), angles.sin()], dim=-1).to(device)
    return RotaryTables(to_rank, relative(to_rank))


def copy(slots):
    tensors = vars(slots).values()
    return Slots(*(None if tensor is None else tensor.clone() for tensor in tensors))


def in_blocks(entries):
    """Return the same entries in separate blocks of a pool, among others' that are NaN."""
    num_blocks, size = 5, entries[0].numel()
    pages = torch.full(
        (num_blocks, size + 3), torch.nan, dtype=entries.dtype, device=entries.device
    )
    blocks = pages[:, 2 : size + 2].view(num_blocks, *entries.shape[1:])
    block_index = torch.tensor([[3, 1], [0, 1]], device=entries.device)[:, 0]  # of a larger tensor
    blocks[block_index] = entries
    return Indexed(blocks, block_index)


def run(device, dtype=torch.float32, groups=2, num_slots=63, num_entries=None, size=32,
        value_size=None, width=0, sink=None, recent=7, cores=1, real=None, slot_mask=None,
        indexed=False, sizes=None, weighs=False, decode_step=triton_decode.decode_step,
        softcap=None, sinks=None, **rules):  # fmt: skip
    num_entries = num_slots - 1 if num_entries is None else num_entries
    value_size = value_size or size
    is_full = num_entries == num_slots - 1 and slot_mask is None
    drawn = num_entries + (is_full and sizes is not None)  # `share` empties a slot of each head
    slots = state(device, num_slots, drawn, size, value_size, dtype, width > 0)
    slots = replace(slots, slot_mask=slot_mask)
    if sizes is not None:
        slots = share(slots, sizes)
    if weighs:
        rules["weights"] = torch.rand_like(slots.scores).mul(3).round().add(1)

    def column(count):
        return torch.full((BATCH, 1, 1), count, device=device)

    step_rules = StepRules(
        AttentionSpec(size**-0.5, softcap, sinks), column(recent),
        None if sink is None else column(sink),
        rotary=tables_of(device, num_slots, width) if width else None,
        full=is_full, **rules,
    )  # fmt: skip
    reference = copy(slots)
    reference_rules = step_rules
    if weighs:
        reference_rules = step_rules._replace(weights=step_rules.weights.clone())
    if indexed:
        slots = replace(slots, keys=in_blocks(slots.keys), values=in_blocks(slots.values))
    for _ in range(4):
        token = (
            torch.randn(BATCH, HEADS * groups, 1, size).mul(2).to(device, dtype),
            torch.randn(BATCH, HEADS, 1, size).mul(2).to(device, dtype),
            torch.randn(BATCH, HEADS, 1, value_size).to(device, dtype),
        )
        output = decode_step(*token, slots, step_rules, real, num_cores=cores)
        expected = step.decode_step(*token, reference, reference_rules, real)
        rows = slice(None) if real is None else real[:, 0]
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(output[rows], expected[rows], atol=tolerance, rtol=tolerance)
        for name in ("positions", "free_slot", "num_real_tokens", "ranks"):
            tensor, other = getattr(slots, name), getattr(reference, name)
            assert tensor is None or torch.equal(tensor, other), name
        is_entry = slots.positions >= 0
        for name in ("keys", "values"):
            entries = getattr(slots, name)
            if indexed:
                others = [block for block in range(5) if block not in entries.block_index]
                assert entries.blocks[others].isnan().all()
                entries = entries.blocks[entries.block_index]
            assert torch.equal(entries[is_entry], getattr(reference, name)[is_entry]), name
        torch.testing.assert_close(
            slots.scores[is_entry], reference.scores[is_entry], atol=1e-4, rtol=1e-4
        )
        if weighs:
            weights, others = step_rules.weights[is_entry], reference_rules.weights[is_entry]
            torch.testing.assert_close(weights, others, atol=0.0, rtol=1e-6)
            step_rules.weights.copy_(reference_rules.weights)
        # Only entries count: a difference in the last bits must not become another choice later.
        slots.scores.copy_(reference.scores)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("cores", [1, 40])
def test_all_slots_taken(device, dtype, groups, cores):
    run(device, dtype, groups, 111, cores=cores)


@pytest.mark.parametrize("size", [40, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_sizes(device, size, dtype):
    run(device, dtype, size=size, value_size=16)
    run(device, dtype, size=16, value_size=size)


@pytest.mark.parametrize("num_slots", [2, 17, 63, 300])
@pytest.mark.parametrize("sink", [None, 4])
def test_slots_that_fill_up(device, num_slots, sink):
    run(device, num_slots=num_slots, num_entries=num_slots // 2, sink=sink, cores=9)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("num_entries", [40, 62])
def test_rolling_positions(device, dtype, width, num_entries):
    run(device, dtype, num_entries=num_entries, width=width, cores=3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_entries", [40, 62])
def test_entries_in_the_blocks_of_a_pool(device, dtype, num_entries):
    run(
        device, dtype, groups=3, num_entries=num_entries, size=40, value_size=16, cores=9,
        indexed=True,
    )  # fmt: skip


def test_sequences_with_budgets_of_their_own(device):
    slot_mask = torch.ones(BATCH, HEADS, 63, dtype=torch.bool, device=device)
    slot_mask[1, :, 40:] = False
    run(device, num_entries=30, slot_mask=slot_mask)


@pytest.mark.parametrize("width", [0, 32])
def test_a_token_that_is_padding(device, width):
    real = torch.tensor([[True], [False]], device=device)
    run(device, num_entries=30, real=real, width=width)


SIZES = [(63, 20), (40, 1), (1, 1), (2, 62)]
"""Slots of two heads that share a row; with one slot a head sees its new entry alone."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_entries", [40, 62])
def test_heads_that_share_a_row(device, dtype, sizes, num_entries):
    run(device, dtype, 3, num_entries=num_entries, sizes=sizes, cores=9, sink=4, weighs=True)


@pytest.mark.parametrize(
    "options",
    [{"softcap": 5.0}, {"sinks": [-2.0, 3.0, 1.0, 9.0]}, {"recent": 500}, {"recent": 0},
     {"padded": True}, {"num_slots": 900, "sizes": (900, 70)}, {"most_slots": 64},
     {"indexed": True}, {"priority": lambda scores, positions, newest: positions.float()}],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_options_of_heads_that_share_a_row(device, options):
    options = {"sizes": (63, 20), "num_entries": 40, "cores": 9} | options
    if options.pop("padded", False):
        options["real"] = torch.tensor([[True], [False]], device=device)
    if "sinks" in options:
        options["sinks"] = torch.tensor(options["sinks"], device=device)
    run(device, **options)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("num_entries", [40, 62])
def test_scores_by_the_values_norms(device, padded, num_entries):
    real = torch.tensor([[True], [False]], device=device) if padded else None
    run(device, num_entries=num_entries, real=real, weighs=True)


def test_pinned_and_protected_entries_of_a_shared_row(device, monkeypatch):
    plain = state

    def pinned(*args):
        slots = plain(*args)
        slots.scores[slots.positions % 3 == 0] = torch.inf
        return slots

    monkeypatch.setattr(f"{__name__}.state", pinned)
    for recent in (7, 500):
        run(device, sizes=(30, 63), recent=recent, weighs=True)


def test_soft_caps(device):
    run(device, softcap=5.0, cores=4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_entries", [40, 62])
@pytest.mark.parametrize("factor", [1.0, 90.0])
def test_learned_sinks(device, dtype, num_entries, factor):
    sinks = factor * torch.tensor([-2.0, 0.0, 1.0, 3.0, 4.0, 6.0], device=device)
    options = {"cores": 9, "sink": 4, "sinks": sinks.to(dtype)}
    run(device, dtype, groups=3, num_entries=num_entries, **options)


def test_nothing_protected_evicts_what_just_came(device):
    run(device, recent=0)


def test_everything_protected(device):
    run(device, recent=500)


def test_a_policy_that_ranks_by_its_own_code(device):
    run(device, priority=lambda scores, positions, newest: positions.float())


def test_the_slots_are_shared_out_without_gaps():
    for rows in (1, 16, 4000):
        for slots in (1, 2, 64, 65, 411, 8193):
            for largest in (slots, 5 * slots):
                splits, size = triton_decode.share_out(rows, slots, largest, 64, 132)
                assert (splits - 1) * size < largest <= splits * size


OPTIONS = {
    "the last slot": {"sink": 4}, "filling up": {"num_entries": 30}, "rolling": {"width": 32},
    "by position": {"priority": lambda scores, positions, newest: positions.float()},
    "by head": {"sizes": (63, 20), "weighs": True},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_compiled_model_calls_the_same_kernels(device, options):
    torch.compiler.reset()
    compiled = torch.compile(triton_decode.decode_step, fullgraph=True)
    run(device, cores=3, decode_step=compiled, **options)
