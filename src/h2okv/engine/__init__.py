"""The serving engine: requests, scheduling, chunked prefill, sampling; never scores or policies."""

from h2okv.engine.config import EngineConfig as EngineConfig
from h2okv.engine.llm import LLM as LLM
from h2okv.engine.llm import AsyncLLM as AsyncLLM
from h2okv.engine.outputs import OutputDelta as OutputDelta
from h2okv.engine.outputs import RequestOutput as RequestOutput
from h2okv.engine.sampling_params import SamplingParams as SamplingParams
