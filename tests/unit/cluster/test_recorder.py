"""An executor's recorder: every second of a replica is entered once, and every byte by the way it
went.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raydp_parallel import DataParallel, Executor, Options, parallel_apply, replicate
from raydp_parallel.cluster import recorder
from raydp_parallel.cluster.backend import DevicePlace
from raydp_parallel.cluster.recorder import AnswerNote, Recorder, note_of
from raydp_parallel.cluster.replica_slots import ChunkCall, ReplicaSlot
from raydp_parallel.devices.buffers import Arena
from raydp_parallel.devices.ranges import ReplicaHello
from raydp_parallel.monitoring.stats import ExecutorStats, Totals
from raydp_parallel.transport.links import Attachments, InlineLink, Mappings
from raydp_parallel.transport.messages import Reply

NO_ATTACHMENTS = Attachments(InlineLink())


class Time:
    """A clock that stands still until it is told."""

    now = 100.0

    def perf_counter(self) -> float:
        """The time."""
        return self.now

    def time(self) -> float:
        """The same, as seconds since the epoch."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    """The only clock of these tests."""
    found = Time()
    monkeypatch.setattr(recorder, "time", found)
    monkeypatch.setattr(recorder, "time", found)
    return found


def install(kept: Recorder, count: int = 2) -> list[ReplicaSlot]:
    """Slots with a replica each."""
    slots = [ReplicaSlot(DevicePlace("cpu", i), i) for i in range(count)]
    for slot in slots:
        slot.install(None, ReplicaHello(40 + slot.index, "node", "cpu", "", "", 0, 0))
        kept.installed(slot)
    return slots


def reply(stamps: tuple[float, ...]) -> Reply:
    """An answer with these stamps."""
    return Reply(None, None, (), None, stamps[-1] - stamps[0], 1, 0, (), stamps)


def told(stamps: tuple[float, ...]) -> AnswerNote:
    """The note of an answer with these stamps."""
    return note_of(reply(stamps), NO_ATTACHMENTS)


def run(
    kept: Recorder,
    clock: Time,
    slots: list[ReplicaSlot],
    method: str = "forward",
    work: tuple[float, ...] = (0.3, 0.3),
) -> None:
    """A call: 10 ms to prepare, 1 ms there, 2 adopt, 3 in, some work, 4 out; all wait for the last,
    5 ms back.
    """
    call = kept.begin([ChunkCall(slot, method, lambda *_: None, 1, rows=16) for slot in slots])
    clock.now += 0.010
    begin = clock.now
    for number, slot in enumerate(slots):
        call.sends(number, slot, NO_ATTACHMENTS)
    replies = []
    for _, seconds in zip(slots, work, strict=True):
        at = begin + 0.001
        stamps = (at, at + 0.002, at + 0.005, at + 0.005 + seconds, at + 0.009 + seconds)
        replies.append(told(stamps))

    def collect(_: Any) -> list[Any]:
        clock.now = max(r.laps[-1] for r in replies) + 0.005
        return []

    call.wait(collect, [])
    call.answered(replies)
    kept.end(call)


def taken(kept: Recorder, slots: list[ReplicaSlot], model: int | None = None) -> ExecutorStats:
    """The statistics, now."""
    return kept.stats(Totals(), slots, "auto", model)


def test_every_second_is_entered_once(clock: Time) -> None:
    """Phases, waiting for the slower one, reduction and idling add up to the time since the replica
    sat down.
    """
    kept = Recorder("seconds")
    slots = install(kept)
    clock.now += 1.0
    run(kept, clock, slots, work=(0.1, 0.3))
    clock.now += 0.5
    run(kept, clock, slots, "backward", work=(0.2, 0.2))
    with kept.reducing(slots):
        clock.now += 0.25
    clock.now += 2.0
    stats = taken(kept, slots)
    for replica in stats.replicas:
        assert replica.phases.total == pytest.approx(stats.seconds)
        assert replica.phases.reduce == pytest.approx(0.25)
        assert replica.phases.idle == pytest.approx(1.0 + 0.01 + 0.5 + 0.01 + 2.0)
    fast, slow = stats.replicas
    assert fast.phases.forward == pytest.approx(0.1)
    assert fast.phases.wait - slow.phases.wait == pytest.approx(0.2), (
        "the fast one waits for the slow one"
    )
    assert slow.phases.wait == pytest.approx(2 * 0.006)
    driver = stats.driver
    assert driver.prepare == pytest.approx(0.02)
    assert (
        driver.prepare + driver.verify + driver.wait + driver.reduce + driver.outside
        == pytest.approx(stats.seconds)
    )


def test_a_call_that_is_under_way_counts_as_waited(clock: Time) -> None:
    """So that one which hangs is seen."""
    kept = Recorder("under way")
    slots = install(kept)
    clock.now += 1.0
    call = kept.begin([ChunkCall(slots[0], "forward", lambda *_: None, 1)])
    call.sends(0, slots[0], NO_ATTACHMENTS)
    clock.now += 7.0
    first, second = (replica.phases for replica in taken(kept, slots).replicas)
    assert (first.idle, first.wait) == (1.0, 7.0)
    assert (second.idle, second.wait) == (8.0, 0.0)
    kept.end(call)
    assert taken(kept, slots).replicas[0].phases.idle == 8.0


def test_what_a_death_leaves_is_no_work(clock: Time) -> None:
    """The time of the call counts as waited; the next replica there goes on from it."""
    kept = Recorder("death")
    slots = install(kept)
    call = kept.begin([ChunkCall(slot, "forward", lambda *_: None, 1) for slot in slots])
    for number, slot in enumerate(slots):
        call.sends(number, slot, NO_ATTACHMENTS)
    clock.now += 3.0
    call.answered([None, None])
    kept.end(call)
    kept.installed(slots[0])
    phases = taken(kept, slots).replicas[0].phases
    assert (phases.wait, phases.work, phases.total) == (3.0, 0.0, 3.0)
    assert "took the place" in kept.events[-1][1]


def test_work_that_is_heard_of_late_was_no_waiting(clock: Time) -> None:
    """Two threads' calls on one replica: the one that it did last, and quickly, is heard of
    first.
    """
    kept = Recorder("late")
    (slot, _) = install(kept)
    long, short = (
        kept.begin([ChunkCall(slot, "forward", lambda *_: None, model)]) for model in (1, 2)
    )
    long.sends(0, slot, NO_ATTACHMENTS)
    short.sends(0, slot, NO_ATTACHMENTS)
    clock.now += 4.0
    short.answered([told((103.0, 103.0, 103.0, 104.0, 104.0))])
    assert taken(kept, [slot]).replicas[0].phases.wait == pytest.approx(3.0)
    long.answered([told((100.0, 100.0, 100.0, 103.0, 103.0))])
    phases = taken(kept, [slot]).replicas[0].phases
    assert (phases.forward, phases.wait, phases.total) == pytest.approx((4.0, 0.0, 4.0))


def test_an_answer_that_was_not_waited_for_is_no_waiting(clock: Time) -> None:
    """In a map the caller's code runs between sending and taking: the replica is idle then, and the
    driver elsewhere.
    """
    kept = Recorder("ahead")
    (slot,) = install(kept, 1)
    call = kept.begin([ChunkCall(slot, "forward", lambda *_: None, 1)])
    call.sends(0, slot, NO_ATTACHMENTS)
    clock.now += 0.5
    call.checked()
    clock.now += 3.0
    call.wait(lambda _: None, [])
    call.answered([told((100.0, 100.0, 100.0, 102.0, 102.0))])
    kept.end(call)
    stats = taken(kept, [slot])
    phases, driver = stats.replicas[0].phases, stats.driver
    assert (phases.forward, phases.wait, phases.idle) == pytest.approx((2.0, 0.0, 1.5))
    assert (driver.verify, driver.wait, driver.outside) == pytest.approx((0.5, 0.0, 3.0))


def test_what_runs_again_counts_once(clock: Time) -> None:
    """A replica died before its backward: the other one makes the graph again, and runs both
    chunks.
    """
    kept = Recorder("again")
    slots = install(kept)
    jobs = [ChunkCall(slot, "backward", lambda *_: None, 1) for slot in slots]
    call = kept.begin(jobs)
    for number, slot in enumerate(slots):
        call.sends(number, slot, NO_ATTACHMENTS)
    clock.now += 1.0
    call.answered([told((100.0, 100.1, 100.2, 100.7, 100.8)), None])
    clock.now += 0.5
    names = [
        call.sends(1, slots[0], NO_ATTACHMENTS, "forward").name,
        call.sends(1, slots[0], NO_ATTACHMENTS).name,
    ]
    clock.now += 2.0
    call.answered(
        [told((101.6, 101.7, 101.8, 102.3, 102.4)), told((102.4, 102.5, 102.6, 103.1, 103.2))]
    )
    kept.end(call)
    assert names == ["forward again chunk 2/2", "backward chunk 2/2"]
    account = kept.account(slots[0], 1)
    assert (account.forwards, account.backwards) == (0, 2)
    assert account.busy == {"forward": 0.0, "backward": pytest.approx(1.6)}
    stats = taken(kept, slots)
    assert stats.replicas[0].phases.forward == pytest.approx(0.5)
    assert stats.replicas[0].phases.backward == pytest.approx(1.0)
    assert all(found.phases.total == pytest.approx(stats.seconds) for found in stats.replicas)
    (shown,) = kept.calls
    assert (shown.began, shown.ended) == (100.0, 103.5)
    assert [(chunk.replica, chunk.sent) for chunk in shown.chunks] == [(0, 100.0), (0, 101.5)]
    assert not kept.under_way


def test_of_one_model_alone(clock: Time) -> None:
    """A wrapper's statistics are those of its module."""
    kept = Recorder("models")
    slots = install(kept, 1)
    kept.accounts.names.update({1: "Net-1", 2: "Other-2"})
    run(kept, clock, slots, work=(0.1,))
    call = kept.begin([ChunkCall(slots[0], "forward", lambda *_: None, 2, rows=4)])
    call.sends(0, slots[0], NO_ATTACHMENTS)
    clock.now += 1.0
    call.answered(
        [told((clock.now - 0.9, clock.now - 0.8, clock.now - 0.7, clock.now - 0.2, clock.now))]
    )
    one, other = (taken(kept, slots, model).replicas[0] for model in (1, 2))
    assert (one.rows, one.calls, one.phases.forward) == (16, 1, pytest.approx(0.1))
    assert (other.rows, other.calls, other.forward_seconds) == (4, 1, pytest.approx(0.9))
    assert taken(kept, slots, 2).models == ("Other-2",)
    assert taken(kept, slots).replicas[0].phases.forward == pytest.approx(0.6)


