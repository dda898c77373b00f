"""The same prompt with the chosen cache, and with the full one beside it."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.cache_utils import Cache

from h2okv.cli.agreement import Agreement
from h2okv.cli.cache_choice import CacheChoice, full_cache
from h2okv.cli.following import count_same_choices
from h2okv.cli.generation import Generation, Job, generate_once, warm_up
from h2okv.cli.output import discard, write_heading, write_text


@dataclass(frozen=True)
class Comparison:
    """A generation, and the full cache's where it was asked for.

    Attributes:
        run: With the chosen cache.
        full: With transformers' own cache; None if not asked for, or after Ctrl-C before it.
        agreement: How far both agree; None without `full`.
        cut_short: Whether Ctrl-C came after both, while their agreement was looked into.
    """

    run: Generation
    full: Generation | None = None
    agreement: Agreement | None = None
    cut_short: bool = False

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended any part of it."""
        runs = (self.run, self.full)
        return self.cut_short or any(run is not None and run.interrupted for run in runs)


def run_alone(job: Job, choice: CacheChoice, quiet: bool) -> Comparison:
    """Generates with the chosen cache only.

    Args:
        job: What to generate.
        choice: The cache.
        quiet: Whether to print nothing; otherwise the text streams to stdout.

    Returns:
        The generation, with nothing to compare it to.
    """
    cache = choice.make(job.model.config, job.sampling.seed)
    run = generate_once(job, cache, discard if quiet else write_text, show_progress=not quiet)
    if not quiet:
        write_text("\n")
    return Comparison(run)


def run_beside_full(job: Job, choice: CacheChoice, quiet: bool) -> Comparison:
    """Generates with the chosen cache and then with the full one.

    Args:
        job: What to generate.
        choice: The cache.
        quiet: Whether to print nothing; otherwise both texts stream to stdout.

    Returns:
        Both generations and their agreement; only the first one after Ctrl-C in it.
    """
    config, seed = job.model.config, job.sampling.seed
    warm_up(job, [lambda: choice.make(config, seed), lambda: full_cache(config)])

    def generate(label: str, cache: Cache) -> Generation:
        if not quiet:
            write_heading(label)
        run = generate_once(job, cache, discard if quiet else write_text, show_progress=not quiet)
        if not quiet:
            write_text("\n\n")
        return run

    run = generate(choice.label, choice.make(config, seed))
    if run.interrupted:
        return Comparison(run)
    full = generate("full cache", full_cache(config))
    same_next_token, cut_short = None, False
    # With sampling the full cache's text is not its likeliest one, so there is nothing to ask.
    if job.sampling.temperature == 0 and not full.interrupted:
        try:
            same_next_token = count_same_choices(job, choice.make(config, seed), full.token_ids)
        except KeyboardInterrupt:
            cut_short = True
    agreement = Agreement.of(run.token_ids, full.token_ids, same_next_token)
    return Comparison(run, full, agreement, cut_short)
