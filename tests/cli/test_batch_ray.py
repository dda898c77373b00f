"""`h2okv batch --ray`: the results of `h2okv batch`, whichever actors die."""

import json
import sys
import threading
from pathlib import Path

import psutil
import pytest
from cli.conftest import write_prompts

from h2okv.cli.app import run

pytestmark = pytest.mark.slow

STEPS = 40
ODD = {"empty": " ", "long": "cat " * 300, "none": None, "odd": "\ud800", "ünï 1": "the cat",
       7: "the dog"}  # fmt: skip


@pytest.fixture(scope="module")
def ray_here():
    """Start Ray on this machine, with more processors than it has: the models are tiny."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR",
        log_to_driver=False, object_store_memory=100 << 20,
    )  # fmt: skip
    yield ray
    ray.shutdown()


@pytest.fixture
def prompts(tmp_path) -> Path:
    return write_prompts(tmp_path / "in.jsonl", 60, ODD)


@pytest.fixture
def job(h2okv_command, model_folder, prompts, tmp_path):
    """Return a function that runs the command on the tiny model: outcome and records by id."""

    def call(*args, output, code=1):  # for some of the prompts cannot be served
        path = tmp_path / output
        options = ("--input", prompts, "--output", path, "--max-new-tokens", STEPS)
        outcome = h2okv_command(
            "batch", "--policy", "h2o", "--model", model_folder, *options, *args
        )
        assert outcome.code == code, outcome
        return outcome, read(path)

    return call


def read(path):
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_id = {json.dumps(record["id"]): record for record in records}
    assert len(by_id) == len(records)
    return by_id


SAMPLING = ("--temperature", "1", "--seed", "3", "--batch", 1)


@pytest.fixture(scope="module")
def reference(model_folder, tmp_path_factory) -> Path:
    """Return the results of one process, in the folder of its prompts."""
    folder = tmp_path_factory.mktemp("reference")
    prompts, output = (
        write_prompts(folder / "in.jsonl", 60, ODD),
        folder / "out.jsonl",
    )
    options = ("--input", prompts, "--output", output, "--max-new-tokens", STEPS, *SAMPLING)
    assert run(["batch", "--policy", "h2o", "--model", str(model_folder), *map(str, options)]) == 1
    return output


def test_results_survive_a_killed_actor(ray_here, reference, job, tmp_path):
    output, is_over = tmp_path / "ray.jsonl", threading.Event()
    finished_at_kill = []

    def kill_one():
        while not is_over.wait(0.005):
            if output.exists() and output.stat().st_size:
                victim, *_ = workers()
                victim.kill()
                finished_at_kill.append(output.read_bytes().count(b"\n"))
                return

    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        outcome, records = job("--ray", "--replicas", 2, *SAMPLING, output="ray.jsonl")
    finally:
        is_over.set()
        killer.join()
    assert len(finished_at_kill) == 1 and 0 < finished_at_kill[0] < 66
    assert records == read(reference)
    assert outcome.out == ""
    assert "66 prompts, 4 with an error record" in outcome.err


def workers():
    """Return the processes of the actors."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(word.startswith("ray::Worker") for word in process.cmdline()):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def test_ray_continues_a_job_of_one_process(ray_here, reference, job, tmp_path):
    begun = tmp_path / "begun.jsonl"
    lines = reference.read_text(encoding="utf-8").splitlines(keepends=True)[:50]
    begun.write_text("".join(lines) + '{"id": "torn', encoding="utf-8")
    settings = reference.with_name("out.jsonl.job.json").read_text()
    begun.with_name("begun.jsonl.job.json").write_text(settings)
    outcome, records = job("--ray", "--replicas", 1, *SAMPLING, "--json", output="begun.jsonl")
    assert records == read(reference)
    assert begun.read_text(encoding="utf-8").startswith("".join(lines))
    summary = json.loads(outcome.out)
    assert (summary["prompts"], summary["skipped"]) == (66, 50)


def test_an_actor_that_cannot_load_the_model_ends_the_job(
    ray_here, h2okv_command, save_model, prompts, tmp_path
):
    folder = save_model()
    (folder / "model.safetensors").write_bytes(b"nothing")
    options = ("--model", folder, "--input", prompts, "--output", tmp_path / "out.jsonl")
    outcome = h2okv_command("batch", "--ray", "--cache", "layers=even", *options)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert "an actor of the job failed" in outcome.err
    assert "the weights of --model" in outcome.err


@pytest.mark.parametrize("option", [("--memory", "4GiB"), ("--weights", "disk")])
def test_options_of_one_machine_are_refused(job, tmp_path, option):
    (tmp_path / "out.jsonl").touch()
    outcome, _ = job("--ray", *option, output="out.jsonl", code=2)
    assert outcome.err.startswith(f"h2okv: {option[0]} ") and "leave out" in outcome.err


def test_missing_ray_names_the_extra(job, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "out.jsonl").touch()
    outcome, _ = job("--ray", output="out.jsonl", code=2)
    assert "pip install '.[ray]'" in outcome.err
