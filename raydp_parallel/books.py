"""An executor's books: whose time went where, what travelled, and the last calls as they happened.

  sent ──► adopt │ copy in │ forward or backward │ copy out ──► ... all replicas done ──► reduce ──► idle ──► sent
           └────────── the replica's own clock ──────────┘
  └───────────────── what of this is not in the replica: wait ─────────────────────────┘

A step pays for this with some additions of floats; whoever wants to see the books reads them at his own pace.
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch._C._profiler import _RecordFunctionFast as _range

from raydp_parallel.accounts import Account, Chair, enter, for_model, phases_of, way_of
from raydp_parallel.advice import advise
from raydp_parallel.crew import Task
from raydp_parallel.links import Mail
from raydp_parallel.messages import Reply
from raydp_parallel.monitor import DriverSeconds, ExecutorStats, ReplicaStats, Totals
from raydp_parallel.phases import CallSpan, ChunkSpan, Clock, OpenSpan, unseen
from raydp_parallel.reporter import Report
from raydp_parallel.seats import Job, Seat

_SHOWN = 48
"""Calls that are kept as they happened, for pictures."""

_LARGE = 8 << 20
"""Bytes of an answer above which a call is not shown."""

_names: Counter[str] = Counter()
_naming = threading.Lock()


class Run:
    """One run of the executor, which tells how far it is.

    Args:
        books: What is written into.
        jobs: What is run.
    """

    def __init__(self, books: Books, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.began = self.checked = time.perf_counter()
        self.times: list[float] = []
        self._books = books
        self.method = jobs[0].method if jobs else ""
        self.number = books.number(self.method)
        self.shown = books.shows(jobs, self.began)

    def sends(self) -> Task:
        """The next job's message is ready and goes out; returns how the call looks in Ray's dashboard."""
        now = time.perf_counter()
        self._books.under_way(self.jobs[len(self.times)].seat, 1, now)
        self.times.append(now)
        place = f"chunk {len(self.times)}/{len(self.jobs)}"
        return Task(f"{self.method} #{self.number} {place}" if self.shown else f"{self.method} {place}", self.shown)

    def wait(self, collect: Callable[[Sequence[Any]], list[Any]], pending: Sequence[Any]) -> list[Any]:
        """Wait for all calls, in a range of torch's profiler."""
        self.checked = time.perf_counter()
        with _range(f"raydp_parallel.{self.method}: replicas"), self._books.seen("wait", self.shown):
            return collect(pending)

    def ended(self, replies: Sequence[Reply | None]) -> None:
        """All answered; None stands for a replica that died."""
        self._stand_up()
        self._books.ran(self, replies, time.perf_counter())

    def broken(self) -> None:
        """Nobody waits for it any more."""
        self._stand_up()

    def _stand_up(self) -> None:
        for job, _ in zip(self.jobs, self.times, strict=False):
            self._books.under_way(job.seat, -1)


