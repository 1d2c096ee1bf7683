"""All questions to Ray. For a new version of Ray, look here first.

Only this file and `registry` read Ray's private tables, of resources, actors and jobs: their public
forms need a dashboard.
"""

from __future__ import annotations

import atexit
import inspect
import math
import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray._private import worker
from ray._private.state import state
from ray._private.utils import get_ray_address_file, read_ray_address  # type: ignore[attr-defined]
from ray._private.worker import global_worker
from ray.core.generated import gcs_pb2
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from raydp_parallel.devices import forks

Group = PlacementGroup
Ref = ray.ObjectRef
RayError = ray.exceptions.RayError
RaySystemError = ray.exceptions.RaySystemError
StoreFull = ray.exceptions.ObjectStoreFullError
VERSION = ray.__version__

TURN = 0.2
"""Seconds of one wait inside Ray, which itself checks for Ctrl-C only once a second."""

BY_LABEL = "bundle_label_selector" in inspect.signature(placement_group).parameters
"""Whether this version places by labels."""

_pb: Any = gcs_pb2


# The session.


class Session:
    """The connection to Ray at the time when this was made."""

    def __init__(self) -> None:
        self._core = global_worker.core_worker  # type: ignore[attr-defined]

    def alive(self) -> bool:
        """Whether it still exists. After its end a question to Ray would start another cluster."""
        # Read with every call: the field that Ray's is_initialized() reads, at less cost.
        return global_worker.connected and global_worker.core_worker is self._core  # type: ignore[attr-defined]


def connected() -> bool:
    """Whether this process is connected to a cluster."""
    return bool(ray.is_initialized())


class _ParentsConnection:
    """The connection of the process from which this one was forked, which shares its sockets.

    An object or an actor of Ray that goes out of use is reported to the cluster. If the child did
    so, by collecting garbage for example, its message would change the state of the parent's
    connection, and the parent would wait for its next answer for ever.
    """

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def remove_actor_handle_reference(self, actor: object) -> None:
        """Called by an actor handle at its end."""

    def remove_object_ref_reference(self, ref: object) -> None:
        """Called by a reference at its end."""

    def async_delete_object_ref_stream(self, ref: object) -> None:
        """Called by a generator of references at its end."""


def _leave_to_parent() -> None:
    if connected() and not inherited():
        global_worker.core_worker = _ParentsConnection(global_worker.core_worker)  # type: ignore[attr-defined]
        # At exit it would end the parent's cluster, and wait for threads that are not here.
        atexit.unregister(ray.shutdown)


forks.call_in_child(_leave_to_parent)


def inherited() -> bool:
    """Whether the session is that of the process from which this one was forked. Ray cannot be used
    by both.
    """
    return connected() and isinstance(global_worker.core_worker, _ParentsConnection)  # type: ignore[attr-defined]


def through_client() -> bool:
    """Whether this process speaks with a cluster through a ``ray://`` proxy."""
    return bool(ray.util.client.ray.is_connected())


def noted_address() -> str | None:
    """The cluster that was started on this machine for others to join, if any."""
    return read_ray_address()


def note() -> str:
    """The file in which that address is."""
    return str(get_ray_address_file(None))


NICENESS = "RAY_worker_niceness"
"""The variable of the environment in which a starting node finds the niceness of its workers."""


def join(address: str | None) -> None:
    """Connect to a cluster by Ray's rules for addresses; ``"local"`` starts one.

    Ray's default for workers is a niceness of 15. On a machine with all cores busy, replicas
    then get a 30th of what this program's data loaders get. In a cluster that is started for this
    program they have its own priority.
    """
    local = "local" in (address, os.environ.get("RAY_ADDRESS"))
    ours = local and NICENESS not in os.environ
    if ours:
        os.environ[NICENESS] = "0"
    try:
        ray.init(address=address)
    finally:
        if ours:
            os.environ.pop(NICENESS, None)


def leave() -> None:
    """Disconnect, which ends a cluster that was started so."""
    ray.shutdown()


def is_private() -> bool:
    """Whether this process started the cluster, by ``ray.init()``: then it is one machine, and gets
    no others.
    """
    node: Any = worker._global_node
    return node is not None and bool(node.head)


def joined_address() -> str:
    """The cluster that this process joined."""
    return str(ray.get_runtime_context().gcs_address)


def here() -> str:
    """The node of this process."""
    return str(ray.get_runtime_context().get_node_id())


# Answers.


