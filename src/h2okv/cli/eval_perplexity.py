"""`h2okv eval perplexity`: the perplexity of a text by position."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from h2okv.assets import sample_prompt
from h2okv.cli.eval_options import (
    Budgets,
    Csv,
    Device,
    Dtype,
    HeavyShare,
    KvBits,
    Model,
    Policies,
    PositionsOption,
    PrefillChunk,
    Seed,
    Sink,
    parse_settings,
)
from h2okv.cli.eval_run import check_csv, load_subject, run_tasks
from h2okv.evaluation.perplexity import Perplexity, Windows
from h2okv.evaluation.text_file import read_text_file
from h2okv.integration.loading import BUNDLED

HELP = """Measure the perplexity of a text by position, with several cache sizes.

The text is cut into windows, each read on a cache of its own; a fraction as budget is of the whole
window. The table has a row for each range of positions.

Examples:

    h2okv eval perplexity --text book.txt --budgets 0.04,0.2,0.6,full --windows 16 --csv ppl.csv

    h2okv eval perplexity --text book.txt --policy h2o,recent --chunk 1 --csv ppl.csv
"""


def perplexity(
    csv: Csv,
    text: Annotated[
        Path | None, typer.Option(help="A text file; by default the opening of a novel.")
    ] = None,
    model: Model = BUNDLED,
    policy: Policies = "h2o",
    budgets: Budgets = "0.1,0.2,0.5,full",
    heavy_share: HeavyShare = 0.5,
    sink: Sink = 0,
    positions: PositionsOption = "original",
    prefill_chunk: PrefillChunk = None,
    kv_bits: KvBits = None,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 1024,
    windows: Annotated[
        int | None, typer.Option(help="Read the first so many windows only.")
    ] = None,
    chunk: Annotated[
        int, typer.Option(help="Tokens of a block; 1 is the paper's Algorithm 1.")
    ] = 64,
    every: Annotated[int, typer.Option(help="Tokens of a range of positions.")] = 128,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> int:
    """Measures perplexity, as `HELP` tells the user."""
    check_csv(csv)
    settings = parse_settings(policy, budgets, heavy_share, sink, positions, prefill_chunk, kv_bits)
    cut = Windows(length, windows, chunk, every)
    name = "sample_prompt" if text is None else text.stem
    task = Perplexity(name, sample_prompt() if text is None else read_text_file(text), cut)
    subject = load_subject(model, dtype, device, settings, seed)
    return run_tasks(subject, [task], settings, seed, csv, detailed=True)[0]
