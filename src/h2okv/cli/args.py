"""Options that several commands share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from transformers import DynamicCache, PreTrainedConfig

import h2okv
from h2okv.config import POSITIONS, CacheConfig, Positions
from h2okv.evaluation.task import COMPRESSIONS, Compression
from h2okv.policy.scoring import DEFAULT_DECAY, SCORINGS

POLICY_HELP = f"{', '.join(h2okv.policy_names(dropping=True))}."
SCORING_HELP = f"What attention counts for: {', '.join(SCORINGS)}."
DECAY_HELP = f"With --scoring decay: the factor per later token, {DEFAULT_DECAY} if left out."
KV_BITS_HELP = "8 or 4: keep keys and values in so many bits; the model's own if left out."
Choice = TypeVar("Choice", bound=str)
COMPILE_HELP = "Compile the steps of one token: slow to start, then faster (torch.compile)."
DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and how many.

    Attributes:
        max_new_tokens: The most tokens to generate.
        temperature: 0 takes the likeliest token, anything above draws from the distribution.
        top_p: Draws among the likeliest tokens that hold this much of the probability.
        seed: Where the random numbers start.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what no generation can be run with."""
        if self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {self.max_new_tokens} is too few; give 1 or more")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"--temperature {self.temperature:g} is out of range; give 0 (always the likeliest"
                " token) or a positive number such as 0.8"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"--top-p {self.top_p:g} is out of range; give a share above 0 and up to 1"
            )
        if self.top_p < 1 and self.temperature == 0:
            raise ValueError(
                f"--top-p {self.top_p:g} has no effect at temperature 0; add --temperature 0.8"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed {self.seed} is out of range; give 0 to {2**63 - 1}")


def parse_amount(name: str, text: str) -> int | float:
    """Reads a part of the budget: tokens as `64`, a fraction of the prompt as `0.1`."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not math.isfinite(fraction):
        raise ValueError(
            f"--{name} {text!r} is not an amount; give tokens (--{name} 64) or a fraction of the"
            f" prompt with a point (--{name} 0.1)"
        )
    return fraction


def parse_positions(text: str) -> Positions:
    """Reads a way of placing entries."""
    return parse_choice("positions", text, POSITIONS)


def parse_choice(option: str, text: str, choices: tuple[Choice, ...]) -> Choice:
    """Reads an option that has a few words to choose from."""
    for word in choices:
        if word == text:
            return word
    raise ValueError(f"--{option} {text!r} is not known; choose from {', '.join(choices)}")


def parse_dtype(text: str) -> torch.dtype | None:
    """Reads a data type."""
    if text not in DTYPES:
        raise ValueError(f"--dtype {text!r} is not known; choose from {', '.join(DTYPES)}")
    return DTYPES[text]


def parse_device(text: str) -> torch.device:
    """Reads a device and looks whether it is there."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        if device.type == "meta":
            raise RuntimeError("a device without memory")
        # Only an allocation tells whether the device really works here.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"--device {text!r} cannot be used on this machine; choose auto, cpu or a GPU that"
            " torch can see, such as cuda:0"
        ) from error
    return device


