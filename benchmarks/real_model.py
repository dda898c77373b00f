"""Speed of H2O on a real model: prompts against SDPA, steps against a full and a static cache.

Runs are interleaved, prompts by round and steps one by one: a slow moment of the machine affects
all of them. "static" is a `StaticCache` with as many entries as H2O: the time if eviction were
free. ``--compile`` also measures H2O's steps under ``h2okv.enable(model, compile=True)``,
``--layer-budgets`` those of a cache with different budgets by layer or head, against an even one.
``--best`` measures the prompt of ``best`` against H2O's, and ``--busy N`` all while N other
processes keep cores busy, as on a laptop or a server. ``--answer`` times a prompt with that number
of new tokens too; "weights" are prompts and steps of H2O with linear layers as they are loaded,
packed, and (in bf16) in 4 bits, as the commands load them; "peak" is the memory of a prompt beyond
the model, in a separate process; "import" is the CPU
time of importing h2okv and a model's class, compared with the class alone. Prompts are random
tokens, the same on every machine, or with ``--text`` those of a book, whose attention is realistic:
its rows name the book. ``--quick``
measures little and prints today's and the recorded ratios.
"""

from __future__ import annotations

import argparse
import atexit
import json
import resource
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import (
    RESULTS,
    Target,
    environment,
    interleave,
    load_pair,
    progress,
    report,
    rows_for,
    show,
    with_h2o,
)
from transformers import PreTrainedModel

from h2okv.config import CacheConfig
from h2okv.models.loading import describe
from h2okv.models.packed_linear import pack_linear_layers
from h2okv.offload.profile import Clock
from h2okv_lab.benchmarking.caches import CacheRunner, CacheSpec, PeakRun, measure_peak, prompt_ids
from h2okv_lab.benchmarking.model import ModelSource, speedup_limit
from h2okv_lab.benchmarking.results import interleaved
from h2okv_lab.tables import read_csv

CSV = RESULTS / "real_model.csv"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PREFILL_LIMIT = {"fp32": 1.15, "bf16": 1.10}
SPAN_LIMIT = 1.02
STEP_LIMIT, COMPILED_LIMIT, ANSWER_LIMIT, PEAK_LIMIT = 1.05, 0.95, 1.0, 1.05
IMPORT_LIMIT = 1.2
BEST_LIMIT = 1.15  # of best's prompt against H2O's
BUSY_LIMIT = 1.3  # of a prompt against SDPA's while others work
UNEVEN_LIMIT = 1.05  # of a step whose layers, or heads, hold alike
MODEL_CLASS = "from transformers import LlamaForCausalLM"
IMPORTS = {"h2o": f"from h2okv import H2OCache, enable; {MODEL_CLASS}", "transformers": MODEL_CLASS}
SHARE_OF_BYTES = 0.9  # of the speed-up that the bytes of a large batch of long texts allow
WARMUP = 8
ALSO_H2O = {"compiled": "h2o", "uneven": "h2o", "best": "h2o"}
MEASURES = ("prompt", "step", "weights", "peak", "import")
WEIGHTS: dict[str, dict[str, int | None]] = {
    "fp32": {"packed": None},
    "bf16": {"packed": None, "int4": 4},
}
SETTING = ("threads", "model", "dtype", "batch", "prompt", "budget", "measure", "implementation")
"""The columns by which a recorded row is found again."""


def measure_prompts(
    runners: dict[str, CacheRunner], ids: torch.Tensor, rounds: int, answer: int
) -> tuple[Any, Any]:
    """Seconds of a prompt, and of it with ``answer`` tokens after it, by cache and round."""
    clock = Clock(ids.device)
    prompts: dict[str, list[float]] = {
        name: [] for name in ("h2o", "dynamic", "best") if name in runners
    }

    def read(name: str) -> None:
        runner = runners[name]
        runner.prepare(ids.shape[1])
        prompts[name].append(clock.seconds(lambda: runner.prefill(ids)))
        for _ in range(answer):
            assert runner.logits is not None
            runner.step(runner.logits[:, -1].argmax(-1, keepdim=True))

    runs = {name: partial(read, name) for name in prompts}
    total = interleave(runs, rounds, 1, f"prompt of {ids.shape[1]} and {answer} tokens")
    return {name: seconds[1:] for name, seconds in prompts.items()}, total


