"""Options that several commands share, each declared once, and the reading of their values."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from typer.models import OptionInfo, ParameterInfo

from h2okv.assets import sample_prompt
from h2okv.config import LEAST_ENTRIES, POSITIONS, CacheConfig, Positions
from h2okv.console import check_least
from h2okv.records import read_text_file

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from h2okv.engine.sampling_params import SamplingParams
    from h2okv.integration.loading import Described

Command = TypeVar("Command", bound=Callable[..., Any])
Choice = TypeVar("Choice", bound=str)
Number = TypeVar("Number", int, float)

BUNDLED = "bundled"
DTYPES = ("auto", "float32", "bfloat16", "float16")
POLICIES = (
    "full", "recent", "sink_recent", "h2o", "heavy", "random", "strided", "strided_heavy",
    "fixed", "fixed_heavy", "snapkv",
)  # fmt: skip
"""Policies that drop entries; written down, for the registry imports torch."""
SCORINGS = ("sum", "mean", "decay", "value_norm", "expected")
MODEL_HELP = "A folder, a GGUF file, a Hub id, bundled or smollm2."
DEVICE_HELP = "auto, cpu, cuda, cuda:1 ..."


def option(default: Any, help: str, *names: str) -> Any:
    """An option of a command; a default that is worked out later stands in the help's brackets."""
    return typer.Option(default, *names, help=help)


JSON = option(False, "Print one JSON object.", "--json")
SEED = option(0, "Random seed.")
TEXT = option(None, "A text file; by default the opening of a novel.")
RAW = option(False, "Continue the text: no chat template, if there is one.", "--raw")
PIN = option(None, "Messages that are never evicted: system, user, last_user (comma-separated).")
ROWS = option(None, "Append the rows to this file.")
MEMORY_HELP = "Memory limit of the process (what is free), such as 4GiB; on a GPU that of the GPU."
COMPILE = option(
    False, "Compile decode steps with torch.compile: slow to start, then faster.", "--compile"
)


def bundle(
    parameter: str, build: Callable[..., Any], signature: Callable[..., Any], **changed: Any
) -> Callable[[Command], Command]:
    """Gives a command the options of a signature in the place of one parameter.

    What `build` makes of their values is the parameter. An option in `changed` replaces the one of
    its name; anything else there is a fixed value, and no option.
    """
    fixed, options = {}, []
    for name, part in inspect.signature(signature, eval_str=True).parameters.items():
        own = copy.copy(changed.get(name, part.default))
        if not isinstance(own, ParameterInfo):
            fixed[name] = own
            continue
        if isinstance(own, OptionInfo):
            own.rich_help_panel = parameter.capitalize().rstrip("s")
        options.append(part.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=own))

    def decorate(command: Command) -> Command:
        whole = inspect.signature(command, eval_str=True)
        parameters = [
            part.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for part in whole.parameters.values()
            if part.name != parameter
        ]

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            values = {part.name: given.pop(part.name) for part in options}
            return command(**given, **{parameter: build(**fixed, **values)})

        changed: Any = run
        changed.__signature__ = whole.replace(parameters=[*parameters, *options])
        changed.__annotations__ = {part.name: part.annotation for part in (*parameters, *options)}
        result: Command = changed
        return result

    return decorate


_AMOUNT = "tokens (64) or a fraction of the prompt (10%)"
_BUDGET = "Entries to keep: tokens (512), part of the prompt (20%), full."
CHUNK_HELP = (
    "Most tokens between two evictions while a prompt is read; 1 is the paper's Algorithm 1."
)


def make_cache(
    policy: str = option("h2o", f"Eviction policy: {', '.join(POLICIES)}."),
    budget: str = option("20%", _BUDGET),
    heavy: str | None = option(None, f"Instead of --budget, heavy hitters to keep: {_AMOUNT}."),
    recent: str | None = option(None, f"Instead of --budget, newest tokens to keep: {_AMOUNT}."),
    heavy_fraction: float = option(0.5, "Part of --budget for heavy hitters; the rest: recent."),
    sink: int = option(0, "First tokens that are never evicted, beyond --budget."),
    scoring: str = option("sum", f"How attention is accumulated: {', '.join(SCORINGS)}."),
    decay: float | None = option(
        None, "Factor per later token: with --scoring decay (0.995), or value_norm (none)."
    ),
    positions: str = option(
        "original", "original, rolling (past the context window), clamped (OPT)."
    ),
    prefill_chunk: int | None = option(None, CHUNK_HELP),
    kv_bits: int | None = option(None, "Quantize keys and values to 8 or 4 bits."),
    layer_budgets: Path | None = option(
        None, "Divide heavy hitters among the layers as a file of h2okv eval layers says."
    ),
) -> CacheConfig:
    """Makes a config; --heavy and --recent stand for --budget, a missing one for its half."""
    rest: dict[str, Any] = {
        "policy": policy, "sink": sink, "scoring": scoring, "decay": decay,
        "positions": positions, "prefill_chunk": prefill_chunk, "kv_bits": kv_bits,
        "layer_budgets": None if layer_budgets is None else read_factors(layer_budgets),
    }  # fmt: skip
    if heavy is None and recent is None:
        return CacheConfig.from_budget(parse_budget(budget), heavy_fraction, **rest)
    half = CacheConfig.from_budget(parse_budget(budget))
    return CacheConfig(
        heavy=half.heavy if heavy is None else parse_amount("heavy", heavy),
        recent=half.recent if recent is None else parse_amount("recent", recent),
        **rest,
    )


