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
_NOT_A_NUMBER, _NONE_LEFT = -1, -2
"""What `choose` returns for these errors."""
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
        # Samplers with equal values share one call of the warpers.
        self.warping = tuple(getattr(params, name) for name in _WARPERS)
        values = [] if params.is_greedy else zip(_WARPERS, self.warping, strict=True)
        changed = [(n, value) for n, value in values if value != getattr(SamplingParams, n)]
        self.warpers = LogitsProcessorList([_WARPERS[n](value) for n, value in changed])
        self._text_processors = _text_processors(model, params, len(prompt))
        self._token_mask = token_mask
        self.sees_text = bool(self._text_processors) or token_mask is not None
        self._prompt = prompt
        # Where its logits are; weights that are read from a disk are on no device.
        draws_there = model.device.type == "cuda" and not self.sees_text
        device = model.device if draws_there else torch.device("cpu")
        self.generator = None if params.is_greedy else torch.Generator(device)
        if self.generator is not None:
            if params.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed((params.seed + index) % 2**63)

    def noise(self, size: int, device: torch.device) -> torch.Tensor:
        """Draw exponential random numbers, fp32 ``[size]``; mutates the generator."""
        assert self.generator is not None
        numbers = torch.empty(size, device=self.generator.device)
        return to_device(numbers.exponential_(generator=self.generator), device)

    def processed(self, logits: torch.Tensor, text: Sequence[int]) -> torch.Tensor:
        """Return logits ``[1, V]`` in fp32, after the processors that depend on the new tokens."""
        logits = logits.float().cpu() if self.sees_text else logits.float()
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
    plain = [row for row, sampler in enumerate(samplers) if not sampler.sees_text]
    chosen: list[int | Exception] = [RequestFailedError(NOT_A_NUMBER)] * len(samplers)
    if plain:
        of_plain = logits if len(plain) == len(samplers) else logits[plain]
        tokens = choose([samplers[row] for row in plain], of_plain).tolist()
        for row, token in zip(plain, as_tokens(tokens), strict=True):
            chosen[row] = token
    if len(plain) == len(samplers):
        return chosen
    for row, is_fine in enumerate((~_is_nan(logits)).tolist()):
        sampler = samplers[row]
        if sampler.sees_text and is_fine:
            try:
                processed = sampler.processed(logits[row : row + 1], texts[row])
                chosen[row] = as_tokens(choose([sampler], processed).tolist())[0]
            except Exception as error:  # a processor of the model's config may raise anything
                chosen[row] = error
    return chosen


def choose(samplers: Sequence[Sampler], logits: torch.Tensor) -> torch.Tensor:
    """Choose the next tokens by logits ``[B, V]`` alone; the host waits for nothing.

    Draws are those of ``torch.multinomial``, which would wait: the maximum of each probability
    over an exponential random number.

    Returns:
        int64 ``[B]`` on the logits' device, for `as_tokens`.
    """
    tokens, device = logits.argmax(dim=-1), logits.device
    groups: dict[Any, list[tuple[int, Sampler]]] = defaultdict(list)
    for row, sampler in enumerate(samplers):
        if sampler.generator is not None:
            groups[sampler.warping].append((row, sampler))
    no_text: Any = None  # warpers do not read it
    for group in groups.values():
        rows: Any = slice(None)
        if len(group) < len(samplers):
            rows = to_device(torch.tensor([row for row, _ in group]), device)
        warped = group[0][1].warpers(no_text, logits[rows].float())
        weights = torch.softmax(warped, dim=-1)
        noise = torch.stack([sampler.noise(logits.shape[1], device) for _, sampler in group])
        is_fine = weights.sum(dim=-1).isfinite()
        tokens[rows] = weights.div_(noise).argmax(dim=-1).where(is_fine, _NONE_LEFT)
    tokens = tokens.where(logits.amax(dim=-1) > -math.inf, _NONE_LEFT)
    return tokens.where(~_is_nan(logits), _NOT_A_NUMBER)


def _is_nan(logits: torch.Tensor) -> torch.Tensor:
    """Tell for each row whether any logit is NaN; infinities of both signs are as useless."""
    return logits.float().sum(dim=-1).isnan()


def as_tokens(chosen: Sequence[int]) -> list[int | Exception]:
    """Return the numbers of `choose` as tokens, or the errors that they stand for."""
    errors = {_NOT_A_NUMBER: NOT_A_NUMBER, _NONE_LEFT: _NOTHING_LEFT}
    return [RequestFailedError(errors[n]) if n in errors else n for n in chosen]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to a device that the host does not wait for."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Return the log-probabilities of n tokens and the ``count`` most likely, of ``[n, V]``."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))[:, 0]
    values, indices = (tensor.tolist() for tensor in logprobs.topk(min(count, logits.shape[1])))
    rows = zip(tokens, chosen.tolist(), indices, values, strict=True)
    return [TokenLogprob(token, n, tuple(zip(*top, strict=True))) for token, n, *top in rows]
