"""A job put together and run: model, prompts, results."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, replace

import torch
from transformers import PreTrainedConfig

import h2okv
from h2okv.cli.batch_engine import Engine, make_engine
from h2okv.cli.batch_request import BatchRequest, Stopped, Summary
from h2okv.cli.console import BatchProgress
from h2okv.cli.text_stream import TextStream
from h2okv.engine.chooser import Chooser
from h2okv.engine.job import Job, Wording
from h2okv.engine.memory import data_bytes, peak_resident_bytes
from h2okv.engine.prompt_file import PromptFile
from h2okv.engine.result_file import ResultFile, Setting
from h2okv.engine.runner import Runner
from h2okv.engine.sequence import Sequence
from h2okv.engine.weights_digest import weights_digest
from h2okv.integration.loading import Described, describe


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
    described = described_of(request)
    prompts = PromptFile(request.input)
    with ResultFile(request.output, settings_of(request, described.config)) as results:
        job = Job(prompts, results, wording_of(request, described))
        try:
            return _run(request, described, job)
        except KeyboardInterrupt:
            raise stopped(job) from None


def stopped(job: Job) -> Stopped:
    """Says how far a job is that Ctrl-C ends."""
    return Stopped(
        f"stopped; {job.num_finished} of {len(job.prompts)} prompts are finished, and the same"
        " command goes on from there"
    )


def _run(request: BatchRequest, described: Described, job: Job) -> Summary:
    if job.num_finished == len(job.prompts):
        return Summary(len(job.prompts), job.num_skipped, job.results.num_errors)
    sampling = request.sampling

    def make_cache() -> h2okv.H2OCache:
        return request.choice.make(described.config, sampling.seed)

    engine = make_engine(request, described, job, make_cache)
    try:
        job.wording = replace(job.wording, most_prompt=engine.most_prompt)
        chooser = Chooser(engine.model, sampling.temperature, sampling.top_p, sampling.seed)
        runner = Runner(
            engine.model, engine.passing, chooser, make_cache, engine.limits, request.device
        )
        with h2okv.enable(engine.model):
            return _go_through(job, runner, engine, sampling.max_new_tokens)
    finally:
        engine.close()


def _go_through(job: Job, runner: Runner, engine: Engine, max_new_tokens: int) -> Summary:
    total = len(job.prompts)
    start = time.perf_counter()
    with BatchProgress(total, job.num_skipped, max_new_tokens) as progress:
        for finished in job.run(runner):
            progress.update(finished, runner.unfinished_tokens, runner.num_tokens)
    assembled = engine.assembled
    stream = None if assembled is None else assembled.stream
    return Summary(
        prompts=total,
        skipped=job.num_skipped,
        errors=job.results.num_errors,
        prompt_tokens=runner.num_prompt_tokens,
        new_tokens=runner.num_tokens,
        passes=runner.num_passes,
        seconds=time.perf_counter() - start,
        predicted=None if engine.plan is None else engine.plan.forecast.tokens_per_second,
        bytes_read=0 if assembled is None else assembled.bytes_read,
        cache_bytes_read=0 if engine.store is None else engine.store.bytes_read,
        wait_seconds=0.0 if stream is None else stream.wait_seconds,
        plan=engine.describe(),
        peak_bytes=peak_resident_bytes(),
        data_bytes=data_bytes(),
    )


def described_of(request: BatchRequest) -> Described:
    """The model's description; a bad budget is heard about before anything is long."""
    described = describe(request.model)
    request.choice.make(described.config, request.sampling.seed)
    if request.choice.positions != "original":
        described = replace(described, context=None)  # nothing ends at the trained window
    return described


def wording_of(request: BatchRequest, described: Described) -> Wording:
    """How the model's tokenizer turns prompts into tokens and tokens into texts."""
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


def settings_of(request: BatchRequest, config: PreTrainedConfig) -> dict[str, Setting]:
    """What the results depend on; not where the weights are or how large a batch is."""
    dtype = "auto" if request.dtype is None else str(request.dtype).removeprefix("torch.")
    described = json.dumps(config.to_dict(), sort_keys=True, default=str)
    return {
        "model": request.model,
        "config": hashlib.sha256(described.encode()).hexdigest()[:16],
        "weights": weights_digest(config),
        **asdict(request.choice),
        **asdict(request.sampling),
        "dtype": dtype,
        "weight_bits": request.weight_bits,
    }
