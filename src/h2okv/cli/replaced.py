"""Options of earlier versions, and what says the same now: one table for all commands."""

from __future__ import annotations

import re
from collections.abc import Sequence

# By the option, or the command and the option. {} stands for the value that the user gave.
_REPLACED = {
    "--heavy": "--budget with heavy+recent, such as --budget 64+64",
    "--recent": "--budget with heavy+recent, such as --budget 64+64",
    "--heavy-fraction": "--budget with heavy+recent, such as --budget 15%+5%",
    "--sink": "--cache sink={}",
    "--scoring": "--cache scoring={}",
    "--decay": "--cache scoring=decay:{}",
    "--positions": "--cache positions={}",
    "--prefill-chunk": "--cache every={} (evict_every)",
    "--evict-every": "--cache every={}",
    "--kv-bits": "--cache bits={}",
    "--layer-budgets": "--cache layers={}",
    "--seed": "--cache random:20%,seed={}",
    "--device": "the environment variable H2OKV_DEVICE={}",
    "--gpu-memory": "--memory {}",
    "--batch-size": "--batch {}",
    "--actors": "--replicas {}",
    "--layers": "the layers of a shape: --shape llama-3-8b,layers={}",
    "--save-every": "--every, a tenth of it",
    "--steps": "nothing: a measurement takes 8 decode steps",
    "--max-prefill-time-fraction": "a smaller --max-prefill-tokens",
    "--max-batch": "--memory alone, which finds the largest batch",
    "--min-p": "the model's generation config, or min_p of h2okv.SamplingParams",
    "--caches": "--runners {}",
    "--threads": "the environment variable OMP_NUM_THREADS={}",
    "needle --seed": "seeds in a file of h2okv eval sweep",
    "recall --max-new-tokens": "max_new_tokens in a file of h2okv eval sweep",
    "layers --tokens": "--text with a shorter text",
    "list --json": "h2okv models path for one folder",
    "plan --serve": "h2okv serve --dry-run",
    "plan --prompt": "--prompt-tokens {}",
    "plan --gen": "--new-tokens {}",
    "--keep-pages": "nothing: streamed pages are always dropped from the page cache",
    "view --layer": "the page's choice of a layer",
    "view --new-tokens": "the page's field for new tokens",
    "view --head": "the page's choice of a head",
    "summarize --template": "template in a file of h2okv eval sweep",
    "summarize --stemmer": "stemmer in a file of h2okv eval sweep",
    "--converted": "the environment variable XDG_CACHE_HOME, the folder of all that is kept",
    "--cache-folder": "another folder for --output, where the cache's file is written",
    **dict.fromkeys(
        ("--top-p", "--top-k", "--repetition-penalty", "--stop"),
        "the model's generation config, or a field of a line of h2okv batch --input",
    ),
}


_PLACEMENT = re.compile(r"(auto|device|cpu|file)(=\d.*)?")


def check_placement(text: str) -> None:
    """Raise ValueError for a place of the cache, which --cache of batch jobs was."""
    if _PLACEMENT.fullmatch(text):
        raise ValueError(f"--cache {text} is gone; give --cache-placement {text}")


def replacement(command: str, option: str, args: Sequence[str]) -> str | None:
    """Return the message for an option that a command no longer has, if it ever had it."""
    new = _REPLACED.get(f"{command.rpartition(' ')[2]} {option}") or _REPLACED.get(option)
    if new is None:
        return None
    value = re.search(rf"(?:^|\0){re.escape(option)}[=\0]([^\0]*)", "\0".join(args))
    return f"{option} is gone; give {new.format(value[1] if value else '...')}"
