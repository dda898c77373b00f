"""H2O inside vLLM, against vLLM's full attention and against `H2OCache`: `make vllm-test`.

Not part of the ordinary tests: it needs vLLM in a separate environment, and every engine takes
almost a minute to start. `H2OKV_VLLM_MODEL` names another Llama than the bundled one.
"""

import contextlib
import functools
import json
import os

import pytest
import torch
import vllm
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from vllm import LLM, SamplingParams
from vllm.config import CompilationMode
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm_plugin.cpu_environment import CPU_ENVIRONMENT

import h2okv
from h2okv.assets import bundled_model_path, sample_prompt
from h2okv.config import CacheConfig
from h2okv.vllm_plugin import TESTED, missing_names

MODEL = os.environ.get("H2OKV_VLLM_MODEL", str(bundled_model_path()))
LENGTH, NEW = 512, 24
SMALL = {"heavy": 16, "recent": 16}


@pytest.fixture(scope="module", autouse=True)
def _environment():
    """Set the variables that vLLM needs on a CPU; its processes inherit them."""
    os.environ.pop("TRITON_INTERPRET", None)
    # An engine of this process starts in a quarter of the time; the server's has processes.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def test_a_batch_of_single_tokens_may_be_one_graph():
    from h2okv.vllm_plugin.layer import AttentionCGSupport, MetadataBuilder

    support = MetadataBuilder.get_cudagraph_support(None, None)
    assert support == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


@contextlib.contextmanager
def engine(setting, model=MODEL, **options):
    """Yield an engine, with H2O if there is a setting, and shut it down."""
    if setting is not None:
        options.setdefault("additional_config", {"h2okv": setting})
    defaults = {"dtype": "float32", "max_model_len": LENGTH, "max_num_batched_tokens": 2 * LENGTH}
    defaults |= {"max_num_seqs": 8, "enforce_eager": True, "disable_log_stats": True}
    llm = LLM(model=str(model), **(defaults | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def prompts_of(lengths, vocabulary=None):
    """Return token ids: excerpts of a novel, or random ones for a random model."""
    if vocabulary is not None:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    ids = AutoTokenizer.from_pretrained(MODEL)(sample_prompt())["input_ids"]
    return [ids[97 * index : 97 * index + n] for index, n in enumerate(lengths)]


LENGTHS = (150, 61, 203, 33, 17, 96, 128, 1)


def greedy(new=NEW, **options):
    # Not min_tokens, which would forbid the end of the text instead of ignoring it.
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, **options)


def generate(llm, prompts, **options):
    """Return the new tokens of each prompt."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = llm.generate(inputs, greedy(), use_tqdm=False, **options)
    return [list(result.outputs[0].token_ids) for result in results]


def expected(prompts, model=MODEL, new=NEW, **options):
    """Return the same by `H2OCache`, one prompt after another."""
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="h2o"
    )
    loaded.generation_config.eos_token_id = None
    texts = []
    for prompt in prompts:
        cache = h2okv.H2OCache(loaded, **{"evict_every": None} | options)
        ids = torch.tensor([prompt])
        text = loaded.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
            max_new_tokens=new, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        texts.append(text[0, len(prompt) :].tolist())
    return texts


def test_this_vllm_has_the_names_that_the_plug_in_needs():
    assert missing_names() == []
    assert vllm.__version__.startswith(TESTED)


@pytest.fixture(scope="module")
def full():
    """Yield vLLM's own texts, with the plug-in installed but inactive."""
    prompts = prompts_of(LENGTHS)
    with engine(None) as llm:
        config = llm.llm_engine.vllm_config
        assert config.model_config.hf_config.architectures == ["LlamaForCausalLM"]
        assert config.scheduler_config.scheduler_cls is None
        assert config.cache_config.enable_prefix_caching
        yield generate(llm, prompts)


def test_a_budget_above_the_text_gives_full_attention(full):
    with engine({"heavy": 200, "recent": 200}) as llm:
        assert generate(llm, prompts_of(LENGTHS)) == full


def test_requests_that_queue_for_blocks(full):
    """Run eight requests on five blocks, one of them unused: blocks are reused."""
    prompts = prompts_of(LENGTHS)
    texts = expected(prompts, **SMALL)
    assert texts != full, "nothing would be seen of the eviction"
    with engine(SMALL, num_gpu_blocks_override=5) as llm:
        assert generate(llm, prompts) == texts
        assert generate(llm, prompts[::-1]) == texts[::-1]
        for prompt, text in list(zip(prompts, texts, strict=True))[:3]:
            assert generate(llm, [prompt]) == [text], "alone it is another text than in a batch"
        _abort_and_resubmit(llm, prompts, texts)
        _interrupt(llm, prompts[:3], texts[:3])
        _sample(llm, prompts[0])


def _add(llm, prompts, name):
    for index, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"{name}{index}", {"prompt_token_ids": prompt}, greedy())


