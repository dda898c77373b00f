"""One text that says which cache: ``best:20%``, ``h2o:512,bits=8,every=256``, ``full``.

``NAME:BUDGET,option=value,...``; each part may be left out. Commands, Python, experiment files,
vLLM's settings and requests read it, and results print it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from numbers import Integral, Real
from typing import Any

from h2okv.records import short_repr, unknown_name

OPTIONS = {
    "sink": "sink", "scoring": "scoring", "positions": "positions",
    "every": "evict_every", "bits": "kv_bits", "layers": "layer_budgets", "min": "min_tokens",
    "max": "max_tokens", "of": "grows", "seed": "seed",
}  # fmt: skip
"""The options of a text, in the order in which they are printed, and the fields they set."""

OF = ("prompt", "seen")  # what fractions are of: the prompt, or all tokens seen
_ZERO_IS_NONE = ("every", "bits", "max")
_PROMPT = "prompt"  # every=prompt+32: after a prompt, then every 32 tokens
_TEXTS = ("scoring", "positions", "layers")
_ELSEWHERE = {
    "policy": "the text begins with it, as in h2o:512",
    "budget": "it follows the policy, as in h2o:512",
    "heavy": "give the budget as heavy+recent, as in h2o:64+64",
    "recent": "give the budget as heavy+recent, as in h2o:64+64",
    "heavy_fraction": "give the budget as heavy+recent, as in h2o:15%+5%",
    **dict.fromkeys(
        ("chunk", "prefill_chunk"), "evict_every says where texts are cut, as in every=64"
    ),
    "decay": "it follows the scoring, as in scoring=decay:0.99",
}
_NAME = r"[A-Za-z_][\w.-]*(?::[A-Za-z_]\w*)?"  # a policy, or module:Class


def parse_amount(text: str) -> int | float | None:
    """Parse tokens (`64`) or a fraction of the prompt (`10%`, `0.1`); ``None`` for another text."""
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        percent = text.strip().endswith("%")
        fraction = float(text.strip().removesuffix("%")) / (100 if percent else 1)
        return fraction if math.isfinite(fraction) else None
    return None


def parse_amounts(text: str) -> tuple[int | float, int | float] | None:
    """Parse heavy and recent, such as ``64+10%``; ``None`` for another text."""
    heavy, plus, recent = map(str.strip, text.partition("+"))
    amounts = parse_amount(heavy), parse_amount(recent)
    if not plus or amounts[0] is None or amounts[1] is None:
        return None
    return amounts[0], amounts[1]


def parse_budget(budget: Any) -> int | float | tuple[int | float, int | float] | None:
    """Return a budget, or heavy and recent, in tokens or fractions; ``None`` for the full cache."""
    amount = budget
    if isinstance(budget, str):
        if budget.strip().lower() == "full":
            return None
        if (amounts := parse_amounts(budget)) is not None:
            return amounts
        amount = parse_amount(budget)
    if isinstance(amount, Integral) and not isinstance(amount, bool):
        return int(amount)
    if isinstance(amount, Real) and not isinstance(amount, bool):
        return float(amount)
    raise ValueError(
        f"budget={short_repr(budget)} is not a budget; give a fraction of the prompt (0.2 or"
        " '20%'), tokens (512), heavy+recent ('64+10%'), or 'full'."
    )


def amount_text(amount: int | float) -> str:
    """Write tokens or a fraction so that `parse_amount` returns exactly the same."""
    if isinstance(amount, int):
        return str(amount)
    texts = (f"{100 * amount:.{digits}g}%" for digits in range(1, 18))
    plain = (text for text in texts if "e" not in text and parse_amount(text) == amount)
    return next(plain, repr(amount))


def parse_cuts(text: str, where: str) -> dict[str, Any]:
    """Parse where entries are evicted, such as ``prompt+32``; `where` names the option."""
    before, plus, every = map(str.strip, text.partition("+"))
    if before.lower() == _PROMPT and plus and every.isdecimal():
        return {"evict_every": int(every), "whole_prompts": True}
    raise ValueError(
        f"{where} must be tokens, such as 256, or prompt+32 for an eviction after each prompt and"
        f" then every 32 tokens, got {short_repr(text)}."
    )


def cuts_text(every: int | None, whole_prompts: bool) -> str:
    """Write where entries are evicted so that `parse` returns the same."""
    return f"{_PROMPT}+{every}" if whole_prompts else str(every or 0)


def is_budget(text: str) -> bool:
    """Return whether a text is ``full``, an amount, or heavy and recent."""
    is_amount = parse_amount(text) is not None or parse_amounts(text) is not None
    return is_amount or text.strip().lower() == "full"


def split_options(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return what comes before the options, and the options."""
    head, *options = re.split(r",\s*(?=\w+\s*=)", text.strip())
    if re.match(r"\w+\s*=", head):
        head, options = "", [head, *options]
    pairs = (option.partition("=") for option in options)
    return head.strip(), [(name.strip(), value.strip()) for name, _, value in pairs]


