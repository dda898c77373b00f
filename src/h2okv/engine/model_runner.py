"""Runs scheduled steps on the model, in one process or on several ranks."""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from h2okv.budget import Budget
from h2okv.cache import H2OCache, slot_pool
from h2okv.cache.argument import CACHE
from h2okv.cache.linear_states import continues_prompts
from h2okv.cache.support import latent_sizes
from h2okv.engine.outputs import EngineStoppedError, KeptTokens
from h2okv.engine.request import PrefillChunk, ScheduledStep
from h2okv.engine.sampler import to_device
from h2okv.integration.attention import KEEPS_ALL
from h2okv.integration.enable import input_device
from h2okv.prompts.images import images_for
from h2okv.prompts.readers import UNLIMITED

_NO_IMAGES: Mapping[str, Tensor] = {}
_PATIENCE = timedelta(days=3650)  # for a step: a server may have no request for any time


@dataclass
class StepOutput:
    """The result of one step."""

    decode_logits: Tensor | None = None  # [B, 1, V]
    prefill_logits: Sequence[Tensor] = ()  # [1, V] or [T, V] for each chunk
    position_offset: int = 0  # of positions on three axes, behind a prompt with images
    error: Exception | None = None  # why prefill failed; its prompts were dropped
    evictions: int = 0  # entries of all layers and KV heads
    phases: dict[str, tuple[Mark, Mark]] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str, device: torch.device) -> Iterator[None]:
        """Note when the device begins and ends what is launched meanwhile; mutates the output."""
        start = Mark(device)
        try:
            yield
        finally:
            self.phases[phase] = start, Mark(device)

    def seconds(self, phase: str) -> float:
        """Return how long "decode" or "prefill" took; waits for its end."""
        if phase not in self.phases:
            return 0.0
        start, end = self.phases[phase]
        return end.seconds_since(start)


class Mark:
    """A point in a device's work."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":  # kernels run asynchronously
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has come here."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Return the seconds from another mark to this one; waits until the device is here."""
        self.wait()
        if self._event is not None:
            return float(earlier._event.elapsed_time(self._event)) / 1000
        return self._time - earlier._time


class TensorParallelGroup:
    """The processes that hold the shards of a model; started by ``torchrun``."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # A separate group: that of the model's tensors times out after some minutes.
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def smallest(self, number: int) -> int:
        """Return the minimum of a number over all ranks."""
        numbers: list[Any] = [None] * self.world_size
        dist.all_gather_object(numbers, number, group=self._group)
        return int(min(numbers))

    def broadcast(self, step: ScheduledStep | None) -> ScheduledStep | None:
        """Send the first rank's step to all, ``None`` to end `follow`; return it."""
        steps = [step]
        dist.broadcast_object_list(steps, src=0, group=self._group)
        return steps[0]


