"""H2O states in a server's memory: one block for each request, with the entries of all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig

from h2okv.budget import Budget
from h2okv.cache.block import Block
from h2okv.cache.rope import PositionRule, Rotation
from h2okv.cache.slot_layer import SlotLayer
from h2okv.cache.slot_state import SlotState
from h2okv.cache.slots import SlotPlan
from h2okv.cache.spans import Spans
from h2okv.config import CacheConfig
from h2okv.ops.attention import mean_queries
from h2okv.ops.compaction import NO_HEAD
from h2okv.ops.decode import QueryRing, Slots, StepRules, decode_step
from h2okv.ops.indexed import Indexed
from h2okv.ops.reference import AttentionSpec
from h2okv.ops.rope import Layout
from h2okv.policy import Inputs
from h2okv.vllm_plugin.settings import rule_of

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor of a request's block in one layer, by its name."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer of one rank reads and holds."""

    number: int  # of the layer, among those with H2O entries
    num_heads: int  # query heads of the rank
    num_kv_heads: int  # KV heads of the rank
    size: int  # D
    dtype: torch.dtype
    rank: int = 0
    num_ranks: int = 1

    def head_budgets(self, config: CacheConfig, rank: int) -> tuple[Budget, ...] | None:
        """Return the budgets of a rank's KV heads; ``None`` if they are equal."""
        budgets = config.head_budgets(self.number)
        if budgets is None:
            return None
        # Fewer heads than ranks: several ranks have the same one.
        first = rank * len(budgets) // self.num_ranks
        return budgets[first : first + self.num_kv_heads]


