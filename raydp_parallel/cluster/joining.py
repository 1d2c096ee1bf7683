"""Joins a Ray cluster, or starts one, and leaves one that was started here."""

from __future__ import annotations

import logging
import os
import socket

from raydp_parallel.cluster import ray_api
from raydp_parallel.errors import ClusterError, forked

log = logging.getLogger("raydp_parallel")

_CLIENT = (
    "a ray:// client connection cannot run replicas: it has no object store and adds a "
    "proxy to every call. Start the driver on a machine of the cluster "
    "(ray.init(address='auto')), or submit it as a Ray job"
)
_ANSWERS = 5.0
"""Seconds that a cluster may take to accept a connection. Ray itself tries for minutes."""

_started_here = False


def connect(start: bool = True) -> bool:
    """Join the cluster: the one that is connected, ``RAY_ADDRESS``, one running here, else start
    one.

    Args:
        start: Whether to start a local cluster if there is none.

    Returns:
        Whether there is a cluster.
    """
    global _started_here
    if ray_api.through_client():
        raise ClusterError(_CLIENT)
    if ray_api.inherited():
        raise forked()
    if ray_api.connected():
        return True
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise ClusterError(_CLIENT)
    running = bool(os.environ.get("RAY_ADDRESS")) or _runs_here()
    if not running and not start:
        return False
    ray_api.join(None if running else "local")
    _started_here = not running
    _say(running)
    return True


def _say(running: bool) -> None:
    """Log which cluster was joined, and why: a cluster of another user, which happened to run here,
    is rarely meant.
    """
    if not running:
        log.info("a Ray cluster was started for this program at %s", ray_api.joined_address())
    elif os.environ.get("RAY_ADDRESS"):
        log.info("joined the Ray cluster at %s, which RAY_ADDRESS names", ray_api.joined_address())
    else:
        owner = _owner(ray_api.note())
        own = owner in (os.getuid(), None)
        log.log(
            logging.INFO if own else logging.WARNING,
            "joined the Ray cluster at %s, because %s names it%s. RAY_ADDRESS=local starts "
            "one for this program alone",
            ray_api.joined_address(),
            ray_api.note(),
            "" if own else f"; it was started by another user, {owner}",
        )


def _owner(file: str) -> int | None:
    try:
        return os.stat(file).st_uid
    except OSError:
        return None


def _runs_here() -> bool:
    """Whether a cluster was started on this machine for others to join, by Ray's own rule, and
    still answers.

    Not address="auto", which also finds the private cluster of another program's ray.init().
    """
    address = ray_api.noted_address()
    if not address:
        return False
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWERS).close()
    except OSError as error:
        log.warning(
            "the cluster at %s, which Ray has noted down for this machine, does not answer "
            "(%s): another is started; `ray stop` clears that note",
            address,
            error,
        )
        return False
    except ValueError:
        pass  # no address that can be tried here: left to Ray
    return True


def disconnect() -> None:
    """Leave a cluster that `connect` started. Any other belongs to its user."""
    global _started_here
    if _started_here and ray_api.connected() and not ray_api.inherited():
        ray_api.leave()
    _started_here = False
