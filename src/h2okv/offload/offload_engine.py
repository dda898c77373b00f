"""A job's model, plan and loop put together."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedModel

import h2okv
from h2okv.cli.args import CacheChoice, Sampling
from h2okv.console import Progress, format_bytes
from h2okv.engine.detokenizer import TextStream
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
from h2okv.offload.assembly import Assembled, assemble
from h2okv.offload.batch_runner import BatchSequence, Limits, OneByOne, Passing, Runner
from h2okv.offload.checkpoint import CheckpointFiles, Stored, weights_digest
from h2okv.offload.conversion import (
    NeedsConversion,
    convert,
    converted_path,
    lay_out,
    map_weights,
    read_converted,
    untie_if_stored_apart,
)
from h2okv.offload.job import Job, JobResultFile, PromptFile, Setting, Wording
from h2okv.offload.kv_tiers import TieredStore
from h2okv.offload.meta_model import Skeleton, make_skeleton
from h2okv.offload.planner import Plan, Planner, Room, Workload, spread
from h2okv.offload.profile import (
    Speeds,
    measure_bandwidth,
    measure_disk,
    measure_link,
    measure_products,
)
from h2okv.offload.quantized_linear import pack_layers


class Stopped(Exception):
    """Ctrl-C ended the job; says how far it is."""


@dataclass(frozen=True)
class BatchRequest:
    """What the user asked for.

    Attributes:
        model: What `resolve_model` takes.
        input: The prompts.
        output: The results.
        choice: The cache.
        sampling: How tokens are chosen, and how many.
        dtype: Of the weights; None for the checkpoint's own.
        device: Where the model runs.
        rows: Prompts under way; None for as many as is best.
        shares: Where weights are, by place; None for what is best.
        cache_shares: Where keys and values are, by place; None for what is best.
        cache_folder: Where the cache's file is made; None for the output's folder.
        memory: Bytes that are not to be exceeded; None for what is free.
        converted: Where converted checkpoints are kept; None for the user's cache folder.
        weight_bits: 8 for int8 weights in the layers; None leaves them.
        keep_pages: Whether the system may keep streamed weights in memory that is free.
    """

    model: str
    input: Path
    output: Path
    choice: CacheChoice
    sampling: Sampling
    dtype: torch.dtype | None
    device: torch.device
    rows: int | None
    shares: dict[str, float] | None = None
    cache_shares: dict[str, float] | None = None
    cache_folder: Path | None = None
    memory: int | None = None
    converted: Path | None = None
    weight_bits: int | None = None
    keep_pages: bool = False


@dataclass(frozen=True)
class Summary:
    """What a job did in this run.

    Attributes:
        prompts: Of the whole job.
        skipped: Finished by an earlier run.
        errors: Prompts with an error record, those of earlier runs too.
        prompt_tokens: Of the prompts read in this run.
        new_tokens: Generated in this run.
        passes: Over the weights.
        seconds: From the first pass to the last.
        predicted: New tokens in a second by the planner; None without a plan.
        bytes_read: Weights read from the disk while it ran.
        cache_bytes_read: Keys and values read from the file.
        wait_seconds: Time that computing waited for weights.
        plan: What was planned, for machines; None without a plan.
        peak_bytes: The largest resident memory; None where nobody tells.
        data_bytes: The process's data at the end; None where nobody tells.
    """

    prompts: int
    skipped: int
    errors: int
    prompt_tokens: int = 0
    new_tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    predicted: float | None = None
    bytes_read: int = 0
    cache_bytes_read: int = 0
    wait_seconds: float = 0.0
    plan: dict[str, Any] | None = None
    peak_bytes: int | None = None
    data_bytes: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens of this run, the reading of prompts included in the time."""
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
        speed = f"{self.tokens_per_second:,.1f} tokens/s"
        if self.predicted is not None:
            speed += f" ({self.predicted:,.1f} predicted)"
        parts.append(speed)
        if self.bytes_read:
            parts.append(f"{format_bytes(self.bytes_read)} of weights read")
        if self.peak_bytes is not None:
            parts.append(f"peak memory {format_bytes(self.peak_bytes)}")
        return ", ".join(parts)


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

    def demand(self, cache: h2okv.H2OCache) -> MemoryModel:
        """The sizes that memory depends on."""
        model = self.skeleton.model
        return MemoryModel.of(model.config, cache, self.skeleton.table.dtype)


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
        with Progress("writing the weights in the order of the layers", unit="bytes") as progress:
            convert(opened.skeleton, opened.files, path, progress.update)
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


