"""Who answers in the serving benchmark; see serving_child.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer

import h2okv
from h2okv.assets import bundled_model_path
from h2okv.benchmarking.serving_client import LoadRequest, Mix, Outcome

Arrived = Callable[[tuple[int, int]], None]
"""Told of every token: whose prompt, and which output."""

PAGE = 256
"""Tokens of a block of transformers' paged cache: its own default."""


class EngineTarget:
    """h2okv's engine."""

    def __init__(self, model: Any, setting: dict[str, Any]) -> None:
        tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
        longest = setting["mix"]["context"][1]
        half = setting["half"] or longest + Mix(**setting["mix"]).most_new_tokens
        self.llm = h2okv.AsyncLLM(
            model, tokenizer, heavy=half, recent=half, max_num_seqs=setting["clients"],
            max_prompt_tokens=longest,
        )  # fmt: skip

    async def send(self, request: LoadRequest, due: float, outcomes: list[Outcome]) -> None:
        """See `h2okv.benchmarking.serving_client.Target`."""
        outcome = Outcome(due, time.perf_counter(), token_ids=[])
        outcomes.append(outcome)
        params = h2okv.SamplingParams(max_tokens=request.max_tokens, temperature=0, ignore_eos=True)
        async for piece in self.llm.generate(request.prompt, params):
            if piece.token_ids:
                outcome.arrivals.append(time.perf_counter())
                outcome.token_ids.extend(piece.token_ids)
        finish(outcome, request)

    async def stream(self, request: LoadRequest, copies: int, arrived: Arrived) -> None:
        """Reads a prompt once and goes on from it in so many outputs, until it is cancelled."""
        params = h2okv.SamplingParams(
            max_tokens=request.max_tokens, temperature=0, ignore_eos=True, n=copies
        )
        async for piece in self.llm.generate(request.prompt, params):
            for _ in piece.token_ids:
                arrived((request.number, piece.index))

    async def close(self) -> dict[str, Any]:
        """Stops; tells the bytes of a row."""
        stats = self.llm.stats()
        told = {
            "user_bytes": stats.reserved_bytes / stats.max_num_seqs,
            "max_budget": self.llm.max_budget,
        }  # fmt: skip
        await self.llm.aclose()
        return told


class PagedTarget:
    """transformers' continuous batching with its full, paged cache."""

    def __init__(self, model: Any, setting: dict[str, Any], requests: list[LoadRequest]) -> None:
        # When only steps are timed, answers are cut off; a user's has the length it would have.
        new = [setting["answer"] or own.max_tokens for own in requests]
        self.blocks = [
            -(-(len(own.prompt) + count) // PAGE) for own, count in zip(requests, new, strict=True)
        ]
        # Room for the largest that can be under way at once, and the tenth that it keeps free.
        most = sum(sorted(self.blocks)[-setting["clients"] :])
        copies = setting["copies"]
        config = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=copies * most * 5 // 4 + 2, allow_block_sharing=False,
            max_batch_tokens=setting["batch_tokens"],
            max_requests_per_batch=setting["at_once"] or setting["clients"],
        )  # fmt: skip
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        # Refused together with greedy decoding when it is given above.
        generation.num_return_sequences = copies
        self.manager = model.init_continuous_batching(generation, config)
        self.manager.start()

    async def send(self, request: LoadRequest, due: float, outcomes: list[Outcome]) -> None:
        """See `h2okv.benchmarking.serving_client.Target`."""
        outcome = Outcome(due, time.perf_counter(), token_ids=[])
        outcomes.append(outcome)
        over = asyncio.get_running_loop().create_future()

        def take(output: Any) -> None:
            if len(output.generated_tokens) > len(outcome.token_ids):
                outcome.arrivals.append(time.perf_counter())
                outcome.token_ids = list(output.generated_tokens)
            if output.is_finished() and not over.done():
                over.set_result(output.error)

        name = f"request-{len(outcomes)}-{request.number}"
        self.manager.register_result_handler(name, take)
        self._add(request, name)
        error = await over
        if error is not None:
            raise RuntimeError(error)
        finish(outcome, request)

    def _add(self, request: LoadRequest, name: str) -> None:
        taken = self.manager.add_request(
            list(request.prompt), name, max_new_tokens=request.max_tokens, streaming=True
        )
        if taken is None:
            raise RuntimeError(f"it stopped: {self.manager.background_thread_status.fatal_error}")

    async def stream(self, request: LoadRequest, copies: int, arrived: Arrived) -> None:
        """Reads a prompt once and goes on from it in so many outputs, until it is cancelled."""
        name = f"request-{request.number}"
        names = [name, *(f"{name}__child#{number}" for number in range(copies - 1))]
        over = asyncio.get_running_loop().create_future()

        def take(number: int, output: Any) -> None:
            if output.error is None:
                arrived((request.number, number))
            elif not over.done():
                over.set_exception(RuntimeError(output.error))

        for number, own in enumerate(names):
            self.manager.register_result_handler(own, partial(take, number))
        self._add(request, name)
        try:
            await over
        finally:
            for own in names:
                self.manager.cancel_request(own)

    async def close(self) -> dict[str, Any]:
        """Stops; tells the bytes that a request's blocks take, when it ends."""
        cache = self.manager.batch_processor.cache
        (allocator,) = cache.cache_allocators.values()
        told = {
            "user_bytes": allocator.bytes_per_block * sum(self.blocks) / len(self.blocks),
            "block_bytes": allocator.bytes_per_block,
            "blocks": self.blocks,
        }
        await asyncio.to_thread(self.manager.stop)
        return told


class SequentialTarget:
    """`generate`, one request after another."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.turn = asyncio.Lock()

    async def send(self, request: LoadRequest, due: float, outcomes: list[Outcome]) -> None:
        """See `h2okv.benchmarking.serving_client.Target`."""
        outcome = Outcome(due, time.perf_counter(), token_ids=[])
        outcomes.append(outcome)
        async with self.turn:
            await asyncio.to_thread(self._generate, request, outcome)
        finish(outcome, request)

    def _generate(self, request: LoadRequest, outcome: Outcome) -> None:
        class Streamer(BaseStreamer):
            """Notes when tokens come; the first call brings the prompt."""

            def put(self, value: torch.Tensor) -> None:
                """Takes tokens."""
                if value.dim() < 2:
                    outcome.arrivals.append(time.perf_counter())
                    outcome.token_ids.extend(value.tolist())

            def end(self) -> None:
                """Does nothing."""

        self.model.generate(
            torch.tensor([request.prompt]), max_new_tokens=request.max_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0, streamer=Streamer(),
        )  # fmt: skip

    async def close(self) -> dict[str, Any]:
        """Has nothing to tell."""
        return {}


def finish(outcome: Outcome, request: LoadRequest) -> None:
    """Notes the end of an answer, which must be as long as was asked for."""
    outcome.ended = time.perf_counter()
    outcome.prompt_tokens, outcome.new_tokens = len(request.prompt), len(outcome.token_ids)
    if outcome.new_tokens != request.max_tokens:
        raise RuntimeError(f"{outcome.new_tokens} tokens came, not {request.max_tokens}")
