"""The generation loop of a batch job: micro-batches that are prefilled, merged and decoded."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.cache.argument import CACHE
from h2okv.cache.linear_states import has_fixed_state, join_states
from h2okv.cache.slot_layer import SlotLayer
from h2okv.config import CacheConfig
from h2okv.console import optional
from h2okv.engine.memory import MemoryModel
from h2okv.engine.model_runner import left_padded
from h2okv.engine.sampler import Sampler, eos_token_ids, sample
from h2okv.engine.sampling_params import SamplingParams
from h2okv.integration.enable import enable
from h2okv.offload.meta_model import Unit
from h2okv.offload.tiers import EmbeddingReader, WeightStream

PromptId = str | int  # a prompt's name in a job


def sequence_seed(seed: int | None, prompt_id: PromptId) -> int:
    """Derive the seed of a prompt, the same in every batch, order and run."""
    name = json.dumps([seed or 0, prompt_id]).encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1


@dataclass
class BatchSequence:
    """A prompt and the tokens generated for it so far."""

    id: PromptId
    prompt: list[int]
    max_new_tokens: int
    params: SamplingParams
    digest: str = ""  # of the prompt's text, by which a resumed job recognises it
    is_context_limited: bool = False  # whether the context window sets max_new_tokens
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # eos, stop, length or context; None while it runs
    sampler: Sampler | None = None  # created for the first token
    ends: frozenset[int] = frozenset()  # end tokens, set with the sampler
    text: Any = None  # finds stop strings, with `add(token)`; None without stop strings
    url: str | None = None  # of a request in OpenAI's batch format


@dataclass(eq=False)
class MicroBatch:
    """Sequences of one forward: left-padded prompts first, then one token at a time."""

    sequences: list[BatchSequence]
    cache: H2OCache
    device: torch.device
    sequence_bytes: int = 0  # of the largest sequence it ever had; all have as many slots

    def __post_init__(self) -> None:
        lengths = [len(sequence.prompt) for sequence in self.sequences]
        self.columns = max(lengths)
        self._lengths = torch.tensor(lengths, device=self.device)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def live(self) -> list[BatchSequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    def forward(self, model: PreTrainedModel) -> torch.Tensor:
        """Run the prompts or the newest tokens; return the last position's logits, ``[B, V]``."""
        columns = torch.arange(self.columns, device=self.device)
        mask = (columns >= self.columns - self._lengths.unsqueeze(1)).long()
        if self.sequences[0].new_tokens:
            newest = [[sequence.new_tokens[-1]] for sequence in self.sequences]
            ids = torch.tensor(newest, device=self.device)
            positions = (self._lengths - 1).unsqueeze(1)
        else:
            ids, _ = left_padded([sequence.prompt for sequence in self.sequences], self.device)
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        # Some models compute positions themselves.
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        return model(
            input_ids=ids,
            attention_mask=mask,
            **{CACHE: self.cache},
            use_cache=True,
            logits_to_keep=1,
            **({"position_ids": positions} if takes_positions else {}),
        ).logits[:, -1]

    def take(self, tokens: list[int]) -> None:
        """Append a column of new tokens; mutates the sequences that are not finished."""
        for sequence, token in zip(self.sequences, tokens, strict=True):
            if sequence.finish_reason is not None:
                continue
            sequence.new_tokens.append(token)
            if token in sequence.ends:
                sequence.finish_reason = "eos"
            elif sequence.text is not None and sequence.text.add(token):
                sequence.finish_reason = "stop"
            elif len(sequence.new_tokens) >= sequence.max_new_tokens:
                sequence.finish_reason = "context" if sequence.is_context_limited else "length"
        self.columns += 1
        self._lengths += 1

    def drop_finished(self) -> None:
        """Remove finished sequences, also from the cache; at least one must be unfinished."""
        reasons = [sequence.finish_reason for sequence in self.sequences]
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        if len(rows) == len(self):
            return
        indices: Any = torch.tensor(rows, device=self.device)
        for layer in self.cache.layers:
            layer.reorder_cache(indices)  # every kind has it, unlike batch_select_indices
        self.sequences, self._lengths = self.live, self._lengths[indices]

    def append(self, other: MicroBatch) -> None:
        """Append another micro-batch's sequences, both after their prefill; mutates both."""
        layers: Any = zip(self.cache.layers, other.cache.layers, strict=True)
        for upper, lower in layers:
            if isinstance(upper, SlotLayer):
                upper.join(lower)
            else:
                join_states(upper, lower)
        self.sequence_bytes = max(self.sequence_bytes, other.sequence_bytes)
        self.sequences = self.sequences + other.sequences
        self.columns = max(self.columns, other.columns)
        self._lengths = torch.cat([self._lengths, other._lengths])


