"""One call per chunk, sent to all, answered by all, whoever dies on the way.

  send all ──► (the driver checks contents meanwhile) ──► collect all ──► whose replica died, goes
  to another ──► ...

A graph that a job needs and that died with its replica is made again first, by the messages that
its recipe holds, in front of the job and on the same way, so that it costs no trip of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from raydp_parallel.cluster.backend import Death, Ending
from raydp_parallel.cluster.chunk_calls import ChunkAnswer, ChunkCall, Prepare, RemoteGraph, steps
from raydp_parallel.cluster.replica_set import ReplicaSet
from raydp_parallel.cluster.replica_slots import ReplicaSlot
from raydp_parallel.cluster.run_notes import ToldNote, tell
from raydp_parallel.errors import GraphLost, ReplicaDied
from raydp_parallel.replica.actor import unseal
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.message_bytes import pack
from raydp_parallel.transport.messages import Forget, Reply

_MOST_REPLAYS = {Ending.LOST: 5, Ending.SILENT: 1}
"""How often a chunk is given to another replica. What ends one replica after the other is the chunk
itself.
"""


class _Flight:
    """A job on its way to a slot: the messages that went there, the last of which is the
    job's own.
    """

    def __init__(self, job: ChunkCall, slot: ReplicaSlot) -> None:
        self.job = job
        self.slot = slot
        self.incarnation = slot.incarnation
        self.pending: list[Any] = []
        self.told: list[Forget | None] = []
        self.graphs: list[RemoteGraph] = []

    def land(self) -> None:
        """What it makes is, or will be, where it was sent."""
        for graph in self.graphs:
            graph.lay(self.slot)


class Dispatcher:
    """Runs one call per chunk, and waits for all.

    Args:
        replica_set: Whose replicas.
        jobs: The calls.
    """

    def __init__(self, replica_set: ReplicaSet, jobs: Sequence[ChunkCall]) -> None:
        self._replica_set = replica_set
        self._backend = replica_set.backend
        self._jobs = jobs
        self._slots = {job.slot for job in jobs}
        self._answers: dict[int, ChunkAnswer] = {}
        self._flights: dict[int, _Flight] = {}
        self._deaths = [0] * len(jobs)
        self._hopeless: set[int] = set()
        with replica_set.lock:
            self._run = replica_set.recorder.begin(jobs)

    def run(self, meanwhile: Callable[[], None] | None = None) -> list[ChunkAnswer]:
        """The answers, in the order of the jobs.

        Args:
            meanwhile: What the driver does while the replicas work.
        """
        try:
            self._send(range(len(self._jobs)), meanwhile)
            lost = self._collect()
            if lost:
                self._replay(lost)
        finally:
            self._replica_set.recorder.end(self._run)
        return [self._answers[number] for number in range(len(self._jobs))]

    def _replay(self, lost: dict[int, ReplicaDied | None]) -> None:
        """Send again what was lost with its replica, or did not reach it whole."""
        begun = time.perf_counter()
        totals = self._replica_set.totals
        try:
            while lost:
                deaths = {number: error for number, error in lost.items() if error is not None}
                if deaths and (self._hopeless or not self._replica_set.replays):
                    raise deaths[min(self._hopeless & deaths.keys() or deaths)]
                self._send(sorted(lost))
                lost = self._collect()
        finally:
            totals.lost_ms += (time.perf_counter() - begun) * 1e3

    def _send(self, numbers: Sequence[int], meanwhile: Callable[[], None] | None = None) -> None:
        with self._replica_set.lock:
            self._replica_set.check_open()
            self._backend.rest()
            try:
                load: dict[ReplicaSlot, int] = {}
                # What cannot be made again is to be found before anything else is sent.
                torn = [
                    number
                    for number in numbers
                    if not all(graph.whole for graph in self._jobs[number].needs)
                ]
                for number in [*torn, *(n for n in numbers if n not in torn)] if torn else numbers:
                    self._send_one(number, load)
                if meanwhile is not None:
                    meanwhile()
            except BaseException:
                self._abandon()
                raise

    def _send_one(self, number: int, load: dict[ReplicaSlot, int]) -> None:
        job = self._jobs[number]
        slot = self._replica_set.choose(job, load, self._slots)
        load[slot] = load.get(slot, 0) + 1
        made_again = steps(job.needs, slot)
        flight = self._flights[number] = _Flight(job, slot)
        try:
            for step in made_again:
                self._submit(number, flight, step.graph, step.method, step.prepare, again=True)
            # [3]
            self._submit(number, flight, job.makes, job.method, job.prepare)
        finally:
            flight.land()
        if made_again or self._deaths[number]:
            self._replica_set.totals.replays += 1
            self._replica_set.recorder.replays(slot)

    def _submit(
        self,
        number: int,
        flight: _Flight,
        graph: RemoteGraph | None,
        method: str,
        prepare: Prepare,
        again: bool = False,
    ) -> None:
        backend, slot = self._backend, flight.slot
        attachments = Attachments(backend.link_to(slot.client))
        message = prepare(slot, attachments)
        flight.told.append(message.forget)
        header = pack(message)
        if graph is not None:
            flight.graphs.append(graph)
        task = self._run.sends(number, slot, attachments, method if again else "")
        flight.pending.append(backend.submit(slot.client, method, header, attachments.beside, task))

    def _collect(self) -> dict[int, ReplicaDied | None]:
        """Wait for all that were sent. Returns whose replica died, and None for who has to be sent
        everything again.
        """
        try:
            self._backend.rest()
            calls = [(flight, call) for flight in self._flights.values() for call in flight.pending]
            # [7]
            found, told = self._run.wait(self._hear, calls)
            lost: dict[int, ReplicaDied | None] = {}
            for (number, flight), (results, death) in zip(
                self._flights.items(), found, strict=True
            ):
                if death is not None:
                    lost[number] = self._bury(number, flight, death)
                elif not self._receive(number, flight, results):
                    lost[number] = None
            self._run.heard(told)
        except BaseException:
            self._abandon()
            raise
        self._flights.clear()
        return lost

    def _hear(
        self, calls: Sequence[tuple[_Flight, Any]]
    ) -> tuple[list[Any], list[ToldNote | None]]:
        """Each flight's answers and the first death among them, and what the books want to know;
        while others work.
        """
        answers, found, told = iter(self._listen(calls)), [], []
        for flight in self._flights.values():
            results = [*itertools.islice(answers, len(flight.pending))]
            death = _death(results)
            told += [None if death is not None or one[0].missed else tell(*one) for one in results]
            found.append((results, death))
        return found, told

    def _listen(self, calls: Sequence[tuple[_Flight, Any]]) -> Iterable[Any]:
        """The answers, opened; jobs hear of them as they come, for other replicas may wait for one
        that died.
        """
        backend, link = self._backend, self._backend.link
        pending = [call for _, call in calls]
        if {flight.job.heard for flight, _ in calls} == {None}:
            return (
                found if isinstance(found, Death) else unseal(found, link)
                for found in backend.collect(pending)
            )
        opened: list[Any] = [None] * len(calls)

        def heard(index: int, answer: Any) -> None:
            flight, call = calls[index]
            found = opened[index] = answer if isinstance(answer, Death) else unseal(answer, link)
            if flight.job.heard is not None and (
                call is flight.pending[-1] or isinstance(found, Death)
            ):
                flight.job.heard(None if isinstance(found, Death) else found[0])

        backend.collect(pending, heard)
        return opened

    def _receive(
        self, number: int, flight: _Flight, results: Sequence[tuple[Reply, Attachments]]
    ) -> bool:
        """Take a job's answer; whether it did what it was to do."""
        slot, job = flight.slot, flight.job
        for reply, _ in results[:-1]:
            if reply.failure is not None:
                for graph in flight.graphs:
                    graph.lose()
                raise GraphLost(
                    "backward: the forward had to run again, because the replica that held "
                    "its graph died, and that "
                    f"failed on {slot}: {reply.failure.text}"
                )
        reply, attachments = results[-1]
        slot.answered = True
        if not reply.revision:
            slot.distrust(slot.name_of(job.model, job.slot))
        self._answers[number] = ChunkAnswer(reply, attachments, slot)
        return not reply.missed

    def _bury(self, number: int, flight: _Flight, death: Death) -> ReplicaDied:
        error = self._replica_set.mark_dead(
            flight.slot, flight.incarnation, flight.job.method, death
        )
        self._deaths[number] += 1
        times = self._deaths[number]
        if not self._replica_set.replays or times <= _MOST_REPLAYS[death.ending]:
            return error
        self._hopeless.add(number)
        return ReplicaDied(
            f"{times} replicas died of chunk {number} in {flight.job.method}, one after the "
            "other: the module itself, "
            f"or this chunk of the batch, ends its process. The last was {flight.slot}: "
            f"{death.cause}. The next call "
            "starts with others"
        )

    def _abandon(self) -> None:
        """Nobody waits for these calls any more, and whether they arrived is not known."""
        for flight in self._flights.values():
            for pending in flight.pending:
                pending.give_up()
            for told in flight.told:
                flight.slot.forget_again(told)
            # Whether what was sent was adopted is not known either: the next call sends everything.
            flight.slot.distrust(flight.slot.name_of(flight.job.model, flight.job.slot))
        self._flights.clear()


def _death(results: Sequence[Any]) -> Death | None:
    """The first death among some results."""
    for result in results:
        if isinstance(result, Death):
            return result
    return None
