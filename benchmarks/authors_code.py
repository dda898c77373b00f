"""The authors' own code beside ours, for `gpu_first.py`: OPT-6.7B of random weights, one GPU.

`--flexgen` of that script names the folder ``h2o_flexgen`` of the authors' repository
(github.com/FMInference/H2O, commit ac75c2a). It runs as it is, in a process of its own, with the
arguments of its ``benchmark/h2o/h2o_suite.py`` and the weights that it calls dummies. Only its
tokenizer, which would be downloaded, is replaced: its prompt becomes a row of equal tokens.

    python benchmarks/authors_code.py FOLDER --model facebook/opt-6.7b --path _DUMMY_ ...
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_timing import Bench, NeedsCudaError
from transformers import AutoModelForCausalLM, DynamicCache, OPTConfig

import h2okv
from h2okv.cache import CACHE
from h2okv.config import CacheConfig

Setting = tuple[int, int, int]
SETTINGS = ((512, 32, 4), (1024, 1024, 4))  # prompt, new tokens, sequences
# Hidden size, that of the MLP, heads, layers, vocabulary: of OPT-6.7B, and to try the script.
SHAPE, TINY_SHAPE = (4096, 16384, 32, 32, 50272), (64, 96, 4, 2, 300)
HEAVY = 0.1  # of the prompt, and as much for the newest tokens: 20 %
FLAGS = "--model facebook/opt-6.7b --path _DUMMY_ --percent 100 0 100 0 100 0 --overlap False"
_SECONDS = re.compile(r"(prefill|decode) latency: ([\d.]+) s")


class _Tokenizer:
    """Stands for OPT's, where nothing can be downloaded."""

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> _Tokenizer:
        return cls()

    def __call__(self, prompts: Sequence[str], max_length: int, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[[5] * max_length for _ in prompts])


def run_authors(folder: str, words: Sequence[str]) -> None:
    """Run the authors' command in this process, with `_Tokenizer`."""
    sys.path.insert(0, folder)
    flex_opt = importlib.import_module("flexgen.flex_opt")
    flex_opt.AutoTokenizer = _Tokenizer  # type: ignore[attr-defined]
    parser = argparse.ArgumentParser()
    flex_opt.add_parser_arguments(parser)
    try:
        flex_opt.run_flexgen(parser.parse_args(words))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # its threads would wait for ever


def seconds_of_authors(folder: Path, words: Sequence[str]) -> tuple[float, float]:
    """Return the seconds of a prompt and of the steps after it, as the authors' command logs them.

    Raises:
        RuntimeError: It failed; with its last line.
    """
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        command = [sys.executable, __file__, str(folder), *words, "--log-file", str(log)]
        command += ["--offload-dir", scratch]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(lines[-1])
        seconds = dict(_SECONDS.findall(log.read_text("utf-8")))
    return float(seconds["prefill"]), float(seconds["decode"])


def seconds_of_ours(
    bench: Bench, model: Any, config: CacheConfig | None, setting: Setting
) -> tuple[float, float]:
    """Return the seconds of a prompt and of the steps after it, as `generate` runs them."""
    length, new, batch = setting
    ids = torch.full((batch, length), 5, device=bench.device)

    def run(count: int) -> float:
        cache: Any = DynamicCache() if config is None else h2okv.H2OCache.from_config(model, config)
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        return bench.clock.seconds(partial(model.generate, ids, **options, **{CACHE: cache}))

    with nullcontext() if config is None else h2okv.enable(model):  # which records steps
        run(min(new, 16))
        prompt = run(1)
        return prompt, run(new) - prompt


def seconds_of(bench: Bench, name: str, setting: Setting) -> tuple[float, float]:
    """Return the seconds of the authors' code for the full cache or H2O."""
    if not bench.is_gpu:
        raise NeedsCudaError
    if bench.args.flexgen is None:
        raise ValueError("--flexgen FOLDER names the authors' h2o_flexgen")
    length, new, batch = setting
    words = f"{FLAGS} --prompt-len {length} --gen-len {new} --gpu-batch-size {batch}"
    words += f" --hh-ratio {HEAVY} --hh-all" * (name == "h2o")
    return seconds_of_authors(bench.args.flexgen, words.split())


def part_k(bench: Bench) -> None:
    """OPT-6.7B beside the authors' FlexGen: prompts and steps, with the full cache and 20 %."""
    tiny = bench.args.tiny
    settings, baseline = ((40, 4, 2),) if tiny else SETTINGS, {}

    def measure(run: Callable[..., tuple[float, float]], prefix: str = "") -> None:
        for setting, name in product(settings, ("full", "h2o")):
            length, new, batch = setting
            label = f"{prefix}{name}"
            cells = {"layers": layers, "batch": batch, "tokens": length + new}
            measured = bench.attempt(
                "beside the authors' code", label, partial(run, name, setting), **cells
            )
            for timed, seconds in zip(("prompt", "steps"), measured or (), strict=False):
                first = baseline.setdefault((setting, name, timed), seconds if prefix else None)
                row: dict[str, Any] = {"unit": "s", "median": seconds, "rounds": 1, **cells}
                if first:
                    row |= {"against": f"authors, {name}", "ratio": seconds / first}
                bench.row(f"{timed} beside the authors' code", label, **row)
            bench.free()

    hidden, inner, heads, layers, vocabulary = TINY_SHAPE if tiny else SHAPE
    measure(partial(seconds_of, bench), "authors, ")  # while no other model is on the device
    shape = OPTConfig(
        hidden_size=hidden, word_embed_proj_dim=hidden, ffn_dim=inner, num_attention_heads=heads,
        num_hidden_layers=layers, vocab_size=vocabulary,
    )  # fmt: skip
    with torch.device(bench.device):
        dtype = torch.float32 if tiny else torch.float16
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype).eval()
    # As many entries as theirs, also where the commands would keep more of a short prompt.
    configs = {"full": None, "h2o": CacheConfig("h2o", heavy=HEAVY, recent=HEAVY, min_tokens=0)}
    measure(lambda name, setting: seconds_of_ours(bench, model, configs[name], setting))


if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1], "flexgen", "flex_opt.py").is_file():
        shown = " ".join(sys.argv[1:2]) or "nothing"
        print(f"FOLDER must be the authors' h2o_flexgen, got {shown}", file=sys.stderr)
        sys.exit(2)
    run_authors(sys.argv[1], sys.argv[2:])
