"""Options that several commands share, each declared once."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from h2okv.config import POSITIONS, CacheConfig, Positions

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel

    from h2okv.engine.sampling_params import SamplingParams
    from h2okv.integration.loading import Described

Command = TypeVar("Command", bound=Callable[..., Any])
Choice = TypeVar("Choice", bound=str)

BUNDLED = "bundled"
DTYPES = ("auto", "float32", "bfloat16", "float16")
POLICIES = (
    "full", "recent", "sink_recent", "h2o", "heavy", "random", "strided", "strided_heavy",
    "fixed", "fixed_heavy", "snapkv",
)  # fmt: skip
"""Policies that drop entries; written down, for the registry imports torch."""
SCORINGS = ("sum", "mean", "decay", "value_norm")
MODEL_HELP = "A folder, a GGUF file, a Hub id, bundled or smollm2."
COMPILE_HELP = "Compile decode steps with torch.compile: slow to start, then faster."


@dataclass(frozen=True)
class _Option:
    """One option of the command line."""

    kind: Any
    default: Any
    help: str
    show_default: bool | str = True


def _bundle(
    parameter: str,
    options: Mapping[str, _Option],
    build: Callable[..., Any],
    panel: str,
    without: Sequence[str] = (),
) -> Callable[[Command], Command]:
    """Gives a command options in the place of one parameter, which is built from them."""
    own = {name: option for name, option in options.items() if name not in without}

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        parameters = [
            part.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for part in signature.parameters.values()
            if part.name != parameter
        ]
        for name, option in own.items():
            shown = typer.Option(
                help=option.help, rich_help_panel=panel, show_default=option.show_default
            )
            parameters.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=option.default,
                    annotation=Annotated[option.kind, shown],
                )
            )

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            values = {name: given.pop(name) for name in own}
            return command(**given, **{parameter: build(**values)})

        changed: Any = run
        changed.__signature__ = signature.replace(parameters=parameters)
        changed.__annotations__ = {part.name: part.annotation for part in parameters}
        result: Command = changed
        return result

    return decorate


_FIELDS = {field.name: field.default for field in fields(CacheConfig)}
_AMOUNT = "tokens (64) or a fraction of the prompt (10%)"
_CACHE = {
    "policy": _Option(str, _FIELDS["policy"], f"Eviction policy: {', '.join(POLICIES)}."),
    "budget": _Option(str, "20%", "Entries to keep: tokens (512), part of the prompt (20%), full."),
    "heavy": _Option(
        str | None, None, f"Instead of --budget, heavy hitters to keep: {_AMOUNT}.", False
    ),
    "recent": _Option(
        str | None, None, f"Instead of --budget, newest tokens to keep: {_AMOUNT}.", False
    ),
    "heavy_fraction": _Option(float, 0.5, "Part of --budget for heavy hitters; the rest: recent."),
    "sink": _Option(int, _FIELDS["sink"], "First tokens that are never evicted, beyond --budget."),
    "scoring": _Option(
        str, _FIELDS["scoring"], f"How attention is accumulated: {', '.join(SCORINGS)}."
    ),
    "decay": _Option(
        float | None, None, "With --scoring decay, the factor per later token.", "0.995"
    ),
    "positions": _Option(
        str,
        _FIELDS["positions"],
        "original, rolling (for text beyond the context window) or clamped (OPT).",
    ),
    "prefill_chunk": _Option(
        int | None,
        None,
        "Most tokens between two evictions while a prompt is read; 1 is the paper's Algorithm 1.",
        "the whole prompt",
    ),
    "kv_bits": _Option(
        int | None, None, "Quantize keys and values to 8 or 4 bits.", "the model's dtype"
    ),
}


def cache_options(budget: str = "20%", without: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Gives a command the options of a cache, and hands it ``cache``, a `CacheConfig`."""
    options = _CACHE | {"budget": _Option(str, budget, _CACHE["budget"].help)}

    def build(policy: str, **values: Any) -> CacheConfig:
        return _cache_config(policy, values.pop("budget", budget), budget, **values)

    return _bundle("cache", options, build, "Cache", without)


