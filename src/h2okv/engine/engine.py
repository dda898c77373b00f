"""The engine's loop: schedule, run, sample, report."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2okv.cache import H2OCache
from h2okv.cache.slot_pool import SlotPool, check_poolable
from h2okv.cache.validation import window_by_length
from h2okv.config import Budget
from h2okv.engine.memory import (
    MemoryModel,
    ServingMemory,
    available_bytes,
    data_bytes,
    give_memory_back,
)
from h2okv.engine.model_runner import Done, Worker
from h2okv.engine.outputs import (
    EngineStats,
    Piece,
    PromptTooLongError,
    RequestFailedError,
    TokenLogprob,
)
from h2okv.engine.parallel import Ranks, check_divides
from h2okv.engine.request import Output, Plan, PromptPiece, PromptStart, Request
from h2okv.engine.sampler import Sampler, eos_token_ids, sample, token_logprobs
from h2okv.engine.sampling_params import SamplingParams
from h2okv.engine.scheduler import Scheduler
from h2okv.integration import enable
from h2okv.integration.loading import Described, context_of, describe, load_weights


@dataclass
class _Counters:
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    steps: int = 0
    evictions: int = 0


class Core:
    """Carries requests from their prompt to their last token; not safe to use from two threads."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        scheduler: Scheduler,
        execute: Callable[[Plan], Done],
        recover: Callable[[], None],
        block: Callable[[], SlotPool],
    ) -> None:
        self.scheduler = scheduler
        self._model = model
        self._tokenizer = tokenizer
        self._execute = execute
        self._recover = recover
        self._block = block
        self._ends = eos_token_ids(model)
        self._counters = _Counters()

    def abort(self, request: Request) -> None:
        """Ends a request whose client went away; its rows are free with the next step."""
        if not request.is_over:
            self._counters.aborted += 1
            self.scheduler.drop(request)

    def step(self) -> bool:
        """Does what is next."""
        plan = self.scheduler.plan()
        if plan.is_empty:
            return False
        try:
            self._follow(plan, self._execute(plan))
        except Exception as error:  # whatever it is, others must be served
            self._give_up(error)
            return True
        except BaseException:  # Ctrl-C in the middle of a forward, which leaves rows half written
            self.scheduler.clear()
            self._recover()
            raise
        return True

    def _follow(self, plan: Plan, done: Done) -> None:
        """Does what a plan that was run leads to."""
        self._counters.evictions += done.evictions
        self.scheduler.spent(done.piece_seconds, done.step_seconds)
        if done.decoded is not None:
            self._counters.steps += 1
            self._take(list(self.scheduler.rows), done.decoded)
        if plan.pieces:
            self._after_pieces(plan.pieces, done)

    def stats(self) -> EngineStats:
        """Tells what is going on; may be called from any thread."""
        block, counters, scheduler = self._block(), self._counters, self.scheduler
        return EngineStats(
            rows=scheduler.num_rows,
            rows_in_use=len(scheduler.rows),
            waiting=len(scheduler.waiting),
            **vars(counters),
            cache_bytes=block.held_bytes,
            full_bytes=block.full_bytes,
            reserved_bytes=block.nbytes,
        )

    def _after_pieces(self, pieces: tuple[PromptPiece, ...], done: Done) -> None:
        requests = list(self.scheduler.reading)
        if done.trouble is not None and len(requests) > 1:
            # One of them is at fault; the others shall not suffer for it.
            self.scheduler.read_apart()
            return
        for number, (request, piece) in enumerate(zip(requests, pieces, strict=True)):
            logits = done.read
            if logits is not None and len(requests) > 1:
                logits = logits[number : number + 1]
            if done.trouble is not None:
                self._fail(request, RequestFailedError(done.trouble))
                continue
            try:
                self._after_piece(request, piece, logits)
            except Exception as error:
                self._fail(request, error)

    def _after_piece(
        self, request: Request, piece: PromptPiece, logits: torch.Tensor | None
    ) -> None:
        self._counters.prompt_tokens += len(piece.tokens)
        if request.params.prompt_logprobs is not None and logits is not None:
            self._note_prompt(request, piece, logits)
        if piece.goes_on:
            return
        self._counters.reused_tokens += request.num_reused
        if request.room == 0:
            request.notify(Piece(0, "", finish_reason="length", prompt=request.prompt_read()))
            self._finish(request)
            return
        assert logits is not None
        request.outputs = [
            Output(
                request,
                index,
                Sampler(self._model, request.params, request.prompt, index),
                self._tokenizer,
            )
            for index in range(request.params.n)
        ]
        self._take(request.outputs, logits[-1:].expand(request.params.n, -1))

    def _note_prompt(self, request: Request, piece: PromptPiece, logits: torch.Tensor) -> None:
        """Keeps the log-probabilities of the tokens that a piece's logits are about."""
        if not request.logprobs:
            request.logprobs.append(None)
        following = request.prompt[piece.position + 1 : piece.position + 1 + len(piece.tokens)]
        count = request.params.prompt_logprobs or 0
        request.logprobs.extend(token_logprobs(logits[: len(following)], following, count))

    def _take(self, outputs: list[Output], logits: torch.Tensor) -> None:
        """Chooses a token for each output and hands it on."""
        tokens = sample([own.sampler for own in outputs], [own.tokens for own in outputs], logits)
        for row, (output, token) in enumerate(zip(outputs, tokens, strict=True)):
            request = output.request
            if request.is_over:  # another output of it has just failed
                continue
            try:
                if isinstance(token, Exception):
                    raise token
                self._hand_on(output, token, logits[row : row + 1])
            except Exception as error:  # of this request alone, whatever it is
                self._fail(request, error)

    def _hand_on(self, output: Output, token: int, logits: torch.Tensor) -> None:
        """Gives an output its next token, and the client what comes of it."""
        request = output.request
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.params.logprobs is not None:
            logprobs = tuple(token_logprobs(logits, [token], request.params.logprobs))
        is_first = not any(own.tokens for own in request.outputs)
        piece = output.take(token, self._ends, logprobs)
        if is_first:
            piece = replace(piece, prompt=request.prompt_read())
        self._counters.new_tokens += 1
        request.notify(piece)
        if request.is_finished:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        self._counters.finished += 1
        self.scheduler.drop(request)
        request.notify(None)

    def _fail(self, request: Request, error: Exception) -> None:
        if not isinstance(error, RequestFailedError):
            failed = RequestFailedError(f"{type(error).__name__}: {error}")
            failed.__cause__ = error
            error = failed
        self._counters.failed += 1
        self.scheduler.drop(request)
        request.notify(error)

    def _give_up(self, error: Exception) -> None:
        """A step has failed, and with it all that was under way; those who wait are served."""
        for request in self.scheduler.clear():
            if not request.is_over:
                self._fail(request, error)
        self._recover()


