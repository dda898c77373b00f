"""The same prompt with the chosen cache, and with the full one beside it."""

from __future__ import annotations

from h2okv.cli.cache_choice import CacheChoice, full_cache
from h2okv.cli.generation import Generation, Job, generate_once, warm_up
from h2okv.cli.output import discard, write_heading, write_summary, write_text
from h2okv.cli.report import comparison_table, small_budget_note, summary_line


def run_alone(job: Job, choice: CacheChoice, quiet: bool) -> list[Generation]:
    """Generates with the chosen cache; the text streams to stdout, the summary to stderr.

    Args:
        job: What to generate.
        choice: The cache.
        quiet: Whether to print nothing.

    Returns:
        One generation.
    """
    cache = choice.make(job.model.config, job.sampling.seed)
    run = generate_once(job, cache, discard if quiet else write_text, show_progress=not quiet)
    if not quiet:
        write_text("\n")
        _remark(run)
    return [run]


def run_beside_full(job: Job, choice: CacheChoice, quiet: bool) -> list[Generation]:
    """Generates with the chosen cache and with the full one; texts and a table go to stdout.

    Args:
        job: What to generate.
        choice: The cache.
        quiet: Whether to print nothing.

    Returns:
        The chosen cache's generation, then the full cache's; without the latter after Ctrl-C in
        the former.
    """
    config, seed = job.model.config, job.sampling.seed
    caches = {
        choice.label: lambda: choice.make(config, seed),
        "full cache": lambda: full_cache(config),
    }
    warm_up(job, list(caches.values()))
    runs: list[Generation] = []
    for label, make_cache in caches.items():
        if not quiet:
            write_heading(label)
        write = discard if quiet else write_text
        runs.append(generate_once(job, make_cache(), write, show_progress=not quiet))
        if not quiet:
            write_text("\n\n")
        if runs[-1].interrupted:
            break
    if not quiet and len(runs) == len(caches):
        write_text(comparison_table(choice.label, *runs))
    if not quiet:
        _remark(runs[0])
    return runs


def _remark(run: Generation) -> None:
    write_summary(summary_line(run))
    note = small_budget_note(run)
    if note is not None:
        write_summary(note)
