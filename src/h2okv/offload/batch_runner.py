"""The generation loop of a batch job: micro-batches that are prefilled, merged and decoded."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.engine.sampler import Sampler, eos_token_ids, sample
from h2okv.engine.sampling_params import SamplingParams
from h2okv.offload.kv_tiers import CacheStore, can_merge, merge_caches

PromptId = str | int
"""A prompt's name in a job."""


@dataclass
class BatchSequence:
    """A prompt and what was generated for it so far.

    Attributes:
        id: The prompt's name in the job.
        prompt: Its tokens.
        max_new_tokens: The most tokens that are generated for it.
        digest: Of the prompt's text, by which a resumed job recognises it.
        is_context_limited: Whether the context window, not the request, sets `max_new_tokens`.
        new_tokens: What was generated.
        finish_reason: ``"eos"``, ``"length"`` or ``"context"``; ``None`` while it runs.
        sampler: Draws its tokens; ``None`` until the first one is chosen.
    """

    id: PromptId
    prompt: list[int]
    max_new_tokens: int
    digest: str = ""
    is_context_limited: bool = False
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    sampler: Sampler | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is generated for it."""
        return self.finish_reason is not None

    def take(self, token: int, ends: frozenset[int]) -> None:
        """Appends the next token; mutates the sequence."""
        self.new_tokens.append(token)
        if token in ends:
            self.finish_reason = "eos"
        elif len(self.new_tokens) >= self.max_new_tokens:
            self.finish_reason = "context" if self.is_context_limited else "length"


def sequence_seed(seed: int, prompt_id: PromptId) -> int:
    """Derives a prompt's own seed, the same in every batch, order and run."""
    name = json.dumps([seed, prompt_id]).encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1


_MASK_STEPS = 64


class MicroBatch:
    """Sequences of one forward: left-padded prompts first, then one token at a time.

    Attributes:
        sequence_bytes: Cache of the largest sequence that was ever in it; all have as many slots.
    """

    sequence_bytes = 0

    def __init__(
        self, sequences: list[BatchSequence], cache: H2OCache, device: torch.device
    ) -> None:
        self.sequences = sequences
        self.cache = cache
        self.device = device
        self.columns = max(len(sequence.prompt) for sequence in sequences)
        lengths = torch.tensor([len(sequence.prompt) for sequence in sequences])
        self._lengths = lengths.to(device)
        self._mask = self._ones(0)
        self._mask[:, : self.columns] = torch.arange(self.columns) >= (
            self.columns - lengths.unsqueeze(1)
        )

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def is_prompt(self) -> bool:
        """Whether the next forward is the prefill."""
        return not self.sequences[0].new_tokens

    @property
    def num_live(self) -> int:
        """Sequences that are not finished."""
        return sum(not sequence.is_finished for sequence in self.sequences)

    def forward(self, model: PreTrainedModel) -> torch.Tensor:
        """Runs the model on the prompts or the newest tokens; mutates the cache.

        Returns:
            Logits of the last position, ``[B, V]``.
        """
        if self.is_prompt:
            tokens = self._padded_prompts()
            positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)
        else:
            newest = [sequence.new_tokens[-1] for sequence in self.sequences]
            tokens = torch.tensor(newest, device=self.device).unsqueeze(1)
            positions = (self._lengths - 1).unsqueeze(1)
        output: Any = model(
            input_ids=tokens,
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **({"position_ids": positions} if _takes_positions(model) else {}),
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    @property
    def mask(self) -> torch.Tensor:
        """int64 ``[B, columns]``, 0 for padding; a view."""
        return self._mask[:, : self.columns]

    def take(self, tokens: list[int], ends: frozenset[int]) -> None:
        """Adds a column of new tokens; mutates the sequences that are not finished."""
        for sequence, token in zip(self.sequences, tokens, strict=True):
            if not sequence.is_finished:
                sequence.take(token, ends)
        if self.columns == self._mask.shape[1]:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self), _MASK_STEPS)], dim=1)
        self.columns += 1
        self._lengths += 1

    def drop_finished(self, store: CacheStore | None = None) -> None:
        """Removes finished sequences, also from the cache; at least one must be left."""
        rows = [row for row, own in enumerate(self.sequences) if not own.is_finished]
        if len(rows) == len(self):
            return
        indices: Any = torch.tensor(rows, device=self.device)
        for index, layer in enumerate(self.cache.layers):
            if store is not None:
                store.load(self.cache, index)
            # Unlike batch_select_indices, every kind of layer has it.
            layer.reorder_cache(indices)
            if store is not None:
                store.save(self.cache, index, is_new=True)
        self.sequences = [self.sequences[row] for row in rows]
        self._mask, self._lengths = self._mask[indices], self._lengths[indices]

    def append(self, other: MicroBatch, cache: H2OCache) -> None:
        """Adds another micro-batch's sequences, both past their prefill; mutates this one."""
        columns = max(self.columns, other.columns)
        masks = [
            torch.nn.functional.pad(part.mask, (columns - part.columns, 0))
            for part in (self, other)
        ]
        self.sequence_bytes = max(self.sequence_bytes, other.sequence_bytes)
        self.sequences = self.sequences + other.sequences
        self.columns = columns
        self._mask = self._ones(columns)
        self._mask[:, :columns] = torch.cat(masks)
        self._lengths = torch.cat([self._lengths, other._lengths])
        self.cache = cache

    def _ones(self, columns: int) -> torch.Tensor:
        """A mask of ones with spare columns."""
        columns = max(columns, self.columns)
        shape = (len(self), columns + _MASK_STEPS)
        return torch.ones(shape, dtype=torch.int64, device=self.device)

    def _padded_prompts(self) -> torch.Tensor:
        """int64 ``[B, columns]``; padding is masked, so that any token will do for it."""
        rows = [
            [own.prompt[0]] * (self.columns - len(own.prompt)) + own.prompt
            for own in self.sequences
        ]
        return torch.tensor(rows, device=self.device)


