"""Convert the weights of a GGUF file to safetensors files, one tensor at a time.

Names and layouts are those of transformers' reader, which keeps several copies of all weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from h2okv.console import Progress

_NUMBERS_AT_ONCE = 4 << 20  # of a table
_TABLES = ("token_embd.weight", "output.weight")  # the largest tensors; no layout changes them
# Loading keeps an entire file in memory until its last tensor is copied.
_FILE_BYTES = 128 << 20
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class _Checkpoint:
    """Safetensors files of tensors whose shapes are known before their values."""

    def __init__(
        self, folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        self.shapes, self.dtype = shapes, dtype
        self.missing = dict.fromkeys(shapes)
        files: list[list[str]] = []
        room = 0
        for name in shapes:
            if not files or self._nbytes(name) > room:
                files.append([])
                room = _FILE_BYTES
            files[-1].append(name)
            room -= self._nbytes(name)
        self._locations: dict[str, tuple[Path, int]] = {}
        for number, names in enumerate(files, 1):
            suffix = f"-{number:05}-of-{len(files):05}" if len(files) > 1 else ""
            self._begin(folder / f"model{suffix}.safetensors", names)
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(map(self._nbytes, shapes))},
                "weight_map": {name: path.name for name, (path, _) in self._locations.items()},
            }
            text = json.dumps(index, indent=2)
            (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _nbytes(self, name: str) -> int:
        return math.prod(self.shapes[name]) * self.dtype.itemsize

    def _begin(self, path: Path, names: Sequence[str]) -> None:
        """Write a file's header and reserve room for its values."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            start, end = end, end + self._nbytes(name)
            kind, shape = _NAMES[self.dtype], self.shapes[name]
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        for name in names:
            self._locations[name] = path, 8 + len(text) + header[name]["data_offsets"][0]
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)

    def write(self, name: str, values: np.ndarray, first_row: int = 0) -> None:
        """Write float32 rows of a tensor, or all of it, rounded to the file's dtype."""
        shape = self.shapes[name]
        if values.shape[1:] != shape[1:] or first_row + len(values) > shape[0]:
            raise ValueError(f"{name} must have the shape {[*shape]}, got {[*values.shape]}")
        contiguous = np.ascontiguousarray(values)
        writeable = contiguous if contiguous.flags.writeable else contiguous.copy()
        tensor = torch.from_numpy(writeable).to(self.dtype)
        path, start = self._locations[name]
        with path.open("r+b") as file:
            file.seek(start + first_row * math.prod(shape[1:]) * self.dtype.itemsize)
            file.write(tensor.view(torch.uint8).numpy().data)
        if first_row + len(values) == shape[0]:
            self.missing.pop(name, None)

    def write_table(self, name: str, tensor: Any, progress: Progress) -> None:
        """Write a tensor of a GGUF file a few rows at a time."""
        from gguf import dequantize

        rows = max(1, _NUMBERS_AT_ONCE // tensor.data.shape[-1])
        for start in range(0, len(tensor.data), rows):
            chunk = tensor.data[start : start + rows]
            self.write(name, dequantize(chunk, tensor.tensor_type), start)
            progress.advance(chunk.nbytes)


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

        def write(name: str, values: np.ndarray) -> None:
            if name in shapes:  # a tied weight is written by its other name
                checkpoint.write(name, values)

        def write_joined() -> None:
            for name, tensor in parsed["tensors"].items():
                write(name, tensor.numpy())
            parsed["tensors"].clear()

        block = ""
        for tensor in sorted(reader.tensors, key=lambda tensor: _block(tensor.name)):
            if _block(tensor.name) != block:
                write_joined()
                block = _block(tensor.name)
            name = names.get(tensor.name)
            if tensor.name in _TABLES and name in shapes:
                checkpoint.write_table(name, tensor, progress)
                continue
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            result = processor.process(values, name=tensor.name, **context)
            write(names.get(result.name, ""), result.weights)
            progress.advance(tensor.n_bytes)
        write_joined()
    parameters = dict(model.named_parameters())
    return model, [name for name in checkpoint.missing if name in parameters]


def _block(name: str) -> str:
    """Return the layer prefix of a tensor's name, such as ``blk.3``; empty outside the layers."""
    return ".".join(name.split(".")[:2]) if name.startswith("blk.") else ""
