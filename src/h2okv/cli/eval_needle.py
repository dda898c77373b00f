"""`h2okv eval needle`: one fact in a long text, by depth and length."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from h2okv.assets import sample_prompt
from h2okv.cli.bench_options import parse_numbers, split_list
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
    QuestionOption,
    Seed,
    Sink,
    parse_question,
    parse_settings,
)
from h2okv.cli.eval_run import check_csv, load_subject, run_tasks
from h2okv.evaluation.needle import Grid, Needle, NeedleTask
from h2okv.evaluation.needle_plot import plot_needles
from h2okv.evaluation.stream_plot import check_plot
from h2okv.evaluation.text_file import read_text_file
from h2okv.integration.loading import BUNDLED

HELP = """Hide a fact at some depth of a text of some length, and ask for it at the end.

Each needle is another name and answer unless --needle says otherwise. The table and the heat map
have a cell for each length and depth.

Examples:

    h2okv eval needle --text book.txt --budgets 0.2,0.5,full --csv needle.csv --plot needle.png

    h2okv eval needle --text book.txt --needle "The pass key is 7914." --answer 7914 \\
        --question " The pass key is" --csv key.csv
"""

_DEFAULT = Needle()


def needle(
    csv: Csv,
    text: Annotated[
        Path | None, typer.Option(help="The haystack; by default the opening of a novel.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="The heat map: .png, .svg, .pdf.")] = None,
    question_known: QuestionOption = "unknown",
    model: Model = BUNDLED,
    policy: Policies = "h2o",
    budgets: Budgets = "0.2,0.5,full",
    lengths: Annotated[str, typer.Option(help="Tokens of the whole prompt.")] = "512,1024,1536",
    depths: Annotated[str, typer.Option(help="Shares of the text before the needle.")] = (
        "0,0.25,0.5,0.75,1"
    ),
    tries: Annotated[int, typer.Option(help="Needles for each length and depth.")] = 4,
    needle: Annotated[str, typer.Option("--needle", help="What is hidden.")] = _DEFAULT.statement,
    question: Annotated[str, typer.Option(help="What the prompt ends in.")] = _DEFAULT.question,
    answer: Annotated[
        str | None, typer.Option(help="The answer in --needle.", show_default="drawn")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="The most tokens of an answer.")
    ] = _DEFAULT.max_new_tokens,
    heavy_share: HeavyShare = 0.5,
    sink: Sink = 0,
    positions: PositionsOption = "original",
    prefill_chunk: PrefillChunk = None,
    kv_bits: KvBits = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> int:
    """Hides and asks, as `HELP` tells the user."""
    check_csv(csv)
    if plot is not None:
        check_plot(plot)
    settings = parse_settings(policy, budgets, heavy_share, sink, positions, prefill_chunk, kv_bits)
    grid = Grid(parse_numbers("lengths", lengths), _parse_depths(depths), tries)
    hidden = Needle(needle, question.replace("\\n", "\n"), answer, max_new_tokens)
    haystack = sample_prompt() if text is None else read_text_file(text)
    name = "needle" if text is None else f"needle in {text.stem}"
    tasks = [
        NeedleTask(name, haystack, grid, hidden, knowledge, seed)
        for knowledge in parse_question(question_known)
    ]
    subject = load_subject(model, dtype, device, settings, seed)
    code, details = run_tasks(subject, tasks, settings, seed, csv, detailed=True)
    if plot is not None and details:
        plot_needles(plot, details, f"{name}, {subject.name} model")
    return code


def _parse_depths(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in split_list(text))
    except ValueError:
        raise ValueError(
            f"--depths {text!r} is no list of shares; give one such as 0,0.5,1"
        ) from None
