"""This package's engine and others on the same prompts: speed, first tokens, capacity.

Every kind runs in a separate process, one after another, in an environment that has it: vLLM in
that of `make vllm-test`, kvpress in one with transformers below 5.3, llama.cpp where `xllamacpp` is
installed (``--gguf FILE``). New rows replace older ones of the same setting:

    python benchmarks/engines.py --model MODEL --text TEXT --kinds h2okv transformers --memory 2048
    .venv-vllm/bin/python benchmarks/engines.py --model MODEL --text TEXT --memory 256

With ``--prompt 1088 --shared 1024 --evict-every 128`` all prompts begin with the same 1,024 tokens,
which the kinds "cached prefixes" read once; all kinds of vLLM with H2O evict every 128 tokens then.

All engines get the same prompts at once and decode greedily. vLLM and h2okv have the same memory
for keys and values; the others use what they need. The measure is CPU time on one thread, because
other programs may share the machine; wall time is recorded too.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import multiprocessing
import os
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "engines.csv"
ENVIRONMENT = {
    # Its processes wait for each other by spinning, which would count as work.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
SETTING = ("model", "engine", "dtype", "memory_mib", "prompt", "new", "requests", "shared")
CACHED = ", cached prefixes"


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children."""
    import psutil

    process = psutil.Process()
    all_times = [times.cpu_times() for times in (process, *process.children(recursive=True))]
    return sum(times.user + times.system for times in all_times)


class VLLM:
    """vLLM's engine, with H2O or all of the cache."""

    def __init__(self, kind: str, args: argparse.Namespace, budget: dict[str, int]) -> None:
        from vllm import LLM

        length, name = args.prompt + args.new, kind.removesuffix(CACHED)
        setting: dict[str, Any] = dict(budget)
        if name == "vllm+best":
            entries = sum(budget.values())
            setting = {"policy": "best", "heavy": entries * 3 // 4}
            setting["recent"] = entries - setting["heavy"]
        if args.evict_every is not None:
            setting["evict_every"] = args.evict_every
        self.llm = LLM(
            model=args.model, dtype=args.dtype, max_model_len=length,
            max_num_batched_tokens=2 * length, max_num_seqs=max(args.requests),
            enforce_eager=True, enable_prefix_caching=kind.endswith(CACHED),
            disable_log_stats=True, kv_cache_memory_bytes=args.memory << 20,
            additional_config={} if name == "vllm" else {"h2okv": setting},
        )  # fmt: skip
        pages = self.llm.llm_engine.vllm_config.cache_config
        each = -(-length // pages.block_size) if name == "vllm" else 1
        self.room = (pages.num_gpu_blocks - 1) // each

    def run(self, prompts: list[list[int]], new: int) -> Iterator[int]:
        """Generate; yield the number of each request at its first token."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True)
        engine, begun = self.llm.llm_engine, set()
        self.llm.reset_prefix_cache()  # the prompts of the last run are among these
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.request_id not in begun:
                    begun.add(output.request_id)
                    yield int(output.request_id)

    def close(self) -> None:
        """End the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()


class H2OKV:
    """The engine behind ``h2okv serve``, also with its ``--weight-bits 4``."""

    def __init__(self, kind: str, args: argparse.Namespace, budget: dict[str, int]) -> None:
        import torch

        import h2okv

        options = {"max_prompt_tokens": args.prompt, "dtype": getattr(torch, args.dtype)} | budget
        if kind == "h2okv, 4 bits":
            options["weight_bits"] = 4
        probe = h2okv.LLM(args.model, max_num_seqs=1, **options)
        self.room = (args.memory << 20) // probe.stats().reserved_bytes
        probe.close()
        self.llm = h2okv.LLM(args.model, max_num_seqs=min(self.room, max(args.requests)), **options)

    def run(self, prompts: list[list[int]], new: int) -> Iterator[int]:
        """Generate; yield the number of each request at its first token."""
        from h2okv import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        engine = self.llm.engine
        begun: dict[int, None] = {}

        def notifier(number: int) -> Callable[[Any], None]:
            def notify(event: Any) -> None:
                if isinstance(event, Exception):
                    raise event
                begun[number] = None

            return notify

        for number, prompt in enumerate(prompts):
            engine.scheduler.submit(engine.request(prompt, params, notifier(number)))
        reported = 0
        while engine.step():
            yield from list(begun)[reported:]
            reported = len(begun)

    def close(self) -> None:
        """Give the model back."""
        self.llm.close()


class Transformers:
    """transformers: ``generate`` over one batch, its continuous batching, or kvpress around it.

    The batch is read at once, so that there is no first token before the last one's.
    """

    room: int | None = None  # nothing limits it

    def __init__(self, kind: str, args: argparse.Namespace, budget: dict[str, int]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.kind, self.fraction = kind, sum(budget.values()) / args.prompt
        self.model = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype)
        ).eval()

    def run(self, prompts: list[list[int]], new: int) -> Iterator[int]:
        """Generate; yield the numbers of the requests once all are answered."""
        import torch
        from transformers import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        )
        if self.kind == "transformers, continuous batching":
            answers = self.model.generate_batch(
                prompts, generation_config=config, persistent_manager=True
            )
            assert all(len(answer.generated_tokens) == new for answer in answers.values())
        else:
            with self.press(), torch.no_grad():
                answer = self.model.generate(torch.tensor(prompts), generation_config=config)
            assert answer.shape[1] == len(prompts[0]) + new
        yield from range(len(prompts))

    def press(self) -> Any:
        """Return kvpress's context: Expected Attention, which needs no attention matrix."""
        if self.kind != "kvpress":
            return contextlib.nullcontext()
        from kvpress import ExpectedAttentionPress

        return ExpectedAttentionPress(compression_ratio=1 - self.fraction)(self.model)

    def close(self) -> None:
        """Do nothing: nothing is left running."""


