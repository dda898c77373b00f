import pytest

from h2okv.cli.generate import comparison_table, report, summary_line
from h2okv.engine.generation import Comparison, Generation


def make_generation(**values):
    defaults = {
        "text": "a text", "token_ids": [1, 2, 3], "finish_reason": "length",
        "time_to_first_token": 0.25, "tokens_per_second": 12.34, "kv_bytes": 512,
        "kv_bytes_full": 2048, "num_seen_tokens": 400, "num_cached_tokens": 80,
        "mean_cached_tokens": 80.0, "smaller_from": 110,
    }  # fmt: skip
    return Generation(**(defaults | values))


def test_a_table_of_three_caches_fits_a_terminal():
    labels = ("full cache", "h2o:20%", "recent:20%")
    same = {labels[1]: 2, labels[2]: 3}
    comparison = Comparison({label: make_generation() for label in labels}, same)
    lines = comparison_table(comparison).splitlines()
    assert max(map(len, lines)) <= 100
    words = [line.split() for line in lines]
    counts = ["2", "of", "3", "3", "of", "3"]
    assert [*["same", "next", "token", "on", "the", "full", "cache's", "text"], *counts] in words


def test_summary_line():
    assert summary_line(make_generation()) == (
        "3 tokens (length) | first after 0.250 s | 12.3 tokens/s"
        " | KV cache 512 B, a full one 2.0 KiB (25 %) | 400 tokens seen, 80 kept"
    )


@pytest.mark.parametrize(
    ("values", "memory", "tokens_kept"),
    [
        ({"kv_bytes": 2100, "num_cached_tokens": 400, "mean_cached_tokens": 400.0},
         "KV cache 2.1 KiB (nothing evicted yet; saves memory from 110 tokens on)",
         "400 tokens seen, all kept"),
        ({"kv_bytes": 2100}, "KV cache 2.1 KiB (saves memory from 110 tokens on)",
         "400 tokens seen, 80 kept"),
        ({"num_cached_tokens": 290}, "KV cache 512 B, a full one 2.0 KiB (25 %)",
         "400 tokens seen, 80 kept by a head on average, 290 by the largest"),
        ({"kv_bytes": 2100, "smaller_from": None}, "KV cache 2.1 KiB", "400 tokens seen, 80 kept"),
    ],
)  # fmt: skip
def test_memory_is_compared_only_if_smaller(values, memory, tokens_kept):
    run = make_generation(**values)
    assert (run.memory_text, run.kept_text) == (memory, tokens_kept)


def test_summary_line_without_tokens():
    nothing = make_generation(
        token_ids=[], finish_reason="interrupted", time_to_first_token=None, tokens_per_second=None,
        kv_bytes=0, kv_bytes_full=0,
    )  # fmt: skip
    assert "0 tokens (interrupted) | KV cache 0 B" in summary_line(nothing)
    assert nothing.interrupted


@pytest.mark.parametrize(
    ("seen", "tokens_kept", "warns"), [(400, 31, True), (400, 32, False), (9, 9, False)]
)
def test_few_entries_note(capsys, seen, tokens_kept, warns):
    run = make_generation(num_seen_tokens=seen, num_cached_tokens=tokens_kept)
    report(Comparison({"h2o:20%": run}))
    assert ("too few for good text" in capsys.readouterr().err) is warns
