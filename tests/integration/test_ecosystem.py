"""The cache beside the packages and ways of calling that models are used with."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoTokenizer, TextIteratorStreamer, pipeline

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.cache.argument import CACHE
from h2okv.config import CacheConfig
from h2okv.provenance import fingerprint, weight_prints

OPTIONS = {"max_new_tokens": 8, "do_sample": False}


def tokens(length=30, seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, length), generator=generator)


def generate(model, ids, cache=None):
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **OPTIONS
    )


def check(model, config, ids):
    """Compare a large budget with the full cache; check the entries of a small one."""
    expected = generate(model, ids)
    with h2okv.enable(model) as enabled:
        assert enabled is model
        assert torch.equal(generate(model, ids, h2okv.H2OCache(config, 40, 40)), expected)
        for positions in ("original", "rolling"):
            cache = h2okv.H2OCache(model, 4, 4, positions=positions)
            assert generate(model, ids, cache).shape == expected.shape
            cache.check_integrity()
            assert cache.num_cached_tokens == 8
    assert config._attn_implementation == "sdpa"


@pytest.fixture
def model(make_llama):
    return make_llama(attention="sdpa")


@pytest.fixture
def adapted(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    adapters = peft.LoraConfig(
        target_modules=["q_proj", "k_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, adapters).eval()


def test_adapters(adapted, make_llama):
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(task_type="CAUSAL_LM", init_ia3_weights=False)
    for model in (adapted, peft.get_peft_model(make_llama(attention="sdpa"), config).eval()):
        check(model, model.get_base_model().config, tokens())


def test_a_forward_of_a_model_with_adapters_is_checked(adapted):
    """Check that padding is found although PEFT bypasses the model's hooks."""
    ids = tokens(batch=2)
    ids[0, :5] = 0
    with h2okv.enable(adapted), pytest.raises(ValueError, match="padded on the left"):
        adapted(ids, past_key_values=h2okv.H2OCache(adapted, 4, 4))


PROMPT_LEARNING = {
    "PrefixTuningConfig": {},
    "PromptTuningConfig": {},
    "PromptEncoderConfig": {"encoder_hidden_size": 16},
}


@pytest.fixture(params=PROMPT_LEARNING)
def prompted(model, request):
    peft = pytest.importorskip("peft")
    model.set_attn_implementation("h2o")
    options = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"} | PROMPT_LEARNING[request.param]
    return peft.get_peft_model(model, getattr(peft, request.param)(**options)).eval()


def test_prompt_learning_is_refused_however_the_cache_was_made(prompted, tmp_path):
    ids, model = tokens(), prompted.get_base_model()
    message = r"prompt learning \(PEFT's (PREFIX_TUNING|PROMPT_TUNING|P_TUNING)\) puts tokens"
    full = h2okv.H2OCache(model, 5, 5)
    h2okv.prefill(model, ids[:, :9], full)
    full.save(tmp_path / "cache")
    recipe = {"custom_generate": str(h2okv.recipe_path()), "trust_remote_code": True}

    def go_on(cache):
        return prompted.generate(**cache.next_turn(ids), **{CACHE: cache}, **OPTIONS)

    def enable():
        with h2okv.enable(prompted):
            pass

    refused = [
        lambda: h2okv.H2OCache(prompted), lambda: h2okv.check_model(prompted),
        lambda: h2okv.H2OCache.load(tmp_path / "cache", prompted),
        lambda: h2okv.prefill(prompted, ids, h2okv.H2OCache(model)), enable,
        lambda: go_on(h2okv.H2OCache(model)), lambda: go_on(h2okv.H2OCache(prompted.config)),
        lambda: go_on(h2okv.H2OCache.from_config(model.config, CacheConfig())),
        lambda: go_on(h2okv.H2OCache.load(tmp_path / "cache")), lambda: go_on(full.fork(1)),
        lambda: prompted(input_ids=ids, **{CACHE: h2okv.H2OCache(model)}),
        lambda: prompted.generate(input_ids=ids, **recipe, **OPTIONS),
    ]  # fmt: skip
    for call in refused:
        with pytest.raises(ValueError, match=message):
            call()
    expected = model.generate(ids, **OPTIONS)
    with prompted.disable_adapter():  # is the model itself
        cache = h2okv.H2OCache(prompted, 40, 40)
        output = prompted.generate(input_ids=ids, **{CACHE: cache}, **OPTIONS)
    assert torch.equal(output, expected)


def test_weights_of_eight_bits(model):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model.float(), quantization.Int8WeightOnlyConfig())
    check(model, model.config, tokens())
    ids = tokens(40)
    with h2okv.enable(model):
        model.generate(ids, **{CACHE: h2okv.H2OCache(model, "best")}, **OPTIONS)


