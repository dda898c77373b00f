"""Convert the weights of a GGUF file to safetensors files, one tensor at a time.

Names and layouts are those of transformers' reader, which keeps several copies of all weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from h2okv.console import Progress
from h2okv.records import write_json

_NUMBERS_AT_ONCE = 4 << 20  # of a table
_TABLES = ("token_embd.weight", "output.weight")  # the largest tensors; no layout changes them
# Loading keeps an entire file in memory until its last tensor is copied.
_FILE_BYTES = 128 << 20


class _Checkpoint:
    """Safetensors files, each written once enough tensors have come for it, and their index."""

    def __init__(
        self, folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        self.shapes, self.dtype, self._folder = shapes, dtype, folder
        self._tensors: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []  # the names in each
        self._size = 0

    def write(self, name: str, values: np.ndarray | torch.Tensor) -> None:
        """Take a tensor, which is rounded to the files' dtype."""
        if self.shapes[name] != tuple(values.shape):
            expected = [*self.shapes[name]]
            raise ValueError(f"{name} must have the shape {expected}, got {[*values.shape]}")
        tensor = torch.as_tensor(np.array(values) if isinstance(values, np.ndarray) else values)
        self._tensors[name] = tensor.to(self.dtype).contiguous()
        self._size += tensor.numel() * self.dtype.itemsize
        if sum(tensor.nbytes for tensor in self._tensors.values()) >= _FILE_BYTES:
            self._end_file()

    def _end_file(self) -> None:
        self._files.append([*self._tensors])
        save_file(self._tensors, self._folder / str(len(self._files)), {"format": "pt"})
        self._tensors.clear()

    def close(self) -> list[str]:
        """Give the files their names and write the index; return the names that are missing."""
        if self._tensors:
            self._end_file()
        count, weight_map = len(self._files), dict[str, str]()
        for number, names in enumerate(self._files, 1):
            suffix = f"-{number:05}-of-{count:05}" if count > 1 else ""
            file = f"model{suffix}.safetensors"
            (self._folder / str(number)).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._size}, "weight_map": weight_map}
            write_json(self._folder / SAFE_WEIGHTS_INDEX_NAME, index)
        return [name for name in self.shapes if name not in weight_map]


def _read_table(tensor: Any, dtype: torch.dtype, progress: Progress) -> torch.Tensor:
    """Read a tensor of a GGUF file a few rows at a time."""
    from gguf import dequantize

    rows = max(1, _NUMBERS_AT_ONCE // tensor.data.shape[-1])
    table = torch.empty(len(tensor.data), int(tensor.shape[0]), dtype=dtype)
    for start in range(0, len(table), rows):
        chunk = tensor.data[start : start + rows]
        table[start : start + rows] = torch.tensor(dequantize(chunk, tensor.tensor_type))
        progress.advance(chunk.nbytes)
    return table


def write_weights(
    reader: Any, architecture: str, config: PreTrainedConfig, dtype: torch.dtype, folder: Path
) -> tuple[transformers.PreTrainedModel, list[str]]:
    """Write weights, without a config, as transformers would load them in `dtype`.

    Returns the model on the meta device, and the names of parameters that the file lacks.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as layouts

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    make = layouts.TENSOR_PROCESSORS.get(architecture, layouts.TensorProcessor)
    processor = make(config=config.to_dict())
    names = layouts.get_gguf_hf_weights_map(model, processor)
    # Tied parameters appear once.
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in names.values()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    parsed: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}  # a layer's experts, stacked
    context = {"tensor_key_mapping": names, "parsed_parameters": parsed}
    checkpoint = _Checkpoint(folder, shapes, dtype)
    size = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    with Progress("converting", size, "bytes") as progress:

        def write(name: str, values: Any) -> None:
            if name in shapes:  # a tied weight is written by its other name
                checkpoint.write(name, values)

        def write_joined() -> None:
            for name, tensor in parsed["tensors"].items():
                write(name, tensor)
            parsed["tensors"].clear()

        block = ""
        for tensor in sorted(reader.tensors, key=lambda tensor: _block(tensor.name)):
            if _block(tensor.name) != block:
                write_joined()
                block = _block(tensor.name)
            name = names.get(tensor.name)
            if tensor.name in _TABLES and name in shapes:
                checkpoint.write(name, _read_table(tensor, dtype, progress))
                continue
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            result = processor.process(values, name=tensor.name, **context)
            write(names.get(result.name, ""), result.weights)
            progress.advance(tensor.n_bytes)
        write_joined()
    parameters = dict(model.named_parameters())
    return model, [name for name in checkpoint.close() if name in parameters]


def _block(name: str) -> str:
    """Return the layer prefix of a tensor's name, such as ``blk.3``; empty outside the layers."""
    return ".".join(name.split(".")[:2]) if name.startswith("blk.") else ""
