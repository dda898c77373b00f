"""Thoughts: apart from the text, in no prefix state, and gone from the next turn's prompt."""

import copy
import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from transformers import LlamaConfig, LlamaForCausalLM

import h2okv
from h2okv.engine import engine as core
from h2okv.engine.chat import Chat
from h2okv.engine.detokenizer import Thoughts
from h2okv.models.loading import Described

BODY = (
    "{% for m in messages %}[{{ m['role'] }}]"
    "{{ m['content'].split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
)
OPENS, PLAIN = BODY + "<think>\n{% endif %}", BODY + "{% endif %}"


@pytest.mark.parametrize(
    ("text", "is_open", "thoughts", "answer"),
    [
        ("<think>\nSo.</think>\n\nYes.", False, "So.", "Yes."),
        (" \n<think>So.</think>Yes.</think>", False, "So.", "Yes.</think>"),
        ("So <think>it</think> goes.", True, "So <think>it", "goes."),
        ("  Yes.", False, "", "  Yes."),
        ("<thin", False, "", "<thin"),
        ("Yes. <think>So.</think>", False, "", "Yes. <think>So.</think>"),
        ("<think>never ends </thin", False, "never ends </thin", ""),
        ("cut inside", True, "cut inside", ""),
        ("<think></think>", False, "", ""),
        ("", True, "", ""),
    ],
)
@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_thoughts_are_found_however_a_text_is_cut(text, is_open, thoughts, answer, data):
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    splitter, divided = Thoughts(is_open), ["", ""]
    for start, stop in zip([0, *at], [*at, len(text)], strict=True):
        is_end = stop == len(text) and start == ([0, *at])[-1]
        for index, piece in enumerate(splitter.split(text[start:stop], is_end)):
            divided[index] += piece
    assert divided == [thoughts, answer]


@pytest.fixture
def make_talk(tokenizer, monkeypatch):
    """Return an engine whose answers are scripted, with a template that leaves thoughts out."""

    def make(template, **options):
        talking, script = copy.deepcopy(tokenizer), []
        talking.chat_template = template
        monkeypatch.setattr(
            core, "sample", lambda samplers, tokens, logits: [script[len(so)] for so in tokens]
        )
        config = LlamaConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=len(talking), max_position_embeddings=1 << 15,
            bos_token_id=1, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        usual = {"heavy": 32, "recent": 32, "evict_every": 32, "max_prompt_tokens": 1 << 13}
        llm = h2okv.LLM(LlamaForCausalLM(config).eval(), talking, **(usual | options))
        llm.engine.reads_ahead = True  # as servers do

        def say(messages, answer, **sampling):
            script[:] = talking(answer, add_special_tokens=False)["input_ids"]
            settings = {"max_tokens": len(script), "ignore_eos": True} | sampling
            return llm.chat(messages, show_progress=False, **settings)[0]

        say.script = script
        return llm, say

    return make


THOUGHT = "Let me see what this may be. " * 12


@pytest.mark.parametrize("template", [OPENS, PLAIN])
def test_thoughts_are_apart_and_make_no_states(make_talk, template):
    llm, say = make_talk(template)
    begin = "" if template == OPENS else "<think>\n"
    talk, lengths, num_thoughts = [], [], 0
    for turn in range(6):
        talk.append({"role": "user", "content": f"Question {turn}: " + "why is it so? " * 10})
        output = say(talk, f"{begin}{THOUGHT}</think>\n\nAnswer {turn}.")
        answer = output.completions[0]
        assert (answer.text, answer.reasoning) == (f"Answer {turn}.", THOUGHT)
        num_thoughts = len(llm.tokenizer(THOUGHT, add_special_tokens=False)["input_ids"])
        assert 0 < answer.reasoning_tokens - num_thoughts < 20
        talk.append({"role": "assistant", "content": answer.text})
        prompt = output.prompt
        lengths.append(len(prompt.token_ids))
        if turn:  # all but the last span of the turn before
            assert prompt.num_reused > lengths[turn - 1] - 2 * 32
    assert llm.stats().prefix_states <= 3  # tokens of two turns may merge at an end


