"""`h2okv serve` as a process."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import openai
import pytest

from h2okv.cli.app import run
from h2okv.server.launch import open_port

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path):
    """Starts the command; returns the process and its address."""
    processes = []

    def start(*options, **environment):
        command = [sys.executable, "-m", "h2okv", "serve", "--max-num-seqs", "4",
                   "--policy", "h2o", "--budget", "32+32",
                   *map(str, options)]  # fmt: skip
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        )  # fmt: skip
        processes.append(process)
        address = process.stdout.readline().strip()
        assert address.startswith("http://"), process.stderr.read()
        return process, address

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def ask(address, key="none", **options):
    client = openai.OpenAI(base_url=address, api_key=key, max_retries=0, timeout=60)
    return client.completions.create(
        model="bundled", prompt="The sea", temperature=0, **{"max_tokens": 8, **options}
    )


def port_of(address):
    return int(address.removesuffix("/v1").rsplit(":", 1)[1])


def test_sigterm_drains_and_frees_the_port_for_a_restart(server):
    process, address = server("--port", "0")
    expected = ask(address, max_tokens=200, extra_body={"ignore_eos": True}).choices[0].text
    stream = iter(ask(address, max_tokens=200, stream=True, extra_body={"ignore_eos": True}))
    texts = [next(stream).choices[0].text]
    process.send_signal(signal.SIGTERM)
    texts += [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == expected
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in err, err
    assert "4 sequences of 64 entries" in err and "warning" not in err
    _, again = server("--port", port_of(address))
    assert again == address and ask(again).usage.completion_tokens == 8


def test_api_key_limits_and_second_signal(server, tmp_path):
    process, address = server(
        "--port", 0, "--name", "captain", "--max-new-tokens", 1900, "--drain", 600,
        H2OKV_API_KEY="a-key",
    )  # fmt: skip
    with pytest.raises(openai.AuthenticationError):
        ask(address)
    client = openai.OpenAI(base_url=address, api_key="a-key", max_retries=0, timeout=60)
    pieces = client.completions.create(
        model="captain", prompt="The sea", max_tokens=1900, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(pieces)
    reading = threading.Thread(target=lambda: _drain(pieces))
    reading.start()
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    reading.join(10)
    assert process.returncode == 130 and "before all requests had finished" in err


def _drain(pieces):
    with contextlib.suppress(Exception):  # the server goes away in the middle
        for _ in pieces:
            pass


@pytest.fixture
def command(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(*options):
        code = run(["serve", *map(str, options)])
        return code, capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host", "300.1.1.1"), "--host '300.1.1.1'"),
        (("--host", "192.0.2.1"), "of 192.0.2.1 cannot be opened"),
        (("--max-body", "large"), "--max-body 'large' is not an amount"),
        (("--cors-origin", "example.org"), "--cors-origin 'example.org' is not an origin; give"),
        (("--cors-origin", "https://a.org/x"), "is not an origin"),
        (("--drain", -1), "--drain must be a number from 0 to 1000000000, got -1"),
        (("--max-new-tokens", 0), "--max-new-tokens must be a whole number of 1 or more, got 0"),
        (("--max-waiting", -1), "--max-waiting must be a whole number of 0 or more, got -1"),
        (("--policy", "snapkv", "--cache", "every=64"), "leave out evict_every=64, or use policy"),
        (("--policy", "snapkv"), "evicts nothing while decoding"),
        (("--policy", "h2o", "--prefix-cache", "1KiB"), "1.0 KiB has no room for a state of"),
        (("--prefix-cache", "much"), "--prefix-cache 'much' is not an amount"),
        (("--prefix-cache", "1GiB", "--cache", "every=0"), "--prefix-cache has no effect with"),
        (("--prefix-cache-folder", "states", "--cache", "every=0"), "--prefix-cache-folder has no"),
        (("--prefix-cache-folder", "states", "--ray"), "--prefix-cache-folder is for one process"),
        (("--prefix-cache-folder", "states", "--tensor-parallel"), "folder is for one process"),
        (("--prefix-cache-folder", __file__), "cannot be written"),
        (("--policy", "h2o", "--memory", "10MiB"), "has no room for a single sequence"),
        (("--verify", "much"), "--verify must be a share such as 0.02 or '2%', got 'much'"),
        (("--agreement", 0.95), "--agreement needs answers that are read again; give --verify"),
        (("--verify", "2%", "--tensor-parallel"), "--verify 0.02 is for one process"),
        (("--pin", "system", "--policy", "sink_recent"), "keeps 0 heavy ones"),
        (("--pin", "tools", "--verify", "2%", "--agreement", 0.9), "agreement lowers them"),
    ],
)
def test_bad_options_are_one_sentence(command, options, words):
    code, err = command("--port", 0, *options)
    assert code == 2 and words in err
    assert err.startswith("h2okv: ") and err.count("\n") == 1


@pytest.fixture
def no_weights(monkeypatch):
    """Fails a test that loads weights."""

    def load(*args, **kwargs):
        raise AssertionError("the weights are loaded")

    monkeypatch.setattr("h2okv.engine.engine.load_weights", load)


def test_the_next_turn_continues_from_the_answer(server):
    process, address = server("--port", 0, "--cache", "every=32")
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)
    messages, usages = [], []
    for turn in range(2):
        messages.append({"role": "user", "content": f"And then, number {turn}? " * 20})
        answer = client.chat.completions.create(
            model="bundled", messages=messages, max_tokens=40, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        usages.append(answer.usage)
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert cached[0] == 0 and cached[1] % 32 == 0
    assert cached[1] > usages[0].prompt_tokens  # some of the answer is in the state
    with urllib.request.urlopen(address.removesuffix("/v1") + "/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    assert "h2okv_prefix_hits_total 1.0" in lines
    assert f"h2okv_reused_tokens_total {float(cached[1])}" in lines
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert "states of prompts and answers: up to" in err, err


def test_a_missed_agreement_is_a_line_in_the_log(server):
    process, address = server(
        "--port", 0, "--cache", "every=16", "--verify", "100%", "--agreement", "100%"
    )  # fmt: skip
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)
    for number in range(8):
        text = f"The sea, and number {number} of the ships that sailed on it. " * 20
        client.completions.create(
            model="bundled", prompt=text, max_tokens=24, extra_body={"h2o": {"verify": True}}
        )
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert "warning: agreement=1 does not hold for requests of kind 'text' with the largest" in err


def test_states_outlive_the_server(server, tmp_path):
    options = ("--port", 0, "--cache", "every=32", "--prefix-cache-folder", tmp_path)
    answers = []
    for number in (0, 2):
        process, address = server(*options)
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)
        prompt = "And then, again and again? " * 20
        create = client.completions.create
        answers.append(
            create(
                model="bundled", prompt=prompt, max_tokens=40, temperature=0,
                extra_body={"ignore_eos": True},
            )
        )  # fmt: skip
        with urllib.request.urlopen(address.removesuffix("/v1") + "/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert f"prefix cache folder: '{tmp_path}' has {number} states" in err, err
    assert answers[0].choices[0].text == answers[1].choices[0].text
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert cached[0] == 0 and cached[1] > 32
    assert "h2okv_prefix_disk_hits_total 1.0" in lines
    assert "h2okv_prefix_disk_states 2.0" in lines


def test_dry_run_says_what_fits_without_the_weights(command, no_weights, capsys, tmp_path):
    assert run(["serve", "--dry-run", "--max-num-seqs", "5", "--prefix-cache", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert "sequences: 5 of 516 entries and 256 more" in out
    assert "prefix cache: 1.0 GiB, " in out and "a full cache of 2,048 tokens takes" in out
    assert run(["serve", "--dry-run", "--prefix-cache-folder", str(tmp_path / "states")]) == 0
    assert "states' has 0 states of " in capsys.readouterr().out
    code, err = command("--dry-run", "--max-num-seqs", "100000000")
    assert code == 2 and "--max-num-seqs 100000000 needs " in err and "has room for" in err
    code, err = command("--dry-run", "--memory", "10MiB")
    assert code == 2 and "has no room for a single sequence" in err


def test_fractions_of_short_prompts_are_raised(command, monkeypatch):
    requests = []
    monkeypatch.setattr(
        "h2okv.server.launch.run_server", lambda request: requests.append(request) or 0
    )
    assert command("--port", 0, "--budget", "20%")[0] == 0
    assert requests[0].engine.cache.min_tokens == requests[0].server.cache.min_tokens == 64


def test_port_in_use_is_one_sentence(command, no_weights):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, err = command("--port", port)
    assert code == 2 and f"--port {port} of 127.0.0.1 cannot be opened" in err


def test_empty_api_key_is_refused(command, monkeypatch):
    monkeypatch.setenv("H2OKV_API_KEY", " ")
    code, err = command("--port", 0)
    assert code == 2 and "the API key is empty" in err


def test_port_is_reserved_while_the_model_is_loaded(command, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def load(*args, **kwargs):
        with pytest.raises(ValueError, match=f"--port {port} of 127.0.0.1 cannot be opened"):
            open_port("127.0.0.1", port)
        raise ValueError("this model was refused")

    monkeypatch.setattr("h2okv.server.launch.AsyncLLM", load)
    assert command("--port", port) == (2, "h2okv: this model was refused.\n")
    open_port("127.0.0.1", port).close()


def test_missing_package_is_named():
    script = (
        "import sys\n"
        "for name in ('uvicorn', 'fastapi', 'starlette'): sys.modules[name] = None\n"
        "from h2okv.cli.app import run\n"
        "sys.exit(run(['serve', '--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    message = "fastapi is not installed, which a server needs; in the clone"
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_signal_after_the_address_stops_gracefully(command, monkeypatch):
    def announce(*args):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("h2okv.server.launch.announce", announce)
    options = ("--max-num-seqs", 1, "--max-prompt-tokens", 64, "--policy", "h2o")
    assert command("--port", 0, *options) == (0, "")


def test_warning_for_a_public_host_without_api_key(command, monkeypatch):
    def announce_only(listener, sockets):
        sockets[0].close()
        asyncio.run(listener._engine.aclose(0))

    monkeypatch.setattr("h2okv.server.launch.Listener.run", announce_only)
    warning = "warning: anyone who reaches 0.0.0.0 may use this server; set H2OKV_API_KEY"
    options = ("--port", 0, "--max-num-seqs", 1, "--max-prompt-tokens", 64)
    assert warning in command("--host", "0.0.0.0", *options)[1]
    assert "warning" not in command(*options)[1]
    monkeypatch.setenv("H2OKV_API_KEY", "a-key")
    assert "warning" not in command("--host", "0.0.0.0", *options)[1]
