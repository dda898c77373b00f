"""`h2okv analyze` and `h2okv view`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2okv.cli import args
from h2okv.cli.args import POLICIES, TEXT, ModelOptions, option
from h2okv.console import INTERRUPTED, Progress, check_least, write_remark, write_text
from h2okv.records import atomic_write

if TYPE_CHECKING:
    from h2okv.analysis.measurements import Measurement
    from h2okv.analysis.viewer.reading import Reader

_TOKENS, _QUICK_TOKENS = 1024, 512


@args.model_options()
def analyze(
    model: ModelOptions,
    out: Path = option(..., "The folder that the report is written to."),
    text: Path | None = TEXT,
    tokens: int | None = option(
        None, f"Tokens of the text ({_TOKENS}; with --quick {_QUICK_TOKENS})."
    ),
    only: str = option("", "Only these measurements, comma-separated, such as sinks,ablation."),
    quick: bool = option(False, "Only full attention: no policies, no theorem.", "--quick"),
    neurons: bool = option(False, "Also count active neurons.", "--neurons"),
) -> int:
    """Measure what the paper observed, on your model and text, and write a report.

    The folder gets report.html, PNG figures and CSV tables. What is finished stays there: after
    Ctrl-C the same command continues.

    Examples:

        h2okv analyze --out report
        h2okv analyze --model smollm2 --text chapter.txt --out report --quick
        h2okv analyze --model ./my-model --text chapter.txt --out report --only sinks,ablation
    """
    from h2okv.analysis import measurements, study
    from h2okv.analysis.ablation import find_neurons
    from h2okv.analysis.figures import new_figure
    from h2okv.analysis.report import REPORT_FILE, write_report
    from h2okv.analysis.score_stats import load_scipy

    chosen = measurements.choose_measurements(args.split_list(only), quick, neurons)
    tokens = (_QUICK_TOKENS if quick else _TOKENS) if tokens is None else tokens
    check_least(study.LEAST_TOKENS, tokens=tokens)
    study.check_folder(out)
    # What is not installed shows before the long work, not in the middle of it.
    load_scipy("stats")
    new_figure()
    wording = args.text_or_sample(text)
    described = model.describe()
    most = min(tokens, described.context or tokens)
    sample = study.make_sample(described.tokenizer, wording, most)
    study.open_folder(out, described.name, wording, sample.length)
    loaded = model.load(described)
    if any(measurement.is_option for measurement in chosen):
        find_neurons(loaded)  # a model without them is refused before the long work
    names = [measurement.name for measurement in chosen]
    with Progress("analyzing", len(names)) as progress:

        def report(measurement: Measurement, fraction: float) -> None:
            progress.update(names.index(measurement.name) + fraction, note=measurement.name)

        try:
            measurements.analyze(loaded, sample, out, chosen, report)
        except KeyboardInterrupt:
            done = sum(measurements.is_finished(out, measurement) for measurement in chosen)
            write_remark(
                f"stopped; {done} of {len(chosen)} measurements are finished in '{out}', and the"
                " same command continues from there."
            )
            return INTERRUPTED
    write_report(out)
    write_text(f"{out / REPORT_FILE}\n")
    return 0


_OFFERED = ("full", "recent", "sink_recent", "h2o", "heavy", "random")
"""What the page offers; others are named with --policy or --compare."""
_SHORT_PROMPT = 6000
"""Characters of the built-in text that the page begins with, so that it is there soon."""


@args.model_options()
def view(
    model: ModelOptions,
    text: Path | None = TEXT,
    export: Path | None = option(None, "Write one HTML file and end."),
    port: int = option(8765, "The port on this machine; 0 for any."),
    policy: str = option("h2o", f"Eviction policy: {', '.join(POLICIES)}."),
    compare: str = option("", "A second policy to show beside it."),
    budget: str = option(
        "", "Budgets, comma-separated: fractions of the text (20%; in the page 10%,5% too)."
    ),
    layer: int = option(0, "The layer to begin with."),
    head: int = option(0, "The KV head to begin with."),
    tokens: int = option(2048, "Most tokens of a text; the rest is cut."),
    new_tokens: int = option(0, "Tokens that the model adds with the full cache."),
    open_browser: bool = option(True, "Open the page in the browser.", "--open/--no-open"),
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
    from h2okv.cache import H2OCache

    check_least(LEAST_TOKENS, tokens=tokens)
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
    args.check_file("export", export)
    if is_page:
        check_port(port)
    wording = args.text_or_sample(text)
    choice["text"] = wording[:_SHORT_PROMPT] if text is None else wording
    described = model.describe()
    check_new_tokens(new_tokens, min(tokens, described.context or tokens))
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
    budgets = list(dict.fromkeys(args.parse_budget(part) for part in args.split_list(text)))
    fractions = [part for part in budgets if isinstance(part, float) and 0 < part <= 1]
    if not fractions or len(fractions) < len(budgets):
        raise ValueError(
            f"--budget {text!r}: a budget of the page is a fraction of the text; give above 0"
            " and up to 1, such as 20% or 0.2"
        )
    return fractions


def _export(reader: Reader, choice: dict[str, Any], path: Path) -> int:
    from h2okv.analysis.viewer.reading import export_content
    from h2okv.analysis.viewer.server import build_page

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
