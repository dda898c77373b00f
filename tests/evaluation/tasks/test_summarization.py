import json

import pytest

from h2okv.evaluation.tasks.summarization import read_articles


def written(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_recipe_s_form_is_a_whole_prompt(tmp_path):
    line = {"article": "###\nA: b\n", "summary_gt": "s", "stop": ["###"], "max_tokens": 9, "n": 1}
    (article,) = read_articles(written(tmp_path / "x.jsonl", line))
    assert article.prompt.text == "###\nA: b\n"
    assert (article.prompt.stops, article.prompt.max_new_tokens) == (("###",), 9)
    assert article.references == ("s",)


def test_longbench_s_form_gets_a_prompt(tmp_path):
    line = {"context": "news {braces}", "answers": ["a", "b"], "input": ""}
    path = written(tmp_path / "x.jsonl", line)
    assert "news {braces}" in read_articles(path)[0].prompt.text
    (article,) = read_articles(path, template="Say: {article} !")
    assert article.prompt.text == "Say: news {braces} !"
    assert article.references == ("a", "b")


def test_two_files_belong_together_by_line(tmp_path):
    texts = tmp_path / "src.txt"
    texts.write_text("one\ntwo\n")
    refs = written(tmp_path / "r.jsonl", {"refs": ["1", "eins"]}, {"refs": ["2"]})
    articles = read_articles(texts, refs)
    assert [a.references for a in articles] == [("1", "eins"), ("2",)]
    assert "Article: two\n" in articles[1].prompt.text
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


def test_a_template_needs_its_place(tmp_path):
    path = written(tmp_path / "x.jsonl", {"context": "c", "answers": ["a"]})
    with pytest.raises(ValueError, match="has no {article}"):
        read_articles(path, template="Say: ")
