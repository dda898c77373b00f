"""The load script against a server with known delays and errors."""

import asyncio
import csv
import itertools
import json
import statistics
import sys

import pytest
import torch

from h2okv_lab.tables import environment

pytestmark = pytest.mark.slow

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
RATIO = 5.0  # characters of a token


@pytest.fixture
def script(import_benchmark):
    return import_benchmark("serve_load")


@pytest.fixture
def run(script, monkeypatch):
    """Return a function that runs the script and returns the rows of its CSV file."""

    def run(path, *words):
        monkeypatch.setattr(sys, "argv", ["serve_load.py", *words, "--csv", str(path)])
        script.main()
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    return run


def measure(script, server, load, *words, new_tokens=4):
    outcomes = []
    args = script.parse([server.url, "--served-name", "the-model", *words])

    async def go():
        async with script.Client(args) as client:
            await load.run(client, [("How so?", new_tokens)] * load.requests, outcomes)

    asyncio.run(go())
    return outcomes


def test_measured_delays_equal_the_server_s(script, fake_server):
    with fake_server(first=0.15, gap=0.04) as server:
        outcomes = measure(script, server, script.Load(2, None, 4), new_tokens=5)
    summary = script.summarize(outcomes, script.Load(1, None, 1))
    assert (summary["requests"], summary["finished"], summary["failed"]) == (4, 4, 0)
    # Never earlier than the server sent it; how much later is the machine's affair.
    assert 0.15 <= summary["first_token_p50"] < 2
    assert 0.035 <= summary["per_token_p50"] < 1
    assert 0.03 <= summary["gap_p50"] < 1
    assert summary["seconds"] >= 2 * (0.15 + 4 * 0.04)
    assert summary["counted_by"] == "usage"
    assert summary["new_tokens"] == 5
    assert summary["new_tokens_per_second"] == pytest.approx(20 / summary["seconds"])
    prompts = sum(len(body["prompt"]) // 5 for body in server.bodies)
    assert summary["total_tokens_per_second"] == pytest.approx((20 + prompts) / summary["seconds"])


@pytest.mark.parametrize("clients", [1, 3])
def test_a_closed_loop_never_has_more_requests_under_way_than_clients(script, clients, fake_server):
    with fake_server(first=0.05) as server:
        outcomes = measure(script, server, script.Load(clients, None, 3 * clients))
    assert server.most_running == clients
    assert len(outcomes) == len(server.bodies) == 3 * clients


def test_an_open_loop_does_not_wait_for_answers(script, fake_server):
    with fake_server(first=0.5) as server:
        outcomes = measure(script, server, script.Load(None, 50.0, 20))
    # All came before the first answer was there, though each takes half a second.
    assert server.most_running > 10
    starts = [outcome.due - outcomes[0].due for outcome in outcomes]
    drawn = list(itertools.islice(script.arrival_times(50.0, 0), 20))
    assert starts == pytest.approx([time - drawn[0] for time in drawn], abs=1e-6)
    assert all(outcome.started >= outcome.due for outcome in outcomes)


def test_waiting_in_the_generator_counts_as_waiting_for_the_server(script):
    outcome = script.Outcome(due=10.0, started=12.0, arrivals=[13.0, 13.5, 14.0], ended=14.0)
    assert outcome.first_token == 3.0
    assert outcome.per_token == 0.5
    assert outcome.gaps == [0.5, 0.5]


def test_arrivals_are_a_poisson_process(script):
    times = list(itertools.islice(script.arrival_times(5.0, 3), 4000))
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)
    assert times == list(itertools.islice(script.arrival_times(5.0, 3), 4000))
    assert times[0] != next(script.arrival_times(5.0, 4))


FAULTS = {0: 429, 2: 500, 3: 429, 4: "cut", 5: "told", 6: "nonsense", 7: "hang", 8: "reset"}
KINDS = {
    "HTTP 429": 2, "HTTP 500": 1, "cut off": 1, "error in stream": 1, "not JSON": 1,
    "timed out": 1, "ClientPayloadError": 1,
}  # fmt: skip


def test_every_kind_of_error_is_counted_and_other_requests_continue(script, fake_server):
    with fake_server(faults=FAULTS) as server:
        outcomes = measure(script, server, script.Load(1, None, 11), "--timeout", "1")
    summary = script.summarize(outcomes, script.Load(1, None, 1))
    assert summary["errors"] == KINDS
    assert (summary["requests"], summary["finished"], summary["failed"]) == (11, 3, 8)
    assert summary["new_tokens"] == 4
    errors = [str(outcome.error) for outcome in outcomes]
    assert any(error.startswith("HTTP 429: ") and "too much" in error for error in errors)
    assert any(error.startswith("error in stream: ") and "NaN" in error for error in errors)


def test_a_server_that_is_gone_is_an_error_and_no_crash(script, fake_server):
    with fake_server() as server:
        pass
    summary = script.summarize(
        measure(script, server, script.Load(2, None, 3)), script.Load(2, None, 3)
    )
    assert summary["errors"] == {"ClientConnectorError": 3}
    assert summary["first_token_p50"] is None and summary["new_tokens"] is None
    assert summary["new_tokens_per_second"] == 0


