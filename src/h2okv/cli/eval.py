"""`h2okv eval`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from h2okv.cli.args import (
    ModelOptions,
    SamplingOptions,
    cache_flags,
    cache_lists,
    check_file,
    model_options,
    parse_choice,
    parse_numbers,
    parse_positions,
    read_text,
    sampling_options,
    split_list,
)
from h2okv.config import CacheConfig
from h2okv.console import INTERRUPTED, Progress, write_remark, write_text

if TYPE_CHECKING:
    from h2okv.evaluation.model import ModelUnderTest
    from h2okv.evaluation.runner import Evaluation
    from h2okv.evaluation.sweep import Experiment
    from h2okv.evaluation.task import Compression, Task

_SUFFIX = ".samples.jsonl"
NEEDLE = "The city of {name} is {answer}."
QUESTION = "\nThe city of {name} is"
_TEXT_HELP = "A text file; by default the opening of a novel."
_TOO_LONG: tuple[Literal["refuse", "skip"], ...] = ("refuse", "skip")

Csv = Annotated[
    Path,
    typer.Option(help="The table; samples go beside it as they come, to NAME.samples.jsonl."),
]
Limit = Annotated[int | None, typer.Option(help="Use the first samples only.")]
TooLongOption = Annotated[
    str, typer.Option(help="refuse samples beyond the context window, or skip them.")
]
CompressionOption = Annotated[str, typer.Option(help="query-aware, query-agnostic, or both.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]

eval_app = typer.Typer(name="eval", pretty_exceptions_enable=False)


@eval_app.callback()
def _options() -> None:
    """Measure what a cache size costs in quality, on your model and task.

    Example:

        h2okv eval summarize --input xsum_0shot.jsonl --budget 64,128,256,full --csv xsum.csv
    """


def model_under_test(
    model: ModelOptions, configs: Sequence[CacheConfig], seed: int
) -> ModelUnderTest:
    """Describes a model to evaluate; its weights are loaded when the tasks are ready for them."""
    from h2okv.evaluation.model import ModelUnderTest, make_cache

    described = model.describe()
    for config in configs:
        make_cache(config, described.config, seed)
    return ModelUnderTest(
        lambda: model.load(described),
        described.config,
        described.tokenizer,
        described.name,
        described.context,
    )


def parse_compression(text: str) -> tuple[Compression, ...]:
    """Reads whether a cache is compressed with the question at hand."""
    from h2okv.evaluation.task import COMPRESSIONS

    found = tuple(name for name in COMPRESSIONS if text in (name, "both"))
    if not found:
        raise ValueError(
            f"--compression {text!r} is not known; choose from {', '.join(COMPRESSIONS)}, both"
        )
    return found


def run_tasks(
    model: ModelUnderTest,
    tasks: Sequence[Task],
    configs: Sequence[CacheConfig],
    seed: int,
    csv: Path,
    detailed: bool = False,
    shown: bool = True,
) -> tuple[int, list[dict[str, Any]]]:
    """Runs tasks with several caches, writes the table, and prints the scores."""
    from h2okv.evaluation.runner import Evaluation, Run, SampleFile
    from h2okv.provenance import versions
    from h2okv.records import markdown_table, write_csv

    with SampleFile(csv.with_suffix(_SUFFIX), versions()) as file:
        runs = [Run(task, config, seed) for task in tasks for config in configs]
        evaluation = Evaluation(model, runs, file)
        code = run_all(evaluation)
    rows, details = list(evaluation.rows().values()), evaluation.details()
    if rows:
        write_csv(csv, details if detailed else rows)
    if rows and shown:
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
                f" '{evaluation.file.path}', and the same command continues from there"
            )
            return INTERRUPTED
    return 0


@eval_app.command("needle")
@cache_lists(budget="20%,50%,full")
@model_options()
def needle(
    caches: list[CacheConfig],
    model: ModelOptions,
    csv: Csv,
    text: Annotated[
        Path | None, typer.Option(help="The haystack; by default the opening of a novel.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot the heat map: .png, .svg or .pdf.")
    ] = None,
    compression: CompressionOption = "query-agnostic",
    lengths: Annotated[str, typer.Option(help="Tokens of the whole prompt.")] = "512,1024,1536",
    depths: Annotated[str, typer.Option(help="Fractions of the text before the needle.")] = (
        "0,0.25,0.5,0.75,1"
    ),
    tries: Annotated[int, typer.Option(help="Needles for each length and depth.")] = 4,
    needle: Annotated[str, typer.Option("--needle", help="What is hidden.")] = NEEDLE,
    question: Annotated[str, typer.Option(help="What the prompt ends in.")] = QUESTION,
    answer: Annotated[
        str | None, typer.Option(help="The answer in --needle.", show_default="drawn")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 16,
    seed: Seed = 0,
) -> int:
    """Hide a fact at some depth of a text of some length, and ask for it at the end.

    Each needle is another name and answer unless --needle says otherwise. The table and the heat
    map have a cell for each length and depth.

    Examples:

        h2okv eval needle --text book.txt --budget 20%,50%,full --csv needle.csv --plot needle.png

        h2okv eval needle --text book.txt --needle "The pass key is 7914." --answer 7914
        --question " The pass key is" --csv key.csv
    """
    from h2okv.assets import sample_prompt
    from h2okv.evaluation.plots import check_plot, plot_needles
    from h2okv.evaluation.tasks.needle import Grid, Needle, NeedleTask

    check_file("csv", csv)
    if plot is not None:
        check_plot(plot)
    grid = Grid(parse_numbers("lengths", lengths), _parse_depths(depths), tries)
    hidden = Needle(needle, question.replace("\\n", "\n"), answer, max_new_tokens)
    haystack = sample_prompt() if text is None else read_text("text", text)
    name = "needle" if text is None else f"needle in {text.stem}"
    tasks = [
        NeedleTask(name, haystack, grid, hidden, own, seed)
        for own in parse_compression(compression)
    ]
    tested = model_under_test(model, caches, seed)
    code, details = run_tasks(tested, tasks, caches, seed, csv, detailed=True)
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


@eval_app.command("perplexity")
@cache_lists(budget="10%,20%,50%,full", prefill_chunk=64)
@model_options()
def perplexity(
    caches: list[CacheConfig],
    model: ModelOptions,
    csv: Csv,
    text: Annotated[Path | None, typer.Option(help=_TEXT_HELP)] = None,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 1024,
    windows: Annotated[int | None, typer.Option(help="Use the first windows only.")] = None,
    every: Annotated[int, typer.Option(help="Tokens of a range of positions.")] = 128,
    seed: Seed = 0,
) -> int:
    """Measure the perplexity of a text by position, with several cache sizes.

    The text is cut into windows, each read on a cache of its own; a budget in percent is of the
    whole window. The table has a row for each range of positions.

    Examples:

        h2okv eval perplexity --text book.txt --budget 4%,20%,60%,full --windows 16 --csv ppl.csv

        h2okv eval perplexity --text book.txt --policy h2o,recent --prefill-chunk 1 --csv ppl.csv
    """
    from h2okv.assets import sample_prompt
    from h2okv.evaluation.tasks.perplexity import Perplexity, Windows

    check_file("csv", csv)
    cut = Windows(length, windows, every)
    name = "sample_prompt" if text is None else text.stem
    task = Perplexity(name, sample_prompt() if text is None else read_text("text", text), cut)
    tested = model_under_test(model, caches, seed)
    return run_tasks(tested, [task], caches, seed, csv, detailed=True)[0]


@eval_app.command("fidelity")
@cache_lists(
    budget="50%,25%,10%,5%",
    policy="h2o,sink_recent,snapkv",
    scoring="sum,decay",
    without=("positions", "prefill_chunk"),
)
@model_options()
def fidelity(
    caches: list[CacheConfig],
    model: ModelOptions,
    csv: Csv = Path("fidelity.csv"),
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text, or JSONL with prompt, messages or turns; may be repeated. By default the"
            " opening of a novel.",
            show_default=False,
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a text read at once.")] = 512,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens compared after them; the most of an answer.")
    ] = 32,
    texts: Annotated[
        int | None,
        typer.Option(help="Texts or prompts of each file.", show_default="8, or all of fewer"),
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(help="decode: evict after each new token. block: read them all at once."),
    ] = "decode",
    raw: Annotated[bool, typer.Option("--raw", help="Prompts without the chat template.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Plot quality against bytes: .png, .svg or .pdf.")
    ] = None,
    recommend: Annotated[
        float | None,
        typer.Option(
            help="Name the smallest cache that agrees with the full one on this fraction of tokens."
        ),
    ] = None,
    seed: Seed = 0,
) -> int:
    """Measure what a cache changes of what the model says, on your texts, for many caches at once.

    Each prompt is read once for all caches; then the next tokens are read on each, and what it
    predicts is compared with the full cache: KL divergence, agreement on the likeliest token, ratio
    of perplexities, bytes held. A prompt of a JSONL file is followed by the full cache's own greedy
    answer. Intervals are 95 % bootstrap over texts.

    Examples:

        h2okv eval fidelity --model smollm2 --data manual.txt --recommend 0.98

        h2okv eval fidelity --data book.txt --data chats.jsonl --texts 50 --prompt-tokens 1024
        --policy h2o,recent --scoring sum,decay,value_norm --csv all.csv --plot all.png
    """
    from h2okv.assets import sample_prompt
    from h2okv.evaluation.plots import check_plot, plot_fidelity
    from h2okv.evaluation.runner import Run
    from h2okv.evaluation.tasks.fidelity import ALL, PROTOCOLS, Fidelity, Reading, Source

    check_file("csv", csv)
    if plot is not None:
        check_plot(plot)
    if recommend is not None and not 0 < recommend <= 1:
        raise ValueError(f"--recommend {recommend:g} is no agreement; give a fraction up to 1")
    how = parse_choice("protocol", protocol, PROTOCOLS)
    reading = Reading(prompt_tokens, new_tokens, texts, how, raw)
    sources = [Source.read(path) for path in data or ()]
    task = Fidelity(sources or [Source("sample_prompt", sample_prompt())], reading)
    tested = model_under_test(model, caches, seed)
    code, details = run_tasks(tested, [task], caches, seed, csv, detailed=True, shown=False)
    found = []
    for own in caches:
        columns = {**Run(task, own, seed).cache_columns(), "data": ALL}.items()
        rows = [row for row in details if columns <= row.items()]  # none if it is not done
        found += [dict(row, cache=own.policy_label, flags=cache_flags(own)) for row in rows]
    if found:
        write_text(_fidelity_table(found))
    drawn = [row for row in found if row["policy"] != "full"]
    if plot is not None and drawn:
        plot_fidelity(plot, drawn, f"{tested.name}, {drawn[0]['texts']} texts")
    if recommend is not None and found and code == 0:
        write_text(_recommendation(found, recommend))
    return code


def _fidelity_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each cache, the intervals in brackets."""
    from h2okv.records import markdown_table

    def cell(row: dict[str, Any], name: str) -> str:
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        return f"{row[name]:.3f}" + ("" if low is None else f" ({low:.3f} to {high:.3f})")

    names = ("agreement", "kl", "perplexity_ratio")
    shown = ["agreement", "KL", "perplexity ratio"]
    lines = []
    for row in rows:
        share = f"{100 * row['bytes_fraction']:.1f} %"
        cells = [cell(row, name) for name in names]
        lines.append([row["cache"], row["budget"], share, *cells, row["texts"]])
    return markdown_table(["cache", "budget", "bytes", *shown, "texts"], lines)


