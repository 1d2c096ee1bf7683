"""Replicas on a Ray cluster: connecting, counting GPUs, placing actors, calling them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import ray
import torch
from ray._private.utils import read_ray_address
from ray._private.worker import global_worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydp_parallel.actor import ReplicaActor, link_for, shared_link
from raydp_parallel.crew import Death, Place
from raydp_parallel.errors import ClusterError, PlacementError
from raydp_parallel.links import Arena, Link, Packet, shared
from raydp_parallel.messages import Hello
from raydp_parallel.options import Options
from raydp_parallel.remote import Pending, RemoteDoor, in_short

log = logging.getLogger("raydp_parallel")

_CLIENT = (
    "a ray:// client connection cannot run replicas: it has no object store and adds a proxy to every call. "
    "Start the driver on a machine of the cluster (ray.init(address='auto')), or submit it as a Ray job"
)
_started_here = False


def connect(start: bool = True) -> bool:
    """Join the cluster: the one that is connected, ``RAY_ADDRESS``, one running here, else start one.

    Args:
        start: Whether to start a local cluster if there is none.

    Returns:
        Whether there is a cluster.
    """
    global _started_here
    if ray.util.client.ray.is_connected():
        raise ClusterError(_CLIENT)
    if ray.is_initialized():
        return True
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise ClusterError(_CLIENT)
    # Ray's own rule. Not address="auto", which also finds the private cluster of somebody else's ray.init().
    running = bool(os.environ.get("RAY_ADDRESS") or read_ray_address())
    if not running and not start:
        return False
    ray.init()
    _started_here = not running
    return True


def disconnect() -> None:
    """Leave a cluster that `connect` started; any other is its user's."""
    global _started_here
    if _started_here and ray.is_initialized():
        ray.shutdown()
    _started_here = False


def gpus() -> list[str]:
    """The node of each logical GPU: the driver's node first, then by node id."""
    return [node["NodeID"] for node in _nodes() for _ in range(int(node["Resources"].get("GPU", 0)))]


def all_gpus() -> list[int]:
    """Every GPU of the cluster. On a machine without a GPU no cluster is started just to find none."""
    return list(range(len(gpus()))) if connect(start=torch.cuda.is_available()) else []


def check_gpus(ids: Sequence[int]) -> None:
    """Raise `PlacementError` for ids that the cluster has not got."""
    connect()
    count = len(gpus())
    missing = [i for i in ids if i >= count]
    if missing:
        has = "no GPU" if not count else "GPU 0 alone" if count == 1 else f"GPUs 0 to {count - 1}"
        raise PlacementError(
            f"device_ids: {missing} not in the cluster, which has {has} on {len(_nodes())} node(s). "
            "Use those, or 'cpu' entries for CPU replicas"
        )


