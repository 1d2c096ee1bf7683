"""`Recorder`: where the time of an executor's replicas went, what travelled, and the last calls as
they happened. The notes that it gets of calls while they run are small tuples that hold no objects
of the user.

sent ──► adopt │ copy in │ forward or backward │ copy out ──► ... all replicas done ──► reduce ──►
idle ──► sent
         └────────── the replica's own clock ──────────┘
└───────────────── what of this is not in the replica: wait ─────────────────────────┘
"""

from __future__ import annotations

import re
import statistics
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from torch._C._profiler import _RecordFunctionFast as _range

from raydp_parallel.cluster.backend import TaskLabel
from raydp_parallel.cluster.replica_slots import ChunkCall, ReplicaSlot
from raydp_parallel.devices import forks
from raydp_parallel.devices.process import number
from raydp_parallel.monitoring.accounts import (
    Account,
    Accounts,
    CallSpan,
    ChunkSpan,
    Clock,
    OpenSpan,
    Recent,
    ReplicaAccount,
    Ways,
    for_model,
    phases_of,
    unseen,
    ways,
)
from raydp_parallel.monitoring.advice import advise
from raydp_parallel.monitoring.reporter import Report
from raydp_parallel.monitoring.stats import (
    DriverSeconds,
    ExecutorStats,
    ReplicaStats,
    Tally,
    Totals,
)
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
        checked: When all was sent, and what it does meanwhile was done.
        waits: When it began to wait.
        ended: When all were answered.
        sent: The messages.
        answers: The note of each message's answer; None if its replica died.
    """

    first: bool
    began: float
    checked: float
    waits: float
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
        recorder: Gets what is done.

    Attributes:
        jobs: The calls of the run, until it ends.
        sent: The messages that are not answered yet.
        rounds: The rounds that are over, for a picture of the run.
    """

    def __init__(self, jobs: Sequence[ChunkCall], number: int, recorder: Recorder) -> None:
        self._began = self._checked = self._waits = time.perf_counter()
        self.jobs = jobs
        self._recorder = recorder
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
        job, method, size = self.jobs[number], again or self.method, attachments.size
        model = self._recorder.accounts.same.get(job.model, job.model)
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
        return TaskLabel(method, number + 1, len(self.jobs), bool(again))

    def checked(self) -> None:
        """Note that all was sent, and what the driver does meanwhile was done."""
        self._checked = time.perf_counter()

    def wait(self, collect: Callable[[Any], T], pending: Any) -> T:
        """Wait for all calls, in a range of torch's profiler."""
        self._waits = time.perf_counter()
        with _range(f"raydp_parallel.{self.method}: replicas"):
            opens = self._recorder.span
            span = None if opens is unseen else opens("wait")
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
            waits=self._waits,
            ended=ended,
            sent=self.sent,
            answers=answers,
        )
        self.rounds.append(done)
        self._recorder.enter_round(done)
        self.sent, self._began = [], ended


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
        recorder: Gets it.

    Attributes:
        began: When it began.
        ended: When it ended.
    """

    def __init__(self, slots: Sequence[ReplicaSlot], number: int, recorder: Recorder) -> None:
        self.slots = slots
        self.number = number
        self.began = self.ended = 0.0
        self._recorder = recorder
        self._span = None if recorder.span is unseen else recorder.span("reduce")
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
            self._recorder.enter_reducing(self)


_SHOWN = 48
"""How many calls are kept as they happened, for pictures."""


class Recorder:
    """The record of what one executor did.

    Args:
        name: What to call it; a second one of the same name in this process gets a number.
    """

    def __init__(self, name: str) -> None:
        found = number(f"executor {name}")
        self.name = name if found == 1 else f"{name}/{found}"
        self.accounts = Accounts()
        self.replicas: dict[int, ReplicaAccount] = {}
        self.driver = [0.0] * 4
        self.calls: deque[CallSpan] = deque(maxlen=_SHOWN)
        self.events: deque[tuple[float, str]] = deque(maxlen=50)
        self.changes: Counter[str] = Counter()
        self.span: OpenSpan = unseen
        """Opens a span of the driver in `ray timeline`, where calls are tasks there."""
        self.traced: list[CallSpan] | None = None
        """Calls since the last report, if a trace is written; the report takes them."""
        # Weak: where Ctrl-C comes before a run is ended, nothing else has it.
        self.under_way: weakref.WeakSet[CallRecord] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._numbers = {"forward": 0, "backward": 0}
        forks.tell_child(self)

    def after_fork(self) -> None:
        """Make the lock anew: the thread that held it is not in the child."""
        self._lock = threading.Lock()

    def installed(self, slot: ReplicaSlot) -> None:
        """Note that a slot got a new replica."""
        now = time.perf_counter()
        with self._lock:
            replica = self.replicas.get(slot.index)
            if replica is None:
                self.replicas[slot.index] = ReplicaAccount(now, now)
                return
            replica.clock, replica.memory = Clock(), (0, 0)
        self.event(f"{slot} took the place of one that ended")

    def event(self, text: str) -> None:
        """Note something that does not happen with every call, without Ray's long description of an
        actor.
        """
        self.events.append((time.time(), re.sub(r"class_name: .*? ip: \S+ ", "", text)))

    def begin(self, jobs: Sequence[ChunkCall]) -> CallRecord:
        """Begin the record of a run."""
        method = jobs[0].method if jobs else "forward"
        number = self._numbers[method] = self._numbers[method] + 1
        run = CallRecord(jobs, number, self)
        self.under_way.add(run)
        return run

    def end(self, run: CallRecord) -> None:
        """Note that a run ended, or was given up. Its jobs hold objects of the user, and are
        released.
        """
        self.under_way.discard(run)
        run.jobs, run.sent = (), []
        if run.rounds:
            with self._lock:
                self._keep(_drawn(run, self.accounts.names, self.replicas))
                self.accounts.tidy()

    def account(self, slot: ReplicaSlot, model: int) -> Account:
        """The account of what a replica did for a model."""
        return self.accounts.of(slot.index, model)

    def replays(self, slot: ReplicaSlot) -> None:
        """Count a job that a replica got because another one died, or lost its graph."""
        with self._lock:
            slot.tally.replays += 1

    def reducing(self, slots: Sequence[ReplicaSlot]) -> Reducing:
        """The time in which the driver sums gradients, as a context manager."""
        return Reducing(slots, self._numbers["backward"], self)

    def state(self, slot: ReplicaSlot, model: int, sent: int, size: int) -> None:
        """Count the bytes of a model's state that went to a replica, out of its size."""
        with self._lock:
            account = self.accounts.of(slot.index, model)
            account.state_sent += sent
            account.state_skipped += max(0, size - sent)

    def changed(self, what: str) -> None:
        """Count why a module changed in more than its contents."""
        with self._lock:
            self.changes[what] += 1

    def enter_round(self, note: Round) -> None:
        """Count what was done in a round."""
        # The other rounds are waiting time as a whole.
        all_sent = checked = waits = note.began
        if note.first:
            all_sent = note.sent[-1].at if note.sent else note.began
            checked = max(all_sent, note.checked)
            waits = max(checked, note.waits)
        with self._lock:
            self.driver[0] += all_sent - note.began
            self.driver[1] += checked - all_sent
            self.driver[2] += note.ended - waits
            by_slot: dict[ReplicaSlot, list[tuple[SentNote, AnswerNote | None]]] = {}
            for one, answer in zip(note.sent, note.answers, strict=True):
                by_slot.setdefault(one.slot, []).append((one, answer))
            for slot, calls in by_slot.items():
                self._enter_calls(slot, calls, note)

    def _enter_calls(
        self, slot: ReplicaSlot, calls: Sequence[tuple[SentNote, AnswerNote | None]], note: Round
    ) -> None:
        """Count what one replica did in a round. One that also runs the chunks of others does
        several calls, one after the other.
        """
        replica, tally = self.replicas[slot.index], slot.tally
        # Calls of several threads may overlap; the time of both counts once.
        start = max(calls[0][0].at, replica.free)
        replica.idle += start - replica.free
        replica.free = max(_done(calls, note, replica.clock.offset), replica.free)
        busy = 0.0
        for one, answer in calls:
            account = self.accounts.of(slot.index, one.model)
            tally.bytes_in += one.size
            _enter_bytes(account, one.ways, one.size, "in")
            if answer is None:
                continue
            if one.own:  # each job is answered once, however often it was sent
                _enter_answer(account, tally, one, answer)
            if answer.laps:
                rows = 0 if answer.failed else one.rows
                busy += _enter_laps(
                    account, replica, one.method, answer.laps, own=one.own, rows=rows
                )
                # `_enter_laps` counted the wait for sums with others as time of copying out.
                account.seconds[4] -= answer.summing
                replica.reduce += answer.summing
                replica.clock.heard(one.at, answer.laps, note.ended)
            if answer.memory is not None:
                replica.memory = answer.memory
        waited = replica.free - start - busy - replica.owed
        replica.owed = max(0.0, -waited)
        account.seconds[5] += max(0.0, waited)

    def enter_reducing(self, note: Reducing) -> None:
        """Count the time in which gradients were summed."""
        span = CallSpan(
            method="reduce",
            number=note.number,
            model="",
            began=note.began,
            sent=note.began,
            ended=note.ended,
            chunks=(),
        )
        with self._lock:
            self.driver[3] += note.ended - note.began
            for slot in note.slots:
                replica = self.replicas[slot.index]
                if note.ended > replica.free:
                    replica.reduce += note.ended - replica.free
                    replica.free = note.ended
            self._keep(span)

    def _keep(self, call: CallSpan) -> None:
        """Keep a call as it happened, for pictures."""
        self.calls.append(call)
        if self.traced is not None:
            self.traced.append(call)

    def _waiting(self, slot: ReplicaSlot) -> float | None:
        """When the oldest call that a replica has still to answer was sent; None if there is
        none.
        """
        sent = [one.at for run in [*self.under_way] for one in [*run.sent] if one.slot is slot]
        return min(sent, default=None)

    def _replica(self, slot: ReplicaSlot, model: int | None, now: float) -> ReplicaStats:
        """A frozen copy of what a replica did, for one model or for all."""
        replica = self.replicas.get(slot.index)
        found = [
            a
            for (index, owner), a in self.accounts.items()
            if index == slot.index and model in (None, owner)
        ]
        hello, info = slot.hello, slot.info()
        more: dict[str, Any] = {
            name: sum(getattr(account, name) for account in found)
            for name in ("state_sent", "state_skipped")
        }
        if replica is not None and hello is not None:
            more["phases"] = phases_of(replica, found, now, self._waiting(slot))
            more["memory"], more["memory_peak"] = replica.memory
            more["memory_total"] = hello.memory
            recent = [entry for entry in replica.recent if entry.rows]
            if recent:
                # A median: a single call that other work of the machine delayed does not count.
                more["recent_ms"] = 1e3 * statistics.median(entry.work for entry in recent)
                more["recent_copies_ms"] = 1e3 * statistics.median(entry.copies for entry in recent)
                more["recent_rows"] = float(statistics.median(entry.rows for entry in recent))
        if model is not None:
            more.update(for_model(found))
        elif replica is not None and replica.recent:
            more["chunk_rows"] = replica.recent[-1].rows  # of the model that ran last
        return slot.tally.stats(info, **more)

    def report(self, stats: ExecutorStats, history: Sequence[Any], last: bool) -> Report:
        """A report for the sinks of the reporter."""
        with self._lock:
            accounts = self.accounts.reported()
            traced, self.traced = self.traced, None if self.traced is None else []
            return Report(
                stats=stats,
                accounts=accounts,
                calls=[*self.calls],
                events=[*self.events],
                history=history,
                traced=traced or (),
                last=last,
            )

    def stats(
        self, totals: Totals, slots: Sequence[ReplicaSlot], link: str, model: int | None = None
    ) -> ExecutorStats:
        """A frozen copy of all statistics, for one model or for all."""
        with self._lock:
            now, model = time.perf_counter(), None if model is None else self.accounts.number(model)
            replicas = tuple(self._replica(slot, model, now) for slot in slots)
            began = min((one.since for one in self.replicas.values()), default=now)
            prepare, verify, wait, reduce = self.driver
            outside = max(0.0, now - began - sum(self.driver))
            ended = max((one.free for one in self.replicas.values()), default=now)
            names = tuple(
                name for id_, name in [*self.accounts.names.items()] if model in (None, id_)
            )
            changes = tuple(self.changes.most_common(10))
        found = totals.stats(
            replicas,
            link,
            name=self.name,
            models=names,
            seconds=now - began,
            quiet=max(0.0, now - ended),
            driver=DriverSeconds(prepare, verify, wait, reduce, outside),
            changes=changes,
        )
        return replace(found, advice=advise(found))


