import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2okv.engine.detokenizer import StopText


def stream(pieces, stops=("\nUser:",)):
    text = StopText(stops)
    written = [*map(text.add, pieces), text.end()]
    assert text.text == "".join(written)
    return text, [piece for piece in written if piece]


@given(st.lists(st.sampled_from(["\n", "User", ":", "Us", "e", "r", " cat", "\nUser:"])))
def test_text_ends_before_the_stop_string_however_it_is_split(pieces):
    joined = "".join(pieces)
    text, written = stream(pieces)
    assert text.text == joined.partition("\nUser:")[0].lstrip()
    assert text.stopped == ("\nUser:" if "\nUser:" in joined else None)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([" a", " cat"], ["a", " cat"]),
        (["a", "\n", "Us", "ual"], ["a", "\nUsual"]),
        (["a", "\nUser"], ["a", "\nUser"]),
        ([" ", "\n", "a"], ["a"]),
    ],
)
def test_text_is_held_back_only_while_it_may_be_a_stop_string(pieces, expected):
    assert stream(pieces)[1] == expected


def test_the_first_of_several_stop_strings_ends_the_text():
    text, _ = stream(["one two three"], ("three", "two"))
    assert text.text == "one "
    assert text.stopped == "two"


def test_leading_space_stays_without_strips_start():
    text = StopText((), strips_start=False)
    assert text.add(" a") + text.end() == " a"


def test_no_stop_strings():
    assert stream(["a\n", "User:"], ())[0].text == "a\nUser:"
