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


def test_two_hundred_clients_at_once_get_what_each_gets_alone(served, openings):
    client = served.client()
    alone = [ask(client, prompt).choices[0].text for prompt in openings]
    assert len(set(alone)) > 20

    async def one(others, number):
        prompt = openings[number % len(openings)]
        if number % 2:
            return (await ask(others, prompt)).choices[0].text
        stream = await ask(others, prompt, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them():
        async with served.client(openai.AsyncOpenAI, timeout=600) as others:
            return await asyncio.gather(*(one(others, number) for number in range(200)))

    texts = asyncio.run(all_of_them())
    assert texts == [alone[number % len(openings)] for number in range(200)]
    stats = served.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0) and stats.evictions > 0
    assert stats.finished >= 225


def test_the_same_seed_draws_the_same_texts(served):
    client = served.client()
    options = dict(max_tokens=16, temperature=1.0, n=2, seed=5)
    first, again = (ask(client, "She opened the", **options) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices] and texts[0] != texts[1]
    assert [c.text for c in ask(client, "She opened the", **options | {"seed": 6}).choices] != texts


def test_a_stop_text_ends_an_output_and_is_not_in_it(served):
    client = served.client()
    whole = ask(client, "It was a bright morning, and the", max_tokens=30).choices[0].text
    stop = whole[8:11]
    choice = ask(client, "It was a bright morning, and the", max_tokens=30, stop=stop).choices[0]
    assert choice.text == whole[: whole.index(stop)] and choice.finish_reason == "stop"
    stream = ask(client, "It was a bright morning, and the", max_tokens=30, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == choice.text


def test_log_probabilities_go_with_the_greedy_text(served):
    choice = ask(served.client(), "The king said to the", logprobs=2).choices[0]
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text
    for token, logprob, top in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values()) < 0


def test_a_budget_of_ones_own(served, openings):
    client = served.client()
    standard, same, small = (
        ask(client, openings[-1], max_tokens=40, extra_body=body).choices[0].text
        for body in (
            {},
            {"h2o": {"heavy": BUDGET, "recent": BUDGET}},
            {"h2o": {"heavy": 2, "recent": 6}},
        )
    )
    assert standard == same != small
    with pytest.raises(openai.BadRequestError, match="this server keeps 96 at most; give less"):
        ask(client, openings[-1], extra_body={"h2o": {"heavy": 90}})


def test_a_client_that_goes_away_frees_its_row(served):
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


def test_what_runs_after_the_drain_is_told_so(start):
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


def test_a_request_that_is_refused_hurts_nobody(served, openings):
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
    assert [one.choices[0].text for one in (a, b, c, d)] == [expected] * 4


def test_a_chat(served):
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

    def measure(context, rest):
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *rest]])).logits[0, len(context) - 1 : -1]
        target = torch.tensor(rest)
        logprobs = logits.log_softmax(-1)[torch.arange(len(rest)), target]
        return logprobs.sum().item(), bool((logits.argmax(-1) == target).all())

    return measure


CONTEXT = sample_prompt()[:1500].strip() + " The captain looked at the sea. The"
ENDINGS = (" ship was near the shore.", " purple of of seven", " sea was calm, and the")


@pytest.mark.parametrize("concurrent", [1, 4])
def test_lm_evals_local_completions(served, own_loglikelihood, concurrent):
    path = str(bundled_model_path())
    harness = LocalCompletionsAPI(
        model="bundled", base_url=f"{served.address}/v1/completions", tokenizer=path,
        tokenizer_backend="huggingface", num_concurrent=concurrent, batch_size=2, max_retries=1,
        add_bos_token=True,
    )  # fmt: skip
    requests = []
    for ending in ENDINGS:
        context, rest = harness._encode_pair(CONTEXT, ending)
        requests.append(((CONTEXT, ending), context, rest))
    assert len(requests[0][1]) > 2 * ROW  # what is scored is not evicted before
    found = harness._loglikelihood_tokens(requests)
    expected = [own_loglikelihood(context, rest) for _, context, rest in requests]
    for (logprob, is_greedy), (own, greedy) in zip(found, expected, strict=True):
        assert logprob == pytest.approx(own, abs=2e-3)
        assert is_greedy == greedy
    assert found[1][0] < found[0][0]


def test_lm_evals_greedy_answers(served):
    path = str(bundled_model_path())
    harness = LocalCompletionsAPI(
        model="bundled", base_url=f"{served.address}/v1/completions", tokenizer=path,
        tokenizer_backend="huggingface", max_retries=1,
    )  # fmt: skip
    answer = harness.model_call(
        [CONTEXT], generate=True, gen_kwargs={"max_gen_toks": 8, "until": ["\n\n"]}
    )
    own = ask(served.client(), CONTEXT, max_tokens=8, stop="\n\n")
    assert harness.parse_generations(answer) == [own.choices[0].text]