def _recommendation(rows: Sequence[dict[str, Any]], least: float) -> str:
    """The smallest cache with so much agreement, ready to paste."""
    enough = [row for row in rows if row["agreement"] >= least]
    if not enough:
        best = max(rows, key=lambda row: row["agreement"])
        return (
            f"\nno cache reaches an agreement of {least:g}; the best has {best['agreement']:.3f}:"
            f" {best['flags']}\n"
        )
    best = min(enough, key=lambda row: row["bytes_fraction"])
    share, texts = 100 * best["bytes_fraction"], best["texts"]
    return (
        f"\nthe smallest cache with an agreement of {least:g} or more ({best['agreement']:.3f} on"
        f" {texts} texts, {share:.1f} % of the bytes):\n{best['flags']}\n"
    )


@eval_app.command("recall")
@cache_lists(budget="20%,50%,full")
@model_options()
def recall(
    caches: list[CacheConfig],
    model: ModelOptions,
    input: Annotated[Path, typer.Option(help="RULER's JSONL: input and outputs.")],
    csv: Csv,
    compression: CompressionOption = "both",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    limit: Limit = None,
    too_long: TooLongOption = "refuse",
    seed: Seed = 0,
) -> int:
    """Ask for one of many values that a long text holds, as RULER does.

    Compression is query-aware if the question is read together with the text, query-agnostic if it
    comes after the text has been read and evicted from.

    Examples:

        h2okv eval recall --input niah_multikey_3.jsonl --budget 20%,50%,full --csv recall.csv

        h2okv eval recall --input niah_multikey_3.jsonl --positions rolling --budget 512 --csv r.csv
    """
    from h2okv.evaluation.tasks.ruler import Recall, read_ruler

    check_file("csv", csv)
    how = parse_choice("too-long", too_long, _TOO_LONG)
    questions = read_ruler(input)
    tasks = [
        Recall(input.stem, questions, own, limit, how, max_new_tokens)
        for own in parse_compression(compression)
    ]
    tested = model_under_test(model, caches, seed)
    return run_tasks(tested, tasks, caches, seed, csv)[0]


