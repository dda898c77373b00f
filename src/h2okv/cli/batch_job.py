"""A job put together: model, prompts, results, and what is said at the end."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

import h2okv
from h2okv.cli.batch_progress import BatchProgress
from h2okv.cli.cache_choice import CacheChoice
from h2okv.cli.loading import Described, describe, load_weights
from h2okv.cli.options import Sampling
from h2okv.cli.text_stream import TextStream
from h2okv.engine.chooser import Chooser
from h2okv.engine.job import Job, Wording
from h2okv.engine.passing import OneByOne
from h2okv.engine.prompt_file import PromptFile
from h2okv.engine.result_file import ResultFile, Setting
from h2okv.engine.runner import Limits, Runner
from h2okv.engine.sequence import Sequence

_ROWS = 32
_PROMPT_TOKENS = 8192


class Stopped(Exception):
    """Ctrl-C ended the job; says how far it is."""


@dataclass(frozen=True)
class BatchRequest:
    """What the user asked for.

    Attributes:
        model: A folder, a Hub id, or the bundled model.
        input: The prompts.
        output: The results.
        choice: The cache.
        sampling: How tokens are chosen, and how many.
        dtype: Of the weights; None for the checkpoint's own.
        device: Where the model runs.
        rows: Prompts under way; None for as many as there is room for.
    """

    model: str
    input: Path
    output: Path
    choice: CacheChoice
    sampling: Sampling
    dtype: torch.dtype | None
    device: torch.device
    rows: int | None


@dataclass(frozen=True)
class Summary:
    """What a job did in this run.

    Attributes:
        prompts: Of the whole job.
        skipped: Finished by an earlier run.
        errors: Prompts with an error record, those of earlier runs too.
        new_tokens: Generated in this run.
        passes: Over the weights.
        seconds: From the first pass to the last.
    """

    prompts: int
    skipped: int
    errors: int
    new_tokens: int
    passes: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of this run, the reading of prompts included."""
        return self.new_tokens / max(self.seconds, 1e-9)

    def to_json(self) -> str:
        """Writes it for machines."""
        return json.dumps({**asdict(self), "tokens_per_second": self.tokens_per_second})

    def to_text(self) -> str:
        """Writes it for people, in one line."""
        parts = [f"{self.prompts} prompts"]
        if self.skipped:
            parts.append(f"{self.skipped} of them finished before")
        if self.errors:
            parts.append(f"{self.errors} with an error record")
        parts.append(f"{self.new_tokens} new tokens in {self.seconds:.1f} s")
        parts.append(f"{self.tokens_per_second:,.1f} tokens/s")
        return ", ".join(parts)


def run_batch(request: BatchRequest) -> Summary:
    """Runs a job, or what an earlier run of it left.

    Args:
        request: What the user asked for.

    Returns:
        What was done.

    Raises:
        ValueError: If something about the input, the output, the model or the memory is wrong.
        Stopped: If Ctrl-C ended it.
    """
    described = _described(request)
    prompts = PromptFile(request.input)
    with ResultFile(request.output, _settings(request, described.config)) as results:
        job = Job(prompts, results, _wording(request, described))
        if job.num_finished == len(prompts):
            return Summary(len(prompts), job.num_skipped, results.num_errors, 0, 0, 0.0)
        model = load_weights(described, request.dtype, request.device)
        runner = Runner(
            model,
            OneByOne(),
            Chooser(
                model, request.sampling.temperature, request.sampling.top_p, request.sampling.seed
            ),
            lambda: request.choice.make(model.config, request.sampling.seed),
            Limits(request.rows or _ROWS, _PROMPT_TOKENS, request.rows or _ROWS),
            request.device,
        )
        with h2okv.enable(model):
            return _run(job, runner, request.sampling.max_new_tokens)


def _run(job: Job, runner: Runner, max_new_tokens: int) -> Summary:
    total = len(job.prompts)
    start = time.perf_counter()
    try:
        with BatchProgress(total, job.num_skipped, max_new_tokens) as progress:
            for finished in job.run(runner):
                progress.update(finished, runner.unfinished_tokens, runner.num_tokens)
    except KeyboardInterrupt:
        raise Stopped(
            f"stopped; {job.num_finished} of {total} prompts are finished, and the same command"
            " goes on from there"
        ) from None
    return Summary(
        prompts=total,
        skipped=job.num_skipped,
        errors=job.results.num_errors,
        new_tokens=runner.num_tokens,
        passes=runner.num_passes,
        seconds=time.perf_counter() - start,
    )


def _described(request: BatchRequest) -> Described:
    """The model's description; a bad budget is heard about before anything is long."""
    described = describe(request.model)
    request.choice.make(described.config, request.sampling.seed)
    if request.choice.positions != "original":
        described = replace(described, context=None)  # nothing ends at the trained window
    return described


def _wording(request: BatchRequest, described: Described) -> Wording:
    tokenizer = described.tokenizer

    def decode(sequence: Sequence) -> str:
        # The way of `h2okv generate`, so that a text is the same there and here.
        prompt = torch.tensor([sequence.prompt])
        stream = TextStream(tokenizer, prompt, lambda _: None, lambda: None)
        stream.put(prompt)
        stream.put(torch.tensor(sequence.new_tokens))
        stream.end()
        return stream.text

    return Wording(
        encode=lambda text: tokenizer(text, verbose=False)["input_ids"],
        decode=decode,
        max_new_tokens=request.sampling.max_new_tokens,
        context=described.context,
        vocabulary=described.config.get_text_config().vocab_size,
    )


def _settings(request: BatchRequest, config: PreTrainedConfig) -> dict[str, Setting]:
    """What the results depend on; not where the weights are or how large a batch is."""
    dtype = "auto" if request.dtype is None else str(request.dtype).removeprefix("torch.")
    described = json.dumps(config.to_dict(), sort_keys=True, default=str)
    return {
        "model": request.model,
        "config": hashlib.sha256(described.encode()).hexdigest()[:16],
        **asdict(request.choice),
        **asdict(request.sampling),
        "dtype": dtype,
    }
