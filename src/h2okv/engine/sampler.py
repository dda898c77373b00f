"""The next token of each sequence."""

from __future__ import annotations

import copy
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from h2okv.engine.outputs import RequestFailedError, TokenLogprob
from h2okv.engine.sampling_params import SamplingParams


def settled_config(
    model: PreTrainedModel,
    temperature: float,
    top_p: float,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float | None = None,
) -> GenerationConfig:
    """Makes a generation config of a model's own and what is asked for."""
    config: Any = copy.deepcopy(model.generation_config)
    draws = temperature > 0
    config.do_sample = draws
    config.temperature = temperature if draws else None
    config.top_p = top_p if draws else None
    config.top_k = top_k or None if draws else None
    config.min_p = min_p or None if draws else None
    if repetition_penalty is not None:
        config.repetition_penalty = repetition_penalty
    config.num_beams = 1
    ends = sorted(end_tokens(model))
    config._eos_token_tensor = torch.tensor(ends) if ends else None
    settled: GenerationConfig = config
    return settled


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Reads the tokens that end a model's texts."""
    ends: Any = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        return frozenset()
    return frozenset(ends if isinstance(ends, list) else [ends])


def processors_of(
    model: PreTrainedModel, config: GenerationConfig, prompt_length: int, device: str = "cpu"
) -> LogitsProcessorList:
    """Makes the processors of ``generate``."""
    transformers: Any = model
    made: LogitsProcessorList = transformers._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt_length,
        device=device,
        model_kwargs={},
    )
    return made


_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""Processors for which a row's text so far makes no difference."""

_NOT_A_NUMBER = (
    "the model's output for this request is not a number (NaN); its data type may be too narrow"
)
_NOTHING_LEFT = (
    "no token can be chosen: temperature, penalties and biases leave no weight that is a number "
    "above 0; choose others."
)


class RowSampler:
    """What choosing the tokens of one output needs."""

    def __init__(
        self, model: PreTrainedModel, params: SamplingParams, prompt: Sequence[int], index: int
    ) -> None:
        penalty = None if params.repetition_penalty == 1 else params.repetition_penalty
        config = settled_config(
            model, params.temperature, params.top_p, params.top_k, params.min_p, penalty
        )
        processors = processors_of(model, config, len(prompt))
        self.params = params
        self.prompt = prompt
        own = [part for part in processors if not isinstance(part, _WARPERS)]
        warpers = [part for part in processors if isinstance(part, _WARPERS)]
        self.by_text = LogitsProcessorList(own)
        """Those that look at the text so far."""
        self.warpers = LogitsProcessorList(warpers)
        self.penalises = bool(
            params.presence_penalty or params.frequency_penalty or params.logit_bias
        )
        self.is_plain = params.is_greedy and not self.by_text and not self.penalises
        bias = params.logit_bias
        self._bias = torch.tensor(list(bias)), torch.tensor(list(bias.values()))
        self.key = (params.temperature, params.top_p, params.top_k, params.min_p)
        self.generator: torch.Generator | None = None
        if not params.is_greedy:
            self.generator = torch.Generator()
            if params.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed((params.seed + index) % 2**63)

    def process(self, logits: Any, text: Sequence[int]) -> torch.Tensor:
        """Does to a row's logits what its text so far asks for.

        Args:
            logits: fp32 ``[1, V]`` on the CPU; unchanged.
            text: New tokens so far.

        Returns:
            fp32 ``[1, V]``.
        """
        if self.penalises:
            logits = self._penalised(logits, text)
        if self.by_text:
            tokens: Any = torch.tensor([[*self.prompt, *text]])
            logits = self.by_text(tokens, logits)
        processed: torch.Tensor = logits
        return processed

    def _penalised(self, logits: torch.Tensor, text: Sequence[int]) -> torch.Tensor:
        logits = logits.clone()
        for token, times in Counter(text).items():
            taken = self.params.presence_penalty + self.params.frequency_penalty * times
            logits[0, token] -= taken
        if self.params.logit_bias:
            tokens, biases = self._bias
            logits[0, tokens] += biases
        return logits


