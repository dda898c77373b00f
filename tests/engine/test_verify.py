"""Answers that are read again: what is compared, when, what it costs, and whom it keeps waiting."""

import asyncio
import copy
import math
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

import h2okv
from h2okv.engine import verify as core
from h2okv.engine.request import Comparison
from h2okv.engine.structured import json_grammar


def oracle(model, prompt, answer):
    """Return the logits behind each token by plain SDPA and a plain cache, without h2okv."""
    plain = LlamaForCausalLM(copy.deepcopy(model.config)).double().eval()
    plain.load_state_dict(model.state_dict())
    plain.set_attn_implementation("sdpa")
    text = torch.tensor([[*prompt, *answer[:-1]]])
    with torch.no_grad():
        logits = plain(text, past_key_values=DynamicCache(config=plain.config)).logits
    return logits[0, len(prompt) - 1 :]


def oracle_of(model, prompt, answer, best):
    agree = (oracle(model, prompt, answer).argmax(-1) == torch.tensor(best)).tolist()
    return sum(agree), agree.index(False) if False in agree else None


@pytest.mark.parametrize("chunk", [512, 7])
def test_figures_are_those_of_a_plain_forward(make_llama, make_llm, make_prompts, greedy, chunk):
    model = make_llama()
    llm = make_llm(model, max_prefill_tokens=chunk)
    prompts = make_prompts([40, 9, 61, 30])
    outputs = llm.generate(prompts, greedy(24), verify=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        answer, figures = output.completions[0].token_ids, output.verified
        # A greedy answer is what the evicting cache predicts.
        agreed, first = oracle_of(model, prompt, answer, answer)
        assert (figures.tokens, figures.agreed, figures.first_difference) == (24, agreed, first)
        assert figures.agreement == agreed / 24 and figures.note == ""
        assert figures.kl_divergence > 0
    assert any(output.verified.agreed < 24 for output in outputs)
    assert llm.agreement().total is None  # who asks is no sample of the traffic


def test_a_cache_that_keeps_all_agrees(make_llama, make_llm, make_prompts, greedy):
    llm = make_llm(make_llama(), heavy=200, recent=200, verify=1.0)
    outputs = llm.generate(make_prompts([40, 9, 61]), greedy(16))
    assert [output.verified.agreed for output in outputs] == [16] * 3
    assert all(output.verified.kl_divergence < 1e-9 for output in outputs)
    total = llm.agreement().total
    assert (total.answers, total.tokens, total.agreement) == (3, 48, 1) and total.bound < 1


def test_sampled_answers_and_penalties_are_judged_by_the_most_likely_token(
    make_llama, make_llm, make_prompts
):
    """Logits after penalties, before temperature; the evicting side from its log-probabilities."""
    model, prompt = make_llama(), make_prompts([50])[0]
    llm = make_llm(model)
    options = {"seed": 3, "temperature": 1.5, "ignore_eos": True}
    plain = llm.generate([prompt], max_tokens=30, logprobs=1, verify=True, **options)[0]
    tokens = [entry.top[0][0] for entry in plain.completions[0].logprobs]
    answer = plain.completions[0].token_ids
    assert answer != tokens
    expected = oracle_of(model, prompt, answer, tokens)
    assert (plain.verified.agreed, plain.verified.first_difference) == expected
    bias = {7: 100.0}
    forced = llm.generate([prompt], max_tokens=30, logit_bias=bias, verify=True, **options)[0]
    assert forced.verified.agreed == 30 and forced.verified.kl_divergence < 1e-6


def test_a_divergence_of_16_tokens_is_at_most_that_of_20(make_llama, make_llm, make_prompts):
    model, prompt = make_llama(), make_prompts([50])[0]
    output = make_llm(model).generate(
        [prompt], max_tokens=20, temperature=0, ignore_eos=True, logprobs=20, verify=True
    )[0]
    answer, logprobs = output.completions[0].token_ids, output.completions[0].logprobs
    full = oracle(model, prompt, answer).log_softmax(-1)
    total = 0.0
    for row, entry in zip(full, logprobs, strict=True):
        tokens, evicting = (torch.tensor(column) for column in zip(*entry.top, strict=True))
        others = 1 - row.exp()[tokens].sum(), 1 - evicting.exp().sum()
        total += float((row.exp()[tokens] * (row[tokens] - evicting)).sum())
        total += float(others[0] * (others[0] / others[1]).log())
    assert 0 < output.verified.kl_divergence <= total / 20 + 1e-6
    assert output.verified.kl_divergence > 0.8 * total / 20


def test_batches_and_several_outputs(make_llama, make_llm, make_prompts, greedy):
    model = make_llama()
    options = {"max_num_seqs": 4, "evict_every": 16}
    llm = make_llm(model, heavy=8, recent=8, **options)
    prompts = [prompt * 3 for prompt in make_prompts([20, 13])]
    for output, prompt in zip(
        llm.generate(prompts, greedy(40, n=2), verify=True), prompts, strict=True
    ):
        answer = output.completions[0].token_ids
        expected = oracle_of(model, prompt, answer, answer)
        assert (output.verified.agreed, output.verified.first_difference) == expected


def test_sliding_layers(gemma, make_llm, make_prompts, greedy):
    llm = make_llm(gemma, heavy=200, recent=200, max_prefill_tokens=5)
    outputs = llm.generate(make_prompts([40, 61]), greedy(16), verify=True)
    assert [output.verified.agreed for output in outputs] == [16] * 2


def test_schemas_and_chats_are_kinds_and_forced_tokens_agree():
    schema = {"properties": {"a": {"const": "yes"}}, "required": ["a"]}
    grammar = json_grammar({"type": "object", "additionalProperties": False, **schema})
    with h2okv.LLM("bundled", heavy=8, recent=8, verify=1.0) as llm:
        forced = llm.generate(["An object: "], max_tokens=40, grammar=grammar)[0]
        llm.chat("Say yes.", max_tokens=8)
        rows = llm.agreement().rows
    assert {(row.kind, row.budget) for row in rows} == {("chat", "16"), ("schema", "16")}
    assert '"yes"' in forced.text and forced.verified.agreement > 0.5


def test_cost_is_the_share(make_llama, make_llm, make_prompts, greedy):
    llm = make_llm(make_llama(), max_num_seqs=8, verify=0.02)
    lengths = [100 + (37 * number) % 60 for number in range(400)]
    llm.generate(make_prompts(lengths), greedy(2))
    stats = llm.stats()
    assert 0.01 * stats.prompt_tokens < stats.verified_tokens <= 0.025 * stats.prompt_tokens
    assert stats.verified == llm.agreement().total.answers >= 4 and stats.verify_waiting == 0


def test_nothing_is_kept_of_answers_that_are_not_sampled(
    make_llama, make_llm, make_prompts, greedy, monkeypatch
):
    monkeypatch.setattr(core.Trace, "add", lambda *_: pytest.fail("a prediction was kept"))
    outputs = make_llm(make_llama()).generate(make_prompts([40, 9]), greedy(4))
    assert [output.verified for output in outputs] == [None, None]


def test_a_bad_budget_raises_the_alarm(make_llama, make_llm, make_prompts, greedy):
    llm = make_llm(make_llama(), heavy=1, recent=1, verify=1.0, agreement=0.95)
    with pytest.warns(UserWarning, match=r"agreement=0.95 does not hold .* 'text' .*budget, 2;"):
        llm.generate(make_prompts([80] * 12), greedy(20))
    report = llm.agreement()
    assert report.missed == ("text",) and report.total.bound < report.total.agreement < 0.95
    assert "below 95 % at the largest budget: text" in str(report)


def test_a_budget_goes_down_and_comes_back_when_the_texts_change(
    make_llama, make_llm, make_prompts, greedy
):
    """Short prompts fit into any budget; then they are long, and differ in the smaller ones."""
    llm = make_llm(make_llama(), heavy=100, recent=100, max_num_seqs=8, verify=1.0, agreement=0.95)
    budgets = lambda: {row.budget: row for row in llm.agreement().rows}  # noqa: E731
    for _ in range(4):
        llm.generate(make_prompts([10] * 48), greedy(4))
    level = llm.engine.verifier.levels.level
    assert level("text") >= 2 and level("chat") == 0
    assert {"200", "150", "100"} <= budgets().keys()
    for seed in range(8):  # 160 requests
        llm.generate(make_prompts([150] * 20, seed), greedy(16))
    assert level("text") == 0 and llm.agreement().missed == ()
    outputs = llm.generate(make_prompts([150] * 10, 99), greedy(16))
    assert all(output.verified.agreement >= 0.95 for output in outputs)


def test_a_text_that_does_not_fit_is_compared_as_far_as_it_does(
    make_llama, make_llm, make_prompts, greedy, monkeypatch
):
    model, prompts = make_llama(), make_prompts([40, 60])
    llm = make_llm(model)
    monkeypatch.setattr(llm.engine.verifier, "_max_tokens", lambda: 50)
    fits, too_long = llm.generate(prompts, greedy(24), verify=True)
    answer = fits.completions[0].token_ids[:11]
    expected = oracle_of(model, prompts[0], answer, answer)
    assert (fits.verified.tokens, fits.verified.agreed) == (11, expected[0])
    assert "compared 11 of 24 tokens: there is room for a full cache of 50" in fits.verified.note
    assert too_long.verified.tokens == 0 and too_long.verified.agreement is None
    assert "prompt and answer have 84" in too_long.verified.note
    assert llm.stats().verify_failed == 1


def test_memory_for_a_full_cache_is_set_aside(make_llama, make_llm, make_prompts, greedy):
    limited = {"memory": 8 << 30, "max_num_seqs": 2}  # more than this process has by then
    llm = make_llm(make_llama(), **limited)
    with pytest.raises(
        ValueError, match=r"verify=True: no part of memory is for a full cache.*--verify 2%"
    ):
        llm.generate(make_prompts([40]), greedy(4), verify=True)
    llm = make_llm(make_llama(), **limited, verify="2%")
    assert "verify: 2 % of all tokens are read again with a full cache" in llm.describe()
    assert llm.generate(make_prompts([40]), greedy(4), verify=True)[0].verified.tokens == 4


def test_a_failure_leaves_the_answer(make_llama, make_llm, make_prompts, greedy, monkeypatch):
    llm = make_llm(make_llama())

    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(llm.engine.runner, "read", fail)
    output = llm.generate(make_prompts([40]), greedy(4), verify=True)[0]
    assert len(output.completions[0].token_ids) == 4
    assert output.verified.note == "it was not compared: RuntimeError: no memory"
    monkeypatch.undo()
    assert llm.generate(make_prompts([40]), greedy(4), verify=True)[0].verified.tokens == 4


@pytest.fixture
def eager(monkeypatch):
    """Repair whatever differs: a random model's choices are near ties, and not sure."""
    monkeypatch.setattr(core, "_TIE", 1.0)
    monkeypatch.setattr(core, "_NATS", math.inf)
    monkeypatch.setattr(core, "_FIRST", 16)


def plain_answer(model, prompt, length):
    """Return a greedy answer, reading all of the text again for each token."""
    answer = []
    for _ in range(length):
        answer.append(int(oracle(model, prompt, [*answer, 0])[-1].argmax()))
    return answer


@pytest.mark.parametrize("amounts", [{"heavy": 6, "recent": 6}, {"heavy": 0.1, "recent": 0.1}])
def test_an_answer_that_differs_is_replaced_by_the_full_caches(
    make_llama, make_llm, make_prompts, greedy, eager, amounts
):
    model, prompts = make_llama(), make_prompts([60, 60, 60])
    first = make_llm(model, **amounts).generate(prompts, greedy(20), verify=True)
    llm = make_llm(model, **amounts)
    repaired = 0
    for prompt, once, output in zip(
        prompts, first, llm.generate(prompts, greedy(20), verify="repair"), strict=True
    ):
        at, figures = once.verified.first_difference, output.verified
        is_repaired = at is not None and at < 16
        repaired += is_repaired
        expected = once.completions[0].token_ids
        if is_repaired:
            expected = plain_answer(model, prompt, 20)
            # Its prompt was read by the check; its last token is read again.
            assert (figures.agreed, figures.tokens, figures.repair_tokens) == (20, 20, 21)
            assert str(figures).endswith("; it was written again by the full cache")
        else:
            assert figures == once.verified
        assert output.completions[0].token_ids == expected and output.prompt == once.prompt
        assert figures.repaired == is_repaired
    stats = llm.stats()
    assert stats.repair_tokens == 21 * repaired > 0
    assert stats.repaired == repaired and stats.finished == 3


def test_windows_read_the_prompt_again_for_a_repair(
    gemma, make_llm, make_prompts, greedy, eager, monkeypatch
):
    monkeypatch.setattr(core, "_TIE", 2.0)  # whatever the cache, so that all are repaired
    llm, prompts = make_llm(gemma, heavy=200, recent=200), make_prompts([40, 61])
    expected = llm.generate(prompts, greedy(16))
    for prompt, once, output in zip(
        prompts, expected, llm.generate(prompts, greedy(16), verify="repair"), strict=True
    ):
        assert output.completions == once.completions
        assert output.verified.repaired and output.verified.repair_tokens == len(prompt) + 16


def test_a_difference_that_is_late_small_or_unsure_is_not_repaired(
    make_llama, make_llm, make_prompts, greedy, eager, monkeypatch
):
    model, prompts = make_llama(), make_prompts([60])
    llm = make_llm(model, heavy=6, recent=6)
    output = llm.generate(prompts, greedy(20), verify=True)[0]
    first, answer = output.verified.first_difference, output.completions[0].token_ids
    shares = oracle(model, prompts[0], answer)[first].softmax(-1)
    tie = float(shares[answer[first]] / shares.amax())
    logs = oracle(model, prompts[0], answer)[: core._SURE].log_softmax(-1)
    nats = -float((logs.exp() * logs).sum(-1).mean())
    monkeypatch.setattr(core, "_FIRST", first + 1)
    for name, repairs, lets in [
        ("_FIRST", first + 1, first), ("_TIE", tie + 1e-4, tie - 1e-4),
        ("_NATS", nats + 1e-3, nats - 1e-3),
    ]:  # fmt: skip
        monkeypatch.setattr(core, name, lets)
        assert not llm.generate(prompts, greedy(20), verify="repair")[0].verified.repaired
        monkeypatch.setattr(core, name, repairs)
        assert llm.generate(prompts, greedy(20), verify="repair")[0].verified.repaired


@pytest.mark.parametrize(
    ("answer", "choice", "ratio", "entropy", "may_be_wrong"),
    [
        (" It is 7 of them", " the", 0.5, 4.0, True),  # an answer with figures
        (" It is one of them", " 4", 0.5, 4.0, True),
        (" It is one of them", " ", 0.5, 4.0, True),  # the space before a number
        (" It is one of them", " the", 0.5, 1.4, True),  # sure
        (" It is one of them", " the", 0.5, 1.6, False),  # goes on in another way
        (" It is one of them", "\n", 0.5, 1.6, False),
        (" It is 7 of them", " the", 0.91, 0.1, False),  # a near tie
    ],
)
def test_what_differs_is_repaired_where_it_may_be_wrong(
    tokenizer, answer, choice, ratio, entropy, may_be_wrong
):
    tokens, full = (
        tokenizer(text, add_special_tokens=False).input_ids for text in (answer, choice)
    )
    compared = [Comparison(True, 0.0, token, 1.0, entropy) for token in tokens]
    compared[-1] = Comparison(False, 0.5, full[0], ratio, entropy)
    request = SimpleNamespace(repairs="repair")
    output = SimpleNamespace(tokens=tokens, tokenizer=tokenizer, request=request)
    check = core._Check(output, None, is_sampled=False, since=0.0, compared=compared)
    assert check.differs is may_be_wrong
    request.repairs = "repair_all"
    assert check.differs is (ratio < 0.9)
    late = [Comparison(True, 0.0, 5, 1.0, entropy)] * core._FIRST
    assert not core._Check(output, None, False, 0.0, compared=late + compared).differs


def test_schemas_samples_and_log_probabilities_of_a_repair(eager):
    """The second answer is drawn as the first: by its seed, in its schema."""
    schema = {"properties": {"a": {"type": "string"}}, "required": ["a"]}
    grammar = json_grammar({"type": "object", "additionalProperties": False, **schema})
    options = {"max_tokens": 40, "seed": 5, "logprobs": 1, "verify": True}
    prompt = "Once upon a time there was a little girl. " * 3 + "Write an object: "
    with h2okv.LLM("bundled", heavy=6, recent=6, verify=1.0) as llm:
        output = llm.generate([prompt], grammar=grammar, **(options | {"verify": "repair"}))[0]
        rows = llm.agreement().rows
    with h2okv.LLM("bundled", heavy=99, recent=99) as llm:
        larger = llm.generate([prompt], grammar=grammar, **options)[0]
    answers = [result.completions[0] for result in (output, larger)]
    assert answers[0].token_ids == answers[1].token_ids
    logprobs = [[entry.logprob for entry in answer.logprobs] for answer in answers]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)
    assert output.verified.repaired and output.text.startswith("{")
    assert [(row.budget, row.answers) for row in rows] == [("12", 1)]  # the first one counts


