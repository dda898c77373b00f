"""Which bytes of a checkpoint are which parameter of the model, where that is so simple."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from h2okv.engine.checkpoint_files import CheckpointFiles, Stored, bytes_of
from h2okv.engine.skeleton import Skeleton, Slot, Unit, split_model

_ALIGNMENT = 64
_SMALL_PIECE = 1 << 20
"""A disk is as fast on pieces of this size as on a whole layer; in smaller ones it is not."""
_FEW_PIECES = 4
_COMPARED = 1 << 20
"""Bytes of an embedding that are compared with the head's at once."""


@dataclass(frozen=True)
class Piece:
    """Bytes that are read at once.

    Attributes:
        file: Index of the checkpoint's file.
        start: The first byte there.
        nbytes: How many.
        offset: Where they go in the unit's buffer.
    """

    file: int
    start: int
    nbytes: int
    offset: int


@dataclass(frozen=True)
class UnitLayout:
    """How a unit lies in the files and in a buffer.

    Attributes:
        unit: The unit.
        pieces: What is read.
        offsets: For each of the unit's slots, the first byte in the buffer.
        buffer_bytes: Size of the buffer.
    """

    unit: Unit
    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    buffer_bytes: int


class NeedsConversion(Exception):
    """A checkpoint cannot be read as it is; says why."""


def named_keys(skeleton: Skeleton, files: CheckpointFiles) -> dict[str, tuple[str, str | None]]:
    """For each tensor in the files the parameter's name, and the pattern by which it is changed."""
    model = skeleton.model
    state = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [own for own in transforms if isinstance(own, WeightRenaming)]
    converters = [own for own in transforms if isinstance(own, WeightConverter)]
    named = {
        key: rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        for key in files.tensors
    }
    table = skeleton.table.name
    if skeleton.is_tied and all(name != table for name, _ in named.values()):
        # Some checkpoints store tied weights as the head's.
        named = {
            key: (table if name == skeleton.head_name else name, pattern)
            for key, (name, pattern) in named.items()
        }
    return named


def untie_if_stored_apart(skeleton: Skeleton, files: CheckpointFiles) -> Skeleton:
    """Gives the head its own weights where the files have others than the embedding's for it.

    `from_pretrained` believes the files rather than the config too.

    Args:
        skeleton: A model without weights; its head may be mutated.
        files: The checkpoint.

    Returns:
        The same model, split anew if it was untied.
    """
    if not skeleton.is_tied:
        return skeleton
    stored = {name: files.tensors[key] for key, (name, _) in named_keys(skeleton, files).items()}
    table, own = stored.get(skeleton.table.name), stored.get(skeleton.head_name)
    if table is None or own is None or _are_equal(files, table, own):
        return skeleton
    head: Any = skeleton.units[-1].module
    head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
    return split_model(skeleton.model)


def _are_equal(files: CheckpointFiles, first: Stored, second: Stored) -> bool:
    """Compares two tensors, a part at a time."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    for start in range(0, first.nbytes, _COMPARED):
        size = min(_COMPARED, first.nbytes - start)
        parts = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        for stored, part in zip((first, second), parts, strict=True):
            files.read_into(stored.file, stored.start + start, bytes_of(part))
        if not torch.equal(*parts):
            return False
    return True


def map_weights(skeleton: Skeleton, files: CheckpointFiles) -> dict[str, Stored]:
    """Finds every parameter in the files.

    Args:
        skeleton: The model.
        files: The checkpoint.

    Returns:
        By the parameter's name.

    Raises:
        NeedsConversion: If a parameter's bytes are not in the files as the model needs them.
        ValueError: If a parameter is missing.
    """
    found: dict[str, Stored] = {}
    for key, (name, pattern) in named_keys(skeleton, files).items():
        if pattern is not None:
            raise NeedsConversion(f"transformers changes {key} when it loads it")
        found[name] = files.tensors[key]
    slots = skeleton.slots
    missing = sorted(slot.name for slot in slots if slot.name not in found)
    if missing:
        raise ValueError(
            f"'{files.paths[0].parent}' is incomplete: {len(missing)} parameters are not in its"
            f" weights (the first is {missing[0]}); get the model again"
        )
    for slot in slots:
        _check(slot, found[slot.name])
    return found


def _check(slot: Slot, stored: Stored) -> None:
    if stored.dtype != slot.dtype:
        raise NeedsConversion(f"{slot.name} is {stored.dtype} in the files, not {slot.dtype}")
    if stored.shape != tuple(slot.shape):
        raise ValueError(
            f"the weights have {slot.name} with shape {list(stored.shape)}, the config asks for"
            f" {list(slot.shape)}; get the model again"
        )


def lay_out(unit: Unit, found: dict[str, Stored]) -> UnitLayout:
    """Finds the fewest reads that bring a unit into a buffer.

    Args:
        unit: A unit.
        found: From `map_weights`.

    Returns:
        The layout.

    Raises:
        NeedsConversion: If the unit is scattered over many small pieces, or would lie in the
            buffer where numbers of its dtype cannot.
    """
    order = sorted(unit.slots, key=lambda slot: (found[slot.name].file, found[slot.name].start))
    pieces: list[Piece] = []
    places: dict[int, int] = {}
    end = 0
    for slot in order:
        stored = found[slot.name]
        last = pieces[-1] if pieces else None
        if last and (last.file, last.start + last.nbytes) == (stored.file, stored.start):
            pieces[-1] = Piece(last.file, last.start, last.nbytes + stored.nbytes, last.offset)
        else:
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            pieces.append(Piece(stored.file, stored.start, stored.nbytes, end))
        places[id(slot)] = end
        if end % slot.dtype.itemsize:
            raise NeedsConversion(f"{slot.name} is not aligned in its file")
        end += stored.nbytes
    if len(pieces) > _FEW_PIECES and end / len(pieces) < _SMALL_PIECE:
        raise NeedsConversion(f"{unit.name} is scattered over {len(pieces)} places")
    offsets = tuple(places[id(slot)] for slot in unit.slots)
    return UnitLayout(unit, tuple(pieces), offsets, end)
