import signal

import pytest
import torch

from h2okv.cache import H2OCache
from h2okv.cli.generate import report
from h2okv.config import CacheConfig
from h2okv.engine.generation import Job, generate_and_compare, generate_once
from h2okv.engine.sampling_params import SamplingParams
from h2okv.models.loading import describe, load_weights

pytestmark = pytest.mark.slow

WAIT = 120
CACHE = CacheConfig(heavy=16, recent=16)
PARAMS = SamplingParams(max_tokens=20, temperature=0.0, seed=0)


@pytest.fixture
def job(model_folder, prompt):
    described = describe(str(model_folder))
    model = load_weights(described, None, torch.device("cpu"))
    return Job(model, described, described.encode(prompt), PARAMS)


class InterruptAt:
    """Stands for Ctrl-C at a given piece of text."""

    def __init__(self, count):
        self.count = count
        self.pieces = []

    def __call__(self, piece):
        self.pieces.append(piece)
        if len(self.pieces) == self.count:
            raise KeyboardInterrupt


def test_an_interrupt_keeps_the_generated_tokens(job):
    uninterrupted = generate_once(
        job, H2OCache.from_config(job.model.config, CACHE), lambda _: None
    )
    cache = H2OCache.from_config(job.model.config, CACHE)
    write = InterruptAt(3)
    run = generate_once(job, cache, write)
    assert run.interrupted
    assert 3 <= len(run.token_ids) < 20
    assert run.token_ids == uninterrupted.token_ids[: len(run.token_ids)]
    assert run.text == "".join(write.pieces)
    assert run.num_cached_tokens == 32
    cache.check_integrity()
    assert job.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("baselines", [None, []])
def test_an_interrupt_while_the_prompt_is_read_has_no_result(job, monkeypatch, baselines):
    def interrupt(module, args, output):
        raise KeyboardInterrupt

    monkeypatch.setattr("h2okv.engine.generation._warm_up", lambda *_: None)
    hook = job.model.base_model.layers[0].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate_and_compare(job, CACHE, baselines)
    hook.remove()
    assert not generate_and_compare(job, CACHE).interrupted


def test_an_interrupt_ends_the_comparison_and_sets_the_exit_code(job, monkeypatch, capsys):
    # The heading is the first piece.
    monkeypatch.setattr("h2okv.engine.generation.write_text", InterruptAt(4))
    comparison = generate_and_compare(job, CACHE, [], quiet=False)
    assert [run.interrupted for run in comparison.runs.values()] == [True]
    assert comparison.interrupted
    report(comparison)
    assert "(interrupted)" in capsys.readouterr().err
    assert not generate_and_compare(job, CACHE).interrupted


@pytest.fixture(scope="module")
def endless(save_model, prompt):
    model = save_model(context=10**7)
    cache = ("--budget", "16+16", "--cache", "layers=even")
    return ("generate", "--model", model, *cache, "--max-new-tokens", "5000000", prompt)


def test_ctrl_c_prints_the_summary_and_exits_with_130(start_command, endless):
    process = start_command(*endless)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT)
    assert process.returncode == 130
    assert b"(interrupted) | first after" in err
    assert err.count(b"\n") == 1


def test_a_closed_pipe_exits_silently_with_141(start_command, endless):
    process = start_command(*endless)
    assert process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=WAIT) == 141
    assert err == b""


@pytest.mark.parametrize("words", [("--help",), ("generate", "--help")])
def test_help_that_nobody_reads_exits_silently_with_141(start_command, words):
    process = start_command(*words)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=WAIT) == 141


def test_an_interrupt_while_counting_choices_sets_the_exit_code(job, monkeypatch):
    monkeypatch.setattr("h2okv.engine.generation._discard", InterruptAt(2))
    comparison = generate_and_compare(job, CACHE, [], quiet=False)
    assert list(comparison.runs) == [CACHE.label, "full cache"]
    assert comparison.same_choices[CACHE.label] is None
    assert comparison.interrupted
