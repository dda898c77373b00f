"""The load generator against a server with known delays and errors."""

import asyncio
import csv
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys

import pytest
import torch

from h2okv.benchmarking.serving import (
    COLUMNS,
    INTERRUPTED,
    Client,
    Load,
    Outcome,
    Workload,
    arrival_times,
    make_loads,
    read_texts,
    summarize,
)
from h2okv.cli.app import run
from h2okv.provenance import environment

pytestmark = pytest.mark.slow

pytest.importorskip("aiohttp", reason="aiohttp is in the [serve] extra")
WAIT = 60


RATIO = 5.0  # characters of a token


def measure(server, load, new_tokens=4, **options):
    outcomes = []
    requests = [("How so?", new_tokens)] * load.requests

    async def go():
        async with Client(server.url, "the-model", **options) as client:
            await load.run(client, requests, outcomes)

    asyncio.run(go())
    return outcomes


def closed(clients, requests):
    return Load(clients, None, requests)


def test_measured_delays_equal_the_server_s(fake_server):
    with fake_server(first=0.15, gap=0.04) as server:
        outcomes = measure(server, closed(2, 4), new_tokens=5)
    summary = summarize(outcomes, closed(1, 1))
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
def test_a_closed_loop_never_has_more_requests_under_way_than_clients(clients, fake_server):
    with fake_server(first=0.05) as server:
        outcomes = measure(server, closed(clients, 3 * clients))
    assert server.most_running == clients
    assert len(outcomes) == len(server.bodies) == 3 * clients


def test_an_open_loop_does_not_wait_for_answers(fake_server):
    with fake_server(first=0.5) as server:
        outcomes = measure(server, Load(None, 50.0, 20))
    # All came before the first answer was there, though each takes half a second.
    assert server.most_running > 10
    starts = [outcome.due - outcomes[0].due for outcome in outcomes]
    drawn = list(itertools.islice(arrival_times(50.0, 0), 20))
    assert starts == pytest.approx([time - drawn[0] for time in drawn], abs=1e-6)
    assert all(outcome.started >= outcome.due for outcome in outcomes)


def test_waiting_in_the_generator_counts_as_waiting_for_the_server():
    outcome = Outcome(due=10.0, started=12.0, arrivals=[13.0, 13.5, 14.0], ended=14.0)
    assert outcome.first_token == 3.0
    assert outcome.per_token == 0.5
    assert outcome.gaps == [0.5, 0.5]


def test_arrivals_are_a_poisson_process():
    times = list(itertools.islice(arrival_times(5.0, 3), 4000))
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)
    assert times == list(itertools.islice(arrival_times(5.0, 3), 4000))
    assert times[0] != next(arrival_times(5.0, 4))


FAULTS = {0: 429, 2: 500, 3: 429, 4: "cut", 5: "told", 6: "nonsense", 7: "hang", 8: "reset"}
KINDS = {
    "HTTP 429": 2, "HTTP 500": 1, "cut off": 1, "error in stream": 1, "not JSON": 1,
    "timed out": 1, "connection broken": 1,
}  # fmt: skip


def test_every_kind_of_error_is_counted_and_other_requests_continue(fake_server):
    with fake_server(faults=FAULTS) as server:
        outcomes = measure(server, closed(1, 11), timeout=1.0)
    summary = summarize(outcomes, closed(1, 1))
    assert summary["errors"] == KINDS
    assert (summary["requests"], summary["finished"], summary["failed"]) == (11, 3, 8)
    assert summary["new_tokens"] == 4
    errors = [str(outcome.error) for outcome in outcomes]
    assert any(error.startswith("HTTP 429: ") and "too much" in error for error in errors)
    assert any(error.startswith("error in stream: ") and "NaN" in error for error in errors)


def test_a_server_that_is_gone_is_an_error_and_no_crash(fake_server):
    with fake_server() as server:
        pass
    summary = summarize(measure(server, closed(2, 3)), closed(2, 3))
    assert summary["errors"] == {"no connection": 3}
    assert summary["first_token_p50"] is None and summary["new_tokens"] is None
    assert summary["new_tokens_per_second"] == 0


