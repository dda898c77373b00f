"""`h2okv batch` with weights on the disk, and the memory that it promises."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from h2okv.cli.app import run
from h2okv.engine.memory import data_bytes

pytestmark = pytest.mark.slow

STEPS = 5
H2O = ("--policy", "h2o")  # budgets by head are measured on whole models alone
PROMPTS = ["the cat", "the dog sat on the log, " * 6, "he", "the mat and the dog " * 3, "it", "a"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"id": n, "prompt": text}) for n, text in enumerate(PROMPTS)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def job(h2okv_command, tmp_path, prompts):
    def call(model, *args, output="out.jsonl", code=0):
        path = tmp_path / output
        options = ("--input", prompts, "--output", path, "--max-new-tokens", STEPS)
        outcome = h2okv_command("batch", *H2O, "--model", model, *options, "--json", *args)
        assert outcome.code == code, outcome
        if code:
            assert outcome.err.startswith("h2okv: ")
            assert outcome.err.count("\n") == 1
            return outcome.err, None
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return json.loads(outcome.out), {record["id"]: record for record in records}

    return call


WEIGHTS = ("disk", "cpu", "device=50,disk=50", "device=67,disk=33", "disk=100")


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weight_placement_does_not_change_results(job, model_folder, weights):
    _, expected = job(model_folder, output="memory.jsonl")
    summary, records = job(model_folder, "--weights", weights, "--batch", 3)
    assert records == expected
    assert (summary["bytes_read"] > 0) == ("disk" in weights)
    assert summary["predicted"] > 0


def test_sampling_with_weights_on_disk(job, model_folder):
    sampling = ("--temperature", "0.9", "--seed", 4)
    _, expected = job(model_folder, *sampling, output="memory.jsonl")
    _, records = job(model_folder, *sampling, "--weights", "disk", "--batch", 2)
    assert records == expected


def test_another_dtype_is_converted_once(job, model_folder, cache_home):
    options = ("--dtype", "bfloat16", "--batch", 6)
    _, expected = job(model_folder, *options, output="memory.jsonl")
    for name in ("a.jsonl", "b.jsonl"):
        options_there = (*options, "--weights", "disk")
        _, records = job(model_folder, *options_there, output=name)
        assert records == expected
        assert len(list(cache_home.iterdir())) == 1


def test_int8_weights(job, model_folder, cache_home):
    pytest.importorskip("torchao")
    options = ("--weight-bits", 8, "--batch", 6)
    _, exact = job(model_folder, output="exact.jsonl")
    stored, in_memory = job(model_folder, *options, "--weights", "device", output="a.jsonl")
    summary, streamed = job(model_folder, *options, "--weights", "disk", output="b.jsonl")
    assert streamed == in_memory
    assert set(streamed) == set(exact)
    assert summary["bytes_read"] > 0
    # The layers' matrices take a quarter of their fp32 bytes, the head and the table all of them.
    before = (model_folder / "model.safetensors").stat().st_size
    (converted,) = cache_home.iterdir()
    other_bytes = 2 * 300 * 64 * 4
    assert (converted.stat().st_size - other_bytes) < 0.4 * (before - other_bytes)
    # Another result: a job of its own.
    error, _ = job(model_folder, output="b.jsonl", code=2)
    assert "begun with weight_bits 8, not unset" in error


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    """Return the default folder of converted checkpoints."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "h2okv" / "weights"


@pytest.fixture(scope="module")
def stored_in_bf16(tmp_path_factory, save_model):
    def save(tied):
        folder = save_model(context=2048, tie_word_embeddings=tied)
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        return folder

    return {"bundled": "bundled", "tied": save(True), "untied": save(False)}


DTYPES = [("bundled", ()), ("tied", ()), ("untied", ())]
DTYPES += [(name, ("--dtype", "float32")) for name in ("tied", "untied")]
DTYPES += [("bundled", ("--dtype", "bfloat16"))]