def measure_speeds(opened: OpenModel, demand: MemoryModel, room: Room) -> Speeds:
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


_ROWS = 32
_PROMPT_TOKENS = 8192
_LITTLE = 0.5
"""A model whose weights take less of the free memory than this is loaded without more ado."""


@dataclass(frozen=True)
class Engine:
    """A model that can run, and how.

    Attributes:
        model: The model.
        passing: Runs its forwards.
        limits: What is in memory at once.
        most_prompt: Tokens of the longest prompt that the memory allows; None for any.
        plan: Why; None if there was nothing to plan.
        assembled: Where weights come from; None if they are all in memory.
        store: Where caches are between two layers; None if they stay.
    """

    model: PreTrainedModel
    passing: Passing
    limits: Limits
    most_prompt: int | None = None
    plan: Plan | None = None
    assembled: Assembled | None = None
    store: TieredStore | None = None

    def close(self) -> None:
        """Ends reading."""
        if self.assembled is not None:
            self.assembled.close()

    def describe(self) -> dict[str, Any] | None:
        """The plan for machines."""
        if self.plan is None:
            return None
        described = asdict(self.plan)
        places = self.plan.placement.units
        described["placement"] = {place: places.count(place) for place in sorted(set(places))}
        return described


def make_engine(
    request: BatchRequest,
    described: Described,
    job: Job,
    make_cache: Callable[[], h2okv.H2OCache],
) -> Engine:
    """Brings the model to where the user, or the planner, wants it.

    Args:
        request: What the user asked for.
        described: The model.
        job: Its prompts are measured for the plan.
        make_cache: Makes an empty cache.

    Returns:
        The engine.

    Raises:
        ValueError: If something about the weights or the memory is wrong.
    """
    if _is_plain(request, described):
        model = load_weights(described, request.dtype, request.device)
        demand = MemoryModel.of(model.config, make_cache(), model.dtype)
        rows = request.rows or _ROWS
        return Engine(
            model,
            OneByOne(),
            Limits(
                rows=rows,
                prompt_tokens=_PROMPT_TOKENS,
                decode_rows=rows,
                cache_bytes=_cache_bytes(request.device),
                bytes_of=_sizes(demand),
            ),
        )
    if request.memory is not None:
        give_memory_back()
    opened = open_model(described, request.dtype, request.device, request.weight_bits)
    return _streamed(request, opened, job, make_cache)


def _streamed(
    request: BatchRequest,
    opened: OpenModel,
    job: Job,
    make_cache: Callable[[], h2okv.H2OCache],
) -> Engine:
    lengths = measure_prompts(job)
    cache = make_cache()
    plan, most = _choose(request, opened, lengths, cache)
    if opened.found is None:
        # Only now: what does not fit was refused before anything is written. And once more: what
        # writing has left in memory counts.
        opened = write_anew(opened, request.converted)
        plan, most = _choose(request, opened, lengths, cache)
    assert opened.found is not None
    store = _store(request, plan, cache)
    assembled = assemble(
        opened.skeleton,
        opened.files,
        opened.found,
        plan.placement,
        request.device,
        store,
        keep_pages=request.keep_pages,
    )
    limits = Limits(
        rows=plan.rows,
        prompt_tokens=plan.lane_tokens,
        decode_rows=plan.rows,
        pass_tokens=plan.pass_tokens,
        cache_bytes=plan.cache_bytes,
        bytes_of=_sizes(opened.demand(cache), 1 - plan.cache_shares.get("device", 0.0)),
    )
    return Engine(opened.skeleton.model, assembled.passing, limits, most, plan, assembled, store)


def _choose(
    request: BatchRequest, opened: OpenModel, lengths: list[int], cache: h2okv.H2OCache
) -> tuple[Plan, int]:
    """The plan, and the tokens of the longest prompt that it has room for."""
    new = request.sampling.max_new_tokens
    planner = make_planner(opened, cache, _workload(lengths, new), request.memory)
    caches = own_memory(request.cache_shares, request.device)
    most = planner.longest_that_fits(request.shares, caches)
    if fitting := [length for length in lengths if length <= most]:
        planner = planner.with_work(_workload(fitting, new))
    # Without any, the planner says what would be needed.
    return planner.choose(request.rows, request.shares, caches), most


