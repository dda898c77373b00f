"""Batch jobs with models larger than memory: `plan` says how one would run, `run` runs it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedModel

import h2okv
from h2okv.config import CacheConfig
from h2okv.console import Progress
from h2okv.engine.memory import (
    MemoryModel,
    available_bytes,
    data_bytes,
    give_memory_back,
    peak_resident_bytes,
)
from h2okv.engine.sampling_params import SamplingParams
from h2okv.integration.gguf import cache_folder
from h2okv.integration.loading import Described, describe, load_weights
from h2okv.integration.models import default_dtype
from h2okv.offload.assembly import OffloadedModel, materialise
from h2okv.offload.batch_runner import ForwardScheduler, Limits, Runner, SequentialScheduler
from h2okv.offload.checkpoint import CheckpointFiles, StoredTensor, checkpoint_bytes, weights_digest
from h2okv.offload.conversion import (
    NeedsConversion,
    lay_out,
    map_weights,
    open_converted,
    untie_if_stored_apart,
)
from h2okv.offload.job import Job, JobResultFile, PromptFile, Summary, TextCodec
from h2okv.offload.kv_tiers import TieredCacheStore
from h2okv.offload.meta_model import MetaModel, make_meta_model
from h2okv.offload.planner import Fractions, MemoryBudget, Plan, Planner, Workload, interleave
from h2okv.offload.profile import (
    HardwareProfile,
    measure_bandwidth,
    measure_disk,
    measure_gemm,
    measure_host_device,
    measure_overhead,
)
from h2okv.offload.quantized_linear import pack_layers
from h2okv.provenance import digest

_UNSUPPORTED = ("stop", "n", "logprobs", "prompt_logprobs")
_BATCH_SIZE = 32
_MICRO_BATCH_TOKENS = 8192
_SMALL_MODEL = 0.5
"""A model whose weights take less than this fraction of the free memory is simply loaded."""
_USABLE = 0.9
"""Fraction of the free memory that is allocated where no ``--memory`` is given."""
_SAMPLE_BYTES = 64 << 20
_MIN_SAMPLE_BYTES = 1 << 20


class Interrupted(Exception):
    """Ctrl-C ended the job; says how far it is."""


@dataclass(frozen=True, kw_only=True)
class OffloadRequest:
    """A model, its cache, and where they may go; ``None`` leaves a choice to the planner.

    Attributes:
        model: What `resolve_model` takes.
        device: Where the model computes.
        cache: The cache.
        dtype: Of the weights; ``None`` for the checkpoint's own.
        weight_bits: 8 or 4 for quantized linear layers.
        batch_size: Running sequences.
        weight_placement: Fractions of the weights by place.
        cache_placement: Fractions of the layers whose keys and values are in each place.
        memory: Bytes that the process may allocate in all; ``None`` for what is free.
    """

    model: str
    device: torch.device
    cache: CacheConfig = CacheConfig()
    dtype: torch.dtype | None = None
    weight_bits: int | None = None
    batch_size: int | None = None
    weight_placement: Fractions | None = None
    cache_placement: Fractions | None = None
    memory: int | None = None


@dataclass(frozen=True, kw_only=True)
class BatchRequest(OffloadRequest):
    """A job.

    Attributes:
        input: The prompts.
        output: The results.
        sampling: How tokens are chosen; ``max_tokens`` is how many.
        is_raw: Whether prompts are continued as they are, without the model's chat template.
        cache_folder: Where the cache's file is made; ``None`` for the output's folder.
        converted: Where converted checkpoints are kept; ``None`` for the user's cache folder.
        keep_pages: Whether streamed weights may stay in the page cache.

    Raises:
        ValueError: If a job cannot do what `sampling` asks for.
    """

    input: Path
    output: Path
    sampling: SamplingParams
    is_raw: bool = False
    cache_folder: Path | None = None
    converted: Path | None = None
    keep_pages: bool = False

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
    """A plan, and what it rests on.

    Attributes:
        plan: The fastest that fits.
        hardware: What was measured.
        budget: Memory that may be allocated.
        sooner: A smaller batch with a sooner first result, where that of `plan` is far off.
    """

    plan: Plan
    hardware: HardwareProfile
    budget: MemoryBudget
    sooner: Plan | None

    def to_dict(self) -> dict[str, Any]:
        """By field, ready for JSON."""
        return {
            **describe_plan(self.plan),
            "process_bytes": self.budget.used,
            "total_bytes": self.plan.total_bytes,
            "limit": self.plan.estimate.step.limit,
            "hardware": asdict(self.hardware),
        }


def describe_plan(plan: Plan) -> dict[str, Any]:
    """A plan by its fields, ready for JSON."""
    return {**asdict(plan), "placement": plan.placement.counts()}


def plan(request: OffloadRequest, workload: Workload, patience: float = 60.0) -> PlannedJob:
    """Plans a job; writes nothing.

    Args:
        request: The model and where it may go.
        workload: Prompts and new tokens.
        patience: Seconds to the first result above which a smaller batch is looked for.

    Returns:
        The plan.

    Raises:
        ValueError: If something about the weights is wrong, or the memory is too little.
    """
    described = describe_for(request)
    if request.memory is not None:
        give_memory_back()
    planner = make_planner(request, open_model(request, described), workload)
    made = planner.plan()
    is_late = made.estimate.first_result_seconds > patience
    sooner = planner.sooner(made, patience) if is_late else None
    return PlannedJob(made, planner.hardware, planner.budget, sooner)


def run(request: BatchRequest) -> Summary:
    """Runs a job, or what an earlier run of it left.

    Args:
        request: The job.

    Returns:
        What was done.

    Raises:
        ValueError: If something about the input, the output, the model or the memory is wrong.
        Interrupted: If Ctrl-C ended it.
    """
    described = describe_for(request)
    prompts = PromptFile(request.input)
    with JobResultFile(request.output, job_settings(request, described)) as results:
        results.check_prompts(prompts.lines)
        job = Job(prompts, results, make_codec(request, described), request.max_new_tokens)
        if job.num_finished == len(prompts):
            return Summary(len(prompts), job.num_skipped, results.num_errors)
        try:
            engine = OffloadEngine.open(request, described, job)
            try:
                return engine.finish(job)
            finally:
                engine.close()
        except KeyboardInterrupt:
            raise interrupted(job) from None


def interrupted(job: Job) -> Interrupted:
    """The exception for a job that Ctrl-C ends."""
    return Interrupted(
        f"stopped; {job.num_finished} of {len(job.prompts)} prompts are finished, and the same"
        " command goes on from there"
    )


def describe_for(request: OffloadRequest) -> Described:
    """Describes the model, and checks the cache before anything slow."""
    described = describe(request.model)
    h2okv.H2OCache.from_config(described.config, request.cache)
    if request.cache.positions != "original":
        described = replace(described, context=None)  # positions never reach the context's end
    return described


def make_codec(request: BatchRequest, described: Described) -> TextCodec:
    """The model's tokenizer, with the job's limits."""
    vocabulary = described.config.get_text_config().vocab_size
    return TextCodec(described.tokenizer, vocabulary, described.context, is_raw=request.is_raw)


def job_settings(request: BatchRequest, described: Described) -> dict[str, Any]:
    """What the results depend on; not where the weights are or how large a batch is."""
    config: PreTrainedConfig = described.config
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


@dataclass(frozen=True)
class OpenModel:
    """A model whose weights are still in their files.

    Attributes:
        meta: The model and its parts.
        files: The checkpoint, or its converted copy.
        found: Where each parameter is; ``None`` if it has to be converted for streaming.
    """

    meta: MetaModel
    files: CheckpointFiles
    found: dict[str, StoredTensor] | None


def open_model(request: OffloadRequest, described: Described) -> OpenModel:
    """Opens a checkpoint for streaming; writes nothing.

    Raises:
        ValueError: If a file is missing or damaged, or the model has no layers to stream.
    """
    folder = _checkpoint_folder(described)
    files = CheckpointFiles.in_folder(folder)
    dtype = request.dtype or default_dtype(described.name, request.device)
    dtype = dtype or _own_dtype(described, files)
    meta = untie_if_stored_apart(make_meta_model(described.config, dtype, str(folder)), files)
    if request.weight_bits is not None:
        meta = pack_layers(meta, request.weight_bits, request.device)
    try:
        found = map_weights(meta, files)
        for unit in meta.units:
            lay_out(unit, found)
    except NeedsConversion:
        return OpenModel(meta, files, None)
    return OpenModel(meta, files, found)


def _converted(opened: OpenModel, folder: Path | None) -> OpenModel:
    """Opens the copy that can be streamed; writes it if it is not there."""
    folder = folder or cache_folder("weights")
    with Progress("writing the weights in the order of the layers", unit="bytes") as progress:
        files, found = open_converted(opened.meta, opened.files, folder, progress.update)
    opened.files.close()
    return OpenModel(opened.meta, files, found)


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


def make_planner(request: OffloadRequest, opened: OpenModel, workload: Workload) -> Planner:
    """Measures what a plan depends on."""
    config = opened.meta.model.config
    cache = h2okv.H2OCache.from_config(config, request.cache)
    memory = MemoryModel.of(config, cache, opened.meta.dtype)
    # Before measuring: what the libraries keep of it, the first forward would take too, and that
    # is counted. So a refusal and the next try, which measures more, count alike.
    budget = _memory_budget(request)
    return Planner(
        meta=opened.meta,
        memory=memory,
        hardware=measure_hardware(request, opened, memory, budget),
        budget=budget,
        workload=workload,
        device=request.device,
        batch_size=request.batch_size,
        weights=request.weight_placement,
        caches=_local(request.cache_placement, request.device),
    )


def measure_hardware(
    request: OffloadRequest, opened: OpenModel, memory: MemoryModel, budget: MemoryBudget
) -> HardwareProfile:
    """Measures the machine, in a second or two; the samples fit into the budget."""
    device = request.device
    # A quarter each for the buffer and its copy, and for the matrices of the products.
    sample = max(_MIN_SAMPLE_BYTES, min(_SAMPLE_BYTES, budget.device // 4))
    bandwidth = measure_bandwidth(device, sample if device.type == "cpu" else None)
    width = max(_MIN_SAMPLE_BYTES, budget.device // 4) // (memory.hidden * 16)
    width = max(1, min(memory.width, width))
    layer_seconds, forward_seconds = measure_overhead(request.cache, opened.meta.dtype, device)
    return HardwareProfile(
        disk=measure_disk(opened.files, sample // 4),
        host_device=bandwidth if device.type == "cpu" else measure_host_device(device),
        memory=bandwidth,
        gemm=measure_gemm(memory.hidden, width, opened.meta.dtype, device),
        layer_seconds=layer_seconds,
        forward_seconds=forward_seconds,
    )


def _memory_budget(request: OffloadRequest) -> MemoryBudget:
    """What may be allocated; below zero if the process has more than was promised already."""
    device = request.device
    if device.type == "cpu":
        # The threads of a product come with the first one, and stay.
        linear(torch.ones(64, 64), torch.ones(64, 64))
        used, host = data_bytes() or 0, 0
    else:
        used = torch.cuda.memory_allocated(device)
        host = (available_bytes(torch.device("cpu")) or 0) // 2
    if request.memory is not None:
        return MemoryBudget(request.memory - used, host, used)
    return MemoryBudget(int((available_bytes(device) or 0) * _USABLE), host, used)


def _local(placement: Fractions | None, device: torch.device) -> Fractions | None:
    """On a CPU, counts caches in the CPU's memory as on the device."""
    if placement is None or device.type != "cpu" or "cpu" not in placement:
        return placement
    rest = {place: own for place, own in placement.items() if place not in ("cpu", "device")}
    return {"device": placement["cpu"] + placement.get("device", 0.0), **rest}


