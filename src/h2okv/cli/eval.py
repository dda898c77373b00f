"""`h2okv eval` and `h2okv lm-eval`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from h2okv.cli import args
from h2okv.cli.args import JSON, SEED, TEXT, ModelOptions, SamplingOptions, option
from h2okv.config import POSITIONS, CacheConfig
from h2okv.console import (
    INTERRUPTED,
    Progress,
    check_least,
    write_json,
    write_remark,
    write_text,
)
from h2okv.plots import check_plot
from h2okv.records import atomic_write, markdown_table, naming, unknown_name, write_csv

if TYPE_CHECKING:
    from h2okv.evaluation.model import ModelUnderTest
    from h2okv.evaluation.runner import Evaluation
    from h2okv.evaluation.sweep import Experiment
    from h2okv.evaluation.task import Task
    from h2okv.evaluation.tasks.recall import Compression

NEEDLE = "The city of {name} is {answer}."
QUESTION = "\nThe city of {name} is"
_TOO_LONG: tuple[Literal["refuse", "skip"], ...] = ("refuse", "skip")

_CSV_HELP = "The table; samples go beside it as they come, to NAME.samples.jsonl."
CSV = option(..., _CSV_HELP)
LIMIT = option(None, "Use the first samples only.")
TOO_LONG = option("refuse", "refuse samples beyond the context window, or skip them.")
_COMPRESSION_HELP = "query-aware, query-agnostic, or both."

eval_app = typer.Typer(name="eval", add_completion=False, pretty_exceptions_enable=False)


@eval_app.callback()
def _options() -> None:
    """Measure what a cache size costs in quality, on your model and task.

    Example:

        h2okv eval summarize --input xsum_0shot.jsonl --budget 64,128,256,full --csv xsum.csv
    """


@eval_app.command("needle")
@args.cache_lists("20%,50%,full")
@args.model_options()
def needle(
    caches: list[CacheConfig],
    model: ModelOptions,
    csv: Path = CSV,
    text: Path | None = option(None, "The haystack; by default the opening of a novel."),
    plot: Path | None = option(None, "Plot the heat map: .png, .svg or .pdf."),
    compression: str = option("query-agnostic", _COMPRESSION_HELP),
    lengths: str = option("512,1024,1536", "Tokens of the whole prompt."),
    depths: str = option("0,0.25,0.5,0.75,1", "Fractions of the text before the needle."),
    tries: int = option(4, "Needles for each length and depth."),
    needle: str = option(NEEDLE, "What is hidden."),
    question: str = option(QUESTION, "What the prompt ends in."),
    answer: str | None = option(None, "The answer in --needle (drawn)."),
    max_new_tokens: int = option(16, "Most tokens of an answer."),
    seed: int = SEED,
    as_json: bool = JSON,
) -> int:
    """Hide a fact at some depth of a text of some length, and ask for it at the end.

    Each needle is another name and answer unless --needle says otherwise. The table and the heat
    map have a cell for each length and depth.

    Examples:

        h2okv eval needle --text book.txt --budget 20%,50%,full --csv needle.csv --plot needle.png
        h2okv eval needle --text book.txt --needle "The pass key is 7914." --answer 7914
            --question " The pass key is" --csv key.csv
    """
    from h2okv.evaluation.plots import plot_needles
    from h2okv.evaluation.tasks.recall import NeedleTask

    args.check_file("csv", csv)
    check_plot(plot)
    haystack = args.text_or_sample(text)
    name = "needle" if text is None else f"needle in {text.stem}"
    tasks = [
        NeedleTask(
            name,
            haystack,
            lengths=args.parse_numbers("lengths", lengths, int),
            depths=args.parse_numbers("depths", depths, float, "0,1"),
            tries=tries,
            statement=needle,
            question=question.replace("\\n", "\n"),
            answer=answer,
            max_new_tokens=max_new_tokens,
            compression=own,
            seed=seed,
        )
        for own in parse_compression(compression)
    ]
    tested = model_under_test(model, caches, seed)
    code, details = run_tasks(tested, tasks, caches, seed, csv, as_json, detailed=True)
    if plot is not None and details:
        plot_needles(plot, details, f"{name}, {tested.name} model")
    return code


@eval_app.command("perplexity")
@args.cache_lists("10%,20%,50%,full", prefill_chunk=option(64, args.CHUNK_HELP))
@args.model_options()
def perplexity(
    caches: list[CacheConfig],
    model: ModelOptions,
    csv: Path = CSV,
    text: Path | None = TEXT,
    length: int = option(1024, "Tokens of a window."),
    windows: int | None = option(None, "Use the first windows only."),
    every: int = option(128, "Tokens of a range of positions."),
    seed: int = SEED,
    as_json: bool = JSON,
) -> int:
    """Measure the perplexity of a text by position, with several cache sizes.

    The text is cut into windows, each read on a cache of its own; a budget in percent is of the
    whole window. The table has a row for each range of positions.

    Examples:

        h2okv eval perplexity --text book.txt --budget 4%,20%,60%,full --windows 16 --csv ppl.csv
        h2okv eval perplexity --text book.txt --policy h2o,recent --prefill-chunk 1 --csv ppl.csv
    """
    from h2okv.evaluation.tasks.perplexity import Perplexity

    args.check_file("csv", csv)
    name = "sample_prompt" if text is None else text.stem
    content = args.text_or_sample(text)
    task = Perplexity(name, content, length, windows, every)
    for own in caches:
        if not own.is_full and own.entries(length) >= length:
            write_remark(f"note: {own.label} keeps all {length} tokens of a window, as full does")
    tested = model_under_test(model, caches, seed)
    return run_tasks(tested, [task], caches, seed, csv, as_json, detailed=True)[0]


@eval_app.command("fidelity")
@args.cache_lists(
    "50%,25%,10%,5%",
    "h2o,sink_recent,snapkv",
    "sum,decay",
    positions="original",
    prefill_chunk=None,
)
@args.model_options()
def fidelity(
    caches: list[CacheConfig],
    model: ModelOptions,
    csv: Path = option(Path("fidelity.csv"), _CSV_HELP),
    data: list[Path] | None = option(
        None,
        "A text, or JSONL with prompt, messages or turns; may be repeated. By default the opening"
        " of a novel.",
    ),
    prompt_tokens: int = option(512, "Tokens of a text read at once."),
    new_tokens: int = option(32, "Tokens compared after them; the most of an answer."),
    texts: int | None = option(None, "Texts or prompts of each file (8, or all of fewer)."),
    protocol: str = option(
        "decode", "decode: evict after each new token. block: read them all at once."
    ),
    raw: bool = option(False, "Prompts without the chat template.", "--raw"),
    plot: Path | None = option(None, "Plot quality against bytes: .png, .svg or .pdf."),
    recommend: float | None = option(
        None, "Name the smallest cache that agrees with the full one on this fraction of tokens."
    ),
    seed: int = SEED,
    as_json: bool = JSON,
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
    from h2okv.evaluation.plots import plot_fidelity
    from h2okv.evaluation.runner import Run
    from h2okv.evaluation.tasks.fidelity import ALL, PROTOCOLS, Fidelity, Source

    args.check_file("csv", csv)
    check_plot(plot)
    if recommend is not None and not 0 < recommend <= 1:
        raise ValueError(
            f"--recommend {recommend:g} is not a fraction of tokens; give one above 0, up to 1"
        )
    how = args.parse_choice("protocol", protocol, PROTOCOLS)
    sources = [Source.read(path) for path in data or ()]
    task = Fidelity(
        sources=sources or [Source("sample_prompt", args.text_or_sample(None))],
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        texts=texts,
        protocol=how,
        raw=raw,
    )
    tested = model_under_test(model, caches, seed)
    code, details = run_tasks(tested, [task], caches, seed, csv, None, detailed=True)
    found = []
    for own in caches:
        columns = {**Run(task, own, seed).columns(), "data": ALL}.items()
        rows = [row for row in details if columns <= row.items()]  # none if it is not done
        found += [dict(row, cache=own.policy_label, flags=args.cache_flags(own)) for row in rows]
    best = None
    if recommend is not None and found and code == 0:
        best = _smallest(found, recommend)
    if as_json:
        write_json({"csv": str(csv), "rows": found, "recommended": best and best["flags"]})
    elif found:
        write_text(_fidelity_table(found))
    drawn = [row for row in found if row["policy"] != "full"]
    if plot is not None and drawn:
        plot_fidelity(plot, drawn, f"{tested.name}, {drawn[0]['texts']} texts")
    if recommend is not None and found and code == 0 and not as_json:
        write_text(_recommendation(found, best, recommend))
    return code


@eval_app.command("layers")
@args.model_options()
def layers(
    model: ModelOptions,
    out: Path = option(Path("layers.json"), "The file that --layer-budgets reads."),
    text: Path | None = TEXT,
    tokens: int = option(1024, "Tokens of the text that are read."),
) -> int:
    """Measure how heavy hitters are best divided among a model's layers, for --layer-budgets.

    Once for a model: its layers differ far more than texts do.

    Example:

        h2okv eval layers --model smollm2 --out smollm2.json
    """
    import torch

    import h2okv

    check_least(2, tokens=tokens)
    described = model.describe()
    ids = described.tokenizer(args.text_or_sample(text), verbose=False)["input_ids"][:tokens]
    with atomic_write(out) as file:  # opened before the work, so that a bad place costs none
        found = h2okv.measure_layer_budgets(model.load(described), torch.tensor([ids]))
        file.write(json.dumps(found) + "\n")
    write_text(f"{out}: {min(found):g} to {max(found):g} of the even share in {len(found)} layers")
    return 0


@eval_app.command("recall")
@args.cache_lists("20%,50%,full")
@args.model_options()
def recall(
    caches: list[CacheConfig],
    model: ModelOptions,
    input: Path = option(..., "RULER's JSONL: input and outputs."),
    csv: Path = CSV,
    compression: str = option("both", _COMPRESSION_HELP),
    max_new_tokens: int = option(128, "Most tokens of an answer."),
    limit: int | None = LIMIT,
    too_long: str = TOO_LONG,
    seed: int = SEED,
    as_json: bool = JSON,
) -> int:
    """Ask for one of many values that a long text holds, as RULER does.

    Compression is query-aware if the question is read together with the text, query-agnostic if it
    comes after the text has been read and evicted from.

    Examples:

        h2okv eval recall --input niah_multikey_3.jsonl --budget 20%,50%,full --csv recall.csv
        h2okv eval recall --input niah_multikey_3.jsonl --positions rolling --budget 512 --csv r.csv
    """
    from h2okv.evaluation.tasks.recall import Recall

    args.check_file("csv", csv)
    how = args.parse_choice("too-long", too_long, _TOO_LONG)
    options: dict[str, Any] = {"limit": limit, "too_long": how, "max_new_tokens": max_new_tokens}
    tasks = [
        Recall(input.stem, input, compression=own, **options)
        for own in parse_compression(compression)
    ]
    tested = model_under_test(model, caches, seed)
    return run_tasks(tested, tasks, caches, seed, csv, as_json)[0]


@eval_app.command("summarize")
@args.cache_lists("64,128,256,512,1024,full")
@args.model_options()
@args.sampling_options(max_new_tokens=None, models_own=False, seed=None)
def summarize(
    caches: list[CacheConfig],
    model: ModelOptions,
    sampling: SamplingOptions,
    input: Path = option(
        ...,
        "JSONL with article and summary_gt (the llama recipe's) or context and answers"
        " (LongBench); with --references one article on each line.",
    ),
    csv: Path = CSV,
    references: Path | None = option(None, "JSONL with refs, one line for each article."),
    template: str | None = option(None, "A prompt with {article} in it, for articles without one."),
    max_new_tokens: int | None = option(None, "Most tokens of a summary (the file's, or 64-512)."),
    stemmer: bool = option(False, "Compare stems of words.", "--stemmer"),
    batch_size: int = option(8, "Articles at a time."),
    limit: int | None = LIMIT,
    too_long: str = TOO_LONG,
    seed: int = SEED,
    as_json: bool = JSON,
) -> int:
    """Summarize articles with several cache sizes and score the summaries by ROUGE.

    Every summary is kept as it comes: after Ctrl-C the same command continues.

    Examples:

        h2okv eval summarize --input xsum_0shot.jsonl --budget 64,128,256,full --csv xsum.csv
        h2okv eval summarize --input cnndm_src.txt --references cnndm_refs.jsonl --csv cnndm.csv
        h2okv eval summarize --input long.jsonl --positions rolling --budget 512 --csv long.csv
    """
    from h2okv.evaluation.task import SAMPLING
    from h2okv.evaluation.tasks.generation import Summarization

    args.check_file("csv", csv)
    how = args.parse_choice("too-long", too_long, _TOO_LONG)
    params = sampling.params()  # greedy unless asked for: results must not hang on a model's wish
    task = Summarization(
        input.stem,
        input,
        references,
        template,
        stemmer,
        batch_size=batch_size,
        limit=limit,
        too_long=how,
        max_new_tokens=max_new_tokens,
        **{name: getattr(params, name) for name in SAMPLING},
    )
    tested = model_under_test(model, caches, seed)
    return run_tasks(tested, [task], caches, seed, csv, as_json)[0]


@eval_app.command("sweep")
@args.model_options()
def sweep(
    model: ModelOptions,
    experiment: str = typer.Argument(help="The name of one, or a YAML file.", show_default=False),
    out: Path = option(..., "The folder that the results go to."),
    data: Path | None = option(None, "The folder with the tasks' data files."),
    only: str | None = option(None, "Run only these tasks, comma-separated."),
    limit: int | None = LIMIT,
    batch_size: int | None = option(None, "Prompts at a time (the experiment's)."),
    positions: str | None = option(None, "original, rolling or clamped (the experiment's)."),
    prefill_chunk: int | None = option(None, "Most tokens read at once (the experiment's)."),
    as_json: bool = JSON,
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

    if data is not None and not data.is_dir():
        raise ValueError(f"--data '{data}' is not a folder; name the one with the data files")
    placed = None if positions is None else args.parse_choice("positions", positions, POSITIONS)
    plan = load_experiment(experiment)
    configs = plan.placed(placed, prefill_chunk)
    work = out / "working"
    with naming(out, "written", "choose another folder for --out"):
        work.mkdir(parents=True, exist_ok=True)
    tasks = _chosen(plan.make_tasks(Surroundings(data, work, limit, batch_size)), only)
    runs = [Run(task, config, seed) for task in tasks for config in configs for seed in plan.seeds]
    tested = model_under_test(model, configs, plan.seeds[0])
    with SampleFile(out / "samples.jsonl") as file:
        evaluation = Evaluation(tested, runs, file)
        code = run_all(evaluation)
        _write(plan, evaluation, out, as_json)
    return code


def lm_eval(
    context: typer.Context,
    data: Path | None = option(None, "Folder of the tasks' data files; or set H2OKV_EVAL_DATA."),
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


def model_under_test(
    model: ModelOptions, configs: Sequence[CacheConfig], seed: int
) -> ModelUnderTest:
    """Describes a model to evaluate; its weights are loaded when the tasks are ready for them."""
    from h2okv.evaluation.model import ModelUnderTest, make_cache

    described = model.describe()
    for config in configs:
        make_cache(config, described.config, seed)
    parts = described.config, described.tokenizer, described.name, described.context
    return ModelUnderTest(lambda: model.load(described), *parts)


def parse_compression(text: str) -> tuple[Compression, ...]:
    """Reads whether a cache is compressed with the question at hand."""
    from h2okv.evaluation.tasks.recall import COMPRESSIONS

    chosen = args.parse_choice("compression", text, (*COMPRESSIONS, "both"))
    return tuple(name for name in COMPRESSIONS if chosen in (name, "both"))


def run_tasks(
    model: ModelUnderTest,
    tasks: Sequence[Task],
    configs: Sequence[CacheConfig],
    seed: int,
    csv: Path,
    as_json: bool | None,
    detailed: bool = False,
) -> tuple[int, list[dict[str, Any]]]:
    """Runs tasks with several caches, writes the table, and prints the scores, if not None."""
    from h2okv.evaluation.runner import Evaluation, Run, SampleFile

    with SampleFile(csv.with_suffix(".samples.jsonl")) as file:
        runs = [Run(task, config, seed) for task in tasks for config in configs]
        evaluation = Evaluation(model, runs, file)
        code = run_all(evaluation)
    rows, details = list(evaluation.rows().values()), evaluation.details()
    if rows:
        write_csv(csv, details if detailed else rows)
    if as_json:
        write_json({"csv": str(csv), "rows": details if detailed else rows})
    elif rows and as_json is not None:
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


def _chosen(tasks: list[Task], only: str | None) -> list[Task]:

    if only is None:
        return tasks
    names = [task.name for task in tasks]
    for name in args.split_list(only):
        if name not in names:
            raise unknown_name("--only: task", name, dict.fromkeys(names))
    return [task for task in tasks if task.name in args.split_list(only)]


def _write(plan: Experiment, evaluation: Evaluation, out: Path, as_json: bool) -> None:
    """Writes tables and picture of the runs that are done, and prints the table."""
    from h2okv.evaluation.plots import plot_sweep
    from h2okv.evaluation.sweep import pivot, report, results_table

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
    if as_json:
        write_json({"csv": str(out / "results.csv"), "rows": list(rows.values())})
    else:
        write_text(results_table(lines))


def _fidelity_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each cache, the intervals in brackets."""

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


def _smallest(rows: Sequence[dict[str, Any]], least: float) -> dict[str, Any] | None:
    """The smallest cache with so much agreement."""
    enough = (row for row in rows if row["agreement"] >= least)
    return min(enough, key=lambda row: row["bytes_fraction"], default=None)


def _recommendation(
    rows: Sequence[dict[str, Any]], best: dict[str, Any] | None, least: float
) -> str:
    """That cache, ready to paste."""
    if best is None:
        best = max(rows, key=lambda row: row["agreement"])
        return (
            f"\nno cache reaches an agreement of {least:g}; the best has {best['agreement']:.3f}:"
            f" {best['flags']}\n"
        )
    share, texts = 100 * best["bytes_fraction"], best["texts"]
    return (
        f"\nthe smallest cache with an agreement of {least:g} or more ({best['agreement']:.3f} on"
        f" {texts} texts, {share:.1f} % of the bytes):\n{best['flags']}\n"
    )
