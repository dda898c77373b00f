"""Data types of the engine: requests, their outputs, and scheduled steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from h2okv.budget import Budget
from h2okv.engine.detokenizer import Detokenizer, StopText, Thoughts
from h2okv.engine.outputs import (
    Completion,
    OutputDelta,
    PromptRead,
    RequestFailedError,
    RequestOutput,
    TokenLogprob,
    VerifiedAnswer,
)
from h2okv.engine.sampler import Sampler
from h2okv.engine.sampling_params import SamplingParams
from h2okv.engine.structured import GrammarMask
from h2okv.prompts.chat_template import Pins

Event = OutputDelta | Exception | None
"""Message to a client: a delta, the error of its request, or ``None`` at the end."""
_MOST_LIKELY = 16
_MIN_PROBABILITY = 1e-9


@dataclass(frozen=True)
class PromptStart:
    """Start of a prompt: its length, its budget if not the engine's, its saved state, its pins."""

    length: int
    budget: Budget | None = None
    state: str | None = None  # key of a saved state
    num_reused: int = 0  # tokens that the state has read
    pins: Pins = ()


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens of a prompt, the first of them at ``position``."""

    tokens: tuple[int, ...]
    position: int
    is_last: bool
    start: PromptStart | None = None  # with the first chunk
    wants_all_logits: bool = False  # False: those of the prompt's last token
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # of images, with all the tokens
    save: str | None = None  # key under which the state after these tokens is saved


@dataclass(frozen=True)
class ScheduledStep:
    """One step of the engine, in the order of the fields; sent to all ranks."""

    # Rows of the pool to release, one after the other; the last row moves into each.
    release: tuple[int, ...] = ()
    # Indices of the prefilled prompts that get slots, once for each output; the prompts are
    # dropped then. None before they are prefilled.
    admit: tuple[int, ...] | None = None
    # The newest token of each running sequence, and its position.
    decode: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    # What images add to its positions on the axes of M-RoPE; empty without such.
    offsets: tuple[int, ...] = ()
    # Rows whose states are saved after decoding, with their keys; keys of states to drop before.
    save: tuple[tuple[int, str], ...] = ()
    drop: tuple[str, ...] = ()
    # A chunk of one prompt, or several whole prompts with one budget.
    prefill: tuple[PrefillChunk, ...] = ()


class Comparison(NamedTuple):
    """What an evicting and a full cache predict at a token of an answer."""

    agrees: bool
    divergence: float
    choice: int  # the full cache's most likely token
    ratio: float  # of the full cache's probabilities, of the other cache's choice to its own
    entropy: float  # of the full cache's distribution, in nats


class Trace:
    """What an evicting cache predicts at each token of an answer."""

    def __init__(self) -> None:
        self.best: list[int] = []
        # Of each token: the most likely ones, int64 [k], and their probabilities, fp32 [k].
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._tokens = self._weights = torch.empty(0)  # the same, [N, k], once all are known

    def add(self, logits: Tensor) -> None:
        """Note the prediction of fp32 logits ``[1, V]``."""
        self.best.append(int(logits.argmax()))
        weights, tokens = torch.softmax(logits[0], dim=-1).topk(min(_MOST_LIKELY, logits.shape[1]))
        self._steps.append((tokens.cpu(), weights.cpu()))

    def end(self) -> None:
        """Move all into two tensors: many small ones take several times the memory."""
        self._tokens, self._weights = map(torch.stack, zip(*self._steps, strict=True))
        self._steps = []

    def compare(self, number: int, logits: Tensor) -> Comparison:
        """Compare the prediction of a token with fp32 logits ``[1, V]`` of a full cache."""
        tokens, evicting = self._tokens[number], self._weights[number]
        shares, best = torch.softmax(logits[0], dim=-1), self.best[number]
        full, evicting = _with_rest(shares[tokens.to(logits.device)].cpu()), _with_rest(evicting)
        divergence = max(0.0, float((full * (full / evicting).log()).sum()))
        choice, entropy = int(logits.argmax()), float(torch.special.entr(shares).sum())
        ratio = float(shares[best] / shares[choice])
        return Comparison(choice == best, divergence, choice, ratio, entropy)


def _with_rest(weights: Tensor) -> Tensor:
    """Return the probabilities ``[k]`` and that of all other tokens, fp64 ``[k + 1]``."""
    others = 1 - weights.double().sum(dim=0, keepdim=True)
    return torch.cat([weights.double(), others]).clamp(min=_MIN_PROBABILITY)


class Output:
    """One of the outputs of a request."""

    def __init__(
        self, request: Request, index: int, sampler: Sampler, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.request, self.sampler, self.tokenizer = request, sampler, tokenizer
        self.completion = Completion(index)
        self.tokens = self.completion.token_ids
        skips_special = request.params.skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, request.prompt, skips_special)
        self._text = StopText(request.params.stop, strips_start=False)
        opening = request.opening
        self._thoughts = None if opening is None else Thoughts(opening > 0)
        self.saved: str | None = None  # key of the newest state that decoding has saved
        self.trace: Trace | None = None  # if it will be read again

    @property
    def has_thoughts(self) -> bool:
        """Whether it begins with thoughts, which the next turn's prompt leaves out."""
        return self._thoughts is not None and self._thoughts.may_begin

    @property
    def is_finished(self) -> bool:
        """Whether its last token has been generated."""
        return self.completion.finish_reason is not None

    @property
    def needs_no_host(self) -> bool:
        """Whether its next token follows from the newest one's logits, and only tokens are sent."""
        request = self.request
        reports = request.kept_every is not None or request.params.logprobs is not None
        return not (self.sampler.sees_text or reports or self.trace is not None)

    def append(
        self, token: int, eos: frozenset[int], logprobs: tuple[TokenLogprob, ...]
    ) -> OutputDelta:
        """Append a token; mutates the output and returns its delta."""
        params, text = self.request.params, self._text
        is_last = len(self.tokens) + 1 >= self.request.max_new_tokens
        reason: str | None = "length" if is_last else None
        ended_by: str | int | None = token if token in params.stop_token_ids else None
        if ended_by is not None or (token in eos and not params.ignore_eos):
            reason = "stop"
            piece = ""
        else:
            piece = text.add(self._detokenizer.add([token]))
        if reason is not None:
            piece += self.flush()
        if text.stopped is not None:
            reason, ended_by = "stop", text.stopped
        delta = OutputDelta(self.completion.index, piece, (token,), logprobs, reason, ended_by)
        if self._thoughts is not None:
            was_open = self._thoughts.is_open
            reasoning, piece = self._thoughts.split(piece, reason is not None)
            count = int(was_open or self._thoughts.is_open)
            delta = replace(delta, text=piece, reasoning=reasoning, reasoning_tokens=count)
        self.completion.add(delta)
        return delta

    def flush(self) -> str:
        """Return the text that may still have changed; mutates the output."""
        return self._text.add(self._detokenizer.end()) + self._text.end()


