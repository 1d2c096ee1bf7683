"""Replicas on a Ray cluster: joining it, placing actors, calling them, seeing their end."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import torch
from ray._private.utils import read_ray_address
from ray._private.worker import global_worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydp_parallel import devices
from raydp_parallel.actor import link_for, shared_link
from raydp_parallel.crew import Death, Ending, Place, Task
from raydp_parallel.errors import ClusterError, PlacementError
from raydp_parallel.links import Arena, Link, Packet, shared
from raydp_parallel.messages import Hello
from raydp_parallel.naming import Names
from raydp_parallel.options import Options
from raydp_parallel.progress import Waiting
from raydp_parallel.remote import TURN, Lost, Pending, RemoteDoor, in_short

log = logging.getLogger("raydp_parallel")

_CAUSE_TIMEOUT = 5.0
"""Seconds that Ray may take to say why a process ended."""

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
    return [node["NodeID"] for node in nodes() for _ in range(int(node["Resources"].get("GPU", 0)))]


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
            f"device_ids: {missing} not in the cluster, which has {has} on {len(nodes())} node(s). "
            "Use those, or 'cpu' entries for CPU replicas"
        )


def nodes() -> list[dict[str, Any]]:
    """The living nodes, the driver's first."""
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda node: (node["NodeID"] != here, node["NodeID"]))


