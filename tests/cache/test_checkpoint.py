"""A cache in a file, and copies of it for many prompts."""

import copy
import json
import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import cache_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import h2okv
from h2okv.cache.checkpoint import CONTRACT, FORMAT, read_notes
from h2okv.config import CacheConfig


def tokens(length, seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, length), generator=generator)


@torch.no_grad()
def follow(model, cache, ids):
    return torch.cat([model(token, past_key_values=cache).logits for token in ids], dim=1)


CONTINUATION = [tokens(1, 1), tokens(1, 2), tokens(7, 3), tokens(1, 4)]


@pytest.fixture
def model(make_llama):
    return make_llama()


def saved(model, tmp_path, batch=1, **options):
    cache = cache_of(model.config, 6, 6, **options)
    with torch.no_grad():
        model(tokens(60, batch=batch), past_key_values=cache)
    path = tmp_path / "cache.safetensors"
    cache.save(path, {"text": "a note"})
    return cache, path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"positions": "rolling", "evict_every": 16}, {"policy": "random", "seed": 7},
     {"policy": "full"}, {"policy": "sink_recent", "max_tokens": 30}],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)  # fmt: skip
def test_a_loaded_cache_goes_on_as_if_nothing_had_happened(model, tmp_path, options, dtype):
    model = model.to(dtype)
    cache, path = saved(model, tmp_path, **options)
    for loaded in (h2okv.H2OCache.load(path, model), h2okv.H2OCache.load(path)):
        loaded.check_integrity()
        assert loaded.nbytes == cache.nbytes
        expected = follow(model, copy.deepcopy(cache), CONTINUATION)
        assert torch.equal(follow(model, loaded, CONTINUATION), expected)
        assert loaded.num_seen_tokens == 70
    assert read_notes(path) == {"text": "a note"}


@pytest.fixture
def window_model():
    config = AutoConfig.for_model(
        "gemma3_text", hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=97,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="h2o").eval()


def test_layers_of_other_kinds_are_kept_too(window_model, tmp_path):
    model = window_model
    cache, path = saved(model, tmp_path)
    loaded = h2okv.H2OCache.load(path, model)
    assert torch.equal(follow(model, loaded, CONTINUATION), follow(model, cache, CONTINUATION))


def test_a_fork_shares_no_memory(model):
    cache = cache_of(model.config, 6, 6)
    follow(model, cache, [tokens(60)])
    before = [layer.state.scores.clone() for layer in cache.layers]
    follow(model, cache.fork(1), CONTINUATION)
    assert all(torch.equal(a, b.state.scores) for a, b in zip(before, cache.layers, strict=True))


@pytest.mark.parametrize("copies", [0, -1, 1.5, True])
def test_a_fork_into_nothing_is_refused(model, copies):
    with pytest.raises(ValueError, match=f"copies={copies}"):
        cache_of(model.config).fork(copies)


def test_another_model_is_refused(make_llama, model, tmp_path):
    _, path = saved(model, tmp_path)
    with pytest.raises(ValueError, match="num_key_value_heads is 2 and this model's is 4"):
        h2okv.H2OCache.load(path, make_llama(kv_heads=4))
    with pytest.raises(ValueError, match="rope_parameters"):
        rope = {"rope_type": "default", "rope_theta": 5000.0}
        h2okv.H2OCache.load(path, make_llama(rope_parameters=rope).config)
    with pytest.raises(ValueError, match="torch.float64 and the model is in torch.bfloat16"):
        h2okv.H2OCache.load(path, copy.deepcopy(model).to(torch.bfloat16))
    loaded = h2okv.H2OCache.load(path, make_llama(seed=1))
    with pytest.raises(ValueError, match="saved with other weights"):
        follow(make_llama(seed=1), loaded, CONTINUATION)
    loaded = h2okv.H2OCache.load(path)
    with pytest.raises(ValueError, match="saved with other weights"):
        follow(make_llama(seed=1), loaded, CONTINUATION)


