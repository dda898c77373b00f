import json

import pytest

from h2okv.config import CacheConfig
from h2okv_lab.evaluation.tasks.generation import Diversity, read_articles


def written(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_recipe_s_format_is_a_complete_prompt(tmp_path):
    line = {"article": "###\nA: b\n", "summary_gt": "s", "stop": ["###"], "max_tokens": 9, "n": 1}
    (article,) = read_articles(written(tmp_path / "x.jsonl", line))
    assert article.text == "###\nA: b\n"
    assert (article.stops, article.max_new_tokens) == (("###",), 9)
    assert article.references == ("s",)


def test_longbench_s_format_gets_a_prompt(tmp_path):
    line = {"context": "news {braces}", "answers": ["a", "b"], "input": ""}
    path = written(tmp_path / "x.jsonl", line)
    assert "news {braces}" in read_articles(path)[0].text
    (article,) = read_articles(path, template="Say: {article} !")
    assert article.text == "Say: news {braces} !"
    assert article.references == ("a", "b")


def test_articles_and_references_are_paired_by_line(tmp_path):
    texts = tmp_path / "src.txt"
    texts.write_text("one\ntwo\n")
    refs = written(tmp_path / "r.jsonl", {"refs": ["1", "eins"]}, {"refs": ["2"]})
    articles = read_articles(texts, refs)
    assert [a.references for a in articles] == [("1", "eins"), ("2",)]
    assert "Article: two\n" in articles[1].text
    texts.write_text("one\n")
    with pytest.raises(ValueError, match="has 1 lines and .* has 2"):
        read_articles(texts, refs)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"article": "a"}, "has no field summary_gt"),
        ({"article": "a", "summary_gt": " "}, "field summary_gt is not a text"),
        ({"article": "a", "summary_gt": []}, "field summary_gt is an empty list"),
        ({"article": 3, "summary_gt": "s"}, "field article is not a text"),
        ({"article": "a", "summary_gt": "s", "max_tokens": 0}, "field max_tokens is 0"),
        ({"article": "a", "summary_gt": "s", "stop": [""]}, "field stop is not a text"),
        ({"context": "c", "answers": ["a", ""]}, "field answers is not a text"),
        ({"text": "a"}, "neither field article nor field context"),
    ],
)
def test_a_bad_line_is_refused_by_file_line_and_field(tmp_path, line, message):
    good = {"article": "a", "summary_gt": "s"}
    path = written(tmp_path / "x.jsonl", good, line)
    with pytest.raises(ValueError, match=message) as caught:
        read_articles(path)
    assert f"line 2 of '{path}'" in str(caught.value)


def test_a_template_without_its_field_is_refused(tmp_path):
    path = written(tmp_path / "x.jsonl", {"context": "c", "answers": ["a"]})
    with pytest.raises(ValueError, match="has no {article}"):
        read_articles(path, template="Say: ")


SAME = "the old man went down to the sea and looked at it for a long time"
OTHER = "every bright morning she walked through green fields without any hurry at all"


@pytest.fixture
def make_task(tmp_path):
    def make(copies=2, temperature=1.0):
        turns = [{"turns": [text]} for text in ("It was late when", "The sea was")]
        path = written(tmp_path / "talk.jsonl", *turns)
        options = {"batch_size": 3, "limit": 2, "max_new_tokens": 12}
        return Diversity("talk", path, copies, temperature=temperature, **options)

    return make


def results(*texts):
    return {n: {"prompt": n // 2, "text": text} for n, text in enumerate(texts)}


def test_self_bleu_of_equal_and_of_disjoint_texts(make_task):
    task = make_task()
    assert task.scores(results(SAME, SAME))["self_bleu"].value == pytest.approx(100)
    apart = task.scores(results(SAME, OTHER))["self_bleu"].value
    assert apart < 5
    both = task.scores(results(SAME, SAME, SAME, OTHER))["self_bleu"].value
    assert both == pytest.approx((100 + apart) / 2)


def test_each_prompt_is_answered_several_times(subject, make_task):
    task = make_task(copies=3)
    task.prepare(subject, [CacheConfig("full")])
    results = {}
    for _, batch in task.run(subject, [CacheConfig(budget=8)], task.samples, 0):
        results |= batch
    assert sorted(results) == [0, 1, 2, 3, 4, 5]
    assert [results[n]["prompt"] for n in range(6)] == [0, 0, 0, 1, 1, 1]
    assert len({result["text"] for result in results.values()}) == 6
    assert 0 <= task.scores(results)["self_bleu"].value < 50


def test_nothing_to_compare_is_refused(make_task):
    with pytest.raises(ValueError, match="copies 1 is too few"):
        make_task(copies=1)
    with pytest.raises(ValueError, match="temperature 0 gives the same"):
        make_task(temperature=0.0)
