"""The agent's loop of benchmarks/: what goes on after an interruption, and the picture."""

import sys

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("psutil", reason="psutil is not installed")


@pytest.fixture
def agent_loop(import_benchmark):
    return import_benchmark("agent_loop")


def test_rows_of_a_cut_off_run_are_dropped(agent_loop, tmp_path, monkeypatch):
    path, picture = tmp_path / "rows.csv", tmp_path / "loop.svg"
    monkeypatch.setattr(sys, "argv", ["agent_loop.py", "--turns", "3", "--csv", str(path)])
    args = agent_loop.parse()
    assert agent_loop.finished(path, args) == set()
    csv = agent_loop.CsvFile(path, agent_loop.FIELDS)
    for server, turns in (("h2okv", 3), ("llama.cpp", 2)):
        row = {"server": server, "model": "bundled", "settings": agent_loop.settings(server, args)}
        for turn in range(1, turns + 1):
            numbers = {"first_token_cpu_s": 1.5 * turn, "rss_mib": 100 + turn}
            csv.append(row | {"turn": turn} | numbers)
    csv.close()
    agent_loop.plot(picture, path)
    assert "llama.cpp" in picture.read_text() or picture.stat().st_size > 1000
    assert agent_loop.finished(path, args) == {"h2okv"}
    assert {row["server"] for row in agent_loop.read_csv(path)} == {"h2okv"}


def test_each_turn_brings_another_file(agent_loop):
    turns = [agent_loop.turn_messages(turn, 500) for turn in (1, 2)]
    contents = [messages[-1]["content"] for messages in turns]
    assert contents[0] != contents[1]
    assert [len(content) for content in contents] == [500, 500]
    assert turns[0][1]["tool_calls"][0]["id"] == turns[0][2]["tool_call_id"]