def _takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model is told where its tokens are (some count for themselves)."""
    return "position_ids" in inspect.signature(model.forward).parameters


class ForwardScheduler(Protocol):
    """Runs the forwards of several micro-batches, which may share each load of the weights.

    Attributes:
        store: Keeps their caches between two layers; ``None`` if they stay on the device.
    """

    store: CacheStore | None

    def run(
        self, model: PreTrainedModel, batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """Runs one forward of each micro-batch; yields each with its logits, ``[B, V]``."""

    def drop(self, batch: MicroBatch) -> None:
        """Frees what is stored for a micro-batch."""


class SequentialScheduler:
    """A `ForwardScheduler` for resident weights: one forward after the other."""

    store: CacheStore | None = None

    def run(
        self, model: PreTrainedModel, batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """See `ForwardScheduler.run`."""
        for batch in batches:
            yield batch, batch.forward(model)

    def drop(self, batch: MicroBatch) -> None:
        """See `ForwardScheduler.drop`."""


_SORT_WINDOW = 8
"""Batches of prompts that are sorted by length together, so that little is padded."""
_REFILL = 4
"""New prompts are admitted when this fraction of a batch is free: a quarter."""


@dataclass(frozen=True)
class Limits:
    """What is in memory at once; at least one sequence always is.

    Attributes:
        batch_size: Running sequences.
        micro_batch_tokens: Prompt tokens, padding included, of a micro-batch's prefill.
        decode_batch: Sequences that are decoded in one micro-batch.
        pass_tokens: Prompt tokens that one weight pass prefills; ``None`` for no limit.
        cache_bytes: Of all caches; ``None`` for no limit.
        sequence_bytes: Of one sequence's cache, from its prompt tokens and its new tokens.
    """

    batch_size: int
    micro_batch_tokens: int
    decode_batch: int
    pass_tokens: int | None = None
    cache_bytes: int | None = None
    sequence_bytes: Callable[[int, int], int] = lambda prompt, new: 0


class Runner:
    """Prefills prompts in micro-batches, merges these, and decodes them together.

    A sequence's tokens depend on its id, its prompt and the sampling parameters' seed, not on the
    batch that it is in.

    Attributes:
        num_passes: Weight passes so far.
        num_prompt_tokens: Of the prompts that were admitted.
        num_new_tokens: Generated so far, also for unfinished sequences.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scheduler: ForwardScheduler,
        sampling: SamplingParams,
        make_cache: Callable[[], H2OCache],
        limits: Limits,
        device: torch.device,
    ) -> None:
        self._model = model
        self._scheduler = scheduler
        self._sampling = sampling
        self._ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._ends |= eos_token_ids(model)
        self._make_cache = make_cache
        self._limits = limits
        self._device = device
        self._batches: list[MicroBatch] = []
        self._has_headroom = False
        """Whether the last weight pass had no tokens left for prompts that there is memory for."""
        self.num_passes = 0
        self.num_prompt_tokens = 0
        self.num_new_tokens = 0

    @property
    def unfinished_tokens(self) -> int:
        """Tokens generated for sequences that still run."""
        running = (own for batch in self._batches for own in batch.sequences)
        return sum(len(own.new_tokens) for own in running if not own.is_finished)

    @torch.inference_mode()
    def run(self, sequences: Iterable[BatchSequence]) -> Iterator[list[BatchSequence]]:
        """Generates for every sequence; yields those that each weight pass finishes."""
        size = self._limits.batch_size
        waiting = _Queue(_sorted_ahead(iter(sequences), size * _SORT_WINDOW))
        while True:
            free = size - sum(batch.num_live for batch in self._batches)
            if self._has_headroom or not self._batches or free * _REFILL >= size:
                self._batches.extend(self._micro_batches(self._admit(waiting, free)))
            if not self._batches:
                return
            yield self._weight_pass()

    def _admit(self, waiting: _Queue, free: int) -> list[BatchSequence]:
        """Takes prompts from the queue as far as batch, cache and prefill limits allow."""
        limits = self._limits
        self._has_headroom = False
        if waiting.first is None:
            return []
        for batch in self._batches:
            batch.drop_finished(self._scheduler.store)
        running = sum(len(batch) for batch in self._batches)
        # Sequences that are decoded together have as many slots each as the largest of them had.
        largest = max((batch.sequence_bytes for batch in self._batches), default=0)
        admitted: list[BatchSequence] = []
        tokens = 0
        while len(admitted) < free and (following := waiting.first) is not None:
            largest = max(largest, self._bytes_of(following))
            tokens += len(following.prompt)
            count = running + len(admitted) + 1
            is_full = limits.cache_bytes is not None and count * largest > limits.cache_bytes
            is_long = limits.pass_tokens is not None and tokens > limits.pass_tokens
            if (is_full and count > 1) or (is_long and admitted):
                self._has_headroom = not is_full
                break
            admitted.append(waiting.take())
            self.num_prompt_tokens += len(following.prompt)
        return admitted

    def _bytes_of(self, sequence: BatchSequence) -> int:
        return self._limits.sequence_bytes(len(sequence.prompt), sequence.max_new_tokens)

    def _micro_batches(self, sequences: list[BatchSequence]) -> Iterator[MicroBatch]:
        """Splits new sequences into micro-batches that can be prefilled."""
        group: list[BatchSequence] = []
        for sequence in sequences:
            longest = max(len(own.prompt) for own in [*group, sequence])
            is_full = longest * (len(group) + 1) > self._limits.micro_batch_tokens
            if group and (is_full or len(group) == self._limits.decode_batch):
                yield self._micro_batch(group)
                group = []
            group.append(sequence)
        if group:
            yield self._micro_batch(group)

    def _micro_batch(self, sequences: list[BatchSequence]) -> MicroBatch:
        batch = MicroBatch(sequences, self._make_cache(), self._device)
        batch.sequence_bytes = max(self._bytes_of(own) for own in sequences)
        return batch

    def _weight_pass(self) -> list[BatchSequence]:
        """Each micro-batch is prefilled or makes one token; returns finished sequences."""
        done: list[BatchSequence] = []
        for batch, logits in self._scheduler.run(self._model, self._batches):
            running = [own for own in batch.sequences if not own.is_finished]
            batch.take(self._choose(batch.sequences, logits), self._ends)
            self.num_new_tokens += len(running)
            done.extend(own for own in running if own.is_finished)
        self.num_passes += 1
        self._compact()
        return done

    def _choose(self, sequences: list[BatchSequence], logits: torch.Tensor) -> list[int]:
        """Chooses a token for each sequence from logits ``[B, V]``."""
        samplers = [own.sampler or self._sampler(own) for own in sequences]
        tokens: list[int] = []
        chosen = sample(samplers, [own.new_tokens for own in sequences], logits)
        for sequence, token in zip(sequences, chosen, strict=True):
            if isinstance(token, Exception):
                raise ValueError(f"prompt {json.dumps(sequence.id)}: {token}") from token
            tokens.append(token)
        return tokens

    def _sampler(self, sequence: BatchSequence) -> Sampler:
        seed = sequence_seed(self._sampling.seed or 0, sequence.id)
        params = replace(self._sampling, seed=seed)
        sequence.sampler = Sampler(self._model, params, sequence.prompt)
        return sequence.sampler

    def _compact(self) -> None:
        """Removes finished sequences, and merges small micro-batches."""
        kept: list[MicroBatch] = []
        for batch in self._batches:
            if batch.num_live == 0:
                self._scheduler.drop(batch)
                continue
            # Copying the live sequences for a few finished ones costs more than it saves.
            if (len(batch) - batch.num_live) * _REFILL >= len(batch):
                batch.drop_finished(self._scheduler.store)
            last = kept[-1] if kept else None
            if last is not None and self._fit_together(last, batch):
                last.append(batch, merge_caches(last.cache, batch.cache, self._scheduler.store))
                self._scheduler.drop(batch)
            else:
                kept.append(batch)
        self._batches = kept

    def _fit_together(self, first: MicroBatch, second: MicroBatch) -> bool:
        if len(first) + len(second) > self._limits.decode_batch:
            return False
        return can_merge(first.cache) and can_merge(second.cache)


class _Queue:
    """An iterator whose next item can be looked at."""

    def __init__(self, sequences: Iterator[BatchSequence]) -> None:
        self._sequences = sequences
        self._first: BatchSequence | None = None

    @property
    def first(self) -> BatchSequence | None:
        """The next item; ``None`` at the end."""
        if self._first is None:
            self._first = next(self._sequences, None)
        return self._first

    def take(self) -> BatchSequence:
        """Removes the next item."""
        taken, self._first = self.first, None
        assert taken is not None
        return taken


def _sorted_ahead(sequences: Iterator[BatchSequence], window: int) -> Iterator[BatchSequence]:
    """Reorders sequences within a window, so that neighbours are of similar length."""
    while chunk := list(islice(sequences, window)):
        # The longest first: if one does not fit into memory, it shows at the beginning.
        yield from sorted(chunk, key=lambda sequence: -len(sequence.prompt))
