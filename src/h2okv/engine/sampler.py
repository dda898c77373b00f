"""How the next token of each sequence is chosen, for every loop in the package."""

from __future__ import annotations

import copy
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
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

NOT_A_NUMBER = (
    "the model's output is not a number (NaN); its data type may be too narrow, try dtype float32"
)
_NOTHING_LEFT = (
    "no token can be chosen: temperature, penalties and biases leave no weight that is a number "
    "above 0; choose others."
)
_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""Processors that do not look at the tokens so far."""


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Reads the tokens that end a model's texts."""
    config: Any = model.generation_config or model.config
    ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset(ids) if isinstance(ids, (list, tuple)) else frozenset({int(ids)})


def generation_kwargs(params: SamplingParams) -> dict[str, Any]:
    """Makes the arguments with which transformers' ``generate`` samples as asked for."""
    options: dict[str, Any] = {"do_sample": not params.is_greedy}
    if not params.is_greedy:  # else transformers warns that they have no effect
        options |= {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p or None,
        }
    if params.repetition_penalty != 1:
        options["repetition_penalty"] = params.repetition_penalty
    return options


def logits_processors(
    model: PreTrainedModel, params: SamplingParams, prompt_length: int
) -> LogitsProcessorList:
    """Makes the processors of ``generate``: the model's own and those asked for."""
    config: Any = copy.deepcopy(model.generation_config)
    for name, value in generation_kwargs(params).items():
        setattr(config, name, value)
    config.num_beams = 1
    ends = sorted(eos_token_ids(model))
    config._eos_token_tensor = torch.tensor(ends) if ends else None
    transformers: Any = model
    made: LogitsProcessorList = transformers._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt_length,
        device="cpu",
        model_kwargs={},
    )
    return made


class Sampler:
    """Chooses the tokens of one output, whatever is sampled beside it.

    Args:
        model: Its generation config may have processors of its own.
        params: What is asked for.
        prompt: Tokens before the first one that is chosen.
        index: Which of the outputs of the prompt; added to the seed.
    """

    def __init__(
        self, model: PreTrainedModel, params: SamplingParams, prompt: Sequence[int], index: int = 0
    ) -> None:
        processors = logits_processors(model, params, len(prompt))
        self.params = params
        self.warpers = LogitsProcessorList(p for p in processors if isinstance(p, _WARPERS))
        self._by_text = LogitsProcessorList(p for p in processors if not isinstance(p, _WARPERS))
        self._prompt = prompt
        self._bias = (
            torch.tensor(list(params.logit_bias)),
            torch.tensor([*params.logit_bias.values()]),
        )
        self._penalises = bool(
            params.presence_penalty or params.frequency_penalty or params.logit_bias
        )
        self.sees_text = bool(self._by_text) or self._penalises
        self.generator: torch.Generator | None = None
        if not params.is_greedy:
            self.generator = torch.Generator()
            if params.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed((params.seed + index) % 2**63)

    @property
    def warping(self) -> tuple[float, ...]:
        """What the warpers depend on; samplers with the same one can share a call."""
        own = self.params
        return own.temperature, own.top_p, own.top_k, own.min_p

    def process(self, logits: Any, text: Sequence[int]) -> torch.Tensor:
        """Applies what depends on the text so far.

        Args:
            logits: fp32 ``[1, V]`` on the CPU; unchanged.
            text: New tokens so far.

        Returns:
            fp32 ``[1, V]``.
        """
        if self._penalises:
            logits = logits.clone()
            for token, times in Counter(text).items():
                taken = self.params.presence_penalty + self.params.frequency_penalty * times
                logits[0, token] -= taken
            if self.params.logit_bias:
                tokens, biases = self._bias
                logits[0, tokens] += biases
        if self._by_text:
            so_far: Any = torch.tensor([[*self._prompt, *text]])
            logits = self._by_text(so_far, logits)
        processed: torch.Tensor = logits
        return processed