def test_chunks_are_counted_without_usage(fake_server):
    with fake_server(tells_usage=False) as server:
        summary = summarize(measure(server, closed(2, 4)), closed(2, 4))
    assert summary["counted_by"] == "pieces"
    assert summary["new_tokens"] == 4
    assert summary["prompt_tokens"] is None and summary["total_tokens_per_second"] is None


def test_the_first_event_of_a_chat_is_no_token(fake_server):
    with fake_server(first=0.2, tells_usage=False) as server:
        summary = summarize(measure(server, closed(1, 1), is_chat=True), closed(1, 1))
    assert server.bodies[0]["messages"][0]["content"] == "How so?"
    assert summary["new_tokens"] == 4
    assert summary["first_token_p50"] >= 0.2


def test_prompt_lengths_are_in_range_and_beginnings_differ():
    workload = Workload(read_texts(None), (200, 300), 32, 0.8, seed=5)
    requests = [workload.request(number, RATIO) for number in range(300)]
    lengths = [len(prompt) / 5 for prompt, _ in requests]
    assert 199 <= min(lengths) < 205 and 295 < max(lengths) <= 301
    assert len({prompt[:30] for prompt, _ in requests}) == 300
    new = [tokens for _, tokens in requests]
    assert statistics.median(new) == pytest.approx(32, rel=0.2)
    assert 1 <= min(new) < 10 and 100 < max(new) <= 128
    assert workload.request(7, RATIO) == requests[7]
    other = Workload(read_texts(None), (200, 300), 32, 0.8, seed=6)
    assert workload.request(7, RATIO) != other.request(7, RATIO)


def test_prompts_without_a_range_are_unchanged(tmp_path):
    path = tmp_path / "questions.jsonl"
    records = [{"turns": ["One?", "Two?"]}, {"prompt": "Three?"}, {"question": "Four?"}]
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    workload = Workload(read_texts(path), None, 8, 0.0)
    requests = [workload.request(number, RATIO) for number in range(4)]
    assert [prompt for prompt, _ in requests] == ["One?", "Three?", "Four?", "One?"]
    assert {tokens for _, tokens in requests} == {8}


def test_mt_bench(shared):
    texts = read_texts(shared / "data" / "eval" / "mt_bench_question.jsonl")
    assert len(texts) == 80 and texts[0].startswith("Compose an engaging travel blog")


def test_loads_of_the_options():
    assert list(make_loads([8, 32], [2.0], None)) == [
        Load(8, None, 32), Load(32, None, 128), Load(None, 2.0, 60),
    ]  # fmt: skip
    assert list(make_loads([8], [], 5)) == [Load(8, None, 5)]


# The command.


def test_the_command_shows_a_table_and_writes_rows(tmp_path, capsys, monkeypatch, fake_server):
    monkeypatch.setenv("H2OKV_API_KEY", "open-sesame")
    rows = tmp_path / "rows.csv"
    with fake_server(gap=0.01) as server:
        code = run([
            "bench", "serve", "--url", server.url, "--clients", "1,2", "--rate", "40",
            "--requests", "4", "--new-tokens", "3", "--spread", "0", "--context", "64:96",
            "--csv", str(rows),
        ])  # fmt: skip
    output = capsys.readouterr()
    assert code == 0, output.err
    assert "1 clients" in output.out and "40/s" in output.out and "4/4" in output.out
    with rows.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == (*environment(torch.device("cpu")), *COLUMNS)
    assert [(row["loop"], row["clients"], row["rate"]) for row in lines] == [
        ("closed", "1", ""), ("closed", "2", ""), ("open", "", "40"),
    ]  # fmt: skip
    assert all(64 <= float(row["prompt_tokens"]) <= 97 for row in lines)
    assert {row["counted_by"] for row in lines} == {"usage"}
    assert set(server.keys) == {"Bearer open-sesame"}
    # One to count, two to warm up, and three loads of four.
    assert len(server.bodies) == 15
    assert {body["model"] for body in server.bodies} == {"the-model"}