def _finish(llm):
    """Run until all requests are finished; return new tokens by request name."""
    done = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
    return done


def _abort_and_resubmit(llm, prompts, texts):
    """Abort requests in the middle; later ones on their blocks are not affected."""
    _add(llm, prompts[:4], "gone")
    for _ in range(6):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["gone0", "gone2"])
    _add(llm, [prompts[2], prompts[0]], "again")
    done = _finish(llm)
    assert done["again0"] == texts[2] and done["again1"] == texts[0]
    assert done["gone1"] == texts[1] and done["gone3"] == texts[3]


def _interrupt(llm, prompts, texts):
    """Preempt requests in the middle; they read their own tokens again, one by one."""
    _add(llm, prompts, "early")
    counts: dict[str, int] = {}
    while len(counts) < len(prompts) or min(counts.values()) < 10:
        counts |= {
            output.request_id: len(output.outputs[0].token_ids) for output in llm.llm_engine.step()
        }
    assert max(counts.values()) < NEW
    assert llm.reset_prefix_cache(reset_running_requests=True)
    done = _finish(llm)
    assert [done[f"early{index}"] for index in range(len(prompts))] == texts


def _sample(llm, prompt):
    """Draw several samples of one prompt, which are separate requests; a seed repeats them."""
    params = SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=8, logprobs=2)
    first, again = (
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs
        for _ in range(2)
    )
    assert [list(output.token_ids) for output in first] == [
        list(output.token_ids) for output in again
    ]
    assert len({tuple(output.token_ids) for output in first}) > 1


def test_prompts_are_cut_by_evict_every_only():
    prompts = prompts_of(LENGTHS)
    texts = expected(prompts, evict_every=24, **SMALL)
    assert texts != expected(prompts, **SMALL), "nothing would be seen of the cuts"
    setting = SMALL | {"evict_every": 24}
    # A step has room for two chunks and some: neighbours would cut everything differently.
    with engine(setting, max_num_batched_tokens=61, max_num_seqs=4) as llm:
        assert generate(llm, prompts) == texts
        assert generate(llm, prompts[3:]) == texts[3:]
        assert generate(llm, prompts[2:3]) == texts[2:3]
        _interrupt(llm, prompts[:3], texts[:3])


def test_prompts_longer_than_a_step_get_a_default_chunk():
    prompts = prompts_of(LENGTHS[:4])
    with engine(SMALL, max_num_batched_tokens=64) as llm:
        chunk = llm.llm_engine.vllm_config.additional_config["h2okv"]["evict_every"]
        assert chunk == 64 - 8
        assert generate(llm, prompts) == expected(prompts, evict_every=chunk, **SMALL)


OTHERS = [{"policy": policy} for policy in ("heavy", "recent", "sink_recent", "random", "strided")]
OTHERS += [{"scoring": scoring} for scoring in ("mean", "decay", "value_norm", "expected")]
OTHERS += [{"policy": "best"}, {"sink": 4}, {"evict_every": 32}, {"evict_every": 1}]


def by_head(num_layers=6, num_heads=2):
    """Return unlike factors for all heads."""
    factors = [[0.4 + (3 * n + h) % 4 / 2 for h in range(num_heads)] for n in range(num_layers)]
    mean = sum(map(sum, factors)) / num_layers / num_heads
    return [[factor / mean for factor in layer] for layer in factors]


@pytest.mark.parametrize("options", OTHERS, ids=lambda case: "-".join(map(str, case.values())))
def test_every_policy_and_scoring(options):
    prompts = prompts_of(LENGTHS)
    with engine(SMALL | options) as llm:
        assert generate(llm, prompts) == expected(prompts, **SMALL, **options)


def shape_of(model):
    config = AutoConfig.from_pretrained(model)
    return config.num_hidden_layers, config.num_key_value_heads


