"""What people write to `LLM`, its `generate` and `chat`, and `SamplingParams`."""

import asyncio
from pathlib import Path

import pytest

import h2okv
from h2okv import LLM, AsyncLLM, Budget, SamplingParams
from h2okv.assets import bundled_model_path


@pytest.fixture(scope="module")
def llm():
    with LLM(Path(bundled_model_path()), max_num_seqs=2, max_prompt_tokens=256) as engine:
        yield engine


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_new_tokens", "max_tokens"), ("max_length", "max_tokens"),
        ("temprature", "temperature"), ("do_sample", "temperature"), ("stop_strings", "stop"),
        ("stop_words", "stop"), ("num_return_sequences", "n"), ("eos_token_id", "stop_token_ids"),
    ],
)  # fmt: skip
def test_other_names_of_sampling_get_a_hint(llm, name, meant):
    unknown = f"argument '{name}' is unknown; did you mean {meant}"
    with pytest.raises(ValueError, match=f"SamplingParams: {unknown}"):
        SamplingParams(**{name: 1})
    for function in ("generate", "chat"):
        with pytest.raises(ValueError, match=f"LLM.{function}: {unknown}"):
            getattr(llm, function)("Hi", **{name: 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_sinks": 4}, "LLM: argument 'num_sinks' is unknown; did you mean sink"),
        ({"max_size": 4}, "LLM: argument 'max_size' is unknown; did you mean budget"),
        ({"batch_size": 4}, "LLM: argument 'batch_size' is unknown; did you mean max_num_seqs"),
        ({"temperature": 0}, "LLM: temperature is an argument of generate; give it there"),
        ({"max_new_tokens": 9}, "LLM: max_new_tokens is an argument of generate; give it there"),
        ({"policy": "StreamingLLM"}, "did you mean sink_recent"),
        ({"budget": "a lot"}, "budget='a lot' is not a budget"),
    ],
)
def test_other_names_of_the_engines_options_get_a_hint(options, message):
    with pytest.raises(ValueError, match=message):
        LLM("bundled", **options)


def test_a_wrong_model_or_wrong_types_are_refused(llm):
    for kind in (LLM, AsyncLLM):
        with pytest.raises(ValueError, match=rf"{kind.__name__} needs a model; .*'smollm2'"):
            kind()
    with pytest.raises(ValueError, match="model=int is not a model"):
        LLM(5)
    with pytest.raises(
        ValueError, match="device 'gpu' cannot be used .*; choose auto, cpu or a GPU"
    ):
        LLM("bundled", device="gpu")
    with pytest.raises(ValueError, match="5 must be given by name"):
        SamplingParams(5)
    with pytest.raises(ValueError, match="prompts must be a text or a list of texts, got 5"):
        llm.generate(5)
    with pytest.raises(ValueError, match="messages must be a text or a list of messages, got 5"):
        llm.chat(5)
    for params in (5, {"temperature": 0}):
        with pytest.raises(ValueError, match="params must be SamplingParams, got"):
            llm.generate("Hi", params)


def test_keywords_replace_fields_of_the_parameters(llm):
    (expected,) = llm.generate("It was", SamplingParams(max_tokens=6, temperature=0))
    (text,) = (output.text for output in [expected])
    assert llm.generate("It was", max_tokens=6)[0].text == text  # greedy by default
    assert llm.generate("It was", SamplingParams(max_tokens=2), max_tokens=6, temperature=0.0)[
        0
    ].text == text  # fmt: skip
    each = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 6)]
    outputs = llm.generate(["It was"] * 2, each, stop="zzz")
    assert [len(output.completions[0].token_ids) for output in outputs] == [2, 6]
    first_word = text.split()[0]
    assert first_word not in llm.generate("It was", max_tokens=6, stop=first_word)[0].text


def test_without_parameters_the_models_own_sampling_counts(llm, make_llama, tokenizer):
    model = make_llama()
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.7
    model.generation_config.top_k = 5
    with LLM(model, tokenizer, max_num_seqs=1, max_prompt_tokens=64) as other:
        params = other._default_params
    assert (params.temperature, params.top_k) == (0.7, 5)
    assert llm._default_params.is_greedy


def test_chat_takes_a_text_a_message_or_several(llm):
    message = {"role": "user", "content": "Who are you?"}
    expected = llm.chat([message], max_tokens=5)[0].text
    assert llm.chat("Who are you?", max_tokens=5)[0].text == expected
    assert llm.chat(message, max_tokens=5)[0].text == expected
    several = llm.chat(["Who are you?", "Where are you?"], max_tokens=5)
    assert len(several) == 2 and several[0].text == expected
    assert [output.text for output in llm.chat([[message]], max_tokens=5)] == [expected]


@pytest.mark.parametrize("budget", [0.2, "20%", 64, "64", Budget(32, 32)])
def test_a_budget_of_one_request(llm, budget):
    assert llm.generate("It was", max_tokens=3, budget=budget)[0].text


@pytest.mark.parametrize("budget", ["full", 1.0, "many", True])
def test_a_budget_that_is_none_is_refused(llm, budget):
    with pytest.raises(ValueError, match="budget="):
        llm.generate("It was", max_tokens=3, budget=budget)


def test_a_request_of_few_entries_warns(llm):
    with pytest.warns(UserWarning, match="keeps 6 entries, too few for good text") as seen:
        llm.generate("It was", max_tokens=3, budget=6)
    assert {warning.filename for warning in seen} == {__file__}


@pytest.mark.parametrize("options", [{"budget": 0.25}, {"policy": "recent", "budget": 64}])
def test_a_budget_of_the_engine(options):
    with LLM("bundled", max_num_seqs=1, max_prompt_tokens=64, **options) as engine:
        cache = engine.engine.config.cache
    assert (cache.heavy, cache.recent) == (options["budget"] / 2,) * 2


def test_the_floor_keeps_a_short_prompt(llm, make_llama, tokenizer):
    cache = llm.engine.config.cache
    assert cache == h2okv.CacheConfig() and cache.entries(37) == 128
    text = llm.generate("The capital of France is", max_tokens=20)[0].text
    with LLM("bundled", budget=256, max_num_seqs=1, max_prompt_tokens=256) as large:
        assert large.generate("The capital of France is", max_tokens=20)[0].text == text


def test_the_other_front_end_takes_the_same_keywords():
    async def run():
        engine = AsyncLLM("bundled", budget=0.2, max_num_seqs=1, max_prompt_tokens=64)
        try:
            with pytest.raises(ValueError, match="AsyncLLM.generate: argument 'max_new_tokens'"):
                async for _ in engine.generate("It was", max_new_tokens=3):
                    pass
            deltas = [delta async for delta in engine.generate("It was", max_tokens=3, budget="30")]
        finally:
            await engine.aclose()
        return sum(len(delta.token_ids) for delta in deltas)

    assert asyncio.run(run()) == 3


def test_an_llm_that_is_closed_says_so():
    with LLM(Path(bundled_model_path()), max_num_seqs=1, max_prompt_tokens=64) as engine:
        pass
    for function in (engine.generate, engine.chat):
        with pytest.raises(h2okv.EngineStoppedError, match="this LLM is closed; make another"):
            function("Hi", max_tokens=1)
