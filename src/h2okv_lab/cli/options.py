"""Options that several commands of the laboratory share, and the parsing of their values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from h2okv.assets import sample_prompt
from h2okv.cli.args import CACHE_HELP, PER_QUERY, Bundle, Usual, choose_caches, option
from h2okv.cli.readers import names, read_text, readable, writable
from h2okv.config import BEST, POLICIES, CacheConfig
from h2okv_lab.tables import check_plot

TEXT = option(None, "Text file (the opening of a novel).", read=readable)
ROWS = option(None, "Append the rows to this file.", read=writable)


def numbers(
    option: str, text: str, kind: type = int, example: str = "2048,8192"
) -> tuple[Any, ...]:
    """Read a comma-separated list of numbers."""
    try:
        return tuple(map(kind, names(option, text)))
    except ValueError:
        expected = "whole numbers" if kind is int else "numbers"
        raise ValueError(
            f"{option} {text!r} is not a list of {expected}; give one such as {example}"
        ) from None


def picture(option: str, path: Path) -> Path:
    """Raise ValueError also for a figure that cannot be drawn."""
    writable(option, path)
    check_plot(path)
    return path


def text_or_sample(path: Path | None) -> str:
    """Return the text of --text; by default the opening of a novel."""
    return sample_prompt() if path is None else read_text("--text", path)


def cache_lists(
    budget: str, policies: Sequence[str] = (BEST,), per_query: bool = False, **options: Any
) -> Any:
    """Return the options of a list of `CacheConfig`: each policy with each budget."""
    usual = Usual(tuple(policies), budget, {"min_tokens": 0} | options, per_query)
    allowed = (*POLICIES, *PER_QUERY) if per_query else POLICIES
    shown = ",".join(name for name in policies if "," not in name)

    def build(
        policy: str | None = option(None, f"Comma-separated: {', '.join(allowed)} ({shown})."),
        budget: str | None = option(None, f"Comma-separated: 512, 20%, full ({budget})."),
        cache: list[str] | None = option(None, f"{CACHE_HELP.rstrip('.')}; repeatable."),
    ) -> list[CacheConfig]:
        return [choice.cache for choice in choose_caches(policy, budget, cache or (), usual)]

    return Bundle(build, "Cache")


def command_line(config: CacheConfig) -> str:
    """Return the command-line options of a cache."""
    return f"--cache {shlex.quote(re.sub(rf'^{BEST}-v[0-9]+', BEST, config.label))}"