class StateLayer(SlotLayer):
    """A layer whose requests have their entries in blocks ``[N, ...]`` of the server.

    Old contents of a block are never read: a request's first tokens overwrite all of it. A prompt's
    chunk is `SlotLayer`'s block path on a copy of the request's slots; single tokens of many
    requests are one step: a kernel's in the blocks, or `SlotLayer`'s on a copy of all but keys and
    values. It is a function of tensors alone, and evicts nothing where a span ends (`end_spans`).

    Heads with different budgets share one row of slots, as in `SlotPlan`, each its own stretch.
    """

    checks_numbers = False  # an error in the middle of a forward would end the server
    spans: _BlockSpans | None

    def __init__(self, config: CacheConfig, shape: LayerShape, spec: AttentionSpec) -> None:
        rule, length = rule_of(config), config.evict_every
        spans = None if (length or 1) == 1 else _BlockSpans(length or 1)
        super().__init__(
            shape.number, config.layer_budget(shape.number), rule,
            PositionRule(evict_every=length),
            head_budgets=shape.head_budgets(config, shape.rank),
            spans=spans,
        )  # fmt: skip
        self.shape, self.attention_spec = shape, spec
        self.rotates: Rotation | None = None  # of the model; for scorings that look ahead
        self.blocks: Mapping[str, Tensor] = {}  # the tensors of `spec`, each [N, ...]
        budgets = self.head_budgets or (self.budget,)
        self.tokens = [rule.allocate_budget(budget.resolve(0)) for budget in budgets]
        self.largest = max(self.tokens, key=lambda budget: budget.total)
        self.totals = [budget.total for budget in self.tokens]
        # A block has the same size on all ranks, whatever their heads need.
        ranks = range(shape.num_ranks if self.head_budgets else 1)
        self.num_slots = max(self._slots_of(config, rank) for rank in ranks)
        self._constants: dict[str, Tensor] = {}

    def _slots_of(self, config: CacheConfig, rank: int) -> int:
        """Return the slots of a row on a rank: of one head, or of all heads that share it."""
        budgets = self.shape.head_budgets(config, rank) or (self.budget,)
        allocate, span = self.rule.allocate_budget, config.span
        return sum(allocate(budget.resolve(0)).total + span for budget in budgets)

    @property
    def spec(self) -> Spec:
        """The tensors of a request's block."""
        shape = self.shape
        slots = (1 if self.head_budgets else shape.num_kv_heads, self.num_slots)
        spec: Spec = {}
        for name, kind in SlotState.kinds.items():
            if kind.per in ("entry", "derived") and kind.is_of(self):
                sizes = () if kind.is_metadata else (shape.size,)
                spec[name] = ((*slots, *sizes), kind.dtype or shape.dtype)
        if self.scores_spans:
            query = torch.empty(1, shape.num_heads, 1, 1, device="meta")
            means = mean_queries(query, shape.num_kv_heads).shape[1]
            spec["queries"] = ((means, self.span, shape.size), shape.dtype)
        heads = shape.num_kv_heads
        spec["free_slot"] = ((1, heads) if self.head_budgets else (heads, 1), torch.int32)
        return spec

    def bind(self, blocks: Mapping[str, Tensor]) -> None:
        """Take the memory of all requests' blocks, by the names of `spec`; mutates the layer."""
        self.blocks, shape = blocks, self.shape
        kinds = SlotState.kinds
        self._metadata = [n for n in blocks if kinds[n].is_metadata or n == "free_slot"]
        device = blocks["keys"].device
        empty = torch.empty(1, shape.num_kv_heads, 0, shape.size, dtype=shape.dtype, device=device)
        self.lazy_initialization(empty, empty)
        with torch.inference_mode(False):
            self._constants = {
                name: torch.full((1, 1, 1), count, device=device)
                for name, count in vars(self.largest).items()
            }
            self._constants["total"] = torch.tensor(self.totals, device=device).view(1, -1, 1)
            self._constants["columns"] = torch.zeros((), dtype=torch.int64, device=device)
            self.first_slots = torch.zeros((), dtype=torch.int32, device=device)
            if self.head_budgets is not None:
                counts = torch.tensor([total + self.span for total in self.totals])
                heads = torch.arange(len(counts)).repeat_interleave(counts)
                room = (0, self.num_slots - len(heads))
                heads = torch.nn.functional.pad(heads, room, value=NO_HEAD).view(1, 1, -1)
                self._constants["head_of_slot"] = heads.to(device, torch.uint8)
                first = (counts.cumsum(0) - counts).view(1, -1)
                self.first_slots = first.to(device, torch.int32)
        slots = self.slots
        slots.operations = None
        # Others rank, or change scores, by code of theirs.
        fits = slots.ranks_by_sums or self.rule.inputs is Inputs.WINDOW or self.span > 1
        fits &= slots.weighs_norms == slots.weighs_values and not slots.changes_scores
        # Compared with PyTorch here, before a graph is recorded.
        step = self._operations(empty, shape.num_heads // shape.num_kv_heads).step
        self._kernel = step if fits and step is not decode_step else None

    def _forget(self) -> None:
        super()._forget()
        self.slots = _BlockPlan(self.rule, self.storage, self.head_budgets is not None, self.span)

    # --- a prompt, or a later chunk, of each of B requests ----------------------------------------

    def run_block(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, index: Tensor, is_first: bool
    ) -> Tensor:
        """Attend, score and evict.

        Args:
            query: ``[B * T, HQ, D]``, the T tokens of one request after those of another.
            key: ``[B * T, H, D]``.
            value: ``[B * T, H, D]``.
            seen: tokens of each request before these, int64 ``[B]``.
            index: their blocks, int64 ``[B]``.
            is_first: whether `seen` is 0 for all requests; else it is for none.

        Returns:
            ``[B * T, HQ, D]``. Mutates the blocks.
        """
        query, key, value = (
            states.unflatten(0, (len(index), -1)).transpose(1, 2) for states in (query, key, value)
        )
        self.reset()
        self.lazy_initialization(key, value)
        self.learn_rotation(self.rotates)
        if not is_first:
            self.cumulative_length += seen.max()
            self.num_columns = None
            self.state = self._copies(index, seen)
        output = self.attend(query, key, value, None, self.attention_spec)
        self._store(index)
        return output.transpose(1, 2).flatten(0, 1)

    def _copies(self, index: Tensor, seen: Tensor) -> SlotState:
        """Return the state of requests after ``seen`` tokens, int64 ``[B]``, from their blocks."""
        tensors = {name: blocks.index_select(0, index) for name, blocks in self.blocks.items()}
        state = self._state(tensors, seen)
        state.known_totals = (tuple(self.totals),) * len(seen)
        if "queries" in tensors:
            state.query_positions = self.spans.positions(seen)
        return state

    def _store(self, index: Tensor) -> None:
        """Write the state of requests into their blocks; mutates these."""
        for name, blocks in self.blocks.items():
            tensor = self.state.kinds[name].resized(getattr(self.state, name), self.num_slots)
            blocks[index] = tensor.to(blocks.dtype)

    # --- a token of each of B requests ------------------------------------------------------------

    def run_step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: Tensor,
        index: Tensor,
        numbers: Sequence[int] | None = None,
        is_full: bool = False,
        output: Tensor | None = None,
    ) -> Tensor:
        """Attend, score and evict; no host sync, and static shapes.

        Args:
            query: ``[B, HQ, D]``.
            key: ``[B, H, D]``.
            value: ``[B, H, D]``.
            seen: tokens of each request before this one, int64 ``[B]``.
            index: their blocks, int64 ``[B]``; those of padding may be any.
            numbers: the same for the host, if it has them.
            is_full: whether all requests are known to hold all entries of their budgets.
            output: contiguous memory for what is returned; ``None``: new.

        Returns:
            ``[B, HQ, D]``. Mutates the blocks.
        """
        query, key, value = (states.unsqueeze(2) for states in (query, key, value))
        blocks, slots = self.blocks, self.slots
        if self._kernel is not None:
            memory = None if output is None else output.unsqueeze(2)
            state, rules = self._in_blocks(seen, index, memory)
            return self._kernel(query, key, value, state, rules).squeeze(2)
        small = {name: blocks[name].index_select(0, index) for name in self._metadata}
        states = {name: Indexed(blocks[name], index, numbers) for name in ("keys", "values")}
        self.state = self._state(small | states, seen)
        self.state.queries = blocks.get("queries")
        if slots.operations is None and not torch.compiler.is_compiling():
            self._choose_operations(query)
        slots.is_full, slots.steps_left = is_full and self.span == 1, -1
        slots.drop_tail()
        slots.has_sinks = self.largest.sink > 0
        slots.most_slots = max(self.totals) + slots.span
        self.cumulative_length = self._constants["columns"]  # a recorded step adds to it
        token = Block(query, key, value, None, None, None, self.attention_spec)
        result = self._read_token(token).squeeze(2)
        for name in small:
            blocks[name][index] = getattr(self.state, name).to(blocks[name].dtype)
        return result if output is None else output.copy_(result)

    def _in_blocks(
        self, seen: Tensor, index: Tensor, output: Tensor | None
    ) -> tuple[Slots, StepRules]:
        """Return what a kernel takes for a step of requests in the blocks of `index` ``[B]``."""
        blocks, slots, constants = self.blocks, self.slots, self._constants
        names = "keys", "values", "scores", "positions", "free_slot"
        memory: dict[str, Any] = {name: Indexed(blocks[name], index) for name in names}
        memory["head_of_slot"] = constants.get("head_of_slot")
        ring = QueryRing(blocks["queries"], None, None) if self.scores_spans else None
        rules = StepRules(
            self.attention_spec, constants["recent"],
            constants["sink"] if self.largest.sink else None, evicts=self.span == 1,
            adds=slots.adds, weights=blocks["value_weights"] if slots.weighs_norms else None,
            ring=ring, most_slots=max(self.totals) + slots.span, output=output,
        )  # fmt: skip
        return Slots(**memory, num_real_tokens=seen), rules

    def _count_to_cut(self) -> None:
        """Leave it to `StatePool.end_spans`, as a recorded step runs nothing of the host."""

    def end_spans(self, counts: Sequence[int], seen: Tensor, index: Tensor) -> None:
        """Evict after as many tokens of requests; ``[B]`` as in `run_step`; mutates."""
        self.learn_rotation(self.rotates)
        self.state = self._copies(index, seen)
        self.state.known_lengths, self.state.scored_lengths = tuple(counts), (-1,) * len(counts)
        if "queries" in self.blocks:
            self.state.query_positions = self.spans.positions(seen, is_over=True)
        self._evict_ended()
        self._store(index)

    def _state(self, tensors: Mapping[str, Any], seen: Tensor) -> SlotState:
        """Return the state of B requests after ``seen`` tokens, int64 ``[B]``."""
        names = ["sink", "recent", "total"] + ["num_static"] * self.rule.has_pattern
        names += ["head_of_slot"] * (self.head_budgets is not None)
        constants = {name: self._constants[name].expand(len(seen), -1, -1) for name in names}
        # Padding of a batch has a block too, of any numbers.
        free = tensors["free_slot"].long().clamp(0, self.num_slots - 1)
        fields = {**tensors, **constants, "free_slot": free}
        fields["total"] = fields["total"].contiguous()  # kernels read it row by row
        return SlotState(**fields, num_real_tokens=seen.clone(), budgets=[self.largest])


