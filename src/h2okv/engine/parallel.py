"""Tensor parallelism over the ranks of a process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedConfig

from h2okv.engine.model_runner import Done
from h2okv.engine.outputs import EngineStoppedError
from h2okv.engine.request import Plan

_PATIENCE = timedelta(days=3650)
"""How long a rank waits for a plan: a server may have no request for any time."""


class Ranks:
    """The processes that hold the parts of a model; started by ``torchrun``.

    Attributes:
        number: This process's.
        count: Of all.
    """

    def __init__(self) -> None:
        self.number = dist.get_rank()
        self.count = dist.get_world_size()
        # A group of its own: that of the model's tensors gives up after some minutes.
        self._plans = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @property
    def is_first(self) -> bool:
        """Whether this rank makes the plans, and has the clients."""
        return self.number == 0

    def leading(self, execute: Callable[[Plan], Done]) -> Callable[[Plan], Done]:
        """Makes all ranks run what the first one runs."""

        def execute_everywhere(plan: Plan) -> Done:
            self._send(plan)
            return execute(plan)

        return execute_everywhere

    def give_up(self) -> None:
        """What the first rank does after an error: the others are somewhere in their forward."""
        raise EngineStoppedError("a step has failed on one of several ranks; start them anew.")

    def follow(self, execute: Callable[[Plan], Done]) -> None:
        """Runs the first rank's plans until it lets go."""
        while (plan := self._receive()) is not None:
            execute(plan)

    def let_go(self) -> None:
        """Ends `follow` on the other ranks."""
        self._send(None)

    def smallest(self, number: int) -> int:
        """The smallest of the numbers that all ranks call this with."""
        numbers: list[Any] = [None] * self.count
        dist.all_gather_object(numbers, number, group=self._plans)
        return int(min(numbers))

    def _send(self, plan: Plan | None) -> None:
        dist.broadcast_object_list([plan], src=0, group=self._plans)

    def _receive(self) -> Plan | None:
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=self._plans)
        plan: Plan | None = received[0]
        return plan


def check_divides(config: PreTrainedConfig) -> None:
    """Refuses a model that cannot be divided among the ranks, before its weights are loaded."""
    if "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "tensor parallelism needs one process for each part of the model; start them with "
            "torchrun --nproc-per-node N -m h2okv.cli serve --tensor-parallel ..."
        )
    count = int(os.environ["WORLD_SIZE"])
    text: Any = config.get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        raise ValueError(
            f"model type {config.model_type!r} has no plan for tensor parallelism in transformers; "
            "run one copy on each device instead (h2okv serve --ray --replicas)."
        )
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if kv_heads % count or heads % count:
        fitting = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and heads % n == 0]
        raise ValueError(
            f"{count} ranks cannot share {kv_heads} KV heads (and {heads} query heads) evenly; "
            f"start {', '.join(map(str, fitting[:-1]))} or {fitting[-1]} of them."
            if len(fitting) > 1
            else f"{count} ranks cannot share {kv_heads} KV heads; start a single one."
        )
