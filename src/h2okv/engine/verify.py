"""Reads finished answers again with the full cache, and compares the next tokens.

Compared at each token of an answer is the most likely next token after all tokens before it as they
were written: of the model with its evicting cache, when the answer was written, and of the same
model with the full cache, in one teacher-forced pass. Both are taken after what the request itself
demands (penalties, biases, a grammar) and before temperature and sampling, so that a sampled answer
is judged like a greedy one, and a token that a schema forces agrees. The divergence is that of the
full cache's distribution from the other over its 16 most likely tokens and all others as one: at
most the one over the whole vocabulary.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean

from transformers import DynamicCache

from h2okv.budget import Budget
from h2okv.config import CacheConfig
from h2okv.console import warn
from h2okv.engine.agreement import FACTORS, AgreementLog, AgreementReport, BudgetLevels
from h2okv.engine.config import EngineConfig
from h2okv.engine.detokenizer import TokenText
from h2okv.engine.model_runner import ModelRunner
from h2okv.engine.outputs import EngineStats, VerifiedAnswer
from h2okv.engine.request import Comparison, Output, Request, Trace

MOST_WAITING = 64
"""Answers that wait to be read again; while there are as many, no further one is sampled."""
_PATIENCE, _BUSY_SHARE = 10.0, 0.1
"""Seconds that an answer waits for an idle engine; then it takes this share of the time."""
REPAIRS = (None, "repair", "repair_all")
"""Values of ``verify`` by which the full cache writes an answer again that differs: where it may be
wrong, or always."""
_FIRST, _TIE = 32, 0.9
"""Tokens that decide on a repair, and the share of the full cache's choice that is nearly a tie."""
_SURE, _NATS = 16, 1.5
"""Tokens of an answer of which the full cache is sure, if their mean entropy is less."""
Repair = tuple[Callable[[], bool], Request]
"""Takes a step of the request that writes an answer again, and that request."""


@dataclass(eq=False)
class _Check:
    """An answer that is read again, and how far that has come."""

    output: Output
    trace: Trace
    is_sampled: bool  # False: only its client wants to know
    since: float
    room: int = 0  # tokens of a full cache, and of the answer that are compared; once it is read
    num_compared: int = 0
    position: int = 0
    cache: DynamicCache | None = None
    compared: list[Comparison] = field(default_factory=list)
    note: str = ""
    is_read: bool = False
    again: Repair | None = None

    @property
    def request(self) -> Request:
        return self.output.request

    @property
    def differs(self) -> bool:
        """Whether one of the first tokens is not the full cache's, and may be wrong; no near tie.

        It may be in an answer with figures, if the full cache would write a number (or the space
        before it), and if it is sure of the answer as a whole. Other texts go on in many ways, and
        only "repair_all" takes what differs for wrong.
        """
        first, answer = self.compared[:_FIRST], self.output.tokens[:_FIRST]
        lost = [token.choice for token in first if token.ratio < _TIE]
        if not lost or self.request.repairs == REPAIRS[-1]:
            return bool(lost)
        data = TokenText(self.output.tokenizer).data
        choices = [*map(data, lost)]
        has_figures = re.search(rb"\d", b"".join([*choices, *map(data, answer)])) is not None
        entropies = [token.entropy for token in first[:_SURE]]
        return has_figures or b" " in choices or fmean(entropies) < _NATS


