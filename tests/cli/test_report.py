import pytest

from h2okv.chat.generation import Agreement, Generation
from h2okv.cli.generate import (
    agreement_text,
    few_entries_note,
    summary_line,
)


def make_generation(**values):
    defaults = {
        "shown": "a text",
        "text": "a text",
        "token_ids": [1, 2, 3],
        "finish_reason": "length",
        "time_to_first_token": 0.25,
        "tokens_per_second": 12.34,
        "kv_bytes": 512,
        "kv_bytes_full": 2048,
        "num_seen_tokens": 400,
        "num_cached_tokens": 80,
    }
    return Generation(**(defaults | values))


@pytest.mark.parametrize(
    ("tokens", "others", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], Agreement(3, 3, None)),
        ([1, 2, 3], [1, 9, 3], Agreement(3, 2, 1)),
        ([1, 2], [1, 2, 3], Agreement(3, 2, 2)),
        ([], [1], Agreement(1, 0, 0)),
        ([], [], Agreement(0, 0, None)),
    ],
)
def test_agreement(tokens, others, expected):
    assert Agreement.of(tokens, others) == expected


def test_agreement_text_counts_from_one():
    assert agreement_text(Agreement(3, 2, 1)) == "2 of 3 (first difference at token 2)"
    assert agreement_text(Agreement(3, 3, None)) == "3 of 3"


def test_summary_line():
    assert summary_line(make_generation()) == (
        "3 tokens (length) | first after 0.250 s | 12.3 tokens/s | KV 512 B of 2.0 KiB (25 %)"
        " | 400 tokens seen, 80 kept"
    )


def test_summary_line_of_nothing():
    nothing = make_generation(
        token_ids=[],
        finish_reason="interrupted",
        time_to_first_token=None,
        tokens_per_second=None,
        kv_bytes=0,
        kv_bytes_full=0,
    )
    assert "0 tokens (interrupted) | first after - | - tokens/s" in summary_line(nothing)
    assert nothing.interrupted


@pytest.mark.parametrize(
    ("seen", "kept", "warns"), [(400, 31, True), (400, 32, False), (9, 9, False)]
)
def test_few_entries_note(seen, kept, warns):
    run = make_generation(num_seen_tokens=seen, num_cached_tokens=kept)
    assert (few_entries_note(run) is not None) is warns
