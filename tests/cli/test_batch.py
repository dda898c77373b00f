"""`h2okv batch`: input and output files, errors and kills."""

import json
import multiprocessing
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
from cli.conftest import write_prompts
from safetensors.torch import load_file, save_file

from h2okv.cli.app import run
from h2okv.config import BEST_VERSION, CacheConfig

pytestmark = pytest.mark.slow

STEPS = 6


def read(path):
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_id = {record["id"]: record for record in records}
    assert len(by_id) == len(records)
    return by_id


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "in.jsonl", 12)


@pytest.fixture
def job(h2okv_command, model_folder, tmp_path):
    """Return a function that runs the command on the tiny model."""

    def call(prompts, *args, output="out.jsonl", code=0):
        path = tmp_path / output
        options = ("--input", prompts, "--output", path, "--max-new-tokens", STEPS)
        outcome = h2okv_command("batch", "--model", model_folder, *options, *args)
        assert outcome.code == code, outcome
        return outcome, read(path) if path.exists() else {}

    return call


@pytest.mark.parametrize("budget", [("--budget", "16"), ()], ids=["tokens", "raised fraction"])
def test_batch_texts_equal_generate(job, h2okv_command, model_folder, prompts, budget):
    outcome, records = job(prompts, *budget)
    assert ("64 heavy + 64 recent entries are kept" in outcome.err) == (not budget)
    assert outcome.out == ""
    assert "12 prompts" in outcome.err
    assert "tokens/s" in outcome.err
    for line in prompts.read_text().splitlines()[:4]:
        prompt = json.loads(line)
        options = ("--max-new-tokens", STEPS, "--json", *budget, prompt["prompt"])
        single = json.loads(h2okv_command("generate", "--model", model_folder, *options).out)
        record = records[prompt["id"]]
        assert record["text"] == single["text"]
        assert record["prompt_tokens"] == single["prompt_tokens"]
        assert record["finish_reason"] == "length"


def test_a_job_goes_on_with_the_budgets_that_it_was_begun_with(job, prompts):
    outcome, records = job(prompts)
    output = prompts.parent / "out.jsonl"
    settings = json.loads((prompts.parent / "out.jsonl.job.json").read_text())
    assert len(settings["layer_budgets"][0]) == 2 and settings["measured"] == BEST_VERSION
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:5]))
    disk = "--weights", "disk"
    outcome, resumed = job(prompts, *disk)
    assert resumed == records and "same budget" not in outcome.err
    outcome, others = job(prompts, *disk, output="other.jsonl")
    assert others == records and "same budget" not in outcome.err
    others = json.loads((prompts.parent / "other.jsonl.job.json").read_text())
    assert others["layer_budgets"] == settings["layer_budgets"]


