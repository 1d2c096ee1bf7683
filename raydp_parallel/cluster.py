"""Replicas on a Ray cluster: placing actors, calling them, seeing their end."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import struct
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import ray
from ray._private.worker import global_worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydp_parallel.actor import METHODS, ReplicaActor, link_for, shared_link
from raydp_parallel.crew import Death, Ending, Place
from raydp_parallel.errors import PlacementError
from raydp_parallel.joining import check_gpus, connect, gpus, nodes
from raydp_parallel.line import Line, LineCut
from raydp_parallel.links import Arena, Descriptor, Mappings, Packet, Slice, shared
from raydp_parallel.messages import Hello
from raydp_parallel.options import Options

log = logging.getLogger("raydp_parallel")

_FRAME = 1 << 15
"""Bytes that a socket takes in whether or not anybody reads."""

_TURN = 0.2
"""Seconds that Ray is waited for at a time: inside, it looks for Ctrl-C once a second only."""

_CAUSE_TIMEOUT = 5.0
"""Seconds that Ray may take to say why a process ended."""


class Pending:
    """A call on its way: over the line, or as a Ray task.

    Args:
        door: Whose call it is.
        number: Its number at that door.
        ref: The Ray task, None if it went over the line.
        packets: What has to stay where it is until the answer comes.
    """

    def __init__(self, door: RemoteDoor, number: int, ref: Any, packets: Sequence[Packet] = ()) -> None:
        self.door = door
        self._line = door.line
        self._number = number
        self._ref = ref
        self._packets = packets

    def result(self, timeout: float | None) -> Any:
        """Wait for the answer."""
        if self._ref is not None or self._line is None:
            return _get(self._ref, timeout)
        try:
            answer = self._line.receive(self._number, timeout)
        except LineCut:
            return Death("its direct line was cut")
        try:
            return self.door.opened(answer)
        except OSError as error:
            return Death(f"its memory is gone: {error}")  # it ended right behind its answer

    def give_up(self) -> None:
        """Nobody waits any more."""
        if self._ref is None and self._line is not None:
            self._line.give_up(self._number)
            self.door.abandoned.append(self)


class Lost:
    """A call that could not be sent, because nobody is there.

    Args:
        door: Whose call it was.
        error: What was seen.
    """

    def __init__(self, door: RemoteDoor, error: Exception) -> None:
        self.door = door
        self._error = error

    def result(self, timeout: float | None) -> Death:
        """What came of it."""
        return Death(_in_short(self._error))

    def give_up(self) -> None:
        """Nothing is on its way."""


class RemoteDoor:
    """The driver's side of an actor's door.

    Args:
        actor: The actor.
        patience: Seconds that a frame may stand still on the line; None waits.
    """

    def __init__(self, actor: Any, patience: float | None = None) -> None:
        self.actor = actor
        self._patience = patience
        self.line: Line | None = None
        # What abandoned calls were sent with: the replica may still read it. Until it answers a later one.
        self.abandoned: list[Pending] = []
        self._number = 0
        self._missed = False
        self._mappings: Mappings | None = None
        self._read: deque[int] = deque()
        self._process: int | None = None

    def watch(self, pid: int) -> None:
        """Hold on to the process, which is on this machine, so that `end` finds it and no other."""
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._process = os.pidfd_open(pid)
                self._let_go = weakref.finalize(self, os.close, self._process)
                self._let_go.atexit = False

    def end(self) -> None:
        """End the process. Ray takes 5 s for one that was stopped, and cannot reach all of them."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            self._let_go()

    def call_directly(self, number: int = 0, timeout: float | None = None) -> None:
        """Open a direct line, if that can be had; else calls stay Ray tasks.

        Args:
            number: The first call that goes over it.
            timeout: Seconds to wait for calls that still run there.
        """
        address = ray.get(self.actor.open_line.remote(number), timeout=timeout)
        try:
            self.line = Line(address, self._read) if address is not None else None
            if self.line is not None and self._patience is not None:
                self.line.limit(self._patience)
        except OSError as error:
            log.info("no direct line to a replica on this node (%s): calls go through Ray, 1 ms each", error)

    def submit(
        self,
        method: str,
        header: bytes,
        beside: Sequence[Packet],
        kept: Sequence[Packet] = (),
        timeout: float | None = None,
    ) -> Pending | Lost:
        """Send a call. What lies in the object store only Ray can carry."""
        number = self._number
        try:
            self._mend(number, timeout)
            self._number, self._missed = number + 1, True
            pending = self._send(number, method, header, beside, kept)
            self._missed = False
            return pending
        except (OSError, ray.exceptions.RayError) as error:
            return Lost(self, error)

    def _send(
        self, number: int, method: str, header: bytes, beside: Sequence[Packet], kept: Sequence[Packet]
    ) -> Pending:
        if self._mappings is None:
            beside = [packet.array if isinstance(packet, Slice) else packet for packet in beside]
        large = len(header) + sum(len(packet) for packet in beside if isinstance(packet, np.ndarray)) > _FRAME
        if (
            self.line is None
            or any(isinstance(packet, ray.ObjectRef) for packet in beside)
            # The replica may be in the midst of a long answer, and would not read before that is taken.
            or (large and self.line.busy)
        ):
            plain = [packet.array if isinstance(packet, Slice) else packet for packet in beside]
            return Pending(self, number, getattr(self.actor, method).remote(number, header, *plain), kept)
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
        options: Deadlines, and what to book.
    """

    def __init__(self, options: Options) -> None:
        connect()
        self._options = options
        self._session = global_worker.core_worker  # type: ignore[attr-defined]
        machines = nodes()
        self._nodes = len(machines)
        shares = options.link == "auto" and options.direct_line and len(machines) == 1 and shared.exists()
        self._arena = Arena() if shares else None
        self.link = link_for(options.link, ray.put, ray.get) if self._arena is None else shared_link(self._arena)
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
        while late and (left := deadline - time.monotonic()) > 0 and not (cancelled is not None and cancelled()):
            _, late = ray.wait(refs, num_returns=len(refs), timeout=min(left, _TURN))
        return late

    def _meet(self, door: RemoteDoor, hello: Hello) -> None:
        if hello.node != ray.get_runtime_context().get_node_id():
            return
        door.watch(hello.pid)
        if self._options.direct_line:
            door.call_directly(timeout=self._options.placement_timeout)
            if self._arena is not None:
                door.share(self._arena)

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
            actor = ReplicaActor.options(**booked, scheduling_strategy=strategy).remote(  # type: ignore[attr-defined]
                place.kind, self._options.link, place.number
            )
            yield place, RemoteDoor(actor, self._options.call_timeout)

    def submit(
        self, door: RemoteDoor, method: str, header: bytes, beside: Sequence[Packet], kept: Sequence[Packet] = ()
    ) -> Any:
        return door.submit(method, header, beside, kept, self._options.call_timeout)

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
            return Death(_in_short(error))

    def cause(self, door: RemoteDoor, death: Death) -> str:
        # Ray would start another cluster, were it asked after the end of this one.
        if death.ending is Ending.SILENT or not self.alive():
            return death.cause
        try:
            ray.get(door.actor.hello.remote(), timeout=_CAUSE_TIMEOUT)
        except ray.exceptions.GetTimeoutError:
            return death.cause
        except ray.exceptions.RayError as error:
            return _in_short(error)
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


def _get(ref: Any, timeout: float | None) -> Any:
    """The result of a Ray task; waited for in short turns, between which Ctrl-C is heard."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            return ray.get(ref, timeout=max(0.0, min(left, _TURN)))
        except ray.exceptions.GetTimeoutError:
            if left <= _TURN:
                raise


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split()).partition(" Some common causes")[0]


def _free(node: dict[str, Any]) -> str:
    free = ray._private.state.available_resources_per_node().get(node["NodeID"], {})
    total = node["Resources"]
    amounts = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in ("GPU", "CPU"))
    return f"node {node['NodeID'][:8]} ({node['NodeManagerAddress']}): {amounts}"