@eval_app.command("summarize")
@cache_lists(budget="64,128,256,512,1024,full")
@model_options()
@sampling_options(without=("max_new_tokens", "seed"), models_own=False)
def summarize(
    caches: list[CacheConfig],
    model: ModelOptions,
    sampling: SamplingOptions,
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
    template: Annotated[
        str | None, typer.Option(help="A prompt with {article} in it, for articles without one.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of a summary.", show_default="the file's, or 64 to 512"),
    ] = None,
    stemmer: Annotated[bool, typer.Option("--stemmer", help="Compare stems of words.")] = False,
    batch_size: Annotated[int, typer.Option(help="Articles at a time.")] = 8,
    limit: Limit = None,
    too_long: TooLongOption = "refuse",
    seed: Seed = 0,
) -> int:
    """Summarize articles with several cache sizes and score the summaries by ROUGE.

    Every summary is kept as it comes: after Ctrl-C the same command continues.

    Examples:

        h2okv eval summarize --input xsum_0shot.jsonl --budget 64,128,256,full --csv xsum.csv

        h2okv eval summarize --input cnndm_src.txt --references cnndm_refs.jsonl --csv cnndm.csv

        h2okv eval summarize --input long.jsonl --positions rolling --budget 512 --csv long.csv
    """
    from h2okv.evaluation.task import BatchOptions
    from h2okv.evaluation.tasks.summarization import Summarization, read_articles

    check_file("csv", csv)
    options = BatchOptions(
        batch_size, limit, parse_choice("too-long", too_long, _TOO_LONG), max_new_tokens
    )
    params = sampling.params()  # greedy unless asked for: results must not hang on a model's wish
    articles = read_articles(input, references, template)
    task = Summarization(input.stem, articles, options, params, stemmer)
    tested = model_under_test(model, caches, seed)
    return run_tasks(tested, [task], caches, seed, csv)[0]


