"""The loop of an offloaded batch."""

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
from h2okv.cache.slots import SlotLayer
from h2okv.engine.sampler import Sampler, eos_token_ids, sample
from h2okv.engine.sampling_params import SamplingParams
from h2okv.offload.kv_tiers import CacheStore

PromptId = str | int
"""What a job's file may call a prompt."""


@dataclass
class BatchSequence:
    """A prompt and what was generated for it so far.

    Attributes:
        id: The prompt's name in the job.
        prompt: Its tokens.
        room: The most tokens that may be generated for it.
        digest: A short name of the prompt's text, by which a resumed job knows it again.
        is_cut: Whether `room` is what the model's context leaves, not what was asked for.
        new_tokens: What was generated.
        finish_reason: ``"eos"``, ``"length"`` or ``"context"``; ``None`` while it goes on.
        sampler: Chooses its tokens; ``None`` until the first one.
    """

    id: PromptId
    prompt: list[int]
    room: int
    digest: str = ""
    is_cut: bool = False
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    sampler: Sampler | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is generated for it."""
        return self.finish_reason is not None

    def take(self, token: int, ends: frozenset[int]) -> None:
        """Takes the next token; mutates the sequence."""
        self.new_tokens.append(token)
        if token in ends:
            self.finish_reason = "eos"
        elif len(self.new_tokens) >= self.room:
            self.finish_reason = "context" if self.is_cut else "length"


def seed_of(seed: int, prompt_id: PromptId) -> int:
    """Derives a prompt's own seed, the same in every batch, order and run."""
    name = json.dumps([seed, prompt_id]).encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1


def can_join(cache: H2OCache) -> bool:
    """Tells whether a cache's rows can be put beside another's."""
    return all(isinstance(layer, SlotLayer) for layer in cache.layers)


def join(first: H2OCache, second: H2OCache, store: CacheStore | None = None) -> H2OCache:
    """Puts one cache's rows below another's, layer by layer."""
    layers: Any = zip(first.layers, second.layers, strict=True)
    for index, (upper, lower) in enumerate(layers):
        if store is not None:
            store.bring(first, index)
            # The next layer needs the workspace that it lies in.
            entries = upper.state.entry_tensors().items()
            upper.state.set_tensors({name: tensor.clone() for name, tensor in entries})
            store.bring(second, index)
        upper.join(lower)
        if store is not None:
            store.put_back(first, index, is_new=True)
    return first


_MASK_STEPS = 64


class MicroBatch:
    """Rows of one forward: a left-padded prompt first, then one token at a time.

    Attributes:
        row_bytes: What the cache of the largest row took that ever was among them.
    """

    row_bytes = 0

    def __init__(
        self, sequences: list[BatchSequence], cache: H2OCache, device: torch.device
    ) -> None:
        self.sequences = sequences
        self.cache = cache
        self.device = device
        self.columns = max(len(sequence.prompt) for sequence in sequences)
        lengths = torch.tensor([len(sequence.prompt) for sequence in sequences])
        self._lengths = lengths.to(device)
        self._mask = self._room_for(0)
        self._mask[:, : self.columns] = torch.arange(self.columns) >= (
            self.columns - lengths.unsqueeze(1)
        )

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def is_prompt(self) -> bool:
        """Whether the next forward reads the prompts."""
        return not self.sequences[0].new_tokens

    @property
    def num_live(self) -> int:
        """Rows that are not finished."""
        return sum(not sequence.is_finished for sequence in self.sequences)

    def forward(self, model: PreTrainedModel) -> torch.Tensor:
        """Runs the model on what comes next; mutates the cache.

        Returns:
            The last column's logits, ``[B, V]``.
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
        """Takes the finished rows out, of the cache too; at least one row must be left."""
        rows = [row for row, own in enumerate(self.sequences) if not own.is_finished]
        if len(rows) == len(self):
            return
        indices: Any = torch.tensor(rows, device=self.device)
        for index, layer in enumerate(self.cache.layers):
            if store is not None:
                store.bring(self.cache, index)
            # Unlike batch_select_indices, every kind of layer has it.
            layer.reorder_cache(indices)
            if store is not None:
                store.put_back(self.cache, index, is_new=True)
        self.sequences = [self.sequences[row] for row in rows]
        self._mask, self._lengths = self._mask[indices], self._lengths[indices]

    def append(self, other: MicroBatch, cache: H2OCache) -> None:
        """Takes another micro-batch's rows, both past their prompts; mutates this one."""
        columns = max(self.columns, other.columns)
        masks = [
            torch.nn.functional.pad(part.mask, (columns - part.columns, 0))
            for part in (self, other)
        ]
        self.row_bytes = max(self.row_bytes, other.row_bytes)
        self.sequences = self.sequences + other.sequences
        self.columns = columns
        self._mask = self._room_for(columns)
        self._mask[:, :columns] = torch.cat(masks)
        self._lengths = torch.cat([self._lengths, other._lengths])
        self.cache = cache

    def _room_for(self, columns: int) -> torch.Tensor:
        """A mask of ones with some columns to grow into."""
        columns = max(columns, self.columns)
        shape = (len(self), columns + _MASK_STEPS)
        return torch.ones(shape, dtype=torch.int64, device=self.device)

    def _padded_prompts(self) -> torch.Tensor:
        """int64 ``[B, columns]``; any token will do for padding, the mask says where it is."""
        rows = [
            [own.prompt[0]] * (self.columns - len(own.prompt)) + own.prompt
            for own in self.sequences
        ]
        return torch.tensor(rows, device=self.device)