def measure_steps(runners: dict[str, CacheRunner], ids: torch.Tensor, steps: int) -> Any:
    """Seconds of a step of every cache, after the prompt."""
    for runner in runners.values():
        runner.prepare(ids.shape[1])
        runner.prefill(ids)

    runs = {name: lambda runner=runner: runner.step(ids[:, :1]) for name, runner in runners.items()}
    compiled = runners.get("compiled")
    with compiled.compiled_steps() if compiled else nullcontext():
        return interleave(runs, steps, WARMUP, f"steps after {ids.shape[1]}")


def measure_spans(
    specs: dict[str, Any], length: int, ids: torch.Tensor, steps: int, setting: dict[str, Any]
) -> list[dict[str, Any]]:
    """Measure steps of caches that evict every `length` tokens, cuts among them.

    Against a static cache of as many entries as they have slots, at most.
    """
    rows, (plain, fifth) = [], specs["static"]
    slots = fifth.entries(ids.shape[1]) + length - 1
    static = plain, CacheConfig(budget=slots, min_tokens=0)
    for name in ("h2o", "best"):
        if name not in specs:
            continue
        model, config = specs[name]
        evicting = model, replace(config, evict_every=length)
        both = {name: evicting, "static": static, "dynamic": specs["dynamic"]}
        runners = {
            key: CacheSpec(ALSO_H2O.get(key, key), config).runner(model)
            for key, (model, config) in both.items()
        }
        seconds = measure_steps(runners, ids, steps)
        targets = [Target("static", SPAN_LIMIT), Target("dynamic", 1.0)]
        measure = f"step, every {length}"
        rows += rows_for(measure, "s", seconds, targets, setting, subject=name)
        for runner in runners.values():
            runner.release()
    return rows


def measure_weights(
    h2o_model: PreTrainedModel, ids: torch.Tensor, args: argparse.Namespace, setting: dict[str, Any]
) -> list[dict[str, Any]]:
    """Prompts and steps of H2O by how the linear weights lie in memory."""
    models = {"loaded": h2o_model}
    for name, bits in WEIGHTS[setting["dtype"]].items():
        models[name] = with_h2o(h2o_model)
        pack_linear_layers(models[name], bits)
    spec = CacheSpec("h2o", CacheConfig(budget=0.2, min_tokens=0))
    runners = {name: spec.runner(model) for name, model in models.items()}
    _check_packed(runners, ids[:, :256])

    def read(runner: CacheRunner) -> None:
        runner.prepare(ids.shape[1])
        runner.prefill(ids)

    runs = {name: partial(read, runner) for name, runner in runners.items()}
    prompts = interleave(runs, args.rounds, 1, f"prompt of {ids.shape[1]} tokens")
    steps = measure_steps(runners, ids, args.steps)
    rows = []
    for measure, samples in (("prefill", prompts), ("step", steps)):
        for name in WEIGHTS[setting["dtype"]]:
            pair = {name: samples[name], "loaded": samples["loaded"]}
            title = f"{measure}, weights"
            rows += rows_for(title, "s", pair, [Target("loaded")], setting, subject=name)
    for runner in runners.values():
        runner.release()
    return rows


def _check_packed(runners: dict[str, CacheRunner], ids: torch.Tensor) -> None:
    """End the run if packed weights do not give the numbers of the loaded ones."""
    logits = {}
    for name in ("loaded", "packed"):
        runners[name].prepare(ids.shape[1])
        runners[name].prefill(ids)
        runners[name].step(ids[:, :1])
        logits[name] = runners[name].logits
    gap = float((logits["packed"] - logits["loaded"]).abs().max())
    if not gap < (1e-3 if logits["loaded"].dtype == torch.float32 else 0.1):
        raise SystemExit(f"logits of packed weights differ by {gap:.2g}; nothing was timed")


