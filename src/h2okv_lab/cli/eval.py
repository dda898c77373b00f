"""`h2okv eval` and `h2okv lm-eval`."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import h2okv
from h2okv import cache_spec
from h2okv.budget import flat_factors
from h2okv.cli import args, readers
from h2okv.cli.args import JSON, ModelOptions, SamplingOptions, Typed, option
from h2okv.cli.readers import choice
from h2okv.config import BEST, BEST_HEAVY_FRACTION, KV_BITS, CacheConfig
from h2okv.console import INTERRUPTED, Progress, install_hint, write_json, write_remark, write_text
from h2okv.records import atomic_write, naming, short_repr, unknown_name
from h2okv_lab.cli import options
from h2okv_lab.tables import markdown_table, write_csv

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from h2okv_lab.evaluation.sweep import Experiment
    from h2okv_lab.evaluation.task import Evaluation, Run, Task

EXPERIMENTS = Path(__file__).parents[1] / "evaluation" / "experiments"
NEEDLE = "The city of {name} is {answer}."
QUESTION = "\nThe city of {name} is"


def _table(option: str, path: Path) -> Path:
    """Raise ValueError also for a file that is no table of these commands, which replace it."""
    readers.writable(option, path)
    first = path.read_bytes().split(b"\n")[0] if path.exists() else b""
    if first and b"policy" not in first.split(b","):
        raise ValueError(f"{option} '{path}' is not a table of h2okv eval; choose another file")
    return path


_CSV_HELP = "Table; samples go to NAME.samples.jsonl."
DEFAULT_CSV = Path("fidelity.csv")
CSV = option(..., _CSV_HELP, read=_table)
LIMIT = option(None, "Use the first samples only.", read=readers.count)
TOO_LONG = option(
    "refuse", "refuse or skip what exceeds the context.", read=choice("refuse", "skip")
)

eval_app = args.group("eval")


@dataclass
class Trial:
    """The caches of a task, its model and the files of its scores."""

    caches: list[CacheConfig]
    model: ModelOptions = args.model_options()
    csv: Path = CSV
    seed: int = option(0, "Random seed.")
    as_json: bool = JSON

    def run(
        self, tasks: Sequence[Task], detailed: bool = False, shown: bool = True
    ) -> tuple[int, list[dict[str, Any]]]:
        """Run tasks, write the table and print the scores.

        Returns:
            The exit code, and the rows of all details.
        """
        from h2okv_lab.evaluation.task import Run

        runs = [Run(task, config, self.seed) for task in tasks for config in self.caches]
        code, evaluation = run_all(self.model, runs, self._samples_path(tasks))
        self.caches = [run.config for run in evaluation.runs[: len(self.caches)]]
        rows, details = list(evaluation.rows().values()), evaluation.details()
        table = details if detailed else rows
        if rows:
            write_csv(self.csv, table)
        if shown and self.as_json:
            write_json({"csv": str(self.csv), "rows": table})
        elif shown and rows:
            header = [*tasks[0].columns, "cache", *tasks[0].metrics, "samples"]
            write_text(markdown_table(header, [[row[name] for name in header] for row in rows]))
        return code, details

    def _samples_path(self, tasks: Sequence[Task]) -> Path:
        """Return the file of samples; by default one for each model and each data."""
        if self.csv != DEFAULT_CSV:
            return self.csv.with_suffix(".samples.jsonl")
        from h2okv.provenance import digest

        settings = [self.model.name, self.model.dtype_name, *(task.identity() for task in tasks)]
        return self.csv.with_suffix(f".{digest(repr(settings))[:8]}.samples.jsonl")


def trial_options(
    budgets: str,
    policies: Sequence[str] = (BEST,),
    csv: Any = CSV,
    draws: bool = False,  # whether the task has a seed, besides that of a policy that draws
    **fields: Any,
) -> Any:
    caches = options.cache_lists(budgets, policies, per_query=True, **fields)
    fixed: dict[str, Any] = {} if draws else {"seed": 0}
    return args.Bundle(args.expand(partial(Trial, caches=caches, csv=csv, **fixed)))


COMPRESSIONS = ("query-aware", "query-agnostic")  # the module that defines them imports torch


def _compressions(option: str, text: str) -> tuple[Any, ...]:
    """Parse how a cache is compressed: with the question, without it, or both."""
    choice(*COMPRESSIONS, "both")(option, text)
    return tuple(name for name in COMPRESSIONS if text in (name, "both"))


def _compression(default: str) -> Any:
    return option(default, "query-aware, query-agnostic or both.", read=_compressions)


@args.subcommand(eval_app, "needle")
def needle(
    trial: Trial = trial_options("20%,50%,full"),
    text: Path | None = option(None, "Haystack (the opening of a novel).", read=readers.readable),
    plot: Path | None = option(None, "Heat map: .png, .svg or .pdf.", read=options.picture),
    compression: Typed = _compression("query-agnostic"),
    lengths: Typed = option("512,1024,1536", "Tokens of the prompt.", read=options.numbers),
    depths: Typed = option(
        "0,0.25,0.5,0.75,1",
        "Depths of the needle.",
        read=options.numbers,
        kind=float,
        example="0,1",
    ),
    tries: int = option(4, "Needles for each length and depth.", read=readers.count),
    needle: str = option(NEEDLE, "Sentence."),
    question: str = option(QUESTION, "End of the prompt."),
    answer: str | None = option(None, "The answer in --needle (drawn)."),
    max_new_tokens: int = option(16, "Maximum number of new tokens.", read=readers.count),
) -> int:
    name = "needle" if text is None else f"needle in {text.stem}"
    haystack = options.text_or_sample(text)
    from h2okv_lab.evaluation.plots import plot_needles
    from h2okv_lab.evaluation.tasks.recall import NeedleTask

    values = locals() | {
        "text": haystack, "statement": needle, "seed": trial.seed,
        "question": question.replace("\\n", "\n"),
    }  # fmt: skip
    tasks = [args.build(NeedleTask, values, compression=mode) for mode in compression]
    code, details = trial.run(tasks, detailed=True)
    if plot is not None and details:
        plot_needles(plot, details, f"{name}, {trial.model.name} model")
    return code


@args.subcommand(eval_app, "perplexity")
def perplexity(
    trial: Trial = trial_options("10%,20%,50%,full", evict_every=64),
    text: Path | None = options.TEXT,
    length: int = option(1024, "Tokens of a window.", read=readers.count),
    windows: int | None = option(None, "Use the first windows only.", read=readers.count),
    every: int = option(128, "Tokens of a range of positions.", read=readers.count),
) -> int:
    name, wording = "sample_prompt" if text is None else text.stem, options.text_or_sample(text)
    from h2okv_lab.evaluation.tasks.perplexity import Perplexity

    task = Perplexity(name, wording, length, windows, every)
    for config in trial.caches:
        if not config.is_full and config.entries(length) >= length:
            write_remark(
                f"note: {config.label} keeps all {length} tokens of a window, as full does"
            )
    return trial.run([task], detailed=True)[0]


def _token_range(option: str, text: str) -> tuple[int, int | None]:
    """Read a number of tokens, or their first and last: the number, and how many are compared."""
    first, dash, last = text.partition("-")
    if first.isdecimal() and last.isdecimal() == bool(dash):
        start, end = (int(first), int(last)) if dash else (1, int(first))
        if 1 <= start <= end:
            return end, end - start + 1 if dash else None
    raise ValueError(f"{option} must be tokens, such as 32 or 129-256, got {short_repr(text)}")


@args.subcommand(eval_app, "fidelity")
def fidelity(
    trial: Trial = trial_options(
        "50%,20%,10%,5%",
        ("best", "h2o", "h2o,scoring=decay", "sink_recent", "snapkv"),
        csv=option(DEFAULT_CSV, _CSV_HELP, read=_table),
    ),
    data: list[Path] | None = option(
        None, "Text, or JSONL of prompts; may be repeated.", read=readers.readable
    ),
    prompt_tokens: int = option(512, "Tokens of a text read at once.", read=readers.count),
    new_tokens: Typed = option("32", "Compared after them; or such as 129-256.", read=_token_range),
    texts: int | None = option(None, "Texts or prompts of each file (8).", read=readers.count),
    protocol: Typed = option(
        "decode",
        "decode: token by token; block: all at once.",
        read=choice("decode", "block"),
    ),
    raw: bool = option(False, "Prompts without the chat template.", "--raw"),
    plot: Path | None = option(
        None, "Plot quality against bytes: .png, .svg or .pdf.", read=options.picture
    ),
    recommend: Typed = option(
        None, "Name the smallest cache with this agreement: 95%.", read=readers.share
    ),
) -> int:
    from h2okv_lab.evaluation.plots import plot_fidelity
    from h2okv_lab.evaluation.tasks.fidelity import Fidelity, Source

    sources = [Source.read(path) for path in data or ()]
    sources = sources or [Source("sample_prompt", options.text_or_sample(None))]
    new, last = new_tokens
    task = args.build(Fidelity, locals() | {"new_tokens": new, "last": last})

    code, results = _rows_by_cache(trial, task)
    flags, advice = None, ""
    if recommend is not None and results and code == 0:
        # Fewer bits hardly make a cache agree more, so the others are not tried with them.
        enough = [row["agreement"] >= recommend for row in results]
        caches = [cache for cache, has in zip(trial.caches, enough, strict=True) if has]
        if all(cache.kv_bits is None for cache in trial.caches):
            write_remark("now 8, 6 and 4 bits, for the caches with enough agreement")
            trial.caches += _with_bits(caches, trial.model.describe().config)
            code, results = _rows_by_cache(trial, task)
        if code == 0:
            flags, advice = _recommendation(results, recommend, trial.model.name)
    if trial.as_json:
        write_json({"csv": str(trial.csv), "rows": results, "recommended": flags})
    elif results:
        write_text(_fidelity_table(results) + advice)
        if note := args.growth_note(trial.caches):
            write_remark(note)
    drawn = [row for row in results if row["policy"] != "full"]
    if plot is not None and drawn:
        lines = [{**row, "cache": row["line"]} for row in drawn]  # a line for all its budgets
        plot_fidelity(plot, lines, f"{trial.model.name}, {drawn[0]['texts']} texts")
    return code


def _with_bits(caches: Sequence[CacheConfig], model: PreTrainedConfig) -> list[CacheConfig]:
    """Return caches, and the full one, with fewer bits, where they can have them."""
    full = CacheConfig("full")
    unique = {cache.label: cache for cache in (*caches, full)}.values()
    quantized = []
    for cache, bits in itertools.product(unique, KV_BITS):
        with suppress(ValueError):
            args.check_cache(model, config := replace(cache, kv_bits=bits))
            quantized.append(config)
    return quantized


def _fidelity_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row for each cache, the intervals in brackets."""

    def cell(row: dict[str, Any], name: str) -> str:
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        return f"{row[name]:.3f}" + ("" if low is None else f" ({low:.3f} to {high:.3f})")

    measures = {"agreement": "agreement", "KL": "kl", "perplexity ratio": "perplexity_ratio"}
    lines = []
    for row in rows:
        cells = [cell(row, name) for name in measures.values()]
        share = f"{100 * row['bytes_fraction']:.1f} %"
        lines.append([row["cache"], share, *cells, row["texts"]])
    return markdown_table(["cache", "bytes", *measures, "texts"], lines)