class RayCrew:
    """Replicas as Ray actors.

    Args:
        names: Starts actors under their names.
        options: Deadlines, and what to book.
    """

    def __init__(self, names: Names, options: Options) -> None:
        connect()
        self._names = names
        self._options = options
        self._session = global_worker.core_worker  # type: ignore[attr-defined]
        machines = nodes()
        self._nodes = len(machines)
        self._arena: Arena | None = None
        self._told = False
        self.link = self._choose_link(len(machines))
        self._cores = int(min(node["Resources"].get("CPU", 1) for node in machines))

    def alive(self) -> bool:
        # Asked with every call: what Ray's own is_initialized() reads, without the way there.
        return global_worker.connected and global_worker.core_worker is self._session  # type: ignore[attr-defined]

    def threads(self, chunks: int) -> int | None:
        here = -(-chunks // self._nodes)
        return self._options.threads or max(1, self._cores // here)

    def start(
        self, places: Sequence[Place], cancelled: Callable[[], bool] | None = None
    ) -> dict[Place, tuple[Any, Hello]]:
        doors: dict[Place, RemoteDoor] = {}
        try:
            for place, door in self._create(places):
                doors[place] = door
            refs = {place: door.actor.hello.remote() for place, door in doors.items()}
            late = self._await(list(refs.values()), cancelled)
            if late:
                raise self._not_placed(places, [place for place, ref in refs.items() if ref in late])
            hellos = {place: ray.get(ref) for place, ref in refs.items()}
            for place, hello in hellos.items():
                self._meet(doors[place], hello)
            return {place: (doors[place], hello) for place, hello in hellos.items()}
        except ray.exceptions.RayError as error:
            self.stop(list(doors.values()))
            text = str(error)
            hint = ": install raydp_parallel on every node of the cluster" if "'raydp_parallel'" in text else ""
            raise PlacementError(f"a replica did not start{hint}: {text}") from error
        except BaseException:
            self.stop(list(doors.values()))
            raise

    def _await(self, refs: list[Any], cancelled: Callable[[], bool] | None) -> list[Any]:
        """Wait until all are there; returns those that are late. In short turns, between which Ctrl-C is heard."""
        deadline = time.monotonic() + self._options.placement_timeout
        late = refs
        with Waiting("replicas to be placed, and to import torch", len(refs)) as tell:
            while late and (left := deadline - time.monotonic()) > 0 and not (cancelled is not None and cancelled()):
                _, late = ray.wait(refs, num_returns=len(refs), timeout=min(left, TURN))
                if cancelled is None:  # nobody waits for what is started behind the scenes
                    tell(len(refs) - len(late))
        return late

    def _meet(self, door: RemoteDoor, hello: Hello) -> None:
        """Call directly who is on this node, and share memory with them."""
        if hello.node == ray.get_runtime_context().get_node_id():
            door.watch(hello.pid)
            if self._options.direct_line:
                door.call_directly(timeout=self._options.placement_timeout)
        if self._arena is None:
            return
        door.share(self._arena, self._options.link == "shared")
        if not door.shares or hello.device != "cpu":
            self.link.withdraw()
        if not door.shares:
            self._go_without(hello)
        elif isinstance(self.link, devices.DeviceLink):
            self._meet_on_device(door, hello, self.link)

    def _meet_on_device(self, door: RemoteDoor, hello: Hello, link: devices.DeviceLink) -> None:
        """Share the GPU's memory with who is on the driver's; the others get copies through the machine's."""
        device = devices.gpu_in_use(hello.gpu_uuid)
        if device is None:
            return
        arena = link.arena or devices.DeviceArena(device)
        why = door.share_device(arena)
        if why:
            devices.refused(why)
        else:
            link.arena = arena

    def _go_without(self, hello: Hello) -> None:
        """A replica and this process cannot read each other's memory."""
        what = f"the replica with pid {hello.pid} on node {hello.node[:8]} cannot share memory with this process"
        if self._options.link == "shared":
            raise PlacementError(f"Options(link='shared'): {what}; leave `link` out to copy bytes instead")
        if not self._told:
            self._told = True
            log.warning("%s: bytes are copied", what)

    def _choose_link(self, count: int) -> Link:
        """The link for a cluster of so many nodes."""
        name = self._options.link
        possible = self._options.direct_line and count == 1 and shared.exists()
        if name == "shared" and not possible:
            raise PlacementError(
                f"Options(link='shared'): memory is shared on one machine with Linux, over direct lines; the "
                f"cluster has {count} node(s), direct_line={self._options.direct_line}"
            )
        if name in ("auto", "shared") and possible:
            self._arena = Arena(pin=devices.pinner(None))
            return devices.reaching(shared_link(self._arena, gives=False, always=name == "shared"))
        return link_for(name, ray.put, ray.get)

    def _create(self, places: Sequence[Place]) -> Iterator[tuple[Place, RemoteDoor]]:
        machines, on_gpu = nodes(), gpus()
        for place in places:
            if place.kind == "cpu":
                node = machines[place.number % len(machines)]
                booked = {"num_cpus": self._options.cpus_per_replica, "num_gpus": 0}
            else:
                if place.number >= len(on_gpu):
                    check_gpus([place.number])
                node = next(n for n in machines if n["NodeID"] == on_gpu[place.number])
                booked = {"num_cpus": 0, "num_gpus": self._options.gpus_per_replica}
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            actor = self._names.start(place, self._options.link, {**booked, "scheduling_strategy": strategy})
            yield place, RemoteDoor(actor, self._options.call_timeout)

    def submit(
        self, door: RemoteDoor, method: str, header: bytes, beside: Sequence[Packet], task: Task | None = None
    ) -> Any:
        return door.submit(method, header, beside, self._options.call_timeout, task)

    def collect(self, pending: Sequence[Pending]) -> list[Any]:
        start, timeout = time.monotonic(), self._options.call_timeout
        before: Counter[int] = Counter()
        results = []
        # All chunks end before anyone hears of the failure of one.
        for call in pending:
            before[id(call.door)] += 1  # a replica that runs several calls, one after the other, has time for each
            deadline = None if timeout is None else start + timeout * before[id(call.door)]
            results.append(self._result(call, deadline))
        return results

    def _result(self, call: Pending | Lost, deadline: float | None) -> Any:
        left = None if deadline is None else max(0.001, deadline - time.monotonic())
        try:
            return call.result(left)
        except TimeoutError:
            return Death(f"no answer within call_timeout={self._options.call_timeout} s", Ending.SILENT)
        except ray.exceptions.RayError as error:
            return Death(in_short(error))

    def cause(self, door: RemoteDoor, death: Death) -> str:
        # Ray would start another cluster, were it asked after the end of this one.
        if death.ending is Ending.SILENT or not self.alive():
            return death.cause
        try:
            ray.get(door.actor.hello.remote(), timeout=_CAUSE_TIMEOUT)
        except ray.exceptions.GetTimeoutError:
            return death.cause
        except ray.exceptions.RayError as error:
            return in_short(error)
        return death.cause

    def stop(self, doors: Sequence[Any]) -> None:
        for door in doors:
            door.close()
            door.end()
            if self.alive():
                ray.kill(door.actor)

    def _not_placed(self, places: Sequence[Place], late: Sequence[Place]) -> PlacementError:
        asked = f"{sum(p.kind == 'gpu' for p in places)} GPU and {sum(p.kind == 'cpu' for p in places)} CPU replicas"
        free = "; ".join(_free(node) for node in nodes())
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
