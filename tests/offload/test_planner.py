"""Plans keep their promise, say the least that works, and know the longest prompt that fits."""

import re
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, OPTConfig

import h2okv
from h2okv.cli.batch import _placement
from h2okv.engine.memory import MemoryModel
from h2okv.offload.meta_model import make_meta_model
from h2okv.offload.planner import Planner, Workload
from h2okv.offload.profile import HardwareProfile, measure_overhead

CPU = torch.device("cpu")
PROFILE = HardwareProfile(1e9, 1e10, 1e10, ((1, 1e10), (8, 5e10), (32, 1e11), (256, 2e11)))
USED = 100 << 20
MIB = 1 << 20
POLICIES = ({}, {"policy": "full"}, {"kv_bits": 4})


@pytest.fixture(scope="module")
def meta(tmp_path_factory):
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=2000,
    )  # fmt: skip
    return make_meta_model(config, torch.bfloat16, str(tmp_path_factory.mktemp("none")))


@pytest.fixture
def planner(meta):
    def make(room, work, batch_size=None, weights=None, **options):
        choices = {"batch_size": batch_size, "weights": weights}
        cache = h2okv.H2OCache(meta.model.config, **options)
        memory = MemoryModel(meta.model.config, cache, torch.bfloat16)
        return Planner(meta, memory, PROFILE, room, work, CPU, used=USED, **choices)

    return make


WORK = Workload(mean_prompt=400, longest_prompt=900, max_new_tokens=100, num_prompts=200)


@pytest.mark.parametrize("options", POLICIES, ids=str)
@pytest.mark.parametrize("shares", [None, {"disk": 1.0}, {"device": 0.5, "disk": 0.5}])
def test_plans_fit_into_memory(planner, options, shares):
    rows = set()
    for room in range(0, 800 * MIB, 57 * MIB):
        try:
            plan = planner(room, WORK, weights=shares, **options).plan()
        except ValueError:
            continue
        assert plan.total_bytes <= room
        assert 1 <= plan.batch_size <= WORK.num_prompts
        assert plan.micro_batch_tokens >= WORK.longest_prompt
        rows.add(plan.batch_size)
    assert len(rows) > 1  # more room, more prompts


@pytest.mark.parametrize("options", POLICIES, ids=str)
@pytest.mark.parametrize("room", [-50 * MIB, 0, MIB, 60 * MIB])
@pytest.mark.parametrize("rows", [None, 1, 7])
def test_the_suggested_memory_is_the_least_that_fits(planner, options, room, rows):
    with pytest.raises(ValueError, match="is too little.*give ") as refusal:
        planner(room, WORK, rows, **options).plan()
    assert f"--memory {(USED + room) // MIB}MiB is too little" in str(refusal.value)
    (named,) = re.findall(r"needs? (\d+)MiB", str(refusal.value))
    least = int(named) * MIB - USED
    plan = planner(least, WORK, rows, **options).plan()
    assert plan.batch_size >= (rows or 1)
    with pytest.raises(ValueError, match="is too little"):
        planner(least - MIB, WORK, rows, **options).plan()


@pytest.mark.parametrize("options", POLICIES, ids=str)
def test_the_longest_prompt_that_fits(planner, options):
    work = Workload(400, 20_000, 100, 200)
    room = 200 * MIB
    longest = planner(room, work, **options).longest_that_fits()
    assert 0 < longest < 20_000
    planner(room, Workload(longest, longest, 100, 1), **options).plan()
    with pytest.raises(ValueError, match=f"with prompts of {longest + 1} tokens"):
        planner(room, Workload(longest + 1, longest + 1, 100, 1), **options).plan()
    assert planner(MIB, work, **options).longest_that_fits() == 0


def test_smaller_entries_make_room_for_more(planner):
    full, candidate, packed = (
        planner(250 * MIB, WORK, weights={"disk": 1.0}, **options).plan()
        for options in ({"policy": "full"}, {}, {"kv_bits": 4})
    )
    assert full.batch_size < candidate.batch_size < packed.batch_size


