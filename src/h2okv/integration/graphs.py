"""`DecodeGraphs`: a model's decode steps on a GPU, recorded once and replayed as one launch."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from h2okv.cache import H2OCache
from h2okv.cache.argument import cache_in
from h2okv.cache.slot_layer import SlotLayer
from h2okv.cache.slot_state import SlotState, ordinary_tensors
from h2okv.cache.validation import check_follows
from h2okv.console import warn
from h2okv.integration.attention import h2o_mask
from h2okv.integration.prompt_chunks import (
    Chunk,
    Chunking,
    Workspace,
    chunking_of,
    fills_in_place,
    off_entries,
    off_logits,
)
from h2okv.records import first_line

VARIABLE = "H2OKV_GRAPHS"  # of the environment, for a whole process
SETTINGS = ("auto", "off")
# Steps at the same addresses that run launch by launch before one is recorded, which takes as long
# as some of them: short answers shall not pay for it.
EAGER_STEPS = 3
MOST_GRAPHS = 64  # of a model
_LIVE = "rows in use"  # among what a step reads
NEEDED_BYTES = 256 << 20  # that must be free before a step is recorded
# Of torch's warnings: that of a wait, and the one of a mode that looks for them.
_WAITS, _LOOKS = "synchronizing CUDA operation", "Synchronization debug mode"


def are_on() -> bool:
    """Tell whether the environment leaves CUDA graphs on."""
    setting = os.environ.get(VARIABLE, "auto")
    if setting not in SETTINGS:
        raise ValueError(f"{VARIABLE} must be {' or '.join(SETTINGS)}, got {setting!r}.")
    return setting == "auto"


def by_name(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return a forward's arguments as keywords; all of them may be positional."""
    if not args:
        return kwargs
    return dict(zip(inspect.signature(forward).parameters, args, strict=False)) | kwargs


def mask_and_positions(
    model: PreTrainedModel, kwargs: Mapping[str, Any], cache: H2OCache
) -> tuple[Tensor | None, Tensor | None]:
    """Return a step's mask, of constant shape, and positions, which must follow the tokens seen.

    A 2D mask as bool ``[B, 1, 1, 1]``; no positions if the model may derive them otherwise.
    """
    tokens = kwargs["input_ids"]
    mask, position_ids = kwargs.get("attention_mask"), kwargs.get("position_ids")
    config = model.config.get_text_config(decoder=True)
    # Without position_ids some models derive positions from the full mask.
    is_rotary = getattr(config, "rope_parameters", None) is not None
    if position_ids is None and mask is None and is_rotary:
        position_ids = tokens.new_full((1, 1), cache.num_seen_tokens, dtype=torch.int64)
    cache.check_block(1, mask, position_ids)
    if mask is not None and mask.dim() == 2:
        # The cache has the earlier columns.
        length, seen = cache.get_mask_sizes(1, 0)
        options = {"q_length": 1, "kv_length": length, "q_offset": seen, "kv_offset": seen}
        mask = h2o_mask(attention_mask=mask.to(tokens.device), **options)
    return mask, position_ids


def rows_for(count: int, limit: int) -> int:
    """Return the rows, ``count`` up to ``limit``, of the graph for a number of sequences.

    A power of two, or half way to the next. A row without a sequence reads no entries, and all
    rows share one reading of the weights: up to half as many again cost less than a recording.
    """
    power = 1 << (count - 1).bit_length()
    rows = power if 4 * count > 3 * power else 3 * power // 4
    return max(count, min(rows, limit))