class LlamaCpp:
    """llama.cpp's server in this process, over a GGUF file, with all of the cache in 16 bits."""

    room: int | None = None

    def __init__(self, kind: str, args: argparse.Namespace, budget: dict[str, int]) -> None:
        from xllamacpp import CommonParams, Server

        params = CommonParams()
        params.model.path = str(args.gguf)
        params.n_parallel = max(args.requests)
        params.n_ctx = params.n_parallel * (args.prompt + args.new)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_prompt, params.warmup, params.verbosity = False, False, -1
        self.server = Server(params)

    def run(self, prompts: list[list[int]], new: int) -> Iterator[int]:
        """Generate; yield the number of each request at its first token."""
        first: queue.Queue[int] = queue.Queue()

        def ask(number: int) -> None:
            chunks: list[Any] = []

            def take(chunk: Any) -> bool:
                chunks.append(chunk)
                if len(chunks) == 1:
                    first.put(number)
                return False

            body = {"prompt": prompts[number], "n_predict": new, "ignore_eos": True,
                    "temperature": 0, "cache_prompt": False, "stream": True}  # fmt: skip
            self.server.handle_completions(body, take)
            assert len(chunks) >= new, chunks[-1]

        with ThreadPoolExecutor(len(prompts)) as pool:
            futures = [pool.submit(ask, number) for number in range(len(prompts))]
            for _ in prompts:
                yield first.get(timeout=3600)
            for future in futures:
                future.result()

    def close(self) -> None:
        """Do nothing: the server ends with the process."""


KINDS: dict[str, Any] = {
    "vllm": VLLM, "vllm+h2o": VLLM, "vllm+best": VLLM, f"vllm{CACHED}": VLLM,
    f"vllm+h2o{CACHED}": VLLM, f"vllm+best{CACHED}": VLLM, "h2okv": H2OKV, "h2okv, 4 bits": H2OKV,
    "transformers": Transformers, "transformers, continuous batching": Transformers,
    "kvpress": Transformers, "llama.cpp": LlamaCpp,
}  # fmt: skip