def _store(request: BatchRequest, plan: Plan, cache: h2okv.H2OCache) -> TieredStore | None:
    """Where keys and values are; None if they stay where the model computes."""
    places = spread(plan.cache_shares, len(cache.layers))
    if set(places) == {"device"}:
        return None
    folder = request.cache_folder or request.output.resolve().parent
    return TieredStore(places, folder, request.device)


def own_memory(shares: dict[str, float] | None, device: torch.device) -> dict[str, float] | None:
    """Knows that a model on the CPU computes in the CPU's memory.

    Args:
        shares: By place; None for what is best.
        device: Where the model computes.

    Returns:
        The same for a CPU, with ``"cpu"`` counted as ``"device"``.
    """
    if shares is None or device.type != "cpu" or "cpu" not in shares:
        return shares
    rest = {place: share for place, share in shares.items() if place not in ("cpu", "device")}
    return {"device": shares["cpu"] + shares.get("device", 0.0), **rest}


def measure_prompts(job: Job) -> list[int]:
    """Counts the tokens of all prompts that are left, for the plan.

    Args:
        job: The job.

    Returns:
        One number for each prompt that can be served, at least one.
    """
    total = len(job.prompts) - job.num_finished
    lengths = []
    with Progress("counting tokens", total, "prompts") as progress:
        for index, length in enumerate(job.lengths()):
            lengths.append(length)
            progress.update(index)
    return lengths or [1]


def _workload(lengths: list[int], new: int) -> Workload:
    typical = -(-sum(lengths) // len(lengths))
    return Workload(typical=typical, longest=max(lengths), new=new, prompts=len(lengths))


def _is_plain(request: BatchRequest, described: Described) -> bool:
    """Whether all weights simply go into memory."""
    if request.weight_bits is not None or request.cache_shares not in (None, {"device": 1.0}):
        return False
    if request.shares is not None:
        only_device = set(request.shares) <= {"device"}
        return only_device and request.memory is None
    if request.memory is not None:
        return False
    free = available_bytes(request.device)
    return free is None or _weight_bytes(checkpoint_folder(described)) < _LITTLE * free


def _weight_bytes(folder: Path) -> int:
    """Size of a checkpoint's files, in whatever format."""
    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        paths = [folder / name for name in names]
    except (OSError, ValueError, LookupError, AttributeError):
        paths = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return sum(path.stat().st_size for path in paths if path.exists())


def _sizes(demand: MemoryModel, away: float = 0.0) -> Callable[[int, int], int]:
    def bytes_of(prompt: int, new: int) -> int:
        slots = demand.slots_for(prompt, new)
        return demand.sequence_bytes(slots, prompt + new, away)

    return bytes_of


def _cache_bytes(device: torch.device) -> int | None:
    free = available_bytes(device)
    return None if free is None else free // 4


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
    with JobResultFile(request.output, settings_of(request, described.config)) as results:
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
        params = SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed
        )
        runner = Runner(
            engine.model, engine.passing, params, make_cache, engine.limits, request.device
        )
        with h2okv.enable(engine.model):
            return _go_through(job, runner, engine, sampling.max_new_tokens)
    finally:
        engine.close()


def _go_through(job: Job, runner: Runner, engine: Engine, max_new_tokens: int) -> Summary:
    total = len(job.prompts)
    start = time.perf_counter()
    with Progress("batch", total * max_new_tokens) as progress:
        for finished in job.run(runner):
            speed = runner.num_tokens / max(time.perf_counter() - start, 1e-9)
            progress.update(
                finished * max_new_tokens + runner.unfinished_tokens,
                note=f"{finished}/{total} prompts, {speed:,.1f} tokens/s",
            )
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
        described = replace(described, context=None)  # nothing ends at the context window
    return described


def wording_of(request: BatchRequest, described: Described) -> Wording:
    """How the model's tokenizer turns prompts into tokens and tokens into texts."""
    tokenizer = described.tokenizer

    def decode(sequence: BatchSequence) -> str:
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