SAMPLES_FILE = "samples.jsonl"
_WORK_FOLDER = "working"


@eval_app.command("sweep")
@model_options()
def sweep(
    model: ModelOptions,
    experiment: Annotated[
        str, typer.Argument(help="The name of one, or a YAML file.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The folder that the results go to.")],
    data: Annotated[
        Path | None, typer.Option(help="The folder with the tasks' data files.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Run only these tasks, comma-separated.")] = None,
    limit: Limit = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Prompts at a time.", show_default="the experiment's")
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option(help="original, rolling or clamped.", show_default="the experiment's"),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(help="Most tokens read at once.", show_default="the experiment's"),
    ] = None,
) -> int:
    """Run policies, budgets and tasks as one file says, and set the scores side by side.

    The folder gets results.csv (a row for each policy, budget, task and seed), results.md,
    results.png, and samples.jsonl, where every result stands as it comes: after Ctrl-C the same
    command continues.

    Experiments included: diversity, figure4, figure9, scoring, table1, table10, table2,
    table6, table8, table9.

    Examples:

        h2okv eval sweep figure4 --data DIR --out figure4 --limit 100

        h2okv eval sweep my_experiment.yaml --model ./my-model --data DIR --out results
    """
    from h2okv.evaluation.runner import Evaluation, Run, SampleFile
    from h2okv.evaluation.sweep import Surroundings, load_experiment
    from h2okv.provenance import versions

    if data is not None and not data.is_dir():
        raise ValueError(f"--data '{data}' is not a folder; name the one with the data files")
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
    tested = model_under_test(model, configs, plan.seeds[0])
    with SampleFile(out / SAMPLES_FILE, versions()) as file:
        evaluation = Evaluation(tested, runs, file)
        code = run_all(evaluation)
        _write(plan, evaluation, out)
    return code


