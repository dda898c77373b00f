"""ROUGE, by the `rouge-score` package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

METRICS = ("rouge1", "rouge2", "rougeL")


class Rouge:
    """ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004) of a text against references.

    Args:
        stemmer: Whether to compare stems (Porter) instead of words.

    Raises:
        ValueError: If `rouge-score` is missing.
    """

    def __init__(self, stemmer: bool = False) -> None:
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError as error:
            raise ValueError(
                "ROUGE needs rouge-score, which is not installed; pip install 'h2okv[eval]'"
            ) from error
        self._scorer: Any = RougeScorer(list(METRICS), use_stemmer=stemmer)

    def f_scores(self, references: Sequence[str], text: str) -> dict[str, float]:
        """Scores a text.

        Args:
            references: At least one; the best one counts, for each metric on its own.
            text: What was written.

        Returns:
            F-measures, 0 to 1, by `METRICS`.
        """
        scores = self._scorer.score_multi(list(references), text)
        return {name: float(scores[name].fmeasure) for name in METRICS}

    def recall(self, reference: str, text: str) -> float:
        """Returns the share of a reference's words that a text has: ROUGE-1 recall, 0 to 1."""
        return float(self._scorer.score(reference, text)["rouge1"].recall)
