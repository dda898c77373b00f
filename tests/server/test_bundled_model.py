"""The server on the real engine and the bundled model."""

import asyncio
import threading
import time

import openai
import pytest
import torch
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoModelForCausalLM

import h2okv
from h2okv.assets import bundled_model_path, sample_prompt

pytestmark = pytest.mark.slow

ROWS = 16
BUDGET = 48
ROW = 2 * BUDGET


@pytest.fixture(scope="module")
def served(start):
    engine = h2okv.AsyncLLM(
        "bundled", max_num_seqs=ROWS, heavy=BUDGET, recent=BUDGET, max_prompt_tokens=1024
    )
    served = start(engine, model_name="bundled")
    yield served
    served.stop()


@pytest.fixture(scope="module")
def openings():
    """Prompts of 10 to 150 tokens, no two alike."""
    words = sample_prompt().split()
    return [" ".join(words[17 * k : 17 * k + 8 + 4 * k]) for k in range(25)]


def ask(client, prompt, **options):
    return client.completions.create(
        model="bundled", prompt=prompt, **{"max_tokens": 10, "temperature": 0, **options}
    )


def test_two_hundred_concurrent_clients_equal_single_requests(served, openings):
    client = served.client()
    alone = [ask(client, prompt).choices[0].text for prompt in openings]
    assert len(set(alone)) > 20

    async def complete(others, number):
        prompt = openings[number % len(openings)]
        if number % 2:
            return (await ask(others, prompt)).choices[0].text
        stream = await ask(others, prompt, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them():
        async with served.client(openai.AsyncOpenAI, timeout=600) as others:
            return await asyncio.gather(*(complete(others, number) for number in range(200)))

    texts = asyncio.run(all_of_them())
    assert texts == [alone[number % len(openings)] for number in range(200)]
    stats = served.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0) and stats.evictions > 0
    assert stats.finished >= 225


def test_equal_seeds_give_equal_texts(served):
    client = served.client()
    options = dict(max_tokens=16, temperature=1.0, n=2, seed=5)
    first, again = (ask(client, "She opened the", **options) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices] and texts[0] != texts[1]
    assert [c.text for c in ask(client, "She opened the", **options | {"seed": 6}).choices] != texts


