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
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from serving_targets import EngineTarget, PagedTarget, SequentialTarget
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from h2okv.assets import bundled_model_path, sample_prompt
from h2okv.benchmarking.serving import summarize
from h2okv.benchmarking.serving_client import LoadRequest, Mix, Outcome, closed_loop
from h2okv.engine.memory import release_workers


def load_model(setting: dict[str, Any]) -> Any:
    """The bundled model in fp32, or random weights of a shape."""
    try:
        return _loaded(setting)
    finally:
        # Contestants that compute in a thread of their own shall have the processors to themselves.
        release_workers()


def _loaded(setting: dict[str, Any]) -> Any:
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
    try:
        result = asyncio.run(run_decode(setting) if setting["steps"] else run(setting))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # The thread of transformers' manager would keep this process alive.
        os._exit(1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
