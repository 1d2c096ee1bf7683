"""An executor's books: whose time went where, what travelled, and the last calls as they happened.

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
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raydp_parallel.cluster.chunk_calls import ChunkCall
from raydp_parallel.cluster.replica_slots import ReplicaSlot
from raydp_parallel.cluster.run_notes import AnswerNote, CallRecord, Reducing, Round, SentNote
from raydp_parallel.devices import forks
from raydp_parallel.monitoring.accounts import (
    Account,
    Accounts,
    ReplicaAccount,
    enter,
    for_model,
    phases_of,
    travelled,
)
from raydp_parallel.monitoring.advice import advise
from raydp_parallel.monitoring.phases import CallSpan, ChunkSpan, Clock, OpenSpan, unseen
from raydp_parallel.monitoring.reporter import Report
from raydp_parallel.monitoring.stats import (
    DriverSeconds,
    ExecutorStats,
    ReplicaStats,
    Tally,
    Totals,
)

_SHOWN = 48
"""Calls that are kept as they happened, for pictures."""

_names: Counter[str] = Counter()
_naming = threading.Lock()


def _numbered(name: str) -> str:
    with _naming:
        _names[name] += 1
        return name if _names[name] == 1 else f"{name}/{_names[name]}"


class Recorder:
    """The books of one executor.

    Args:
        name: What to call it; a second one of the same name in this process gets a number.
    """

    def __init__(self, name: str) -> None:
        self.name = _numbered(name)
        self.accounts = Accounts()
        self.models = self.accounts.names
        self.chairs: dict[int, ReplicaAccount] = {}
        self.driver = [0.0] * 4
        self.calls: deque[CallSpan] = deque(maxlen=_SHOWN)
        self.events: deque[tuple[float, str]] = deque(maxlen=50)
        self.changes: Counter[str] = Counter()
        self.span: OpenSpan = unseen
        """Opens a span of the driver in `ray timeline`, where calls are tasks there."""
        self.traced: list[CallSpan] | None = None
        """Calls that somebody wants to write down; he takes them away."""
        self.under_way: set[CallRecord] = set()
        self._lock = threading.Lock()
        self._numbers = {"forward": 0, "backward": 0}
        forks.tell_child(self)

    def after_fork(self) -> None:
        """No other thread has the lock."""
        self._lock = threading.Lock()

    def seated(self, slot: ReplicaSlot) -> None:
        """A replica sat down."""
        now = time.perf_counter()
        with self._lock:
            chair = self.chairs.get(slot.index)
            if chair is None:
                self.chairs[slot.index] = ReplicaAccount(now, now)
                return
            chair.clock, chair.memory = Clock(), (0, 0)
        self.event(f"{slot} took the place of one that ended")

    def event(self, text: str) -> None:
        """Note something that does not happen with every call; of Ray's long words the ends."""
        self.events.append((time.time(), re.sub(r"class_name: .*? ip: \S+ ", "", text)))

    def begin(self, jobs: Sequence[ChunkCall]) -> CallRecord:
        """A run begins."""
        method = jobs[0].method if jobs else "forward"
        number = self._numbers[method] = self._numbers[method] + 1
        run = CallRecord(jobs, number, self.accounts.same, self._enter, self.span)
        self.under_way.add(run)
        return run

    def end(self, run: CallRecord) -> None:
        """It came to its end, or nobody waits for it any more."""
        run.ended()
        self.under_way.discard(run)

    def _enter(self, done: Round | CallRecord | Reducing) -> None:
        """Something is done."""
        with self._lock:
            if isinstance(done, Round):
                self._enter_round(done)
            elif isinstance(done, CallRecord):
                self._keep(_drawn(done, self.models, self.chairs))
                self.accounts.tidy(self.accounts.gone)
            else:
                self._enter_reducing(done)

    def account(self, slot: ReplicaSlot, model: int) -> Account:
        """What a replica did for a model."""
        return self.accounts.of(slot.index, model)

    def replays(self, slot: ReplicaSlot) -> None:
        """A replica is given what another one died of, or with."""
        with self._lock:
            slot.tally.replays += 1

    def reducing(self, slots: Sequence[ReplicaSlot]) -> Reducing:
        """The driver sums the gradients of some replicas, which have nothing to do meanwhile."""
        return Reducing(slots, self._numbers["backward"], self._enter, self.span("reduce"))

    def state(self, slot: ReplicaSlot, model: int, sent: int, size: int) -> None:
        """So much of a model's state went to a replica, out of so much."""
        with self._lock:
            account = self.accounts.of(slot.index, model)
            account.state_sent += sent
            account.state_skipped += max(0, size - sent)

    def changed(self, what: str) -> None:
        """A module changed in more than its contents; empty if it did not."""
        if what:
            with self._lock:
                self.changes[what] += 1

    def _enter_round(self, note: Round) -> None:
        # What runs again was waited for, all of it.
        all_sent, checked = note.began, note.began
        if note.first:
            all_sent, checked = note.sent[-1].at if note.sent else note.began, note.checked
        self.driver[0] += all_sent - note.began
        self.driver[1] += checked - all_sent
        self.driver[2] += note.ended - checked
        by_seat: dict[ReplicaSlot, list[tuple[SentNote, AnswerNote | None]]] = {}
        for one, told in zip(note.sent, note.told, strict=True):
            by_seat.setdefault(one.slot, []).append((one, told))
        for slot, calls in by_seat.items():
            self._enter_calls(slot, calls, note.ended)

    def _enter_calls(
        self, slot: ReplicaSlot, calls: Sequence[tuple[SentNote, AnswerNote | None]], ended: float
    ) -> None:
        """What one replica did in a round. One that stands in for another does several calls, one
        after the other.
        """
        chair, tally = self.chairs[slot.index], slot.tally
        # Calls of several threads may overlap; what two were under way in counts once.
        start = max(calls[0][0].at, chair.free)
        chair.idle += start - chair.free
        chair.free = max(ended, chair.free)
        busy = 0.0
        for one, told in calls:
            account = self.accounts.of(slot.index, one.model)
            tally.bytes_in += one.size
            travelled(account, one.ways, one.size, "in")
            if told is None:
                continue
            if one.own:  # each job arrives once, however often it was sent
                _enter_answer(account, tally, one, told)
            if told.laps:
                busy += enter(
                    account, chair, one.method, told.laps, one.own, 0 if told.failed else one.rows
                )
                # Time in which it waited for sums with others is no time of copying out, which it
                # was entered as.
                account.seconds[4] -= told.summing
                chair.reduce += told.summing
                chair.clock.heard(one.at, told.laps, ended)
            if told.memory is not None:
                chair.memory = told.memory
        waited = chair.free - start - busy - chair.owed
        chair.owed = max(0.0, -waited)
        account.seconds[5] += max(0.0, waited)

    def _enter_reducing(self, note: Reducing) -> None:
        self.driver[3] += note.ended - note.began
        for slot in note.slots:
            chair = self.chairs[slot.index]
            if note.ended > chair.free:
                chair.reduce += note.ended - chair.free
                chair.free = note.ended
        self._keep(CallSpan("reduce", note.number, "", note.began, note.began, note.ended, ()))

    def _keep(self, call: CallSpan) -> None:
        """Keep a call as it happened, for pictures."""
        self.calls.append(call)
        if self.traced is not None:
            self.traced.append(call)

    def _waiting(self, slot: ReplicaSlot) -> float | None:
        """When the first of a replica's calls was sent that are under way; None: there is none."""
        sent = [one.at for run in [*self.under_way] for one in [*run.sent] if one.slot is slot]
        return min(sent, default=None)

    def _replica(self, slot: ReplicaSlot, model: int | None, now: float) -> ReplicaStats:
        """Frozen, what a replica did: for one model, or for all."""
        chair = self.chairs.get(slot.index)
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
        if chair is not None and hello is not None:
            more["phases"] = phases_of(chair, found, now, self._waiting(slot))
            more["memory"], more["memory_peak"] = chair.memory
            more["memory_total"] = hello.memory
            recent = [entry for entry in chair.recent if entry.rows]
            if recent:
                # A median: a call that the machine's other work held up makes no straggler.
                more["recent_ms"] = 1e3 * statistics.median(entry.work for entry in recent)
                more["recent_copies_ms"] = 1e3 * statistics.median(entry.copies for entry in recent)
                more["recent_rows"] = float(statistics.median(entry.rows for entry in recent))
        if model is not None:
            more.update(for_model(found))
        elif chair is not None and chair.recent:
            more["chunk_rows"] = chair.recent[-1].rows  # of whichever model came last
        return slot.tally.stats(info, **more)

    def report(self, stats: ExecutorStats, history: Sequence[Any], last: bool) -> Report:
        """How things stand, for whoever wants to tell others."""
        with self._lock:
            accounts = self.accounts.reported(self.accounts.gone)
            traced, self.traced = self.traced, None if self.traced is None else []
            return Report(
                stats, accounts, [*self.calls], [*self.events], history, traced or (), last
            )

    def stats(
        self, totals: Totals, slots: Sequence[ReplicaSlot], link: str, model: int | None = None
    ) -> ExecutorStats:
        """Frozen, all of it."""
        with self._lock:
            now, model = time.perf_counter(), None if model is None else self.accounts.number(model)
            replicas = tuple(self._replica(slot, model, now) for slot in slots)
            began = min((chair.since for chair in self.chairs.values()), default=now)
            prepare, verify, wait, reduce = self.driver
            outside = max(0.0, now - began - sum(self.driver))
            ended = max((chair.free for chair in self.chairs.values()), default=now)
            names = tuple(name for id_, name in [*self.models.items()] if model in (None, id_))
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
        return _with_advice(found)