@dataclass(frozen=True)
class OffloadEngine:
    """A model ready to generate.

    Attributes:
        request: What was asked for.
        model: The model.
        scheduler: Runs its forwards.
        limits: What is in memory at once.
        max_prompt: The longest prompt that the memory allows, in tokens; ``None`` for any.
        plan: ``None`` if there was nothing to plan.
        offloaded: Streams the weights; ``None`` if they are simply loaded.
        store: Stores caches between two layers; ``None`` if they stay on the device.
    """

    request: BatchRequest
    model: PreTrainedModel
    scheduler: ForwardScheduler
    limits: Limits
    max_prompt: int | None = None
    plan: Plan | None = None
    offloaded: OffloadedModel | None = None
    store: TieredCacheStore | None = None

    @classmethod
    def open(cls, request: BatchRequest, described: Described, job: Job) -> OffloadEngine:
        """Loads the model, or plans for the job's prompts and places the weights as planned.

        Raises:
            ValueError: If something about the weights or the memory is wrong.
        """
        if _fits_whole(request, described):
            return cls._resident(request, load_weights(described, request.dtype, request.device))
        if request.memory is not None:
            give_memory_back()
        return cls._streamed(request, open_model(request, described), job)

    @classmethod
    def _resident(cls, request: BatchRequest, model: PreTrainedModel) -> OffloadEngine:
        size = request.batch_size or _BATCH_SIZE
        free = available_bytes(request.device)
        cache = h2okv.H2OCache.from_config(model.config, request.cache)
        limits = Limits(
            batch_size=size,
            micro_batch_tokens=_MICRO_BATCH_TOKENS,
            decode_batch=size,
            cache_bytes=None if free is None else free // 4,
            sequence_bytes=_SequenceBytes(MemoryModel.of(model.config, cache, model.dtype)),
        )
        return cls(request, model, SequentialScheduler(), limits)

    @classmethod
    def _streamed(cls, request: BatchRequest, opened: OpenModel, job: Job) -> OffloadEngine:
        lengths = list(_count_tokens(job)) or [1]
        planner, longest = _planner_for(request, opened, lengths)
        chosen = planner.plan()
        if opened.found is None:
            # Only now: what does not fit was refused before anything is written. And once more:
            # what writing has left in memory counts.
            opened = _converted(opened, request.converted)
            planner, longest = _planner_for(request, opened, lengths)
            chosen = planner.plan()
        assert opened.found is not None
        tiers = interleave(chosen.cache_placement, len(planner.memory.cache.layers))
        store = None
        if set(tiers) != {"device"}:
            folder = request.cache_folder or request.output.resolve().parent
            store = TieredCacheStore(tiers, folder, request.device)
        offloaded = materialise(
            opened.meta, opened.files, opened.found, chosen.placement, request.device, store,
            request.keep_pages,
        )  # fmt: skip
        away = 1 - chosen.cache_placement.get("device", 0.0)
        limits = Limits(
            batch_size=chosen.batch_size,
            micro_batch_tokens=chosen.micro_batch_tokens,
            decode_batch=chosen.batch_size,
            pass_tokens=chosen.pass_tokens,
            cache_bytes=chosen.cache_bytes,
            sequence_bytes=_SequenceBytes(planner.memory, away),
        )
        model, scheduler = opened.meta.model, offloaded.scheduler
        return cls(request, model, scheduler, limits, longest, chosen, offloaded, store)

    def make_runner(self) -> Runner:
        """A loop over prompts, without any yet."""
        request = self.request
        return Runner(
            self.model,
            self.scheduler,
            request.sampling,
            lambda: h2okv.H2OCache.from_config(self.model.config, request.cache),
            self.limits,
            request.device,
        )

    def generate(self, job: Job, runner: Runner) -> Iterator[int]:
        """Runs a job; yields the number of finished prompts after each weight pass."""
        job.codec = replace(job.codec, max_prompt=self.max_prompt)
        with h2okv.enable(self.model):
            yield from job.run(runner)

    def finish(self, job: Job) -> Summary:
        """Runs a job to its end."""
        runner, total = self.make_runner(), len(job.prompts)
        length = self.request.max_new_tokens
        start = time.perf_counter()
        with Progress("batch", total * length) as progress:
            for finished in self.generate(job, runner):
                speed = runner.num_new_tokens / max(time.perf_counter() - start, 1e-9)
                progress.update(
                    finished * length + runner.unfinished_tokens,
                    note=f"{finished}/{total} prompts, {speed:,.1f} tokens/s",
                )
        offloaded = self.offloaded
        stream = None if offloaded is None else offloaded.stream
        return Summary(
            prompts=total,
            skipped=job.num_skipped,
            errors=job.results.num_errors,
            prompt_tokens=runner.num_prompt_tokens,
            new_tokens=runner.num_new_tokens,
            passes=runner.num_passes,
            seconds=time.perf_counter() - start,
            predicted=None if self.plan is None else self.plan.estimate.tokens_per_second,
            bytes_read=0 if offloaded is None else offloaded.bytes_read,
            cache_bytes_read=0 if self.store is None else self.store.bytes_read,
            wait_seconds=0.0 if stream is None else stream.wait_seconds,
            plan=None if self.plan is None else describe_plan(self.plan),
            peak_bytes=peak_resident_bytes(),
            data_bytes=data_bytes(),
        )

    def close(self) -> None:
        """Ends reading."""
        if self.offloaded is not None:
            self.offloaded.close()