def test_the_command_as_json_with_errors_and_extra_fields(capsys, fake_server):
    with fake_server(faults={3: 429}) as server:
        code = run([
            "bench", "serve", "--url", server.url + "/v1", "--clients", "2", "--requests", "3",
            "--json", "--extra", '{"top_p": 0.5}', "--chat",
        ])  # fmt: skip
    assert code == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["errors"] == {"HTTP 429": 1}
    assert (row["requests"], row["finished"], row["failed"]) == (3, 2, 1)
    assert {body["top_p"] for body in server.bodies} == {0.5}


def test_nothing_finished_is_exit_code_1(capsys, fake_server):
    with fake_server(faults={n: 500 for n in range(1, 9)}) as server:
        code = run(["bench", "serve", "--url", server.url, "--clients", "2", "--requests", "3"])
    assert code == 1
    assert "2 clients: HTTP 500: " in capsys.readouterr().err


BAD = {
    "no address": ((), ("--url",)),
    "no URL": (("--url", "localhost:8000"), ("localhost:8000", "http://127.0.0.1:8000")),
    "no clients": (("--url", "http://x", "--clients", "0"), ("--clients 0",)),
    "clients in words": (("--url", "http://x", "--clients", "many"), ("--clients 'many'",)),
    "no rate": (("--url", "http://x", "--rate", "0"), ("--rate must be", "got 0")),
    "endless rate": (("--url", "http://x", "--rate", "inf"), ("--rate must be", "got inf")),
    "context backwards": (("--url", "http://x", "--context", "96:64"), ("--context must be",)),
    "context in words": (("--url", "http://x", "--context", "long"), ("--context 'long'",)),
    "no tokens": (("--url", "http://x", "--new-tokens", "0"), ("--new-tokens 0",)),
    "spread": (("--url", "http://x", "--spread", "-1"), ("--spread must be", "got -1")),
    "no requests": (("--url", "http://x", "--requests", "0"), ("--requests 0",)),
    "no time": (("--url", "http://x", "--timeout", "0"), ("--timeout 0",)),
    "extra": (("--url", "http://x", "--extra", "[1]"), ("--extra '[1]'", "JSON object")),
    "no file": (("--url", "http://x", "--prompts", "none.jsonl"), ("none.jsonl", "cannot be read")),
    "no server": (("--url", "http://127.0.0.1:9"), ("no answer from", "--model bundled")),
}  # fmt: skip


@pytest.mark.parametrize(("args", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence(capsys, args, words):
    assert run(["bench", "serve", *args]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert all(word in output.err for word in words), output.err


def test_options_of_the_other_benchmark_are_refused_before_the_word(capsys):
    assert run(["bench", "--rounds", "3", "serve", "--url", "http://x"]) == 2
    assert "--rounds before the word serve is an option of" in capsys.readouterr().err


def test_control_c_prints_what_was_measured(fake_server):
    with fake_server(gap=0.05, faults={7: "hang", 8: "hang"}) as server:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "h2okv", "bench", "serve", "--url", server.url,
                "--clients", "2", "--requests", "50", "--new-tokens", "3", "--spread", "0",
                "--warmup", "0",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # A test run in the background ignores SIGINT, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        try:
            waiting = 600
            while len(server.bodies) < 9 and process.poll() is None and waiting:
                waiting -= 1
                signal.sigtimedwait([], 0.1)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=WAIT)
        finally:
            process.kill()
    assert process.returncode == 130, err
    # One request found out how tokens are counted; six were answered; two hung.
    assert "6/8" in out
    assert "2 clients: interrupted" in err and "stopped" in err
    assert "Traceback" not in err


def test_interrupted_requests_are_no_errors():
    complete = Outcome(0.0, 0.0, [1.0, 2.0], 2.0)
    stopped = Outcome(0.0, 0.0, [1.0], 3.0, error=INTERRUPTED)
    summary = summarize([complete, stopped], closed(1, 2))
    assert (summary["finished"], summary["failed"], summary["interrupted"]) == (1, 0, 1)
    assert summary["errors"] == {}
