import torch
from transformers import DynamicCache

from h2okv.engine.generation import Job, count_same_choices, generate_once
from h2okv.engine.sampling_params import SamplingParams
from h2okv.models.loading import describe, load_weights


def test_count_same_choices_counts_equal_tokens(model_folder, prompt):
    described = describe(str(model_folder))
    model = load_weights(described, None, torch.device("cpu"))
    ids = described.encode(prompt)
    job = Job(model, described, ids, SamplingParams(max_tokens=12, temperature=0.0))
    token_ids = generate_once(job, DynamicCache(config=model.config), lambda _: None).token_ids
    assert count_same_choices(job, DynamicCache(config=model.config), token_ids) == 12

    # What follows the changed token is compared to one forward over the same changed text.
    changed = [*token_ids[:4], (token_ids[4] + 1) % 300, *token_ids[5:]]
    tokens = torch.tensor([[*ids, *changed]])
    with torch.no_grad():
        choices = model(tokens).logits[0, len(ids) - 1 : -1].argmax(-1).tolist()
    expected = sum(a == b for a, b in zip(choices, changed, strict=True))
    assert count_same_choices(job, DynamicCache(config=model.config), changed) == expected < 12


def test_count_same_choices_of_no_tokens_is_none(model_folder):
    assert count_same_choices(None, None, []) is None
