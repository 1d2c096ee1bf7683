"""`ReplicaSet`: the replicas of an executor by device, which of them run the chunks of others, and
which are dead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from raydp_parallel import cluster, devices
from raydp_parallel.cluster.backend import Backend, Death, DevicePlace, Ending
from raydp_parallel.cluster.in_process import InProcessBackend
from raydp_parallel.cluster.ray_backend import ActorNames, program
from raydp_parallel.cluster.recorder import Recorder
from raydp_parallel.cluster.replica_slots import ChunkCall, ReplicaSlot, SlotState
from raydp_parallel.cluster.respawn import Loss, Respawner
from raydp_parallel.devices import forks
from raydp_parallel.devices.ranges import ReplicaHello
from raydp_parallel.errors import ExecutorClosed, GraphLost, ReplicaDied, forked
from raydp_parallel.monitoring.stats import Totals
from raydp_parallel.options import Options

log = logging.getLogger("raydp_parallel")


class ReplicaSet:
    """The slots of an executor, and the backend that fills them.

    Args:
        options: How to place replicas, and what to do when one dies.

    Attributes:
        slots: By place, in the order in which they were first filled.
        totals: The executor's counters.
        recorder: The record of where time went.
        closed: Whether the executor was closed.
        replays: Whether another replica takes over when one dies.
        before_leaving: Gives what is called with replicas that are about to end, while others stay.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._lock = threading.RLock()
        self._forked = False
        self.slots: dict[DevicePlace, ReplicaSlot] = {}
        self.totals = Totals()
        self.recorder = Recorder(options.name or program())
        self.closed = False
        self.replays = options.on_fault == "replay"
        self.before_leaving: Callable[[], Callable[[Sequence[ReplicaSlot]], None] | None]
        self.before_leaving = lambda: None
        self._backend: Backend | None = None
        self._respawner: Respawner | None = None
        forks.tell_child(self)

    def after_fork(self) -> None:
        """Note that replicas in other processes belong to the parent."""
        self._lock = threading.RLock()
        backend = self._backend
        self._forked = self._forked or (
            backend is not None and not isinstance(backend, InProcessBackend) and backend.alive()
        )

    @property
    def forked(self) -> bool:
        """Whether the replicas are those of the process from which this one was forked."""
        return self._forked

    @property
    def lock(self) -> threading.RLock:
        """Held while slots change, and while calls are sent."""
        if self._forked:
            raise forked()
        return self._lock

    def check_own(self) -> None:
        """Raise `ForkedProcess` if the replicas are the parent's."""
        if self._forked:
            raise forked()

    @property
    def backend(self) -> Backend:
        """The backend, which runs the replicas."""
        if self._forked:
            raise forked()
        assert self._backend is not None
        return self._backend

    @property
    def link(self) -> str:
        """The name of the link."""
        return self._backend.link.name if self._backend is not None else self.options.link

    def ready(self) -> list[ReplicaSlot]:
        """The slots that can be called."""
        return [slot for slot in self.slots.values() if slot.ready]

    def check_open(self) -> None:
        """Raise `ExecutorClosed` if the executor was closed."""
        if self.closed:
            raise ExecutorClosed(
                "this executor was closed: make another, or leave "
                "`executor` out to use the process's"
            )

    def refresh(self) -> bool:
        """Make sure that there is a backend, and that it belongs to the cluster that is connected
        now; returns whether it is new.
        """
        self.check_open()
        if self._backend is not None and self._backend.alive():
            return False
        if self._respawner is not None:
            self._respawner.stop()
        if self._backend is not None:
            self._backend.stop([slot.client for slot in self.ready()])
        names = ActorNames(
            self.recorder.name, {place: slot.index for place, slot in self.slots.items()}
        )
        if self.options.in_process:
            self._backend = InProcessBackend(self.options)
        else:
            self._backend = cluster.RayBackend(names, self.options)
        self._respawner = Respawner(self._backend, self.options, self.recorder.event)
        for slot in self.slots.values():
            slot.empty(SlotState.EMPTY)
        return True

    def fill(self, wanted: Sequence[DevicePlace]) -> None:
        """Make sure that each place has a replica, or one that is starting."""
        self.pick_up()
        self._leave_nodes()
        absent = [
            p for p in dict.fromkeys(wanted) if p not in self.slots or not self.slots[p].ready
        ]
        if not absent:
            return
        if self.replays and self._respawner is not None:
            later = {p for p in absent if p in self.slots and self.slots[p].is_replaced}
            self._respawner.ensure(later)
            absent = [place for place in absent if place not in later]
        if not absent:
            return
        started = self.backend.start(absent)
        for place in absent:
            if place in started:
                again = place in self.slots and self.slots[place].state is SlotState.DEAD
                self._count(self._slot(place, *started[place]), again)
            else:
                self._await(place)
        found = [
            (slot.place.number, slot.hello) for place, slot in self.slots.items() if place in wanted
        ]
        devices.check_balance(
            [(number, hello) for number, hello in found if hello is not None and hello.memory]
        )

    def _await(self, place: DevicePlace) -> None:
        """Let an elastic executor start without a place, which is filled once there is room."""
        slot = self.slots.setdefault(place, ReplicaSlot(place, len(self.slots)))
        slot.state = SlotState.AWAY
        if self._respawner is not None:
            self._respawner.ensure([place])

    def _leave_nodes(self) -> None:
        """Leave nodes that are about to end, as long as replicas of the same kind stay
        elsewhere.
        """
        leaving = self.backend.leaving() if self.options.elastic else ()
        if not leaving:
            return
        going = [
            slot for slot in self.ready() if slot.hello is not None and slot.hello.node in leaving
        ]
        staying = {slot.place.kind for slot in self.ready() if slot not in going}
        # The end of others, if it comes, is handled as a death.
        going = [slot for slot in going if slot.place.kind in staying]
        bring_to_safety = self.before_leaving()
        if going and bring_to_safety is not None:
            bring_to_safety(going)
        for slot in going:
            self.backend.stop([slot.client])
            self.backend.release([slot.place])
            log.info("%s was left, because its node is about to end", slot)
            self.recorder.event(f"{slot} was left, because its node is about to end")
            slot.empty(SlotState.AWAY)

    def missing(self) -> list[ReplicaSlot]:
        """The slots without a replica of their own."""
        return [slot for slot in self.slots.values() if not slot.ready]

    def grow(self, timeout: float) -> int:
        """Wait until each slot has a replica, or the time is over; returns how many were added."""
        before = len(self.missing())
        self.pick_up()
        if not self.replays or self._respawner is None:
            self.fill([slot.place for slot in self.missing()])
            return before - len(self.missing())
        deadline = time.monotonic() + timeout
        while places := [slot.place for slot in self.missing()]:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._respawner.ensure(places)
            if not self._respawner.await_one(places, left):
                break
            self.pick_up()
        return before - len(self.missing())

    def pick_up(self) -> None:
        """Install the replicas that were started in the background."""
        if self._respawner is None or not self._respawner.arrived:
            return
        for place, (client, hello) in self._respawner.arrivals().items():
            home = self._slot(place, client, hello)
            for slot in self.ready():
                slot.contents.dismiss(home.index)
            self._count(home, True)

    def _count(self, slot: ReplicaSlot, again: bool) -> None:
        slot.tally.respawns += again
        self.totals.respawns += again

    def _slot(self, place: DevicePlace, client: Any, hello: ReplicaHello) -> ReplicaSlot:
        slot = self.slots.setdefault(place, ReplicaSlot(place, len(self.slots)))
        slot.install(client, hello)
        self.recorder.installed(slot)
        return slot

    def choose(
        self, job: ChunkCall, load: Mapping[ReplicaSlot, int], others: Collection[ReplicaSlot]
    ) -> ReplicaSlot:
        """The slot that runs a job: the one that it is for, else one of the same kind of device. If
        no such replica is left, the first that starts.

        Args:
            job: The job.
            load: How many jobs each slot was given already.
            others: The slots that take part in the call. They have the model; others may not.
        """
        slot, needs = job.slot, job.needs
        if needs:
            holder = next((graph.slot for graph in needs if graph.whole), needs[0].slot)
            slot = holder if holder is not None and (holder.ready or not self.replays) else slot
            lost = not self.replays and not all(graph.on(slot) for graph in needs)
            if lost or self._backend is None or not self._backend.alive():
                gone = next((graph for graph in needs if not graph.on(slot)), needs[0])
                raise GraphLost(
                    f"{slot} lost {gone.what}, because its process ended; {gone.remedy}"
                )
        if slot.ready or not self.replays:
            return slot
        while True:
            self.pick_up()
            able = [s for s in self.ready() if s.place.kind == slot.place.kind]
            if slot in able:
                return slot
            if able:
                return min(able, key=lambda s: (s not in others, load.get(s, 0), s.index))
            assert self._respawner is not None
            self._respawner.wait([place for place in self.slots if place.kind == slot.place.kind])

    def mark_dead(
        self, slot: ReplicaSlot, incarnation: int, method: str, death: Death
    ) -> ReplicaDied:
        """Mark a replica that gave no answer as dead, so that it is not called any more. Returns
        the error, for a caller that cannot do without the answer.
        """
        with self.lock:
            new = slot.incarnation == incarnation and slot.ready
            cause = death.cause if self.replays else self.backend.cause(slot.client, death)
            error = ReplicaDied(
                f"{slot} died in {method}: {cause}. A new one starts with the next call"
            )
            if not new:
                return error
            slot.empty(SlotState.DEAD)
            slot.tally.deaths += 1
            if death.ending is Ending.SILENT or not self.replays:
                self.backend.stop([slot.client])
            if not self.replays:
                log.warning("%s", error)
                self.recorder.event(f"{slot} died in {method}: {cause}")
            elif self._respawner is not None:
                loss = Loss(
                    place=slot.place,
                    name=str(slot),
                    client=slot.client,
                    method=method,
                    death=death,
                    answered=slot.answered,
                )
                self._respawner.replace(loss)
        return error

    def release(self) -> None:
        """Start no more replicas. A thread that holds the lock and waits for one stops waiting."""
        if self._respawner is not None:
            self._respawner.end()

    def close(self) -> None:
        """End all replicas."""
        self.closed = True
        try:
            if self._respawner is not None:
                self._respawner.stop()
        finally:
            if self._backend is not None:
                self._backend.stop([slot.client for slot in self.ready()])
                self._backend.release()
                self._backend.link.close()
            for slot in self.slots.values():
                slot.state = SlotState.CLOSED
