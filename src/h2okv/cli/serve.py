"""`h2okv serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from h2okv.cli.args import ModelOptions, cache_options, check_copies, model_options
from h2okv.config import CacheConfig

KEY_VARIABLE = "H2OKV_API_KEY"


@cache_options(without=("prefill_chunk",))
@model_options()
def serve(
    cache: CacheConfig,
    model: ModelOptions,
    name: Annotated[
        str | None,
        typer.Option(help="What clients call the model.", show_default="the model's, or folder's"),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 for any that is free.")] = 8000,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Sequences that run together.", show_default="what fits, up to 64"),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            "--gpu-memory",
            help="Memory limit of the process, such as 4GiB; on a GPU that of the GPU.",
            show_default="most of what is free",
        ),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of the longest prompt.", show_default="the context, up to 8192"),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; more get HTTP 429.")
    ] = 256,
    max_prefill_tokens: Annotated[
        int, typer.Option(help="Chunked prefill: prompt tokens between two decode steps.")
    ] = 512,
    max_prefill_time_fraction: Annotated[
        float, typer.Option(help="Fraction of the time for prefill while other requests decode.")
    ] = 0.8,
    max_new_tokens: Annotated[
        int, typer.Option(help="Most new tokens that a request may ask for.")
    ] = 4096,
    max_choices: Annotated[
        int, typer.Option(help="Most outputs of a request: prompts times n.")
    ] = 128,
    max_body: Annotated[str, typer.Option(help="Largest request body.")] = "8MiB",
    timeout: Annotated[
        float, typer.Option(help="Seconds that a request may take, waiting included.")
    ] = 600.0,
    drain: Annotated[
        float, typer.Option(help="Seconds for running requests to finish at shutdown.")
    ] = 30.0,
    prefix: Annotated[
        list[Path] | None,
        typer.Option(help="A file with a prefix of many prompts, read once; may be repeated."),
    ] = None,
    system: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file with a system message of many chats, read once; may be repeated."
        ),
    ] = None,
    view_page: Annotated[
        Path | None, typer.Option(help="A page of `h2okv view --export`, served at /view.")
    ] = None,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Serve copies on the Ray cluster of RAY_ADDRESS, or here."),
    ] = False,
    tensor_parallel: Annotated[
        bool,
        typer.Option("--tensor-parallel", help="Under torchrun: split the model over the ranks."),
    ] = False,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="With --ray: copies of the model.", show_default="one on each GPU or machine"
        ),
    ] = None,
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
    from h2okv.server.config import (
        ServeRequest,
        ServerSettings,
        check_installed,
        read_text,
        served_name,
    )

    device = model.device_name
    check_copies("--replicas", replicas, ray, device)
    if tensor_parallel and ray:
        raise ValueError("--tensor-parallel and --ray exclude each other; choose one.")
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
    server = ServerSettings(
        model_name=name or served_name(model.name),
        budget=cache.budget,
        host=host,
        port=port,
        api_key=os.environ.get(KEY_VARIABLE),
        timeout=timeout,
        drain=drain,
        max_body=_body_bytes(max_body),
        max_new_tokens=max_new_tokens,
        max_choices=max_choices,
        view_page=None if view_page is None else read_text("view-page", view_page),
    )
    loading: dict[str, Any] = {"dtype": model.dtype}
    if not ray:  # there, each copy takes what its machine has
        loading["device"] = model.device
    request = ServeRequest(
        model=model.name,
        server=server,
        engine=engine,
        prefixes=tuple(prefix or ()),
        systems=tuple(system or ()),
        loading=loading,
    )
    check_installed()
    # Only now: what follows imports what the extras bring.
    if not ray:
        from h2okv.server.launch import follow, run_server

        is_follower = tensor_parallel and os.environ.get("RANK", "0") != "0"
        return follow(request) if is_follower else run_server(request)
    from h2okv.cluster.ray_cluster import import_ray

    import_ray()
    from h2okv.cluster.serve import run_server_on_ray

    return run_server_on_ray(request, device, replicas)


def _body_bytes(text: str) -> int:
    from h2okv.engine.memory import parse_memory

    try:
        return parse_memory(text)
    except ValueError as error:
        raise ValueError(f"--max-body {text!r} is not a size; give one such as 8MiB.") from error
