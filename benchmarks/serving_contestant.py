"""One run of the serving benchmark, in a process of its own: a setting on stdin, JSON out.

Started by serving.py. The contestants answer the same requests, sent by the same clients
(`h2okv.benchmarking.load`), all in this process and without HTTP:

- h2okv: `h2okv.AsyncLLM`.
- transformers: its `ContinuousBatchingManager`, with SDPA, which is what `transformers serve
  --continuous-batching` runs on a CPU; prefixes are not shared, and no prompt begins as another.
- sequential: `generate`, one request after another.

With "steps" in the setting only steps are timed, all users under way: few prompts are read, each
goes on in several outputs of its own, and the tokens count that come from when the last user has
its first one until each has got so many more.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.generation.streamers import BaseStreamer

import h2okv
from h2okv.assets import bundled_model_path, sample_prompt
from h2okv.benchmarking.load.loops import closed_loop
from h2okv.benchmarking.load.outcome import LoadRequest, Outcome
from h2okv.benchmarking.load.summary import summarize
from h2okv.benchmarking.load.workload import Mix

Arrived = Callable[[tuple[int, int]], None]
"""Told of every token: whose prompt, and which output."""

PAGE = 256
"""Tokens of a block of transformers' paged cache: its own default."""


def load_model(setting: dict[str, Any]) -> Any:
    """The bundled model in fp32, or random weights of a shape."""
    if setting["model"] == "bundled":
        return AutoModelForCausalLM.from_pretrained(
            bundled_model_path(), dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
    torch.manual_seed(0)
    config = LlamaConfig(
        **setting["shape"], bos_token_id=None, eos_token_id=None, pad_token_id=None,
        attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def make_requests(setting: dict[str, Any], vocabulary: int) -> list[LoadRequest]:
    """Prompts as tokens, the same for every contestant: real text, or random tokens."""
    mix = Mix(**setting["mix"])
    text = AutoTokenizer.from_pretrained(bundled_model_path())(sample_prompt(), verbose=False)
    requests = []
    for number in range(setting["requests"]):
        length, new_tokens, source = mix.draw(number)
        assert length is not None
        if setting["model"] == "bundled":
            start = source.randrange(len(text["input_ids"]))
            turned = text["input_ids"][start:] + text["input_ids"][:start]
            prompt = turned[:length]
        else:
            prompt = [source.randrange(3, vocabulary) for _ in range(length)]
        requests.append(LoadRequest(number, tuple(prompt), new_tokens))
    return requests


class EngineTarget:
    """h2okv's engine."""

    def __init__(self, model: Any, setting: dict[str, Any]) -> None:
        tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
        longest = setting["mix"]["context"][1]
        half = setting["half"] or longest + Mix(**setting["mix"]).most_new_tokens
        self.llm = h2okv.AsyncLLM(
            model, tokenizer, heavy=half, recent=half, rows=setting["clients"],
            max_prompt_tokens=longest,
        )  # fmt: skip

    async def send(self, request: LoadRequest, due: float, outcomes: list[Outcome]) -> None:
        """See `h2okv.benchmarking.load.loops.Target`."""
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
        """Stops; tells the bytes of a row, and of the entries of the longest prompt."""
        block = self.llm.engine.worker.block
        told = {
            "user_bytes": block.nbytes / self.llm.engine.num_rows,
            "row_budget": self.llm.row_budget,
            "reading_bytes": self.llm.max_prompt_tokens * block.token_bytes,
        }
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
        """See `h2okv.benchmarking.load.loops.Target`."""
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
        self.manager.add_request(
            list(request.prompt), name, max_new_tokens=request.max_tokens, streaming=True
        )
        error = await over
        if error is not None:
            raise RuntimeError(error)
        finish(outcome, request)

    async def stream(self, request: LoadRequest, copies: int, arrived: Arrived) -> None:
        """Reads a prompt once and goes on from it in so many outputs, until it is cancelled."""
        name = f"request-{request.number}"
        names = [name, *(f"{name}__child#{number}" for number in range(copies - 1))]

        def take(number: int, output: Any) -> None:
            if output.error is not None:
                raise RuntimeError(output.error)
            arrived((request.number, number))

        for number, own in enumerate(names):
            self.manager.register_result_handler(own, partial(take, number))
        self.manager.add_request(
            list(request.prompt), name, max_new_tokens=request.max_tokens, streaming=True
        )
        try:
            await asyncio.get_running_loop().create_future()
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
        """See `h2okv.benchmarking.load.loops.Target`."""
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


def memory(name: str) -> int:
    """Bytes of this process: VmRSS, resident now, or VmHWM, the most so far."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this system does not report {name}")


async def run_decode(setting: dict[str, Any]) -> dict[str, Any]:
    """Times steps with all users under way."""
    model = load_model(setting)
    low, high = setting["mix"]["context"]
    source = random.Random(1)
    requests = []
    for number in range(setting["requests"]):
        length = low + (high - low) * number // max(1, setting["requests"] - 1)
        prompt = tuple(source.randrange(3, model.config.vocab_size) for _ in range(length))
        # More than will come: the answers are cut off when enough was timed.
        requests.append(LoadRequest(number, prompt, setting["most"]))
    loaded = memory("VmRSS")
    target: Any
    if setting["kind"] == "h2okv":
        target = EngineTarget(model, setting)
    else:
        target = PagedTarget(model, setting, requests)
    users: dict[tuple[int, int], list[float]] = {}
    copies, enough = setting["copies"], asyncio.Event()
    number_of_users = copies * len(requests)

    def arrived(user: tuple[int, int]) -> None:
        times = users.setdefault(user, [])
        times.append(time.perf_counter())
        if len(users) == number_of_users:
            begin = max(own[0] for own in users.values())
            enough_came = all(
                sum(at > begin for at in own) > setting["steps"] for own in users.values()
            )
            if enough_came:
                enough.set()

    tasks = [asyncio.create_task(target.stream(own, copies, arrived)) for own in requests]
    waiting = asyncio.create_task(enough.wait())
    await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    end = time.perf_counter()
    if not enough.is_set():
        await asyncio.gather(*tasks)
        raise RuntimeError("an answer ended before enough tokens had come; give more new tokens")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    begin = max(own[0] for own in users.values())
    outcomes = []
    for own in users.values():
        times = [at for at in own if begin < at <= end]
        outcomes.append(Outcome(begin, begin, times, times[-1], new_tokens=len(times)))
    summary = summarize(outcomes)
    told = await target.close()
    return {
        **summary.cells(), **told, "beside_model_bytes": memory("VmHWM") - loaded, "tokens": None,
    }  # fmt: skip


async def run(setting: dict[str, Any]) -> dict[str, Any]:
    """Runs one contestant under one load."""
    model = load_model(setting)
    requests = make_requests(setting, model.config.vocab_size)
    loaded = memory("VmRSS")
    target: Any
    if setting["kind"] == "h2okv":
        target = EngineTarget(model, setting)
    elif setting["kind"] == "transformers":
        target = PagedTarget(model, setting, requests)
    else:
        target = SequentialTarget(model)
    # Nothing is to be done for the first time while it is timed.
    warm = LoadRequest(-1, requests[0].prompt[:64], 4)
    await target.send(warm, time.perf_counter(), [])
    outcomes: list[Outcome] = []
    await closed_loop(target, requests, setting["clients"], outcomes)
    summary = summarize(outcomes)
    told = await target.close()
    by_prompt = {own.number: own.max_tokens for own in requests}
    assert len(by_prompt) == len(outcomes)
    return {
        **summary.cells(), **told,
        "beside_model_bytes": memory("VmHWM") - loaded,
        "tokens": [own.token_ids for own in outcomes] if setting["tells_tokens"] else None,
    }  # fmt: skip


def main() -> None:
    """Runs one setting."""
    setting = json.load(sys.stdin)
    torch.set_num_threads(setting["threads"])
    print(json.dumps(asyncio.run(run_decode(setting) if setting["steps"] else run(setting))))


if __name__ == "__main__":
    main()