class RayCrew:
    """Replicas as Ray actors.

    Args:
        options: Deadlines, and what to book.
    """

    def __init__(self, options: Options) -> None:
        connect()
        self._options = options
        self._session = global_worker.core_worker  # type: ignore[attr-defined]
        nodes = _nodes()
        self._nodes = len(nodes)
        self._arena: Arena | None = None
        self._told = False
        self.link = self._choose_link(len(nodes))
        self._cores = int(min(node["Resources"].get("CPU", 1) for node in nodes))

    def alive(self) -> bool:
        # Asked with every call: what Ray's own is_initialized() reads, without the way there.
        return global_worker.connected and global_worker.core_worker is self._session  # type: ignore[attr-defined]

    def threads(self, chunks: int) -> int | None:
        here = -(-chunks // self._nodes)
        return self._options.threads or max(1, self._cores // here)

    def start(self, places: Sequence[Place]) -> dict[Place, tuple[Any, Hello]]:
        doors = self._create(places)
        refs = {place: door.actor.hello.remote() for place, door in doors.items()}
        _, late = ray.wait(list(refs.values()), num_returns=len(refs), timeout=self._options.placement_timeout)
        if late:
            self.stop(list(doors.values()))
            raise self._not_placed(places, [place for place, ref in refs.items() if ref in late])
        try:
            found = {place: (doors[place], ray.get(ref)) for place, ref in refs.items()}
            self._connect(found.values())
            return found
        except ray.exceptions.RayError as error:
            self.stop(list(doors.values()))
            text = str(error)
            hint = ": install raydp_parallel on every node of the cluster" if "'raydp_parallel'" in text else ""
            raise PlacementError(f"a replica did not start{hint}: {text}") from error

    def _connect(self, found: Iterable[tuple[RemoteDoor, Hello]]) -> None:
        """Call directly whoever is on this node, and share memory with them."""
        here = ray.get_runtime_context().get_node_id()
        for door, hello in found:
            if self._options.direct_line and hello.node == here:
                door.call_directly()
            if self._arena is not None:
                sees = door.share(self._arena, self._options.link == "shared") and hello.device == "cpu"
                if not sees:
                    self.link.withdraw()
                if not door.shares:
                    self._go_without(hello)

    def _go_without(self, hello: Hello) -> None:
        """A replica and this process cannot read each other's memory."""
        what = f"the replica with pid {hello.pid} on node {hello.node[:8]} cannot share memory with this process"
        if self._options.link == "shared":
            raise PlacementError(f"Options(link='shared'): {what}; leave `link` out to copy bytes instead")
        if not self._told:
            self._told = True
            log.warning("%s: bytes are copied", what)

    def _choose_link(self, nodes: int) -> Link:
        name = self._options.link
        possible = self._options.direct_line and nodes == 1 and shared.exists()
        if name == "shared" and not possible:
            raise PlacementError(
                f"Options(link='shared'): memory is shared on one machine with Linux, over direct lines; the "
                f"cluster has {nodes} node(s), direct_line={self._options.direct_line}"
            )
        if name in ("auto", "shared") and possible:
            self._arena = Arena()
            return shared_link(self._arena, gives=False, always=name == "shared")
        return link_for(name, ray.put, ray.get)

    def _create(self, places: Sequence[Place]) -> dict[Place, Any]:
        nodes, on_gpu = _nodes(), gpus()
        doors = {}
        for place in places:
            if place.kind == "cpu":
                node = nodes[place.number % len(nodes)]
                booked = {"num_cpus": self._options.cpus_per_replica, "num_gpus": 0}
            else:
                if place.number >= len(on_gpu):
                    check_gpus([place.number])
                node = next(n for n in nodes if n["NodeID"] == on_gpu[place.number])
                booked = {"num_cpus": 0, "num_gpus": self._options.gpus_per_replica}
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            actor = ReplicaActor.options(**booked, scheduling_strategy=strategy).remote(  # type: ignore[attr-defined]
                place.kind, self._options.link, place.number
            )
            doors[place] = RemoteDoor(actor)
        return doors

    def submit(self, door: RemoteDoor, method: str, header: bytes, beside: Sequence[Packet]) -> Any:
        return door.submit(method, header, beside, self._options.call_timeout)

    def collect(self, pending: Sequence[Pending]) -> list[Any]:
        timeout = self._options.call_timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        # All chunks end before anyone hears of the failure of one.
        return [self._result(call, deadline) for call in pending]

    def _result(self, call: Pending, deadline: float | None) -> Any:
        left = None if deadline is None else max(0.001, deadline - time.monotonic())
        try:
            return call.result(left)
        except TimeoutError:
            return Death(f"no answer within call_timeout={self._options.call_timeout} s")
        except ray.exceptions.RayError as error:
            return Death(in_short(error))

    def stop(self, doors: Sequence[Any]) -> None:
        for door in doors:
            door.close()
            if self.alive():
                ray.kill(door.actor)

    def _not_placed(self, places: Sequence[Place], late: Sequence[Place]) -> PlacementError:
        asked = f"{sum(p.kind == 'gpu' for p in places)} GPU and {sum(p.kind == 'cpu' for p in places)} CPU replicas"
        free = "; ".join(_free(node) for node in _nodes())
        return PlacementError(
            f"asked for {asked}; after {self._options.placement_timeout:g} s the replicas for device_ids "
            f"{[p.device_id for p in late]} were not running. Free now: {free}. GPUs are held by other actors or tasks "
            "of this cluster (`ray list actors` shows them) or by another executor: close it, or use fewer device_ids"
        )


def _free(node: dict[str, Any]) -> str:
    free = ray._private.state.available_resources_per_node().get(node["NodeID"], {})
    total = node["Resources"]
    amounts = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in ("GPU", "CPU"))
    return f"node {node['NodeID'][:8]} ({node['NodeManagerAddress']}): {amounts}"


def _nodes() -> list[dict[str, Any]]:
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda node: (node["NodeID"] != here, node["NodeID"]))
