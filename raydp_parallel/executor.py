"""The executor: starts replicas, runs one call per chunk, and says what it did.

  prepare the chunks' messages ──► submit all ──► (the driver checks contents meanwhile) ──► collect all

All wrappers of a process share one executor, and through it one replica per device, unless they were given another.
Chunks are logical and replicas physical: what chunk i computes depends on i only, never on who runs it.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from raydp_parallel import cluster, devices, telemetry
from raydp_parallel.actor import unseal
from raydp_parallel.books import Books, Run
from raydp_parallel.crew import Crew, Death, DeviceId, Place, device_id, places
from raydp_parallel.errors import ExecutorClosed, GraphLost, ReplicaDied
from raydp_parallel.links import Link, Mail
from raydp_parallel.local import LocalCrew
from raydp_parallel.monitor import ExecutorStats, ReplicaInfo, Totals
from raydp_parallel.naming import Names, program
from raydp_parallel.options import Options
from raydp_parallel.reporter import Reporter
from raydp_parallel.seats import Answer, Job, Seat, State
from raydp_parallel.snapshot.master import Master

log = logging.getLogger("raydp_parallel")

_graph_keys = itertools.count(1)

_RECENT = 4
"""Modules whose replicas outlive a call of the functional interface, so that the next call need not send them again."""


class Executor:
    """Replicas for any number of models: one actor per device.

    A wrapper without an executor of its own uses the process's; give it one to choose when actors start and end::

        with Executor(["cpu", "cpu"]) as executor:
            model = DataParallel(net, executor=executor)

    Args:
        device_ids: Logical GPUs of the cluster, or ``"cpu"`` entries; None is every GPU of the cluster. With ``()``
            replicas start when a wrapper first needs them.
        options: The rare knobs.
    """

    def __init__(self, device_ids: Sequence[Any] | None = None, *, options: Options | None = None) -> None:
        self.options = options or Options()
        self.device_ids = normalize(device_ids) if device_ids != () else []
        self._lock = threading.RLock()
        self._closed = False
        self._crew: Crew | None = None
        self._seats: dict[Place, Seat] = {}
        self._masters: weakref.WeakValueDictionary[int, Master] = weakref.WeakValueDictionary()
        self._recent: deque[Master] = deque(maxlen=_RECENT)
        self._totals = Totals()
        self.books = Books(self.options.name or program())
        self._reporter: Reporter | None = None
        self._start_all(places(self.device_ids))

    def __reduce__(self) -> Any:
        return shared, (self.options,)  # in another process there are other replicas

    def __deepcopy__(self, memo: Any) -> Executor:
        return self

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def link(self) -> Link:
        """What bytes travel by."""
        assert self._crew is not None
        return self._crew.link

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        """Who runs what, one entry per device."""
        return tuple(seat.info() for seat in self._seats.values())

    def stats(self, model: nn.Module | None = None) -> ExecutorStats:
        """What was done so far: for all models, or what concerns the replicas for one."""
        known = self.known(model) if model is not None else None
        only = None if model is None else known.id if known is not None else 0
        link = self._crew.link.name if self._crew is not None else self.options.link
        return self.books.stats(self._totals, [*self._seats.values()], link, only)

    def close(self) -> None:
        """End the replicas. Their graphs are lost; what the driver holds is not. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._reporter is not None:
                self._reporter.close()
            if self._crew is not None:
                self._crew.stop([seat.door for seat in self._seats.values() if seat.state is State.READY])
                self._crew.link.close()
            for seat in self._seats.values():
                seat.state = State.CLOSED

    def seats(self, device_ids: Sequence[DeviceId]) -> list[Seat]:
        """The seats for ``device_ids``, each with a living replica."""
        wanted = places(device_ids)
        with self._lock:
            self._refresh()
            if any(p not in self._seats or self._seats[p].state is not State.READY for p in wanted):
                self._start_all(wanted)
            return [self._seats[place] for place in wanted]

    def revive(self, seats: Sequence[Seat]) -> None:
        """See that somebody sits on each seat; whoever holds a replica of one that died gets the next."""
        if any(seat.state is State.DEAD for seat in seats):
            with self._lock:
                self._start_all([seat.place for seat in seats])

    def master(self, module: nn.Module, keep: bool = False) -> Master:
        """The watch on a module that all its wrappers share. Whoever asks for it keeps it alive.

        Args:
            module: The module.
            keep: Whether the executor keeps it too, for a while: for callers that hold nothing between two calls.
        """
        with self._lock:
            self._refresh()
            master = self.known(module)
            if master is None:
                assert self._crew is not None
                master = Master(module, self._crew.link)
                weakref.finalize(master, _drop_model, weakref.ref(self), master.id).atexit = False
                self._masters[id(module)] = master
                self.books.models[master.id] = f"{type(module).__name__}-{master.id}"
            if keep and master not in self._recent:
                self._recent.append(master)
            return master

    def known(self, module: nn.Module) -> Master | None:
        """The watch on a module that a wrapper keeps already, and with it what the replicas hold."""
        master = self._masters.get(id(module))
        return master if master is not None and master.module is module else None

    def run(self, jobs: Sequence[Job], meanwhile: Callable[[], None] | None = None) -> list[Answer]:
        """Run one call per chunk, and wait for all.

        Args:
            jobs: The calls.
            meanwhile: What the driver does while the replicas work.

        Raises:
            ReplicaDied: A replica's process ended. All other calls have ended too.
        """
        with self._lock:
            if self._closed:
                raise ExecutorClosed(
                    "this executor was closed: make another, or leave `executor` out to use the process's"
                )
            assert self._crew is not None
            sent: list[tuple[Any, int]] = []
            run = self.books.begin(jobs)
            try:
                for job in jobs:
                    sent.append(self._send(job, run))
                if meanwhile is not None:
                    meanwhile()
            except BaseException:
                _abandon(run, sent)
                raise
        try:
            results = run.wait(self._crew.collect, [pending for pending, _ in sent])
        except BaseException:
            _abandon(run, sent)
            raise
        answers: list[Answer | ReplicaDied] = [
            self._receive(job, result, incarnation)
            for job, result, (_, incarnation) in zip(jobs, results, sent, strict=True)
        ]
        run.ended([answer.reply if isinstance(answer, Answer) else None for answer in answers])
        for answer in answers:
            if isinstance(answer, ReplicaDied):
                raise answer
        return answers  # type: ignore[return-value]

    def threads(self, chunks: int) -> int | None:
        """Torch's threads for each of so many chunks on CPUs."""
        assert self._crew is not None
        return self._crew.threads(chunks)

    def note_forward(self, reruns: int, sends: int, state_bytes: int) -> None:
        """Count one forward call."""
        totals = self._totals
        totals.forwards += 1
        totals.reruns += reruns
        totals.state_sends += sends
        totals.state_bytes += state_bytes

    def note_backward(self) -> None:
        """Count one trip back."""
        self._totals.backwards += 1

    def flush(self) -> list[tuple[int, int]]:
        """Tell the replicas now what the driver let go of; returns how many models and graphs each still holds."""
        with self._lock:
            self._refresh()
            assert self._crew is not None
            ready = [seat for seat in self._seats.values() if seat.state is State.READY]
            calls = [self._crew.submit(s.door, "forget", pickle.dumps(s.forget()), ()) for s in ready]
            answers = self._crew.collect(calls)
            return [unseal(left, self._crew.link)[0] for left in answers if not isinstance(left, Death)]

    def _send(self, job: Job, run: Run) -> tuple[Any, int]:
        assert self._crew is not None
        if job.incarnation is not None and not _holds(self._crew, job.seat, job.incarnation):
            raise GraphLost(f"{job.seat} lost the graph of this forward, because its process ended; run forward again")
        mail = Mail(self._crew.link)
        message = job.prepare(job.seat, mail)
        header = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self.books.sent(job, mail)
        pending = self._crew.submit(job.seat.door, job.method, header, mail.beside, mail.kept, run.sends())
        return pending, job.seat.incarnation

    def _receive(self, job: Job, result: Any, incarnation: int) -> Answer | ReplicaDied:
        assert self._crew is not None
        if isinstance(result, Death):
            return self._bury(job, result, incarnation)
        reply, mail = unseal(result, self._crew.link)
        job.seat.heard()
        self.books.received(job, mail, reply)
        return Answer(reply, mail, incarnation)

    def _bury(self, job: Job, death: Death, incarnation: int) -> ReplicaDied:
        seat = job.seat
        with self._lock:
            if seat.incarnation == incarnation and seat.state is State.READY:
                assert self._crew is not None
                self._crew.stop([seat.door])
                seat.state = State.DEAD
                seat.tally.deaths += 1
                seat.leave_behind()
                self.books.event(f"{seat} died in {job.method}: {death.cause}")
                log.warning("%s died in %s: %s. A new one starts with the next call", seat, job.method, death.cause)
        return ReplicaDied(f"{seat} died in {job.method}: {death.cause}. A new one starts with the next call")

    def _refresh(self) -> None:
        """Make sure there is a crew, and that it belongs to the cluster that is connected now."""
        if self._closed:
            raise ExecutorClosed("this executor was closed: make another, or leave `executor` out to use the process's")
        if self._crew is not None and self._crew.alive():
            return
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None
        names = Names(self.books.name, {place: seat.index for place, seat in self._seats.items()})
        self._crew = LocalCrew(self.options) if self.options.in_process else cluster.RayCrew(names, self.options)
        self._masters.clear()
        self._recent.clear()
        for seat in self._seats.values():
            seat.state = State.EMPTY
            seat.leave_behind()

    def _start_all(self, wanted: Sequence[Place]) -> None:
        if not wanted:
            return
        self._refresh()
        assert self._crew is not None
        missing = [p for p in dict.fromkeys(wanted) if p not in self._seats or self._seats[p].state is not State.READY]
        started = self._crew.start(missing)
        for place, (door, hello) in started.items():
            seat = self._seats.setdefault(place, Seat(place, len(self._seats)))
            seat.seat(door, hello)
            self.books.seated(seat)
        if self._reporter is None:
            self._reporter = telemetry.watch(self)
        gpus = [(s.place.number, s.hello) for p, s in self._seats.items() if p in wanted and s.hello and s.hello.memory]
        devices.check_balance(gpus)


