"""The commands put together, and what a failing one prints."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers.utils import logging as transformers_logging

import h2okv
from h2okv.cli.analyze import HELP as ANALYZE_HELP
from h2okv.cli.analyze import VIEW_HELP, analyze, view
from h2okv.cli.batch import HELP as BATCH_HELP
from h2okv.cli.batch import PLAN_HELP, batch, plan
from h2okv.cli.bench import HELP as BENCH_HELP
from h2okv.cli.bench import bench
from h2okv.cli.bench_serve import SERVE_HELP as BENCH_SERVE_HELP
from h2okv.cli.bench_serve import bench_serve
from h2okv.cli.chat import HELP as CHAT_HELP
from h2okv.cli.chat import chat
from h2okv.cli.env import HELP as ENV_HELP
from h2okv.cli.env import env
from h2okv.cli.eval import eval_app
from h2okv.cli.generate import HELP, demo, generate
from h2okv.cli.models import models_app
from h2okv.cli.serve import HELP as SERVE_HELP
from h2okv.cli.serve import serve
from h2okv.cli.stream import HELP as STREAM_HELP
from h2okv.cli.stream import stream
from h2okv.console import BAD_INPUT, INTERRUPTED, OutputClosedError, write_remark, write_text
from h2okv.evaluation.lm_eval.launcher import run_harness

LM_EVAL_HELP = """Run lm-evaluation-harness with the model type h2okv and six tasks.

All options but --data are lm_eval's own; `lm_eval run --help` lists them.
--model is h2okv unless you say otherwise. The tasks read local files:
h2okv_copa, h2okv_rte, h2okv_piqa, h2okv_openbookqa, h2okv_winogrande,
h2okv_mathqa, and h2okv_tasks for all six.

Examples:

    h2okv lm-eval --data DIR --tasks h2okv_copa --num_fewshot 5
    --model_args pretrained=bundled,heavy=0.1,recent=0.1

    h2okv lm-eval --data DIR --tasks h2okv_tasks --output_path OUT
    --model_args pretrained=./my-model,heavy=64,recent=64,prefill_chunk=1

    h2okv lm-eval ls tasks
"""

LM_EVAL_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""What the registration gives typer, so that it passes on what it does not know."""


def lm_eval(
    context: typer.Context,
    data: Annotated[
        Path | None,
        typer.Option(help="The folder of the tasks' data files; or set H2OKV_EVAL_DATA."),
    ] = None,
) -> int:
    """Hands over to the harness, as `HELP` tells the user."""
    try:
        return run_harness(context.args, data)
    except KeyboardInterrupt:
        write_remark(
            "stopped; answers that --use_cache stored stay, and the same command goes on from them."
        )
        return INTERRUPTED


_app = typer.Typer(
    name="h2okv",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        write_text(f"h2okv {h2okv.__version__}\n")
        raise typer.Exit


@_app.callback(help="Heavy-Hitter Oracle (H2O) KV-cache eviction for Hugging Face models.")
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Takes what comes before the command."""


_app.command("generate", help=HELP)(generate)
_app.command("demo")(demo)
_app.command("analyze", help=ANALYZE_HELP)(analyze)
_app.command("view", help=VIEW_HELP)(view)
_app.command("chat", help=CHAT_HELP)(chat)
_app.command("stream", help=STREAM_HELP)(stream)
_bench_app = typer.Typer(pretty_exceptions_enable=False)
_bench_app.callback(invoke_without_command=True, help=BENCH_HELP)(bench)
_bench_app.command("serve", help=BENCH_SERVE_HELP)(bench_serve)
_app.add_typer(_bench_app, name="bench")
_app.command("env", help=ENV_HELP)(env)
_app.add_typer(models_app)
_app.command("lm-eval", help=LM_EVAL_HELP, context_settings=LM_EVAL_CONTEXT)(lm_eval)
_app.add_typer(eval_app)
_app.command("serve", help=SERVE_HELP)(serve)
_app.command("batch", help=BATCH_HELP)(batch)
_app.command("plan", help=PLAN_HELP)(plan)


def run(args: Sequence[str]) -> int:
    """Runs one command."""
    _quieten_libraries()
    try:
        code = _app(args=list(args) or ["--help"], prog_name="h2okv", standalone_mode=False)
    except typer.TyperException as error:
        return _fail(f"{_one_line(error.format_message()).rstrip('.')}; see h2okv --help")
    except OutputClosedError as error:
        _drop_stdout()
        return _fail(str(error))
    except torch.OutOfMemoryError as error:
        return _fail(
            f"the device is out of memory ({_one_line(str(error))}); choose a smaller model,"
            " a shorter prompt or --dtype bfloat16"
        )
    except ValueError as error:
        return _fail(_one_line(str(error)))
    return code if isinstance(code, int) else 0


def _quieten_libraries() -> None:
    """Keeps stderr for this command's own sentences."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    for output in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a question mark, not a crash.
        if hasattr(output, "reconfigure"):
            output.reconfigure(errors="replace")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _fail(sentence: str) -> int:
    print(f"h2okv: {sentence.rstrip('.')}.", file=sys.stderr)
    return BAD_INPUT


def _drop_stdout() -> None:
    """Gives the interpreter somewhere to flush what is left, or it complains on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
