"""Shared by the parts of `gpu_first.py`: rows, graphs recorded by hand, steps on any cache."""

from __future__ import annotations

import argparse
import copy
import gc
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache as memoize
from functools import partial
from math import ceil
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

import h2okv
from h2okv.cache import CACHE
from h2okv.config import CacheConfig
from h2okv.integration.enable import with_compiled_steps
from h2okv.integration.graphs import EAGER_STEPS, DecodeGraphs
from h2okv.offload.profile import Clock, measure_bandwidth
from h2okv.records import first_line
from h2okv_lab.benchmarking.caches import SDPA_KERNELS, FixedLayer
from h2okv_lab.benchmarking.model import Footprint, parse_shape
from h2okv_lab.benchmarking.results import interleaved, quartiles
from h2okv_lab.tables import CsvFile, environment

COLUMNS = (
    "date", "version", "commit", "machine", "device", "python", "torch", "transformers", "part",
    "measure", "implementation", "status", "sdpa", "layers", "dtype", "batch", "tokens", "entries",
    "unit", "median", "lower_quartile", "upper_quartile", "rounds", "gb", "gb_per_s", "bandwidth",
    "against", "ratio", "first_use",
)  # fmt: skip
"""Columns; ``first_use`` are the seconds before the first run, of a capture or of compiling."""
SINK, SHARE = 4, 0.2  # entries that `best` never evicts; the budget of all caches
MANY = 32  # sequences whose caches are not all in memory at once


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    shape: str = "llama-3-8b,window=65536"
    layers: int = 8
    deep: int = 32
    context: int = 8192
    batches: tuple[int, ...] = (1, 8, 64)
    span: int = 256
    heads: tuple[int, int, int] = (32, 8, 128)  # query heads, KV heads, size of a head
    slots: tuple[int, ...] = (1639, 4096, 16384)
    lengths: tuple[int, ...] = (4096, 16384)
    requests: tuple[int, int, int] = (64, 2048, 512)  # their number, prompt and new tokens
    rounds: int = 7
    repeats: int = 20  # steps of a sample
    cold: int = 256 << 20  # bytes of different slots that one sample reads: more than caches hold


TINY = Sizes(
    "hidden=64,heads=4,kv_heads=2,head_dim=16,intermediate=96,vocab=300,window=1024", 2, 2, 80,
    (2,), 32, (4, 2, 16), (33,), (48,), (2, 40, 4), 2, 2, 1,
)  # fmt: skip


class OutOfTime(BaseException):  # noqa: N818, not an error, and no `except Exception` may take it
    """The seconds of a part are over."""