def test_stop_text_ends_the_output_and_is_excluded(served):
    client = served.client()
    unstopped = ask(client, "It was a bright morning, and the", max_tokens=30).choices[0].text
    stop = unstopped[8:11]
    choice = ask(client, "It was a bright morning, and the", max_tokens=30, stop=stop).choices[0]
    assert choice.text == unstopped[: unstopped.index(stop)] and choice.finish_reason == "stop"
    stream = ask(client, "It was a bright morning, and the", max_tokens=30, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == choice.text


def test_logprobs_of_a_greedy_completion(served):
    choice = ask(served.client(), "The king said to the", logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values()) < 0


def test_budget_of_one_request(served, openings):
    client = served.client()
    standard, same, small = (
        ask(client, openings[-1], max_tokens=40, extra_body=body).choices[0].text
        for body in ({}, {"h2o": f"{BUDGET}+{BUDGET}"}, {"h2o": {"cache": "2+6"}})
    )
    assert standard == same != small
    with pytest.raises(openai.BadRequestError, match="this server keeps 96 at most; give less"):
        ask(client, openings[-1], extra_body={"h2o": "90+40"})


def test_disconnected_client_frees_its_sequence(served):
    client, before = served.client(), served.engine.stats().aborted
    stream = ask(client, "Once", max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    pieces = iter(stream)
    for _ in range(5):  # the first comes before it has a row
        next(pieces)
    assert served.engine.stats().running == 1
    stream.close()
    client.close()
    end = time.monotonic() + 5
    while served.engine.stats().running:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert served.engine.stats().aborted == before + 1


def test_requests_after_the_drain_time_get_an_error(start):
    engine = h2okv.AsyncLLM("bundled", max_num_seqs=1, heavy=8, recent=8, max_prompt_tokens=64)
    served = start(engine, model_name="bundled", drain=0.1)
    stream = iter(ask(served.client(), "Once", max_tokens=1900, stream=True,
                      extra_body={"ignore_eos": True}))  # fmt: skip
    next(stream)
    stopping = threading.Thread(target=served.stop)
    stopping.start()
    with pytest.raises(openai.APIError, match="shutting down") as caught:
        for _ in stream:
            pass
    assert caught.value.code == "engine_stopped"
    stopping.join(30)


def test_refused_requests_leave_others_unchanged(served, openings):
    expected = ask(served.client(), openings[3]).choices[0].text

    async def all_of_them():
        async with served.client(openai.AsyncOpenAI) as client:
            bad = [
                ask(client, openings[3], n=ROWS + 1),
                ask(client, "word " * 1500),
                ask(client, [5000]),
                ask(client, "x", temperature=-1),
            ]
            good = [ask(client, openings[3]) for _ in range(4)]
            return await asyncio.gather(*bad, *good, return_exceptions=True)

    *bad, a, b, c, d = asyncio.run(all_of_them())
    assert all(isinstance(error, openai.BadRequestError) for error in bad), bad
    assert [answer.choices[0].text for answer in (a, b, c, d)] == [expected] * 4


def test_chat_with_the_bundled_model(served):
    answer = served.client().chat.completions.create(
        model="bundled", messages=[{"role": "user", "content": "Where is the boat?"}],
        max_tokens=40, temperature=0,
    )  # fmt: skip
    content = answer.choices[0].message.content
    assert content and content == content.lstrip() and "\nUser:" not in content


@pytest.fixture(scope="module")
def own_loglikelihood():
    """Log-likelihood of some tokens after others, and whether they are the likeliest."""
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path()).float().eval()

    def measure(context, ending):
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *ending]])).logits[0, len(context) - 1 : -1]
        target = torch.tensor(ending)
        logprobs = logits.log_softmax(-1)[torch.arange(len(ending)), target]
        return logprobs.sum().item(), bool((logits.argmax(-1) == target).all())

    return measure


CONTEXT = sample_prompt()[:1500].strip() + " The captain looked at the sea. The"
ENDINGS = (" ship was near the shore.", " purple of of seven", " sea was calm, and the")


@pytest.mark.parametrize("concurrent", [1, 4])
def test_lm_eval_loglikelihoods_equal_the_model(served, own_loglikelihood, concurrent):
    path = str(bundled_model_path())
    harness = LocalCompletionsAPI(
        model="bundled", base_url=f"{served.address}/v1/completions", tokenizer=path,
        tokenizer_backend="huggingface", num_concurrent=concurrent, batch_size=2, max_retries=1,
        add_bos_token=True,
    )  # fmt: skip
    requests = []
    for ending in ENDINGS:
        context, target = harness._encode_pair(CONTEXT, ending)
        requests.append(((CONTEXT, ending), context, target))
    assert len(requests[0][1]) > 2 * ROW  # what is scored is not evicted before
    results = harness._loglikelihood_tokens(requests)
    expected = [own_loglikelihood(context, target) for _, context, target in requests]
    for (logprob, is_greedy), (expected_logprob, greedy) in zip(results, expected, strict=True):
        assert logprob == pytest.approx(expected_logprob, abs=2e-3)
        assert is_greedy == greedy
    assert results[1][0] < results[0][0]


def test_lm_eval_greedy_generation(served):
    path = str(bundled_model_path())
    harness = LocalCompletionsAPI(
        model="bundled", base_url=f"{served.address}/v1/completions", tokenizer=path,
        tokenizer_backend="huggingface", max_retries=1,
    )  # fmt: skip
    answer = harness.model_call(
        [CONTEXT], generate=True, gen_kwargs={"max_gen_toks": 8, "until": ["\n\n"]}
    )
    completion = ask(served.client(), CONTEXT, max_tokens=8, stop="\n\n")
    assert harness.parse_generations(answer) == [completion.choices[0].text]