class _BlockPlan(SlotPlan):
    """Slots of a server's blocks: all from the beginning, and no step counts them."""

    def forget(self) -> None:
        super().forget()
        self.has_all_slots = True

    def refresh(self, state: SlotState, dtype: torch.dtype) -> None:
        """Leave out what only steps of a cache that grows need to know."""

    @staticmethod
    def _is_static(state: SlotState) -> bool:
        return True


class _BlockSpans(Spans):
    """Spans whose queries are in the blocks of a server."""

    def positions(self, seen: Tensor, is_over: bool = False) -> Tensor:
        """Return where the queries of a span are after ``seen`` tokens ``[B]``, -1: none yet.

        At the end of a span those of the next, of which there are none, unless it ``is_over``.
        """
        phase = (seen % self.length + self.length * is_over).unsqueeze(1)
        columns = torch.arange(self.length, device=seen.device)
        return torch.where(columns < phase, seen.unsqueeze(1) - phase + columns, -1)


class StatePool:
    """All requests' blocks: each has the entries of all layers, one after the other."""

    def __init__(self, layers: Sequence[StateLayer]) -> None:
        self.layers = layers
        # Large elements come first, so that each tensor is aligned to its element size.
        self._fields = sorted(
            (
                (layer, name, shape, dtype)
                for layer in layers
                for name, (shape, dtype) in layer.spec.items()
            ),
            key=lambda field: -field[3].itemsize,
        )
        self.pages: Tensor | None = None  # uint8 [N, C]
        # Of requests whose spans end in the last step: tokens, and blocks int64 [B].
        self.ended: tuple[list[int], Tensor] | None = None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a block's tensors, in their order in memory."""
        return tuple(shape for _, _, shape, _ in self._fields)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of a block's tensors."""
        return tuple(dtype for *_, dtype in self._fields)

    @property
    def block_bytes(self) -> int:
        """Bytes of a request's block."""
        fields = zip(self.shapes, self.dtypes, strict=True)
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in fields)

    def bind(self, pages: Tensor) -> None:
        """Give each layer its share of the memory, bytes ``[N, C]``; mutates the layers."""
        self.pages, self.ended, offset = pages, None, 0
        tensors: dict[StateLayer, dict[str, Tensor]] = {layer: {} for layer in self.layers}
        for layer, name, shape, dtype in self._fields:
            end = offset + torch.Size(shape).numel() * dtype.itemsize
            tensors[layer][name] = pages[:, offset:end].view(dtype).view(-1, *shape)
            offset = end
        for layer, blocks in tensors.items():
            layer.bind(blocks)

    def end_spans(self) -> None:
        """Evict where the last step has ended a span, before anything reads the blocks; mutates.

        Of a request that is gone this harms no other, which writes all of its block first.
        """
        if self.ended is not None:
            (counts, index), self.ended = self.ended, None
            seen = on_device(counts, index)
            for layer in self.layers:
                layer.end_spans(counts, seen, index)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks, int64 ``[B]`` each; mutates the memory."""
        assert self.pages is not None
        self.pages[target] = self.pages[source]

    def clean(self, index: Tensor) -> None:
        """Empty blocks, int64 ``[B]``, for requests whose first step brings one token; mutates."""
        assert self.pages is not None
        self.pages[index] = 0
        for layer in self.layers:
            layer.blocks["free_slot"][index] = layer.first_slots
            for name, blocks in layer.blocks.items():
                if value := SlotState.kinds[name].empty_value(layer.num_slots):
                    blocks[index] = value


def on_device(numbers: Sequence[int], like: Tensor) -> Tensor:
    """Copy numbers of the host to a tensor's device, which does not wait for what it runs."""
    return torch.tensor(numbers, dtype=torch.int64).to(like.device, non_blocking=True)


def model_rotation(config: PreTrainedConfig, dtype: torch.dtype, in_halves: bool) -> Rotation:
    """Return how a model rotates its keys, from transformers' implementation."""
    with torch.device("meta"):
        modules = list(AutoModel.from_config(config).modules())
    kinds = (type(module) for module in modules)
    rotary: Any = next(kind for kind in kinds if kind.__name__.endswith("RotaryEmbedding"))(config)
    layout: Layout = "half" if in_halves else "interleaved"
    return Rotation(rotary, None, layout, dtype, rotary.inv_freq.device)