def test_chunks_are_counted_without_usage(script, fake_server):
    with fake_server(tells_usage=False) as server:
        summary = script.summarize(
            measure(script, server, script.Load(2, None, 4)), script.Load(2, None, 4)
        )
    assert summary["counted_by"] == "pieces"
    assert summary["new_tokens"] == 4
    assert summary["prompt_tokens"] is None and summary["total_tokens_per_second"] is None


def test_the_first_event_of_a_chat_is_no_token(script, fake_server):
    with fake_server(first=0.2, tells_usage=False) as server:
        summary = script.summarize(
            measure(script, server, script.Load(1, None, 1), "--chat"), script.Load(1, None, 1)
        )
    assert server.bodies[0]["messages"][0]["content"] == "How so?"
    assert summary["new_tokens"] == 4
    assert summary["first_token_p50"] >= 0.2


def test_prompt_lengths_are_in_range_and_beginnings_differ(script):
    def requests(seed):
        words = ("--context", "200:300", "--new-tokens", "32", "--seed", str(seed))
        args = script.parse(["http://x", *words])
        texts = script.read_texts(None)
        return [script.make_request(number, texts, RATIO, args) for number in range(300)]

    first = requests(5)
    lengths = [len(prompt) / 5 for prompt, _ in first]
    assert 199 <= min(lengths) < 205 and 295 < max(lengths) <= 301
    assert len({prompt[:30] for prompt, _ in first}) == 300
    new = [tokens for _, tokens in first]
    assert statistics.median(new) == pytest.approx(32, rel=0.2)
    assert 1 <= min(new) < 10 and 100 < max(new) <= 128
    assert requests(5) == first
    assert requests(6)[7] != first[7]


def test_prompts_without_a_range_are_unchanged(script, tmp_path):
    path = tmp_path / "questions.jsonl"
    records = [{"turns": ["One?", "Two?"]}, {"prompt": "Three?"}, {"question": "Four?"}]
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    args = script.parse(["http://x", "--new-tokens", "8", "--spread", "0"])
    texts = script.read_texts(path)
    requests = [script.make_request(number, texts, RATIO, args) for number in range(4)]
    assert requests == [("One?", 8), ("Three?", 8), ("Four?", 8), ("One?", 8)]


def test_interrupted_requests_are_no_errors(script):
    complete = script.Outcome(0.0, 0.0, [1.0, 2.0], 2.0)
    stopped = script.Outcome(0.0, 0.0, [1.0], 3.0, error=script.INTERRUPTED)
    summary = script.summarize([complete, stopped], script.Load(1, None, 2))
    assert (summary["finished"], summary["failed"], summary["interrupted"]) == (1, 0, 1)
    assert summary["errors"] == {}


def test_the_script_writes_a_row_for_each_load(run, tmp_path, capsys, monkeypatch, fake_server):
    monkeypatch.setenv("H2OKV_API_KEY", "open-sesame")
    options = ("--new-tokens", "3", "--spread", "0", "--context", "64:96", "--requests", "4")
    with fake_server(gap=0.01, faults={3: 429}) as server:
        loads = ("--clients", "1,2", "--rate", "40", "--extra", '{"top_p": 0.5}')
        rows = run(tmp_path / "rows.csv", server.url + "/v1", *loads, *options)
    captured = capsys.readouterr()
    assert "1 clients" in captured.out and "40/s" in captured.out and "3/4" in captured.out
    assert "1 clients: HTTP 429: " in captured.err
    assert list(rows[0])[: len(environment(torch.device("cpu")))] == [
        *environment(torch.device("cpu"))
    ]
    assert [(row["loop"], row["clients"], row["rate"]) for row in rows] == [
        ("closed", "1", ""), ("closed", "2", ""), ("open", "", "40"),
    ]  # fmt: skip
    assert all(64 <= float(row["prompt_tokens"]) <= 97 for row in rows)
    assert [json.loads(row["errors"]) for row in rows] == [{"HTTP 429": 1}, {}, {}]
    assert set(server.keys) == {"Bearer open-sesame"}
    # One to count, two to warm up, and three loads of four.
    assert len(server.bodies) == 15
    assert {(body["model"], body["top_p"]) for body in server.bodies} == {("the-model", 0.5)}


def test_a_file_of_loads_keeps_its_columns(script):
    points = [
        f"{name}_{point}"
        for name in ("first_token", "per_token", "gap", "lateness")
        for point in ("p50", "p95", "p99")
    ]
    expected = (
        "server", "model", "loop", "clients", "rate", "requests", "finished", "failed",
        "interrupted", "errors", "seconds", "requests_per_second", "new_tokens_per_second",
        "total_tokens_per_second", "prompt_tokens", "new_tokens", "counted_by", *points,
    )  # fmt: skip
    assert expected == script.COLUMNS


def test_a_server_that_is_not_there_is_one_sentence(run, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        run(tmp_path / "rows.csv", "http://127.0.0.1:9")
    assert error.value.code == 2
    assert "http://127.0.0.1:9/v1/models lists no model" in capsys.readouterr().err
