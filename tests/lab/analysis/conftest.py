"""A tiny model and a tokenized text, which repeats: that gives heads something to attend to."""

import pytest
import torch

from h2okv_lab.analysis.study import Sample


@pytest.fixture(scope="session")
def model(make_llama):
    """Shared by all tests: leave it as it is."""
    return make_llama(attention="sdpa")


@pytest.fixture(scope="session")
def sample() -> Sample:
    torch.manual_seed(1)
    ids = torch.randint(2, 97, (1, 160))
    ids[:, 80:120] = ids[:, 10:50]
    return Sample(ids, tuple(f"<{token}>" for token in ids[0].tolist()))


@pytest.fixture(scope="session")
def attention(make_llama, sample):
    """Return the same model's attention by transformers' eager code, ``[L, HQ, T, T]``."""
    eager = make_llama(attention="eager")
    with torch.inference_mode():
        output = eager(sample.input_ids, output_attentions=True, use_cache=False)
    return torch.cat(output.attentions).float()
