"""The decode step as machine code: made in the background, kept, and equal to the plain one."""

import os
import subprocess
import sys
import time

import pytest
import torch

import h2okv
from h2okv.ops import compiled, dispatch
from h2okv.ops.compiled import Spec

SPEC = Spec("float32", 16, 16, 2, 0.25, None, 0, False, False, True)

needs_compiler = pytest.mark.skipif(compiled.compiler() is None, reason="there is no C++ compiler")


def forget():
    compiled.load.cache_clear()
    compiled._load.cache_clear()
    compiled._requested.clear()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder of packages in which `SPEC` was compiled by a process of its own."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        forget()
        compiled.request(SPEC)
        path = compiled.package_path(SPEC)
        deadline = time.time() + 300
        while not path.exists() and time.time() < deadline:
            time.sleep(0.2)
        mark = path.with_suffix(".compiling")
        assert path.exists(), mark.read_text(errors="replace")
    return folder


@pytest.fixture
def packages(home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.delenv("H2OKV_OPS")
    forget()
    yield
    forget()


@torch.no_grad()
def run(model, ids, implementation, steps=10, **options):
    with dispatch.use(implementation):
        cache = h2okv.H2OCache(model.config, **{"heavy": 6, "recent": 5} | options)
        logits = [model(ids[:, :-steps], past_key_values=cache).logits]
        for at in range(ids.shape[1] - steps, ids.shape[1]):
            logits.append(model(ids[:, at : at + 1], past_key_values=cache).logits)
    cache.check_integrity()
    return cache, torch.cat(logits, dim=1)


def compare(model, ids, kept_sets, implementation, **options):
    expected, expected_logits = run(model, ids, "plain", **options)
    cache, logits = run(model, ids, implementation, **options)
    assert {layer.step.name for layer in cache.layers} == {"compiled"}
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-4)
    assert kept_sets(cache) == kept_sets(expected)
    return cache


@needs_compiler
@pytest.mark.parametrize("batch", [1, 3])
def test_a_later_run_takes_what_was_compiled(packages, make_llama, kept_sets, batch):
    model = make_llama(heads=4, kv_heads=2)
    compare(model, torch.randint(2, 97, (batch, 40)), kept_sets, "auto")


@needs_compiler
def test_one_package_serves_all_budgets_and_heads(packages, make_llama, kept_sets):
    model = make_llama(heads=8, kv_heads=4)
    compare(model, torch.randint(2, 97, (2, 90)), kept_sets, "auto", heavy=30, recent=20)


@needs_compiler
@torch.no_grad()
def test_rows_are_taken_and_copied(packages, make_llama, kept_sets):
    model, ids = make_llama(heads=4, kv_heads=2), torch.randint(2, 97, (3, 40))
    caches = []
    for implementation in ("plain", "auto"):
        cache, _ = run(model, ids, implementation)
        with dispatch.use(implementation):
            twin = cache.fork(2)
            twin.reorder_cache(torch.tensor([5, 0, 0, 3, 1, 2]))
            for token in (5, 6, 7):
                model(torch.full((6, 1), token), past_key_values=twin)
                model(torch.full((3, 1), token), past_key_values=cache)
            cache.batch_select_indices(torch.tensor([1]))
            model(torch.tensor([[8]]), past_key_values=cache)
        caches.append([kept_sets(cache), kept_sets(twin)])
    assert caches[0] == caches[1]


@needs_compiler
def test_budgets_changed_in_place_are_seen(packages, make_llama, kept_sets):
    model, ids = make_llama(heads=4, kv_heads=2), torch.randint(2, 97, (2, 40))
    kept = []
    for implementation in ("plain", "auto"):
        cache, _ = run(model, ids, implementation)
        for layer in cache.layers:
            layer.recent.fill_(9)
        with torch.no_grad(), dispatch.use(implementation):
            for token in range(5, 12):
                model(torch.full((2, 1), token), past_key_values=cache)
        kept.append(kept_sets(cache))
    assert kept[0] == kept[1]


