"""The engine's loop: schedule, run, sample, report."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from h2okv.budget import Budget
from h2okv.cache import H2OCache
from h2okv.cache.checkpoint import config_identity
from h2okv.cache.linear_states import continues_prompts
from h2okv.cache.validation import parse_pins
from h2okv.calibration.layer_budgets import even_budgets, with_measured_budgets
from h2okv.config import MEASURED
from h2okv.engine.config import EngineConfig
from h2okv.engine.detokenizer import THOUGHTS, THOUGHTS_END
from h2okv.engine.memory import MemoryModel, available_bytes, give_memory_back
from h2okv.engine.model_runner import (
    Mark,
    ModelRunner,
    StepOutput,
    TensorParallelGroup,
    check_divides,
)
from h2okv.engine.outputs import EngineStats, OutputDelta, RequestFailedError
from h2okv.engine.prefix_cache import PrefixCache, PrefixFolder
from h2okv.engine.request import Event, Output, PrefillChunk, PromptStart, Request, ScheduledStep
from h2okv.engine.sampler import Sampler, as_tokens, choose, eos_token_ids, sample, token_logprobs
from h2okv.engine.sampling_params import SamplingParams
from h2okv.engine.scheduler import Scheduler
from h2okv.engine.serving import MemoryShare, config_for, prompt_limits, share_memory
from h2okv.engine.structured import GrammarCompiler
from h2okv.engine.verify import REPAIRS, Verifier, with_budget
from h2okv.integration.enable import enable, input_device
from h2okv.models.loading import Described, context_of, describe, load_weights, parse_device
from h2okv.prompts.chat_template import Pins, check_pinnable, encode, message_spans, reopens_answers
from h2okv.prompts.images import EncodedPrompt
from h2okv.prompts.messages import Conversation
from h2okv.prompts.readers import UNLIMITED, FieldError, integer
from h2okv.provenance import fingerprint
from h2okv.records import refusing

_MIB = 1 << 20
_MOST_ANSWERED = 64  # conversations that wait to be read without thoughts
_MOST_OPENING = 12  # tokens of "<think>" and the blanks behind it


def _describe(
    model: str | PreTrainedModel, tokenizer: Any, config: EngineConfig
) -> tuple[Described, Any]:
    """Describe a model that has a name or is loaded; return its tokenizer too."""
    processor: Any = None
    if hasattr(tokenizer, "image_processor"):
        processor, tokenizer = tokenizer, tokenizer.tokenizer
    if isinstance(model, str):
        described = describe(model)
        if config.tensor_parallel:
            check_divides(described.config)
        return described, tokenizer or described.tokenizer
    if config.weight_bits is not None:
        raise ValueError(
            f"weight_bits={config.weight_bits} is for a model that is loaded here; give its name or"
            " folder, or change yours by h2okv.models.packed_linear.pack_linear_layers(model, 4)."
        )
    kind, name = model.config.model_type, str(model.config._name_or_path or "")
    if tokenizer is None and not name:
        raise ValueError(
            f"this {kind} model has no name, so its tokenizer is unknown; give it, LLM(model,"
            " tokenizer)."
        )
    tokenizer = tokenizer or describe(name).tokenizer
    context = context_of(model.config)
    return Described(name or kind, name, model.config, tokenizer, context, processor), tokenizer


class _Unread(NamedTuple):
    """A decode step whose tokens the host has not read yet."""

    output: StepOutput
    tokens: Tensor  # int64 [B], on the device
    copy: Tensor  # the same on the host, from `copied` on
    copied: Mark


class Engine:
    """A model, its slots and one step of the loop, for one thread; ``group``: the ranks, if any.

    On a GPU the next decode step is launched before the tokens of the last one are read, where
    these cannot make it another step (`Scheduler.next_decode`).
    """

    runs_ahead: bool | None = None  # None: on a GPU
    reads_ahead = False  # whether it reads answers without their thoughts when there is no request
    _unread: _Unread | None = None
    _answered: deque[Request] = deque(maxlen=0)  # those to read without their thoughts

    def __init__(
        self,
        model: str | PreTrainedModel,
        tokenizer: Any = None,  # or a processor with it
        config: EngineConfig | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        described, self.tokenizer = _describe(model, tokenizer, config)
        self.name, self.image_encoder = described.name, described.image_encoder
        # Check everything that can be checked before the weights are loaded.
        cache_config = config.cache
        self._cache_source: PreTrainedConfig | PreTrainedModel = described.config
        if config.tensor_parallel:
            cache_config = even_budgets(cache_config, "each process holds a part of the model")
        self.config = config = replace(config, cache=cache_config.before_measuring)
        probe = self.make_cache(None)
        self.config = config = config_for(self.config, probe)
        self._folder = PrefixFolder.of(config)
        if config.tensor_parallel and probe.cache_config.is_by_head:
            raise ValueError(
                "layer_budgets has a factor for each head, and with tensor parallelism a process"
                " holds some of the heads; give one factor for each layer."
            )
        self._set_limits(probe, described)
        if config.pin:  # refused now if no prompt could have pins
            check_pinnable(config.pin, self.tokenizer)
            longest = self.limits.max_prompt_tokens
            self.make_cache(None).pin([(longest - 1, longest)], longest)
        if isinstance(model, str):
            target = parse_device(str(device or "auto"))
            if config.memory is not None and target.type == "cpu":
                give_memory_back()  # also what loading takes for a while
            load_options = config.tensor_parallel, True, config.weight_bits
            model = load_weights(described, dtype, target, *load_options)
        probe.warn_of_few_entries()
        self.model = model.eval()
        self._cache_source = self.model.config
        if not config.tensor_parallel:  # where a process has a part of the model
            self._cache_source = self.model
        cache = self.config.cache
        if cache_config.layer_budgets == MEASURED:
            cache = with_measured_budgets(cache_config, self.model, described)
        if config.pin:
            cache = cache.with_room_for_pins
        if cache is not self.config.cache:
            self.config = config = replace(config, cache=cache)
            probe = self.make_cache(None)
            self._set_limits(probe, described)
        if config.pin:
            self._most_pinned = probe.most_pinned(self.limits.max_prompt_tokens)
        share = self._open_slots(probe)
        self._open_queue(probe, share)
        self._eos = eos_token_ids(self.model)
        template = str(getattr(self.tokenizer, "chat_template", None))
        self._thinks = THOUGHTS_END in template
        if config.caches_prefixes and self._thinks and reopens_answers(self.tokenizer):
            self._answered = deque(maxlen=min(_MOST_ANSWERED, config.max_waiting))
        self._grammars = GrammarCompiler(self.tokenizer, described.vocab_size, self._eos)

    def _open_slots(self, probe: H2OCache) -> MemoryShare:
        """Divide the memory, and let the runner allocate its part; mutates the engine."""
        config = self.config
        self.group = TensorParallelGroup() if config.tensor_parallel else None
        ranks = 1 if self.group is None else self.group.world_size
        self.memory = MemoryModel(self.model.config, probe, self.model.dtype).serving(
            self.max_budgets, self.limits.max_prompt_tokens, config.max_prefill_tokens, ranks,
            self.image_encoder.reads_images,
        )  # fmt: skip
        share = share_memory(config, self.memory, input_device(self.model))
        self.max_num_seqs = share.num_seqs
        if self.group is not None and config.max_num_seqs is None:
            self.max_num_seqs = self.group.smallest(share.num_seqs)
        with ExitStack() as stack:
            stack.enter_context(enable(self.model))
            # On a GPU, late allocations fragment memory; a given limit must hold from the start.
            grows = config.memory is None and input_device(self.model).type == "cpu"
            longest = self.limits.max_prompt_tokens
            self.runner = ModelRunner(
                self.model, self.make_cache, self.max_num_seqs, self.max_budgets, self.group, grows,
                probe.layer_entries_for(longest, max),
            )  # fmt: skip
            if self._folder is not None:
                stack.callback(self._folder.close)
            self.close = stack.pop_all().close  # gives the model its own attention back
        return share

    def _open_queue(self, probe: H2OCache, share: MemoryShare) -> None:
        """Set up what requests pass: scheduler, saved states, verifier; mutates the engine."""
        config = self.config
        chunk_tokens = self.runner.chunk_tokens(config.max_prefill_tokens)
        self.prefix_cache: PrefixCache | None = None
        if self.config.caches_prefixes:
            span = self.config.cache.span
            identity = self._state_identity()
            self.prefix_cache = PrefixCache(span, share.states, identity, self._load_state)
        if self._folder is not None:
            self._folder.trim()
        self.scheduler = Scheduler(config, self.max_num_seqs, chunk_tokens, self.prefix_cache)
        self._full_room = share.verify
        self._counters = EngineStats()
        chunk = config.max_prefill_tokens if continues_prompts(probe) else UNLIMITED
        self.verifier = Verifier(config, self.runner, chunk, self._full_tokens, self._counters)
        self._execute = self.runner.execute

    def step(self) -> bool:
        """Schedule, run, sample and report one step; return whether there was work to do.

        Without requests, finished answers are read again: without thoughts, or with a full cache.
        """
        try:
            if self._unread is not None and self._read_behind(self._unread):
                self.verifier.step_late()
                return True
            step = self.scheduler.schedule()
            if step == ScheduledStep():
                return self._read_ahead() or self.verifier.step()
            self._after_step(step, self._execute(step))
        except BaseException as error:
            self._unread = None
            for request in self.scheduler.clear():
                if isinstance(error, Exception) and not request.is_over:
                    self._end(request, error)
            self.runner.reset()  # its slots are half written
            if not isinstance(error, Exception):  # Ctrl-C in the middle of a forward
                raise
        self.verifier.step_late()
        return True

    def _after_step(self, step: ScheduledStep, output: StepOutput) -> None:
        """Sample and report what a step has computed, or leave it on the device."""
        self._add_states(step, output)
        self._counters.evictions += output.evictions
        if output.decode_logits is not None:
            self._counters.steps += 1
            if self._can_wait(step):
                self._unread = self._choose(output)
                return
            self._sample(
                list(self.scheduler.running), output.decode_logits[:, 0], range(len(step.decode))
            )
        if step.prefill:
            self._after_prefill(step.prefill, output)
        self.scheduler.record_time(output.seconds("prefill"), output.seconds("decode"))

    def _can_wait(self, step: ScheduledStep) -> bool:
        """Tell whether the tokens of a step may be read after the next one is launched."""
        runs_ahead = self.runs_ahead
        if runs_ahead is None:
            runs_ahead = input_device(self.model).type == "cuda"
        if not runs_ahead or step.prefill or self.group is not None:
            return False
        return all(output.needs_no_host for output in self.scheduler.running)

    def _choose(self, output: StepOutput) -> _Unread:
        """Choose the tokens behind a step on the device, and begin to copy them to the host."""
        assert output.decode_logits is not None
        samplers = [each.sampler for each in self.scheduler.running]
        tokens = choose(samplers, output.decode_logits[:, 0])
        copy = tokens.to("cpu", non_blocking=True)
        return _Unread(output, tokens, copy, Mark(tokens.device))

    def _read_behind(self, unread: _Unread) -> bool:
        """Read the tokens of a step, after the next one is launched; return whether one is."""
        self._unread = None
        if (step := self.scheduler.next_decode()) is not None:
            # A row without a token ends with the one before; whatever it reads goes nowhere.
            newest = unread.tokens.clamp(min=0).unsqueeze(1)
            output = self._execute(step, newest)
            self._counters.evictions += output.evictions
            self._counters.steps += 1
            self._unread = self._choose(output)
        unread.copied.wait()
        running, logits = list(self.scheduler.running), unread.output.decode_logits
        assert logits is not None
        tokens = as_tokens(unread.copy.tolist())
        self._report_all(running, tokens, logits[:, 0], range(len(running)))
        self.scheduler.record_time(0.0, unread.output.seconds("decode"))
        return step is not None

    def _read_ahead(self) -> bool:
        """Read an answer without its thoughts, for the next turn; return whether one was left."""
        if not self._answered:
            return False
        request = self._answered.pop()
        answer, start = request.outputs[0].completion, request.start
        before = request.prompt[: len(request.prompt) - (request.opening or 0)]
        tokens = (*before, *encode(self.tokenizer, answer.text, special=False))
        length = min(len(tokens), self.limits.max_prompt_tokens) - 1
        tokens = tokens[: length - length % self.config.cache.span + 1]
        # A first turn may be the only one.
        if answer.reasoning and start.state and len(tokens) > len(before):
            ahead = replace(
                request, prompt=tokens, start=PromptStart(len(tokens), pins=start.pins), saves={},
                max_new_tokens=0, outputs=[], num_prefilled=0, notify=lambda event: None,
                opening=0, is_over=False, is_ahead=True,
            )  # fmt: skip
            self.scheduler.waiting.append(ahead)
        return True

    @property
    def has_clients(self) -> bool:
        """Whether anyone waits for an answer, or for its figures."""
        return self.scheduler.has_work or self.verifier.has_clients

    def _full_tokens(self) -> int:
        """Return how many tokens a full cache has room for now."""
        free = self._full_room
        if self.config.memory is None:
            available = available_bytes(input_device(self.model))
            if available is None:
                return UNLIMITED
            free = available // 2
        return free // self.memory.full_token

    def _add_states(self, step: ScheduledStep, output: StepOutput) -> None:
        """Note the states that a step has saved, and what is to be dropped for them."""
        cache, folder = self.prefix_cache, self._folder
        if cache is None:
            return
        saved = [chunk.save for chunk in step.prefill if chunk.save and output.error is None]
        for key in (*saved, *(key for _, key in step.save)):
            self._add_state(key)
            if folder is not None and key in cache:
                folder.write(key, self.runner.states[key])
        for row, key in step.save:
            # A conversation continues from the end of its answer.
            answer = self.scheduler.running[row]
            if answer.saved is not None and cache.remove(answer.saved):
                self.scheduler.dropped_states.append(answer.saved)
                if folder is not None:
                    folder.remove(answer.saved)
            answer.saved = key

    def _add_state(self, key: str) -> None:
        assert self.prefix_cache is not None
        dropped = self.prefix_cache.add(key, self.runner.states[key].nbytes)
        self.scheduler.dropped_states += dropped
        if self._folder is not None:
            for other in dropped:
                self._folder.forget(other)

    def _load_state(self, key: str, length: int) -> bool:
        """Bring a state back from its file; return whether there was one."""
        if self._folder is None:
            return False
        state = self._folder.read(key, length, self.model, self.make_cache(None))
        if state is None:
            return False
        self.runner.pool.adopt(state)
        self.runner.states[key] = state
        self._add_state(key)
        return self.prefix_cache is not None and key in self.prefix_cache

    def _after_prefill(self, chunks: tuple[PrefillChunk, ...], output: StepOutput) -> None:
        requests = list(self.scheduler.prefilling)
        requests[0].position_offset = output.position_offset  # images are read alone
        if output.error is None:
            for request, chunk, logits in zip(requests, chunks, output.prefill_logits, strict=True):
                try:
                    self._after_chunk(request, chunk, logits)
                except Exception as error:
                    self._end(request, error)
        elif len(requests) == 1:
            self._end(requests[0], output.error)
        else:  # one of them is at fault; the others are retried one by one
            self.scheduler.split_prefill_batch()

    def _after_chunk(self, request: Request, chunk: PrefillChunk, logits: Any) -> None:
        """Record a chunk's log-probabilities, and start the outputs after the last chunk."""
        if request.is_ahead:
            request.is_over = chunk.is_last
            return
        self._counters.prompt_tokens += len(chunk.tokens)
        count = request.params.prompt_logprobs
        if count is not None:
            if not request.logprobs:
                request.logprobs.append(None)
            first = chunk.position + 1
            next_tokens = request.prompt[first : first + len(chunk.tokens)]
            request.logprobs.extend(token_logprobs(logits[: len(next_tokens)], next_tokens, count))
        if not chunk.is_last:
            return
        self._counters.reused_tokens += request.start.num_reused
        if (state := request.start.state) is not None:
            self._counters.prefix_hits += 1
            if self._folder is not None:
                self._folder.touch(state)
        if request.max_new_tokens == 0:
            request.notify(OutputDelta(0, "", finish_reason="length", prompt=request.prompt_read()))
            self._end(request)
            return
        for index in range(request.params.n):
            token_mask = request.grammar_mask and request.grammar_mask.copy()
            sampler = Sampler(self.model, request.params, request.prompt, index, token_mask)
            sampler.generator = request.generator or sampler.generator
            request.outputs.append(Output(request, index, sampler, self.tokenizer))
        self.verifier.begin(request, self._counters.prompt_tokens + self._counters.new_tokens)
        logits = logits[-1:].expand(request.params.n, -1)
        self._sample(request.outputs, logits)

    def _sample(
        self, outputs: list[Output], logits: torch.Tensor, rows: Sequence[int] = ()
    ) -> None:
        """Choose a token for each output, whose rows of the pool are given, and report it."""
        tokens = sample(
            [output.sampler for output in outputs], [output.tokens for output in outputs], logits
        )
        self._report_all(outputs, tokens, logits, rows)

    def _report_all(
        self,
        outputs: Sequence[Output],
        tokens: Sequence[int | Exception],
        logits: Tensor,
        rows: Sequence[int],
    ) -> None:
        """Report a token for each output that has not ended; end requests with an error."""
        for index, (output, token) in enumerate(zip(outputs, tokens, strict=True)):
            if output.request.is_over or output.is_finished:  # its request has just failed, or it
                continue  # ended when this step had begun
            try:
                if isinstance(token, Exception):
                    raise token
                row = rows[index] if rows else None
                self._report(output, token, logits[index : index + 1], row)
            except Exception as error:  # any error fails this request alone
                self._end(output.request, error)

    def _report(self, output: Output, token: int, logits: torch.Tensor, row: int | None) -> None:
        """Append a token to an output and send the delta to the client."""
        request, count = output.request, output.request.params.logprobs
        if output.trace is not None:
            output.trace.add(output.sampler.processed(logits, output.tokens))
        logprobs = () if count is None else tuple(token_logprobs(logits, [token], count))
        is_first = not any(sibling.tokens for sibling in request.outputs)
        delta = output.append(token, self._eos, logprobs)
        if is_first:
            delta = replace(delta, prompt=request.prompt_read())
        if request.kept_every is not None and row is not None:
            num_new = len(output.tokens) - 1  # the newest is not in the cache yet
            if delta.finish_reason or (num_new - 1) % request.kept_every == 0:
                kept_tokens = self.runner.kept_tokens(row, len(request.prompt) + num_new)
                delta = replace(delta, kept=kept_tokens)
        self._counters.new_tokens += 1
        if not request.repairs:  # else the answer may be replaced
            request.notify(delta)
        if all(sibling.is_finished for sibling in request.outputs):
            self._end(request)

    def _end(self, request: Request, error: Exception | None = None) -> None:
        """End a request, successfully or with its error."""
        if error is None:
            self._counters.finished += 1
            if self.reads_ahead and len(request.outputs) == 1 and request.uses_prefix_cache:
                self._answered.append(request)
        else:
            self._counters.failed += not request.is_ahead
            if not isinstance(error, RequestFailedError):
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                cause, error = error, RequestFailedError(f"{kind}{error}")
                error.__cause__ = cause
            request.error = error
        self.scheduler.drop(request)
        if error is None and self.verifier.end(request):
            return  # its client gets the figures first
        request.verify = False
        request.notify(error)

    def abort(self, request: Request) -> None:
        """End a request whose client went away; its slots are free with the next step."""
        self.verifier.cancel(request)
        if not request.is_over:
            self._counters.aborted += 1
            self.scheduler.drop(request)

    def stats(self) -> EngineStats:
        """Return counters and the present memory of the cache; may be called from any thread."""
        pool = self.runner.pool
        states = {} if self.prefix_cache is None else self.prefix_cache.stats()
        if (folder := self._folder) is not None:
            states |= {
                "prefix_disk_states": len(folder),
                "prefix_disk_bytes": folder.num_bytes,
                "prefix_disk_hits": folder.num_hits,
            }
        return replace(
            self._counters,
            **states,
            max_num_seqs=self.max_num_seqs,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            cache_bytes=pool.held_bytes,
            full_bytes=pool.full_bytes,
            reserved_bytes=pool.nbytes,
            verify_waiting=self.verifier.num_waiting,
        )

    def describe(self) -> str:
        """Describe the model, its slots and its memory, in lines for people."""
        memory, pool, num_seqs = self.memory, self.runner.pool, self.max_num_seqs
        dtype = str(self.model.dtype).removeprefix("torch.")
        if self.config.weight_bits is not None:
            dtype += f" and {self.config.weight_bits}-bit weights"
        longest = self.limits.max_context or self.limits.max_prompt_tokens
        full, states = pool.full_bytes_of(longest), pool.linear_bytes
        # Beside states, which both hold.
        sequence = pool.sequence_bytes
        break_even = (sequence - states) / (pool.full_bytes_of(1) - states)
        is_allocated = pool.nbytes == num_seqs * sequence
        allocated = "together" if is_allocated else "at most, allocated as requests come"
        shards = "" if self.group is None else f" in {self.group.world_size} parts"
        device = input_device(self.model)
        lines = [
            f"{self.name} in {dtype} on {device}{shards}, {self.config.cache.policy_label}:"
            f" {self.make_cache(None)!r}",
            f"{num_seqs} sequences of {self.max_budget:,} entries (prompts up to "
            f"{self.limits.max_prompt_tokens:,} tokens): {sequence / _MIB:.2f} MiB "
            f"each, {num_seqs * sequence / _MIB:.1f} MiB {allocated}",
            f"beside weights and slots at most {memory.prefill / _MIB:.0f} MiB "
            f"for prefill and {num_seqs * memory.step / _MIB:.0f} MiB for a decode step",
            f"a full cache of {longest:,} tokens would take {full / _MIB:.2f} MiB for each user, "
            f"{full / sequence:.1f} times as much; slots save memory from "
            f"{math.floor(break_even) + 1:,} tokens on",
        ]
        return "\n".join([*lines, *self._remarks()])

    def _remarks(self) -> Iterator[str]:
        """Yield the lines of `describe` on what only some engines have."""
        minimum = self.config.cache.min_tokens
        if minimum and self.config.cache.budget.is_relative:
            yield f"short prompts keep at least {minimum} heavy and {minimum} recent entries"
        if self.prefix_cache is not None:
            limit = self.prefix_cache.max_bytes / _MIB
            yield f"states of prompts and answers: up to {limit:.0f} MiB, for later prompts"
        if self._folder is not None:
            yield f"prefix cache folder: {self._folder}"
        if self.config.pin:
            pinned = ", ".join(self.config.pin)
            room = f"{self._most_pinned:,} tokens at most"
            yield f"never evicted: {pinned} of each chat that has them, {room}"
        if self.config.verify:
            yield (
                f"verify: {100 * self.config.verify:g} % of all tokens are read again with a full"
                f" cache, answers of up to {self._full_tokens():,} tokens with their prompts"
            )
        if self.config.agreement:
            budget, goal = self.config.cache.budget_label, 100 * self.config.agreement
            yield (
                f"agreement: budgets of new requests below {budget} while {goal:g} % of the next"
                " tokens are the full cache's"
                + (", without saved states" if self.prefix_cache is not None else "")
            )
        if self.image_encoder.reads_images:
            try:
                yield f"images: {type(self.image_encoder.processor()).__name__}"
            except ValueError as error:
                yield f"images: off; {error}"

    def request(
        self,
        prompt: Any,
        params: SamplingParams,
        notify: Callable[[Event], None],
        budget: Budget | int | float | str | None = None,
        kept_every: int | None = None,
        pins: Pins = (),
        verify: bool | str = False,
        kind: str = "text",
    ) -> Request:
        """Validate and create a request without submitting it; may be called from any thread.

        The prompt is a text, tokens, an `EncodedPrompt`, or a mapping of a text with ``images``.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {params!r}.")
        if kept_every is not None:
            integer(1)(kept_every, ("kept_every",))
        read = self._read(prompt)
        tokens, inputs, pins = read.token_ids, read.inputs, parse_pins(pins or read.pins)
        max_tokens = UNLIMITED if params.max_tokens is None else params.max_tokens
        self.limits.check_length(len(tokens), min(1, max_tokens))
        self.limits.check_tokens(params.logit_bias, "logit_bias")
        if params.n > (seqs := self.max_num_seqs):
            raise FieldError(("n",), f"={params.n} is more than max_num_seqs={seqs}; ask for less")
        grammar, level = params.grammar, None
        if grammar is not None and kind != "tools":
            kind = "schema"
        thinks = self._thinks and kind != "text"
        if thinks and THOUGHTS_END in getattr(self.tokenizer, "all_special_tokens", ()):
            params = replace(params, skip_special_tokens=False)  # their text would be missing
        if verify:
            self._check_verify(verify, inputs, params.n, kept_every)
        if budget is not None:
            budget = self.config.cache.request_budget(budget)
        self._check_room(budget, pins, len(tokens))
        if budget is None and not pins:
            level, budget = self.verifier.budget(kind)
        return Request(
            prompt=tokens,
            params=params,
            max_new_tokens=self.limits.room(len(tokens), max_tokens),
            start=PromptStart(len(tokens), budget, pins=pins),
            notify=notify,
            kept_every=kept_every,
            grammar_mask=None if grammar is None else self._grammars.compile(grammar),
            inputs=inputs,
            kind=kind,
            opening=self._opening(tokens, grammar is None) if thinks else None,
            level=level,
            verify=bool(verify),
            repairs=verify if isinstance(verify, str) else None,
        )

    def _check_room(self, budget: Budget | None, pins: Pins, length: int) -> None:
        """Raise ValueError if slots have no room for a prompt's budget, or the budget for pins."""
        cache = self.make_cache(budget)
        if budget is not None:
            cache.warn_of_few_entries()
        cache.pin(pins, length)
        for keeps, room in zip(cache.layer_entries_for(length), self.max_budgets, strict=True):
            if keeps > room:
                raise ValueError(
                    f"the budget of {keeps:g} entries is larger than the {room:g} that a sequence"
                    " has slots for; lower heavy, recent or sink."
                )

    def _check_verify(
        self, verify: bool | str, inputs: Mapping[str, Any], n: int, kept_every: int | None
    ) -> None:
        """Raise ValueError if an answer cannot be read again, or repaired."""
        if verify is not True and verify not in REPAIRS[1:]:
            choices = " or ".join(map(repr, REPAIRS[1:]))
            raise ValueError(f"verify must be true, false, {choices}, got {verify!r}.")
        problem = ""
        if verify in REPAIRS and (n > 1 or kept_every is not None):
            problem = f"one answer is repaired; give n=1, kept_every=None, got {n=}, {kept_every=}"
        elif inputs:
            problem = "a prompt with images is not read again"
        elif self.group is not None:
            problem = "answers are read again in one process, and here are several"
        elif self.config.memory is not None and not self.config.verify:
            problem = "no part of memory is for a full cache; start with verify=0.02 (--verify 2%)"
        if problem:
            raise ValueError(f"verify={verify!r}: {problem}; or leave it out.")

    def _opening(self, tokens: Sequence[int], may_think: bool) -> int:
        """Return how many tokens at the end of a prompt begin thoughts; 0 if none do."""
        for count in range(1, _MOST_OPENING + 1) if may_think else ():
            if str(self.tokenizer.decode(list(tokens[-count:]))).strip() == THOUGHTS:
                return count
        return 0

    def encode(self, chat: Conversation) -> EncodedPrompt:
        """Encode a conversation up to its answer, with its images and the config's pins."""
        pins = message_spans(self.tokenizer, chat, self.config.pin, needs_all=False)
        if chat.images:
            return self.image_encoder.encode(chat)
        return EncodedPrompt(tuple(encode(self.tokenizer, chat)), pins=pins)

    def _read(self, prompt: Any) -> EncodedPrompt:
        if isinstance(prompt, Mapping):
            prompt = self.image_encoder.encode_fields(prompt)
        remedy = "give a text, or tokens of this model."
        inputs: Mapping[str, Any] = {}
        pins: Pins = ()
        with refusing("the prompt cannot be read", remedy, TypeError):  # such as half a character
            if isinstance(prompt, EncodedPrompt):
                prompt, inputs, pins = prompt.token_ids, prompt.inputs, prompt.pins
            if isinstance(prompt, str):
                prompt = encode(self.tokenizer, prompt)
            tokens: Any = tuple(prompt)
        self.limits.check_tokens(tokens)
        return EncodedPrompt(tuple(map(int, tokens)), inputs, pins)

    def _state_identity(self) -> dict[str, Any]:
        """Return what a state depends on besides the tokens that it has read."""
        return {
            "cache": self.config.cache.identity(),
            "dtype": str(self.model.dtype),
            "model": config_identity(self.model.config),
            # Within one process there is one model.
            "weights": None if self._folder is None else fingerprint(self.model),
            "weight_bits": self.config.weight_bits,
        }

    def make_cache(self, budget: Budget | None) -> H2OCache:
        """Return an empty cache, with the budget of a request if that has one."""
        config = with_budget(self.config.cache, budget)
        cache = H2OCache.from_config(self._cache_source, config)
        if self.config.tensor_parallel:
            cache.allow_non_finite()
        return cache

    def _set_limits(self, probe: H2OCache, described: Described) -> None:
        """Set the maximum lengths of prompts and texts, and of the entries of a sequence."""
        self.limits = prompt_limits(self.config, described)
        self.max_budget = probe.entries_for(self.limits.max_prompt_tokens)
        self.max_budgets = probe.layer_entries_for(self.limits.max_prompt_tokens)