class PackedWeight(torch.Tensor):
    """A weight as quantization libraries have them: without views, but for `dequantize`."""

    @staticmethod
    def __new__(cls, numbers):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype)

    def __init__(self, numbers):
        self.numbers = numbers

    def __tensor_flatten__(self):
        return ["numbers"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, size, stride):
        return cls(tensors["numbers"])

    def dequantize(self):
        return self.numbers

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten.detach.default:
            return cls(args[0].numbers)
        raise NotImplementedError(f"{operation} of a packed weight")


def test_weights_of_a_tensor_subclass_have_the_prints_of_their_numbers():
    linear = torch.nn.Linear(6, 4)
    expected = fingerprint(linear), weight_prints(linear)
    linear.weight = torch.nn.Parameter(PackedWeight(linear.weight.detach()), requires_grad=False)
    assert (fingerprint(linear), weight_prints(linear)) == expected


def test_offloaded_weights_and_a_cache_from_a_file(model, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    cache = h2okv.H2OCache(model, 6, 6)
    h2okv.prefill(model, tokens(), cache)
    cache.save(tmp_path / "cache")
    with h2okv.enable(model):
        more = cache.next_turn(tokens(9, 1))
        expected = model.generate(**more, past_key_values=cache, **OPTIONS)
    accelerate.cpu_offload(model)
    assert model.device.type == "meta"
    check(model, model.config, tokens())
    loaded = h2okv.H2OCache.load(tmp_path / "cache", model)
    with h2okv.enable(model):
        output = model.generate(**loaded.next_turn(tokens(9, 1)), past_key_values=loaded, **OPTIONS)
    assert torch.equal(output, expected)


def test_threads_with_separate_enable_blocks(model):
    texts = [tokens(20 + n, n) for n in range(8)]
    expected = [generate(model, ids) for ids in texts]

    def generate_with_cache(ids):
        with h2okv.enable(model):
            return generate(model, ids, h2okv.H2OCache(model, 40, 40))

    with ThreadPoolExecutor(4) as pool:
        output = list(pool.map(generate_with_cache, texts))
    assert all(torch.equal(actual, other) for actual, other in zip(output, expected, strict=True))
    assert model.config._attn_implementation == "sdpa" and not model._forward_pre_hooks


@pytest.fixture(scope="module")
def bundled():
    path = str(bundled_model_path())
    return pipeline("text-generation", path, tokenizer=AutoTokenizer.from_pretrained(path))


def test_a_pipeline_with_a_list_of_prompts(bundled):
    """Read a list in one padded batch on one cache."""
    bundled.tokenizer.pad_token = bundled.tokenizer.pad_token or bundled.tokenizer.eos_token
    bundled.tokenizer.padding_side = "left"
    prompts = ["The old house stood at", "It was late"]
    expected = bundled(prompts, batch_size=2, **OPTIONS)
    with h2okv.enable(bundled.model):
        cache = h2okv.H2OCache(bundled.model, 64, 64)
        assert bundled(prompts, batch_size=2, past_key_values=cache, **OPTIONS) == expected


def test_a_streamer(bundled):
    inputs = bundled.tokenizer("The old house", return_tensors="pt", return_token_type_ids=False)
    expected = bundled.model.generate(**inputs, **OPTIONS)[0, inputs.input_ids.shape[1] :]
    streamer = TextIteratorStreamer(bundled.tokenizer, skip_prompt=True)
    cache = h2okv.H2OCache(bundled.model, 64, 64)
    with h2okv.enable(bundled.model):
        bundled.model.generate(**inputs, past_key_values=cache, streamer=streamer, **OPTIONS)
    assert "".join(streamer) == bundled.tokenizer.decode(expected)


def test_lm_eval_hflm_model(bundled):
    """Log-likelihoods come of a forward without a cache, texts of `generate` with ours."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(pretrained=bundled.model, tokenizer=bundled.tokenizer, batch_size=1)
    start = "The old house stood at"

    def log_likelihoods(**options):
        endings = [(start, end) for end in (" the end of the street.", " war with the sea.")]
        options |= {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
        scored = [Instance("loglikelihood", {}, pair, 0) for pair in endings]
        written = [Instance("generate_until", {}, (start, options), 0)]
        return harness.loglikelihood(scored), harness.generate_until(written)

    expected, text = log_likelihoods()
    with h2okv.enable(bundled.model):
        for budget in (64, 2):  # the harness copies the cache
            scores, output = log_likelihoods(
                past_key_values=h2okv.H2OCache(bundled.model, budget, budget)
            )
            for actual, other in zip(scores, expected, strict=True):
                assert actual == (pytest.approx(other[0], abs=1e-3), other[1])
            assert (output == text) == (budget == 64)
