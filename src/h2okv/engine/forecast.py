"""How long a step takes: t = max(weights / b_w, B K e / b_kv, B c)."""

from __future__ import annotations

from dataclasses import dataclass

from h2okv.engine.speeds import Speeds


@dataclass(frozen=True)
class Traffic:
    """What one pass moves and computes, for a model and where its parts are.

    Attributes:
        disk_bytes: Weights read from the disk.
        link_bytes: Weights copied from the CPU's memory to the device.
        memory_bytes: Weights that a pass reads in the device's memory: all of them.
        parameters: Numbers of the weights that a token is multiplied with.
        cache_bytes: Of one sequence, read in every step from the device's memory.
        far_bytes: Of one sequence, brought in every step over the link.
        file_bytes: Of one sequence, brought in every step from the disk.
    """

    disk_bytes: int
    link_bytes: int
    memory_bytes: int
    parameters: int
    cache_bytes: int
    far_bytes: int = 0
    file_bytes: int = 0


@dataclass(frozen=True)
class Step:
    """The parts of a step's time, in seconds; the longest of them is the step's.

    Attributes:
        weights: Bringing the weights.
        cache: Reading all sequences' caches.
        compute: Products, or reading the weights for them in memory.
    """

    weights: float
    cache: float
    compute: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max(self.weights, self.cache, self.compute)

    @property
    def limit(self) -> str:
        """What the step waits for."""
        parts = {"weights": self.weights, "cache": self.cache, "compute": self.compute}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Forecast:
    """What a job does if the model of its time holds.

    Attributes:
        step: Of one decode step.
        prompt_seconds: Reading the prompts of one batch.
        first_seconds: Until the first results are there.
        decode_tokens_per_second: Of steps alone.
        tokens_per_second: New tokens over the whole time, prompts included.
    """

    step: Step
    prompt_seconds: float
    first_seconds: float
    decode_tokens_per_second: float
    tokens_per_second: float


def forecast(
    traffic: Traffic, speeds: Speeds, rows: int, prompt: int, new: int, prompts_in_pass: int
) -> Forecast:
    """Predicts a batch.

    Args:
        traffic: What a pass moves.
        speeds: Of the machine.
        rows: Sequences, B.
        prompt: Tokens of each prompt.
        new: Tokens generated for each.
        prompts_in_pass: Prompts that one pass over the weights reads.

    Returns:
        The prediction.
    """
    brought = max(traffic.disk_bytes / speeds.disk, traffic.link_bytes / speeds.link)
    cache = rows * traffic.cache_bytes / speeds.memory
    # One disk, and one link, does one thing at a time: the caches come after the weights.
    if traffic.file_bytes:
        cache = max(cache, (traffic.disk_bytes + rows * traffic.file_bytes) / speeds.disk)
    if traffic.far_bytes:
        cache = max(cache, (traffic.link_bytes + rows * traffic.far_bytes) / speeds.link)
    work = 2 * traffic.parameters
    products = rows * work / speeds.product_rate(rows)
    compute = max(products, traffic.memory_bytes / speeds.memory)
    step = Step(brought, cache, compute)
    passes = -(-rows // max(1, prompts_in_pass))
    reading = rows * prompt * work / speeds.product_rate(prompt)
    prompt_seconds = max(passes * brought, reading)
    steps = max(0, new - 1)
    total = prompt_seconds + steps * step.seconds
    return Forecast(
        step=step,
        prompt_seconds=prompt_seconds,
        # A pass brings each prompt that is under way a token, also while others are still read.
        first_seconds=prompt_seconds * min(1.0, new / passes) + max(0, new - passes) * step.seconds,
        decode_tokens_per_second=rows / step.seconds if step.seconds else 0.0,
        tokens_per_second=rows * new / total if total else 0.0,
    )
