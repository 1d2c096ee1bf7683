"""All questions to Ray. For a new version of Ray, look here first.

Private tables of Ray's are read here alone: their public forms need a dashboard.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import inspect
import logging
import math
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._private import worker
from ray._private.state import state
from ray._private.worker import global_worker
from ray.experimental.internal_kv import internal_kv_get_gcs_client
from ray.util.metrics import Counter, Gauge
from ray.util.placement_group import (
    PlacementGroup as PlacementGroup,
)
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from raydp_parallel.errors import ClusterError, forked, log

# A cluster of one's own has a token, which Ray finds by itself: nothing to warn of.
logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(
    lambda record: "is enabled" not in record.msg
)

Actor = Any  # Ray makes a handle's methods at run time
RayError = ray.exceptions.RayError

TURN = 0.2
"""Seconds of one wait inside Ray, which itself checks for Ctrl-C only once a second."""

PAUSE = 0.05
"""Seconds between two questions to Ray that wait for nothing."""

BY_LABEL = "bundle_label_selector" in inspect.signature(placement_group).parameters
"""True if this version places by labels."""


def session() -> Callable[[], bool]:
    """Make a function that tells if the connection of now still exists. After its end a question
    to Ray would start another cluster.
    """
    core = global_worker.core_worker  # type: ignore[attr-defined]
    # A cluster that is being left is no longer connected, and has its core for a while.
    return lambda: connected() and getattr(global_worker, "core_worker", None) is core


class _ParentsConnection:
    """The connection of the process from which this one was forked, which shares its sockets.

    Ray's objects report their end to the cluster. A child that did so, by collecting garbage,
    would change the state of its parent's connection, and the parent would wait for ever.
    """

    def __init__(self, core: object) -> None:
        self._core = core

    def __getattr__(self, name: str) -> object:
        return getattr(self._core, name)

    def _leave(self, thing: object) -> None:
        """Report nothing."""

    remove_actor_handle_reference = remove_object_ref_reference = _leave
    async_delete_object_ref_stream = _leave


def _leave_to_parent() -> None:
    if connected() and not inherited():
        global_worker.core_worker = _ParentsConnection(global_worker.core_worker)  # type: ignore[attr-defined]
        # At exit it would end the parent's cluster, and wait for threads that are not here. So
        # would the end of Ray's state, which gets one reference too many, and Ray's C++, before
        # which the process ends: of the handlers at exit the last one is the first to run.
        atexit.unregister(ray.shutdown)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(state))
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)


os.register_at_fork(after_in_child=_leave_to_parent)


connected: Callable[[], bool] = ray.is_initialized
"""Tells if this process is connected to a cluster."""


def inherited() -> bool:
    """Tell if the session is that of the process from which this one was forked."""
    return connected() and isinstance(global_worker.core_worker, _ParentsConnection)  # type: ignore[attr-defined]


_CLIENT = "a ray:// client runs no replicas: use ray.init(address='auto') on a node, or a Ray job"
_ANSWERS = 5.0
"""Seconds that a cluster may take to accept a connection. Ray itself tries for minutes."""

NICENESS = "RAY_worker_niceness"
"""The variable of the environment in which a starting node finds the niceness of its workers."""
_LONGEST = 36
"""Letters of a folder; this package adds 4, Ray 66 for a socket, and Unix allows 107."""

_ours: Callable[[], bool] = bool
"""Tells if the connection is that to a cluster which `connect` has started."""


def connect(start: bool = True) -> bool:
    """Join the cluster: the one that is connected, ``RAY_ADDRESS``, one running here, else start
    a local one; returns whether there is a cluster.
    """
    global _ours
    named = os.environ.get("RAY_ADDRESS", "")
    if ray.util.client.ray.is_connected() or (not connected() and named.startswith("ray://")):
        raise ClusterError(_CLIENT)
    if inherited():
        raise forked()
    if connected():
        return True
    noted = "" if named else _noted(start)
    if named not in ("", "local") or noted:
        ray.init(address=noted or None)  # Ray would read the note again, which may be another
        way = "RAY_ADDRESS (=local starts one)" if named else "what `ray start` noted"
        log.info("joined the Ray cluster at %s by %s", ray.get_runtime_context().gcs_address, way)
        return True
    if start:
        log.warning("starting Ray on this machine, which takes some seconds")
        # Ray's workers have a niceness of 15. On a machine with all cores busy, replicas then get a
        # 30th of what data loaders get.
        config = {} if NICENESS in os.environ else {"worker_niceness": 0}
        # The folder is of its user alone: in Ray's every user could take the place of its sockets.
        ray.init(address="local", _temp_dir=_folder(), _system_config=config)
        _ours = session()
        if os.environ.get("RAY_AUTH_MODE") == "token":
            log.warning("`ray get-auth-token` prints the token that Ray's dashboard asks for")
    return start


def _temporary() -> str:
    """Return the folder in which Ray has its own."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR", "/tmp")


