"""Weights in few bits: near what they were, and refused where there is no such format."""

import pytest
import torch
from transformers import LlamaConfig

from h2okv.offload.meta_model import PackedSlot, make_meta_model, pack_layers

CPU = torch.device("cpu")


def meta(tmp_path, dtype=torch.bfloat16, **sizes):
    defaults = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = LlamaConfig(num_hidden_layers=1, vocab_size=50, **(defaults | sizes))
    return make_meta_model(config, dtype, str(tmp_path))


def slots_of(packed):
    return {slot.name.split(".")[-2]: slot for slot in packed.units[0].slots}


@pytest.mark.parametrize(("bits", "max_error"), [(8, 0.02), (4, 0.15)])
def test_products_are_near_what_they_were(tmp_path, bits, max_error):
    pytest.importorskip("torchao")
    packed = pack_layers(meta(tmp_path), bits, CPU)
    slot = slots_of(packed)["gate_proj"]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    rows = torch.randn(5, 64, generator=generator).bfloat16()
    stored = slot.to_bytes(weight)
    slot.fill(stored)
    output = slot.owner(rows).float()
    expected = rows.float() @ weight.float().T
    assert 0 < (output - expected).norm() < max_error * expected.norm()
    assert slot.nbytes == stored.nbytes
    assert stored.nbytes == {8: 96 * 64 + 4 * 96, 4: 96 * 64 // 2 + 4 * 96}[bits]
    slot.empty()
    assert slot.owner.weight.device.type == "meta"


def test_weights_that_int4_cannot_pack_stay(tmp_path):
    pytest.importorskip("torchao")
    # 40 numbers are no whole groups of 32, and 40 outputs no multiple of 16.
    packed = pack_layers(meta(tmp_path, intermediate_size=40), 4, CPU)
    kinds = {name: isinstance(slot, PackedSlot) for name, slot in slots_of(packed).items()}
    assert kinds["q_proj"] and not kinds["down_proj"] and not kinds["up_proj"]
    with pytest.raises(ValueError, match="no linear layers whose weights could be int4"):
        pack_layers(meta(tmp_path, hidden_size=40, intermediate_size=40), 4, CPU)


def test_bytes_of_another_processor_are_another_file(tmp_path, monkeypatch):
    slot = PackedSlot.of(meta(tmp_path).units[0].slots[0], 4)
    assert isinstance(slot, PackedSlot)
    before = slot.form
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert slot.form != before


@pytest.mark.parametrize(
    ("device", "dtype", "words"),
    [
        (torch.device("cuda"), torch.bfloat16, "is for CPUs.*--weight-bits 8"),
        (CPU, torch.float32, "in float32 a product takes.*--dtype bfloat16"),
    ],
)
def test_missing_int4_is_refused(tmp_path, device, dtype, words):
    with pytest.raises(ValueError, match=words):
        pack_layers(meta(tmp_path, dtype), 4, device)
