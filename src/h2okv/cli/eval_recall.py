"""`h2okv eval recall`: RULER's questions about long texts."""

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
    QuestionOption,
    Seed,
    Sink,
    TooLongOption,
    parse_question,
    parse_settings,
)
from h2okv.cli.eval_run import check_csv, load_subject, run_tasks
from h2okv.cli.options import parse_choice
from h2okv.evaluation.long_samples import TOO_LONG
from h2okv.evaluation.recall import MOST_TOKENS, Recall, read_ruler
from h2okv.integration.loading import BUNDLED

HELP = """Ask for one of many values that a long text holds, as RULER does.

The question is known or not known while the cache is compressed: read together with the text, or
after the text has been read and evicted from.

Examples:

    h2okv eval recall --input niah_multikey_3.jsonl --budgets 0.2,0.5,full --csv recall.csv

    h2okv eval recall --input niah_multikey_3.jsonl --positions rolling --budgets 512 --csv r.csv
"""


def recall(
    input: Annotated[Path, typer.Option(help="RULER's JSONL: input and outputs.")],
    csv: Csv,
    question: QuestionOption = "both",
    model: Model = BUNDLED,
    policy: Policies = "h2o",
    budgets: Budgets = "0.2,0.5,full",
    heavy_share: HeavyShare = 0.5,
    sink: Sink = 0,
    positions: PositionsOption = "original",
    prefill_chunk: PrefillChunk = None,
    kv_bits: KvBits = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = (
        MOST_TOKENS
    ),
    limit: Limit = None,
    too_long: TooLongOption = "refuse",
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> int:
    """Asks, as `HELP` tells the user."""
    check_csv(csv)
    settings = parse_settings(policy, budgets, heavy_share, sink, positions, prefill_chunk, kv_bits)
    how = parse_choice("too-long", too_long, TOO_LONG)
    questions = read_ruler(input)
    tasks = [
        Recall(input.stem, questions, knowledge, limit, how, max_new_tokens)
        for knowledge in parse_question(question)
    ]
    subject = load_subject(model, dtype, device, settings, seed)
    return run_tasks(subject, tasks, settings, seed, csv)[0]
