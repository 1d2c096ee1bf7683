"""What a replica does between two calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_replica import Driver, Square, X
from torch import Tensor, nn

from raydp_parallel.replica import replica
from raydp_parallel.state.python_state import PythonState
from raydp_parallel.transport.messages import Forget

CPU = torch.device("cpu")


def test_a_graph_of_which_all_was_differentiated_is_freed() -> None:
    """The driver's torch has freed its nodes too; the word to forget it finds nothing more."""
    driver = Driver(Square())
    driver.forward(X)
    driver.backward(torch.ones(2), torch.ones(()))
    assert driver.replica.holdings() == (1, 1)
    driver.replica.use_pause()
    assert driver.replica.holdings() == (1, 0)
    _, reply = driver.forward(X)
    assert reply.failure is None


@pytest.mark.parametrize("keep", [False, True])
def test_a_graph_that_may_be_asked_for_again_stays(keep: bool) -> None:
    """Of two outputs one was differentiated, or the graph is to be kept."""
    driver = Driver(Square())
    driver.forward(X)
    given = (torch.ones(2), torch.ones(()))[: 2 if keep else 1]
    driver.backward(*given, keep=keep)
    driver.replica.use_pause()
    assert driver.replica.holdings() == (1, 1)
    outputs = ((driver.key, (1,)),)
    _, reply = driver.backward(torch.ones(()), outputs=outputs)
    assert reply.failure is None


class Counts(nn.Module):
    """Multiplies by an attribute, which each forward raises."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 1
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        """The result shows what earlier forwards have left."""
        self.times += 1
        self.seen.append(self.times)
        return x * self.times + len(self.seen)


class Plain(nn.Module):
    """Changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        return x


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The answers of all comparisons of attributes."""
    found: list[bool] = []
    compare = PythonState.attributes_changed

    def compared(state: PythonState) -> bool:
        found.append(compare(state))
        return found[-1]

    monkeypatch.setattr(PythonState, "attributes_changed", compared)
    return found


@pytest.mark.parametrize("pauses", [0, 1, 2])
def test_what_a_forward_changed_is_restored_after_a_pause(pauses: int) -> None:
    """With a look in between, with several, and without."""
    driver = Driver(Counts())
    for _ in range(3):
        found, _ = driver.forward(X, graph=False)
        assert torch.equal(found, X * 2 + 1)
        for _ in range(pauses):
            driver.replica.use_pause()


def test_a_forward_after_a_pause_does_not_look_again(looks: list[bool]) -> None:
    """Nothing ran since."""
    driver = Driver(Plain())
    driver.forward(X, graph=False)
    driver.replica.use_pause()
    looks.clear()
    driver.tracker.sync = lambda: None  # type: ignore[method-assign]  # the driver looks too
    driver.forward(X, graph=False)
    assert looks == []


def test_a_forward_looks_again_where_other_code_has_run(looks: list[bool]) -> None:
    """Two models may share what both can change."""
    far = replica.Replica(CPU)
    one, other = Driver(Plain(), far), Driver(Plain(), far)
    other.forward(X, graph=False)
    one.forward(X, graph=False)
    far.use_pause()
    other.forward(X, graph=False)
    looks.clear()
    one.tracker.sync = lambda: None  # type: ignore[method-assign]
    one.forward(X, graph=False)
    assert looks == [False]


def test_an_edit_by_the_driver_is_adopted_after_a_pause() -> None:
    """The look found nothing to restore; the driver's new value counts."""
    module: Any = Counts()
    driver = Driver(module)
    driver.forward(X, graph=False)
    driver.replica.use_pause()
    module.times = 5
    found, _ = driver.forward(X, graph=False)
    assert torch.equal(found, X * 6 + 1)


def test_a_model_that_was_dropped_is_not_looked_at(looks: list[bool]) -> None:
    """Nor kept alive."""
    driver = Driver(Plain())
    driver.forward(X, graph=False)
    driver.replica.forget(Forget((), (driver.tracker.id,)))
    looks.clear()
    driver.replica.use_pause()
    assert looks == []
