"""Run a notebook top to bottom without Jupyter.

The last expression of a cell is its result, shown as HTML if it has `_repr_html_`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run the code cells of a notebook and return it with their outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"], cell["outputs"] = (
                count,
                run_cell("".join(cell["source"]), names, count),
            )
    return notebook


def run_cell(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell and return its outputs: what it printed, and its result."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {count}", "exec"), names)
        result = last and eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(text)})
    if result is not None:
        data = {"text/plain": lines(repr(result))}
        if hasattr(result, "_repr_html_"):
            data = {"text/html": lines(result._repr_html_()), "text/plain": ["<HTML>"]}
        outputs.append(
            {
                "data": data,
                "execution_count": count,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return outputs


def lines(text: str) -> list[str]:
    """Return a text as a notebook stores it."""
    return text.splitlines(keepends=True)


def main() -> None:
    """Run a notebook, and print or store its outputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, metavar="FILE", help="a notebook (.ipynb)")
    parser.add_argument("--write", action="store_true", help="put the outputs into the file")
    args = parser.parse_args()
    try:
        notebook = json.loads(args.path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"'{args.path}' is not a notebook that can be read ({error})")
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as the commands do, before torch is imported
    run(notebook)
    if args.write:
        text = json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"
        args.path.write_text(text, encoding="utf-8")
    for cell in notebook["cells"] if not args.write else ():
        for output in cell.get("outputs", ()):
            print("".join(output.get("text") or output["data"]["text/plain"]))


if __name__ == "__main__":
    main()
