from contextlib import suppress

import pytest
from rouge_score.rouge_scorer import RougeScorer

from h2okv.evaluation.cache_setting import CacheSetting
from h2okv.evaluation.decoding import Decoding
from h2okv.evaluation.runner import Cell, Evaluation, SampleFile
from h2okv.evaluation.task import BatchOptions, TextPrompt
from h2okv.evaluation.tasks.summarization import Article, Summarization

SETTINGS = [CacheSetting("h2o", 16), CacheSetting()]
CODE = {"h2okv": "0"}


def make_task(novel, limit=None, batch_size=2, temperature=0.0, too_long="refuse", most=6):
    words = novel.split()
    articles = [
        Article(
            TextPrompt(" ".join(words[20 * n : 20 * n + 30 + 5 * n]), most, (), f"line {n}"),
            (" ".join(words[: 5 + n]), "the the"),
        )
        for n in range(5)
    ]
    options = BatchOptions(batch_size, limit, too_long)
    return Summarization("words", articles, options, Decoding(temperature))


def evaluate(subject, path, task, stop_after=None, settings=SETTINGS, seed=0):
    """Runs an evaluation, interrupted after some batches."""
    batches = []

    def on_results(cell, count):
        batches.append(count)
        if len(batches) == stop_after:
            raise KeyboardInterrupt

    with SampleFile(path, CODE) as file:
        evaluation = Evaluation(subject, [Cell(task, s, seed) for s in settings], file)
        with suppress(KeyboardInterrupt):
            evaluation.run(on_results)
        return evaluation.rows(), sum(batches)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stopped_run_goes_on_to_the_same_results(subject, novel, tmp_path, temperature):
    whole, count = evaluate(subject, tmp_path / "a", make_task(novel, temperature=temperature))
    assert count == 10 and len(whole) == 2
    again = make_task(novel, temperature=temperature, batch_size=3)
    partly, first = evaluate(subject, tmp_path / "b", again, stop_after=1)
    assert partly == {} and first == 3
    # A result that was half written is lost; all others are not computed again.
    (tmp_path / "b").write_bytes((tmp_path / "b").read_bytes()[:-9])
    rest, second = evaluate(subject, tmp_path / "b", again)
    assert second == 8
    assert rest == whole


def test_two_runs_with_one_seed_agree_and_others_differ(subject, novel, tmp_path):
    task = make_task(novel, limit=2, temperature=1.0, most=20)
    runs = [evaluate(subject, tmp_path / f"{n}", task, seed=n // 2)[0] for n in range(3)]
    values = [[row["rouge1"] for row in run.values()] for run in runs]
    assert values[0] == values[1] != values[2]


def test_a_larger_limit_keeps_what_there_is(subject, novel, tmp_path):
    few, _ = evaluate(subject, tmp_path / "a", make_task(novel, limit=2))
    assert [row["samples"] for row in few.values()] == [2, 2]
    more, count = evaluate(subject, tmp_path / "a", make_task(novel))
    assert count == 6
    assert [row["samples"] for row in more.values()] == [5, 5]


def test_rows_say_all_that_they_come_from(subject, novel, tmp_path):
    rows, _ = evaluate(subject, tmp_path / "a", make_task(novel, limit=2))
    row = rows["words: h2o, 16"]
    assert row.items() >= {
        "task": "words", "policy": "h2o", "budget": "16", "seed": 0, "model": "bundled",
        "dtype": "float32", "h2okv": "0", "metric": "rouge2", "value": row["rouge2"],
    }.items()  # fmt: skip
    assert row["revision"].startswith("weights-")


def test_scores_are_the_means_of_rouge_score(subject, novel, tmp_path):
    task = make_task(novel, limit=3)
    with SampleFile(tmp_path / "a", CODE) as file:
        cell = Cell(task, SETTINGS[0])
        evaluation = Evaluation(subject, [cell], file)
        evaluation.run()
        results, row = file.results(cell.label), evaluation.rows()[cell.label]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    for name in ("rouge1", "rouge2", "rougeL"):
        best = [
            max(scorer.score(ref, results[n]["text"])[name].fmeasure for ref in refs)
            for n, refs in enumerate(article.references for article in task.articles[:3])
        ]
        assert row[name] == pytest.approx(sum(best) / 3)


def test_a_cache_is_asked_for_once(subject, novel, tmp_path):
    with pytest.raises(ValueError, match="asked for twice"):
        evaluate(subject, tmp_path / "a", make_task(novel), settings=[CacheSetting()] * 2)


def test_a_sample_above_the_window_is_refused_by_line_or_left_out(subject, novel, tmp_path):
    many = TextPrompt(novel, 6, (), "line 9")
    for too_long, settings in (("refuse", SETTINGS), ("skip", SETTINGS)):
        task = make_task(novel, limit=6, too_long=too_long)
        task.articles = [*task.articles[:1], Article(many, ("a",))]
        if too_long == "refuse":
            with pytest.raises(ValueError, match="line 9 has .* 'h2o, 16' that is more than the"):
                evaluate(subject, tmp_path / "a", task, settings=settings)
        else:
            rows, count = evaluate(subject, tmp_path / "a", task, settings=settings)
            assert count == 2 and all(row["samples"] == 1 for row in rows.values())
    rolling = [CacheSetting("h2o", 16, positions="rolling")]
    task = make_task(novel, limit=6)
    task.articles = [Article(many, ("a",))]
    assert evaluate(subject, tmp_path / "b", task, settings=rolling)[1] == 1


def test_none_left_is_refused(subject, novel, tmp_path):
    task = make_task(novel, too_long="skip")
    task.articles = [Article(TextPrompt(novel, 6, (), "line 9"), ("a",))]
    with pytest.raises(ValueError, match="every sample is above the model's window of 2048"):
        evaluate(subject, tmp_path / "a", task)
