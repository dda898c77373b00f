"""The loss that dropped entries are expected to cost, against the divergence that they cost."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from h2okv.cache.argument import CACHE
from h2okv.calibration import factors
from h2okv.calibration.factors import _Prompt, losses_by_orders, measure_layer_budgets

LENGTH, FOLLOWING, STEP = 24, 8, 0.02


@pytest.fixture
def text():
    torch.manual_seed(3)
    return torch.randint(2, 97, (1, LENGTH + FOLLOWING))


def test_losses_are_the_divergence_of_weaker_entries(make_llama, text):
    """A layer with one KV head: a mask for all heads weakens the same entries a little."""
    model = make_llama(heads=2, kv_heads=1, layers=1, attention="eager", sharpness=3.0)
    order = torch.randperm(LENGTH)
    losses = losses_by_orders(model, text, [{0: order[None]}], rounds=4000)[0][0][0]
    causal = torch.full((FOLLOWING, LENGTH + FOLLOWING), -1e9).triu(LENGTH + 1)

    @torch.no_grad()
    def log_p(weakened):
        cache = DynamicCache(config=model.config)
        model(text[:, :LENGTH], **{CACHE: cache})
        mask = causal.clone()
        mask[:, weakened] -= STEP
        logits = model(text[:, LENGTH:], attention_mask=mask[None, None], **{CACHE: cache}).logits
        return logits[0].double().log_softmax(-1)

    full = log_p([])
    for rank in (0, LENGTH // 2, LENGTH - 3):
        weaker = log_p(order[rank:])
        divergence = (full.exp() * (full - weaker)).sum(-1).mean() / STEP**2
        assert losses[rank].item() == pytest.approx(divergence.item(), rel=0.1)


def test_a_model_is_as_before(make_llama, text):
    model = make_llama(attention="sdpa")
    before = model(text).logits
    order = torch.arange(LENGTH).expand(2, LENGTH)
    losses_by_orders(model, text, [{0: order, 1: order}])[0]
    assert model.config._attn_implementation == "sdpa"
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.equal(model(text).logits, before)


def test_packed_layers_have_gradients(make_llama, text):
    from h2okv.models.packed_linear import pack_linear_layers

    model = make_llama(attention="sdpa").to(torch.bfloat16)
    order = torch.arange(LENGTH).expand(2, LENGTH)
    expected = losses_by_orders(model, text, [{0: order, 1: order}])[0]
    if not pack_linear_layers(model):
        pytest.skip("nothing is packed on this processor")
    losses = losses_by_orders(model, text, [{0: order, 1: order}])[0]
    for layer in (0, 1):
        assert losses[layer].max() > 0
        torch.testing.assert_close(losses[layer], expected[layer], rtol=0.05, atol=1e-6)


def test_attention_without_a_mask_is_refused(make_llama, text, monkeypatch):
    model = make_llama(attention="sdpa")
    layer = model.model.layers[1]

    def forward(states, **options):
        return layer.self_attn(states, **options | {"attention_mask": None})[0]

    monkeypatch.setattr(layer, "forward", forward)
    order = torch.arange(LENGTH).expand(2, LENGTH)
    with pytest.raises(ValueError, match="takes no attention mask"):
        losses_by_orders(model, text, [{1: order}])[0]
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("gemma3_text", {"sliding_window": 8,
                         "layer_types": ["sliding_attention", "full_attention"]}),
        ("minicpm3", {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
                      "qk_nope_head_dim": 8, "v_head_dim": 8}),
    ],
    ids=["full", "sliding", "latent"],
)  # fmt: skip
def test_the_scored_prompt_is_not_read_again(text, monkeypatch, kind, options):
    if kind == "minicpm3" and CACHE != "cache":
        pytest.skip("latents need transformers 5.24")
    config = AutoConfig.for_model(
        kind, vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4 if kind == "minicpm3" else 2, **options,
    )  # fmt: skip
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.inference_mode():
        prompt = _Prompt.read(model, text[:, :LENGTH])
        orders = prompt.orders(recent=4)
    reads, forward = [], type(model).forward
    monkeypatch.setattr(
        type(model),
        "forward",
        lambda *args, **options: reads.append(1) or forward(*args, **options),
    )
    expected = losses_by_orders(model, text, [orders])[0]
    assert len(reads) == 2
    losses = losses_by_orders(model, text, [orders], cache=prompt.cache)[0]
    assert len(reads) == (4 if kind == "minicpm3" else 3)  # a cache of latents has no keys
    for layer, values in expected.items():
        torch.testing.assert_close(losses[layer], values, rtol=1e-3, atol=1e-7)
        assert values.max() > 0


def test_measuring_works_in_inference_mode(make_llama, capsys):
    model = make_llama(layers=2)
    ids = torch.arange(400)[None] % 97
    expected = measure_layer_budgets(model, ids, by_head=True)
    with torch.inference_mode():
        assert measure_layer_budgets(model, ids, by_head=True) == expected
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("packs", [False, True], ids=["plain", "packed"])
def test_weights_are_copied_where_another_dtype_is_faster(make_llama, monkeypatch, packs):
    from h2okv.models.packed_linear import pack_linear_layers

    model, ids = make_llama(layers=2, attention="sdpa").float(), torch.arange(400)[None] % 97
    model.lm_head.weight = model.model.embed_tokens.weight
    expected = measure_layer_budgets(model, ids, by_head=True)
    if packs and not pack_linear_layers(model):
        pytest.skip("nothing is packed on this processor")
    before, logits = dict(model.named_parameters()), model(ids).logits
    trained = [name for name, parameter in before.items() if parameter.requires_grad]
    dtypes, read = [], _Prompt.read
    monkeypatch.setattr(factors, "_COPIED", range(1 << 20))
    seconds = {torch.float32: 2.0, torch.bfloat16: 1.0}
    monkeypatch.setattr(factors, "_product_seconds", lambda dtype, device: seconds[dtype])

    def note(model, window):
        dtypes.append({parameter.dtype for parameter in model.parameters()})
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return read(model, window)

    monkeypatch.setattr(_Prompt, "read", note)
    copied = measure_layer_budgets(model, ids, by_head=True)
    assert dtypes and all(kinds == {torch.bfloat16} for kinds in dtypes)
    torch.testing.assert_close(torch.tensor(copied), torch.tensor(expected), atol=0.2, rtol=0)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert [name for name, parameter in after.items() if parameter.requires_grad] == trained
    assert torch.equal(model(ids).logits, logits)
    seconds[torch.bfloat16] = 3.0
    assert measure_layer_budgets(model, ids, by_head=True) != copied
    assert dtypes[-1] == {torch.float32}


def test_slopes_are_of_the_lower_convex_hull():
    """The hull at a number is the lowest chord over it, here of all pairs."""
    torch.manual_seed(2)
    losses = torch.rand(3, 12).double()
    slopes = factors._slopes(losses)
    for row, actual in zip(losses.tolist(), slopes.tolist(), strict=True):
        points = [*row, 0.0]
        hull = [
            min(
                points[a] + (points[b] - points[a]) * (x - a) / max(1, b - a)
                for a in range(x + 1) for b in range(x, len(points))
            )
            for x in range(len(points))
        ]  # fmt: skip
        expected = [left - right for left, right in zip(hull, hull[1:], strict=False)]
        assert actual == pytest.approx(expected, abs=1e-9)