def _names_parts(default: str, budget: str, values: dict[str, Any]) -> bool:
    """Whether --heavy or --recent stand for --budget, which must then be left alone."""
    is_fine = values["heavy"] is not None or values["recent"] is not None
    if is_fine and budget != default:
        raise ValueError("--budget goes without --heavy and --recent, its parts; leave one out")
    return is_fine


def cache_options(budget: str = "20%", **fixed: Any) -> Callable[[Command], Command]:
    """Gives a command the options of a cache, and hands it ``cache``, a `CacheConfig`."""

    def build(**values: Any) -> CacheConfig:
        _names_parts(budget, values["budget"], values)
        return make_cache(**values)

    return bundle("cache", build, make_cache, budget=option(budget, _BUDGET), **fixed)


def cache_lists(
    budget: str, policy: str = "h2o", scoring: str = "sum", **changed: Any
) -> Callable[[Command], Command]:
    """The same for a command that compares: ``caches``, each policy with each budget."""

    def build(**values: Any) -> list[CacheConfig]:
        lists = {name: split_list(values.pop(name)) for name in ("budget", "policy", "scoring")}
        for name, found in lists.items():
            if not found:
                raise ValueError(f"--{name} names nothing; give at least one value")
        if _names_parts(budget, ",".join(lists["budget"]), values):
            lists["budget"] = ("20%",)
        caches: list[CacheConfig] = []
        for own, name in itertools.product(lists["budget"], lists["policy"]):
            for chosen in _scorings_of(name, lists["scoring"], values["decay"]):
                made = make_cache(policy=name, budget=own, **(values | chosen))
                if not any(made.identity() == other.identity() for other in caches):
                    caches.append(made)
        return caches

    lists = {
        "policy": option(policy, f"Policies, comma-separated: {', '.join(POLICIES)}."),
        "budget": option(
            budget, "Budgets, comma-separated: tokens (512), part of the prompt (20%), full."
        ),
        "scoring": option(
            scoring, f"How attention is accumulated, comma-separated: {', '.join(SCORINGS)}."
        ),
    }
    return bundle("caches", build, make_cache, **lists, **changed)


def _scorings_of(policy: str, scorings: Sequence[str], decay: float | None) -> list[dict[str, Any]]:
    """The scorings of a list that a policy looks at; the options of each."""
    if len(scorings) == 1:
        return [{"scoring": scorings[0]}]
    from h2okv.policy import get_policy

    known = get_policy(policy)
    if known.prompt_only or not known.uses_scores:
        scorings = ["sum"]
    takes = ("decay", "value_norm")
    return [{"scoring": own, "decay": decay if own in takes else None} for own in scorings]


def budget_text(config: CacheConfig) -> str:
    """A budget as `parse_cache` reads it: ``20%``, or heavy and recent such as ``64+10%``."""
    parts = (config.heavy, config.recent)
    if type(config.heavy) is type(config.recent):
        plain = CacheConfig.from_budget(config.heavy + config.recent)
        if parts == (plain.heavy, plain.recent):
            return config.budget_label
    return "+".join(f"{100 * part:g}%" if isinstance(part, float) else str(part) for part in parts)


def parse_cache(policy: str, budget: str, sink: int = 0) -> CacheConfig:
    """Reads what `budget_text` writes."""
    heavy, plus, recent = budget.partition("+")
    if not plus:
        return CacheConfig.from_budget(parse_budget(budget), policy=policy, sink=sink)
    parts = parse_amount("heavy", heavy), parse_amount("recent", recent)
    return CacheConfig(policy, *parts, sink=sink)


def cache_flags(config: CacheConfig) -> str:
    """The options that a command reads back as this cache."""
    if config.is_full:
        return "--policy full"
    heavy, plus, recent = budget_text(config).partition("+")
    budget = f"--heavy {heavy} --recent {recent}" if plus else f"--budget {heavy}"
    flags = [f"--policy {config.policy}", budget]
    for name in ("sink", "scoring", "decay", "positions", "prefill_chunk", "kv_bits"):
        if getattr(config, name) != getattr(CacheConfig, name):
            flags.append(f"{flag(name)} {getattr(config, name)}")
    if config.layer_budgets is not None:
        flags.append("--layer-budgets FILE")
    return " ".join(flags)


