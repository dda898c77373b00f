"""Peak memory, measured in a process of its own: `python -P -m h2okv.benchmarking.peak`."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass, replace

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from h2okv.benchmarking.caches import CacheRunner, CacheSpec
from h2okv.benchmarking.model import ModelSource
from h2okv.engine.memory import peak_resident_bytes, reset_peak, resident_bytes

_CHILD = "h2okv.benchmarking.peak"


class PeakRunFailedError(Exception):
    """The process of a run ended without a result, most likely for want of memory."""


@dataclass(frozen=True)
class PeakRun:
    """What to run, in words that another process understands; `dtype` such as ``"bfloat16"``."""

    source: ModelSource
    dtype: str
    device: str
    threads: int
    spec: CacheSpec
    context: int
    batch: int
    steps: int = 2
    prefill_chunk: int | None = None

    @classmethod
    def on(
        cls,
        model: PreTrainedModel,
        source: ModelSource,
        spec: CacheSpec,
        context: int,
        batch: int,
        prefill_chunk: int | None,
    ) -> PeakRun:
        """A run with the dtype, device and threads that are in use here."""
        dtype, threads = dtype_name(model.dtype), torch.get_num_threads()
        device = str(model.device)
        return cls(
            source, dtype, device, threads, spec, context, batch, prefill_chunk=prefill_chunk
        )

    @classmethod
    def from_json(cls, text: str) -> PeakRun:
        """Reads what ``json.dumps(asdict(run))`` wrote."""
        values = json.loads(text)
        source = ModelSource.from_json(values.pop("source"))
        return cls(source=source, spec=CacheSpec.from_json(values.pop("spec")), **values)


@dataclass(frozen=True)
class Peak:
    """Memory of a run, in bytes.

    Attributes:
        loaded: With the model there and nothing read.
        peak: The most until the last step was done.
        cache: Held by the cache at the end.
    """

    loaded: int
    peak: int
    cache: int


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def prompt_ids(model: PreTrainedModel, batch: int, length: int) -> torch.Tensor:
    """Draws token ids, int64 ``[B, T]``, the same every time, on the model's device."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (batch, length), generator=generator).to(model.device)


def measure_peak(run: PeakRun, model: PreTrainedModel | None = None) -> Peak | None:
    """Measures the largest memory of one cache; ``None`` where the system does not tell.

    On a GPU it runs here, as torch counts that memory. On a CPU resident memory is of a whole
    process, so that each run gets its own.
    """
    if model is not None and model.device.type == "cuda":
        return _peak_on_gpu(run, model)
    if peak_resident_bytes() is None:
        return None
    done = subprocess.run(
        # -P: nothing of the current folder is imported in place of an installed package.
        [sys.executable, "-P", "-m", _CHILD],
        input=json.dumps(asdict(run)),
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = done.stderr.strip().splitlines()[-1:] or ["it was ended by the system"]
        raise PeakRunFailedError(f"peak memory of {run.spec.label}: {reason[0][:200]}")
    return Peak(**json.loads(lines[-1]))


def _run(model: PreTrainedModel, run: PeakRun) -> CacheRunner:
    """Reads the prompt and takes the steps; the runner's cache is still there."""
    runner = run.spec.runner(model, run.prefill_chunk)
    ids = prompt_ids(model, run.batch, run.context)
    runner.prepare(run.context)
    runner.prefill(ids)
    with runner.decoding():
        for _ in range(run.steps):
            runner.step(ids[:, :1])
    return runner


def _peak_in_this_process(run: PeakRun) -> Peak:
    """What the other process does: builds the model, runs, and reads its own peak."""
    torch.set_num_threads(run.threads)
    model = run.source.build(getattr(torch, run.dtype), torch.device(run.device))
    # A first small run brings in libraries and scratch memory that every process has once.
    _run(model, replace(run, context=min(16, run.context), batch=1, steps=1)).release()
    gc.collect()
    reset_peak()
    loaded = resident_bytes() or 0
    runner = _run(model, run)
    return Peak(loaded, peak_resident_bytes() or 0, runner.nbytes)


def _peak_on_gpu(run: PeakRun, model: PreTrainedModel) -> Peak:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    loaded = torch.cuda.memory_allocated(model.device)
    runner = _run(model, run)
    torch.cuda.synchronize(model.device)
    peak = Peak(loaded, torch.cuda.max_memory_allocated(model.device), runner.nbytes)
    runner.release()
    return peak


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    print(json.dumps(asdict(_peak_in_this_process(PeakRun.from_json(sys.stdin.read())))))
