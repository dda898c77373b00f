"""Diversity of generated texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from h2okv.engine.sampling_params import SamplingParams
from h2okv.evaluation.generate import Answer
from h2okv.evaluation.task import BatchOptions, GenerationTask, Result, Score, TextPrompt, mean
from h2okv.provenance import digest


class Diversity(GenerationTask):
    """A model answers each prompt several times at random, and the answers are compared.

    Self-BLEU (Zhu et al., arXiv 1802.01886, section 3.3): each answer's BLEU with the other answers
    to the same prompt as references, averaged; the lower, the more the answers differ.
    """

    metrics = ("self_bleu",)
    higher_is_better = False

    def __init__(
        self,
        name: str,
        prompts: Sequence[TextPrompt],
        copies: int,
        options: BatchOptions,
        params: SamplingParams,
    ) -> None:
        if copies < 2:
            raise ValueError(f"copies {copies} is too few; give 2 answers or more to compare")
        if params.is_greedy:
            raise ValueError("temperature 0 gives the same answer each time; give 1, for example")
        limit = None if options.limit is None else options.limit * copies
        super().__init__(replace(options, limit=limit), params)
        self.name = name
        self._texts = prompts
        self._copies = copies
        self._bleu = load_bleu()

    def identity(self) -> Mapping[str, Any]:
        """Names the prompts and how they are answered."""
        data = digest(repr([(p.text, p.stops) for p in self._texts]))
        return {"data": data, "copies": self._copies, **super().identity()}

    def prompts(self) -> Sequence[TextPrompt]:
        """Each prompt as often as it is answered."""
        return [prompt for prompt in self._texts for _ in range(self._copies)]

    def result(self, sample: int, answer: Answer) -> Result:
        """Keeps an answer; it is scored with the others to its prompt."""
        return {"prompt": sample // self._copies, "tokens": answer.tokens, "text": answer.text}

    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        """Averages Self-BLEU over the prompts; 0 to 100, as BLEU is counted."""
        answers: dict[int, list[str]] = {}
        for result in results.values():
            answers.setdefault(result["prompt"], []).append(result["text"])
        of_prompts = {
            prompt: {"self_bleu": self._self_bleu(texts)} for prompt, texts in answers.items()
        }
        return {"self_bleu": mean(of_prompts, "self_bleu")}

    def _self_bleu(self, texts: Sequence[str]) -> float:
        found = [
            self._bleu.sentence_score(text, [*texts[:n], *texts[n + 1 :]]).score
            for n, text in enumerate(texts)
        ]
        return float(sum(found) / len(found))


def load_bleu() -> Any:
    """Finds BLEU for single sentences in sacrebleu."""
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise ValueError(
            "Self-BLEU needs sacrebleu, which is not installed; pip install 'h2okv[eval]'"
        ) from error
    return BLEU(effective_order=True)
