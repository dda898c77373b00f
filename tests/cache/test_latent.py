"""Latent attention (MLA): one kept set for all heads; scores and outputs by the formula."""

import math

import pytest
import torch
from oracle import cache_of
from torch.nn.utils import parametrizations
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import eager_attention_forward

import h2okv
from h2okv.cache.argument import CACHE
from h2okv.engine.model_runner import check_divides
from h2okv.models.packed_linear import pack_linear_layers
from h2okv_lab.analysis.eviction_trace import follow, split_budget

pytestmark = pytest.mark.skipif(CACHE != "cache", reason="needs transformers 5.24")
_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 89, "max_position_embeddings": 256, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 9,
    "initializer_range": 0.3,
}  # fmt: skip
_SEEN = []


def _capture(module, query, key, value, mask, **options):
    _SEEN.append((query, key, value))
    return eager_attention_forward(module, query, key, value, mask, **options)


AttentionInterface.register("latent_capture", _capture)


def _model(layers=2, attention="h2o", model_type="deepseek_v3", **options):
    config = AutoConfig.for_model(model_type, **_SIZES, num_hidden_layers=layers, **options)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def _ids(length, rows=1, seed=1):
    return torch.randint(3, 89, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _read(model, cache, ids, blocks):
    logits, start = [], 0
    for size in blocks:
        logits.append(model(ids[:, start : start + size], cache=cache).logits)
        start += size
    return torch.cat(logits, dim=1)


def _formula(query, key, scale, blocks, heavy, recent):
    """Scores and kept tokens by the definition, in loops over expanded keys ``[HQ, T, D]``."""
    scores, chosen, seen = {}, [], 0
    for size in blocks:
        block = range(seen, seen + size)
        for token in block:
            scores[token] = 0.0
        for i in block:
            visible = chosen + [j for j in block if j <= i]
            for head in range(query.shape[0]):
                logits = [float(query[head, i] @ key[head, j]) * scale for j in visible]
                total = sum(math.exp(logit - max(logits)) for logit in logits)
                for j, logit in zip(visible, logits, strict=True):
                    scores[j] += math.exp(logit - max(logits)) / total
        seen += size
        entries = [*chosen, *block]
        newest = entries[-recent:]
        others = sorted((j for j in entries if j not in newest), key=lambda j: (scores[j], j))
        chosen = sorted([*others[-heavy:], *newest])
    return {j: scores[j] for j in chosen}


@torch.no_grad()
@pytest.mark.parametrize("masks", [False, True])
def test_scores_are_the_formulas_sums_over_all_heads(masks):
    """One layer: what it reads depends on no eviction, so plain attention gives its inputs."""
    blocks, ids = (20, 1, 1, 1, 6, 1), _ids(30)
    model = _model(layers=1, attention="latent_capture")
    _SEEN.clear()
    model(ids, use_cache=False)
    query, key, _ = _SEEN[0]
    scale = model.model.layers[0].self_attn.scaling
    expected = _formula(query[0].double(), key[0].double(), scale, blocks, heavy=5, recent=3)
    model.set_attn_implementation("h2o")
    cache = cache_of(model.config, heavy=5, recent=3, masks=masks)
    _read(model, cache, ids, blocks)
    positions = cache.kept_positions(0)
    assert positions.shape[:2] == (1, 1)
    scores = dict(
        zip(positions.flatten().tolist(), cache.scores(0).flatten().tolist(), strict=True)
    )
    scores.pop(-1, None)
    assert scores.keys() == expected.keys()
    for token, score in expected.items():
        assert scores[token] == pytest.approx(score, abs=1e-4)


def test_a_slot_holds_a_latent_and_a_rotated_part_once():
    model = _model()
    cache = cache_of(model.config, heavy=8, recent=8)
    _read(model, cache, _ids(40), (38, 1, 1))
    layer = cache.layers[0]
    assert layer.keys.shape == (1, 1, 17, 24) and layer.values.shape == (1, 1, 17, 16)
    assert layer.values.untyped_storage().data_ptr() == layer.keys.untyped_storage().data_ptr()
    assert cache.nbytes == 2 * 17 * (24 * 4 + 4 + 4)
    full = DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    _read(model, full, _ids(40), (38, 1, 1))
    num_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in full.layers)
    assert cache.full_nbytes == num_bytes


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_bits": 8}, {"evict_every": 4}, {"positions": "rolling"}, {"scoring": "expected"},
     {"scoring": "value_norm"}, {"policy": "keydiff"}, {"layer_budgets": (0.5, 1.5)}],
    ids=lambda options: next(iter(options.values()), "plain"),
)  # fmt: skip
def test_options_drop_what_they_mask(options):
    model, ids, blocks = _model(), _ids(50, rows=2), (34, 1, 1, 7, 1, 1, 1, 1, 1, 1, 1)
    caches = [
        cache_of(model.config, heavy=6, recent=4, sink=1, masks=masks, **options)
        for masks in (False, True)
    ]
    dropped, masked = (_read(model, cache, ids, blocks) for cache in caches)
    torch.testing.assert_close(dropped, masked, atol=1e-4, rtol=0)
    for index in range(2):
        sets = [
            [set(row.flatten().tolist()) - {-1} for row in cache.kept_positions(index)]
            for cache in caches
        ]
        assert sets[0] == sets[1]
    caches[0].check_integrity()


