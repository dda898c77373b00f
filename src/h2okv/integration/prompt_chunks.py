"""Chunks of a long prompt that are replayed from one CUDA graph, as they are all alike."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from h2okv.cache import H2OCache
from h2okv.cache.slot_layer import SlotLayer
from h2okv.cache.slot_state import ordinary_tensors

# Tokens of a chunk, at least: enough for the weights to be read once for many, few enough for
# prompts of a thousand tokens to have some. It is a multiple of the span.
CHUNK = 512


_Pairs = list[tuple[list[Tensor], list[Tensor]]]


class Chunking(NamedTuple):
    """How a forward of T tokens is read."""

    first: int  # tokens that run launch by launch, up to the end of a span
    chunk: int  # tokens of each chunk that is replayed


def chunking_of(
    model: PreTrainedModel, kwargs: Mapping[str, Any], cache: H2OCache
) -> Chunking | None:
    """Return how a forward is read by chunks; ``None`` if it is read as it is.

    Waits for the device once, for a mask that may have padding.
    """
    layers, tokens, keep = cache.span_layers, kwargs["input_ids"], kwargs.get("logits_to_keep")
    if not layers or len(layers) < len(cache.layers) or not isinstance(keep, int) or keep != 1:
        return None
    first, length = layers[0], tokens.shape[1]
    chunk = first.span * -(-CHUNK // first.span)
    if length < first.span or first.position_rule.chunk != first.span or not _is_ready(first):
        return None
    others = {name for name, value in kwargs.items() if isinstance(value, Tensor)}
    if others - {"input_ids", "attention_mask", "position_ids"}:
        return None
    num_first = chunk
    if first.holds_entries:
        seen = set(first.state.known_lengths or ())
        if seen != {first.num_columns} or len(tokens) != first.batch_size:
            return None
        num_first = -seen.pop() % first.span
    if num_first == 0 and length % first.span == 0:  # of a caller who reads by chunks
        chunk = min(chunk, length)
    if length < num_first + chunk:
        return None
    config = model.config.get_text_config(decoder=True)
    position_ids, is_rotary = kwargs.get("position_ids"), getattr(config, "rope_parameters", None)
    if not is_rotary if position_ids is None else position_ids.shape[-1] != length:
        return None
    mask, end = kwargs.get("attention_mask"), (first.num_columns or 0) + length
    if mask is not None and (mask.shape != (len(tokens), end) or not bool(mask.all())):
        return None
    return Chunking(num_first, chunk)


def _is_ready(layer: SlotLayer) -> bool:
    """Tell whether a layer may read what comes next by chunks."""
    is_plain = layer.log is None and layer.departures is None and layer._shared_attention is None
    return is_plain and layer.prompt.is_read and layer.is_recordable and layer.rule.is_bounded


def fills_in_place(layer: SlotLayer) -> bool:
    """Tell whether a layer has all slots that there may be, and kernels that fill them."""
    state = layer.state
    has_all = state.num_slots == layer.slots.all_slots(state)
    return has_all and layer.cut_kernels(state.positions) is not None


class Workspace:
    """A cache at constant addresses, in place of that of a prompt while chunks are replayed.

    Its slots are those of a prompt that may be longer, so that one graph reads prompts of all
    budgets up to these. The host takes it for one that has read much; what depends on the text is
    on the device.
    """

    def __init__(self, like: H2OCache) -> None:
        """Reserve slots for a cache that has read the first tokens of a prompt."""
        self.cache = like.fork(1)
        self.cache._window = None  # the text's cache warns of its length
        self.layers = layers = self.cache.span_layers
        length, batch, span = 2 * CHUNK, layers[0].batch_size, layers[0].span
        self._reserve(length)
        while not self.has_room_for(like):
            length *= 2
            self._reserve(length)
        largest = max(max(map(max, layer.state.totals())) for layer in layers)
        self._seen = span * -(-largest // span)  # as if all heads were full
        for layer in layers:
            state, slots, totals = layer.state, layer.slots, layer.state.totals()
            slots.capacity = num_slots = slots.all_slots(state)
            slots.has_all_slots = slots.is_by_head
            layer.state = state.like(batch, num_slots)
            layer.state.budgets, layer.state.known_totals = state.budgets, totals
            self._pretend(layer)
            slots.refresh(layer.state, layer.dtype)
        with ordinary_tensors():
            self.sums = torch.zeros(len(layers), device=layers[-1].device)
        # Of the cache that is read: the addresses of its tensors, and these beside those here.
        self._joined: WeakKeyDictionary[H2OCache, tuple[list[Any], _Pairs]] = WeakKeyDictionary()

    def _reserve(self, length: int) -> None:
        """Note the budgets of a prompt of this length; mutates the layers."""
        for layer in self.layers:
            layer._set_budgets([length] * layer.batch_size)

    def has_room_for(self, cache: H2OCache) -> bool:
        """Tell whether a cache is of the same kind, and fits into the slots."""
        if _kind_of(cache) != _kind_of(self.cache):
            return False
        rows = [
            pair
            for layer, other in zip(self.layers, cache.span_layers, strict=True)
            for pair in zip(layer.state.totals(), other.state.totals(), strict=True)
        ]
        return all(all(map(operator.ge, totals, others)) for totals, others in rows)

    def _pretend(self, layer: SlotLayer) -> None:
        """Let the host take a layer for one whose heads are all full; mutates it."""
        state, lengths = layer.state, (self._seen,) * layer.batch_size
        state.known_lengths, state.span_starts, state.has_gaps = lengths, None, False
        state.scored_lengths = lengths if layer.scores_spans else None
        layer.num_columns, layer.num_forwards = self._seen, 2

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let a chunk be read, by what a graph can record."""
        for layer in self.layers:
            self._pretend(layer)
        self.layers[0].forward.sums = self.sums
        try:
            yield
        finally:
            self.layers[0].forward.sums = None

    def key(self) -> tuple[Any, ...]:
        """Return what a recorded chunk has of the workspace."""
        return tuple((layer.slots.operations, layer.addresses()) for layer in self.layers)

    def tensors(self) -> list[Tensor]:
        """Return all that a chunk changes."""
        tensors = [tensor for layer in self.layers for tensor in layer.state.tensors().values()]
        return [*tensors, self.sums, *(layer.cumulative_length for layer in self.layers)]

    def take(self, cache: H2OCache) -> None:
        """Copy what a cache has read, up to the end of a span; mutates the workspace."""
        addresses = [layer.addresses() for layer in cache.span_layers]
        if cache not in self._joined or self._joined[cache][0] != addresses:
            self._joined.clear()
            self._empty()
            self._joined[cache] = addresses, self._join(cache)
        self.sums.zero_()
        for tensors, others in self._joined[cache][1]:
            torch._foreach_copy_(tensors, others)

    def give(self, cache: H2OCache, length: int) -> None:
        """Copy all back to the cache, which has T tokens more; mutates the cache.

        Raises:
            ValueError: if attention was not finite.
        """
        first, *_ = layers = cache.span_layers
        first.forward.check(self.sums, [layer.layer_idx for layer in layers], first.dtype)
        for tensors, others in self._joined[cache][1]:
            torch._foreach_copy_(others, tensors)
        for layer in layers:
            state = layer.state
            state.note_count((length,) * layer.batch_size)
            layer.note_columns(length)
            state.scored_lengths = None if state.queries is None else state.known_lengths
            layer.slots.refresh(state, layer.dtype)

    def leave(self, cache: H2OCache) -> None:
        """Forget the tensors of a cache, which may have others from now on; mutates."""
        self._joined.pop(cache, None)

    def _empty(self) -> None:
        """Empty all slots, and what an interrupted chunk has left; mutates the workspace."""
        groups = defaultdict[Any, list[Tensor]](list)
        for layer in self.layers:
            state = layer.state
            for name, tensor in state.tensors().items():
                empty = state.kind_of(name).empty_value(state.num_slots)
                empty = -1 if name == "query_positions" else empty
                groups[tensor.device, tensor.dtype, empty].append(tensor)
        for (*_, empty), tensors in groups.items():
            torch._foreach_zero_(tensors)
            if empty:
                torch._foreach_add_(tensors, empty)

    def _join(self, cache: H2OCache) -> _Pairs:
        """Return which tensors of a cache belong to which here; mutates the workspace."""
        groups = defaultdict[Any, tuple[list[Tensor], list[Tensor]]](lambda: ([], []))
        for layer, other in zip(self.layers, cache.span_layers, strict=True):
            layer.writer, layer.slots.operations = other.writer, other.slots.operations
            layer.rotations.follow(other.rotations)
            pairs = [(layer.cumulative_length, other.cumulative_length)]
            tensors, num_slots = layer.state.tensors(), other.state.num_slots  # as many or fewer
            for name, source in other.state.tensors().items():
                kind = other.state.kind_of(name)
                if kind.per != "span":  # of a span that has ended nothing is left
                    tensor = tensors[name]
                    pairs.append((tensor[:, :, :num_slots] if kind.has_slots else tensor, source))
            for tensor, source in pairs:
                group = groups[tensor.device, tensor.dtype]
                group[0].append(tensor)
                group[1].append(source)
        return [*groups.values()]  # a GPU copies the tensors of all layers together