_DEFAULT_PROMPT = 8192
_DEFAULT_ROWS = 64
_FREE_SHARE = 0.8
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How many requests of which size go together, on which cache.

    Attributes:
        heavy: Heavy hitters of a request: tokens (int) or a fraction of its prompt (float).
        recent: Newest tokens, likewise.
        sink: First tokens that are kept whatever their score.
        rows: Requests that generate at the same time; ``None``: as many as `memory` has room for.
        memory: Bytes that the process may take on a CPU, with all that it holds, or that may be
            taken on the GPU, with the weights; ``None``: most of what is free, up to 64 rows.
        max_prompt_tokens: The longest prompt; ``None``: the model's context, up to 8,192. With
            budgets in fractions a row is as large as this prompt needs.
        max_waiting: The most requests that wait for a row; more are refused.
        piece_tokens: The most tokens of a prompt that are read between two steps.
        prompt_share: The largest share of the time that is spent reading prompts while others
            generate: a smaller one makes tokens come more evenly, and first tokens later.
        prefixes: Texts, or their tokens, that many prompts begin with. Each is read once; a prompt
            that begins with one goes on from its compressed cache, with that cache's budget.
        cache: Further options of `H2OCache`: ``policy``, ``scoring``, ``decay``, ``positions``,
            ``prefill_chunk``, ``kv_bits``.
    """

    heavy: int | float = 0.1
    recent: int | float = 0.1
    sink: int = 0
    rows: int | None = None
    memory: int | None = None
    max_prompt_tokens: int | None = None
    max_waiting: int = 256
    piece_tokens: int = 512
    prompt_share: float = 0.8
    prefixes: Sequence[str | Sequence[int]] = ()
    cache: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks what can be checked without a model."""
        for name in ("rows", "memory", "max_prompt_tokens", "piece_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value!r} is out of range; give 1 or more.")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting={self.max_waiting!r} is out of range; give 0 or more.")
        if not 0 < self.prompt_share < 1:
            raise ValueError(
                f"prompt_share={self.prompt_share!r} is no share of the time; give a number "
                "between 0 and 1."
            )


