"""`h2okv analyze`: the paper's observations on a model and a text, as a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from h2okv.analysis.analysis import analyze as run_analysis
from h2okv.analysis.analysis import finished, open_folder
from h2okv.analysis.measurements import MEASUREMENTS, Measurement
from h2okv.analysis.neurons import find_neurons
from h2okv.analysis.power_law import load_scipy
from h2okv.analysis.report.drawing import new_figure
from h2okv.analysis.report.page import REPORT_FILE, write_report
from h2okv.analysis.sample import LEAST_TOKENS, MOST_TOKENS, make_sample
from h2okv.assets import sample_prompt
from h2okv.cli.exit_codes import INTERRUPTED
from h2okv.cli.options import DTYPES, parse_device, parse_dtype
from h2okv.cli.output import write_remark, write_text
from h2okv.cli.prompt import read_prompt
from h2okv.integration.loading import BUNDLED, Described, describe, load_weights

HELP = """Measure what the paper observed, on your model and text, and write a report.

The folder gets report.html, PNG figures and CSV tables. What is finished stays there: after Ctrl-C
the same command goes on.

Examples:

    h2okv analyze --out report

    h2okv analyze --model ./my-model --text chapter.txt --out report --neurons
"""

_STEPS_PER_MEASUREMENT = 100


def analyze(
    out: Annotated[Path, typer.Option(help="The folder that the report is written to.")],
    model: Annotated[str, typer.Option(help="A folder, a Hub id, or the bundled model.")] = BUNDLED,
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
    with _Bar() as bar:
        try:
            run_analysis(loaded, sample, out, neurons, bar.show)
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


class _Bar:
    """A progress bar on stderr: one step for each measurement."""

    def __init__(self) -> None:
        name, share = TextColumn("{task.description:<22}"), TextColumn("{task.percentage:>3.0f} %")
        columns = (name, BarColumn(), share, TimeElapsedColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, disable=not sys.stderr.isatty())
        self._names = [measurement.name for measurement in MEASUREMENTS]
        total = len(self._names) * _STEPS_PER_MEASUREMENT
        self._task = self._progress.add_task("loading", total=total)

    def show(self, measurement: Measurement, share: float) -> None:
        """Shows how far a measurement is."""
        done = self._names.index(measurement.name) + share
        self._progress.update(
            self._task,
            description=measurement.name,
            completed=done * _STEPS_PER_MEASUREMENT,
        )

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
