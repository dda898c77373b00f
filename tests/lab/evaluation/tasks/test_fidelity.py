import json
import math

import pytest
import torch

from h2okv import enable
from h2okv.config import CacheConfig
from h2okv_lab.evaluation.model import ModelUnderTest, make_cache
from h2okv_lab.evaluation.tasks.fidelity import Fidelity, Source, bootstrap

CONFIGS = [
    CacheConfig(budget=0.5, min_tokens=0),
    CacheConfig(budget=0.1, min_tokens=0, scoring="decay"),
    CacheConfig(budget=12, policy="snapkv", kv_bits=8),
    CacheConfig(budget=12, positions="rolling"),  # this and `evict_every=4` read alone
    CacheConfig(budget=12, scoring="expected", sink=2, evict_every="prompt+4"),
    CacheConfig(budget=12, evict_every=4),
]
MESSAGES = {"messages": [{"role": "user", "content": "What did Holmes see in the street?"}]}


@pytest.fixture(scope="module")
def subject(short_subject):
    return short_subject


def compared(subject, sources, configs=CONFIGS, **reading):
    task = Fidelity(sources=sources, **reading)
    task.prepare(subject, configs)
    results = [{} for _ in configs]
    for number, batch in task.run(subject, configs, task.samples, 0):
        results[number] |= batch
    return task, results


@torch.no_grad()
def predictions(subject, config, prompt, blocks):
    """Return a separate cache's log-probabilities after each later token, and its bytes."""
    cache = make_cache(config, subject.config, 0)
    cache.expect(len(prompt))
    log_probs, read = [], 0
    with enable(subject.model):
        for ids in (prompt, *blocks):
            read += len(ids)
            out = subject.model(
                torch.tensor([ids]), attention_mask=torch.ones(1, read), past_key_values=cache
            )
            log_probs.append(out.logits[0].double().log_softmax(-1))
    return torch.cat(log_probs[1:]), cache.nbytes


def check(subject, results, prompt, following, protocol, compared=0):
    """Compare the results of a sample, one of each config, with separate caches."""
    blocks = [[n] for n in following[:-1]] if protocol == "decode" else [following[:-1]]
    full = predictions(subject, CacheConfig("full"), prompt, blocks)[0][-compared:]
    target = torch.tensor(following[1:]).unsqueeze(1)[-compared:]
    for config, result in zip(CONFIGS, results, strict=True):
        log_probs, nbytes = predictions(subject, config, prompt, blocks)
        log_probs = log_probs[-compared:]
        kl = (full.exp() * (full - log_probs)).sum(-1).mean()
        assert kl > 1e-4 and result["kl"] == pytest.approx(kl.item(), abs=1e-5)
        agreement = (full.argmax(-1) == log_probs.argmax(-1)).double().mean()
        assert result["agreement"] == pytest.approx(agreement.item())
        for name, rows in (("nll", log_probs), ("full_nll", full)):
            loss = -rows.gather(1, target).mean().item()
            assert result[name] == pytest.approx(loss, abs=1e-4)
        assert (result["tokens"], result["bytes"]) == (compared or len(following) - 1, nbytes)


@pytest.mark.parametrize(("protocol", "last"), [("decode", None), ("block", None), ("decode", 4)])
def test_predictions_on_a_text_equal_those_of_separate_caches(subject, novel, protocol, last):
    task, results = compared(
        subject, [Source("novel", novel)], prompt_tokens=80, new_tokens=9, texts=2,
        protocol=protocol, last=last,
    )  # fmt: skip
    assert task.samples == [0, 1]
    for sample, content in task._samples.items():
        assert (len(content.prompt), len(content.following)) == (80, 10)
        of_sample = [result[sample] for result in results]
        check(subject, of_sample, content.prompt, content.following, protocol, last or 0)


