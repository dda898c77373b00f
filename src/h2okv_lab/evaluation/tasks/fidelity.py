"""How a cache setting changes a model's predictions on the user's own texts."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from h2okv.cache import CACHE, H2OCache
from h2okv.config import CacheConfig
from h2okv.engine.sampler import eos_token_ids
from h2okv.integration.enable import enable, input_device
from h2okv.provenance import digest
from h2okv.records import read_text_file
from h2okv_lab.evaluation.model import ModelUnderTest, make_cache
from h2okv_lab.evaluation.streaming import Conversation, read_conversations
from h2okv_lab.evaluation.task import CacheResults, Configs, Result, Score, Task
from h2okv_lab.shared import SharedPrefill, shares_prompt
from h2okv_lab.tables import Entry, check_minimum, read_jsonl

Protocol = Literal["decode", "block"]
DEFAULT_TEXTS = 8
_FULL = CacheConfig("full")
_MEASURES = ("kl", "agreement", "nll", "full_nll")
_DRAWS = 1000
ALL = "all"


@dataclass(frozen=True)
class Source:
    """A text to cut into windows, or prompts to answer."""

    name: str
    text: str = ""
    prompts: tuple[Any, ...] = ()  # strings, questions or conversations

    @classmethod
    def read(cls, path: Path) -> Source:
        if path.suffix != ".jsonl":
            return cls(path.stem, read_text_file(path))
        records = read_jsonl(path, "an object with prompt, messages or turns")
        if records and all("prompt" in record.fields for record in records):
            return cls(path.stem, prompts=tuple(map(_read_prompt, records)))
        return cls(path.stem, prompts=tuple(map(_last_question, read_conversations(path))))


class _Question(NamedTuple):
    """A prompt with its answer; the context before it is evicted from first."""

    prompt: str
    answer: str
    context: str


def _read_prompt(record: Entry) -> str | _Question:
    if "answer" in record.fields:
        context = record.text("context") if "context" in record.fields else ""
        return _Question(record.text("prompt"), record.text("answer"), context)
    if "context" in record.fields:
        record.refuse("context", "needs an answer; add the field answer")
    return record.text("prompt")


def _last_question(conversation: Conversation) -> Conversation:
    """Return the conversation up to the user's first unanswered message, or the last one."""
    questions = [n for n, message in enumerate(conversation) if message.role == "user"]
    answered = {n - 1 for n, message in enumerate(conversation) if message.role == "assistant"}
    end = next((n for n in questions if n not in answered), questions[-1])
    return conversation[: end + 1]


class _Sample(NamedTuple):
    """One sample: a prompt, and the tokens that follow it if they are known."""

    source: str
    prompt: list[int]
    following: list[int]
    compared: int = 0  # number of last predictions to compare; 0 for all


def _as_input(prompt: str, as_message: bool) -> Any:
    return [{"role": "user", "content": prompt}] if as_message else prompt


