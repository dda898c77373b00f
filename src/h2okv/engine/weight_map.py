"""Which bytes of a checkpoint are which parameter of the model, where that is so simple."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from h2okv.engine.checkpoint_files import CheckpointFiles, Stored
from h2okv.engine.skeleton import Skeleton, Slot, Unit

_ALIGNMENT = 64
_SMALL_PIECE = 1 << 20
"""A disk is as fast on pieces of this size as on a whole layer; in smaller ones it is not."""
_FEW_PIECES = 4


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
    model = skeleton.model
    state = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [own for own in transforms if isinstance(own, WeightRenaming)]
    converters = [own for own in transforms if isinstance(own, WeightConverter)]
    found: dict[str, Stored] = {}
    for key, stored in files.tensors.items():
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, state
        )
        if pattern is not None:
            raise NeedsConversion(f"transformers changes {key} when it loads it")
        found[name] = stored
    slots = [skeleton.table, *skeleton.rest, *(s for unit in skeleton.units for s in unit.slots)]
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
