"""Batch jobs with models larger than memory: `plan` says how one would run, `run` runs it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from h2okv.cache import H2OCache
from h2okv.config import CacheConfig
from h2okv.console import Progress
from h2okv.engine import memory as process
from h2okv.engine.memory import MemoryModel
from h2okv.engine.sampling_params import SamplingParams
from h2okv.integration.loading import Described, describe, load_weights
from h2okv.integration.models import cache_folder, default_dtype
from h2okv.offload.batch_runner import ForwardScheduler, Limits, Runner
from h2okv.offload.checkpoint import CheckpointFiles, checkpoint_bytes, weights_digest
from h2okv.offload.job import (
    Job,
    JobResultFile,
    PromptError,
    PromptFile,
    Summary,
    TextCodec,
    generate_records,
)
from h2okv.offload.kv_tiers import CacheStore
from h2okv.offload.meta_model import (
    MetaModel,
    NeedsConversion,
    make_meta_model,
    map_weights,
    open_converted,
    untie_if_stored_apart,
)
from h2okv.offload.planner import Fractions, MemoryBudget, Plan, Planner, Workload, interleave
from h2okv.offload.profile import HardwareProfile, measure_hardware
from h2okv.offload.quantized_linear import pack_layers
from h2okv.offload.weight_stream import WeightReader, materialise
from h2okv.provenance import digest

_UNSUPPORTED = ("stop", "n", "logprobs", "prompt_logprobs")
_BATCH_SIZE = 32
_MICRO_BATCH_TOKENS = 8192
_SMALL_MODEL = 0.5
"""A model whose weights take less than this fraction of the free memory is simply loaded."""
_SPARE = 4 << 20
"""By so much what a process holds differs between runs; an amount that is told must do."""
_USABLE = 0.9
"""Fraction of the free memory that is allocated where no ``--memory`` is given."""


class Interrupted(Exception):
    """Ctrl-C ended the job; says how far it is."""


@dataclass(frozen=True, kw_only=True)
class OffloadRequest:
    """A model, its cache, and where they may go; ``None`` leaves a choice to the planner."""

    model: str  # what `resolve_model` takes
    device: torch.device  # where the model computes
    cache: CacheConfig = CacheConfig()
    dtype: torch.dtype | None = None  # None for the checkpoint's own
    weight_bits: int | None = None  # 8 or 4 for quantized linear layers
    batch_size: int | None = None
    weight_placement: Fractions | None = None
    cache_placement: Fractions | None = None  # of the layers whose keys and values are there
    memory: int | None = None  # bytes that the process may allocate in all; None for what is free
    keep_pages: bool = False  # whether streamed weights may stay in the page cache


@dataclass(frozen=True, kw_only=True)
class BatchRequest(OffloadRequest):
    """A job; refuses what a job cannot do of `sampling`."""

    input: Path
    output: Path
    sampling: SamplingParams
    is_raw: bool = False  # whether prompts are continued, without the model's chat template
    cache_folder: Path | None = None  # of the cache's file; None for the output's folder
    converted: Path | None = None  # of converted checkpoints; None for the user's cache folder

    def __post_init__(self) -> None:
        values, defaults = asdict(self.sampling), asdict(SamplingParams())
        for name in _UNSUPPORTED:
            if values[name] != defaults[name]:
                raise ValueError(
                    f"{name}={values[name]!r} is not supported in a batch job; leave it out, or use"
                    " h2okv.LLM"
                )

    @property
    def max_new_tokens(self) -> int:
        """The most tokens that are generated for a prompt."""
        return self.sampling.max_tokens or 1


@dataclass(frozen=True)
class PlannedJob:
    """The fastest plan that fits, and what it rests on."""

    plan: Plan
    hardware: HardwareProfile
    budget: MemoryBudget
    sooner: Plan | None  # with a sooner first result, where that of `plan` is far off

    def to_dict(self) -> dict[str, Any]:
        """By field, ready for JSON."""
        return {
            **self.plan.to_dict(),
            "process_bytes": self.budget.used,
            "total_bytes": self.plan.total_bytes,
            "limit": self.plan.estimate.limit,
            "hardware": asdict(self.hardware),
        }


def plan(request: OffloadRequest, workload: Workload, patience: float = 60.0) -> PlannedJob:
    """Plans a job; writes nothing.

    If the first result comes later than ``patience`` seconds, a smaller batch is looked for.
    """
    described = describe_for(request)
    if request.memory is not None:
        process.give_memory_back()
    meta, reader = open_model(request, described)
    planner = make_planner(request, meta, reader.files, workload)
    made = planner.plan()
    is_late = made.estimate.first_result_seconds > patience
    sooner = planner.sooner(made, patience) if is_late else None
    return PlannedJob(made, planner.hardware, planner.budget, sooner)


def run(
    request: BatchRequest,
    execute: Callable[[BatchRequest, Described, Job], Summary] | None = None,
) -> Summary:
    """Runs a job, or what an earlier run of it left, with ``execute`` or in this process."""
    described = describe_for(request)
    prompts = PromptFile(request.input)
    with JobResultFile(request.output, job_settings(request, described)) as results:
        results.check_prompts(prompts.lines)
        job = Job(prompts, results, make_codec(request, described))
        if job.num_finished == len(prompts):
            return job.summary()
        try:
            return (execute or _run_here)(request, described, job)
        except KeyboardInterrupt:
            raise Interrupted(
                f"stopped; {job.num_finished} of {len(prompts)} prompts are finished, and the same"
                " command goes on from there"
            ) from None


def _run_here(request: BatchRequest, described: Described, job: Job) -> Summary:
    runner, chosen = open_runner(request, described, _count_tokens(job))
    begun, length, scheduler = job.summary(), request.max_new_tokens, runner.scheduler
    start = time.perf_counter()
    try:
        with Progress("batch", begun.prompts * length) as progress:
            for records in generate_records(job.read(), job.codec, runner):
                if records:
                    job.results.append(records)
                speed = runner.num_new_tokens / max(time.perf_counter() - start, 1e-9)
                progress.update(
                    job.num_finished * length + runner.unfinished_tokens,
                    note=f"{job.num_finished}/{begun.prompts} prompts, {speed:,.1f} tokens/s",
                )
    finally:
        scheduler.close()
    return replace(
        begun,
        errors=job.results.num_errors,
        prompt_tokens=runner.num_prompt_tokens,
        new_tokens=runner.num_new_tokens,
        passes=runner.num_passes,
        seconds=time.perf_counter() - start,
        predicted=None if chosen is None else chosen.estimate.tokens_per_second,
        bytes_read=scheduler.bytes_read,
        cache_bytes_read=0 if scheduler.store is None else scheduler.store.bytes_read,
        wait_seconds=0.0 if scheduler.stream is None else scheduler.stream.wait_seconds,
        plan=None if chosen is None else chosen.to_dict(),
        peak_bytes=process.peak_resident_bytes(),
        data_bytes=process.data_bytes(),
    )


def _count_tokens(job: Job) -> Iterator[int]:
    """Tokens of each unfinished prompt that can be served."""
    with Progress("counting tokens", len(job.prompts) - job.num_finished, "prompts") as progress:
        for _, prompt, _ in job.read():
            with suppress(PromptError):
                yield len(job.codec.encode(prompt))
            progress.advance()


def describe_for(request: OffloadRequest) -> Described:
    """Describes the model, and checks the cache before anything slow."""
    described = describe(request.model)
    H2OCache.from_config(described.config, request.cache)
    if request.cache.positions != "original":
        described = replace(described, context=None)  # positions never reach the context's end
    return described


def make_codec(request: BatchRequest, described: Described) -> TextCodec:
    """The model's tokenizer, with the job's limits."""
    return TextCodec(
        tokenizer=described.tokenizer,
        vocabulary=described.config.get_text_config().vocab_size,
        context=described.context,
        max_new_tokens=request.max_new_tokens,
        is_raw=request.is_raw,
    )


def job_settings(request: BatchRequest, described: Described) -> dict[str, Any]:
    """What the results depend on; not where the weights are or how large a batch is."""
    config = described.config
    cache, sampling = request.cache.to_dict(), asdict(request.sampling)
    cache["cache_seed"] = cache.pop("seed")
    sampling["max_new_tokens"] = sampling.pop("max_tokens")
    return {
        "model": request.model,
        "config": digest(json.dumps(config.to_dict(), sort_keys=True, default=str)),
        "weights": weights_digest(config),
        **cache,
        **{name: value for name, value in sampling.items() if name not in _UNSUPPORTED},
        "dtype": "auto" if request.dtype is None else str(request.dtype).removeprefix("torch."),
        "weight_bits": request.weight_bits,
        "chat_template": make_codec(request, described).uses_template,
    }


def open_model(request: OffloadRequest, described: Described) -> tuple[MetaModel, WeightReader]:
    """Opens a checkpoint for streaming, and finds nothing in it if it has to be converted first."""
    folder = _checkpoint_folder(described)
    files = CheckpointFiles.in_folder(folder)
    dtype = request.dtype or default_dtype(described.name, request.device)
    dtype = dtype or _own_dtype(described, files)
    meta = untie_if_stored_apart(make_meta_model(described.config, dtype, str(folder)), files)
    if request.weight_bits is not None:
        meta = pack_layers(meta, request.weight_bits, request.device)
    reader = WeightReader(files, {}, request.keep_pages)
    with suppress(NeedsConversion):
        reader = replace(reader, found=map_weights(meta, files))
    return meta, reader


def _checkpoint_folder(described: Described) -> Path:
    """The folder of a model's files; those of a Hub id are downloaded if they are not here yet."""
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