@dataclass(eq=False, kw_only=True)
class Fidelity(Task):
    """Compare a setting's predictions with the full cache's on the same text.

    All caches share one forward over the prompt, which predicts the first token; predictions of the
    tokens after it are compared. For a prompt of a JSONL file these are the answer in the file, or
    else the full cache's greedy one. A context is read first, with an eviction.
    """

    name: str = "fidelity"
    sources: Sequence[Source]
    # Tokens of a text that form the prompt; prompts of a JSONL file are used whole.
    prompt_tokens: int = 512
    new_tokens: int = 32  # predictions after the prompt; the maximum length of an answer
    last: int | None = None  # predictions at the end of a text that are compared; None for all
    texts: int | None = None  # per file; None for 8, or all if there are fewer
    # "decode" evicts after each new token, as generation does; "block" reads all new tokens at once
    # on the compressed prompt.
    protocol: Protocol = "decode"
    raw: bool = False  # whether to skip the model's chat template
    metrics = ("agreement", "kl", "perplexity_ratio", "bytes_fraction")

    def __post_init__(self) -> None:
        check_minimum(new_tokens=self.new_tokens, texts=self.texts, last=self.last)
        check_minimum(2, prompt_tokens=self.prompt_tokens)
        if self.last is not None and any(source.prompts for source in self.sources):
            raise ValueError(
                f"--new-tokens {self.new_tokens + 1 - self.last}-{self.new_tokens} is for texts, as"
                f" answers to prompts differ in length; give --new-tokens {self.new_tokens}"
            )
        self._samples: dict[int, _Sample] = {}

    def identity(self) -> Mapping[str, Any]:
        names = ("prompt_tokens", "new_tokens", "protocol", "raw")
        data = digest(repr(list(self.sources)))
        last = {} if self.last is None else {"last": self.last}
        return {"data": data, **{name: getattr(self, name) for name in names}, **last}

    def prepare(self, model: ModelUnderTest, configs: Configs) -> None:
        for index, source in enumerate(self.sources):
            read = self._prompts if source.prompts else self._windows
            for number, sample in enumerate(read(model, source)):
                self._samples[number * len(self.sources) + index] = sample
        lengths = []
        for sample in self._samples.values():
            following = len(sample.following) or self.new_tokens + 1
            lengths.append((len(sample.prompt) + following, f"a text of {sample.source!r}"))
        self.within_window(model, configs, lengths)
        self.samples = sorted(self._samples)

    def _windows(self, model: ModelUnderTest, source: Source) -> list[_Sample]:
        """Cut a text into distant windows; fewer texts are a prefix of more."""
        prompt = self.prompt_tokens
        length = prompt + self.new_tokens + 1
        special = model.encode("")
        bos = special if special == [model.tokenizer.bos_token_id] else []
        ids = model.encode(source.text, special=False)
        starts = list(range(0, len(ids) - length + len(bos) + 1, length))
        num_texts = self.texts or min(DEFAULT_TEXTS, len(starts))
        if len(starts) < max(num_texts, 1):
            fewer = f", or --texts {len(starts)} or fewer" if starts else ""
            raise ValueError(
                f"{source.name!r} has {len(ids)} tokens for this model, enough for {len(starts)}"
                f" texts of {length} (--prompt-tokens, --new-tokens and one to start from); give a"
                f" longer text, or smaller numbers{fewer}"
            )
        random.Random(0).shuffle(starts)
        windows = ([*bos, *ids[start : start + length - len(bos)]] for start in starts[:num_texts])
        last = self.last or 0
        return [_Sample(source.name, window[:prompt], window[prompt:], last) for window in windows]

    def _prompts(self, model: ModelUnderTest, source: Source) -> list[_Sample]:
        """Encode the first prompts, with the chat template if there is one."""
        num_prompts = self.texts or min(DEFAULT_TEXTS, len(source.prompts))
        if num_prompts > len(source.prompts):
            raise ValueError(
                f"{source.name!r} has {len(source.prompts)} prompts; give --texts"
                f" {len(source.prompts)} or fewer"
            )
        as_message = bool(model.tokenizer.chat_template) and not self.raw
        samples = []
        for number, prompt in enumerate(source.prompts[:num_prompts], start=1):
            if isinstance(prompt, _Question):
                sample = self._make_sample(model, source, prompt, as_message)
            elif isinstance(prompt, str):
                sample = _Sample(source.name, model.encode(_as_input(prompt, as_message)), [])
            elif self.raw:
                raise ValueError("--raw takes prompts, not messages; leave it out")
            else:
                messages = [message._asdict() for message in prompt]
                sample = _Sample(source.name, model.encode(messages), [])
            if len(sample.prompt) < 2:
                raise ValueError(f"prompt {number} of {source.name!r} is too short; lengthen it")
            samples.append(sample)
        return samples

    def _make_sample(
        self, model: ModelUnderTest, source: Source, question: _Question, as_message: bool
    ) -> _Sample:
        """Split a question at the end of its context, or before its last token."""
        ids = model.encode(_as_input(question.context + question.prompt, as_message))
        context_ids = ids[:-1]
        if question.context:
            # A token across the border of context and question belongs to the question.
            context_only = model.encode(_as_input(question.context, as_message))
            context_ids = list(os.path.commonprefix([context_ids, context_only]))
        answer = model.encode(question.answer, special=False)
        return _Sample(source.name, context_ids, ids[len(context_ids) :] + answer, len(answer))

    def run(
        self, model: ModelUnderTest, configs: Configs, samples: Sequence[int], seed: int
    ) -> CacheResults:
        for sample in samples:
            caches = [make_cache(config, model.model, seed) for config in (_FULL, *configs)]
            with enable(model.model), torch.no_grad():
                compared = _Comparison(model, caches, self._samples[sample])
                results = compared.run(self.new_tokens, self.protocol)
            for number, result in enumerate(results):
                yield number, {sample: result}

    def scores(self, results: Mapping[int, Result]) -> dict[str, Score]:
        row = self._row(ALL, list(results.values()))
        return {name: Score(row[name]) for name in self.metrics}

    def details(self, results: Mapping[int, Result]) -> list[dict[str, Any]]:
        rows = [self._row(ALL, list(results.values()))]
        for source in self.sources if len(self.sources) > 1 else ():
            selected = [r for n, r in results.items() if self._samples[n].source == source.name]
            rows.append(self._row(source.name, selected))
        return rows

    def _row(self, name: str, results: Sequence[Result]) -> dict[str, Any]:
        """Return means over texts, each with its 95 % bootstrap interval."""
        columns = {field: [result[field] for result in results] for field in results[0]}
        row: dict[str, Any] = {"data": name, "texts": len(results)}
        row["tokens"] = sum(columns["tokens"])
        losses = zip(columns["nll"], columns["full_nll"], strict=True)
        differences = [loss - full for loss, full in losses]
        ratio = [None if value is None else math.exp(value) for value in bootstrap(differences)]
        intervals = {name: bootstrap(columns[name]) for name in ("agreement", "kl")}
        for measure, values in (*intervals.items(), ("perplexity_ratio", ratio)):
            row |= zip((measure, f"{measure}_low", f"{measure}_high"), values, strict=True)
        row["bytes"] = sum(columns["bytes"]) / len(results)
        row["bytes_fraction"] = sum(columns["bytes"]) / sum(columns["full_bytes"])
        return row