def deliver(
    kept: Recorder, job: ChunkCall, attachments: Attachments, answer: Reply, back: Attachments
) -> None:
    """A call of one chunk."""
    call = kept.begin([job])
    call.sends(0, job.slot, attachments)
    call.answered([note_of(answer, back)])
    kept.end(call)


def test_bytes_by_the_way_they_went(clock: Time) -> None:
    """Inside the message, beside it, or through shared memory, on both sides of it."""
    kept = Recorder("bytes")
    (slot,) = install(kept, 1)
    job = ChunkCall(slot, "forward", lambda *_: None, 1)
    arena = Arena()
    lent = arena.take(1000)
    attachments = Attachments(InlineLink(), [lent, np.zeros(50, dtype=np.uint8)])
    attachments.size = 1060
    shown = Mappings().find(lent.descriptor)
    deliver(
        kept,
        job,
        attachments,
        reply((0.0,) * 5)._replace(size=1000),
        Attachments(InlineLink(), [shown]),
    )
    traffic = kept.account(slot, 1).traffic
    assert traffic == {
        ("shared", "in"): 1000,
        ("beside", "in"): 50,
        ("inline", "in"): 10,
        ("shared", "out"): 1000,
    }
    assert (slot.tally.bytes_in, slot.tally.bytes_out) == (1060, 1000)


