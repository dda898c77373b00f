"""The loop's body: plan, run the model, choose tokens, tell the clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2okv.cache.row_block import RowBlock
from h2okv.engine.processors import end_tokens
from h2okv.engine.serving.errors import RequestFailedError
from h2okv.engine.serving.outputs import Piece, TokenLogprob
from h2okv.engine.serving.plan import Plan, PromptPiece
from h2okv.engine.serving.request import Output, Request
from h2okv.engine.serving.sampler import RowSampler, choose, logprobs_of
from h2okv.engine.serving.scheduler import Scheduler
from h2okv.engine.serving.stats import EngineStats
from h2okv.engine.serving.worker import Done


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
    """Carries requests from their prompt to their last token; not safe to use from two threads.

    Args:
        model: Its generation config says which tokens end a text; unchanged.
        tokenizer: Of the model.
        scheduler: Whose turn it is; mutated.
        execute: Runs a plan on the model, or on all parts of it.
        recover: Empties all rows after an error.
        block: The rows, to be looked at.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        scheduler: Scheduler,
        execute: Callable[[Plan], Done],
        recover: Callable[[], None],
        block: Callable[[], RowBlock],
    ) -> None:
        self.scheduler = scheduler
        self._model = model
        self._tokenizer = tokenizer
        self._execute = execute
        self._recover = recover
        self._block = block
        self._ends = end_tokens(model)
        self._counters = _Counters()

    def abort(self, request: Request) -> None:
        """Ends a request whose client went away; its rows are free with the next step.

        Args:
            request: Submitted; nothing happens if it is over.
        """
        if not request.is_over:
            self._counters.aborted += 1
            self.scheduler.drop(request)

    def step(self) -> bool:
        """Does what is next.

        Returns:
            False if there was nothing to do.
        """
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
                RowSampler(self._model, request.params, request.prompt, index),
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
        request.logprobs.extend(logprobs_of(logits[: len(following)], following, count))

    def _take(self, outputs: list[Output], logits: torch.Tensor) -> None:
        """Chooses a token for each output and hands it on."""
        tokens = choose([own.sampler for own in outputs], [own.tokens for own in outputs], logits)
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
            logprobs = tuple(logprobs_of(logits, [token], request.params.logprobs))
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
