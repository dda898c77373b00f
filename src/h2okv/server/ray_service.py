"""A Ray Serve instance that serves one application, from its start to its end."""

from __future__ import annotations

import dataclasses
import logging
from types import TracebackType
from typing import Any

import ray
from ray import serve

from h2okv.engine.ray_cluster import reason
from h2okv.server.ray_app import REPLICA, Deployed, application
from h2okv.server.ray_board import make_board

APP = "h2okv"


class RayService:
    """Serve on a cluster that was joined before; ended on leaving.

    Args:
        host: The address to listen at: on the head's machine alone if it is a loopback address,
            otherwise on every machine with a part of the application.
        port: The port, on each of them.
        is_local: Whether `host` is a loopback address.

    Raises:
        ValueError: If Serve runs on the cluster already.
    """

    def __init__(self, host: str, port: int, is_local: bool) -> None:
        _quieten()
        if serve.status().proxies:
            raise ValueError(
                "Ray Serve runs on this cluster already, with a host and a port of its own; end it"
                " with `serve shutdown`, or use another cluster"
            )
        serve.start(
            proxy_location="HeadOnly" if is_local else "EveryNode",
            http_options={"host": host, "port": port},
            logging_config={"enable_access_log": False, "log_level": "ERROR"},
        )

        self._board = make_board()

    def __enter__(self) -> RayService:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Takes no more requests, and ends when those that run have finished."""
        serve.delete(APP)
        serve.shutdown()
        ray.kill(self._board)

    def deploy(self, deployed: Deployed) -> tuple[str, int]:
        """Loads the models, and begins to take requests.

        Args:
            deployed: What is served. Its number of rows is put right when the replicas are there.

        Returns:
            What a replica says of itself, and its rows.

        Raises:
            ValueError: If a replica cannot be started.
        """
        logs = {"enable_access_log": False, "log_level": "ERROR"}
        try:
            serve.run(application(deployed, self._board), name=APP, logging_config=logs)
            handle = serve.get_deployment_handle(REPLICA, APP)
            told: Any = handle.broadcast("describe").results(timeout_s=60)
            description, rows = min(told, key=lambda one: one[1])
            if rows != deployed.rows:
                serve.run(
                    application(dataclasses.replace(deployed, rows=rows), self._board),
                    name=APP,
                    logging_config=logs,
                )
        except RuntimeError as error:
            raise ValueError(f"the model cannot be served ({_why(error)})") from error
        return description, rows


def _why(error: BaseException) -> str:
    """What a replica said when it could not start, if it has."""
    found = serve.status().applications.get(APP)
    for deployment in found.deployments.values() if found else ():
        if "Error" in deployment.message:
            return reason(RuntimeError(deployment.message))
    return reason(error)


def _quieten() -> None:
    """Keeps Serve's progress away from the command's own remarks; its log files have it."""
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