def test_rolling_packages_take_queries_in_full_precision():
    # What turns them back makes them fp32 whatever the model's dtype, and a package does not ask.
    for width, dtype in ((0, torch.bfloat16), (16, torch.float32)):
        spec = SPEC._replace(dtype="bfloat16", width=width)
        assert compiled.example(spec)[0].dtype == dtype


@needs_compiler
def test_rolling_positions_and_sinks_compiled_at_once(packages, make_llama, kept_sets):
    model, ids = make_llama(heads=4, kv_heads=2), torch.randint(2, 97, (2, 40))
    compare(model, ids, kept_sets, "compiled", positions="rolling", sink=2)


@needs_compiler
def test_packed_slots(packages, make_llama, kept_sets):
    # Two groups of 40 numbers: nibbles, grids and a head that is no power of two in one package.
    model, ids = (
        make_llama(heads=4, kv_heads=2, layers=1, head_dim=80),
        torch.randint(2, 97, (2, 40)),
    )
    compare(model, ids, kept_sets, "compiled", kv_bits=4)


@needs_compiler
def test_rows_with_budgets_of_their_own(packages, make_llama, kept_sets):
    model, ids = make_llama(heads=4, kv_heads=2), torch.randint(2, 97, (2, 30))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    texts, caches = [], []
    for implementation in ("plain", "compiled"):
        with dispatch.use(implementation), h2okv.enable(model):
            cache = h2okv.H2OCache(model.config, heavy=0.2, recent=0.2)
            options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": mask}
            texts.append(model.generate(ids, past_key_values=cache, **options))
            caches.append((kept_sets(cache), {layer.step.name for layer in cache.layers}))
    assert torch.equal(*texts) and caches[0][0] == caches[1][0]
    assert caches[1][1] == {"compiled"}


@needs_compiler
def test_a_damaged_package_is_left_alone(packages, tmp_path, monkeypatch, make_llama):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = compiled.package_path(SPEC)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a package")
    cache, _ = run(make_llama(heads=4, kv_heads=2), torch.randint(2, 97, (2, 40)), "auto")
    step = cache.layers[0].step
    assert (step.name, step.why) == ("plain", "the compiled code disagrees")


def test_old_packages_are_dropped(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "_MOST_PACKAGES", 2)
    for age, name in enumerate("cab"):
        path = tmp_path / f"step-{name}.pt2"
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    compiled._drop_oldest(tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["step-a", "step-c"]


def test_many_plain_steps_ask_for_machine_code_once(monkeypatch, tmp_path, make_llama):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("H2OKV_OPS")
    monkeypatch.setattr(compiled, "compiler", lambda: "g++")
    forget()
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: started.append(command))
    monkeypatch.setattr(dispatch, "_STEPS_BEFORE_COMPILING", 6)
    model = make_llama(heads=4, kv_heads=2)
    run(model, torch.randint(2, 97, (2, 40)), "auto", steps=5)
    assert started == []
    run(model, torch.randint(2, 97, (2, 40)), "auto", steps=9)
    assert len(started) == 1 and started[0][:3] == [sys.executable, "-m", "h2okv.ops.compiled"]
    forget()
    # Another process that asks for the same finds the mark of the first.
    run(model, torch.randint(2, 97, (2, 40)), "auto", steps=9)
    assert len(started) == 1
    forget()


def test_without_a_compiler(monkeypatch, tmp_path, make_llama):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("H2OKV_OPS")
    monkeypatch.setattr(compiled, "compiler", lambda: None)
    model, ids = make_llama(heads=4, kv_heads=2), torch.randint(2, 97, (2, 40))
    cache, _ = run(model, ids, "auto")
    assert cache.layers[0].step.why == "there is no C++ compiler"
    with pytest.raises(ValueError, match="needs a C.. compiler such as g..; install one|install"):
        run(model, ids, "compiled")