def test_what_generation_is_told_makes_no_other_model(model, tmp_path):
    cache, path = saved(model, tmp_path)
    duplicate = copy.deepcopy(model)
    duplicate.config.pad_token_id, duplicate.config.use_cache = 5, False
    duplicate.config.output_hidden_states = True
    loaded = h2okv.H2OCache.load(path, duplicate)
    assert torch.equal(follow(duplicate, loaded, CONTINUATION), follow(model, cache, CONTINUATION))


def rewrite(path, change_tensors=lambda tensors: None, change_head=lambda head: None):
    """Write the file again with tensors and a header that functions have changed."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    head, tensors = json.loads(metadata["h2okv"]), load_file(path)
    change_tensors(tensors)
    change_head(head)
    save_file(tensors, path, metadata=metadata | {"h2okv": json.dumps(head)})


def test_another_contract_or_format_is_refused(model, tmp_path):
    _, path = saved(model, tmp_path)
    rewrite(path, change_head=lambda head: head.update(format=2))
    with pytest.raises(ValueError, match="version 2 of the file format"):
        h2okv.H2OCache.load(path, model)
    rewrite(path, change_head=lambda head: head.update(contract=999, format=FORMAT))
    with pytest.raises(ValueError, match="version 999 of the eviction contract"):
        h2okv.H2OCache.load(path, model)
    rewrite(path, change_head=lambda head: (head.update(contract=CONTRACT), head.pop("format")))
    with pytest.raises(ValueError, match="version 1 of the file format and this h2okv has"):
        h2okv.H2OCache.load(path, model)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.99])
def test_a_truncated_file_is_refused(model, tmp_path, share):
    _, path = saved(model, tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match="no whole saved cache, or damaged"):
        h2okv.H2OCache.load(path, model)
    with pytest.raises(ValueError, match="no whole saved cache, or damaged"):
        read_notes(path)


def test_a_file_without_a_cache_is_refused(model, tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="holds tensors but no H2OCache"):
        h2okv.H2OCache.load(path, model)
    for name in ("none", "long" * 100):
        with pytest.raises(ValueError, match="does not exist"):
            h2okv.H2OCache.load(tmp_path / name, model)
    with pytest.raises(ValueError, match="damaged"):
        h2okv.H2OCache.load(tmp_path, model)


def test_a_file_that_lacks_a_tensor_is_refused(model, tmp_path):
    _, path = saved(model, tmp_path)
    for name in ("1.scores", "1.keys", "0.free_slot"):
        broken = shutil.copy(path, tmp_path / "broken")
        rewrite(broken, lambda tensors, name=name: tensors.pop(name))
        with pytest.raises(ValueError, match="no whole saved cache, or damaged"):
            h2okv.H2OCache.load(broken, model)


def test_an_older_file_survives_a_failed_save(model, tmp_path, monkeypatch):
    cache, path = saved(model, tmp_path)
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("h2okv.cache.checkpoint.save_file", full)
    with pytest.raises(ValueError, match="No space left on device"):
        cache.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]
    with pytest.raises(ValueError, match="cannot be written"):
        cache.save(tmp_path / "no folder" / "file")


def test_an_empty_or_torn_cache_is_not_saved(model, tmp_path):
    cache = cache_of(model.config)
    with pytest.raises(ValueError, match="nothing to save"):
        cache.save(tmp_path / "c")
    follow(model, cache, [tokens(60)])
    cache.layers[1].count_columns(1)
    with pytest.raises(ValueError, match="interrupted"):
        cache.save(tmp_path / "c")


def test_a_policy_that_is_no_json_is_refused(model, tmp_path):
    class Own(h2okv.Policy):
        name = "own"

        def __init__(self):
            self.table = torch.zeros(3)

        def priority(self, scores, positions, newest, layer_idx):
            return -scores

    with pytest.raises(ValueError, match="policy='own' .* no JSON"):
        saved(model, tmp_path, policy=Own())


def test_a_policy_of_ones_own_comes_by_argument(model, tmp_path):
    class Own(h2okv.Policy):
        name = "own"

        def priority(self, scores, positions, newest, layer_idx):
            return -scores

    cache, path = saved(model, tmp_path, policy=Own())
    with pytest.raises(ValueError, match="policy 'own' is unknown"):
        h2okv.H2OCache.load(path, model)
    loaded = h2okv.H2OCache.load(path, model, policy=Own())
    assert torch.equal(follow(model, loaded, CONTINUATION), follow(model, cache, CONTINUATION))


DAMAGES = {
    "a free slot out of range": ("0.free_slot", lambda t: t.fill_(40)),
    "a free slot that is taken": ("1.free_slot", lambda t: t.copy_((t + 1) % 13)),
    "scores that are not finite": ("0.scores", lambda t: t.fill_(torch.nan)),
    "keys that are not finite": ("1.keys", lambda t: t.fill_(torch.inf)),
    "no positions": ("0.positions", lambda t: t.fill_(-1)),
    "one position many times": ("0.positions", lambda t: t.clamp_(max=5)),
    "a position that was not seen": ("0.positions", lambda t: t.mul_(9)),
    "another negative position": ("0.positions", lambda t: t.clamp_(max=-2)),
    "more tokens than were seen": ("0.num_real_tokens", lambda t: t.fill_(1 << 40)),
    "no tokens": ("1.num_real_tokens", lambda t: t.zero_()),
    "another total": ("0.total", lambda t: t.add_(1)),
    "a negative window": ("0.recent", lambda t: t.neg_()),
    "ranks out of range": ("1.ranks", lambda t: t.fill_(13)),
    "ranks of others": ("1.ranks", lambda t: t.zero_()),
}


@pytest.fixture(scope="module")
def rolling_file(make_llama, tmp_path_factory):
    model = make_llama()
    cache = cache_of(model.config, 6, 6, positions="rolling")
    follow(model, cache, [tokens(60), tokens(1)])
    path = tmp_path_factory.mktemp("saved") / "cache"
    cache.save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    return model, path.parent, load_file(path), metadata


def load_with(rolling_file, tensors, head=None):
    model, folder, _, metadata = rolling_file
    text = metadata["h2okv"] if head is None else head
    save_file(tensors, folder / "broken", metadata=metadata | {"h2okv": text})
    cache = h2okv.H2OCache.load(folder / "broken", model)
    follow(model, cache, CONTINUATION)
    cache.check_integrity()


@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=DAMAGES.keys())
def test_numbers_that_cannot_be_are_refused(rolling_file, name, damage):
    tensors = {key: tensor.clone() for key, tensor in rolling_file[2].items()}
    damage(tensors[name])
    with pytest.raises(ValueError, match="no whole saved cache, or damaged"):
        load_with(rolling_file, tensors)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"0.attend": torch.zeros(1)},
        lambda t: t | {"9.keys": t["0.keys"].clone()},
        lambda t: t | {"keys": t["0.keys"].clone()},
        lambda t: t | {"0.norms": t["0.scores"].clone()},
        lambda t: t | {"0.slot_mask": torch.zeros(1, 2, 13, dtype=torch.bool)},
        lambda t: t | {"0.values": t["0.values"][:, :, :5].clone()},
        lambda t: t | {"0.keys": t["0.keys"].float()},
        lambda t: t | {"0.cumulative_length": torch.tensor(61.0)},
        lambda t: t | {"1.cumulative_length": torch.tensor(62)},
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(rolling_file, change):
    with pytest.raises(ValueError, match="no whole saved cache, or damaged"):
        load_with(rolling_file, change(rolling_file[2]))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_file_with_a_changed_byte_is_refused(rolling_file, data):
    model, folder, tensors, metadata = rolling_file
    save_file(tensors, folder / "changed", metadata=metadata)
    content = bytearray((folder / "changed").read_bytes())
    at = data.draw(st.integers(8, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    (folder / "changed").write_bytes(content)
    try:
        cache = h2okv.H2OCache.load(folder / "changed", model)
    except ValueError as error:
        assert len(str(error)) < 2000
    else:  # a name that safetensors gives, or its padding
        assert cache.cache_config.to_dict() == json.loads(metadata["h2okv"])["cache_config"]
        follow(model, cache, CONTINUATION)
        cache.check_integrity()


def test_a_policy_that_keeps_other_numbers_is_refused(model, tmp_path):
    class Weighed(h2okv.Policy):
        name = "weighed"
        weighs_values = True

    _, path = saved(model, tmp_path)
    with pytest.raises(ValueError, match="norms must be there, by the cache's options"):
        h2okv.H2OCache.load(path, model, policy=Weighed())


@pytest.mark.parametrize("name", ["0.keys", "0.values"])
def test_a_window_of_another_text_is_refused(window_model, tmp_path, name):
    _, path = saved(window_model, tmp_path)
    rewrite(path, lambda tensors: tensors.update({name: tensors[name][:, :, 1:].clone()}))
    with pytest.raises(ValueError, match="no whole saved cache, or damaged"):
        h2okv.H2OCache.load(path, window_model)


def json_paths(value, path=()):
    """Yield the paths to all parts of a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield from json_paths(value[key], (*path, key))


