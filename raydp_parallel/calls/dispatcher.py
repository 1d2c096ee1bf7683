"""Sends one call per chunk and waits for all answers. The chunks of a replica that dies are sent to
others.

  send all ──► (the driver checks contents meanwhile) ──► collect all ──► chunks of dead replicas:
  send them to other replicas ──► ...

A job may need a graph that died with its replica. The messages of the graph's recipe then go in
front of the job, to the same replica, so that making the graph again costs no trip of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from raydp_parallel.cluster.backend import Death, Ending
from raydp_parallel.cluster.recorder import AnswerNote, note_of
from raydp_parallel.cluster.replica_set import ReplicaSet
from raydp_parallel.cluster.replica_slots import (
    ChunkAnswer,
    ChunkCall,
    Prepare,
    RemoteGraph,
    ReplicaSlot,
    steps,
)
from raydp_parallel.errors import GraphLost, ReplicaDied, StateChanged
from raydp_parallel.replica import exceptions
from raydp_parallel.state import hidden_attributes
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.message_bytes import pack, unseal
from raydp_parallel.transport.messages import Forget, Reply

_MOST_REPLAYS = {Ending.LOST: 5, Ending.SILENT: 1}
"""How often a chunk is given to another replica, by how the last one ended. If replicas end one
after the other, the chunk itself is the cause.
"""


class _SentJob:
    """A job that was sent to a slot: its messages, the last of which is the job's own."""

    def __init__(self, job: ChunkCall, slot: ReplicaSlot) -> None:
        self.job = job
        self.slot = slot
        self.incarnation = slot.incarnation
        self.pending: list[Any] = []
        self.forgotten: list[Forget | None] = []
        self.graphs: list[RemoteGraph] = []

    def place_graphs(self) -> None:
        """Note that the graphs it makes are, or will be, on the slot."""
        for graph in self.graphs:
            graph.lay(self.slot)


