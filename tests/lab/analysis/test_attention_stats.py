import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, MistralConfig

from h2okv_lab.analysis import attention_stats as observing
from h2okv_lab.analysis.attention_stats import full_attention_layers, of_layers, read_observed


def collected_rows(model, ids):
    matrices = {}

    def keep(layer):
        for first, probabilities in layer.rows():
            rows = probabilities.flatten(0, 1)
            matrix = matrices.setdefault(
                layer.layer_idx, torch.zeros(4, ids.shape[1], ids.shape[1])
            )
            matrix[:, first : first + rows.shape[1], : rows.shape[2]] = rows

    read_observed(model, ids, keep)
    return torch.stack([matrices[i] for i in sorted(matrices)])


@pytest.mark.parametrize("most_rows", [256, 7])
def test_rows_are_the_models_attention(model, sample, attention, most_rows, monkeypatch):
    monkeypatch.setattr(observing, "_MOST_ROWS", most_rows)
    rows = collected_rows(model, sample.input_ids)
    torch.testing.assert_close(rows, attention, atol=2e-6, rtol=1e-4)


def test_blocks_stay_small_when_the_text_is_long(model, monkeypatch):
    monkeypatch.setattr(observing, "_MOST_ELEMENTS", 4 * 400 * 3)
    sizes = []
    ids = torch.randint(2, 97, (1, 400))

    def measure(layer):
        sizes.extend(probabilities.numel() for _, probabilities in layer.rows())

    read_observed(model, ids, measure)
    assert max(sizes) <= 4 * 400 * 3
    assert len(sizes) >= 2 * 400 // 3


def test_of_layers_computes_logits_of_one_token_only(model, sample):
    sizes = []
    hook = model.lm_head.register_forward_hook(lambda _, __, logits: sizes.append(logits.shape[1]))
    of_layers(model, sample.input_ids, lambda layer: 0)
    hook.remove()
    assert sizes == [1]


def test_observing_does_not_change_the_output(model, sample):
    with torch.inference_mode():
        before = model(sample.input_ids, use_cache=False).logits
    after = read_observed(model, sample.input_ids, lambda layer: None).logits
    torch.testing.assert_close(before, after, atol=1e-5, rtol=1e-4)
    assert model.config._attn_implementation == "sdpa"


def test_the_attention_comes_back_after_an_error(model, sample):
    def fail(layer):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        read_observed(model, sample.input_ids, fail)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_without_attention_access_is_refused(sample):
    config = BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=97)
    with pytest.raises(ValueError, match="bloom.*is not supported"):
        read_observed(BloomForCausalLM(config), sample.input_ids, lambda layer: None)


def test_sliding_layers_are_not_shown(sample):
    config = MistralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=97, sliding_window=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match="no full-attention layer"):
        full_attention_layers(config)


def test_strongest_queries_equal_those_of_the_full_matrix(model, sample, monkeypatch):
    """Check blockwise results: only later queries, summed over a group, above 1 %."""
    monkeypatch.setattr(observing, "_MOST_ROWS", 13)
    seen = []

    def look(layer):
        strongest = observing.strongest_queries(layer, 3)
        probabilities = torch.softmax(
            layer.logits(0, sample.length).masked_fill(
                torch.ones(sample.length, sample.length).triu(1).bool(), -torch.inf
            ),
            dim=-1,
        )
        mass = probabilities.sum(dim=1).tril(-1).transpose(1, 2)
        best, queries = mass.topk(3)
        expected = queries.masked_fill(best <= 0.01, -1)
        assert (torch.from_numpy(strongest) == expected).all()
        seen.append((expected >= 0).float().mean().item())

    read_observed(model, sample.input_ids, look)
    assert max(seen) > 0.5