def read_factors(path: Path) -> list[float]:
    """Reads a JSON list of numbers."""
    try:
        found = json.loads(read_text("layer-budgets", path))
        return [float(factor) for factor in found]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--layer-budgets '{path}' is no JSON list of numbers; give a file of h2okv eval layers"
        ) from error


@dataclass(frozen=True)
class ModelOptions:
    """Which model, in which dtype, on which device; the fields are a command's options."""

    name: str = option(BUNDLED, MODEL_HELP, "--model")
    dtype_name: str = option("auto", f"Data type of the weights: {', '.join(DTYPES)}.", "--dtype")
    device_name: str = option("auto", DEVICE_HELP, "--device")

    @property
    def dtype(self) -> torch.dtype | None:
        """The data type of the weights; None for the checkpoint's own."""
        return parse_dtype(self.dtype_name)

    @property
    def device(self) -> torch.device:
        """Where it runs; refused if this machine does not have it."""
        from h2okv.integration.loading import parse_device

        return parse_device(self.device_name)

    def describe(self) -> Described:
        """Reads config and tokenizer, so that most mistakes show before the weights load."""
        from h2okv.integration.loading import describe

        _ = self.dtype, self.device
        return describe(self.name)

    def load(self, described: Described) -> PreTrainedModel:
        from h2okv.integration.loading import load_weights

        return load_weights(described, self.dtype, self.device)


def model_options(**fixed: Any) -> Callable[[Command], Command]:
    """Gives a command the options of a model, and hands it ``model``, `ModelOptions`."""
    return bundle("model", ModelOptions, ModelOptions, **fixed)


_MODELS_OWN = "the model's own, or "


def _own(neutral: int, help: str) -> Any:
    return option(None, f"{help} ({_MODELS_OWN}{neutral}).")


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling as far as the user said it; the fields are a command's options."""

    max_new_tokens: int | None = option(128, "Most tokens to generate.")
    temperature: float | None = _own(0, "0 is greedy decoding; higher is more random")
    top_p: float | None = _own(1, "Nucleus sampling: most likely tokens of this total probability")
    top_k: int | None = _own(0, "Sample among this many of the most likely tokens; 0 for all")
    min_p: float | None = _own(0, "Drop tokens less likely than this, relative to the likeliest")
    repetition_penalty: float | None = _own(1, "Above 1, tokens that occurred become less likely")
    stop: list[str] | None = option(None, "A string that ends the text; may be repeated.")
    seed: int | None = option(0, "Random seed.")

    def __post_init__(self) -> None:
        self._make({})
        check_least(max_new_tokens=self.max_new_tokens)
        if not 0 <= (self.seed or 0) < 2**63:
            raise ValueError(f"--seed {self.seed} is out of range; give 0 to {2**63 - 1}")

    def params(self, described: Described | None = None) -> SamplingParams:
        """Settles what the user left open by the model's generation config; greedy without one."""
        params = self._make({} if described is None else _sampling_of(described))
        for name, neutral in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
            value = getattr(self, name)
            if params.is_greedy and value not in (None, neutral):
                raise ValueError(
                    f"{flag(name)} {value:g} has no effect on greedy decoding; add"
                    " --temperature 0.8"
                )
        return params

    def _make(self, own: dict[str, Any]) -> SamplingParams:
        from h2okv.engine.sampling_params import SamplingParams

        said = {name: value for name, value in vars(self).items() if value is not None}
        most = said.pop("max_new_tokens", None)
        try:
            return SamplingParams(**{"temperature": 0.0, "max_tokens": most, **own, **said})
        except ValueError as error:  # which names the argument, and here it is an option
            message = re.sub(r"^(\w+)=", lambda match: f"{flag(match[1])} ", str(error))
            raise ValueError(message.replace("--max-tokens", "--max-new-tokens")) from error


def _sampling_of(described: Described) -> dict[str, Any]:
    """How a model's authors want it to be sampled, if they say so."""
    from transformers import GenerationConfig

    from h2okv.engine.sampler import model_sampling

    try:
        return model_sampling(GenerationConfig.from_pretrained(described.source))
    except (OSError, ValueError):
        return {}


