"""`benchmarks/record.py`: rows of earlier runs stay as they are."""

import pytest


@pytest.fixture(scope="module")
def record(load_script):
    return load_script("benchmarks/record.py")


def test_earlier_rows_keep_every_character(record, tmp_path):
    cells = dict.fromkeys(record.FIELDS, "")
    cells |= {"commit": "504e778", "ratio": "1.040", "measure": "step", "machine": "EPYC, 2 cores"}
    row = cells | {"dtype": "fp32", "implementation": "h2o", "unit": "s"}
    row |= dict.fromkeys(("median", "lower_quartile", "upper_quartile"), 0.5)
    path = tmp_path / "rows.csv"
    record.report(path, [row])
    before = path.read_bytes()
    record.report(path, [row])
    assert path.read_bytes() == before + before.partition(b"\n")[2]
    assert b",504e778," in before and b",1.040," in before
