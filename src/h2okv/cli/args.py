"""Options that several commands share, each declared once, and the parsing of their values."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import typer
from typer.models import OptionInfo, ParameterInfo

import h2okv
from h2okv.cli import readers
from h2okv.cli.help_page import describe, order
from h2okv.config import (
    BEST,
    BEST_HEAVY_FRACTION,
    EVEN,
    KV_BITS,
    MEASURED,
    PER_QUERY,
    POLICIES,
    POSITIONS,
    SCORED,
    SCORINGS,
    CacheConfig,
    LayerBudgets,
    parse_factors,
)
from h2okv.console import check_least
from h2okv.integration.names import check_name
from h2okv.records import refusing, unknown_name

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance
    from transformers import PreTrainedConfig, PreTrainedModel

    from h2okv.engine.sampling_params import SamplingParams
    from h2okv.integration.loading import Described

    Typed = Any
else:
    Typed = str  # the type of options whose text is parsed
Command = TypeVar("Command", bound=Callable[..., Any])
Instance = TypeVar("Instance", bound="DataclassInstance")

BUNDLED = "bundled"
DTYPES = ("auto", "float32", "bfloat16", "float16")


@functools.cache
def helps() -> dict[str, str]:
    """Return the text of help.md by command."""
    text = Path(__file__).with_name("help.md").read_text(encoding="utf-8")
    _, *sections = re.split(r"^# (.+)\n+", text, flags=re.MULTILINE)
    return dict(zip(sections[::2], sections[1::2], strict=True))


def group(name: str) -> typer.Typer:
    return typer.Typer(name=name, help=helps()[name], add_completion=False)


def subcommand(app: typer.Typer, name: str) -> Callable[[Command], Command]:
    register = app.command(name, help=helps()[f"{app.info.name} {name}"])
    return lambda command: register(expand(command))


def option(
    default: Any, help: str, *names: str, read: Callable[..., Any] | None = None, **options: Any
) -> Any:
    """Return an option of a command; `read` checks or converts its value."""
    if read is None:
        return typer.Option(default, *names, help=help)

    def called(context: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
        if value is None or context.resilient_parsing:  # a shell that completes a line
            return value
        if isinstance(value, list):
            return [read(param.opts[0], entry, **options) for entry in value]
        return read(param.opts[0], value, **options)

    return typer.Option(default, *names, help=help, callback=called)


def build(kind: type[Instance], values: dict[str, Any], **extra: Any) -> Instance:
    """Build a dataclass from the values that are named like its fields."""
    names = {field.name for field in fields(kind) if field.init}
    return kind(**{name: value for name, value in (values | extra).items() if name in names})


MODEL_HELP = "Folder, GGUF file, Hub id, bundled or smollm2."
DEVICE_HELP = "auto, cpu, cuda or cuda:1."
JSON = option(False, "Print one JSON object.", "--json")
TEXT = option(None, "Text file (the opening of a novel).", read=readers.readable)
RAW = option(False, "Continue the text, without a chat template.", "--raw")
_PIN_HELP = "Messages never evicted: system, user, last_user."
PIN = option("", _PIN_HELP, read=readers.names)
ROWS = option(None, "Append the rows to this file.", read=readers.writable)
MEMORY_HELP = "Limit, such as 4GiB (what is free)."
AUTO_POSITIONS = option(
    "auto",
    "auto, original, rolling or clamped.",
    read=readers.choice,
    words=("auto", *POSITIONS),
)
EVICT_EVERY = option(
    None, "Evict at multiples of this (256); 0: each block.", read=readers.least, least=0
)
COMPILE = option(False, "Compile decode steps: slow to start, then faster.", "--compile")
WEIGHT_BITS = option(
    None, "4: decode reads 4-bit weights (x86).", "--weight-bits", read=readers.bits, allowed=(4,)
)


class Bundle(NamedTuple):
    """Options that replace one parameter of a command; `build` turns their values into its value.

    The options are the defaults in the signature of `build`; `changed` replaces some of them. A
    default that is not an option, in either of them, is a fixed value.
    """

    build: Callable[..., Any]
    panel: str | None = None  # by the names of the options
    changed: Mapping[str, Any] = {}

    def options(self) -> list[inspect.Parameter]:
        """Return the parameters of `build`, with options or fixed values as defaults."""
        source = inspect.signature(self.build, eval_str=True)
        parameters = []
        for name, parameter in source.parameters.items():
            default = copy.copy(self.changed.get(name, parameter.default))
            if isinstance(default, OptionInfo):
                default.rich_help_panel = default.rich_help_panel or self.panel
            parameters.append(
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=default)
            )
        return parameters


def expand(command: Callable[..., Any]) -> Any:
    """Replace a command's parameters that are bundles by their options."""
    signature = inspect.signature(command, eval_str=True)
    outer = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
    ]
    bundles = [parameter for parameter in outer if isinstance(parameter.default, Bundle)]
    inner = {bundle.name: bundle.default.options() for bundle in reversed(bundles)}
    direct = [parameter for parameter in outer if parameter not in bundles]
    parameters = [
        describe(entry) if isinstance(entry.default, ParameterInfo) else entry
        for options in (*inner.values(), direct)
        for entry in options
        if options is direct or isinstance(entry.default, ParameterInfo)
    ]
    parameters.sort(key=order)

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        for bundle in bundles:
            arguments = {parameter.name: parameter.default for parameter in inner[bundle.name]}
            for name, default in arguments.items():
                # A fixed value may be named like an option of the command itself.
                if isinstance(default, ParameterInfo):
                    arguments[name] = values.pop(name)
            values[bundle.name] = bundle.default.build(**arguments)
        return command(**values)

    expanded: Any = run
    expanded.__signature__ = signature.replace(parameters=parameters)
    expanded.__annotations__ = {entry.name: entry.annotation for entry in parameters}
    return expanded


