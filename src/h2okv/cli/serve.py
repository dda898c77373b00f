"""`h2okv serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from h2okv.cli import args
from h2okv.cli.args import MEMORY_HELP, ModelOptions, option
from h2okv.config import CacheConfig
from h2okv.console import check_least

KEY_VARIABLE = "H2OKV_API_KEY"


@args.cache_options(prefill_chunk=None)
@args.model_options()
def serve(
    cache: CacheConfig,
    model: ModelOptions,
    called: str | None = option(None, "What clients call the model (its own name).", "--name"),
    host: str = option("127.0.0.1", "The address to listen at."),
    port: int = option(8000, "The port; 0 for any that is free."),
    max_num_seqs: int | None = option(None, "Sequences that run together (what fits, up to 64)."),
    memory: str | None = option(None, MEMORY_HELP, "--memory", "--gpu-memory"),
    max_prompt_tokens: int | None = option(
        None, "Longest prompt in tokens (the context, up to 8192)."
    ),
    max_waiting: int = option(256, "Requests that may wait; more get HTTP 429."),
    max_prefill_tokens: int = option(512, "Chunked prefill: prompt tokens between decode steps."),
    max_prefill_time_fraction: float = option(
        0.8, "Time for prefill while others decode: a fraction."
    ),
    max_new_tokens: int = option(4096, "Most new tokens that a request may ask for."),
    max_choices: int = option(128, "Most outputs of a request: prompts times n."),
    max_body: str = option("8MiB", "Largest request body."),
    timeout: float = option(600.0, "Seconds that a request may take, waiting included."),
    drain: float = option(30.0, "Seconds for running requests to finish at shutdown."),
    prefix: list[Path] | None = option(
        None, "File with a prefix of many prompts; may be repeated."
    ),
    system: list[Path] | None = option(None, "File with a system message; may be repeated."),
    cors_origin: list[str] | None = option(
        None, "Site whose pages may ask (https://example.org; * for all); may be repeated."
    ),
    log_requests: bool = option(False, "A line on stderr for each request.", "--log-requests"),
    view_page: Path | None = option(None, "A page of `h2okv view --export`, served at /view."),
    ray: bool = option(False, "Serve copies on the Ray cluster of RAY_ADDRESS, or here.", "--ray"),
    tensor_parallel: bool = option(
        False, "Under torchrun: split the model over the ranks.", "--tensor-parallel"
    ),
    replicas: int | None = option(None, "With --ray: copies of the model (one a GPU or machine)."),
) -> int:
    """Serve a model over OpenAI's API, each request with an H2O cache.

    Every sequence has cache slots of the same size, so the maximum concurrency is known at
    start-up. SIGTERM or Ctrl-C finishes what runs and ends; a second one ends at once. With
    H2OKV_API_KEY in the environment, requests need that key.

    Examples:

        h2okv serve --model smollm2 --port 8000
        h2okv serve --model ./my-model --name my-model --budget 1024 --memory 16GiB
        torchrun --nproc-per-node 2 -m h2okv.cli serve --tensor-parallel --model ./my-model
        h2okv serve --ray --replicas 4 --model ./my-model --host 0.0.0.0
        H2OKV_API_KEY=... h2okv serve --model ./my-model --host 0.0.0.0 --system system.txt
    """
    from h2okv.engine import EngineConfig
    from h2okv.engine.memory import parse_memory
    from h2okv.server import config

    check_least(max_num_seqs=max_num_seqs, max_prompt_tokens=max_prompt_tokens)
    args.check_copies("replicas", replicas, ray, model.device_name)
    if tensor_parallel and ray:
        raise ValueError("--tensor-parallel and --ray exclude each other; choose one.")
    cache, _ = args.with_least_entries(cache)
    engine = EngineConfig(
        cache=cache,
        max_num_seqs=max_num_seqs,
        memory=None if memory is None else parse_memory(memory),
        max_prompt_tokens=max_prompt_tokens,
        max_waiting=max_waiting,
        max_prefill_tokens=max_prefill_tokens,
        max_prefill_time_fraction=max_prefill_time_fraction,
        tensor_parallel=tensor_parallel,
    )
    server = config.ServerSettings(
        model_name=called or config.served_name(model.name),
        budget=cache.budget,
        host=host,
        port=port,
        api_key=os.environ.get(KEY_VARIABLE),
        timeout=timeout,
        drain=drain,
        max_body=_body_bytes(max_body),
        max_new_tokens=max_new_tokens,
        max_choices=max_choices,
        cors_origins=tuple(cors_origin or ()),
        log_requests=log_requests,
        view_page=None if view_page is None else args.read_text("view-page", view_page),
    )
    loading: dict[str, Any] = {"dtype": model.dtype}
    if not ray:  # there, each copy takes what its machine has
        loading["device"] = model.device
    request = config.ServeRequest(
        model=model.name,
        server=server,
        engine=engine,
        # Without the line end that editors put last, which no client sends.
        prefixes=tuple(args.read_text("prefix", path) for path in prefix or ()),
        systems=tuple(args.read_text("system", path) for path in system or ()),
        loading=loading,
    )
    config.check_installed()
    # Only now: what follows imports what the extras bring.
    if not ray:
        from h2okv.server.launch import follow, run_server

        is_follower = tensor_parallel and os.environ.get("RANK", "0") != "0"
        return follow(request) if is_follower else run_server(request)
    from h2okv.cluster.ray_cluster import import_ray

    import_ray()
    from h2okv.cluster.serve import run_server_on_ray

    return run_server_on_ray(request, model.device_name, replicas)


def _body_bytes(text: str) -> int:
    from h2okv.engine.memory import parse_memory

    try:
        return parse_memory(text)
    except ValueError as error:
        raise ValueError(f"--max-body {text!r} is not a size; give one such as 8MiB.") from error
