"""What happens around the start of a new replica, with replicas in this process: what waits, what
leaves, what counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from harness import raised
from torch import nn

from raydp_parallel import (
    ClusterError,
    DataParallel,
    Executor,
    ExecutorClosed,
    Options,
    ReplicaDied,
)
from raydp_parallel.cluster import replica_set
from raydp_parallel.cluster.backend import Death, DevicePlace, TaskLabel
from raydp_parallel.cluster.in_process import Answered, InProcessBackend
from raydp_parallel.devices.ranges import Attachment, ReplicaHello
from raydp_parallel.errors import PlacementError

PLACES = ["cpu", "cpu"]
X = torch.ones(4, 4)


class MortalBackend(InProcessBackend):
    """Replicas that can die, and starts that can be held."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.dead: list[Any] = []
        self.stopped: list[Any] = []
        self.holds = self.left = False
        self.held = threading.Event()

    def alive(self) -> bool:
        return not self.left

    def start(
        self, places: Sequence[DevicePlace], cancelled: Callable[[], bool] | None = None
    ) -> dict[DevicePlace, tuple[Any, ReplicaHello]]:
        while self.holds:
            self.held.set()
            time.sleep(0.005)
            if cancelled is not None and cancelled():
                raise PlacementError("this start is not needed any more")
        return super().start(places)

    def submit(
        self,
        client: Any,
        method: str,
        header: bytes,
        beside: Sequence[Attachment],
        task: TaskLabel | None = None,
    ) -> Answered:
        return (
            Answered(Death("killed"))
            if client in self.dead
            else super().submit(client, method, header, beside, task)
        )

    def stop(self, clients: Sequence[Any]) -> None:
        self.stopped += clients


def make(**options: Any) -> tuple[Executor, MortalBackend, Any]:
    """An executor, its backend and a model."""
    executor = Executor(PLACES, options=Options(in_process=True, **options))
    backend: Any = executor.replica_set.backend
    return executor, backend, DataParallel(nn.Linear(4, 2), executor=executor)


def clients(executor: Executor) -> list[Any]:
    """What calls to its replicas go through."""
    return [slot.client for slot in executor.replica_set.slots.values()]


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Crews of this file."""
    monkeypatch.setattr(replica_set, "InProcessBackend", MortalBackend)
    yield


def test_close_does_not_wait_for_a_call_that_waits_for_a_replica() -> None:
    """All are dead, the next is on its way, and a thread holds the lock meanwhile: it hears of the
    end at once.
    """
    executor, backend, model = make()
    model(X)
    backend.dead, backend.holds = clients(executor), True
    errors: list[BaseException] = []
    thread = threading.Thread(target=lambda: errors.append(raised(lambda: model(X))), daemon=True)
    thread.start()
    assert backend.held.wait(10)
    begun = time.monotonic()
    executor.close()
    assert time.monotonic() - begun < 5
    thread.join(10)
    assert [type(error) for error in errors] == [ExecutorClosed]
    respawner: Any = executor.replica_set._respawner
    assert not respawner._working


def test_ctrl_c_while_it_closes_leaves_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second `close` does nothing, so the first has to do it all."""
    for what in ("_stop_reports", "_respawner.stop"):
        executor, backend, model = make()
        model(X)

        def interrupted() -> None:
            raise KeyboardInterrupt

        owner: Any = executor if what == "_stop_reports" else executor.replica_set._respawner
        with monkeypatch.context() as patch:
            patch.setattr(owner, what.rpartition(".")[2], interrupted)
            with pytest.raises(KeyboardInterrupt):
                executor.close()
        assert backend.stopped == clients(executor)
        assert [info.state for info in executor.replicas()] == ["closed", "closed"]


def test_a_start_is_left_with_its_cluster() -> None:
    """It asks nothing more: asked after its end, Ray would start another cluster, which is
    not wanted.
    """
    executor, backend, model = make()
    model(X)
    backend.dead, backend.holds = clients(executor)[1:], True
    model(X)
    assert backend.held.wait(10)
    respawner: Any = executor.replica_set._respawner
    (thread,) = respawner._working.values()
    backend.left = True
    thread.join(10)
    assert not thread.is_alive()
    assert [type(error) for error in respawner._problems.values()] == [ClusterError]
    assert model(X).shape == (4, 2)  # with a backend of the next cluster
    executor.close()


def test_a_replica_that_is_replaced_by_the_next_call_counts_too() -> None:
    """As those that are replaced in the background."""
    executor, backend, model = make(on_fault="raise")
    model(X)
    backend.dead = clients(executor)[1:]
    with pytest.raises(ReplicaDied):
        model(X)
    model(X)
    stats = executor.stats()
    assert (stats.deaths, stats.respawns, [r.respawns for r in stats.replicas]) == (1, 1, [0, 1])
    executor.close()


def test_a_name_that_is_in_use_again_is_not_forgotten() -> None:
    """A driver that gives up a call tells again what it had told; of a model that was sent anew
    since, nothing.
    """
    executor, _, model = make()
    model(X)
    slot = executor.slots(PLACES)[0]
    (name,) = slot.contents.held
    slot.contents.drop_model(name)
    told = slot.contents.forget()
    model(X)
    assert told is not None and slot.contents.held[name]
    slot.contents.forget_again(told)
    again = slot.contents.forget()
    assert again is not None and again.models == ()
    assert model(X).shape == (4, 2)
    executor.close()
