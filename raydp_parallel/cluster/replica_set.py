"""`ReplicaSet`: the replicas of an executor by device. Others stand in for the dead.

These are replaced in the background, by one thread for each, which also asks Ray for the cause. It
never takes the set's lock: the next call picks up what it started.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from raydp_parallel import errors
from raydp_parallel.cluster.clients import Client, end_all
from raydp_parallel.cluster.placement import DeviceId, Place, places
from raydp_parallel.cluster.start import Starter
from raydp_parallel.devices.cuda import Hello, check_balance
from raydp_parallel.monitoring.recorder import Recorder
from raydp_parallel.monitoring.stats import ReplicaInfo
from raydp_parallel.options import Options

log = logging.getLogger("raydp_parallel")

_LEFT = "the Ray cluster was left while replicas ran; the next use starts anew"
_PAUSES = 0.1, 30.0
"""The least and the longest pause before the next, if replicas die before they ever answered."""
_CLOSED = "this executor was closed: make another, or leave `executor` out to use the process's"
_LOOK = 0.02
"""Seconds between two looks of a call that waits for a new replica."""

_Loss = tuple[Client, str, str]
"""The client of a replica that died, the phase in which it died, and the first sign of it."""


class ReplicaSlot:
    """One place of an executor, and the replica that it has now.

    Attributes:
        place, index: The device, its number in the executor.
        client: The client of its replica, or of the last one.
        life: The number of processes that it has had.
        state: ``"ready"``, ``"starting"``, ``"dead"``, ``"away"`` (an elastic executor has no room
            for it) or ``"closed"``.
        answered: True if its replica has answered a call.
        cause: The cause of its last death.
        forget: Keys of graphs that the next message tells the replica to drop.
        revisions: The state that it holds, by the model's number.
        pending: The request that it has not answered yet.
    """

    def __init__(self, place: Place, index: int) -> None:
        self.place, self.index = place, index
        self.client: Any = None
        self.life = 0
        self.state = "starting"
        self.cause = ""
        self._reset()

    def _reset(self) -> None:
        self.answered = False
        self.forget: list[int] = []
        self.revisions: dict[int, Any] = {}
        self.pending: Any = None

    def install(self, client: Client) -> None:
        """Take a new replica, which holds nothing."""
        self.client, self.state = client, "ready"
        self.life += 1
        self._reset()

    @property
    def ready(self) -> bool:
        """Tell if it can be called."""
        return self.state == "ready"

    def info(self) -> ReplicaInfo:
        """Describe it for users."""
        device = "cpu" if self.place.kind == "cpu" else f"cuda:{self.place.number}"
        hello = Hello(0, "", device) if self.client is None else self.client.hello
        return ReplicaInfo(self.index, device, hello.node, hello.pid, self.state, hello.gpu)

    def __str__(self) -> str:
        info = self.info()
        where = f" (pid {info.pid}, node {info.node[:8]})" if info.pid else ""
        return f"replica {self.index} for device {self.place.device_id}{where}"


class ReplicaSet:
    """The slots of an executor.

    Attributes:
        slots: The slots by place, in the order in which they were first filled.
        recorder: The executor's counters.
        closed: True if it was closed.
        forked: True if the replicas are those of the process from which this one was forked.
    """

    def __init__(self, options: Options, name: str) -> None:
        self.options = options
        self.slots: dict[Place, ReplicaSlot] = {}
        self.recorder = Recorder(name)
        self.closed = False
        self._starter: Starter | None = None
        self._arrived: dict[Place, Client] = {}
        self._problems: dict[Place, errors.ParallelError] = {}
        self._in_vain: dict[Place, int] = {}
        self._working: dict[Place, threading.Thread] = {}
        self._ended = threading.Event()
        self.forked = False
        self.after_fork()
        _sets.add(self)

    def after_fork(self) -> None:
        """Leave the replicas to the parent; threads that are not here may hold its locks."""
        self._lock = threading.RLock()
        self._mutex = threading.Lock()  # of what background threads write; never waited with
        self.forked = self.forked or self._starter is not None

    @property
    def lock(self) -> threading.RLock:
        """The lock that is held while slots change and while calls run."""
        if self.forked:
            raise errors.forked()
        return self._lock

    def ready(self) -> list[ReplicaSlot]:
        """Return the slots that can be called."""
        return [slot for slot in self.slots.values() if slot.ready]

    def slots_for(self, ids: Sequence[DeviceId]) -> list[ReplicaSlot]:
        """Return the slots for ``device_ids``, and start those that never had a replica. A dead one
        is replaced in the background while others stand in.
        """
        wanted = places(tuple(ids))
        with self.lock:
            self._refresh()
            self._pick_up()
            if self.options.elastic:
                self._leave_nodes()
            missing = [p for p in wanted if p not in self.slots or not self.slots[p].ready]
            if missing:
                self._fill(missing)
            return [self.slots[place] for place in wanted]

    def _refresh(self) -> Starter:
        """Make sure that replicas belong to the cluster that is connected now."""
        if self.closed:
            raise errors.ExecutorClosed(_CLOSED)
        if self._starter is not None and self._starter.alive():
            return self._starter
        if self._starter is not None:  # the cluster was left, and the replicas with it
            self._stop_threads()
            self._ended = threading.Event()
            for slot in self.slots.values():
                slot.state = "starting"
        ranks = {place: slot.index for place, slot in self.slots.items()}
        self._starter = Starter(self.recorder.name, self.options, ranks)
        return self._starter

    def _fill(self, missing: Sequence[Place]) -> None:
        """Start replicas in new places; see to it that the others' are on their way."""
        now = [p for p in missing if p not in self.slots or self.slots[p].state == "starting"]
        self._ensure([place for place in missing if place not in now])
        if not now:
            return
        started = self._refresh().start([*dict.fromkeys(now)])
        self._install(started)
        absent = [place for place in now if place not in started]
        for place in absent:  # an elastic executor begins without them
            self._slot(place).state = "away"
        self._ensure(absent)
        hellos = [(slot.place.number, slot.client.hello) for slot in self.ready()]
        check_balance([(number, hello) for number, hello in hellos if hello.memory])

    def _slot(self, place: Place) -> ReplicaSlot:
        return self.slots.setdefault(place, ReplicaSlot(place, len(self.slots)))

    def _install(self, started: Mapping[Place, Client]) -> None:
        for place, client in started.items():
            slot = self._slot(place)
            slot.install(client)
            info = slot.info()
            self.recorder.started(slot.index, info.device, info.node, info.pid)

    def _pick_up(self) -> None:
        """Install the replicas that were started in the background."""
        if self._arrived:
            with self._mutex:
                found, self._arrived = self._arrived, {}
            self._install(found)

    def _leave_nodes(self) -> None:
        """Leave nodes that are about to end, if replicas of the same kind stay elsewhere."""
        leaving = self._refresh().leaving()
        going = [s for s in self.ready() if s.client.hello.node in leaving]
        staying = {slot.place.kind for slot in self.ready() if slot not in going}
        # The end of others, if it comes, is handled as a death.
        going = [slot for slot in going if slot.place.kind in staying]
        end_all(slot.client for slot in going)
        self._refresh().release([slot.place for slot in going])
        for slot in going:
            slot.state = "away"
            self.recorder.event(f"{slot} left its node, which is about to end")

    def choose(self, slot: ReplicaSlot, load: Mapping[ReplicaSlot, int]) -> ReplicaSlot:
        """Return the slot that does a slot's work: itself, else that of its kind with the least
        load, else the first that starts.
        """
        if slot.ready:
            return slot
        while True:
            self._pick_up()
            able = [s for s in self.ready() if s.place.kind == slot.place.kind]
            if slot in able:
                return slot
            if able:
                return min(able, key=lambda s: (load.get(s, 0), s.index))
            kind = [place for place in self.slots if place.kind == slot.place.kind]
            timeout = self.options.placement_timeout
            if not self._wait(kind, timeout):
                late = f"all replicas died, and no new one started in {timeout:g} s"
                known = [self._problems[place] for place in kind if place in self._problems]
                raise known[0] if known else errors.PlacementError(late)

    def lost(self, slot: ReplicaSlot, life: int, phase: str, cause: str) -> None:
        """Note that a replica died in a phase of a call, once, and replace it in the background."""
        with self.lock:
            if slot.life != life or not slot.ready:
                return
            slot.state, slot.cause = "dead", cause
            self.recorder.died(slot.index, f"{slot} died in {phase}: {cause}")
            place = slot.place
            self._in_vain[place] = 0 if slot.answered else self._in_vain.get(place, 0) + 1
            self._begin(place, (slot.client, f"{slot} died in {phase}", cause))

    def cause(self, slot: ReplicaSlot) -> str:
        """Ask Ray why a slot's last replica died; this takes up to some seconds."""
        return slot.client.cause() or "its process ended"

    def threads(self, chunks: int) -> int | None:
        """Return torch's threads for each of so many chunks on CPUs; None leaves them."""
        starter = self._starter
        if starter is None or not starter.alive():  # forward makes sure of one
            text = "the Ray cluster was left, and the replicas with it: run forward again"
            raise errors.GraphLost(text)
        return starter.threads(chunks)

    def grow(self, timeout: float) -> int:
        """Wait until each slot has a replica, or the time is over; returns how many were added."""
        with self.lock:
            self._refresh()
            before = len(self.ready())
            deadline = time.monotonic() + timeout
            while True:
                self._pick_up()
                missing = [slot.place for slot in self.slots.values() if not slot.ready]
                self._ensure(missing)
                if not missing or not self._wait(missing, deadline - time.monotonic()):
                    return len(self.ready()) - before

    def close(self) -> None:
        """End all replicas. A thread that holds the lock and waits for one stops waiting."""
        if self.forked:
            return
        self._ended.set()
        with self._lock:
            self.closed = True
            try:
                self._stop_threads()
            finally:  # also after Ctrl-C: nothing would end the replicas later
                end_all(slot.client for slot in self.ready())
                if self._starter is not None:
                    self._starter.release()
                for slot in self.slots.values():
                    slot.state = "closed"

    # Replacements.

    def _ensure(self, wanted: Collection[Place]) -> None:
        """Make sure that a replica starts in each place."""
        for place in wanted:
            if place not in self._arrived:
                self._begin(place, None)

    def _begin(self, place: Place, loss: _Loss | None) -> None:
        thread = threading.Thread(
            target=self._work, args=(place, loss, self._ended), name="raydp-respawn", daemon=True
        )
        with self._mutex:
            if self._ended.is_set() or place in self._working:
                return
            self._problems.pop(place, None)
            self._working[place] = thread
        thread.start()

    def _work(self, place: Place, loss: _Loss | None, ended: threading.Event) -> None:
        client = None
        try:
            if loss is not None:
                _report(*loss)
            client = self._start(place, ended)
        except errors.ParallelError as error:
            self._problems[place] = error
            log.error("no replica for device %s: %s", place.device_id, error)
        except Exception as error:  # of any kind: no call may wait for ever
            self._problems[place] = errors.ClusterError(f"no replica could be started: {error!r}")
            log.exception("no replica for device %s", place.device_id)
        finally:
            with self._mutex:
                self._working.pop(place, None)
                if client is not None and not ended.is_set():
                    self._arrived[place], client = client, None
            if client is not None:
                client.end()

    def _start(self, place: Place, ended: threading.Event) -> Client | None:
        starter = self._starter
        assert starter is not None
        while True:
            tries = self._in_vain.get(place, 0)
            pause = min(_PAUSES[0] * 2**tries, _PAUSES[1]) if tries else 0.0
            if pause == _PAUSES[1]:
                text = "device %s: %d replicas ended before they answered; the next starts in %g s"
                log.warning(text, place.device_id, tries, pause)
            if ended.wait(pause):
                return None
            if not starter.alive():
                raise errors.ClusterError(_LEFT)
            try:
                found = starter.start([place], lambda: ended.is_set() or not starter.alive())
            except errors.PlacementError as error:
                if ended.is_set() or not starter.alive():
                    continue  # which ends above
                known, self._problems[place] = place in self._problems, error
                if not isinstance(error, errors.NoRoom):  # a process was started
                    self._in_vain[place] = tries + 1
                level = logging.INFO if known else logging.WARNING
                log.log(level, "device %s waits for a replica: %s", place.device_id, error)
                continue
            self._problems.pop(place, None)
            return found[place]

    def _wait(self, wanted: Collection[Place], timeout: float) -> bool:
        """Wait until a replica started in one of the places; False if none will, or not in time."""
        deadline = time.monotonic() + timeout
        while not any(place in self._arrived for place in wanted):
            coming = any(place in self._working for place in wanted)
            if self._ended.wait(_LOOK):
                raise errors.ExecutorClosed(_CLOSED)
            if time.monotonic() >= deadline or not coming:
                return any(place in self._arrived for place in wanted)
        return True

    def _stop_threads(self) -> None:
        """Start no more replicas, and end those that started too late."""
        self._ended.set()
        for thread in [*self._working.values()]:
            thread.join(5.0)
        with self._mutex:
            late, self._arrived = self._arrived, {}
        end_all(late.values())


def _report(client: Client, what: str, cause: str) -> None:
    """Log why a replica died, which takes Ray a while to know, and end what may be left of it."""
    cause = client.cause() or cause
    client.end()
    done = "Its chunks run again on other replicas, and a new one starts in the background"
    log.warning("%s: %s. %s", what, cause, done)


_sets: weakref.WeakSet[ReplicaSet] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """End all threads before the program leaves Ray: Ray ends a process with a thread inside it."""
    for known in [*_sets]:
        if not known.forked:
            known._stop_threads()


def _after_fork() -> None:
    for known in [*_sets]:
        known.after_fork()


os.register_at_fork(after_in_child=_after_fork)
