"""Check that names, docstrings and messages use the field's words.

Usage:
    python scripts/check_words.py [PATH ...]           # list every breach; exit 1 if there is one
    python scripts/check_words.py --share [PATH ...]   # share of banned names among all bindings

A path is a Python file, a Markdown page or a folder of them.

A variable, parameter, attribute or function must not be named by a word that says nothing of what
it holds (`NAMES`). The docstring of a function begins with an imperative verb, that of a property
or a class with a noun. Strings and comments must not contain the phrases of `PHRASES`, each of
which has a plain equivalent. Pages and the help texts of the commands must not contain those of
`PROSE` either; code blocks, inline code and rendered tables are exempt. CONTRIBUTING.md has the
table of words. A line with `word-ok` is left alone: a file format, an option or data fixes its
words.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

NAMES = frozenset(
    """
    own held told found made asked said taken wanted given whole known kept places place part
    parts rest most what how worth which who one ones thing things anew behind beside nobody
    somebody whoever whatever way ways kin twin theirs
    """.split()  # noqa: SIM905
)
VERBS = frozenset(("place", "_place"))  # as names of functions
# First words of a function's docstring that are no verbs.
NOT_VERBS = frozenset(
    """
    a all an and any are as at by each every for how if in is it its likewise most no none not
    of on one only so such that the their them these they this those to what when where whether
    which who whose why with
    """.split()  # noqa: SIM905
)
PHRASES = {
    r"\bis no more\b": "is gone, has ended",
    r"\bare no more\b": "are gone, have ended",
    r"(?<!there )\b(?-i:is none)\b": "must be ..., got ...",
    r"(?<!there )\b(?-i:are none)\b": "must be ..., got ...",
    r"\bis no (seed|folder|file|format|number|budget|model|policy|name|method)\b": "is not a ...",
    r"\bso many\b": "the number itself",
    r"\banew\b": "again",
    r"\bnobody('s)?\b": "unused, no one",
    r"\bas though\b": "as if",
    r"\basked again\b": "re-evaluated",
    r"\bwhat is held\b": "entries",
}
PROSE = {
    r"\bwhose\b": "with (models with learned positions)",
    r"\btakes? (\w+ ){0,6}off\b": "reduces ... by",
    r"\bso that\b[^.]*\bso that\b": "one 'so that' per sentence",
    r"\bof (its|their|his) own\b": "its own ..., a separate ...",
    r"\bin place of\b": "instead of",
    r"\bfor ever\b": "without a limit",
    r"\blikeliest\b": "most likely",
    r"\ball but free\b": "costs almost nothing",
    r"\b(goes|went) for\b": "maximizes, prefers",
    r"\bby the whole interval\b": "by more than the interval",
    r"\b(is|are|was|were) said\b|\bas said\b|\bsaid otherwise\b": "noted, stated",
    r"\b(is|are|was|were) told\b|\bthis page tells\b": "reports, describes",
    r"\bwhat (was|are|were) held\b": "entries",
    r"\bat hand\b": "available",
    r"\b(go|goes|going|went|gone|gone on|read on) on (from|with|as|there|past|until)\b": "continue",
    r"[,;] for (it|they|there|what|no one) (is|are|has|have|had|was|were|would|does|can)\b": "as",
    r"\bno way to\b": "cannot",
    r"\bwho (asks?|waits?|waited|decodes?|generates?|connects?)\b": "clients, requests",
    r"\bnothing but\b": "only",
    r"\bfour fifths\b": "80 %",
    r"\bperson's answer\b": "one request",
    r"\bmost that\b": "the maximum",
    r"\b(most|least) (tokens|probability)\b": "maximum number of, minimum",
    r"\bbut for\b": "except for",
    r"\bhence\b": "so, therefore",
    r"\bnothing of\b": "nothing about",
    r"\bthat (is|are|was|were) there\b": "existing",
    r"\bstands? (there|beside|below)\b": "is beside, is below",
    r"\bof which (the|a|another|it|they)\b": "two sentences",
    r"\btells? (everything|whether|nothing)\b": "show, report",
}
_PHRASES = [(re.compile(pattern, re.IGNORECASE), remedy) for pattern, remedy in PHRASES.items()]
_PROSE = _PHRASES + [
    (re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), remedy)
    for pattern, remedy in PROSE.items()
]
# What a page has beside prose: code, links' targets, rendered tables, and lines that say so.
_EXEMPT = re.compile(
    r"^```.*?^```|^ {4}[^\n]*|`[^`\n]*`|\]\([^)\n]*\)|^[^\n]*word-ok[^\n]*"
    r"|<!-- (?:table: )?(?P<place>[\w-]+)(?::start)? -->.*?<!-- (?:end|(?P=place):end) -->"
    r"|<!-- words-off -->.*?<!-- words-on -->",
    re.DOTALL | re.MULTILINE,
)
HELP = ("src/h2okv/cli/", "src/h2okv_lab/cli/")
Breach = tuple[Path, int, str]


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that a module binds, with its line: variables, parameters, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ExceptHandler):
            if node.name not in VERBS:
                yield node.name or "", node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return bool(names & {"property", "cached_property", "setter"})


def docstring_breaches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield functions whose docstring does not begin with a verb."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_property(node):
            continue
        if node.name.startswith("test_"):  # which states a fact
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        word = re.split(r"[\s,.:;()]", text, maxsplit=1)[0].strip("`'\"").lower()
        if word in NOT_VERBS:
            yield node.body[0].lineno, f"docstring of {node.name} begins with {word!r}; use a verb"


def check(path: Path) -> Iterator[Breach]:
    """Yield the breaches of one Python file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines()
    for name, line in bindings(tree):
        if name.strip("_") in NAMES and "word-ok" not in lines[line - 1]:
            yield path, line, f"name {name!r} says nothing of what it holds"
    for line, message in docstring_breaches(tree):
        yield path, line, message
    for number, line_text in enumerate(lines, 1):
        for pattern, remedy in _PHRASES:
            match = pattern.search(line_text)
            if match and "word-ok" not in line_text:
                yield path, number, f"{match[0]!r}: write {remedy!r}"


