"""The options that the commands of `h2okv eval` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import h2okv
from h2okv.cli.bench_options import split_list
from h2okv.cli.options import DTYPES, KV_BITS_HELP, parse_amount, parse_positions
from h2okv.evaluation.cache_setting import CacheSetting
from h2okv.evaluation.recall import KNOWLEDGE, Knowledge

Model = Annotated[str, typer.Option(help="A folder, a Hub id, or the bundled model.")]
Budgets = Annotated[
    str,
    typer.Option(help="Tokens (64), fractions of the prompt (0.2), or full, with commas."),
]
Policies = Annotated[str, typer.Option(help=f"{', '.join(h2okv.policy_names())}, with commas.")]
HeavyShare = Annotated[float, typer.Option(help="The heavy hitters' share of the budget.")]
Sink = Annotated[int, typer.Option(help="First tokens to keep, beyond the budget.")]
PositionsOption = Annotated[
    str, typer.Option(help="original, rolling (past the trained window) or clamped (OPT).")
]
PrefillChunk = Annotated[
    int | None, typer.Option(help="The most tokens read at once; 1 is the paper's Algorithm 1.")
]
KvBits = Annotated[int | None, typer.Option(help=KV_BITS_HELP)]
Csv = Annotated[
    Path,
    typer.Option(help="The table; samples go beside it as they come, to NAME.samples.jsonl."),
]
Limit = Annotated[int | None, typer.Option(help="Take the first so many samples only.")]
TooLongOption = Annotated[
    str, typer.Option(help="refuse samples above the model's window, or skip them.")
]
QuestionOption = Annotated[
    str, typer.Option(help="known or unknown while the cache is compressed, or both.")
]
Seed = Annotated[int, typer.Option(help="Where random numbers start.")]
Dtype = Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]


def parse_settings(
    policies: str,
    budgets: str,
    heavy_share: float = 0.5,
    sink: int = 0,
    positions: str = "original",
    prefill_chunk: int | None = None,
    kv_bits: int | None = None,
) -> list[CacheSetting]:
    """Makes the caches that the options ask for: each policy with each budget, full once.

    Args:
        policies: Names with commas.
        budgets: Amounts or `full`, with commas.
        heavy_share: Of the budget.
        sink: First tokens.
        positions: A name of `POSITIONS`.
        prefill_chunk: Tokens of a block.
        kv_bits: Bits of a number of keys and values.

    Returns:
        The caches, those of a budget together.

    Raises:
        ValueError: If an option makes no sense.
    """
    names, amounts = split_list(policies), split_list(budgets)
    if not names or not amounts:
        option = "budgets" if names else "policy"
        raise ValueError(f"--{option} names nothing; give at least one value")
    more = {} if kv_bits is None else {"kv_bits": kv_bits}
    settings: list[CacheSetting] = []
    for amount in amounts:
        budget = None if amount == "full" else parse_amount("budgets", amount)
        for name in names:
            setting = CacheSetting(
                name, budget, heavy_share, sink, parse_positions(positions), prefill_chunk, more
            )
            if not setting.is_full or not any(other.is_full for other in settings):
                settings.append(setting)
    return settings


def parse_question(text: str) -> tuple[Knowledge, ...]:
    """Reads whether questions are known while the cache is compressed.

    Args:
        text: One of `KNOWLEDGE`, or `both`.

    Returns:
        What to run.

    Raises:
        ValueError: If it is something else.
    """
    found = tuple(name for name in KNOWLEDGE if text in (name, "both"))
    if not found:
        raise ValueError(f"{text!r} is not known; a question is {', '.join(KNOWLEDGE)}, or both")
    return found
