"""`h2okv plan`: a decision that fits, from measured speeds."""

import json
import re

import pytest

from h2okv.engine.memory import data_bytes
from h2okv.offload import offload_engine
from h2okv.offload.profile import HardwareProfile


@pytest.fixture(scope="module")
def long_model(save_model):
    return save_model(context=2048)


@pytest.fixture
def plan(h2okv_command, long_model):
    def call(*args, code=0):
        outcome = h2okv_command(
            "plan", long_model, "--prompt-tokens", 200, "--new-tokens", 50, *args
        )
        assert outcome.code == code, outcome
        if code:
            assert outcome.err.startswith("h2okv: ")
            assert outcome.err.count("\n") == 1
            return outcome.err
        return json.loads(outcome.out) if "--json" in args else outcome.out

    return call


FAST = HardwareProfile(1e9, 1e10, 1e10, ((1, 3e9), (8, 4e9), (32, 5e9), (256, 6e9)))


@pytest.fixture
def rated(monkeypatch):
    """Return a function that replaces the measurement of the machine, which takes seconds."""

    def rate(profile):
        monkeypatch.setattr(offload_engine, "measure_hardware", lambda *_: profile)

    rate(FAST)
    return rate


def test_the_plan_of_this_machine_fits_into_memory_and_adds_up(plan):
    promise = data_bytes() + (160 << 20)
    record = plan("--json", "--memory", promise)
    assert record["process_bytes"] + record["total_bytes"] <= promise
    names = ("cache_bytes", "weight_bytes", "buffer_bytes", "temporary_bytes")
    assert record["total_bytes"] == sum(record[name] for name in names)
    step = record["estimate"]["step"]
    assert record["limit"] == max(step, key=step.get)
    decode = record["estimate"]["decode_tokens_per_second"]
    assert decode == pytest.approx(record["batch_size"] / max(step.values()))


def test_a_smaller_cache_makes_room_for_more_prompts(plan, rated):
    promise = data_bytes() + (130 << 20)
    ample = ("--json", "--memory", promise, "--weights", "disk")
    ample = (*ample, "--prompt-tokens", 1024)  # of which 20 % is more than the least that is kept
    h2o = plan(*ample)
    full = plan(*ample, "--policy", "full")
    assert sequence_bytes(h2o) < 0.32 * sequence_bytes(full)  # with a span
    packed = plan(*ample, "--cache", "bits=4")
    assert sequence_bytes(packed) < 0.6 * sequence_bytes(h2o)


def sequence_bytes(record):
    return record["cache_bytes"] / record["batch_size"]


def test_placement_options_are_followed(plan, rated):
    record = plan("--json", "--weights", "disk", "--batch", 3)
    assert record["placement"] == {"disk": 3}
    assert record["batch_size"] == 3
    assert record["estimate"]["step"]["weights"] > 0


def test_a_late_first_result_is_said(plan, rated):
    rated(HardwareProfile(2e5, 1e9, 1e9, ((1, 3e5), (8, 4e5), (32, 5e5), (256, 6e5))))
    text = plan()
    for words in ("layers and head", "batch size", "GB/s", "slowest of them", "tokens/s",
                  "0.0003 (1), 0.0004 (8), "):  # fmt: skip
        assert words in text
    args = ("--prompt-tokens", 50, "--new-tokens", 5, "--weights", "disk")
    first = plan("--json", *args)["estimate"]["first_result_seconds"]
    assert first > 120
    assert re.search(r"the first result +after .+ (min|h)\n", plan(*args))


def test_too_little_memory_is_refused(plan, rated):
    assert "--memory 2MiB is too little" in plan("--memory", "2MiB", code=2)


def test_prompts_that_the_job_would_refuse_have_no_plan(plan, rated):
    too_long = ("--prompt-tokens", 10**6, "--memory", 10**15)
    message = plan(*too_long, code=2)
    assert "context of" in message and "got 1000000 and 1; lower --prompt-tokens" in message
    assert plan(*too_long, "--cache", "h2o:64,positions=rolling")


def test_a_server_is_planned_by_its_own_command(plan, h2okv_command, model_folder, monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("the weights are loaded")

    monkeypatch.setattr("h2okv.engine.engine.load_weights", load)
    monkeypatch.setattr("h2okv.engine.serving.data_bytes", lambda: 400 << 20)  # and 20 of loading
    assert "--serve is gone; give h2okv serve --dry-run" in plan("--serve", code=2)
    for options in (("--budget", 64), ("--cache", "10%,bits=8"), ("--cache", "every=64")):
        served = h2okv_command(
            "serve", "--dry-run", "--model", model_folder, "--memory", 1000 << 20, *options
        )
        assert served.code == 0, served
        assert served.out.startswith("memory: 1000.0 MiB, of which the process takes 420.0 MiB")
