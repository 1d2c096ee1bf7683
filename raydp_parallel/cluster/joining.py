"""Joining a cluster, and leaving one that was started here."""

from __future__ import annotations

import logging
import os
import socket

from raydp_parallel.cluster import session
from raydp_parallel.errors import ClusterError

log = logging.getLogger("raydp_parallel")

_CLIENT = (
    "a ray:// client connection cannot run replicas: it has no object store and adds a proxy to every call. "
    "Start the driver on a machine of the cluster (ray.init(address='auto')), or submit it as a Ray job"
)
_ANSWERS = 5.0
"""Seconds that a cluster has to take a call. Ray itself tries for minutes."""

_started_here = False


def connect(start: bool = True) -> bool:
    """Join the cluster: the one that is connected, ``RAY_ADDRESS``, one running here, else start one.

    Args:
        start: Whether to start a local cluster if there is none.

    Returns:
        Whether there is a cluster.
    """
    global _started_here
    if session.through_client():
        raise ClusterError(_CLIENT)
    if session.connected():
        return True
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise ClusterError(_CLIENT)
    running = bool(os.environ.get("RAY_ADDRESS")) or _runs_here()
    if not running and not start:
        return False
    session.join(None if running else "local")
    _started_here = not running
    return True


def _runs_here() -> bool:
    """Whether a cluster was started on this machine for others to join, by Ray's own rule, and still answers.

    Not address="auto", which also finds the private cluster of somebody else's ray.init().
    """
    address = session.noted_address()
    if not address:
        return False
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWERS).close()
    except OSError as error:
        log.warning(
            "the cluster at %s, which Ray has noted down for this machine, does not answer (%s): another is started; "
            "`ray stop` clears that note",
            address,
            error,
        )
        return False
    except ValueError:
        pass  # no address that can be tried: Ray knows more of it
    return True


def disconnect() -> None:
    """Leave a cluster that `connect` started; any other is its user's."""
    global _started_here
    if _started_here and session.connected():
        session.leave()
    _started_here = False
