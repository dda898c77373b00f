"""What to measure first on an NVIDIA GPU that is at hand for a quarter of an hour.

Parts in order of value, each within its seconds; every row is written as soon as it is measured:

{parts}

Models have random weights of Llama 3 8B's shape; nothing is downloaded. The full cache is the
fastest one: each of SDPA's kernels is tried on keys of constant length, in a CUDA graph recorded by
hand. Steps of H2O are replayed as `generate` replays them, and eager ones timed beside them. A row
names SDPA's kernel and has the GB a step reads (weights, keys and values), the GB/s, and the ratio
to that baseline. What cannot run gets a row that says why.
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from authors_code import part_k
from gpu_timing import (
    SHARE,
    SINK,
    TINY,
    Bench,
    Cases,
    NeedsCudaError,
    OutOfTime,
    Sizes,
    Step,
    Timed,
    at_most,
    configs,
    fastest_full,
    steps_of,
)
from record import RESULTS
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoTokenizer, DynamicCache

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.cache import CACHE
from h2okv.config import CacheConfig
from h2okv.engine.engine import Engine
from h2okv.integration.graphs import EAGER_STEPS, DecodeGraphs
from h2okv.ops import dispatch, flash_varlen
from h2okv.ops.attention import expected_attention
from h2okv.ops.choice import CutRules, choose, protected_entries
from h2okv.ops.compaction import pick
from h2okv.ops.decode import Slots, StepRules
from h2okv.ops.reference import AttentionSpec, Visibility
from h2okv.vllm_plugin.batch import Batch
from h2okv.vllm_plugin.state import LayerShape, StateLayer, StatePool

AVOID = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"


def part_a(bench: Bench) -> None:
    """Step of the full cache: growing or of one length, each kernel of SDPA, few layers."""
    tokens, avoids = bench.sizes.context, AVOID in os.environ
    flash = SDPBackend.FLASH_ATTENTION
    bench.sizes = replace(bench.sizes, rounds=min(3, bench.sizes.rounds))
    for layers in (bench.sizes.layers,) if avoids else (bench.sizes.layers, 2):
        make = partial(Step, bench, layers, 1, tokens)
        cases: Cases = {
            "growing" + f", {AVOID}" * avoids: lambda m=make: m().full(grows=True).timed("eager")
        }
        if not avoids:
            cases |= {
                "growing, flash": lambda m=make: m().full(flash, grows=True).timed("eager"),
                "one length": lambda m=make: m().full().timed("eager"),
            }
        bench.compare("step", cases, layers=layers, batch=1, tokens=tokens)
    if avoids:
        return
    fastest_full(bench, bench.sizes.layers, 1)
    bench.attempt("step", f"growing, {AVOID}", partial(_part_a_again, bench))


def _part_a_again(bench: Bench) -> None:
    """Run part A in a process that has cuDNN keep its plans; it writes its own row."""
    if not bench.is_gpu:
        raise NeedsCudaError
    command = [sys.executable, __file__, "--parts", "A", "--limit", "60"]
    command += ["--output", str(bench.args.output)]
    done = subprocess.run(command, env=os.environ | {AVOID: "1"}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])


STEPS_TO_PROFILE = (
    ("h2o", "eager"), ("best by head", "eager"), ("h2o, spans", "eager"), ("h2o", "compiled"),
)  # fmt: skip


def part_b(bench: Bench) -> None:
    """Profiles: kernels, launches and the host's share of steps and prompts, in text files."""
    layers, by_name = bench.sizes.layers, configs(bench, bench.sizes.layers)
    for name, config in by_name.items():
        profile(bench, "prompt", name, prompt(bench, layers, 1, config), layers=layers, batch=1)
    for name, mode in STEPS_TO_PROFILE:
        for batch in bench.sizes.batches[:2]:
            step = Step(bench, layers, batch, bench.sizes.context)

            def prepare(step: Step = step, name: str = name, mode: str = mode) -> Step:
                step.h2o(by_name[name]).timed(mode)
                return step

            cells = {"layers": layers, "batch": batch}
            if bench.attempt("profile of a step", f"{name}, {mode}", prepare, **cells) is not None:
                profile(bench, "step", f"{name}, {mode}", step, **cells)