class Dispatcher:
    """Runs one call per chunk, and waits for all.

    Args:
        replica_set: The replicas.
        jobs: The calls.
    """

    def __init__(self, replica_set: ReplicaSet, jobs: Sequence[ChunkCall]) -> None:
        self._replica_set = replica_set
        self._backend = replica_set.backend
        self._jobs = jobs
        self._slots = {job.slot for job in jobs}
        self._answers: dict[int, ChunkAnswer] = {}
        self._sent: dict[int, _SentJob] = {}
        self._deaths = [0] * len(jobs)
        self._hopeless: set[int] = set()
        with replica_set.lock:
            self._run = replica_set.recorder.begin(jobs)

    def send(
        self,
        first: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Send the calls.

        Args:
            first: What the driver does before it makes the first message, under the same lock.
            meanwhile: What it does while the replicas work.
        """
        try:
            self._send(range(len(self._jobs)), first, meanwhile)
        except BaseException:
            self._replica_set.recorder.end(self._run)
            raise

    def answers(self) -> list[ChunkAnswer]:
        """Wait for all answers, once. They have the order of the jobs."""
        try:
            self._replica_set.check_own()
            lost = self._collect()
            if lost:
                self._replay(lost)
        finally:
            self._replica_set.recorder.end(self._run)
        return [self._answers[number] for number in range(len(self._jobs))]

    @property
    def pending(self) -> list[Any]:
        """The calls that were sent, with answers that were not taken yet."""
        return [call for sent in [*self._sent.values()] for call in sent.pending]

    def abandon(self) -> None:
        """Stop waiting for answers, if any were not taken."""
        if self._sent:
            self._abandon()
            self._replica_set.recorder.end(self._run)

    def _replay(self, lost: dict[int, ReplicaDied | None]) -> None:
        """Send again the jobs that were lost with their replicas, or did not reach them whole."""
        begun = time.perf_counter()
        totals = self._replica_set.totals
        try:
            while lost:
                deaths = {number: error for number, error in lost.items() if error is not None}
                final = self._hopeless or any(self._jobs[number].bound for number in deaths)
                if deaths and (final or not self._replica_set.replays):
                    raise deaths[min(self._hopeless & deaths.keys() or deaths)]
                self._send(sorted(lost))
                lost = self._collect()
        finally:
            totals.lost_ms += (time.perf_counter() - begun) * 1e3

    def _send(
        self,
        numbers: Sequence[int],
        first: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        with self._replica_set.lock:
            self._replica_set.check_open()
            self._backend.rest()
            try:
                if first is not None:
                    first()
                load: dict[ReplicaSlot, int] = {}
                # A graph that cannot be made again is found before anything else is sent.
                torn = [
                    number
                    for number in numbers
                    if not all(graph.whole for graph in self._jobs[number].needs)
                ]
                for number in [*torn, *(n for n in numbers if n not in torn)] if torn else numbers:
                    self._send_one(number, load)
                if meanwhile is not None:
                    meanwhile()
                self._run.checked()
            except BaseException:
                self._abandon()
                raise

    def _send_one(self, number: int, load: dict[ReplicaSlot, int]) -> None:
        job = self._jobs[number]
        slot = self._replica_set.choose(job, load, self._slots)
        load[slot] = load.get(slot, 0) + 1
        made_again = steps(job.needs, slot)
        sent = self._sent[number] = _SentJob(job, slot)
        try:
            for step in made_again:
                self._submit(number, sent, step.graph, step.method, step.prepare, again=True)
            # [3]
            self._submit(number, sent, job.makes, job.method, job.prepare)
        finally:
            sent.place_graphs()
        if made_again or self._deaths[number]:
            self._replica_set.totals.replays += 1
            self._replica_set.recorder.replays(slot)

    def _submit(
        self,
        number: int,
        sent: _SentJob,
        graph: RemoteGraph | None,
        method: str,
        prepare: Prepare,
        again: bool = False,
    ) -> None:
        backend, slot = self._backend, sent.slot
        attachments = Attachments(backend.link_to(slot.client))
        message = prepare(slot, attachments)
        sent.forgotten.append(message.forget)
        header = pack(message)
        if graph is not None:
            sent.graphs.append(graph)
        task = self._run.sends(number, slot, attachments, method if again else "")
        sent.pending.append(backend.submit(slot.client, method, header, attachments.beside, task))

    def _collect(self) -> dict[int, ReplicaDied | None]:
        """Wait for all jobs that were sent. Returns the jobs to send again, by number: with the
        error if the replica died, with None if the replica lacked something.
        """
        try:
            self._backend.rest()
            calls = [(sent, call) for sent in self._sent.values() for call in sent.pending]
            # [7]
            found, notes = self._run.wait(self._take_answers, calls)
            lost: dict[int, ReplicaDied | None] = {}
            sent_jobs = [*self._sent.items()]
            for (number, sent), (results, death) in zip(sent_jobs, found, strict=True):
                if death is not None:
                    lost[number] = self._mark_dead(number, sent, death)
                elif not self._receive(number, sent, results):
                    lost[number] = None
            self._run.answered(notes)
        except BaseException:
            self._abandon()
            raise
        self._sent.clear()
        return lost

    def _take_answers(
        self, calls: Sequence[tuple[_SentJob, Any]]
    ) -> tuple[list[Any], list[AnswerNote | None]]:
        """Each job's answers with the first death among them, and the notes for the recorder, which
        are made while other replicas work.
        """
        answers, found = iter(self._open_answers(calls)), []
        notes: list[AnswerNote | None] = []
        for sent in self._sent.values():
            results = [*itertools.islice(answers, len(sent.pending))]
            death = _death(results)
            for one in results:
                lost = death is not None or one[0].missed
                notes.append(None if lost else note_of(*one))
            found.append((results, death))
        return found, notes

    def _open_answers(self, calls: Sequence[tuple[_SentJob, Any]]) -> Iterable[Any]:
        """The answers, opened. A job with ``on_answer`` gets its answer as soon as it arrives,
        because other replicas may wait for one that died.
        """
        backend, link = self._backend, self._backend.link
        pending = [call for _, call in calls]
        if {sent.job.on_answer for sent, _ in calls} == {None}:
            return (
                found if isinstance(found, Death) else unseal(found, link)
                for found in backend.collect(pending)
            )
        opened: list[Any] = [None] * len(calls)

        def take(index: int, answer: Any) -> None:
            sent, call = calls[index]
            on_answer = sent.job.on_answer
            if isinstance(answer, Death):
                opened[index] = answer
                if on_answer is not None:
                    on_answer(None)
                return
            found = opened[index] = unseal(answer, link)
            if on_answer is not None and call is sent.pending[-1]:
                on_answer(found[0])

        backend.collect(pending, take)
        return opened

    def _receive(
        self, number: int, sent: _SentJob, results: Sequence[tuple[Reply, Attachments]]
    ) -> bool:
        """Take a job's answer; returns whether the job was done."""
        slot, job = sent.slot, sent.job
        for reply, _ in results[:-1]:
            if reply.failure is not None:
                for graph in sent.graphs:
                    graph.lose()
                raise GraphLost(
                    "backward: the forward had to run again, because the replica that held "
                    f"its graph died, and that failed on {slot}: {reply.failure.text}"
                )
        reply, attachments = results[-1]
        slot.answered = True
        if not reply.revision:
            slot.contents.distrust(slot.name_of(job.model, job.slot))
        failed = reply.failure.entry if reply.failure is not None else 0
        slot.contents.has_trained(slot.name_of(job.model, job.slot), reply.training, failed)
        self._answers[number] = ChunkAnswer(reply, attachments, slot)
        return not reply.missed

    def _mark_dead(self, number: int, sent: _SentJob, death: Death) -> ReplicaDied:
        error = self._replica_set.mark_dead(sent.slot, sent.incarnation, sent.job.method, death)
        self._deaths[number] += 1
        times = self._deaths[number]
        if not self._replica_set.replays or times <= _MOST_REPLAYS[death.ending]:
            return error
        self._hopeless.add(number)
        return ReplicaDied(
            f"{times} replicas died of chunk {number} in {sent.job.method}, one after the "
            "other: the module itself, or this chunk of the batch, ends its process. The last "
            f"was {sent.slot}: {death.cause}. The next call starts with others"
        )

    def _abandon(self) -> None:
        """Stop waiting for these calls; whether they arrived is not known."""
        for sent in self._sent.values():
            for pending in sent.pending:
                pending.give_up()
            for forgotten in sent.forgotten:
                sent.slot.contents.forget_again(forgotten)
            # The replica may not have adopted the state either: the next call sends all of it.
            sent.slot.contents.distrust(sent.slot.name_of(sent.job.model, sent.job.slot))
        self._sent.clear()


class KnownObjects:
    """What the only replica of a call has, too: objects among the arguments by number, and what its
    module consists of by key.
    """

    def __init__(self, tracker: ModuleTracker, given: Sequence[Any] = ()) -> None:
        self._tracker = tracker
        self._given = given

    def __getitem__(self, key: Any) -> Any:
        return self._given[key] if isinstance(key, int) else self._tracker.known(key)


def apply_effects(answers: Sequence[tuple[ModuleTracker | None, ChunkAnswer]]) -> None:
    """Apply the effects of answers, in this order: state that chunk 0 changed, warnings, then the
    failure of the lowest chunk.

    Args:
        answers: The answers of a call, each with the module that takes what it says was written;
            None if no module does.
    """
    for tracker, answer in answers:
        written = answer.reply.written
        if tracker is not None and written is not None:
            tracker.write_back(written, answer.attachments)
        hooked = answer.reply.hooked
        if tracker is not None and hooked is not None:
            tensors = codec.unpack(hooked, answer.attachments, tracker.device)
            tracker.take_hooked(codec.load(hooked, tensors, KnownObjects(tracker)))
    for _, answer in answers:
        if answer.reply.warnings:
            exceptions.warn_again(answer.reply.warnings)
    for tracker, answer in answers:
        if answer.reply.failure is not None:
            if tracker is not None and hidden_attributes.is_not_shown(answer.reply.failure):
                tracker.show()
                raise StateChanged(
                    "backward: a hook, or code that runs again, reads an attribute that an earlier "
                    "forward set, and the last one did not; run forward again, which shows it"
                )
            exceptions.reraise(answer.reply.failure, str(answer.slot))


def _death(results: Sequence[Any]) -> Death | None:
    """The first death among some results."""
    for result in results:
        if isinstance(result, Death):
            return result
    return None
