"""Everything about the engine that is decided when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from h2okv.config import CacheConfig
from h2okv.engine.sampling_params import UNLIMITED, check_numbers
from h2okv.records import unknown_name


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How many requests of which size run together, on which cache.

    Attributes:
        cache: The cache of each sequence; a request may bring a budget of its own, up to this
            one's for the longest prompt.
        max_num_seqs: Sequences that decode at the same time; ``None``: as many as `memory` allows.
        memory: Bytes that the process may take on a CPU, with all that it holds, or that may be
            taken on the GPU, with the weights; ``None``: most of what is free, up to 64 sequences.
        max_prompt_tokens: The longest prompt, which all slots are made for where budgets are
            fractions; ``None``: the model's context, up to 8,192.
        max_waiting: The most requests that wait to be scheduled; more are refused.
        max_prefill_tokens: The most prompt tokens between two decode steps (chunked prefill); the
            outputs do not depend on it.
        max_prefill_time_fraction: The largest fraction of the time that is spent on prefill while
            others decode: a smaller one makes tokens come more evenly, and first tokens later.
        prefixes: Texts, or their tokens, that many prompts begin with. Each is read once; a prompt
            that begins with one goes on from its compressed cache, with that cache's budget.
        weight_bits: 4 lets steps of up to four sequences read linear weights of 4 bits, in bfloat16
            on an x86 CPU, of a model that is loaded by name; ``None``: as they are.
        tensor_parallel: Whether each process that ``torchrun`` has started holds a part of the
            model. All of them make the same calls, and only the first one gets outputs.

    Raises:
        ValueError: If a value is out of range.
    """

    cache: CacheConfig = field(default_factory=CacheConfig)
    max_num_seqs: int | None = None
    memory: int | None = None
    max_prompt_tokens: int | None = None
    max_waiting: int = 256
    max_prefill_tokens: int = 512
    max_prefill_time_fraction: float = 0.8
    prefixes: Sequence[str | Sequence[int]] = ()
    weight_bits: int | None = None
    tensor_parallel: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.cache, CacheConfig):
            raise ValueError(f"cache={self.cache!r} is of another type; give a CacheConfig.")
        counts = ("max_num_seqs", "memory", "max_prompt_tokens", "max_prefill_tokens")
        check_numbers(self, {name: (int, 1, UNLIMITED) for name in counts})
        check_numbers(self, {"max_waiting": (int, 0, UNLIMITED)})
        if not 0 < self.max_prefill_time_fraction < 1:
            raise ValueError(
                f"max_prefill_time_fraction={self.max_prefill_time_fraction!r} is not a fraction of"
                " the time; give a number between 0 and 1."
            )
        if self.weight_bits is not None and self.tensor_parallel:
            raise ValueError("weight_bits and tensor_parallel exclude each other; choose one.")

    @classmethod
    def from_options(cls, config: EngineConfig | None = None, **options: Any) -> EngineConfig:
        """Changes a config, or the defaults, by fields of this class and of `CacheConfig`.

        Raises:
            ValueError: If an option is unknown or out of range.
        """
        own = [part.name for part in fields(cls)]
        known = [*own, *(part.name for part in fields(CacheConfig))]
        for name in options:
            if name not in known:
                raise unknown_name("option", name, known)
        config = config or cls()
        config = replace(config, **{name: options.pop(name) for name in own if name in options})
        return replace(config, cache=replace(config.cache, **options))