class Verifier:
    """Samples answers, and reads them again in chunks while the engine has nothing else to do.

    Args:
        config: The engine's; its `verify` is the share of all tokens read and written that may be
            read again.
        runner: Runs the model.
        chunk_tokens: Tokens of one forward, after which other work comes first.
        max_tokens: Returns how many tokens a full cache has room for.
        counters: Those of the engine; mutated.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        chunk_tokens: int,
        max_tokens: Callable[[], int],
        counters: EngineStats,
    ) -> None:
        self._config, self._runner, self._counters = config, runner, counters
        self._chunk_tokens, self._max_tokens = chunk_tokens, max_tokens
        self.again: Callable[[Request, DynamicCache], Repair]  # by the full cache that has read it
        self.log = AgreementLog()
        self.levels = None if config.agreement is None else BudgetLevels(config.agreement)
        self.warn = warn  # a command writes a line instead
        self._warned: frozenset[str] = frozenset()
        self._random = random.Random(0)
        self._waiting: list[_Check] = []
        self._current: _Check | None = None
        self._spent = 0  # tokens of sampled answers and their prompts
        self._chunk_seconds = self._last_end = 0.0

    @property
    def num_waiting(self) -> int:
        """Number of answers that are still to be read again."""
        return len(self._waiting)

    def report(self) -> AgreementReport:
        """Return how often the next token was the same; may be called from any thread."""
        missed = () if self.levels is None else tuple(sorted(self.levels.missed))
        verify, goal = self._config.verify, self._config.agreement
        return AgreementReport(verify, goal, self.log.total(), self.log.rows(), missed)

    @property
    def has_clients(self) -> bool:
        """Whether a client waits for its figures."""
        return any(check.request.verify for check in self._waiting)

    def budget(self, kind: str) -> tuple[int | None, Budget | None]:
        """Return the level of a new request, and its budget; ``None`` for the engine's."""
        if self.levels is None:
            return None, None
        level = self.levels.level(kind)
        return level, scaled(self._config.cache.budget, FACTORS[level]) if level else None

    def begin(self, request: Request, num_tokens: int) -> None:
        """Decide by all tokens so far whether an answer will be read again; mutates its output."""
        # Twice the share while less than the share has been spent: the choice depends on what came
        # before, and never on the request.
        share = self._config.verify
        may_spend = share == 1 or self._spent <= share * num_tokens
        may_wait = self.num_waiting < MOST_WAITING and not request.inputs
        request.is_sampled = may_spend and may_wait and self._random.random() < 2 * share
        if request.is_sampled:
            self._spent += len(request.prompt)
        if request.is_sampled or request.verify:
            request.outputs[0].trace = Trace()

    def end(self, request: Request) -> bool:
        """Take a finished answer; return whether its client waits until it was read again."""
        num_written = sum(len(output.tokens) for output in request.outputs)
        self.log.write(self._label(request), request.kind, num_written)
        trace = request.outputs[0].trace if request.outputs else None
        if trace is None:
            return False
        trace.end()
        check = _Check(request.outputs[0], trace, request.is_sampled, time.monotonic())
        if request.is_sampled:
            self._spent += len(check.output.tokens)
        self._waiting.append(check)
        return request.verify

    def cancel(self, request: Request) -> None:
        """Note that a client went away: its answer is read again only if it was sampled."""
        request.verify = False
        self._waiting = [c for c in self._waiting if c.is_sampled or c.request is not request]
        if self._current not in self._waiting:
            self._current = None

    def clear(self) -> list[Request]:
        """Forget all answers; return the requests whose clients wait."""
        checks, self._waiting, self._current = self._waiting, [], None
        return [check.request for check in checks if check.request.verify]

    def step(self) -> bool:
        """Read one chunk of an answer again; return whether there was one."""
        check = self._current or self._next()
        if check is None:
            return False
        begin, self._current, is_over = time.monotonic(), check, True
        try:
            is_over = self._advance(check)
        except Exception as error:  # such as no memory; the answer itself is complete
            done = "repaired" if check.is_read else "compared"
            check.note = f"it was not {done}: {type(error).__name__}: {error}"
            check.compared, check.again = check.compared if check.is_read else [], None
        finally:  # Ctrl-C in the middle of a forward too
            if is_over:
                self._waiting.remove(check)
                self._current = None
        if is_over:
            self._report(check)
        self._last_end = time.monotonic()
        self._chunk_seconds = self._last_end - begin
        return True

    def step_late(self) -> None:
        """Read a chunk although requests run, if an answer has waited for long."""
        if not self._waiting or time.monotonic() - self._waiting[0].since < _PATIENCE:
            return
        pause = self._chunk_seconds * (1 / _BUSY_SHARE - 1)
        if time.monotonic() - self._last_end >= pause:
            self.step()

    def _next(self) -> _Check | None:
        """Begin to read the next answer: of a client that waits, else the oldest."""
        if not self._waiting:
            return None
        check = min(self._waiting, key=lambda check: not check.request.verify)
        num_tokens, length = len(check.trace.best), len(check.request.prompt)
        room = check.room = self._max_tokens()
        check.num_compared = max(0, min(num_tokens, room - length + 1))
        if check.num_compared < num_tokens:
            check.note = (
                f"compared {check.num_compared} of {num_tokens} tokens: there is room for a full"
                f" cache of {room:,} tokens, and prompt and answer have {length + num_tokens:,}"
            )
        return check

    def _read_chunk(self, check: _Check) -> bool:
        """Read the next tokens of a text and compare; return whether the answer is done."""
        if not check.num_compared:
            return True
        if check.cache is None:
            check.cache = self._runner.full_cache()
        request, answer = check.request, check.output.tokens
        text = [*request.prompt, *answer[: check.num_compared - 1]]
        start, before = check.position, len(request.prompt) - 1
        end = check.position = min(start + self._chunk_tokens, len(text))
        self._counters.verified_tokens += end - start
        first = max(start, before)
        logits = self._runner.read(text[start:end], start, check.cache, max(1, end - first))[0]
        for number in range(first - before, end - before):
            row = number - (first - before)
            processed = check.output.sampler.processed(logits[row : row + 1], answer[:number])
            check.compared.append(check.trace.compare(number, processed))
        return end == len(text)

    def _advance(self, check: _Check) -> bool:
        """Read a chunk, or take a step of a repair; return whether the check is over."""
        if check.again is not None:
            return self._repair(check, *check.again)
        check.is_read = self._read_chunk(check)
        is_asked = check.is_read and check.request.repairs and check.request.verify
        if is_asked and check.cache is not None and check.differs:
            check.again = self.again(check.request, check.cache)
        return check.is_read and check.again is None

    def _repair(self, check: _Check, step: Callable[[], bool], again: Request) -> bool:
        """Take a step of writing an answer again; return whether that is over."""
        num_tokens = len(again.prompt) + sum(len(output.tokens) for output in again.outputs)
        if not check.request.verify:  # its client went away
            check.again = None
        elif num_tokens > check.room + 1:  # the newest is not in the cache
            check.again = None
            check.note = (
                f"it was not repaired: there is room for a full cache of {check.room:,} tokens, and"
                " prompt and second answer have more"
            )
        elif not again.is_over:
            step()
            return False
        elif again.error is not None:
            raise again.error
        return True

    def _report(self, check: _Check) -> None:
        """Note the figures of an answer, and send them to its client."""
        request, count = check.request, len(check.compared)
        agreed = sum(token.agrees for token in check.compared)
        differs = (number for number, token in enumerate(check.compared) if not token.agrees)
        self._counters.verified += count > 0
        self._counters.verify_failed += count == 0
        check.cache = None
        request.verified = VerifiedAnswer(
            tokens=count,
            agreed=agreed,
            first_difference=next(differs, None),
            kl_divergence=sum(token.divergence for token in check.compared) / max(1, count),
            note=check.note,
        )
        if check.is_sampled and count:
            self.log.add(self._label(request), request.kind, count, agreed)
            if self.levels is not None and request.level is not None:
                self.levels.add(request.kind, request.level, count, agreed)
                self._warn(request.kind)
        if check.again is not None:
            request.outputs, start = check.again[1].outputs, check.again[1].start
            count = len(request.outputs[0].tokens)
            cost = start.length - start.num_reused + count
            request.verified = VerifiedAnswer(count, count, repaired=True, repair_tokens=cost)
            self._counters.repaired += 1
            self._counters.repair_tokens += cost
        check.again = None
        if request.verify:
            request.verify = False
            request.finish()

    def _warn(self, kind: str) -> None:
        assert self.levels is not None
        missed = self.levels.missed
        if kind in missed and kind not in self._warned:
            self.warn(
                f"agreement={self.levels.goal:g} does not hold for requests of kind {kind!r} with"
                f" the largest budget, {self._config.cache.budget_label}; give a larger budget."
            )
        self._warned = missed

    def _label(self, request: Request) -> str:
        return with_budget(self._config.cache, request.start.budget).budget_label


def with_budget(cache: CacheConfig, budget: Budget | None) -> CacheConfig:
    """Return an engine's cache with the budget of a request, if that has one."""
    if budget is None:
        return cache
    fields = ("heavy", "recent", "sink", "min_tokens", "grows")
    return replace(cache, **{name: getattr(budget, name) for name in fields})


def scaled(budget: Budget, factor: float) -> Budget:
    """Return a budget with a multiple of its heavy hitters and recent tokens."""
    heavy, recent = (
        amount * factor if isinstance(amount, float) else round(max(amount * factor, amount > 0))
        for amount in (budget.heavy, budget.recent)
    )
    return replace(budget, heavy=heavy, recent=recent)