_BUDGET = "Entries to keep: 512, 20% or full ({})."
_BUDGETS = "Comma-separated: 512, 20%, full ({})."
CHUNK_HELP = "Prompt tokens between evictions; the paper's: 1."


def _factors(option: str, text: str) -> LayerBudgets | Literal["auto", "even"]:
    if text in (MEASURED, EVEN):
        return MEASURED if text == MEASURED else EVEN
    written = readers.read_text(option, Path(text))
    problem = f"{option} '{text}' is not a JSON list of numbers"
    with refusing(problem, "give auto, even or a file of h2okv eval layers", ValueError, TypeError):
        return parse_factors(written)


def policy_option(default: str = BEST) -> Any:
    return option(default, f"{', '.join(POLICIES)} or module:Class; h2o is the paper's.")


def make_cache(
    policy: str = policy_option(),
    budget: str | None = option(None, _BUDGET.format("20%")),
    heavy: str | None = option(None, "Heavy hitters to keep, instead of --budget."),
    recent: str | None = option(None, "Newest tokens to keep, instead of --budget."),
    heavy_fraction: float | None = option(
        None, f"Heavy hitters in --budget (0.5; best: {BEST_HEAVY_FRACTION:g})."
    ),
    sink: int | None = option(None, "First tokens, never evicted (none; best: 4)."),
    scoring: str | None = option(None, f"{', '.join(SCORINGS)} (sum; best: expected)."),
    decay: float | None = option(None, "Of scores, per token (--scoring decay: 0.995)."),
    positions: str = option("original", "original, rolling or clamped."),
    prefill_chunk: int | None = option(None, CHUNK_HELP, read=readers.least),
    evict_every: int | None = option(
        None, "Evict only at multiples of this many tokens.", read=readers.least
    ),
    kv_bits: int | None = option(
        None, "8, 6 (keys 8, values 4) or 4: quantize.", read=readers.bits, allowed=tuple(KV_BITS)
    ),
    layer_budgets: Typed = option(
        None, "auto, even or a file of h2okv eval layers.", read=_factors
    ),
    default_budget: str = "20%",  # without budget, heavy and recent
    default_chunk: int | None = None,  # of --prefill-chunk, unless one or --evict-every is given
    min_tokens: int | None = 0,  # None for commands that write text
    simulated: bool = False,  # allow policies that need the full cache
) -> CacheConfig:
    """Build a config; --heavy or --recent alone leaves half of the default budget to the other."""
    if prefill_chunk is None and evict_every is None:
        prefill_chunk = default_chunk
    values = locals()
    check_names(policy, scoring, simulated)
    options = {name: values[name] for name in cache_fields(values) if name not in _AMOUNTS}
    if layer_budgets is None:
        del options["layer_budgets"]  # the policy's
    if heavy is None and recent is None:
        return CacheConfig.from_budget(
            readers.parse_budget(default_budget if budget is None else budget),
            heavy_fraction,
            **options,
        )
    for name, value in (("--budget", budget), ("--heavy-fraction", heavy_fraction)):
        if value is not None:
            others = "--heavy and --recent, which set both amounts"
            raise ValueError(f"{name} {value} cannot be combined with {others}; leave one out")
    default = "20%" if "," in default_budget else default_budget
    half = CacheConfig.from_budget(readers.parse_budget(default))
    return CacheConfig(
        heavy=half.heavy if heavy is None else readers.parse_amount("heavy", heavy),
        recent=half.recent if recent is None else readers.parse_amount("recent", recent),
        **options,
    )


