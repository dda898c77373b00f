import json
from contextlib import suppress

import pytest
from rouge_score.rouge_scorer import RougeScorer

from h2okv.cache.checkpoint import CONTRACT
from h2okv.config import CacheConfig
from h2okv_lab.evaluation.task import Evaluation, Run, SampleFile, TextPrompt
from h2okv_lab.evaluation.tasks.generation import Summarization

pytestmark = pytest.mark.slow

CONFIGS = [CacheConfig(budget=16), CacheConfig("full")]
CODE = {"h2okv": "0"}


@pytest.fixture
def make_task(novel, tmp_path):
    def make(max_tokens=6, **options):
        words = novel.split()
        articles = [
            {
                "article": " ".join(words[20 * n : 20 * n + 30 + 5 * n]),
                "summary_gt": [" ".join(words[: 5 + n]), "the the"],
                "max_tokens": max_tokens,
            }
            for n in range(5)
        ]
        path = tmp_path / "words.jsonl"
        path.write_text("\n".join(map(json.dumps, articles)))
        return Summarization("words", path, **{"batch_size": 2, "too_long": "refuse"} | options)

    return make


def evaluate(subject, path, task, stop_after=None, configs=CONFIGS, seed=0):
    """Run an evaluation, interrupted after some batches."""
    batches = []

    def on_results(run, count):
        batches.append(count)
        if len(batches) == stop_after:
            raise KeyboardInterrupt

    with SampleFile(path, CODE) as file:
        evaluation = Evaluation(subject, [Run(task, s, seed) for s in configs], file)
        with suppress(KeyboardInterrupt):
            evaluation.run(on_results)
        return evaluation.rows(), sum(batches)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_run_gives_the_same_results(subject, make_task, tmp_path, temperature):
    uninterrupted, count = evaluate(subject, tmp_path / "a", make_task(temperature=temperature))
    assert count == 10 and len(uninterrupted) == 2
    again = make_task(temperature=temperature, batch_size=3)
    partly, first = evaluate(subject, tmp_path / "b", again, stop_after=1)
    assert partly == {} and first == 3
    # A result that was half written is lost; all others are not computed again.
    (tmp_path / "b").write_bytes((tmp_path / "b").read_bytes()[:-9])
    resumed, second = evaluate(subject, tmp_path / "b", again)
    assert second == 8
    assert resumed == uninterrupted


def test_samples_of_an_earlier_rule_are_refused(subject, make_task, tmp_path):
    path, task = tmp_path / "a", make_task(limit=2)
    evaluate(subject, path, task)
    text = path.read_text()
    path.write_text(text.replace(f'"rule": {CONTRACT}', f'"rule": {CONTRACT - 1}'))
    with pytest.raises(ValueError, match=f"begun with rule {CONTRACT - 1}, not {CONTRACT}"):
        evaluate(subject, path, task)


