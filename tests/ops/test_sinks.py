"""Learned sinks: every way to attend against the matrix with one more column."""

import itertools

import pytest
import torch

from h2okv.ops import attention as blockwise
from h2okv.ops import flash
from h2okv.ops.attention import blockwise_attention_with_scores, expected_attention
from h2okv.ops.decode import decode_with_scores
from h2okv.ops.reference import AttentionSpec, Visibility, attention_with_scores

SCALE = 0.3
# One that changes nothing, one that takes a share, one that takes nearly all; far beyond fp32's
# powers of two.
SINKS = {
    "usual": (-2.0, 0.5, 3.0, 8.0), "extreme": (-300.0, -90.0, 90.0, 300.0), "none": None
}  # fmt: skip
any_cpu = pytest.mark.parametrize("is_amd", [False, True])
every_sink = pytest.mark.parametrize("sinks", SINKS.values(), ids=SINKS)


def draw(length, past, batch=2, groups=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(length + past)
    query = torch.randn(batch, 2 * groups, length, 16, generator=generator).mul(2).to(dtype)
    key = torch.randn(batch, 2, past + length, 16, generator=generator).mul(2).to(dtype)
    value = torch.randn(batch, 2, past + length, 16, generator=generator).to(dtype)
    return query, key, value


def spec_of(sinks, softcap=None):
    return AttentionSpec(SCALE, softcap, None if sinks is None else torch.tensor(sinks))


def expect(query, key, value, visible, sinks, softcap=None, weights=None, power=1):
    """Output and sums, in loops and float64; ``visible`` is ``[B, H, T, N]``."""
    query, key, value = query.double(), key.double(), value.double()
    output = query.new_zeros(*query.shape[:3], value.shape[-1])
    sums = query.new_zeros(key.shape[:3])
    groups = query.shape[1] // key.shape[1]
    for row, head, token in itertools.product(*map(range, query.shape[:3])):
        group = head // groups
        seen = visible[row, group, token]
        logits = key[row, group, seen] @ query[row, head, token] * SCALE
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        column = torch.tensor([-torch.inf if sinks is None else sinks[head]], dtype=torch.float64)
        shares = torch.cat([logits, column]).softmax(0)[:-1]
        output[row, head, token] = shares @ value[row, group, seen]
        weight = 1.0 if weights is None else weights[row, token].double()
        sums[row, group, seen] += weight * shares**power
    return output, sums


def set_cpu(monkeypatch, is_amd):
    """Take the products of either kind of CPU, however few logits there are."""
    monkeypatch.setattr(blockwise.flash, "IS_AMD", is_amd)
    monkeypatch.setattr(blockwise, "_FEW_LOGITS", -1)


def close(actual, expected, tolerance=2e-5):
    for tensor, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor.double(), reference, atol=tolerance, rtol=tolerance)


def causal(length, past, batch=2):
    visible = torch.ones(length, past + length, dtype=torch.bool).tril(past)
    return visible.expand(batch, 2, -1, -1)


@every_sink
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("past", [0, 9])
def test_the_reference(past, softcap, sinks):
    states, visible = draw(21, past), causal(21, past)
    for weights in (None, torch.linspace(0, 1, 42).view(2, 21)):
        result = attention_with_scores(*states, visible, spec_of(sinks, softcap), weights=weights)
        close(result, expect(*states, visible, sinks, softcap, weights))


@any_cpu
@every_sink
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("kind", ["plain", "entries", "padding", "window", "weights"])
@pytest.mark.parametrize("past", [0, 9])
def test_blocks(monkeypatch, past, kind, softcap, sinks, is_amd):
    set_cpu(monkeypatch, is_amd)
    monkeypatch.setattr(blockwise, "_TILE_ROWS", 8)
    monkeypatch.setattr(blockwise, "_TILE_KEYS", 7)
    states, visible, weights = draw(21, past), causal(21, past), None
    visibility, spec = Visibility(past), spec_of(sinks, softcap)
    if kind == "entries":
        entries = torch.arange(past + 21) % 4 > 0
        entries = torch.stack([entries, entries.roll(1) | (torch.arange(past + 21) > 9)])
        entries = entries.expand(2, 2, -1)
        visibility, visible = Visibility(past, entries), visible & entries.unsqueeze(2)
    elif kind == "padding":
        real = torch.ones(2, 21, dtype=torch.bool)
        real[0, :8] = False
        seen = torch.cat([real.new_ones(2, past), real], dim=1)
        visibility = Visibility(past, queries=real)
        visible = visible & seen[:, None, None] & real[:, None, :, None]
    elif kind == "window":
        spec, visible = spec._replace(window=5), visible & ~visible.tril(past - 5)
    elif kind == "weights":
        weights = torch.linspace(0, 1, 42).view(2, 21)
    result = blockwise_attention_with_scores(*states, visibility, spec, weights)
    expected = expect(*states, visible, sinks, softcap, weights)
    assert weights is None or torch.equal(
        result[0], blockwise_attention_with_scores(*states, visibility, spec)[0]
    )
    if kind == "padding":
        result[0].masked_fill_(~real[:, None, :, None], 0.0)
    close(result, expected)