CACHES = {
    "mean": ("--budget", "16", "--cache", "scoring=mean"),
    "decay": ("--budget", "16", "--cache", "scoring=decay:0.5"),
    "8 bits": ("--budget", "16", "--cache", "bits=8"),
    "6 bits": ("--budget", "16", "--cache", "bits=6"),
    "4 bits": ("--budget", "16", "--cache", "bits=4"),
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
def test_batch_cache_options_equal_generate(job, h2okv_command, model_folder, prompts, cache):
    _, records = job(prompts, *cache, "--batch", 5)
    for line in prompts.read_text().splitlines()[:4]:
        prompt = json.loads(line)
        options = ("--max-new-tokens", STEPS, "--json", *cache, prompt["prompt"])
        single = json.loads(h2okv_command("generate", "--model", model_folder, *options).out)
        assert records[prompt["id"]]["text"] == single["text"]
    settings = json.loads((prompts.parent / "out.jsonl.job.json").read_text())
    expected = CacheConfig.from_spec(cache[-1], policy="best")
    names = [n for n in ("scoring", "decay", "kv_bits") if getattr(expected, n) is not None]
    assert [settings[name] for name in names] == [getattr(expected, name) for name in names]
    outcome, _ = job(prompts, code=2)
    assert "was begun with" in outcome.err


@pytest.mark.parametrize("sampling", [(), ("--temperature", "1", "--seed", "3")])
def test_results_do_not_depend_on_the_batch_or_the_order(job, prompts, tmp_path, sampling):
    _, records = job(prompts, *sampling, output="a.jsonl")
    _, single = job(prompts, *sampling, "--batch", 1, output="b.jsonl")
    lines = prompts.read_text().splitlines()
    random.Random(1).shuffle(lines)
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text("\n".join(lines))
    _, other = job(shuffled, *sampling, "--batch", 5, output="c.jsonl")
    assert records == single == other


def test_invalid_prompts_get_error_records(job, tmp_path):
    odd = {"empty": " \n", "long": "cat " * 300, "none": None, "odd": "\ud800"}
    prompts = write_prompts(tmp_path / "in.jsonl", 3, odd)
    outcome, records = job(prompts, code=1)
    assert "4 with an error record" in outcome.err
    errors = {name: record["error"] for name, record in records.items() if "error" in record}
    assert set(errors) == {"empty", "long", "none", "odd"}
    assert "empty" in errors["empty"]
    assert "context of 256 tokens" in errors["long"]
    assert "not a text" in errors["none"]
    assert "surrogate" in errors["odd"]
    again, same = job(prompts, "--json", code=1)
    assert same == records
    assert json.loads(again.out)["skipped"] == 7


def test_a_text_ends_at_the_context_window(job, tokenizer, tmp_path):
    long = "x"
    while len(tokenizer(long)["input_ids"]) < 253:
        long += " x"
    prompts = write_prompts(tmp_path / "in.jsonl", 1, {"long": long})
    _, records = job(prompts)
    record = records["long"]
    assert record["finish_reason"] == "context"
    assert record["prompt_tokens"] + record["new_tokens"] == 256


def test_output_of_other_weights_is_refused(job, save_model, prompts, tmp_path, h2okv_command):
    folder, output = save_model(), tmp_path / "out.jsonl"
    args = ("batch", "--model", folder, "--input", prompts, "--output", output,
            "--max-new-tokens", 2)  # fmt: skip
    assert h2okv_command(*args).code == 0
    # Trained on: the same sizes, the same config, other numbers.
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(weights, path, metadata={"format": "pt"})
    refused = h2okv_command(*args)
    assert refused.code == 2
    assert "was begun with weights " in refused.err and "choose another file" in refused.err


def run_quietly(args, file_size=None, home=None):
    """Run the command in a child process, without its output."""
    if home is not None:
        os.environ["XDG_CACHE_HOME"] = str(home)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    if file_size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    os._exit(run([str(arg) for arg in args]))


@pytest.fixture(scope="module")
def processes():
    """Return a context of processes that begin with all imports done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["h2okv.cli.app", "h2okv.offload.offload_engine"])
    return context


@pytest.mark.parametrize(("count", "weights"), [(100, "device"), (40, "disk")])
def test_a_job_killed_repeatedly_resumes_without_loss(
    processes, h2okv_command, save_model, tmp_path, count, weights, monkeypatch
):
    prompts = write_prompts(tmp_path / "in.jsonl", count)
    output, copies = tmp_path / "killed.jsonl", tmp_path / "home" / "h2okv" / "weights"
    # From the disk in another dtype and tied, so that a kill may hit the conversion too.
    model = save_model(tie_word_embeddings=weights == "disk")
    args = ["batch", "--model", model, "--input", prompts, "--max-new-tokens", STEPS,
            "--batch", 2, "--policy", "h2o"]  # fmt: skip
    if weights == "disk":
        args += ["--dtype", "bfloat16", "--weights", "disk"]
    assert h2okv_command(*args, "--output", tmp_path / "whole.jsonl").code == 0
    args += ["--output", output]
    home = os.environ["XDG_CACHE_HOME"]
    if weights == "disk":
        home = tmp_path / "home"
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    generator = random.Random(0)
    kills = 0
    for turn in range(40):
        child = processes.Process(target=run_quietly, args=(args, None, home))
        child.start()
        # Let it begin, then strike at a random moment between two results or within one.
        size = size_of(output) + generator.randint(1, 2500)
        # The first few of the disk's before there are any: while weights are copied and measured.
        end = time.monotonic() + (generator.random() if weights == "disk" and turn < 4 else 60)
        while child.is_alive() and size_of(output) < size and time.monotonic() < end:
            time.sleep(0.0005)
        time.sleep(generator.random() * 0.01)
        child.kill()
        child.join()
        if child.exitcode == 0:
            break
        kills += 1
        if output.exists():
            for line in output.read_bytes().splitlines(keepends=True)[:-1]:
                json.loads(line)
    assert child.exitcode == 0
    assert kills
    assert read(output) == read(tmp_path / "whole.jsonl")
    if weights == "disk":
        assert len(list(copies.iterdir())) == 1
        in_memory = [*args[:-4], "--output", tmp_path / "memory.jsonl"]
        assert h2okv_command(*in_memory).code == 0
        assert read(tmp_path / "memory.jsonl") == read(output)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_full_disk_keeps_finished_results(processes, job, model_folder, tmp_path):
    # A limit on the size of files fails a write half-way, as a full disk does.
    prompts = write_prompts(tmp_path / "in.jsonl", 20)
    output = tmp_path / "out.jsonl"
    args = ("batch", "--model", model_folder, "--input", prompts, "--output", output,
            "--max-new-tokens", STEPS, "--batch", 2)  # fmt: skip
    child = processes.Process(target=run_quietly, args=(args, 1500))
    child.start()
    child.join()
    assert child.exitcode == 2
    data = output.read_bytes()
    assert data.endswith(b"\n")
    assert 0 < len(read(output)) < 20
    _, records = job(prompts)
    assert len(records) == 20
    assert output.read_bytes().startswith(data)
