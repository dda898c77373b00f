"""A tiny model with random weights, by the shape that a user would give."""

import pytest
import torch

from h2okv.benchmarking.model import ModelSource, parse_shape

SIZES = "hidden=64,layers=2,heads=4,kv_heads=2,intermediate=96,vocab=300,window=1024"


@pytest.fixture(scope="session")
def source() -> ModelSource:
    shape = parse_shape(SIZES)
    return ModelSource(shape.name, shape=shape)


@pytest.fixture(scope="session")
def build(source):
    """Builds the model; shared by all tests, which set its attention before they use it."""
    models = {}

    def make(dtype=torch.float32):
        if dtype not in models:
            models[dtype] = source.build(dtype, torch.device("cpu"))
        return models[dtype]

    return make
