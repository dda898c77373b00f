"""Memory of the process and the machine, and the share of caches in it."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from h2okv.cache import H2OCache
from h2okv.cache.linear_states import state_bytes
from h2okv.cache.slot_state import SlotBytes, SlotState, slots_for
from h2okv.cache.support import latent_sizes, num_kv_heads, size_of
from h2okv.models.packed_linear import limit_kernels

_STRICT = ((-3, 128 << 10), (-1, 4 << 20), (-8, 2))
"""M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_ARENA_MAX."""
_LOOSE = ((-3, 32 << 20), (-1, 64 << 20))
_MIN_KERNELS = 16
"""Kernels of a decode step and of one micro-batch of prompts, with some to spare."""
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
# Version 2 and version 1 of Linux's control groups, which limit containers.
_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device, ``None`` if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    amounts = [_field("meminfo", "MemAvailable"), *(_left(*files) for files in _LIMITS)]
    return min((amount for amount in amounts if amount is not None), default=None)


def data_bytes() -> int | None:
    """Return the bytes of private writable memory, resident or not (limited by RLIMIT_DATA)."""
    return _field("self/status", "VmData")


def resident_bytes() -> int | None:
    """Return the resident bytes of this process; ``None`` on a system without ``/proc``."""
    return _field("self/status", "VmRSS")


def peak_resident_bytes() -> int | None:
    """Return the peak of this process's resident bytes since `reset_peak`, or since its start."""
    # Not ru_maxrss: a spawned process inherits its parent's there.
    return _field("self/status", "VmHWM")


def reset_peak() -> None:
    """Reset the peak of resident memory to its present value, where Linux allows it."""
    with suppress(OSError):
        (_PROC / "self/clear_refs").write_text("5", encoding="ascii")


def give_memory_back() -> None:
    """Make libraries return unused memory to the system, to stay below a memory limit.

    It costs time: the tensors of each prompt are allocated again, and few kernels are cached.
    """
    limit_kernels(_MIN_KERNELS)
    # The C library would keep freed blocks of up to 32 MiB, in which other sizes do not fit: after
    # some prompts of different lengths a process holds twice the memory that it uses.
    _set_allocator(_STRICT)


def keep_memory() -> None:
    """Let the C library keep freed blocks again, where there is room for them."""
    _set_allocator(_LOOSE)


def _set_allocator(options: Sequence[tuple[int, int]]) -> None:
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if library is not None and hasattr(library, "mallopt"):
        for option, value in options:
            library.mallopt(option, value)


def _field(file: str, name: str) -> int | None:
    """Read a line ``name: number kB`` of a file in ``/proc``; return bytes."""
    with suppress(OSError):
        match = re.search(rf"^{name}:\s*(\d+)", (_PROC / file).read_text(encoding="utf-8"), re.M)
        return int(match[1]) * 1024 if match else None
    return None


def _left(limit: str, usage: str) -> int | None:
    """Return the bytes that a control group still allows; ``None`` without a limit."""
    with suppress(OSError, ValueError):
        total, used = (
            int((_CGROUPS / name).read_text(encoding="ascii")) for name in (limit, usage)
        )
        return max(0, total - used)
    return None


_LIBRARY = re.compile(r"(/\S*lib(?:gomp|iomp5|omp)[-.\w]*)$", re.MULTILINE)
_SOFT = 1


def release_workers() -> bool:
    """End the OpenMP workers of the calling thread, which restart on demand; return success."""
    # If the workers of all threads outnumber the processors, GNU's OpenMP lets them sleep between
    # two operations: a model that was loaded in one thread and runs in another took 1.5 times as
    # long for a token (two cores, 32 sequences of the bundled model).
    with suppress(OSError, AttributeError):
        maps = (_PROC / "self/maps").read_text(encoding="utf-8", errors="replace")
        match = _LIBRARY.search(maps)
        return match is not None and ctypes.CDLL(match[1]).omp_pause_resource_all(_SOFT) == 0
    return False


_MARGIN = 1.25
"""Factor for temporaries beyond those that are counted (measured; see docs/batch.md)."""


