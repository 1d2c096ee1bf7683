"""The roster: who sits where, who stands in for whom, and who is buried."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from raydp_parallel import cluster, devices, forks
from raydp_parallel.books import Books
from raydp_parallel.crew import Crew, Death, Ending, Place
from raydp_parallel.errors import ExecutorClosed, GraphLost, ReplicaDied, forked
from raydp_parallel.jobs import Job
from raydp_parallel.local import LocalCrew
from raydp_parallel.messages import Hello
from raydp_parallel.monitor import Totals
from raydp_parallel.naming import Names, program
from raydp_parallel.options import Options
from raydp_parallel.respawn import Loss, Respawner
from raydp_parallel.seats import Seat, State

log = logging.getLogger("raydp_parallel")


class Roster:
    """The seats of an executor, and the crew that fills them.

    Args:
        options: How to place replicas, and what to do when one dies.

    Attributes:
        seats: By place, in the order in which they were first filled.
        totals: The executor's counters.
        books: Whose time went where.
        closed: Whether the executor was closed.
        replays: Whether another replica takes over when one dies.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._lock = threading.RLock()
        self._forked = False
        self.seats: dict[Place, Seat] = {}
        self.totals = Totals()
        self.books = Books(options.name or program())
        self.closed = False
        self.replays = options.on_fault == "replay"
        self._crew: Crew | None = None
        self._respawner: Respawner | None = None
        forks.tell_child(self)

    def after_fork(self) -> None:
        """Replicas in other processes stay the parent's."""
        self._lock = threading.RLock()
        crew = self._crew
        self._forked = crew is not None and not isinstance(crew, LocalCrew) and crew.alive()

    @property
    def forked(self) -> bool:
        """Whether the replicas are those of the process from which this one was forked."""
        return self._forked

    @property
    def lock(self) -> threading.RLock:
        """Held while seats change, and while calls are sent."""
        self.check_own()
        return self._lock

    def check_own(self) -> None:
        """Raise `ForkedProcess` if the replicas are the parent's."""
        if self._forked:
            raise forked()

    @property
    def crew(self) -> Crew:
        """Who runs the replicas."""
        self.check_own()
        assert self._crew is not None
        return self._crew

    @property
    def link(self) -> str:
        """What bytes travel by."""
        return self._crew.link.name if self._crew is not None else self.options.link

    def ready(self) -> list[Seat]:
        """Those that can be called."""
        return [seat for seat in self.seats.values() if seat.ready]

    def check_open(self) -> None:
        """Raise `ExecutorClosed` if it is."""
        if self.closed:
            raise ExecutorClosed("this executor was closed: make another, or leave `executor` out to use the process's")

    def refresh(self) -> bool:
        """Make sure there is a crew, and that it belongs to the cluster that is connected now; whether it is new."""
        self.check_open()
        if self._crew is not None and self._crew.alive():
            return False
        if self._respawner is not None:
            self._respawner.stop()
        if self._crew is not None:
            self._crew.stop([seat.door for seat in self.ready()])
        names = Names(self.books.name, {place: seat.index for place, seat in self.seats.items()})
        self._crew = LocalCrew(self.options) if self.options.in_process else cluster.RayCrew(names, self.options)
        self._respawner = Respawner(self._crew, self.options, self.books.event)
        for seat in self.seats.values():
            seat.empty(State.EMPTY)
        return True

    def fill(self, wanted: Sequence[Place]) -> None:
        """See that somebody sits in each place, or is on the way there."""
        self.pick_up()
        self._leave_nodes()
        absent = [p for p in dict.fromkeys(wanted) if p not in self.seats or not self.seats[p].ready]
        if not absent:
            return
        if self.replays and self._respawner is not None:
            behind = {p for p in absent if p in self.seats and self.seats[p].state in (State.DEAD, State.AWAY)}
            self._respawner.see_to(behind)
            absent = [place for place in absent if place not in behind]
        if not absent:
            return
        started = self.crew.start(absent)
        for place in absent:
            if place in started:
                again = place in self.seats and self.seats[place].state is State.DEAD
                self._count(self._seat(place, *started[place]), again)
            else:
                self._await(place)
        found = [(seat.place.number, seat.hello) for place, seat in self.seats.items() if place in wanted]
        devices.check_balance([(number, hello) for number, hello in found if hello is not None and hello.memory])

    def _await(self, place: Place) -> None:
        """An elastic executor starts without a place, which is filled once there is room."""
        seat = self.seats.setdefault(place, Seat(place, len(self.seats)))
        seat.state = State.AWAY
        if self._respawner is not None:
            self._respawner.see_to([place])

    def _leave_nodes(self) -> None:
        """Leave nodes that are about to end, as long as somebody is left elsewhere."""
        leaving = self.crew.leaving() if self.options.elastic else ()
        if not leaving:
            return
        going = [seat for seat in self.ready() if seat.hello is not None and seat.hello.node in leaving]
        staying = {seat.place.kind for seat in self.ready() if seat not in going}
        for seat in going:
            if seat.place.kind not in staying:
                continue  # its end, if it comes, is a death like any other
            self.crew.stop([seat.door])
            self.crew.release([seat.place])
            log.info("%s was left, because its node is about to end", seat)
            self.books.event(f"{seat} was left, because its node is about to end")
            seat.empty(State.AWAY)

    def missing(self) -> list[Seat]:
        """Those without a replica of their own."""
        return [seat for seat in self.seats.values() if not seat.ready]

    def grow(self, timeout: float) -> int:
        """Wait until everybody has a replica of their own, or the time is over; how many came."""
        before = len(self.missing())
        self.pick_up()
        if not self.replays or self._respawner is None:
            self.fill([seat.place for seat in self.missing()])
            return before - len(self.missing())
        deadline = time.monotonic() + timeout
        while (places := [seat.place for seat in self.missing()]) and (left := deadline - time.monotonic()) > 0:
            self._respawner.see_to(places)
            if not self._respawner.await_one(places, left):
                break
            self.pick_up()
        return before - len(self.missing())

    def pick_up(self) -> None:
        """Seat those that were started behind the scenes."""
        if self._respawner is None:
            return
        for place, (door, hello) in self._respawner.arrivals().items():
            home = self._seat(place, door, hello)
            for seat in self.ready():
                seat.dismiss(home)
            self._count(home, True)

    def _count(self, seat: Seat, again: bool) -> None:
        seat.tally.respawns += again
        self.totals.respawns += again

    def _seat(self, place: Place, door: Any, hello: Hello) -> Seat:
        seat = self.seats.setdefault(place, Seat(place, len(self.seats)))
        seat.seat(door, hello)
        self.books.seated(seat)
        return seat

    def choose(self, job: Job, load: Mapping[Seat, int], others: Collection[Seat]) -> Seat:
        """Who runs a job: who it is for, else one of the same kind, if need be the first that comes back.

        Args:
            job: The job.
            load: How many each seat was given already.
            others: Who takes part in the call; they have the model, and the others may not.
        """
        seat, needs = job.seat, job.needs
        if needs:
            holder = next((graph.seat for graph in needs if graph.whole), needs[0].seat)
            seat = holder if holder is not None and (holder.ready or not self.replays) else seat
            if not self.crew.alive() or (not self.replays and not all(graph.on(seat) for graph in needs)):
                raise GraphLost(f"{seat} lost the graph of this forward, because its process ended; run forward again")
        if seat.ready or not self.replays:
            return seat
        while True:
            self.pick_up()
            able = [s for s in self.ready() if s.place.kind == seat.place.kind]
            if able:
                return seat if seat in able else min(able, key=lambda s: (s not in others, load.get(s, 0), s.index))
            assert self._respawner is not None
            self._respawner.wait([place for place in self.seats if place.kind == seat.place.kind])

    def bury(self, seat: Seat, incarnation: int, method: str, death: Death) -> ReplicaDied:
        """A replica gave no answer: nobody calls it any more. Returns what to raise, if it comes to that."""
        with self.lock:
            new = seat.incarnation == incarnation and seat.ready
            cause = death.cause if self.replays else self.crew.cause(seat.door, death)
            error = ReplicaDied(f"{seat} died in {method}: {cause}. A new one starts with the next call")
            if not new:
                return error
            seat.empty(State.DEAD)
            seat.tally.deaths += 1
            if death.ending is Ending.SILENT or not self.replays:
                self.crew.stop([seat.door])
            if not self.replays:
                log.warning("%s", error)
                self.books.event(f"{seat} died in {method}: {cause}")
            elif self._respawner is not None:
                self._respawner.replace(Loss(seat.place, str(seat), seat.door, method, death, seat.answered))
        return error

    def release(self) -> None:
        """Start nobody any more. Who waits for a new replica, with the lock in his hand, is told so."""
        if self._respawner is not None:
            self._respawner.end()

    def close(self) -> None:
        """End everybody."""
        self.closed = True
        try:
            if self._respawner is not None:
                self._respawner.stop()
        finally:
            if self._crew is not None:
                self._crew.stop([seat.door for seat in self.ready()])
                self._crew.release()
                self._crew.link.close()
            for seat in self.seats.values():
                seat.state = State.CLOSED
