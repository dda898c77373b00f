"""Sampling of the next token of each sequence, for every loop in the package."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process

from h2okv.engine.outputs import RequestFailedError, TokenLogprob
from h2okv.engine.sampling_params import SamplingParams
from h2okv.engine.structured import GrammarMask

NOT_A_NUMBER = (
    "the model's output is not a number (NaN); its data type may be too narrow, try dtype float32"
)
_NOTHING_LEFT = (
    "no token can be chosen: temperature, penalties and biases leave no weight that is a number "
    "above 0; choose others."
)
_WARPERS: Mapping[str, Any] = {
    "temperature": logits_process.TemperatureLogitsWarper,
    "top_k": logits_process.TopKLogitsWarper,
    "top_p": logits_process.TopPLogitsWarper,
    "min_p": logits_process.MinPLogitsWarper,
}
"""The processors that do not read the text, by parameter, in the order of ``generate``."""


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Read the tokens that end a model's texts."""
    ids = getattr(model.generation_config or model.config, "eos_token_id", None)
    listed = ids if isinstance(ids, (list, tuple)) else [ids]
    return frozenset(int(token) for token in listed if token is not None)


def model_sampling(config: GenerationConfig | None) -> dict[str, Any]:
    """Return the sampling settings of a model's authors, by fields of `SamplingParams`."""
    if config is None:
        return {}
    names = ("repetition_penalty", *_WARPERS) if config.do_sample else ("repetition_penalty",)
    standard = {"temperature": 1.0} if config.do_sample else {}
    values = {name: getattr(config, name, None) for name in names}
    values["stop"] = config.stop_strings
    return standard | {name: value for name, value in values.items() if value is not None}


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    """Return the warpers whose parameters differ from the neutral ones."""
    values = {} if params.is_greedy else {name: getattr(params, name) for name in _WARPERS}
    changed = {n: v for n, v in values.items() if v != getattr(SamplingParams, n)}
    return LogitsProcessorList([_WARPERS[name](value) for name, value in changed.items()])


def _text_processors(
    model: PreTrainedModel, params: SamplingParams, prompt_length: int
) -> LogitsProcessorList:
    """Return the processors that read the text: of the parameters and of the model's config."""
    config: Any = copy.deepcopy(model.generation_config)
    config.do_sample, config.num_beams = not params.is_greedy, 1
    for name in ("repetition_penalty", *_WARPERS):  # 1 too: the model may have another
        setattr(config, name, getattr(params, name))
    ends = sorted(eos_token_ids(model))
    config._eos_token_tensor = torch.tensor(ends) if ends else None
    make: Any = model._get_logits_processor
    every, warpers = make(config, prompt_length, device="cpu", model_kwargs={}), _WARPERS.values()
    processors = LogitsProcessorList(p for p in every if not isinstance(p, tuple(warpers)))
    if params.presence_penalty or params.frequency_penalty or params.logit_bias:
        processors.insert(0, NewTextPenalty(params, prompt_length))
    return processors


class NewTextPenalty(LogitsProcessor):
    """Applies presence and frequency penalties, which transformers lacks, and biases."""

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        self._params, self._prompt_length = params, prompt_length
        self._biased = torch.tensor([*params.logit_bias], dtype=torch.long)
        self._biases = torch.tensor([*params.logit_bias.values()])

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Penalize logits ``[1, V]`` by the tokens of ``[1, T]`` after the prompt."""
        times = torch.bincount(input_ids[0, self._prompt_length :], minlength=scores.shape[1])
        presence, frequency = self._params.presence_penalty, self._params.frequency_penalty
        scores = scores - (presence * (times > 0) + frequency * times)
        scores[0, self._biased] += self._biases
        return scores


class Sampler:
    """Chooses the tokens of one output, independent of the other sequences of the batch."""

    def __init__(
        self,
        model: PreTrainedModel,
        params: SamplingParams,
        prompt: Sequence[int],
        index: int = 0,
        token_mask: GrammarMask | None = None,
    ) -> None:
        self.params = params
        self.warpers = _warpers(params)
        # Samplers with equal values share one call of the warpers.
        self.warping = tuple(getattr(params, name) for name in _WARPERS)
        self._text_processors = _text_processors(model, params, len(prompt))
        self._token_mask = token_mask
        self.sees_text = bool(self._text_processors) or token_mask is not None
        self._prompt = prompt
        self.generator = None if params.is_greedy else torch.Generator()
        if self.generator is not None:
            if params.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed((params.seed + index) % 2**63)

    def processed(self, logits: torch.Tensor, text: Sequence[int]) -> torch.Tensor:
        """Return logits ``[1, V]`` in fp32, after the processors that depend on the new tokens."""
        logits = logits.float()
        return self.process(logits.cpu(), text) if self.sees_text else logits

    def process(self, logits: Any, text: Sequence[int]) -> Any:
        """Apply the processors that depend on the new tokens to fp32 ``[1, V]`` on the CPU."""
        if self._text_processors:
            so_far: Any = torch.tensor([[*self._prompt, *text]])
            logits = self._text_processors(so_far, logits)
        if self._token_mask is not None:  # last: no bias makes another token possible
            logits = logits.masked_fill(~self._token_mask.mask(text), -math.inf)
        return logits


def sample(
    samplers: Sequence[Sampler], texts: Sequence[Sequence[int]], logits: torch.Tensor
) -> list[int | Exception]:
    """Sample the next token of each sequence, as if alone, from logits ``[B, V]``, or its error."""
    # Any NaN makes the sum NaN, as do infinities of both signs, which are as useless.
    is_fine = (~torch.isnan(logits.float().sum(dim=-1))).tolist()
    chosen: list[int | Exception] = list(logits.argmax(dim=-1).tolist())
    groups: dict[Any, list[int]] = defaultdict(list)
    for row, sampler in enumerate(samplers):
        if not is_fine[row]:
            chosen[row] = RequestFailedError(NOT_A_NUMBER)
        elif sampler.sees_text:
            try:
                processed = sampler.processed(logits[row : row + 1], texts[row])
                chosen[row] = _draw([sampler], processed)[0]
            except Exception as error:  # a processor of the model's config may raise anything
                chosen[row] = error
        elif sampler.generator is not None:
            groups[sampler.warping].append(row)
    for group in groups.values():
        drawn = _draw([samplers[row] for row in group], logits[group].float())
        for row, token in zip(group, drawn, strict=True):
            chosen[row] = token
    return chosen


def _draw(samplers: list[Sampler], logits: Any) -> list[int | Exception]:
    """Draw for sequences with equal warpers, or take the most likely token of a single one."""
    failed = RequestFailedError(_NOTHING_LEFT)
    if samplers[0].generator is None:
        return [int(logits.argmax()) if logits.max() > -math.inf else failed]
    no_text: Any = None  # warpers do not read it
    weights = torch.softmax(samplers[0].warpers(no_text, logits), dim=-1).cpu()
    is_fine = torch.isfinite(weights.sum(dim=-1)).tolist()
    return [
        int(torch.multinomial(row_weights, 1, generator=sampler.generator)) if fine else failed
        for sampler, row_weights, fine in zip(samplers, weights, is_fine, strict=True)
    ]


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Return the log-probabilities of n tokens and the ``count`` most likely, of ``[n, V]``."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))[:, 0]
    values, indices = (tensor.tolist() for tensor in logprobs.topk(min(count, logits.shape[1])))
    rows = zip(tokens, chosen.tolist(), indices, values, strict=True)
    return [TokenLogprob(token, n, tuple(zip(*top, strict=True))) for token, n, *top in rows]
