"""Tensor parallelism over the ranks of a process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedConfig

from h2okv.engine.model_runner import StepOutput
from h2okv.engine.outputs import EngineStoppedError
from h2okv.engine.request import ScheduledStep

_PATIENCE = timedelta(days=3650)
"""How long a rank waits for a step: a server may have no request for any time."""


class TensorParallelGroup:
    """The processes that hold the parts of a model; started by ``torchrun``.

    Attributes:
        rank: This process's number.
        world_size: Of all processes.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # A group of its own: that of the model's tensors gives up after some minutes.
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @property
    def is_first(self) -> bool:
        """Whether this rank schedules, and has the clients."""
        return self.rank == 0

    def broadcasting(
        self, execute: Callable[[ScheduledStep], StepOutput]
    ) -> Callable[[ScheduledStep], StepOutput]:
        """Makes all ranks run what the first one runs."""

        def execute_everywhere(step: ScheduledStep) -> StepOutput:
            self._broadcast(step)
            return execute(step)

        return execute_everywhere

    def give_up(self) -> None:
        """What the first rank does after an error: the others are somewhere in their forward."""
        raise EngineStoppedError("a step has failed on one of several ranks; start them anew.")

    def follow(self, execute: Callable[[ScheduledStep], StepOutput]) -> None:
        """Runs the first rank's steps until it lets go."""
        while (step := self._broadcast(None)) is not None:
            execute(step)

    def stop_followers(self) -> None:
        """Ends `follow` on the other ranks."""
        self._broadcast(None)

    def smallest(self, number: int) -> int:
        """The smallest of the numbers that all ranks call this with."""
        numbers: list[Any] = [None] * self.world_size
        dist.all_gather_object(numbers, number, group=self._group)
        return int(min(numbers))

    def _broadcast(self, step: ScheduledStep | None) -> ScheduledStep | None:
        """Sends the first rank's step to all; returns it."""
        steps = [step]
        dist.broadcast_object_list(steps, src=0, group=self._group)
        return steps[0]


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
