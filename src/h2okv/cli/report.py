"""What is said about a generation: the summary line, the table, the JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from h2okv.cli.agreement import Agreement
from h2okv.cli.comparison import Comparison
from h2okv.cli.generation import Generation
from h2okv.cli.output import write_remark, write_text

_NONE = "-"
_FEW_TOKENS = 32


def summary_line(run: Generation) -> str:
    """Puts a generation's measurements in one line.

    Args:
        run: The generation.

    Returns:
        The line, without a line end.
    """
    parts = [
        f"{len(run.token_ids)} tokens ({run.finish_reason})",
        f"first after {_seconds(run.time_to_first_token)}",
        f"{_speed(run.tokens_per_second)} tokens/s",
        f"KV {format_bytes(run.kv_bytes)} of {format_bytes(run.kv_bytes_full)} ({_share(run)})",
        f"{run.num_seen_tokens} tokens seen, {run.num_cached_tokens} kept",
    ]
    return " | ".join(parts)


def report(label: str, comparison: Comparison) -> None:
    """Tells people what a generation cost, and how it compares to the full cache's.

    The table goes to stdout, for it is the result of a comparison; remarks go to stderr.

    Args:
        label: What the chosen cache is called.
        comparison: The generation, with or without the full cache's.
    """
    run = comparison.run
    if comparison.full is not None and comparison.agreement is not None:
        write_text(comparison_table(label, run, comparison.full, comparison.agreement))
    else:
        write_remark(summary_line(run))
    note = small_budget_note(run)
    if note is not None:
        write_remark(note)


def comparison_table(label: str, run: Generation, full: Generation, agreement: Agreement) -> str:
    """Sets a generation beside that of the full cache.

    Args:
        label: What the run is called.
        run: With a policy.
        full: With transformers' own cache.
        agreement: How far they agree.

    Returns:
        The table as text, without colours.
    """
    table = Table()
    table.add_column("")
    for heading in ("full cache", label):
        table.add_column(heading, justify="right")
    rows = {
        "tokens generated": lambda r: str(len(r.token_ids)),
        "time to first token": lambda r: _seconds(r.time_to_first_token),
        "tokens per second": lambda r: _speed(r.tokens_per_second),
        "KV cache held": lambda r: format_bytes(r.kv_bytes),
        "of a full one": _share,
        "tokens seen": lambda r: str(r.num_seen_tokens),
        "tokens kept": lambda r: str(r.num_cached_tokens),
    }
    for name, cell in rows.items():
        table.add_row(name, cell(full), cell(run))
    table.add_row("tokens that agree", "", agreement_text(agreement))
    if agreement.same_next_token is not None:
        same = f"{agreement.same_next_token} of {len(full.token_ids)} (after the full cache's text)"
        table.add_row("same next token", "", same)
    # Rendered to text, so that a closed pipe shows where the text is written and nowhere else.
    console = Console(width=88)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def agreement_text(agreement: Agreement) -> str:
    """Says in words how far two runs agree."""
    text = f"{agreement.equal} of {agreement.compared}"
    if agreement.first_difference is None:
        return text
    return f"{text} (first difference at token {agreement.first_difference + 1})"


def small_budget_note(run: Generation) -> str | None:
    """Warns of a budget that is a share of a short prompt, and so hardly keeps anything.

    Args:
        run: The generation.

    Returns:
        The note, or None if the cache kept enough, or everything.
    """
    kept = run.num_cached_tokens
    if kept >= _FEW_TOKENS or kept >= run.num_seen_tokens:
        return None
    return (
        f"note: only {kept} tokens were kept, too few for good text; after a short prompt give"
        " the budget in tokens, such as --heavy 64 --recent 64"
    )


def to_json(settings: dict[str, Any], comparison: Comparison) -> str:
    """Makes the object that `--json` prints.

    Args:
        settings: What the generation was asked for.
        comparison: The generation, with or without the full cache's.

    Returns:
        One JSON object on one line.
    """
    result = {**settings, **_fields(comparison.run)}
    if comparison.full is not None and comparison.agreement is not None:
        result["full"] = _fields(comparison.full)
        result["agreement"] = asdict(comparison.agreement)
    return json.dumps(result, allow_nan=False)


def format_bytes(count: int) -> str:
    """Writes a number of bytes for people, in powers of 1024."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _fields(run: Generation) -> dict[str, Any]:
    return {
        "text": run.text,
        "token_ids": run.token_ids,
        "finish_reason": run.finish_reason,
        "time_to_first_token_s": run.time_to_first_token,
        "tokens_per_second": run.tokens_per_second,
        "kv_bytes": run.kv_bytes,
        "kv_bytes_full": run.kv_bytes_full,
        "num_seen_tokens": run.num_seen_tokens,
        "num_cached_tokens": run.num_cached_tokens,
    }


def _seconds(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3f} s"


def _speed(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1f}"


def _share(run: Generation) -> str:
    return f"{100 * run.kv_bytes / run.kv_bytes_full:.0f} %" if run.kv_bytes_full else _NONE