def test_a_file_a_fork_and_a_batch_go_on_alike(tmp_path):
    model, ids = _model(), _ids(40)
    cache = cache_of(model.config, heavy=6, recent=4)
    _read(model, cache, ids[:, :30], (28, 1, 1))
    cache.save(tmp_path / "cache.safetensors")
    loaded = h2okv.H2OCache.load(tmp_path / "cache.safetensors", model)
    forked = cache.fork(2)
    blocks = (1, 1, 5, 1)
    expected = _read(model, cache, ids[:, 30:], blocks)
    torch.testing.assert_close(_read(model, loaded, ids[:, 30:], blocks), expected)
    both = _read(model, forked, ids[:, 30:].repeat(2, 1), blocks)
    torch.testing.assert_close(both, expected.repeat(2, 1, 1), atol=1e-5, rtol=0)


class _Scaled(torch.nn.Linear):
    def forward(self, states):
        return super().forward(states) * 2


def _change_class(linear, folder):
    linear.__class__ = _Scaled


def _replace_forward(linear, folder):
    forward = linear.forward
    linear.forward = lambda states: forward(states) * 2


def _scale_in_hook(linear, folder):
    linear.register_forward_hook(lambda module, args, output: output * 2)


def _steer_in_hook(linear, folder):
    vector = torch.randn(linear.out_features, generator=torch.Generator().manual_seed(5))
    linear.register_forward_hook(lambda module, args, output: output + vector)


def _scale_before(linear, folder):
    linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _add_bias(linear, folder):
    generator = torch.Generator().manual_seed(5)
    linear.bias = torch.nn.Parameter(torch.randn(linear.out_features, generator=generator))


def _parametrize(linear, folder):
    parametrizations.weight_norm(linear)
    linear.parametrizations.weight.original0.mul_(2)


def _offload(linear, folder):
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(linear, execution_device="cpu")
    assert linear.weight.is_meta


def _offload_to_disk(linear, folder):
    accelerate = pytest.importorskip("accelerate")
    accelerate.disk_offload(linear, folder / str(id(linear)), execution_device="cpu")
    assert linear.weight.is_meta


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        _change_class, _replace_forward, _scale_in_hook, _steer_in_hook, _scale_before, _add_bias,
        _parametrize, _offload, _offload_to_disk,
    ],
)  # fmt: skip
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_what_expands_latents_is_its_forward_not_its_weight(model_type, change, tmp_path):
    """Adapters, hooks, offloading and few bits may change what a plain matrix would give."""
    model, ids, blocks = _model(model_type=model_type), _ids(30, rows=2), (25, 1, 1, 3)
    plain = _read(model, cache_of(model.config, heavy=99, recent=99), ids, blocks)
    for layer in model.model.layers:
        change(layer.self_attn.kv_b_proj, tmp_path)
    cache = cache_of(model.config, heavy=99, recent=99)
    logits = _read(model, cache, ids, blocks)
    model.set_attn_implementation("sdpa")
    expected = _read(model, DynamicCache(config=model.config), ids, blocks)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert torch.allclose(plain, expected, atol=1e-3) == (change in (_offload, _offload_to_disk))


