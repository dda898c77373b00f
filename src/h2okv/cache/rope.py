"""Positions of cached entries: original, rolling, clamped."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from h2okv.cache.argument import CACHE
from h2okv.config import Positions
from h2okv.ops.decode import RotaryTables
from h2okv.ops.rope import Layout, inverse, multiply, relative, rotate
from h2okv.policy import Rule

# Kinds of RoPE whose frequencies depend on the longest position.
BY_LENGTH = ("dynamic", "longrope")


@dataclass
class Rotation:
    """How a model rotates the keys of a layer; layers that are rotated alike share an equal one."""

    rotary: torch.nn.Module
    layer_type: str | None
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    direction: int = 1  # -1: by minus the angle (NanoChat)

    def __post_init__(self) -> None:
        self._tables: dict[int, Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None
        # R, how many numbers of a head are rotated.
        self.width = 2 * self._frequencies(self.rotary)[0].shape[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Rotation:
        return self

    def of_text(self, position_ids: Tensor) -> Tensor:
        """Factors that undo it at positions ``[B or 1, T]``, fp32 ``[B or 1, 1, T, R / 2, 2]``."""
        # All layers of a forward get the same object.
        last = self._last
        if last is None or last[0] is not position_ids:
            factors = self._factors(self.rotary, position_ids.to(self.device))
            last = self._last = position_ids, inverse(factors.to(self.dtype)).unsqueeze(1)
        return last[1]

    def moved(self, position_ids: Tensor, end: Tensor) -> Tensor:
        """Return factors that move rotations from these positions to ``[B or 1, 1]``."""
        there = self._factors(self.rotary, end.to(self.device)).unsqueeze(1)
        return multiply(self.of_text(position_ids), there)

    def begin_forward(self) -> None:
        """Forgets the last forward's positions, which a caller may have overwritten in place."""
        self._last = None

    def of_ranks(self, length: int) -> Tensor:
        """Factors of the rotations to the ranks of a cache, fp32 ``[length, R / 2, 2]``."""
        if length not in self._tables:
            if len(self._tables) >= 8:
                self._tables.clear()
            with torch.inference_mode(False):
                ranks = torch.arange(length, device=self.device).unsqueeze(0)
                # Not the running one: its frequencies may depend on what it has met.
                self._tables[length] = self._factors(self._rotary_of(ranks), ranks)[0]
        return self._tables[length]

    def _rotary_of(self, positions: Tensor) -> Any:
        """Return a copy of rotary embeddings that has seen only these positions."""
        fresh: Any = type(self.rotary)(self.rotary.config).to(self.device)
        options = {"layer_type": self.layer_type} if self.layer_type else {}
        kind: Any = fresh.rope_type
        if (kind[self.layer_type] if options else kind) in BY_LENGTH:
            fresh(torch.empty(0, device=self.device), positions, **options)
        return fresh

    def _frequencies(self, rotary: Any) -> tuple[Tensor, float]:
        """Frequencies ``[R / 2]``, and the scale of the cosines (YaRN)."""
        prefix = f"{self.layer_type}_" if self.layer_type else ""
        attribute = f"{prefix}attention_scaling"
        scaling = getattr(rotary, attribute if hasattr(rotary, attribute) else "attention_scaling")
        return getattr(rotary, f"{prefix}inv_freq"), scaling

    def _factors(self, rotary: Any, positions: Tensor) -> Tensor:
        frequencies, scaling = self._frequencies(rotary)
        if frequencies.is_meta:  # buffers may be offloaded too
            frequencies, scaling = self._frequencies(self._rotary_of(positions))
        # A model that was cast as a whole has rounded frequencies.
        frequencies = frequencies.to(self._frequencies(self.rotary)[0].dtype)
        # The same operation as in transformers, so that the same angle comes out, rounding and all.
        angles = positions[..., None].float() * frequencies.to(positions.device, torch.float32)
        sines = angles.sin() * (scaling * self.direction)
        return torch.stack([angles.cos() * scaling, sines], dim=-1)