def talk_over(llm, say, turns, length=20):
    """Return the outputs of some turns; the visible answers have several spans."""
    talk, outputs = [], []
    for turn in range(turns):
        talk.append({"role": "user", "content": f"Question {turn}: " + "why is it so? " * 4})
        answer = f"{THOUGHT}</think>Answer {turn}: {'it is so since it is. ' * length}"
        outputs.append(say(talk, answer, logprobs=0))
        talk.append({"role": "assistant", "content": outputs[-1].text})
    return talk, outputs


def test_a_turn_continues_from_the_text_of_the_answer_before(make_talk):
    llm, say = make_talk(OPENS)
    talk, outputs = talk_over(llm, say, 6)
    for before, output in itertools.pairwise(outputs[1:]):  # a first turn may be the only one
        text = llm.tokenizer(before.text, add_special_tokens=False)["input_ids"]
        end = len(before.prompt.token_ids) + len(text)
        assert len(text) > 100 and output.prompt.num_reused > end - 2 * 32
    stats = llm.stats()
    assert stats.prefix_states <= 3 and stats.finished == 6
    assert stats.prompt_tokens + stats.reused_tokens == sum(
        len(output.prompt.token_ids) for output in outputs
    )
    # The last question can be edited, and its answer made again.
    last = len(outputs[-1].prompt.token_ids)
    for question in (talk[-2]["content"], "Question 5: and who says so?"):
        edited = say([*talk[:-2], {"role": "user", "content": question}], "So.</think>It is.")
        assert edited.prompt.num_reused >= outputs[-1].prompt.num_reused > last - 4 * 32


def test_a_turn_that_continues_is_as_one_that_is_read_whole(make_talk):
    logprobs = []
    for options in ({}, {"prefix_cache": 0}):
        torch.manual_seed(0)
        _, outputs = talk_over(*make_talk(OPENS, **options), turns=4)
        assert bool(options) != (outputs[-1].prompt.num_reused > 300)
        completions = [output.completions[0] for output in outputs]
        logprobs.append([token.logprob for each in completions for token in each.logprobs])
    torch.testing.assert_close(*map(torch.tensor, logprobs), rtol=0, atol=1e-4)


def test_requests_come_while_an_answer_is_read_ahead(make_talk):
    llm, say = make_talk(OPENS, max_prefill_tokens=32, max_waiting=1)
    engine, tokenizer = llm.engine, llm.tokenizer
    talk, _ = talk_over(llm, say, 2)

    def submit(content):
        talk.append({"role": "user", "content": content})
        prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
        params = h2okv.SamplingParams(max_tokens=len(say.script), ignore_eos=True)
        request = engine.request(prompt, params, lambda event: None, kind="chat")
        engine.scheduler.submit(request)
        return request

    answer = "It is so. " * 20
    say.script[:] = tokenizer(f"So.</think>{answer}", add_special_tokens=False)["input_ids"]
    before = submit("Why?")
    while not before.is_over:
        engine.step()
    talk.append({"role": "assistant", "content": before.outputs[0].completion.text})
    while not engine.scheduler.prefilling:
        assert engine.step()
    assert engine.scheduler.prefilling[0].is_ahead and not engine.scheduler.waiting
    again = submit("And why that?")  # not refused, though one waits at most
    while not again.is_over:
        engine.step()
    assert again.outputs[0].completion.text.strip() == answer.strip()
    assert again.start.num_reused > len(before.prompt) + 50
    stats = llm.stats()
    assert (stats.finished, stats.failed, stats.aborted) == (4, 0, 0)


def test_llm_returns_before_an_answer_is_read_ahead(make_talk):
    llm, say = make_talk(OPENS)
    llm.engine.reads_ahead = type(llm.engine).reads_ahead
    _, outputs = talk_over(llm, say, 3)
    read = sum(len(output.prompt.token_ids) - output.prompt.num_reused for output in outputs)
    assert llm.stats().prompt_tokens == read