def _done(calls: Sequence[tuple[SentNote, AnswerNote | None]], note: Round, offset: float) -> float:
    """When a replica's calls were done: when the driver had the answers, without the time in which
    they lay there and the driver did not wait for them.
    """
    computed = max((answer.laps[-1] for _, answer in calls if answer and answer.laps), default=0.0)
    return note.ended - max(0.0, note.waits - max(note.checked, computed + offset))


def _enter_answer(account: Account, tally: Tally, one: SentNote, answer: AnswerNote) -> None:
    """Count a job that was done."""
    if one.method == "forward":
        rows = 0 if answer.failed else one.rows
        tally.calls += 1
        tally.rows += rows
        tally.forward_seconds += answer.seconds
        account.rows += rows
        account.chunk_rows = rows or account.chunk_rows
    else:
        tally.backward_seconds += answer.seconds
    tally.bytes_out += answer.size
    _enter_bytes(account, answer.ways, answer.size, "out")
    if answer.among:
        account.traffic["collective", "among"] += answer.among


def _enter_laps(
    account: Account,
    replica: ReplicaAccount,
    method: str,
    laps: tuple[float, ...],
    own: bool,
    rows: int,
) -> float:
    """Enter what a replica measured; returns how long it was busy.

    Args:
        account: What the replica did for the model.
        replica: What concerns the replica.
        method: ``"forward"`` or ``"backward"``.
        laps: When its phases began, and when the last ended.
        own: Whether it counts as a call. A forward that only makes a lost graph again takes time,
            but was counted where it ran first.
        rows: Rows of the batch that it computed.
    """
    t0, t1, t2, t3, t4 = laps
    work = t3 - t2
    copies = (t2 - t0) + (t4 - t3)
    seconds = account.seconds
    seconds[0] += t1 - t0
    seconds[1] += t2 - t1
    seconds[2 if method == "forward" else 3] += work
    seconds[4] += t4 - t3
    if not own:
        return t4 - t0
    account.busy[method] += t4 - t0
    if method == "forward":
        account.forwards += 1
        replica.recent.append(Recent(work, copies, rows))
    else:
        account.backwards += 1
        if replica.recent:
            last = replica.recent[-1]
            replica.recent[-1] = Recent(last.work + work, last.copies + copies, last.rows)
    return t4 - t0


