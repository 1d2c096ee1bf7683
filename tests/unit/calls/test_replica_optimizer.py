"""Training in the replicas where programs do more than `step`: options that a step changes, edits
in the driver, other wrappers, and the end of things. Replicas run in this process.
"""

from __future__ import annotations

import collections
import copy
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import optimizer_of, raised
from torch import nn

from raydp_parallel import (
    DataParallel,
    Executor,
    ExecutorClosed,
    Options,
    ReplicaDied,
    StateChanged,
    StateLost,
)

HERE = Options(in_process=True, threads=1)


@pytest.fixture
def two() -> Iterator[Executor]:
    """Two replicas."""
    with Executor(["cpu"] * 2, options=HERE) as executor:
        yield executor


def small(
    executor: Executor, inside: bool = True, kind: Any = torch.optim.Adam, **keywords: Any
) -> tuple[DataParallel[Any], Any]:
    """A small model and its optimizer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model = DataParallel(net, executor=executor)
    keywords = {"lr": 0.01, **keywords}
    if inside:
        return model, model.optimizer(kind, **keywords)
    return model, kind(net.parameters(), **keywords)


def advance(model: DataParallel[Any], optimizer: Any, step: int) -> None:
    """One step of training."""
    torch.manual_seed(step)
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()


def same(found: Any, expected: Any) -> bool:
    """Whether two models have the same weights."""
    pairs = zip(found._master.parameters(), expected._master.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def test_T3_edits_before_a_step_that_takes_what_was_fetched(two: Executor) -> None:
    """Those that move no version are found, too, and not overwritten by what was fetched."""
    model, optimizer = small(two)
    optimizer.close()
    optimizer = model.optimizer(torch.optim.Adam, lr=0.01, sync_every=1)
    for step in range(2):
        advance(model, optimizer, step)
    model(torch.ones(4, 6)).sum().backward()
    for p in [*model._master.parameters()]:
        p.data.clamp_(-0.01, 0.01)
    error = raised(optimizer.step)
    assert isinstance(error, StateChanged) and "model.sync()" in str(error)


@pytest.mark.long
@pytest.mark.parametrize("clipped", [False, True])
def test_T2_the_norm_of_gradients_is_no_change_of_weights(cluster: None, clipped: bool) -> None:
    """A backward after it, or after they were clipped, may be made again, by another replica."""
    found = []
    for inside in (True, False):
        with Executor(["cpu"] * 2) as executor:
            model, optimizer = small(executor, inside)
            one, other = model(torch.ones(4, 6)).sum(), model(torch.full((4, 6), 2.0)).sum()
            one.backward()
            if clipped and inside:
                optimizer.clip_grad_norm_(0.1)
            elif clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif inside:
                optimizer.grad_norm()
            os.kill(executor.replicas()[0].pid, signal.SIGKILL)
            other.backward()
            optimizer.step()
            found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


# --- options that a step changes ---


class Counting(torch.optim.SGD):
    """Its groups have a counter, and a learning rate that follows from it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["k"], group["seen"] = 0, [0]

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            group["seen"] = [*group["seen"], group["k"]]
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"] / group["k"])


def test_T3_counters_in_the_groups(two: Executor) -> None:
    """They count on in the replicas, arrive with a sync, and leave the driver's edits alone."""
    found = []
    for inside in (True, False):
        model, optimizer = small(two, inside, Counting, lr=0.1)
        for step in range(3):
            advance(model, optimizer, step)
        optimizer.param_groups[0]["lr"] = 0.05
        states = [optimizer.state_dict()["param_groups"]]
        advance(model, optimizer, 3)
        states += [optimizer.state_dict()["param_groups"]]
        assert optimizer.param_groups[0]["k"] == 4
        optimizer.param_groups[0]["k"] = 1
        advance(model, optimizer, 4)
        optimizer.load_state_dict(optimizer.state_dict())
        advance(model, optimizer, 5)
        states += [optimizer.state_dict()["param_groups"]]
        found.append((model.state_dict(), states))
    assert found[0][1] == found[1][1]
    for name, value in found[0][0].items():
        assert torch.equal(value, found[1][0][name])


