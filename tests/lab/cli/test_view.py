import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from h2okv.models.names import SMOLLM2
from h2okv_lab.cli.analyze import fast_dtype


@pytest.fixture
def text_file(tmp_path, prompt):
    path = tmp_path / "text.txt"
    path.write_text(prompt, encoding="utf-8")
    return path


def content_of(page):
    data = re.search(r'<script type="application/json" id="content">(.*?)</script>', page, re.S)
    return json.loads(data.group(1))


def test_an_export_has_the_policies_and_budgets_of_the_options(
    h2okv_command, model_folder, text_file, tmp_path
):
    path = tmp_path / "kept.html"
    done = h2okv_command(
        "view", "--model", model_folder, "--text", text_file, "--export", path,
        "--budget", "64,20%", "--policy", "h2o,recent",
    )  # fmt: skip
    assert (done.code, done.out) == (0, f"{path}\n"), done.err
    content = content_of(path.read_text(encoding="utf-8"))
    pairs = [(trace["policy"], trace["budget"]) for trace in content["traces"]]
    assert pairs == [(policy, share) for policy in ("h2o", "recent") for share in ("64", "20%")]
    reading, choice = content["reading"], content["choice"]
    assert len(reading["tokens"]) == reading["given"]
    assert "".join(reading["tokens"][: reading["given"]]).endswith("on the log, ")
    assert (choice["layer"], choice["beside"], choice["budgets"]) == (0, "recent", ["64", "20%"])
    assert choice["policies"] == ["h2o", "recent"] and choice["other"] == "recent"


def test_it_begins_with_the_first_layer_that_evicts(h2okv_command, tokenizer, text_file, tmp_path):
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=len(tokenizer), sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    Gemma3ForCausalLM._from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "kept.html"
    done = h2okv_command("view", "--model", tmp_path, "--text", text_file, "--export", path)
    assert done.code == 0, done.err
    assert content_of(path.read_text(encoding="utf-8"))["choice"]["layer"] == 2


def test_an_export_has_a_default_budget(h2okv_command, model_folder, text_file, tmp_path):
    path = tmp_path / "kept.html"
    options = ("--policy", "recent", "--export", path)
    done = h2okv_command("view", "--model", model_folder, "--text", text_file, *options)
    assert done.code == 0, done.err
    content = content_of(path.read_text(encoding="utf-8"))
    assert [(t["policy"], t["budget"]) for t in content["traces"]] == [("recent", "20%")]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--policy", "best"), "best:20% cannot be shown: the page shows accumulated attention"),
        (("--cache", "bits=8"), "h2o:20%,bits=8 cannot be shown"),
        (("--cache", "h2o", "--cache", "h2o,sink=4"), "h2o:20%,sink=4 cannot be shown"),
        (("--budget", 1.5), "budget 1.5 is out of range"),
    ],
)
def test_bad_input_is_one_sentence(
    h2okv_command, model_folder, text_file, tmp_path, options, sentence
):
    base = ["view", "--model", model_folder, "--text", text_file, "--export", tmp_path / "k.html"]
    done = h2okv_command(*base, *options)
    assert done.code == 2
    assert done.err.startswith("h2okv: ") and done.err.count("\n") == 1
    assert sentence in done.err
    assert not (tmp_path / "k.html").exists()


def test_an_empty_text_is_refused(h2okv_command, model_folder, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    done = h2okv_command("view", "--model", model_folder, "--text", empty, "--export", "x.html")
    assert done.code == 2 and f"--text '{empty}' is empty" in done.err


def test_a_port_in_use_is_one_sentence(h2okv_command, model_folder, text_file):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = h2okv_command(
            "view", "--model", model_folder, "--text", text_file, "--port", port, "--no-open"
        )
    assert done.code == 2
    assert f"--port {port} cannot be opened" in done.err and "--port 0" in done.err


@pytest.mark.slow
def test_view_serves_the_page_until_ctrl_c(model_folder, text_file):
    process = subprocess.Popen(
        [sys.executable, "-m", "h2okv", "view", "--model", str(model_folder), "--port", "0",
         "--text", str(text_file), "--no-open"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=30) as answer:
            content = content_of(answer.read().decode())
        assert content["choice"]["text"].startswith("the cat sat")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_while_a_text_is_read_ends_with_130(save_model, text_file):
    model = save_model(context=10**5)
    process = subprocess.Popen(
        [sys.executable, "-m", "h2okv", "view", "--model", str(model), "--port", "0",
         "--text", str(text_file), "--tokens", "60000", "--no-open"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        address = process.stdout.readline().strip()
        body = json.dumps({"text": "the cat sat on the mat. " * 10_000}).encode()
        host = address.removeprefix("http://").rstrip("/")
        connection = http.client.HTTPConnection(host, timeout=30)
        connection.request("POST", "/api/text", body)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        connection.close()
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "stopped while a text was being read."
    assert "Traceback" not in err and "terminate" not in err


@pytest.mark.parametrize("has_tiles", [True, False])
def test_pictures_take_bfloat16_where_the_cpu_multiplies_it(monkeypatch, has_tiles):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles, raising=False)
    assert fast_dtype(SMOLLM2, "cpu") == (torch.bfloat16 if has_tiles else torch.float32)
    assert fast_dtype(SMOLLM2, "cuda") is None and fast_dtype("owner/name", "cpu") is None
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert fast_dtype(SMOLLM2, "cpu") == torch.float32
