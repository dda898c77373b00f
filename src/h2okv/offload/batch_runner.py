"""The generation loop of a batch job: micro-batches that are prefilled, merged and decoded."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.config import CacheConfig
from h2okv.console import optional
from h2okv.engine.memory import MemoryModel
from h2okv.engine.sampler import Sampler, eos_token_ids, sample
from h2okv.engine.sampling_params import SamplingParams
from h2okv.integration.enable import enable
from h2okv.offload.kv_tiers import CacheStore, can_merge, merge_caches
from h2okv.offload.meta_model import Unit
from h2okv.offload.weight_stream import EmbeddingReader, WeightStream

PromptId = str | int
"""A prompt's name in a job."""


@dataclass
class BatchSequence:
    """A prompt and what was generated for it so far."""

    id: PromptId
    prompt: list[int]
    max_new_tokens: int
    digest: str = ""  # of the prompt's text, by which a resumed job recognises it
    is_context_limited: bool = False  # whether the context window sets max_new_tokens
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # eos, length or context; None while it runs
    sampler: Sampler | None = None  # made for the first token

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is generated for it."""
        return self.finish_reason is not None


def sequence_seed(seed: int, prompt_id: PromptId) -> int:
    """Derives a prompt's own seed, the same in every batch, order and run."""
    name = json.dumps([seed, prompt_id]).encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1


