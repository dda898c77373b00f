"""Two copies of the bundled model behind Ray Serve's proxy, one of which is killed."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest

from h2okv.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

SEQS, WAITING = 2, 16
TOKENS = 500
PROMPT = "It was a dark and stormy night, and the"
KEY = "a key of some length"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """`h2okv serve --ray` on a cluster of this machine alone; ended as an operator ends it."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    command = (
        "serve", "--ray", "--replicas", "2", "--max-num-seqs", SEQS, "--max-prompt-tokens", "256",
        "--max-waiting", WAITING, "--name", "books", "--port", "0", "--drain", "5",
    )  # fmt: skip
    environment = os.environ | {
        "RAY_ADDRESS": "local",
        "RAY_worker_niceness": "0",
        "H2OKV_API_KEY": KEY,
        "OMP_NUM_THREADS": "1",
    }
    remarks = tmp_path_factory.mktemp("serve") / "stderr"
    with remarks.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "h2okv", *map(str, command)],
            stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
        )  # fmt: skip
    try:
        line = process.stdout.readline()
        assert line.endswith("/v1\n"), remarks.read_text()
        assert f"2 replicas with {SEQS} sequences each" in remarks.read_text()
        process.address = line.removesuffix("/v1\n")
        yield process
        helpers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == ""
        assert process.wait(timeout=30) == 0, remarks.read_text()
        assert psutil.wait_procs(helpers, timeout=15)[1] == []
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def address(server):
    return server.address


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def expected():
    """Return the text of a single engine with a server's defaults, by number of tokens."""
    from h2okv.engine.config import EngineConfig
    from h2okv.engine.llm import AsyncLLM
    from h2okv.engine.serving import with_states

    options = {"policy": "best", "budget": 512, "max_num_seqs": SEQS, "max_prompt_tokens": 256}
    config, _ = with_states(EngineConfig.from_options(**options), None)

    async def texts():
        engine = AsyncLLM("bundled", config=config)
        results = {}
        for count in (20, TOKENS):
            params = SamplingParams(max_tokens=count, temperature=0)
            results[count] = "".join([p.text async for p in engine.generate(PROMPT, params)])
        await engine.aclose(drain=0)
        return results

    return asyncio.run(texts())


def ask(client, count, stream=False):
    """Returns the text, and the error that ended it."""
    options = {"model": "books", "prompt": PROMPT, "max_tokens": count, "temperature": 0}
    if not stream:
        return client.completions.create(**options).choices[0].text, None
    text = ""
    try:
        for chunk in client.completions.create(**options, stream=True):
            text += chunk.choices[0].text
    except openai.APIError as error:
        return text, error
    return text, None


def get(address, page):
    import httpx2

    return httpx2.get(f"{address}{page}", headers={"Authorization": f"Bearer {KEY}"}, timeout=30)


def numbers(address):
    return get(address, "/stats").json()


def wait_for(address, **expected_stats):
    """Wait until the stats, which replicas report once a second, have these values."""
    until = time.monotonic() + 60
    while (
        stats := {name: numbers(address).get(name) for name in expected_stats}
    ) != expected_stats:
        assert time.monotonic() < until, stats
        time.sleep(0.1)


def test_responses_equal_a_single_engine(address, client, expected):
    assert ask(client, 20) == (expected[20], None)
    assert ask(client, 20, stream=True) == (expected[20], None)
    assert [model.id for model in client.models.list()] == ["books"]
    wait_for(address, replicas=2, max_num_seqs=2 * SEQS, model="books", finished=2)
    page = get(address, "/metrics").text
    assert "h2okv_replicas 2.0" in page
    assert page.count("h2okv_max_num_seqs{replica=") == 2
    assert get(address, "/health").json() == {"status": "ok", "replicas": 2}


def test_invalid_requests_are_refused_by_the_router(address, client):
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        ask(stranger, 20)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_full_queue_and_disconnected_clients(address, client):
    streams = [
        client.completions.create(
            model="books", prompt=PROMPT, max_tokens=1500, temperature=0, stream=True
        )
        for _ in range(2 * SEQS)
    ]
    for stream in streams:
        next(iter(stream))
    wait_for(address, running=2 * SEQS)
    with ThreadPoolExecutor(WAITING + 4) as pool:
        waiting = [pool.submit(ask, client, 20) for _ in range(WAITING + 4)]
        refused = []
        while len(refused) < 4:
            refused = [future for future in waiting if future.done()]
            time.sleep(0.05)
        for future in refused:
            error = future.exception()
            assert isinstance(error, openai.RateLimitError)
            assert int(error.response.headers["retry-after"]) >= 1
        # Their slots go to those that wait.
        for stream in streams:
            stream.close()
        assert sum(future.exception() is None for future in waiting) == WAITING
    wait_for(address, running=0, aborted=2 * SEQS)


def replicas(server):
    """Processes with a copy of the model."""
    processes = []
    for process in psutil.Process(server.pid).children(recursive=True):
        try:
            if any("ServeReplica:h2okv:model" in argument for argument in process.cmdline()):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def names(address):
    """Return the names of the replicas that have reported their stats lately."""
    return set(re.findall(r'h2okv_max_num_seqs{replica="(\w+)"}', get(address, "/metrics").text))


@pytest.fixture(scope="module")
def before(address):
    """Return the names of the replicas that the server started with."""
    return names(address)


def test_killed_replica(server, address, before, client, expected):
    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(ask, client, TOKENS, stream=True) for _ in range(4)]
        complete = [pool.submit(ask, client, TOKENS) for _ in range(8)]
        wait_for(address, running=2 * SEQS)
        victim, other = replicas(server)
        victim.kill()
        answers = [future.result() for future in complete]
        streamed = [future.result() for future in streams]
    assert answers == [(expected[TOKENS], None)] * 8
    broken = [(text, error) for text, error in streamed if error is not None]
    for text, error in broken:
        # The stream had begun: the client keeps its text and gets an error.
        assert error.code == "replica_lost"
        assert expected[TOKENS].startswith(text) and text
    assert [text for text, error in streamed if error is None] == [expected[TOKENS]] * (
        4 - len(broken)
    )
    stats = numbers(address)
    assert stats["broken"] == len(broken)
    assert stats["broken"] + stats["retried"] >= SEQS
    assert other.is_running()


def test_killed_replica_is_replaced(address, before, client, expected):
    until = time.monotonic() + 60
    while len(before | names(address)) < 3 or len(names(address)) != 2:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert ask(client, 20) == (expected[20], None)