def test_state_that_need_not_be_sent_is_counted(clock: Time) -> None:
    kept = Recorder("state")
    (slot,) = install(kept, 1)
    for sent in (100, 0, 0, 40):
        kept.state(slot, 1, sent, 100)
    found = taken(kept, [slot]).replicas[0]
    assert (found.state_sent, found.state_skipped) == (140, 260)


def test_names_of_tasks(clock: Time) -> None:
    """Without the call's number, for Ray keeps every name it has seen."""
    kept = Recorder("names")
    slots = install(kept)
    jobs = [ChunkCall(slot, "forward", lambda *_: None, 1) for slot in slots]
    for run in (kept.begin(jobs), kept.begin(jobs)):
        names = [run.sends(i, slot, NO_ATTACHMENTS).name for i, slot in enumerate(slots)]
        assert names == ["forward chunk 1/2", "forward chunk 2/2"]
    again = kept.begin(jobs).sends(0, slots[0], NO_ATTACHMENTS, "forward")
    assert again.name == "forward again chunk 1/2"


def test_executors_of_one_name_are_told_apart() -> None:
    assert [Recorder("twins").name, Recorder("twins").name] == ["twins", "twins/2"]


def test_reports_while_calls_run(clock: Time) -> None:
    """A model that runs for the first time while a report was made broke the reporter's thread."""
    kept = Recorder("busy")
    (slot,) = install(kept, 1)
    done = threading.Event()
    failed: list[BaseException] = []

    def report() -> None:
        try:
            while not done.is_set():
                kept.report(taken(kept, [slot]), [], False)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=report)
    thread.start()
    for model in range(600):
        kept.accounts.names[model] = f"Net-{model}"
        kept.state(slot, model, 1, 1)
        kept.changed(f"attribute {model}")
        kept.event("something")
    done.set()
    thread.join()
    assert not failed


