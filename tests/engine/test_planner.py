"""Plans keep their promise, say the least that works, and know the longest prompt that fits."""

import re

import pytest
import torch
from transformers import LlamaConfig

import h2okv
from h2okv.engine.memory import MemoryModel
from h2okv.offload.meta_model import make_skeleton
from h2okv.offload.planner import Planner, Room, Workload
from h2okv.offload.profile import Speeds

CPU = torch.device("cpu")
SPEEDS = Speeds(1e9, 1e10, 1e10, ((1, 1e10), (8, 5e10), (32, 1e11), (256, 2e11)))
USED = 100 << 20
MIB = 1 << 20
POLICIES = ({}, {"policy": "full"}, {"kv_bits": 4})


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory):
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=2000,
    )  # fmt: skip
    return make_skeleton(config, torch.bfloat16, str(tmp_path_factory.mktemp("none")))


@pytest.fixture
def planner(skeleton):
    def make(room, work, **options):
        cache = h2okv.H2OCache(skeleton.model.config, **options)
        demand = MemoryModel.of(skeleton.model.config, cache, torch.bfloat16)
        return Planner(skeleton, demand, cache, SPEEDS, Room(room, 0, USED), work, CPU)

    return make


WORK = Workload(typical=400, longest=900, new=100, prompts=200)


@pytest.mark.parametrize("options", POLICIES, ids=str)
@pytest.mark.parametrize("shares", [None, {"disk": 1.0}, {"device": 0.5, "disk": 0.5}])
def test_no_plan_is_above_its_room(planner, options, shares):
    rows = set()
    for room in range(0, 800 * MIB, 31 * MIB):
        try:
            plan = planner(room, WORK, **options).choose(shares=shares)
        except ValueError:
            continue
        assert plan.total_bytes <= room
        assert 1 <= plan.rows <= WORK.prompts
        assert plan.lane_tokens >= WORK.longest
        rows.add(plan.rows)
    assert len(rows) > 1  # more room, more prompts


@pytest.mark.parametrize("options", POLICIES, ids=str)
@pytest.mark.parametrize("room", [-50 * MIB, 0, MIB, 60 * MIB])
@pytest.mark.parametrize("rows", [None, 1, 7])
def test_the_least_that_is_named_works_and_less_does_not(planner, options, room, rows):
    with pytest.raises(ValueError, match="is too little.*give ") as refusal:
        planner(room, WORK, **options).choose(rows)
    assert f"--memory {(USED + room) // MIB}MiB is too little" in str(refusal.value)
    (named,) = re.findall(r"needs? (\d+)MiB", str(refusal.value))
    least = int(named) * MIB - USED
    plan = planner(least, WORK, **options).choose(rows)
    assert plan.rows >= (rows or 1)
    with pytest.raises(ValueError, match="is too little"):
        planner(least - MIB, WORK, **options).choose(rows)


@pytest.mark.parametrize("options", POLICIES, ids=str)
def test_the_longest_prompt_that_fits(planner, options):
    work = Workload(400, 20_000, 100, 200)
    room = 200 * MIB
    longest = planner(room, work, **options).longest_that_fits()
    assert 0 < longest < 20_000
    planner(room, Workload(longest, longest, 100, 1), **options).choose()
    with pytest.raises(ValueError, match=f"with prompts of {longest + 1} tokens"):
        planner(room, Workload(longest + 1, longest + 1, 100, 1), **options).choose()
    assert planner(MIB, work, **options).longest_that_fits() == 0


def test_smaller_entries_make_room_for_more(planner):
    full, own, packed = (
        planner(250 * MIB, WORK, **options).choose(shares={"disk": 1.0}, cache_shares={"device": 1})
        for options in ({"policy": "full"}, {}, {"kv_bits": 4})
    )
    assert full.rows < own.rows < packed.rows