# --- edits while the master is behind ---


def halve(net: Any, how: str) -> None:
    """Edit a weight, so that its version shows it or not."""
    weight = net[0].weight
    with torch.no_grad():
        (weight.data if how == "hidden" else weight).mul_(0.5)


@pytest.mark.parametrize("how", ["plain", "hidden"])
@pytest.mark.parametrize(
    "reader",
    [
        lambda model, _: model.state_dict(),
        lambda model, _: model.module,
        lambda model, _: [*model.parameters()],
        lambda model, _: model.load_state_dict({}),
        lambda _, optimizer: optimizer.state,
        lambda _, optimizer: optimizer.state_dict(),
        lambda _, optimizer: optimizer.load_state_dict({}),
        lambda _, optimizer: optimizer.close(),
    ],
)
def test_T3_what_syncs_by_itself_overwrites_no_edit(
    reader: Callable[[Any, Any], Any], how: str, two: Executor
) -> None:
    """It is refused; a sync by name overwrites it."""
    model, optimizer = small(two)
    expected, ordinary = small(two, inside=False)
    net = model.module
    advance(model, optimizer, 0)
    advance(expected, ordinary, 0)
    halve(net, how)
    error = raised(lambda: reader(model, optimizer))
    assert isinstance(error, StateChanged) and "model.sync()" in str(error), error
    model.sync()
    assert same(model, expected)
    halve(net, how)
    advance(model, optimizer, 1)
    halve(expected.module, how)
    advance(expected, ordinary, 1)
    model.state_dict()
    assert same(model, expected)


# --- other wrappers ---


@pytest.mark.parametrize(
    "reader",
    [
        lambda model: [*model.module.parameters()],
        lambda model: [*model.parameters()],
        lambda model: [*model.state_dict().values()],
        lambda model: [p for m in [*model.modules()][2:] for p in m._parameters.values()],
        lambda model: [p for m in next(model.children()) for p in m._parameters.values()],
        lambda model: [p for m in dict(model.named_children())["module"] for p in m.parameters()],
        lambda model: [*copy.deepcopy(model).parameters()],
    ],
)
@pytest.mark.parametrize("which", ["its own", "another executor", "in place"])
def test_T3_every_wrapper_of_the_parameters_gives_all_steps(
    reader: Callable[[Any], list[torch.Tensor]], which: str, two: Executor
) -> None:
    """Whatever trains them; modes need no weights."""
    expected, ordinary = small(two, inside=False)
    model, optimizer = small(two)
    net = model.module
    for step in range(2):
        advance(expected, ordinary, step)
        advance(model, optimizer, step)
    with Executor(["cpu"], options=HERE) as other:
        wrapper = model
        if which == "another executor":
            wrapper = DataParallel(net, executor=other)
        elif which == "in place":
            wrapper = DataParallel(net, ["cpu"], executor=other)
            wrapper.device_ids = []
        assert wrapper.eval() is wrapper and not net[0].training
        assert model.stats().steps_behind == 2
        pairs = zip(reader(wrapper), expected.parameters(), strict=True)
        assert all(torch.equal(one.detach(), other.detach()) for one, other in pairs)
        assert model.stats().steps_behind == 0


# --- what a step does besides ---


class Noisy(torch.optim.SGD):
    """Adds random numbers of all generators, and keeps them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                drawn = random.random() + np.random.rand()
                self.state[p]["noise"] = torch.randn_like(p) + drawn
                p.data.add_(self.state[p]["noise"], alpha=group["lr"])


def test_T3_steps_that_draw_random_numbers(two: Executor) -> None:
    """All replicas draw the same, other ones in each step, and the driver's stay its own."""
    advance(*small(two, inside=False), 0)
    drawn = torch.rand(1)
    states = random.getstate(), np.random.get_state()[2]
    model, optimizer = small(two, kind=Noisy)
    advance(model, optimizer, 0)
    assert torch.equal(drawn, torch.rand(1))
    assert states == (random.getstate(), np.random.get_state()[2])
    advance(model, optimizer, 1)
    x = torch.ones(1, 6)
    out = model(torch.cat([x, x]))
    assert torch.equal(out[0], out[1])
    last = optimizer.state[model.module[0].weight]["noise"]
    advance(model, optimizer, 1)
    assert not torch.equal(optimizer.state[model.module[0].weight]["noise"], last)


