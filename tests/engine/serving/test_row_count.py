"""The number of rows is arithmetic, and the arithmetic is right."""

import pytest
import torch

import h2okv
from h2okv.cache.slot_pool import RowBlock
from h2okv.engine.memory import row_sizes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"positions": "rolling"},
        {"kv_bits": 8},
        {"kv_bits": 4, "positions": "rolling"},
        {"scoring": "value_norm"},
        {"policy": "strided_heavy"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_takes_what_was_counted(make_llama, options, dtype):
    model = make_llama().to(dtype)
    cache = h2okv.H2OCache(model.config, 1, 1, **options)
    sizes = row_sizes(model.config, cache, dtype, row_budget=37, max_prompt=100, piece=50)
    with torch.no_grad():
        model(torch.tensor([[5]]), past_key_values=cache)
    assert RowBlock(cache, 5, 37).nbytes == 5 * sizes.row


def test_rows_fill_the_memory_and_no_more(make_llama):
    model = make_llama()
    cache = h2okv.H2OCache(model.config)
    sizes = row_sizes(model.config, cache, model.dtype, row_budget=37, max_prompt=100, piece=50)
    assert sizes.rows_in(sizes.least) == 1
    assert sizes.rows_in(sizes.least - 1) == 0
    assert sizes.rows_in(sizes.least + 9 * (sizes.row + sizes.step)) == 10


def test_memory_without_room_for_a_row_is_refused_with_what_would_do(make_llama, make_llm):
    with pytest.raises(ValueError, match=r"no room for a single row; give \d+ MiB"):
        make_llm(make_llama(), rows=None, memory=1 << 20)


def test_the_memory_decides_the_rows(make_llama, make_llm):
    model = make_llama()
    llm = make_llm(model, rows=None)
    assert llm.engine.num_rows == 64
    description = llm.describe()
    assert "64 rows of" in description
    assert "times as much" in description
