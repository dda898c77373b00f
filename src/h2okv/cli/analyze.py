"""`h2okv analyze` and `h2okv view`."""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from h2okv.analysis.ablation import find_neurons
from h2okv.analysis.attention_stats import check_layer
from h2okv.analysis.figures import new_figure
from h2okv.analysis.measurements import MEASUREMENTS, Measurement
from h2okv.analysis.report import REPORT_FILE, write_report
from h2okv.analysis.run import analyze as run_analysis
from h2okv.analysis.run import check_folder, choose_measurements, is_finished, open_folder
from h2okv.analysis.score_stats import load_scipy
from h2okv.analysis.study import LEAST_TOKENS, MOST_TOKENS, make_sample
from h2okv.analysis.viewer.reading import Desk, Reader, budget_tokens, export_content
from h2okv.analysis.viewer.server import HOST, build_page, make_server
from h2okv.assets import sample_prompt
from h2okv.cli.args import DTYPES, POLICY_HELP, Model, parse_device, parse_dtype, split_list
from h2okv.cli.generate import read_prompt
from h2okv.console import INTERRUPTED, Progress, write_remark, write_text
from h2okv.integration.loading import Described, describe, load_weights
from h2okv.integration.models import BUNDLED
from h2okv.policy import get_policy
from h2okv.records import atomic_write

HELP = """Measure what the paper observed, on your model and text, and write a report.

The folder gets report.html, PNG figures and CSV tables. What is finished stays there: after Ctrl-C
the same command goes on.

Examples:

    h2okv analyze --out report

    h2okv analyze --model smollm2 --text chapter.txt --out report --quick

    h2okv analyze --model ./my-model --text chapter.txt --out report --only sinks,ablation
"""
_QUICK_TOKENS = 512


def analyze(
    out: Annotated[Path, typer.Option(help="The folder that the report is written to.")],
    model: Model = BUNDLED,
    text: Annotated[
        Path | None, typer.Option(help="A text file; by default the opening of a novel.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Look at so many tokens, or at what the model can read"
            f" [default: {MOST_TOKENS}; with --quick {_QUICK_TOKENS}]."
        ),
    ] = None,
    only: Annotated[
        str,
        typer.Option(help=f"Only these: {', '.join(m.name for m in MEASUREMENTS)}."),
    ] = "",
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Only what full attention tells: no policies, no theorem."),
    ] = False,
    neurons: Annotated[bool, typer.Option("--neurons", help="Also count active neurons.")] = False,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
) -> int:
    """Runs the measurements and writes the report, as `HELP` tells the user."""
    chosen = choose_measurements(split_list(only), quick, neurons)
    tokens = (_QUICK_TOKENS if quick else MOST_TOKENS) if tokens is None else tokens
    if tokens < LEAST_TOKENS:
        raise ValueError(f"--tokens {tokens} is too few; give {LEAST_TOKENS} or more")
    check_folder(out)
    # What is not installed is heard about before the long work, not in the middle of it.
    load_scipy("stats")
    new_figure()
    wanted_dtype, wanted_device = parse_dtype(dtype), parse_device(device)
    wording = sample_prompt() if text is None else read_text(text)
    described = describe(model)
    sample = make_sample(described.tokenizer, wording, within_context(described, tokens))
    open_folder(out, described.name, wording, sample.length)
    loaded = load_weights(described, wanted_dtype, wanted_device)
    if any(measurement.is_option for measurement in chosen):
        find_neurons(loaded)  # a model without them is heard about before the long work
    names = [measurement.name for measurement in chosen]
    with Progress("analyzing", len(names)) as progress:

        def report(measurement: Measurement, fraction: float) -> None:
            progress.update(names.index(measurement.name) + fraction, note=measurement.name)

        try:
            run_analysis(loaded, sample, out, chosen, report)
        except KeyboardInterrupt:
            write_remark(_stopped(out, chosen))
            return INTERRUPTED
    write_report(out)
    write_text(f"{out / REPORT_FILE}\n")
    return 0


def read_text(path: Path) -> str:
    """Reads a text file that the user named by `--text`."""
    try:
        return read_prompt(None, path)
    except ValueError as error:
        # The option has another name here.
        message = str(error).replace("--file", "--text").replace("the prompt is", "the text is")
        raise ValueError(message) from error


def within_context(described: Described, tokens: int) -> int:
    """Cuts a number of tokens to what the model can read."""
    return tokens if described.context is None else min(tokens, described.context)


def _stopped(folder: Path, chosen: Sequence[Measurement]) -> str:
    done = sum(is_finished(folder, measurement) for measurement in chosen)
    return (
        f"stopped; {done} of {len(chosen)} measurements are finished in '{folder}', and the same "
        "command goes on from there."
    )


