import pytest
import torch

from h2okv_lab.benchmarking.model import Footprint, parse_shape

# The number of parameters that the checkpoints on the Hub have.
PUBLISHED = {
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-2-7b": 6_738_415_616,
    "qwen2.5-7b": 7_615_616_512,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_shapes_have_the_published_number_of_parameters(name):
    footprint = Footprint(parse_shape(name).config(), torch.bfloat16)
    assert footprint.weight_bytes == 2 * PUBLISHED[name]


def test_layers_limits_the_depth_of_a_shape():
    source = parse_shape("llama-3-8b,layers=4")
    assert [source.shape[name] for name in ("layers", "hidden", "kv_heads")] == [4, 4096, 8]
    assert source.name == "llama-3-8b,layers=4"


def test_sizes_override_a_named_shape():
    assert parse_shape("llama-3-8b,window=65536").config().max_position_embeddings == 65536


def test_a_custom_shape_has_defaults():
    shape = parse_shape("hidden=64, layers=2, heads=4, intermediate=96, vocab=300").shape
    assert [shape[name] for name in ("kv_heads", "head_dim", "tied")] == [4, 16, 0]


def test_random_weights_are_the_same_every_time(source, build):
    again = source.build(torch.float32, torch.device("cpu"))
    for left, right in zip(build().parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("llama-9", "llama-3-8b"), ("small,colour=3", "'colour'"),
        ("hidden=64,layers=2", "lacks heads"), ("small,kv_heads=5", "kv_heads=5"),
        ("small,hidden=many", "'many'"), ("small,head_dim=7", "head_dim=7"),
        ("small,layers=0", "layers=0"), ("small,tied=2", "tied=2"),
    ],
)  # fmt: skip
def test_an_invalid_shape_is_refused(text, word):
    with pytest.raises(ValueError, match=word):
        parse_shape(text)