class _Modules:
    """A model's modules as they were when a step was recorded, and what speaks against it.

    Before each step it is asked whether they seem the same, which takes microseconds, and behind
    its back, while the device works, whether they are. So a single weight that moves between two
    steps of one text may count a step late.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        inner = [(name, module) for name, module in model.named_modules() if name]
        self.why = next(filter(None, (_why_not(name, module) for name, module in inner)), None)
        self._num_hooks = RemovableHandle.next_id
        tensors = [t for _, m in model.named_modules() for t in (m._parameters, m._buffers) if t]
        self._tensors: list[dict[str, Tensor | None]] = tensors
        self.addresses = self._addresses(tensors)
        devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        if self.why is None and [device.type for device in devices] != ["cuda"]:
            self.why = f"the model is on {', '.join(sorted(map(str, devices)))}"

    @staticmethod
    def _addresses(groups: Iterable[Mapping[str, Tensor | None]]) -> list[int]:
        tensors = (tensor for group in groups for tensor in group.values())
        return [tensor.data_ptr() for tensor in tensors if tensor is not None]

    def seem_same(self) -> bool:
        """Tell whether no hook has come, and neither the first nor the last weights have moved."""
        if self._num_hooks != RemovableHandle.next_id:
            return False
        first, last = (self._addresses([group]) for group in (self._tensors[0], self._tensors[-1]))
        addresses = self.addresses
        return first == addresses[: len(first)] and last == addresses[len(addresses) - len(last) :]

    def are_same(self) -> bool:
        """Tell whether no weight has moved."""
        return self._addresses(self._tensors) == self.addresses


def _why_not(name: str, module: torch.nn.Module) -> str | None:
    """Return why steps that run a module cannot be recorded, or ``None``."""
    if hasattr(module, "_hf_hook") or "forward" in vars(module):
        return f"the forward of {name} is replaced, as for weights on several devices or elsewhere"
    every = torch.nn.modules.module
    hooks = module._forward_pre_hooks, module._forward_hooks
    if any(hooks) or every._global_forward_pre_hooks or every._global_forward_hooks:
        return f"{name} has hooks, which a replay would not call"
    if module._compiled_call_impl is not None:
        return f"{name} is compiled"
    if hasattr(module, "_active_adapter"):
        return f"{name} has adapters; model.merge_and_unload() makes them part of the weights"
    return f"{name} is in training mode; call model.eval()" if module.training else None


class _Step:
    """A step of a model and a cache: what a recording runs, and the check of its first replay.

    What the host counts is left out, and done around it.
    """

    name = "step"

    def __init__(self, plain: Callable[..., Any], kwargs: dict[str, Any], cache: H2OCache) -> None:
        self._plain, self._kwargs, self._cache = plain, kwargs, cache
        self.inputs = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}

    def run(self, inputs: dict[str, Tensor]) -> Any:
        arguments = self._kwargs | inputs
        with self._cache.on_device_alone(arguments.pop(_LIVE, None)):
            return self._plain(**arguments)

    def prepare(self) -> list[tuple[Tensor, Tensor]]:
        return [(tensor, tensor.clone()) for tensor in _changing(self._cache)]

    def check(self, replayed: Any, before: list[tuple[Tensor, Tensor]]) -> tuple[Any, str]:
        """Run again what was replayed; return the output, and how far the replay is off, if it is.

        Waits for the device once. Restores the cache's tensors to what they were `before`.
        """
        for tensor, former in before:
            tensor.copy_(former)
        output = self.run(self.inputs)
        return output, off_logits(replayed, output, self.inputs.get(_LIVE))


class _Cut:
    """A cut of all layers of a cache: what a recording runs, and the check of its first replay."""

    name = "cut"

    def __init__(self, cache: H2OCache, ended: tuple[int, ...], numbers: Tensor) -> None:
        self._cache, self._ended, self.inputs = cache, ended, {"numbers": numbers}

    def run(self, inputs: dict[str, Tensor]) -> Any:
        self._cache.cut(self._ended, inputs["numbers"])
        return ModelOutput()

    def prepare(self) -> list[SlotState]:
        return self._cache.cut(self._ended, self.inputs["numbers"], stores=False)

    def check(self, replayed: Any, states: list[SlotState]) -> tuple[Any, str]:
        """Compare the layers with `states`, and store these; waits for the device once."""
        index, pairs = self.inputs["numbers"][0], list[tuple[Tensor, Tensor]]()
        for layer, right in zip(self._cache.span_layers, states, strict=True):
            tensors = [tensor.index_select(0, index) for tensor in layer.state.of_cuts()]
            pairs += zip(tensors, right.of_cuts(), strict=True)
            layer.state.store_cut(index, right)
        return replayed, off_entries(pairs)


class _Graph(NamedTuple):
    """A recorded step, or a cut."""

    graph: Any  # torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]  # what a replay reads
    kind: type[ModelOutput]
    outputs: dict[str, Tensor | None]  # what it writes; None for the cache

    def replay(self, inputs: Mapping[str, Tensor], cache: H2OCache) -> ModelOutput:
        """Run the step; the next replay overwrites no tensor of the output."""
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor)
        self.graph.replay()
        outputs = self.outputs.items()
        return self.kind(**{n: cache if t is None else t.clone() for n, t in outputs})


class _Graphs:
    """The recorded steps, or cuts, of one cache."""

    def __init__(self) -> None:
        self.graphs: dict[Any, _Graph] = {}
        self.counts: Counter[Any] = Counter()  # of eager steps
        # By the number of sequences: the sequence whose token each row reads, the rows in use.
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.why: str | None = None  # it cannot be recorded
        self.may_have_moved = False  # the cache, in a block


class DecodeGraphs:
    """The forward of a model on a GPU, whose decode steps are replayed from CUDA graphs.

    A step of an `H2OCache` whose layers are all H2O's is a function of the device: its token,
    position and mask are copied to constant addresses, and the cache's tensors stay where they
    are. After some steps at the same addresses it is recorded by hand, and then replayed; what the
    host counts of a step, and cuts, `H2OCache.begin_step` and `end_step` do around it. Long prompts
    are read by recorded chunks (`h2okv.integration.prompt_chunks`). Everything else, and what
    speaks against it, runs launch by launch; a line says why. Sequences of a pool come and go: a
    graph has rows for a few more than there are, which change nothing (`rows_for`).

    It takes the place of a model's ``forward``; `h2okv.enable` sees to that.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = ref(model)
        functools.update_wrapper(self, type(model).forward, updated=())
        self.__signature__ = inspect.signature(self._plain())
        # Of each cache its steps and its cuts.
        self._caches: WeakKeyDictionary[H2OCache, tuple[_Graphs, _Graphs]] = WeakKeyDictionary()
        self._modules: _Modules | None = None  # to be looked at again after other forwards
        self._addresses: list[int] = []  # of the weights
        self._stream: Any = None  # on which steps are recorded
        self._home: Any = None  # on which they are replayed
        self._pool: Any = None
        self._workspace: Workspace | None = None  # of prompts that are read by chunks
        self._warned_of: set[str] = set()
        self.why = ""  # the last step that ran as it is did so
        self._lock = threading.Lock()  # all graphs share one memory

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy with the model, without what was recorded."""
        return type(self), (self.model,)

    @property
    def model(self) -> Any:
        """The model, which a strong reference would keep alive."""
        return self._model()

    def _plain(self) -> Callable[..., Any]:
        return type(self.model).forward.__get__(self.model)

    @property
    def num_graphs(self) -> int:
        """Steps that are recorded now, of all caches that exist."""
        return sum(len(each.graphs) for graphs in self._caches.values() for each in graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        plain = self._plain()
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return plain(*args, **kwargs)
        kwargs = by_name(plain, args, kwargs)
        cache, tokens = cache_in(kwargs), kwargs.get("input_ids")
        if not isinstance(cache, H2OCache) or tokens is None or not tokens.is_cuda:
            self._let_move(cache)
            return plain(**kwargs)
        if tokens.shape[1] != 1:
            return self._read_block(plain, kwargs, cache)
        if self._workspace is not None:
            self._workspace.leave(cache)
        why = self._why_not(kwargs, cache)
        if why is None:
            why = self._graphs_of(cache)[0].why
        if why is None:
            mask, position_ids = mask_and_positions(self.model, kwargs, cache)
            why = "the model is given no position_ids" if position_ids is None else None
        if why is not None:
            self._say(why)
            return plain(**kwargs)
        kwargs = {**kwargs, "attention_mask": mask, "position_ids": position_ids}
        kwargs = self._with_spare_rows(kwargs, cache)
        with self._lock:
            output = self._step(plain, kwargs, cache)
            cut = functools.partial(self._cut, cache)
            cache.end_step(None if mask is not None else (1,) * len(tokens), cut)
        if len(kwargs["input_ids"]) > len(tokens):
            output.logits = output.logits[: len(tokens)]
        return output

    def _let_move(self, cache: Any) -> None:
        """Note that a forward runs launch by launch, in which a cache and weights may move."""
        self._modules = None
        for graphs in self._caches.get(cache, ()) if isinstance(cache, H2OCache) else ():
            graphs.may_have_moved = True

    def _read_block(
        self, plain: Callable[..., Any], kwargs: dict[str, Any], cache: H2OCache
    ) -> Any:
        """Read several tokens; those of a long prompt by recorded chunks."""
        space = self._workspace
        is_known = space is None or self._graphs_of(space.cache)[0].why is None
        chunking = chunking_of(self.model, kwargs, cache) if is_known else None
        if chunking is None or self._why_not(kwargs, cache) is not None:
            self._let_move(cache)
            return plain(**kwargs)
        with self._lock:
            output, modules = self._read_chunks(plain, kwargs, cache, chunking), self._modules
        self._let_move(cache)
        if modules is not None and modules.are_same():
            self._modules = modules
        return output

    def _read_chunks(
        self, plain: Callable[..., Any], kwargs: dict[str, Any], cache: H2OCache, chunking: Chunking
    ) -> Any:
        """Read a long prompt; mutates the cache."""
        tokens, positions = kwargs["input_ids"], kwargs.get("position_ids")
        length, seen, layers = tokens.shape[1], cache.num_seen_tokens, cache.span_layers
        num_forwards = layers[0].num_forwards + 1
        if positions is None:
            positions = torch.arange(seen, seen + length, device=tokens.device).unsqueeze(0)
        elif not chunking.first:
            check_follows(layers[0], positions, None, length)

        def inputs_of(start: int, stop: int) -> dict[str, Any]:
            ids, position_ids = tokens[:, start:stop], positions[..., start:stop]
            inputs = {"input_ids": ids, "position_ids": position_ids, "attention_mask": None}
            return kwargs | inputs

        cache.expect(length)
        output, done = None, chunking.first
        if done:
            try:
                output = plain(**inputs_of(0, done))
            finally:
                cache.expect(None)
        try:
            if (space := self._workspace_of(cache)) is not None:
                space.take(cache)
                for start in range(done, length - chunking.chunk + 1, chunking.chunk):
                    output = self._chunk(
                        plain, inputs_of(start, start + chunking.chunk), cache, space
                    )
                    done = start + chunking.chunk
                space.give(cache, done - chunking.first)
            if done < length:
                output = plain(**inputs_of(done, length))
        except BaseException:
            layers[0].awaits_attention = True  # the cache has read a part
            raise
        for layer in layers:
            layer.num_forwards = num_forwards
        return output

    def _workspace_of(self, cache: H2OCache) -> Workspace | None:
        """Return slots in which chunks of a prompt can be read, if there can be any."""
        if not all(fills_in_place(layer) for layer in cache.span_layers):
            return None
        if self._workspace is None or not self._workspace.has_room_for(cache):
            self._workspace = None  # before another is allocated
            try:
                self._workspace = Workspace(cache)
            except torch.OutOfMemoryError:
                self._say("the device's memory has no room for their slots", "chunks of prompts")
        return self._workspace

    def _chunk(
        self, plain: Callable[..., Any], kwargs: dict[str, Any], cache: H2OCache, space: Workspace
    ) -> Any:
        graphs = self._graphs_of(space.cache)[0]
        others = [(n, v) for n, v in kwargs.items() if not isinstance(v, Tensor) and v is not cache]
        kwargs = {n: space.cache if v is cache else v for n, v in kwargs.items()}
        work = Chunk(plain, kwargs, space)
        output = self._run(work, graphs, (*others, space.key()), space.cache)
        if graphs.why is not None:
            self._say(graphs.why, "chunks of prompts")
        for name, value in output.items():
            if value is space.cache:
                output[name] = cache
        return output

    def _with_spare_rows(self, kwargs: dict[str, Any], cache: H2OCache) -> dict[str, Any]:
        """Return a step's arguments for the rows of a graph that serves other batches of a pool."""
        count, limit = len(kwargs["input_ids"]), cache.num_rows
        num_rows = rows_for(count, limit)
        is_shared = num_rows > count or (count > 1 and rows_for(count - 1, limit) == count)
        if not is_shared or sum(isinstance(value, Tensor) for value in kwargs.values()) > 2:
            return kwargs
        rows = self._graphs_of(cache)[0].rows
        if count not in rows:
            with ordinary_tensors():
                order = torch.arange(num_rows, device=kwargs["input_ids"].device)
                rows[count] = order.clamp(max=count - 1), (order < count).unsqueeze(1)
        order, live = rows[count]
        names = "input_ids", "position_ids"
        return kwargs | {n: kwargs[n].index_select(-2, order) for n in names} | {_LIVE: live}

    def _why_not(self, kwargs: Mapping[str, Any], cache: H2OCache) -> str | None:
        """Return why a step runs as it is, or ``None``; an empty text if it needs no line."""
        model, tokens = self.model, kwargs["input_ids"]
        layers: list[Any] = cache.layers
        if cache in self._caches:  # what may have changed changes in all layers
            layers = [layers[0], layers[-1]]
        others = sum(not isinstance(layer, SlotLayer) for layer in layers)
        if others:
            return f"{others} of {len(layers)} layers have a cache of transformers"
        is_step = tokens.shape[1] == 1
        is_first = is_step and not all(layer.is_ready for layer in layers)  # or drafts may leave
        if is_first or (is_step and layers[0].batch_size != len(tokens)):
            return ""
        if kwargs.get("labels") is not None:
            return ""
        tensors = (value for value in kwargs.values() if isinstance(value, Tensor))
        if any(tensor.device != tokens.device for tensor in tensors):
            return ""
        if torch.is_grad_enabled():
            return "gradients are recorded; use torch.no_grad()"
        if self._home is not None and torch.cuda.current_stream(tokens.device) != self._home:
            return "another CUDA stream is current"
        if torch.is_autocast_enabled("cuda"):
            return "autocast is on"
        for name in ("output_attentions", "output_hidden_states"):
            setting = kwargs.get(name)
            if getattr(model.config, name, False) if setting is None else setting:
                return f"{name} is set"
        modules = self._modules
        if modules is None or (modules.why is None and not modules.seem_same()):
            modules = self._modules = _Modules(model)
            if modules.addresses != self._addresses:  # what was recorded has the former ones
                self._caches.clear()
            self._addresses = modules.addresses
        return modules.why

    def _graphs_of(self, cache: H2OCache) -> tuple[_Graphs, _Graphs]:
        return self._caches.setdefault(cache, (_Graphs(), _Graphs()))

    def _say(self, why: str, operation: str = "decode steps") -> None:
        self.why = why
        if why and why not in self._warned_of:
            self._warned_of.add(why)
            warn(f"{operation} run launch by launch, not from a CUDA graph: {why}.")

    def _step(self, plain: Callable[..., Any], kwargs: dict[str, Any], cache: H2OCache) -> Any:
        is_padded = kwargs["attention_mask"] is not None or _LIVE in kwargs
        cache.begin_step(is_padded)
        others = [(n, v) for n, v in kwargs.items() if not isinstance(v, Tensor) and v is not cache]
        work, key = _Step(plain, kwargs, cache), (*others, cache.step_key(is_padded))
        output = self._run(work, self._graphs_of(cache)[0], key, cache)
        if self._modules is None or not self._modules.are_same():
            self._modules = None
        return output

    def _cut(self, cache: H2OCache, ended: tuple[int, ...]) -> bool:
        """Do a cut of sequences of a cache, if it can be recorded; tell whether it was done."""
        graphs = self._graphs_of(cache)[1]
        if graphs.why is not None:
            return False
        are_all = not cache.num_rows and len(ended) == cache.span_layers[0].batch_size
        while ended:  # by powers of two, so that few graphs do for all numbers
            count = len(ended) if are_all else 1 << (len(ended).bit_length() - 1)
            some, ended = ended[:count], ended[count:]
            if (inputs := cache.cut_inputs(some)) is None:  # and so for all of them
                return False
            self._run(_Cut(cache, some, inputs[1]), graphs, inputs[0], cache)
        if graphs.why is not None:
            self._say(graphs.why, "cuts")
        return True

    def _run(
        self, work: _Step | _Cut | Chunk, graphs: _Graphs, others: tuple[Any, ...], cache: H2OCache
    ) -> Any:
        """Run what a step does on the device: replay it, or record it before, or neither.

        ``others`` is what a recording depends on besides the shapes of its inputs.
        """
        shapes = [(name, t.shape, t.dtype, t.device) for name, t in work.inputs.items()]
        key: Any = (*shapes, *others)
        try:
            graph = graphs.graphs.get(key)
        except TypeError:
            graphs.why = "the model gets an argument that has no hash"
            key = graph = None
        if graph is None and graphs.may_have_moved:
            graphs.graphs.clear()
            graphs.counts.clear()
        graphs.may_have_moved = False
        before: Any = None
        if graph is None and graphs.why is None:
            graphs.counts[key] += 1
            if graphs.counts[key] > EAGER_STEPS:
                try:
                    graph = self._record(work, cache)
                    before = work.prepare()
                    self._keep(graphs, key, graph)
                except Exception as error:  # whatever a model does that no graph can record
                    why, graph = first_line(error.__context__ or error), None
                    graphs.why = f"it could not be recorded ({why})"
                    for layer in cache.layers:  # of which nothing has run
                        layer.awaits_attention = False  # type: ignore[union-attr]
        if graph is not None:
            output = graph.replay(work.inputs, cache)
            if before is not None:
                output, problem = work.check(output, before)
                if problem:
                    graphs.graphs.clear()
                    graphs.why = f"its first replay's {problem}"
            return output
        if graphs.why is None and graphs.counts[key] == EAGER_STEPS:
            with _noting_waits(graphs, work.name):
                return work.run(work.inputs)
        return work.run(work.inputs)

    def _keep(self, graphs: _Graphs, key: Any, graph: _Graph) -> None:
        """Keep a graph, and drop the oldest of all caches beyond `MOST_GRAPHS`."""
        graphs.counts.clear()
        graphs.graphs[key] = graph
        while self.num_graphs > MOST_GRAPHS:
            every = (each for graphs in self._caches.values() for each in graphs)
            oldest = next(each for each in every if each.graphs)
            del oldest.graphs[next(iter(oldest.graphs))]

    def _record(self, work: _Step | _Cut | Chunk, cache: H2OCache) -> _Graph:
        """Record a step or a cut, which runs nothing."""
        device = next(iter(work.inputs.values())).device
        _check_memory(device)
        if self._stream is None:
            self._stream, self._home = torch.cuda.Stream(device), torch.cuda.current_stream(device)
            self._pool = torch.cuda.graph_pool_handle()
        with ordinary_tensors():
            constant = {name: tensor.clone() for name, tensor in work.inputs.items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), _without_collector():
            self._stream.wait_stream(self._home)
            with torch.cuda.stream(self._stream):
                # Other threads may go on using the device.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = work.run(constant)
                finally:
                    graph.capture_end()
            self._home.wait_stream(self._stream)
        return _Graph(graph, constant, type(output), _outputs(output, cache))


