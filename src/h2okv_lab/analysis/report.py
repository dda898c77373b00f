"""The report page: the paper's findings beside this model's, then a section for each."""

from __future__ import annotations

import base64
import io
import tomllib
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from h2okv.records import atomic_write
from h2okv_lab.analysis import sections
from h2okv_lab.analysis.measurements import MEASUREMENTS
from h2okv_lab.analysis.sections import Tables
from h2okv_lab.analysis.study import TEXT_COLUMNS, read_settings
from h2okv_lab.tables import read_csv

REPORT_FILE = "report.html"
_HERE = Path(__file__).parent
_FIRST = ("ablation", "policies", "ranks", "sinks", "sparsity")
"""The first three of these that exist are shown beside the summary."""


@dataclass(frozen=True)
class Section:
    """A section of the report, as in sections.toml; its PNG file has its name."""

    name: str
    title: str
    about: str
    tables: list[str]
    size: list[float]
    panels: list[dict[str, Any]]
    sentence: str
    each: str = ""
    joint: str = "; "
    paper: str = ""
    rule: str = ""

    def draw(self, tables: Tables) -> Any:
        figure, panels = sections.new_figure(self.size, self.panels)
        getattr(sections, f"draw_{self.name}")(figure, panels, tables)
        sections.put_legend(figure, panels)
        return figure

    def tell(self, tables: Tables) -> tuple[str, str]:
        """Return the sentence about the tables, and the verdict on the paper's finding."""
        figures = getattr(sections, f"find_{self.name}")(tables)
        repeated = self.joint.join(self.each.format(**entry) for entry in figures.get("each", ()))
        sentence = self.sentence.format(**{**figures, "each": repeated})
        if not self.paper:
            return sentence, ""
        partly = "in part" if figures.get("partly") else "differs"
        return sentence, "agrees" if figures.get("agrees") else partly


SECTIONS = tuple(
    Section(name, **fields)
    for name, fields in tomllib.loads((_HERE / "sections.toml").read_text("utf-8")).items()
)


def write_report(folder: Path) -> list[str]:
    """Draw the sections whose tables exist, and write figures and page; return what is missing."""
    settings = {name: escape(str(value)) for name, value in read_settings(folder).items()}
    tables = {
        path.stem: read_csv(path, text=TEXT_COLUMNS)
        for path in (folder / f"{name}.csv" for section in SECTIONS for name in section.tables)
        if path.is_file()
    }
    body, pictures, missing = "", {}, {}
    for section in SECTIONS:
        absent = set(section.tables) - tables.keys()
        if absent:
            options = [
                "--neurons" if measurement.is_option else f"--only {measurement.name}"
                for measurement in MEASUREMENTS
                if absent & set(measurement.tables)
            ]
            missing[section.title] = f"{section.title} ({', '.join(options)})"
            continue
        picture = io.BytesIO()
        # No date or version: the same tables give the same file.
        section.draw(tables).savefig(picture, format="png", metadata={"Software": None})
        (folder / f"{section.name}.png").write_bytes(picture.getvalue())
        data = base64.b64encode(picture.getvalue()).decode("ascii")
        image = f'<img alt="{escape(section.about)}" src="data:image/png;base64,{data}">'
        pictures[section.name] = image
        sentence = section.tell(tables)[0]
        body += (
            f'<section id="{section.name}"><h2>{escape(section.title)}</h2>'
            f"<p>{escape(section.about)}</p><p>{escape(sentence[0].upper() + sentence[1:])}.</p>"
            f"<figure>{image}</figure>"
            f"<small>{', '.join(f'{table}.csv' for table in section.tables)}</small></section>"
        )
    gaps = f'<p class="missing">Not measured: {escape(", ".join(missing.values()))}.</p>'
    first = [name for name in _FIRST if name in pictures][:3]
    page = Template((_HERE / "report.html").read_text("utf-8")).substitute(
        settings,
        first="".join(f'<a href="#{name}">{pictures[name]}</a>' for name in first),
        missing=gaps if missing else "",
        sections=body,
        **_summary(tables),
    )
    with atomic_write(folder / REPORT_FILE) as file:
        file.write(page)
    return list(missing)


def _summary(tables: Tables) -> dict[str, str]:
    """Return the page's table of the paper's findings, and the rules of the verdicts."""
    lines, rules = "", []
    for section in filter(lambda section: section.paper, SECTIONS):
        is_measured = section.tables[0] in tables
        cells = section.paper, *(section.tell(tables) if is_measured else ("not measured", ""))
        lines += f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        rules.append(f"{section.paper}: {section.rule}")
    return {"findings": lines, "rules": escape("; ".join(rules))}