def test_budgets_by_head_of_a_file(tmp_path):
    """Compare what is kept too, in all layers and heads, for ten texts while they are decoded."""
    file = tmp_path / "layers.json"
    file.write_text(json.dumps(by_head(*shape_of(MODEL))))
    options = SMALL | {"policy": "best", "layer_budgets": str(file)}
    prompts = prompts_of([*LENGTHS, 77, 181])
    with engine(options, max_num_seqs=16) as llm:
        config = CacheConfig.from_dict(llm.llm_engine.vllm_config.additional_config["h2okv"])
        assert config.is_by_head
        _add(llm, prompts, "text")
        for _ in range(12):
            llm.llm_engine.step()
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        requests, manager = scheduler.running, scheduler.kv_cache_manager
        texts = [request.all_token_ids[: request.num_computed_tokens] for request in requests]
        blocks = [manager.get_block_ids(request.request_id)[0][-1] for request in requests]
        (stored,) = llm.apply_model(functools.partial(_stored, blocks=blocks, texts=texts))
        done = _finish(llm)
    assert len(requests) == 10 and min(map(len, texts)) > 8
    factors = {"layer_budgets": config.layer_budgets}
    texts_of = expected(prompts, **options | factors)
    assert [done[f"text{index}"] for index in range(10)] == texts_of
    loaded = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="h2o"
    )
    for request, text, positions in zip(requests, texts, stored, strict=True):
        cache = h2okv.H2OCache.from_config(loaded, config)
        start = request.num_prompt_tokens
        with torch.inference_mode():
            for tokens in (text[:start], *([token] for token in text[start:])):
                loaded(torch.tensor([list(tokens)]), past_key_values=cache)
        assert positions == [_positions(layer.state) for layer in cache.layers]


def _positions(state):
    """Return the sorted positions that each head holds of one sequence."""
    (positions,) = state.by_head("positions")
    return [
        sorted(position for position in head if position >= 0) for head in positions[0].tolist()
    ]


def _stored(model, blocks, texts):
    """Return what each layer and head of a model in vLLM holds of each request."""
    pool = next(module.pool for module in model.modules() if getattr(module, "pool", None))
    return [
        [
            _positions(layer._copies(torch.tensor([block]), torch.tensor([len(text)])))
            for layer in pool.layers
        ]
        for block, text in zip(blocks, texts, strict=True)
    ]


def test_compiled_models_give_the_same_tokens():
    prompts = prompts_of(LENGTHS)
    options = SMALL | {"policy": "best", "layer_budgets": by_head(*shape_of(MODEL))}
    with engine(options, enforce_eager=False) as llm:
        mode = llm.llm_engine.vllm_config.compilation_config.mode
        assert mode != CompilationMode.NONE
        assert generate(llm, prompts) == expected(prompts, **options)


EVERY = 32


class _Still:
    """A stream or an event of a GPU, for a CPU that waits for nothing."""

    def __init__(self, *args, **options):
        pass

    def record(self, *args):
        pass

    synchronize = wait_stream = record


@pytest.mark.parametrize("options", [{}, {"evict_every": EVERY, "policy": "best"}], ids=str)
def test_the_next_step_is_scheduled_while_one_runs(options, monkeypatch):
    """As vLLM does on GPUs; on a CPU, where it is off, the order of all calls is the same."""
    from vllm.platforms import current_platform

    check = current_platform.check_and_update_config

    def turned_on(vllm_config):
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(current_platform, "check_and_update_config", turned_on)
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, _Still)
    monkeypatch.setattr(torch.cuda, "current_stream", _Still)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    prompts, setting = prompts_of(LENGTHS), SMALL | options
    texts = expected(prompts, **setting)
    with engine(setting, num_gpu_blocks_override=24, max_num_seqs=3) as llm:
        core = llm.llm_engine.engine_core.engine_core
        assert isinstance(core.scheduler, AsyncScheduler) and core.batch_queue is not None
        for _ in range(2):
            assert generate(llm, prompts) == texts
        _abort_and_resubmit(llm, prompts, texts)
        _interrupt(llm, prompts[:3], texts[:3])