@pytest.mark.parametrize("protocol", ["decode", "block"])
@pytest.mark.parametrize("ends", [False, True])
def test_a_prompt_is_followed_by_the_full_cache_s_answer(subject, novel, protocol, ends, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": novel[:400]}) + "\n")
    ids = torch.tensor([subject.encode(novel[:400])])
    written = subject.model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
    answer = written.tolist()
    config = subject.model.generation_config
    before = config.eos_token_id
    if ends:  # the answer ends with its fifth token
        config.eos_token_id = answer[4]
        answer = answer[: answer.index(answer[4], 1) + 1]
    try:
        _, results = compared(subject, [Source.read(path)], new_tokens=8, protocol=protocol)
    finally:
        config.eos_token_id = before
    check(subject, [result[0] for result in results], ids[0].tolist(), answer, protocol)


@pytest.mark.parametrize("protocol", ["decode", "block"])
@pytest.mark.parametrize("context", [True, False])
def test_a_given_answer_is_predicted_after_its_question(
    subject, novel, protocol, context, tmp_path
):
    before, question, answer = novel[:400], novel[400:450], novel[450:480]
    record = {"prompt": question, "answer": answer}
    record |= {"context": before} if context else {"prompt": before + question}
    (tmp_path / "asked.jsonl").write_text(json.dumps(record) + "\n")
    task, results = compared(
        subject, [Source.read(tmp_path / "asked.jsonl")], new_tokens=2, protocol=protocol
    )
    question_ids, answer_ids = (
        subject.encode(before + question),
        subject.encode(answer, special=False),
    )
    # The last token of the question predicts the answer's first one.
    sample = task._samples[0]
    assert sample.prompt + sample.following == question_ids + answer_ids
    read = len(subject.encode(before)) if context else len(question_ids) - 1
    assert read - context <= len(sample.prompt) <= read  # a token may span the edge
    first = [result[0] for result in results]
    check(subject, first, sample.prompt, sample.following, protocol, len(answer_ids))


def test_a_context_ends_inside_the_chat_message(subject, chat_tokenizer, tmp_path):
    chatty = ModelUnderTest(lambda: subject.model, subject.config, chat_tokenizer, "chatty", 2048)
    record = {"context": "He came in.", "prompt": " Who came?", "answer": "He"}
    (tmp_path / "asked.jsonl").write_text(json.dumps(record) + "\n")
    task = Fidelity(sources=[Source.read(tmp_path / "asked.jsonl")])
    task.prepare(chatty, CONFIGS)
    sample = task._samples[0]
    assert chatty.tokenizer.decode(sample.prompt) == "<|user|>He came in."
    assert chatty.tokenizer.decode(sample.following) == " Who came?<|bos|>\n<|assistant|>He"


def test_a_context_needs_an_answer(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "Who?", "context": "He came."}\n')
    with pytest.raises(ValueError, match="field context needs an answer; add the field answer"):
        Source.read(tmp_path / "p.jsonl")


def test_messages_and_prompts_use_the_chat_template(subject, chat_tokenizer, tmp_path):
    chatty = ModelUnderTest(lambda: subject.model, subject.config, chat_tokenizer, "chatty", 2048)
    question = MESSAGES["messages"][0]["content"]
    answered = {"messages": [*MESSAGES["messages"], {"role": "assistant", "content": "A horse."}]}
    prompts = {}
    for name, line in (
        ("prompt", {"prompt": question}),
        ("messages", MESSAGES),
        ("answered", answered),
        ("turns", {"turns": [question, "And then?"]}),
    ):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
        task = Fidelity(sources=[Source.read(tmp_path / f"{name}.jsonl")])
        task.prepare(chatty, CONFIGS)
        prompts[name] = chatty.tokenizer.decode(task._samples[0].prompt)
    assert set(prompts.values()) == {f"<|user|>{question}<|bos|>\n<|assistant|>"}
    raw = Fidelity(sources=[Source.read(tmp_path / "prompt.jsonl")], raw=True)
    raw.prepare(chatty, CONFIGS)
    assert chatty.decode(raw._samples[0].prompt) == question
    with pytest.raises(ValueError, match="--raw takes prompts, not messages"):
        turns = [Source.read(tmp_path / "turns.jsonl")]
        Fidelity(sources=turns, raw=True).prepare(chatty, [])


def test_more_texts_start_with_the_same_windows(subject, novel):
    sources = [Source("novel", novel), Source("backwards", novel[::-1])]
    windows = []
    for texts in (2, 5):
        task = Fidelity(sources=sources, prompt_tokens=80, new_tokens=9, texts=texts)
        task.prepare(subject, CONFIGS)
        windows.append({n: sample.prompt for n, sample in task._samples.items()})
    assert len(windows[1]) == 10 and windows[0].items() <= windows[1].items()


def test_rows_have_means_and_intervals_by_file(subject):
    sources = [Source("a", "x"), Source("b", "y")]
    task = Fidelity(sources=sources)
    common = {"tokens": 4, "full_nll": 1.0, "full_bytes": 1000}
    figures = [
        (0.2, 1.0, 1.3, 100),
        (0.1, 0.5, 1.1, 200),
        (0.6, 0.75, 1.2, 300),
        (0.1, 0.75, 1.0, 200),
    ]
    results = {
        n: {"kl": kl, "agreement": agreed, "nll": nll, "bytes": size, **common}
        for n, (kl, agreed, nll, size) in enumerate(figures)
    }
    task._samples = {n: type("Own", (), {"source": "ab"[n % 2]}) for n in results}
    total, first, second = task.details(results)
    assert [row["data"] for row in (total, first, second)] == ["all", "a", "b"]
    assert (total["texts"], total["tokens"], first["texts"]) == (4, 16, 2)
    assert total["agreement"] == 0.75 and total["kl"] == pytest.approx(0.25)
    assert total["perplexity_ratio"] == pytest.approx(math.exp(0.15))
    assert (total["bytes"], total["bytes_fraction"]) == (200, 0.2)
    assert total["kl_low"] < 0.25 < total["kl_high"] <= 0.6
    assert second["kl"] == pytest.approx(0.1)
    assert task.scores(results)["agreement"].value == 0.75


def test_an_interval_covers_the_mean_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(200):
        mean, low, high = bootstrap(torch.randn(40, generator=generator).tolist())
        assert low < mean < high
        hits += low < 0 < high
    assert 0.9 <= hits / 200 <= 0.99
    assert bootstrap([3.0]) == (3.0, None, None)


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        ({"prompt_tokens": 1}, "--prompt-tokens 1 is too few"),
        ({"new_tokens": 0}, "--new-tokens 0 is too few"),
        ({"texts": 0}, "--texts 0 is too few"),
        ({"prompt_tokens": 100_000}, "for 0 texts of 100033 .*longer text, or smaller numbers$"),
        ({"texts": 400}, r"or --texts \d+ or fewer$"),
        ({"prompt_tokens": 2040}, "more than the model's context window of 2048"),
    ],
)
def test_what_cannot_be_read_is_refused(subject, novel, reading, message):
    with pytest.raises(ValueError, match=message):
        compared(subject, [Source("novel", novel)], **reading)


def test_texts_above_the_number_of_prompts_is_refused(subject, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "It was a dark night"}\n')
    with pytest.raises(ValueError, match="'p' has 1 prompts; give --texts 1 or fewer"):
        compared(subject, [Source.read(tmp_path / "p.jsonl")], texts=2)
    with pytest.raises(ValueError, match="--new-tokens 6-9 is for texts.*give --new-tokens 9$"):
        compared(subject, [Source.read(tmp_path / "p.jsonl")], new_tokens=9, last=4)
