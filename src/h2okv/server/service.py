"""What all routes work with."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from h2okv.engine.serving.sampling_params import SamplingParams
from h2okv.server.api_error import ApiError
from h2okv.server.generation import Job
from h2okv.server.metrics import Metrics
from h2okv.server.prompt import Prompt, PromptReader
from h2okv.server.sampled_request import SampledRequest
from h2okv.server.served_engine import ServedEngine
from h2okv.server.settings import ServerSettings
from h2okv.server.token_text import TokenText


class Service:
    """An engine, what is counted of it, and the limits.

    Args:
        engine: Generates.
        settings: The limits.

    Attributes:
        metrics: Counted here.
        prompts: Turns prompts into tokens.
        tokens: Turns tokens into text.
        created: When the service began, in seconds since 1970.
    """

    def __init__(self, engine: ServedEngine, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        self.metrics = Metrics(engine)
        self.prompts = PromptReader(engine.tokenizer, engine.max_prompt_tokens)
        self.tokens = TokenText(engine.tokenizer)
        self.created = int(time.time())

    def check_model(self, name: str) -> None:
        """Refuses a model that is not here.

        Raises:
            ApiError: If it is not.
        """
        if name != self.settings.model_name:
            raise ApiError(
                404,
                f"model={name!r} is not served here; give {self.settings.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    def check_choices(self, body: SampledRequest, prompts: int) -> None:
        """Refuses a request for more outputs than one may have.

        Raises:
            ApiError: If there are too many.
        """
        wanted, most = prompts * max(body.n or 1, 1), self.settings.max_choices
        if wanted > most:
            raise ApiError(
                400,
                f"prompts times n = {prompts} x {body.n or 1} = {wanted} outputs, but one request"
                f" may have {most}; send several requests.",
                param="n" if prompts == 1 else "prompt",
                code="invalid_value",
            )

    def job(self, body: SampledRequest, prompts: Sequence[Prompt], params: SamplingParams) -> Job:
        """Puts together what the engine is asked for.

        Args:
            body: The request.
            prompts: Its prompts, read.
            params: Its parameters.

        Returns:
            The job.

        Raises:
            ApiError: If a prompt with its output does not fit into the model's context, or the
                budget not into a row.
        """
        fitted = [self._fitted(body, prompt, params) for prompt in prompts]
        budget = None if body.h2o is None else body.h2o.budget(self.settings.budget)
        if budget is not None:
            row = self.engine.row_budget
            needed = max(budget.resolve(len(prompt.token_ids)).total for prompt in prompts)
            if needed > row:
                raise ApiError(
                    400,
                    f"h2o: sink + heavy + recent = {needed} tokens for this prompt, but a row of"
                    f" this server holds {row}; give less.",
                    param="h2o",
                    code="invalid_value",
                )
        return Job(prompts, fitted, budget)

    def _fitted(
        self, body: SampledRequest, prompt: Prompt, params: SamplingParams
    ) -> SamplingParams:
        """The parameters with a number of new tokens that the context has room for."""
        context, length = self.engine.max_context, len(prompt.token_ids)
        most = self.settings.max_new_tokens
        room = most if context is None else context - length
        wanted = params.max_tokens
        if room < (1 if wanted is None else wanted):
            raise ApiError(
                400,
                f"a prompt of {length} tokens and max_tokens="
                f"{'at least 1' if wanted is None else wanted} are more than the model's context"
                f" of {context} tokens; shorten the prompt or ask for less.",
                param="max_tokens" if length < (context or 0) else None,
                code="context_length_exceeded",
            )
        if wanted is None:
            standard = body.default_max_tokens or most
            return dataclasses.replace(params, max_tokens=min(standard, room, most))
        return params
