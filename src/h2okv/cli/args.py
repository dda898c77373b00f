"""Options that several commands share, each declared once, and the reading of their values."""

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
from h2okv.config import (
    BEST,
    LEAST_ENTRIES,
    MEASURED,
    PER_QUERY,
    POLICIES,
    SCORED,
    SCORINGS,
    CacheConfig,
    LayerBudgets,
    checked_factors,
)
from h2okv.console import check_least
from h2okv.integration.names import check_name
from h2okv.records import parse_json, refusing, unknown_name

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance
    from transformers import PreTrainedConfig, PreTrainedModel

    from h2okv.engine.sampling_params import SamplingParams
    from h2okv.integration.loading import Described

    Typed = Any
else:
    Typed = str  # of an option whose text is read
Command = TypeVar("Command", bound=Callable[..., Any])
Made = TypeVar("Made", bound="DataclassInstance")

BUNDLED = "bundled"
DTYPES = ("auto", "float32", "bfloat16", "float16")


@functools.cache
def helps() -> dict[str, str]:
    """What help.md says of each command."""
    text = Path(__file__).with_name("help.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^# (.+)\n+", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def group(name: str) -> typer.Typer:
    return typer.Typer(name=name, help=helps()[name], add_completion=False)


def subcommand(app: typer.Typer, name: str) -> Callable[[Command], Command]:
    made = app.command(name, help=helps()[f"{app.info.name} {name}"])
    return lambda command: made(expand(command))


def option(
    default: Any, help: str, *names: str, read: Callable[..., Any] | None = None, **how: Any
) -> Any:
    """An option of a command; `read` checks what was given, or makes something of it."""
    if read is None:
        return typer.Option(default, *names, help=help)

    def called(context: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
        if value is None or context.resilient_parsing:  # a shell that completes a line
            return value
        if isinstance(value, list):
            return [read(param.opts[0], one, **how) for one in value]
        return read(param.opts[0], value, **how)

    return typer.Option(default, *names, help=help, callback=called)


def build(kind: type[Made], given: dict[str, Any], **more: Any) -> Made:
    """Make a dataclass of those of a command's values that have the name of a field."""
    known = {field.name for field in fields(kind) if field.init}
    return kind(**{name: value for name, value in (given | more).items() if name in known})


MODEL_HELP = "A folder, a GGUF file, a Hub id, bundled or smollm2."
DEVICE_HELP = "auto, cpu, cuda, cuda:1 ..."
JSON = option(False, "Print one JSON object.", "--json")
TEXT = option(None, "A text file; by default the opening of a novel.", read=readers.readable)
RAW = option(False, "Continue the text: no chat template, if there is one.", "--raw")
_PIN_HELP = "Messages that are never evicted: system, user, last_user (comma-separated)."
PIN = option("", _PIN_HELP, read=readers.names)
ROWS = option(None, "Append the rows to this file.", read=readers.writable)
MEMORY_HELP = "Memory limit of the process (what is free), such as 4GiB; on a GPU that of the GPU."
COMPILE = option(
    False, "Compile decode steps with torch.compile: slow to start, then faster.", "--compile"
)
WEIGHT_BITS = option(
    None,
    "4: steps of few sequences read weights of 4 bits (x86 CPUs, bfloat16).",
    "--weight-bits",
    read=readers.bits,
    known=(4,),
)


class Bundle(NamedTuple):
    """Options in the place of one parameter, which is what `build` makes of their values.

    They are those of its signature. An option in `changed` replaces the one of its name; any other
    default, there or in the signature, is a fixed value, and no option.
    """

    build: Callable[..., Any]
    panel: str = "Options"
    changed: Mapping[str, Any] = {}

    def options(self) -> list[inspect.Parameter]:
        """All of the signature; those that are fixed have a value and no option as default."""
        source = inspect.signature(self.build, eval_str=True)
        found = []
        for name, part in source.parameters.items():
            own = copy.copy(self.changed.get(name, part.default))
            if isinstance(own, OptionInfo):
                own.rich_help_panel = own.rich_help_panel or self.panel
            found.append(part.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=own))
        return found


def expand(command: Callable[..., Any]) -> Any:
    """Give a command the options of those of its parameters that are bundles."""
    whole = inspect.signature(command, eval_str=True)
    given = [own.replace(kind=inspect.Parameter.KEYWORD_ONLY) for own in whole.parameters.values()]
    bundles = [own for own in given if isinstance(own.default, Bundle)]
    inner = {own.name: own.default.options() for own in reversed(bundles)}
    parts = [own for own in given if own not in bundles]
    for options in inner.values():
        parts += [own for own in options if isinstance(own.default, ParameterInfo)]

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        for bundle in bundles:
            own = {part.name: part.default for part in inner[bundle.name]}
            # What is fixed may have the name of an option that is the command's own.
            own |= {name: values.pop(name) for name in own if isinstance(own[name], ParameterInfo)}
            values[bundle.name] = bundle.default.build(**own)
        return command(**values)

    made: Any = run
    made.__signature__ = whole.replace(parameters=parts)
    made.__annotations__ = {part.name: part.annotation for part in parts}
    return made


_AMOUNT = "tokens (64) or a fraction of the prompt (10%)"
_BUDGET = "Entries to keep: tokens (512), part of the prompt (20%), full. By default {}."
_BUDGETS = "Budgets, comma-separated: tokens (512), part of the prompt (20%), full. By default {}."
CHUNK_HELP = (
    "Most tokens between two evictions while a prompt is read; 1 is the paper's Algorithm 1."
)


def _factors(option: str, given: str) -> LayerBudgets | Literal["auto"]:
    if given == MEASURED:
        return MEASURED
    path = Path(given)
    problem = f"{option} '{path}' is no JSON list of numbers"
    with refusing(problem, "give a file of h2okv eval layers", ValueError, TypeError):
        return checked_factors(parse_json(readers.read_text(option, path)))


def make_cache(
    policy: str = option("h2o", f"Eviction policy: {', '.join(POLICIES)}; or module:Class."),
    budget: str | None = option(None, _BUDGET.format("20%")),
    heavy: str | None = option(None, f"Instead of --budget, heavy hitters to keep: {_AMOUNT}."),
    recent: str | None = option(None, f"Instead of --budget, newest tokens to keep: {_AMOUNT}."),
    heavy_fraction: float | None = option(
        None, "Part of --budget for heavy hitters (0.5; best: 0.75); the rest: recent."
    ),
    sink: int | None = option(
        None, "First tokens that are never evicted, beyond --budget (none; best: 4)."
    ),
    scoring: str | None = option(
        None, f"How attention is accumulated: {', '.join(SCORINGS)} (sum; best: expected)."
    ),
    decay: float | None = option(
        None, "Factor per later token: with --scoring decay (0.995), or value_norm (none)."
    ),
    positions: str = option(
        "original", "original, rolling (past the context window), clamped (OPT)."
    ),
    prefill_chunk: int | None = option(None, CHUNK_HELP, read=readers.least),
    kv_bits: int | None = option(
        None, "Quantize keys and values to 8 or 4 bits.", read=readers.bits
    ),
    layer_budgets: Typed = option(
        None,
        "Divide heavy hitters among the heads: auto (measured once for a model and kept), or a"
        " file of h2okv eval layers.",
        read=_factors,
    ),
    usual: str = "20%",  # the budget, unless one or its parts are given
    simulated: bool = False,  # policies that need the whole cache are known too
) -> CacheConfig:
    """Make a config; --heavy and --recent stand for --budget, a missing one for its half."""
    values = locals()
    check_names(policy, scoring, simulated)
    rest = {name: values[name] for name in cache_fields(values) if name not in _PARTS}
    if heavy is None and recent is None:
        return CacheConfig.from_budget(
            readers.parse_budget(usual if budget is None else budget), heavy_fraction, **rest
        )
    for name, value in (("--budget", budget), ("--heavy-fraction", heavy_fraction)):
        if value is not None:
            parts = "--heavy and --recent, which say how large each part is"
            raise ValueError(f"{name} {value} goes without {parts}; leave one out")
    half = CacheConfig.from_budget(readers.parse_budget("20%" if "," in usual else usual))
    return CacheConfig(
        heavy=half.heavy if heavy is None else readers.parse_amount("heavy", heavy),
        recent=half.recent if recent is None else readers.parse_amount("recent", recent),
        **rest,
    )


_PARTS = ("heavy", "recent")


def cache_fields(among: Iterable[str] | None = None) -> list[str]:
    """Return the names of the fields of `CacheConfig`, or of those that are options."""
    options = inspect.signature(make_cache).parameters if among is None else among
    return [field.name for field in fields(CacheConfig) if field.name in options]


def check_names(policy: str, scoring: str | None, simulated: bool) -> None:
    """Refuse policies and scorings that there are not."""
    if policy in PER_QUERY and not simulated:
        raise ValueError(
            f"--policy {policy} chooses anew for every query from a cache that keeps everything,"
            " which only h2okv eval can simulate (in Python: simulate=True); choose from"
            f" {', '.join(POLICIES)}"
        )
    known = (*POLICIES, *PER_QUERY) if simulated else POLICIES
    for name, value, names in (("policy", policy, known), ("scoring", scoring, SCORINGS)):
        is_custom = name == "policy" and ":" in str(value)  # module:Class
        if value is not None and value not in names and not is_custom:
            raise unknown_name(f"--{name}", value, names)


def check_cache(config: PreTrainedConfig, cache: CacheConfig) -> None:
    """Refuse a cache that cannot be made for a model, whose own budgets may not be known yet."""
    if cache.layer_budgets == MEASURED:
        cache = replace(cache, layer_budgets=None)
    h2okv.H2OCache.from_config(config, cache)


def growth_note(caches: Sequence[CacheConfig]) -> str | None:
    """Why a table shows more bytes than the budget."""
    if not any(own.policy == "snapkv" for own in caches):
        return None
    return "note: snapkv evicts once, after the prompt; what follows comes on top of its budget"


def cache_options(budget: str = "20%", **changed: Any) -> Any:
    """The options of a `CacheConfig`."""
    changed |= {"budget": option(None, _BUDGET.format(budget)), "usual": budget}
    return Bundle(make_cache, "Cache", changed)


def cache_lists(
    budget: str, policy: str = "h2o", scoring: str | None = None, **changed: Any
) -> Any:
    """The same for a list of them: each policy with each budget."""

    @functools.wraps(make_cache)
    def build(**values: Any) -> list[CacheConfig]:
        values["usual"], given = budget, values.pop("budget")
        parts = values["heavy"] is not None or values["recent"] is not None
        if given is None and not parts:
            given = budget
        policies = readers.names("policy", values.pop("policy"))
        scoring = values.pop("scoring")
        scorings = () if scoring is None else readers.names("scoring", scoring)
        budgets = (
            (None,) if given is None else (given,) if parts else readers.names("budget", given)
        )
        lists = {"policy": policies, "scoring": scoring is None or scorings, "budget": budgets}
        for name, found in lists.items():
            if not found:
                raise ValueError(f"--{name} names nothing; give at least one value")
        for name in policies:
            check_names(name, None, values["simulated"])
        caches: dict[str, CacheConfig] = {}
        for own, name in itertools.product(budgets, policies):
            for chosen in _scorings_of(name, scorings, values["decay"]):
                made = make_cache(policy=name, budget=own, **(values | chosen))
                caches.setdefault(repr(made.identity()), made)
        return list(caches.values())

    known = (*POLICIES, *PER_QUERY) if changed.get("simulated") else POLICIES
    lists = {
        "policy": option(policy, f"Policies, comma-separated: {', '.join(known)} or module:Class."),
        "budget": option(None, _BUDGETS.format(budget)),
        "scoring": option(
            scoring, f"How attention is accumulated, comma-separated: {', '.join(SCORINGS)}."
        ),
    }
    return Bundle(build, "Cache", lists | changed)


def _scorings_of(policy: str, scorings: Sequence[str], decay: float | None) -> list[dict[str, Any]]:
    """The scorings of a list that a policy looks at; the options of each."""
    if len(scorings) <= 1:
        return [{"scoring": next(iter(scorings), None)}]
    if policy == BEST:
        return [{"scoring": None, "decay": None}]  # its own takes their place
    if policy not in (*SCORED, "topk_heavy"):
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
    """Read what `budget_text` writes."""
    heavy, plus, recent = budget.partition("+")
    if not plus:
        return CacheConfig.from_budget(readers.parse_budget(budget), policy=policy, sink=sink)
    parts = readers.parse_amount("heavy", heavy), readers.parse_amount("recent", recent)
    return CacheConfig(policy, *parts, sink=sink)


def cache_flags(config: CacheConfig) -> str:
    """The options that a command reads back as this cache."""
    if config.is_full:
        return "--policy full"
    heavy, plus, recent = budget_text(config).partition("+")
    budget = f"--heavy {heavy} --recent {recent}" if plus else f"--budget {heavy}"
    flags = [f"--policy {config.policy}", budget]
    for name in cache_fields():
        is_separate = name in ("policy", *_PARTS, "layer_budgets")
        if not is_separate and getattr(config, name) != getattr(CacheConfig(), name):
            flags.append(f"{flag(name)} {getattr(config, name)}")
    if config.layer_budgets is not None:
        flags.append("--layer-budgets FILE")
    return " ".join(flags)


@dataclass(frozen=True)
class ModelOptions:
    """Which model, in which dtype, on which device; the fields are a command's options."""

    name: str = option(BUNDLED, MODEL_HELP, "--model")
    dtype_name: str = option(
        "auto",
        f"Data type of the weights: {', '.join(DTYPES)}.",
        "--dtype",
        read=readers.choice,
        words=DTYPES,
    )
    device_name: str = option("auto", DEVICE_HELP, "--device", read=readers.device)
    is_here: bool = True  # not if other machines load it

    def __post_init__(self) -> None:
        if self.is_here:
            check_name(self.name)

    @property
    def dtype(self) -> torch.dtype | None:
        return readers.torch_dtype(self.dtype_name)

    @property
    def device(self) -> torch.device:
        """Where it runs; refused if this machine does not have it."""
        from h2okv.integration.loading import parse_device

        return parse_device(self.device_name)

    def describe(self) -> Described:
        """Read config and tokenizer, so that most mistakes show before the weights load."""
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
        """Load the weights, in `dtype` where the user chose none."""
        from h2okv.integration.loading import load_weights

        if compiled and weight_bits is not None:
            raise ValueError("--compile and --weight-bits exclude each other; choose one")
        options: Any = {"packed": not compiled, "weight_bits": weight_bits}
        return load_weights(described, self.dtype or dtype, self.device, **options)


def model_options(**changed: Any) -> Any:
    return Bundle(ModelOptions, "Model", changed)


_MOST = "Most tokens to generate."
_MODELS_OWN = "the model's own, or "


def _own(neutral: int, help: str) -> Any:
    return option(None, f"{help} ({_MODELS_OWN}{neutral}).")


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling as far as the user said it; the fields are a command's options."""

    max_new_tokens: int | None = option(128, _MOST, read=readers.least)
    temperature: float | None = _own(0, "0 is greedy decoding; higher is more random")
    top_p: float | None = _own(1, "Nucleus sampling: most likely tokens of this total probability")
    top_k: int | None = _own(0, "Sample among this many of the most likely tokens; 0 for all")
    min_p: float | None = _own(0, "Drop tokens less likely than this, relative to the likeliest")
    repetition_penalty: float | None = _own(1, "Above 1, tokens that occurred become less likely")
    stop: list[str] | None = option(None, "A string that ends the text; may be repeated.")
    seed: int | None = option(0, "Random seed.")

    def __post_init__(self) -> None:
        self._make({})
        if not 0 <= (self.seed or 0) < 2**63:
            raise ValueError(f"--seed {self.seed} is out of range; give 0 to {2**63 - 1}")

    def params(self, described: Described | None = None) -> SamplingParams:
        """Settle what the user left open as the model's authors say; greedy if they do not."""
        own: dict[str, Any] = {}
        if described is not None:
            from transformers import GenerationConfig

            from h2okv.engine.sampler import model_sampling

            with suppress(OSError, ValueError):
                own = model_sampling(GenerationConfig.from_pretrained(described.source))
        params = self._make(own)
        for name, neutral in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
            value = getattr(self, name)
            if params.is_greedy and value not in (None, neutral):
                reason = f"{flag(name)} {value:g} has no effect on greedy decoding"
                raise ValueError(f"{reason}; add --temperature 0.8")
        return params

    def _make(self, own: dict[str, Any]) -> SamplingParams:
        said = {name: value for name, value in vars(self).items() if value is not None}
        most = said.pop("max_new_tokens", None)
        try:
            return h2okv.SamplingParams(**{"temperature": 0.0, "max_tokens": most, **own, **said})
        except ValueError as error:  # which names the argument, and here it is an option
            message = re.sub(r"^(\w+)=", lambda match: f"{flag(match[1])} ", str(error))
            raise ValueError(message.replace("--max-tokens", "--max-new-tokens")) from error


def sampling_options(max_new_tokens: int | None = 128) -> Any:
    """With None a task says how long its answers are, and the model's authors nothing."""
    changed: dict[str, Any] = {"max_new_tokens": option(max_new_tokens, _MOST, read=readers.least)}
    if max_new_tokens is None:
        changed = {"max_new_tokens": None, "seed": None}
        for part in fields(SamplingOptions)[1:-1]:
            own: Any = copy.copy(part.default)
            changed[part.name] = own
            own.help = own.help.replace(_MODELS_OWN, "")
    return Bundle(SamplingOptions, "Sampling", changed)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_copies(option: str, copies: int | None, ray: bool, device: str) -> None:
    """Refuse a number of copies of the model, or a device for them, that makes no sense."""
    if not ray and copies is not None:
        raise ValueError(f"--{option} {copies} needs --ray; give --ray too")
    check_least(**{option: copies})
    if ray and device not in ("auto", "cpu", "cuda"):
        reason = f"--device {device!r} cannot be chosen with --ray, which gives each copy a GPU"
        raise ValueError(f"{reason}; give auto, cpu, cuda")


def with_least_entries(
    cache: CacheConfig, length: int | None = None
) -> tuple[CacheConfig, str | None]:
    """Raise fractions of short prompts, known or not, to enough entries for a text; says where."""
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