def _kind_of(cache: H2OCache) -> tuple[Any, ...]:
    """Return what a recorded chunk has of a cache, besides its numbers."""
    config, first, rule = cache.cache_config, cache.span_layers[0], cache.rule
    settings = [
        (name, value if isinstance(value, int | float | str | None) else id(value))
        for owner in (rule, rule.scoring)
        for name, value in vars(owner).items()
        if name != "scoring"
    ]
    rules = type(rule), type(rule.scoring), settings, config.evict_every, config.is_by_head
    return *rules, first.batch_size, first.dtype, first.checks_numbers


class Chunk:
    """A chunk of a prompt: what a recording runs, and the check of its first replay."""

    name = "chunk of a prompt"

    def __init__(
        self, plain: Callable[..., Any], kwargs: dict[str, Any], workspace: Workspace
    ) -> None:
        self._plain, self._kwargs, self._workspace = plain, kwargs, workspace
        self.inputs = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}

    def run(self, inputs: dict[str, Tensor]) -> Any:
        with self._workspace.reading():
            return self._plain(**(self._kwargs | inputs))

    def prepare(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self._workspace.tensors()]

    def check(self, replayed: Any, before: list[Tensor]) -> tuple[Any, str]:
        """Run again what was replayed, and compare; waits for the device twice."""
        tensors = self._workspace.tensors()
        after = [tensor.clone() for tensor in tensors]
        for tensor, former in zip(tensors, before, strict=True):
            tensor.copy_(former)
        output = self.run(self.inputs)
        return output, off_logits(replayed, output) or off_entries(zip(after, tensors, strict=True))


