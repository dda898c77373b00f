"""What a cache setting changes of what the model says, on the user's own texts."""

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

from h2okv.cache import H2OCache
from h2okv.cache.argument import CACHE
from h2okv.config import CacheConfig
from h2okv.console import check_least
from h2okv.engine.sampler import eos_token_ids
from h2okv.evaluation.model import ModelUnderTest, make_cache
from h2okv.evaluation.shared_prefill import SharedPrefill
from h2okv.evaluation.stream_data import Conversation, read_conversations
from h2okv.evaluation.task import Configs, Found, Result, Score, Task
from h2okv.integration.enable import enable
from h2okv.provenance import digest
from h2okv.records import Record, read_jsonl, read_text_file

Protocol = Literal["decode", "block"]
DEFAULT_TEXTS = 8
_FULL = CacheConfig("full")
_MEASURES = ("kl", "agreement", "nll", "full_nll")
_DRAWS = 1000
ALL = "all"


@dataclass(frozen=True)
class Source:
    """A text that is cut into windows, or prompts that the model answers."""

    name: str
    text: str = ""
    prompts: tuple[Any, ...] = ()  # strings, questions or conversations

    @classmethod
    def read(cls, path: Path) -> Source:
        if path.suffix != ".jsonl":
            return cls(path.stem, read_text_file(path))
        records = read_jsonl(path, "an object with prompt, messages or turns")
        if records and all("prompt" in record.fields for record in records):
            return cls(path.stem, prompts=tuple(map(_to_ask, records)))
        return cls(path.stem, prompts=tuple(map(_to_answer, read_conversations(path))))


class _Question(NamedTuple):
    """A prompt with its answer, asked behind a context that was evicted from before."""

    prompt: str
    answer: str
    context: str


def _to_ask(record: Record) -> str | _Question:
    if "answer" in record.fields:
        context = record.text("context") if "context" in record.fields else ""
        return _Question(record.text("prompt"), record.text("answer"), context)
    if "context" in record.fields:
        record.refuse("context", "needs an answer; add the field answer")
    return record.text("prompt")


def _to_answer(conversation: Conversation) -> Conversation:
    """The conversation up to the first message of the user that has no answer, or the last one."""
    asked = [n for n, message in enumerate(conversation) if message.role == "user"]
    answered = {n - 1 for n, message in enumerate(conversation) if message.role == "assistant"}
    end = next((n for n in asked if n not in answered), asked[-1])
    return conversation[: end + 1]


class _Sample(NamedTuple):
    """What one sample reads: a prompt, and the tokens after it if they are given."""

    source: str
    prompt: list[int]
    following: list[int]
    compared: int = 0  # predictions of the last tokens that follow; 0 for all


def _asked(prompt: str, as_message: bool) -> Any:
    return [{"role": "user", "content": prompt}] if as_message else prompt