def test_an_answer_that_cannot_be_read_ahead_is_no_failed_request(make_talk, monkeypatch):
    llm, say = make_talk(OPENS)
    failures, after_chunk = [], type(llm.engine)._after_chunk

    def fail(engine, request, *args):
        if request.is_ahead:
            failures.append(request)
            raise ValueError("no number")
        after_chunk(engine, request, *args)

    monkeypatch.setattr(type(llm.engine), "_after_chunk", fail)
    talk_over(llm, say, 2)
    stats = llm.stats()
    assert failures
    assert (stats.finished, stats.failed, stats.aborted) == (2, 0, 0)


@pytest.mark.parametrize("mark", ["", "<think></think>"])  # of answers, but not of a new one
def test_answers_are_read_ahead_where_the_template_shows_them_so(make_talk, mark):
    _, outputs = talk_over(*make_talk(OPENS.replace("}}]", "}}]" + mark, 1)), turns=4)
    before, output = (each.prompt for each in outputs[-2:])
    assert (output.num_reused > len(before.token_ids)) == (not mark)


def test_an_answer_that_ends_inside_its_thoughts_has_no_text(make_talk):
    llm, say = make_talk(OPENS)
    question = [{"role": "user", "content": "Why?"}]
    cut = say(question, THOUGHT + "</think>Because.", max_tokens=20).completions[0]
    assert cut.text == "" and THOUGHT.startswith(cut.reasoning.rstrip())
    assert cut.finish_reason == "length" and cut.reasoning_tokens == 20
    unclosed = say(question, THOUGHT).completions[0]
    assert (unclosed.text, unclosed.reasoning) == ("", THOUGHT)


def test_models_and_prompts_without_thoughts_are_as_before(make_talk):
    question = [{"role": "user", "content": "Why? " * 60}]
    answer = "<think>So.</think>Because. " + "It is so. " * 20
    llm, say = make_talk(PLAIN.replace("</think>", "|"))
    output = say(question, answer).completions[0]
    assert (output.text, output.reasoning, output.reasoning_tokens) == (answer, "", 0)
    states = llm.stats().prefix_states
    assert states == 2  # of the prompt and of the answer
    llm, say = make_talk(PLAIN)
    assert say(question, "Because. " + "It is so. " * 20).completions[0].reasoning == ""
    assert llm.stats().prefix_states == states
    text = llm.generate(["Why?"], max_tokens=4, ignore_eos=True)[0].completions[0]
    assert text.reasoning == "" and text.text  # a text is not a chat


def test_a_chat_on_one_cache_reads_the_answer_again_without_thoughts(make_talk):
    llm, say = make_talk(OPENS)
    model, tokenizer, script = llm.engine.model, llm.tokenizer, say.script
    described = Described("tiny", "tiny", model.config, tokenizer, 1 << 15)
    cache = h2okv.H2OCache(model, heavy=32, recent=32, evict_every=32)
    params = h2okv.SamplingParams(max_tokens=400, temperature=0, seed=0, stop=("\x01",))
    chat = Chat(model, described, params, cache)
    answers = ["Because it is so.", "It may be.", "No."]
    for number, answer in enumerate(answers):
        text = f"{THOUGHT}</think>\n\n{answer}"
        script[:] = tokenizer(text, add_special_tokens=False)["input_ids"]
        chat.params = dataclasses.replace(params, max_tokens=len(script))
        assert chat.say(f"Why {number}?", lambda piece: None).text.endswith(answer)
        expected = "".join(
            f"[user]Why {turn}?\n[assistant]{answers[turn]}\n" for turn in range(number + 1)
        )
        assert chat.transcript.text == expected.removesuffix("\n")
        assert tokenizer.decode(chat.transcript.token_ids) == chat.transcript.text
        assert chat.cache.num_seen_tokens < len(chat.transcript.token_ids)
    script[:] = tokenizer(THOUGHT, add_special_tokens=False)["input_ids"]  # cut inside
    chat.params = dataclasses.replace(params, max_tokens=len(script))
    chat.say("And now?", lambda piece: None)
    assert chat.transcript.text.endswith(f"[assistant]<think>\n{THOUGHT}")
