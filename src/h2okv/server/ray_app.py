"""The server as a Ray Serve application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve import Application

from h2okv.server.ray_front import Front
from h2okv.server.ray_replica import Replica
from h2okv.server.settings import ServerSettings

REPLICA = "model"
FRONT = "front"
_HEALTH_PERIOD = 1.0
_SLACK = 1024
"""Requests that the front looks at beyond those that wait, to refuse them in our own words."""


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """What is served, and on what.

    Attributes:
        model: What `AsyncLLM` takes first: a folder, a Hub id or ``"bundled"``, on every machine.
        options: What it takes else.
        settings: Of the server.
        replicas: Copies of the model.
        rows: Requests that a copy takes at once.
        waiting: Requests that may wait for a row; more get HTTP 429.
        cpus: Processors of a copy.
        gpus: GPUs of a copy.
        drain: Seconds that running requests have at the end.
    """

    model: str
    options: dict[str, Any]
    settings: ServerSettings
    replicas: int
    rows: int
    waiting: int
    cpus: float
    gpus: float
    drain: float


def application(deployed: Deployed, board: Any) -> Application:
    """Puts the application together.

    Args:
        deployed: What is served. With another number of rows, the application of a second call
            updates that of the first one in place, without new replicas.
        board: From `make_board`.

    Returns:
        What ``serve.run`` takes.
    """
    replica = serve.deployment(
        name=REPLICA,
        num_replicas=deployed.replicas,
        max_ongoing_requests=deployed.rows,
        # The queue is the front's: whichever replica has a free row takes its first request.
        max_queued_requests=max(1, deployed.waiting),
        health_check_period_s=_HEALTH_PERIOD,
        graceful_shutdown_timeout_s=deployed.drain,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": deployed.cpus, "num_gpus": deployed.gpus},
    )(Replica).bind(deployed.model, deployed.options, deployed.settings, board)
    return serve.deployment(
        name=FRONT,
        num_replicas=1,
        max_ongoing_requests=deployed.replicas * deployed.rows + deployed.waiting + _SLACK,
        health_check_period_s=_HEALTH_PERIOD,
        graceful_shutdown_timeout_s=deployed.drain,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": 0},
    )(Front).bind(replica, deployed.settings, board)
