"""Models with linear-attention or convolution layers, behind the engine and in batch jobs."""

from functools import cache

import pytest
import torch
from oracle import cache_of
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import LinearAttentionLayer
from walk import results, tiny_config

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.cache.argument import CACHE
from h2okv.cache.linear_states import continues_blocks, has_states
from h2okv.cli.chat import plan_cache
from h2okv.config import CacheConfig
from h2okv.engine.cache_engine import CacheEngine
from h2okv.engine.config import EngineConfig
from h2okv.engine.request import PromptStart, Request
from h2okv.engine.sampling_params import SamplingParams
from h2okv.engine.serving import in_tokens, plan_serving
from h2okv.integration.enable import read_blocks
from h2okv.offload.batch_runner import BatchSequence, ForwardScheduler, Limits, Runner

SERVED = [
    "bailing_hybrid", "bamba", "granitemoehybrid", "jamba", "kimi_linear", "lara_mini", "lfm2",
    "lfm2_moe", "lfm3", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next",
]  # fmt: skip
FORGETFUL = {"jamba"}  # begin a block with an empty state
SLIDING = {"lara_mini", "lfm3"}  # have layers with a window too
# One of each kind of layer.
QUICK = {"bamba", "jamba", "kimi_linear", "lfm3", "nemotron_h", "qwen3_next"}
LENGTHS, NEWS = (40, 3, 25, 1, 31, 8), (9, 14, 1, 6, 12, 4)
BUDGET = {"heavy": 6, "recent": 4, "sink": 1}


def config_of(model_type):
    config = tiny_config(model_type)
    if model_type == "lfm2":  # whose rule of layers leaves no convolution in so few of them
        config.layer_types = ["conv", "full_attention"] * 2
    return config


@cache
def model_of(model_type):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # what padding would bring into a state
                parameter.normal_(0, 0.3)
    model.generation_config.eos_token_id = None
    return model


def hybrid(served=SERVED):
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "model_type", [pytest.param(t, marks=() if t in QUICK else slow) for t in served]
    )


continuing = hybrid([model_type for model_type in SERVED if model_type not in FORGETFUL])


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled_model_path())


def prompts_of(lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 80, (n,), generator=generator).tolist() for n in lengths]


def alone(model, prompt, new, **options):
    """Return the tokens that ``generate`` appends to a prompt."""
    ids = torch.tensor([prompt])
    with h2okv.enable(model):
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            **{CACHE: cache_of(model.config, **(BUDGET | options))},
        )
    return text[0, len(prompt) :].tolist()


def states_of(cache):
    linear = [layer for layer in cache.layers if type(layer) is LinearAttentionLayer]
    kinds = (states for layer in linear for states in (layer.conv_states, layer.recurrent_states))
    return [tensor for states in kinds for tensor in states.values() if tensor is not None]


def greedy(new):
    return h2okv.SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)


def answers(outputs):
    return [list(output.completions[0].token_ids) for output in outputs]


def test_every_type_with_states_that_a_cache_accepts_is_served():
    types = results()["works"].split()
    with_states = [t for t in types if has_states(cache_of(config_of(t)))]
    assert with_states == SERVED


@torch.no_grad()
def test_a_block_without_positions_is_refused_where_a_model_counts_from_zero():
    model = model_of("bamba")
    model.set_attn_implementation("h2o")
    ids, cache = torch.tensor(prompts_of([14])), cache_of(model.config, heavy=20, recent=20)
    expected = model(ids, **{CACHE: cache_of(model.config, heavy=20, recent=20)}).logits
    model(ids[:, :9], **{CACHE: cache})
    waiting = cache.fork(1)
    with pytest.raises(ValueError, match="5 more whose positions begin at 0.*position_ids 9 to 13"):
        model(ids[:, 9:], **{CACHE: cache})
    logits = model(ids[:, 9:], position_ids=torch.arange(9, 14)[None], **{CACHE: waiting}).logits
    torch.testing.assert_close(logits, expected[:, 9:], atol=1e-4, rtol=0)