def choose(
    rows: Sequence[RowSampler], texts: Sequence[Sequence[int]], logits: torch.Tensor
) -> list[int | Exception]:
    """Chooses a token for each row, whatever the others want.

    Args:
        rows: B of them; their generators are advanced.
        texts: Their new tokens so far.
        logits: ``[B, V]``, of any dtype, on any device.
    """
    # A NaN anywhere in a row is one in its sum; infinities of both signs are no use either.
    is_fine = ~torch.isnan(logits.float().sum(dim=-1))
    chosen: list[int | Exception] = list(logits.argmax(dim=-1).tolist())
    for row, fine in enumerate(is_fine.tolist()):
        if not fine:
            chosen[row] = RequestFailedError(_NOT_A_NUMBER)
    drawing: dict[Any, list[int]] = defaultdict(list)
    for row, sampler in enumerate(rows):
        if isinstance(chosen[row], Exception) or sampler.is_plain:
            continue
        if sampler.by_text or sampler.penalises:
            try:
                one = sampler.process(logits[row : row + 1].float().cpu(), texts[row])
                chosen[row] = _draw([sampler], one)[0]
            except Exception as error:  # a processor of the model's own may raise anything
                chosen[row] = error
        else:
            drawing[sampler.key].append(row)
    for group in drawing.values():
        samplers = [rows[row] for row in group]
        for row, token in zip(group, _draw(samplers, logits[group].float()), strict=True):
            chosen[row] = token
    return chosen


def _draw(samplers: list[RowSampler], logits: Any) -> list[int | Exception]:
    """Draws for rows with the same warpers, or takes the likeliest."""
    chosen: list[int | Exception] = []
    if samplers[0].generator is None:
        best = logits.max(dim=-1)
        for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            chosen.append(token if value > -math.inf else RequestFailedError(_NOTHING_LEFT))
        return chosen
    nothing: Any = None  # warpers do not look at the text
    weights = torch.softmax(samplers[0].warpers(nothing, logits), dim=-1).cpu()
    is_fine = torch.isfinite(weights.sum(dim=-1)).tolist()
    for row, sampler in enumerate(samplers):
        if is_fine[row]:
            drawn = torch.multinomial(weights[row : row + 1], 1, generator=sampler.generator)
            chosen.append(int(drawn))
        else:
            chosen.append(RequestFailedError(_NOTHING_LEFT))
    return chosen


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Tells how likely tokens were.

    Args:
        logits: ``[n, V]``, as the model gave them.
        tokens: n of them.
        count: How many of the likeliest tokens to tell with each.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    values, indices = logprobs.topk(min(count, logits.shape[1]), dim=-1)
    return [
        TokenLogprob(token, value[0], tuple(zip(places, best, strict=True)))
        for token, value, places, best in zip(
            tokens, own.tolist(), indices.tolist(), values.tolist(), strict=True
        )
    ]


class SeededSampling(LogitsProcessor):
    """Adds noise to the logits, so that the likeliest token is a draw from their distribution.

    The maximum of log-probabilities with independent Gumbel noise is distributed as they say
    (Gumbel 1954; Maddison et al., arXiv 1411.0030, section 2). Each row of a batch has a random
    generator of its own: what it draws does not depend on the rows beside it, nor on what an
    interrupted run has finished before.
    """

    def __init__(self, seeds: Sequence[int], temperature: float, top_p: float) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
        if top_p < 1:
            self._warpers.append(TopPLogitsWarper(top_p))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Returns the logits with noise, fp32 ``[B, V]``.

        Args:
            input_ids: int64 ``[B, T]``.
            scores: Logits, ``[B, V]``.
        """
        noisy = cast(torch.FloatTensor, scores.float())
        for warper in self._warpers:
            noisy = warper(input_ids, noisy)
        size = noisy.shape[1]
        noise = torch.stack(
            [-torch.empty(size).exponential_(generator=g).log() for g in self._generators]
        )
        return cast(torch.FloatTensor, noisy + noise.to(noisy.device))


def sample_seed(seed: int, sample: int) -> int:
    """Makes the seed of one sample."""
    digest = hashlib.sha256(f"{seed} {sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class NumbersOnly(LogitsProcessor):
    """Ends a generation whose numbers have overflowed, for it would go on with any text at all."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Returns the scores as they are."""
        if bool(torch.isnan(scores).any()):
            raise ValueError(
                f"the model's output is not a number (NaN) after {input_ids.shape[1]} tokens;"
                " its data type may be too narrow, try --dtype float32"
            )
        return scores


def end_token_ids(model: PreTrainedModel) -> set[int]:
    """Tells which tokens end an answer."""
    config = model.generation_config or model.config
    ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return set()
    return set(ids) if isinstance(ids, (list, tuple)) else {int(ids)}


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the likeliest token, anything above draws from the distribution.
        top_p: Draws among the likeliest tokens that hold this much of the probability.
    """

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Refuses what nothing can be drawn with."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature {self.temperature:g} is out of range; give 0 (always the likeliest"
                " token) or a positive number such as 0.3"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p {self.top_p:g} is out of range; give a share above 0 and up to 1"
            )


def text_before(text: str, stops: Sequence[str]) -> str:
    """Cuts a text where the first of some strings begins."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