def _rows_by_cache(trial: Trial, task: Task) -> tuple[int, list[dict[str, Any]]]:
    """Run fidelity; return the exit code, and the row of each cache that has finished."""
    from h2okv_lab.evaluation.task import Run
    from h2okv_lab.evaluation.tasks.fidelity import ALL

    code, details = trial.run([task], detailed=True, shown=False)
    results = []
    for config in trial.caches:
        columns = Run(task, config, trial.seed).columns() | {"data": ALL}
        columns |= {n: columns.get(n) for n in ("evict_every", "grows")}  # left out if not given
        names = {"line": config.policy_label, "flags": options.command_line(config)}
        rows = (row for row in details if all(row.get(n) == v for n, v in columns.items()))
        results += [{**row, **names} for row in rows]
    return code, results


def _recommendation(
    rows: Sequence[dict[str, Any]], minimum: float, model: str
) -> tuple[str | None, str]:
    """Return the options of the smallest cache with an agreement of `minimum`, and a headline."""

    def headline(row: dict[str, Any]) -> str:
        bits = "" if row["kv_bits"] is None else f"{row['kv_bits']} bits and "
        return (
            f"{bits}{row['budget'].replace('%', ' %')}: {100 * row['bytes_fraction']:.1f} % of the"
            f" bytes, perplexity {100 * (row['perplexity_ratio'] - 1):+.1f} %, agreement"
            f" {100 * row['agreement']:.1f} % on {row['texts']} texts\n"
            f"h2okv generate --model {shlex.quote(model)} {row['flags']}\n"
        )

    enough = [row for row in rows if row["agreement"] >= minimum]
    if not enough:
        best = max(rows, key=lambda row: row["agreement"])
        return None, f"\nno cache reaches an agreement of {minimum:g}; the best: {headline(best)}"
    best = min(enough, key=lambda row: (row["bytes_fraction"], -row["agreement"]))
    return best["flags"], (
        f"\nof {len(rows)} caches, the smallest with an agreement of {minimum:g} or more:\n"
        f"{headline(best)}"
    )


