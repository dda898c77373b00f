"""`h2okv lm-eval`: lm-evaluation-harness on a cache that evicts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from h2okv.cli.exit_codes import INTERRUPTED
from h2okv.cli.output import write_remark
from h2okv.evaluation.harness.launcher import run_harness

HELP = """Run lm-evaluation-harness with the model type h2okv and six tasks.

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

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
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
