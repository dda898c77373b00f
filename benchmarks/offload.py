"""Weights on the disk: h2okv's engine against accelerate's disk offload, and under a memory cap.

With ``--model`` of that model; else a Llama with random bf16 weights of about 0.75 B parameters
(26 layers, hidden 1536, 12 heads of 128, 4 KV heads, MLP 4096, vocabulary 32000) is written to a
scratch folder and deleted again.
Every run is a separate process, contestants take turns, the page cache is dropped before every pass
of accelerate and after every read of h2okv, and the figures are medians. In this order:

- equal: batch 32, prompt 128, budget 20 %. A decode step of h2okv (under the data limit) against
  one of accelerate (which does not load under it), of reading alone and of computing alone; the
  bytes that a pass reads. With the full cache's policy both must make nearly the same tokens (bf16
  products of two libraries are not the same to the last bit), or there is no figure.
- best: prompt 1024, 256 new tokens under the data limit: the whole job with as many sequences as
  h2okv's planner finds room for, with h2o and with the full cache, and with accelerate at the full
  cache's batch. accelerate has no limit and makes fewer tokens; its time for all of them is the
  prompt's plus that number of median steps. The plan's forecast is beside what came of it.

numpy's and scipy's own threads, which nothing here uses, would take 84 MB of the data limit; all
contestants run with OPENBLAS_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from record import Target, environment, progress, report, rows_for
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from h2okv.assets import bundled_model_path
from h2okv.models.loading import resolve_model

CHILD = Path(__file__).with_name("offload_child.py")
RESULTS = Path(__file__).parent / "results" / "offload.csv"
AGREEMENT = 0.9
SHARE = 0.2
ACCELERATE_STEPS = 16


def make_checkpoint(args: argparse.Namespace, folder: str) -> int:
    """Write the model; return its number of parameters."""
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        vocab_size=args.vocabulary,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(bundled_model_path()).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


class Runs:
    """Runs of contestants with shared settings."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self._common = {
            "folder": folder, "vocabulary": args.vocabulary, "layers": args.layers,
            "tied": args.tied, "threads": args.threads, "policy": "h2o", "rows": None, "limit": 0,
        }  # fmt: skip

    def __call__(self, kind: str, label: str, **setting: Any) -> dict[str, Any]:
        """Run one contestant in a separate process."""
        progress(label)
        done = subprocess.run(
            [sys.executable, str(CHILD)],
            input=json.dumps({**self._common, "kind": kind, **setting}),
            capture_output=True,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        if done.returncode:
            progress("")
            raise SystemExit(f"{label} failed:\n{done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result


def step_seconds(run: dict[str, Any]) -> float:
    """Return the median of the decode steps: all passes but those that read prompts."""
    passes = [seconds for seconds, _ in run["passes"]]
    return statistics.median(passes[1:])


def agreement(first: list[list[int]], second: list[list[int]]) -> float:
    """Share of sequences whose first tokens are the same."""
    return statistics.mean(a[0] == b[0] for a, b in zip(first, second, strict=True))


def equal(args: argparse.Namespace, run: Runs) -> list[dict[str, Any]]:
    """Measure a step at equal batch, and its parts."""
    setting = {"batch": args.batch, "prompt": args.prompt, "new": args.steps, "rows": args.batch}
    reference = run("accelerate", "checking", **{**setting, "new": 1})
    ours = run("h2okv", "checking", **{**setting, "new": 1}, policy="full", disk=True)
    share = agreement(ours["tokens"], reference["tokens"])
    if share < AGREEMENT:
        raise SystemExit(f"only {share:.0%} of the first tokens agree with accelerate's: no figure")
    steps: dict[str, list[float]] = {"h2o": [], "accelerate": []}
    bounds: dict[str, list[float]] = {"h2o": [], "the longer part": []}
    reads: dict[str, list[float]] = {"h2o": [], "streamed": []}
    for number in range(args.rounds):
        label = f"equal batch, round {number + 1} of {args.rounds}: "
        streamed = run("h2okv", label + "h2okv", **setting, limit=args.limit, disk=True)
        other = run("accelerate", label + "accelerate", **setting)
        reading = run("reading", label + "reading alone", **setting)
        computing = run("h2okv", label + "computing alone", **setting)
        steps["h2o"].append(step_seconds(streamed))
        steps["accelerate"].append(step_seconds(other))
        bounds["h2o"].append(step_seconds(streamed))
        bounds["the longer part"].append(max(step_seconds(reading), step_seconds(computing)))
        reads["h2o"].append(statistics.median(read for _, read in streamed["passes"][1:]))
        reads["streamed"].append(streamed["streamed_bytes"])
    setting_columns = columns_of(args, args.batch, args.prompt)
    return [
        *rows_for("offload: step", "s", steps, [Target("accelerate", 1.8, True)], setting_columns),
        *rows_for(
            "offload: step, parts", "s", bounds, [Target("the longer part", 1.25)], setting_columns
        ),
        *rows_for(
            "offload: bytes of a pass", "B", reads, [Target("streamed", 1.02)], setting_columns
        ),
    ]


def best(args: argparse.Namespace, run: Runs) -> list[dict[str, Any]]:
    """Measure the whole job under the cap, in seconds per new token."""
    long = {"prompt": args.long_prompt, "new": args.new, "limit": args.limit}
    offered = {**long, "batch": args.jobs, "one_batch": True}
    h2o = run("h2okv", "best batch: h2o", **offered)
    full = run("h2okv", "best batch: full", **offered, policy="full")
    few = {**long, "limit": 0, "new": min(args.new, ACCELERATE_STEPS + 1)}
    other = run("accelerate", "best batch: accelerate", **few, batch=full["rows"])
    passes = [seconds for seconds, _ in other["passes"]]
    other_seconds = passes[0] + (args.new - 1) * statistics.median(passes[1:])
    tokens = {"h2o": sum(map(len, h2o["tokens"])), "full": sum(map(len, full["tokens"]))}
    samples = {
        "h2o": [h2o["seconds"] / tokens["h2o"]],
        "full": [full["seconds"] / tokens["full"]],
        "accelerate": [other_seconds / (other["rows"] * args.new)],
    }
    decode = {
        "h2o": [step_seconds(h2o) / h2o["rows"]],
        "full": [step_seconds(full) / full["rows"]],
        "accelerate": [statistics.median(passes[1:]) / other["rows"]],
    }
    print(
        f"rows under way: h2o {h2o['rows']}, full {full['rows']}; predicted tokens/s:"
        f" h2o {h2o['predicted']:.2f} (real {1 / samples['h2o'][0]:.2f}),"
        f" full {full['predicted']:.2f} (real {1 / samples['full'][0]:.2f}); data of the process:"
        f" {h2o['data_bytes'] / 1e6:.0f} and {full['data_bytes'] / 1e6:.0f} MB of"
        f" {args.limit / 1e6:.0f}"
    )
    forecast = {"h2o": [1 / samples["h2o"][0]], "forecast": [h2o["predicted"]]}
    setting_columns = columns_of(args, h2o["rows"], args.long_prompt)
    targets = [Target("full", 3.0, True), Target("accelerate", 10.0, True)]
    return [
        *rows_for("offload: job, s per token", "s", samples, targets, setting_columns),
        *rows_for("offload: step, s per token", "s", decode, targets[:1], setting_columns),
        *rows_for(
            "offload: job and forecast", "tokens/s", forecast, [Target("forecast")], setting_columns
        ),
    ]


def columns_of(args: argparse.Namespace, batch: int, prompt: int) -> dict[str, Any]:
    """Return the columns that describe the run."""
    return {
        **environment(),
        "threads": args.threads,
        "model": f"{args.label}, {args.limit // 10**6} MB",
        "dtype": "bf16", "kv_heads": args.kv_heads, "batch": batch, "prompt": prompt,
        "budget": SHARE,
    }  # fmt: skip


def main() -> None:
    """Run the measurements and add their rows to the CSV file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measurements = {"equal": equal, "best": best}
    parser.add_argument("--parts", nargs="+", choices=measurements, default=list(measurements))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--limit", type=int, default=900_000_000, help="bytes of data")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--long-prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=64, help="sequences to choose a batch for")
    for size_name, size in (
        ("hidden", 1536), ("layers", 26), ("heads", 12), ("kv-heads", 4), ("intermediate", 4096),
        ("vocabulary", 32_000),
    ):  # fmt: skip
        parser.add_argument(f"--{size_name}", type=int, default=size)
    parser.add_argument("--model", help="a folder or smollm2, in place of random weights")
    parser.add_argument("--scratch", help="where the model is written (1.6 GB)")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.scratch is not None:
        Path(args.scratch).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        args.label, args.tied = f"llama {args.layers} x {args.hidden}", False
        if args.model:
            try:
                folder = resolve_model(args.model)
                config = AutoConfig.from_pretrained(folder)
            except (OSError, ValueError) as error:
                parser.error(str(error).splitlines()[0])
            args.label, args.tied = args.model, config.tie_word_embeddings
            args.layers, args.vocabulary = config.num_hidden_layers, config.vocab_size
            args.kv_heads = config.num_key_value_heads
        else:
            print(f"{make_checkpoint(args, folder) / 1e9:.3f} B parameters", flush=True)
        run = Runs(args, folder)
        for name in args.parts:
            rows = measurements[name](args, run)
            progress("")
            report(args.csv, rows)


if __name__ == "__main__":
    main()
