"""States over a restart: equal tokens, and files that are no good are skipped."""

import logging
import os
import shutil

import pytest
import torch

from h2okv.engine.prefix_cache import PrefixFolder

BY_HEAD = [[0.5, 1.0], [2.0, 0.5]]
OPTIONS = {"heavy": 8, "recent": 6, "evict_every": 8, "max_prompt_tokens": 200}
TEXT = list(range(2, 42))


@pytest.fixture(scope="module")
def double_model(make_llama):
    return make_llama().double()


@pytest.fixture
def run(make_llm, greedy, double_model):
    """Generate in an engine that starts, answers and stops; return tokens, reused and engine."""

    def generate(prompt, new, folder=None, model=double_model, pins=(), **options):
        llm = make_llm(model, **(OPTIONS | {"prefix_cache_folder": folder} | options))
        result = llm.generate([prompt], greedy(new), pins=[pins])[0]
        llm.close()
        return list(result.completions[0].token_ids), result.prompt.num_reused, llm

    return generate


def files(folder):
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"policy": "best"}, {"policy": "best", "layer_budgets": BY_HEAD}, {"kv_bits": 8},
        {"kv_bits": 4},
        {"positions": "rolling"}, {"scoring": "expected"}, {"model": "gemma"},
    ],
    ids=lambda options: str(sorted(options)),
)  # fmt: skip
def test_a_conversation_goes_on_after_a_restart(run, tmp_path, options, gemma):
    """Return the state of a prompt and that of an answer, which was in the pool."""
    if "model" in options:
        options = {"model": gemma}
    folder = tmp_path / "new" / "states"
    answer, reused, llm = run(TEXT, 30, folder, **options)
    assert reused == 0
    assert len(files(folder)) == 2
    text = TEXT + answer
    for prompt, length in ((TEXT, 32), ([*text, 7, 8, 9], (len(text) - 1) // 8 * 8)):
        tokens, reused, llm = run(prompt, 20, folder, **options)
        stats = llm.stats()
        assert reused == length
        assert (stats.prefix_disk_hits, stats.prefix_hits) == (1, 1)
        assert stats.prefix_disk_bytes == sum(f.stat().st_size for f in files(folder)) > 0
        assert tokens == run(prompt, 20, prefix_cache=0, **options)[0]


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_pinned_conversation_goes_on_after_a_restart(run, tmp_path, name, double_model, gemma):
    options = {"model": gemma if name == "gemma" else double_model, "heavy": 12}
    answer, _, _ = run(TEXT, 30, tmp_path, pins=[(5, 11)], **options)
    prompt = [*TEXT, *answer, 7, 8, 9]
    pins = [(5, 11), (len(prompt) - 2, len(prompt))]  # and some that are still to be read
    tokens, reused, llm = run(prompt, 20, tmp_path, pins=pins, **options)
    assert reused == (len(prompt) - 4) // 8 * 8 and llm.stats().prefix_disk_hits == 1
    assert tokens == run(prompt, 20, prefix_cache=0, pins=pins, **options)[0]
    assert tokens != run(prompt, 20, tmp_path, **options)[0]
    assert run(prompt, 1, tmp_path, pins=[(5, 12)], **options)[1] == 0


@pytest.mark.parametrize(
    "harm",
    [lambda c: c[: len(c) // 2], lambda c: c[:100] + b"?" * 10 + c[110:], lambda c: b""],
    ids=["truncated", "damaged", "empty"],
)
def test_a_damaged_file_is_skipped_and_written_again(run, tmp_path, caplog, harm):
    cold = run(TEXT, 5, tmp_path)[0]
    (path,) = files(tmp_path)
    path.write_bytes(harm(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "h2okv.engine"):
        tokens, reused, _ = run(TEXT, 5, tmp_path)
    assert (tokens, reused) == (cold, 0)
    assert len(caplog.messages) == 1
    assert path.name in caplog.messages[0] and "\n" not in caplog.messages[0]
    assert run(TEXT, 5, tmp_path)[:2] == (cold, 32)


def test_states_of_other_models_and_options_are_not_used(run, make_llama, tmp_path, caplog):
    other = make_llama(heads=8).double()
    cold = run(TEXT, 5, tmp_path)[0]
    (path,) = files(tmp_path)
    alike = make_llama().double()
    with torch.no_grad():  # no weight of the attention
        alike.lm_head.weight.mul_(1.5)
    for options in ({"model": other}, {"model": alike}, {"recent": 5}, {"kv_bits": 8}):
        assert run(TEXT, 5, tmp_path, **options)[1] == 0
    assert not caplog.messages  # their files have other names
    content = path.read_bytes()
    # What the attention of `alike` has written may be the same bytes.
    for other_path in [p for p in files(tmp_path) if p.read_bytes() != content]:
        shutil.copy(other_path, path)
        with caplog.at_level(logging.WARNING, "h2okv.engine"):
            assert run(TEXT, 5, tmp_path)[:2] == (cold, 0)
        assert len(caplog.messages) == 1 and path.name in caplog.messages[0]
        caplog.clear()


def test_a_state_under_another_name_is_not_believed(run, tmp_path, caplog):
    other_text = [5, 4, 3, *range(50, 90)]
    cold = run(other_text, 5)[0]
    run(TEXT, 5, tmp_path)
    (written,) = files(tmp_path)
    run(other_text, 5, tmp_path)
    (path,) = [path for path in files(tmp_path) if path != written]
    shutil.copy(written, path)
    with caplog.at_level(logging.WARNING, "h2okv.engine"):
        assert run(other_text, 5, tmp_path)[:2] == (cold, 0)
    assert len(caplog.messages) == 1 and path.name in caplog.messages[0]


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_the_folder_is_private(run, tmp_path):
    folder = tmp_path / "states"
    run(TEXT, 5, folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="not writable for everyone"):
        run(TEXT, 5, folder)
    folder.chmod(0o755)
    assert run(TEXT, 5, folder)[1] == 32


def test_a_state_whose_keys_were_not_transformed_is_not_used(run, tmp_path, caplog, monkeypatch):
    cold = run(TEXT, 5, kv_bits=4)[0]
    with monkeypatch.context() as patch:
        patch.setattr("h2okv.calibration.key_transforms.transforms_of_model", lambda *_: {})
        run(TEXT, 5, tmp_path, kv_bits=4)
    (path,) = files(tmp_path)
    with caplog.at_level(logging.WARNING, "h2okv.engine"):
        assert run(TEXT, 5, tmp_path, kv_bits=4)[:2] == (cold, 0)
    assert len(caplog.messages) == 1 and path.name in caplog.messages[0]


def test_other_files_are_named_once_and_left_alone(run, tmp_path, caplog):
    (tmp_path / "notes.txt").write_text("mine")
    draft = tmp_path / f"{'ab' * 32}.safetensors.0123abcd.tmp"
    draft.write_bytes(b"half a state")
    os.utime(draft, (0, 0))  # of a process that is gone
    with caplog.at_level(logging.WARNING, "h2okv.engine"):
        run(TEXT, 5, tmp_path)
    assert len(caplog.messages) == 1 and "notes.txt" in caplog.messages[0]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not draft.exists()


def test_the_file_that_was_used_least_is_deleted(run, tmp_path):
    texts = [[first, *range(2, 42)] for first in (50, 51, 52)]
    run(texts[0], 1, tmp_path)
    size = files(tmp_path)[0].stat().st_size
    limit = {"prefix_cache": 2 * size + size // 2}
    run(texts[1], 1, tmp_path, **limit)
    assert run(texts[0], 1, tmp_path, **limit)[1] == 40  # used again
    run(texts[2], 1, tmp_path, **limit)
    assert len(files(tmp_path)) == 2
    assert [run(text, 1, tmp_path, **limit)[1] for text in (texts[0], texts[2])] == [40, 40]
    assert run(texts[1], 1, tmp_path, **limit)[1] == 0
    run(texts[0], 1, tmp_path, prefix_cache=size + size // 2)  # a smaller limit, from the start
    assert len(files(tmp_path)) == 1


def test_what_memory_has_dropped_comes_back(make_llm, greedy, double_model, tmp_path):
    llm = make_llm(double_model, prefix_cache_folder=tmp_path, **OPTIONS)
    cold = llm.generate([TEXT], greedy(5))[0]
    llm.engine._folder._writer.submit(int).result()  # everything is written
    for key in list(llm.engine.runner.states):
        llm.engine.prefix_cache.remove(key)
        llm.engine.scheduler.dropped_states.append(key)
    again = llm.generate([TEXT], greedy(5))[0]  # in the step that drops it
    assert again.prompt.num_reused == 32
    assert again.completions[0].token_ids == cold.completions[0].token_ids
    assert llm.generate([TEXT], greedy(5))[0].prompt.num_reused == 32
    assert llm.stats().prefix_disk_hits == 1


def test_superseded_states_of_an_answer_are_deleted(run, tmp_path):
    run(TEXT, 60, tmp_path)
    assert len(files(tmp_path)) == 2


def test_a_full_disk_fails_nothing(run, tmp_path, caplog, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("h2okv.cache.checkpoint.save_file", lambda *a, **k: fail())
    tokens, _, llm = run(TEXT, 5, tmp_path)
    assert len(tokens) == 5
    assert llm.stats().prefix_states == 1 and llm.stats().prefix_disk_states == 0
    assert len(caplog.messages) == 1 and "No space left" in caplog.messages[0]
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("options", [{"prefix_cache": 0}, {"evict_every": None}, {"heavy": 0.2}])
def test_a_folder_without_states_is_refused(run, tmp_path, options):
    with pytest.raises(ValueError, match="prefix_cache_folder is for states"):
        run(TEXT, 1, tmp_path, **options)


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "states"):
        with pytest.raises(ValueError, match="cannot be written .*give a folder") as error:
            PrefixFolder(path, 1000)
        assert "\n" not in str(error.value)
