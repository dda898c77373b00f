"""The check of a prompt's tokens and length that every front end shares."""

import numpy as np
import pytest

from h2okv.prompts.readers import PromptLimits, PromptTooLongError


@pytest.mark.parametrize(
    ("max_context", "length", "num_new", "message"),
    [
        (None, 100, 10**9, None),
        (None, 101, 0, r"have at most 100 tokens, got 101; shorten it\.$"),
        (50, 50, 0, None),
        (50, 49, 1, None),
        (50, 50, 1, r"context of 50 tokens, got 50 and 1; shorten it\.$"),
        (50, 30, 21, "context of 50 tokens, got 30 and 21"),
        (50, 0, 0, "has no tokens"),
    ],
)
def test_prompt_and_output_fit_the_limits(max_context, length, num_new, message):
    limits = PromptLimits(10, max_context, 100)
    if message is None:
        limits.check_length(length, num_new)
        return
    with pytest.raises(ValueError, match=message) as caught:
        limits.check_length(length, num_new)
    assert isinstance(caught.value, PromptTooLongError) == (length > 0)


def test_room_ends_with_the_context():
    assert PromptLimits(10, 50).room(30, 15) == 15
    assert PromptLimits(10, 50).room(30, 99) == 20
    assert PromptLimits(10).room(30, 99) == 99


@pytest.mark.parametrize("token", [-1, 10, True, 1.0, "1", None])
def test_tokens_outside_the_vocabulary_are_refused(token):
    PromptLimits(10).check_tokens([0, 9, np.int64(3)])
    with pytest.raises(ValueError, match="the prompt: token must be 0 to 9 for this model, got"):
        PromptLimits(10).check_tokens([0, token])
