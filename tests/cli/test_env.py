import json

import pytest

from h2okv.ops import compiled


@pytest.fixture(autouse=True)
def _own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("H2OKV_OPS")


def test_what_would_be_used_and_why(h2okv_command, monkeypatch):
    monkeypatch.setattr(compiled, "compiler", lambda: None)
    made = h2okv_command("env", "--device", "cpu")
    assert made.code == 0
    assert "c++ compiler:   none" in made.out and "H2OKV_OPS:      auto" in made.out
    assert "there is no C++ compiler" in made.out and "Triton has no kernels for cpu" in made.out


def test_as_json(h2okv_command, monkeypatch):
    monkeypatch.setenv("H2OKV_OPS", "plain")
    made = h2okv_command("env", "--device", "cpu", "--json")
    told = json.loads(made.out)
    assert told["H2OKV_OPS"] == "plain" and told["machine code, files"] == 0
    assert (told["head_size"], told["groups"]) == (64, 2)
    assert {(one["operation"], one["used"]) for one in told["used"]} == {
        ("block", "plain"), ("step", "plain"),
    }  # fmt: skip
    assert {one["why"] for one in told["used"]} == {"asked for: plain"}


@pytest.mark.parametrize(
    "name, text", [("fast", "choose one of auto"), ("triton", "leave the choice to ops='auto'")]
)
def test_a_wrong_choice(h2okv_command, monkeypatch, name, text):
    monkeypatch.setenv("H2OKV_OPS", name)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    made = h2okv_command("env", "--device", "cpu")
    assert made.code == 2 and text in made.err and len(made.err.splitlines()) == 1
