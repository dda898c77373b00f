"""The server on the real engine and the bundled model."""

import asyncio

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


def test_budget_of_one_request(served, openings):
    client = served.client()
    standard, same, small = (
        ask(client, openings[-1], max_tokens=40, extra_body=body).choices[0].text
        for body in ({}, {"h2o": f"{BUDGET}+{BUDGET}"}, {"h2o": {"cache": "2+6"}})
    )
    assert standard == same != small
    with pytest.raises(openai.BadRequestError, match="this server keeps 96 at most; give less"):
        ask(client, openings[-1], extra_body={"h2o": "90+40"})


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
