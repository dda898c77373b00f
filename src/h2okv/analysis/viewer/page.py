"""The page's files put together into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("data.js", "pane.js", "map.js", "app.js")


def build_page(content: dict[str, Any]) -> str:
    """Makes the page, with its style, its scripts and what it shows inside.

    Args:
        content: a JSON object: ``choice``, and for an export ``reading`` and ``traces``.

    Returns:
        HTML that asks for nothing from elsewhere.
    """
    page = (_FOLDER / "index.html").read_text(encoding="utf-8")
    scripts = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    # "</script" in a text would end the script that holds it.
    data = json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    for mark, part in (
        ("/*STYLE*/", (_FOLDER / "style.css").read_text(encoding="utf-8")),
        ("/*SCRIPT*/", scripts),
        ("/*CONTENT*/", data),
    ):
        before, after = page.split(mark)
        page = before + part + after
    return page
