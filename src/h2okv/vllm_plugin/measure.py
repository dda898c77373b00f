"""Budgets by head of vLLM's model, measured once before its engine starts.

vLLM's own layers cannot be measured, so transformers loads the model, in a process that is gone
before the engine takes the memory. What `h2okv generate` has measured is used again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from h2okv.calibration.factors import Shares
from h2okv.calibration.layer_budgets import (
    even_budgets,
    measure_model,
    with_measured_budgets,
    with_shares,
)
from h2okv.config import FACTORS_VERSION, MEASURED, CacheConfig
from h2okv.models.loading import weights_digest
from h2okv.models.names import cache_folder
from h2okv.provenance import digest
from h2okv.records import first_line, parse_json, write_json


def measured(cache: CacheConfig, model: Any) -> CacheConfig:
    """Replace ``layer_budgets="auto"`` by factors for vLLM's model; needs the weights once."""
    if cache.layer_budgets != MEASURED:
        return cache
    source, dtype = str(model.model), str(model.dtype).removeprefix("torch.")
    state = weights_digest(source, model.hf_config)
    setting = f"{source} {state} {FACTORS_VERSION}"
    file = cache_folder("layer-budgets") / f"vllm-{digest(setting)}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # not there, or damaged
        stored = parse_json(file.read_text(encoding="utf-8"))
        if state is not None and stored["setting"] == setting:
            return with_shares(cache, Shares.from_dict(stored["shares"]))
    request = json.dumps([source, dtype, cache.to_dict()])
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=request, stdout=subprocess.PIPE, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        reason = done.stdout.strip() or f"exit status {done.returncode}"
        return even_budgets(cache, f"the model could not be measured ({reason})")
    shares = parse_json(done.stdout)
    if shares is None:  # a line has said why
        return replace(cache, layer_budgets=None)
    with suppress(OSError, ValueError):  # then the next start looks for it in the model again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"setting": setting, "shares": shares})
    return with_shares(cache, Shares.from_dict(shares))


def _main() -> None:
    """Measure the model that stdin names; write its shares to stdout, or null."""
    import torch

    from h2okv.models.loading import describe, load_weights, parse_device

    source, dtype, options = json.loads(sys.stdin.read())
    described = describe(source)
    loaded = load_weights(described, getattr(torch, dtype), parse_device("auto"))
    cache = with_measured_budgets(CacheConfig.from_dict(options), loaded, described)
    shares = None if cache.measured is None else asdict(measure_model(loaded, described))
    sys.stdout.write(json.dumps(shares))


if __name__ == "__main__":
    try:
        _main()
    except (ValueError, RuntimeError, MemoryError) as error:
        sys.stdout.write(first_line(error))
        sys.exit(1)
