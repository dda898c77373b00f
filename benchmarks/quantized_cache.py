"""H2O beside transformers' `QuantizedCache` at equal bytes, in CPU seconds.

Each cache reads the same prompt; then they take turns of 8 decode steps. CPU seconds of the process
count, not wall time, so that the machine may be shared; use one thread. `QuantizedCache` has 4 bits
by optimum-quanto or hqq; H2O's budget is the share of the full cache's bytes that it takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import quality
import torch
from transformers import DynamicCache, QuantizedCache
from transformers.utils import is_optimum_quanto_available

import h2okv
from h2okv.prompts.chat_template import encode
from h2okv.records import naming
from h2okv_lab.benchmarking.caches import stored_bytes
from h2okv_lab.tables import CsvFile, check_minimum

COLUMNS = (
    "date", "model", "dtype", "cache", "prompt", "cache_bytes", "prompt_cpu_s", "step_cpu_s",
    "lower_quartile", "upper_quartile", "rounds", "prompt_over_full", "step_over_full",
)  # fmt: skip
STEPS = 8


def compare(options: argparse.Namespace) -> None:
    """Time the caches; write the rows."""
    check_minimum(2, rounds=options.rounds, prompt=options.prompt)
    if not 0 < options.budget <= 1:
        raise ValueError(f"--budget must be above 0 and at most 1, got {options.budget}")
    with naming(options.text, "read", "give a text"):
        text = options.text.read_text("utf-8")[: 20 * options.prompt]
    model, tokenizer = h2okv.load(options.model, dtype=options.dtype)
    ids = torch.tensor([encode(tokenizer, text, model.config.vocab_size)[: options.prompt]])
    backend = "quanto" if is_optimum_quanto_available() else "hqq"
    half = int(options.budget * options.prompt) // 2
    caches: dict[str, Any] = {
        "full": DynamicCache(config=model.config),
        f"QuantizedCache, 4 bits, {backend}": QuantizedCache(backend, model.config, nbits=4),
        f"H2O, {options.budget:.0%}": h2okv.H2OCache(model, heavy=half, recent=half),
    }
    prompts: dict[str, float] = {}
    steps: dict[str, list[float]] = {name: [] for name in caches}

    def forward(name: str, tokens: torch.Tensor) -> float:
        attention = "h2o" if name.startswith("H2O") else "sdpa"
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)
        began = time.process_time()
        with torch.no_grad():
            model(tokens, past_key_values=caches[name], logits_to_keep=1)
        return time.process_time() - began

    for name in caches:
        prompts[name] = forward(name, ids)
        forward(name, ids[:, :1])  # warm-up
        print(name, f"{prompts[name]:.2f} s", flush=True)
    for _ in range(options.rounds):
        for name in caches:
            seconds = [forward(name, ids[:, i : i + 1]) for i in range(STEPS)]
            steps[name].append(statistics.fmean(seconds))
    file = CsvFile(options.csv, COLUMNS)
    for name, cache in caches.items():
        lower, median, upper = statistics.quantiles(steps[name], n=4)
        ratios = [a / b for a, b in zip(steps[name], steps["full"], strict=True)]
        stored = cache.nbytes if name.startswith("H2O") else stored_bytes(cache)
        row = {
            "date": time.strftime("%Y-%m-%d"),
            "model": options.model,
            "dtype": options.dtype,
            "cache": name,
            "prompt": options.prompt,
            "cache_bytes": stored,
            "prompt_cpu_s": f"{prompts[name]:.3f}",
            "step_cpu_s": f"{median:.4f}",
            "lower_quartile": f"{lower:.4f}",
            "upper_quartile": f"{upper:.4f}",
            "rounds": options.rounds,
            "prompt_over_full": f"{prompts[name] / prompts['full']:.2f}",
            "step_over_full": f"{statistics.median(ratios):.2f}",
        }
        file.append(row)
        print(*row.values(), flush=True)
    file.close()


def main() -> None:
    """Run what the command line asks for."""
    parser = quality.parser_of(
        __doc__, "quantized_cache.py --text moby_dick.txt --csv quantized_cache.csv"
    )
    parser.add_argument("--text", type=Path, required=True, help="a book")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt (1024)")
    parser.add_argument("--budget", type=float, default=0.3, help="H2O's share of it (0.3)")
    parser.add_argument("--rounds", type=int, default=8, help="of 8 steps each (8)")
    quality.run_alone(parser, compare)


if __name__ == "__main__":
    main()
