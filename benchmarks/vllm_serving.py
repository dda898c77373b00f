"""vLLM with H2O beside vLLM with all of the cache: requests at once, and tokens per CPU second.

Runs in the environment of `make vllm-test`, an engine of each kind after the other:

    .venv-vllm/bin/python benchmarks/vllm_serving.py --model MODEL --text TEXT

The same prompts, greedy, with the same memory for keys and values. What is counted is the CPU time
of all of vLLM's processes, for machines that others use too; wall time is beside it.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "vllm_serving.csv"
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def cpu_seconds() -> float:
    """Of this process and all that it started."""
    import psutil

    own = psutil.Process()
    times = [one.cpu_times() for one in (own, *own.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def measure(kind: str, asked: argparse.Namespace, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """One engine: a row for each number of requests."""
    from vllm import LLM, SamplingParams

    entries = round(asked.fraction * asked.prompt)
    setting = {"heavy": entries // 2, "recent": entries - entries // 2}
    llm = LLM(
        model=asked.model, dtype=asked.dtype, max_model_len=asked.prompt + asked.new,
        max_num_batched_tokens=2 * (asked.prompt + asked.new), max_num_seqs=max(asked.requests),
        enforce_eager=True, enable_prefix_caching=False, disable_log_stats=True,
        kv_cache_memory_bytes=asked.memory << 20,
        additional_config={"h2okv": setting} if kind == "h2o" else {},
    )  # fmt: skip
    config = llm.llm_engine.vllm_config
    blocks = config.cache_config.num_gpu_blocks - 1
    each = -(-(asked.prompt + asked.new) // config.cache_config.block_size) if kind == "full" else 1
    rows = []
    llm.generate([{"prompt_token_ids": prompts[0][:64]}], SamplingParams(max_tokens=4))
    for count in asked.requests:
        params = SamplingParams(
            temperature=0, max_tokens=asked.new, min_tokens=asked.new, ignore_eos=True
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts[:count]]
        start, cpu = time.monotonic(), cpu_seconds()
        llm.generate(given, params, use_tqdm=False)
        wall, cpu = time.monotonic() - start, cpu_seconds() - cpu
        rows.append({
            "date": datetime.date.today().isoformat(),
            "model": Path(asked.model).name, "dtype": asked.dtype, "cache": kind,
            "entries": entries if kind == "h2o" else asked.prompt + asked.new,
            "memory_mib": asked.memory, "prompt": asked.prompt, "new": asked.new,
            "requests": count, "room_for": blocks // each,
            "wall_s": round(wall, 1), "cpu_s": round(cpu, 1),
            "new_tokens_per_cpu_s": round(count * asked.new / cpu, 2),
            "load": round(os.getloadavg()[0], 1),
        })  # fmt: skip
        print(rows[-1], flush=True)
    llm.llm_engine.engine_core.shutdown()
    return rows


def main() -> None:
    """Measures both kinds and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--fraction", type=float, default=0.2)
    parser.add_argument("--memory", type=int, default=256, help="MiB for keys and values")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from transformers import AutoTokenizer

    text = asked.text.read_text(encoding="utf-8")[: 6 * asked.prompt * max(asked.requests)]
    ids = AutoTokenizer.from_pretrained(asked.model)(text)["input_ids"]
    starts = range(0, len(ids) - asked.prompt, asked.prompt)
    prompts = [ids[start : start + asked.prompt] for start in starts][: max(asked.requests)]
    assert len(prompts) == max(asked.requests), "the text is too short"
    rows = [row for kind in ("full", "h2o") for row in measure(kind, asked, prompts)]
    with asked.out.open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
