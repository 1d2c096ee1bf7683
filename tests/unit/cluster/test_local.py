"""Replicas in the driver's own process: the same clients without walls, and nothing of the driver's
is disturbed.
"""

from __future__ import annotations

import os
import random
import threading
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from harness import assert_same_grads, assert_same_state, raised
from threaded import together
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, Options
from raydp_parallel.calls.executor import _shared
from raydp_parallel.devices import process

HERE = Options(in_process=True)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """Every test has its own replicas; those of other tests, which are processes, stay."""
    yield
    for executor in [*_shared.by_options.values()]:
        if executor.options.in_process:
            executor.close()


def wrapped(module: nn.Module, replicas: int = 2, **options: Any) -> DataParallel[Any]:
    """A wrapper over replicas in this process."""
    return DataParallel(module, ["cpu"] * replicas, options=Options(in_process=True, **options))


class Draws(nn.Module):
    """Uses every generator, and changes settings."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Random numbers of each kind."""
        noise = torch.rand(len(x), 1) + random.random() + float(np.random.rand())
        return x * self.weight + noise


def draw() -> tuple[float, float, float]:
    """One number of each generator."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def seed() -> None:
    """Put the driver's generators where they always are."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def test_A10_the_drivers_generators_are_left_alone() -> None:
    """But for the one number that each forward draws from torch's for its seed."""
    seed()
    torch.empty((), dtype=torch.int64).random_()
    expected = draw()
    model = wrapped(Draws())
    seed()
    out = model(torch.ones(4, 1))
    assert draw() == expected
    out.sum().backward()
    after = draw()
    seed()
    torch.empty((), dtype=torch.int64).random_()
    draw()
    assert draw() == after


def test_A10_torchs_seed_makes_a_run_repeatable() -> None:
    """And chunks draw different numbers."""
    model = wrapped(Draws())
    torch.manual_seed(3)
    first = model(torch.ones(4, 1)).detach()
    torch.manual_seed(3)
    assert torch.equal(model(torch.ones(4, 1)), first)
    assert not torch.equal(first[:2], first[2:])


class Meddles(nn.Module):
    """Leaves modes behind, as code with a bug does."""

    def forward(self, x: Tensor) -> Tensor:
        """Grad mode and RNG."""
        torch.manual_seed(99)
        torch.set_grad_enabled(False)
        return x * 2


def test_modes_that_a_module_leaves_behind_stay_in_its_replica() -> None:
    """The driver goes on as it was, and so does the next call."""
    model = wrapped(Meddles())
    x = torch.ones(4, requires_grad=True)
    model(x)
    assert torch.is_grad_enabled()
    assert (x * 2).requires_grad


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode, torch.enable_grad))
def test_A8_the_callers_modes_hold_inside(mode: Any) -> None:
    """As in any other replica."""
    model = wrapped(nn.Linear(2, 2))
    with mode():
        out = model(torch.ones(4, 2))
        assert out.requires_grad == torch.is_grad_enabled()
    assert out.requires_grad == (mode is torch.enable_grad)


class Warns(nn.Module):
    """Warns once per call."""

    def forward(self, x: Tensor) -> Tensor:
        """At this line."""
        warnings.warn("from inside", RuntimeWarning, stacklevel=1)
        return x


def test_A9_warnings_come_out_once_per_chunk() -> None:
    """With category, text and place."""
    model = wrapped(Warns())
    with pytest.warns(RuntimeWarning, match="from inside") as seen:
        model(torch.ones(4))
    assert len(seen) == 2
    assert {w.filename for w in seen} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.ones(4))


class Nested(nn.Module):
    """Has a wrapper inside, as a model with a wrapped block that is wrapped itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = wrapped(nn.Linear(3, 3), 2)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Says whether a replica runs, and on how many rows the block ran."""
        inside = torch.full((len(x),), float(process.running_replica()))
        return self.head(self.block(x)), inside


