import pytest
import torch

from h2okv.benchmarking.timing import Spread, interleaved
from h2okv.engine.memory import available_bytes, parse_memory, peak_resident_bytes, resident_bytes
from h2okv.offload.profile import Clock, measure_bandwidth


def test_everybody_takes_turns_and_the_order_turns_too():
    assert list(interleaved("ab", 3)) == [
        (0, "a"),
        (0, "b"),
        (1, "b"),
        (1, "a"),
        (2, "a"),
        (2, "b"),
    ]


def test_a_clock_runs_the_call_once():
    calls = []
    assert Clock(torch.device("cpu")).seconds(lambda: calls.append(1)) > 0
    assert calls == [1]


def test_quartiles():
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_ratios_are_within_rounds():
    # The ratio of the medians would be 1; in two of three rounds it is 2.
    assert Spread.of_ratios([2.0, 4.0, 3.0], [1.0, 2.0, 30.0]).median == 2.0


def test_bandwidth_is_a_positive_number():
    assert measure_bandwidth(torch.device("cpu"), 2**20) > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GiB", 8 * 2**30), ("500 MB", 500_000_000), ("1.5kib", 1536), ("12345", 12345)],
)
def test_amounts_of_memory(text, expected):
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "much", "8 GiBs", "-1GiB", "0"])
def test_what_is_no_amount_of_memory_is_refused(text):
    with pytest.raises(ValueError, match="--memory"):
        parse_memory(text)


def test_memory_of_this_process():
    resident = resident_bytes()
    if resident is None:
        pytest.skip("this system has no /proc")
    assert 0 < resident <= peak_resident_bytes()
    assert available_bytes(torch.device("cpu")) > 0
