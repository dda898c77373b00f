"""Triton's kernels under test: on a GPU, or in Python where there is none."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _whole_products(monkeypatch):
    """Makes the interpreter's product of bf16, which multiplies their bits as integers, right."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *others):
        return plain(self, widen(a), widen(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def garbage(monkeypatch):
    """Fills new tensors with NaN, so that a number that no kernel wrote shows up."""
    plain = torch.Tensor.new_empty

    def new_empty(self, *args, **kwargs):
        tensor = plain(self, *args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(-7)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
