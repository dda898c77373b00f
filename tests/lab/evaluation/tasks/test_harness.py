import pytest
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from h2okv.cache.argument import cache_in
from h2okv.config import CacheConfig
from h2okv_lab.evaluation.tasks.harness import HarnessTask, quietly


def run(task, subject, config):
    task.prepare(subject, [config])
    ((_, results),) = task.run(subject, [config], task.samples, 0)
    return task.scores(results), task.size(results)


def test_full_cache_scores_equal_the_harness_s(published_data, subject, tmp_path):
    before = subject.config._attn_implementation
    task = HarnessTask("openbookqa", published_data, tmp_path, shots=1, limit=8)
    with quietly():
        expected = simple_evaluate(
            HFLM(subject.model, tokenizer=subject.tokenizer, batch_size=8),
            tasks=["openbookqa"],
            num_fewshot=1,
            limit=8,
            task_manager=TaskManager(include_path=published_data, include_defaults=False),
        )["results"]["openbookqa"]
    for config in (CacheConfig("full"), CacheConfig(budget=2000)):
        scores, size = run(task, subject, config)
        assert size == 8
        for name in ("acc", "acc_norm"):
            assert scores[name].value == expected[f"{name},none"]
            assert scores[name].stderr == expected[f"{name}_stderr,none"]
    assert subject.config._attn_implementation == before


def test_caches_without_chunks_share_prompts(published_data, subject, tmp_path):
    configs = [
        CacheConfig("full"),
        CacheConfig(budget=0.1, min_tokens=0),
        CacheConfig("recent", 8, 8),
    ]
    task = HarnessTask("openbookqa", published_data, tmp_path / "a", evict_every=None, limit=6)
    alone = HarnessTask("openbookqa", published_data, tmp_path / "b", evict_every=None, limit=6)
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    task.prepare(subject, configs)
    read = []
    hook = subject.model.register_forward_pre_hook(
        lambda _, __, options: read.append(type(cache_in(options)).__name__), with_kwargs=True
    )
    results = dict(task.run(subject, configs, task.samples, 0))
    hook.remove()
    # The contexts for all caches at once, and 24 continuations on each, 16 at a time.
    assert read.count("SharedPrefill") == 1 and len(read) == 1 + 2 * len(configs)
    for number, config in enumerate(configs):
        ((_, expected),) = alone.run(subject, [config], alone.samples, 0)
        assert results[number] == expected


def test_unknown_tasks_and_invalid_options_are_refused(subject, add_task_files, tmp_path):
    task = HarnessTask("winogrand", add_task_files(tmp_path), tmp_path)
    with pytest.raises(
        ValueError, match="harness: 'winogrand' is unknown; did you mean winogrande"
    ):
        task.prepare(subject, [CacheConfig("full")])
    with pytest.raises(ValueError, match="shots -1"):
        HarnessTask("copa", tmp_path, tmp_path, shots=-1)


def test_a_missing_data_file_is_named_before_anything_runs(subject, add_task_files, tmp_path):
    task = HarnessTask("copa", add_task_files(tmp_path), tmp_path)
    with pytest.raises(ValueError, match="'copa_balanced_dev.xml' is not in"):
        task.prepare(subject, [CacheConfig("full")])


def test_a_task_that_cannot_be_fetched_is_one_sentence(subject, add_task_files, tmp_path):
    (add_task_files(tmp_path) / "tasks.py").write_text(
        "def copa(**_):\n    raise ConnectionError('the Hub cannot be reached')\n"
    )
    task = HarnessTask("copa", tmp_path, tmp_path)
    with pytest.raises(ValueError, match="'copa' cannot be loaded .*Hub.*; give a folder .*--data"):
        task.prepare(subject, [CacheConfig("full")])
