"""Batch jobs with models larger than memory: `plan` plans a job, `run` runs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.calibration.factors import Shares
from h2okv.calibration.layer_budgets import (
    even_budgets,
    measure_model,
    measuring_command,
    stored_budgets,
    with_measured_budgets,
)
from h2okv.config import MEASURED, CacheConfig
from h2okv.console import Progress, format_bytes
from h2okv.engine import memory as process
from h2okv.engine.memory import MemoryModel
from h2okv.engine.sampling_params import SamplingParams
from h2okv.models.loading import (
    Described,
    default_dtype,
    describe,
    load_weights,
    weights_digest,
)
from h2okv.models.names import cache_folder
from h2okv.offload.batch_runner import ForwardScheduler, Limits, Runner
from h2okv.offload.checkpoint import (
    CheckpointFiles,
    checkpoint_bytes,
    map_weights,
    open_checkpoint,
    open_converted,
)
from h2okv.offload.job import Job, PromptFile, Summary, TextCodec, generate_records, saved_settings
from h2okv.offload.meta_model import MetaModel, pack_layers
from h2okv.offload.planner import MICRO_BATCH_TOKENS, Fractions, Plan, Planner, Workload
from h2okv.offload.profile import measure_hardware
from h2okv.offload.tiers import (
    StreamingModel,
    bytes_while_streaming,
    materialise,
    weights_in_files,
)
from h2okv.provenance import digest

_UNSUPPORTED = ("n", "logprobs", "prompt_logprobs")  # of sampling, in jobs
BATCH_SIZE = 32
_SMALL_MODEL = 0.5  # fraction of the free memory below which a model is simply loaded
_SPARE = 4 << 20  # variation of a process's memory between runs, added to suggested amounts
_USABLE = 0.9  # fraction of the free memory that is allocated without ``--memory``


@dataclass(frozen=True, kw_only=True)
class OffloadRequest:
    """A model, its cache, and its tiers; ``None`` leaves a choice to the planner."""

    model: str  # a name for `resolve_model`
    device: torch.device  # where the model computes
    cache: CacheConfig = CacheConfig()
    dtype: torch.dtype | None = None  # None for the checkpoint's own
    weight_bits: int | None = None  # 8 for quantized linear layers
    batch_size: int | None = None
    weight_placement: Fractions | None = None
    memory: int | None = None  # total bytes that the process may allocate; None: all that is free


@dataclass(frozen=True, kw_only=True)
class BatchRequest(OffloadRequest):
    """A job, with what its lines do not say."""

    input: Path
    output: Path
    sampling: SamplingParams
    is_raw: bool = False  # whether prompts are continued, without the model's chat template

    @property
    def max_new_tokens(self) -> int:
        return self.sampling.max_tokens or 1


def plan(request: OffloadRequest, workload: Workload) -> tuple[Plan, Planner]:
    """Return the fastest plan that fits, and the planner with its measurements."""
    described = describe_for(request)
    remedy = "lower --prompt-tokens, or add --cache positions=rolling"
    described.limits.check_length(workload.longest_prompt, remedy=remedy)
    meta, files = open_model(request, described)
    planner = make_planner(request, meta, files, workload)
    return planner.plan(), planner


def run(
    request: BatchRequest,
    execute: Callable[[BatchRequest, Described, Job], Summary] | None = None,
    prompts: PromptFile | None = None,
) -> Summary:
    """Run a job, or the rest of an interrupted one, with ``execute`` or in this process.

    ``prompts`` are those of the request's input, if they were read already.
    """
    prompts = prompts or PromptFile(request.input)
    path = Path(request.model)
    prompts.check_model(path.resolve().name if path.exists() else request.model, request.model)
    described = describe_for(request)
    request, model = _with_budgets(request, described, is_here=execute is None)
    execute = execute or partial(_run_here, model=model)
    with Job(request.output, job_settings(request, described), prompts) as job:
        job.check_prompts()
        count = len(prompts.lines)
        if len(job.finished) == count:
            return Summary(count, count, job.num_errors)
        try:
            return execute(request, described, job)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"stopped; {len(job.finished)} of {count} prompts are finished, and the same"
                " command goes on from there"
            ) from None


def _with_budgets(
    request: BatchRequest, described: Described, is_here: bool
) -> tuple[BatchRequest, PreTrainedModel | None]:
    """Replace layer budgets ``"auto"``; return the model too if measuring has loaded it.

    A job that was begun goes on with its budgets, whether the model fits into memory or not.
    """
    cache, model = request.cache, None
    if cache.layer_budgets != MEASURED:
        return request, None
    saved = saved_settings(request.output)
    if "layer_budgets" in saved:
        factors, version = saved["layer_budgets"], saved.get("measured")
        cache = replace(cache, layer_budgets=factors, measured=version)
    elif is_here and _fits_in_memory(request, described):
        model = load_weights(described, request.dtype, request.device)
        cache = with_measured_budgets(cache, model, described)
    else:
        cache = _budgets_from_files(request, described, measures=is_here)
    return replace(request, cache=cache), model


def _budgets_from_files(
    request: OffloadRequest, described: Described, measures: bool
) -> CacheConfig:
    """Replace ``"auto"`` for a model that is not loaded whole here."""
    try:
        meta, files = _open(request, described)
    except ValueError:
        if measures:
            raise
        return even_budgets(request.cache, "the weights cannot be read here")
    reason = f"{described.name} was not measured yet"
    with closing(files):
        weights = weights_in_files(meta, files)
        stored = stored_budgets(request.cache, described.config, weights)
        if stored is not None:
            return stored
        room = None if request.memory is None else request.memory - (process.data_bytes() or 0)
        needed = bytes_while_streaming(meta)
        if measures and (room is None or needed <= room):
            if room is not None:
                process.give_memory_back()
            with _streaming(meta, files, request.device) as streaming:
                weights = streaming.weights()
                return with_measured_budgets(request.cache, streaming.model, described, weights)
        if measures:
            reason = f"--memory leaves less than the {format_bytes(needed)} that measuring takes"
    return even_budgets(request.cache, reason, measuring_command(described.name))


def measure(request: OffloadRequest, described: Described) -> Shares:
    """Measure a model's budgets by layer and head, loaded or streamed; once."""
    if _fits_in_memory(request, described):
        return measure_model(load_weights(described, request.dtype, request.device), described)
    meta, files = _open(request, described)
    with closing(files), _streaming(meta, files, request.device) as streaming:
        return measure_model(streaming.model, described, streaming.weights())