def _own_dtype(described: Described, files: CheckpointFiles) -> torch.dtype:
    """The config's, or else that of the largest stored tensor."""
    own: Any = getattr(described.config.get_text_config(), "dtype", None)
    if isinstance(own, torch.dtype):
        return own
    largest = max(files.tensors.values(), key=lambda stored: stored.nbytes)
    return largest.dtype if largest.dtype.is_floating_point else torch.float32


def make_planner(
    request: OffloadRequest, meta: MetaModel, files: CheckpointFiles, workload: Workload
) -> Planner:
    """Measures what a plan depends on."""
    config, device, dtype = meta.model.config, request.device, meta.embedding.dtype
    memory = MemoryModel(config, H2OCache.from_config(config, request.cache), dtype)
    # Before measuring: what the libraries keep of it, the first forward would take too, and that
    # is counted. So a refusal and the next try, which measures more, count alike.
    budget = _memory_budget(request)
    caches = request.cache_placement
    if caches is not None and device.type == "cpu" and "cpu" in caches:
        # There the CPU's memory is the device's.
        near = caches["cpu"] + caches.get("device", 0.0)
        caches = {"device": near, **{k: v for k, v in caches.items() if k == "file"}}
    return Planner(
        meta=meta,
        memory=memory,
        hardware=measure_hardware(files, request.cache, memory, dtype, device, budget.device),
        budget=budget,
        workload=workload,
        device=device,
        batch_size=request.batch_size,
        weights=request.weight_placement,
        caches=caches,
    )


