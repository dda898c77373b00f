"""`h2okv serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

import h2okv
from h2okv.cli.args import (
    DTYPES,
    KV_BITS_HELP,
    POLICY_HELP,
    Model,
    check_copies,
    parse_amount,
    parse_device,
    parse_dtype,
    parse_positions,
)
from h2okv.cluster.ray_cluster import import_ray
from h2okv.config import CacheConfig
from h2okv.engine import EngineConfig
from h2okv.engine.memory import parse_memory
from h2okv.integration.models import BUNDLED
from h2okv.server.config import ServerSettings
from h2okv.server.launch import (
    ServeRequest,
    check_installed,
    follow,
    read_text,
    run_server,
    served_name,
)

HELP = """Serve a model over HTTP, to clients of OpenAI's API.

Every user has a row of cache entries of the same size, so that the number of users is known when
it starts. SIGTERM or Ctrl-C finishes what runs and ends; a second one ends at once.

With H2OKV_API_KEY in the environment, requests need that key.

Examples:

    h2okv serve --port 8000

    h2okv serve --model ./my-model --name my-model --heavy 512 --recent 512 --memory 16GiB

    torchrun --nproc-per-node 2 -m h2okv.cli serve --tensor-parallel --model ./my-model

    h2okv serve --ray --replicas 4 --model ./my-model --host 0.0.0.0

    H2OKV_API_KEY=... h2okv serve --model ./my-model --host 0.0.0.0 --system system.txt
"""

KEY_VARIABLE = "H2OKV_API_KEY"
_RAY_HELP = "Copies of the model on a Ray cluster: that of RAY_ADDRESS, or this machine alone."
_PARTS_HELP = "Under torchrun: each process holds a part of the model (transformers' own plan)."
_REPLICAS_HELP = "With --ray: how many copies."
_MEMORY_HELP = "All memory that the process may take, such as 4GiB; on a GPU that of the GPU."


def serve(
    model: Model = BUNDLED,
    name: Annotated[
        str | None,
        typer.Option(help="What clients call the model.", show_default="the model's, or folder's"),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 for any that is free.")] = 8000,
    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = "h2o",
    heavy: Annotated[
        str, typer.Option(help="Heavy hitters to keep: tokens (64) or a share of the prompt (0.1).")
    ] = "0.1",
    recent: Annotated[
        str, typer.Option(help="Newest tokens to keep: tokens (64) or a share (0.1).")
    ] = "0.1",
    sink: Annotated[int, typer.Option(help="First tokens to keep whatever their score.")] = 0,
    positions: Annotated[
        str, typer.Option(help="original, rolling (past the context window) or clamped (OPT).")
    ] = "original",
    kv_bits: Annotated[int | None, typer.Option(help=KV_BITS_HELP, show_default=False)] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Sequences that decode together.", show_default="what fits, up to 64"),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", "--gpu-memory", help=_MEMORY_HELP, show_default="most of what is free"
        ),
    ] = None,
    max_prompt: Annotated[
        int | None,
        typer.Option(help="Tokens of the longest prompt.", show_default="the context, up to 8192"),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; more get HTTP 429.")
    ] = 256,
    max_prefill_tokens: Annotated[
        int, typer.Option(help="Prompt tokens between two decode steps (chunked prefill).")
    ] = 512,
    max_prefill_time_fraction: Annotated[
        float,
        typer.Option(help="Fraction of the time for prefill while others decode; less: more even."),
    ] = 0.8,
    max_tokens_limit: Annotated[
        int, typer.Option(help="The most new tokens that a request may ask for.")
    ] = 4096,
    max_choices: Annotated[
        int, typer.Option(help="The most outputs of a request: prompts times n.")
    ] = 128,
    max_body: Annotated[str, typer.Option(help="The largest request body.")] = "8MiB",
    timeout: Annotated[
        float, typer.Option(help="Seconds that a request may take, waiting included.")
    ] = 600.0,
    drain: Annotated[
        float, typer.Option(help="Seconds that running requests get to finish at the end.")
    ] = 30.0,
    prefix: Annotated[
        list[Path] | None,
        typer.Option(help="A file with a text that many prompts begin with; may be repeated."),
    ] = None,
    system: Annotated[
        list[Path] | None,
        typer.Option(help="A file with the system message of many chats; may be repeated."),
    ] = None,
    view_page: Annotated[
        Path | None, typer.Option(help="A page of `h2okv view --export`, served at /view.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help=_RAY_HELP)] = False,
    tensor_parallel: Annotated[bool, typer.Option("--tensor-parallel", help=_PARTS_HELP)] = False,
    replicas: Annotated[
        int | None, typer.Option(help=_REPLICAS_HELP, show_default="one on each GPU or machine")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
) -> int:
    """Serves until a signal, as `HELP` tells the user."""
    check_copies("--replicas", replicas, ray, device)
    budget = h2okv.Budget(parse_amount("heavy", heavy), parse_amount("recent", recent), sink)
    engine = EngineConfig(
        cache=CacheConfig(
            policy=policy,
            heavy=budget.heavy,
            recent=budget.recent,
            sink=budget.sink,
            positions=parse_positions(positions),
            kv_bits=kv_bits,
        ),
        max_num_seqs=max_num_seqs,
        memory=None if memory is None else parse_memory(memory),
        max_prompt_tokens=max_prompt,
        max_waiting=max_waiting,
        max_prefill_tokens=max_prefill_tokens,
        max_prefill_time_fraction=max_prefill_time_fraction,
        tensor_parallel=tensor_parallel,
    )
    server = ServerSettings(
        model_name=name or served_name(model),
        budget=budget,
        host=host,
        port=port,
        api_key=os.environ.get(KEY_VARIABLE),
        timeout=timeout,
        drain=drain,
        max_body=_body_bytes(max_body),
        max_new_tokens=max_tokens_limit,
        max_choices=max_choices,
        view_page=None if view_page is None else read_text("view-page", view_page),
    )
    loading: dict[str, Any] = {"dtype": parse_dtype(dtype)}
    if not ray:  # there, each copy takes what its machine has
        loading["device"] = parse_device(device)
    request = ServeRequest(
        model=model,
        server=server,
        engine=engine,
        prefixes=tuple(prefix or ()),
        systems=tuple(system or ()),
        loading=loading,
    )
    if tensor_parallel and ray:
        raise ValueError("--tensor-parallel and --ray exclude each other; choose one.")
    if tensor_parallel and os.environ.get("RANK", "0") != "0":
        return follow(request)
    if not ray:
        return run_server(request)
    check_installed()
    import_ray()
    # Only now: it imports what the extras bring.
    from h2okv.cluster.serve import run_server_on_ray

    return run_server_on_ray(request, device, replicas)


def _body_bytes(text: str) -> int:
    try:
        return parse_memory(text)
    except ValueError as error:
        raise ValueError(f"--max-body {text!r} is no size; give one such as 8MiB.") from error
