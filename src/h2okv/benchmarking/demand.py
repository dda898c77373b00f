"""How much memory a batch needs, and how large a batch a memory holds."""

from __future__ import annotations

from dataclasses import dataclass

from h2okv.benchmarking.trial import Peak


@dataclass(frozen=True)
class Demand:
    """Memory by batch: ``fixed + batch * (cache + activation)``, in bytes.

    Attributes:
        weights: Weights of the model, by arithmetic.
        runtime: What the process or the device holds beside them, measured.
        constant: What a forward needs for any batch, measured.
        cache: Of one sequence after its prompt, by arithmetic.
        activation: What a forward needs beside that for each sequence, measured.
    """

    weights: int
    runtime: int
    constant: int
    cache: int
    activation: int

    @classmethod
    def of_peaks(cls, weights: int, cache: int, peaks: dict[int, Peak]) -> Demand:
        """Finds the measured parts from the peaks of the smallest and the largest batch.

        Args:
            weights: Bytes of the weights.
            cache: Bytes of one sequence's cache.
            peaks: By batch, two at least.

        Returns:
            The demand; a part that measures below zero is noise, and counts as none.
        """
        few, many = min(peaks), max(peaks)
        slope = (peaks[many].peak - peaks[few].peak) / (many - few)
        activation = max(0, round(slope) - cache)
        runtime = max(0, peaks[few].loaded - weights)
        rest = peaks[few].peak - peaks[few].loaded - few * (cache + activation)
        return cls(weights, runtime, max(0, rest), cache, activation)

    def bytes(self, batch: int) -> int:
        """What a batch needs at most."""
        fixed = self.weights + self.runtime + self.constant
        return fixed + batch * (self.cache + self.activation)

    def largest_batch(self, memory: int) -> int:
        """The largest batch that fits; 0 if not even one sequence does.

        Args:
            memory: Bytes, for everything.
        """
        return max(0, (memory - self.bytes(0)) // max(1, self.cache + self.activation))