def _takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model is told where its tokens are (some count for themselves)."""
    return "position_ids" in inspect.signature(model.forward).parameters


class Passing(Protocol):
    """How the forwards of several micro-batches share the weights.

    Attributes:
        store: Where their caches are between two layers; ``None`` if they stay.
    """

    store: CacheStore | None

    def run(
        self, model: PreTrainedModel, batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """Runs one forward of each micro-batch; mutates their caches.

        Yields:
            Each micro-batch with its last column's logits, ``[B, V]``.
        """
        ...

    def forget(self, batch: MicroBatch) -> None:
        """Gives back what is held for a micro-batch."""
        ...


class OneByOne:
    """All weights are in memory: one forward after the other."""

    store: CacheStore | None = None

    def run(
        self, model: PreTrainedModel, batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """See `Passing.run`."""
        for batch in batches:
            yield batch, batch.forward(model)

    def forget(self, batch: MicroBatch) -> None:
        """See `Passing.forget`."""


_AHEAD = 8
"""Batches of prompts that are sorted by length together, so that little is padded."""
_REFILL = 4
"""New prompts come in when this share of a batch is free: a quarter."""


@dataclass(frozen=True)
class Limits:
    """What is in memory at once.

    Attributes:
        rows: Sequences under way.
        prompt_tokens: Tokens, padding included, of the prompts that one micro-batch reads; at
            least one prompt is read whatever its length.
        decode_rows: Sequences that are decoded together.
        pass_tokens: Tokens of the prompts that one pass reads; ``None`` for no limit. At least one
            prompt is read.
        cache_bytes: For all caches; ``None`` for no limit. At least one sequence is under way.
        bytes_of: Of one sequence's cache, from the tokens of its prompt and its text.
    """

    rows: int
    prompt_tokens: int
    decode_rows: int
    pass_tokens: int | None = None
    cache_bytes: int | None = None
    bytes_of: Callable[[int, int], int] = lambda prompt, new: 0


class Runner:
    """Reads prompts in micro-batches, joins them, and decodes them together."""

    def __init__(
        self,
        model: PreTrainedModel,
        passing: Passing,
        params: SamplingParams,
        make_cache: Callable[[], H2OCache],
        limits: Limits,
        device: torch.device,
    ) -> None:
        self._model = model
        self._passing = passing
        self._params = params
        self._ends = eos_token_ids(model)
        self._make_cache = make_cache
        self._limits = limits
        self._device = device
        self._batches: list[MicroBatch] = []
        self._is_filling = False
        """Whether there is room for prompts that the last pass could not take too."""
        self.num_passes = 0
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        """Tokens generated so far, of unfinished sequences too."""

    @property
    def unfinished_tokens(self) -> int:
        """Tokens generated for sequences that are still under way."""
        return sum(
            len(sequence.new_tokens)
            for batch in self._batches
            for sequence in batch.sequences
            if not sequence.is_finished
        )

    @torch.inference_mode()
    def run(self, sequences: Iterable[BatchSequence]) -> Iterator[list[BatchSequence]]:
        """Generates for every sequence."""
        waiting = _Queue(_sorted_ahead(iter(sequences), self._limits.rows * _AHEAD))
        while True:
            free = self._limits.rows - sum(batch.num_live for batch in self._batches)
            if self._is_filling or not self._batches or free * _REFILL >= self._limits.rows:
                self._batches.extend(self._begin(self._admit(waiting, free)))
            if not self._batches:
                return
            yield self._step()

    def _admit(self, waiting: _Queue, free: int) -> list[BatchSequence]:
        """Takes prompts for which there are rows, cache and room for their states."""
        limits = self._limits
        self._is_filling = False
        if waiting.peek() is None:
            return []
        for batch in self._batches:
            batch.drop_finished(self._passing.store)
        going = sum(len(batch) for batch in self._batches)
        # Rows that are decoded together have as many slots each as the largest of them had.
        largest = max((batch.row_bytes for batch in self._batches), default=0)
        chosen: list[BatchSequence] = []
        tokens = 0
        while len(chosen) < free and (following := waiting.peek()) is not None:
            largest = max(largest, self._bytes_of(following))
            tokens += len(following.prompt)
            count = going + len(chosen) + 1
            full = limits.cache_bytes is not None and count * largest > limits.cache_bytes
            long = limits.pass_tokens is not None and tokens > limits.pass_tokens
            if (full and count > 1) or (long and chosen):
                self._is_filling = not full
                break
            chosen.append(waiting.take())
            self.num_prompt_tokens += len(following.prompt)
        return chosen

    def _bytes_of(self, sequence: BatchSequence) -> int:
        return self._limits.bytes_of(len(sequence.prompt), sequence.room)

    def _begin(self, sequences: list[BatchSequence]) -> Iterator[MicroBatch]:
        """Cuts new sequences into micro-batches that are small enough to be read."""
        own: list[BatchSequence] = []
        for sequence in sequences:
            longest = max(len(other.prompt) for other in [*own, sequence])
            full = longest * (len(own) + 1) > self._limits.prompt_tokens
            if own and (full or len(own) == self._limits.decode_rows):
                yield self._micro_batch(own)
                own = []
            own.append(sequence)
        if own:
            yield self._micro_batch(own)

    def _micro_batch(self, sequences: list[BatchSequence]) -> MicroBatch:
        batch = MicroBatch(sequences, self._make_cache(), self._device)
        batch.row_bytes = max(self._bytes_of(own) for own in sequences)
        return batch

    def _step(self) -> list[BatchSequence]:
        """One pass: every micro-batch reads its prompts or makes one token."""
        done: list[BatchSequence] = []
        for batch, logits in self._passing.run(self._model, self._batches):
            going = [sequence for sequence in batch.sequences if not sequence.is_finished]
            batch.take(self._sample(batch.sequences, logits), self._ends)
            self.num_tokens += len(going)
            done.extend(sequence for sequence in going if sequence.is_finished)
        self.num_passes += 1
        self._tidy()
        return done

    def _sample(self, sequences: list[BatchSequence], logits: torch.Tensor) -> list[int]:
        """Chooses a token for each sequence, with a seed of its own: the batch does not matter."""
        for own in sequences:
            if own.sampler is None:
                params = replace(self._params, seed=seed_of(self._params.seed or 0, own.id))
                own.sampler = Sampler(self._model, params, own.prompt)
        samplers = [own.sampler for own in sequences if own.sampler is not None]
        tokens: list[int] = []
        for token in sample(samplers, [own.new_tokens for own in sequences], logits):
            if isinstance(token, Exception):
                raise ValueError(str(token)) from token
            tokens.append(token)
        return tokens

    def _tidy(self) -> None:
        """Leaves out finished rows, and puts small micro-batches together."""
        kept: list[MicroBatch] = []
        for batch in self._batches:
            if batch.num_live == 0:
                self._passing.forget(batch)
                continue
            # Rows that are copied for nothing cost more than rows computed for nothing.
            if (len(batch) - batch.num_live) * _REFILL >= len(batch):
                batch.drop_finished(self._passing.store)
            last = kept[-1] if kept else None
            if last is not None and self._fits(last, batch):
                last.append(batch, join(last.cache, batch.cache, self._passing.store))
                self._passing.forget(batch)
            else:
                kept.append(batch)
        self._batches = kept

    def _fits(self, first: MicroBatch, second: MicroBatch) -> bool:
        if len(first) + len(second) > self._limits.decode_rows:
            return False
        return can_join(first.cache) and can_join(second.cache)


class _Queue:
    """Sequences that can be looked at before they are taken."""

    def __init__(self, sequences: Iterator[BatchSequence]) -> None:
        self._sequences = sequences
        self._next: BatchSequence | None = None

    def peek(self) -> BatchSequence | None:
        """The next one; ``None`` at the end."""
        if self._next is None:
            self._next = next(self._sequences, None)
        return self._next

    def take(self) -> BatchSequence:
        """Takes the one that was looked at."""
        assert self._next is not None
        taken, self._next = self._next, None
        return taken


def _sorted_ahead(sequences: Iterator[BatchSequence], window: int) -> Iterator[BatchSequence]:
    """Sequences in an order in which neighbours are of similar length."""
    while chunk := list(islice(sequences, window)):
        # The longest first: if one does not fit into memory, it shows at the beginning.
        yield from sorted(chunk, key=lambda sequence: -len(sequence.prompt))
