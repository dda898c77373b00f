"""The report's page: one HTML file with its figures inside."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

from h2okv.analysis.analysis import read_settings
from h2okv.analysis.report.drawing import Rows
from h2okv.analysis.report.sections import SECTIONS, Section
from h2okv.analysis.tables import read_table

REPORT_FILE = "report.html"

_CSS = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; background: #fff; }
section { margin-bottom: 3rem; } small { opacity: .8; } h1, h2 { line-height: 1.2; }
"""


def write_report(folder: Path) -> list[str]:
    """Draws what there are tables for, and writes the figures and the page.

    Args:
        folder: an analysis, finished or not; PNG files and ``report.html`` are written there.

    Returns:
        Titles of the parts whose measurements are not finished.

    Raises:
        ValueError: if matplotlib is missing, or the folder holds no analysis.
    """
    settings = read_settings(folder)
    parts, missing = [], []
    for section in SECTIONS:
        paths = [folder / f"{table}.csv" for table in section.tables]
        if not all(path.is_file() for path in paths):
            missing.append(section.title)
            continue
        tables = {path.stem: read_table(path) for path in paths}
        picture = _png(section.draw(tables))
        (folder / f"{section.name}.png").write_bytes(picture)
        parts.append(_section(section, tables, picture))
    (folder / REPORT_FILE).write_text(_page(settings, parts, missing), encoding="utf-8")
    return missing


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    # Without a date or a version, so that the same tables give the same file.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _section(section: Section, tables: dict[str, Rows], picture: bytes) -> str:
    told = html.escape(section.tell(tables))
    data = base64.b64encode(picture).decode("ascii")
    files = ", ".join(f"{table}.csv" for table in section.tables)
    return (
        f"<section><h2>{html.escape(section.title)}</h2><p>{told}</p><figure>"
        f'<img alt="{told}" src="data:image/png;base64,{data}"></figure>'
        f"<small>{files}</small></section>"
    )


def _page(settings: dict[str, Any], parts: list[str], missing: list[str]) -> str:
    about = f"Model {settings['model']}, the first {settings['tokens']} tokens of the text."
    notes = ""
    if missing:
        notes = f"<p>Not measured (yet): {html.escape(', '.join(missing))}.</p>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>What attention keeps</title><style>{_CSS}</style></head><body>"
        f"<h1>What attention keeps</h1><p>{html.escape(about)}</p>{notes}"
        f"{''.join(parts)}</body></html>\n"
    )
