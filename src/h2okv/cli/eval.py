"""`h2okv eval`: what a cache costs in quality, by task."""

from __future__ import annotations

import typer

from h2okv.cli.eval_needle import HELP as NEEDLE_HELP
from h2okv.cli.eval_needle import needle
from h2okv.cli.eval_perplexity import HELP as PERPLEXITY_HELP
from h2okv.cli.eval_perplexity import perplexity
from h2okv.cli.eval_recall import HELP as RECALL_HELP
from h2okv.cli.eval_recall import recall
from h2okv.cli.eval_summarize import HELP as SUMMARIZE_HELP
from h2okv.cli.eval_summarize import summarize
from h2okv.cli.eval_sweep import HELP as SWEEP_HELP
from h2okv.cli.eval_sweep import sweep

HELP = """Measure what a cache size costs in quality, on your model and task.

Example:

    h2okv eval summarize --input xsum_0shot.jsonl --budgets 64,128,256,full --csv xsum.csv
"""

eval_app = typer.Typer(name="eval", help=HELP, pretty_exceptions_enable=False)
eval_app.command("summarize", help=SUMMARIZE_HELP)(summarize)
eval_app.command("perplexity", help=PERPLEXITY_HELP)(perplexity)
eval_app.command("needle", help=NEEDLE_HELP)(needle)
eval_app.command("recall", help=RECALL_HELP)(recall)
eval_app.command("sweep", help=SWEEP_HELP)(sweep)
