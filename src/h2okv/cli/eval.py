"""`h2okv eval`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from h2okv.assets import sample_prompt
from h2okv.cli.args import (
    Budgets,
    CompressionOption,
    Csv,
    Decay,
    Device,
    Dtype,
    HeavyFraction,
    KvBits,
    Limit,
    Model,
    Policies,
    PositionsOption,
    PrefillChunk,
    Scoring,
    Seed,
    Sink,
    TooLongOption,
    parse_choice,
    parse_compression,
    parse_configs,
    parse_device,
    parse_dtype,
    parse_numbers,
    parse_positions,
    split_list,
)
from h2okv.config import CacheConfig
from h2okv.console import INTERRUPTED, Progress, write_remark, write_text
from h2okv.engine.sampling_params import SamplingParams
from h2okv.evaluation.model import ModelUnderTest, make_cache
from h2okv.evaluation.plots import check_plot, plot_needles, plot_sweep
from h2okv.evaluation.runner import Evaluation, Run, SampleFile
from h2okv.evaluation.sweep import (
    Experiment,
    Surroundings,
    experiment_names,
    load_experiment,
    pivot,
    report,
    results_table,
)
from h2okv.evaluation.task import TOO_LONG, BatchOptions, Task
from h2okv.evaluation.tasks.needle import Grid, Needle, NeedleTask
from h2okv.evaluation.tasks.perplexity import BLOCK, Perplexity, Windows
from h2okv.evaluation.tasks.ruler import MOST_TOKENS, Recall, read_ruler
from h2okv.evaluation.tasks.summarization import Summarization, read_articles
from h2okv.integration.loading import describe, load_weights
from h2okv.integration.models import BUNDLED
from h2okv.provenance import versions
from h2okv.records import atomic_write, markdown_table, read_text_file, unknown_name, write_csv

_SUFFIX = ".samples.jsonl"


def model_under_test(
    model: str, dtype: str, device: str, configs: Sequence[CacheConfig], seed: int
) -> ModelUnderTest:
    """Describes a model to evaluate; its weights are loaded when the tasks are ready for them."""
    wanted_dtype, wanted_device = parse_dtype(dtype), parse_device(device)
    described = describe(model)
    for config in configs:
        make_cache(config, described.config, seed)
    return ModelUnderTest(
        lambda: load_weights(described, wanted_dtype, wanted_device),
        described.config,
        described.tokenizer,
        described.name,
        described.context,
    )


def check_csv(path: Path) -> None:
    """Refuses a table's place before anything is computed."""
    if path.is_dir():
        raise ValueError(f"--csv '{path}' is a folder; give a file")
    if not path.parent.is_dir():
        raise ValueError(f"--csv '{path}' is in no folder that exists; make it first")


def run_tasks(
    model: ModelUnderTest,
    tasks: Sequence[Task],
    configs: Sequence[CacheConfig],
    seed: int,
    csv: Path,
    detailed: bool = False,
) -> tuple[int, list[dict[str, Any]]]:
    """Runs tasks with several caches, writes the table, and prints the scores."""
    with SampleFile(csv.with_suffix(_SUFFIX), versions()) as file:
        runs = [Run(task, config, seed) for task in tasks for config in configs]
        evaluation = Evaluation(model, runs, file)
        code = run_all(evaluation)
    rows, details = list(evaluation.rows().values()), evaluation.details()
    if rows:
        write_csv(csv, details if detailed else rows)
        header = [*tasks[0].columns, "policy", "budget", *tasks[0].metrics, "samples"]
        write_text(markdown_table(header, [[row[name] for name in header] for row in rows]))
    return code, details


def run_all(evaluation: Evaluation) -> int:
    """Runs what is left to do under a progress bar; Ctrl-C ends it and loses nothing."""
    if evaluation.done:
        write_remark(f"{evaluation.done} of {evaluation.total} samples were done before")
    with Progress("evaluating", evaluation.total, "samples") as progress:
        progress.update(evaluation.done)
        try:
            evaluation.run(lambda run, count: progress.advance(count, run.label))
        except KeyboardInterrupt:
            write_remark(
                f"stopped; {evaluation.done} of {evaluation.total} samples are in"
                f" '{evaluation.file.path}', and the same command goes on from there"
            )
            return INTERRUPTED
    return 0


