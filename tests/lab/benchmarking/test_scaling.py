"""The tables of docs/results/scaling.md equal the output of benchmarks/scaling_arithmetic.py."""

import re
from pathlib import Path

import pytest
from transformers import LlamaConfig

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def arithmetic(load_script):
    return load_script("benchmarks/scaling_arithmetic.py")


def test_the_page_equals_the_script_s_output(arithmetic):
    page = (ROOT / "docs" / "results" / "scaling.md").read_text(encoding="utf-8")
    assert arithmetic.filled(page) == page
    assert sorted(re.findall(r"<!-- (of-[a-z-]+):start -->", page)) == sorted(arithmetic.PARTS)


@pytest.mark.parametrize(
    ("load", "unlucky", "rows"),
    # One row that is busy half of the time is found busy by half of the requests; the second
    # one, by Erlang's tables, by a tenth.
    [(0.5, 0.51, 1), (0.5, 0.49, 2), (0.5, 0.101, 2), (0.5, 0.099, 3), (2.0, 0.45, 3)],
)
def test_rows_by_erlangs_formula(arithmetic, load, unlucky, rows):
    assert arithmetic.rows_needed(load, 1.0, 0.0, unlucky) == rows


def test_waiting_is_allowed(arithmetic):
    # In one row, exp(-(1 - 0.5) * patience) of those that wait do so for longer.
    assert arithmetic.rows_needed(0.5, 1.0, 10.0, 0.5 * 0.0068) == 1
    assert arithmetic.rows_needed(0.5, 1.0, 10.0, 0.5 * 0.0067) == 2


def test_bytes_and_traffic_of_ranks(arithmetic):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, tie_word_embeddings=False,
    )  # fmt: skip
    subject = arithmetic.Subject(config, "tiny")
    split = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 2 * 100 * 64
    norms = 7 * 64
    assert subject.rank_bytes(1) == 2 * (split + norms)
    assert subject.rank_bytes(2) == 2 * (split / 2 + norms)
    assert subject.read_bytes(2) == subject.rank_bytes(2) - 100 * 64
    # Two ranks: each sends each reduced state once, and half of a gathered one.
    assert subject.link_bytes(2, 5, 5) == 2 * (1 + 2 * 3) * 5 * 64 + 5 * 100 * 2 / 2
