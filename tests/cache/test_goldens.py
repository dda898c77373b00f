"""The traces of the published H2O cache, reproduced by dropping and by masking."""

import json

import pytest
import torch
from oracle import cache_of
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

CASES = ("case0", "case1", "case2", "case3")


@pytest.fixture(scope="module")
def goldens(shared):
    folder = shared / "goldens"
    cases = json.loads((folder / "h2o_reference.json").read_text())
    return cases, load_file(folder / "h2o_reference.safetensors")


def load_model(case, tensors, name):
    heads = {key: case[key] for key in ("num_attention_heads", "num_key_value_heads")}
    model = LlamaForCausalLM(LlamaConfig(**case["config"], **heads)).eval()
    prefix = f"{name}/weights/"
    model.load_state_dict(
        {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
    )
    model.set_attn_implementation("h2o")
    return model


def entries(cache, num_layers):
    """Positions and scores of all layers, ascending by position, ``[L, B, H, entries]``."""
    positions, scores = [], []
    for layer in range(num_layers):
        unsorted, received = cache.kept_positions(layer).long(), cache.scores(layer)
        count = int((unsorted >= 0).sum(dim=-1).max())
        order = torch.where(unsorted < 0, 1 << 30, unsorted).argsort(dim=-1)[..., :count]
        positions.append(unsorted.gather(-1, order))
        scores.append(received.gather(-1, order))
    return torch.stack(positions), torch.stack(scores)


@pytest.mark.parametrize("masks", [False, True], ids=["dropping", "masking"])
@pytest.mark.parametrize("name", CASES)
def test_reproduces_the_published_cache(goldens, name, masks):
    cases, tensors = goldens
    case = cases[name]
    model = load_model(case, tensors, name)
    layers, prompt = model.config.num_hidden_layers, case["prompt"]
    cache = cache_of(
        model.config,
        heavy=case["heavy"],
        recent=case["recent"],
        positions="rolling" if case["position_rolling"] else "original",
        masks=masks,
    )
    input_ids = tensors[f"{name}/input_ids"]
    with torch.no_grad():
        logits = [model(input_ids[:, :prompt], past_key_values=cache).logits]
        assert torch.equal(entries(cache, layers)[0], tensors[f"{name}/kept_after_prompt"])
        for at in range(prompt, case["total"]):
            logits.append(model(input_ids[:, at : at + 1], past_key_values=cache).logits)
    cache.check_integrity()
    torch.testing.assert_close(
        torch.cat(logits, dim=1), tensors[f"{name}/logits"], atol=5e-4, rtol=0
    )
    positions, scores = entries(cache, layers)
    assert torch.equal(positions, tensors[f"{name}/kept_final"])
    torch.testing.assert_close(scores, tensors[f"{name}/scores_final"], atol=1e-3, rtol=1e-4)