def test_a_wrapper_inside_a_replica_runs_in_place() -> None:
    """Nothing waits for itself, and gradients reach the inner master."""
    torch.manual_seed(0)
    net = Nested()
    model = wrapped(net, 3)
    x = torch.randn(6, 3)
    out, inside = model(x)
    assert inside.tolist() == [1.0] * 6
    expected = net.head(net.block.module(x))
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    ours = {name: p.grad for name, p in net.named_parameters()}
    for name, grad in zip(
        ours, torch.autograd.grad(expected.sum(), [*net.parameters()]), strict=True
    ):
        torch.testing.assert_close(ours[name], grad)
    assert model.executor.stats().forwards == 1
    assert not process.running_replica()


def test_a_wrapper_in_a_plain_module_runs_on_replicas() -> None:
    """The same model, called by hand."""
    net = Nested()
    _, inside = net(torch.randn(6, 3))
    assert inside.tolist() == [0.0] * 6
    assert net.block.executor.stats().forwards == 1


@pytest.mark.parametrize("link", ("auto", "inline", "object_store"))
def test_training_is_that_of_the_plain_module(link: str) -> None:
    """Over every link that needs no Ray."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 2))
    ours = nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 2))
    ours.load_state_dict(plain.state_dict())
    model = wrapped(ours, 3, link=link)
    batches = torch.randn(4, 7, 5)
    for net, run in ((plain, plain), (ours, model)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for batch in batches:
            optimizer.zero_grad()
            run(batch).square().mean().backward()
            optimizer.step()
    assert_same_grads(ours, plain, rtol=1e-5, atol=1e-6)
    assert_same_state(ours, plain, rtol=1e-5, atol=1e-6)
    assert model.executor.stats().link == link


def test_replicas_say_that_they_are_here() -> None:
    """This process, as many as were asked for; closing ends them."""
    with Executor(["cpu"] * 3, options=HERE) as executor:
        replicas = executor.replicas()
        assert [(r.index, r.pid, r.state) for r in replicas] == [
            (i, os.getpid(), "ready") for i in range(3)
        ]
        model = DataParallel(nn.Linear(2, 2), executor=executor)
        model(torch.ones(3, 2))
    assert {r.state for r in executor.replicas()} == {"closed"}


class Meeting(NamedTuple):
    """Two threads' forwards, the first of which is there until the second has ended.

    Attributes:
        begun: The first one has.
        over: The second one is.
    """

    begun: threading.Event
    over: threading.Event


MEETINGS: dict[str, Meeting] = {}


class Stays(nn.Module):
    """Runs until another thread's forward is over."""

    def __init__(self, meeting: str) -> None:
        super().__init__()
        self.meeting = meeting

    def forward(self, x: Tensor) -> Tensor:
        """The input."""
        MEETINGS[self.meeting].begun.set()
        assert MEETINGS[self.meeting].over.wait(60)
        return x


class Identity(nn.Module):
    """Says in which object it runs."""

    def forward(self, x: Tensor) -> Tensor:
        """The object, for each row."""
        return torch.full((len(x),), id(self))


def test_a_forward_runs_on_replicas_while_another_thread_s_replica_runs() -> None:
    """It ran on the master, in the belief that it was inside of the other thread's module."""
    meeting = MEETINGS["replicas"] = Meeting(threading.Event(), threading.Event())
    longer, shorter = wrapped(Stays("replicas"), 1), wrapped(Identity(), name="other")

    def second() -> None:
        assert meeting.begun.wait(60)
        try:
            where = shorter(torch.zeros(4))
            assert id(shorter.module) not in where.tolist()
            assert len(set(where.tolist())) == 2
        finally:
            meeting.over.set()

    together(lambda: longer(torch.zeros(1)), second)
    assert not process.running_replica()


class Raises(nn.Module):
    """Raises."""

    def forward(self, x: Tensor) -> Tensor:
        """A KeyError."""
        raise KeyError("here")


def test_errors_have_the_same_text_and_leave_no_trace() -> None:
    """And the next call works."""
    error = raised(lambda: wrapped(Raises())(torch.ones(2)))
    assert type(error) is KeyError
    assert str(error).startswith("Caught KeyError in replica 0 on device cpu")
    assert wrapped(Warns(), 1).eval() is not None
    assert not process.running_replica()