def measure(
    plain: PreTrainedModel, h2o_model: PreTrainedModel, args: argparse.Namespace, dtype: str
) -> list[dict[str, Any]]:
    """Measure one dtype, of a model and the same model under H2O attention."""
    rows = []
    fifth = CacheConfig(budget=0.2, min_tokens=0)
    specs = {"dynamic": (plain, None), "static": (plain, fifth), "h2o": (h2o_model, fifth)}
    if args.compile:
        specs["compiled"] = (with_h2o(plain), fifth)
    factors = None
    if args.layer_budgets:
        factors = json.loads(args.layer_budgets.read_text(encoding="utf-8"))
    if args.best:
        best = CacheConfig(budget=0.2, min_tokens=0, policy="best", layer_budgets=factors)
        specs["best"] = (h2o_model, best)
    elif factors:
        specs["uneven"] = (h2o_model, replace(fifth, layer_budgets=factors))
    for batch in args.batches:
        for prompt in args.prompts:
            setting = environment() | {
                "model": args.model + (f", {args.text.stem}" if args.text else ""),
                "dtype": dtype, "batch": batch, "prompt": prompt,
                "kv_heads": plain.config.num_key_value_heads, "budget": "20%",
            }  # fmt: skip
            ids = prompt_ids(plain, batch, prompt)
            if args.text:
                ids = text_ids(args.model, args.text, batch, prompt)
            runners = {
                name: CacheSpec(ALSO_H2O.get(name, name), config).runner(model)
                for name, (model, config) in specs.items()
            }
            if "prompt" in args.measures:
                prompts, answers = measure_prompts(runners, ids, args.rounds, args.answer)
                suffix = f", {args.busy} busy" if args.busy else ""
                targets = [Target("dynamic", BUSY_LIMIT if args.busy else PREFILL_LIMIT[dtype])]
                best = prompts.pop("best", None)
                rows += rows_for(f"prefill{suffix}", "s", prompts, targets, setting)
                if best:
                    both = {"best": best, "h2o": prompts["h2o"]}
                    targets = [Target("h2o", BEST_LIMIT)]
                    rows += rows_for(
                        f"prefill{suffix}", "s", both, targets, setting, subject="best"
                    )
                if args.answer:
                    targets = [Target("dynamic", ANSWER_LIMIT)]
                    rows += rows_for(f"answer of {args.answer}", "s", answers, targets, setting)
            if "step" in args.measures:
                seconds = measure_steps(runners, ids, args.steps)
                allowed = speedup_limit(
                    plain.get_memory_footprint(), runners["dynamic"].nbytes, runners["h2o"].nbytes
                )
                is_large = batch >= 8 and prompt >= 4096
                least = round(SHARE_OF_BYTES * allowed, 3) if is_large else None
                targets = [Target("static", STEP_LIMIT), Target("dynamic", least, at_least=True)]
                compiled, uneven, _ = (seconds.pop(name, None) for name in ALSO_H2O)
                rows += rows_for("step", "s", seconds, targets, setting)
                if compiled:
                    both = {"h2o": compiled, "static": seconds["static"]}
                    targets = [Target("static", COMPILED_LIMIT)]
                    rows += rows_for("compiled step", "s", both, targets, setting)
                if uneven:
                    both = {"h2o": uneven, "alike": seconds["h2o"]}
                    name = f"step, by {'head' if specs['uneven'][1].is_by_head else 'layer'}"
                    rows += rows_for(name, "s", both, [Target("alike", UNEVEN_LIMIT)], setting)
            for length in args.every if "step" in args.measures else ():
                rows += measure_spans(specs, length, ids, args.steps, setting)
            if "weights" in args.measures:
                rows += measure_weights(h2o_model, ids, args, setting)
            if "peak" in args.measures:
                bytes_ = {
                    name: [peak_beyond_model(args.model, DTYPES[dtype], runners[name].spec, ids)]
                    for name in ("h2o", "dynamic")
                }
                if not all(map(all, bytes_.values())):
                    raise SystemExit(f"--prompts {ids.shape[1]} is too short to see a peak")
                targets = [Target("dynamic", PEAK_LIMIT)]
                rows += rows_for("peak of a prompt", "MiB", bytes_, targets, setting)
            for runner in runners.values():
                runner.release()
    return rows