class ModelRunner:
    """Runs steps on one process's model or shard, and holds the slots."""

    def __init__(
        self,
        model: PreTrainedModel,
        make_cache: Callable[[Budget | None], H2OCache],  # None: the engine's budget
        max_num_seqs: int,
        capacities: Sequence[float],  # entries of the largest sequence in each layer of H2O
        group: TensorParallelGroup | None = None,
        grows: bool = False,  # whether slots are allocated as sequences come
        largest_heads: Sequence[float] = (),  # entries of such a sequence's largest head
    ) -> None:
        self.group = group
        self._model: Any = model
        self._device = input_device(model)
        self._has_axes = hasattr(getattr(model, "model", None), "get_rope_index")
        self._make_cache = make_cache
        self.states: dict[str, H2OCache] = {}  # by keys; only copies are mutated
        self._prefilled: H2OCache | None = None
        self._size = (max_num_seqs, capacities, grows, largest_heads)
        self.pool = self._make_pool()

    def _make_pool(self) -> slot_pool.SlotPool:
        probe = self._make_cache(Budget(heavy=1, recent=1))
        bos = self._model.generation_config.bos_token_id or 0
        first = torch.tensor([[bos if isinstance(bos, int) else bos[0]]])
        self._forward(first, torch.zeros_like(first), probe)
        return slot_pool.SlotPool(probe, *self._size)

    def chunk_tokens(self, limit: int) -> int:
        """Return the maximum tokens of a prompt per forward that leave the result unchanged."""
        cache = self._make_cache(None)
        if not continues_prompts(cache):
            return UNLIMITED
        chunk = cache.position_rule.chunk
        if chunk is not None:
            return max(limit // chunk, 1) * chunk
        return limit if slot_pool.can_split_blocks(cache) else UNLIMITED

    def execute(self, step: ScheduledStep, newest: Tensor | None = None) -> StepOutput:
        """Run a scheduled step on all ranks; mutates the slots and the prefilled prompts.

        ``newest``: the tokens to read, int64 ``[B, 1]`` on the device, where the host has not read
        them, in one process.
        """
        if self.group is not None:
            self.group.broadcast(step)
        return self._run(step, newest)

    def follow(self) -> None:
        """Run the first rank's steps until it closes or ends a call."""
        assert self.group is not None
        while (step := self.group.broadcast(None)) is not None:
            self._run(step)

    def reset(self) -> None:
        """Drop all sequences and prompts, after an error in a step."""
        if self.group is not None:  # the other ranks may be in the middle of a forward
            raise EngineStoppedError("a step has failed on one of several ranks; restart them.")
        self._prefilled = None
        self.pool = self._make_pool()

    def _run(self, step: ScheduledStep, newest: Tensor | None = None) -> StepOutput:
        output = StepOutput()
        for key in step.drop:
            self.states.pop(key, None)
        for number in step.release:
            self.pool.release(number)
        if step.admit is not None:
            for prompt in step.admit:
                assert self._prefilled is not None
                self.pool.admit(self._prefilled, prompt)
            self._prefilled = None
        if step.positions:
            with output.timed("decode", self._device):
                self._decode(step, newest, output)
        if step.prefill:
            try:
                with output.timed("prefill", self._device):
                    self._prefill(step.prefill, output)
            except Exception as error:  # such as no memory for a long prompt; slots are unchanged
                if self.group is not None and not isinstance(error, ValueError):
                    raise  # the other ranks have not failed
                self._prefilled, output.error = None, error
                if isinstance(error, torch.OutOfMemoryError):
                    error.with_traceback(None)  # whose frames have the forward's tensors
        return output

    def _decode(self, step: ScheduledStep, newest: Tensor | None, output: StepOutput) -> None:
        """Read each sequence's newest token; mutates the output."""
        positions = torch.tensor(step.positions).unsqueeze(-1)
        tokens = torch.tensor(step.decode).unsqueeze(-1) if newest is None else newest
        if step.offsets:
            moved = positions + torch.tensor(step.offsets).unsqueeze(-1)
            positions = torch.stack([positions, *[moved] * 3])
        output.decode_logits = self._forward(tokens, positions, self.pool.cache)
        output.evictions += self.pool.count_step()
        for row, key in step.save:
            self.states[key] = self._make_cache(None)
            self.pool.copy_to(self.states[key], row)

    def _prefill(self, chunks: tuple[PrefillChunk, ...], output: StepOutput) -> None:
        """Prefill chunks; mutates the output."""
        chunk, cache = chunks[0], self._cache_for(chunks)
        before = slot_pool.num_entries(cache)
        lengths = [len(each.tokens) for each in chunks]
        ids, mask = left_padded([each.tokens for each in chunks])
        positions = chunk.position + (mask.cumsum(1) - 1).clamp(min=0)
        is_padded = min(lengths) < max(lengths)
        if "image_grid_thw" in chunk.inputs:
            get_rope_index = self._model.model.get_rope_index
            names = inspect.signature(get_rope_index).parameters
            options = {name: value for name, value in chunk.inputs.items() if name in names}
            axes, offset = get_rope_index(input_ids=ids, **options)
            positions = torch.cat([positions.unsqueeze(0), axes])
            output.position_offset = int(offset)  # what these add to a later token's
        logits = self._forward(
            ids,
            positions,
            cache,
            mask=mask if is_padded else None,
            inputs=chunk.inputs,
            keep=0 if chunk.wants_all_logits else 1,
        )
        output.prefill_logits = list(logits)
        if chunk.save is not None:
            self.states[chunk.save] = slot_pool.copy_at_cut(cache)
        evicted = before + sum(lengths) * self.pool.num_heads - slot_pool.num_entries(cache)
        output.evictions += evicted

    def _cache_for(self, chunks: tuple[PrefillChunk, ...]) -> H2OCache:
        """Return the cache to read chunks with; a new one where prompts begin."""
        start = chunks[0].start
        if start is not None and start.state is not None:
            self._prefilled = self.states[start.state].fork(1)
            slot_pool.pin_unread(self._prefilled, start.pins)
        elif start is not None:
            self._prefilled = self._make_cache(start.budget)
            self._prefilled.pin(start.pins)
            if len(chunks) == 1:
                self._prefilled.expect(start.length)
        cache = self._prefilled
        assert cache is not None
        if cache.position_rule.chunk is None and slot_pool.can_split_blocks(cache):
            slot_pool.expect_partial_block(cache, not chunks[0].is_last)
        return cache

    def full_cache(self) -> DynamicCache:
        """Return an empty cache of transformers' own, which keeps everything."""
        return DynamicCache(config=self._model.config)

    def read(self, tokens: Sequence[int], start: int, cache: DynamicCache, keep: int) -> Tensor:
        """Read tokens of a text from `start` on into a full cache; return ``[1, keep, V]``."""
        positions = torch.arange(start, start + len(tokens)).unsqueeze(0)
        return self._forward(torch.tensor([[*tokens]]), positions, cache, keep=keep)

    def kept_tokens(self, row: int, num_seen: int) -> KeptTokens:
        """Return which tokens a sequence of the pool still holds; waits for the device."""
        pool, layers = self.pool, self.pool.slot_layers
        cache_bytes = float(pool.linear_bytes)
        for state in (layer.state for layer in layers):
            num_filled = int((state.positions[row] >= 0).sum())
            cache_bytes += num_filled * state.nbytes / state.positions.numel()
        scored = [layer.state.positions[row] for layer in layers if layer.window is None]
        counts = tuple(count_kept(scored, num_seen))
        return KeptTokens(counts, pool.num_heads, int(cache_bytes), pool.full_bytes_of(num_seen))

    @torch.no_grad()
    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Cache,
        mask: Any = None,
        inputs: Mapping[str, Tensor] = _NO_IMAGES,
        keep: int = 1,
    ) -> Tensor:
        """Return the logits of the last ``keep`` tokens, for 0 of all: ``[B, keep or T, V]``."""
        if self._has_axes and positions.dim() == 2:  # of which the attention is told the first
            positions = positions.expand(4, -1, -1)
        expects = KEEPS_ALL.set(not isinstance(cache, H2OCache))
        try:
            logits: Tensor = self._model(
                input_ids=to_device(tokens, self._device),
                position_ids=to_device(positions, self._device),
                **images_for(self._model, inputs),
                attention_mask=None if mask is None else to_device(mask, self._device),
                **{CACHE: cache},
                use_cache=True,
                logits_to_keep=keep,
            ).logits
        finally:
            KEEPS_ALL.reset(expects)
        return logits


