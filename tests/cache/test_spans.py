"""`evict_every`: what is kept depends on the text alone, however it was cut."""

import pytest
import torch
from oracle import cache_of

import h2okv
from h2okv.ops.reference import AttentionSpec

BY_HEAD = [[0.5, 1.0], [2.0, 0.5]]
OPTIONS = [
    {}, {"scoring": "expected"}, {"scoring": "mean"}, {"scoring": "decay"}, {"scoring": "last"},
    {"scoring": "value_norm"}, {"policy": "keydiff"}, {"policy": "random"},
    {"policy": "sink_recent"}, {"policy": "strided_heavy"}, {"positions": "rolling"},
    {"positions": "rolling", "scoring": "expected"}, {"kv_bits": 8},
    {"kv_bits": 4, "scoring": "expected"},
    {"layer_budgets": BY_HEAD}, {"layer_budgets": BY_HEAD, "policy": "best"},
    {"layer_budgets": BY_HEAD, "kv_bits": 8}, {"layer_budgets": [1.5, 0.5]},
]  # fmt: skip


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama().double()  # codes of `kv_bits` would differ by the rounding of products


@torch.no_grad()
def read(model, cache, ids, sizes, lengths=None):
    """Read texts ``[B, T]`` in forwards of these sizes; return the logits ``[B, T, V]``.

    With lengths the first forward is padded on the left, to the longest.
    """
    logits, start = [], 0
    batch, longest = len(ids), max(lengths or [0])
    pads = torch.tensor([longest - length for length in lengths or [0] * batch])
    mask = (torch.arange(ids.shape[1]) >= pads.unsqueeze(1)).long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    for size in sizes:
        columns = slice(start, start + size)
        inputs = {"attention_mask": mask[:, : start + size]} if lengths else {}
        output = model(
            ids[:, columns], position_ids=positions[:, columns], past_key_values=cache, **inputs
        )
        logits.append(output.logits)
        start += size
    assert start == ids.shape[1]
    cache.check_integrity()
    return torch.cat(logits, dim=1)


def entries(cache, row=0):
    """Positions and scores of a sequence, by layer: sorted ``[H, N]`` without empty slots."""
    result = []
    for layer in range(len(cache.layers)):
        positions, scores = cache.kept_positions(layer)[row], cache.scores(layer)[row]
        order = positions.argsort(dim=-1)
        result.append((positions.gather(-1, order), scores.gather(-1, order)))
    return result