def _enter_answer(account: Account, tally: Tally, one: SentNote, told: AnswerNote) -> None:
    """A job was done."""
    if one.method == "forward":
        rows = 0 if told.failed else one.rows
        tally.calls += 1
        tally.rows += rows
        tally.forward_seconds += told.seconds
        account.rows += rows
        account.chunk_rows = rows or account.chunk_rows
    else:
        tally.backward_seconds += told.seconds
    tally.bytes_out += told.size
    travelled(account, told.ways, told.size, "out")
    if told.among:
        account.traffic["collective", "among"] += told.among


def _drawn(
    run: CallRecord, models: Mapping[int, str], chairs: Mapping[int, ReplicaAccount]
) -> CallSpan:
    """A run as it happened, by the driver's clock. Of a job that ran again the last time is
    shown.
    """
    first, ended = run.rounds[0], run.rounds[-1].ended
    model = models.get(first.sent[0].model, "") if first.sent else ""
    chunks: dict[int, ChunkSpan] = {}
    for each in run.rounds:
        for one, told in zip(each.sent, each.told, strict=True):
            offset, laps = (
                chairs[one.slot.index].clock.offset,
                told.laps if told is not None else (),
            )
            laps = tuple([stamp + offset for stamp in laps]) if offset else laps
            chunks[one.number] = ChunkSpan(one.slot.index, one.at, laps)
    all_sent = first.sent[-1].at if first.sent else first.began
    drawn = tuple([chunks[number] for number in sorted(chunks)])
    return CallSpan(run.method, run.number, model, first.began, all_sent, ended, drawn)


def _with_advice(stats: ExecutorStats) -> ExecutorStats:
    return replace(stats, advice=advise(stats))
