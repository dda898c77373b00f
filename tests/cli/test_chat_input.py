import pytest

from h2okv.cli.chat import Entry, EntryReader


def read_all(text):
    lines = iter(text.split("\n"))
    reader = EntryReader(lambda prompt: next(lines, None))
    entries = []
    while (entry := reader.read()) is not None:
        entries.append(entry)
    return entries


def turn(text):
    return Entry(text, is_command=False)


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("one\ntwo", [turn("one"), turn("two")]),
        ("one \\\ntwo\\\nthree\nfour", [turn("one \ntwo\nthree"), turn("four")]),
        ("one\\", [turn("one")]),
        ('"""\na\n\n  b\\\n/quit\n"""\nc', [turn("a\n\n  b\\\n/quit"), turn("c")]),
        ('"""\nnever closed', [turn("never closed")]),
        ('a """ b', [turn('a """ b')]),
        ("/save x", [Entry("/save x", is_command=True)]),
        ("/save \\\nx", [turn("/save \nx")]),
        (" /save", [turn(" /save")]),
        ("", [turn("")]),
    ],
)
def test_entries(text, entries):
    assert read_all(text) == entries


def test_prompts_tell_a_beginning_from_a_continuation():
    prompts, lines = [], iter(["a\\", "b", '"""', "c", '"""', "d"])

    def read_line(prompt):
        prompts.append(prompt)
        return next(lines, None)

    reader = EntryReader(read_line)
    for _ in range(3):
        reader.read()
    assert prompts == ["> ", "... ", "> ", "... ", "... ", "> "]


def test_an_entry_that_is_no_text_is_refused_and_the_next_is_read():
    lines = iter(['"""', "fine", "caf\udce9", '"""', "caf\udce9", "next"])
    reader = EntryReader(lambda prompt: next(lines, None))
    with pytest.raises(ValueError, match="line 2 of the input is not UTF-8"):
        reader.read()
    with pytest.raises(ValueError, match="the line is not UTF-8"):
        reader.read()
    assert reader.read() == turn("next")