@dataclass(eq=False, kw_only=True)
class Fidelity(Task):
    """Compares a setting's predictions with the full cache's, token by token, on the same text.

    The prompt is read once for all, and so predicts the first token alike; those that follow are
    compared. After a prompt of a JSONL file they are the answer given there, or else the full
    cache's own greedy one. A context beside them is read and evicted from before the prompt.
    """

    name: str = "fidelity"
    sources: Sequence[Source]
    # Tokens of a text that are read at once and evicted from; of a JSONL file's prompts all are.
    prompt_tokens: int = 512
    new_tokens: int = 32  # after them, each of which predicts the next; the most of an answer
    texts: int | None = None  # of each file; None for 8, or all of fewer
    # "decode" evicts after each new token, as when text is generated; "block" reads them all on
    # what the prompt left.
    protocol: Protocol = "decode"
    raw: bool = False  # whether prompts go without the model's chat template
    metrics = ("agreement", "kl", "perplexity_ratio", "bytes_fraction")

    def __post_init__(self) -> None:
        check_least(new_tokens=self.new_tokens, texts=self.texts)
        check_least(2, prompt_tokens=self.prompt_tokens)
        self._samples: dict[int, _Sample] = {}

    def identity(self) -> Mapping[str, Any]:
        names = ("prompt_tokens", "new_tokens", "protocol", "raw")
        data = digest(repr(list(self.sources)))
        return {"data": data, **{name: getattr(self, name) for name in names}}

    def prepare(self, model: ModelUnderTest, configs: Configs) -> None:
        for place, source in enumerate(self.sources):
            found = self._prompts(model, source) if source.prompts else self._cut(model, source)
            for number, sample in enumerate(found):
                self._samples[number * len(self.sources) + place] = sample
        lengths = []
        for own in self._samples.values():
            following = len(own.following) or self.new_tokens + 1
            lengths.append((len(own.prompt) + following, f"a text of {own.source!r}"))
        self.within_window(model, configs, lengths)
        self.samples = sorted(self._samples)

    def _cut(self, model: ModelUnderTest, source: Source) -> list[_Sample]:
        """Windows of a text, far from each other, and the same ones first if more are wanted."""
        prompt = self.prompt_tokens
        length = prompt + self.new_tokens + 1
        special = model.encode("")
        start = special if special == [model.tokenizer.bos_token_id] else []
        ids = model.encode(source.text, special=False)
        places = list(range(0, len(ids) - length + len(start) + 1, length))
        wanted = self.texts or min(DEFAULT_TEXTS, len(places))
        if len(places) < max(wanted, 1):
            raise ValueError(
                f"{source.name!r} has {len(ids)} tokens for this model, which are {len(places)}"
                f" texts of {length} (--prompt-tokens, --new-tokens and one to start from); give a"
                " longer text, smaller numbers, or fewer --texts"
            )
        random.Random(0).shuffle(places)
        windows = ([*start, *ids[at : at + length - len(start)]] for at in places[:wanted])
        return [_Sample(source.name, own[:prompt], own[prompt:]) for own in windows]

    def _prompts(self, model: ModelUnderTest, source: Source) -> list[_Sample]:
        """The first prompts, in the form that the model knows."""
        wanted = self.texts or min(DEFAULT_TEXTS, len(source.prompts))
        if wanted > len(source.prompts):
            raise ValueError(
                f"{source.name!r} has {len(source.prompts)} prompts; give --texts"
                f" {len(source.prompts)} or fewer"
            )
        as_message = bool(model.tokenizer.chat_template) and not self.raw
        found = []
        for number, prompt in enumerate(source.prompts[:wanted], start=1):
            if isinstance(prompt, _Question):
                sample = self._ask(model, source, prompt, as_message)
            elif isinstance(prompt, str):
                sample = _Sample(source.name, model.encode(_asked(prompt, as_message)), [])
            elif self.raw:
                raise ValueError("--raw takes prompts, not messages; leave it out")
            else:
                said = [message._asdict() for message in prompt]
                sample = _Sample(source.name, model.encode(said), [])
            if len(sample.prompt) < 2:
                raise ValueError(f"prompt {number} of {source.name!r} is too short; lengthen it")
            found.append(sample)
        return found

    def _ask(
        self, model: ModelUnderTest, source: Source, question: _Question, as_message: bool
    ) -> _Sample:
        """Cut a question behind its context, or before its last token, which predicts."""
        ids = model.encode(_asked(question.context + question.prompt, as_message))
        read = ids[:-1]
        if question.context:
            # A token that holds the end of the one and the start of the other is the question's.
            alone = model.encode(_asked(question.context, as_message))
            read = list(os.path.commonprefix([read, alone]))
        answer = model.encode(question.answer, special=False)
        return _Sample(source.name, read, ids[len(read) :] + answer, len(answer))

    def run(
        self, model: ModelUnderTest, configs: Configs, samples: Sequence[int], seed: int
    ) -> Found:
        for sample in samples:
            caches = [make_cache(own, model.config, seed) for own in (_FULL, *configs)]
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
            own = [r for n, r in results.items() if self._samples[n].source == source.name]
            rows.append(self._row(source.name, own))
        return rows

    def _row(self, name: str, results: Sequence[Result]) -> dict[str, Any]:
        """Means over texts, each with the interval that holds 95 % of bootstrap means."""
        of = {field: [result[field] for result in results] for field in results[0]}
        row: dict[str, Any] = {"data": name, "texts": len(results), "tokens": sum(of["tokens"])}
        loss = [own - full for own, full in zip(of["nll"], of["full_nll"], strict=True)]
        ratio = [None if value is None else math.exp(value) for value in bootstrap(loss)]
        found = {name: bootstrap(of[name]) for name in ("agreement", "kl")}
        for measure, values in (*found.items(), ("perplexity_ratio", ratio)):
            row |= zip((measure, f"{measure}_low", f"{measure}_high"), values, strict=True)
        row["bytes"] = sum(of["bytes"]) / len(results)
        row["bytes_fraction"] = sum(of["bytes"]) / sum(of["full_bytes"])
        return row


