"""The check of words reads pages and help texts, and leaves code and rendered tables alone."""

import pytest


@pytest.fixture(scope="module")
def words(load_script):
    return load_script("scripts/check_words.py")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# A model\n\nwhose layers slide", 3),  # word-ok
        ("It is cut,\nso that it fits, so that it\nworks.", 2),
        ("A thread of\nits own.", 1),  # word-ok
        ("`whose` [x](whose.md)", None),
        ("```\nwhose\n```\n    whose", None),
        ("<!-- table: x -->\nwhose\n<!-- end -->", None),
        ("so that it fits. It is cut so that it works.", None),
        ("whose <!-- word-ok -->", None),
    ],
)
def test_phrases_of_a_page(words, tmp_path, text, line):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert [number for _, number, _ in words.checks(page)] == ([line] if line else [])


def test_help_texts_are_read_in_commands_alone(words, tmp_path, monkeypatch):
    file = tmp_path / "command.py"
    file.write_text('HELP = "Models whose layers slide"\n')  # word-ok
    assert not list(words.checks(file))
    monkeypatch.setattr(words, "HELP", (str(tmp_path),))
    assert [number for _, number, _ in words.checks(file)] == [1]
