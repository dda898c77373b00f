"""Peak memory, measured in a process of its own."""

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

from h2okv.benchmarking.caches import CacheChoice, Contestant, contestant_class
from h2okv.benchmarking.model import ModelSource
from h2okv.engine.memory import peak_resident_bytes, reset_peak, resident_bytes

_CHILD = "h2okv.benchmarking.peak"


class TrialFailedError(Exception):
    """The process of a trial ended without a result, most likely for want of memory."""


@dataclass(frozen=True)
class Trial:
    """What to run, in words that another process understands.

    Attributes:
        source: The model.
        dtype: Of weights and cache, such as ``"bfloat16"``.
        device: Such as ``"cpu"``.
        threads: Of torch.
        choice: The cache.
        context: Tokens of each prompt.
        batch: Sequences.
        steps: Decode steps after the prompt.
        prefill_chunk: Tokens of a block; ``None`` reads the prompt at once.
    """

    source: ModelSource
    dtype: str
    device: str
    threads: int
    choice: CacheChoice
    context: int
    batch: int
    steps: int = 2
    prefill_chunk: int | None = None

    def to_json(self) -> str:
        """Writes it as one line."""
        return json.dumps({**asdict(self), "source": self.source.to_json()})

    @classmethod
    def from_json(cls, text: str) -> Trial:
        """Reads what `to_json` wrote."""
        values = json.loads(text)
        source = ModelSource.from_json(values.pop("source"))
        choice = CacheChoice(**values.pop("choice"))
        return cls(source=source, choice=choice, **values)


@dataclass(frozen=True)
class Peak:
    """Memory of a trial, in bytes.

    Attributes:
        loaded: With the model there and nothing read.
        peak: The most until the last step was done.
        cache: Held by the cache at the end.
    """

    loaded: int
    peak: int
    cache: int


def prompt_ids(model: PreTrainedModel, batch: int, length: int) -> torch.Tensor:
    """Draws token ids, int64 ``[B, T]``, the same every time, on the model's device."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (batch, length), generator=generator).to(model.device)


def run_alone(model: PreTrainedModel, trial: Trial) -> Contestant:
    """Reads the prompt and the steps; returns the contestant, its cache still there."""
    contestant = contestant_class(trial.choice)(model, trial.choice, trial.prefill_chunk)
    ids = prompt_ids(model, trial.batch, trial.context)
    contestant.prepare(trial.context)
    contestant.read(ids)
    with contestant.stepping():
        for _ in range(trial.steps):
            contestant.step(ids[:, :1])
    return contestant


def measure_peak(trial: Trial, model: PreTrainedModel | None = None) -> Peak | None:
    """Measures the largest memory of one cache.

    On a GPU it runs here, as torch counts that memory. On a CPU resident memory is of a whole
    process, so that each trial gets its own.
    """
    if model is not None and model.device.type == "cuda":
        return _peak_on_gpu(trial, model)
    if peak_resident_bytes() is None:
        return None
    done = subprocess.run(
        # -P: nothing of the current folder is imported in place of an installed package.
        [sys.executable, "-P", "-m", _CHILD],
        input=trial.to_json(),
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = done.stderr.strip().splitlines()[-1:] or ["it was ended by the system"]
        raise TrialFailedError(f"peak memory of {trial.choice.label}: {reason[0][:200]}")
    return Peak(**json.loads(lines[-1]))


def peak_in_this_process(trial: Trial) -> Peak:
    """What the other process does: builds the model, runs the trial, and reads its own peak."""
    torch.set_num_threads(trial.threads)
    model = trial.source.build(getattr(torch, trial.dtype), torch.device(trial.device))
    # A first small run brings in libraries and scratch memory that every process has once.
    run_alone(model, replace(trial, context=min(16, trial.context), batch=1, steps=1)).forget()
    gc.collect()
    reset_peak()
    loaded = resident_bytes() or 0
    contestant = run_alone(model, trial)
    return Peak(loaded, peak_resident_bytes() or 0, contestant.nbytes)


def _peak_on_gpu(trial: Trial, model: PreTrainedModel) -> Peak:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    loaded = torch.cuda.memory_allocated(model.device)
    contestant = run_alone(model, trial)
    torch.cuda.synchronize(model.device)
    peak = Peak(loaded, torch.cuda.max_memory_allocated(model.device), contestant.nbytes)
    contestant.forget()
    return peak


def main() -> None:
    """Reads one trial, runs it, and prints one JSON object."""
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    print(json.dumps(asdict(peak_in_this_process(Trial.from_json(sys.stdin.read())))))


if __name__ == "__main__":
    main()
