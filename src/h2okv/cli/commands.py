"""The commands by name, and their help: the only place where the product names the laboratory.

A command's module is imported when the command runs: torch and transformers take seconds.
"""

from __future__ import annotations

import functools
import re
from importlib.resources import files

COMMANDS = {
    "generate": "h2okv.cli.generate:generate",
    "demo": "h2okv.cli.generate:demo",
    "chat": "h2okv.cli.chat:chat",
    "serve": "h2okv.cli.serve:serve",
    "batch": "h2okv.cli.batch:batch",
    "plan": "h2okv.cli.batch:plan",
    "stream": "h2okv_lab.cli.stream:stream",
    "eval": "h2okv_lab.cli.eval:eval_app",
    "lm-eval": "h2okv_lab.cli.eval:lm_eval",
    "bench": "h2okv_lab.cli.bench:bench",
    "analyze": "h2okv_lab.cli.analyze:analyze",
    "view": "h2okv_lab.cli.analyze:view",
    "models": "h2okv.cli.env:models_app",
    "env": "h2okv.cli.env:env",
}
"""The function or group of each command."""


@functools.cache
def helps() -> dict[str, str]:
    """Return the texts of both packages' help.md by command."""
    pages = (files(package).joinpath("help.md") for package in ("h2okv.cli", "h2okv_lab.cli"))
    sections: list[str] = []
    for page in pages:
        sections += re.split(r"^# (.+)\n+", page.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return dict(zip(sections[::2], sections[1::2], strict=True))
