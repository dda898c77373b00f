"""Positions inside the cache: precision, blocks, and what is refused."""

import copy

import pytest
import torch
from oracle import cache_of
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import h2okv
from h2okv.cache import rope
from h2okv.ops import dispatch
from h2okv.ops.rope import rotate


def tokens(length, seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, length), generator=generator)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("frequencies", [torch.float32, torch.bfloat16])
def test_a_million_tokens_in_bf16_are_as_precise_as_a_short_text(make_llama, frequencies):
    """One layer, one head: the oracle reads the kept tokens again as a short text in fp32."""
    model = make_llama(1, 1, layers=1, sharpness=20.0)
    rotary = model.model.rotary_emb
    kept_fp32 = rotary.inv_freq.clone()
    model.to(torch.bfloat16)  # rounds the frequencies too; from_pretrained(dtype=...) does not
    if frequencies == torch.float32:
        rotary.inv_freq = kept_fp32
    precise = copy.deepcopy(model).float()
    precise.set_attn_implementation("eager")
    rough = copy.deepcopy(model)
    rough.set_attn_implementation("eager")
    cache = cache_of(model.config, heavy=24, recent=24, positions="rolling", evict_every=400)
    total = 1_000_000
    ids = tokens(total + 8)
    h2okv.prefill(model, ids[:, :total], cache)
    sensitivity = []
    for at in range(total, total + 8):
        stored = cache.kept_positions(0)[0, 0].sort().values
        stored = torch.cat([stored[stored >= 0].long(), torch.tensor([at])])
        logits = model(ids[:, at : at + 1], past_key_values=cache).logits[0, -1].float()
        expected = precise(ids[:, stored], use_cache=False).logits[0, -1]
        rounded = rough(ids[:, stored], use_cache=False).logits[0, -1].float()
        other_order = torch.cat([stored[:-1].flip(0), stored[-1:]])
        rotated = precise(ids[:, other_order], use_cache=False).logits[0, -1]
        bound = 2 * (rounded - expected).abs().max() + 0.01 * expected.abs().max()
        assert (logits - expected).abs().max() <= bound
        sensitivity.append(float((rotated - expected).abs().max() / bound))
    assert max(sensitivity) > 3  # positions matter for this model, so that wrong ones would show
    assert cache.num_seen_tokens == total + 8
    assert cache.num_cached_tokens == 48 + 8  # since the cut at the end of the prompt
    cache.check_integrity()


@torch.no_grad()
def test_a_block_never_sees_more_than_the_budget_and_itself(make_llama, monkeypatch):
    seen = []
    plain = dispatch.blockwise_attention_with_scores

    def spy(query, key, *args):
        seen.append(key.shape[2])
        return plain(query, key, *args)

    monkeypatch.setattr(dispatch, "blockwise_attention_with_scores", spy)
    model = make_llama()
    cache = cache_of(model.config, 5, 5, evict_every=8)
    h2okv.prefill(model, tokens(200), cache)
    assert max(seen) <= 10 + 2 * 8  # slots for a span, and a block of one
    assert cache.num_cached_tokens == 10


@torch.no_grad()
def test_prefill_takes_fractions_of_the_whole_prompt(make_llama):
    model = make_llama()
    cache = cache_of(model.config, 0.1, 0.1, evict_every=10)
    assert h2okv.prefill(model, tokens(100), cache).shape == (1, 97)
    assert cache.num_cached_tokens == 20


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_the_budget_a_rank_is_a_position(make_llama, dtype):
    """A model that was cast as a whole has rounded frequencies, which ranks must have too."""
    model = make_llama(sharpness=20.0).to(dtype)
    ids, logits = tokens(500), []
    for positions in ("original", "rolling"):
        cache = cache_of(model.config, 250, 250, positions=positions)
        chunks = [ids[:, :400], ids[:, 400:480], *ids[:, 480:].split(1, dim=1)]
        outputs = [model(chunk, past_key_values=cache).logits for chunk in chunks]
        logits.append(torch.cat(outputs, dim=1).float())
    original, rolling = logits
    error = (rolling - original).norm() / original.norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.04)


@torch.no_grad()
def test_far_past_the_window_it_stays_finite_and_whole(make_llama):
    model = make_llama()  # window 512
    cache = cache_of(model.config, 20, 20, positions="rolling", evict_every=64)
    logits = h2okv.prefill(model, tokens(3000), cache)
    output = model.generate(
        torch.cat([tokens(3000), logits.argmax(-1, keepdim=True)], dim=1),
        past_key_values=cache,
        max_new_tokens=30,
        do_sample=False,
    )
    assert output.shape[1] == 3031 and cache.num_seen_tokens == 3030
    cache.check_integrity()


