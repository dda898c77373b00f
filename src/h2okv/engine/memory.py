"""Memory of the process and machine, and what caches take of it."""

from __future__ import annotations

import ctypes
import os
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
from h2okv.cache.slot_state import SlotBytes

_STRICT = ((-3, 128 << 10), (-1, 4 << 20), (-8, 2))
"""M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_ARENA_MAX."""
_LOOSE = ((-3, 32 << 20), (-1, 64 << 20))
_MOST_KERNELS = 16
"""Of a decode step and of one micro-batch of prompts, with some to spare."""
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
# Version 2 and version 1 of Linux's control groups, by which containers are limited.
_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_bytes(device: torch.device) -> int | None:
    """Tells how much memory can still be taken on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    amounts = [_field("meminfo", "MemAvailable"), *(_left(*files) for files in _LIMITS)]
    return min((amount for amount in amounts if amount is not None), default=None)


def data_bytes() -> int | None:
    """Private memory that this process can write to, resident or not (what RLIMIT_DATA limits)."""
    return _field("self/status", "VmData")


def resident_bytes() -> int | None:
    """Resident memory of this process now; ``None`` on a system without ``/proc``."""
    return _field("self/status", "VmRSS")


def peak_resident_bytes(process: int | str = "self") -> int | None:
    """The largest resident memory of a process since `reset_peak`, or since it began."""
    # Not ru_maxrss: a spawned process inherits its parent's there.
    return _field(f"{process}/status", "VmHWM")


def reset_peak() -> None:
    """Makes the present resident memory the largest so far, where Linux allows it."""
    with suppress(OSError):
        (_PROC / "self/clear_refs").write_text("5", encoding="ascii")


def give_memory_back() -> None:
    """Makes the libraries return what they no longer need, so that a promise can be kept.

    It takes time: a prompt's tensors are new memory each, and few kernels are kept.
    """
    # oneDNN, with which PyTorch multiplies bf16 on a CPU, keeps machine code for each shape of a
    # product, 1 to 2 MiB each, and both it and PyTorch remember 1024 of them. This holds for
    # products after this call, if there were none in bf16 before.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(_MOST_KERNELS))
    # The C library would keep blocks of up to 32 MiB for later, in which others do not fit: after
    # some prompts of different length a process holds twice what it uses.
    _set_allocator(_STRICT)


def keep_memory() -> None:
    """Lets the C library keep blocks again, where there is room for them."""
    _set_allocator(_LOOSE)


def _set_allocator(options: Sequence[tuple[int, int]]) -> None:
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if library is not None and hasattr(library, "mallopt"):
        for option, value in options:
            library.mallopt(option, value)


def _field(file: str, name: str) -> int | None:
    """Reads a line ``name: number kB``."""
    with suppress(OSError):
        found = re.search(rf"^{name}:\s*(\d+)", (_PROC / file).read_text(encoding="utf-8"), re.M)
        return int(found[1]) * 1024 if found else None
    return None


def _left(limit: str, usage: str) -> int | None:
    """What a control group still allows; ``None`` without a limit."""
    with suppress(OSError, ValueError):
        most, used = ((_CGROUPS / name).read_text(encoding="ascii") for name in (limit, usage))
        return max(0, int(most) - int(used))
    return None


_LIBRARY = re.compile(r"(/\S*lib(?:gomp|iomp5|omp)[-.\w]*)$", re.MULTILINE)
_SOFT = 1


def release_workers() -> bool:
    """Ends the workers that the calling thread holds; they come back when they are needed."""
    # If those of all threads are more than there are processors, GNU's OpenMP lets them sleep
    # between two operations: a model that was loaded in one thread and runs in another took 1.5
    # times as long for a token (two cores, 32 sequences of the bundled model).
    with suppress(OSError, AttributeError):
        maps = (_PROC / "self/maps").read_text(encoding="utf-8", errors="replace")
        found = _LIBRARY.search(maps)
        return found is not None and ctypes.CDLL(found[1]).omp_pause_resource_all(_SOFT) == 0
    return False


_MARGIN = 1.25
"""What temporaries take beyond those that are counted (measured; see docs/throughput.md)."""


@dataclass(frozen=True)
class ServingMemory:
    """The bytes that a server's memory goes to, beside the weights."""

    sequence: int  # one sequence's slots in all layers, as `SlotPool` allocates them
    step: int  # temporaries of a decode step, for each sequence
    prefill: int  # entries and temporaries of what is prefilled, and the libraries' scratch memory

    def num_seqs(self, free: int) -> int:
        """How many sequences fit into so many bytes."""
        return max(0, (free - self.prefill) // (self.sequence + self.step))

    @property
    def least(self) -> int:
        """Bytes with which one sequence fits."""
        return self.prefill + self.sequence + self.step


class MemoryModel:
    """The bytes that a model and its H2O caches take, by arithmetic."""

    # Scratch memory and kernels of the libraries, and stacks of threads: they come with the first
    # forward and stay.
    fixed_bytes = 72 << 20

    def __init__(self, config: PreTrainedConfig, cache: H2OCache, dtype: torch.dtype) -> None:
        text: Any = config.get_text_config(decoder=True)
        self.cache = cache  # like all others; asked for the layout of its slots
        self.hidden, self.width, self.vocabulary = text.hidden_size, _width(text), text.vocab_size
        self.num_heads: int = text.num_attention_heads
        self.num_kv_heads: int = getattr(text, "num_key_value_heads", None) or self.num_heads
        self.key_size: int = getattr(text, "head_dim", None) or self.hidden // self.num_heads
        self.element = dtype.itemsize  # bytes of a number
        self.slots = cache.slot_bytes(self.num_kv_heads, self.key_size, dtype)  # of a layer
        self.window_slots = SlotBytes(self.num_kv_heads, 2 * self.key_size * self.element)
        # The most tokens of each layer that has no H2O slots. A recurrent layer's state is about
        # as large as a window of its own width.
        self.windows = tuple(self.key_size if own is None else own for own in cache.windows)
        self.num_slot_layers = len(cache.layers) - len(self.windows)
        # Of a slot's key and value, in one layer and for all KV heads.
        self.entry_bytes = self.num_kv_heads * self.slots.entry

    def layer_bytes(self, slots: float) -> int:
        """Bytes of one sequence in one layer of slots; budgets of a batch may differ."""
        return int(self.slots.total(slots) + self.num_kv_heads * slots)

    def sequence_bytes(self, slots: float, length: int, away: float = 0.0) -> int:
        """Bytes of one sequence in the memory of the device, in all layers."""
        held = sum(min(length, window) for window in self.windows)
        own = self.num_slot_layers * self.layer_bytes(slots)
        own += held * self.num_kv_heads * self.window_slots.entry
        return int(own - away * self.kv_bytes(slots))

    def kv_bytes(self, slots: float) -> float:
        """Keys and values of one sequence in all slot layers."""
        return self.num_slot_layers * slots * self.entry_bytes

    def decode_bytes(self, batch: int, slots: float) -> int:
        """Temporaries of a step: keys in fp32, probabilities, the MLP, the logits in fp32."""
        keys = self.num_kv_heads * self.key_size * slots * (4 if self.element < 4 else 0)
        weights = 3 * self.num_heads * slots * 4
        if self.slots.is_by_head:  # queries of all heads meet the slots of all
            weights *= self.num_kv_heads
        states = self.element * (8 * self.hidden + 4 * self.width)
        logits = self.vocabulary * (self.element + 2 * 4)
        return int(_MARGIN * batch * (keys + weights + states + logits))

    def prefill_bytes(self, tokens: int) -> int:
        """Temporaries of a prompt's block: states, heads, and the MLP."""
        states = self.hidden * (4 * self.element + 2 * 4)
        heads = self.key_size * (4 * self.num_heads + 4 * self.num_kv_heads) * self.element
        heads += 60 * self.num_kv_heads
        return int(_MARGIN * tokens * (states + max(heads, 4 * self.width * self.element)))

    def waiting_bytes(self, tokens: int) -> int:
        """Bytes of prompts that wait before a layer while other micro-batches pass it."""
        return int(tokens * (self.hidden + 2 * self.key_size) * self.element * 1.1)

    def serving(
        self, budgets: Sequence[float], max_prompt: int, max_prefill_tokens: int, ranks: int = 1
    ) -> ServingMemory:
        """Says what serving takes of each rank, by a sequence's most entries in each layer."""
        chunk = self.cache.prefill_chunk
        held = max_prompt if chunk is None else max(budgets) + min(chunk, max_prompt)
        # The next chunk is put behind what is held, and one layer is there twice meanwhile.
        prefill = -(-(self.sequence_bytes(held, 0) + 3 * self.layer_bytes(held)) // ranks)
        # Temporaries are counted whole: states and logits, most of them, are not split.
        tokens = min(max_prefill_tokens, max_prompt)
        prefill += self.prefill_bytes(tokens) + tokens * self.vocabulary * 4
        sequence = sum(self.slots.total(budget + 1) for budget in budgets)
        # Layers with one budget share the marks of the slots within a sequence's.
        marked = budgets if self.cache.cache_config.layer_budgets is not None else budgets[:1]
        if not self.slots.is_by_head:
            sequence += self.num_kv_heads * sum(budget + 1 for budget in marked)
        sequence += sum(self.window_slots.total(window) for window in self.windows)
        return ServingMemory(
            sequence=-(-int(sequence) // ranks),
            step=self.decode_bytes(1, max(budgets) + 1),
            prefill=prefill + self.fixed_bytes,
        )


def _width(text: Any) -> int:
    """The MLP's width, for a mixture of experts that of all experts that a token goes to."""
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp")
    widths = [getattr(text, name, None) or 0 for name in names]
    each = getattr(text, "moe_intermediate_size", None) or max(widths)
    widths.append((getattr(text, "num_experts_per_tok", None) or 0) * each)
    widths.append(getattr(text, "shared_expert_intermediate_size", None) or 0)
    return max(widths) or 4 * text.hidden_size
