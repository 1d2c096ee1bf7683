"""The replica set: who sits where, who stands in for whom, and who is buried."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from raydp_parallel import cluster, devices
from raydp_parallel.cluster.actor_names import ActorNames, program
from raydp_parallel.cluster.backend import Backend, Death, DevicePlace, Ending
from raydp_parallel.cluster.chunk_calls import ChunkCall
from raydp_parallel.cluster.in_process import InProcessBackend
from raydp_parallel.cluster.recorder import Recorder
from raydp_parallel.cluster.replica_slots import ReplicaSlot, SlotState
from raydp_parallel.cluster.respawn import Loss, Respawner
from raydp_parallel.devices import forks
from raydp_parallel.devices.specs import ReplicaHello
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
        recorder: Whose time went where.
        closed: Whether the executor was closed.
        replays: Whether another replica takes over when one dies.
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
        self._backend: Backend | None = None
        self._respawner: Respawner | None = None
        forks.tell_child(self)

    def after_fork(self) -> None:
        """Replicas in other processes stay the parent's."""
        self._lock = threading.RLock()
        backend = self._backend
        self._forked = (
            backend is not None and not isinstance(backend, InProcessBackend) and backend.alive()
        )

    @property
    def forked(self) -> bool:
        """Whether the replicas are those of the process from which this one was forked."""
        return self._forked

    @property
    def lock(self) -> threading.RLock:
        """Held while slots change, and while calls are sent."""
        self.check_own()
        return self._lock

    def check_own(self) -> None:
        """Raise `ForkedProcess` if the replicas are the parent's."""
        if self._forked:
            raise forked()

    @property
    def backend(self) -> Backend:
        """Who runs the replicas."""
        self.check_own()
        assert self._backend is not None
        return self._backend

    @property
    def link(self) -> str:
        """What bytes travel by."""
        return self._backend.link.name if self._backend is not None else self.options.link

    def ready(self) -> list[ReplicaSlot]:
        """Those that can be called."""
        return [slot for slot in self.slots.values() if slot.ready]

    def check_open(self) -> None:
        """Raise `ExecutorClosed` if it is."""
        if self.closed:
            raise ExecutorClosed(
                "this executor was closed: make another, or leave "
                "`executor` out to use the process's"
            )

    def refresh(self) -> bool:
        """Make sure there is a backend, and that it belongs to the cluster that is connected now;
        whether it is new.
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
        self._backend = (
            InProcessBackend(self.options)
            if self.options.in_process
            else cluster.RayBackend(names, self.options)
        )
        self._respawner = Respawner(self._backend, self.options, self.recorder.event)
        for slot in self.slots.values():
            slot.empty(SlotState.EMPTY)
        return True

    def fill(self, wanted: Sequence[DevicePlace]) -> None:
        """See that somebody sits in each place, or is on the way there."""
        self.pick_up()
        self._leave_nodes()
        absent = [
            p for p in dict.fromkeys(wanted) if p not in self.slots or not self.slots[p].ready
        ]
        if not absent:
            return
        if self.replays and self._respawner is not None:
            behind = {
                p
                for p in absent
                if p in self.slots and self.slots[p].state in (SlotState.DEAD, SlotState.AWAY)
            }
            self._respawner.see_to(behind)
            absent = [place for place in absent if place not in behind]
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
        """An elastic executor starts without a place, which is filled once there is room."""
        slot = self.slots.setdefault(place, ReplicaSlot(place, len(self.slots)))
        slot.state = SlotState.AWAY
        if self._respawner is not None:
            self._respawner.see_to([place])

    def _leave_nodes(self) -> None:
        """Leave nodes that are about to end, as long as somebody is left elsewhere."""
        leaving = self.backend.leaving() if self.options.elastic else ()
        if not leaving:
            return
        going = [
            slot for slot in self.ready() if slot.hello is not None and slot.hello.node in leaving
        ]
        staying = {slot.place.kind for slot in self.ready() if slot not in going}
        for slot in going:
            if slot.place.kind not in staying:
                continue  # its end, if it comes, is a death like any other
            self.backend.stop([slot.client])
            self.backend.release([slot.place])
            log.info("%s was left, because its node is about to end", slot)
            self.recorder.event(f"{slot} was left, because its node is about to end")
            slot.empty(SlotState.AWAY)

    def missing(self) -> list[ReplicaSlot]:
        """Those without a replica of their own."""
        return [slot for slot in self.slots.values() if not slot.ready]

    def grow(self, timeout: float) -> int:
        """Wait until everybody has a replica of their own, or the time is over; how many came."""
        before = len(self.missing())
        self.pick_up()
        if not self.replays or self._respawner is None:
            self.fill([slot.place for slot in self.missing()])
            return before - len(self.missing())
        deadline = time.monotonic() + timeout
        while (places := [slot.place for slot in self.missing()]) and (
            left := deadline - time.monotonic()
        ) > 0:
            self._respawner.see_to(places)
            if not self._respawner.await_one(places, left):
                break
            self.pick_up()
        return before - len(self.missing())

    def pick_up(self) -> None:
        """Seat those that were started behind the scenes."""
        if self._respawner is None:
            return
        for place, (client, hello) in self._respawner.arrivals().items():
            home = self._slot(place, client, hello)
            for slot in self.ready():
                slot.dismiss(home)
            self._count(home, True)

    def _count(self, slot: ReplicaSlot, again: bool) -> None:
        slot.tally.respawns += again
        self.totals.respawns += again

    def _slot(self, place: DevicePlace, client: Any, hello: ReplicaHello) -> ReplicaSlot:
        slot = self.slots.setdefault(place, ReplicaSlot(place, len(self.slots)))
        slot.slot(client, hello)
        self.recorder.seated(slot)
        return slot

    def choose(
        self, job: ChunkCall, load: Mapping[ReplicaSlot, int], others: Collection[ReplicaSlot]
    ) -> ReplicaSlot:
        """Who runs a job: who it is for, else one of the same kind, if need be the first that comes
        back.

        Args:
            job: The job.
            load: How many each slot was given already.
            others: Who takes part in the call; they have the model, and the others may not.
        """
        slot, needs = job.slot, job.needs
        if needs:
            holder = next((graph.slot for graph in needs if graph.whole), needs[0].slot)
            slot = holder if holder is not None and (holder.ready or not self.replays) else slot
            if not self.backend.alive() or (
                not self.replays and not all(graph.on(slot) for graph in needs)
            ):
                raise GraphLost(
                    f"{slot} lost the graph of this forward, because its "
                    "process ended; run forward again"
                )
        if slot.ready or not self.replays:
            return slot
        while True:
            self.pick_up()
            able = [s for s in self.ready() if s.place.kind == slot.place.kind]
            if able:
                return (
                    slot
                    if slot in able
                    else min(able, key=lambda s: (s not in others, load.get(s, 0), s.index))
                )
            assert self._respawner is not None
            self._respawner.wait([place for place in self.slots if place.kind == slot.place.kind])

    def mark_dead(
        self, slot: ReplicaSlot, incarnation: int, method: str, death: Death
    ) -> ReplicaDied:
        """A replica gave no answer: nobody calls it any more. Returns what to raise, if it comes to
        that.
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
                self._respawner.replace(
                    Loss(slot.place, str(slot), slot.client, method, death, slot.answered)
                )
        return error

    def release(self) -> None:
        """Start nobody any more. Who waits for a new replica, with the lock in his hand, is told
        so.
        """
        if self._respawner is not None:
            self._respawner.end()

    def close(self) -> None:
        """End everybody."""
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