class _Comparison:
    """A prompt that the full cache, the first one, has read with those compared with it."""

    def __init__(self, model: ModelUnderTest, caches: list[H2OCache], sample: _Sample) -> None:
        self.sample = sample
        self.model: Any = model.model
        self.ends = eos_token_ids(self.model)
        self.caches, self.shared = caches, SharedPrefill(caches)
        first = self._forward(torch.tensor([sample.prompt]), self.shared, 1)
        self.first = int(first[0, -1].argmax())
        self.shared.split()

    def run(self, most: int, protocol: Protocol) -> list[Result]:
        following = self.sample.following
        how = self._decode if protocol == "decode" else self._in_one_block
        measured = how(following, len(following) - 1 if following else most)
        measured = measured[-self.sample.compared :]
        full, *others = self.caches
        return [
            {
                "tokens": len(measured),
                **dict(zip(_MEASURES, own, strict=True)),
                "bytes": cache.nbytes,
                "full_bytes": full.full_nbytes,
            }
            for own, cache in zip(measured.mean(0).tolist()[1:], others, strict=True)
        ]

    def _decode(self, following: Sequence[int], most: int) -> torch.Tensor:
        """Token by token, all caches in one batch; `_MEASURES`, fp32 ``[T, caches, 4]``."""
        token, steps = following[0] if following else self.first, []
        for step in range(most):
            batch = torch.full((len(self.caches), 1), token)
            log_probs = self._forward(batch, self.shared, 1)[:, -1]
            token = following[step + 1] if following else int(log_probs[0].argmax())
            steps.append(_measure(log_probs[:1], log_probs, torch.tensor(token)))
            if not following and token in self.ends:
                break
        return torch.stack(steps)

    def _in_one_block(self, following: Sequence[int], most: int) -> torch.Tensor:
        """All tokens at once, one cache after another; the same."""
        tokens = list(following) or self._answer(most)
        block, targets = torch.tensor([tokens[:-1]]), torch.tensor(tokens[1:])
        said = (self._forward(block, cache)[0] for cache in self.caches)
        full = next(said)
        return torch.stack([_measure(full, own, targets) for own in chain([full], said)], dim=1)

    def _answer(self, most: int) -> list[int]:
        """The full cache's own answer, on a copy; at least two tokens."""
        cache, tokens = self.caches[0].fork(1), [self.first]
        while len(tokens) <= most and (len(tokens) < 2 or tokens[-1] not in self.ends):
            tokens.append(int(self._forward(torch.tensor([tokens[-1:]]), cache, 1).argmax()))
        return tokens

    def _forward(self, ids: torch.Tensor, cache: H2OCache, keep: int = 0) -> torch.Tensor:
        """Log-probabilities fp32 ``[B, T, V]``, or of the last token alone; on the CPU."""
        ids = ids.to(self.model.device)
        logits = self.model(ids, logits_to_keep=keep, **{CACHE: cache}).logits
        return logits.float().log_softmax(dim=-1).cpu()


def _measure(full: torch.Tensor, own: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`_MEASURES` of log-probabilities ``[N, V]``, fp32 ``[N, 4]``; ``full`` may be one row."""
    kl = torch.where(full.isneginf(), 0.0, full.exp() * (full - own)).sum(dim=-1)
    agrees = (own.argmax(dim=-1) == full.argmax(dim=-1)).float()
    index = target.expand(own.shape[0]).unsqueeze(1)
    losses = [-part.expand_as(own).gather(1, index).squeeze(1) for part in (own, full)]
    return torch.stack([kl, agrees, *losses], dim=1)


def bootstrap(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The mean, and the interval that holds 95 % of the means of samples drawn again."""
    numbers = torch.tensor(values, dtype=torch.float64)
    if len(numbers) < 2:
        return float(numbers.mean()), None, None
    draws = torch.randint(
        len(numbers), (_DRAWS, len(numbers)), generator=torch.Generator().manual_seed(0)
    )
    means = numbers[draws].mean(dim=1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(numbers.mean()), low, high