LARGEST_ERROR = 0.05  # of a replay's logits, to the largest: kernels may differ, in bf16 too


def off_logits(replayed: Any, output: Any, live: Tensor | None = None) -> str:
    """Return how far a replay's logits are off, if they are; waits for the device once.

    ``live``: bool ``[B, 1]``, the rows that count.
    """
    name = next(name for name, value in output.items() if isinstance(value, Tensor))
    wrong, right = replayed[name].float(), output[name].float()
    both = torch.stack([wrong - right, right]).abs().flatten(2).amax(2)
    if live is not None:
        both = both.masked_fill(~live[:, 0], 0.0)
    error, largest = both.amax(1).tolist()
    is_same = error <= LARGEST_ERROR * largest
    return "" if is_same else f"{name} are off by {error:.2g} of {largest:.2g}"


def off_entries(pairs: Iterable[tuple[Tensor, Tensor]]) -> str:
    """Return how many of a replay's numbers are off, if any are; waits for the device once."""
    shares = []
    for wrong, right in pairs:
        is_near = torch.isclose(wrong.float(), right.float(), rtol=LARGEST_ERROR, equal_nan=True)
        shares.append(1 - is_near.mean(dtype=torch.float32))
    share = torch.stack(shares).amax().item()
    return "" if share <= LARGEST_ERROR else f"entries are off in {share:.2g} of the numbers"
