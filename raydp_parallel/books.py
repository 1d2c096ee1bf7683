"""An executor's books: whose time went where, what travelled, and the last calls as they happened.

  sent ──► adopt │ copy in │ forward or backward │ copy out ──► ... all replicas done ──► reduce ──► idle ──► sent
           └────────── the replica's own clock ──────────┘
  └───────────────── what of this is not in the replica: wait ─────────────────────────┘

A step pays for this with some additions of floats; whoever wants to see the books reads them at his own pace.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch._C._profiler import _RecordFunctionFast as _range

from raydp_parallel.accounts import Account, Accounts, Chair, enter, exchanged, for_model, mailed, phases_of, summed
from raydp_parallel.advice import advise
from raydp_parallel.crew import Task
from raydp_parallel.jobs import Job
from raydp_parallel.links import GIVEN, Mail
from raydp_parallel.messages import Reply
from raydp_parallel.monitor import DriverSeconds, ExecutorStats, ReplicaStats, Totals
from raydp_parallel.phases import CallSpan, ChunkSpan, Clock, OpenSpan, unseen
from raydp_parallel.reporter import Report
from raydp_parallel.seats import Seat

_SHOWN = 48
"""Calls that are kept as they happened, for pictures."""

_LARGE = 8 << 20
"""Bytes of an answer above which a call is not shown."""

_names: Counter[str] = Counter()
_naming = threading.Lock()


class Sent(NamedTuple):
    """One message of a run, on its way.

    Attributes:
        number: Which of the run's jobs it is for.
        job: The job.
        seat: Who it went to.
        at: When.
        method: What it asks for.
        own: Whether it is the job's own message, and not one that makes a lost graph again in front of it.
        account: What its replica did for its model.
    """

    number: int
    job: Job
    seat: Seat
    at: float
    method: str
    own: bool
    account: Account


class Run:
    """One run of the executor, which tells how far it is.

    A run has one round, and another one for the jobs of each replica that dies: send, wait, heard.

    Args:
        books: What is written into.
        jobs: What is run.
    """

    def __init__(self, books: Books, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.began = self.checked = time.perf_counter()
        self.method = jobs[0].method if jobs else ""
        self.number = books.number(self.method)
        self.shown = books.shows(jobs, self.began)
        self.sent: list[Sent] = []
        self.rounds = 0
        self._books = books
        self._chunks: dict[int, ChunkSpan] = {}
        self._times: tuple[float, float, float] | None = None

    def sends(self, number: int, seat: Seat, mail: Mail, again: str = "") -> Task:
        """A message for a job is ready and goes out; returns how the call looks in Ray's dashboard.

        Args:
            number: Which job.
            seat: Who gets it.
            mail: What goes with it.
            again: What is called to make a lost graph again in front of the job; empty for the job itself.
        """
        now, job, method = time.perf_counter(), self.jobs[number], again or self.method
        account = self._books.sent(seat, job, mail, now)
        self.sent.append(Sent(number, job, seat, now, method, not again, account))
        name = f"{method} #{self.number}" if self.shown else method
        return Task(f"{name} {'again ' if again else ''}chunk {number + 1}/{len(self.jobs)}", self.shown)

    def wait(self, collect: Callable[[Sequence[Any]], list[Any]], pending: Sequence[Any]) -> list[Any]:
        """Wait for all calls, in a range of torch's profiler."""
        self.checked = time.perf_counter()
        with _range(f"raydp_parallel.{self.method}: replicas"), self._books.seen("wait", self.shown):
            return collect(pending)

    def heard(self, replies: Sequence[Reply | None]) -> None:
        """All messages of a round were answered, in the order of sending; None stands for a replica that died."""
        ended = time.perf_counter()
        sent, self.sent = self.sent, []
        chunks = self._books.ran(self, sent, replies, ended)
        self._chunks.update(zip((one.number for one in sent), chunks, strict=True))  # of a job the last one stays
        first, all_sent, _ = self._times or (self.began, sent[-1].at if sent else self.began, 0.0)
        self._times = first, all_sent, ended
        self.began = ended
        self.rounds += 1

    def ended(self) -> None:
        """It came to its end, or nobody waits for it any more."""
        for one in self.sent:
            self._books.given_up(one.seat)
        self.sent = []
        if self._times is not None:
            model = self._books.name_of(self.jobs[0].model) if self.jobs else ""
            chunks = tuple(chunk for _, chunk in sorted(self._chunks.items()))
            self._books.keep(CallSpan(self.method, self.number, model, *self._times, chunks))


