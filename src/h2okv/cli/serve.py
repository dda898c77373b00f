"""`h2okv serve`."""

from __future__ import annotations

import os
from pathlib import Path

from h2okv.cli import args, readers
from h2okv.cli.args import MEMORY_HELP, WEIGHT_BITS, ModelOptions, Typed, option
from h2okv.cli.readers import count
from h2okv.console import optional
from h2okv.models.names import check_name

KEY_VARIABLE = "H2OKV_API_KEY"


def serve(
    choice: args.Choice = args.cache_options("512"),
    model: ModelOptions = args.model_options(is_here=False),
    called: str | None = option(None, "The model's name for clients.", "--name"),
    host: str = option("127.0.0.1", "Address to listen at."),
    port: int = option(8000, "Port; 0: any free one.", read=readers.port),
    max_num_seqs: int | None = option(None, "Users at a time (what fits, to 64).", read=count),
    memory: Typed = option(None, MEMORY_HELP, read=readers.memory),
    max_prompt_tokens: int | None = option(None, "Longest prompt (context, to 8192).", read=count),
    max_waiting: int = option(256, "Requests waiting; more get HTTP 429."),
    max_prefill_tokens: int = option(512, "Prompt tokens between steps."),
    prefix_cache: Typed = option(
        None, "Memory of states (1GiB); 0: none.", read=readers.memory, minimum=0
    ),
    prefix_cache_folder: Path | None = option(None, "Folder of states, over a restart."),
    max_new_tokens: int = option(4096, "Maximum number of new tokens."),
    max_body: Typed = option("8MiB", "Largest request body.", read=readers.memory),
    timeout: float = option(600.0, "For a request, waiting included."),
    drain: float = option(30.0, "For running requests at shutdown."),
    verify: Typed = option(None, "Share read again with a full cache: 2%.", read=readers.share),
    agreement: Typed = option(None, "Budgets that hold this share: 0.95.", read=readers.share),
    weight_bits: int | None = WEIGHT_BITS,
    pin: Typed = option("", "Never evicted in chats: system,tools.", read=readers.names),
    cors_origin: list[str] | None = option(None, "CORS origin, or *; may be repeated."),
    log_requests: bool = option(False, "Log each request to stderr.", "--log-requests"),
    ray: bool = option(False, "Serve copies on a Ray cluster.", "--ray"),
    tensor_parallel: bool = option(False, "Under torchrun: split the model.", "--tensor-parallel"),
    dry_run: bool = option(False, "Say what fits, and end.", "--dry-run"),
    replicas: int | None = option(None, "With --ray: copies (one per GPU).", read=count),
) -> int:
    from h2okv.engine.config import EngineConfig
    from h2okv.server import config

    cache, evict_every = choice.apart_from_cuts()
    args.check_copies(replicas, ray, args.chosen_device())
    if prefix_cache_folder is not None and ray:
        raise ValueError(
            "--prefix-cache-folder is for one process, and --ray starts several; leave one of them"
            " out."
        )
    if tensor_parallel and ray:
        raise ValueError("--tensor-parallel and --ray exclude each other; choose one.")
    if agreement is not None and not verify:
        raise ValueError("--agreement needs answers that are read again; give --verify 5% too.")
    if not ray:  # the machines of a cluster may have other models
        check_name(model.name)
    # Clients see only the last part of a path, and a Hub id as it is.
    path = Path(model.name)
    name = path.resolve().name if path.exists() else model.name
    engine = args.build(EngineConfig, locals())
    server = args.build(
        config.ServerSettings,
        locals(),
        model_name=called or name,
        cache=cache,
        api_key=os.environ.get(KEY_VARIABLE),
        cors_origins=tuple(cors_origin or ()),
    )
    # After the checks above, which need no torch.
    from h2okv.engine.serving import with_states

    engine, note = with_states(engine, evict_every)
    request = config.ServeRequest(
        model=model.name,
        server=server,
        engine=engine,
        notes=() if note is None else (note,),
    )
    # On a cluster each copy uses the device of its machine.
    request.loading.update({"dtype": model.dtype} | ({} if ray else {"device": model.device}))
    # Before the imports below, which need the extra.
    for package in ("fastapi", "uvicorn", "pydantic", "prometheus_client"):
        optional(package, "a server", "serve")
    if dry_run and (ray or tensor_parallel):
        raise ValueError("--dry-run is for one process; leave out --ray and --tensor-parallel.")
    if not ray:
        from h2okv.server.launch import announce_plan, follow, run_server

        if dry_run:
            return announce_plan(request)
        is_follower = tensor_parallel and os.environ.get("RANK", "0") != "0"
        return follow(request) if is_follower else run_server(request)
    from h2okv.cluster import import_ray

    import_ray()
    from h2okv.cluster.serve import run_server_on_ray

    return run_server_on_ray(request, args.chosen_device(), replicas)
