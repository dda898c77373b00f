"""vLLM's scheduler, with prompts cut where `prefill_chunk` cuts them and nowhere else."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from h2okv.vllm_plugin.settings import parse, tokens_to_run


class H2OScheduler(Scheduler):
    """Gives a request a whole block of its prompt or waits, so that neighbours decide nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        cache = parse(self.vllm_config.additional_config)
        assert cache is not None
        self._chunk = cache.prefill_chunk
        # What the scheduler asks where states are to be cut at certain tokens.
        self.need_mamba_block_aligned_split = True

    def _mamba_block_aligned_split(
        self, request: Any, num_new_tokens: int, *computed: int, **more: int
    ) -> int:
        """Tokens of the request that this step runs; 0 to wait."""
        start = request.num_computed_tokens + sum(computed) + sum(more.values())
        return tokens_to_run(start, num_new_tokens, request.num_prompt_tokens, self._chunk)
