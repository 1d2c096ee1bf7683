"""Replicas on a Ray cluster: connecting, counting GPUs, placing actors, calling them."""

from __future__ import annotations

import logging
import os
import struct
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray._private.utils import read_ray_address
from ray._private.worker import global_worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydp_parallel.actor import METHODS, link_for, shared_link
from raydp_parallel.crew import Death, Lost, Place, Task, in_short
from raydp_parallel.errors import ClusterError, PlacementError
from raydp_parallel.line import Line, LineCut
from raydp_parallel.links import Arena, Descriptor, Mappings, Packet, Slice, shared
from raydp_parallel.messages import Hello
from raydp_parallel.naming import Names
from raydp_parallel.options import Options
from raydp_parallel.progress import Waiting

log = logging.getLogger("raydp_parallel")

_CLIENT = (
    "a ray:// client connection cannot run replicas: it has no object store and adds a proxy to every call. "
    "Start the driver on a machine of the cluster (ray.init(address='auto')), or submit it as a Ray job"
)
_FRAME = 1 << 15
"""Bytes that a socket takes in whether or not anybody reads."""

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


class Pending:
    """A call on its way: over the line, or as a Ray task.

    Args:
        door: Whose call it is.
        number: Its number at that door.
        ref: The Ray task, None if it went over the line.
        packets: What has to stay where it is until the answer comes.
    """

    def __init__(self, door: RemoteDoor, number: int, ref: Any, packets: Sequence[Packet] = ()) -> None:
        self._door = door
        self._line = door.line
        self._number = number
        self._ref = ref
        self._packets = packets

    def result(self, timeout: float | None) -> Any:
        """Wait for the answer."""
        if self._ref is not None or self._line is None:
            return ray.get(self._ref, timeout=timeout)
        try:
            answer = self._line.receive(self._number, timeout)
        except LineCut:
            ray.get(self._door.actor.hello.remote(), timeout=timeout)  # raises with the cause of the death
            return Death("its direct line was cut")
        return self._door.opened(answer)

    def give_up(self) -> None:
        """Nobody waits any more."""
        if self._line is not None:
            if self._ref is None:
                self._line.give_up(self._number)
            self._door.abandoned.append(self)


