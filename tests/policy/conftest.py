"""What a layer attends with, for tests that write a policy down once more."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


@pytest.fixture(scope="session")
def first_layer():
    """Queries ``[HQ, T, D]`` and keys ``[H, T, D]`` of the first layer, rotated."""

    @torch.no_grad()
    def compute(model, input_ids):
        attention, length = model.model.layers[0].self_attn, input_ids.shape[1]
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(input_ids))
        cos, sin = model.model.rotary_emb(hidden, torch.arange(length)[None])
        query, key = (
            project(hidden).view(1, length, -1, 16).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        return query[0], key[0]

    return compute
