"""Options that several commands share, each declared once, and the parsing of their values."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import typer
from typer.models import OptionInfo, ParameterInfo

import h2okv
from h2okv import cache_spec
from h2okv.cli import readers
from h2okv.cli.commands import helps
from h2okv.cli.help_page import describe, order
from h2okv.config import BEST, POLICIES, SCORINGS, CacheConfig
from h2okv.models.names import BUNDLED, check_name
from h2okv.records import unknown_name

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance
    from transformers import PreTrainedConfig, PreTrainedModel

    from h2okv.engine.sampling_params import SamplingParams
    from h2okv.models.loading import Described

    Typed = Any
else:
    Typed = str  # the type of options whose text is parsed
Command = TypeVar("Command", bound=Callable[..., Any])
Instance = TypeVar("Instance", bound="DataclassInstance")

DTYPES = ("auto", "float32", "bfloat16", "float16")


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
JSON = option(False, "Print one JSON object.", "--json")
RAW = option(False, "Continue the text, without a chat template.", "--raw")
_PIN_HELP = "Messages never evicted: system, user, last_user."
PIN = option("", _PIN_HELP, read=readers.names)
MEMORY_HELP = "Limit, such as 4GiB (what is free)."
COMPILE = option(False, "Compile decode steps: slow to start, then faster.", "--compile")
_VERIFY_HELP = "Compare with a full cache; repair: write again."
VERIFY = option("", _VERIFY_HELP, "--verify", read=readers.verify)
WEIGHT_BITS = option(
    None, "4: decode reads 4-bit weights (x86).", "--weight-bits", read=readers.bits, allowed=4
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


CACHE_HELP = f"All in one: h2o:512,bits=8. Options: {', '.join(cache_spec.OPTIONS)}."


PER_QUERY = ("topk", "topk_heavy")  # `PER_QUERY` of the masking oracle


class Choice(NamedTuple):
    """A cache, and the fields that --cache names: a command sets some of the others."""

    cache: CacheConfig
    named: frozenset[str]

    def apart_from_cuts(self) -> tuple[CacheConfig, int | str | None]:
        """Return the cache without ``evict_every``, and that: ``None`` if unsaid, 0 for none."""
        cuts = self.cache.cuts if self.cache.whole_prompts else self.cache.evict_every or 0
        cache = replace(self.cache, evict_every=None, whole_prompts=False)
        return cache, cuts if "evict_every" in self.named else None


def choose_caches(
    policy: str | None, budget: str | None, cache: Sequence[str], usual: Usual
) -> list[Choice]:
    """Return the caches of the options: each --cache, or --policy, with each --budget.

    What a text of --cache leaves out are those of --policy and --budget, or the command's defaults.
    """
    texts = [cache_spec.parse(text) for text in cache]
    names = [cache_spec.parse(text) for text in usual.policies]
    if policy is not None:
        names = [{"policy": name} for name in _listed("policy", policy)]
        if texts and all("policy" in text for text in texts):
            raise ValueError(f"--policy {policy} has no effect, as --cache names one; omit it")
    named = [[text] if "policy" in text else [name | text for name in names] for text in texts]
    bases = list(itertools.chain(*named)) if texts else names
    if budget is not None and all({"budget", "full"} & {*base, base["policy"]} for base in bases):
        where = "--cache has one" if "budget" in bases[0] else "policy full keeps all entries"
        raise ValueError(f"--budget {budget} has no effect, as {where}; omit it")
    amounts = _listed("budget", usual.budget if budget is None else budget)
    choices: dict[str, Choice] = {}
    for amount, base in itertools.product(amounts, bases):
        if not cache_spec.is_budget(amount):
            raise ValueError(
                f"--budget {amount!r} is not an amount; give tokens (--budget 64), a fraction of"
                " the prompt (--budget 10%), heavy+recent (--budget 32+10%), or full"
            )
        check_names(base["policy"], base.get("scoring"), usual.per_query)
        config = CacheConfig(**({"budget": amount} | dict(usual.options) | base))
        choices.setdefault(repr(config.identity()), Choice(config, frozenset(base)))
    return list(choices.values())


@dataclass(frozen=True)
class Usual:
    """What a command takes where its options say nothing."""

    policies: tuple[str, ...] = (BEST,)
    budget: str = "20%"
    options: Mapping[str, Any] = field(default_factory=dict)
    per_query: bool = False  # allow policies that need the full cache


def _listed(name: str, text: str) -> tuple[str, ...]:
    entries = readers.names(name, text)
    if not entries:
        raise ValueError(f"--{name} is empty; give at least one value")
    return entries


def check_names(policy: str, scoring: str | None, per_query: bool) -> None:
    """Raise ValueError for an unknown policy or scoring."""
    if policy in PER_QUERY and not per_query:
        raise ValueError(
            f"policy {policy} chooses entries for each query from a cache that keeps all of them,"
            " which only h2okv eval can; choose from"
            f" {', '.join(POLICIES)}"
        )
    policies = (*POLICIES, *PER_QUERY) if per_query else POLICIES
    policy = BEST if policy.startswith(f"{BEST}-v") else policy  # its version is checked later
    for name, value, names in (("policy", policy, policies), ("scoring", scoring, SCORINGS)):
        is_custom = name == "policy" and ":" in policy and policy.partition(":")[0] not in policies
        if value is not None and value not in names and not is_custom:
            raise unknown_name(name, value, names)


def check_cache(config: PreTrainedConfig, cache: CacheConfig) -> None:
    """Raise ValueError for a cache that the model cannot use; `layer_budgets` may be ``auto``."""
    h2okv.H2OCache.from_config(config, cache.before_measuring)


def growth_note(caches: Sequence[CacheConfig]) -> str | None:
    """Return the note on caches that exceed their budget, or ``None``."""
    if not any(config.policy == "snapkv" for config in caches):
        return None
    return "note: snapkv evicts once, after the prompt; later tokens come on top of its budget"


def cache_options(budget: str = "20%", policy: str = BEST, **options: Any) -> Any:
    """Return the options of one `Choice`; ``options`` are defaults of other fields."""
    usual = Usual((policy,), budget, {"min_tokens": None} | options)

    def build(
        policy: str | None = option(None, f"{', '.join(POLICIES)} or module:Class ({policy})."),
        budget: str | None = option(None, f"Entries to keep: 512, 20%, 64+64 or full ({budget})."),
        cache: list[str] | None = option(None, CACHE_HELP),
    ) -> Choice:
        choices = choose_caches(policy, budget, cache or (), usual)
        if len(choices) > 1 or len(cache or ()) > 1:
            raise ValueError(
                "several caches are chosen, and this command has one; give --cache once, with"
                " commas between its options"
            )
        return choices[0]

    return Bundle(build, "Cache")


DEVICE_VARIABLE = "H2OKV_DEVICE"


def chosen_device() -> str:
    """Return the name of the user's device: auto, cpu, cuda, cuda:1, ..."""
    return readers.device(DEVICE_VARIABLE, os.environ.get(DEVICE_VARIABLE) or "auto")