def _outputs(output: Any, cache: H2OCache) -> dict[str, Tensor | None]:
    """Return a model's output, with ``None`` for the cache, which graphs must not keep alive."""
    if not isinstance(output, ModelOutput):
        raise TypeError(f"the model returns a {type(output).__name__}")
    for name, value in output.items():
        if value is not cache and not isinstance(value, Tensor):
            raise TypeError(f"the model returns {name}")
    return {name: None if value is cache else value for name, value in output.items()}


def _changing(cache: H2OCache) -> list[Tensor]:
    """Return what a step changes but for the entry that it writes, which it may write twice."""
    tensors = []
    for layer in cast("list[SlotLayer]", cache.layers):
        state, tail = layer.state, layer.slots.tail
        names = state.tensors().keys() - state.entry_tensors()
        tensors += [layer.cumulative_length, *(state.tensors()[name] for name in names)]
        if tail is not None:
            tensors += [each for each in (tail.free, tail.free_bias) if each is not None]
    return tensors


@contextmanager
def _without_collector() -> Iterator[None]:
    """Let nothing on the device be freed meanwhile that is unreachable by now."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def _check_memory(device: torch.device) -> None:
    """Raise if memory may be short: a recording cannot free any."""
    if torch.cuda.mem_get_info(device)[0] < NEEDED_BYTES:
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info(device)[0] < NEEDED_BYTES:
            raise MemoryError(f"less than {NEEDED_BYTES >> 20} MiB of the device's memory are free")


@contextmanager
def _noting_waits(graphs: _Graphs, name: str) -> Iterator[None]:
    """Note a step that waits for the device, before a recording fails of it.

    A recording that fails leaves torch's random numbers unusable.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        if _WAITS in str(warning.message):
            graphs.why = f"a {name} of this model and cache waits for the device"
        elif _LOOKS not in str(warning.message):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