@hybrid()
def test_requests_share_rows_and_give_what_generate_gives(model_type, tokenizer):
    model, prompts = model_of(model_type), prompts_of(LENGTHS)
    expected = [alone(model, p, new) for p, new in zip(prompts, NEWS, strict=True)]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    options = {"max_num_seqs": 3, "max_prefill_tokens": 16, **BUDGET}
    # Else the time that a prompt takes decides whether three requests ever run together.
    options["max_prefill_time_fraction"] = 0.999
    with h2okv.LLM(model, tokenizer, **options) as llm:
        assert answers(llm.generate(prompts, list(map(greedy, NEWS)))) == expected
        engine, cache = llm.engine, cache_of(model.config, **BUDGET)
        assert engine.runner.pool.nbytes == 3 * engine.memory.sequence
        params = h2okv.SamplingParams(max_tokens=5, n=3, seed=1)
        sampled = llm.generate([prompts[0]], params)[0].completions
        assert len({tuple(completion.token_ids) for completion in sampled}) > 1
    with torch.no_grad(), h2okv.enable(model):
        model(torch.tensor(prompts[:1]), **{CACHE: cache})
    size = sum(tensor.nbytes for tensor in states_of(cache))
    assert size == engine.runner.pool.linear_bytes > 0


@hybrid()
def test_a_state_is_continued_unless_the_type_is_listed(model_type):
    model = model_of(model_type)
    model.set_attn_implementation("eager")
    ids = torch.tensor(prompts_of([30]))
    logits = []
    for cuts in ((30,), (13, 10, 2, 1, 4)):
        states, chunks, start = DynamicCache(config=model.config), [], 0
        for size in cuts:
            position_ids = torch.arange(start, start + size)[None]
            with torch.no_grad():
                chunk = model(
                    ids[:, start : start + size], position_ids=position_ids, **{CACHE: states}
                )
            chunks.append(chunk.logits)
            start += size
        logits.append(torch.cat(chunks, dim=1))
    close = torch.allclose(*logits, rtol=0, atol=1e-3)
    assert close == continues_blocks(model.config.get_text_config(decoder=True).model_type)


@continuing
def test_turns_and_shared_prefixes_continue_from_states(model_type, tokenizer, tmp_path):
    model = model_of(model_type)
    options = BUDGET | {"evict_every": 8, "max_prompt_tokens": 100, "max_prefill_tokens": 16}
    folder = {"prefix_cache_folder": tmp_path}
    first, second, third = prompts_of((40, 5, 9), seed=3)
    with h2okv.LLM(model, tokenizer, max_num_seqs=2, **options, **folder) as llm:
        (answer,) = answers(llm.generate([first], greedy(12)))
        saved = {cache.num_seen_tokens: cache for cache in llm.engine.runner.states.values()}
        fresh = cache_of(model.config, **BUDGET, evict_every=8)
        with torch.no_grad():
            model(torch.tensor([(first + answer)[:48]]), **{CACHE: fresh})
        for state, expected in zip(states_of(saved[48]), states_of(fresh), strict=True):
            torch.testing.assert_close(state, expected, rtol=1e-3, atol=1e-3)
        # The end of an answer; a beginning that is shared for the first time, and the second.
        turns = [first + answer + second, first[:21] + third, first[:21] + second]
        outputs = [llm.generate([turn], greedy(8))[0] for turn in turns]
        for state in llm.engine.runner.states.values():
            assert state.nbytes <= llm.engine.memory.state
            assert state.nbytes == llm.engine.memory.state or model_type in SLIDING
    assert [output.prompt.num_reused for output in outputs] == [48, 0, 16]
    expected = [alone(model, turn, 8, evict_every=8) for turn in turns]
    assert answers(outputs) == expected
    with h2okv.LLM(model, tokenizer, max_num_seqs=2, **options, **folder) as llm:
        assert answers(llm.generate(turns, greedy(8))) == expected
        assert llm.stats().prefix_disk_hits > 0


def test_a_type_that_forgets_reads_prompts_whole_and_keeps_no_states(tokenizer):
    model = model_of("jamba")
    options = BUDGET | {"evict_every": 8, "max_prompt_tokens": 100, "max_prefill_tokens": 16}
    prompt = prompts_of([40])[0]
    with h2okv.LLM(model, tokenizer, max_num_seqs=2, **options) as llm:
        outputs = [llm.generate([prompt], greedy(12))[0] for _ in range(2)]
    assert [output.prompt.num_reused for output in outputs] == [0, 0]
    assert answers(outputs) == 2 * [alone(model, prompt, 12, evict_every=8)]
    with pytest.raises(ValueError, match="prefix_cache: .*'jamba' forget"):
        h2okv.LLM(model, tokenizer, max_num_seqs=2, **options, prefix_cache=1 << 20)