@pytest.mark.parametrize(
    "options", [{}, {"scoring": "expected"}, {"positions": "rolling"}], ids=str
)
@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_an_offloaded_model_gives_what_it_gives_in_memory(offload, options, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, ids, blocks = _model(), _ids(40), (30, 1, 1, 5, 1, 1, 1)
    caches = [cache_of(model.config, heavy=6, recent=4, **options) for _ in range(2)]
    expected = _read(model, caches[0], ids, blocks)
    arguments = (tmp_path,) if offload == "disk_offload" else ()
    hooked = {"execution_device": "cpu", "offload_buffers": True}
    getattr(accelerate, offload)(model, *arguments, **hooked)
    torch.testing.assert_close(_read(model, caches[1], ids, blocks), expected)


@torch.no_grad()
def test_a_hook_that_is_not_linear_is_refused():
    model = _model()
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: out.clamp(-1, 1))
    with pytest.raises(ValueError, match="kv_b_proj with its hooks and adapters must be linear"):
        model(_ids(30), cache=cache_of(model.config, heavy=6, recent=4))


@torch.no_grad()
def test_adapters_of_the_matrix_that_expands_latents_count():
    peft = pytest.importorskip("peft")
    model, ids, blocks = _model(), _ids(30), (28, 1, 1)
    options = {"target_modules": ["kv_b_proj"], "init_lora_weights": False, "lora_dropout": 0.5}
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, **options)).eval()
    cache = cache_of(model.config, heavy=99, recent=99)
    logits = _read(model, cache, ids, blocks)
    model.base_model.model.set_attn_implementation("sdpa")
    expected = _read(model, DynamicCache(config=model.config), ids, blocks)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_packed_weights_leave_the_matrix_that_attention_reads():
    model, ids, blocks = _model(), _ids(30), (28, 1, 1)
    options = {"heavy": 6, "recent": 4}
    expected = _read(model, cache_of(model.config, **options), ids, blocks)
    if not pack_linear_layers(model):
        pytest.skip("this processor packs no weights")
    assert all(type(m.self_attn.kv_b_proj) is torch.nn.Linear for m in model.model.layers)
    logits = _read(model, cache_of(model.config, **options), ids, blocks)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_ranks_are_refused(monkeypatch):
    """Each would choose by the attention of its own heads."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one set of latents for all heads"):
        check_divides(_model().config)


def test_a_trace_has_one_row_for_a_layer():
    trace = follow(_model(), _ids(20), "h2o", split_budget(8), recorded=2)
    assert trace.gone_at.shape == (2, 1, 20)


def test_budgets_by_head_are_refused():
    with pytest.raises(ValueError, match="1 KV heads"):
        cache_of(_model().config, layer_budgets=[[1.0] * 4] * 2)


def test_another_attention_is_noticed_before_a_token_is_made():
    model = _model(attention="eager")
    with pytest.raises(ValueError, match="attention is not 'h2o'"):
        model(_ids(9), cache=cache_of(model.config))


@pytest.mark.slow
@torch.no_grad()
def test_steps_compile_in_one_graph():
    model, ids = _model(), _ids(40)
    cache, plain = (cache_of(model.config, heavy=6, recent=4) for _ in range(2))
    expected = _read(model, plain, ids, (30,) + (1,) * 10)
    _read(model, cache, ids[:, :30], (30,))
    step = torch.compile(model.forward, fullgraph=True, backend="eager")
    logits = [step(ids[:, i : i + 1], cache=cache).logits for i in range(30, 40)]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected[:, 30:], atol=1e-4, rtol=0)