def test_two_runs_with_one_seed_agree_and_others_differ(subject, make_task, tmp_path):
    task = make_task(limit=2, temperature=1.0, max_tokens=20)
    runs = [evaluate(subject, tmp_path / f"{n}", task, seed=n // 2)[0] for n in range(3)]
    values = [[row["rouge1"] for row in run.values()] for run in runs]
    assert values[0] == values[1] != values[2]


def test_a_larger_limit_reuses_results(subject, make_task, tmp_path):
    few, _ = evaluate(subject, tmp_path / "a", make_task(limit=2))
    assert [row["samples"] for row in few.values()] == [2, 2]
    more, count = evaluate(subject, tmp_path / "a", make_task())
    assert count == 6
    assert [row["samples"] for row in more.values()] == [5, 5]


def test_rows_have_provenance_columns(subject, make_task, tmp_path):
    rows, _ = evaluate(subject, tmp_path / "a", make_task(limit=2))
    row = rows["words: h2o:16"]
    assert row.items() >= {
        "task": "words", "policy": "h2o", "budget": "16", "seed": 0, "model": "bundled",
        "dtype": "float32", "h2okv": "0", "metric": "rouge2", "value": row["rouge2"],
    }.items()  # fmt: skip
    assert row["revision"].startswith("weights-")


def test_scores_are_the_means_of_rouge_score(subject, make_task, tmp_path):
    task = make_task(limit=3)
    with SampleFile(tmp_path / "a", CODE) as file:
        run = Run(task, CONFIGS[0])
        evaluation = Evaluation(subject, [run], file)
        evaluation.run()
        results, row = file.results(run.label), evaluation.rows()[run.label]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    for name in ("rouge1", "rouge2", "rougeL"):
        best = [
            max(scorer.score(ref, results[n]["text"])[name].fmeasure for ref in refs)
            for n, refs in enumerate(prompt.references for prompt in task.prompts[:3])
        ]
        assert row[name] == pytest.approx(sum(best) / 3)


def test_a_duplicate_cache_is_refused(subject, make_task, tmp_path):
    with pytest.raises(ValueError, match="requested twice"):
        evaluate(subject, tmp_path / "a", make_task(), configs=[CacheConfig("full")] * 2)


def test_a_sample_above_the_window_is_refused_by_line_or_left_out(
    subject, make_task, novel, tmp_path
):
    many = TextPrompt(novel, 6, (), "line 9", ("a",))
    for too_long, configs in (("refuse", CONFIGS), ("skip", CONFIGS)):
        task = make_task(limit=6, too_long=too_long)
        task.prompts = [*task.prompts[:1], many]
        if too_long == "refuse":
            with pytest.raises(ValueError, match="line 9 has .* 'h2o:16' that is more than the"):
                evaluate(subject, tmp_path / "a", task, configs=configs)
        else:
            rows, count = evaluate(subject, tmp_path / "a", task, configs=configs)
            assert count == 2 and all(row["samples"] == 1 for row in rows.values())
    rolling = [CacheConfig(budget=16, positions="rolling")]
    task = make_task(limit=6)
    task.prompts = [many]
    assert evaluate(subject, tmp_path / "b", task, configs=rolling)[1] == 1


def test_no_sample_within_the_window_is_refused(subject, make_task, novel, tmp_path):
    task = make_task(too_long="skip")
    task.prompts = [TextPrompt(novel, 6, (), "line 9", ("a",))]
    with pytest.raises(
        ValueError, match="every sample is above the model's context window of 2048"
    ):
        evaluate(subject, tmp_path / "a", task)


NOW = {"h2okv": "1", "commit": "abc"}


@pytest.fixture
def path(tmp_path):
    with SampleFile(tmp_path / "r.jsonl", NOW) as file:
        file.open_run("a", {"model": "m", "depths": (0, 1)})
        file.add("a", {0: {"x": 1.5}, 3: {"x": 2}})
    return tmp_path / "r.jsonl"


def reopened(path, versions=NOW):
    with SampleFile(path, versions) as file:
        return file.results("a")


def test_added_results_are_read_again(path):
    assert reopened(path) == {0: {"x": 1.5}, 3: {"x": 2}}


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_line_that_was_not_finished_is_dropped(path, cut):
    path.write_bytes(path.read_bytes()[:-cut])
    assert reopened(path) == {0: {"x": 1.5}}
    with SampleFile(path, NOW) as file:
        file.add("a", {3: {"x": 4}})
    assert reopened(path) == {0: {"x": 1.5}, 3: {"x": 4}}


def test_a_first_line_that_was_not_finished_is_written_again(path):
    path.write_bytes(path.read_bytes()[:10])
    assert reopened(path) == {}
    assert path.read_text().startswith('{"kind": "h2okv evaluation"')


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ('{"run": "a", "sample": 1}', "is not a result of h2okv evaluation"),
        ('{"run": "a", "sample": "1", "result": {}}', "field sample is '1'"),
        ('{"run": "b", "sample": 1, "result": {}}', "field run is 'b'"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_line_and_stays(path, line, message):
    content = path.read_text()
    path.write_text(f"{content}{line}\n{content.splitlines()[-1]}\n")
    number = len(content.splitlines()) + 1
    with pytest.raises(ValueError, match=message) as caught:
        SampleFile(path, NOW)
    assert f"line {number} of '{path}'" in str(caught.value)
    assert line in path.read_text()


def test_a_file_of_another_format_is_not_modified(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("my notes")
    with pytest.raises(ValueError, match="is not a result of h2okv evaluation"):
        SampleFile(path, NOW)
    assert path.read_text() == "my notes"


def test_results_of_another_model_are_refused(path):
    with SampleFile(path, NOW) as file:
        file.open_run("a", {"model": "m", "depths": [0, 1]})
        with pytest.raises(ValueError, match="a was begun with model m, not n"):
            file.open_run("a", {"model": "n", "depths": [0, 1]})


def test_versions_of_all_runs_are_recorded(path):
    with SampleFile(path, {"h2okv": "1", "commit": "def"}) as file:
        assert file.versions("a") == {"h2okv": "1", "commit": "abc"}
        file.add("a", {4: {}})
        assert file.versions("a") == {"h2okv": "1", "commit": "abc def"}
    with SampleFile(path, {"h2okv": "2", "commit": "ghi"}) as file:
        assert file.versions("a") == {"h2okv": "1", "commit": "abc def"}
        assert file.versions("new") == {"h2okv": "2", "commit": "ghi"}


def test_a_second_concurrent_run_is_refused(path):
    pytest.importorskip("fcntl")
    with SampleFile(path, NOW), pytest.raises(ValueError, match="by another run"):
        SampleFile(path, NOW)


def test_lines_are_json_objects(path):
    assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())