_AMOUNTS = ("heavy", "recent")


def cache_fields(among: Iterable[str] | None = None) -> list[str]:
    """Return the names of the fields of `CacheConfig`, or of those that are options."""
    options = inspect.signature(make_cache).parameters if among is None else among
    return [field.name for field in fields(CacheConfig) if field.name in options]


def check_names(policy: str, scoring: str | None, simulated: bool) -> None:
    """Raise ValueError for an unknown policy or scoring."""
    if policy in PER_QUERY and not simulated:
        raise ValueError(
            f"--policy {policy} chooses entries for each query from a cache that keeps all of them,"
            " which only h2okv eval can simulate (in Python: simulate=True); choose from"
            f" {', '.join(POLICIES)}"
        )
    policies = (*POLICIES, *PER_QUERY) if simulated else POLICIES
    for name, value, names in (("policy", policy, policies), ("scoring", scoring, SCORINGS)):
        is_custom = name == "policy" and ":" in str(value)  # module:Class
        if value is not None and value not in names and not is_custom:
            raise unknown_name(f"--{name}", value, names)


def check_cache(config: PreTrainedConfig, cache: CacheConfig) -> None:
    """Raise ValueError for a cache that the model cannot use; `layer_budgets` may be ``auto``."""
    h2okv.H2OCache.from_config(config, cache.before_measuring)


def growth_note(caches: Sequence[CacheConfig]) -> str | None:
    """Return the note on caches that exceed their budget, or ``None``."""
    if not any(config.policy == "snapkv" for config in caches):
        return None
    return "note: snapkv evicts once, after the prompt; later tokens come on top of its budget"


def cache_options(budget: str = "20%", **changed: Any) -> Any:
    """Return the options of a `CacheConfig`."""
    changed |= {"budget": option(None, _BUDGET.format(budget)), "default_budget": budget}
    return Bundle(make_cache, "Cache", changed)


SERVED_BUDGET = "512"


def planned_caches(**changed: Any) -> Any:
    """Return the options of two `CacheConfig`, of a job and of a server by their defaults."""

    @functools.wraps(make_cache)
    def build(**values: Any) -> tuple[CacheConfig, CacheConfig]:
        job, server = (
            make_cache(**(values | {"default_budget": budget})) for budget in ("20%", SERVED_BUDGET)
        )
        return job, server

    budget = option(None, _BUDGET.format(f"20%, with --serve {SERVED_BUDGET}"))
    return Bundle(build, "Cache", changed | {"budget": budget})


def cache_lists(budget: str, policy: str = BEST, scoring: str | None = None, **changed: Any) -> Any:
    """Return the options of a list of `CacheConfig`: each policy with each budget."""

    @functools.wraps(make_cache)
    def build(**values: Any) -> list[CacheConfig]:
        values["default_budget"], text = budget, values.pop("budget")
        has_amounts = values["heavy"] is not None or values["recent"] is not None
        if text is None and not has_amounts:
            text = budget
        policies = readers.names("policy", values.pop("policy"))
        scoring = values.pop("scoring")
        scorings = () if scoring is None else readers.names("scoring", scoring)
        budgets = (
            (None,) if text is None else (text,) if has_amounts else readers.names("budget", text)
        )
        lists = {"policy": policies, "scoring": scoring is None or scorings, "budget": budgets}
        for name, entries in lists.items():
            if not entries:
                raise ValueError(f"--{name} is empty; give at least one value")
        for name in policies:
            check_names(name, None, values["simulated"])
        caches: dict[str, CacheConfig] = {}
        for amount, name in itertools.product(budgets, policies):
            for chosen in _scorings_of(name, scorings, values["decay"]):
                config = make_cache(policy=name, budget=amount, **(values | chosen))
                caches.setdefault(repr(config.identity()), config)
        return list(caches.values())

    allowed = (*POLICIES, *PER_QUERY) if changed.get("simulated") else POLICIES
    lists = {
        "policy": option(policy, f"Comma-separated: {', '.join(allowed)} or module:Class."),
        "budget": option(None, _BUDGETS.format(budget)),
        "scoring": option(scoring, f"Comma-separated: {', '.join(SCORINGS)}."),
    }
    return Bundle(build, "Cache", lists | changed)