@pytest.mark.parametrize(("name", "dtype"), DTYPES, ids=str)
def test_default_options_convert_weights_only_if_needed(
    job, h2okv_command, stored_in_bf16, cache_home, name, dtype
):
    model = stored_in_bf16[name]
    planned = h2okv_command("plan", model, *dtype)
    assert planned.code == 0, planned
    assert "new tokens/s" in planned.out
    assert not cache_home.exists()  # a plan writes nothing
    # In one batch: plans choose others, and bf16 products of other batches round otherwise.
    options = (*dtype, "--batch", len(PROMPTS))
    _, expected = job(model, *options, output="memory.jsonl")
    memory = ("--memory", data_bytes() + (2 << 30))
    for number, args in enumerate((memory, ("--weights", "disk"))):
        summary, records = job(model, *options, *args, output=f"{number}.jsonl")
        assert records == expected
        assert summary["predicted"] > 0
    needs_copy = name == "bundled" and not dtype or "float32" in dtype
    assert cache_home.exists() == needs_copy


def test_too_little_memory_is_refused_before_conversion(job, model_folder, cache_home):
    options = ("--dtype", "bfloat16", "--memory", "1MiB")
    assert "is too little" in job(model_folder, *options, code=2)[0]
    assert not cache_home.exists()


def test_a_conversion_without_disk_space_is_refused(job, model_folder, cache_home):
    cache_home.parent.mkdir(parents=True)
    cache_home.write_text("not a folder")
    options = ("--dtype", "bfloat16", "--weights", "disk")
    error, _ = job(model_folder, *options, code=2)
    assert "must be rewritten" in error
    assert "XDG_CACHE_HOME" in error


@pytest.mark.parametrize("memory", ["1MiB", "half of the model"])
def test_too_little_memory_names_a_sufficient_amount(
    processes, model_folder, prompts, tmp_path, memory
):
    """Run with the named amount in another process, whose memory the system limits."""
    args = ["batch", *H2O, "--model", model_folder, "--input", prompts, "--max-new-tokens", 2]
    promise = {} if memory == "1MiB" else {"promise_beside": 40 << 20}
    options = ["--memory", memory] if memory == "1MiB" else []
    refused = processes([*args, "--output", tmp_path / "none.jsonl", *options], **promise)
    assert refused.code == 2 and refused.error.count("\n") == 1
    assert "is too little: one layer of this model at a time and a batch of one need" in (
        refused.error
    )
    needed = int(refused.error.split(" need ")[1].split("MiB")[0]) << 20
    output = tmp_path / "out.jsonl"
    done = processes([*args, "--output", output, "--memory", needed], data_limit=needed)
    assert done.code == 0, done.error
    assert done.data <= needed
    assert len(output.read_text(encoding="utf-8").splitlines()) == len(PROMPTS)


def test_freed_memory_is_kept_if_the_limit_is_ample(job, model_folder, monkeypatch):
    calls = []
    monkeypatch.setattr("h2okv.engine.memory.give_memory_back", lambda: calls.append("give"))
    monkeypatch.setattr("h2okv.engine.memory.keep_memory", lambda: calls.append("keep"))
    job(model_folder, output="first.jsonl")  # what a first run loads stays in the process
    error, _ = job(model_folder, "--memory", "1MiB", code=2)
    least = int(error.split(" need ")[1].split("MiB")[0]) << 20
    calls.clear()
    job(model_folder, "--memory", least, output="tight.jsonl")
    assert calls == ["give"]
    job(model_folder, "--memory", least + (1 << 30), output="ample.jsonl")
    assert calls == ["give", "give", "keep"]