@contextmanager
def _streaming(
    meta: MetaModel, files: CheckpointFiles, device: torch.device
) -> Iterator[StreamingModel]:
    """Open a model that reads its layers one by one, from their converted copy if there must be."""
    if files.parameters:
        yield StreamingModel(meta, files, device)
        return
    with closing(open_converted(meta, files, cache_folder("weights"))) as copy:
        yield StreamingModel(meta, copy, device)


def _run_here(
    request: BatchRequest, described: Described, job: Job, model: PreTrainedModel | None = None
) -> Summary:
    codec = TextCodec(described, request.sampling, request.is_raw)

    def lengths() -> Iterator[int]:
        """Yield the tokens of each unfinished prompt that can be served."""
        unfinished = job.unfinished()
        with Progress("counting tokens", len(unfinished), "prompts") as progress:
            for prompt in unfinished:
                with suppress(ValueError):
                    yield len(codec.sequence(prompt, None).prompt)
                progress.advance()

    usual, prompts = request.max_new_tokens, job.prompts.lines.values()
    limits = [prompt.sampling.get("max_tokens") or usual for prompt in prompts]
    # The plan must have room for the longest answer of any line.
    longest = replace(request.sampling, max_tokens=max(limits))
    request = replace(request, sampling=longest)
    runner, chosen = open_runner(request, described, lengths(), model)
    count, total, scheduler = len(limits), sum(limits), runner.scheduler
    unfinished = job.unfinished()

    def report(seconds: float, _: int) -> None:
        speed = runner.num_new_tokens / max(seconds, 1e-9)
        note = f"{len(job.finished)}/{count} prompts, {speed:,.1f} tokens/s"
        finished = total * len(job.finished) // count
        progress.update(finished + runner.unfinished_tokens, note=note)

    with closing(scheduler), Progress("batch", total) as progress:
        summary = job.collect(generate_records(unfinished, codec, runner), report)
    return replace(
        summary,
        passes=runner.num_passes,
        predicted=None if chosen is None else chosen.estimate.tokens_per_second,
        bytes_read=scheduler.bytes_read,
        wait_seconds=0.0 if scheduler.stream is None else scheduler.stream.wait_seconds,
        plan=None if chosen is None else chosen.to_dict(),
        peak_bytes=process.peak_resident_bytes(),
        data_bytes=process.data_bytes(),
    )


def describe_for(request: OffloadRequest) -> Described:
    """Describe the model, and check the cache before anything slow."""
    described = describe(request.model)
    H2OCache.from_config(described.config, request.cache.before_measuring)
    if request.cache.positions != "original":
        described = replace(described, context=None)  # positions never reach the context's end
    return described


def job_settings(request: BatchRequest, described: Described) -> dict[str, Any]:
    """Return the settings that results depend on; not the placement or the batch size."""
    config = described.config
    cache, sampling = request.cache.to_dict(), asdict(request.sampling)
    cache["cache_seed"] = cache.pop("seed")
    sampling["max_new_tokens"] = sampling.pop("max_tokens")
    return {
        "model": request.model,
        "config": digest(json.dumps(config.to_dict(), sort_keys=True, default=str)),
        "weights": weights_digest(config.name_or_path, config),
        **cache,
        **{name: value for name, value in sampling.items() if name not in _UNSUPPORTED},
        "dtype": "auto" if request.dtype is None else str(request.dtype).removeprefix("torch."),
        "weight_bits": request.weight_bits,
        "chat_template": TextCodec(described, is_raw=request.is_raw).uses_template,
    }