def test_T4_groups_that_lose_parameters(two: Executor) -> None:
    """A step refuses them."""
    model, optimizer = small(two)
    advance(model, optimizer, 0)
    optimizer.param_groups[0]["params"].pop()
    error = raised(lambda: advance(model, optimizer, 1))
    assert isinstance(error, ValueError) and "add_param_group()" in str(error)


class Halting(torch.optim.SGD):
    """Fails halfway, once its group says so; in one replica alone, if that is asked for."""

    alone: list[Any] = []  # noqa: RUF012  # of the class

    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        first.data.add_(first.grad, alpha=-1.0)
        if self.param_groups[0]["lr"] < 0:
            raise RuntimeError("lr is negative")
        if self.param_groups[0]["lr"] > 1 and not self.alone:
            self.alone.append(self)
            raise MemoryError("here alone")
        return super().step(closure)


@pytest.mark.parametrize("reader", ["forward", "sync", "state_dict"])
def test_T4_a_step_that_fails(reader: str, two: Executor) -> None:
    """Its exception arrives once, with the next call to the replicas, and says which step it is. No
    earlier step is lost; what it had changed stays changed, as in this process.
    """
    found = []
    for inside in (True, False):
        model, optimizer = small(two, inside, Halting)
        net = model._master
        advance(model, optimizer, 0)
        advance(model, optimizer, 1)
        optimizer.param_groups[0]["lr"] = -0.1
        if inside:
            advance(model, optimizer, 2)
            read = {"forward": lambda m: m(torch.ones(4, 6)), "sync": lambda m: m.sync()}
            call = read.get(reader, lambda m: m.state_dict())
            error = raised(lambda call=call, model=model: call(model))
        else:
            error = raised(lambda m=model, o=optimizer: advance(m, o, 2))
        assert isinstance(error, RuntimeError) and "lr is negative" in str(error), error
        if inside:
            assert "step 3 of model.optimizer()" in f"{error}{error.__cause__}"
        optimizer.param_groups[0]["lr"] = 0.1
        advance(model, optimizer, 3)
        model.state_dict()
        found.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("before", [0, 1])
def test_T4_a_step_of_large_weights_that_fails(before: int, two: Executor) -> None:
    """As of small ones, which are not stepped in slices."""
    found = []
    for inside in (True, False):
        torch.manual_seed(0)
        net = nn.Linear(1024, 1024)
        model = DataParallel(net, executor=two)
        kind, keywords = torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1}
        optimizer: Any = (
            model.optimizer(kind, **keywords) if inside else kind(net.parameters(), **keywords)
        )
        for step in range(before + 2):
            torch.manual_seed(step)
            optimizer.param_groups[0]["weight_decay"] = "x" if step == before else 0.0
            optimizer.zero_grad()
            model(torch.randn(4, 1024)).square().mean().backward()
            if step != before:
                optimizer.step()
            elif inside:
                optimizer.step()
                assert isinstance(raised(model.sync), TypeError)
            else:
                assert isinstance(raised(optimizer.step), TypeError)
        found.append((model.state_dict(), optimizer.state_dict()["state"]))
    for name, value in found[0][0].items():
        assert torch.equal(value, found[1][0][name])
    for number, values in found[1][1].items():
        for name, value in values.items():
            assert torch.equal(value, found[0][1][number][name]), name


