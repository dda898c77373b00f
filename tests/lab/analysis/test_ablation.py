import numpy as np
import torch

from h2okv_lab.analysis.attention_stats import (
    dense_losses,
    heaviest,
    losses_with_hidden,
    random_tokens,
    token_losses,
)


def test_hiding_nothing_costs_nothing(model, sample):
    hidden = np.zeros((2, 2, sample.length), dtype=bool)
    losses = losses_with_hidden(model, sample.input_ids, hidden, (0, 1))
    np.testing.assert_allclose(losses[1:], dense_losses(model, sample.input_ids)[1:], atol=1e-4)


def test_hiding_tokens_is_an_attention_mask(make_llama, sample):
    # With the same tokens hidden in all heads and layers it can be said to transformers too.
    model = make_llama(attention="eager")
    gone = torch.zeros(sample.length, dtype=torch.bool)
    gone[[3, 17, 60]] = True
    length = sample.length
    visible = torch.ones(length, length, dtype=torch.bool).tril() & ~gone
    visible |= torch.eye(length, dtype=torch.bool)
    mask = torch.zeros(1, 1, length, length).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        logits = model(sample.input_ids, attention_mask=mask, use_cache=False).logits
    hidden = np.broadcast_to(gone.numpy(), (2, 2, length)).copy()
    losses = losses_with_hidden(model, sample.input_ids, hidden, (0, 1))
    np.testing.assert_allclose(losses[1:], token_losses(logits, sample.input_ids)[1:], atol=1e-4)
    assert np.abs(losses[1:] - dense_losses(model, sample.input_ids)[1:]).max() > 1e-3


def test_heaviest_and_random_tokens():
    scores = np.array([[[1.0, 5.0, 3.0, 4.0]]])
    assert heaviest(scores, 2).tolist() == [[[False, True, False, True]]]
    first, second = random_tokens((2, 2, 50), 7, seed=0), random_tokens((2, 2, 50), 7, seed=1)
    assert (first.sum(axis=-1) == 7).all()
    assert (first != second).any()
    assert (first[0, 0] != first[0, 1]).any()