def test_what_does_not_fit_the_window_is_refused(make_llama):
    model = make_llama()
    cache = cache_of(model.config, 20, 20, positions="rolling")
    with pytest.raises(ValueError, match=r"block of 600 tokens.*512.*evict_every=472"):
        model(tokens(600), past_key_values=cache)
    cache = cache_of(model.config, 20, 20, positions="rolling", evict_every=500)
    with pytest.raises(ValueError, match="evict_every=500 must fit .* lower .* or evict_every"):
        model(tokens(600), past_key_values=cache)
    cache = cache_of(model.config, 300, 300, positions="rolling")
    with pytest.raises(ValueError, match="budget of 600 tokens leaves no room"):
        model(tokens(9), past_key_values=cache)


@torch.no_grad()
def test_a_refused_turn_loses_nothing(make_llama):
    model = make_llama()
    cache = cache_of(model.config, 20, 20, positions="rolling")
    model(tokens(90), past_key_values=cache)
    untouched = cache.fork(1)
    with pytest.raises(ValueError, match="block of 480 tokens after 40 entries"):
        model(tokens(480), past_key_values=cache)
    step = tokens(1)
    expected = model(step, past_key_values=untouched).logits
    torch.testing.assert_close(model(step, past_key_values=cache).logits, expected)
    cache.check_integrity()


@torch.no_grad()
def test_a_refused_prompt_leaves_an_empty_cache(make_llama):
    model = make_llama()
    used, new = (cache_of(model.config, 0.1, 0.1, positions="rolling") for _ in range(2))
    with pytest.raises(ValueError, match="evict_every"):
        model(tokens(600), past_key_values=used)
    logits = [model(tokens(90, batch=2), past_key_values=cache).logits for cache in (used, new)]
    assert torch.equal(*logits)
    assert used.num_cached_tokens == 18


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "rolled"}, "positions='rolled' is unknown; choose one of original"),
        ({"positions": "rolling", "policy": "full"}, "policy='full' evicts nothing"),
        ({"positions": "clamped"}, "no learned positions to stop at"),
        ({"evict_every": 0}, "evict_every=0 is not a number of tokens"),
        ({"evict_every": 0.5}, "evict_every=0.5 is not a number of tokens"),
        ({"evict_every": True}, "evict_every=True is not a number of tokens"),
        ({"evict_every": "often"}, "evict_every must be tokens.*got 'often'"),
        ({"whole_prompts": True}, "whole_prompts must have an evict_every, got None"),
    ],
)
def test_bad_options_are_refused(make_llama, options, message):
    with pytest.raises(ValueError, match=message):
        cache_of(make_llama().config, **options)


@torch.no_grad()
def test_after_a_reset_another_model_may_use_the_cache(make_llama):
    other = make_llama(rope_parameters={"rope_type": "default", "rope_theta": 50.0})
    used, new = (cache_of(other.config, 6, 6, positions="rolling", evict_every=9) for _ in range(2))
    make_llama()(tokens(40), past_key_values=used)
    used.reset()
    logits = [other(tokens(40), past_key_values=cache).logits for cache in (used, new)]
    assert torch.equal(*logits)


@torch.no_grad()
def test_position_ids_that_a_caller_overwrites_in_place(make_llama):
    model = make_llama(kv_heads=1)
    ids = tokens(40)
    results = []
    for reuse in (False, True):
        cache = cache_of(model.config, 6, 6, positions="rolling")
        position_ids = torch.empty(1, 1, dtype=torch.long)
        for at in range(40):
            step = position_ids.fill_(at) if reuse else torch.tensor([[at]])
            logits = model(ids[:, at : at + 1], position_ids=step, past_key_values=cache).logits
        results.append(logits)
    assert torch.equal(*results)


def _with_longer_table(model, length, new_length):
    longer = copy.deepcopy(model)
    for module in longer.modules():
        table = getattr(module, "weight", None)
        if isinstance(module, torch.nn.Embedding) and length <= len(table) < length + 3:
            last = table[-1:].expand(new_length - length, -1)
            module.weight = torch.nn.Parameter(torch.cat([table, last]))
    longer.config.max_position_embeddings = new_length
    return longer