def sample(
    samplers: Sequence[Sampler], texts: Sequence[Sequence[int]], logits: torch.Tensor
) -> list[int | Exception]:
    """Chooses the next token of each sequence, as if it were alone.

    Args:
        samplers: B of them; their generators are advanced.
        texts: Their new tokens so far.
        logits: ``[B, V]``, of any dtype, on any device.

    Returns:
        For each sequence its token, or why there is none.
    """
    # A NaN anywhere makes the sum one; infinities of both signs are no use either.
    is_fine = (~torch.isnan(logits.float().sum(dim=-1))).tolist()
    chosen: list[int | Exception] = list(logits.argmax(dim=-1).tolist())
    groups: dict[Any, list[int]] = defaultdict(list)
    for row, sampler in enumerate(samplers):
        if not is_fine[row]:
            chosen[row] = RequestFailedError(NOT_A_NUMBER)
        elif sampler.sees_text:
            try:
                one = sampler.process(logits[row : row + 1].float().cpu(), texts[row])
                chosen[row] = _draw([sampler], one)[0]
            except Exception as error:  # a processor of the model's own may raise anything
                chosen[row] = error
        elif sampler.generator is not None:
            groups[sampler.warping].append(row)
    for rows in groups.values():
        drawn = _draw([samplers[row] for row in rows], logits[rows].float())
        for row, token in zip(rows, drawn, strict=True):
            chosen[row] = token
    return chosen


def _draw(samplers: list[Sampler], logits: Any) -> list[int | Exception]:
    """Draws for sequences with the same warpers, or takes the most likely token."""
    failed = RequestFailedError(_NOTHING_LEFT)
    if samplers[0].generator is None:
        values, tokens = (part.tolist() for part in logits.max(dim=-1))
        return [
            token if value > -math.inf else failed
            for value, token in zip(values, tokens, strict=True)
        ]
    nothing: Any = None  # warpers do not look at the text
    weights = torch.softmax(samplers[0].warpers(nothing, logits), dim=-1).cpu()
    is_fine = torch.isfinite(weights.sum(dim=-1)).tolist()
    return [
        int(torch.multinomial(weights[row : row + 1], 1, generator=sampler.generator))
        if is_fine[row]
        else failed
        for row, sampler in enumerate(samplers)
    ]


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Gives the log-probabilities of tokens.

    Args:
        logits: ``[n, V]``, as the model gave them.
        tokens: n of them.
        count: How many of the most likely tokens come with each.
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
    """Makes greedy ``generate`` draw, each sequence with a random generator of its own.

    The maximum of log-probabilities with independent Gumbel noise is distributed as they say
    (Gumbel 1954; Maddison et al., arXiv 1411.0030, section 2). What a sequence draws depends
    neither on the others of the batch nor on what an interrupted run has finished before.

    Args:
        params: Of each sequence, with a seed; temperature, top-p, top-k and min-p are the first's.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self._generators = [torch.Generator().manual_seed(own.seed or 0) for own in params]
        first = params[0]
        self._warpers = LogitsProcessorList([TemperatureLogitsWarper(first.temperature)])
        if first.top_k:
            self._warpers.append(TopKLogitsWarper(first.top_k))
        if first.top_p < 1:
            self._warpers.append(TopPLogitsWarper(first.top_p))
        if first.min_p:
            self._warpers.append(MinPLogitsWarper(first.min_p))

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Adds noise to logits ``[B, V]``; returns fp32."""
        warped: Any = self._warpers(input_ids, scores.float())
        noise = [
            -torch.empty(warped.shape[1]).exponential_(generator=own).log()
            for own in self._generators
        ]
        return warped + torch.stack(noise).to(warped.device)


class RefuseNaN(LogitsProcessor):
    """Ends a ``generate`` whose logits have overflowed: it would go on with any text at all."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Returns the scores as they are."""
        if bool(torch.isnan(scores).any()):
            raise ValueError(f"{NOT_A_NUMBER} (after {input_ids.shape[1]} tokens)")
        return scores


def sample_seed(seed: int, sample: int) -> int:
    """Derives the seed of one sample of a run."""
    digest = hashlib.sha256(f"{seed} {sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