class Books:
    """The books of one executor.

    Args:
        name: What to call it; a second one of the same name in this process gets a number.
    """

    def __init__(self, name: str) -> None:
        with _naming:
            _names[name] += 1
            self.name = name if _names[name] == 1 else f"{name}/{_names[name]}"
        self.models: dict[int, str] = {}
        self.accounts: dict[tuple[int, int], Account] = {}
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

    def under_way(self, seat: Seat, change: int, sent: float | None = None) -> None:
        """One call more, or less, is under way to a replica."""
        chair = self.chairs[seat.index]
        with self._lock:
            chair.running += change
            chair.sent = chair.sent if sent is None else sent

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
        known = [self.accounts.get((job.seat.index, job.model)) for job in jobs]
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
        found = self.accounts.get((seat.index, model))
        return found if found is not None else self.accounts.setdefault((seat.index, model), Account())

    def rows(self, seat: Seat, model: int, rows: int) -> None:
        """A chunk of a forward came to its end."""
        with self._lock:
            account = self.account(seat, model)
            account.rows += rows
            account.chunk_rows = rows
            chair = self.chairs[seat.index]
            if chair.recent:
                chair.recent[-1] = (chair.recent[-1][0], rows)

    def sent(self, job: Job, mail: Mail) -> None:
        """A message goes to a replica."""
        with self._lock:
            job.seat.tally.bytes_in += mail.size
            self._mailed(job, mail, mail.size, "in")

    def received(self, job: Job, mail: Mail, reply: Reply) -> None:
        """A replica answered."""
        tally = job.seat.tally
        with self._lock:  # answers are heard by several threads
            if job.method == "forward":
                tally.calls += 1
                tally.forward_seconds += reply.seconds
            else:
                tally.backward_seconds += reply.seconds
            tally.bytes_out += reply.size
            self._mailed(job, mail, reply.size, "out")

    def _mailed(self, job: Job, mail: Mail, size: int, direction: str) -> None:
        """A message with so many bytes of tensors: which way did they go?"""
        account = self.account(job.seat, job.model)
        if direction == "out":
            account.answer[job.method] = size
        if size:
            traffic, left = account.traffic, size
            for packet in mail.beside:
                link, part = way_of(packet)
                part = left if part is None else min(left, part)
                left -= part
                traffic[link, direction] += part
            if left:
                traffic["inline", direction] += left

    def ran(self, run: Run, replies: Sequence[Reply | None], ended: float) -> None:
        """A run came to its end."""
        with self._lock:
            self._ran(run, replies, ended)

    def _ran(self, run: Run, replies: Sequence[Reply | None], ended: float) -> None:
        jobs, sent = run.jobs, run.times
        all_sent = sent[-1] if sent else run.began
        driver = self.driver
        driver[0] += all_sent - run.began
        driver[1] += run.checked - all_sent
        driver[2] += ended - run.checked
        chunks = []
        for job, reply, at in zip(jobs, replies, sent, strict=True):
            laps = reply.laps if reply is not None else ()
            chair = self.chairs[job.seat.index]
            account = self.account(job.seat, job.model)
            # Calls of several threads may overlap; what two were under way in counts once.
            start = max(at, chair.free)
            chair.idle += start - chair.free
            chair.free = max(ended, chair.free)
            busy = 0.0
            if laps:
                busy = enter(account, chair, job.method, laps)
                chair.clock.heard(at, laps, ended)
                offset = chair.clock.offset
                laps = tuple([stamp + offset for stamp in laps]) if offset else laps
            if reply is not None and reply.memory is not None:
                chair.memory = reply.memory
            account.seconds[5] += max(0.0, chair.free - start - busy)
            chunks.append(ChunkSpan(job.seat.index, at, laps))
        model = self.models.get(jobs[0].model, "") if jobs else ""
        self._keep(CallSpan(run.method, run.number, model, run.began, all_sent, ended, tuple(chunks)))

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
            self._keep(CallSpan("reduce", self._numbers["backward"], "", began, began, ended, ()))

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

    def _keep(self, call: CallSpan) -> None:
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
            more["recent_ms"] = 1e3 * sum(work for work, _ in recent) / max(1, len(recent))
            more["recent_rows"] = sum(rows for _, rows in recent) / max(1, len(recent))
        if found:
            more["chunk_rows"] = found[-1].chunk_rows
        if model is not None:
            more.update(for_model(found))
        return seat.tally.stats(info, **more)

    def report(self, stats: ExecutorStats, history: Sequence[Any], last: bool) -> Report:
        """How things stand, for whoever wants to tell others."""
        with self._lock:
            traced, self.traced = self.traced, None if self.traced is None else []
            named = self.models
            accounts = [(index, named.get(model, ""), copy.deepcopy(a)) for (index, model), a in self.accounts.items()]
            return Report(stats, accounts, [*self.calls], [*self.events], history, traced or (), last)

    def stats(self, totals: Totals, seats: Sequence[Seat], link: str, model: int | None = None) -> ExecutorStats:
        """Frozen, all of it."""
        with self._lock:
            now = time.perf_counter()
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


def _with_advice(stats: ExecutorStats) -> ExecutorStats:
    return replace(stats, advice=advise(stats))
