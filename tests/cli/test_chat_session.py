"""A chat equals the same tokens fed by hand, with and without interruptions."""

import io
import signal
import sys
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from cli.conftest import make_model

import h2okv
from h2okv.cache import CACHE
from h2okv.config import CacheConfig
from h2okv.engine.chat import Chat
from h2okv.engine.generation import break_even_tokens
from h2okv.engine.sampler import eos_token_ids
from h2okv.engine.sampling_params import SamplingParams
from h2okv.models.loading import describe, load_weights

ANSWER = 12
LONG_TURN = "a heron, a fox; 7 owls? " * 3


class Partner(NamedTuple):
    model: Any
    described: Any
    params: SamplingParams


def greedy(count):
    return SamplingParams(max_tokens=count, temperature=0.0, seed=0)


@pytest.fixture(scope="module")
def load(chat_folder, model_folder):
    """Load a model with H2O attention: one with a chat template, or one without."""

    def call(template=True):
        described = describe(str(chat_folder if template else model_folder))
        model = load_weights(described, torch.float64, torch.device("cpu"))
        model.set_attn_implementation("h2o")
        return Partner(model, described, greedy(ANSWER))

    return call


@pytest.fixture
def partner(load):
    return load()


def make_cache(partner, chunk=16, positions="rolling", budget=12):
    config = CacheConfig("h2o", budget, budget, 1, positions=positions, evict_every=chunk)
    return h2okv.H2OCache.from_config(partner.model.config, config)


def by_hand(partner, cache, token_ids, count):
    """Read the tokens and answer greedily; the cache does not read the last token."""
    logits = h2okv.prefill(partner.model, torch.tensor([token_ids]), cache)
    answer = []
    while True:
        answer.append(int(logits.argmax()))
        if len(answer) == count:
            return answer
        with torch.no_grad():
            next_id = torch.tensor([answer[-1:]])
            logits = partner.model(next_id, past_key_values=cache).logits[:, -1]


def assert_same_cache(cache, other):
    assert cache.num_seen_tokens == other.num_seen_tokens
    for layer in range(len(cache.layers)):
        assert torch.equal(cache.kept_positions(layer), other.kept_positions(layer))
        torch.testing.assert_close(cache.scores(layer), other.scores(layer))


def ends_with(partner, token, after):
    """Make the model choose `token` after `after` others; return the hook.

    A turn must be one block: each block of it calls the head, too.
    """
    calls = 0

    def hook(module, args, logits):
        nonlocal calls
        calls += 1
        if calls % (after + 1) == 0:
            logits[..., token] = logits.max() + 1
        return logits

    return partner.model.lm_head.register_forward_hook(hook)


def ignore(piece):
    pass


@pytest.mark.parametrize("template", [True, False], ids=["template", "plain"])
@pytest.mark.parametrize("positions", ["original", "rolling"])
@pytest.mark.parametrize("chunk", [None, 16])
def test_chat_tokens_equal_greedy_decoding_by_hand(load, template, positions, chunk):
    partner = load(template)
    chat = Chat(*partner, make_cache(partner, chunk, positions), "be brief")
    cache = make_cache(partner, chunk, positions)
    for turn in ("the cat?", LONG_TURN, "and the dog?"):
        read = cache.num_seen_tokens
        answer = chat.say(turn, ignore)
        fed = chat.transcript.token_ids[read : -len(answer.token_ids)]
        assert by_hand(partner, cache, fed, ANSWER) == answer.token_ids
        assert_same_cache(chat.cache, cache)
        # All but the token that was chosen last went through, and none of them twice.
        assert cache.num_seen_tokens == len(chat.transcript.token_ids) - 1
    # Tokens since the last cut are there besides the budget.
    since = chat.cache.num_seen_tokens % (chunk or 1)
    assert chat.cache.num_cached_tokens == 25 + since


def test_a_pinned_system_message_stays_for_the_whole_chat(partner):
    system = "be brief"
    chat = Chat(*partner, make_cache(partner), system, pin=("system",))
    for turn in ("the cat?", "the dog?", "and the bird?"):
        chat.say(turn, ignore)
    read, tokenizer = chat.transcript.token_ids, partner.described.tokenizer
    scores, positions = chat.cache.scores(0)[0], chat.cache.kept_positions(0)[0]
    for head in range(scores.shape[0]):
        pinned = positions[head][scores[head].isinf()].sort().values.tolist()
        assert tokenizer.decode([read[position] for position in pinned]).strip() == system