def _enter_bytes(account: Account, went: Ways | None, size: int, direction: str) -> None:
    """Enter a message's bytes by link; without ``went`` all of them lay in the message itself."""
    for link, part in (("inline", size),) if went is None else went:
        if part:
            account.traffic[link, direction] += part


def _drawn(
    run: CallRecord, models: Mapping[int, str], replicas: Mapping[int, ReplicaAccount]
) -> CallSpan:
    """A run as it happened, by the driver's clock. A job that ran again is shown as it ran last."""
    first, ended = run.rounds[0], run.rounds[-1].ended
    model = models.get(first.sent[0].model, "") if first.sent else ""
    chunks: dict[int, ChunkSpan] = {}
    for each in run.rounds:
        for one, answer in zip(each.sent, each.answers, strict=True):
            offset = replicas[one.slot.index].clock.offset
            laps = answer.laps if answer is not None else ()
            laps = tuple([stamp + offset for stamp in laps]) if offset else laps
            chunks[one.number] = ChunkSpan(one.slot.index, one.at, laps)
    all_sent = first.sent[-1].at if first.sent else first.began
    return CallSpan(
        method=run.method,
        number=run.number,
        model=model,
        began=first.began,
        sent=all_sent,
        ended=ended,
        chunks=tuple([chunks[number] for number in sorted(chunks)]),
    )