def _scorings_of(policy: str, scorings: Sequence[str], decay: float | None) -> list[dict[str, Any]]:
    """Return the options of each scoring of a list that a policy uses."""
    if len(scorings) <= 1:
        return [{"scoring": next(iter(scorings), None)}]
    if policy == BEST:
        return [{"scoring": None, "decay": None}]  # it sets its own scoring
    if policy not in (*SCORED, "topk_heavy"):
        scorings = ["sum"]
    has_decay = ("decay", "value_norm")
    return [{"scoring": name, "decay": decay if name in has_decay else None} for name in scorings]


def budget_text(config: CacheConfig) -> str:
    """Format a budget for `parse_cache`: ``20%``, or heavy and recent such as ``64+10%``."""
    amounts = (config.heavy, config.recent)
    if type(config.heavy) is type(config.recent):
        policy = BEST if config.is_best else "h2o"
        plain = CacheConfig.from_budget(config.heavy + config.recent, policy=policy)
        if amounts == (plain.heavy, plain.recent):
            return config.budget_label
    texts = (f"{100 * value:g}%" if isinstance(value, float) else str(value) for value in amounts)
    return "+".join(texts)


def parse_cache(policy: str, budget: str, sink: int = 0) -> CacheConfig:
    """Parse a text of `budget_text`."""
    heavy, plus, recent = budget.partition("+")
    if not plus:
        amount = readers.parse_budget(budget)
        return CacheConfig.from_budget(amount, policy=policy, sink=sink, min_tokens=0)
    amounts = readers.parse_amount("heavy", heavy), readers.parse_amount("recent", recent)
    return CacheConfig(policy, *amounts, sink=sink, min_tokens=0)


def cache_flags(config: CacheConfig) -> str:
    """Return the command-line options of a cache."""
    if config.is_full:
        return "--policy full" + (f" --kv-bits {config.kv_bits}" if config.kv_bits else "")
    heavy, plus, recent = budget_text(config).partition("+")
    budget = f"--heavy {heavy} --recent {recent}" if plus else f"--budget {heavy}"
    usual = CacheConfig(BEST if config.is_best else "h2o")
    flags = [f"--policy {BEST if config.is_best else config.policy}", budget]
    for name in cache_fields():
        is_separate = name in ("policy", *_AMOUNTS, "min_tokens", "layer_budgets")
        if not is_separate and getattr(config, name) != getattr(usual, name):
            flags.append(f"{flag(name)} {getattr(config, name)}")
    if config.layer_budgets is not None and not config.is_best:
        flags.append(f"--layer-budgets {MEASURED if config.measured else 'FILE'}")
    return " ".join(flags)