_TOKENS = 4864  # of the four sample texts


@args.subcommand(eval_app, "layers")
def layers(
    model: ModelOptions = args.model_options(),
    out: Path = option(Path("layers.json"), "File for --cache layers=FILE.", read=readers.writable),
    text: Path | None = option(None, "Text file (four sample texts).", read=readers.readable),
    by_head: bool = option(False, "Divide among the heads of a layer too.", "--by-head"),
    budget: str = option(
        "20%", f"Budget to divide; {100 * BEST_HEAVY_FRACTION:g} % are heavy hitters."
    ),
) -> None:
    fraction = cache_spec.parse_amount(budget)
    wording = None if text is None else readers.read_text("--text", text)
    if not isinstance(fraction, float) or not 0 < fraction < 1:
        problem = f"--budget must be a fraction of the text below 1, got {budget}"
        raise ValueError(f"{problem}; give percent above 0 and below 100")
    import torch

    from h2okv.calibration.layer_budgets import calibration_ids
    from h2okv.offload.offload_engine import OffloadRequest, measure
    from h2okv.prompts.chat_template import encode

    described = model.describe()
    if wording is None:
        ids = calibration_ids(described.tokenizer, described.vocab_size)
    else:
        ids = torch.tensor([encode(described.tokenizer, wording)])
    read, fraction = ids[:, :_TOKENS], BEST_HEAVY_FRACTION * fraction
    with atomic_write(out) as file:  # opened before the work, to find a bad path early
        if wording is None:  # what all commands use, and store
            request = OffloadRequest(model=model.name, device=model.device, dtype=model.dtype)
            budgets = measure(request, described).factors(fraction, by_head)
        else:
            loaded = model.load(described)
            budgets = h2okv.measure_layer_budgets(loaded, read, fraction, by_head=by_head)
        file.write(json.dumps(budgets) + "\n")
    factors = flat_factors(budgets)
    shares = f"{min(factors):g} to {max(factors):g} of the even share"
    heads = f", {len(factors) // len(budgets)} heads in each" if by_head else ""
    write_text(f"{out}: {shares} in {len(budgets)} layers{heads}, by {read.shape[1]} tokens\n")