def test_caches_may_take_what_a_plan_leaves(planner):
    ample = planner(4000 * MIB, WORK, 8)
    plan = ample.plan()
    sequence_bytes = ample.memory.sequence_bytes(ample._slots(900), 900 + 100)
    assert plan.cache_bytes < ample.cache_limit(plan) == 8 * sequence_bytes
    tight = replace(ample, room=plan.total_bytes)
    assert tight.cache_limit(plan) == plan.cache_bytes
    assert ample.is_ample(plan) and not tight.is_ample(plan)


def test_prompts_cost_what_they_compute(planner, meta):
    # Many short prompts are one product with many rows, and only their last tokens pass the head.
    plan = planner(4000 * MIB, Workload(8, 8, 4, 32), 32).plan()
    *layers, head = (2 * sum(slot.num_weights for slot in unit.slots) for unit in meta.units)
    expected = (32 * 8 * sum(layers) + 32 * head) / PROFILE.gemm_rate(32 * 8)
    assert plan.estimate.prefill_seconds == pytest.approx(expected)


def test_each_forward_through_a_layer_takes_a_while_however_small_it_is(planner):
    work = Workload(mean_prompt=1000, longest_prompt=1000, max_new_tokens=4, num_prompts=8)
    free = planner(4000 * MIB, work, 8)
    profile = replace(PROFILE, layer_seconds=0.25, forward_seconds=1.0)
    quick, slow = (
        candidate.plan().estimate for candidate in (free, replace(free, hardware=profile))
    )
    forward = 6 * 0.25 + 1.0
    assert slow.step["compute"] == pytest.approx(quick.step["compute"] + forward)
    # 8 prompts of 1,000 tokens are read in four micro-batches of up to 2,048.
    assert slow.prefill_seconds == pytest.approx(quick.prefill_seconds + 4 * forward)
    assert slow.decode_tokens_per_second == pytest.approx(8 / slow.step["compute"])


def test_reading_and_computing_overlap(planner):
    work = Workload(mean_prompt=100, longest_prompt=100, max_new_tokens=11, num_prompts=8)
    estimate = planner(4000 * MIB, work, 8, weights={"disk": 1.0}).plan().estimate
    longest = max(estimate.step["weights"], estimate.step["compute"])
    assert estimate.decode_tokens_per_second == pytest.approx(8 / longest)


def test_attention_and_a_last_batch_count(planner):
    work = Workload(mean_prompt=100, longest_prompt=100, max_new_tokens=11, num_prompts=12)
    free = planner(4000 * MIB, work, 8)
    profile = replace(PROFILE, entry_seconds=1e-3, token_seconds=1e-2)
    quick, slow = (
        candidate.plan().estimate for candidate in (free, replace(free, hardware=profile))
    )
    slots = free.memory.cache.slots_for(100, 11)
    assert slow.step["compute"] == pytest.approx(quick.step["compute"] + 6 * 8 * slots * 1e-3)
    assert slow.prefill_seconds == pytest.approx(quick.prefill_seconds + 6 * 8 * 100 * 1e-2)
    # Twelve prompts, eight at a time: the last four take as many steps.
    seconds = 1.5 * slow.prefill_seconds + 2 * 10 * slow.step["compute"]
    assert slow.tokens_per_second == pytest.approx(12 * 11 / seconds)


@pytest.mark.parametrize(
    "options", [{}, {"policy": "full"}, {"kv_bits": 4}, {"positions": "clamped"}], ids=str
)
def test_the_overhead_of_a_layer_is_measured(meta, options):
    config = OPTConfig() if options.get("positions") == "clamped" else meta.model.config
    memory = MemoryModel(config, h2okv.H2OCache(config, **options), torch.bfloat16)
    overhead = measure_overhead(memory, 400, torch.bfloat16, CPU)
    # A step is of both; on a busy machine five layers may take no longer than one.
    assert overhead["layer_seconds"] + overhead["forward_seconds"] > 0
    assert all(0 <= seconds < 1 for seconds in overhead.values())
    assert overhead["token_seconds"] > 0


def test_percentages_may_have_no_digit_before_the_point():
    fractions = _placement("--weights", "device=.5,disk=99.5%")
    assert fractions == pytest.approx({"device": 0.005, "disk": 0.995})
