"""`h2okv generate`: text from a prompt, with a policy's cache."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from h2okv.cli.cache_choice import CacheChoice
from h2okv.cli.comparison import run_alone, run_beside_full
from h2okv.cli.exit_codes import exit_code
from h2okv.cli.generation import Job
from h2okv.cli.options import (
    COMPILE_HELP,
    DECAY_HELP,
    DTYPES,
    KV_BITS_HELP,
    POLICY_HELP,
    SCORING_HELP,
    Sampling,
    parse_amount,
    parse_device,
    parse_dtype,
    parse_positions,
)
from h2okv.cli.output import write_text
from h2okv.cli.prompt import encode_prompt, read_prompt
from h2okv.cli.report import report, to_json
from h2okv.integration.loading import BUNDLED, describe, load_weights

HELP = """Generate text with an H2O cache.

The text streams to stdout, the summary line goes to stderr.

Examples:

    h2okv generate --file chapter.txt --heavy 0.1 --recent 0.1

    h2okv generate "It was late when" --heavy 64 --recent 64

    cat chapter.txt | h2okv generate --model ./my-model --compare full

    h2okv generate --file book.txt --heavy 512 --recent 512 --positions rolling
"""


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or nothing reads it from stdin.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a text file.")] = None,
    model: Annotated[str, typer.Option(help="A folder, a Hub id, or the bundled model.")] = BUNDLED,
    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = "h2o",
    heavy: Annotated[
        str, typer.Option(help="Heavy hitters to keep: tokens (64) or a share of the prompt (0.1).")
    ] = "0.1",
    recent: Annotated[
        str, typer.Option(help="Newest tokens to keep: tokens (64) or a share (0.1).")
    ] = "0.1",
    sink: Annotated[int, typer.Option(help="First tokens to keep whatever their score.")] = 0,
    scoring: Annotated[str, typer.Option(help=SCORING_HELP)] = "sum",
    decay: Annotated[float | None, typer.Option(help=DECAY_HELP, show_default=False)] = None,
    kv_bits: Annotated[int | None, typer.Option(help=KV_BITS_HELP, show_default=False)] = None,
    positions: Annotated[
        str,
        typer.Option(help="original, rolling (past the trained window) or clamped (OPT)."),
    ] = "original",
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            help="The most tokens that are read at once; 1 is the paper's Algorithm 1.",
            show_default="all; with rolling positions 512, or a quarter of the window",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest with this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Where the random numbers start.")] = 0,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help=COMPILE_HELP)] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    compare: Annotated[
        str | None, typer.Option(help="full: run the full cache too and compare.")
    ] = None,
) -> int:
    """Generates text from a prompt, as `HELP` tells the user."""
    if compare not in (None, "full"):
        raise ValueError(f"--compare {compare!r} is not known; the one choice is --compare full")
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    choice = CacheChoice(
        policy,
        parse_amount("heavy", heavy),
        parse_amount("recent", recent),
        sink,
        parse_positions(positions),
        prefill_chunk,
        scoring,
        decay,
        kv_bits,
    )
    wanted_dtype, wanted_device = parse_dtype(dtype), parse_device(device)
    text = read_prompt(prompt, file)
    described = describe(model)
    if choice.positions == "rolling" and prefill_chunk is None and described.context is not None:
        choice = replace(choice, prefill_chunk=max(1, min(512, described.context // 4)))
    if choice.positions != "original" and compare is None:
        described = replace(described, context=None)  # nothing ends at the trained window
    choice.make(described.config, seed)  # a bad budget is heard about before the weights load
    input_ids = encode_prompt(described, text)
    loaded = load_weights(described, wanted_dtype, wanted_device)
    job = Job(loaded, described, input_ids, sampling, compile)
    run = run_alone if compare is None else run_beside_full
    comparison = run(job, choice, quiet=json)
    if json:
        write_text(to_json(_settings(job, choice), comparison) + "\n")
    else:
        report(choice.label, comparison)
    return exit_code(comparison)


def _settings(job: Job, choice: CacheChoice) -> dict[str, Any]:
    return {
        "model": job.described.name,
        **asdict(choice),
        **asdict(job.sampling),
        "dtype": str(job.model.dtype).removeprefix("torch."),
        "device": str(job.model.device),
        "prompt_tokens": job.input_ids.shape[1],
    }
