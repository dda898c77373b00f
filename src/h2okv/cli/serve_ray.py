"""`h2okv serve --ray`: copies of the model on a Ray cluster, behind one address."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout

from h2okv.cli.serve_run import ServeRequest, check_installed, engine_options, settings_of
from h2okv.console import write_remark, write_text
from h2okv.engine.ray_cluster import cluster, count_workers, has_gpus, import_ray, share_cpus

_ROWS = 64
"""Rows that a replica is thought to have until it has told."""


def run_server_on_ray(request: ServeRequest, device: str, replicas: int | None) -> int:
    """Serves on a Ray cluster until a signal.

    Args:
        request: What the user asked for; its device is not looked at.
        device: ``auto``, ``cpu`` or ``cuda``, on the machines of the replicas.
        replicas: Copies of the model; None for one on each GPU, or on each machine without any.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: If an option, the model, the port or the cluster is at fault.
    """
    check_installed()
    import_ray()
    from h2okv.server.listening import LOOPBACK, open_port
    from h2okv.server.ray_app import Deployed
    from h2okv.server.ray_service import RayService

    settings, options = settings_of(request), engine_options(request)
    opened = open_port(request.host, request.port)
    port = opened.getsockname()[1]
    opened.close()
    is_local = request.host in LOOPBACK
    shown = f"[{request.host}]" if ":" in request.host else request.host
    ended, stdout = threading.Event(), sys.stdout
    with ExitStack() as stack:
        # Ray tells stdout at length of every actor that ends.
        silence = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(redirect_stdout(silence))
        ray = stack.enter_context(cluster())
        # After Ray, which takes SIGTERM for itself.
        stack.enter_context(_told_by_signals(ended))
        on_gpu = has_gpus(ray) if device == "auto" else device == "cuda"
        copies = replicas or count_workers(ray, on_gpu)
        service = stack.enter_context(RayService(request.host, port, is_local))
        description, rows = service.deploy(
            Deployed(
                model=request.model,
                options={**options, "dtype": request.dtype},
                settings=settings,
                replicas=copies,
                rows=request.rows or _ROWS,
                waiting=request.max_waiting,
                cpus=1 if on_gpu else share_cpus(ray, copies),
                gpus=1 if on_gpu else 0,
                drain=request.drain,
            )
        )
        write_remark(f"{copies} replicas with {rows} rows each. {description}")
        if not is_local and request.api_key is None:
            write_remark(
                f"warning: whoever reaches {shown} may use this server; set H2OKV_API_KEY to ask"
                " for a key."
            )
        write_remark(f"model {settings.model_name!r}; Ctrl-C finishes what runs and ends")
        with redirect_stdout(stdout):
            write_text(f"http://{shown}:{port}/v1\n")
        ended.wait()
    return 0


@contextmanager
def _told_by_signals(event: threading.Event) -> Iterator[None]:
    """Sets an event at the first SIGINT or SIGTERM; the second one ends the process."""

    def told(number: int, frame: object) -> None:
        event.set()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, told) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