def sampling_options(
    max_new_tokens: int | None = 128, models_own: bool = True, **fixed: Any
) -> Callable[[Command], Command]:
    """Gives a command the options of sampling, and hands it ``sampling``, `SamplingOptions`."""
    most = None if max_new_tokens is None else option(max_new_tokens, "Most tokens to generate.")
    changed = {"max_new_tokens": most, **fixed}
    if not models_own:  # the command does not ask how the model's authors want it to be sampled
        for part in fields(SamplingOptions):
            own: Any = copy.copy(part.default)
            own.help = own.help.replace(_MODELS_OWN, "")
            changed.setdefault(part.name, own)
    return bundle("sampling", SamplingOptions, SamplingOptions, **changed)


def flag(name: str) -> str:
    """The option that sets a parameter."""
    return f"--{name.replace('_', '-')}"


def parse_amount(name: str, text: str) -> int | float:
    """Reads a part of the budget: tokens as `64`, a fraction of the prompt as `10%` or `0.1`."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        percent = text.strip().endswith("%")
        fraction = float(text.strip().removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        fraction = math.nan
    if not math.isfinite(fraction):
        raise ValueError(
            f"--{name} {text!r} is not an amount; give tokens (--{name} 64) or a fraction of the"
            f" prompt (--{name} 10% or --{name} 0.1)"
        )
    return fraction


def parse_budget(text: str) -> int | float | None:
    """Reads a budget: `512`, `20%`, `0.2`, or `full`, which is None."""
    return None if text.strip() == "full" else parse_amount("budget", text.strip())


def parse_choice(option: str, text: str, choices: Sequence[Choice]) -> Choice:
    """Reads an option that takes one of a few words."""
    for word in choices:
        if word == text:
            return word
    raise ValueError(f"--{option} {text!r} is not known; choose from {', '.join(choices)}")


def parse_positions(text: str) -> Positions | None:
    """Reads how entries are positioned; None for auto, which the command settles."""
    chosen: Any = parse_choice("positions", text, ("auto", *POSITIONS))
    return None if chosen == "auto" else chosen


def parse_dtype(text: str) -> torch.dtype | None:
    """Reads a data type."""
    import torch

    name = parse_choice("dtype", text, DTYPES)
    return None if name == "auto" else getattr(torch, name)


def split_list(text: str) -> tuple[str, ...]:
    """Reads a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_numbers(
    name: str, text: str, kind: type[Number], example: str = "2048,8192"
) -> tuple[Number, ...]:
    """Reads a comma-separated list of numbers."""
    try:
        return tuple(kind(part) for part in split_list(text))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(
            f"--{name} {text!r} is not a list of {what}; give one such as {example}"
        ) from None


def check_file(option: str, path: Path | None) -> None:
    """Refuses a file that could not be written when the work is done."""
    if path is None:
        return
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = "it is in no folder that exists"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission denied"
    else:
        return
    raise ValueError(f"--{option} '{path}' cannot be written ({reason}); choose another file")


def text_or_sample(path: Path | None) -> str:
    """Reads --text; without it the opening of a novel."""
    return sample_prompt() if path is None else read_text("text", path)


def read_text(option: str, path: Path) -> str:
    """Reads a text file that an option names, without the last line's end."""
    try:
        return read_text_file(path).rstrip("\r\n")
    except ValueError as error:
        raise ValueError(f"--{option} {error}") from error


def check_copies(option: str, copies: int | None, ray: bool, device: str) -> None:
    """Refuses a number of copies of the model, or a device for them, that makes no sense."""
    if not ray and copies is not None:
        raise ValueError(f"--{option} {copies} needs --ray; give --ray too")
    check_least(**{option: copies})
    if ray and device not in (devices := ("auto", "cpu", "cuda")):
        raise ValueError(
            f"--device {device!r} cannot be chosen with --ray, which gives each copy of the model"
            f" a GPU of its own; give {', '.join(devices)}"
        )


def reflow(text: str | None) -> str:
    """Joins the lines of each paragraph, for the terminal to wrap; indented ones stay."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(
        part if part.startswith(" ") else " ".join(part.split()) for part in paragraphs
    )


def with_least_entries(
    cache: CacheConfig, length: int | None = None
) -> tuple[CacheConfig, str | None]:
    """Raises fractions of short prompts to enough entries for a text, and says where that acts.

    For a prompt of a length, or for prompts that are not known yet.
    """
    raised = replace(cache, min_tokens=LEAST_ENTRIES)
    tokens = raised.budget.resolve(length or 0)
    if cache.is_full or tokens == cache.budget.resolve(length or 0):
        return cache, None
    kept = f"{tokens.heavy} heavy + {tokens.recent} recent entries are kept"
    if length is None:
        note = f"of short prompts, whose {cache.budget_label} are too little for good text, {kept}"
    else:
        note = f"{cache.budget_label} of {length} tokens is too little for good text, so {kept}"
    return raised, f"note: {note}; for fewer give tokens, such as --budget 32"