@dataclass
class ForwardScheduler:
    """Run the forwards of several micro-batches; with units, layer by layer.

    That is FlexGen's zig-zag block schedule (arXiv 2303.06865, section 4.1): all micro-batches pass
    a layer before the next, and each weight pass serves all of them. Transformers' forwards are
    suspended before each unit, in greenlets. Without units, for a model whose weights stay on the
    device, one forward runs after the other.
    """

    units: Sequence[Unit] = ()
    stream: WeightStream | None = None
    embedding: EmbeddingReader | None = None

    def __post_init__(self) -> None:
        if self.units:
            self._greenlet = optional("greenlet", "streaming weights", "offload")
        for index, unit in enumerate(self.units):
            hook: Callable[..., Any] = partial(self._suspend_before, index)
            unit.module.register_forward_pre_hook(hook, with_kwargs=True)

    @property
    def bytes_read(self) -> int:
        readers = (self.stream, self.embedding)
        return sum(reader.bytes_read for reader in readers if reader is not None)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()

    def run(
        self, model: PreTrainedModel, batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """Run one forward of each micro-batch; yield each with its logits, ``[B, V]``."""
        if not self.units:
            yield from ((batch, batch.forward(model)) for batch in batches)
            return
        forwards = [self._greenlet.greenlet(partial(batch.forward, model)) for batch in batches]
        try:
            # The state of each: the index of the unit that it waits for, or its logits at the end.
            reached: list[Any] = [forward.switch() for forward in forwards]
            while running := [n for n, forward in enumerate(forwards) if not forward.dead]:
                index = min(reached[number] for number in running)
                if self.stream is not None and self.units[index] in self.stream.units:
                    self.stream.load(self.units[index])
                for number in running:
                    if reached[number] == index:
                        reached[number] = forwards[number].switch()
            if self.stream is not None:
                self.stream.release()
        finally:
            for forward in forwards:
                if not forward.dead:
                    forward.throw()
        yield from zip(batches, reached, strict=True)

    def _suspend_before(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        current = self._greenlet.getcurrent()
        if current.parent is not None:
            current.parent.switch(index)
        # With strided input a bf16 product on a CPU copies the weights for each sequence.
        return tuple(a.contiguous() if torch.is_tensor(a) else a for a in args), kwargs


_SORT_WINDOW = 8  # batches of prompts that are sorted by length together, to reduce padding
_REFILL = 4  # new prompts are admitted when this fraction of a batch is free: a quarter


@dataclass(frozen=True)
class Limits:
    """Limits of what is in memory at once, at least one sequence. ``None`` is no limit."""

    batch_size: int
    micro_batch_tokens: int  # prompt tokens, padding included, of a micro-batch's prefill
    decode_batch: int  # sequences that are decoded in one micro-batch
    longest_prompt: int | None = None
    pass_tokens: int | None = None  # prompt tokens that one weight pass prefills
    cache_bytes: int | None = None  # of all caches
    memory: MemoryModel | None = None  # of a sequence's cache

    def bytes_of(self, sequence: BatchSequence) -> int:
        """Return the bytes of a sequence's cache in the device's memory."""
        memory, prompt, new = self.memory, len(sequence.prompt), sequence.max_new_tokens
        if memory is None:
            return 0
        return memory.sequence_bytes(memory.cache.slots_for(prompt, new), prompt + new)


@dataclass
class Runner:
    """Prefill prompts in micro-batches, merge these, and decode them together."""

    model: PreTrainedModel
    scheduler: ForwardScheduler
    cache: CacheConfig
    limits: Limits
    device: torch.device
    num_passes: int = 0
    num_new_tokens: int = 0  # also of unfinished sequences

    def __post_init__(self) -> None:
        self._batches: list[MicroBatch] = []
        self._following: BatchSequence | None = None  # the first waiting sequence
        # Whether the last weight pass had memory, but no tokens left, for further prompts.
        self._has_headroom = False

    @property
    def unfinished_tokens(self) -> int:
        return sum(len(sequence.new_tokens) for batch in self._batches for sequence in batch.live)

    @torch.inference_mode()
    def run(self, sequences: Iterable[BatchSequence]) -> Iterator[list[BatchSequence]]:
        """Generate for every sequence; yield those that each weight pass finishes."""
        size = self.limits.batch_size
        waiting = _sorted_ahead(iter(sequences), size * _SORT_WINDOW)
        with enable(self.model):
            while True:
                free = size - sum(len(batch.live) for batch in self._batches)
                if self._has_headroom or not self._batches or free * _REFILL >= size:
                    self._batches.extend(self._micro_batches(self._admit(waiting, free)))
                if not self._batches:
                    return
                yield self._weight_pass()

    def _admit(self, waiting: Iterator[BatchSequence], free: int) -> list[BatchSequence]:
        """Take waiting prompts up to the limits of batch, cache and prefill."""
        limits = self.limits
        self._has_headroom = False
        self._following = self._following or next(waiting, None)
        if self._following is None:
            return []
        for batch in self._batches:
            batch.drop_finished()
        running = sum(len(batch) for batch in self._batches)
        # Sequences that are decoded together have as many slots each as the largest of them.
        largest = max((batch.sequence_bytes for batch in self._batches), default=0)
        admitted: list[BatchSequence] = []
        tokens = 0
        while len(admitted) < free and (following := self._following) is not None:
            largest = max(largest, limits.bytes_of(following))
            tokens += len(following.prompt)
            count = running + len(admitted) + 1
            is_full = limits.cache_bytes is not None and count * largest > limits.cache_bytes
            is_long = limits.pass_tokens is not None and tokens > limits.pass_tokens
            if (is_full and count > 1) or (is_long and admitted):
                self._has_headroom = not is_full
                break
            admitted.append(following)
            self._following = next(waiting, None)
        return admitted

    def _micro_batches(self, sequences: list[BatchSequence]) -> Iterator[MicroBatch]:
        """Split new sequences into micro-batches that can be prefilled."""
        groups: list[list[BatchSequence]] = []
        for sequence in sequences:
            group = [*groups[-1], sequence] if groups else []
            padded = len(group) * max((len(member.prompt) for member in group), default=0)
            is_full = padded > self.limits.micro_batch_tokens
            if not group or is_full or len(group) > self.limits.decode_batch:
                groups.append([sequence])
            else:
                groups[-1] = group
        for group in groups:
            largest = max(map(self.limits.bytes_of, group))
            cache = H2OCache.from_config(self.model, self.cache)
            yield MicroBatch(group, cache, self.device, largest)

    def _weight_pass(self) -> list[BatchSequence]:
        finished: list[BatchSequence] = []
        for batch, logits in self.scheduler.run(self.model, self._batches):
            running = batch.live
            batch.take(self._choose(batch.sequences, logits))
            self.num_new_tokens += len(running)
            finished.extend(sequence for sequence in running if sequence.finish_reason is not None)
        self.num_passes += 1
        self._compact()
        return finished

    def _choose(self, sequences: list[BatchSequence], logits: torch.Tensor) -> list[int]:
        """Choose a token for each sequence from logits ``[B, V]``."""
        for sequence in sequences:
            if sequence.sampler is None:
                params = sequence.params
                eos = frozenset() if params.ignore_eos else eos_token_ids(self.model)
                sequence.ends = eos | frozenset(params.stop_token_ids)
                sequence.sampler = Sampler(self.model, params, sequence.prompt)
        samplers: list[Any] = [sequence.sampler for sequence in sequences]
        tokens: list[int] = []
        chosen = sample(samplers, [sequence.new_tokens for sequence in sequences], logits)
        for sequence, token in zip(sequences, chosen, strict=True):
            if isinstance(token, Exception):
                raise ValueError(f"prompt {json.dumps(sequence.id)}: {token}") from token
            tokens.append(token)
        return tokens

    def _compact(self) -> None:
        """Remove finished sequences, and merge small micro-batches."""
        remaining: list[MicroBatch] = []
        for batch in self._batches:
            if not batch.live:
                continue
            # Copying the live sequences for a few finished ones costs more than it saves.
            if (len(batch) - len(batch.live)) * _REFILL >= len(batch):
                batch.drop_finished()
            # Only slots and states can be merged.
            layers, limit = batch.cache.layers, self.limits.decode_batch
            can_merge = all(isinstance(each, SlotLayer) or has_fixed_state(each) for each in layers)
            if remaining and can_merge and len(remaining[-1]) + len(batch) <= limit:
                remaining[-1].append(batch)
            else:
                remaining.append(batch)
        self._batches = remaining


def _sorted_ahead(sequences: Iterator[BatchSequence], window: int) -> Iterator[BatchSequence]:
    """Reorder sequences within a window, to group those of similar length."""
    while chunk := list(islice(sequences, window)):
        # The longest first: one that does not fit into memory fails at the beginning.
        yield from sorted(chunk, key=lambda sequence: -len(sequence.prompt))
