"""What a harness run asks of the cache, and when it evicts."""

from __future__ import annotations

import difflib
import inspect
from typing import Any, Literal

from transformers import PreTrainedConfig

from h2okv.budget import Budget
from h2okv.cache import H2OCache
from h2okv.cache.positions import PositionRule
from h2okv.policy import get_policy
from h2okv.policy.scoring import get_scoring

Protocol = Literal["prompt", "whole"]
PROTOCOLS: tuple[Protocol, ...] = ("prompt", "whole")


def _defaults() -> dict[str, Any]:
    """`H2OCache`'s arguments and their defaults, so that a new one is known here too."""
    parameters = inspect.signature(H2OCache.__init__).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if name not in ("self", "config")
    }


class EvictionSettings:
    """A cache as a harness configures it, and what a continuation is scored on.

    Args:
        protocol: ``"prompt"``: the context is read and evicted, the budget is of the context, and
            the continuation follows on what is left. ``"whole"``: context and continuation are
            one text that is evicted from its first block on, and the budget is of the whole text;
            with ``prefill_chunk=1`` this is how the H2O paper evaluates (arXiv 2306.14048,
            section 5). ``None`` means ``"whole"`` where ``prefill_chunk`` is 1, else ``"prompt"``.
        **options: arguments of `H2OCache` by name.

    Attributes:
        protocol: ``prompt`` or ``whole``.
        options: all arguments of `H2OCache`, defaults included.

    Raises:
        ValueError: if a name, the policy or the protocol is unknown, the budget makes no sense, or
            nothing would be evicted before the scores are made.
    """

    def __init__(self, protocol: str | None = None, **options: Any) -> None:
        defaults = _defaults()
        for name in options:
            if name not in defaults:
                raise ValueError(
                    f"cache option {name!r} is unknown; {_hint(name)}choose from "
                    f"{', '.join(defaults)}."
                )
        self.options: dict[str, Any] = defaults | options
        chunk = self.options["prefill_chunk"]
        if protocol is None:
            protocol = "whole" if chunk == 1 else "prompt"
        if protocol not in PROTOCOLS:
            raise ValueError(
                f"protocol={protocol!r} is unknown; choose one of {', '.join(PROTOCOLS)}."
            )
        if protocol == "whole" and chunk is None and not self.is_full:
            raise ValueError(
                "protocol='whole' without prefill_chunk reads a text as one block and evicts only "
                "after it, so that no score would change; give prefill_chunk=1 (the paper's way) "
                "or a larger block."
            )
        self.protocol = protocol
        # What the cache would refuse is heard about before a model's weights are loaded.
        get_policy(self.options["policy"], self.options["seed"])
        get_scoring(self.options["scoring"], self.options["decay"])
        Budget(**{name: self.options[name] for name in ("heavy", "recent", "sink", "max_tokens")})
        PositionRule(self.options["positions"], chunk)

    @property
    def is_full(self) -> bool:
        """Whether nothing is ever evicted, whatever the budget."""
        return bool(self.options["policy"] == "full")

    @property
    def rolls(self) -> bool:
        """Whether positions roll, so that there is no longest text."""
        return bool(self.options["positions"] == "rolling")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the settings' names, as ``--model_args`` takes them."""
        return ("protocol", *_defaults())

    def make(self, config: PreTrainedConfig) -> H2OCache:
        """Makes the cache, empty.

        Args:
            config: the model's config.

        Returns:
            The cache.

        Raises:
            ValueError: if the budget or the policy makes no sense, or the model is not supported.
        """
        return H2OCache(config, **self.options)

    def describe(self) -> dict[str, Any]:
        """Returns all settings by name, for the output of a run."""
        return {"protocol": self.protocol} | self.options


def closest(name: str) -> str | None:
    """Finds the setting that a misspelt name may mean.

    Args:
        name: what was written.

    Returns:
        A name of `EvictionSettings.names`, or ``None``.
    """
    near = difflib.get_close_matches(name, EvictionSettings.names(), n=1, cutoff=0.7)
    return near[0] if near else None


def _hint(name: str) -> str:
    near = closest(name)
    return f"did you mean {near!r}? " if near else ""