class MicroBatch:
    """Sequences of one forward: left-padded prompts first, then one token at a time."""

    def __init__(
        self,
        sequences: list[BatchSequence],
        cache: H2OCache,
        device: torch.device,
        sequence_bytes: int = 0,
    ) -> None:
        self.sequences = sequences
        self.cache = cache
        self.device = device
        # Cache of the largest sequence that was ever in it; all have as many slots.
        self.sequence_bytes = sequence_bytes
        lengths = [len(sequence.prompt) for sequence in sequences]
        self.columns = max(lengths)
        self._lengths = torch.tensor(lengths, device=device)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def live(self) -> list[BatchSequence]:
        """The sequences that are not finished."""
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    def forward(self, model: PreTrainedModel) -> torch.Tensor:
        """Runs the model on the prompts or the newest tokens; mutates the cache.

        Returns:
            Logits of the last position, ``[B, V]``.
        """
        columns = torch.arange(self.columns, device=self.device)
        mask = (columns >= self.columns - self._lengths.unsqueeze(1)).long()
        if self.sequences[0].new_tokens:
            tokens = [[sequence.new_tokens[-1]] for sequence in self.sequences]
            positions = (self._lengths - 1).unsqueeze(1)
        else:
            # Padding is masked, so that any token will do for it.
            prompts = [sequence.prompt for sequence in self.sequences]
            tokens = [[own[0]] * (self.columns - len(own)) + own for own in prompts]
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        # Some models count for themselves.
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        output: Any = model(
            input_ids=torch.tensor(tokens, device=self.device),
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **({"position_ids": positions} if takes_positions else {}),
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def take(self, tokens: list[int], ends: frozenset[int]) -> None:
        """Adds a column of new tokens; mutates the sequences that are not finished."""
        for own, token in zip(self.sequences, tokens, strict=True):
            if own.is_finished:
                continue
            own.new_tokens.append(token)
            if token in ends:
                own.finish_reason = "eos"
            elif len(own.new_tokens) >= own.max_new_tokens:
                own.finish_reason = "context" if own.is_context_limited else "length"
        self.columns += 1
        self._lengths += 1

    def drop_finished(self, store: CacheStore | None = None) -> None:
        """Removes finished sequences, also from the cache; at least one must be left."""
        kept = [number for number, own in enumerate(self.sequences) if not own.is_finished]
        if len(kept) == len(self):
            return
        indices: Any = torch.tensor(kept, device=self.device)
        for index, layer in enumerate(self.cache.layers):
            if store is not None:
                store.load(self.cache, index)
            # Unlike batch_select_indices, every kind of layer has it.
            layer.reorder_cache(indices)
            if store is not None:
                store.save(self.cache, index, is_new=True)
        self.sequences = [self.sequences[number] for number in kept]
        self._lengths = self._lengths[indices]

    def append(self, other: MicroBatch, store: CacheStore | None = None) -> None:
        """Adds another micro-batch's sequences, both past their prefill; mutates both."""
        self.cache = merge_caches(self.cache, other.cache, store)
        self.sequence_bytes = max(self.sequence_bytes, other.sequence_bytes)
        self.sequences = self.sequences + other.sequences
        self.columns = max(self.columns, other.columns)
        self._lengths = torch.cat([self._lengths, other._lengths])


class ForwardScheduler:
    """Runs the forwards of several micro-batches; with units, layer by layer.

    That is FlexGen's zig-zag block schedule (arXiv 2303.06865, section 4.1): all micro-batches pass
    a layer before the next, so that each weight pass serves all of them. Transformers' own forwards
    are suspended before each unit, in greenlets. Without units, for a model whose weights and
    caches stay on the device, one forward runs after the other.
    """

    def __init__(
        self,
        units: Sequence[Unit] = (),
        stream: WeightStream | None = None,
        store: CacheStore | None = None,
        embedding: EmbeddingReader | None = None,
    ) -> None:
        self.stream = stream
        self.store = store
        self.embedding = embedding
        self._units = units
        self._streamed = set() if stream is None else {id(unit) for unit in stream.units}
        if units:
            self._greenlet = optional(
                "greenlet", "keeping weights or caches outside the memory", "offload"
            )
        for index, unit in enumerate(units):
            unit.module.register_forward_pre_hook(self._suspend_before(index), with_kwargs=True)

    @property
    def bytes_read(self) -> int:
        """Weights read from the disk so far."""
        parts = (self.stream, self.embedding)
        return sum(part.bytes_read for part in parts if part is not None)

    def drop(self, batch: MicroBatch) -> None:
        """Frees what is stored for a micro-batch."""
        if self.store is not None:
            self.store.drop(batch.cache)

    def close(self) -> None:
        """Ends reading."""
        for part in (self.stream, self.store):
            if part is not None:
                part.close()

    def run(
        self, model: PreTrainedModel, batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """Runs one forward of each micro-batch; yields each with its logits, ``[B, V]``."""
        if not self._units:
            yield from ((batch, batch.forward(model)) for batch in batches)
            return
        forwards = [self._greenlet.greenlet(partial(own.forward, model)) for own in batches]
        # What each has come to: the unit that it waits for, or its logits at the end.
        reached: list[Any] = [None] * len(forwards)
        try:
            for number, forward in enumerate(forwards):
                reached[number] = forward.switch()
            while running := [n for n, forward in enumerate(forwards) if not forward.dead]:
                index = min(reached[number] for number in running)
                unit = self._units[index]
                if self.stream is not None and id(unit) in self._streamed:
                    self.stream.load(unit)
                numbers = [number for number in running if reached[number] == index]
                for number in self._with_entries(unit, batches, numbers):
                    reached[number] = forwards[number].switch()
            if self.stream is not None:
                self.stream.release()
        finally:
            for forward in forwards:
                if not forward.dead:
                    forward.throw()
        yield from zip(batches, reached, strict=True)

    def _with_entries(
        self, unit: Unit, batches: list[MicroBatch], numbers: list[int]
    ) -> Iterator[int]:
        """Gives the micro-batches, each while its entries of the layer are on the device."""
        layer = unit.layer_idx
        if self.store is None or layer is None:
            yield from numbers
            return
        following = [*((number, layer) for number in numbers[1:]), (numbers[0], layer + 1)]
        for number, (other, later) in zip(numbers, following, strict=True):
            self.store.load(batches[number].cache, layer)
            self.store.prefetch(batches[other].cache, later)
            yield number
            self.store.save(batches[number].cache, layer)

    def _suspend_before(self, index: int) -> Callable[..., Any]:
        def suspend(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            current = self._greenlet.getcurrent()
            if current.parent is not None:
                current.parent.switch(index)
            # With strided input a bf16 product on a CPU copies the weights once for each sequence.
            return tuple(a.contiguous() if torch.is_tensor(a) else a for a in args), kwargs

        return suspend


_SORT_WINDOW = 8
"""Batches of prompts that are sorted by length together, so that little is padded."""
_REFILL = 4
"""New prompts are admitted when this fraction of a batch is free: a quarter."""


@dataclass(frozen=True)
class Limits:
    """What is in memory at once; at least one sequence always is. ``None`` is no limit."""

    batch_size: int
    micro_batch_tokens: int  # prompt tokens, padding included, of a micro-batch's prefill
    decode_batch: int  # sequences that are decoded in one micro-batch
    longest_prompt: int | None = None
    pass_tokens: int | None = None  # prompt tokens that one weight pass prefills
    cache_bytes: int | None = None  # of all caches
    memory: MemoryModel | None = None  # of a sequence's cache
    away: float = 0.0  # the fraction of keys and values that is stored off the device


class Runner:
    """Prefills prompts in micro-batches, merges these, and decodes them together.

    A sequence's tokens depend on its id, its prompt and the sampling parameters' seed, not on the
    batch that it is in.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scheduler: ForwardScheduler,
        sampling: SamplingParams,
        cache: CacheConfig,
        limits: Limits,
        device: torch.device,
    ) -> None:
        self._model = model
        self.scheduler = scheduler
        self._sampling = sampling
        self._ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._ends |= eos_token_ids(model)
        self._cache = cache
        self.limits = limits
        self._device = device
        self._batches: list[MicroBatch] = []
        self._following: BatchSequence | None = None  # the first that waits
        # Whether the last weight pass had no tokens left for prompts that there is memory for.
        self._has_headroom = False
        self.num_passes = 0
        self.num_prompt_tokens = 0
        self.num_new_tokens = 0  # also of unfinished sequences

    @property
    def unfinished_tokens(self) -> int:
        """Tokens generated for sequences that still run."""
        return sum(len(own.new_tokens) for batch in self._batches for own in batch.live)

    @torch.inference_mode()
    def run(self, sequences: Iterable[BatchSequence]) -> Iterator[list[BatchSequence]]:
        """Generates for every sequence; yields those that each weight pass finishes."""
        size = self.limits.batch_size
        waiting = _sorted_ahead(iter(sequences), size * _SORT_WINDOW)
        with enable(self._model):
            while True:
                free = size - sum(len(batch.live) for batch in self._batches)
                if self._has_headroom or not self._batches or free * _REFILL >= size:
                    self._batches.extend(self._micro_batches(self._admit(waiting, free)))
                if not self._batches:
                    return
                yield self._weight_pass()

    def _admit(self, waiting: Iterator[BatchSequence], free: int) -> list[BatchSequence]:
        """Takes prompts as far as batch, cache and prefill limits allow."""
        limits = self.limits
        self._has_headroom = False
        self._following = self._following or next(waiting, None)
        if self._following is None:
            return []
        for batch in self._batches:
            batch.drop_finished(self.scheduler.store)
        running = sum(len(batch) for batch in self._batches)
        # Sequences that are decoded together have as many slots each as the largest of them had.
        largest = max((batch.sequence_bytes for batch in self._batches), default=0)
        admitted: list[BatchSequence] = []
        tokens = 0
        while len(admitted) < free and (following := self._following) is not None:
            largest = max(largest, self._bytes_of(following))
            tokens += len(following.prompt)
            count = running + len(admitted) + 1
            is_full = limits.cache_bytes is not None and count * largest > limits.cache_bytes
            is_long = limits.pass_tokens is not None and tokens > limits.pass_tokens
            if (is_full and count > 1) or (is_long and admitted):
                self._has_headroom = not is_full
                break
            admitted.append(following)
            self.num_prompt_tokens += len(following.prompt)
            self._following = next(waiting, None)
        return admitted

    def _bytes_of(self, sequence: BatchSequence) -> int:
        """A sequence's cache in the memory of the device."""
        memory, prompt, new = self.limits.memory, len(sequence.prompt), sequence.max_new_tokens
        if memory is None:
            return 0
        return memory.sequence_bytes(memory.slots_for(prompt, new), prompt + new, self.limits.away)

    def _micro_batches(self, sequences: list[BatchSequence]) -> Iterator[MicroBatch]:
        """Splits new sequences into micro-batches that can be prefilled."""
        group: list[BatchSequence] = []
        for sequence in sequences:
            longest = max(len(own.prompt) for own in [*group, sequence])
            is_full = longest * (len(group) + 1) > self.limits.micro_batch_tokens
            if group and (is_full or len(group) == self.limits.decode_batch):
                yield self._micro_batch(group)
                group = []
            group.append(sequence)
        if group:
            yield self._micro_batch(group)

    def _micro_batch(self, sequences: list[BatchSequence]) -> MicroBatch:
        largest = max(map(self._bytes_of, sequences))
        cache = H2OCache.from_config(self._model.config, self._cache)
        return MicroBatch(sequences, cache, self._device, largest)

    def _weight_pass(self) -> list[BatchSequence]:
        """Each micro-batch is prefilled or makes one token; returns finished sequences."""
        done: list[BatchSequence] = []
        for batch, logits in self.scheduler.run(self._model, self._batches):
            running = batch.live
            batch.take(self._choose(batch.sequences, logits), self._ends)
            self.num_new_tokens += len(running)
            done.extend(own for own in running if own.is_finished)
        self.num_passes += 1
        self._compact()
        return done

    def _choose(self, sequences: list[BatchSequence], logits: torch.Tensor) -> list[int]:
        """Chooses a token for each sequence from logits ``[B, V]``."""
        samplers = []
        for own in sequences:
            if own.sampler is None:
                seed = sequence_seed(self._sampling.seed or 0, own.id)
                own.sampler = Sampler(self._model, replace(self._sampling, seed=seed), own.prompt)
            samplers.append(own.sampler)
        chosen = sample(samplers, [own.new_tokens for own in sequences], logits)
        tokens: list[int] = []
        for sequence, token in zip(sequences, chosen, strict=True):
            if isinstance(token, Exception):
                raise ValueError(f"prompt {json.dumps(sequence.id)}: {token}") from token
            tokens.append(token)
        return tokens

    def _compact(self) -> None:
        """Removes finished sequences, and merges small micro-batches."""
        kept: list[MicroBatch] = []
        for batch in self._batches:
            if not batch.live:
                self.scheduler.drop(batch)
                continue
            # Copying the live sequences for a few finished ones costs more than it saves.
            if (len(batch) - len(batch.live)) * _REFILL >= len(batch):
                batch.drop_finished(self.scheduler.store)
            fits = kept and len(kept[-1]) + len(batch) <= self.limits.decode_batch
            if fits and can_merge(kept[-1].cache) and can_merge(batch.cache):
                kept[-1].append(batch, self.scheduler.store)
                self.scheduler.drop(batch)
            else:
                kept.append(batch)
        self._batches = kept


def _sorted_ahead(sequences: Iterator[BatchSequence], window: int) -> Iterator[BatchSequence]:
    """Reorders sequences within a window, so that neighbours are of similar length."""
    while chunk := list(islice(sequences, window)):
        # The longest first: if one does not fit into memory, it shows at the beginning.
        yield from sorted(chunk, key=lambda sequence: -len(sequence.prompt))
