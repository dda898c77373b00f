"""Rows put together go on as they would have gone on alone, whatever they keep besides scores."""

import pytest
import torch

import h2okv
from h2okv.offload.batch_runner import BatchSequence, MicroBatch


@pytest.mark.parametrize(
    "options",
    [{}, {"scoring": "decay", "decay": 0.9}, {"scoring": "value_norm"},
     {"layer_budgets": ((0.5, 1.5), (1.75, 0.25))}, {"policy": "strided_heavy"},
     {"policy": "fixed"}, {"policy": "snapkv"}],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)  # fmt: skip
@pytest.mark.parametrize("share", [0.3, 7])
def test_joined_rows_go_on_as_alone(make_llama, kept_sets, options, share):
    model = make_llama()
    ids = torch.randint(2, 97, (2, 70), generator=torch.Generator().manual_seed(0))
    prompts = [ids[:1, :30], ids[1:, :20]]
    alone, caches = (
        [h2okv.H2OCache(model.config, share, share, **options) for _ in prompts] for _ in range(2)
    )
    with torch.no_grad():
        for cache, other, prompt in zip(alone, caches, prompts, strict=True):
            model(prompt, past_key_values=cache)
            model(prompt, past_key_values=other)
    first, second = (
        MicroBatch(
            [BatchSequence(n, prompt[0].tolist(), 15, h2okv.SamplingParams())],
            cache,
            torch.device("cpu"),
        )
        for n, (prompt, cache) in enumerate(zip(prompts, caches, strict=True))
    )
    first.append(second)
    joined = first.cache
    following = ids[:, 30:]
    position_ids = torch.tensor([[30], [20]])
    with torch.no_grad():
        for step in range(15):
            token = following[:, step : step + 1]
            together = model(token, position_ids=position_ids + step, past_key_values=joined).logits
            for row, cache in enumerate(alone):
                logits = model(token[row : row + 1], past_key_values=cache).logits
                torch.testing.assert_close(together[row : row + 1], logits, atol=2e-4, rtol=1e-4)
    for row, cache in enumerate(alone):
        assert [layer[row] for layer in kept_sets(joined)] == [
            layer[0] for layer in kept_sets(cache)
        ]
    joined.check_integrity()