@torch.no_grad()
def test_dynamic_scaling_is_not_moved_by_what_else_the_model_reads(make_llama):
    """The model's frequencies remember the longest text that it has met."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = make_llama(rope_parameters=rope, sharpness=2.0)
    model.config.max_position_embeddings = 30
    model = type(model)(model.config).eval()
    ids, logits = tokens(100), []
    for others in (False, True):
        cache = cache_of(model.config, 6, 6, positions="rolling", evict_every=10)
        h2okv.prefill(model, ids[:, :20], cache)
        with h2okv.enable(model):
            for at in range(20, 100):
                if others:
                    model(tokens(90), use_cache=False)
                step = model(ids[:, at : at + 1], past_key_values=cache)
                logits.append(step.logits)
    torch.testing.assert_close(torch.cat(logits[:80]), torch.cat(logits[80:]))


@torch.no_grad()
def test_the_models_own_rounding_is_undone(make_llama):
    """In bf16 the model rounds its cosines; the inverse must divide by what it multiplied by."""
    model = make_llama(1, 1, layers=1).to(torch.bfloat16)
    cache = cache_of(model.config, 6, 6, positions="rolling")
    model(tokens(9), past_key_values=cache)
    position_ids = torch.arange(5000, 5009)[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), position_ids)
    factors = torch.stack([cos[..., :8], sin[..., :8]], dim=-1).float()
    key = torch.randn(1, 1, 9, 16)
    undo = cache.layers[0].rotations.rolling.of_text(position_ids)
    torch.testing.assert_close(rotate(rotate(key, factors), undo), key, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["opt", "gpt2", "gpt_bigcode"])
def test_learned_positions_stop_at_the_last_one(kind):
    sizes = {"opt": {"hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32}}
    config = AutoConfig.for_model(
        kind, vocab_size=97, num_hidden_layers=2, num_attention_heads=4, n_embd=32, n_inner=32,
        max_position_embeddings=40, n_positions=40, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, **sizes.get(kind, {}),
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="h2o").eval()
    ids = tokens(100)
    cache = cache_of(config, 6, 6, positions="clamped", evict_every=16)
    with pytest.raises(ValueError, match="call h2okv.enable"):
        model(ids[:, :9], past_key_values=cache)
    cache.reset()
    logits = h2okv.prefill(model, ids, cache)
    # The same with a model whose table of positions is longer and repeats its last row.
    longer = _with_longer_table(model, 40, 100)
    plain = cache_of(longer.config, 6, 6, evict_every=16)
    torch.testing.assert_close(logits, h2okv.prefill(longer, ids, plain))
    with h2okv.enable(model):
        text = model.generate(
            torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1),
            past_key_values=cache,
            max_new_tokens=5,
            do_sample=False,
        )
    assert text.shape == (1, 106)
    with pytest.raises(ValueError, match="positions='rolling'.*positions='clamped'"):
        cache_of(config, positions="rolling")


def _doubles_its_keys(query, key, cos, sin, **options):
    return query, key * (1 + cos[:, None] ** 2)


def _needs_more(query, key, cos, sin, **options):
    raise KeyError("full_attention")


@torch.no_grad()
@pytest.mark.parametrize("rotates", [_doubles_its_keys, _needs_more])
@pytest.mark.parametrize(
    ("options", "named", "remedy"),
    [
        ({"positions": "rolling"}, "positions='rolling'", "use positions='original'."),
        ({"policy": "best", "layer_budgets": "even"}, "scoring='expected' (of policy='best')",
         "use policy='h2o' (--policy h2o), without that scoring."),
        ({"scoring": "expected", "positions": "rolling"},
         "positions='rolling' and scoring='expected' (of policy='best')",
         "use positions='original' and policy='h2o' (--policy h2o), without that scoring."),
    ],
    ids=["rolling", "best", "both"],
)  # fmt: skip
def test_an_unknown_rotation_is_refused_by_the_options_given(
    make_llama, monkeypatch, rotates, options, named, remedy
):
    model, rotate_keys = make_llama(), modeling_llama.apply_rotary_pos_emb
    calls = []

    def apply(*args, **kwargs):  # the model's first layer is probed in its forward
        calls.append(args)
        return (rotate_keys if len(calls) == 1 else rotates)(*args, **kwargs)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply)
    with pytest.raises(ValueError) as caught:
        model(tokens(9), past_key_values=cache_of(model.config, 6, 6, **options))
    assert str(caught.value) == (
        f"{named}: how LlamaAttention rotates its keys must be known, and it does so in another way"
        f" than other models; {remedy}"
    )


@torch.no_grad()
@pytest.mark.parametrize("options", [{"positions": "rolling"}, {"scoring": "expected"}], ids=str)
def test_a_module_is_probed_once_for_all_caches(make_llama, monkeypatch, options):
    probed, probe = [], rope._probe
    monkeypatch.setattr(rope, "_probe", lambda *args: probed.append(args[1]) or probe(*args))
    model = make_llama(layers=3)

    def read():
        cache = cache_of(model.config, 6, 6, **options)
        logits = model(tokens(30), past_key_values=cache).logits
        return logits, cache.kept_positions(2)

    first = read()
    assert probed == [0, 1, 2]
    for again, expected in zip(read(), first, strict=True):
        assert again.equal(expected)
    assert probed == [0, 1, 2]
    model.to(torch.float32)
    read()
    assert probed == [0, 1, 2] * 2
    # Rotary embeddings that were replaced may rotate in another way.
    model.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    read()
    assert probed == [0, 1, 2] * 3


@torch.no_grad()
def test_layers_share_the_rotations_of_a_forward(make_llama, monkeypatch):
    computed, move = [], rope.Rotation.moved
    monkeypatch.setattr(
        rope.Rotation, "moved", lambda *args: computed.append(args[1]) or move(*args)
    )
    model = make_llama(layers=3)
    cache = cache_of(model.config, 6, 6, scoring="expected")
    with h2okv.enable(model):
        h2okv.prefill(model, tokens(30), cache)
    assert [ids[0].tolist() for ids in computed] == [list(range(30))]
