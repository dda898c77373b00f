"""A cache after a ``generate`` with drafts: what follows is read as after a plain one."""

import copy
import pickle
import threading
from unittest.mock import MagicMock

import pytest
import torch
from oracle import cache_of
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation import utils as generation

import h2okv
from h2okv.cache.argument import CACHE

pytestmark = pytest.mark.skipif(CACHE != "cache", reason="needs transformers 5.24")

VOCABULARY, NEW = 61, 8
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.35,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LATENTS = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "first_k_dense_replace": 9,
}  # fmt: skip
FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 9},
    "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "deepseek_v3": LATENTS,
    "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
}
BY_HEAD = [[0.5, 1.0], [2.0, 0.5]]
OPTIONS = [
    {}, {"heavy": 0.2, "recent": 0.1}, {"scoring": "mean"}, {"scoring": "decay"},
    {"scoring": "last"}, {"scoring": "value_norm"}, {"scoring": "expected", "sink": 4},
    {"kv_bits": 8}, {"kv_bits": 4}, {"positions": "rolling"}, {"layer_budgets": BY_HEAD},
    {"evict_every": 8}, {"evict_every": 8, "scoring": "expected", "layer_budgets": BY_HEAD},
    {"evict_every": 3}, {"policy": "snapkv"}, {"policy": "full"}, {"masks": True},
]  # fmt: skip
# Without the token of padding, which a mask made from the text would leave out.
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "suppress_tokens": [0]}
LOOKUP = {"prompt_lookup_num_tokens": 3}


def family(name: str, seed: int = 0):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **SIZES, **FAMILIES[name])
    return AutoModelForCausalLM.from_config(config, attn_implementation="h2o").double().eval()


@pytest.fixture(scope="module")
def model():
    return family("llama")


