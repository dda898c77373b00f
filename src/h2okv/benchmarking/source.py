"""Where the benchmarked model comes from: a shape with random weights, or a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from h2okv.benchmarking.shape import Shape

_SEED = 0


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built again in another process, with the same weights.

    Attributes:
        name: What the user calls it.
        shape: Sizes for random weights; ``None`` for a checkpoint.
        folder: What `from_pretrained` takes; ``None`` for a shape.
    """

    name: str
    shape: Shape | None = None
    folder: str | None = None

    def config(self) -> PreTrainedConfig:
        """Returns the model's config."""
        if self.shape is not None:
            return self.shape.config()
        assert self.folder is not None
        return AutoConfig.from_pretrained(self.folder, trust_remote_code=False)

    def build(self, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        """Makes the model in evaluation mode, directly in its dtype and on its device.

        Args:
            dtype: Of the weights.
            device: Where they go.

        Returns:
            The model.

        Raises:
            ValueError: If a checkpoint's weights cannot be loaded.
        """
        if self.shape is not None:
            torch.manual_seed(_SEED)
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(self.config(), dtype=dtype)
            return model.eval()
        assert self.folder is not None
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=dtype, trust_remote_code=False
            )
        except (OSError, RuntimeError, ValueError) as error:
            first_line = next(iter(str(error).splitlines()), "no reason given")
            raise ValueError(
                f"the weights of --model {self.name!r} cannot be loaded ({first_line}); get the"
                " model again or choose another"
            ) from error
        return loaded.to(device).eval()

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelSource:
        """Makes the source that `to_json` described."""
        shape = values["shape"]
        return cls(values["name"], Shape(**shape) if shape else None, values["folder"])