def split_list(text: str) -> tuple[str, ...]:
    """Takes a list with commas apart."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """Reads a list of whole numbers."""
    try:
        return tuple(int(part) for part in split_list(text))
    except ValueError:
        raise ValueError(
            f"--{name} {text!r} is no list of whole numbers; give one such as 2048,8192"
        ) from None


def parse_budgets(text: str) -> tuple[int | float, ...]:
    """Reads a list of budgets: tokens as `64`, fractions of the prompt as `0.1`."""
    return tuple(parse_amount("budgets", part) for part in split_list(text))


def parse_dtypes(text: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """Reads a list of data types."""
    if "auto" in split_list(text) and text.strip() != "auto":
        raise ValueError(
            f"--dtype {text!r} mixes auto with others; choose from {', '.join(DTYPES)}"
        )
    preferred = torch.float32 if device.type == "cpu" else torch.bfloat16
    return tuple(parse_dtype(part) or preferred for part in split_list(text))


MODEL_HELP = "A folder, a GGUF file, a Hub id, smollm2, or bundled, the package's own."
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
Budgets = Annotated[
    str,
    typer.Option(help="Tokens (64), fractions of the prompt (0.2), or full, with commas."),
]
Policies = Annotated[str, typer.Option(help=f"{', '.join(h2okv.policy_names())}, with commas.")]
HeavyFraction = Annotated[
    float, typer.Option(help="The fraction of the budget for heavy hitters; the rest is recent.")
]
Sink = Annotated[int, typer.Option(help="First tokens to keep, beyond the budget.")]
PositionsOption = Annotated[
    str, typer.Option(help="original, rolling (past the context window) or clamped (OPT).")
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
CompressionOption = Annotated[str, typer.Option(help="query-aware, query-agnostic, or both.")]
Scoring = Annotated[str, typer.Option(help=SCORING_HELP)]
Decay = Annotated[float | None, typer.Option(help=DECAY_HELP, show_default=False)]
Seed = Annotated[int, typer.Option(help="Where random numbers start.")]
Dtype = Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]


def parse_configs(
    policies: str, budgets: str, heavy_fraction: float = 0.5, **options: Any
) -> list[CacheConfig]:
    """Makes the caches that the options ask for: each policy with each budget, full once."""
    names, amounts = split_list(policies), split_list(budgets)
    if not names or not amounts:
        option = "budgets" if names else "policy"
        raise ValueError(f"--{option} names nothing; give at least one value")
    configs: dict[str, CacheConfig] = {}
    for amount in amounts:
        budget = None if amount == "full" else parse_amount("budgets", amount)
        for name in names:
            config = CacheConfig.from_budget(budget, heavy_fraction, policy=name, **options)
            configs.setdefault(config.label, config)
    return list(configs.values())


def parse_compression(text: str) -> tuple[Compression, ...]:
    """Reads whether a cache is compressed with the question at hand."""
    found = tuple(name for name in COMPRESSIONS if text in (name, "both"))
    if not found:
        raise ValueError(
            f"--compression {text!r} is not known; choose from {', '.join(COMPRESSIONS)}, both"
        )
    return found


RAY_DEVICES = ("auto", "cpu", "cuda")


def check_copies(option: str, copies: int | None, ray: bool, device: str) -> None:
    """Refuses a number of copies of the model, or a device for them, that makes no sense."""
    if not ray:
        if copies is not None:
            raise ValueError(f"{option} {copies} is for --ray; give --ray too")
        return
    if copies is not None and copies < 1:
        raise ValueError(f"{option} {copies} is too few; give 1 or more")
    if device not in RAY_DEVICES:
        raise ValueError(
            f"--device {device!r} cannot be chosen with --ray, which gives each copy of the model"
            f" a GPU of its own; give {', '.join(RAY_DEVICES)}"
        )


@dataclass(frozen=True)
class CacheChoice:
    """A policy and its budget.

    Attributes:
        policy: A name of `h2okv.policy_names()`.
        heavy: Heavy hitters, in tokens (int) or as a fraction of the prompt (float).
        recent: Newest tokens, in tokens or as a fraction.
        sink: First tokens.
        positions: `original`, `rolling` or `clamped`.
        prefill_chunk: The most tokens that are read at once; None for no limit.
        scoring: What attention counts for, one of `h2okv.policy.scoring.SCORINGS`.
        decay: The factor of `decay`; None for the default, or with another scoring.
        kv_bits: Bits of a number of keys and values, 8 or 4; None for the model's own.
    """

    policy: str
    heavy: int | float
    recent: int | float
    sink: int
    positions: Positions = "original"
    prefill_chunk: int | None = None
    scoring: str = "sum"
    decay: float | None = None
    kv_bits: int | None = None

    def make(self, config: PreTrainedConfig, seed: int) -> h2okv.H2OCache:
        """Makes the cache, empty."""
        return h2okv.H2OCache(
            config,
            heavy=self.heavy,
            recent=self.recent,
            sink=self.sink,
            policy=self.policy,
            positions=self.positions,
            prefill_chunk=self.prefill_chunk,
            scoring=self.scoring,
            decay=self.decay,
            kv_bits=self.kv_bits,
            seed=seed,
        )

    @property
    def label(self) -> str:
        """What tables call it."""
        bits = "" if self.kv_bits is None else f", {self.kv_bits} bits"
        if self.policy == "full":
            return f"policy full{bits}"
        sink = f" + sink {self.sink}" if self.sink else ""
        scoring = "" if self.scoring == "sum" else f" by {self.scoring}"
        if self.decay is not None:
            scoring += f" {self.decay:g}"
        return f"{self.policy}{scoring}, heavy {self.heavy} + recent {self.recent}{sink}{bits}"


def full_cache(config: PreTrainedConfig) -> DynamicCache:
    """Makes the cache that transformers uses by itself, which keeps everything."""
    return DynamicCache(config=config)