def _memory_budget(request: OffloadRequest) -> MemoryBudget:
    """What may be allocated; below zero if the process has more than was promised already."""
    device = request.device
    if device.type == "cpu":
        # The threads of a product come with the first one, and stay.
        linear(torch.ones(64, 64), torch.ones(64, 64))
        used, host = process.data_bytes() or 0, 0
    else:
        used = torch.cuda.memory_allocated(device)
        host = (process.available_bytes(torch.device("cpu")) or 0) // 2
    if request.memory is not None:
        return MemoryBudget(request.memory - used, host, used, _SPARE)
    return MemoryBudget(int((process.available_bytes(device) or 0) * _USABLE), host, used, _SPARE)


def open_runner(
    request: BatchRequest, described: Described, lengths: Iterable[int]
) -> tuple[Runner, Plan | None]:
    """Loads the model, or plans for prompts of these lengths and places weights as planned."""
    if _fits_whole(request, described):
        return _resident_runner(request, described), None
    if request.memory is not None:
        process.give_memory_back()
    meta, reader = open_model(request, described)
    known = list(lengths) or [1]
    planner, chosen, longest = _plan_for(request, meta, reader.files, known)
    if not reader.found:
        # Only now: what does not fit was refused before anything is written. And once more: what
        # writing has left in memory counts.
        folder = request.converted or cache_folder("weights")
        files, found = open_converted(meta, reader.files, folder)
        reader.files.close()
        reader = replace(reader, files=files, found=found)
        planner, chosen, longest = _plan_for(request, meta, files, known)
    tiers = interleave(chosen.cache_placement, len(planner.memory.cache.layers))
    store = None
    if set(tiers) != {"device"}:
        folder = request.cache_folder or request.output.resolve().parent
        store = CacheStore(tiers, folder, request.device)
    places = chosen.placement
    stream, embedding = materialise(meta, reader, places.units, places.embedding, request.device)
    scheduler = ForwardScheduler(meta.units, stream, store, embedding)
    limits = Limits(
        batch_size=chosen.batch_size,
        micro_batch_tokens=chosen.micro_batch_tokens,
        decode_batch=chosen.batch_size,
        longest_prompt=longest,
        pass_tokens=chosen.pass_tokens,
        cache_bytes=chosen.cache_bytes,
        memory=planner.memory,
        away=1 - chosen.cache_placement.get("device", 0.0),
    )
    model, sampling = meta.model, request.sampling
    return Runner(model, scheduler, sampling, request.cache, limits, request.device), chosen


