import pytest

from h2okv.cli.chat import Entry, read_entry


def read_all(text):
    lines = iter(text.split("\n"))
    entries = []
    while (entry := read_entry(lambda prompt: next(lines, None))) is not None:
        entries.append(entry)
    return entries


def turn(text):
    return Entry(text, is_command=False)


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("one\ntwo", [turn("one"), turn("two")]),
        ("one\\\ntwo", [turn("one\\"), turn("two")]),
        ('"""\na\n\n  b\\\n/quit\n"""\nc', [turn("a\n\n  b\\\n/quit"), turn("c")]),
        ('"""\nnever closed', [turn("never closed")]),
        ('a """ b', [turn('a """ b')]),
        ("/save x", [Entry("/save x", is_command=True)]),
        (" /save", [turn(" /save")]),
        ("", [turn("")]),
    ],
)
def test_entries(text, entries):
    assert read_all(text) == entries


def test_continuation_lines_have_another_prompt():
    prompts, lines = [], iter(['"""', "c", '"""', "d"])

    def read_line(prompt):
        prompts.append(prompt)
        return next(lines, None)

    for _ in range(2):
        read_entry(read_line)
    assert prompts == ["> ", "... ", "... ", "> "]


def test_an_entry_that_is_not_utf8_is_refused_and_the_next_is_read():
    lines = iter(['"""', "fine", "caf\udce9", '"""', "caf\udce9", "next"])

    def read():
        return read_entry(lambda prompt: next(lines, None))

    with pytest.raises(ValueError, match="line 2 of the input is not UTF-8"):
        read()
    with pytest.raises(ValueError, match="the line is not UTF-8"):
        read()
    assert read() == turn("next")