def test_an_end_token_is_read_once_with_the_next_turn(partner):
    end = partner.described.tokenizer.eos_token_id
    chat = Chat(*partner, make_cache(partner, chunk=64))
    hook = ends_with(partner, end, after=4)
    try:
        for turn in ("the cat?", "the dog?"):
            answer = chat.say(turn, ignore)
            assert answer.finish_reason == "eos"
            assert len(answer.token_ids) == 5 and answer.token_ids[-1] == end
            assert "<|im_end|>" not in answer.text
    finally:
        hook.remove()
    answer = chat.say("and?", ignore)
    messages = chat.transcript.messages[:-1]
    rendered = partner.described.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    fed = chat.transcript.token_ids[: -len(answer.token_ids)]
    assert partner.described.tokenizer.decode(fed) == partner.described.tokenizer.decode(
        rendered["input_ids"]
    )
    assert fed.count(end) == 5  # three turns of the user's and two answers
    assert chat.cache.num_seen_tokens == len(fed) + ANSWER - 1


def test_a_plain_answer_ends_at_the_users_line(load):
    partner = load(template=False)
    tokenizer = partner.described.tokenizer
    script = tokenizer(" a cat\nUser: W", add_special_tokens=False)["input_ids"]
    calls = iter(script)

    def follow(module, args, logits):
        token = next(calls, None)
        if token is not None:
            logits[..., token] = logits.max() + 1
        return logits

    hook = partner.model.lm_head.register_forward_hook(follow)
    pieces = []
    chat = Chat(*partner, make_cache(partner, chunk=64))
    answer = chat.say("who?", pieces.append)
    hook.remove()
    assert answer.finish_reason == "stop"
    assert "".join(pieces) == answer.text == "a cat"
    chat.say("more", ignore)
    assert tokenizer.decode(chat.transcript.token_ids).startswith(
        "User: who?\n\nAssistant: a cat\nUser: more\n\nAssistant:"
    )


def test_ctrl_c_ends_the_answer_and_the_chat_continues(partner):
    chat = Chat(*partner, make_cache(partner))
    cache = make_cache(partner)
    pieces = []

    def write(piece):
        pieces.append(piece)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    answer = chat.say("the cat?", write)
    assert answer.finish_reason == "interrupted"
    assert 3 <= len(answer.token_ids) < ANSWER
    assert signal.getsignal(signal.SIGINT) is before
    chat.cache.check_integrity()
    fed = chat.transcript.token_ids[: -len(answer.token_ids)]
    assert by_hand(partner, cache, fed, len(answer.token_ids)) == answer.token_ids
    assert_same_cache(chat.cache, cache)

    read = cache.num_seen_tokens
    later = chat.say("the dog?", ignore)
    fed = chat.transcript.token_ids[read : -len(later.token_ids)]
    assert fed[0] == answer.token_ids[-1]
    assert by_hand(partner, cache, fed, ANSWER) == later.token_ids
    assert_same_cache(chat.cache, cache)


def test_ctrl_c_during_prefill_leaves_unread_tokens_for_the_next_turn(partner):
    chat = Chat(*partner, make_cache(partner))
    blocks = []

    def interrupt(module, args, output):
        blocks.append(1)
        if len(blocks) == 2:
            signal.raise_signal(signal.SIGINT)

    hook = partner.model.base_model.register_forward_hook(interrupt)
    answer = chat.say(LONG_TURN, ignore)
    hook.remove()
    assert (answer.finish_reason, answer.token_ids) == ("interrupted", [])
    assert chat.cache.num_seen_tokens == 32
    assert len(chat.transcript.token_ids) > 48
    turn = list(chat.transcript.token_ids)
    later = chat.say("well?", ignore)
    assert chat.transcript.token_ids[: len(turn)] == turn
    cache = make_cache(partner)
    h2okv.prefill(partner.model, torch.tensor([turn[:32]]), cache)
    fed = chat.transcript.token_ids[32 : -len(later.token_ids)]
    assert by_hand(partner, cache, fed, ANSWER) == later.token_ids


