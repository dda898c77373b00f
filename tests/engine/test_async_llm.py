"""The engine in its thread: tasks that come, go away, and a shutdown."""

import asyncio
import time

import pytest

import h2okv
from h2okv.engine.outputs import EngineStoppedError
from h2okv.prompts.readers import PromptTooLongError


@pytest.fixture
def make_async(tokenizer):
    def make(model, **settings):
        return h2okv.AsyncLLM(
            model,
            tokenizer,
            **({"heavy": 0.2, "recent": 0.2, "min_tokens": 0, "max_num_seqs": 3} | settings),
        )

    return make


async def tokens_of(llm, prompt, params):
    return [token async for piece in llm.generate(prompt, params) for token in piece.token_ids]


def test_concurrent_tasks_equal_generate(make_llama, make_async, make_prompts, alone, greedy):
    model = make_llama()
    prompts = make_prompts([20, 3, 44, 31, 9, 60])
    llm = make_async(model)

    async def main():
        generated = await asyncio.gather(
            *(tokens_of(llm, prompt, greedy(12)) for prompt in prompts)
        )
        await llm.aclose()
        return generated

    generated = asyncio.run(main())
    assert generated == [alone(model, prompt, 12) for prompt in prompts]


def test_cancelled_task_frees_its_slots(make_llama, make_async, make_prompts, greedy):
    prompts = make_prompts([20, 20])
    llm = make_async(make_llama(), max_num_seqs=1)

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


def test_shutdown_finishes_running_requests_and_refuses_new_ones(
    make_llama, make_async, make_prompts, greedy
):
    prompts = make_prompts([20, 20])
    llm = make_async(make_llama())

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


def test_shutdown_aborts_requests_after_the_drain_time(
    make_llama, make_async, make_prompts, greedy
):
    (prompt,) = make_prompts([20])
    llm = make_async(make_llama())

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


def test_invalid_requests_raise_in_the_task(make_llama, make_async, greedy):
    llm = make_async(make_llama())

    async def main():
        with pytest.raises(PromptTooLongError):
            await tokens_of(llm, [5] * 600, greedy(5))
        with pytest.raises(ValueError, match="no tokens"):
            await tokens_of(llm, [], greedy(5))
        assert llm.is_healthy
        await llm.aclose()

    asyncio.run(main())
