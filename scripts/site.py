"""Write build/pages, from which mkdocs.yml makes the site: python scripts/site.py (make site).

The pages are those of docs/, the README as the home page, the viewer with the bundled model, and
a copy of each file outside docs/ that a page links to, since the site stands alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")
CODE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)
OPTIONS = ("--policy", "h2o,recent", "--budget", "10%,20%,50%", "--tokens", "512")
# Names in a first column stay whole and code lines of 88 characters fit; on phones cells are narrow
# and code wraps.
STYLE = """\
.md-typeset table:not([class]) td:first-child code { white-space: nowrap; }
.md-typeset table code { word-break: normal; }
.md-typeset pre > code { font-size: 0.78em; }
@media screen and (max-width: 44.9375em) {
  .md-typeset table:not([class]) th { min-width: 0; padding: 0.7em 0.6em; }
  .md-typeset table:not([class]) td { padding: 0.6em; }
  .md-typeset pre > code { white-space: pre-wrap; overflow-wrap: anywhere; }
}
"""
LIVE = f"""---
hide: [toc, navigation]
---

# What a cache keeps

The viewer on the model and the text of the package: which tokens H2O and a recent window of the
same size hold at each step. [Open it alone](live/view.html), or make one of your text:

    h2okv view --text chapter.txt {" ".join(OPTIONS)} --export kept.html

<iframe src="live/view.html" title="h2okv view" style="width: 100%; height: 85vh; border: 0">
</iframe>
"""


def main() -> None:
    """Replace build/pages."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    for source in sorted((ROOT / "docs").rglob("*.md")):
        copy_page(source, PAGES / source.relative_to(ROOT / "docs"))
    copy_page(ROOT / "README.md", PAGES / "index.md")
    (PAGES / "live.md").write_text(LIVE, encoding="utf-8")
    (PAGES / "style.css").write_text(STYLE, encoding="utf-8")
    (PAGES / "live").mkdir()
    command = [sys.executable, "-m", "h2okv", "view", *OPTIONS, "--export"]
    subprocess.run([*command, str(PAGES / "live" / "view.html")], check=True)


def copy_page(source: Path, target: Path) -> None:
    """Copy a page with its links; a file outside docs/ is copied too."""

    def link(match: re.Match[str]) -> str:
        linked = place(Path(os.path.normpath(source.parent / match[1])))
        return os.path.relpath(linked, target.parent)

    text = source.read_text(encoding="utf-8")
    codes = CODE.findall(text)
    proses = (LINK.sub(link, prose) for prose in CODE.split(text))
    pieces = [piece for pair in zip(proses, [*codes, ""], strict=True) for piece in pair]
    target.write_text("".join(pieces), encoding="utf-8")


def place(linked: Path) -> Path:
    """Return where a linked file is in the site; copy it there if it is outside docs/."""
    if linked == ROOT / "README.md":
        return PAGES / "index.md"
    is_page = linked.is_relative_to(ROOT / "docs")
    base, folder = (ROOT / "docs", PAGES) if is_page else (ROOT, PAGES / "files")
    copied = folder / linked.relative_to(base)
    copied.parent.mkdir(parents=True, exist_ok=True)
    if linked.is_dir():
        paths = [place(path) for path in sorted(linked.iterdir()) if path.is_file()]
        copied = copied.with_name(f"{copied.name}.md")
        items = [f"- [{path.name}]({path.relative_to(copied.parent)})\n" for path in paths]
        copied.write_text(f"# {linked.name}\n\n{''.join(items)}", encoding="utf-8")
    elif not is_page and not copied.exists():
        shutil.copy(linked, copied)
        if linked.suffix == ".md":
            copy_page(linked, copied)
    return copied


if __name__ == "__main__":
    main()
