"""Blocks that lie apart against the same entries in one tensor."""

import pytest
import torch

from h2okv.ops import indexed
from h2okv.ops.indexed import Indexed


@pytest.mark.parametrize("largest", [0, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_are_read_where_they_lie(monkeypatch, largest, dtype):
    monkeypatch.setattr(indexed, "_SMALL_BLOCK", largest)
    blocks = torch.randn(7, 2, 3, 9, 16).to(dtype)[:, 1]  # of a pool that holds more
    block_index = torch.tensor([5, 0, 3])
    wide = torch.promote_types(dtype, torch.float32)
    query, weights = torch.randn(9, 4, 16, dtype=wide), torch.rand(9, 4, 9, dtype=wide)
    selected = blocks[block_index].flatten(0, 1)
    entries = Indexed(blocks, block_index)
    torch.testing.assert_close(entries.logits(query), query @ selected.to(wide).transpose(1, 2))
    # Few values are converted; else the weights are rounded as the values are.
    used = weights if largest else weights.to(dtype).to(wide)
    torch.testing.assert_close(entries.mix(weights), torch.bmm(used, selected.to(wide)).to(dtype))