NEEDLE_HELP = """Hide a fact at some depth of a text of some length, and ask for it at the end.

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
    compression: CompressionOption = "query-agnostic",
    model: Model = BUNDLED,
    policy: Policies = "h2o",
    budgets: Budgets = "0.2,0.5,full",
    lengths: Annotated[str, typer.Option(help="Tokens of the whole prompt.")] = "512,1024,1536",
    depths: Annotated[str, typer.Option(help="Fractions of the text before the needle.")] = (
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
    heavy_fraction: HeavyFraction = 0.5,
    sink: Sink = 0,
    scoring: Scoring = "sum",
    decay: Decay = None,
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
    configs = parse_configs(
        policy,
        budgets,
        heavy_fraction,
        sink=sink,
        scoring=scoring,
        decay=decay,
        positions=parse_positions(positions),
        prefill_chunk=prefill_chunk,
        kv_bits=kv_bits,
    )
    grid = Grid(parse_numbers("lengths", lengths), _parse_depths(depths), tries)
    hidden = Needle(needle, question.replace("\\n", "\n"), answer, max_new_tokens)
    haystack = sample_prompt() if text is None else read_text_file(text)
    name = "needle" if text is None else f"needle in {text.stem}"
    tasks = [
        NeedleTask(name, haystack, grid, hidden, own, seed)
        for own in parse_compression(compression)
    ]
    tested = model_under_test(model, dtype, device, configs, seed)
    code, details = run_tasks(tested, tasks, configs, seed, csv, detailed=True)
    if plot is not None and details:
        plot_needles(plot, details, f"{name}, {tested.name} model")
    return code


def _parse_depths(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in split_list(text))
    except ValueError:
        raise ValueError(
            f"--depths {text!r} is not a list of fractions; give one such as 0,0.5,1"
        ) from None


PERPLEXITY_HELP = """Measure the perplexity of a text by position, with several cache sizes.

The text is cut into windows, each read on a cache of its own; a fraction as budget is of the whole
window. The table has a row for each range of positions.

Examples:

    h2okv eval perplexity --text book.txt --budgets 0.04,0.2,0.6,full --windows 16 --csv ppl.csv

    h2okv eval perplexity --text book.txt --policy h2o,recent --prefill-chunk 1 --csv ppl.csv
"""


def perplexity(
    csv: Csv,
    text: Annotated[
        Path | None, typer.Option(help="A text file; by default the opening of a novel.")
    ] = None,
    model: Model = BUNDLED,
    policy: Policies = "h2o",
    budgets: Budgets = "0.1,0.2,0.5,full",
    heavy_fraction: HeavyFraction = 0.5,
    sink: Sink = 0,
    scoring: Scoring = "sum",
    decay: Decay = None,
    positions: PositionsOption = "original",
    prefill_chunk: PrefillChunk = BLOCK,
    kv_bits: KvBits = None,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 1024,
    windows: Annotated[
        int | None, typer.Option(help="Read the first so many windows only.")
    ] = None,
    every: Annotated[int, typer.Option(help="Tokens of a range of positions.")] = 128,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> int:
    """Measures perplexity, as `HELP` tells the user."""
    check_csv(csv)
    configs = parse_configs(
        policy,
        budgets,
        heavy_fraction,
        sink=sink,
        scoring=scoring,
        decay=decay,
        positions=parse_positions(positions),
        prefill_chunk=prefill_chunk,
        kv_bits=kv_bits,
    )
    cut = Windows(length, windows, every)
    name = "sample_prompt" if text is None else text.stem
    task = Perplexity(name, sample_prompt() if text is None else read_text_file(text), cut)
    tested = model_under_test(model, dtype, device, configs, seed)
    return run_tasks(tested, [task], configs, seed, csv, detailed=True)[0]


RECALL_HELP = """Ask for one of many values that a long text holds, as RULER does.

Compression is query-aware if the question is read together with the text, query-agnostic if it
comes after the text has been read and evicted from.

Examples:

    h2okv eval recall --input niah_multikey_3.jsonl --budgets 0.2,0.5,full --csv recall.csv

    h2okv eval recall --input niah_multikey_3.jsonl --positions rolling --budgets 512 --csv r.csv
