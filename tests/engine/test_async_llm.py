"""The engine in its thread: tasks that come, go away, and a shutdown."""

import asyncio
import time

import pytest

from h2okv.engine.outputs import EngineStoppedError


async def tokens_of(llm, prompt, params):
    return [token async for piece in llm.generate(prompt, params) for token in piece.token_ids]


def test_cancelled_task_frees_its_slots(make_async, make_prompts, greedy):
    prompts = make_prompts([20, 20])
    llm = make_async(max_num_seqs=1)

    async def main():
        pieces = llm.generate(prompts[0], greedy(400))
        async for _ in pieces:
            break
        while llm.stats().running == 0:  # the first token comes of the prompt, before the slots
            await asyncio.sleep(0.001)
        await pieces.aclose()
        task = asyncio.create_task(tokens_of(llm, prompts[0], greedy(400)))
        while llm.stats().running == 0 or llm.stats().aborted == 0:
            await asyncio.sleep(0.001)
        task.cancel()
        generated = await tokens_of(llm, prompts[1], greedy(5))
        assert len(generated) == 5
        stats = llm.stats()
        await llm.aclose()
        return stats

    stats = asyncio.run(main())
    assert (stats.aborted, stats.finished) == (2, 1)


def test_shutdown_finishes_running_requests_and_refuses_new_ones(make_async, make_prompts, greedy):
    prompts = make_prompts([20, 20])
    llm = make_async()

    async def main():
        task = asyncio.create_task(tokens_of(llm, prompts[0], greedy(60)))
        while llm.stats().running == 0:
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(llm.aclose())
        await asyncio.sleep(0)
        with pytest.raises(EngineStoppedError, match="shutting down"):
            await tokens_of(llm, prompts[1], greedy(5))
        await closing
        assert len(await task) == 60
        assert not llm.is_healthy

    asyncio.run(main())


def test_shutdown_aborts_requests_after_the_drain_time(make_async, make_prompts, greedy):
    (prompt,) = make_prompts([20])
    llm = make_async()

    async def main():
        task = asyncio.create_task(tokens_of(llm, prompt, greedy(480)))
        while llm.stats().running == 0:
            await asyncio.sleep(0.001)
        start_time = time.monotonic()
        await llm.aclose(drain=0.01)
        assert time.monotonic() - start_time < 5
        with pytest.raises(EngineStoppedError):
            await task

    asyncio.run(main())