def test_T4_a_step_that_fails_in_one_replica(two: Executor) -> None:
    """All go on with what another one has made of it."""
    expected, ordinary = small(two, False, Halting)
    Halting.alone[:] = [None]
    model, optimizer = small(two, True, Halting)
    for step in range(2):
        advance(expected, ordinary, step)
        advance(model, optimizer, step)
    for one in (ordinary, optimizer):
        one.param_groups[0]["lr"] = 1.5
    advance(expected, ordinary, 2)
    Halting.alone.clear()
    advance(model, optimizer, 2)
    error = raised(lambda: model(torch.ones(4, 6)))
    assert isinstance(error, MemoryError) and Halting.alone
    for step in range(3, 5):
        advance(expected, ordinary, step)
        advance(model, optimizer, step)
    x = torch.ones(1, 6)
    out = model(torch.cat([x, x]))
    assert torch.equal(out[0], out[1])
    model.sync()
    assert same(model, expected)


# --- code that gets at the weights' memory ---


class Looking(nn.Module):
    """Looks at its weights past torch; writes to them, if asked to."""

    def __init__(self, in_backward: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.in_backward = in_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = float(self.linear.weight.data.abs().max())
        scale += float(self.linear.bias.detach().numpy().sum())
        out = self.linear(x) * (1 + scale)
        if self.in_backward and out.requires_grad:
            out.register_hook(lambda _: self.linear.weight.data.sum() and None)
        if float(x.detach()[0, 0]) == 7.0:
            self.linear.weight.data[0, 0] = 3.0
        return out


@pytest.mark.parametrize("in_backward", [False, True])
def test_T3_a_module_that_reads_its_weights_data(in_backward: bool, two: Executor) -> None:
    """That is right; writing is refused, and leaves no trace."""
    found = []
    for inside in (True, False):
        torch.manual_seed(0)
        model = DataParallel(Looking(in_backward), executor=two)
        optimizer = optimizer_of(model, inside, torch.optim.Adam, lr=0.01)
        for step in range(3):
            advance(model, optimizer, step)
        if inside:
            error = raised(lambda model=model: model(torch.full((4, 6), 7.0)))
            assert isinstance(error, StateChanged) and "'linear.weight'" in str(error)
        advance(model, optimizer, 3)
        model.state_dict()
        found.append([p.detach().clone() for p in model._master.parameters()])
    assert all(map(torch.equal, *found))


# --- the end of things ---


def test_T3_what_the_program_let_go_of(two: Executor) -> None:
    """Its steps are not lost, and another optimizer may follow."""
    expected, ordinary = small(two, inside=False)
    advance(expected, ordinary, 0)
    with Executor(["cpu"] * 2, options=HERE) as other:
        model, optimizer = small(other)
        advance(model, optimizer, 0)
        net = model._master
        del model, optimizer
        gc.collect()
    assert all(map(torch.equal, net.parameters(), expected.parameters()))
    model, optimizer = small(two)
    advance(model, optimizer, 0)
    assert "let go" in str(raised(lambda: model.optimizer(torch.optim.SGD, lr=0.1)))
    del optimizer
    gc.collect()
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    assert same(model, expected)
    advance(model, optimizer, 1)


def test_T3_ctrl_c_while_the_executor_fetches_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replicas end all the same."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    executor = Executor(["cpu"] * 2, options=HERE)
    model, optimizer = small(executor)
    advance(model, optimizer, 0)
    monkeypatch.setattr(optimizer.training, "sync", interrupted)
    assert isinstance(raised(executor.close), KeyboardInterrupt)
    assert executor.closed


def test_T3_the_last_copy_on_a_node_that_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is fetched before its replica is left."""
    options = Options(in_process=True, threads=1, elastic=True)
    with Executor(["cpu"] * 2, options=options) as executor:
        torch.manual_seed(0)
        net = nn.Linear(6, 2)
        model = DataParallel(net, ["cpu"], executor=executor)
        optimizer = model.optimizer(torch.optim.Adam, lr=0.01)
        for step in range(2):
            advance(model, optimizer, step)
        first, second = executor.replica_set.slots.values()
        assert second.hello is not None and model.stats().steps_behind == 2
        second.hello, before = second.hello._replace(node="another"), first.client
        nodes = iter([{"driver"}])
        monkeypatch.setattr(executor.replica_set.backend, "leaving", lambda: next(nodes, ()))
        out = model(torch.ones(4, 6))
        assert not (first.ready and first.client is before)
        assert model.stats().steps_behind == 0
        advance(model, optimizer, 2)
        model.sync()
        found = [p.detach().clone() for p in net.parameters()]
        assert torch.equal(out, expected_after(net, 2)(torch.ones(4, 6)))
    assert all(map(torch.equal, found, expected_after(net, 3).parameters()))


def expected_after(net: nn.Module, steps: int) -> nn.Module:
    """What so many steps in this process make of a module like this."""
    torch.manual_seed(0)
    other = nn.Linear(6, 2)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.01)
    for step in range(steps):
        advance(other, optimizer, step)  # type: ignore[arg-type]  # as a wrapper
    return other


class Sleepy(nn.Module):
    """Says that it sleeps, and does so for long, if the batch asks for it."""

    def __init__(self, pipe: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.pipe = pipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach()[0, 0]) == 7.0:
            Path(self.pipe).write_text("asleep")
            time.sleep(600)
        return self.linear(x)


@pytest.mark.long
def test_T3_closing_while_replicas_are_busy(
    cluster: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It waits for them, but not for ever; what is lost is raised where it is asked for."""
    monkeypatch.setattr("raydp_parallel.calls.executor._PATIENCE", 0.5)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    executor = Executor(["cpu"])
    model = DataParallel(Sleepy(str(pipe)), executor=executor)
    optimizer = model.optimizer(torch.optim.Adam, lr=0.01)
    advance(model, optimizer, 0)
    before = [p.detach().clone() for p in model._master.parameters()]
    errors: list[BaseException] = []
    call = threading.Thread(
        target=lambda: errors.append(raised(lambda: model(torch.full((2, 6), 7.0))))
    )
    call.start()
    assert pipe.read_text() == "asleep"
    executor.close()
    call.join()
    assert isinstance(errors[0], (ReplicaDied, ExecutorClosed)), errors
    assert "close() waited" in caplog.text and "lost" in caplog.text
    error = raised(model.state_dict)
    assert isinstance(error, StateLost) and "after step 0" in str(error)
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert isinstance(raised(optimizer.step), ExecutorClosed)


def test_T3_closing_waits_for_each_model_and_longer_for_large_ones(
    two: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minute is for replicas that are busy, and not for weights that take their time."""
    waits: list[float] = []

    class Timer:
        daemon = False

        def __init__(self, seconds: float, function: Callable[[], None]) -> None:
            waits.append(seconds)

        def start(self) -> None:
            pass

        def cancel(self) -> None:
            pass

    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr("raydp_parallel.calls.executor._SLOWEST", 100.0)
    models = [small(two) for _ in range(2)]
    for model, optimizer in models:
        advance(model, optimizer, 0)
    two.close()
    weights = sum(p.nbytes for p in models[0][0]._master.parameters())
    assert waits == [60 + 3 * weights / 100] * 2  # Adam has two numbers for each


# --- edits of the state ---


@pytest.mark.parametrize("how", ["in place", "replaced", "assigned", "groups"])
def test_T3_edits_of_the_state(how: str, two: Executor) -> None:
    """They reach the replicas."""
    found = []
    for inside in (True, False):
        model, optimizer = small(two, inside)
        advance(model, optimizer, 0)
        advance(model, optimizer, 1)
        state = optimizer.state[model.module[0].weight]
        if how == "in place":
            state["exp_avg"].zero_()
        elif how == "replaced":
            state["exp_avg"] = torch.ones(8, 6)
        elif how == "assigned":
            optimizer.state = collections.defaultdict(dict)
        else:
            optimizer.param_groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]
        advance(model, optimizer, 2)
        advance(model, optimizer, 3)
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_T3_an_edit_of_old_state(two: Executor) -> None:
    """It is refused while the replicas are ahead."""
    model, optimizer = small(two)
    advance(model, optimizer, 0)
    old = optimizer.state[model.module[0].weight]["exp_avg"]
    advance(model, optimizer, 1)
    old.zero_()
    error = raised(lambda: advance(model, optimizer, 2))
    assert isinstance(error, StateChanged) and "optimizer's state" in str(error)