def normalize(device_ids: Sequence[Any] | None) -> list[DeviceId]:
    """``device_ids`` in their plain form, checked against the cluster."""
    if device_ids is None:
        return list(cluster.all_gpus())
    if isinstance(device_ids, (str, int)) or not hasattr(device_ids, "__iter__"):
        raise TypeError(f"device_ids={device_ids!r}: give a list, such as [0, 1] or ['cpu', 'cpu']")
    ids = [device_id(entry) for entry in device_ids]
    if not ids:
        raise ValueError(
            "device_ids=[] names no device: leave it out to use every GPU of the cluster, or give ids or 'cpu' entries"
        )
    gpus = [entry for entry in ids if isinstance(entry, int)]
    if gpus:
        cluster.check_gpus(gpus)
    return ids


def new_graph_key() -> int:
    """A key that no graph of this process had before."""
    return next(_graph_keys)


def _abandon(run: Run, sent: Sequence[tuple[Any, int]]) -> None:
    """Nobody waits for these calls any more, and whether they arrived is not known."""
    run.broken()
    for pending, _ in sent:
        pending.give_up()
    for job in run.jobs:
        job.seat.forget_again()


def _holds(crew: Crew, seat: Seat, incarnation: int) -> bool:
    """Whether the replica that held a graph is still there."""
    return crew.alive() and (seat.state, seat.incarnation) == (State.READY, incarnation)


def _drop_model(executor: weakref.ref[Executor], model: int) -> None:
    known = executor()
    if known is not None:
        for seat in known._seats.values():
            seat.drop_model(model)


_shared: dict[Options, Executor] = {}
_shared_lock = threading.Lock()


def shared(options: Options) -> Executor:
    """The process's executor for these options; it has no replica until one is needed."""
    executor = _shared.get(options)
    if executor is None or executor.closed:
        with _shared_lock:
            plain = replace(options, unused_grads="zeros", scalars="vector")  # these are wrappers' matters
            if plain not in _shared or _shared[plain].closed:
                _shared[plain] = Executor((), options=plain)
            executor = _shared[options] = _shared[plain]
    return executor


def shutdown() -> None:
    """End the process's replicas, and the Ray cluster if it was started for them. The next use starts anew."""
    with _shared_lock:
        for executor in _shared.values():
            executor.close()
        _shared.clear()
    cluster.disconnect()
