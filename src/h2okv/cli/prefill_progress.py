"""A progress bar for a long prompt: one step for each layer that has read it."""

from __future__ import annotations

import math
import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from transformers import PreTrainedModel

LONG_PROMPT = 512


class PrefillProgress:
    """Shows on stderr how many layers have read the prompt, then vanishes.

    Args:
        model: The model that reads.
        prompt_tokens: Length of the prompt; a short one gets no bar.
        wanted: Whether to show it, if stderr is a terminal.
        chunk: The most tokens that are read at once; None for all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt_tokens: int,
        wanted: bool,
        chunk: int | None = None,
    ) -> None:
        self._layers = decoder_layers(model)
        self._steps = len(self._layers) * math.ceil(prompt_tokens / (chunk or prompt_tokens))
        shown = wanted and prompt_tokens >= LONG_PROMPT and sys.stderr.isatty() and self._layers
        self._text = f"reading {prompt_tokens} tokens"
        self._progress: Progress | None = _bar() if shown else None
        self._hooks: list[Any] = []

    def __enter__(self) -> PrefillProgress:
        """Starts the bar."""
        if self._progress is not None:
            progress = self._progress
            task = progress.add_task(self._text, total=self._steps)
            self._hooks = [
                layer.register_forward_hook(lambda *_: progress.advance(task))
                for layer in self._layers
            ]
            progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Removes the bar, whatever happened."""
        self.close()

    def close(self) -> None:
        """Removes the bar and the hooks; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Finds a model's decoder layers.

    Args:
        model: Any model of transformers.

    Returns:
        The layers in order; empty if the model keeps them in some unusual way.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    return []


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