def test_a_repair_that_fails_or_has_no_room_leaves_the_answer(
    make_llama, make_llm, make_prompts, greedy, eager, monkeypatch
):
    llm, prompts = make_llm(make_llama(), heavy=6, recent=6), make_prompts([60])
    plain = llm.generate(prompts, greedy(20))[0]
    monkeypatch.setattr(llm.engine.verifier, "_max_tokens", lambda: 70)
    output = llm.generate(prompts, greedy(20), verify="repair")[0]
    assert output.text == plain.text and output.verified.tokens == 11
    assert output.verified.note == (
        "it was not repaired: there is room for a full cache of 70 tokens, and prompt and second"
        " answer have more"
    )
    monkeypatch.setattr(llm.engine.verifier, "_max_tokens", lambda: 1 << 20)
    monkeypatch.setattr(llm.engine.verifier, "again", lambda *_: 1 / 0)
    output = llm.generate(prompts, greedy(20), verify="repair")[0]
    assert output.text == plain.text and output.verified.tokens == 20
    assert output.verified.note.startswith("it was not repaired: ZeroDivisionError")


def test_what_cannot_be_repaired_is_refused(make_llama, make_llm, make_prompts, greedy):
    llm = make_llm(make_llama())
    with pytest.raises(
        ValueError, match="verify must be true, false, 'repair' or 'repair_all', got 'always'"
    ):
        llm.generate(make_prompts([9]), greedy(2), verify="always")
    with pytest.raises(
        ValueError,
        match="verify='repair': one answer is repaired; give n=1, kept_every=None, got n=2",
    ):
        llm.generate(make_prompts([9]), greedy(2, n=2), verify="repair")
    output = llm.generate(make_prompts([9]), greedy(0), verify="repair")[0]
    assert output.text == "" and output.verified is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "2x"}, "verify must be a share such as 0.02 or '2%', got '2x'"),
        ({"verify": 2}, "verify must be a share"),
        ({"verify": True}, "verify must be a share"),
        ({"agreement": 0.95}, "agreement=0.95 is judged by answers that are read again"),
        ({"verify": 0.1, "tensor_parallel": True}, "verify=0.1 is for one process"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        h2okv.EngineConfig(**options)


def read_slowly(llm):
    """Let each chunk that is read again take a while; return a list that notes them."""
    order, read = [], llm.engine.runner.read

    def slow_read(*args):
        order.append("again")
        time.sleep(0.02)
        return read(*args)

    llm.engine.runner.read = slow_read
    return order


def test_work_comes_before_answers_that_are_read_again(make_async, make_prompts, greedy):
    """A chunk of an answer at most stands between a new request and its first token."""
    llm = make_async(verify=1.0, max_prefill_tokens=16)
    order, execute = read_slowly(llm), llm.engine._execute
    llm.engine._execute = lambda step: order.append("work") or execute(step)

    async def main():
        async for _ in llm.generate(make_prompts([400])[0], greedy(4)):
            pass
        while order.count("again") < 3:
            await asyncio.sleep(0.001)
        begin = len(order)
        async for _ in llm.generate(make_prompts([30])[0], greedy(6)):
            pass
        during = order[begin:]
        while llm.stats().verify_waiting:
            await asyncio.sleep(0.001)
        await llm.aclose()
        return during

    during = asyncio.run(main())
    assert during.index("work") <= 1 and "again" not in during[during.index("work") : -1]
    assert order.count("again") >= 26  # all chunks of the first, each once


def test_a_server_that_is_never_idle_reads_again_late(
    make_async, make_prompts, greedy, monkeypatch
):
    monkeypatch.setattr(core, "_PATIENCE", 0.05)
    llm = make_async(verify=1.0)

    async def main():
        endless = llm.generate(make_prompts([20])[0], greedy(450))
        await anext(endless)
        async for _ in llm.generate(make_prompts([40])[0], greedy(4)):
            pass
        async for _ in endless:
            if llm.stats().verified:
                break
        running = llm.stats().running
        await endless.aclose()
        await llm.aclose()
        return running

    assert asyncio.run(main()) == 1


def test_a_client_that_leaves_while_its_answer_is_read_again(make_async, make_prompts, greedy):
    llm = make_async(max_prefill_tokens=16)
    read_slowly(llm)

    async def main():
        pieces = llm.generate(make_prompts([400])[0], greedy(4), verify=True)
        async for piece in pieces:
            if piece.finish_reason:
                break
        while not llm.stats().verified_tokens:
            await asyncio.sleep(0.001)
        await pieces.aclose()
        while llm.stats().verify_waiting:
            await asyncio.sleep(0.001)
        stats = llm.stats()
        figures = [
            piece.verified
            async for piece in llm.generate(make_prompts([30])[0], greedy(4), verify=True)
        ]
        await llm.aclose()
        return stats, figures

    stats, figures = asyncio.run(main())
    assert stats.verified == 0 and stats.verified_tokens < 403
    assert [entry is None for entry in figures] == [True] * 4 + [False]


def test_shutdown_waits_for_figures_but_not_for_samples(make_async, make_prompts, greedy):
    llm = make_async(verify=1.0, max_prefill_tokens=16)
    read_slowly(llm)

    async def main():
        async for _ in llm.generate(make_prompts([400])[0], greedy(2)):
            pass
        task = asyncio.create_task(collect())
        await asyncio.sleep(0.05)
        await llm.aclose()
        return await task

    async def collect():
        pieces = llm.generate(make_prompts([100])[0], greedy(2), verify=True)
        return [piece async for piece in pieces]

    assert asyncio.run(main())[-1].verified.tokens == 2


def test_a_repaired_answer_comes_at_once_and_a_client_may_leave(
    make_async, make_prompts, greedy, eager
):
    llm = make_async(heavy=6, recent=6, max_prefill_tokens=16)
    prompt, repair = make_prompts([100])[0], {"verify": "repair"}

    async def main():
        pieces = [piece async for piece in llm.generate(prompt, greedy(20), **repair)]
        leaver = asyncio.create_task(anext(llm.generate(prompt, greedy(400), **repair)))
        while not any(check.again for check in llm.engine.verifier._waiting):
            await asyncio.sleep(0.001)
        leaver.cancel()
        while llm.stats().verify_waiting:
            await asyncio.sleep(0.001)
        stats = llm.stats()
        late = asyncio.create_task(collect())
        while not any(check.again for check in llm.engine.verifier._waiting):
            await asyncio.sleep(0.001)
        await llm.aclose(drain=0.0)
        return pieces, stats, await late

    async def collect():
        return [piece async for piece in llm.generate(prompt, greedy(400), **repair)]

    (answer, figures), stats, (unchecked,) = asyncio.run(main())
    assert len(answer.token_ids) == 20 and answer.prompt.token_ids == (*prompt,)
    assert figures.verified.repaired and stats.repaired == 1
    assert len(unchecked.token_ids) == 400 and unchecked.verified is None