@dataclass(frozen=True)
class ModelOptions:
    """Model, dtype and device; the fields are a command's options."""

    name: str = option(BUNDLED, MODEL_HELP, "--model")
    dtype_name: str = option(
        "auto", f"{', '.join(DTYPES)}.", "--dtype", read=readers.choice, words=DTYPES
    )
    device_name: str = option("auto", DEVICE_HELP, "--device", read=readers.device)
    is_here: bool = True  # False if other machines load the model

    def __post_init__(self) -> None:
        if self.is_here:
            check_name(self.name)

    @property
    def dtype(self) -> torch.dtype | None:
        return readers.torch_dtype(self.dtype_name)

    @property
    def device(self) -> torch.device:
        """The device; ValueError if this machine does not have it."""
        from h2okv.integration.loading import parse_device

        return parse_device(self.device_name)

    def describe(self) -> Described:
        """Read config and tokenizer, which shows most mistakes before the weights load."""
        from h2okv.integration.loading import describe

        _ = self.device
        return describe(self.name)

    def load(
        self,
        described: Described,
        compiled: bool = False,
        weight_bits: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> PreTrainedModel:
        """Load the weights; `dtype` is the default if the user chose none."""
        from h2okv.integration.loading import load_weights

        if compiled and weight_bits is not None:
            raise ValueError("--compile and --weight-bits exclude each other; choose one")
        options: Any = {"packed": not compiled, "weight_bits": weight_bits}
        return load_weights(described, self.dtype or dtype, self.device, **options)


def model_options(**changed: Any) -> Any:
    return Bundle(ModelOptions, "Model", changed)


_MOST = "Maximum number of new tokens."


@dataclass(frozen=True)
class SamplingOptions:
    """The sampling options that the user set; the fields are a command's options."""

    max_new_tokens: int | None = option(128, _MOST, read=readers.least)
    temperature: float | None = option(None, "0 is greedy decoding; higher is more random.")
    top_p: float | None = option(None, "Sample tokens of this total probability.")
    top_k: int | None = option(None, "Sample among the most likely tokens; 0: all.")
    min_p: float | None = option(None, "Minimum probability relative to the top.")
    repetition_penalty: float | None = option(None, "Above 1, repeated tokens are less likely.")
    stop: list[str] | None = option(None, "Ends the text; may be repeated.")
    seed: int | None = option(0, "Random seed.")

    def __post_init__(self) -> None:
        self._make({})
        if not 0 <= (self.seed or 0) < 2**63:
            raise ValueError(f"--seed {self.seed} is out of range; give 0 to {2**63 - 1}")

    def params(self, described: Described | None = None) -> SamplingParams:
        """Fill the unset options from the model's generation config; greedy by default."""
        defaults: dict[str, Any] = {}
        if described is not None:
            from transformers import GenerationConfig

            from h2okv.engine.sampler import model_sampling

            with suppress(OSError, ValueError):
                defaults = model_sampling(GenerationConfig.from_pretrained(described.source))
        params = self._make(defaults)
        for name, neutral in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
            value = getattr(self, name)
            if params.is_greedy and value not in (None, neutral):
                reason = f"{flag(name)} {value:g} has no effect on greedy decoding"
                raise ValueError(f"{reason}; add --temperature 0.8")
        return params

    def _make(self, defaults: dict[str, Any]) -> SamplingParams:
        values = {name: value for name, value in vars(self).items() if value is not None}
        max_tokens = values.pop("max_new_tokens", None)
        try:
            arguments: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens}
            return h2okv.SamplingParams(**(arguments | defaults | values))
        except ValueError as error:  # names the argument, not the option
            message = re.sub(r"^(\w+)=", lambda match: f"{flag(match[1])} ", str(error))
            raise ValueError(message.replace("--max-tokens", "--max-new-tokens")) from error


def sampling_options(max_new_tokens: int | None = 128) -> Any:
    """Return the sampling options; ``None`` leaves the length to a task and ignores the model's."""
    changed: dict[str, Any] = {"max_new_tokens": option(max_new_tokens, _MOST, read=readers.least)}
    if max_new_tokens is None:
        return Bundle(SamplingOptions, "Sampling", {"max_new_tokens": None, "seed": None})
    return Bundle(SamplingOptions, "Sampling (by default the model's own)", changed)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_copies(option: str, copies: int | None, ray: bool, device: str) -> None:
    """Raise ValueError for copies of the model without Ray, or on a device that Ray cannot give."""
    if not ray and copies is not None:
        raise ValueError(f"--{option} {copies} needs --ray; give --ray too")
    check_least(**{option: copies})
    if ray and device not in ("auto", "cpu", "cuda"):
        reason = f"--device {device!r} cannot be chosen with --ray, which gives each copy a GPU"
        raise ValueError(f"{reason}; give auto, cpu, cuda")


def least_entries_note(cache: CacheConfig, length: int | None = None) -> str | None:
    """Return the note on fractions that are too few entries of a prompt, or ``None``.

    Args:
        cache: the config.
        length: tokens of the prompt; ``None`` if unknown.
    """
    tokens = cache.budget.resolve(length or 0)
    if cache.is_full or tokens == replace(cache, min_tokens=0).budget.resolve(length or 0):
        return None
    sinks = f"{tokens.sink} first + " if tokens.sink else ""
    entries = f"{sinks}{tokens.heavy} heavy + {tokens.recent} recent entries are kept"
    if length is None:
        note = f"{cache.budget_label} of a short prompt is too few for good text: {entries}"
    else:
        note = f"{cache.budget_label} of {length} tokens is too few for good text, so {entries}"
    return f"note: {note}; to keep fewer, give a token count, such as --budget 32"