class NeedsCudaError(Exception):
    """What only a GPU can do."""

    def __init__(self) -> None:
        super().__init__("needs CUDA")


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in a block that takes longer."""

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Timed(NamedTuple):
    """What a sample runs, and what is eligible of it."""

    call: Callable[[], Any]
    runs: int = 1  # that one call does
    num_bytes: int = 0  # that each of them must read
    sdpa: str = ""


Cases = dict[str, Callable[[], Timed]]
"""By name, what prepares an implementation, which may take long and fail."""
Baseline = tuple[str, float]
"""The name of an implementation, and its seconds."""


class Bench:
    """Models, rows and the baseline of a run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device, self.dtype = args, args.device, args.dtype
        self.sizes: Sizes = args.sizes
        self.is_gpu = self.device.type == "cuda"
        self.clock = Clock(self.device)
        flash, cudnn, math = SDPA_KERNELS
        self.kernels = (flash, cudnn) if self.is_gpu else (flash, math)
        self.file = CsvFile(args.output, COLUMNS)
        self.bandwidth = measure_bandwidth(self.device, None if self.is_gpu else 1 << 20)
        self.letter = ""
        self.model = memoize(self._build)

    def _build(self, layers: int) -> Any:
        source = parse_shape(f"{self.sizes.shape},layers={layers}")
        return source.build(self.dtype, self.device)

    def footprint(self, layers: int) -> Footprint:
        return Footprint(self.model(layers).config, self.dtype)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(self.dtype)

    def row(self, measure: str, implementation: str, **cells: Any) -> None:
        """Write a row, and show it."""
        named = {"part": self.letter, "measure": measure, "implementation": implementation}
        named |= {"dtype": str(self.dtype)[6:], "bandwidth": self.bandwidth / 1e9, "status": "ok"}
        row = environment(self.device) | named | cells
        self.file.append(row)
        shown = f"{self.letter}  {measure}, {implementation}"
        for name in ("batch", "tokens", "entries"):
            shown += f", {name} {row[name]}" if name in cells else ""
        if "median" in row:
            shown += f": {1e3 * row['median']:.4g} ms" if row["unit"] == "s" else ""
            shown += f": {row['median']:.4g} {row['unit']}" if row["unit"] != "s" else ""
        for name, form in (("gb_per_s", "{:.0f} GB/s"), ("ratio", "{:.3f} of the baseline")):
            shown += ", " + form.format(row[name]) if name in row else ""
        shown += "".join(f", {row[name]}" for name in ("sdpa", "status") if row.get(name))
        print(shown, flush=True)

    def attempt(self, measure: str, name: str, run: Callable[[], Any], **cells: Any) -> Any:
        """Return what a call returns; a failure is a row, and returns ``None``."""
        try:
            return run()
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            status = first_line(error) if isinstance(error, NeedsCudaError) else reason
            self.row(measure, name, status=status, **cells)
            if self.args.debug and not isinstance(error, NeedsCudaError):
                traceback.print_exc()
            return None

    def compare(
        self, measure: str, cases: Cases, baseline: Baseline | None = None,
        baselines: tuple[str, ...] = (), **cells: Any,
    ) -> Baseline | None:  # fmt: skip
        """Time cases in turn; return the fastest of them.

        Ratios are to `baseline`, or to the fastest of `baselines`, names of cases.
        """
        ready: dict[str, Timed] = {}
        first_use: dict[str, float] = {}
        samples: dict[str, list[float]] = {}
        try:
            for name, prepare in cases.items():
                start = time.perf_counter()
                timed = self.attempt(measure, name, partial(self._first, prepare), **cells)
                if timed is not None:
                    ready[name], first_use[name] = timed, time.perf_counter() - start
            for _, name in interleaved(list(ready), self.sizes.rounds):
                timed = ready[name]
                seconds = self.clock.seconds(timed.call) / timed.runs
                samples.setdefault(name, []).append(seconds)
        finally:  # what was measured when the time is over too
            fastest = self._write(measure, ready, samples, first_use, baseline, baselines, cells)
            ready.clear()
            self.free()
        return fastest

    def _write(
        self, measure: str, ready: dict[str, Timed], samples: dict[str, list[float]],
        first_use: dict[str, float], baseline: Baseline | None, baselines: tuple[str, ...],
        cells: dict[str, Any],
    ) -> Baseline | None:  # fmt: skip
        """Write the rows of `compare`; return the fastest implementation."""
        medians = {name: median(values) for name, values in samples.items()}
        eligible = {name: medians[name] for name in baselines if name in medians}
        if eligible:
            fastest = min(eligible, key=lambda name: eligible[name])
            baseline = fastest, eligible[fastest]
        for name, values in samples.items():
            keys = ("median", "lower_quartile", "upper_quartile")
            row: dict[str, Any] = dict(zip(keys, quartiles("m", values).values(), strict=True))
            row |= {"unit": "s", "rounds": len(values), "first_use": first_use[name]}
            gigabytes = ready[name].num_bytes / 1e9
            if gigabytes:
                row |= {"gb": gigabytes, "gb_per_s": gigabytes / medians[name]}
            if baseline is not None:
                row |= {"against": baseline[0], "ratio": medians[name] / baseline[1]}
            self.row(measure, name, sdpa=ready[name].sdpa, **row, **cells)
        return min(medians.items(), key=lambda pair: pair[1]) if medians else None

    def _first(self, prepare: Callable[[], Timed]) -> Timed:
        timed = prepare()
        self.clock.seconds(timed.call)
        if timed.runs > 1:  # not a prompt
            self.clock.seconds(timed.call)
        return timed

    def free(self) -> None:
        """Give memory back."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def compiler(self) -> Any:
        """Return `torch.compile`, on a GPU."""
        if not self.is_gpu:
            raise NeedsCudaError
        return torch.compile

    def repeated(self, run: Callable[[], Any]) -> Callable[[], None]:
        """Return a call that runs something as often as a sample does."""

        def call() -> None:
            for _ in range(self.sizes.repeats):
                run()

        return call

    def record(self, run: Callable[[], Any], warmup: int = 3) -> Callable[[], None]:
        """Return the replay of a call that is recorded in a CUDA graph by hand."""
        if not self.is_gpu:
            raise NeedsCudaError
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warmup):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


class Step:
    """A decode step of a model, whose token, position and entries are at constant addresses."""

    def __init__(self, bench: Bench, layers: int, batch: int, tokens: int) -> None:
        self.bench, self.layers, self.batch, self.tokens = bench, layers, batch, tokens
        self.model, self.attention = bench.model(layers), "sdpa"
        self.token = torch.ones(batch, 1, dtype=torch.int64, device=bench.device)
        self.position_ids = torch.full_like(self.token, tokens - 1)
        self.before: Callable[[], None] = lambda: None
        self.kernel: SDPBackend | None = None
        self.cache: Any = None
        self.forward: Callable[..., Any] = self.model
        self.cached_bytes = bench.footprint(layers).full_bytes(batch, tokens)
        self.sdpa = ""

    def full(self, kernel: SDPBackend | None = None, grows: bool = False) -> Step:
        """Take a full cache; one that does not grow overwrites its last entry."""
        self.cache, self.kernel = DynamicCache(), kernel
        states = self._random()
        for key, value in states:
            layer = DynamicLayer() if grows else FixedLayer()
            layer.lazy_initialization(key, value)
            layer.keys, layer.values = key, value
            self.cache.layers.append(layer)
        self.sdpa = kernel.name.lower() if kernel else f"{self._choice()}, SDPA's choice"
        return self

    def with_kernel(self, kernel: SDPBackend) -> Step:
        """Return the same step, on the same cache, with another kernel of SDPA."""
        step = copy.copy(self)
        step.kernel, step.sdpa = kernel, kernel.name.lower()
        return step

    def static(self) -> Step:
        """Take a full `StaticCache`, whose last entry steps overwrite."""
        self.cache = StaticCache(config=self.model.config, max_cache_len=self.tokens)
        for layer, (key, value) in zip(self.cache.layers, self._random(), strict=True):
            layer.lazy_initialization(key, value)
            layer.keys.copy_(key)
            layer.values.copy_(value)

        def begin() -> None:
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(self.tokens - 1)

        self.before, self.sdpa = begin, "SDPA's choice, with a mask"
        return self

    def h2o(self, config: CacheConfig) -> Step:
        """Take an `H2OCache` that is full, where a span has just begun."""
        self.attention, self.sdpa = "h2o", "none"
        entries, span = config.entries(self.tokens), self.bench.sizes.span
        self.cached_bytes = self.bench.footprint(self.layers).h2o_bytes(
            self.batch, entries, self.tokens
        )
        self.cache = h2okv.H2OCache.from_config(self.model, config)
        length = ceil((entries + 8) / span) * span
        self.position_ids.fill_(length)
        self.model.set_attn_implementation(self.attention)
        with torch.no_grad():
            ids = self.token.repeat(1, length)
            self.model(ids, logits_to_keep=1, **{CACHE: self.cache})
        return self

    def _random(self) -> Iterator[torch.Tensor]:
        """Yield keys and values of each layer, ``[2, B, H, tokens, D]``."""
        _, heads, size = self.bench.sizes.heads
        for _ in range(self.layers):
            yield self.bench.draw(2, self.batch, heads, self.tokens, size)

    def _choice(self) -> str:
        heads, kv_heads, size = self.bench.sizes.heads
        query = self.bench.draw(self.batch, heads, 1, size)
        states = self.bench.draw(self.batch, kv_heads, 8, size)
        chosen = torch._fused_sdp_choice(query, states, states, enable_gqa=True)
        return SDPBackend(chosen).name.lower()

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        self.before()
        with nullcontext() if self.kernel is None else sdpa_kernel(self.kernel):
            return self.forward(
                input_ids=self.token, position_ids=self.position_ids, logits_to_keep=1,
                use_cache=True, **{CACHE: self.cache},
            ).logits  # fmt: skip

    def _replay(self) -> None:
        """Let the step be recorded as `h2okv.enable` lets it, and replayed from here on."""
        if not self.bench.is_gpu:
            raise NeedsCudaError
        forward = self.forward = DecodeGraphs(self.model)
        for _ in range(EAGER_STEPS + 2):
            self()
        if not forward.num_graphs:
            raise RuntimeError(forward.why or "no step was recorded")

    def timed(self, mode: str) -> Timed:
        """Return what times the step: ``eager``, in a ``graph``, compiled or both.

        An H2O cache's graph is the one that users get, with all that the host does for a step; cuts
        are among the steps where one is due. Other caches' graphs are recorded here.
        """
        run: Callable[[], Any] = self
        self.model.set_attn_implementation(self.attention)
        if mode == "reduce-overhead":
            plain = self.model.forward
            self.forward = self.bench.compiler()(plain, fullgraph=True, mode=mode)
        elif "compiled" in mode:
            self.bench.compiler()
            self.forward = with_compiled_steps(self.model)
        if mode == "graph" and self.attention == "h2o":
            self._replay()
        elif mode.startswith("graph"):
            run = self.bench.record(run)
        repeated = self.bench.repeated(run)

        def call() -> None:
            # Every cache on the model sets its attention: once a sample.
            self.model.set_attn_implementation(self.attention)
            repeated()

        num_bytes = self.bench.footprint(self.layers).step_weight_bytes + self.cached_bytes
        return Timed(call, self.bench.sizes.repeats, num_bytes, self.sdpa)


def fastest_full(
    bench: Bench, layers: int, batch: int, modes: tuple[str, ...] = ("graph", "eager")
) -> Baseline | None:
    """Time the full cache with each kernel of SDPA, eager and in a graph; return the fastest."""
    tokens = bench.sizes.context
    step = Step(bench, layers, batch, tokens).full()
    cases: Cases = {}
    for kernel in bench.kernels:
        with_kernel = step.with_kernel(kernel)
        for mode in modes:
            name = f"full, {kernel.name.lower()}, {mode}"
            cases[name] = partial(with_kernel.timed, mode)
    cells = {"layers": layers, "batch": batch, "tokens": tokens}
    return bench.compare("step", cases, baselines=tuple(cases), **cells)


def configs(bench: Bench, layers: int) -> dict[str, CacheConfig]:
    """Return H2O and the commands' default, with budgets in tokens."""
    entries, heads = int(SHARE * bench.sizes.context), bench.sizes.heads[1]
    factors = [[1.4, 0.6] * (heads // 2)] * layers
    h2o = CacheConfig(budget=entries, min_tokens=0, sink=0)
    best = CacheConfig(budget=entries - SINK, policy="best", min_tokens=0, layer_budgets=factors)
    spans = {"evict_every": bench.sizes.span}
    return {
        "h2o": h2o, "best by head": best,
        "h2o, spans": replace(h2o, **spans), "best by head, spans": replace(best, **spans),
    }  # fmt: skip


def steps_of(bench: Bench, layers: int, batch: int, modes: dict[str, tuple[str, ...]]) -> None:
    """Time the full cache, in a graph if one can be recorded, then others by name and mode."""
    baseline, tokens = fastest_full(bench, layers, batch, ("graph",)), bench.sizes.context
    baseline = baseline or fastest_full(bench, layers, batch, ("eager",))
    entries, by_name = int(SHARE * tokens), configs(bench, layers)

    def prepare(name: str, mode: str) -> Timed:
        step = Step(bench, layers, batch, entries if name in ("static", "flash") else tokens)
        if name == "static":
            return step.static().timed(mode)
        if name == "flash":
            return step.full(SDPBackend.FLASH_ATTENTION).timed(mode)
        return step.h2o(by_name[name]).timed(mode)

    cases: Cases = {
        f"{name}, {mode}": partial(prepare, name, mode)
        for name, its in modes.items()
        for mode in its
    }
    cells = {"layers": layers, "batch": batch, "tokens": tokens, "entries": entries}
    together = [cases] if batch < MANY else [{name: case} for name, case in cases.items()]
    for some in together:
        bench.compare("step", some, baseline, **cells)