def _chosen(tasks: list[Task], only: str | None) -> list[Task]:
    from h2okv.records import unknown_name

    if only is None:
        return tasks
    names = [task.name for task in tasks]
    for name in split_list(only):
        if name not in names:
            raise unknown_name("--only: task", name, dict.fromkeys(names))
    return [task for task in tasks if task.name in split_list(only)]


def _write(plan: Experiment, evaluation: Evaluation, out: Path) -> None:
    """Writes tables and picture of the runs that are done, and prints the table."""
    from h2okv.evaluation.plots import plot_sweep
    from h2okv.evaluation.sweep import pivot, report, results_table
    from h2okv.records import atomic_write, write_csv

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


def lm_eval(
    context: typer.Context,
    data: Annotated[
        Path | None,
        typer.Option(help="The folder of the tasks' data files; or set H2OKV_EVAL_DATA."),
    ] = None,
) -> int:
    """Run lm-evaluation-harness with an H2O cache: the model type h2okv and six tasks.

    All options but --data are lm_eval's own; `lm_eval run --help` lists them. --model is h2okv
    unless you say otherwise. The tasks read local files: h2okv_copa, h2okv_rte, h2okv_piqa,
    h2okv_openbookqa, h2okv_winogrande, h2okv_mathqa, and h2okv_tasks for all six.

    Examples:

        h2okv lm-eval --data DIR --tasks h2okv_copa --num_fewshot 5
        --model_args pretrained=bundled,heavy=0.1,recent=0.1

        h2okv lm-eval --data DIR --tasks h2okv_tasks --output_path OUT
        --model_args pretrained=./my-model,heavy=64,recent=64,prefill_chunk=1

        h2okv lm-eval ls tasks
    """
    from h2okv.evaluation.lm_eval.launcher import run_harness

    try:
        return run_harness(context.args, data)
    except KeyboardInterrupt:
        write_remark(
            "stopped; answers that --use_cache stored stay, and the same command continues from"
            " them."
        )
        return INTERRUPTED


lm_eval.context_settings = {  # type: ignore[attr-defined]
    "allow_extra_args": True,
    "ignore_unknown_options": True,
}