VIEW_HELP = """See what a policy keeps of a text, token by token, in the browser.

Without --export it serves a page on this machine only, until Ctrl-C; with it, it writes one HTML
file that opens anywhere, offline, with the policies (--policy, --beside) and budgets asked for.

Examples:

    h2okv view

    h2okv view --text chapter.txt --policy h2o --beside recent --budget 0.1

    h2okv view --export kept.html --text chapter.txt --budget 0.1 --budget 0.2
"""

_POLICIES = ("full", "recent", "sink_recent", "h2o", "heavy", "random")
"""What the page offers; others are named with --policy or --beside."""
_BUDGETS = (0.2, 0.1, 0.05)
"""What the page offers where --budget is not given; an export has the first."""
_SHORT_PROMPT = 6000
"""Characters of the built-in text that the page begins with, so that it is there soon."""


def view(
    model: Model = BUNDLED,
    text: Annotated[
        Path | None, typer.Option(help="A text file; by default the opening of a novel.")
    ] = None,
    export: Annotated[Path | None, typer.Option(help="Write one HTML file and end.")] = None,
    port: Annotated[int, typer.Option(help="The port on this machine; 0 for any.")] = 8765,
    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = "h2o",
    beside: Annotated[str, typer.Option(help="A second policy to show beside it.")] = "",
    budget: Annotated[
        list[float] | None,
        typer.Option(
            help="Budget as a fraction of the text, half of it recent; may be repeated"
            " [default: 0.2, and in the page without --export 0.1 and 0.05]."
        ),
    ] = None,
    layer: Annotated[int, typer.Option(help="The layer to begin with.")] = 0,
    head: Annotated[int, typer.Option(help="The KV head to begin with.")] = 0,
    tokens: Annotated[int, typer.Option(help="Cut texts off at so many tokens.")] = 2 * MOST_TOKENS,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens that the model adds with the full cache.")
    ] = 0,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the browser.")
    ] = True,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
) -> int:
    """Serves or writes the page, as `HELP` tells the user."""
    budgets = list(dict.fromkeys(budget or (_BUDGETS if export is None else _BUDGETS[:1])))
    for share in budgets:
        budget_tokens(share, 1000)
    asked = list(dict.fromkeys((policy, *filter(None, [beside]))))
    for name in asked:
        get_policy(name)
    if export is not None:
        _check_export(export)
    wanted_dtype, wanted_device = parse_dtype(dtype), parse_device(device)
    wording = sample_prompt()[:_SHORT_PROMPT] if text is None else read_text(text)
    described = describe(model)
    loaded = load_weights(described, wanted_dtype, wanted_device)
    reader = Reader(loaded, described.tokenizer, described.name, described.context, tokens)
    check_layer(loaded, layer, head)
    choice = {
        # An export holds what was asked for and nothing else.
        "policies": asked if export is not None else list(dict.fromkeys((*_POLICIES, *asked))),
        "budgets": budgets,
        "policy": policy,
        "beside": beside,
        "other": asked[-1] if export is not None else "recent" if policy != "recent" else "h2o",
        "layer": layer,
        "head": head,
        "new_tokens": new_tokens,
        "text": wording,
    }
    if export is not None:
        return _export(reader, choice, export)
    return _serve(reader, choice, port, open_browser)


def _check_export(path: Path) -> None:
    """Refuses a file that could not be written at the end."""
    reason = ""
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"there is no folder '{path.parent}'"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission denied"
    if reason:
        raise ValueError(f"--export '{path}' cannot be written ({reason}); choose another file")


def _export(reader: Reader, choice: dict[str, Any], path: Path) -> int:
    """Writes the page with the policies and budgets that were asked for."""
    with Progress("computing", 1.0) as progress:
        try:
            content = export_content(
                reader, choice, lambda label, done: progress.update(done, note=label)
            )
        except KeyboardInterrupt:
            write_remark("stopped; nothing was written.")
            return INTERRUPTED
    with atomic_write(path) as file:
        file.write(build_page(content))
    write_text(f"{path}\n")
    return 0


def _serve(reader: Reader, choice: dict[str, Any], port: int, open_browser: bool) -> int:
    """Serves the page until Ctrl-C."""
    server = make_server(Desk(reader, choice), port)
    address = f"http://{HOST}:{server.server_address[1]}/"
    write_text(f"{address}\n")
    write_remark("Ctrl-C ends it.")
    if open_browser:
        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        write_remark("")
    finally:
        server.server_close()
    return 0