def text_ids(model: str, path: Path, batch: int, length: int) -> torch.Tensor:
    """Return the tokens of a text, int64 ``[B, T]``, consecutive windows of it."""
    text = path.read_text(encoding="utf-8")[: 8 * batch * length]
    ids = describe(model).tokenizer(text, return_tensors="pt").input_ids[0]
    if len(ids) < batch * length:
        raise SystemExit(f"--text {path} has {len(ids)} tokens; give one of {batch * length}")
    return ids[: batch * length].view(batch, length)


def peak_beyond_model(model: str, dtype: torch.dtype, spec: CacheSpec, ids: torch.Tensor) -> float:
    """Return a process's peak MiB while it reads a prompt, beyond the model."""
    source, (batch, prompt) = ModelSource(model), ids.shape
    threads = torch.get_num_threads()
    peak = measure_peak(PeakRun(source, dtype, ids.device, threads, spec, prompt, batch))
    assert peak is not None, "this system does not tell a process's peak memory"
    return (peak.peak - peak.loaded) / 2**20


def measure_imports(rounds: int) -> dict[str, list[float]]:
    """CPU seconds of a new Python that imports, by what it imports."""
    samples: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for number, name in interleaved(list(IMPORTS), 1 + rounds):
        progress(f"imports: round {number} of {rounds}")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", IMPORTS[name]], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if number:  # the first round fills the disk's cache
            samples[name].append(
                after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
            )
    progress("")
    return samples


def compare(rows: list[dict[str, Any]], path: Path) -> None:
    """Print today's ratios with the latest recorded ones of the same setting."""
    recorded = {_key(row): row for row in (read_csv(path) if path.exists() else [])}
    print(f"\n{'':40} {'today':>24}   recorded")
    for row in rows:
        if row.get("ratio"):
            name = f"{row['measure']}, {row['dtype']}, {row['prompt']} tokens, {row['against']}"
            before = recorded.get(_key(row))
            earlier = "none" if before is None else f"{before['ratio']} at {before['commit']}"
            spread = f"{row['ratio']} ({row['ratio_lower']} to {row['ratio_upper']})"
            print(f"{name:40} {spread:>24}   {earlier}")


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in SETTING)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/real_model.py --threads 1 --prompts 1024,4096",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--prompts", type=numbers, default=[1024, 4096], help="tokens")
    parser.add_argument("--batches", type=numbers, default=[1])
    parser.add_argument("--text", type=Path, help="a text to read in place of random tokens")
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=["prompt", "step"])
    parser.add_argument("--answer", type=int, default=0, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=7, help="prompts of each cache")
    parser.add_argument("--steps", type=int, default=60, help="steps of each cache")
    parser.add_argument("--layer-budgets", type=Path, help="steps with these budgets too")
    parser.add_argument(
        "--every", type=numbers, default=[], help="steps of caches that evict every c tokens too"
    )
    parser.add_argument("--best", action="store_true", help="prompts of best too")
    parser.add_argument("--busy", type=int, default=0, help="other processes that keep cores busy")
    parser.add_argument("--compile", action="store_true", help="compiled steps too")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's choice")
    parser.add_argument("--csv", type=Path, default=CSV, help="file to add rows to")
    parser.add_argument("--quick", action="store_true", help="1,024 tokens, fp32; records nothing")
    args = parser.parse_args()
    if args.text and not args.text.is_file():
        parser.error(f"--text {args.text} is not a file")
    if args.quick:
        args.dtypes, args.prompts, args.rounds = ["fp32"], [1024], 5
    if args.threads:
        torch.set_num_threads(args.threads)
    if "import" in args.measures:
        setting = environment() | {"model": "", "dtype": ""}
        targets = [Target("transformers", IMPORT_LIMIT)]
        report(args.csv, rows_for("import", "s", measure_imports(args.rounds), targets, setting))
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(args.busy)]
    atexit.register(lambda: [process.kill() for process in others])
    for dtype in args.dtypes if args.measures != ["import"] else []:
        plain, h2o_model = load_pair(args.model, DTYPES[dtype])
        rows = measure(plain, h2o_model, args, dtype)
        if args.quick:
            show(rows)
            compare(rows, args.csv)
        else:
            report(args.csv, rows)


if __name__ == "__main__":
    main()