@args.subcommand(eval_app, "recall")
def recall(
    trial: Trial = trial_options("20%,50%,full"),
    input: Path = option(..., "RULER's JSONL: input and outputs.", read=readers.readable),
    compression: Typed = _compression("both"),
    limit: int | None = LIMIT,
    too_long: Typed = TOO_LONG,
) -> int:
    from h2okv_lab.evaluation.tasks.recall import Recall

    values = locals() | {"name": input.stem}
    return trial.run([args.build(Recall, values, compression=mode) for mode in compression])[0]


@args.subcommand(eval_app, "summarize")
def summarize(
    trial: Trial = trial_options("64,128,256,512,1024,full", draws=True),
    sampling: SamplingOptions = args.sampling_options(None, few=True),
    input: Path = option(..., "JSONL of articles, or of LongBench.", read=readers.readable),
    references: Path | None = option(None, "JSONL of reference summaries.", read=readers.readable),
    max_new_tokens: int | None = option(None, "Of a summary (the file's).", read=readers.count),
    batch_size: int = option(8, "Articles at a time.", "--batch", read=readers.count),
    limit: int | None = LIMIT,
    too_long: Typed = TOO_LONG,
) -> int:
    from h2okv_lab.evaluation.tasks.generation import Summarization

    params = sampling.params()  # greedy by default: a model's generation config must not matter
    task = args.build(Summarization, vars(params) | locals(), name=input.stem)
    return trial.run([task])[0]


def _folder(option: str, path: Path) -> Path:
    """Return the folder of data files; raise ValueError if it does not exist."""
    if not path.is_dir():
        raise ValueError(f"{option} '{path}' is not a folder; name the one with the data files")
    return path


def _experiment(name: str) -> str:
    """Return the name or the path of an experiment; raise ValueError if it is neither."""
    included = [path.stem for path in EXPERIMENTS.glob("*.yaml")]
    path = Path(name).expanduser()
    if name not in included and path.suffix not in (".yaml", ".yml") and not path.is_file():
        raise unknown_name("experiment", name, sorted(included))
    return name if name in included else str(readers.readable("experiment", path))