def test_nan_weights_are_refused(job, model_folder, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(model_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"][:] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    error, _ = job(folder, "--weights", "disk", code=2)
    assert "not finite" in error


def large_model(folder, model_folder, layers=12):
    """Save a model of 25 MB per layer with the tokenizer of the tiny one; return its size."""
    shutil.copytree(model_folder, folder)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=300, max_position_embeddings=256, bos_token_id=0,
        eos_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1 << 20, generator=generator).to(torch.bfloat16) / 50
    weights = {}
    for name, shape in shapes.items():
        repeats = -(-shape.numel() // len(noise))
        weights[name] = noise.repeat(repeats)[: shape.numel()].view(shape).clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    return sum(weight.nbytes for weight in weights.values())


def run_within(args, report, promise_beside, data_limit, file_size, home):
    """Run the command in a child process, within limits of the system."""
    os.environ["XDG_CACHE_HOME"] = home
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(report, os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    if promise_beside is not None:
        data_limit = data_bytes() + promise_beside
        args = [*args, "--memory", data_limit]
    if data_limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))
    if file_size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    code = run([str(arg) for arg in args])
    print(json.dumps([code, data_bytes(), data_limit]), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Ended:
    code: int
    data: int
    promise: int | None
    error: str


@pytest.fixture
def processes(tmp_path):
    """Return a function that runs the command in processes with all imports done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["h2okv.cli.app", "h2okv.offload.offload_engine"])

    def call(args, promise_beside=None, data_limit=None, file_size=None) -> Ended:
        report = tmp_path / f"{len(list(tmp_path.iterdir()))}.txt"
        limits = (promise_beside, data_limit, file_size)
        child = context.Process(
            target=run_within, args=(args, report, *limits, os.environ["XDG_CACHE_HOME"])
        )
        child.start()
        child.join()
        text = report.read_text()
        assert child.exitcode == 0, text
        *error, last = text.splitlines(keepends=True)
        return Ended(*json.loads(last), "".join(error))

    return call


def test_memory_limit_is_kept(processes, model_folder, tmp_path, prompts):
    folder = tmp_path / "large"
    size = large_model(folder, model_folder)
    promise = 196 << 20
    assert size > 1.5 * promise
    output = tmp_path / "limited.jsonl"
    args = ["batch", *H2O, "--model", folder, "--input", prompts, "--max-new-tokens", 2]
    ended = processes([*args, "--output", output, "--json"], promise_beside=promise)
    assert ended.code == 0, ended.error
    assert ended.data <= ended.promise
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert len(records) == len(PROMPTS)
    assert not any("error" in record for record in records)


def test_memory_limit_is_kept_for_any_lengths(processes, model_folder, tmp_path):
    # A library that keeps machine code for each shape of a product would take 200 MB here.
    folder, prompts, output = (tmp_path / name for name in ("large", "many.jsonl", "out.jsonl"))
    large_model(folder, model_folder, layers=3)
    texts = ["the cat sat on the mat " * (2 + n) for n in range(30)]
    lines = [json.dumps({"id": n, "prompt": text}) for n, text in enumerate(texts)]
    prompts.write_text("\n".join(lines))
    args = ["batch", *H2O, "--model", folder, "--input", prompts, "--output", output]
    options = ["--max-new-tokens", 1, "--batch", 1, "--weights", "disk"]
    ended = processes([*args, *options], promise_beside=160 << 20)
    assert ended.code == 0, ended.error
    assert ended.data <= ended.promise
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert len({record["prompt_tokens"] for record in records}) == len(texts)
    assert not any("error" in record for record in records)


def test_prompts_beyond_the_memory_limit_get_error_records(processes, model_folder, tmp_path):
    folder, prompts = tmp_path / "large", tmp_path / "mixed.jsonl"
    large_model(folder, model_folder, layers=2)
    texts = ["the cat", "the cat sat on the mat and the dog sat on the log, " * 17, "the dog"]
    lines = [json.dumps({"id": n, "prompt": text}) for n, text in enumerate(texts)]
    args = ["batch", *H2O, "--model", folder, "--max-new-tokens", 2, "--json"]
    prompts.write_text("\n".join(lines[::2]))
    output = tmp_path / "out.jsonl"
    refused = processes([*args, "--input", prompts, "--output", output, "--memory", "1MiB"])
    enough_for_short = int(refused.error.split(" need ")[1].split("MiB")[0]) << 20
    prompts.write_text("\n".join(lines))
    options = ["--input", prompts, "--output", output, "--memory", enough_for_short]
    ended = processes([*args, *options], data_limit=enough_for_short)
    assert ended.code == 1, ended.error
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    by_id = {record["id"]: record for record in records}
    assert [by_id[n]["new_tokens"] for n in (0, 2)] == [2, 2]
    assert "shorten it, or give more --memory" in by_id[1]["error"]


def test_a_full_disk_while_weights_are_converted(
    processes, cache_home, model_folder, tmp_path, prompts
):
    # A limit on the size of files fails a write half-way, as a full disk does.
    output = tmp_path / "out.jsonl"
    args = ["batch", *H2O, "--model", model_folder, "--input", prompts, "--output", output,
            "--max-new-tokens", STEPS, "--dtype", "bfloat16", "--weights", "disk"]  # fmt: skip
    ended = processes(args, file_size=100_000)
    assert ended.code == 2
    assert "must be rewritten" in ended.error and "File too large" in ended.error
    assert "give XDG_CACHE_HOME another folder" in ended.error and ended.error.count("\n") == 1
    assert not list(cache_home.iterdir())
    again = processes(args)
    assert again.code == 0 and len(list(cache_home.iterdir())) == 1
