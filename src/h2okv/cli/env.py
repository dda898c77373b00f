"""`h2okv env`: what is installed, and what would run on it."""

from __future__ import annotations

import importlib.metadata
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h2okv.cli.args import ModelOptions, model_options
from h2okv.console import format_table, write_text

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


@model_options(without=("dtype",))
def env(
    model: ModelOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show what is installed, and what would run attention and why.

    H2OKV_OPS=plain or triton overrides the choice.

    Examples:

        h2okv env

        h2okv env --model meta-llama/Llama-3.2-1B

        H2OKV_OPS=plain h2okv env --json
    """
    import torch

    from h2okv.ops import dispatch

    where = model.device
    config = model.describe().config
    size, groups = _heads(config)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    chosen = {
        str(dtype)[6:]: dispatch.operations(where, dtype, size, size, groups) for dtype in dtypes
    }
    facts = _facts(where)
    if as_json:
        shown = [
            {"device": str(where), "dtype": dtype, "used": own.name, "why": own.why}
            for dtype, own in chosen.items()
        ]
        write_text(json.dumps({**facts, "head_size": size, "groups": groups, "used": shown}) + "\n")
        return 0
    write_text(_lines(facts) + f"\nHeads of {size}, {groups} for each KV head, on {where}:\n\n")
    headings = ("dtype", "used", "why")
    rows = [(dtype, own.name, own.why) for dtype, own in chosen.items()]
    write_text(format_table(headings, rows, left=headings))
    return 0


def _heads(config: PreTrainedConfig) -> tuple[int, int]:
    """Head size, and query heads of a KV head."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return size, heads // (getattr(text, "num_key_value_heads", None) or heads)


def _facts(device: torch.device) -> dict[str, Any]:
    import torch

    from h2okv.ops import dispatch
    from h2okv.provenance import environment

    known = environment(device)
    return {
        "h2okv": known["version"],
        "python": known["python"],
        "torch": known["torch"],
        "transformers": known["transformers"],
        "triton": _version("triton"),
        "machine": known["machine"],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": known["device"] if device.type == "cuda" else None,
        dispatch.VARIABLE: dispatch.wanted(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(facts: dict[str, Any]) -> str:
    return "".join(
        f"{name + ':':<15} {'none' if value is None else value}\n" for name, value in facts.items()
    )
