"""What is noted of calls while they go on, for the books: a few tuples that hold nothing of the
user's.
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
    """One message of a run, on its way.

    Attributes:
        number: Which of the run's jobs it is for.
        slot: Who it went to.
        at: When.
        method: What it asks for.
        own: Whether it is the job's own message, and not one that makes a lost graph again in front
            of it.
        model: The number that the model's accounts go by.
        rows: Rows of the batch that the job computes.
        size: Bytes of tensors in it.
        ways: How they went; None: all of them in the message itself.
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
    """What the books want to know of an answer.

    Attributes:
        laps: When each of the replica's phases began, and when the last ended.
        seconds: How long its device worked.
        size: Bytes of tensors in it.
        ways: How they came; None: all of them in the message itself.
        memory: Bytes of a GPU's memory, if it tells.
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
    """All messages of a round were answered.

    Attributes:
        first: Whether it is the run's first; the others wait for what runs again.
        began: When the driver began to prepare it.
        checked: When it began to wait.
        ended: When all were answered.
        sent: The messages.
        told: For each its answer; None: its replica died.
    """

    first: bool
    began: float
    checked: float
    ended: float
    sent: Sequence[SentNote]
    told: Sequence[AnswerNote | None]


class CallRecord:
    """One run of the executor, which tells how far it is.

    A run has one round, and another one for the jobs of each replica that dies: send, wait, heard.

    Args:
        jobs: What is run.
        number: Which run of its kind it is.
        models: The numbers of models that have others in accounts.
        note: Enters in the books what is done.
        span: Opens a span of the driver in `ray timeline`.

    Attributes:
        sent: What is on its way.
        rounds: What was answered, for whoever draws the run.
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
        """A message for a job is ready and goes out; returns how the call looks in Ray's dashboard.

        Args:
            number: Which job.
            slot: Who gets it.
            attachments: What goes with it.
            again: What is called to make a lost graph again in front of the job; empty for the job
                itself.
        """
        job, method, size = self._jobs[number], again or self.method, attachments.size
        model = self._models.get(job.model, job.model)
        went = ways(attachments.beside, size) if attachments.beside else None
        self.sent.append(
            SentNote(
                number, slot, time.perf_counter(), method, not again, model, job.rows, size, went
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

    def answered(self, told: Sequence[AnswerNote | None]) -> None:
        """All messages of a round were answered, in the order of sending; None stands for a replica
        that died.
        """
        ended = time.perf_counter()
        one = Round(not self.rounds, self._began, self._checked, ended, self.sent, told)
        self.rounds.append(one)
        self._note(one)
        self.sent, self._began = [], ended

    def ended(self) -> None:
        """It came to its end, or nobody waits for it any more. What it was to do is the user's, and
        let go of.
        """
        self._jobs, self.sent = (), []
        if self.rounds:
            self._note(self)


def note_of(reply: Reply, attachments: Attachments) -> AnswerNote:
    """What the books want to know of an answer."""
    size, reduced = reply.size, reply.reduced
    summing, among = (
        (reduced.seconds, reduced.size + reply.passed)
        if reduced is not None
        else (0.0, reply.passed)
    )
    came = None
    if attachments.beside:
        came = ways(attachments.beside, size)
    return AnswerNote(
        reply.laps,
        reply.seconds,
        size,
        came,
        reply.memory,
        summing,
        among,
        reply.failure is not None,
    )


class Reducing:
    """The driver sums the gradients of some replicas, which have nothing to do meanwhile.

    Args:
        slots: Whose gradients.
        number: Which backward's.
        note: Enters it in the books.
        span: A span in `ray timeline`, if it is to be seen there.

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