def _numbered(name: str) -> str:
    with _naming:
        _names[name] += 1
        return name if _names[name] == 1 else f"{name}/{_names[name]}"


class Books:
    """The books of one executor.

    Args:
        name: What to call it; a second one of the same name in this process gets a number.
    """

    def __init__(self, name: str) -> None:
        self.name = _numbered(name)
        self.accounts = Accounts()
        self.models = self.accounts.names
        self.chairs: dict[int, Chair] = {}
        self.driver = [0.0] * 4
        self.calls: deque[CallSpan] = deque(maxlen=_SHOWN)
        self.events: deque[tuple[float, str]] = deque(maxlen=50)
        self.changes: Counter[str] = Counter()
        self.shown = True
        self.span: OpenSpan = unseen
        """Opens a span of the driver in `ray timeline`."""
        self._last_shown = False
        self.traced: list[CallSpan] | None = None
        """Calls that somebody wants to write down; he takes them away."""
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()
        self._began = time.perf_counter()
        self._next_shown: dict[str, float] = {}

    def seated(self, seat: Seat) -> None:
        """A replica sat down."""
        now = time.perf_counter()
        with self._lock:
            chair = self.chairs.get(seat.index)
            if chair is None:
                self.chairs[seat.index] = Chair(now, now)
                return
            chair.clock, chair.memory = Clock(), (0, 0)
        self.event(f"{seat} took the place of one that ended")

    def given_up(self, seat: Seat) -> None:
        """Nobody waits for a call to a replica any more."""
        with self._lock:
            self.chairs[seat.index].running -= 1

    def event(self, text: str) -> None:
        """Note something that does not happen with every call; of Ray's long words the ends."""
        self.events.append((time.time(), re.sub(r"class_name: .*? ip: \S+ ", "", text)))

    def begin(self, jobs: Sequence[Job]) -> Run:
        """A run begins."""
        run = Run(self, jobs)
        self._last_shown = run.shown
        return run

    def seen(self, phase: str, shown: bool) -> contextlib.AbstractContextManager[Any]:
        """A span in `ray timeline` for a phase of the driver, if its call is shown."""
        return (self.span(phase) if shown else None) or contextlib.nullcontext()

    def shows(self, jobs: Sequence[Job], now: float) -> bool:
        """Whether this run is one of those that Ray's dashboard gets to see.

        [Note: calls that are shown]
        A call over a direct line is no Ray task. So that the dashboard has a task list and a timeline, now and then a
        call goes as a task, under a name with its number: at first each second, later after a fifth of the time that
        has passed. Not more often, and no others with their number, because Ray labels a metric with each task's name
        and never forgets it: a name costs 11 series. Not those with large answers, which the line carries faster.
        """
        method = jobs[0].method if jobs else ""
        if not self.shown or now < self._next_shown.get(method, 0.0):
            return False
        known = [self.accounts.get((job.seat.index, self.accounts.number(job.model))) for job in jobs]
        if any(account is not None and account.answer.get(method, 0) > _LARGE for account in known):
            return False
        self._next_shown[method] = now + max(1.0, (now - self._began) / 5)
        return True

    def number(self, method: str) -> int:
        """The number of a call that begins now."""
        self._numbers[method] += 1
        return self._numbers[method]

    def account(self, seat: Seat, model: int) -> Account:
        """What a replica did for a model."""
        return self.accounts.of(seat.index, model)

    def name_of(self, model: int) -> str:
        """What metrics call a model."""
        return self.models.get(self.accounts.number(model), "")

    def rows(self, seat: Seat, model: int, rows: int) -> None:
        """A chunk of a forward came to its end."""
        with self._lock:
            seat.tally.rows += rows
            account = self.account(seat, model)
            account.rows += rows
            account.chunk_rows = rows
            chair = self.chairs[seat.index]
            if chair.recent:
                chair.recent[-1] = (chair.recent[-1][0], rows)

    def sent(self, seat: Seat, job: Job, mail: Mail, now: float) -> Account:
        """A message goes to a replica; returns its account for the model."""
        chair = self.chairs[seat.index]
        with self._lock:
            chair.running += 1
            chair.sent = now
            seat.tally.bytes_in += mail.size
            account = self.accounts.of(seat.index, job.model)
            mailed(account, mail, mail.size, "in")
            return account

    def received(self, seat: Seat, job: Job, mail: Mail, reply: Reply) -> None:
        """A replica has done a job. Jobs are counted here, where each arrives once, however often it was sent."""
        tally = seat.tally
        with self._lock:  # answers are heard by several threads
            if job.method == "forward":
                tally.calls += 1
                tally.forward_seconds += reply.seconds
            else:
                tally.backward_seconds += reply.seconds
            tally.bytes_out += reply.size
            account = self.account(seat, job.model)
            account.answer[job.method] = reply.size
            laid = reply.value is not None and reply.value.packet == GIVEN
            mailed(account, mail, reply.size, "out", "shared" if laid else "inline")
            exchanged(account, reply)

    def replays(self, seat: Seat) -> None:
        """A replica is given what another one died of, or with."""
        with self._lock:
            seat.tally.replays += 1

    def ran(self, run: Run, sent: Sequence[Sent], replies: Sequence[Reply | None], ended: float) -> list[ChunkSpan]:
        """A round of a run came to its end; returns its messages as they happened."""
        with self._lock:
            # What runs again was waited for, all of it.
            all_sent, checked = (
                (sent[-1].at if sent else run.began, run.checked) if not run.rounds else (run.began,) * 2
            )
            self.driver[0] += all_sent - run.began
            self.driver[1] += checked - all_sent
            self.driver[2] += ended - checked
            by_seat: dict[Seat, list[tuple[Sent, Reply | None]]] = {}
            for one, reply in zip(sent, replies, strict=True):
                by_seat.setdefault(one.seat, []).append((one, reply))
            for seat, calls in by_seat.items():
                self._ran(seat, calls, ended)
            found = [(one, reply, self.chairs[one.seat.index]) for one, reply in zip(sent, replies, strict=True)]
            return [_span(*each) for each in found]

    def _ran(self, seat: Seat, calls: Sequence[tuple[Sent, Reply | None]], ended: float) -> None:
        """What one replica did in a round. One that stands in for another does several calls, one after the other."""
        chair = self.chairs[seat.index]
        chair.running -= len(calls)
        # Calls of several threads may overlap; what two were under way in counts once.
        start = max(calls[0][0].at, chair.free)
        chair.idle += start - chair.free
        chair.free = max(ended, chair.free)
        busy = 0.0
        for one, reply in calls:
            if reply is not None and reply.laps:
                busy += enter(one.account, chair, one.method, reply.laps, one.own)
                summed(one.account, chair, reply)
                chair.clock.heard(one.at, reply.laps, ended)
            if reply is not None and reply.memory is not None:
                chair.memory = reply.memory
        waited = chair.free - start - busy - chair.owed
        chair.owed = max(0.0, -waited)
        calls[-1][0].account.seconds[5] += max(0.0, waited)

    @contextlib.contextmanager
    def reducing(self, seats: Sequence[Seat]) -> Iterator[None]:
        """The driver sums the gradients of some replicas, which have nothing to do meanwhile."""
        began = time.perf_counter()
        with _range("raydp_parallel.reduce"), self.seen("reduce", self._last_shown):
            yield
        ended = time.perf_counter()
        with self._lock:
            self.driver[3] += ended - began
            for seat in seats:
                chair = self.chairs[seat.index]
                if ended > chair.free:
                    chair.reduce += ended - chair.free
                    chair.free = ended
        self.keep(CallSpan("reduce", self._numbers["backward"], "", began, began, ended, ()))

    def state(self, seat: Seat, model: int, sent: int, size: int) -> None:
        """So much of a model's state went to a replica, out of so much."""
        with self._lock:
            account = self.account(seat, model)
            account.state_sent += sent
            account.state_skipped += max(0, size - sent)

    def changed(self, what: str) -> None:
        """A module changed in more than its contents; empty if it did not."""
        if what:
            with self._lock:
                self.changes[what] += 1

    def keep(self, call: CallSpan) -> None:
        """Keep a call as it happened, for pictures."""
        with self._lock:
            self.calls.append(call)
            if self.traced is not None:
                self.traced.append(call)

    def replica(self, seat: Seat, model: int | None = None, now: float | None = None) -> ReplicaStats:
        """Frozen, what a replica did: for one model, or for all."""
        chair = self.chairs.get(seat.index)
        found = [a for (index, owner), a in self.accounts.items() if index == seat.index and model in (None, owner)]
        hello, info = seat.hello, seat.info()
        more: dict[str, Any] = {
            name: sum(getattr(account, name) for account in found) for name in ("state_sent", "state_skipped")
        }
        if chair is not None and hello is not None:
            more["phases"] = phases_of(chair, found, now)
            more["memory"], more["memory_peak"] = chair.memory
            more["memory_total"] = hello.memory
            recent = [entry for entry in chair.recent if entry[1]]
            if recent:
                # A median: a call that the machine's other work held up makes no straggler.
                more["recent_ms"] = 1e3 * statistics.median(work for work, _ in recent)
                more["recent_rows"] = float(statistics.median(rows for _, rows in recent))
        if model is not None:
            more.update(for_model(found))
        elif chair is not None and chair.recent:
            more["chunk_rows"] = chair.recent[-1][1]  # of whichever model came last
        return seat.tally.stats(info, **more)

    def report(self, stats: ExecutorStats, history: Sequence[Any], last: bool) -> Report:
        """How things stand, for whoever wants to tell others."""
        with self._lock:
            traced, self.traced = self.traced, None if self.traced is None else []
            return Report(stats, self.accounts.reported(), [*self.calls], [*self.events], history, traced or (), last)

    def stats(self, totals: Totals, seats: Sequence[Seat], link: str, model: int | None = None) -> ExecutorStats:
        """Frozen, all of it."""
        with self._lock:
            now, model = time.perf_counter(), None if model is None else self.accounts.number(model)
            replicas = tuple(self.replica(seat, model, now) for seat in seats)
            began = min((chair.since for chair in self.chairs.values()), default=now)
            prepare, verify, wait, reduce = self.driver
            outside = max(0.0, now - began - sum(self.driver))
            ended = max((chair.free for chair in self.chairs.values()), default=now)
            names = tuple(name for id_, name in [*self.models.items()] if model in (None, id_))
            changes = tuple(self.changes.most_common(10))
        found = totals.stats(
            replicas, link, name=self.name, models=names, seconds=now - began, quiet=max(0.0, now - ended),
            driver=DriverSeconds(prepare, verify, wait, reduce, outside), changes=changes,
        )  # fmt: skip
        return _with_advice(found)


def _span(one: Sent, reply: Reply | None, chair: Chair) -> ChunkSpan:
    """A message as it happened, by the driver's clock."""
    offset, laps = chair.clock.offset, reply.laps if reply is not None else ()
    return ChunkSpan(one.seat.index, one.at, tuple([stamp + offset for stamp in laps]) if offset else laps)


def _with_advice(stats: ExecutorStats) -> ExecutorStats:
    return replace(stats, advice=advise(stats))
