"""`h2okv eval summarize`: ROUGE of summaries, by cache size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from h2okv.cli.eval_options import (
    Budgets,
    Csv,
    Device,
    Dtype,
    HeavyShare,
    KvBits,
    Limit,
    Model,
    Policies,
    PositionsOption,
    PrefillChunk,
    Seed,
    Sink,
    TooLongOption,
    parse_settings,
)
from h2okv.cli.eval_run import check_csv, load_subject, run_tasks
from h2okv.cli.options import parse_choice
from h2okv.evaluation.articles import read_articles
from h2okv.evaluation.decoding import Decoding
from h2okv.evaluation.generation_task import BatchOptions
from h2okv.evaluation.long_samples import TOO_LONG
from h2okv.evaluation.summarization import Summarization
from h2okv.integration.loading import BUNDLED

HELP = """Summarize articles with several cache sizes, and score the summaries by ROUGE-1, 2 and L.

Every summary is kept as it comes: after Ctrl-C the same command goes on.

Examples:

    h2okv eval summarize --input xsum_0shot.jsonl --budgets 64,128,256,full --csv xsum.csv

    h2okv eval summarize --input cnndm_src.txt --references cnndm_refs.jsonl --csv cnndm.csv

    h2okv eval summarize --input long.jsonl --positions rolling --budgets 512 --csv long.csv
"""


def summarize(
    input: Annotated[
        Path,
        typer.Option(
            help="JSONL with article and summary_gt (the llama recipe's) or context and answers"
            " (LongBench); with --references one article on each line."
        ),
    ],
    csv: Csv,
    references: Annotated[
        Path | None, typer.Option(help="JSONL with refs, one line for each article.")
    ] = None,
    model: Model = BUNDLED,
    policy: Policies = "h2o",
    budgets: Budgets = "64,128,256,512,1024,full",
    heavy_share: HeavyShare = 0.5,
    sink: Sink = 0,
    positions: PositionsOption = "original",
    prefill_chunk: PrefillChunk = None,
    kv_bits: KvBits = None,
    template: Annotated[
        str | None, typer.Option(help="A prompt with {article} in it, for articles without one.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="The most tokens of a summary.", show_default="the file's, or 64 to 512"),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest with this share.")] = 1.0,
    stemmer: Annotated[bool, typer.Option("--stemmer", help="Compare stems of words.")] = False,
    batch_size: Annotated[int, typer.Option(help="Articles at a time.")] = 8,
    limit: Limit = None,
    too_long: TooLongOption = "refuse",
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> int:
    """Summarizes, as `HELP` tells the user."""
    check_csv(csv)
    settings = parse_settings(policy, budgets, heavy_share, sink, positions, prefill_chunk, kv_bits)
    options = BatchOptions(
        batch_size, limit, parse_choice("too-long", too_long, TOO_LONG), max_new_tokens
    )
    decoding = Decoding(temperature, top_p)
    articles = read_articles(input, references, template)
    task = Summarization(input.stem, articles, options, decoding, stemmer)
    subject = load_subject(model, dtype, device, settings, seed)
    return run_tasks(subject, [task], settings, seed, csv)[0]