def parse(text: str) -> dict[str, Any]:
    """Return the arguments of `CacheConfig` that a text sets, ``layer_budgets`` as its text."""
    if not isinstance(text, str):
        raise ValueError(f"cache must be a text such as 'best:20%', got {short_repr(text)}.")
    head, pairs = split_options(text)
    options = _parse_head(head, text)
    for name, value in pairs:
        where = f"cache {short_repr(text)}"
        if remedy := _ELSEWHERE.get(name):
            raise ValueError(f"{where}: {name} is not an option; {remedy}.")
        if name not in OPTIONS:
            raise unknown_name(f"{where}: option", name, OPTIONS)
        if OPTIONS[name] in options:
            raise ValueError(f"{where}: {name} is given twice; leave one of them out.")
        options |= _parse_option(name, value, where)
    if not head and not pairs:
        raise ValueError("cache is an empty text; give such as best:20%.")
    return options


def _parse_head(head: str, text: str) -> dict[str, Any]:
    """Return policy and budget."""
    if not head:
        return {}
    if head.lower() == "full":
        return {"policy": "full"}
    name, colon, amount = head.rpartition(":")
    if not colon:
        name, amount = ("", head) if is_budget(head) else (head, "")
    elif not is_budget(amount) and re.fullmatch(r"[A-Za-z_]\w*", amount.strip()):
        name, amount = head, ""  # module:Class
    name, amount = name.strip(), amount.strip()
    if (name and not re.fullmatch(_NAME, name)) or (amount and not is_budget(amount)):
        raise ValueError(
            f"cache {short_repr(text)} must be a policy, a budget and options, such as h2o, 20%,"
            f" h2o:512 or best:20%,bits=8; got {short_repr(amount or name)}."
        )
    return {n: v for n, v in (("policy", name), ("budget", amount)) if v}


def _parse_option(name: str, value: str, where: str) -> dict[str, Any]:
    field = OPTIONS[name]
    if name == "scoring":
        scoring, colon, decay = value.partition(":")
        if not colon:
            return {field: scoring}
        factor = parse_amount(decay)
        if factor is None:
            raise ValueError(f"{where}: scoring={value} must be such as decay:0.99.")
        return {field: scoring.strip(), "decay": float(factor)}
    if name in _TEXTS:
        return {field: value}
    if name == "every" and value.lower().startswith(_PROMPT):
        return parse_cuts(value, f"{where}: every")
    if name == "of":
        if value.lower() not in OF:
            raise ValueError(f"{where}: of must be {' or '.join(OF)}, got {short_repr(value)}.")
        return {field: value.lower() == OF[1]}
    if name == "sink" and (sink := parse_amount(value)) is not None:
        return {field: sink}
    with suppress(ValueError):
        number = int(value)
        return {field: None if number == 0 and name in _ZERO_IS_NONE else number}
    amount = "tokens, or a fraction such as 100%" if name == "sink" else "a whole number"
    raise ValueError(f"{where}: {name} must be {amount}, got {short_repr(value)}.")


def write(policy: str, budget: str, options: Mapping[str, str]) -> str:
    """Return the text of a cache; `options` by their names in `OPTIONS`."""
    head = f"{policy}:{budget}" if budget else policy
    return ",".join([head, *(f"{name}={options[name]}" for name in OPTIONS if name in options)])
