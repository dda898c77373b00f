"""`h2okv analyze` and `h2okv view`."""

from __future__ import annotations

import tempfile
import webbrowser
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2okv.cli import args, readers
from h2okv.cli.args import ModelOptions, Typed, option
from h2okv.config import CacheConfig
from h2okv.console import INTERRUPTED, Progress, write_remark, write_text
from h2okv.records import atomic_write, refusing, unknown_name
from h2okv_lab.cli import options
from h2okv_lab.tables import check_minimum

if TYPE_CHECKING:
    import torch

    from h2okv_lab.analysis.measurements import Measurement
    from h2okv_lab.analysis.viewer import Reader


# Listed here because the modules that define them import torch.
MEASUREMENTS = (
    "sparsity", "scores", "words", "sinks", "ablation", "policies", "predicted", "retention",
    "lifetimes", "overlap", "neurons",
)  # fmt: skip
MIN_TOKENS, MIN_VIEWED = 128, 8


def _measurements(option: str, text: str) -> tuple[str, ...]:
    """Parse names of measurements."""
    names = readers.names(option, text)
    for name in names:
        if name not in MEASUREMENTS:
            raise unknown_name(f"{option}: measurement", name, MEASUREMENTS)
    return names


def _report_folder(option: str, folder: Path) -> Path:
    """Raise ValueError for a folder that cannot be written or created."""
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    # Only writing tells whether a folder is writable: access() ignores read-only file systems, and
    # nothing can be created in /proc.
    with refusing(f"{option} '{folder}' cannot be written", "choose another folder", OSError):
        tempfile.TemporaryDirectory(prefix=".h2okv-", dir=parent).cleanup()
    return folder


def analyze(
    model: ModelOptions = args.model_options(),
    out: Path = option(..., "Folder of the report.", read=_report_folder),
    text: Path | None = options.TEXT,
    tokens: int = option(1024, "Tokens of the text."),
    only: Typed = option("", "Comma-separated: measurements (all).", read=_measurements),
    quick: bool = option(False, "Full attention only: no policies.", "--quick"),
    neurons: bool = option(False, "Also count active neurons.", "--neurons"),
) -> int:
    if only and quick:
        raise ValueError("--only and --quick both choose measurements; give one of them")
    check_minimum(MIN_TOKENS, tokens=tokens)
    wording = options.text_or_sample(text)
    from h2okv_lab.analysis import measurements, study
    from h2okv_lab.analysis.attention_stats import find_neurons
    from h2okv_lab.analysis.report import REPORT_FILE, write_report
    from h2okv_lab.analysis.score_stats import load_scipy
    from h2okv_lab.analysis.sections import new_figure

    chosen = measurements.choose_measurements(only, quick, neurons)
    # Missing packages must show before the long work, not in the middle of it.
    load_scipy("stats")
    new_figure()
    described = model.describe()
    limit = min(tokens, described.context or tokens)
    sample = study.make_sample(described.tokenizer, wording, limit)
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


# Policies that the page offers; --policy adds others.
_OFFERED = ("full", "recent", "sink_recent", "h2o", "heavy", "random")
_SHORT_PROMPT = 6000  # characters of the built-in text, to show the page soon
_SHOWN = ("policy", "heavy", "recent", "sink", "min_tokens")
"""Fields that the page shows: it follows the scores of H2O, a token at a time."""


def shown_cache(policy: str, budget: str, sink: int | float = 0) -> CacheConfig:
    """Return the cache of a policy and a budget as the page has them."""
    return CacheConfig.from_dict({"policy": policy, "budget": budget, "sink": sink})


def fast_dtype(name: str, device: torch.device | str) -> torch.dtype | None:
    """Return `default_dtype`, but bfloat16 on CPUs with AMX tiles; for interactive pictures."""
    import torch

    from h2okv.models.loading import default_dtype

    usual = default_dtype(name, device)
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return torch.bfloat16 if usual is torch.float32 and has_tiles() else usual


def view(
    caches: list[CacheConfig] = options.cache_lists("20%", ["h2o"]),
    model: ModelOptions = args.model_options(),
    text: Path | None = options.TEXT,
    export: Path | None = option(None, "Write one HTML file and end.", read=readers.writable),
    port: int = option(8765, "Port; 0: any free one.", read=readers.port),
    tokens: int = option(2048, "Cut the text there."),
    open_browser: bool = option(True, "Open the page in the browser.", "--open/--no-open"),
) -> int:
    check_minimum(MIN_VIEWED, tokens=tokens)
    wording = options.text_or_sample(text)
    from h2okv_lab.analysis.attention_stats import full_attention_layers
    from h2okv_lab.analysis.viewer import PageServer, Reader

    is_page = export is None
    policies = list(dict.fromkeys(cache.policy for cache in caches))
    budgets = dict.fromkeys(config.budget_label for config in caches if not config.is_full)
    choice = {
        # An export has only the policies of the command line.
        "policies": list(dict.fromkeys((*_OFFERED, *policies))) if is_page else policies,
        "budgets": list(budgets) or ["full"],
        "policy": policies[0],
        "beside": policies[1] if len(policies) > 1 else "",
        "other": policies[1] if len(policies) > 1 else "recent" if is_page else policies[0],
        "head": 0,
        "new_tokens": 0,
        "text": wording[:_SHORT_PROMPT] if text is None else wording,
    }
    if is_page:
        PageServer(port).server_close()  # raises for a port in use before the long work
    described = model.describe()
    choice["layer"] = full_attention_layers(described.config)[0]
    sink = caches[0].sink
    for config in caches:
        args.check_cache(described.config, config)
        shown = CacheConfig(**{name: getattr(config, name) for name in _SHOWN})
        if config != shown or config.sink != sink:
            raise ValueError(
                f"{config.label} cannot be shown: the page shows accumulated attention, with one"
                " number of sinks for all; choose such as h2o:20%"
            )
    loaded = model.load(described, dtype=fast_dtype(described.name, model.device))
    reader = Reader(loaded, described, tokens, partial(shown_cache, sink=sink))
    if export is not None:
        return _export(reader, choice, export)
    return _serve(reader, choice, port, open_browser)


def _export(reader: Reader, choice: dict[str, Any], path: Path) -> int:
    from h2okv_lab.analysis.viewer import build_page, export_content

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
    from h2okv_lab.analysis.viewer import HOST, Desk, PageServer

    with PageServer(port, Desk(reader, choice)) as server:
        address = f"http://{HOST}:{server.server_address[1]}/"
        write_text(f"{address}\n")
        write_remark("Ctrl-C ends it")
        if open_browser:
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
        if server.desk is not None and server.desk.is_busy:
            write_remark("\nstopped while a text was being read.")
            return INTERRUPTED
    write_remark("")
    return 0