class Engine:
    """A model, its rows and the loop's body; not safe to use from two threads.

    Attributes:
        name: The model's name.
        ranks: The processes that hold the parts; ``None`` if the model is whole.
        core: The loop's body.
        num_rows: Rows.
        row_budget: The most entries that a request may keep.
        max_context: The most tokens of a prompt and its output together; ``None`` for no limit.
            Models whose positions are scaled by the length of the longest text in the batch
            (dynamic scaling, LongRoPE) are held below that length.
        max_prompt_tokens: The most tokens of a prompt.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        settings: EngineSettings | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        in_parts: bool = False,
    ) -> None:
        self.settings = settings or EngineSettings()
        self._stack = ExitStack()
        self._in_parts = in_parts
        described = _describe(model, tokenizer, in_parts)
        self.tokenizer, self.name = tokenizer or described.tokenizer, described.name
        # All that can be refused is, before the weights are loaded.
        self._config, context = described.config, described.context
        probe = self._make_cache(None)
        check_poolable(probe)
        shared = window_by_length(self._config)
        if shared is not None:
            context = min(context or shared, shared)
        self.max_context = None if probe.rule.rolls else context
        self.max_prompt_tokens = self._longest_prompt(context)
        self.row_budget = probe.entries_for(self.max_prompt_tokens)
        self.model = _load(model, described, dtype, device, in_parts)
        self._config = self.model.config
        self.ranks = Ranks() if in_parts else None
        self._stack.enter_context(enable(self.model))
        try:
            self.sizes = self._sizes(probe)
            self.num_rows = self._count_rows()
            self.worker = Worker(
                self.model, self._make_cache, self.num_rows, self.row_budget, in_parts
            )
            self._prefixes = [self._save_prefix(text) for text in self.settings.prefixes]
        except BaseException:
            self._stack.close()
            raise
        scheduler = Scheduler(
            self.num_rows,
            self.worker.piece_tokens(self.settings.piece_tokens),
            self.settings.max_waiting,
            self.settings.prompt_share,
        )
        execute: Callable[[Plan], Done] = self.worker.execute
        recover: Callable[[], None] = self.worker.reset
        if self.ranks is not None:
            execute, recover = self.ranks.leading(execute), self.ranks.give_up
        self.core = Core(
            self.model, self.tokenizer, scheduler, execute, recover, lambda: self.worker.block
        )

    def follow(self) -> None:
        """Runs the plans of the first of several ranks, until it closes or ends a call."""
        assert self.ranks is not None
        self.ranks.follow(self.worker.execute)

    def request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        notify: Callable[[Piece | Exception | None], None],
        budget: Budget | None = None,
    ) -> Request:
        """Makes a request, without submitting it; may be called from any thread."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r} is of another type; give SamplingParams.")
        tokens = self._tokens(prompt)
        self._check_length(len(tokens), params)
        self._check_tokens("logit_bias: the token", params.logit_bias)
        if params.n > self.num_rows:
            raise ValueError(f"n={params.n} is more than the {self.num_rows} rows; ask for less.")
        keeps = self._make_cache(budget).entries_for(len(tokens))
        if keeps > self.row_budget:
            raise ValueError(
                f"the budget of {keeps} entries is larger than a row of {self.row_budget}; lower "
                "heavy, recent or sink."
            )
        prefix = None
        if budget is None and params.prompt_logprobs is None:
            prefix = self._prefix_of(tokens)
        left = math.inf if self.max_context is None else self.max_context - len(tokens)
        wished = math.inf if params.max_tokens is None else params.max_tokens
        own = None if budget is None else (budget.heavy, budget.recent, budget.sink)
        return Request(
            prompt=tokens,
            params=params,
            room=int(min(left, wished, 1 << 40)),
            start=PromptStart(len(tokens), own, prefix),
            num_reused=0 if prefix is None else len(self._prefixes[prefix]),
            notify=notify,
        )

    def describe(self) -> str:
        """Says what is served with which memory, for people."""
        sizes, block = self.sizes, self.worker.block
        dtype = str(self.model.dtype).removeprefix("torch.")
        cache = self._make_cache(None)
        longest = self.max_context or self.max_prompt_tokens
        full = block.full_bytes_of(longest)
        parts = "" if self.ranks is None else f" in {self.ranks.count} parts"
        lines = [
            f"{self.name} in {dtype} on {self.model.device}{parts}, {cache!r}",
            f"{self.num_rows} rows of {self.row_budget} entries (prompts up to "
            f"{self.max_prompt_tokens:,} tokens): {block.nbytes / self.num_rows / _MIB:.2f} MiB "
            f"each, {block.nbytes / _MIB:.1f} MiB together",
            f"beside weights and rows at most {(sizes.prefill + sizes.fixed) / _MIB:.0f} MiB for "
            f"a prompt and {self.num_rows * sizes.step / _MIB:.0f} MiB for a step",
            f"a full cache of {longest:,} tokens would take {full / _MIB:.2f} MiB for each user, "
            f"{full * self.num_rows / block.nbytes:.1f} times as much",
        ]
        if self._prefixes:
            lengths = ", ".join(f"{len(tokens):,}" for tokens in self._prefixes)
            lines.append(f"saved prefixes: {lengths} tokens")
        return "\n".join(lines)

    def close(self) -> None:
        """Gives the model its own attention back."""
        self._stack.close()

    def _make_cache(self, budget: Budget | None) -> H2OCache:
        own = budget or self.settings
        cache = H2OCache(
            self._config,
            heavy=own.heavy,
            recent=own.recent,
            sink=own.sink,
            **self.settings.cache,
        )
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.checks_numbers = not self._in_parts
        return cache

    def _longest_prompt(self, context: int | None) -> int:
        wished = self.settings.max_prompt_tokens
        if self.max_context is None:
            return wished or min(context or _DEFAULT_PROMPT, _DEFAULT_PROMPT)
        # A prompt that fills the context can still be read, for the log-probabilities of its own.
        longest = min(wished or _DEFAULT_PROMPT, self.max_context)
        if wished is not None and wished > longest:
            raise ValueError(
                f"max_prompt_tokens={wished} is more than the model's context of "
                f"{self.max_context}; lower it, or use positions='rolling'."
            )
        return longest

    def _sizes(self, probe: H2OCache) -> ServingMemory:
        return MemoryModel.of(self.model.config, probe, self.model.dtype).serving(
            self.row_budget,
            self.max_prompt_tokens,
            self.settings.piece_tokens,
            1 if self.ranks is None else self.ranks.count,
        )

    def _count_rows(self) -> int:
        if self.settings.rows is not None:
            return self.settings.rows
        device = self.model.device
        if device.type == "cpu":
            give_memory_back()
        available = available_bytes(device) or 0
        if self.settings.memory is None:
            rows = min(self.sizes.num_seqs(int(_FREE_SHARE * available)), _DEFAULT_ROWS)
            taken, promised = 0, int(_FREE_SHARE * available)
        else:
            taken = _taken(device)
            promised = self.settings.memory
            rows = self.sizes.num_seqs(promised - taken)
        if rows < 1:
            least = taken + self.sizes.least
            raise ValueError(
                f"memory of {promised / _MIB:.0f} MiB has no room for a single row; give "
                f"{least / _MIB + 1:.0f} MiB, or lower the budget, the longest prompt or the piece."
            )
        return rows if self.ranks is None else self.ranks.smallest(rows)

    def _tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        try:
            if isinstance(prompt, str):
                prompt = self.tokenizer(prompt, verbose=False)["input_ids"]
            tokens: Any = tuple(prompt)
        except TypeError as error:  # half a character, or nothing that could be read
            raise ValueError(
                f"the prompt cannot be read ({error}); give a text, or tokens of this model."
            ) from error
        self._check_tokens("the prompt: token", tokens)
        return tuple(map(int, tokens))

    def _check_tokens(self, name: str, tokens: Iterable[Any]) -> None:
        """Refuses what is none of the model's tokens."""
        table: Any = self.model.get_input_embeddings().weight
        vocabulary = table.shape[0]
        for token in tokens:
            is_int = isinstance(token, Integral) and not isinstance(token, bool)
            if not is_int or not 0 <= token < vocabulary:
                raise ValueError(
                    f"{name} {reprlib.repr(token)} is not one of the model's {vocabulary}; give "
                    "tokens of this model."
                )

    def _check_length(self, length: int, params: SamplingParams) -> None:
        if length == 0:
            raise ValueError("the prompt has no tokens; give at least one.")
        most = self.max_prompt_tokens
        if self.max_context is not None and params.max_tokens != 0:
            most = min(most, self.max_context - 1)
        if length > most:
            raise PromptTooLongError(
                f"the prompt has {length:,} tokens, and at most {most:,} can be read; shorten it."
            )

    def _save_prefix(self, text: str | Sequence[int]) -> tuple[int, ...]:
        tokens = self._tokens(text)
        if not tokens or len(tokens) >= self.max_prompt_tokens:
            raise ValueError(
                f"a prefix of {len(tokens):,} tokens is none that prompts of up to "
                f"{self.max_prompt_tokens:,} tokens can begin with; give a shorter text."
            )
        self.worker.save_prefix(tokens, self.settings.piece_tokens)
        return tokens

    def _prefix_of(self, tokens: tuple[int, ...]) -> int | None:
        """The longest saved prefix that a prompt begins with and goes on from."""
        fitting = [
            (len(own), number)
            for number, own in enumerate(self._prefixes)
            if len(own) < len(tokens) and tokens[: len(own)] == own
        ]
        return max(fitting)[1] if fitting else None


def _describe(
    model: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, in_parts: bool
) -> Described:
    """What is known of a model without its weights."""
    if isinstance(model, str):
        described = describe(model)
        if in_parts:
            check_divides(described.config)
        return described
    name = str(model.config._name_or_path or model.config.model_type)
    own = tokenizer or describe(name).tokenizer
    return Described(name, name, model.config, own, context_of(model.config))


def _load(
    model: str | PreTrainedModel,
    described: Described,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    in_parts: bool,
) -> PreTrainedModel:
    """The model, loaded if it is not yet."""
    if not isinstance(model, str):
        return model.eval()
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return load_weights(described, dtype, torch.device(where), in_parts)


def _taken(device: torch.device) -> int:
    """Bytes that are taken already of what a promise is about."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return data_bytes() or 0