def cache_lists(
    budget: str,
    policy: str = "h2o",
    scoring: str = "sum",
    prefill_chunk: int | None = None,
    without: Sequence[str] = (),
) -> Callable[[Command], Command]:
    """The same for a command that compares: ``caches``, each policy with each budget."""
    options = _CACHE | {
        "policy": _Option(str, policy, f"Policies, comma-separated: {', '.join(POLICIES)}."),
        "budget": _Option(
            str, budget, "Budgets, comma-separated: tokens (512), part of the prompt (20%), full."
        ),
        "scoring": _Option(
            str, scoring, f"How attention is accumulated, comma-separated: {', '.join(SCORINGS)}."
        ),
    }
    if prefill_chunk is not None:
        options["prefill_chunk"] = _Option(int, prefill_chunk, _CACHE["prefill_chunk"].help)

    def build(policy: str, **values: Any) -> list[CacheConfig]:
        budgets = split_list(values.pop("budget", budget))
        policies = split_list(policy)
        scorings = split_list(values.pop("scoring", scoring))
        lists = (("policy", policies), ("budget", budgets), ("scoring", scorings))
        for name, found in lists:
            if not found:
                raise ValueError(f"--{name} names nothing; give at least one value")
        is_fine = values.get("heavy") is not None or values.get("recent") is not None
        if is_fine and ",".join(budgets) != budget:
            raise ValueError(_TWICE)
        caches: list[CacheConfig] = []
        for own in ["20%"] if is_fine else budgets:
            for name in policies:
                for chosen in _scorings_of(name, scorings, values.get("decay")):
                    made = _cache_config(name, own, own, **(values | chosen))
                    if not any(made.identity() == other.identity() for other in caches):
                        caches.append(made)
        return caches

    return _bundle("caches", options, build, "Cache", without)


def _scorings_of(policy: str, scorings: Sequence[str], decay: float | None) -> list[dict[str, Any]]:
    """The scorings of a list that a policy looks at; the options of each."""
    if len(scorings) == 1:
        return [{"scoring": scorings[0]}]
    from h2okv.policy import get_policy

    known = get_policy(policy)
    if known.prompt_only or not known.uses_scores:
        scorings = ["sum"]
    return [{"scoring": own, "decay": decay if own == "decay" else None} for own in scorings]


_TWICE = "--budget goes without --heavy and --recent, which are its parts; leave one of them out"


def _cache_config(
    policy: str,
    budget: str,
    default: str,
    heavy: str | None = None,
    recent: str | None = None,
    heavy_fraction: float = 0.5,
    **rest: Any,
) -> CacheConfig:
    """Makes one config; --heavy and --recent stand for --budget, a missing one for its half."""
    if heavy is None and recent is None:
        return CacheConfig.from_budget(
            parse_budget(budget), heavy_fraction, **({"policy": policy} | rest)
        )
    if budget != default:
        raise ValueError(_TWICE)
    half = CacheConfig.from_budget(parse_budget(default))
    return CacheConfig(
        policy=policy,
        heavy=half.heavy if heavy is None else parse_amount("heavy", heavy),
        recent=half.recent if recent is None else parse_amount("recent", recent),
        **rest,
    )


def cache_flags(config: CacheConfig) -> str:
    """The options that a command reads back as this cache."""
    if config.is_full:
        return "--policy full"
    parts = (config.heavy, config.recent)
    shown = [f"{100 * part:g}%" if isinstance(part, float) else str(part) for part in parts]
    flags = [f"--policy {config.policy}", f"--heavy {shown[0]} --recent {shown[1]}"]
    if type(config.heavy) is type(config.recent):
        plain = CacheConfig.from_budget(config.heavy + config.recent)
        if parts == (plain.heavy, plain.recent):
            flags[1] = f"--budget {config.budget_label}"
    for name in ("sink", "scoring", "decay", "positions", "prefill_chunk", "kv_bits"):
        if getattr(config, name) != _FIELDS[name]:
            flags.append(f"--{name.replace('_', '-')} {getattr(config, name)}")
    return " ".join(flags)