def _folder() -> str:
    """Make the folder for the files of clusters, which only this user may enter: where Ray has its
    own, if names of sockets do not get too long there.
    """
    made = os.path.join(_temporary(), f"raydp-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(made, 0o700)
    found = os.lstat(made)
    # Who made it can do what he likes.
    if len(made) > _LONGEST or found.st_uid != os.getuid() or found.st_mode & 0o077:
        made = tempfile.mkdtemp(prefix="raydp-", dir="/tmp")
    return os.path.join(made, "ray")  # Ray lets all users write to this one


def _noted(start: bool) -> str:
    """Return the address of a cluster which was started on this machine for others to join, if that
    still answers. Say so if it does not, and another one will ``start``.

    Not address="auto", which also finds the private cluster of another program's ray.init().
    """
    file = Path(_temporary(), "ray", "ray_current_cluster")  # as the manual of ray.init() says
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as note:
            address = note.read().strip()
            owners = {os.fstat(note.fileno()).st_uid, file.parent.lstat().st_uid}
    except OSError:
        return ""
    # Every user may write to Ray's folder, and who runs a cluster runs code in its drivers.
    others = owners - {0, os.getuid()}
    why = f"belongs to another user ({others.pop()})" if others else _silent(address)
    if why and start:
        warn_once(f"the cluster at {address!r}, which {file} names, {why}: another is started")
    return "" if why else address


warn_once = functools.cache(log.warning)


def _silent(address: str) -> str:
    """Say why a cluster does not answer at an address; empty if it does, or Ray has to find out."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(ValueError):  # no address that can be tried here
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWERS).close()
        except OSError as error:
            return f"does not answer ({error})"
    return ""


def disconnect() -> None:
    """Leave a cluster that `connect` started. Any other belongs to its user."""
    if _ours():
        ray.shutdown()


def is_private() -> bool:
    """Tell if this process started the cluster: then it is one machine, and gets no others."""
    return bool(getattr(worker._global_node, "head", False))


def here() -> str:
    """Return the node of this process."""
    return str(ray.get_runtime_context().get_node_id())


def get(ref: Any, timeout: float | None = None) -> Any:
    """Return the result of a task; raises TimeoutError and RayError. Waits in short turns, between
    which Ctrl-C is noticed.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        with contextlib.suppress(ray.exceptions.GetTimeoutError):
            return ray.get(ref, timeout=TURN)
        if time.monotonic() >= deadline:
            raise TimeoutError


def late(refs: Sequence[object], seconds: float = 0.0) -> list[object]:
    """Return the tasks that have not ended after so long."""
    return list(ray.wait([*refs], num_returns=len(refs), timeout=seconds)[1])


kill = ray.kill
"""Ends an actor at once."""


def in_short(error: BaseException) -> str:
    """Say what Ray says of a death, without its advice and what it repeats."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    text = " ".join(str(error).split()).partition(" Some common causes")[0]
    return re.sub(r".*(The actor (is dead|died) because|exit detail:) ", "", text).rstrip(".")


def program() -> str:
    """Return the name of the program, or that by which Ray shows the task, the actor's method or
    Tune's trial that this process runs.
    """
    title = Path("/proc/self/cmdline").read_text(errors="replace").partition("\0")[0]
    name = title[5:] if title.startswith("ray::") else Path(*sys.argv[:1]).stem
    if name == "ImplicitFunc.train":
        with contextlib.suppress(AttributeError):  # of an older Ray
            name = sys.modules["ray.tune"].get_context().get_trial_name()
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "python"


class Node(NamedTuple):
    """A living node, with all of its resources."""

    id: str
    total: Mapping[str, float]


def nodes() -> list[Node]:
    """Return the living nodes that do not drain, the driver's first, then by id."""
    first, leaving = here(), draining()
    living = [Node(entry["NodeID"], entry["Resources"]) for entry in ray.nodes() if entry["Alive"]]
    staying = [node for node in living if node.id not in leaving]
    if not staying:
        raise ClusterError("this program's Ray node is gone: call ray.shutdown(), and go on")
    return sorted(staying, key=lambda node: (node.id != first, node.id))


def free(names: Sequence[str]) -> str:
    """Say how much of some resources the cluster has, and how much of that nobody holds."""
    now, total = ray.available_resources(), ray.cluster_resources()
    return ", ".join(f"{now.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in names)


own_address = ray.util.get_node_ip_address
"""Returns the address of this process's node."""


def living() -> frozenset[str]:
    """Return all nodes that have not ended, by id."""
    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def draining() -> frozenset[str]:
    """Return nodes that are about to end: they were drained, or their provider gave notice."""
    return frozenset(state.get_draining_nodes())


def group(
    name: str, bundles: Sequence[dict[str, float]], nodes: Sequence[str], labels: Mapping[str, str]
) -> PlacementGroup:
    """Ask for a placement group, one bundle for each process on a node with some labels; a node ""
    is any.
    """
    selectors = [{**labels, **({"ray.io/node-id": node} if node else {})} for node in nodes]
    by_label = {"bundle_label_selector": selectors} if BY_LABEL and any(selectors) else {}
    together = "PACK" if any("GPU" in bundle for bundle in bundles) else "SPREAD"
    made: PlacementGroup = placement_group([*bundles], together, name=name, **by_label)
    return made


def nodes_of(group: PlacementGroup) -> list[str] | None:
    """Return the node of each bundle of a group, none where there is no room for it; None until Ray
    has looked.
    """
    known = placement_group_table(group)
    if known.get("state") == "CREATED":
        return [node for _, node in sorted(known["bundles_to_node_id"].items())]
    why = known.get("stats", {}).get("scheduling_state")
    return [] if why in ("NO_RESOURCES", "INFEASIBLE") else None


def remove(groups: Collection[PlacementGroup]) -> None:
    """Remove groups. After the end of the session there are none."""
    for group in groups if connected() else ():
        remove_placement_group(group)


def strategy(group: PlacementGroup | None, bundle: int, node: str) -> object:
    """Tell Ray to start a process in a bundle of a group, or without one on a node."""
    if group is None:
        # With soft=True Ray takes any node for a process that needs nothing (seen with 2.60).
        return NodeAffinitySchedulingStrategy(node, soft=False)
    return PlacementGroupSchedulingStrategy(group, bundle)


_NAMESPACE = b"raydp_parallel/2"
"""The number is another one after each change of an entry's fields: other versions see none."""


_NOTHING = 5e-324  # the least number above 0
_metric = functools.cache(lambda kind, *about: kind(*about))


def add_to_counter(name: str, description: str, labels: dict[str, str], value: float) -> None:
    """Add to a counter, always with the same labels."""
    # inc() refuses 0, but a counter that does not begin at 0 shows its first step as none.
    _metric(Counter, name, description, tuple(labels)).inc(value or _NOTHING, labels)


def set_gauge(name: str, description: str, labels: dict[str, str], value: float) -> None:
    """Set a gauge."""
    _metric(Gauge, name, description, tuple(labels)).set(value, labels)


def _key(name: str) -> bytes:
    # Not Ray's public question for the job, which would start another cluster if this one was left.
    job = global_worker.core_worker.get_current_job_id()  # type: ignore[attr-defined]
    return f"{job.hex()}:{os.getpid()}:{name}".encode()


def put_entry(name: str, value: str) -> None:
    """Write an entry of this process's, by its name, to Ray's key-value store."""
    internal_kv_get_gcs_client().internal_kv_put(_key(name), value.encode(), True, _NAMESPACE)


def delete_entry(name: str) -> None:
    """Delete it."""
    internal_kv_get_gcs_client().internal_kv_del(_key(name), False, _NAMESPACE)


def entries(address: str | None = None) -> list[str]:
    """Return the entries of a cluster that have a living driver; those of killed ones are deleted.
    Without an address: of the cluster that ``RAY_ADDRESS`` names, or of the user's that run here.
    """
    with contextlib.suppress(ImportError, AttributeError):  # an older Ray knows no tokens
        from ray._private.authentication import authentication_token_setup as tokens

        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    named = address or os.environ.get("RAY_ADDRESS")
    # Not Ray's own choice, the cluster that it noted last, which may be dead.
    places = [named] if named and named != "auto" else sorted(_running())
    found: list[str] = []
    problem: object = "" if places else "none runs on this machine"
    for place in places:
        try:
            found += _entries(place)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            problem = error
    if problem and not found:
        raise ClusterError(
            f"no Ray cluster to look at: {problem}. Run this on a machine of the cluster, or give "
            "--address; a cluster with a token also needs RAY_AUTH_MODE=token and its token"
        )
    return found


def _running() -> set[str]:
    """Return the addresses of the clusters that this user runs here. Ray's own list has those of
    others: whoever is asked is told the token.
    """
    found = set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is another user's, or has ended
            mine = f"\nUid:\t{os.getuid()}\t" in (process / "status").read_text()
            if mine and os.readlink(process / "exe").endswith("/raylet"):
                line = (process / "cmdline").read_text(errors="replace")
                found.update(re.findall("--gcs-address=([^\0 ]+)", line))
    return found


def _entries(address: str) -> list[str]:
    """Return the entries of one cluster, in the order of their keys."""
    if why := _silent(address):
        raise ConnectionError(f"{address} {why}")
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    store = GcsClient(address=address)
    dead = {known.job_id.hex(): known.is_dead for known in store.get_all_job_info().values()}
    found = []
    for key in sorted(store.internal_kv_keys(b"", _NAMESPACE)):
        if dead.get(key.decode(errors="replace").partition(":")[0], True):
            store.internal_kv_del(key, False, _NAMESPACE)
        elif (value := store.internal_kv_get(key, _NAMESPACE)) is not None:
            found.append(value.decode(errors="replace"))
    return found
