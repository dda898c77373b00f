"""`h2okv analyze` and `h2okv view`."""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h2okv.cli.args import (
    POLICIES,
    ModelOptions,
    model_options,
    parse_budget,
    read_text,
    split_list,
)
from h2okv.console import INTERRUPTED, Progress, write_remark, write_text

if TYPE_CHECKING:
    from h2okv.analysis.measurements import Measurement
    from h2okv.analysis.viewer.reading import Reader
    from h2okv.integration.loading import Described

_TOKENS, _QUICK_TOKENS = 1024, 512
_TEXT_HELP = "A text file; by default the opening of a novel."


@model_options()
def analyze(
    model: ModelOptions,
    out: Annotated[Path, typer.Option(help="The folder that the report is written to.")],
    text: Annotated[Path | None, typer.Option(help=_TEXT_HELP)] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the text to look at, within the context window.",
            show_default=f"{_TOKENS}; with --quick {_QUICK_TOKENS}",
        ),
    ] = None,
    only: Annotated[
        str, typer.Option(help="Only these measurements, comma-separated, such as sinks,ablation.")
    ] = "",
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Only what full attention tells: no policies, no theorem."),
    ] = False,
    neurons: Annotated[bool, typer.Option("--neurons", help="Also count active neurons.")] = False,
) -> int:
    """Measure what the paper observed, on your model and text, and write a report.

    The folder gets report.html, PNG figures and CSV tables. What is finished stays there: after
    Ctrl-C the same command continues.

    Examples:

        h2okv analyze --out report

        h2okv analyze --model smollm2 --text chapter.txt --out report --quick

        h2okv analyze --model ./my-model --text chapter.txt --out report --only sinks,ablation
    """
    from h2okv.analysis.ablation import find_neurons
    from h2okv.analysis.figures import new_figure
    from h2okv.analysis.report import REPORT_FILE, write_report
    from h2okv.analysis.run import analyze as run_analysis
    from h2okv.analysis.run import check_folder, choose_measurements, open_folder
    from h2okv.analysis.score_stats import load_scipy
    from h2okv.analysis.study import LEAST_TOKENS, make_sample
    from h2okv.assets import sample_prompt

    chosen = choose_measurements(split_list(only), quick, neurons)
    tokens = (_QUICK_TOKENS if quick else _TOKENS) if tokens is None else tokens
    if tokens < LEAST_TOKENS:
        raise ValueError(f"--tokens {tokens} is too few; give {LEAST_TOKENS} or more")
    check_folder(out)
    # What is not installed shows before the long work, not in the middle of it.
    load_scipy("stats")
    new_figure()
    wording = sample_prompt() if text is None else read_text("text", text)
    described = model.describe()
    sample = make_sample(described.tokenizer, wording, within_context(described, tokens))
    open_folder(out, described.name, wording, sample.length)
    loaded = model.load(described)
    if any(measurement.is_option for measurement in chosen):
        find_neurons(loaded)  # a model without them is refused before the long work
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


def within_context(described: Described, tokens: int) -> int:
    """Cuts a number of tokens to what the model can read."""
    return tokens if described.context is None else min(tokens, described.context)


def _stopped(folder: Path, chosen: Sequence[Measurement]) -> str:
    from h2okv.analysis.run import is_finished

    done = sum(is_finished(folder, measurement) for measurement in chosen)
    return (
        f"stopped; {done} of {len(chosen)} measurements are finished in '{folder}', and the same "
        "command continues from there."
    )


_OFFERED = ("full", "recent", "sink_recent", "h2o", "heavy", "random")
"""What the page offers; others are named with --policy or --compare."""
_SHORT_PROMPT = 6000
"""Characters of the built-in text that the page begins with, so that it is there soon."""