@dataclass(frozen=True)
class _SequenceBytes:
    """A sequence's cache in device memory, from its prompt tokens and new tokens."""

    memory: MemoryModel
    away: float = 0.0

    def __call__(self, prompt: int, new: int) -> int:
        slots = self.memory.slots_for(prompt, new)
        return self.memory.sequence_bytes(slots, prompt + new, self.away)


def _planner_for(
    request: BatchRequest, opened: OpenModel, lengths: list[int]
) -> tuple[Planner, int]:
    """The planner for those prompts that fit, and the longest length that does."""
    new = request.max_new_tokens
    planner = make_planner(request, opened, Workload.of(lengths, new))
    longest = planner.longest_that_fits()
    if fitting := [length for length in lengths if length <= longest]:
        planner = replace(planner, workload=Workload.of(fitting, new))
    # If none fits, the planner says what would be needed.
    return planner, longest


def _count_tokens(job: Job) -> Iterator[int]:
    """Tokens of each unfinished prompt that can be served."""
    with Progress("counting tokens", len(job.prompts) - job.num_finished, "prompts") as progress:
        for length in job.lengths():
            yield length
            progress.advance()


def _fits_whole(request: BatchRequest, described: Described) -> bool:
    """Whether the model is simply loaded: nothing is to be placed, and there is ample memory."""
    if request.weight_bits is not None or request.memory is not None:
        return False
    if request.cache_placement not in (None, {"device": 1.0}):
        return False
    if request.weight_placement is not None:
        return set(request.weight_placement) <= {"device"}
    free = available_bytes(request.device)
    return free is None or checkpoint_bytes(_checkpoint_folder(described)) < _SMALL_MODEL * free
