"""The next token of every sequence, by transformers' own processors."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from h2okv.engine.processors import end_tokens, processors_of, settled_config
from h2okv.engine.sequence import Sequence, seed_of


class Chooser:
    """Chooses as ``generate`` does, each sequence by itself.

    What transformers' processors do to a row depends on that row alone, and each sequence draws
    from a generator seeded by the job's seed and its own id: so a text does not depend on the
    batch that it is made in.

    Args:
        model: Its generation config says which processors; unchanged.
        temperature: 0 takes the likeliest token.
        top_p: Draws among the likeliest tokens that hold this much of the probability.
        seed: The job's.
    """

    def __init__(
        self, model: PreTrainedModel, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0
    ) -> None:
        config = settled_config(model, temperature, top_p)
        self.ends = end_tokens(model)
        self._model = model
        self._config = config
        self._seed = seed
        self._draws = temperature > 0
        self._is_plain = not self._draws and len(self._processors(1)) == 0

    def choose(self, sequences: list[Sequence], logits: torch.Tensor) -> list[int]:
        """Chooses a token for each sequence.

        Args:
            sequences: B of them; their generators are advanced.
            logits: ``[B, V]``, of any dtype, on any device.

        Returns:
            B tokens.

        Raises:
            ValueError: If a logit is NaN.
        """
        logits = logits.float()
        if bool(torch.isnan(logits).any()):
            raise ValueError(
                "the model's output is not a number (NaN); its data type may be too narrow, try"
                " --dtype float32"
            )
        if self._is_plain:
            return logits.argmax(dim=-1).tolist()
        rows = logits.cpu()
        return [
            self._choose_one(sequence, rows[index : index + 1])
            for index, sequence in enumerate(sequences)
        ]

    def _choose_one(self, sequence: Sequence, rows: Any) -> int:
        text: Any = torch.tensor([sequence.prompt + sequence.new_tokens])
        scores: Any = self._processors(len(sequence.prompt))(text, rows)
        if not self._draws:
            return int(scores.argmax(dim=-1))
        if sequence.generator is None:
            sequence.generator = torch.Generator().manual_seed(seed_of(self._seed, sequence.id))
        weights = torch.softmax(scores, dim=-1)
        return int(torch.multinomial(weights, 1, generator=sequence.generator))

    def _processors(self, prompt_length: int) -> LogitsProcessorList:
        """Those of ``generate``; some of them know the prompt's length."""
        return processors_of(self._model, self._config, prompt_length)
