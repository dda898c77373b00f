"""Configuration of the engine, fixed when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from h2okv import cache_spec
from h2okv.config import CacheConfig
from h2okv.prompts.chat_template import check_pinnable
from h2okv.prompts.readers import FieldError, check_settings, integer, share
from h2okv.records import check_arguments, checked_arguments

DEFAULT_STATES = 1 << 30  # bytes


@checked_arguments()
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How many requests of which size run together, on which cache.

    Attributes:
        cache: The cache of each sequence, also as text, such as ``"best:20%"``
            (`CacheConfig.from_spec`); a request may set another budget, up to this one's for the
            longest prompt.
        max_num_seqs: Sequences that decode at the same time; ``None``: as many as `memory` allows.
        memory: Bytes that the whole process may use on a CPU, or that may be used on the GPU,
            weights included; ``None``: most of the free memory, up to 64 sequences, and on a
            CPU slots are allocated as sequences come.
        max_prompt_tokens: The longest prompt, for which slots are allocated where budgets are
            fractions; ``None``: the model's context, up to 8,192.
        max_waiting: Maximum number of requests in the queue; more are refused.
        max_prefill_tokens: Maximum number of prompt tokens between two decode steps (chunked
            prefill); the outputs do not depend on it.
        max_prefill_time_fraction: Largest fraction of the time spent on prefill while other
            sequences decode; smaller values give steadier tokens and later first tokens.
        prefix_cache: Bytes of states of prompts and answers, from which later prompts with the same
            beginning continue (`h2okv.engine.prefix_cache`); 0: none. Only with
            ``cache.evict_every`` and a budget in tokens. ``None``: 1 GiB, or a quarter of the free
            memory if that is less.
        prefix_cache_folder: Folder that keeps these states over a restart, up to `prefix_cache`
            or 1 GiB; ``None`` for none.
        weight_bits: 4 lets steps of up to four sequences read linear weights of 4 bits, in bfloat16
            on an x86 CPU, of a model that is loaded by name; ``None``: weights as loaded.
        tensor_parallel: Whether each process started by ``torchrun`` holds a shard of the model.
            All of them make the same calls, and only the first one gets outputs.
        verify: Share of all tokens, such as 0.02 or ``"2%"``, that are read again with the full
            cache while nothing else is to be done: a sample of the answers with their prompts, to
            see how often the next token is the same (`RequestOutput.verified`,
            `LLM.agreement`).
        agreement: How often it must be the same, such as 0.95: the budget of requests that name
            none goes down from `cache`'s while the sample allows it, and up again. ``None`` for
            always that of `cache`.
        pin: Messages of every chat that are never evicted, if it has them: ``"system"``,
            ``"tools"``, ``"user"``, ``"last_user"``.

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
    prefix_cache: int | None = None
    prefix_cache_folder: str | Path | None = None
    weight_bits: int | None = None
    tensor_parallel: bool = False
    verify: float = 0.0
    agreement: float | None = None
    pin: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.cache, str):
            object.__setattr__(self, "cache", CacheConfig.from_spec(self.cache))
        if not isinstance(self.cache, CacheConfig):
            raise ValueError(
                f"cache must be a CacheConfig or a text such as 'best:20%', got {self.cache!r}."
            )
        if self.cache.grows and not self.cache.is_full:
            raise ValueError(
                "of=seen (grows=True) needs slots for each further token, and an engine's sequences"
                " have a fixed number; leave it out, or use h2okv generate."
            )
        if isinstance(self.memory, str):
            raise FieldError(("memory",), f" must be bytes, such as {8 << 30}, got {self.memory!r}")
        counts = ("max_num_seqs", "memory", "max_prompt_tokens", "max_prefill_tokens")
        check_settings(self, dict.fromkeys(counts, integer(1)))
        check_settings(self, dict.fromkeys(("max_waiting", "prefix_cache"), integer(0)))
        if self.verify is None:
            object.__setattr__(self, "verify", 0.0)
        check_settings(self, {"verify": share, "agreement": share})
        if self.agreement is not None and not self.verify:
            raise ValueError(
                f"agreement={self.agreement:g} is judged by answers that are read again; give"
                " verify too, the share of them, such as verify=0.05."
            )
        check_pinnable(self.pin)
        if self.pin and self.agreement is not None:
            raise ValueError(
                f"pin={','.join(self.pin)} needs room in every budget, and agreement lowers them;"
                " leave one of them out."
            )
        if self.verify and self.tensor_parallel:
            problem = "is for one process, and tensor_parallel has several; leave one of them out"
            raise FieldError(("verify",), f"={self.verify:g} {problem}")
        if not 0 < self.max_prefill_time_fraction < 1:
            raise ValueError(
                "max_prefill_time_fraction must be a number between 0 and 1, got"
                f" {self.max_prefill_time_fraction!r}."
            )
        if self.weight_bits is not None and self.tensor_parallel:
            raise ValueError("weight_bits and tensor_parallel exclude each other; choose one.")
        if self.prefix_cache_folder is not None and self.tensor_parallel:
            raise ValueError(
                "prefix_cache_folder is for one process, and with tensor_parallel each holds a part"
                " of a state; leave one of them out."
            )

    @property
    def caches_prefixes(self) -> bool:
        """Whether states are kept: they must depend on the text alone."""
        cache = self.cache
        is_exact = cache.chunk is not None and not cache.is_full
        return self.prefix_cache != 0 and is_exact and not cache.budget.is_relative

    @classmethod
    def from_options(cls, config: EngineConfig | None = None, **options: Any) -> EngineConfig:
        """Return a config, or the defaults, with fields of this class and `CacheConfig` replaced.

        ``budget`` sets heavy and recent, as in `CacheConfig`.

        Raises:
            ValueError: If an option is unknown or out of range.
        """
        own_names = [entry.name for entry in fields(cls)]
        cache_names = [entry.name for entry in fields(CacheConfig)]
        check_arguments("LLM", options, (*own_names, "budget", *cache_names))
        changed = {name: options.pop(name) for name in own_names if name in options}
        text, policy = changed.get("cache"), options.get("policy")
        named = cache_spec.parse(text) if isinstance(text, str) else {}
        if policy is not None and named.get("policy", policy) != policy:
            raise ValueError(f"policy={policy!r} contradicts cache={text!r}; leave one out.")
        config = replace(config or cls(), **changed)
        return replace(config, cache=config.cache.with_options(**options))