"""


def recall(
    input: Annotated[Path, typer.Option(help="RULER's JSONL: input and outputs.")],
    csv: Csv,
    compression: CompressionOption = "both",
    model: Model = BUNDLED,
    policy: Policies = "h2o",
    budgets: Budgets = "0.2,0.5,full",
    heavy_fraction: HeavyFraction = 0.5,
    sink: Sink = 0,
    scoring: Scoring = "sum",
    decay: Decay = None,
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
    configs = parse_configs(
        policy,
        budgets,
        heavy_fraction,
        sink=sink,
        scoring=scoring,
        decay=decay,
        positions=parse_positions(positions),
        prefill_chunk=prefill_chunk,
        kv_bits=kv_bits,
    )
    how = parse_choice("too-long", too_long, TOO_LONG)
    questions = read_ruler(input)
    tasks = [
        Recall(input.stem, questions, own, limit, how, max_new_tokens)
        for own in parse_compression(compression)
    ]
    tested = model_under_test(model, dtype, device, configs, seed)
    return run_tasks(tested, tasks, configs, seed, csv)[0]


SUMMARIZE_HELP = """Summarize articles with several cache sizes and score the summaries by ROUGE.

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
    heavy_fraction: HeavyFraction = 0.5,
    sink: Sink = 0,
    scoring: Scoring = "sum",
    decay: Decay = None,
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
    temperature: Annotated[float, typer.Option(help="0 = greedy decoding.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus (top-p) sampling.")] = 1.0,
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
    configs = parse_configs(
        policy,
        budgets,
        heavy_fraction,
        sink=sink,
        scoring=scoring,
        decay=decay,
        positions=parse_positions(positions),
        prefill_chunk=prefill_chunk,
        kv_bits=kv_bits,
    )
    options = BatchOptions(
        batch_size, limit, parse_choice("too-long", too_long, TOO_LONG), max_new_tokens
    )
    params = SamplingParams(temperature=temperature, top_p=top_p)
    articles = read_articles(input, references, template)
    task = Summarization(input.stem, articles, options, params, stemmer)
    tested = model_under_test(model, dtype, device, configs, seed)
    return run_tasks(tested, [task], configs, seed, csv)[0]


SAMPLES_FILE = "samples.jsonl"
_WORK_FOLDER = "working"

SWEEP_HELP = f"""Run policies, budgets and tasks as one file says, and set the scores side by side.

The folder gets results.csv (a row for each policy, budget, task and seed), results.md,
results.png, and samples.jsonl, where every result stands as it comes: after Ctrl-C the same
command goes on.

Experiments that come along: {", ".join(experiment_names())}.

Examples:

    h2okv eval sweep figure4 --data DIR --out figure4 --limit 100

    h2okv eval sweep my_experiment.yaml --model ./my-model --data DIR --out results
"""


def sweep(
    experiment: Annotated[
        str, typer.Argument(help="One that comes along, or a YAML file.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The folder that the results go to.")],
    data: Annotated[
        Path | None, typer.Option(help="The folder with the tasks' data files.")
    ] = None,
    model: Model = BUNDLED,
    only: Annotated[
        str | None, typer.Option(help="Run these tasks only, by name, with commas.")
    ] = None,
    limit: Limit = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Prompts at a time.", show_default="the experiment's")
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option(help="original, rolling or clamped.", show_default="the experiment's"),
    ] = None,
    prefill_chunk: PrefillChunk = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> int:
    """Runs an experiment, as `HELP` tells the user."""
    if data is not None and not data.is_dir():
        raise ValueError(f"--data '{data}' is no folder; name the one with the data files")
    placed = None if positions is None else parse_positions(positions)
    plan = load_experiment(experiment)
    configs = plan.placed(placed, prefill_chunk)
    work = out / _WORK_FOLDER
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out '{out}' cannot be made ({error.strerror}); choose another folder"
        ) from error
    tasks = _chosen(plan.make_tasks(Surroundings(data, work, limit, batch_size)), only)
    runs = [Run(task, config, seed) for task in tasks for config in configs for seed in plan.seeds]
    tested = model_under_test(model, dtype, device, configs, plan.seeds[0])
    with SampleFile(out / SAMPLES_FILE, versions()) as file:
        evaluation = Evaluation(tested, runs, file)
        code = run_all(evaluation)
        _write(plan, evaluation, out)
    return code


def _chosen(tasks: list[Task], only: str | None) -> list[Task]:
    if only is None:
        return tasks
    names = [task.name for task in tasks]
    for name in split_list(only):
        if name not in names:
            raise unknown_name("--only: task", name, dict.fromkeys(names))
    return [task for task in tasks if task.name in split_list(only)]


def _write(plan: Experiment, evaluation: Evaluation, out: Path) -> None:
    """Writes tables and picture of the runs that are done, and prints the table."""
    rows = evaluation.rows()
    if not rows:
        return
    lines = pivot(evaluation.runs, rows)
    write_csv(out / "results.csv", list(rows.values()))
    page = report(plan, lines, next(iter(rows.values())))
    with atomic_write(out / "results.md") as file:
        file.write(page)
    if importlib.util.find_spec("matplotlib") is not None:
        plot_sweep(out / "results.png", lines, plan.title)
    else:
        write_remark("no picture without matplotlib; pip install 'h2okv[plot]'")
    write_text(results_table(lines))


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
