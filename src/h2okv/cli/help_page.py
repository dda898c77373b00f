"""How `--help` shows a command: its panels in order, and each option's type and default."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any, get_args

from typer import rich_utils
from typer.models import ArgumentInfo, OptionInfo

PANELS = ("Model", "Cache", "Text", "Sampling", "Output", "Offload", "Server", "More")
_TEXT = (
    "input file image text data prefix system references prompts raw pin load"
    " tokens new_tokens prompt_tokens texts windows length lengths depths every limit too_long"
    " needle question answer tries compression contexts batches"
)
_OUTPUT = "output out export csv plot compare as_json"
_SERVER = "called host port max_body timeout drain cors_origin log_requests max_waiting"
_PANEL_OF = {
    name: panel
    for panel, names in (
        ("Model", "model shape dtypes"),
        ("Cache", "runners cache"),
        ("Text", _TEXT),
        ("Output", _OUTPUT),
        ("Server", _SERVER),
    )
    for name in names.split()
}

_LIST, _LISTED = "A,B", "Comma-separated: "
_NAMES = {
    "TOKENS": (
        "max_new_tokens max_prompt_tokens max_prefill_tokens tokens new_tokens prompt_tokens"
        " length every"
    ),
    "TOKENS|%": "budget",
    "FRACTION": "top_p min_p recommend",
    "SIZE": "memory max_body prefix_cache",
    "SECONDS": "timeout drain",
    "BITS": "weight_bits",
    _LIST: "contexts batches lengths depths runners dtypes",
    "PLACES": "weight_placement",
    "MODEL": "name model",
    "DTYPE": "dtype_name",
    "POLICY": "policy",
    "CACHE": "cache",
    "WORD": "protocol compression too_long",
    "ROLES": "pin",
    "NAME": "called",
    "full": "compare",
    "ADDRESS": "host",
    "PORT": "port",
    "ORIGIN": "cors_origin",
    "SHAPE": "shape",
}
_TYPE_OF = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_TYPES = {bool: "", int: "N", float: "NUMBER", str: "TEXT", Path: "FILE"}


def describe(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter with the panel, the type and the default that its help shows."""
    info = copy.copy(parameter.default)
    if isinstance(info, ArgumentInfo):
        info.metavar = info.metavar or parameter.name.upper()
    elif info.metavar is None:
        info.rich_help_panel = info.rich_help_panel or _PANEL_OF.get(parameter.name, "More")
        info.help = (info.help or "").removesuffix(".")
        info.metavar = _kind(parameter.name, parameter.annotation, info.help)
        info.help = info.help.removeprefix(_LISTED)
        value = info.default
        if not isinstance(value, bool) and value not in (None, "", ...):
            info.help += f" ({f'{value:g}' if isinstance(value, float) else value})"
        info.show_default = False
    if isinstance(info, OptionInfo) and not info.param_decls:
        # Typer 0.27 would take the flag's letters from the metavar: --POLICY.
        flag = parameter.name.replace("_", "-")
        is_switch = isinstance(info.default, bool)
        info.param_decls = (f"--{flag}/--no-{flag}" if is_switch else f"--{flag}",)
    return parameter.replace(default=info)


def order(parameter: inspect.Parameter) -> int:
    """Return the place of a parameter's panel."""
    panel = getattr(parameter.default, "rich_help_panel", None)
    return PANELS.index(panel.partition(" (")[0]) if panel else 0


def _kind(name: str, annotation: Any, help: str) -> str:
    """Return what an option's value is called."""
    types = [annotation, *get_args(annotation)]
    types += [inner for kind in types for inner in get_args(kind)]
    plain = next((kind for kind in types if kind in _TYPES), str)
    if plain is bool:
        return ""
    if plain is Path:
        return "FOLDER" if "older" in help else "FILE"
    return _LIST if help.startswith(_LISTED) else _TYPE_OF.get(name, _TYPES[plain])


def show_types(command: Any) -> None:
    """Let a command, or those of a group, show the described types, and --help last."""
    for subcommand in getattr(command, "commands", {}).values():
        show_types(subcommand)
    narrow: Any = (0, 1, 0, 0)
    rich_utils.STYLE_OPTIONS_TABLE_PADDING = narrow
    help_option = command.get_help_option(command.context_class(command))
    if help_option is not None and command.params:
        help_option.rich_help_panel = "More"
    for param in (*command.params, help_option):
        # Typer would show the Python type; an argument's name says enough.
        is_option = getattr(param, "param_type_name", "") == "option"
        param.display_type_rich = lambda ctx, text=is_option and param.metavar or "": text