def left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return prompts as one left-padded batch, and its mask; int64 ``[B, T]`` each.

    A prompt is padded with its own first token: a NaN in its embedding reaches no other prompt, and
    a repetition penalty, which counts padding as text, meets no other token.
    """
    length = max(map(len, prompts))
    pads = [length - len(prompt) for prompt in prompts]
    rows = [[*prompt[:1]] * pad + [*prompt] for prompt, pad in zip(prompts, pads, strict=True)]
    ids = torch.tensor(rows, dtype=torch.int64, device=device)
    columns = torch.arange(length, device=device)
    return ids, (columns >= torch.tensor(pads, device=device).unsqueeze(1)).long()


def count_kept(positions: Iterable[Tensor], num_tokens: int) -> list[int]:
    """Return the number of heads that hold each token, from positions ``[H, S]`` of each layer."""
    flat = torch.cat([of_layer.flatten().cpu() for of_layer in positions]).long()
    # -1 is an empty slot.
    counts: list[int] = torch.bincount(flat + 1, minlength=num_tokens + 1)[1:].tolist()
    return counts


def check_divides(config: PreTrainedConfig) -> None:
    """Raise ValueError if a model cannot be divided among the ranks; needs no weights."""
    if "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "tensor parallelism needs one process for each part of the model; start them with "
            "torchrun --nproc-per-node N -m h2okv serve --tensor-parallel"
        )
    text: Any = config.get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        raise ValueError(
            f"model type {config.model_type!r} has no plan for tensor parallelism in transformers; "
            "run one copy on each device instead (h2okv serve --ray --replicas)."
        )
    if latent_sizes(config) is not None:
        raise ValueError(
            f"model type {config.model_type!r} keeps one set of latents for all heads of a layer, "
            "which each rank would choose by its own heads; run one copy on each device instead "
            "(h2okv serve --ray --replicas)."
        )
    heads, count = text.num_attention_heads, int(os.environ["WORLD_SIZE"])
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    common = math.gcd(heads, kv_heads)
    if common % count:
        *others, last = (str(n) for n in range(1, common + 1) if common % n == 0)
        start = f"{', '.join(others)} or {last} of them" if others else "a single one"
        unfit = f"{kv_heads} KV heads (and {heads} query heads)"
        raise ValueError(f"{count} ranks cannot share {unfit} evenly; start {start}.")
