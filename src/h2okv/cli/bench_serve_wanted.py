"""What `h2okv bench serve` is asked for, read and checked before anything starts."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from typing import Any

from h2okv.benchmarking.load.child_server import (
    Command,
    PagedSize,
    own_server,
    transformers_server,
)
from h2okv.benchmarking.load.measurement import Load, make_loads
from h2okv.benchmarking.load.openai_target import Endpoint
from h2okv.benchmarking.load.workload import Mix
from h2okv.cli.bench_options import parse_numbers, split_list
from h2okv.integration.loading import BUNDLED, describe

OTHERS = ("transformers", "sequential")
_CLIENTS = "8"
_UNSTRETCHED = 1024


def parse_context(text: str) -> tuple[int, int] | None:
    """Reads a range of tokens: `2048:4096`, `2048`, or nothing for prompts as they are.

    Raises:
        ValueError: If it is none.
    """
    if not text.strip():
        return None
    parts = text.split(":")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ValueError(f"--context {text!r} is no range of tokens; give one such as 2048:4096")
    return numbers[0], numbers[-1]


def parse_loads(clients: str, rates: str, requests: int | None) -> tuple[Load, ...]:
    """Reads which loops to run.

    Raises:
        ValueError: If a number makes no sense.
    """
    try:
        found = tuple(float(part) for part in split_list(rates))
    except ValueError:
        raise ValueError(f"--rate {rates!r} is no list of numbers; give one such as 2,5") from None
    if any(not math.isfinite(rate) for rate in found):
        raise ValueError(f"--rate {rates!r} is not finite; give requests a second, such as 5")
    chosen = clients or ("" if found else _CLIENTS)
    return tuple(make_loads(parse_numbers("clients", chosen), found, requests))


def parse_extra(text: str) -> dict[str, Any]:
    """Reads further fields of every request.

    Raises:
        ValueError: If they are no JSON object.
    """
    if not text.strip():
        return {}
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(
            f"--extra {text!r} is no JSON object; give one such as '{{\"top_p\": 0.9}}'"
        )
    return fields


def check_timeout(seconds: float) -> float:
    """Returns the time-out if it is one.

    Raises:
        ValueError: If not.
    """
    if not seconds > 0:
        raise ValueError(f"--timeout {seconds:g} leaves no time; give seconds, such as 600")
    return seconds


def choose_servers(
    url: str | None,
    model: str | None,
    against: str,
    served_name: str | None,
    serve_options: str,
    device: str,
    loads: Sequence[Load],
    mix: Mix,
) -> tuple[Command | Endpoint, ...]:
    """Finds out which servers to measure.

    Args:
        url: Of a running one, or ``None``.
        model: For servers to start, or ``None``.
        against: Which others to start.
        served_name: The model's name in requests.
        serve_options: Of `h2okv serve`.
        device: Where started servers compute.
        loads: The loads; the largest decides on the size of a paged cache.
        mix: The lengths.

    Returns:
        The servers, in the order in which they are measured.

    Raises:
        ValueError: If the options contradict each other.
    """
    if (url is None) == (model is None):
        raise ValueError(
            "give either --url of a running server or --model, for which one is started"
        )
    others = split_list(against)
    for name in others:
        if name not in OTHERS:
            raise ValueError(f"--against {name!r} is not known; choose from {', '.join(OTHERS)}")
    if url is not None:
        if others or serve_options:
            raise ValueError("--against and --serve-options go with --model, not with --url")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url {url!r} is no URL; give one such as http://127.0.0.1:8000")
        return (Endpoint(url.rstrip("/").removesuffix("/v1"), served_name),)
    assert model is not None
    options = [*shlex.split(serve_options), *(("--device", device) if device != "auto" else ())]
    servers: list[Command | Endpoint] = [own_server(model, options)]
    if others:
        described = describe(model)
        longest = _UNSTRETCHED if mix.context is None else mix.context[1]
        size = PagedSize(
            max(load.clients or load.requests for load in loads), longest + mix.most_new_tokens
        )
        dtype = "float32" if model == BUNDLED and device in ("auto", "cpu") else "auto"
        for name in others:
            paged = size if name == "transformers" else None
            servers.append(transformers_server(described.source, dtype, device, paged))
    return tuple(servers)