@pytest.mark.parametrize("policy", ["h2o", "best"])
def test_requests_go_on_from_cached_states(policy):
    beginning, *others = prompts_of([203, 50, 61, 33, 40])
    prompts = [beginning + other for other in others] + [beginning, beginning[:100], others[0]]
    options = SMALL | {"evict_every": EVERY, "policy": policy}
    texts = expected(prompts, **options)
    with engine(options, num_gpu_blocks_override=24, max_num_seqs=3) as llm:
        assert llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
        for _ in range(2):
            assert generate(llm, prompts) == texts
        results = llm.generate([{"prompt_token_ids": prompts[0]}], greedy(), use_tqdm=False)
        assert results[0].num_cached_tokens >= 192, "a prompt that was just read is known"
        assert list(results[0].outputs[0].token_ids) == texts[0]
        # A text's own continuation begins where its last multiple was.
        turn = prompts[0] + texts[0] + others[1]
        (again,) = expected([turn], **options)
        (result,) = llm.generate([{"prompt_token_ids": turn}], greedy(), use_tqdm=False)
        assert list(result.outputs[0].token_ids) == again
        assert result.num_cached_tokens == (len(prompts[0] + texts[0]) - 1) // EVERY * EVERY
        _interrupt(llm, prompts[:3], texts[:3])
        assert llm.reset_prefix_cache()
        assert generate(llm, prompts) == texts
    with engine(options, enable_prefix_caching=False) as llm:
        assert generate(llm, prompts) == texts
        results = llm.generate([{"prompt_token_ids": prompts[0]}], greedy(), use_tqdm=False)
        assert not results[0].num_cached_tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_few_bits_the_first_token_is_as_likely(dtype):
    """Compare first tokens only: vLLM's matrix products round differently from transformers'."""
    prompts = prompts_of(LENGTHS)
    loaded = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="h2o"
    )
    with engine(SMALL | {"evict_every": 24}, dtype=dtype) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = llm.generate(inputs, greedy(4, logprobs=1), use_tqdm=False)
    for prompt, result in zip(prompts, results, strict=True):
        cache = h2okv.H2OCache(loaded.config, evict_every=24, **SMALL)
        with torch.inference_mode():
            logits = loaded(torch.tensor([prompt]), past_key_values=cache).logits[0, -1]
        token = result.outputs[0].token_ids[0]
        likely = result.outputs[0].logprobs[0][token].logprob
        assert likely == pytest.approx(float(logits.log_softmax(-1)[token]), abs=0.15)


