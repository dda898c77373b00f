import torch

from h2okv.offload.profile import Clock, measure_bandwidth


def test_a_clock_runs_the_call_once():
    calls = []
    assert Clock(torch.device("cpu")).seconds(lambda: calls.append(1)) > 0
    assert calls == [1]


def test_bandwidth_is_a_positive_number():
    assert measure_bandwidth(torch.device("cpu"), 2**20) > 0