def assert_same_entries(cache, other, row=0, other_row=0):
    for (positions, scores), (others, their_scores) in zip(
        entries(cache, row), entries(other, other_row), strict=True
    ):
        width = max(positions.shape[-1], others.shape[-1])
        positions, others = (
            torch.nn.functional.pad(p, (width - p.shape[-1], 0), value=-1)
            for p in (positions, others)
        )
        assert torch.equal(positions, others)
        scores, their_scores = (
            torch.nn.functional.pad(s, (width - s.shape[-1], 0)) for s in (scores, their_scores)
        )
        torch.testing.assert_close(scores, their_scores, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_sequence_of_a_padded_batch_is_what_it_is_alone(model, options):
    lengths, new = [23, 40, 31], 30
    options = {"heavy": 8, "recent": 6, "evict_every": 7} | options
    ids = torch.randint(2, 97, (3, max(lengths) + new), generator=torch.Generator().manual_seed(3))
    alone, expected = [cache_of(model.config, **options) for _ in lengths], []
    for row, (cache, length) in enumerate(zip(alone, lengths, strict=True)):
        text = ids[row : row + 1, -length - new :]
        expected.append(read(model, cache, text, [length + new])[0])
    for sizes in ([40] + [1] * new, [40, 3, 1, 1, 3, 1, 9, 12], [70]):
        cache = cache_of(model.config, **options)
        logits = read(model, cache, ids, sizes, lengths)
        for row, by_itself in enumerate(expected):
            of_row = logits[row, -len(by_itself) :]
            torch.testing.assert_close(of_row, by_itself, atol=1e-4, rtol=1e-4)
            assert_same_entries(cache, alone[row], row)


@torch.no_grad()
def test_a_span_without_a_token_scores_nothing(model):
    """A sequence that gets only padding while another goes on stays as it is."""
    options = {"heavy": 6, "recent": 4, "scoring": "expected", "evict_every": "prompt+5"}
    cache, ids = h2okv.H2OCache(model, **options), torch.arange(4, 44).view(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    model(ids, attention_mask=mask, past_key_values=cache)
    before = entries(cache, row=1)
    mask = torch.cat([mask, torch.tensor([[0, 1], [0, 0]])], dim=1)
    positions = (mask.cumsum(dim=1) - 1)[:, -2:]
    model(ids[:, :2], attention_mask=mask, position_ids=positions, past_key_values=cache)
    torch.testing.assert_close(entries(cache, row=1), before, atol=0.0, rtol=0.0)


def test_the_file_of_an_ended_span_has_no_queries(model, tmp_path):
    cache = cache_of(model.config, 8, 6, 4, scoring="expected", evict_every=16)
    ids = torch.randint(2, 97, (1, 80))
    read(model, cache, ids[:, :64], [64])
    cache.save(tmp_path / "ended")
    read_sizes = (tmp_path / "ended").stat().st_size
    with torch.no_grad():
        model(ids[:, 64:65], position_ids=torch.tensor([[64]]), past_key_values=cache)
    cache.save(tmp_path / "begun")
    assert (tmp_path / "begun").stat().st_size > read_sizes + 2 * 16 * 4 * 16 * 4
    with torch.no_grad():
        loaded = h2okv.H2OCache.load(tmp_path / "begun", model)
        options = {"position_ids": torch.arange(65, 80)[None]}
        again = model(ids[:, 65:], past_key_values=loaded, **options).logits
        expected = model(ids[:, 65:], past_key_values=cache, **options).logits
    assert torch.equal(again, expected)


def test_a_short_chat_takes_little_more_than_a_full_cache_and_its_queries(make_llama):
    model = make_llama(heads=3, kv_heads=1, head_dim=64).float()
    options = {"layer_budgets": "even", "positions": "rolling", "evict_every": 256}
    cache = cache_of(model, "best", budget=0.2, **options)
    ids = torch.randint(2, 97, (1, 200), generator=torch.Generator().manual_seed(6))
    with h2okv.enable(model):
        read(model, cache, ids, [40, *[1] * 30, 100, *[1] * 30])
    queries = 2 * 256 * 64 * 4  # layers, tokens, numbers of a KV head's mean query, bytes
    assert sum(layer.state.queries.nbytes for layer in cache.layers) == queries
    assert queries == 128 * cache.full_nbytes / 200
    assert cache.nbytes <= queries + 1.15 * cache.full_nbytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {}, {"scoring": "expected", "sink": 4}, {"kv_bits": 8},
        {"scoring": "expected", "sink": 4, "evict_every": "prompt+8"},
    ],
    ids=str,
)  # fmt: skip
def test_compiled_steps_evict_at_the_same_places(model, options):
    ids = torch.randint(2, 97, (2, 30), generator=torch.Generator().manual_seed(6))
    make = {"heavy": 8, "recent": 6, "evict_every": 8} | options
    texts, caches = [], []
    for compiled in (False, True):
        cache = cache_of(model.config, **make)
        with h2okv.enable(model, compile=compiled):
            texts.append(
                model.generate(ids, past_key_values=cache, max_new_tokens=40, do_sample=False)
            )
        cache.check_integrity()
        caches.append(cache)
    assert torch.equal(*texts)
    assert_same_entries(*caches)


@pytest.mark.parametrize("by_head", [None, BY_HEAD])
def test_a_cache_whose_cut_has_waited_for_an_image_is_saved_and_goes_on(model, by_head, tmp_path):
    """The cut at 8 waits for the end of an image at 10, and is not followed by one until 16."""
    cache = cache_of(model.config, heavy=4, recent=4, evict_every=8, layer_budgets=by_head)
    generator = torch.Generator().manual_seed(0)

    def attend(cache, length, seen, reach=None):
        shape, spec = (1, 4, length, 16), AttentionSpec(0.25, reach=reach)
        for layer in cache.layers:
            query, key, value = (torch.randn(shape, generator=generator).double() for _ in range(3))
            layer.attend(query, *layer.update(key[:, :2], value[:, :2]), None, spec)
        cache.check_integrity()
        for layer in cache.layers:
            [counts] = layer.slots.count_entries(layer.state)
            positions = layer.state.by_head("positions")[0]
            assert counts == (positions[0] >= 0).sum(dim=-1).tolist()
            assert {*range(seen - 4, seen)} <= {*positions[0, 0].tolist()}

    reach = torch.arange(13).unsqueeze(0)
    reach[:, 5:11] = 10
    attend(cache, 13, 13, reach)
    if by_head is None:
        assert cache.num_cached_tokens == 8 + 2
    cache.save(tmp_path / "late.safetensors")
    loaded = h2okv.H2OCache.load(tmp_path / "late.safetensors")
    for seen in range(14, 19):
        attend(loaded, 1, seen)
    if by_head is None:
        assert loaded.num_cached_tokens == 8 + 2