def profile(bench: Bench, kind: str, name: str, run: Callable[[], Any], **cells: Any) -> None:
    """Write the kernels of a call to a file, and a row with launches and the device's share."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record_activity

    def measure() -> None:
        run()
        seconds = bench.clock.seconds(run)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * bench.is_gpu
        with record_activity(activities=activities) as recorded:
            bench.clock.seconds(run)
        events = recorded.key_averages()
        by = "self_device_time_total" if bench.is_gpu else "self_cpu_time_total"
        folder = bench.args.output.with_suffix(".profiles")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{kind}, {name}, batch {cells['batch']}.txt"
        path.write_text(events.table(sort_by=by, row_limit=20), encoding="utf-8")
        kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        common = {"rounds": 1, **cells}
        bench.row(f"profile of a {kind}", name, unit="s", median=seconds, **common)
        if bench.is_gpu:
            busy = sum(event.self_device_time_total for event in kernels) / 1e6
            launches = sum(event.count for event in kernels)
            row = bench.row
            row(f"profile of a {kind}", f"{name}, on the device", unit="s", median=busy, **common)
            row(f"profile of a {kind}", name, unit="launches", median=launches, **common)

    bench.attempt(f"profile of a {kind}", name, measure, **cells)
    bench.free()


def prompt(
    bench: Bench, layers: int, batch: int, config: CacheConfig | None, replays: bool = False
) -> Callable[[], None]:
    """Return a call that reads a prompt into a new cache; ``None`` for the full one.

    Launch by launch, or by chunks that are recorded in the first call and replayed from then on.
    """
    if replays and not bench.is_gpu:
        raise NeedsCudaError
    model, length = bench.model(layers), bench.sizes.context
    forward: Callable[..., Any] = DecodeGraphs(model) if replays else model
    ids = torch.ones(batch, length, dtype=torch.int64, device=bench.device)

    def run() -> None:
        model.set_attn_implementation("sdpa" if config is None else "h2o")
        cache: Any = DynamicCache() if config is None else h2okv.H2OCache.from_config(model, config)
        with torch.no_grad():
            forward(ids, logits_to_keep=1, **{CACHE: cache})

    return run


def part_c(bench: Bench) -> None:
    """Steps of few layers: eager, in a graph recorded by hand, compiled, and first-use seconds."""
    sizes, caches = bench.sizes, ("static", "flash", *configs(bench, bench.sizes.layers))
    for batch in sizes.batches:
        steps_of(bench, sizes.layers, batch, dict.fromkeys(caches, ("graph", "eager")))
    for batch in sizes.batches[:2]:
        cuts_of(bench, sizes.layers, batch)
    modes: dict[str, tuple[str, ...]] = {"static": ("reduce-overhead",)}
    modes |= dict.fromkeys(("h2o", "best by head"), ("compiled", "graph of compiled"))
    for batch in sizes.batches[:2]:
        if bench.is_gpu:
            torch.compiler.reset()
        steps_of(bench, sizes.layers, batch, modes)


def cuts_of(bench: Bench, layers: int, batch: int) -> None:
    """Time replayed steps of which every second ends a span, by how its cut runs."""
    tokens, by_name = bench.sizes.context, configs(bench, layers)

    def prepare(name: str, is_replayed: bool) -> Timed:
        step = Step(bench, layers, batch, tokens).h2o(replace(by_name[name], evict_every=2))
        timed = step.timed("graph")
        for _ in range(2 * EAGER_STEPS + 4):  # until its cut is recorded too
            step()
        if not is_replayed:
            forward: Any = step.forward
            forward._cut = lambda *_: False
        return timed

    for name in ("h2o, spans", "best by head, spans"):
        cases: Cases = {
            f"{name}, cut {kind}": partial(prepare, name, kind == "replayed")
            for kind in ("launched", "replayed")
        }
        cells = {"layers": layers, "batch": batch, "tokens": tokens}
        baselines = (f"{name}, cut launched",)
        bench.compare("step, a cut after every second", cases, baselines=baselines, **cells)


def part_d(bench: Bench) -> None:
    """Step of a layer in a graph: our kernels and SDPA over the same slots, blocks of slots."""
    for batch in bench.sizes.batches:
        for count in bench.sizes.slots:
            layer_steps(bench, batch, count)


def layer_steps(bench: Bench, batch: int, count: int) -> None:
    """Time a layer's attention over some slots that caches of the device do not hold."""
    num_heads, heads, size = bench.sizes.heads
    groups, repeats = num_heads // heads, bench.sizes.repeats
    num_bytes = 2 * batch * heads * count * size * torch.empty((), dtype=bench.dtype).element_size()
    copies = max(1, min(repeats, bench.sizes.cold // num_bytes))
    query, key, value = (bench.draw(batch, n, 1, size) for n in (num_heads, heads, heads))

    def slots() -> Slots:
        positions = torch.arange(count, dtype=torch.int32, device=bench.device)
        positions = positions.repeat(batch, heads, 1)
        positions[..., -1] = -1
        free = torch.full((batch, heads, 1), count - 1, device=bench.device)
        keys, values = (bench.draw(batch, heads, count, size) for _ in range(2))
        scores = torch.rand(batch, heads, count, device=bench.device)
        return Slots(keys, values, scores, positions, free, free[:, 0, 0].clone())

    rules = StepRules(
        AttentionSpec(size**-0.5),
        torch.full((batch, 1, 1), count // 2, device=bench.device),
        full=True,
    )
    operations = dispatch.operations(bench.device, bench.dtype, size, size, groups)
    all_slots = [slots() for _ in range(copies)]

    def timed(run: Callable[[Slots], Any], sdpa: str = "none") -> Timed:
        def once() -> None:
            for number in range(repeats):
                run(all_slots[number % copies])

        call = bench.record(once) if bench.is_gpu else once
        return Timed(call, repeats, num_bytes, sdpa)

    def ours(block: int | None = None) -> Timed:
        if block is None:
            return timed(lambda state: operations.step(query, key, value, state, rules))
        if operations.name != "triton":
            raise NeedsCudaError
        with patch("h2okv.ops.triton_decode.block_slots", lambda *_: block):
            return timed(lambda state: operations.step(query, key, value, state, rules))

    def sdpa(kernel: SDPBackend | None) -> Timed:
        attend = torch.nn.functional.scaled_dot_product_attention

        def run(state: Slots) -> Any:
            mask = None if kernel is not None else state.positions[:, :1, None] >= 0
            with nullcontext() if kernel is None else sdpa_kernel(kernel):
                return attend(query, state.keys, state.values, mask, enable_gqa=True)

        return timed(run, "with a mask" if kernel is None else kernel.name.lower())

    def by_row() -> Timed:
        """Attend with each KV head as a sequence that has its own length."""
        kernel = flash_varlen._varlen() if bench.is_gpu else None
        if kernel is None:
            raise NeedsCudaError
        rows = batch * heads
        edges = torch.arange(rows + 1, dtype=torch.int32, device=bench.device)
        lengths = torch.full((rows,), count, dtype=torch.int32, device=bench.device)
        options = {"enable_gqa": True, "seqused_k": lengths}
        missing = options.keys() - inspect.signature(kernel[0]).parameters
        shared = groups if "enable_gqa" in missing else 1  # torch 2.11, for example
        options = {name: options[name] for name in options.keys() - missing}

        def run(state: Slots) -> Any:
            return kernel[0](
                query.view(rows, groups, size),
                *(
                    states.reshape(rows * count, 1, size).expand(-1, shared, -1)
                    for states in (state.keys, state.values)
                ),
                edges, edges * count, 1, count, scale=size**-0.5, **options,
            )  # fmt: skip

        return timed(run, "varlen_attn")

    cases: Cases = {f"h2o, {operations.name}": ours}
    cases |= {f"h2o, blocks of {block}": partial(ours, block) for block in (16, 32, 64, 128)}
    cases |= {f"sdpa, {kernel.name.lower()}": partial(sdpa, kernel) for kernel in bench.kernels}
    cases |= {"sdpa, masked": partial(sdpa, None), "a row for each KV head": by_row}
    names = tuple(name for name in cases if name.startswith("sdpa"))
    bench.compare("step of a layer", cases, baselines=names, batch=batch, entries=count)


def part_e(bench: Bench) -> None:
    """Score sums of a prompt by tile, and forwards that keep the log-sum-exp, over SDPA."""
    for length in bench.sizes.lengths:
        score_sums(bench, length)


def _forwards(query: Any, key: Any, value: Any, is_causal: bool) -> Cases:
    """Return forward passes that keep the log-sum-exp, of PyTorch."""
    aten, groups = torch.ops.aten, query.shape[1] // key.shape[1]
    wide = [states.repeat_interleave(groups, dim=1) for states in (key, value)]
    cudnn = partial(aten._scaled_dot_product_cudnn_attention, query, key, value, None, True, 0.0)
    flash = partial(aten._scaled_dot_product_flash_attention, query, *wide, 0.0)
    return {
        "forward, cudnn": lambda: Timed(partial(cudnn, is_causal), sdpa="cudnn"),
        "forward, flash": lambda: Timed(partial(flash, is_causal), sdpa="flash"),
    }


def score_sums(bench: Bench, length: int) -> None:
    """Time both passes over a prompt of one sequence."""
    from h2okv.ops import triton_prefill
    from h2okv.ops.triton_prefill import Tile

    num_heads, heads, size = bench.sizes.heads
    query, key, value = (bench.draw(1, n, length, size) for n in (num_heads, heads, heads))
    chosen = dispatch.operations(bench.device, bench.dtype, size, size, num_heads // heads)
    spec, visibility, run_ours = AttentionSpec(size**-0.5), Visibility(), chosen.name == "triton"
    sdpa = partial(
        torch.nn.functional.scaled_dot_product_attention, query, key, value, is_causal=True,
        enable_gqa=True,
    )  # fmt: skip
    cases: Cases = {"sdpa": lambda: Timed(sdpa, sdpa="SDPA's choice")}
    if bench.is_gpu:
        cases |= _forwards(query, key, value, True)
        if flash_varlen.applies(query, value, visibility, spec):
            cases["forward, varlen"] = lambda: Timed(
                partial(flash_varlen.forward, query, key, value, spec.scale), sdpa="varlen_attn"
            )
    attend = partial(chosen.attend, query, key, value, visibility, spec)
    cases[f"h2o, both passes, {chosen.name}"] = lambda: Timed(attend)
    if run_ours:
        forward = partial(triton_prefill.forward, query, key, value, visibility, spec)
        limits = forward()[1]
        sums = partial(triton_prefill.score_sums, query, key, limits, visibility, spec)
        cases |= {"forward, ours": lambda: Timed(forward), "sums": lambda: Timed(sums)}
        tiles = [
            Tile(queries, keys, warps, stages)
            for queries, keys in ((64, 128), (128, 128), (64, 64), (32, 128), (128, 64))
            for warps in (4, 8)
            for stages in (2, 3, 4)
        ]
        for tile in tiles:
            name = "sums, tile " + "/".join(map(str, tile))
            cases[name] = lambda tile=tile: Timed(partial(sums, tile=tile))
    bench.compare("score sums", cases, baselines=("sdpa",), batch=1, tokens=length)


def part_f(bench: Bench) -> None:
    """Expected attention of a prompt: by the layers' operation, and by PyTorch in bf16."""
    num_heads, heads, size = bench.sizes.heads
    length, spec = bench.sizes.lengths[0], AttentionSpec(size**-0.5)
    query, key = (bench.draw(1, n, length, size) for n in (num_heads, heads))
    chosen = dispatch.operations(bench.device, bench.dtype, size, size, num_heads // heads)
    exact = expected_attention(query.float(), key.float(), None, None, spec)

    def checked(expect: Callable[..., torch.Tensor]) -> Timed:
        run = partial(expect, query, key, None, None, spec)
        error = float((run() - exact).norm() / exact.norm())
        if not error < 0.02:
            raise ArithmeticError(f"its norms differ from fp32's by {error:.2g}")
        return Timed(run)

    cases: Cases = {
        "plain": partial(checked, expected_attention),
        f"h2o, {chosen.name}": partial(checked, chosen.expect),
    }
    bench.compare("expected attention", cases, baselines=("plain",), batch=1, tokens=length)


def part_g(bench: Bench) -> None:
    """Choosing what stays of a prompt and moving it: by kernels, by PyTorch, `topk` to compare."""
    for batch in bench.sizes.batches:
        cut_of_layer(bench, batch)


def cut_of_layer(bench: Bench, batch: int) -> None:
    """Time the parts of a layer's first cut."""
    num_heads, heads, size = bench.sizes.heads
    count, device = bench.sizes.lengths[0], bench.device
    limit = int(SHARE * count)
    kernels = dispatch.operations(device, bench.dtype, size, size, num_heads // heads).cut
    scores = torch.rand(batch, heads, count, device=device)
    positions = torch.arange(count, dtype=torch.int32, device=device)
    positions = positions.expand(batch, heads, -1).contiguous()
    columns = [torch.full((batch, 1, 1), n, device=device) for n in (SINK, limit // 2, limit)]
    rules = CutRules(torch.full((batch,), count, device=device), *columns)
    keys = bench.draw(batch, heads, count, size)
    protected = protected_entries(positions, count - 1, rules.sink, rules.recent)
    by_pytorch = partial(choose, scores, positions, protected, rules.total, limit)
    indices, _ = by_pytorch()

    def selection() -> Callable[[], Any]:
        if kernels is None:
            raise NeedsCudaError
        return partial(kernels.select, scores, None, scores, positions, rules, limit, False)

    def moves() -> Timed:
        chosen = selection()()
        from h2okv.ops.triton_cut import Rows

        target = Rows(*(tensor[:, :, :limit].clone() for tensor in (keys, keys, scores, positions)))
        source = Rows(keys, keys.clone(), scores, positions)
        assert kernels is not None
        return Timed(partial(kernels.move, source, target, heads, chosen))

    cases: Cases = {
        "choose, plain": lambda: Timed(by_pytorch),
        "choose, triton": lambda: Timed(selection()),
        "topk": lambda: Timed(partial(torch.topk, scores, limit, dim=-1)),
        "move keys, plain": lambda: Timed(partial(pick, keys, indices)),
        "move entries, triton": moves,
    }
    cells = {"batch": batch, "tokens": count, "entries": limit}
    bench.compare("cut of a layer", cases, baselines=("choose, plain",), **cells)


def part_h(bench: Bench) -> None:
    """Whole model: steps and prompts of all caches, over the fastest full cache."""
    layers, by_name = bench.sizes.deep, configs(bench, bench.sizes.deep)
    caches = ("static", "flash", *by_name)
    for batch in bench.sizes.batches:
        eager = {"h2o": ("graph", "eager")} if batch == bench.sizes.batches[0] else {}
        steps_of(bench, layers, batch, dict.fromkeys(caches, ("graph",)) | eager)
    bench.sizes = replace(bench.sizes, rounds=2)  # seconds each
    for batch in bench.sizes.batches[:2]:
        cases: Cases = {
            "full": lambda b=batch: Timed(prompt(bench, layers, b, None), sdpa="SDPA's choice")
        }
        for name, config in by_name.items():
            if config.chunk is not None:
                call = partial(prompt, bench, layers, batch, config, replays=True)
                cases[f"{name}, chunks replayed"] = lambda c=call: Timed(c())
            if config.evict_every and batch > 1 and bench.is_gpu:  # minutes, launch by launch
                continue
            cases[name] = lambda b=batch, c=config: Timed(prompt(bench, layers, b, c))
        cells = {"layers": layers, "batch": batch, "tokens": bench.sizes.context}
        bench.compare("prompt", cases, baselines=("full",), **cells)


def part_i(bench: Bench) -> None:
    """Engine, few layers: tokens a second at equal memory, and the device's share of a run."""
    layers, (count, length, new) = bench.sizes.layers, bench.sizes.requests
    tokenizer, budget = AutoTokenizer.from_pretrained(bundled_model_path()), int(SHARE * length)
    prompts = [[3 + (n + i) % 90 for i in range(length)] for n in range(count)]
    best = configs(bench, layers)["best by head"]
    unbounded = CacheConfig(budget=length + new, min_tokens=0)  # evicts nothing
    caches: dict[str, tuple[CacheConfig, int]] = {
        "full": (unbounded, max(1, count * budget // (length + new))),
        "full, all at once": (unbounded, count),
        "h2o": (CacheConfig(budget=budget, min_tokens=0), count),
        "best by head": (
            CacheConfig(
                budget=budget, policy="best", min_tokens=0, layer_budgets=best.layer_budgets
            ),
            count,
        ),
    }
    reads_first = "best by head, each step's tokens read before the next step"
    caches[reads_first] = caches["best by head"]
    full: float | None = None
    for name, (config, sequences) in caches.items():
        cells = {"layers": layers, "batch": sequences, "tokens": length, "entries": budget}
        ahead = patch.object(Engine, "runs_ahead", None if name != reads_first else False)

        def run(
            config: CacheConfig = config, sequences: int = sequences, ahead: Any = ahead
        ) -> float:
            options = {"max_num_seqs": sequences, "max_prompt_tokens": length, "prefix_cache": 0}
            params = h2okv.SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
            with ahead, h2okv.LLM(bench.model(layers), tokenizer, cache=config, **options) as llm:
                generate = partial(llm.generate, params=params, show_progress=False)
                generate(prompts[:2], max_tokens=2)
                seconds = bench.clock.seconds(lambda: generate(prompts))
                if bench.is_gpu:
                    some = partial(generate, prompts[:8], max_tokens=8)
                    profile(bench, "run of the engine", name, some, **cells)  # noqa: B023
            return seconds

        seconds = bench.attempt("engine", name, run, **cells)
        if seconds is None:
            continue
        full = full or seconds * (name == "full")
        compared = {"against": "full", "ratio": seconds / full} if full else {}
        bench.row("engine", name, unit="s", median=seconds, rounds=1, **compared, **cells)
        rate = count * new / seconds
        bench.row("engine", name, unit="tokens/s", median=rate, rounds=1, **cells)
        bench.free()


def part_j(bench: Bench) -> None:
    """Step of the vLLM plug-in recorded in a graph and replayed over the end of a span."""
    num_heads, heads, size = bench.sizes.heads
    span, batch = 16, 2
    config = CacheConfig(heavy=8, recent=8, evict_every=span, layer_budgets=None)

    def make() -> tuple[StateLayer, StatePool]:
        shape = LayerShape(0, num_heads, heads, size, bench.dtype)
        pool = StatePool([StateLayer(config, shape, AttentionSpec(size**-0.5))])
        pages = torch.zeros(batch, pool.block_bytes, dtype=torch.uint8, device=bench.device)
        pool.bind(pages)
        return pool.layers[0], pool

    (eager, eager_pool), (other, other_pool) = make(), make()
    inputs = [bench.draw(batch, n, size) for n in (num_heads, heads, heads)]
    outputs = [torch.zeros_like(inputs[0]) for _ in range(2)]
    table = torch.arange(batch, dtype=torch.int32, device=bench.device).unsqueeze(1)
    replay: Callable[[], None] | None = None

    def batch_at(number: int, pool: StatePool) -> Batch:
        return Batch.of(list(range(batch + 1)), [number + 1] * batch, table, pool)

    def compare_states() -> str:
        nonlocal replay
        begin = 3 * span + 4
        recorded: Any = None
        for number in range(begin + 2 * span):
            for tensor in inputs:
                tensor.copy_(bench.draw(*tensor.shape))
            batch_at(number, eager_pool).run(eager, *[*inputs, outputs[0]])
            now = batch_at(number, other_pool)
            if number < begin:
                now.run(other, *[*inputs, outputs[1]])
                continue
            if replay is None:
                before = other_pool.pages.clone()
                recorded = now
                run = partial(recorded.run, other, *inputs, outputs[1])
                replay = bench.record(run, warmup=1)
                other_pool.pages.copy_(before)
            recorded.seen.copy_(now.seen)
            replay()
            if not torch.allclose(outputs[0].float(), outputs[1].float(), atol=2e-2):
                return f"differs from step {number + 1} on, spans end at multiples of {span}"
        return "equals eager steps over two ends of spans"

    status = bench.attempt("plug-in in a graph", "h2o, spans", compare_states, batch=batch)
    if status is not None:
        bench.row("plug-in in a graph", "h2o, spans", status=status, batch=batch, entries=16)


PARTS: dict[str, tuple[int, Callable[[Bench], None]]] = {
    "A": (45, part_a), "B": (60, part_b), "C": (150, part_c), "D": (60, part_d), "E": (60, part_e),
    "F": (30, part_f), "G": (30, part_g), "H": (120, part_h), "I": (95, part_i), "J": (40, part_j),
    "K": (90, part_k),
}  # fmt: skip
"""Each part's seconds and function, in order of value."""


def parse(words: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    listed = "\n".join(f"  {n}  {s:>3} s  {f.__doc__}" for n, (s, f) in PARTS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").format(parts=listed),
        epilog="example: python benchmarks/gpu_first.py --parts A,C,H --limit 300",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def letters(text: str) -> list[str]:
        names = text.upper().split(",")
        if unknown := [name for name in names if name not in PARTS]:
            raise argparse.ArgumentTypeError(
                f"must be letters of {','.join(PARTS)}, got {unknown[0]!r}"
            )
        return names

    parser.add_argument("--parts", dest="letters", type=letters, help="all; K with --flexgen")
    parser.add_argument("--flexgen", type=Path, help="the authors' folder h2o_flexgen, for part K")
    parser.add_argument("--limit", type=float, default=690, help="seconds of all parts (690)")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_first.csv", help="rows")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--debug", action="store_true", help="print where errors come from")
    args = parser.parse_args(words)
    if args.flexgen is not None and not (args.flexgen / "flexgen" / "flex_opt.py").is_file():
        parser.error(f"--flexgen must be the authors' folder h2o_flexgen, got {args.flexgen}")
    args.letters = args.letters or [name for name in PARTS if name != "K" or args.flexgen]
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; try the script with --tiny --device cpu")
    args.sizes, args.dtype = (TINY, torch.float32) if args.tiny else (Sizes(), torch.bfloat16)
    return args


def main(words: list[str] | None = None) -> None:
    """Run the parts that the command line names."""
    args = parse(words)
    bench, seconds = Bench(args), sum(PARTS[name][0] for name in args.letters)
    end = time.perf_counter() + args.limit
    for name in args.letters:
        budget, run = PARTS[name]
        budget = max(0, min(budget * args.limit / seconds, end - time.perf_counter()))
        bench.sizes = args.sizes
        bench.letter, title = name, (run.__doc__ or "").rstrip(".")
        try:
            with at_most(budget):
                bench.attempt("whole part", title, partial(run, bench))
        except OutOfTime:
            bench.row("whole part", title, status=f"stopped after {budget:.0f} s")
        bench.free()
    bench.file.close()


if __name__ == "__main__":
    main()