@dataclass(frozen=True)
class ServingMemory:
    """Bytes of a server's memory without the weights."""

    sequence: int  # one sequence's slots in all layers, as `SlotPool` allocates them
    step: int  # temporaries of a decode step, for each sequence
    prefill: int  # entries and temporaries of prefill, and the libraries' scratch memory
    state: int = 0  # a state that later prompts continue from
    full_token: int = 0  # a token of a full cache
    verify: int = 0  # a full cache of the longest text

    def num_seqs(self, free: int) -> int:
        """Return the number of sequences that fit into ``free`` bytes."""
        return max(0, (free - self.prefill) // (self.sequence + self.step))

    @property
    def minimum(self) -> int:
        """Bytes needed for a single sequence."""
        return self.prefill + self.sequence + self.step


class MemoryModel:
    """Bytes of a model's H2O caches and temporaries, by arithmetic."""

    # Scratch memory and kernels of the libraries, and stacks of threads: allocated by the first
    # forward and never freed.
    fixed_bytes = 72 << 20

    def __init__(self, config: PreTrainedConfig, cache: H2OCache, dtype: torch.dtype) -> None:
        text: Any = config.get_text_config(decoder=True)
        self.cache = cache  # of the same layout as all others
        self.hidden, self.width, self.vocabulary = text.hidden_size, _width(text), text.vocab_size
        self.num_heads: int = text.num_attention_heads
        self.num_kv_heads = num_kv_heads(config)
        self.key_size: int = size_of(text, "head_dim") or self.hidden // self.num_heads
        self.key_size = sum(latent_sizes(config) or (self.key_size,))
        self.element = dtype.itemsize  # bytes of an element
        self.slots = cache.slot_bytes(self.num_kv_heads, self.key_size, dtype)  # of a layer
        window_entry, metadata = 2 * self.key_size * self.element, SlotState.metadata_bytes()
        self.window_slots = SlotBytes(self.num_kv_heads, window_entry, metadata)
        # Largest number of tokens in each sliding layer.
        self.windows = tuple(window for window in cache.windows if window is not None)
        self.linear = state_bytes(cache, dtype)  # bytes of a sequence's states in linear layers
        self.num_slot_layers = len(cache.layers) - len(cache.windows)

    def layer_bytes(self, slots: float) -> int:
        """Return the bytes of one sequence in one layer of slots; a batch's budgets may differ."""
        return int(self.slots.total(slots) + self.num_kv_heads * slots)

    def sequence_bytes(self, slots: float, length: int) -> int:
        """Return the bytes of one sequence in device memory, in all layers."""
        window_entries = sum(min(length, window) for window in self.windows)
        total = self.num_slot_layers * self.layer_bytes(slots)
        total += window_entries * self.num_kv_heads * self.window_slots.entry + self.linear
        return int(total)

    def full_bytes(self, length: int) -> int:
        """Return the bytes of a text in transformers' own cache, which keeps everything."""
        sizes = [length] * self.num_slot_layers + [min(length, w - 1) for w in self.windows]
        return sum(sizes) * self.num_kv_heads * self.window_slots.entry + self.linear

    def decode_bytes(self, batch: int, slots: float) -> int:
        """Return the bytes of a step's temporaries: fp32 keys, probabilities, MLP, fp32 logits."""
        keys = self.num_kv_heads * self.key_size * slots * (4 if self.element < 4 else 0)
        weights = 3 * self.num_heads * slots * 4
        if self.slots.is_by_head:  # queries of all heads meet the slots of all
            weights *= self.num_kv_heads
        states = self.element * (8 * self.hidden + 4 * self.width)
        logits = self.vocabulary * (self.element + 2 * 4)
        return int(_MARGIN * batch * (keys + weights + states + logits))

    def prefill_bytes(self, tokens: int) -> int:
        """Return the bytes of a prompt block's temporaries: states, heads, and the MLP."""
        states = self.hidden * (4 * self.element + 2 * 4)
        heads = self.key_size * (4 * self.num_heads + 4 * self.num_kv_heads) * self.element
        heads += 60 * self.num_kv_heads
        return int(_MARGIN * tokens * (states + max(heads, 4 * self.width * self.element)))

    def waiting_bytes(self, tokens: int) -> int:
        """Return the bytes of prompts that wait for a layer while other micro-batches pass it."""
        return int(tokens * (self.hidden + 2 * self.key_size) * self.element * 1.1)

    def serving(
        self,
        budgets: Sequence[float],
        max_prompt: int,
        max_prefill_tokens: int,
        ranks: int = 1,
        reads_images: bool = False,
    ) -> ServingMemory:
        """Return the memory that serving takes on each rank.

        ``budgets`` has the maximum number of entries of a sequence in each layer. A prompt with
        images is read in one forward, of which the image's tower is left out here.
        """
        chunk = None if reads_images else self.cache.position_rule.chunk
        num_entries = max_prompt if chunk is None else max(budgets) + min(chunk, max_prompt)
        # The next chunk is appended to the entries, and one layer is copied meanwhile.
        held_bytes = self.sequence_bytes(num_entries, 0) + 3 * self.layer_bytes(num_entries)
        prefill = -(-held_bytes // ranks)
        # Temporaries are not divided: states and logits, the largest, are replicated.
        tokens = min(max_prefill_tokens, max_prompt)
        prefill += max(
            self.prefill_bytes(tokens) + tokens * self.vocabulary * 4,
            self.prefill_bytes(max_prompt if reads_images else 0),
        )
        span = self.cache.evict_every or 1
        sequence = sum(self.slots.total(budget + span) for budget in budgets)
        # Layers with one budget share the marks of the slots within a sequence's.
        marked = budgets if self.cache.cache_config.layer_budgets is not None else budgets[:1]
        if not self.slots.is_by_head and span == 1:
            sequence += self.num_kv_heads * sum(budget + 1 for budget in marked)
        sequence += sum(self.window_slots.total(window) for window in self.windows) + self.linear
        full_token = (
            (len(budgets) + len(self.windows)) * self.num_kv_heads * self.window_slots.entry
        )
        return ServingMemory(
            full_token=full_token,
            verify=full_token * max_prompt,
            sequence=-(-int(sequence) // ranks),
            state=-(-self._state_bytes(budgets, span) // ranks),
            step=self.decode_bytes(1, max(budgets) + span),
            prefill=prefill + self.fixed_bytes,
        )

    def _state_bytes(self, budgets: Sequence[float], span: int) -> int:
        """Return the bytes of a state of one sequence that later prompts continue from."""
        room = [
            budget + span if self.slots.is_by_head else slots_for(int(budget), int(budget + span))
            for budget in budgets
        ]
        windows = sum(self.window_slots.entries(window - 1) for window in self.windows)
        return int(sum(map(self.slots.entries, room)) + windows + self.linear)


def _width(text: Any) -> int:
    """Return the width of the MLP; of a mixture of experts, that of all experts of a token."""
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp")
    widths = [getattr(text, name, None) or 0 for name in names]
    expert_width = getattr(text, "moe_intermediate_size", None) or max(widths)
    widths.append((getattr(text, "num_experts_per_tok", None) or 0) * expert_width)
    widths.append(getattr(text, "shared_expert_intermediate_size", None) or 0)
    return max(widths) or 4 * text.hidden_size