class Rotations:
    """How the model rotates the keys of one layer, and what follows from that.

    Rolling layers keep keys un-rotated and rotate them to their ranks; a rule that re-evaluates
    queries rotates these further.
    """

    def __init__(self, rolls: bool, looks_ahead: bool) -> None:
        self.rolls, self.looks_ahead = rolls, looks_ahead
        # One list for all layers of a cache: layers that rotate alike share one object.
        self.shared_rotations: list[Rotation] = []
        self.forget()

    def forget(self) -> None:
        """Forget the model; mutates."""
        self.rolling: Rotation | None = None
        self.text: Rotation | None = None
        self.tables: RotaryTables | None = None
        self.is_known = not (self.rolls or self.looks_ahead)

    def learn(self, rotation: Rotation | None) -> None:
        """Note how the model rotates; ``None`` if it does not. Mutates."""
        self.rolling, self.text = (rotation, None) if self.rolls else (None, rotation)
        self.is_known = True

    def follow(self, other: Rotations) -> None:
        """Note what another layer of the same module has learned; mutates."""
        self.rolling, self.text, self.is_known = other.rolling, other.text, other.is_known

    def make_tables(self, num_ranks: int) -> None:
        """Make the tables that all decode steps share; mutates."""
        assert self.rolling is not None
        to_rank = self.rolling.of_ranks(num_ranks)
        self.tables = RotaryTables(to_rank, relative(to_rank))

    def rolled_behind(
        self, query: Tensor, keys: Tensor, is_entry: Tensor | None, num_ranks: int, ahead: int
    ) -> Tensor:
        """Rotate un-rotated queries to one rank, `ahead` of that of the last key."""
        assert self.rolling is not None
        factors, end = self.rolling.of_ranks(num_ranks), keys.shape[2] - 1 + ahead
        if is_entry is None:
            return rotate(query, factors[end : end + 1].view(1, 1, 1, *factors.shape[1:]))
        return rotate(query, factors[is_entry[:, :1].sum(dim=-1, keepdim=True) - 1 + ahead])

    def moved_behind(
        self, real: Tensor | None, position_ids: Tensor, ahead: int
    ) -> tuple[Tensor, Layout]:
        """Return what rotates queries from positions ``[B or 1, T]`` to one `ahead` of the last."""
        text, ends = self.text, position_ids
        if real is not None:
            position_ids = position_ids.expand_as(real)
            ends = position_ids.masked_fill(~real, 0)
        factors = text.moved(position_ids, ends.amax(dim=1, keepdim=True) + ahead)
        if text.layout == "half":  # `rotate` reads cosines and sines apart
            factors = factors.movedim(-1, 0).contiguous().movedim(0, -1)
        return factors, text.layout


def rotate_to_ranks(states: Tensor, ranks: Tensor, factors: Tensor) -> Tensor:
    """Rotate states ``[B, H, N, D]`` to ranks; those of empty slots may be anything."""
    return rotate(states, factors[ranks.clamp(min=0, max=len(factors) - 1).long()])


def ranks_of(positions: Tensor) -> Tensor:
    """Ranks of entries ``[B, H, S]`` by age; an empty slot has rank S - 1, behind all."""
    size = positions.shape[-1]
    order = torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions).argsort(dim=-1)
    ranks = torch.empty_like(positions, dtype=torch.int32)
    slot_ranks = torch.arange(size, dtype=torch.int32, device=positions.device)
    ranks.scatter_(-1, order, slot_ranks.expand_as(ranks))
    return ranks.masked_fill_(positions < 0, size - 1)


@dataclass(frozen=True)
class PositionRule:
    """The options of positions and blocks; see `H2OCache`."""

    positions: Positions = "original"
    evict_every: int | None = None
    window: int | None = None  # positions that the model was trained on, if its config says so
    whole_prompts: bool = False  # whether a block is evicted from once, whatever its length

    @property
    def chunk(self) -> int | None:  # tokens of a block between two evictions
        return None if self.whole_prompts else self.evict_every

    @property
    def rolls(self) -> bool:  # entries sit at their ranks
        return self.positions == "rolling"

    @property
    def rewrites(self) -> bool:  # the model must be given other positions than those in the text
        return self.positions == "clamped"


# --- how a model rotates its keys -----------------------------------------------------------------

_PROBED = (5, 11)
# Largest relative difference that rounding to bf16 leaves; a wrong layout gives about 1.
_CLOSE = 0.03


class _KeysTakenError(Exception):
    """Stops an attention module once it has computed its keys."""


class _KeyTaker(DynamicCache):
    """Records the keys that an attention module passes to its cache."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.latent = vars(module).get("kv_lora_rank"), vars(module).get("qk_rope_head_dim")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.latent == (key_states.shape[-1], value_states.shape[-1]):
            key_states = torch.cat([value_states, key_states], dim=-1)
        self.keys = key_states.float()
        raise _KeysTakenError


def find_rotation(
    module: torch.nn.Module,
    layer_idx: int,
    rotations: Rotations,
    rule: Rule,
    key: Tensor,
    rotary: Any,
) -> Rotation | None:
    """Return how an attention module rotates its keys, one object for modules that do so alike.

    Probes a module once and remembers the result, which does not depend on its weights; ``None`` if
    it rotates nothing, ValueError if it does in an unknown way. A new one is noted in `rotations`.
    `rotary` is the module's `running_rotary`.
    """
    setting = rotary, key.dtype, key.device
    former, result = _PROBES.get(module, (None, None))
    if former != setting:
        try:
            result = _probe(module, layer_idx, key, rotary)
        except Exception as error:  # whatever a module raises that needs what it does not get
            options, remedy = options_of_rotation(rotations, rule)
            raise ValueError(
                f"{options}: how {type(module).__name__} rotates its keys must be known, and it"
                f" does so in another way than other models; {remedy}."
            ) from error
        _PROBES[module] = setting, result
    if result is None:
        return None
    rotation, shared = replace(result, rotary=rotary), rotations.shared_rotations
    if rotation not in shared:
        shared.append(rotation)
    return shared[shared.index(rotation)]


def options_of_rotation(rotations: Rotations, rule: Rule) -> tuple[str, str]:
    """Return the options that need a model's rotation, and what to use instead."""
    options, remedies = [], []
    if rotations.rolls:
        options.append("positions='rolling'")
        remedies.append("positions='original'")
    if rotations.looks_ahead:
        is_scoring = rule.scoring.name == "expected"
        own_rule = f"policy={rule.name!r}"
        options.append("scoring='expected' (of policy='best')" if is_scoring else own_rule)
        remedies.append("policy='h2o' (--policy h2o), without that scoring" * is_scoring)
    return " and ".join(options), "use " + " and ".join(filter(None, remedies))


