"""One run of the offloading benchmark, in a separate process: a setting on stdin, JSON out.

Started by offload.py: in a fresh process a limit on its data applies to this run alone, and no
memory of an earlier run remains.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def prompts_of(setting: dict[str, Any], vocabulary: int) -> torch.Tensor:
    """Random tokens, int64 ``[B, T]``, the same for all."""
    generator = torch.Generator().manual_seed(1)
    shape = (setting["batch"], setting["prompt"])
    return torch.randint(3, vocabulary, shape, generator=generator)


def drop_pages(folder: str) -> None:
    """Make the system forget what it holds of the checkpoint."""
    for path in Path(folder).glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run_engine(setting: dict[str, Any]) -> dict[str, Any]:
    """Run the engine of `h2okv batch`, and time every pass."""
    from h2okv.config import CacheConfig
    from h2okv.engine.memory import data_bytes, peak_resident_bytes
    from h2okv.engine.sampling_params import SamplingParams
    from h2okv.models.loading import describe
    from h2okv.offload.batch_runner import BatchSequence
    from h2okv.offload.offload_engine import BatchRequest, open_runner

    described = describe(setting["folder"])
    request = BatchRequest(
        model=setting["folder"],
        input=Path("none"),
        output=Path(tempfile.gettempdir()) / "none",
        cache=CacheConfig(setting["policy"]),
        sampling=SamplingParams(max_tokens=setting["new"], temperature=0),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        batch_size=setting["rows"],
        weight_placement={"disk": 1.0} if setting.get("disk") else None,
        memory=setting["limit"] or None,
    )

    lengths = [setting["prompt"]] * setting["batch"]
    runner, plan = open_runner(request, described, lengths)
    tokens = prompts_of(setting, setting["vocabulary"]).tolist()
    if setting.get("one_batch"):
        tokens = tokens[: runner.limits.batch_size]
    new, params = setting["new"], request.sampling
    sequences = [BatchSequence(n, ids, new, params) for n, ids in enumerate(tokens)]
    passes: list[tuple[float, int]] = []
    done: list[BatchSequence] = []
    scheduler = runner.scheduler
    start = last = time.perf_counter()
    read = 0
    for finished in runner.run(sequences):
        now = time.perf_counter()
        total = scheduler.bytes_read
        passes.append((now - last, total - read))
        last, read = now, total
        done.extend(finished)
    seconds = time.perf_counter() - start
    scheduler.close()
    stream = scheduler.stream
    streamed = sum(unit.nbytes for unit in stream.units) if stream else 0
    done.sort(key=lambda sequence: int(sequence.id))
    return {
        "seconds": seconds,
        "passes": passes,
        "streamed_bytes": streamed,
        "bytes_read": scheduler.bytes_read,
        "wait_seconds": stream.wait_seconds if stream else 0.0,
        "rows": runner.limits.batch_size,
        "predicted": plan.estimate.tokens_per_second if plan else None,
        "tokens": [sequence.new_tokens for sequence in done],
        "data_bytes": data_bytes(),
        "peak_bytes": peak_resident_bytes(),
    }


def run_accelerate(setting: dict[str, Any]) -> dict[str, Any]:
    """Accelerate's disk offload, as `from_pretrained` sets it up, with transformers' own cache."""
    from transformers import AutoModelForCausalLM, DynamicCache

    from h2okv.cache.argument import CACHE

    layers = {f"model.layers.{n}": "disk" for n in range(setting["layers"])}
    devices = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    with tempfile.TemporaryDirectory() as scratch:
        model = AutoModelForCausalLM.from_pretrained(
            setting["folder"], dtype=torch.bfloat16, offload_folder=scratch,
            device_map={**devices, **layers, "lm_head": "cpu" if setting["tied"] else "disk"},
        ).eval()  # fmt: skip
        block = prompts_of(setting, setting["vocabulary"])
        cache = DynamicCache(config=model.config)
        passes, tokens = [], []
        start = time.perf_counter()
        with torch.inference_mode():
            for _ in range(setting["new"]):
                drop_pages(setting["folder"])
                before = time.perf_counter()
                logits = model(block, **{CACHE: cache}, logits_to_keep=1).logits[:, -1]
                block = logits.argmax(dim=-1, keepdim=True)
                tokens.append(block)
                passes.append((time.perf_counter() - before, 0))
        seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "passes": passes,
        "tokens": torch.cat(tokens, dim=1).tolist(),
        "rows": setting["batch"],
    }


def run_reading(setting: dict[str, Any]) -> dict[str, Any]:
    """Read the weights alone: a pass without computation."""
    from transformers import AutoConfig

    from h2okv.offload.checkpoint import open_checkpoint
    from h2okv.offload.tiers import materialise

    folder = setting["folder"]
    config = AutoConfig.from_pretrained(folder)
    meta, files = open_checkpoint(config, Path(folder), torch.bfloat16)
    stream, _ = materialise(meta, files, ["disk"] * (len(meta.units) + 1), torch.device("cpu"))
    assert stream is not None
    passes = []
    for _ in range(setting["new"]):
        before = time.perf_counter()
        for unit in meta.units:
            stream.load(unit)
        stream.release()
        passes.append((time.perf_counter() - before, 0))
    stream.close()
    return {"passes": passes, "seconds": sum(elapsed for elapsed, _ in passes)}


KINDS = {"h2okv": run_engine, "accelerate": run_accelerate, "reading": run_reading}


def main() -> None:
    """Run one setting."""
    setting = json.load(sys.stdin)
    torch.set_num_threads(setting["threads"])
    if setting["limit"]:
        resource.setrlimit(resource.RLIMIT_DATA, (setting["limit"], setting["limit"]))
    print(json.dumps(KINDS[setting["kind"]](setting)))


if __name__ == "__main__":
    main()