def _resident_runner(request: BatchRequest, described: Described) -> Runner:
    model = load_weights(described, request.dtype, request.device)
    size = request.batch_size or _BATCH_SIZE
    free = process.available_bytes(request.device)
    cache = H2OCache.from_config(model.config, request.cache)
    limits = Limits(
        batch_size=size,
        micro_batch_tokens=_MICRO_BATCH_TOKENS,
        decode_batch=size,
        cache_bytes=None if free is None else free // 4,
        memory=MemoryModel(model.config, cache, model.dtype),
    )
    scheduler, sampling = ForwardScheduler(), request.sampling
    return Runner(model, scheduler, sampling, request.cache, limits, request.device)


def _plan_for(
    request: BatchRequest, meta: MetaModel, files: CheckpointFiles, lengths: list[int]
) -> tuple[Planner, Plan, int]:
    """Plans for those prompts that fit; returns the longest length that does too."""
    new = request.max_new_tokens
    planner = make_planner(request, meta, files, Workload.of(lengths, new))
    longest = planner.longest_that_fits()
    if fitting := [length for length in lengths if length <= longest]:
        planner = replace(planner, workload=Workload.of(fitting, new))
    # If none fits, the planner says what would be needed.
    return planner, planner.plan(), longest


def _fits_whole(request: BatchRequest, described: Described) -> bool:
    """Whether the model is simply loaded: nothing is to be placed, and there is ample memory."""
    if request.weight_bits is not None or request.memory is not None:
        return False
    if request.cache_placement not in (None, {"device": 1.0}):
        return False
    if request.weight_placement is not None:
        return set(request.weight_placement) <= {"device"}
    free = process.available_bytes(request.device)
    return free is None or checkpoint_bytes(_checkpoint_folder(described)) < _SMALL_MODEL * free