# What each module's rotation depends on, and the result.
_PROBES: WeakKeyDictionary[torch.nn.Module, tuple[Any, Rotation | None]] = WeakKeyDictionary()


def _probe(module: torch.nn.Module, layer_idx: int, key: Tensor, rotary: Any) -> Rotation | None:
    """Check on two tokens how a module rotates; raise an error if it cannot be seen.

    The module is run on random numbers at two positions and without a rotation; the one must be the
    other, rotated. So a family that rotates its keys in a way of its own is noticed.
    """
    config: Any = module.config
    # Not the parameters' device, which have none while their weights are offloaded.
    dtype, device = key.dtype, key.device
    parameter = next(module.parameters(), key)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 2, config.hidden_size, generator=generator)
    hidden = hidden.to(device, parameter.dtype if parameter.is_floating_point() else dtype)
    # Not the running one, as in `Rotation.of_ranks`.
    fresh = None if rotary is None else type(rotary)(rotary.config).to(device)
    options: dict[str, Any] = {}
    if fresh is not None and "layer_type" in inspect.signature(fresh.forward).parameters:
        options["layer_type"] = config.layer_types[layer_idx]
        if options["layer_type"] not in fresh.rope_type:  # Beam rotates in sliding layers only
            fresh = None

    def keys_at(positions: tuple[int, int]) -> tuple[Tensor, Any]:
        ids = torch.tensor([positions], device=device)
        embeddings = None if fresh is None else fresh(hidden.to(dtype), ids, **options)
        return _keys(module, hidden, ids, embeddings), embeddings

    plain, _ = keys_at((0, 0))
    rotated, embeddings = keys_at(_PROBED)
    if (rotated - plain).norm() <= 1e-6 * rotated.norm():
        return None
    # Some families hold complex numbers, which are never rounded to the model's dtype.
    table_dtype = torch.float32 if torch.is_tensor(embeddings) else embeddings[0].dtype
    ids = torch.tensor([_PROBED], device=device)
    for layout, direction in product(get_args(Layout), (1, -1)):
        setting = options.get("layer_type"), layout, table_dtype, device, direction
        trial = Rotation(fresh, *setting)
        start, back = (
            rotate(keys, trial.of_text(position_ids), layout)
            for keys, position_ids in ((plain, torch.zeros_like(ids)), (rotated, ids))
        )
        if (back - start).norm() <= _CLOSE * start.norm():
            return trial
    raise ValueError("the keys are not those of another position, rotated")


def _keys(module: torch.nn.Module, hidden: Tensor, position_ids: Tensor, embeddings: Any) -> Tensor:
    """Return the keys that a module makes of hidden states at positions."""
    taker = _KeyTaker(module)
    parameters = inspect.signature(module.forward).parameters
    by_name: dict[str, Any] = {
        "hidden_states": hidden,
        "attention_mask": None,
        "position_ids": position_ids,
        "position_embeddings": embeddings,
        "shared_kv_states": {},  # Gemma 4
        "layer_past" if "layer_past" in parameters else CACHE: taker,
    }
    arguments = {name: value for name, value in by_name.items() if name in parameters}
    for name, parameter in parameters.items():
        is_named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_named and parameter.default is parameter.empty:
            arguments.setdefault(name, hidden)  # CTRL's queries, keys and values
    try:
        with torch.no_grad():
            module(**arguments)
    except _KeysTakenError:
        return taker.keys
    raise ValueError("the module hands its cache no keys")


def running_rotary(module: torch.nn.Module) -> Any:
    """Return the rotary embeddings of the model that runs a module, up the stack, if any."""
    family = type(module).__module__
    # Not this very frame: its locals would hold the frame itself, a cycle with all that the callers
    # hold, hidden states and logits among it.
    frame = sys._getframe(1)
    try:
        while frame is not None:
            caller = frame.f_locals.get("self")
            for child in caller.children() if isinstance(caller, torch.nn.Module) else ():
                kind = type(child)
                if kind.__name__.endswith("RotaryEmbedding") and kind.__module__ == family:
                    return child
            frame = frame.f_back
    finally:
        del frame
    return None
