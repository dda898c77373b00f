"""vLLM's scheduler, with prompts split where it changes no result."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from h2okv.vllm_plugin.settings import parse, tokens_to_run


class H2OScheduler(Scheduler):
    """Schedules whole chunks of a prompt or none: results do not depend on other requests."""

    def __new__(cls, vllm_config: Any, *args: Any, **options: Any) -> H2OScheduler:
        """Make one as vLLM has decided by now, after it has read the class's name."""
        is_asynchronous = vllm_config.scheduler_config.async_scheduling
        return super().__new__(_AsyncScheduler if is_asynchronous else cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        cache = parse(self.vllm_config.additional_config)
        assert cache is not None
        self._cache = cache
        # vLLM's flag for models whose prompts must be split at certain tokens.
        self.need_mamba_block_aligned_split = True

    def _mamba_block_aligned_split(
        self, request: Any, num_new_tokens: int, *computed: int, **more: int
    ) -> int:
        """Return the tokens of the request that this step runs; 0 to wait."""
        start = request.num_computed_tokens + sum(computed) + sum(more.values())
        return tokens_to_run(start, num_new_tokens, request.num_prompt_tokens, self._cache)


class _AsyncScheduler(H2OScheduler, AsyncScheduler):
    """Schedules the next step while the last one runs: lengths are known without its tokens."""
