"""The notes that the recorder gets of calls while they run: small tuples that hold no objects of
the user.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch._C._profiler import _RecordFunctionFast as _range

from raydp_parallel.cluster.backend import TaskLabel
from raydp_parallel.cluster.chunk_calls import ChunkCall
from raydp_parallel.cluster.replica_slots import ReplicaSlot
from raydp_parallel.monitoring.accounts import Ways, ways
from raydp_parallel.monitoring.phases import OpenSpan
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import Reply

T = TypeVar("T")


class SentNote(NamedTuple):
    """One message of a run that was sent.

    Attributes:
        number: Which of the run's jobs it is for.
        slot: The slot that it went to.
        at: When it was sent.
        method: The method that it calls.
        own: Whether it is the job's own message, and not one that makes a lost graph again in front
            of it.
        model: The model's number in the accounts.
        rows: Rows of the batch that the job computes.
        size: Bytes of tensors in it.
        ways: How those bytes went; None if all of them were in the message itself.
    """

    number: int
    slot: ReplicaSlot
    at: float
    method: str
    own: bool
    model: int
    rows: int
    size: int
    ways: Ways | None


class AnswerNote(NamedTuple):
    """What the recorder counts of an answer.

    Attributes:
        laps: When each of the replica's phases began, and when the last ended.
        seconds: How long its device worked.
        size: Bytes of tensors in it.
        ways: How those bytes came; None if all of them were in the message itself.
        memory: Bytes of a GPU's memory, if the replica says.
        summing: Seconds in which the replica waited for sums with others.
        among: Bytes that it gave to others.
        failed: Whether something was raised.
    """

    laps: tuple[float, ...]
    seconds: float
    size: int
    ways: Ways | None
    memory: tuple[int, int] | None
    summing: float
    among: int
    failed: bool


class Round(NamedTuple):
    """One round of a run, with all messages answered.

    Attributes:
        first: Whether it is the run's first; the others wait for what runs again.
        began: When the driver began to prepare it.
        checked: When it began to wait.
        ended: When all were answered.
        sent: The messages.
        answers: The note of each message's answer; None if its replica died.
    """

    first: bool
    began: float
    checked: float
    ended: float
    sent: Sequence[SentNote]
    answers: Sequence[AnswerNote | None]


class CallRecord:
    """One run of the executor, and how far it is.

    A run has one round of sending, waiting and answers, and another one for the jobs of each
    replica that dies.

    Args:
        jobs: The calls of the run.
        number: Its number among the runs of its method.
        models: The models with another number in the accounts.
        note: Gives the recorder what is done.
        span: Opens a span of the driver in `ray timeline`.

    Attributes:
        sent: The messages that are not answered yet.
        rounds: The rounds that are over, for a picture of the run.
    """

    def __init__(
        self,
        jobs: Sequence[ChunkCall],
        number: int,
        models: dict[int, int],
        note: Callable[[Any], None],
        span: OpenSpan,
    ) -> None:
        self._began = self._checked = time.perf_counter()
        self._jobs = jobs
        self._models = models
        self._note = note
        self._span = span
        self.method = jobs[0].method if jobs else ""
        self.number = number
        self.sent: list[SentNote] = []
        self.rounds: list[Round] = []

    def sends(
        self, number: int, slot: ReplicaSlot, attachments: Attachments, again: str = ""
    ) -> TaskLabel:
        """Note that a message for a job is sent; returns how the call looks in Ray's dashboard.

        Args:
            number: The number of the job.
            slot: The slot that gets the message.
            attachments: Its attachments.
            again: The method that makes a lost graph again in front of the job; empty for the job
                itself.
        """
        job, method, size = self._jobs[number], again or self.method, attachments.size
        model = self._models.get(job.model, job.model)
        went = ways(attachments.beside, size) if attachments.beside else None
        self.sent.append(
            SentNote(
                number=number,
                slot=slot,
                at=time.perf_counter(),
                method=method,
                own=not again,
                model=model,
                rows=job.rows,
                size=size,
                ways=went,
            )
        )
        return TaskLabel(method, number + 1, len(self._jobs), bool(again))

    def wait(self, collect: Callable[[Any], T], pending: Any) -> T:
        """Wait for all calls, in a range of torch's profiler."""
        self._checked = time.perf_counter()
        with _range(f"raydp_parallel.{self.method}: replicas"):
            span = self._span("wait")
            if span is None:
                return collect(pending)
            with span:
                return collect(pending)

    def answered(self, answers: Sequence[AnswerNote | None]) -> None:
        """Note that all messages of a round were answered, in the order of sending; None stands for
        a replica that died.
        """
        ended = time.perf_counter()
        done = Round(
            first=not self.rounds,
            began=self._began,
            checked=self._checked,
            ended=ended,
            sent=self.sent,
            answers=answers,
        )
        self.rounds.append(done)
        self._note(done)
        self.sent, self._began = [], ended

    def ended(self) -> None:
        """Note that it ended, or was given up. Its jobs hold objects of the user, and are
        released.
        """
        self._jobs, self.sent = (), []
        if self.rounds:
            self._note(self)


def note_of(reply: Reply, attachments: Attachments) -> AnswerNote:
    """The note of an answer, for the recorder."""
    size, reduced = reply.size, reply.reduced
    summing, among = 0.0, reply.passed
    if reduced is not None:
        summing, among = reduced.seconds, reduced.size + reply.passed
    came = None
    if attachments.beside:
        came = ways(attachments.beside, size)
    return AnswerNote(
        laps=reply.laps,
        seconds=reply.seconds,
        size=size,
        ways=came,
        memory=reply.memory,
        summing=summing,
        among=among,
        failed=reply.failure is not None,
    )


class Reducing:
    """The time in which the driver sums the gradients of replicas, which have nothing to do
    meanwhile.

    Args:
        slots: The slots of the replicas.
        number: The number of the backward.
        note: Gives it to the recorder.
        span: A span in `ray timeline`, if it is shown there.

    Attributes:
        began: When it began.
        ended: When it ended.
    """

    def __init__(
        self, slots: Sequence[ReplicaSlot], number: int, note: Callable[[Any], None], span: Any
    ) -> None:
        self.slots = slots
        self.number = number
        self.began = self.ended = 0.0
        self._note = note
        self._span = span
        self._range = _range("raydp_parallel.reduce")

    def __enter__(self) -> None:
        self.began = time.perf_counter()
        self._range.__enter__()
        if self._span is not None:
            self._span.__enter__()

    def __exit__(self, *failure: Any) -> None:
        if self._span is not None:
            self._span.__exit__(*failure)
            self._span = None
        self._range.__exit__(*failure)
        self.ended = time.perf_counter()
        if failure[0] is None:
            self._note(self)