def step_with_verbs(net: nn.Module, executor: Executor) -> None:
    """A step of a loop that replicates anew each time, as upstream's verbs invite to."""
    x = torch.ones(2, 2)
    for out in parallel_apply(replicate(net, ["cpu", "cpu"], executor=executor), [x, x]):
        out.sum().backward()


def test_steps_with_the_verbs_open_one_account_for_each_replica() -> None:
    """Each step has another watch on the module; its number, its name in metrics, was another one
    too.
    """
    net = nn.Linear(2, 2)
    with Executor(options=Options(in_process=True), device_ids=["cpu", "cpu"]) as executor:
        for _ in range(30):
            step_with_verbs(net, executor)
        assert len(executor.stats().models) == 1 and len(executor.recorder.accounts) == 2
        assert len(executor.recorder.accounts.same) <= 1
        assert [account.forwards for account in executor.recorder.accounts.values()] == [30, 30]
        assert [replica.calls for replica in executor.stats(net).replicas] in ([30, 30], [0, 0])


@pytest.mark.long
def test_modules_that_are_gone_leave_one_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search over many modules in one program: the sums stay, and the recorder does not grow."""
    with Executor(options=Options(in_process=True), device_ids=["cpu", "cpu"]) as executor:
        for _ in range(60):
            step_with_verbs(nn.Linear(2, 2), executor)
        gc.collect()
        stats = executor.stats()
        assert [replica.calls for replica in stats.replicas] == [60, 60]
        assert len(executor.recorder.accounts) < 2 * 30
        ended = executor.recorder.report(stats, (), False)
        assert sum(account.forwards for _, _, account in ended.accounts) <= 60
        assert len(executor.recorder.accounts) == 2 and executor.recorder.accounts.names == {}
        assert sum(account.forwards for account in executor.recorder.accounts.values()) == 120
        assert sum(replica.phases.forward for replica in executor.stats().replicas) > 0
        assert executor.recorder.report(stats, (), False).accounts == []


def test_a_recorder_holds_nothing_of_the_users() -> None:
    """Inputs, outputs and graphs go at once."""
    with Executor(options=Options(in_process=True), device_ids=["cpu", "cpu"]) as executor:
        model = DataParallel(nn.Linear(2, 2), executor=executor)
        gone = []
        for _ in range(3):
            x = torch.ones(4, 2, requires_grad=True)
            out = model(x)
            out.sum().backward()
            gone += [weakref.ref(x), weakref.ref(out)]
            del x, out
        gc.collect()
        assert [ref() for ref in gone] == [None] * 6
        assert executor.stats().replicas[0].rows == 6
