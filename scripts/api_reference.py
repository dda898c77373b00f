"""Writes docs/api.md from the docstrings of the public names: python scripts/api_reference.py."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import h2okv

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = """# API reference

What `import h2okv` gives, made from the docstrings by `python scripts/api_reference.py`. The pages
on [policies](policies.md), [positions](positions.md) and the [engine](engine.md) say more.
"""
LISTS = ("Args", "Attributes", "Raises")
SECTIONS = (*LISTS, "Returns", "Yields", "Example", "Examples")


def page() -> str:
    """The whole page."""
    return HEAD + "".join(entry(name, getattr(h2okv, name)) for name in h2okv.__all__)


def entry(name: str, thing: Any) -> str:
    """A public name, and the methods that it shows itself."""
    text = f"\n## `{name}`\n\n```python\n{name}{signature(thing)}\n```\n\n{prose(thing)}"
    if not inspect.isclass(thing):
        return text
    for own, member in members(thing):
        call = "" if isinstance(member, property) else signature(member)
        text += f"\n### `{name}.{own}`\n\n"
        text += (f"```python\n{own}{call}\n```\n\n" if call else "") + prose(member)
    return text


def members(owner: type) -> list[tuple[str, Any]]:
    """Public methods and properties of a class that are h2okv's own and have a docstring."""
    found = []
    for name in dir(owner):
        member = inspect.getattr_static(owner, name)
        member = getattr(member, "__func__", member)  # of a class method
        is_shown = isinstance(member, property) or inspect.isfunction(member)
        source = getattr(getattr(member, "fget", member), "__module__", "")
        if not name.startswith("_") and is_shown and str(source).startswith("h2okv"):
            found.append((name, member))
    return [(name, member) for name, member in found if member.__doc__]


def signature(thing: Any) -> str:
    """The arguments as written, without what every method has first."""
    try:
        text = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return ""
    text = re.sub(r"\((self|cls)(, )?", "(", text).replace("'", "")
    if len(text) < 90:
        return text
    lines = re.sub(r", (?=[*\w]+:)", ",\n    ", text).replace("(", "(\n    ", 1)
    return re.sub(r"\)( -> [^\n]*)?$", r",\n)\1", lines)


def prose(thing: Any) -> str:
    """A Google docstring as Markdown: sections become headings, arguments a list."""
    lines, part = [], ""
    for line in (inspect.getdoc(thing) or "").replace("``", "`").splitlines():
        heading = line.rstrip(":")
        if line.endswith(":") and heading in SECTIONS:
            part = heading
            lines += [f"**{part}**", ""]
        elif part in LISTS and (argument := re.match(r"    (\*{0,2}\w+): (.*)", line)):
            lines.append(f"- `{argument[1]}`: {argument[2]}")
        elif part in LISTS:
            lines.append(f"  {line.strip()}".rstrip())
        else:  # an example stays indented, which Markdown shows as code
            lines.append(line.removeprefix("    ") if part else re.sub("::$", ":", line))
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