# After the first layer, when the others have not read the block, and in the last one, whose
# progress is not visible from outside.
@pytest.mark.parametrize("layer", [0, -1])
def test_a_second_ctrl_c_in_a_forward_takes_the_turn_back(partner, layer):
    chat = Chat(*partner, make_cache(partner))
    chat.say("the cat?", ignore)

    def interrupt(module, args, output):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    hook = partner.model.base_model.layers[layer].register_forward_hook(interrupt)
    answer = chat.say("the dog?", ignore)
    hook.remove()
    assert answer.finish_reason == "interrupted"
    fresh = Chat(*partner, make_cache(partner))
    fresh.say("the cat?", ignore)
    assert_same_cache(chat.cache, fresh.cache)
    assert chat.say("well?", ignore).token_ids == fresh.say("well?", ignore).token_ids
    assert chat.transcript == fresh.transcript


@pytest.mark.parametrize(
    "options",
    [
        {}, {"evict_every": 8}, {"evict_every": 8, "positions": "original"},
        {"policy": "best", "evict_every": 8}, {"kv_bits": 8, "evict_every": 8},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("pin", [(), ("system",)])
def test_undo_and_retry_equal_a_chat_without_the_turn(partner, options, pin):
    def begin():
        config = CacheConfig(**{"heavy": 12, "recent": 12, "positions": "rolling"} | options)
        cache = h2okv.H2OCache.from_config(partner.model.config, config)
        return Chat(*partner, cache, "be brief", pin)

    read = []
    chat, cold = begin(), begin()
    assert [other.say("the cat?", ignore).text for other in (chat, cold)][0]
    chat.say("an owl, a fox; 7 herons?", ignore)
    assert chat.undo() == "an owl, a fox; 7 herons?"
    assert_same_cache(chat.cache, cold.cache)
    hook = partner.model.base_model.register_forward_hook(
        lambda module, args, output: read.append(output.last_hidden_state.shape[1])
    )
    seen = chat.cache.num_seen_tokens
    answer = chat.say("the dog?", ignore)
    hook.remove()
    assert sum(read) == chat.cache.num_seen_tokens - seen  # what is new and nothing else
    assert answer.token_ids == cold.say("the dog?", ignore).token_ids
    assert_same_cache(chat.cache, cold.cache)
    assert chat.say(chat.undo(), ignore).token_ids == answer.token_ids
    assert chat.transcript == cold.transcript
    for message in ("the dog?", "the cat?"):
        assert chat.undo() == message
    with pytest.raises(ValueError, match="no earlier turn is kept"):
        chat.undo()
    again = begin()
    assert chat.say("a heron?", ignore).token_ids == again.say("a heron?", ignore).token_ids
    assert_same_cache(chat.cache, again.cache)


def test_with_spans_a_chat_equals_generate_of_the_whole_text(partner):
    """A turn's answer is what transformers' own loop writes after the whole chat."""
    config = CacheConfig(heavy=12, recent=12, evict_every=8, positions="rolling")
    make = partial(h2okv.H2OCache.from_config, partner.model.config, config)
    chat = Chat(*partner, make(), "be brief")
    for number, turn in enumerate(("the cat?", "an owl, a fox?", "the dog?", "and the bird?")):
        answer = chat.say(turn, ignore)
        tokens = chat.transcript.token_ids
        ids = torch.tensor([tokens[: -len(answer.token_ids)]])
        with h2okv.enable(partner.model):
            options = {CACHE: make(), "max_new_tokens": ANSWER, "do_sample": False}
            generated = partner.model.generate(ids, **options)
        assert generated[0].tolist() == tokens
        if number == 1:
            chat.undo()


def test_copies_before_turns_are_limited(partner, monkeypatch):
    chat = Chat(*partner, make_cache(partner))
    chat.say("the cat?", ignore)
    monkeypatch.setattr("h2okv.engine.chat._TURNS_BYTES", 2 * chat.cache.nbytes)
    for _ in range(4):
        chat.say(LONG_TURN, ignore)
    for _ in range(2):
        chat.undo()
    with pytest.raises(ValueError, match="no earlier turn is kept"):
        chat.undo()


def test_a_second_ctrl_c_between_forwards_keeps_the_cache_usable(partner):
    chat = Chat(*partner, make_cache(partner))

    def write(piece):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    answer = chat.say("the cat?", write)
    assert answer.finish_reason == "interrupted"
    assert chat.cache.num_seen_tokens == len(chat.transcript.token_ids) - 1
    assert len(chat.say("the dog?", ignore).token_ids) == ANSWER


def test_a_turn_beyond_the_context_does_not_change_the_chat(load):
    partner = load()
    chat = Chat(*partner, make_cache(partner, positions="original"))
    chat.say("the cat?", ignore)
    before, seen = chat.transcript, chat.cache.num_seen_tokens
    with pytest.raises(
        ValueError,
        match=rf"a chat of {seen} tokens and this turn .* context of 256 tokens, got .*rolling",
    ):
        chat.say(LONG_TURN * 5, ignore)
    assert chat.transcript is before
    assert chat.cache.num_seen_tokens == seen
    assert len(chat.say("the dog?", ignore).token_ids) == ANSWER


def test_an_answer_ends_with_the_context(load):
    partner = load()
    partner = partner._replace(params=greedy(1000))
    partner.model.generation_config.suppress_tokens = sorted(eos_token_ids(partner.model))
    chat = Chat(*partner, make_cache(partner, positions="original"))
    answer = chat.say("the cat?", ignore)
    assert answer.finish_reason == "context"
    assert len(chat.transcript.token_ids) == 256
    with pytest.raises(
        ValueError, match="this turn and its output must fit the model's context of 256"
    ):
        chat.say("the dog?", ignore)


def test_a_turn_that_the_cache_refuses_is_not_part_of_the_chat(partner):
    # A block as long as the window has no room after the entries of the cache.
    chat = Chat(*partner, make_cache(partner, chunk=None))
    chat.say("the cat?", ignore)
    before = chat.transcript
    with pytest.raises(ValueError, match="window of 256"):
        chat.say(LONG_TURN * 5, ignore)
    assert chat.transcript is before
    assert len(chat.say("the dog?", ignore).token_ids) == ANSWER


def test_an_error_during_an_answer_keeps_the_text_so_far(partner):
    chat = Chat(*partner, make_cache(partner))
    calls = 0

    def spoil(module, args, logits):
        nonlocal calls
        calls += 1
        return logits * torch.nan if calls == 4 else logits

    hook = partner.model.lm_head.register_forward_hook(spoil)
    with pytest.raises(ValueError, match="not a number"):
        chat.say("the cat?", ignore)
    hook.remove()
    assert [message["role"] for message in chat.transcript.messages] == ["user", "assistant"]
    assert chat.cache.num_seen_tokens == len(chat.transcript.token_ids)
    assert len(chat.say("the dog?", ignore).token_ids) == ANSWER


def test_sampling_follows_the_seed(load):
    partner = load()
    texts = []
    for seed in (1, 1, 2):
        sampling = SamplingParams(max_tokens=ANSWER, temperature=1.0, top_p=0.9, seed=seed)
        chat = Chat(partner.model, partner.described, sampling, make_cache(partner))
        texts.append([chat.say(turn, ignore).token_ids for turn in ("the cat?", "the dog?")])
    assert texts[0] == texts[1] != texts[2]


def test_a_long_turn_shows_a_progress_bar(partner, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    chat = Chat(*partner, make_cache(partner))
    chat.say(LONG_TURN, ignore, show_progress=True)
    assert terminal.getvalue() == ""
    chat.say(LONG_TURN * 10, ignore, show_progress=True)
    assert "reading " in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", quiet := io.StringIO())
    chat.say(LONG_TURN * 10, ignore, show_progress=True)
    assert quiet.getvalue() == ""


@pytest.mark.parametrize("budgets", [None, ((0.5, 1.5), (1.25, 0.75))], ids=["even", "by head"])
def test_a_chat_saves_memory_from_one_number_of_tokens_on(budgets):
    """It follows from the budget, so it is the same after every turn."""
    model = make_model(context=4096)
    cache = h2okv.H2OCache(model, 40, 24, scoring="expected", evict_every=64, layer_budgets=budgets)
    numbers, blocks = [], (5, 20, 1, 30, 1, 100, 3)
    with torch.no_grad(), h2okv.enable(model):
        for length in blocks:
            model(torch.full((1, length), 7), past_key_values=cache)
            numbers.append(break_even_tokens(cache))
        assert len(set(numbers)) == 1, numbers
        while cache.num_seen_tokens < numbers[0] or cache.num_seen_tokens % 64 != 63:
            model(torch.full((1, 1), 7), past_key_values=cache)
    assert cache.nbytes < cache.full_nbytes