@dataclass(frozen=True)
class ModelOptions:
    """Model and dtype; the fields are a command's options."""

    name: str = option(BUNDLED, MODEL_HELP, "--model")
    dtype_name: str = option(
        "auto", f"{', '.join(DTYPES)}.", "--dtype", read=readers.choice(*DTYPES)
    )
    is_here: bool = True  # False if other machines load the model

    def __post_init__(self) -> None:
        chosen_device()
        if self.is_here:
            check_name(self.name)

    @property
    def dtype(self) -> torch.dtype | None:
        return readers.torch_dtype(self.dtype_name)

    @property
    def device(self) -> torch.device:
        """The device; ValueError if this machine does not have it."""
        from h2okv.models.loading import parse_device

        return parse_device(chosen_device())

    def describe(self) -> Described:
        """Read config and tokenizer, which shows most mistakes before the weights load."""
        from h2okv.models.loading import describe

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
        from h2okv.models.loading import load_weights

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

    max_new_tokens: int | None = option(128, _MOST, read=readers.count)
    temperature: float | None = option(None, "0 is greedy decoding; higher is more random.")
    top_p: float | None = option(None, "Sample tokens of this total probability.")
    top_k: int | None = option(None, "Sample among the most likely tokens; 0: all.")
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
        for name, neutral in (("top_p", 1), ("top_k", 0)):
            value = getattr(self, name)
            if params.is_greedy and value not in (None, neutral):
                reason = f"{flag(name)} {value:g} has no effect on greedy decoding"
                raise ValueError(f"{reason}; add --temperature 0.8")
        return params

    def _make(self, defaults: dict[str, Any]) -> SamplingParams:
        values = {name: value for name, value in vars(self).items() if value is not None}
        max_tokens = values.pop("max_new_tokens", None)
        arguments: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens}
        return h2okv.SamplingParams(**(arguments | defaults | values))


_SELDOM = ("top_p", "top_k", "repetition_penalty", "stop")


def sampling_options(max_new_tokens: int | None = 128, few: bool = False) -> Any:
    """Return the sampling options; ``None`` leaves the length to a task and ignores the model's."""
    changed: dict[str, Any] = {"max_new_tokens": option(max_new_tokens, _MOST, read=readers.count)}
    changed |= dict.fromkeys(_SELDOM) if few else {}
    if max_new_tokens is None:
        return Bundle(SamplingOptions, "Sampling", changed | {"max_new_tokens": None, "seed": None})
    return Bundle(SamplingOptions, "Sampling (by default the model's own)", changed)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_copies(copies: int | None, ray: bool, device: str) -> None:
    """Raise ValueError for copies of the model without Ray, or on a device that Ray cannot give."""
    if not ray and copies is not None:
        raise ValueError(f"--replicas {copies} needs --ray; give --ray too")
    if ray and device not in ("auto", "cpu", "cuda"):
        reason = f"{DEVICE_VARIABLE}={device} cannot be chosen with --ray, which gives each copy a"
        raise ValueError(f"{reason} GPU; give auto, cpu, cuda")


def minimum_entries_note(cache: CacheConfig, length: int | None = None) -> str | None:
    """Return the note on fractions that are too few entries of a prompt, if its length is known."""
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