@dataclass(frozen=True)
class ModelOptions:
    """Which model, in which dtype, on which device.

    Attributes:
        name: what the user calls it.
        dtype: of the weights; None for the checkpoint's own.
        device_name: where it runs, in the user's words.
    """

    name: str
    dtype: torch.dtype | None
    device_name: str = "auto"

    @property
    def device(self) -> torch.device:
        """Where it runs; refused if this machine does not have it."""
        from h2okv.integration.loading import parse_device

        return parse_device(self.device_name)

    def describe(self) -> Described:
        """Reads config and tokenizer, so that most mistakes show before the weights load."""
        from h2okv.integration.loading import describe, parse_device

        parse_device(self.device_name)
        return describe(self.name)

    def load(self, described: Described) -> PreTrainedModel:
        """Loads the weights."""
        from h2okv.integration.loading import load_weights

        return load_weights(described, self.dtype, self.device)


_MODEL = {
    "model": _Option(str, BUNDLED, MODEL_HELP),
    "dtype": _Option(str, "auto", f"Data type of the weights: {', '.join(DTYPES)}."),
    "device": _Option(str, "auto", "auto, cpu, cuda, cuda:1 ..."),
}


def model_options(without: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Gives a command the options of a model, and hands it ``model``, `ModelOptions`."""

    def build(model: str = BUNDLED, dtype: str = "auto", device: str = "auto") -> ModelOptions:
        return ModelOptions(model, parse_dtype(dtype), device)

    return _bundle("model", _MODEL, build, "Model", without)


_MODELS_OWN = "the model's own, or {}"
_SAMPLING = {
    "max_new_tokens": _Option(int, 128, "Most tokens to generate."),
    "temperature": _Option(
        float | None, None, "0 is greedy decoding; higher is more random.", _MODELS_OWN.format(0)
    ),
    "top_p": _Option(
        float | None, None, "Nucleus sampling: most likely tokens of this total probability.",
        _MODELS_OWN.format(1),
    ),
    "top_k": _Option(
        int | None, None, "Sample among this many of the most likely tokens; 0 for all.",
        _MODELS_OWN.format(0),
    ),
    "min_p": _Option(
        float | None, None, "Drop tokens less likely than this, relative to the most likely one.",
        _MODELS_OWN.format(0),
    ),
    "repetition_penalty": _Option(
        float | None, None, "Above 1, tokens that occurred become less likely.",
        _MODELS_OWN.format(1),
    ),
    "stop": _Option(list[str] | None, None, "A string that ends the text; may be repeated.", False),
    "seed": _Option(int, 0, "Random seed."),
}  # fmt: skip


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling as far as the user said it; the rest is the model's own.

    Attributes:
        given: arguments of `SamplingParams`.
    """

    given: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._make({})
        if self.given.get("max_tokens") is not None and self.given["max_tokens"] < 1:
            raise ValueError(
                f"--max-new-tokens {self.given['max_tokens']} is too few; give 1 or more"
            )
        if not 0 <= self.given.get("seed", 0) < 2**63:
            raise ValueError(f"--seed {self.given['seed']} is out of range; give 0 to {2**63 - 1}")

    def params(self, own: GenerationConfig | None = None) -> SamplingParams:
        """Settles what the user left open by the model's generation config; greedy without one."""
        params = self._make(_defaults_of(own))
        for name in ("top_p", "top_k", "min_p"):
            value = self.given.get(name)
            if params.is_greedy and value is not None and value != getattr(_neutral(), name):
                raise ValueError(
                    f"--{name.replace('_', '-')} {value:g} has no effect on greedy decoding; add"
                    " --temperature 0.8"
                )
        return params

    def _make(self, own: Mapping[str, Any]) -> SamplingParams:
        from h2okv.engine.sampling_params import SamplingParams

        said = {name: value for name, value in self.given.items() if value is not None}
        try:
            return SamplingParams(**{"temperature": 0.0, **own, **said})
        except ValueError as error:
            raise ValueError(_as_option(str(error))) from error


def _neutral() -> SamplingParams:
    """Sampling that leaves the model's probabilities as they are."""
    from h2okv.engine.sampling_params import SamplingParams

    return SamplingParams()


def own_generation_config(described: Described) -> GenerationConfig | None:
    """Reads how a model's authors want it to be sampled, if they say so."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(described.source)
    except (OSError, ValueError):
        return None


def _defaults_of(own: GenerationConfig | None) -> dict[str, Any]:
    """What a model's generation config asks for."""
    if own is None:
        return {}
    found = {"repetition_penalty": getattr(own, "repetition_penalty", None)}
    if getattr(own, "do_sample", False):
        temperature = getattr(own, "temperature", None)
        found["temperature"] = 1.0 if temperature is None else temperature
        found |= {name: getattr(own, name, None) for name in ("top_p", "top_k", "min_p")}
    return {name: value for name, value in found.items() if value is not None}


def _as_option(message: str) -> str:
    """Says what is wrong with an argument in the words of the command line."""

    def option(match: re.Match[str]) -> str:
        name = "max-new-tokens" if match[1] == "max_tokens" else match[1].replace("_", "-")
        return f"--{name} {match[2]}"

    return re.sub(r"^(\w+)=(\S+)", option, message)


def sampling_options(
    max_new_tokens: int = 128, without: Sequence[str] = (), models_own: bool = True
) -> Callable[[Command], Command]:
    """Gives a command the options of sampling, and hands it ``sampling``, `SamplingOptions`."""
    most = _Option(int, max_new_tokens, _SAMPLING["max_new_tokens"].help)
    options = _SAMPLING | {"max_new_tokens": most}
    if not models_own:  # the command does not ask how the model's authors want it to be sampled
        for name, option in options.items():
            if isinstance(option.show_default, str):
                shown = option.show_default.rpartition(" ")[2]
                options[name] = replace(option, show_default=shown)

    def build(max_new_tokens: int | None = None, **given: Any) -> SamplingOptions:
        return SamplingOptions({"max_tokens": max_new_tokens, **given})

    return _bundle("sampling", options, build, "Sampling", without)


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


def parse_positions(text: str) -> Positions:
    """Reads how entries are positioned."""
    return parse_choice("positions", text, POSITIONS)


def parse_choice(option: str, text: str, choices: Sequence[Choice]) -> Choice:
    """Reads an option that takes one of a few words."""
    for word in choices:
        if word == text:
            return word
    raise ValueError(f"--{option} {text!r} is not known; choose from {', '.join(choices)}")


def parse_dtype(text: str) -> torch.dtype | None:
    """Reads a data type."""
    import torch

    name = parse_choice("dtype", text, DTYPES)
    return None if name == "auto" else getattr(torch, name)


def split_list(text: str) -> tuple[str, ...]:
    """Reads a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """Reads a comma-separated list of whole numbers."""
    try:
        return tuple(int(part) for part in split_list(text))
    except ValueError:
        raise ValueError(
            f"--{name} {text!r} is not a list of whole numbers; give one such as 2048,8192"
        ) from None


def check_file(option: str, path: Path) -> None:
    """Refuses a file that could not be written when the work is done."""
    if path.is_dir():
        raise ValueError(f"--{option} '{path}' is a folder and cannot be written; give a file")
    if not path.parent.is_dir():
        raise ValueError(f"--{option} '{path}' is in no folder that exists; make it first")


def read_text(option: str, path: Path, what: str = "text") -> str:
    """Reads a text file that an option names."""
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(
            f"--{option} '{path}' cannot be read ({reason}); give a text file"
        ) from error
    return checked_text(decode(f"--{option} '{path}'", data), what)


def decode(source: str, data: bytes) -> str:
    """Decodes UTF-8, without the byte-order mark and the last line's end."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not UTF-8 text (byte {error.start}); convert it to UTF-8"
        ) from error
    return text.removeprefix("\ufeff").rstrip("\r\n")


def checked_text(text: str, what: str) -> str:
    """Refuses a text with nothing in it."""
    if not text.strip():
        raise ValueError(f"the {what} is empty; give some text to go on from")
    return text


RAY_DEVICES = ("auto", "cpu", "cuda")


def check_copies(option: str, copies: int | None, ray: bool, device: str) -> None:
    """Refuses a number of copies of the model, or a device for them, that makes no sense."""
    if not ray:
        if copies is not None:
            raise ValueError(f"{option} {copies} needs --ray; give --ray too")
        return
    if copies is not None and copies < 1:
        raise ValueError(f"{option} {copies} is too few; give 1 or more")
    if device not in RAY_DEVICES:
        raise ValueError(
            f"--device {device!r} cannot be chosen with --ray, which gives each copy of the model"
            f" a GPU of its own; give {', '.join(RAY_DEVICES)}"
        )


def reflow(text: str | None) -> str:
    """Joins the lines of each paragraph, for the terminal to wrap; indented ones stay."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(
        part if part.startswith(" ") else " ".join(part.split()) for part in paragraphs
    )
