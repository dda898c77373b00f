"""Weights in 8 bits: near what they were, and refused where no layer takes them."""

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from h2okv.offload.meta_model import make_meta_model, pack_layers


def test_products_are_near_what_they_were(tmp_path):
    pytest.importorskip("torchao")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = LlamaConfig(num_hidden_layers=1, vocab_size=50, **sizes)
    packed = pack_layers(make_meta_model(config, torch.bfloat16, str(tmp_path)))
    slots = {slot.name.split(".")[-2]: slot for slot in packed.units[0].slots}
    slot = slots["gate_proj"]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    rows = torch.randn(5, 64, generator=generator).bfloat16()
    stored = slot.to_bytes(weight)
    slot.fill(stored)
    output = slot.owner(rows).float()
    expected = rows.float() @ weight.float().T
    assert 0 < (output - expected).norm() < 0.02 * expected.norm()
    assert slot.nbytes == stored.nbytes == 96 * 64 + 4 * 96
    slot.empty()
    assert slot.owner.weight.device.type == "meta"


def test_a_model_without_linear_layers_is_refused(tmp_path):
    pytest.importorskip("torchao")
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50)  # of Conv1D
    with pytest.raises(ValueError, match="no linear layers whose weights could be int8"):
        pack_layers(make_meta_model(config, torch.float32, str(tmp_path)))