@pytest.fixture
def apart(monkeypatch):
    """Give engines processes: vLLM's Transformers backend changes the classes of transformers."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


def test_vllms_transformers_backend(apart):
    prompts = prompts_of(LENGTHS)
    with engine(SMALL, model_impl="transformers") as llm:
        assert llm.llm_engine.vllm_config.model_config.using_transformers_backend()
        assert generate(llm, prompts) == expected(prompts, **SMALL)


SHAPE = {
    "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 200,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"sliding_window": None}),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
}


def tiny(family, folder, **options):
    """Save a random model of a family whose attention is far from uniform."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**(SHAPE | extra | options))).eval()
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data *= 6
        if "qkv_proj" in name:  # not the values, of which there are as many as keys
            weight.data[: weight.shape[0] * 3 // 4] *= 6
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("scoring", ["sum", "expected"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, scoring, tmp_path, apart):
    if family == "olmo2" and scoring == "expected":
        pytest.skip("vLLM has it by its Transformers backend, where the scoring is refused")
    path, prompts = tiny(family, tmp_path), prompts_of(LENGTHS, 200)
    setting = SMALL | {"scoring": scoring}
    with engine(setting, path, skip_tokenizer_init=True) as llm:
        assert generate(llm, prompts) == expected(prompts, path, **setting)


def test_two_ranks_each_with_its_own_heads(apart):
    prompts = prompts_of(LENGTHS)
    with engine(SMALL, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        assert generate(llm, prompts) == expected(prompts, **SMALL)


def test_two_ranks_whose_heads_need_unlike_numbers(apart):
    prompts = prompts_of(LENGTHS)
    options = SMALL | {"policy": "best", "layer_budgets": by_head(*shape_of(MODEL))}
    with engine(options, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        assert generate(llm, prompts) == expected(prompts, **options)


def quantise(folder):
    """Replace a saved model's linear weights by int8; activations are quantised token by token."""
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, file, {"format": "pt"})
    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"], "weights": kind | {"strategy": "channel"},
        "input_activations": kind | {"strategy": "token", "dynamic": True},
    }  # fmt: skip
    quantisation = {
        "quant_method": "compressed-tensors", "format": "int-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"], "config_groups": {"all": group},
    }  # fmt: skip
    settings = json.loads(config.read_text()) | {"quantization_config": quantisation}
    config.write_text(json.dumps(settings))


def test_int8_weights(tmp_path):
    """Compare with vLLM alone: no other library rounds activations as its int8 kernels do."""
    # vLLM's kernel for AMX takes no fp32, and sizes that it does not take go to the other one.
    path = tiny("llama", tmp_path, hidden_size=136, head_dim=32)
    quantise(path)
    prompts, options = prompts_of(LENGTHS, 200), {"skip_tokenizer_init": True}
    with engine(None, path, **options) as llm:
        model = llm.llm_engine.model_executor.driver_worker.get_model()
        kinds = [type(module.quant_method).__name__ for module in model.model.layers.modules()
                 if hasattr(module, "quant_method")]  # fmt: skip
        assert kinds.count("CompressedTensorsLinearMethod") == 8
        full = generate(llm, prompts)
    with engine({"heavy": 200, "recent": 200}, path, **options) as llm:
        assert generate(llm, prompts) == full
    best = SMALL | {"policy": "best", "layer_budgets": by_head(2), "evict_every": 32}
    with engine(best, path, **options) as llm:
        texts = generate(llm, prompts)
        assert generate(llm, prompts) == texts != full
        assert llm.generate([{"prompt_token_ids": prompts[0]}], greedy())[0].num_cached_tokens
    with engine(best, path, enable_prefix_caching=False, **options) as llm:
        assert generate(llm, prompts) == texts
        assert [generate(llm, [prompt])[0] for prompt in prompts] == texts


def adapter(number, path, folder):
    """Save a random LoRA adapter of a model, and the model merged with it."""
    model = LlamaForCausalLM.from_pretrained(path)
    generator, tensors = torch.Generator().manual_seed(number), {}
    targets = ["q_proj", "v_proj", "down_proj"]
    for name, weight in model.named_parameters():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            down, up = (
                torch.randn(shape, generator=generator) / 5
                for shape in ((4, weight.shape[1]), (weight.shape[0], 4))
            )
            tensors[f"base_model.model.{module}.lora_A.weight"] = down
            tensors[f"base_model.model.{module}.lora_B.weight"] = up
            weight.data += 2 * up @ down
    saved, merged = folder / f"adapter{number}", folder / f"merged{number}"
    saved.mkdir()
    save_file(tensors, saved / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets}
    (saved / "adapter_config.json").write_text(json.dumps(config))
    model.save_pretrained(merged)
    return LoRARequest(f"adapter{number}", number, str(saved)), merged


@pytest.mark.parametrize("options", [{}, {"evict_every": 32, "scoring": "expected"}])
def test_lora_adapters_are_as_the_merged_models(options, tmp_path):
    """Mix two adapters and the model itself in a batch; with cached prefixes, in turns."""
    path, prompts = tiny("llama", tmp_path / "model"), prompts_of(LENGTHS, 200)
    first, second = (adapter(number, path, tmp_path) for number in (1, 2))
    setting = SMALL | options
    texts = {
        request: expected(prompts, folder, **setting)
        for request, folder in ((None, path), first, second)
    }
    # On a CPU vLLM gives requests without an adapter the last place, which has to be empty.
    with engine(
        setting, path, skip_tokenizer_init=True, enable_lora=True, max_loras=3, max_lora_rank=8
    ) as llm:
        for turn in range(3):
            requests = [list(texts)[(turn + index) % 3] for index in range(len(prompts))]
            assert generate(llm, prompts, lora_request=requests) == [
                texts[request][index] for index, request in enumerate(requests)
            ]


REFUSED = [
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2,
                             "prompt_lookup_max": 3}}, "--speculative-config"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
    ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "--scheduler-cls"),
    ({"model_impl": "transformers", "additional_config": {"h2okv": SMALL | {"policy": "best"}}},
     "does not say"),
    ({"max_model_len": 31}, "32 entries are above max_model_len=31"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda case: str(case)[:30])
def test_unsupported_options_are_refused_at_the_start(options, words):
    with pytest.raises(ValueError, match="h2okv: ") as refusal, engine(SMALL, **options):
        pass
    assert words in str(refusal.value)


def test_a_model_with_sliding_layers_is_refused_with_the_reason(tmp_path):
    options = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    path = tiny("qwen2", tmp_path, **options)
    with (
        pytest.raises(ValueError, match="not full attention"),
        engine(SMALL, path, skip_tokenizer_init=True),
    ):
        pass