def test_a_type_that_forgets_refuses_a_block_after_a_state_and_reads_chunks_at_once(tokenizer):
    model, (prompt,) = model_of("jamba"), prompts_of([33])
    ids, outputs = torch.tensor([prompt]), []
    for options in ({"evict_every": 8}, {"evict_every": 1}):
        expected = alone(model, prompt, 6, **options)  # one forward
        cache = cache_of(model.config, **BUDGET, **options)
        h2okv.prefill(model, ids[:, :-1], cache)  # blocks where a model can continue them
        with h2okv.enable(model):
            text = model.generate(ids, max_new_tokens=6, do_sample=False, **{CACHE: cache})
            outputs.append(text[0, 33:].tolist())
            assert outputs[-1] == expected
            more = torch.cat([text, text[:, :5]], dim=1)
            with pytest.raises(ValueError, match="6 tokens in one forward after the 38 .*'jamba'"):
                model.generate(more, max_new_tokens=2, **{CACHE: cache})
            with pytest.raises(ValueError, match="'jamba' forget"):
                list(read_blocks(model, ids, cache_of(model.config, **BUDGET), 8))
        cache.reset()
        h2okv.prefill(model, ids, cache)
    config = CacheConfig(heavy=20, recent=20)
    with pytest.raises(ValueError, match="'jamba' cannot chat"):
        plan_cache(model.config, config, "original")


@hybrid()
@pytest.mark.parametrize("is_full", [False, True])
def test_one_request_on_a_cache(model_type, tokenizer, is_full):
    model, (prompt,) = model_of(model_type), prompts_of([33])
    caches = [
        DynamicCache(config=model.config) if is_full else cache_of(model.config, **BUDGET)
        for _ in range(2)
    ]
    params, start = SamplingParams(max_tokens=8, temperature=0.0), PromptStart(len(prompt))
    request = Request(tuple(prompt), params, 8, start, lambda event: None)
    ids = torch.tensor([prompt])
    with h2okv.enable(model):
        CacheEngine(model, tokenizer, caches[0]).run([request])
        text = model.generate(ids, max_new_tokens=8, do_sample=False, **{CACHE: caches[1]})
    assert request.outputs[0].tokens == text[0, len(prompt) :].tolist()


@hybrid()
def test_micro_batches_are_joined(model_type):
    model, prompts = model_of(model_type), prompts_of(LENGTHS)
    sequences = [
        BatchSequence(number, prompt, new, greedy(20))
        for number, (prompt, new) in enumerate(zip(prompts, NEWS, strict=True))
    ]
    widths = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    runner = Runner(
        model, ForwardScheduler(), CacheConfig(**BUDGET), Limits(6, 50, 6),
        torch.device("cpu"),
    )  # fmt: skip
    done = {
        sequence.id: sequence.new_tokens for group in runner.run(sequences) for sequence in group
    }
    handle.remove()
    expected = [alone(model, p, new) for p, new in zip(prompts, NEWS, strict=True)]
    assert [done[number] for number in range(len(prompts))] == expected
    # What a sliding layer holds cannot be joined.
    is_joined = max(rows for rows, columns in widths if columns == 1) > max(
        rows for rows, columns in widths if columns > 1
    )
    assert is_joined == (model_type not in SLIDING)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "jamba"])
def test_loaded_models_are_planned_described_and_served(model_type, tokenizer, tmp_path):
    model = model_of(model_type)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"max_num_seqs": 2, "max_prompt_tokens": 100}
    config = EngineConfig(cache=CacheConfig(evict_every=8), **options)
    config, note = in_tokens(config, str(tmp_path))
    assert ("on, so every text" in note) == (model_type != "jamba")
    plan = plan_serving(config, str(tmp_path), None, torch.device("cpu"))
    assert (plan.share.states > 0) == (model_type != "jamba")
    prompt = prompts_of([40])[0]
    with h2okv.LLM(str(tmp_path), config=config) as llm:
        outputs = llm.generate([prompt], greedy(8))
        pool, memory = llm.engine.runner.pool, llm.engine.memory
        text = llm.describe()
    budget = {name: getattr(config.cache, name) for name in BUDGET}
    assert answers(outputs) == [alone(model, prompt, 8, **budget, evict_every=8)]
    assert (plan.memory.sequence, plan.memory.state) == (memory.sequence, memory.state)
    assert plan.full_sequence == pool.full_bytes_of(plan.longest)
    per_token = pool.full_bytes_of(9) - pool.full_bytes_of(8)
    least = (pool.sequence_bytes - pool.linear_bytes) // per_token + 1
    assert f"slots save memory from {least:,} tokens on" in text
    assert ("states of prompts and answers" in text) == (model_type != "jamba")