class _Comparison:
    """A prompt read by several caches, of which the first is full and the reference."""

    def __init__(self, model: ModelUnderTest, caches: list[H2OCache], sample: _Sample) -> None:
        self.sample = sample
        self.model: Any = model.model
        self.ends = eos_token_ids(self.model)
        self.caches = caches
        sharing = [cache for cache in caches if shares_prompt(cache.cache_config)]
        alone = [cache for cache in caches if cache not in sharing]
        shared = SharedPrefill(sharing)
        prompt = torch.tensor([sample.prompt])
        # What reads a token for some caches, the full one among the first of them.
        self.readers = [(shared, sharing), *((cache, [cache]) for cache in alone)]
        self.first = int(self._forward(prompt, shared, 1)[0, -1].argmax())
        shared.split()
        for cache in alone:
            self._forward(prompt, cache, 1)

    def run(self, max_new_tokens: int, protocol: Protocol) -> list[Result]:
        following = self.sample.following
        measure = self._decode if protocol == "decode" else self._in_one_block
        measured = measure(following, len(following) - 1 if following else max_new_tokens)
        measured = measured[-self.sample.compared :]
        full, *others = self.caches
        return [
            {
                "tokens": len(measured),
                **dict(zip(_MEASURES, means, strict=True)),
                "bytes": cache.nbytes,
                "full_bytes": full.full_nbytes,
            }
            for means, cache in zip(measured.mean(0).tolist()[1:], others, strict=True)
        ]

    def _decode(self, following: Sequence[int], max_new_tokens: int) -> torch.Tensor:
        """Decode token by token, in one batch what can be; `_MEASURES`, fp32 ``[T, caches, 4]``."""
        token, steps = following[0] if following else self.first, []
        order = [cache for _, read in self.readers for cache in read]
        rows = torch.tensor([order.index(cache) for cache in self.caches])
        for step in range(max_new_tokens):
            batches = [(reader, torch.full((len(read), 1), token)) for reader, read in self.readers]
            read = [self._forward(batch, reader, 1)[:, -1] for reader, batch in batches]
            log_probs = torch.cat(read)[rows]
            token = following[step + 1] if following else int(log_probs[0].argmax())
            steps.append(_measure(log_probs[:1], log_probs, torch.tensor(token)))
            if not following and token in self.ends:
                break
        return torch.stack(steps)

    def _in_one_block(self, following: Sequence[int], max_new_tokens: int) -> torch.Tensor:
        """Read all tokens at once, one cache after another; returns the same as `_decode`."""
        tokens = list(following) or self._generate_answer(max_new_tokens)
        block, targets = torch.tensor([tokens[:-1]]), torch.tensor(tokens[1:])
        outputs = (self._forward(block, cache)[0] for cache in self.caches)
        full = next(outputs)
        measured = [_measure(full, log_probs, targets) for log_probs in chain([full], outputs)]
        return torch.stack(measured, dim=1)

    def _generate_answer(self, max_new_tokens: int) -> list[int]:
        """Generate the full cache's own answer on a copy; at least two tokens."""
        cache, tokens = self.caches[0].fork(1), [self.first]
        while len(tokens) <= max_new_tokens and (len(tokens) < 2 or tokens[-1] not in self.ends):
            tokens.append(int(self._forward(torch.tensor([tokens[-1:]]), cache, 1).argmax()))
        return tokens

    def _forward(self, ids: torch.Tensor, cache: H2OCache, keep: int = 0) -> torch.Tensor:
        """Return log-probabilities fp32 ``[B, T, V]``, or of the last token alone; on the CPU."""
        ids = ids.to(input_device(self.model))
        logits = self.model(ids, logits_to_keep=keep, **{CACHE: cache}).logits
        return logits.float().log_softmax(dim=-1).cpu()


def _measure(full: torch.Tensor, log_probs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute `_MEASURES` of log-probabilities ``[N, V]``, fp32; ``full`` may be one row."""
    kl = torch.where(full.isneginf(), 0.0, full.exp() * (full - log_probs)).sum(dim=-1)
    agrees = (log_probs.argmax(dim=-1) == full.argmax(dim=-1)).float()
    index = target.expand(log_probs.shape[0]).unsqueeze(1)
    losses = [-x.expand_as(log_probs).gather(1, index).squeeze(1) for x in (log_probs, full)]
    return torch.stack([kl, agrees, *losses], dim=1)


def bootstrap(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the mean and its 95 % bootstrap interval."""
    numbers = torch.tensor(values, dtype=torch.float64)
    if len(numbers) < 2:
        return float(numbers.mean()), None, None
    seeded, size = torch.Generator().manual_seed(0), len(numbers)
    draws = torch.randint(size, (_DRAWS, size), generator=seeded)
    means = numbers[draws].mean(dim=1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(numbers.mean()), low, high