@args.subcommand(eval_app, "sweep")
def sweep(
    model: ModelOptions = args.model_options(),
    experiment: str = typer.Argument(
        help="Name, or YAML file.", show_default=False, callback=_experiment
    ),
    out: Path = option(..., "Folder of the results."),
    data: Path | None = option(None, "Folder of the tasks' data files.", read=_folder),
    only: Typed = option(None, "Comma-separated: tasks to run.", read=readers.names),
    limit: int | None = LIMIT,
    batch_size: int | None = option(None, "Prompts at a time.", "--batch", read=readers.count),
    cache: str = option("", "Options for each cache of the file: every=64."),
    as_json: bool = JSON,
) -> int:
    from h2okv_lab.evaluation.sweep import Surroundings, load_experiment
    from h2okv_lab.evaluation.task import Run

    plan = load_experiment(experiment)
    configs = plan.with_options(cache)
    work = out / "working"
    with naming(out, "written", "choose another folder for --out"):
        work.mkdir(parents=True, exist_ok=True)
    _table("--out: the file", out / "results.csv")
    tasks = plan.make_tasks(Surroundings(data, work, limit, batch_size))
    names = dict.fromkeys(task.name for task in tasks)
    for name in only or ():
        if name not in names:
            raise unknown_name("--only: task", name, names)
    tasks = [task for task in tasks if only is None or task.name in only]
    runs = [Run(task, config, seed) for task in tasks for config in configs for seed in plan.seeds]
    code, evaluation = run_all(model, runs, out / "samples.jsonl")
    _write(plan, evaluation, out, as_json)
    return code


def lm_eval(
    context: typer.Context,
    data: Path | None = option(None, "Folder of task files.", read=_folder),
) -> int:
    from h2okv_lab.evaluation.lm_eval import run_harness

    try:
        return run_harness(context.args, data)
    except KeyboardInterrupt:
        write_remark("stopped; the same command continues from answers that --use_cache stored.")
        return INTERRUPTED


def run_all(model: ModelOptions, runs: Sequence[Run], path: Path) -> tuple[int, Evaluation]:
    """Evaluate the remaining samples under a progress bar; Ctrl-C loses none of the finished."""
    from h2okv_lab.evaluation.model import ModelUnderTest
    from h2okv_lab.evaluation.task import Evaluation, SampleFile

    described = model.describe()
    model_fields = described.config, described.tokenizer, described.name, described.context
    tested = ModelUnderTest(lambda: model.load(described), *model_fields)
    is_new = not path.exists()
    with SampleFile(path) as file:
        try:
            evaluation = Evaluation(tested, runs, file)
        except BaseException:
            if is_new:  # it has no result
                path.unlink(missing_ok=True)
            raise
        if evaluation.done:
            write_remark(f"{evaluation.done} of {evaluation.total} samples are already evaluated")
        with Progress("evaluating", evaluation.total, "samples") as progress:
            progress.update(evaluation.done)
            try:
                evaluation.run(lambda run, count: progress.advance(count, run.label))
            except KeyboardInterrupt:
                write_remark(
                    f"stopped; {evaluation.done} of {evaluation.total} samples are in '{path}', and"
                    " the same command continues from there"
                )
                return INTERRUPTED, evaluation
    return 0, evaluation


def _write(plan: Experiment, evaluation: Evaluation, out: Path, as_json: bool) -> None:
    """Write tables and figure of the finished runs, and print the table."""
    from h2okv_lab.evaluation.plots import plot_sweep
    from h2okv_lab.evaluation.sweep import report
    from h2okv_lab.evaluation.task import pivot, results_table

    rows = evaluation.rows()
    table, result_rows = out / "results.csv", list(rows.values())
    if not rows:
        return
    lines = pivot(evaluation.runs, rows)
    write_csv(table, result_rows)
    with atomic_write(out / "results.md") as file:
        file.write(report(plan, lines, result_rows[0]))
    if importlib.util.find_spec("matplotlib") is not None:
        plot_sweep(out / "results.png", lines, plan.title)
    else:
        write_remark(f"no figure without matplotlib; {install_hint('plot')}")
    if as_json:
        write_json({"csv": str(table), "rows": result_rows})
    else:
        write_text(results_table(lines))