def open_model(request: OffloadRequest, described: Described) -> tuple[MetaModel, CheckpointFiles]:
    """Open a checkpoint for streaming; see `open_checkpoint`."""
    if request.memory is not None:
        process.give_memory_back()
    meta, files = _open(request, described)
    described.add_end_tokens(meta.model)
    if request.weight_bits is not None:
        meta = pack_layers(meta)
        files.parameters = map_weights(meta, files)
    return meta, files


def _open(request: OffloadRequest, described: Described) -> tuple[MetaModel, CheckpointFiles]:
    dtype = request.dtype or default_dtype(described.name, request.device)
    return open_checkpoint(described.config, _checkpoint_folder(described), dtype)


def _checkpoint_folder(described: Described) -> Path:
    """Return the folder of a model's files, downloading those of a Hub id if needed."""
    folder = Path(described.source)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(described.source, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # its type depends on the network failure
        raise ValueError(
            f"the weights of model {described.name!r} cannot be fetched"
            f" ({type(error).__name__}); check the network, or give a folder"
        ) from error


def make_planner(
    request: OffloadRequest, meta: MetaModel, files: CheckpointFiles, workload: Workload
) -> Planner:
    """Measure the machine and the process for a planner."""
    config, device, dtype = meta.model.config, request.device, meta.embedding.dtype
    memory = MemoryModel(config, H2OCache.from_config(config, request.cache), dtype)
    # Before measuring: the memory that libraries keep from it, the first forward would allocate
    # too, and that is counted. A refusal and the next attempt, which measures more, count alike.
    if device.type == "cpu":
        # The first product starts the threads, which stay.
        linear(torch.ones(64, 64), torch.ones(64, 64))
        used, host = process.data_bytes() or 0, 0
    else:
        used = torch.cuda.memory_allocated(device)
        host = (process.available_bytes(torch.device("cpu")) or 0) // 2
    # Below zero if the process already has more than the limit.
    room = int((process.available_bytes(device) or 0) * _USABLE)
    room = room if request.memory is None else request.memory - used
    return Planner(
        meta=meta,
        memory=memory,
        hardware=measure_hardware(files, memory, workload.mean_prompt, dtype, device, room),
        room=room,
        workload=workload,
        device=device,
        host_room=host,
        used=used,
        spare=_SPARE,
        batch_size=request.batch_size,
        weights=request.weight_placement,
    )


def open_runner(
    request: BatchRequest,
    described: Described,
    lengths: Iterable[int],
    model: PreTrainedModel | None = None,
) -> tuple[Runner, Plan | None]:
    """Load the model, or plan for prompts of these lengths and place weights as planned."""
    device = request.device
    if model is not None or _fits_in_memory(request, described):
        model = model or load_weights(described, request.dtype, device)
        cache = H2OCache.from_config(model.config, request.cache)
        size, free = request.batch_size or BATCH_SIZE, process.available_bytes(device)
        limits = Limits(
            batch_size=size,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            decode_batch=size,
            cache_bytes=None if free is None else free // 4,
            memory=MemoryModel(model.config, cache, model.dtype),
        )
        return Runner(model, ForwardScheduler(), request.cache, limits, device), None
    meta, files = open_model(request, described)
    prompt_lengths = list(lengths) or [1]
    planner, chosen, longest = _plan_for(request, meta, files, prompt_lengths)
    if not files.parameters:
        # Only now, because a job that does not fit is refused before anything is written. Plan
        # again: memory left over from writing counts.
        with closing(files):
            files = open_converted(meta, files, cache_folder("weights"))
        planner, chosen, longest = _plan_for(request, meta, files, prompt_lengths)
    if planner.is_ample(chosen):
        process.keep_memory()
    stream, embedding = materialise(meta, files, chosen.placement, device)
    scheduler = ForwardScheduler(meta.units, stream, embedding)
    limits = Limits(
        batch_size=chosen.batch_size,
        micro_batch_tokens=chosen.micro_batch_tokens,
        decode_batch=chosen.batch_size,
        longest_prompt=longest,
        pass_tokens=chosen.pass_tokens,
        cache_bytes=planner.cache_limit(chosen),
        memory=planner.memory,
    )
    return Runner(meta.model, scheduler, request.cache, limits, device), chosen


def _plan_for(
    request: BatchRequest, meta: MetaModel, files: CheckpointFiles, lengths: list[int]
) -> tuple[Planner, Plan, int]:
    """Plan for those prompts that fit; return the longest length that fits too."""
    new = request.max_new_tokens
    planner = make_planner(request, meta, files, Workload.of(lengths, new))
    longest = planner.longest_that_fits()
    if fitting := [length for length in lengths if length <= longest]:
        planner = replace(planner, workload=Workload.of(fitting, new))
    # If none fits, the planner raises with the memory needed.
    return planner, planner.plan(), longest


def _fits_in_memory(request: OffloadRequest, described: Described) -> bool:
    """Return whether the model is simply loaded: no placement requested, and ample memory."""
    if request.weight_bits is not None or request.memory is not None:
        return False
    if request.weight_placement is not None:
        return set(request.weight_placement) <= {"device"}
    free = process.available_bytes(request.device)
    return free is None or checkpoint_bytes(_checkpoint_folder(described)) < _SMALL_MODEL * free
