"""`h2okv demo`: the full cache and H2O at 20 %, side by side on a long prompt."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from h2okv.assets import sample_prompt
from h2okv.cli.cache_choice import CacheChoice
from h2okv.cli.comparison import run_beside_full
from h2okv.cli.exit_codes import exit_code
from h2okv.cli.generation import Job
from h2okv.cli.options import Sampling, parse_device, parse_dtype
from h2okv.cli.output import write_text
from h2okv.cli.report import report
from h2okv.integration.loading import BUNDLED, Described, describe, load_weights

# What the prompt may use of a context that is longer than the sample text's first pages.
_MOST_PROMPT_TOKENS = 4096
_SHOWN_CHARACTERS = 300


def demo(
    model: Annotated[str, typer.Option(help="A folder, a Hub id, or the bundled model.")] = BUNDLED,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    dtype: Annotated[str, typer.Option(help="As for generate.")] = "auto",
    device: Annotated[str, typer.Option(help="As for generate.")] = "auto",
) -> int:
    """Shows what H2O at 20 % does to text, speed and memory, beside the full cache."""
    sampling = Sampling(max_new_tokens)
    wanted_dtype, wanted_device = parse_dtype(dtype), parse_device(device)
    described = describe(model)
    input_ids = _long_prompt(described, max_new_tokens)
    loaded = load_weights(described, wanted_dtype, wanted_device)
    prompt_end = described.tokenizer.decode(input_ids[0], skip_special_tokens=True)
    write_text(
        f"{described.name}, {input_ids.shape[1]} tokens of a novel that it was not trained on,"
        f" ending in\n\n...{prompt_end[-_SHOWN_CHARACTERS:]}\n\n"
    )
    job = Job(loaded, described, input_ids, sampling)
    choice = CacheChoice(policy="h2o", heavy=0.1, recent=0.1, sink=0)
    comparison = run_beside_full(job, choice, quiet=False)
    report(choice.label, comparison)
    return exit_code(comparison)


def _long_prompt(described: Described, max_new_tokens: int) -> torch.Tensor:
    """Takes as much of the sample text as leaves room for the new tokens."""
    context = described.context or _MOST_PROMPT_TOKENS
    room = min(context, _MOST_PROMPT_TOKENS) - max_new_tokens
    if room < 1:
        raise ValueError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in the context of"
            f" {context}; give fewer"
        )
    encoded = described.tokenizer(sample_prompt(), return_tensors="pt", verbose=False)
    return encoded["input_ids"][:, :room]