class RemoteDoor:
    """The driver's side of an actor's door.

    Args:
        actor: The actor.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.line: Line | None = None
        # What abandoned calls were sent with: the replica may still read it. Until it answers a later one.
        self.abandoned: list[Pending] = []
        self._number = 0
        self._missed = False
        self._mappings: Mappings | None = None
        self._read: deque[int] = deque()

    def call_directly(self, number: int = 0, timeout: float | None = None) -> None:
        """Open a direct line, if that can be had; else calls stay Ray tasks.

        Args:
            number: The first call that goes over it.
            timeout: Seconds to wait for calls that still run there.
        """
        address = ray.get(self.actor.open_line.remote(number), timeout=timeout)
        try:
            self.line = Line(address, self._read) if address is not None else None
        except OSError as error:
            log.info("no direct line to a replica on this node (%s): calls go through Ray, 1 ms each", error)

    def submit(
        self,
        method: str,
        header: bytes,
        beside: Sequence[Packet],
        kept: Sequence[Packet] = (),
        timeout: float | None = None,
        task: Task | None = None,
    ) -> Pending | Lost:
        """Send a call. What lies in the object store only Ray can carry."""
        number = self._number
        try:
            self._mend(number, timeout)
            self._number, self._missed = number + 1, True
            pending = self._send(number, method, header, beside, kept, task)
            self._missed = False
            return pending
        except (OSError, ray.exceptions.RayError) as error:
            return Lost(error)

    def _send(
        self,
        number: int,
        method: str,
        header: bytes,
        beside: Sequence[Packet],
        kept: Sequence[Packet],
        task: Task | None,
    ) -> Pending:
        if self._mappings is None:
            beside = [packet.array if isinstance(packet, Slice) else packet for packet in beside]
        large = len(header) + sum(len(packet) for packet in beside if isinstance(packet, np.ndarray)) > _FRAME
        if (
            self.line is None
            or any(isinstance(packet, ray.ObjectRef) for packet in beside)
            # The replica may be in the midst of a long answer, and would not read before that is taken.
            or (large and self.line.busy)
            or (task is not None and task.shown)
        ):
            plain = [packet.descriptor if isinstance(packet, Slice) else packet for packet in beside]
            call = getattr(self.actor, method)
            call = call.options(name=task.name) if task is not None else call
            return Pending(self, number, call.remote(number, header, *plain), [*beside, *kept])
        read = [self._read.popleft() for _ in range(len(self._read))]
        self.line.send(number, [struct.pack(f"<{1 + len(read)}Q", METHODS.index(method), *read), header, *beside])
        return Pending(self, number, None, [*beside, *kept])

    def _mend(self, number: int, timeout: float | None) -> None:
        """See that the replica waits for this call, and not for one that broke off or was never sent."""
        broken = self.line is not None and not self.line.intact
        if broken or self._missed:
            had_line = self.line is not None
            self.close()
            if had_line:
                self.call_directly(number, timeout)
            else:
                ray.get(self.actor.skip_to.remote(number), timeout=timeout)
            self._missed = False

    def opened(self, answer: list[Any]) -> Any:
        """An answer with its packets in reach. The replica may write to them again once nobody here reads them."""
        self.abandoned.clear()
        for i, part in enumerate(answer):
            if isinstance(part, Descriptor):
                assert self._mappings is not None
                answer[i] = self._mappings.open(part)
                weakref.finalize(answer[i], self._read.append, part.lease).atexit = False
        return tuple(answer) if len(answer) > 1 else answer[0]

    def share(self, arena: Arena) -> None:
        """Use shared memory on the line, if both sides can read the other's."""
        probe = arena.take(16)
        probe.array[:] = np.frombuffer(os.urandom(16), dtype=np.uint8)
        if self.line is None:
            return
        found = ray.get(self.actor.share.remote(probe.descriptor, probe.array.tobytes()))
        if found is None:
            return
        mappings = Mappings()
        try:
            if mappings.open(found[0]).tobytes() != found[1]:
                raise OSError("it shows something else")
            self._mappings = mappings
        except (OSError, ValueError) as error:
            ray.get(self.actor.unshare.remote())
            log.info("no shared memory with a replica on this node (%s): bytes are copied", error)

    def close(self) -> None:
        """Hang up."""
        if self.line is not None:
            self.line.close()


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
        nodes = _nodes()
        self._nodes = len(nodes)
        shares = options.link == "auto" and options.direct_line and len(nodes) == 1 and shared.exists()
        self._arena = Arena() if shares else None
        self.link = link_for(options.link, ray.put, ray.get) if self._arena is None else shared_link(self._arena)
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
        late = _wait([*refs.values()], self._options.placement_timeout)
        if late:
            self.stop(list(doors.values()))
            raise self._not_placed(places, [place for place, ref in refs.items() if ref in late])
        try:
            here = ray.get_runtime_context().get_node_id()
            for door, hello in ((doors[place], ray.get(ref)) for place, ref in refs.items()):
                if self._options.direct_line and hello.node == here:
                    door.call_directly()
                    if self._arena is not None:
                        door.share(self._arena)
            return {place: (doors[place], ray.get(ref)) for place, ref in refs.items()}
        except ray.exceptions.RayError as error:
            self.stop(list(doors.values()))
            text = str(error)
            hint = ": install raydp_parallel on every node of the cluster" if "'raydp_parallel'" in text else ""
            raise PlacementError(f"a replica did not start{hint}: {text}") from error

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
            options = {**booked, "scheduling_strategy": strategy}
            doors[place] = RemoteDoor(self._names.start(place, self._options.link, options))
        return doors

    def submit(
        self,
        door: RemoteDoor,
        method: str,
        header: bytes,
        beside: Sequence[Packet],
        kept: Sequence[Packet] = (),
        task: Task | None = None,
    ) -> Any:
        return door.submit(method, header, beside, kept, self._options.call_timeout, task)

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


def _wait(refs: list[Any], seconds: float) -> list[Any]:
    """Wait until replicas have been placed and have started; returns those that have not."""
    end, late = time.monotonic() + seconds, refs
    with Waiting("replicas to be placed, and to import torch", len(refs)) as tell:
        while late and time.monotonic() < end:
            _, late = ray.wait(refs, num_returns=len(refs), timeout=min(1.0, max(0.0, end - time.monotonic())))
            tell(len(refs) - len(late))
    return late


def _free(node: dict[str, Any]) -> str:
    free = ray._private.state.available_resources_per_node().get(node["NodeID"], {})
    total = node["Resources"]
    amounts = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in ("GPU", "CPU"))
    return f"node {node['NodeID'][:8]} ({node['NodeManagerAddress']}): {amounts}"


def _nodes() -> list[dict[str, Any]]:
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda node: (node["NodeID"] != here, node["NodeID"]))