def check_page(path: Path) -> Iterator[Breach]:
    """Yield the breaches of one Markdown page."""
    text = path.read_text(encoding="utf-8")
    prose = _EXEMPT.sub(lambda match: re.sub(r"[^\n]", "_", match[0]), text)
    for pattern, remedy in _PROSE:
        for match in pattern.finditer(prose):
            yield path, prose.count("\n", 0, match.start()) + 1, f"{match[0]!r}: write {remedy!r}"


def check_helps(path: Path) -> Iterator[Breach]:
    """Yield the breaches of the strings in a command's file, most of which are help texts."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        for pattern, remedy in _PROSE[len(_PHRASES) :]:
            match = pattern.search(node.value)
            if match and "word-ok" not in lines[node.lineno - 1]:
                yield path, node.lineno, f"{match[0]!r}: write {remedy!r}"


def checks(path: Path) -> Iterator[Breach]:
    """Yield the breaches of a file by the checks of its kind."""
    if path.suffix == ".md":
        yield from check_page(path)
        return
    yield from check(path)
    if any(folder in path.resolve().as_posix() for folder in HELP):
        yield from check_helps(path)


def main(arguments: list[str]) -> int:
    """Run the check over files and folders; return the exit code."""
    is_share = "--share" in arguments
    roots = [Path(name) for name in arguments if name != "--share"] or [Path("src")]
    files = sorted(
        file
        for root in roots
        for file in ([root] if root.is_file() else root.rglob("*"))
        if root.is_file() or file.suffix in (".py", ".md")
    )
    if is_share:
        files = [file for file in files if file.suffix == ".py"]
        names = [name for file in files for name, _ in bindings(ast.parse(file.read_text("utf-8")))]
        banned = sum(name.strip("_") in NAMES for name in names)
        print(f"{banned} of {len(names)} bindings: {100 * banned / max(1, len(names)):.2f} %")
        return 0
    breaches = [
        breach for file in files if file.name != Path(__file__).name for breach in checks(file)
    ]
    for path, line, message in breaches:
        print(f"{path}:{line}: {message}")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