@model_options()
def view(
    model: ModelOptions,
    text: Annotated[Path | None, typer.Option(help=_TEXT_HELP)] = None,
    export: Annotated[Path | None, typer.Option(help="Write one HTML file and end.")] = None,
    port: Annotated[int, typer.Option(help="The port on this machine; 0 for any.")] = 8765,
    policy: Annotated[
        str, typer.Option(help=f"Eviction policy: {', '.join(POLICIES)}.", rich_help_panel="Cache")
    ] = "h2o",
    compare: Annotated[
        str, typer.Option(help="A second policy to show beside it.", rich_help_panel="Cache")
    ] = "",
    budget: Annotated[
        str,
        typer.Option(
            help="Budgets, comma-separated: parts of the text, half for heavy hitters.",
            show_default="20%, and in the page 10%,5% too",
            rich_help_panel="Cache",
        ),
    ] = "",
    layer: Annotated[int, typer.Option(help="The layer to begin with.")] = 0,
    head: Annotated[int, typer.Option(help="The KV head to begin with.")] = 0,
    tokens: Annotated[int, typer.Option(help="Most tokens of a text; the rest is cut.")] = 2048,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens that the model adds with the full cache.")
    ] = 0,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the browser.")
    ] = True,
) -> int:
    """See what a policy keeps of a text, token by token, in the browser.

    Without --export it serves a page on this machine only, until Ctrl-C. With it, it writes one
    HTML file that opens anywhere, offline, with --policy and --compare at every budget.

    Examples:

        h2okv view

        h2okv view --text chapter.txt --policy h2o --compare recent --budget 10%

        h2okv view --export kept.html --text chapter.txt --budget 10%,20%
    """
    from h2okv.analysis.attention_stats import check_layer
    from h2okv.analysis.viewer.reading import LEAST_TOKENS, Reader, check_new_tokens
    from h2okv.analysis.viewer.server import check_port
    from h2okv.assets import sample_prompt
    from h2okv.cache import H2OCache

    if tokens < LEAST_TOKENS:
        raise ValueError(f"--tokens {tokens} is too few; give {LEAST_TOKENS} or more")
    asked = list(dict.fromkeys((policy, *filter(None, [compare]))))
    is_page = export is None
    choice = {
        # An export holds what was asked for and nothing else.
        "policies": list(dict.fromkeys((*_OFFERED, *asked))) if is_page else asked,
        "budgets": parse_fractions(budget or ("20%,10%,5%" if is_page else "20%")),
        "policy": policy,
        "beside": compare,
        "other": ("recent" if policy != "recent" else "h2o") if is_page else asked[-1],
        "layer": layer,
        "head": head,
        "new_tokens": new_tokens,
    }
    if export is not None:
        _check_export(export)
    else:
        check_port(port)
    choice["text"] = sample_prompt()[:_SHORT_PROMPT] if text is None else read_text("text", text)
    described = model.describe()
    check_new_tokens(new_tokens, within_context(described, tokens))
    check_layer(described.config, layer, head)
    for name in asked:
        H2OCache(described.config, policy=name)
    loaded = model.load(described)
    reader = Reader(loaded, described.tokenizer, described.name, described.context, tokens)
    if export is not None:
        return _export(reader, choice, export)
    return _serve(reader, choice, port, open_browser)


def parse_fractions(text: str) -> list[float]:
    """Reads budgets that are parts of a text, which may be changed in the page."""
    budgets = list(dict.fromkeys(parse_budget(part) for part in split_list(text)))
    for part in budgets:
        if not isinstance(part, float) or not 0 < part <= 1:
            raise ValueError(
                f"--budget {text!r}: a budget of the page is a fraction of the text; give above 0"
                " and up to 1, such as 20% or 0.2"
            )
    if not budgets:
        raise ValueError("--budget names nothing; give at least one fraction, such as 20%")
    return [part for part in budgets if isinstance(part, float)]


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
    from h2okv.analysis.viewer.reading import export_content
    from h2okv.analysis.viewer.server import build_page
    from h2okv.records import atomic_write

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
    from h2okv.analysis.viewer.reading import Desk
    from h2okv.analysis.viewer.server import HOST, make_server

    server = make_server(Desk(reader, choice), port)
    address = f"http://{HOST}:{server.server_address[1]}/"
    write_text(f"{address}\n")
    write_remark("Ctrl-C ends it")
    if open_browser:
        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        write_remark("")
    finally:
        server.server_close()
    return 0
