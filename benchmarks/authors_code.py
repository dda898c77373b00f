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
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_timing import Bench, NeedsCudaError
from transformers import AutoModelForCausalLM, DynamicCache, OPTConfig

import h2okv
from h2okv.cache import CACHE
from h2okv.config import CacheConfig

SETTINGS = ((512, 32, 4), (1024, 1024, 4))  # prompt, new tokens, sequences
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


def seconds_of_ours(bench: Bench, model: Any, config: CacheConfig | None, setting: Any) -> Any:
    """Return the seconds of a prompt and of the steps after it, with `generate`; once warm."""
    length, new, batch = setting
    ids = torch.full((batch, length), 5, device=bench.device)
    model.set_attn_implementation("sdpa" if config is None else "h2o")

    def run(count: int) -> float:
        cache: Any = DynamicCache() if config is None else h2okv.H2OCache.from_config(model, config)
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        return bench.clock.seconds(partial(model.generate, ids, **options, **{CACHE: cache}))

    run(min(new, 16))
    prompt = run(1)
    return prompt, run(new) - prompt


def part_k(bench: Bench) -> None:
    """OPT-6.7B beside the authors' FlexGen: prompts and steps, with the full cache and 20 %."""
    folder: Path | None = bench.args.flexgen
    tiny = bench.args.tiny
    sizes = {"hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    large = {"hidden_size": 4096, "ffn_dim": 16384, "num_attention_heads": 32}
    large |= {"num_hidden_layers": 32}
    shape = OPTConfig(
        **(sizes if tiny else large), word_embed_proj_dim=64 if tiny else 4096,
        vocab_size=300 if tiny else 50272,
    )  # fmt: skip
    dtype = torch.float32 if tiny else torch.float16
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype).eval()
    h2o = CacheConfig("h2o", heavy=HEAVY, recent=HEAVY)

    def authors(setting: Any, more: str) -> tuple[float, float]:
        if not bench.is_gpu:
            raise NeedsCudaError
        if folder is None:
            raise ValueError("--flexgen FOLDER names the authors' h2o_flexgen")
        length, new, batch = setting
        sizes = f"--prompt-len {length} --gen-len {new} --gpu-batch-size {batch}"
        return seconds_of_authors(folder, f"{FLAGS} {sizes} {more}".split())

    for setting in ((40, 4, 2),) if tiny else SETTINGS:
        baseline: dict[str, float] = {}
        cases: dict[str, Callable[[], tuple[float, float]]] = {
            "authors, full": partial(authors, setting, ""),
            "authors, h2o": partial(authors, setting, f"--hh-ratio {HEAVY} --hh-all"),
            "full": partial(seconds_of_ours, bench, model, None, setting),
            "h2o": partial(seconds_of_ours, bench, model, h2o, setting),
        }
        for name, run in cases.items():
            length, new, batch = setting
            cells = {"layers": shape.num_hidden_layers, "batch": batch, "tokens": length + new}
            measured = bench.attempt("beside the authors' code", name, run, **cells)
            for measure, seconds in zip(("prompt", "steps"), measured or (), strict=False):
                against = "authors, h2o" if "h2o" in name else "authors, full"
                baseline |= {f"{measure} {name}": seconds}
                row: dict[str, Any] = {"unit": "s", "median": seconds, "rounds": 1, **cells}
                if first := baseline.get(f"{measure} {against}"):
                    row |= {"against": against, "ratio": seconds / first}
                bench.row(f"{measure} beside the authors' code", name, **row)
            bench.free()


if __name__ == "__main__":
    run_authors(sys.argv[1], sys.argv[2:])