@torch.no_grad()
def test_threads_share_the_heads(monkeypatch):
    monkeypatch.setattr(blockwise, "_MANY_LOGITS", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        states, sinks = draw(40, 5), SINKS["usual"]
        result = blockwise_attention_with_scores(*states, Visibility(5), spec_of(sinks))
        again = expected_attention(*states[:2], None, None, spec_of(sinks))
    finally:
        torch.set_num_threads(before)
    close(result, expect(*states, causal(40, 5), sinks))
    everything = torch.ones(2, 2, 40, 45, dtype=torch.bool)
    squares = expect(*states, everything, sinks, power=2)[1]
    torch.testing.assert_close(again.double(), squares.sqrt(), atol=1e-6, rtol=1e-4)


@any_cpu
@every_sink
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("has_holes", [False, True])
@pytest.mark.parametrize("tile", [7, 1 << 19])
@torch.no_grad()
def test_expected_attention(monkeypatch, tile, has_holes, softcap, sinks, is_amd):
    set_cpu(monkeypatch, is_amd)
    monkeypatch.setattr(blockwise, "_TILE_ELEMENTS", tile)
    query, key, value = draw(11, 6)
    entries = None
    queries, visible = None, torch.ones(2, 2, 11, 17, dtype=torch.bool)
    if has_holes:
        entries = torch.rand(2, 2, 17, generator=torch.Generator().manual_seed(0)) < 0.7
        queries = torch.rand(2, 11, generator=torch.Generator().manual_seed(1)) < 0.7
        visible = visible & entries.unsqueeze(2) & queries[:, None, :, None]
    result = expected_attention(query, key, entries, queries, spec_of(sinks, softcap))
    squares = expect(query, key, value, visible, sinks, softcap, power=2)[1]
    torch.testing.assert_close(result.double(), squares.sqrt(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("past", [0, 29])
def test_fused_attention_on_a_cpu(past):
    query, key, value = draw(140, past, batch=1, dtype=torch.bfloat16)
    sinks, grouped = SINKS["usual"], query[0].unflatten(0, (2, 2))
    spec = AttentionSpec(SCALE, sinks=torch.tensor(sinks).view(2, 2))
    output, sums = flash.attention_with_sums(grouped, key[0], value[0], past, spec, None)
    expected = expect(query, key, value, causal(140, past, 1), sinks)
    close([output.flatten(0, 1)[None]], expected[:1], 2e-2)
    torch.testing.assert_close(sums[None].double(), expected[1], atol=1e-6, rtol=2e-4)
    squares = flash.expected_squares(grouped, key[0], spec)
    everything = torch.ones(1, 2, 140, past + 140, dtype=torch.bool)
    expected_squares = expect(query, key, value, everything, sinks, power=2)[1]
    torch.testing.assert_close(squares[None].double(), expected_squares, atol=1e-6, rtol=4e-4)


@pytest.mark.parametrize("is_amd", [False, True])
@torch.no_grad()
def test_output_alone_goes_by_fused_attention_where_that_is_faster(monkeypatch, is_amd):
    calls, attend = [], flash.attention_with_sums
    monkeypatch.setattr(flash, "IS_AMD", is_amd)
    monkeypatch.setattr(flash, "attention_with_sums", lambda *a: calls.append(a) or attend(*a))
    states, sinks = draw(130, 5, batch=1), SINKS["usual"]
    block = *states, Visibility(5), spec_of(sinks)
    output, _ = blockwise_attention_with_scores(*block, needs_sums=False)
    assert bool(calls) is not is_amd
    close([output], expect(*states, causal(130, 5, 1), sinks)[:1])


@every_sink
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("has_holes", [False, True])
def test_steps(has_holes, groups, sinks):
    query, key, value = draw(1, 19, groups=groups)
    hidden = torch.rand(2, 2, 20, generator=torch.Generator().manual_seed(1)) < 0.4
    hidden = hidden if has_holes else None
    visible = torch.ones(2, 2, 20, dtype=torch.bool) if hidden is None else ~hidden
    expected = expect(query, key, value, visible.unsqueeze(2), sinks)
    before = torch.rand(2, 2, 20)
    for scores in (None, before.clone()):
        spec = spec_of(sinks and sinks[: 2 * groups])
        result = decode_with_scores(query, key, value, hidden, spec, None, scores)
        added = 0 if scores is None else before.double()
        close(result, (expected[0], expected[1] + added))


def test_a_step_over_slots_that_heads_share():
    query, key, value = draw(1, 19)
    of_first = torch.arange(40) < 20
    hidden = torch.stack([~of_first, of_first]).expand(2, 2, 40)
    shared_key, shared_value = (states.flatten(1, 2).unsqueeze(1) for states in (key, value))
    sinks = SINKS["usual"]
    output, sums = decode_with_scores(query, shared_key, shared_value, hidden, spec_of(sinks))
    visible = torch.ones(2, 2, 1, 20, dtype=torch.bool)
    expected = expect(query, key, value, visible, sinks)
    close((output, sums.view(2, 2, 20)), expected)


@every_sink
def test_nothing_to_see_gives_zeros(sinks):
    query, key, value = draw(1, 19)
    hidden = torch.ones(2, 2, 20, dtype=torch.bool)
    output, sums = decode_with_scores(query, key, value, hidden, spec_of(sinks))
    assert not output.any() and not sums.any()


@pytest.mark.slow
@every_sink
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_holes", [False, True])
def test_a_prompt_by_kernels(device, garbage, has_holes, dtype, sinks):
    from h2okv.ops import triton_prefill

    states, visible, entries = draw(40, 9, dtype=dtype), causal(40, 9), None
    if has_holes:
        entries = (torch.arange(49) % 4 > 0).expand(2, 2, -1)
        visible = visible & entries.unsqueeze(2)
        entries = entries.to(device)
    learned = None if sinks is None else torch.tensor(sinks, dtype=dtype, device=device)
    output, sums = triton_prefill.attention_with_scores(
        *(state.to(device) for state in states), Visibility(9, entries),
        AttentionSpec(SCALE, sinks=learned),
    )  # fmt: skip
    expected = expect(*states, visible, sinks and learned.double().tolist())
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    close([output.cpu()], expected[:1], tolerance)
    torch.testing.assert_close(sums.cpu().double(), expected[1], atol=1e-4, rtol=1e-4)
