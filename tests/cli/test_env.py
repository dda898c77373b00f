import json

import pytest


@pytest.fixture(autouse=True)
def _nothing_asked_for(monkeypatch):
    monkeypatch.delenv("H2OKV_OPS")


def test_env_names_the_implementation_and_the_reason(h2okv_command):
    outcome = h2okv_command("env")
    assert outcome.code == 0
    assert "H2OKV_OPS:      auto" in outcome.out and "for cpu" in outcome.out
    assert "Decode steps: launch by launch." in outcome.out  # on a CPU
    assert "Triton" in outcome.out and "machine code" not in outcome.out


def test_env_as_json(h2okv_command, monkeypatch):
    monkeypatch.setenv("H2OKV_OPS", "plain")
    monkeypatch.setenv("H2OKV_GRAPHS", "off")
    outcome = h2okv_command("env", "--json")
    record = json.loads(outcome.out)
    assert record["H2OKV_OPS"] == "plain"
    assert (record["H2OKV_GRAPHS"], record["graphs"]) == ("off", False)
    assert (record["head_size"], record["groups"]) == (64, 2)
    assert record["used"] == [
        {"device": "cpu", "dtype": dtype, "used": "plain", "why": "asked for: plain"}
        for dtype in ("float32", "bfloat16", "float16")
    ]


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("warp", "H2OKV_DEVICE 'warp' is not known; choose auto, cpu or a GPU"),
        ("cuda:99", "device 'cuda:99' cannot be used on this machine"),
        ("cpu", ""),
    ],
)
def test_the_device_is_that_of_the_environment(h2okv_command, monkeypatch, device, words):
    monkeypatch.setenv("H2OKV_DEVICE", device)
    outcome = h2okv_command("env", "--json")
    assert outcome.code == (2 if words else 0) and words in outcome.err
    if device == "cuda:99":
        ray = h2okv_command("serve", "--ray")
        assert "H2OKV_DEVICE=cuda:99 cannot be chosen with --ray" in ray.err


@pytest.mark.parametrize(
    "name, text",
    [
        ("fast", "choose one of auto"),
        ("compiled", "choose one of auto"),
        ("triton", "leave the choice to ops='auto'"),
    ],
)
def test_an_unknown_implementation_is_refused(h2okv_command, monkeypatch, name, text):
    monkeypatch.setenv("H2OKV_OPS", name)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    outcome = h2okv_command("env")
    assert outcome.code == 2 and text in outcome.err and len(outcome.err.splitlines()) == 1
