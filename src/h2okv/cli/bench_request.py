"""What `h2okv bench` is asked for, checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.benchmarking.footprint import Footprint, footprint_of
from h2okv.benchmarking.requirement import check_fits
from h2okv.benchmarking.roofline import check_plot
from h2okv.benchmarking.settings import Settings
from h2okv.benchmarking.shape import parse_shape
from h2okv.benchmarking.source import ModelSource
from h2okv.cache.support import trained_window
from h2okv.engine.memory import available_bytes, parse_memory
from h2okv.integration.checkpoint import locate
from h2okv.integration.loading import BUNDLED


@dataclass(frozen=True)
class Request:
    """All that was asked for, checked.

    Attributes:
        source: The model.
        settings: What to measure.
        device: Where.
        memory: Bytes for the largest batch; ``None`` for a comparison.
        max_run_batch: The largest batch that is really run.
        footprints: The model's bytes, by dtype.
    """

    source: ModelSource
    settings: Settings
    device: torch.device
    memory: int | None
    max_run_batch: int
    footprints: dict[torch.dtype, Footprint]


def choose_source(model: str | None, shape: str | None, layers: int | None) -> ModelSource:
    """Finds the model that the options name.

    Raises:
        ValueError: If there is none, or they contradict each other.
    """
    if model is None:
        chosen = parse_shape("small" if shape is None else shape, layers)
        return ModelSource(chosen.name, shape=chosen)
    if shape is not None:
        raise ValueError("both --model and --shape are given; give one of them")
    if layers is not None:
        raise ValueError("--layers cuts a --shape, not a --model; leave it out")
    folder = locate(str(bundled_model_path()) if model == BUNDLED else model)
    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the configuration of --model {model!r} cannot be loaded"
            f" ({type(error).__name__}); check the name and the network, or give a folder"
        ) from error
    return ModelSource(model, folder=folder)


def memory_for_batch(
    max_batch: bool, memory: str | None, most: int, plot: Path | None
) -> int | None:
    """Reads the options of `--max-batch`.

    Returns:
        Bytes; None if that is not asked for.

    Raises:
        ValueError: If the options contradict each other.
    """
    if max_batch != (memory is not None):
        raise ValueError("--max-batch and --memory go together; give both, such as --memory 8GiB")
    if most < 1:
        raise ValueError(f"--max-run-batch {most} is too few; give 1 or more")
    if max_batch and plot is not None:
        raise ValueError("--plot draws steps by context, not --max-batch; leave one of them out")
    return None if memory is None else parse_memory(memory)


def check_files(csv: Path | None, plot: Path | None) -> None:
    """Refuses files that could not be written at the end.

    Raises:
        ValueError: Naming the option.
    """
    for name, path in (("csv", csv), ("plot", plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"--{name} '{path}' is no file in a folder that exists; make it first")
    if plot is not None:
        check_plot(plot)


def checked_request(
    source: ModelSource,
    settings: Settings,
    device: torch.device,
    memory: int | None,
    max_run_batch: int,
) -> Request:
    """Finds out what can be known before anything is allocated.

    Raises:
        ValueError: If the model is not supported, or a context, budget or size does not fit.
    """
    config = source.config()
    h2okv.check_model(config)
    settings.check_window(trained_window(config))
    for choice in settings.choices():
        if choice.name == "h2o":
            h2okv.H2OCache(
                config, **choice.parts(), positions=choice.positions, kv_bits=choice.kv_bits
            )
    rolls = settings.positions == "rolling"
    footprints = {dtype: footprint_of(config, dtype, rolls) for dtype in settings.dtypes}
    needed = settings
    if memory is not None:
        # Its straight line begins at batches of one and two, one cache at a time.
        needed = Settings(
            settings.contexts, (2,), settings.budgets, ("dynamic",), settings.dtypes,
            prefill_chunk=settings.prefill_chunk,
        )  # fmt: skip
    for footprint in footprints.values():
        check_fits(needed, footprint, available_bytes(device), device.type == "cpu")
        if memory is not None and footprint.weight_bytes >= memory:
            raise ValueError(
                f"--memory {memory} bytes do not hold the model's {footprint.weight_bytes} bytes of"
                " weights; give more, fewer --layers or another --dtype"
            )
    return Request(source, settings, device, memory, max_run_batch, footprints)
