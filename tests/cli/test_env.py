import json

import pytest


@pytest.fixture(autouse=True)
def _nothing_asked_for(monkeypatch):
    monkeypatch.delenv("H2OKV_OPS")


def test_what_would_be_used_and_why(h2okv_command):
    made = h2okv_command("env", "--device", "cpu")
    assert made.code == 0
    assert "H2OKV_OPS:      auto" in made.out and "for cpu" in made.out
    assert "Triton" in made.out and "machine code" not in made.out


def test_as_json(h2okv_command, monkeypatch):
    monkeypatch.setenv("H2OKV_OPS", "plain")
    made = h2okv_command("env", "--device", "cpu", "--json")
    told = json.loads(made.out)
    assert told["H2OKV_OPS"] == "plain"
    assert (told["head_size"], told["groups"]) == (64, 2)
    assert told["used"] == [
        {"device": "cpu", "dtype": dtype, "used": "plain", "why": "asked for: plain"}
        for dtype in ("float32", "bfloat16", "float16")
    ]


@pytest.mark.parametrize(
    "name, text",
    [
        ("fast", "choose one of auto"),
        ("compiled", "choose one of auto"),
        ("triton", "leave the choice to ops='auto'"),
    ],
)
def test_a_wrong_choice(h2okv_command, monkeypatch, name, text):
    monkeypatch.setenv("H2OKV_OPS", name)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    made = h2okv_command("env", "--device", "cpu")
    assert made.code == 2 and text in made.err and len(made.err.splitlines()) == 1
