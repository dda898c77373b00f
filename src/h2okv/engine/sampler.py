"""How the next token of each sequence is chosen, for every loop in the package."""

from __future__ import annotations

import copy
import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process

from h2okv.engine.outputs import RequestFailedError, TokenLogprob
from h2okv.engine.sampling_params import SamplingParams

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
"""The processors that do not look at the text, by parameter, in the order of ``generate``."""


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Reads the tokens that end a model's texts."""
    ids = getattr(model.generation_config or model.config, "eos_token_id", None)
    listed = ids if isinstance(ids, (list, tuple)) else [ids]
    return frozenset(int(token) for token in listed if token is not None)


def model_sampling(config: GenerationConfig | None) -> dict[str, float]:
    """How a model's authors want it to be sampled, by fields of `SamplingParams`."""
    if config is None:
        return {}
    names = ("repetition_penalty", *_WARPERS) if config.do_sample else ("repetition_penalty",)
    standard = {"temperature": 1.0} if config.do_sample else {}
    found = {name: getattr(config, name, None) for name in names}
    return standard | {name: value for name, value in found.items() if value is not None}


def generation_kwargs(params: SamplingParams) -> dict[str, Any]:
    """Makes the arguments with which transformers' ``generate`` samples as asked for."""
    options: dict[str, Any] = {"do_sample": not params.is_greedy}
    if not params.is_greedy:  # else transformers warns that they have no effect
        options |= {name: getattr(params, name) for name in _WARPERS}
        options["min_p"] = params.min_p or None
    if params.repetition_penalty != 1:
        options["repetition_penalty"] = params.repetition_penalty
    return options


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    """Those of them that change something."""
    neutral = SamplingParams()
    changed = [name for name in _WARPERS if getattr(params, name) != getattr(neutral, name)]
    made = [] if params.is_greedy else [_WARPERS[name](getattr(params, name)) for name in changed]
    return LogitsProcessorList(made)


def _text_processors(
    model: PreTrainedModel, params: SamplingParams, prompt_length: int
) -> LogitsProcessorList:
    """The processors that look at the text: those asked for and the model's own."""
    config: Any = copy.deepcopy(model.generation_config)
    for name, value in generation_kwargs(params).items():
        setattr(config, name, value)
    config.num_beams = 1
    ends = sorted(eos_token_ids(model))
    config._eos_token_tensor = torch.tensor(ends) if ends else None
    untyped: Any = model
    found = untyped._get_logits_processor(config, prompt_length, device="cpu", model_kwargs={})
    warpers = tuple(_WARPERS.values())
    processors = LogitsProcessorList(one for one in found if not isinstance(one, warpers))
    if params.presence_penalty or params.frequency_penalty or params.logit_bias:
        processors.insert(0, NewTextPenalty(params, prompt_length))
    return processors


class NewTextPenalty(LogitsProcessor):
    """Presence and frequency penalties, which transformers does not have, and the biases."""

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        self._params, self._prompt_length = params, prompt_length
        self._biased = torch.tensor([*params.logit_bias], dtype=torch.long)
        self._biases = torch.tensor([*params.logit_bias.values()])

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Changes logits ``[1, V]`` by what ``[1, T]`` has behind the prompt."""
        times = torch.bincount(input_ids[0, self._prompt_length :], minlength=scores.shape[1])
        taken = self._params.presence_penalty * (times > 0) + self._params.frequency_penalty * times
        scores = scores - taken
        scores[0, self._biased] += self._biases
        return scores


class Sampler:
    """Chooses the tokens of one output, whatever is sampled beside it."""

    def __init__(
        self, model: PreTrainedModel, params: SamplingParams, prompt: Sequence[int], index: int = 0
    ) -> None:
        self.params = params
        self.warpers = _warpers(params)
        # Samplers with equal ones can share a call of the warpers.
        self.warping = tuple(getattr(params, name) for name in _WARPERS)
        self._text_processors = _text_processors(model, params, len(prompt))
        self.sees_text = bool(self._text_processors)
        self._prompt = prompt
        self.generator = None if params.is_greedy else torch.Generator()
        if self.generator is not None:
            if params.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed((params.seed + index) % 2**63)

    def process(self, logits: Any, text: Sequence[int]) -> Any:
        """Applies what depends on the new tokens so far to fp32 ``[1, V]`` on the CPU."""
        so_far: Any = torch.tensor([[*self._prompt, *text]])
        return self._text_processors(so_far, logits)


def sample(
    samplers: Sequence[Sampler], texts: Sequence[Sequence[int]], logits: torch.Tensor
) -> list[int | Exception]:
    """The next token of each sequence as if alone, of logits ``[B, V]``, or why there is none."""
    # A NaN anywhere makes the sum one; infinities of both signs are no use either.
    is_fine = (~torch.isnan(logits.float().sum(dim=-1))).tolist()
    chosen: list[int | Exception] = list(logits.argmax(dim=-1).tolist())
    groups: dict[Any, list[int]] = defaultdict(list)
    for at, sampler in enumerate(samplers):
        if not is_fine[at]:
            chosen[at] = RequestFailedError(NOT_A_NUMBER)
        elif sampler.sees_text:
            try:
                one = sampler.process(logits[at : at + 1].float().cpu(), texts[at])
                chosen[at] = _draw([sampler], one)[0]
            except Exception as error:  # a processor of the model's own may raise anything
                chosen[at] = error
        elif sampler.generator is not None:
            groups[sampler.warping].append(at)
    for group in groups.values():
        drawn = _draw([samplers[at] for at in group], logits[group].float())
        for at, token in zip(group, drawn, strict=True):
            chosen[at] = token
    return chosen


def _draw(samplers: list[Sampler], logits: Any) -> list[int | Exception]:
    """Draws for sequences with the same warpers, or takes one's most likely token."""
    failed = RequestFailedError(_NOTHING_LEFT)
    if samplers[0].generator is None:
        return [int(logits.argmax()) if logits.max() > -math.inf else failed]
    no_text: Any = None  # which warpers do not look at
    weights = torch.softmax(samplers[0].warpers(no_text, logits), dim=-1).cpu()
    is_fine = torch.isfinite(weights.sum(dim=-1)).tolist()
    return [
        int(torch.multinomial(own, 1, generator=sampler.generator)) if fine else failed
        for sampler, own, fine in zip(samplers, weights, is_fine, strict=True)
    ]


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """The log-probabilities of n tokens and of the ``count`` likeliest, from ``[n, V]``."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))[:, 0]
    values, indices = (best.tolist() for best in logprobs.topk(min(count, logits.shape[1])))
    columns = zip(tokens, own.tolist(), indices, values, strict=True)
    return [TokenLogprob(one, value, tuple(zip(*top, strict=True))) for one, value, *top in columns]


class SeededSampling(LogitsProcessor):
    """Makes greedy ``generate`` draw, each sequence with a random generator of its own.

    The maximum of log-probabilities with independent Gumbel noise is distributed as they say
    (Gumbel 1954; Maddison et al., arXiv 1411.0030, section 2). What a sequence draws depends
    neither on the others of the batch nor on what an interrupted run has finished before.
    Temperature, top-p, top-k and min-p are those of the first sequence.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self._generators = [torch.Generator().manual_seed(own.seed or 0) for own in params]
        self._warpers = _warpers(params[0])

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
