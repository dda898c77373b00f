"""A model that runs from its files: opened, weighed, planned and put together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

import h2okv
from h2okv.benchmarking.bandwidth import measure_bandwidth
from h2okv.cli.console import StageProgress
from h2okv.engine.checkpoint_files import CheckpointFiles, Stored
from h2okv.engine.conversion import convert, converted_path, read_converted
from h2okv.engine.demand import Demand, demand_of
from h2okv.engine.memory import available_bytes, data_bytes
from h2okv.engine.packed_layers import pack_layers
from h2okv.engine.planner import Planner, Room, Workload
from h2okv.engine.skeleton import Skeleton, make_skeleton
from h2okv.engine.speeds import Speeds, measure_disk, measure_link, measure_products
from h2okv.engine.weight_map import (
    NeedsConversion,
    lay_out,
    map_weights,
    untie_if_stored_apart,
)
from h2okv.integration.gguf import cache_folder
from h2okv.integration.loading import Described
from h2okv.integration.models import default_dtype

_SPARE = 0.9
"""Of what is free, where nothing was promised."""
_SAMPLE_BYTES = 64 << 20
_LEAST_SAMPLE = 1 << 20


@dataclass(frozen=True)
class OpenModel:
    """A model whose weights are still in their files.

    Attributes:
        skeleton: The model and its parts.
        files: The checkpoint, or what it was converted to.
        device: Where it will compute.
        found: Where each parameter lies; None if the weights must be written anew to be streamed.
    """

    skeleton: Skeleton
    files: CheckpointFiles
    device: torch.device
    found: dict[str, Stored] | None

    def demand(self, cache: h2okv.H2OCache) -> Demand:
        """The sizes that memory depends on."""
        model = self.skeleton.model
        return demand_of(model.config, cache, self.skeleton.table.dtype)


def open_model(
    described: Described,
    dtype: torch.dtype | None,
    device: torch.device,
    weight_bits: int | None = None,
) -> OpenModel:
    """Opens a checkpoint for streaming; writes nothing.

    Args:
        described: From `describe`.
        dtype: Of the weights; None for the checkpoint's own, and for the bundled model on a CPU
            float32, as everywhere.
        device: Where it will compute.
        weight_bits: 8 or 4 for the layers' weights in so many bits; None leaves them.

    Returns:
        The model.

    Raises:
        ValueError: If a file is missing or damaged, or the model has no layers to stream.
    """
    folder = checkpoint_folder(described)
    files = CheckpointFiles.in_folder(folder)
    dtype = dtype or default_dtype(described.name, device) or _own_dtype(described, files)
    skeleton = untie_if_stored_apart(make_skeleton(described.config, dtype, str(folder)), files)
    if weight_bits is not None:
        skeleton = pack_layers(skeleton, weight_bits, device)
    try:
        found = map_weights(skeleton, files)
        for unit in skeleton.units:
            lay_out(unit, found)
    except NeedsConversion:
        return OpenModel(skeleton, files, device, None)
    return OpenModel(skeleton, files, device, found)


def write_anew(opened: OpenModel, folder: Path | None) -> OpenModel:
    """Opens a copy of the weights that can be streamed; makes it if it is not there.

    Args:
        opened: A model whose files cannot be streamed as they are.
        folder: Where such copies are kept; None for the user's cache folder.

    Returns:
        The model with the copy.

    Raises:
        ValueError: If it cannot be written, or the checkpoint is incomplete.
    """
    path = converted_path(folder or cache_folder("weights"), opened.files, opened.skeleton)
    if not path.exists():
        with StageProgress("writing the weights in the order of the layers") as progress:
            convert(opened.skeleton, opened.files, path, progress.show)
    opened.files.close()
    files, found = read_converted(path, opened.skeleton)
    return replace(opened, files=files, found=found)


def checkpoint_folder(described: Described) -> Path:
    """Where a model's files are; those of a Hub id are fetched if they are not here yet.

    Args:
        described: From `describe`.

    Returns:
        A folder.

    Raises:
        ValueError: If they cannot be fetched.
    """
    folder = Path(described.source)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(described.source, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # its failures have as many types as a network has
        raise ValueError(
            f"the weights of --model {described.name!r} cannot be fetched"
            f" ({type(error).__name__}); check the network, or give a folder"
        ) from error


def measure_speeds(opened: OpenModel, demand: Demand, room: Room) -> Speeds:
    """Measures the machine, in a second or two.

    Args:
        opened: The model; a part of it is read.
        demand: Its sizes.
        room: Memory that may be taken meanwhile; the samples are smaller if it is little.

    Returns:
        The speeds.
    """
    device = opened.device
    # A quarter each for the buffer and its copy, and for the matrices of the products.
    sample = max(_LEAST_SAMPLE, min(_SAMPLE_BYTES, room.device // 4))
    memory = measure_bandwidth(device, sample if device.type == "cpu" else None)
    dtype = opened.skeleton.table.dtype
    width = min(demand.width, max(_LEAST_SAMPLE, room.device // 4) // (demand.hidden * 16))
    return Speeds(
        disk=measure_disk(opened.files, piece=sample // 4),
        link=memory if device.type == "cpu" else measure_link(device),
        memory=memory,
        products=measure_products(demand.hidden, max(1, width), dtype, device),
    )


def find_room(device: torch.device, memory: int | None) -> Room:
    """Finds out how much memory may be taken.

    Args:
        device: Where the model will compute.
        memory: What was promised, in bytes, all that the process has included; None for what is
            free.

    Returns:
        The room; below zero if the process has more than was promised already, so that the
        planner says how much would do.
    """
    if device.type == "cpu":
        # The threads of a product come with the first one, and stay.
        linear(torch.ones(64, 64), torch.ones(64, 64))
        used = data_bytes() or 0
        free = available_bytes(device)
    else:
        used = torch.cuda.memory_allocated(device)
        free = available_bytes(device)
    room = int((free or 0) * _SPARE) if memory is None else memory - used
    host = 0 if device.type == "cpu" else (available_bytes(torch.device("cpu")) or 0) // 2
    return Room(room, host, used)


def make_planner(
    opened: OpenModel, cache: h2okv.H2OCache, work: Workload, memory: int | None
) -> Planner:
    """Measures what a plan depends on.

    Args:
        opened: The model.
        cache: An empty cache of the kind that the job uses.
        work: What the job asks for.
        memory: What was promised, in bytes; None for what is free.

    Returns:
        The planner.
    """
    demand = opened.demand(cache)
    # Before measuring: what the libraries keep of it, the first forward would take too, and that
    # is counted. So a refusal and the next try, which measures more, count alike.
    room = find_room(opened.device, memory)
    speeds = measure_speeds(opened, demand, room)
    return Planner(opened.skeleton, demand, cache, speeds, room, work, opened.device)


def _own_dtype(described: Described, files: CheckpointFiles) -> torch.dtype:
    """What the config says, or else what most of the weights are stored in."""
    own: Any = getattr(described.config.get_text_config(), "dtype", None)
    if isinstance(own, torch.dtype):
        return own
    largest = max(files.tensors.values(), key=lambda stored: stored.nbytes)
    return largest.dtype if largest.dtype.is_floating_point else torch.float32
