"""A prompt never makes a T x T tensor, in no layer of a supported model."""

import pytest
import torch
from family_table import VOCABULARY
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

import h2okv

LENGTH = 1500


class SquareTensors(TorchDispatchMode):
    """Notes every result of an operation that has two dimensions of LENGTH or more."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and sum(n >= LENGTH for n in leaf.shape) >= 2:
                self.results.append((str(func), tuple(leaf.shape)))
        return result


def _model(model_type: str, **options):
    config = AutoConfig.for_model(
        model_type, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=VOCABULARY,
        max_position_embeddings=4 * LENGTH, pad_token_id=0, eos_token_id=None, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="h2o").eval()


_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100}
MODELS = {
    "full": ("llama", {}),
    "sliding": ("gemma3_text", _SLIDING),
    "soft-capped": ("gemma2", _SLIDING),
    "learned sinks": ("gpt_oss", _SLIDING | {"num_local_experts": 2, "num_experts_per_tok": 1}),
}


@pytest.mark.parametrize("padding", [0, 200])
@pytest.mark.parametrize("kind", list(MODELS))
@torch.no_grad()
def test_no_square_tensor_in_two_turns(kind, padding):
    model_type, options = MODELS[kind]
    model = _model(model_type, **options)
    cache = h2okv.H2OCache(model.config, heavy=10, recent=10)
    ids = torch.randint(3, VOCABULARY, (2, 2 * LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    with SquareTensors() as squares:
        for end in (LENGTH, 2 * LENGTH):
            model(
                ids[:, end - LENGTH : end],
                attention_mask=mask[:, :end],
                past_key_values=cache,
                logits_to_keep=1,
            )
    cache.check_integrity()
    assert cache.num_seen_tokens == 2 * LENGTH
    assert not squares.results


@torch.no_grad()
def test_the_test_sees_square_tensors():
    model = _model("llama")
    model.set_attn_implementation("eager")
    ids = torch.ones(1, LENGTH, dtype=torch.long)
    with SquareTensors() as squares:
        model(ids, logits_to_keep=1)
    assert squares.results
