"""`ReplicaSet`: the replicas of an executor by device. Others stand in for the dead, until a
`Successor` is there.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from raydp_parallel import errors
from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.clients import Client, end_all
from raydp_parallel.cluster.placement import DeviceId, Place, places
from raydp_parallel.cluster.start import Starter
from raydp_parallel.devices.cuda import Hello, check_balance
from raydp_parallel.errors import log
from raydp_parallel.monitoring.recorder import Recorder
from raydp_parallel.monitoring.stats import ReplicaInfo
from raydp_parallel.options import ExecutorOptions

_INSTEAD = "Its chunks run again on other replicas, and a new one starts in the background"
_PAUSES = 0.1, 30.0
"""The least and the longest pause before the next, if replicas die before they ever answered."""
_UNKNOWN = Hello(0, "", "")
_CLOSED = "closed: make another, or leave `executor` out; make optimizers anew, run forward again"


@dataclass(eq=False)
class ReplicaSlot:
    """One place of an executor, and the replica that it has now."""

    place: Place
    index: int  # its number in the executor
    client: Client = field(init=False)  # of its replica, or of the last one; none in life 0
    hello: Hello = _UNKNOWN  # its description of itself
    life: int = 0  # the number of processes that it has had
    # "ready", "starting" (after its cluster was left), "dead", "away" (an elastic executor has no
    # room for it) or "closed".
    state: str = "away"
    cause: str = ""  # of its last death
    in_vain: int = 0  # processes that ended, one after the other, before they answered
    successor: Successor | None = None  # the next replica, while one starts
    # Of the replica that it has now.
    answered: set[str] = field(default_factory=set)  # the kinds of calls that it has answered
    forget: list[int] = field(default_factory=list)  # keys of graphs that it is told to drop next
    revisions: dict[int, int] = field(default_factory=dict)  # the states of models, by number

    @property
    def ready(self) -> bool:
        """Tell if it can be called."""
        return self.state == "ready"

    def info(self) -> ReplicaInfo:
        """Describe it for users."""
        hello, pages = self.hello, "0 0"
        with contextlib.suppress(OSError):  # it has ended, or is not on this machine
            pages = Path(f"/proc/{hello.pid if hello.near else 0}/statm").read_text()
        about = hello.node, hello.pid, self.state, hello.gpu, int(pages.split()[1]) * mmap.PAGESIZE
        return ReplicaInfo(self.index, self.place.device, *about)

    def __str__(self) -> str:
        info = self.info()
        where = f" (pid {info.pid}, node {info.node[:8]})" if info.pid else ""
        return f"replica {self.index} for device {self.place.device}{where}"


class Successor(threading.Thread):
    """The next replica of a slot. A thread of its own starts it, and never takes the set's lock:
    the next call picks up what it started.
    """

    def __init__(self, slot: ReplicaSlot, starter: Starter, died: str) -> None:
        # ``died`` says that the last one did, and Ray is asked why; it is empty if none did.
        super().__init__(name="raydp-respawn", daemon=True)
        self.client: Client | None = None  # once it has started
        self.problem: errors.ParallelError | None = None  # why not yet, or never
        self._slot, self._starter, self._died = slot, starter, died
        self._dead = slot.client if died else None
        self.start()

    def run(self) -> None:
        """Start it."""
        try:
            if self._dead:  # Ray takes a while to know the cause, and something may be left of it
                cause = self._dead.cause() or self._slot.cause
                self._dead.end()
                log.warning("%s: %s. %s", self._died, cause, _INSTEAD)
            self.client = self._first()
        except errors.ClusterError as error:  # it was left
            self.problem = error
        except Exception as error:  # of any kind: no call may wait for ever
            self.problem = errors.ClusterError(f"no replica could be started: {error!r}")
            if not self._starter.ended.is_set():
                log.exception("no replica for device %s", self._slot.place.device)
        if self.client is not None and self._starter.ended.is_set():  # unnoticed
            self.client.end()

    def _first(self) -> Client | None:
        """Try until there is one; None if nobody needs it any more."""
        slot, starter = self._slot, self._starter
        while True:
            pause = min(_PAUSES[0] * 2**slot.in_vain, _PAUSES[1]) if slot.in_vain else 0.0
            if pause == _PAUSES[1]:
                text = "device %s: %d replicas ended before they answered; the next starts in %g s"
                log.warning(text, slot.place.device, slot.in_vain, pause)
            if starter.ended.wait(pause):
                return None
            try:
                return starter.start({slot.place: slot.index}, background=True)[slot.place]
            except errors.PlacementError as error:
                slot.in_vain += not isinstance(error, errors.NoRoom)  # a process was started
                level = logging.INFO if self.problem else logging.WARNING
                log.log(level, "device %s waits for a replica: %s", slot.place.device, error)
                self.problem = error


class ReplicaSet:
    """The slots of an executor. Whoever changes or calls them holds the lock."""

    def __init__(self, options: ExecutorOptions, name: str) -> None:
        self.options = options
        # By place, in the order in which they were first filled.
        self.slots: dict[Place, ReplicaSlot] = {}
        self.recorder = Recorder(name)
        self.closed = self.forked = False  # forked where replicas are of this one's parent
        self.lock = threading.RLock()
        self._starter: Starter | None = None
        self._next_look = 0.0  # at nodes that are about to end
        _sets.add(self)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Hold the lock, outside of the caller's inference mode: windows, copies, sums and states
        that are made on the way serve later calls, and torch lets nobody write to tensors of that
        mode outside of it. Outputs, which are the caller's, are made outside of the block.
        """
        if self.forked:
            raise errors.forked()
        grad = torch.is_grad_enabled()  # which torch enables with the mode's end
        with self.lock, torch.inference_mode(False), torch.set_grad_enabled(grad):
            yield

    def ready_slots(self) -> list[ReplicaSlot]:
        """Return the slots that can be called."""
        return [slot for slot in [*self.slots.values()] if slot.ready]

    def slots_for(self, ids: Sequence[DeviceId]) -> list[ReplicaSlot]:
        """Return the slots for ``device_ids``, and start those that never had a replica. A dead one
        is replaced in the background while others stand in.
        """
        wanted = places(tuple(ids))
        starter = self._refresh()
        self._leave_nodes(starter)
        if not all([place in self.slots and self.slots[place].ready for place in wanted]):
            self._fill(wanted, starter)
        return [self.slots[place] for place in wanted]

    def _refresh(self) -> Starter:
        """Make sure that replicas belong to the cluster that is connected now."""
        if self.closed or _ending.is_set():
            raise errors.ExecutorClosed(_CLOSED)
        if self._starter is None or not self._starter.alive():
            # The cluster was left, and the replicas with it.
            if self._starter is not None:
                log.warning("your Ray was shut down, and its replicas with it; starting new ones")
            self._stop_successors()
            for slot in self.slots.values():
                slot.state, slot.hello = "starting", _UNKNOWN
            self._starter = Starter(self.recorder.name, self.options)
            self.threads = self._starter.threads
        return self._starter

    def _fill(self, asked: Sequence[Place], starter: Starter) -> None:
        """Start replicas in new places; see to it that the others' are on their way."""
        self._pick_up()
        new = [place for place in dict.fromkeys(asked) if place not in self.slots]
        if new:
            numbers = dict(zip(new, itertools.count(len(self.slots))))
            started = starter.start(numbers)
            for place, index in numbers.items():
                slot = self.slots[place] = ReplicaSlot(place, index)
                if place in started:  # an elastic executor may begin without it
                    self._install(slot, started[place])
            check_balance([(slot.place.number, slot.hello) for slot in self.ready_slots()])
        for place in asked:
            if not self.slots[place].ready:
                self._start_successor(self.slots[place])

    def _install(self, slot: ReplicaSlot, client: Client) -> None:
        """Let a slot have a new replica, which holds nothing."""
        slot.client, slot.hello, slot.successor = client, client.hello, None
        slot.state, slot.life = "ready", slot.life + 1
        slot.answered, slot.forget, slot.revisions = set(), [], {}
        self.recorder.started(slot.info())

    def _pick_up(self) -> None:
        """Install the replicas that were started in the background."""
        for slot in self.slots.values():
            if slot.successor is not None and slot.successor.client is not None:
                self._install(slot, slot.successor.client)

    def _start_successor(self, slot: ReplicaSlot, died: str = "") -> None:
        """Make sure that a successor starts."""
        assert self._starter is not None
        known = slot.successor
        on_its_way = known is not None and (known.is_alive() or known.client is not None)
        if not on_its_way and not self._starter.ended.is_set():
            slot.successor = Successor(slot, self._starter, died)

    def _leave_nodes(self, starter: Starter) -> None:
        """Leave nodes that are about to end, if replicas of the same kind stay elsewhere."""
        if not self.options.elastic or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + 1.0  # each is a call to Ray
        leaving, ready = ray_api.draining(), self.ready_slots()
        staying = {slot.place.kind for slot in ready if slot.hello.node not in leaving}
        # The end of others, if it comes, is handled as a death.
        going = [s for s in ready if s.hello.node in leaving and s.place.kind in staying]
        end_all(slot.client for slot in going)
        starter.holds.release([slot.place for slot in going])
        for slot in going:
            slot.state = "away"
            self.recorder.event(f"{slot} left its node, which is about to end")

    def choose(self, slot: ReplicaSlot, busy: Collection[ReplicaSlot]) -> ReplicaSlot:
        """Return the slot that does a slot's work: itself, else one of its kind, better one that
        is not busy, else the first that starts.
        """
        if slot.ready:
            return slot
        kind = [other for other in self.slots.values() if other.place.kind == slot.place.kind]
        timeout = self.options.placement_timeout
        if not self._wait(kind, timeout):
            late = f"all replicas died, and no new one started in {timeout:g} s"
            known = [other.successor.problem for other in kind if other.successor]
            raise next(filter(None, known), errors.PlacementError(late))
        able = [other for other in kind if other.ready]
        return min(able, key=lambda s: (s is not slot, s in busy, s.index))

    def lost(self, slot: ReplicaSlot, life: int, phase: str, cause: str) -> None:
        """Note that a replica died in a phase of a call, once, and replace it in the background."""
        if slot.life != life or not slot.ready:
            return
        slot.state, slot.cause = "dead", cause
        slot.in_vain = 0 if slot.answered else slot.in_vain + 1
        died = f"{slot} died in {phase}"
        self.recorder.died(slot.index, f"{died}: {cause}")
        self._start_successor(slot, died)

    def grow(self, timeout: float | None = None) -> int:
        """Wait until each slot has a replica, or the time is over; returns how many were added."""
        timeout = self.options.placement_timeout if timeout is None else timeout
        self._refresh()
        before = len(self.ready_slots())
        deadline = time.monotonic() + timeout
        while True:
            missing = [slot for slot in self.slots.values() if not slot.ready]
            for slot in missing:
                self._start_successor(slot)
            if not missing or not self._wait(missing, deadline - time.monotonic()):
                return len(self.ready_slots()) - before

    def _wait(self, slots: Collection[ReplicaSlot], timeout: float) -> bool:
        """Wait until one of the slots has a replica; False if none comes in time."""
        deadline = time.monotonic() + timeout
        while True:
            coming = [slot.successor for slot in slots if slot.successor is not None]
            # Asked first: one that ends may have started.
            works = any(successor.is_alive() for successor in coming)
            self._pick_up()
            if any(slot.ready for slot in slots):
                return True
            if self._starter is None or self._starter.ended.wait(0.02):
                raise errors.ExecutorClosed(_CLOSED)
            if not works or time.monotonic() >= deadline:
                return False

    def close(self) -> None:
        """End all replicas. A thread that holds the lock and waits for one stops waiting."""
        if self._starter is not None:
            self._starter.ended.set()
        with self.lock:
            self.closed = True
            try:
                self._stop_successors()
            finally:  # also after Ctrl-C: nothing would end the replicas later
                end_all(slot.client for slot in self.ready_slots())
                if self._starter is not None:
                    self._starter.holds.release()
                for slot in self.slots.values():
                    slot.state = "closed"

    def _stop_successors(self) -> None:
        """Start no more replicas, and end those that nobody has picked up."""
        if self._starter is not None:
            self._starter.ended.set()
        late = [slot.successor for slot in [*self.slots.values()] if slot.successor is not None]
        for successor in late:
            successor.join(5.0)
        end_all([successor.client for successor in late if successor.client is not None])
        for slot in self.slots.values():
            slot.successor = None


_sets: weakref.WeakSet[ReplicaSet] = weakref.WeakSet()
_ending = threading.Event()
"""Is set when the program ends: a thread that goes on would start another cluster."""


@atexit.register
def _stop_all() -> None:
    """End all threads before the program leaves Ray: Ray ends a process with a thread inside it."""
    _ending.set()
    for known in [*_sets]:
        if not known.forked:
            known._stop_successors()
            if known.lock.acquire(timeout=1.0):  # a call's, which perhaps starts its first replica
                known.lock.release()


def _after_fork() -> None:
    """Leave the replicas to the parent; a thread that is not here may hold the lock."""
    for known in [*_sets]:
        known.lock = threading.RLock()
        known.forked = known.forked or known._starter is not None


os.register_at_fork(after_in_child=_after_fork)