def measure(kind: str, args: argparse.Namespace, prompts: list[list[int]], rows: Any) -> None:
    """Measure one engine; send a row per number of requests to `rows`."""
    entries, all_tokens = round(args.fraction * args.prompt), args.prompt + args.new
    budget = {"heavy": entries // 2, "recent": entries - entries // 2}
    engine = KINDS[kind](kind, args, budget)
    weights = args.gguf.suffixes[-2][1:] if kind == "llama.cpp" else args.dtype
    list(engine.run([prompts[-1][-64:]], 4))
    for count in args.requests:
        start, cpu = time.monotonic(), cpu_seconds()
        first = [time.monotonic() - start for _ in engine.run(prompts[:count], args.new)]
        wall, cpu = time.monotonic() - start, cpu_seconds() - cpu
        assert len(first) == count, "not every request has got a token"
        rows.send({
            "date": datetime.date.today().isoformat(),
            "model": Path(args.model).name, "dtype": weights, "engine": kind,
            "entries": entries if "+" in kind or "h2o" in kind or kind == "kvpress" else all_tokens,
            "memory_mib": args.memory, "prompt": args.prompt, "new": args.new,
            "requests": count, "room_for": engine.room or "",
            "wall_s": round(wall, 1), "cpu_s": round(cpu, 1),
            "new_tokens_per_cpu_s": round(count * args.new / cpu, 2),
            "first_token_median_s": round(statistics.median(first), 1),
            "first_token_last_s": round(max(first), 1),
            "load": round(os.getloadavg()[0], 1), "shared": args.shared,
        })  # fmt: skip
    engine.close()


def write(row: dict[str, Any], out: Path) -> None:
    """Add a row to the table; it replaces an older one of the same setting."""
    rows = []
    if out.exists():
        with out.open(newline="") as file:
            rows = list(csv.DictReader(file))
    rows = [
        old for old in rows if any((old.get(name) or "0") != str(row[name]) for name in SETTING)
    ] + [row]
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, row, restval="0", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Measure all kinds and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf", type=Path, help="what llama.cpp reads")
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--kinds", nargs="+", default=["vllm", "vllm+h2o", "h2okv"], choices=KINDS)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--fraction", type=float, default=0.2)
    parser.add_argument("--memory", type=int, nargs="+", default=[256], help="MiB for keys, values")
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--evict-every", type=int, help="as CacheConfig.evict_every; vLLM only")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if "llama.cpp" in args.kinds and (args.gguf is None or not args.gguf.is_file()):
        parser.error(f"--gguf {args.gguf} is not a file; give the GGUF file for llama.cpp")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from transformers import AutoTokenizer

    try:
        text = args.text.read_text(encoding="utf-8")[: 6 * args.prompt * max(args.requests)]
        ids = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"]
    except (OSError, ValueError) as error:
        parser.error(str(error).splitlines()[0])
    if not 0 <= args.shared < args.prompt:
        parser.error(f"--shared {args.shared} must be below --prompt {args.prompt}")
    beginning, length = ids[: args.shared], args.prompt - args.shared
    starts = range(args.shared, len(ids) - length, length)
    prompts = [beginning + ids[start : start + length] for start in starts][: max(args.requests)]
    if len(prompts) < max(args.requests):
        parser.error(
            f"--text {args.text} has {len(prompts)} prompts of {args.prompt} tokens, and"
            f" --requests asks for {max(args.requests)}; give a longer text"
        )
    context = multiprocessing.get_context("spawn")
    for dtype in args.dtype:
        for memory in args.memory:
            for kind in args.kinds:
                run_args = argparse.Namespace(**(vars(args) | {"dtype": dtype, "memory": memory}))
                rows, sent = context.Pipe(duplex=False)
                process = context.Process(target=measure, args=(kind, run_args, prompts, sent))
                process.start()
                sent.close()  # the pipe ends with the process
                with contextlib.suppress(EOFError):
                    while True:
                        row = rows.recv()
                        print(row, flush=True)
                        write(row, args.out)
                process.join()
                if process.exitcode:
                    raise SystemExit(f"{kind} ended with an error; the rows before it are kept")


if __name__ == "__main__":
    main()