def tokens(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def prompt(length: int = 30) -> torch.Tensor:
    """Return a text that repeats itself, of which prompt lookup makes drafts."""
    return tokens(9).repeat(1, 5)[:, :length]


def new_cache(model, **options):
    return cache_of(model.config, **({"heavy": 6, "recent": 4} | options))


def generate(model, ids, cache, **options):
    return model.generate(ids, **({CACHE: cache} | GREEDY | options))


def drafts_of(mode, model):
    return {
        "lookup": LOOKUP,
        "itself": {"assistant_model": model},
        "early exit": {"assistant_early_exit": 1},
    }[mode]


def sets(cache):
    """Return what each head keeps, and a score for each, in the order of the text."""
    entries = []
    for index, layer in enumerate(cache.layers):
        if hasattr(layer, "rule"):
            positions, order = cache.kept_positions(index).sort(dim=-1)
            scores = cache.scores(index).gather(-1, order)
            entries.append([positions[positions >= 0], scores[positions >= 0]])
    return entries


def check_alike(cache, other):
    cache.check_integrity()
    assert cache.num_seen_tokens == other.num_seen_tokens
    for (positions, scores), (others, their_scores) in zip(sets(cache), sets(other), strict=True):
        assert torch.equal(positions, others)
        torch.testing.assert_close(scores, their_scores, atol=1e-4, rtol=1e-4)


def turn_by(method, model, cache, text):
    """Read a text's new tokens into a cache in one of the ways that a turn may come."""
    seen = cache.num_seen_tokens
    if method == "whole":
        return generate(model, text, cache)[:, text.shape[1] :]
    if method == "whole with drafts":
        return generate(model, text, cache, **LOOKUP)[:, text.shape[1] :]
    turn = cache.next_turn(text[:, seen:])
    if method.startswith("next_turn"):
        more = LOOKUP if method.endswith("drafts") else {}
        return model.generate(**turn, **{CACHE: cache}, **GREEDY, **more)[:, -NEW:]
    if method == "prefill":
        return h2okv.prefill(model, text[:, seen:], cache).argmax(dim=-1)
    with torch.no_grad():
        return model(text[:, seen:], **{CACHE: cache}).logits.argmax(dim=-1)[:, -1]


TURNS = ["whole", "next_turn", "forward", "prefill", "whole with drafts", "next_turn with drafts"]


def check_turns(model, options, drafts, turns, between=lambda cache: cache):
    """Compare turns after drafts with those after plain steps, each of a copy of the cache."""
    caches, texts = [], []
    for extra in ({}, drafts):
        cache = new_cache(model, **options)
        texts.append(generate(model, prompt(), cache, **extra))
        caches.append(cache)
    assert torch.equal(*texts)
    caches[1] = between(caches[1])
    text = torch.cat([texts[0], tokens(7, seed=5)], dim=1)
    expected = copy.deepcopy(caches[0])
    answers = {False: turn_by("whole", model, expected, text)}
    forward = copy.deepcopy(caches[0])
    answers[True] = turn_by("forward", model, forward, text)
    for method in turns:
        cache = copy.deepcopy(caches[1])
        answer, reads_only = turn_by(method, model, cache, text), method in ("forward", "prefill")
        assert torch.equal(answer, answers[reads_only]), method
        check_alike(cache, forward if reads_only else expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mode", ["lookup", "itself", "early exit"])
def test_a_turn_after_drafts_is_read_as_after_plain_steps(model, mode, options):
    turns = TURNS if mode == "lookup" else ["forward", "next_turn with drafts"]
    check_turns(model, options, drafts_of(mode, model), turns)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama"])
@pytest.mark.parametrize("options", [{"scoring": "value_norm"}, {"evict_every": 8}], ids=str)
def test_families_go_on_alike(name, options):
    model, other = family(name), ["whole", "next_turn"]
    check_turns(model, options, LOOKUP, TURNS)
    for drafts in ({"assistant_model": model}, {"assistant_model": family(name, seed=1)}):
        check_turns(model, options, drafts, other)


def _loaded(cache, path, model):
    cache.save(path / "cache")
    return h2okv.H2OCache.load(path / "cache", model)


def _reordered(cache):
    cache.reorder_cache(torch.tensor([0]))
    return cache


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("copies", ["fork", "load", "pickle", "reorder", "read, then load"])
def test_copies_go_on_alike(name, copies, tmp_path):
    model = family(name)
    change = {
        "fork": lambda cache: cache.fork(1),
        "load": lambda cache: _loaded(cache, tmp_path, model),
        "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
        "reorder": _reordered,
    }.get(copies)
    if change is not None:
        check_turns(model, {}, LOOKUP, TURNS, change)
        return
    cache = new_cache(model)  # layers that slide hold no more than their window
    text = generate(model, prompt(), cache, **LOOKUP)
    generate(model, torch.cat([text, tokens(7, seed=5)], dim=1), cache)
    check_alike(_loaded(cache, tmp_path, model), cache)


def test_a_padded_prompt_goes_on_alike(model):
    ids = torch.cat([torch.zeros(1, 6, dtype=torch.int64), prompt()], dim=1)
    mask = (torch.arange(36) >= 6).long()[None]
    results = []
    for drafts in ({}, LOOKUP):
        cache = new_cache(model)
        text = generate(model, ids, cache, attention_mask=mask, **drafts)
        for more in ({}, drafts):
            text = torch.cat([text, tokens(7, seed=5)], dim=1)
            full_mask = torch.cat([mask, mask.new_ones(1, text.shape[1] - 36)], dim=1)
            text = generate(model, text, cache, attention_mask=full_mask, **more)
        results.append((text, cache))
    assert torch.equal(results[0][0], results[1][0])
    check_alike(results[1][1], results[0][1])


def test_a_reset_cache_begins_anew(model):
    cache, fresh = new_cache(model), new_cache(model)
    generate(model, prompt(), cache, **LOOKUP)
    cache.reset()
    texts = []
    for each in (cache, fresh):
        text = torch.cat([generate(model, prompt(20), each), tokens(7)], dim=1)
        texts.append(generate(model, text, each))
    assert torch.equal(*texts)
    check_alike(cache, fresh)


@pytest.mark.parametrize("name", ["llama", "gemma2", "lfm2"])
@pytest.mark.parametrize("verified", [0, 1, 2])
@pytest.mark.parametrize("mode", ["lookup", "itself"])
def test_unverified_drafts_of_an_interrupted_generate_are_taken_back(
    name, verified, mode, monkeypatch
):
    """What a streamer has heard but for the newest token is what the cache has seen."""
    model = family(name)
    cache, plain, calls = new_cache(model), new_cache(model), []
    crop = cache.crop

    def interrupted(count):
        calls.append(count)
        if len(calls) > verified:
            raise KeyboardInterrupt
        crop(count)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cache, "crop", interrupted)
        generate(model, prompt(), cache, max_new_tokens=70, **drafts_of(mode, model))
    seen = cache.num_seen_tokens
    assert seen == 30 if not verified else 30 < seen < 90
    text = generate(model, prompt(), plain, max_new_tokens=seen - 29)
    check_alike(cache, plain)
    text = torch.cat([text, tokens(7)], dim=1)
    assert torch.equal(generate(model, text, cache), generate(model, text, plain))
    check_alike(cache, plain)


@pytest.mark.parametrize("drafts", [LOOKUP, {"assistant_model": None}], ids=str)
def test_a_refused_generate_leaves_no_length_of_its_prompt(model, drafts):
    """A budget in fractions is that of the prompt that is read."""
    cache, fresh = (new_cache(model, heavy=0.2, recent=0.2) for _ in range(2))
    drafts = {name: value or model for name, value in drafts.items()}
    with pytest.raises(ValueError, match="batch_size = 1"):
        generate(model, tokens(50, rows=2), cache, **drafts)
    for each in (cache, fresh):
        h2okv.prefill(model, prompt(20), each)
    check_alike(cache, fresh)
    assert not model._forward_pre_hooks


def test_what_was_expected_before_drafts_stays(model):
    cache = new_cache(model, heavy=0.2, recent=0.2)
    cache.expect(60)
    with pytest.raises(ValueError, match="batch_size = 1"):
        generate(model, tokens(50, rows=2), cache, **LOOKUP)
    h2okv.prefill(model, prompt(20), cache)
    assert cache.num_cached_tokens == 20  # of 24


def test_a_prefilled_prompt_may_have_drafts(model):
    caches = [new_cache(model) for _ in range(2)]
    for cache in caches:
        h2okv.prefill(model, prompt()[:, :-1], cache)
    texts = [generate(model, prompt(), caches[0]), generate(model, prompt(), caches[1], **LOOKUP)]
    assert torch.equal(*texts)
    check_alike(*caches)
    assert not model._forward_pre_hooks


def test_embeddings_of_a_later_turn_may_come_as_the_whole_text(model):
    caches = [new_cache(model) for _ in range(2)]
    embed = model.get_input_embeddings()
    answers = []
    for cache, drafts in zip(caches, ({}, LOOKUP), strict=True):
        h2okv.prefill(model, prompt()[:, :-3], cache)
        answers.append(
            model.generate(inputs_embeds=embed(prompt()), **{CACHE: cache}, **GREEDY, **drafts)
        )
    assert torch.equal(*answers)
    check_alike(*caches)


def test_a_text_that_adds_nothing_is_refused_with_drafts_too(model):
    cache = new_cache(model)
    text = generate(model, prompt(), cache)
    for ids in (text[:, :-1], text[:, :10]):
        with pytest.raises(ValueError, match=r"seen 37 tokens and got none.*cache\.reset"):
            generate(model, ids, cache, **LOOKUP)
    assert torch.equal(generate(model, torch.cat([text, prompt()], dim=1), cache)[:, :38], text)


def test_two_caches_take_turns_with_drafts_on_one_model(model):
    caches = [new_cache(model) for _ in range(2)]
    texts = [generate(model, prompt(), cache, **LOOKUP) for cache in caches]
    for _ in range(2):
        texts = [torch.cat([text, tokens(5)], dim=1) for text in texts]
        texts = [
            generate(model, text, cache, **LOOKUP)
            for text, cache in zip(texts, caches, strict=True)
        ]
    assert torch.equal(*texts)


def test_another_thread_may_look_at_a_cache_while_drafts_are_verified(model, monkeypatch):
    cache, plain, lengths = new_cache(model), new_cache(model), []
    crop = cache.crop

    def look(count):
        thread = threading.Thread(target=lambda: lengths.append(cache.num_seen_tokens))
        thread.start()
        thread.join()
        crop(count)

    monkeypatch.setattr(cache, "crop", look)
    text = generate(model, prompt(), cache, **LOOKUP)
    assert torch.equal(text, generate(model, prompt(), plain))
    assert len(lengths) > 1 and min(lengths) >= 30
    monkeypatch.undo()
    check_alike(cache, plain)


def test_steps_after_drafts_are_ready_for_the_compiler(model):
    """Recording keeps it off, and copies the scores of every step."""
    cache = new_cache(model)
    text = generate(model, prompt(), cache, **LOOKUP)
    assert cache.prepare_step()
    assert not any(cache.is_recording_past(layer) for layer in range(2))
    with torch.no_grad():
        model(text[:, -1:], **{CACHE: cache})
    assert all(layer.log is None for layer in cache.layers)


def test_a_cache_that_runs_ahead_of_the_stopping_criteria_records_no_longer(model, monkeypatch):
    """transformers does so on one kind of device: the last step may be taken back."""
    checks = staticmethod(lambda *_, **__: True)
    monkeypatch.setattr(generation.DeferredStopCheck, "is_supported", checks)
    monkeypatch.setattr(torch, "Event", lambda **_: MagicMock())
    caches = [new_cache(model) for _ in range(2)]
    texts = [generate(model, prompt(), caches[0])]
    monkeypatch.undo()
    texts.append(generate(model, prompt(), caches[1]))
    for _ in range(2):
        assert torch.equal(*texts)
        check_alike(*caches)
        texts = [
            generate(model, torch.cat([text, tokens(6)], dim=1), cache)
            for text, cache in zip(texts, caches, strict=True)
        ]


def test_recording_by_hand_lasts_until_it_is_ended(model):
    cache, plain = new_cache(model), new_cache(model)
    cache.activate_past_recording()
    for each in (cache, plain):
        text = torch.cat([generate(model, prompt(), each), tokens(7)], dim=1)
    cache.crop(-2)
    assert cache.num_seen_tokens == 35
    with torch.no_grad():
        for column in (35, 36):
            model(text[:, column : column + 1], **{CACHE: cache})
    cache.end_past_recording()
    assert torch.equal(generate(model, text, cache), generate(model, text, plain))
    check_alike(cache, plain)


def test_rows_may_be_chosen_between_drafts_and_their_end(model):
    ids, rows = tokens(25, rows=3), torch.tensor([2, 0])
    cache, plain = new_cache(model), new_cache(model)
    with torch.no_grad():
        for each, length in ((cache, 25), (plain, 22)):
            model(ids[:, :20], **{CACHE: each})
            each.activate_past_recording()
            model(ids[:, 20:length], **{CACHE: each})
            each.reorder_cache(rows)
    cache.crop(-3)
    check_alike(cache, plain)


def test_entries_read_as_a_block_are_not_taken_back(model):
    cache = new_cache(model)
    with torch.no_grad():
        model(tokens(20), **{CACHE: cache})
        cache.activate_past_recording()
        model(tokens(4), **{CACHE: cache})
    turn = cache.next_turn(tokens(5))
    model.generate(**turn, **{CACHE: cache}, **GREEDY, **LOOKUP)
    with pytest.raises(ValueError, match="of a forward whose past it recorded"):
        cache.crop(-1)