@dataclass(eq=False)
class Request:
    """A prompt, its parameters, and its progress."""

    prompt: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int
    start: PromptStart
    notify: Callable[[Event], None]  # called in the engine's thread
    kept_every: int | None = None  # new tokens between two reports of what the cache holds
    grammar_mask: GrammarMask | None = None  # before the first token, copied for each output
    generator: torch.Generator | None = None  # instead of one with the seed of `params`
    num_prefilled: int = 0
    saves: dict[int, str] = field(default_factory=dict)  # keys of states to save, by their lengths
    outputs: list[Output] = field(default_factory=list)  # once the prompt is prefilled
    logprobs: list[TokenLogprob | None] = field(default_factory=list)  # of the prompt, if requested
    error: RequestFailedError | None = None  # the reason of its failure
    is_over: bool = False
    is_alone: bool = False  # whether its prompt is prefilled by itself
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # of images
    position_offset: int = 0  # of positions on three axes, after images that take fewer
    kind: str = "text"  # or chat, tools, schema
    # Tokens at the prompt's end that begin thoughts, which are not the answer's text; None where
    # answers have no thoughts.
    opening: int | None = None
    is_ahead: bool = False  # whether it only saves a state, for a prompt that is yet to come
    level: int | None = None  # of its budget, if the engine chose it
    verify: bool = False  # whether the client waits for its answer to be read again
    # And gets it after that, or the full cache's if the two differ: one of `verify.REPAIRS`.
    repairs: str | None = None
    is_sampled: bool = False  # whether it is one of those that all are judged by
    verified: VerifiedAnswer | None = None

    @property
    def num_seqs(self) -> int:
        """Number of sequences that it needs."""
        return self.params.n if self.max_new_tokens > 0 else 0

    @property
    def can_batch(self) -> bool:
        """Whether others may be prefilled in the same forward, if all are short enough."""
        special = self.is_alone or self.inputs or self.params.prompt_logprobs is not None
        return not special and self.start == PromptStart(self.start.length)

    @property
    def uses_prefix_cache(self) -> bool:
        """Whether it has the engine's budget, no images, and needs no prompt logits."""
        plain = self.start.budget is None and not self.inputs
        return plain and self.params.prompt_logprobs is None

    @property
    def is_prefilled(self) -> bool:
        """Whether the cache has seen the whole prompt."""
        return self.num_prefilled == len(self.prompt)

    def prompt_read(self) -> PromptRead:
        """Return the properties of the prompt, for the client."""
        logprobs = None if self.params.prompt_logprobs is None else tuple(self.logprobs)
        return PromptRead(self.prompt, self.start.num_reused, logprobs)

    def finish(self) -> None:
        """Send a client what comes after its answer was read again, and the end."""
        for output in self.outputs if self.repairs else ():
            done = output.completion
            prompt = self.prompt_read() if done.index == 0 else None
            fields = {**vars(done), "token_ids": (*done.token_ids,), "logprobs": (*done.logprobs,)}
            self.notify(OutputDelta(**fields, prompt=prompt))
        if self.verified is not None:
            self.notify(OutputDelta(0, "", verified=self.verified))
        self.notify(None)

    def output(self) -> RequestOutput | None:
        """Return its outputs once it is over; ``None`` if it has failed."""
        completions = [output.completion for output in self.outputs]
        if self.max_new_tokens == 0:
            completions = [Completion(n, finish_reason="length") for n in range(self.params.n)]
        if self.error:
            return None
        return RequestOutput(self.prompt_read(), completions, self.verified)