def get(ref: Any, timeout: float | None = None) -> Any:
    """The result of a task, or of a list of them. Waited for in short turns, between which Ctrl-C
    is noticed.

    Raises:
        TimeoutError: It is not there in time.
        RayError: The replica that was to answer died.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            return ray.get(ref, timeout=max(0.0, min(left, TURN)))
        except ray.exceptions.GetTimeoutError:
            if left <= TURN:
                raise


def late(refs: Sequence[Any], seconds: float = 0.0, count: int | None = None) -> list[Any]:
    """The tasks that have not ended after so long, or once ``count`` have; others may have, too."""
    return list(ray.wait([*refs], num_returns=count or len(refs), timeout=seconds)[1])


def put(value: Any) -> Any:
    """A reference to a value that lies in the object store."""
    return ray.put(value)


def kill(actor: Any) -> None:
    """End an actor at once."""
    ray.kill(actor)


def in_short(error: Exception) -> str:
    """What Ray says of a death, without its advice and what it repeats."""
    text = " ".join(str(error).split()).partition(" Some common causes")[0]
    return (text.partition("The actor is dead because ")[2] or text).rstrip(".")


# Nodes.


class Node(NamedTuple):
    """A living node.

    Attributes:
        id: Ray's id of it.
        address: Its IP address.
        total: What it has, by the name of the resource.
        free: What of that is free.
        labels: Its labels.
    """

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str]


def nodes() -> list[Node]:
    """The living nodes that do not drain, the driver's first, then by id."""
    first, free, leaving = here(), state.available_resources_per_node(), draining()
    found = [
        _node(n, free.get(n["NodeID"], {}))
        for n in ray.nodes()
        if n["Alive"] and n["NodeID"] not in leaving
    ]
    return sorted(found, key=lambda node: (node.id != first, node.id))


def _node(entry: Mapping[str, Any], free: Mapping[str, float]) -> Node:
    return Node(
        entry["NodeID"],
        entry["NodeManagerAddress"],
        entry["Resources"],
        free,
        entry.get("Labels") or {},
    )


def living() -> frozenset[str]:
    """All nodes that have not ended, by id."""
    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def draining() -> frozenset[str]:
    """The nodes that are about to end: they were drained, or their provider gave notice."""
    look = getattr(state, "get_draining_nodes", None)  # Ray 2.40 has it; it is not public
    return frozenset(look()) if look is not None else frozenset()


# Placement groups.


def group(
    name: str, bundles: Sequence[dict[str, float]], nodes: Sequence[str], labels: Mapping[str, str]
) -> Group:
    """Ask for a placement group, one bundle for each process.

    Args:
        name: Its name in the dashboard.
        bundles: What each process needs.
        nodes: The node of each, "" for any.
        labels: What labels any of them must have.
    """
    selectors = [{**labels, **({"ray.io/node-id": node} if node else {})} for node in nodes]
    by_label = {"bundle_label_selector": selectors} if BY_LABEL and any(selectors) else {}
    made: Group = placement_group([*bundles], "PACK", name=name, **by_label)
    return made


def is_placed(group: Group) -> bool:
    """Whether a group has got what it asked for."""
    return bool(placement_group_table(group).get("state") == "CREATED")


def nodes_of(group: Group) -> list[str]:
    """The node of each bundle of a group that was placed."""
    return [node for _, node in sorted(placement_group_table(group)["bundles_to_node_id"].items())]


def remove(groups: Collection[Group]) -> None:
    """Remove groups. After the end of the session there are none."""
    for group in groups if connected() else ():
        remove_placement_group(group)


def strategy(group: Group | None, bundle: int, node: str) -> Any:
    """How Ray is told to start a process in a bundle of a group, or without one on a node."""
    if group is None:
        # With soft=True Ray takes any node for what needs nothing (seen with 2.60).
        return NodeAffinitySchedulingStrategy(node, soft=False)
    return PlacementGroupSchedulingStrategy(group, bundle)


# Which jobs hold what.


class Holder(NamedTuple):
    """An actor, or a placement group, that holds GPUs.

    Attributes:
        node: Where.
        amount: How many.
        actor: What to call it, "" for a group.
        group: The group's name.
        job: The job that it belongs to, in words.
    """

    node: str
    amount: float
    actor: str
    group: str
    job: str


def holders() -> Iterator[Holder]:
    """The actors without a group, and the placement groups, that hold GPUs."""
    accessor = state._connect_and_get_accessor()
    jobs = _jobs()
    for entry in accessor.get_actor_table(None, "ALIVE"):
        actor = _pb.ActorTableData.FromString(entry)
        amount = dict(actor.required_resources).get("GPU", 0.0)
        if amount:
            name = repr(actor.name) if actor.name else "without a name"
            what = f"actor {name} ({actor.class_name}, pid {actor.pid})"
            yield Holder(actor.node_id.hex(), amount, what, "", jobs[actor.job_id.hex()])
    for entry in accessor.get_placement_group_table():
        group = _pb.PlacementGroupTableData.FromString(entry)
        amounts: dict[str, float] = defaultdict(float)
        if group.state != _pb.PlacementGroupTableData.REMOVED:
            for bundle in group.bundles:
                amounts[bundle.node_id.hex()] += dict(bundle.unit_resources).get("GPU", 0.0)
        job = jobs[group.creator_job_id.hex()]
        yield from (
            Holder(node, amount, "", group.name, job)
            for node, amount in amounts.items()
            if node and amount
        )


def _jobs() -> Mapping[str, str]:
    """What to call each job."""
    own = ray.get_runtime_context().get_job_id()
    names: dict[str, str] = defaultdict(lambda: "a job that ended")
    for job in state.job_table():
        entry = f", {job['Entrypoint']!r}" if job.get("Entrypoint") else ""
        where = f"job {job['JobID']} (pid {job['DriverPid']} on {job['DriverIPAddress']}{entry})"
        names[job["JobID"]] = "this program" if job["JobID"] == own else where
    return names