WRONG = [None, True, -1, 0, 7, 1 << 70, 0.5, "", "h2o", "float32", [], [1], {}, {"a": 1}]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_crafted_header_is_refused_or_harmless(rolling_file, data):
    _, _, tensors, metadata = rolling_file
    head = json.loads(metadata["h2okv"])
    path = data.draw(st.sampled_from(sorted(json_paths(head), key=str)))
    action = data.draw(st.sampled_from(["replace", "remove", "add"]))
    wrong = data.draw(st.sampled_from(WRONG))
    if path == ():
        head = wrong
    else:
        container = head
        for key in path[:-1]:
            container = container[key]
        if action == "replace":
            container[path[-1]] = wrong
        elif action == "remove":
            del container[path[-1]]
        elif isinstance(container, dict):
            container["unknown"] = wrong
    try:
        load_with(rolling_file, tensors, json.dumps(head))
    except ValueError as error:
        assert len(str(error)) < 2000


@pytest.mark.parametrize("head", ["", "no JSON", "[1]", "3", "{", "[" * 100_000])
def test_a_header_that_is_no_object_is_refused(rolling_file, head):
    with pytest.raises(ValueError, match="no whole saved cache, or damaged"):
        load_with(rolling_file, rolling_file[2], head)


def test_a_cache_carries_its_config(model, tmp_path):
    cache, path = saved(model, tmp_path, policy="random", seed=7, positions="rolling")
    expected = CacheConfig("random", 6, 6, positions="rolling", seed=7)
    assert cache.cache_config == expected
    loaded = h2okv.H2OCache.load(path, model)
    assert loaded.cache_config.to_dict() | {"seed": 7} == expected.to_dict()


@pytest.mark.parametrize("kind", ["conv", "linear_attention"])
def test_linear_layers_are_forked_and_saved(tmp_path, kind):
    sizes = dict(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    if kind == "conv":
        config = AutoConfig.for_model("lfm2", layer_types=["conv", "full_attention"], **sizes)
    else:
        config = AutoConfig.for_model(
            "qwen3_next", layer_types=["linear_attention", "full_attention"], head_dim=8,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
            linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1,
            moe_intermediate_size=16, shared_expert_intermediate_size=16, **sizes,
        )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="h2o").eval()
    cache, path = saved(model, tmp_path)
    loaded, twice = h2okv.H2OCache.load(path, model), cache.fork(2)
    steps = [tokens(1, seed) for seed in (1, 2, 3)]
    expected = follow(model, cache, steps)
    assert torch.equal(follow(model, loaded, steps), expected)
    both = follow(model, twice, [step.expand(2, 1) for step in steps])
    torch.testing.assert_close(both, expected.expand_as(both), atol=1e-4, rtol=1e-4)
    twice.reset()
    again = follow(model, twice, [tokens(12, 7), *steps])  # a batch of another size
    assert torch.equal(again, follow(model, cache_of(config, 6, 6), [tokens(12, 7), *steps]))
