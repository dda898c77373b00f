"""`h2okv analyze` and `h2okv view`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from h2okv.analysis.ablation import find_neurons
from h2okv.analysis.figures import new_figure
from h2okv.analysis.measurements import MEASUREMENTS, Measurement
from h2okv.analysis.report import REPORT_FILE, write_report
from h2okv.analysis.run import analyze as run_analysis
from h2okv.analysis.run import finished, open_folder
from h2okv.analysis.score_stats import load_scipy
from h2okv.analysis.study import LEAST_TOKENS, MOST_TOKENS, make_sample
from h2okv.analysis.viewer.reading import Reader, budget_tokens, check_choice
from h2okv.analysis.viewer.server import HOST, Desk, build_page, make_server
from h2okv.assets import sample_prompt
from h2okv.cli.args import DTYPES, POLICY_HELP, Model, parse_device, parse_dtype
from h2okv.cli.generate import read_prompt
from h2okv.console import INTERRUPTED, Progress, write_remark, write_text
from h2okv.integration.loading import Described, describe, load_weights
from h2okv.integration.models import BUNDLED

HELP = """Measure what the paper observed, on your model and text, and write a report.

The folder gets report.html, PNG figures and CSV tables. What is finished stays there: after Ctrl-C
the same command goes on.

Examples:

    h2okv analyze --out report

    h2okv analyze --model ./my-model --text chapter.txt --out report --neurons
"""


def analyze(
    out: Annotated[Path, typer.Option(help="The folder that the report is written to.")],
    model: Model = BUNDLED,
    text: Annotated[
        Path | None, typer.Option(help="A text file; by default the opening of a novel.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Look at so many tokens, or at what the model can read.")
    ] = MOST_TOKENS,
    neurons: Annotated[bool, typer.Option("--neurons", help="Also count active neurons.")] = False,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
) -> int:
    """Runs the measurements and writes the report, as `HELP` tells the user."""
    if tokens < LEAST_TOKENS:
        raise ValueError(f"--tokens {tokens} is too few; give {LEAST_TOKENS} or more")
    # What is not installed is heard about before the long work, not in the middle of it.
    load_scipy("stats")
    new_figure()
    wanted_dtype, wanted_device = parse_dtype(dtype), parse_device(device)
    wording = sample_prompt() if text is None else read_text(text)
    described = describe(model)
    sample = make_sample(described.tokenizer, wording, within_context(described, tokens))
    open_folder(out, described.name, wording, sample.length)
    loaded = load_weights(described, wanted_dtype, wanted_device)
    if neurons:
        find_neurons(loaded)  # a model without them is heard about before the long work
    names = [measurement.name for measurement in MEASUREMENTS]
    with Progress("analyzing", len(names)) as progress:

        def report(measurement: Measurement, fraction: float) -> None:
            progress.update(names.index(measurement.name) + fraction, note=measurement.name)

        try:
            run_analysis(loaded, sample, out, neurons, report)
        except KeyboardInterrupt:
            write_remark(_stopped(out, neurons))
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


def _stopped(folder: Path, neurons: bool) -> str:
    wanted = [m for m in MEASUREMENTS if neurons or not m.is_option]
    done = sum(finished(folder, measurement) for measurement in wanted)
    return (
        f"stopped; {done} of {len(wanted)} measurements are finished in '{folder}', and the same "
        "command goes on from there."
    )


VIEW_HELP = """See what a policy keeps of a text, token by token, in the browser.

Without --export it serves a page on this machine only, until Ctrl-C; with it, it writes one HTML
file that opens anywhere, offline.

Examples:

    h2okv view

    h2okv view --text chapter.txt --policy h2o --beside recent --budget 0.1

    h2okv view --export kept.html --text chapter.txt --budget 0.1 --budget 0.2
"""

_POLICIES = ("full", "recent", "sink_recent", "h2o", "heavy", "random")
"""What the page offers; others are named with --policy or --beside."""
_DEFAULT_BUDGETS = (0.2, 0.1, 0.05)
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
        typer.Option(help="Budget as a share of the text, half of it recent; may be repeated."),
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
    budgets = list(dict.fromkeys(budget or _DEFAULT_BUDGETS))
    for share in budgets:
        budget_tokens(share, 1000)
    wanted_dtype, wanted_device = parse_dtype(dtype), parse_device(device)
    wording = sample_prompt()[:_SHORT_PROMPT] if text is None else read_text(text)
    described = describe(model)
    loaded = load_weights(described, wanted_dtype, wanted_device)
    reader = Reader(loaded, described.tokenizer, described.name, described.context, tokens)
    check_choice(reader, layer, head, [policy, *filter(None, [beside])])
    choice = {
        "policies": list(dict.fromkeys((*_POLICIES, policy, *filter(None, [beside])))),
        "budgets": budgets,
        "policy": policy,
        "beside": beside,
        "other": "recent" if policy != "recent" else "h2o",
        "layer": layer,
        "head": head,
        "new_tokens": new_tokens,
        "text": wording,
    }
    if export is not None:
        return _export(reader, choice, export)
    return _serve(reader, choice, port, open_browser)


def _export(reader: Reader, choice: dict[str, Any], path: Path) -> int:
    """Writes the page with every policy and budget in it."""
    pairs = [(name, share) for name in choice["policies"] for share in choice["budgets"]]
    reading = reader.read(choice["text"], choice["new_tokens"])
    traces = []
    with Progress("computing", len(pairs)) as progress:
        try:
            for done, (name, share) in enumerate(pairs):
                label = f"{name} {100 * share:g} %"

                def tick(part: float, done: int = done, label: str = label) -> None:
                    progress.update(done + part, note=label)

                traces.append(reading.trace(name, share, tick))
        except KeyboardInterrupt:
            write_remark("stopped; nothing was written.")
            return INTERRUPTED
    content = {"choice": {**choice, "text": ""}, "reading": reading.describe(), "traces": traces}
    try:
        path.write_text(build_page(content), encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--export '{path}' cannot be written ({error.strerror}); choose another file"
        ) from error
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
