"""`Options(compile=...)`: replicas compile the module once, and keep that (pytorch#94636)."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import sys
import warnings
from typing import Any

import pytest
import torch
from harness import assert_same_grads, assert_same_state
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, Options, convert_sync_batchnorm

BACKEND = {"backend": "aot_eager"}
TWO = ["cpu", "cpu"]


def net() -> nn.Module:
    """A net that writes to buffers."""
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)
    ).double()


def graphs(module: nn.Module, x: Tensor) -> Tensor:
    """How many graphs this process has compiled, and how often again."""
    found = sys.modules.get("torch._dynamo.utils")
    counted = 0 if found is None else found.counters["stats"]["unique_graphs"]
    return torch.full((1,), counted) + 0 * len(x)


def inside(**settings: Any) -> Options:
    """Replicas in this process."""
    return Options(in_process=True, threads=1, compile=settings or BACKEND)


def train(model: Any, steps: int) -> list[Tensor]:
    """The losses of some steps."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4, dtype=torch.double)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.long
def test_X6_compiled_once_in_twenty_steps(two: Executor) -> None:
    """In each replica one graph, with changing weights and buffers; results are those of the module
    as it is.
    """
    module = net()
    plain = DataParallel(copy.deepcopy(module), executor=two)
    model = DataParallel(module, executor=two, options=Options(compile=BACKEND))
    x = torch.zeros(2, 1)
    assert model.run(graphs, x).tolist() == [0, 0]
    ours, theirs = train(model, 20), train(plain, 20)
    torch.testing.assert_close(ours, theirs)
    assert_same_state(model, plain)
    assert_same_grads(model, plain)
    assert model.run(graphs, x).tolist() == [1, 1]
    with torch.no_grad():
        model.eval(), plain.eval()
        batch = torch.randn(8, 4, dtype=torch.double)
        torch.testing.assert_close(model(batch), plain(batch))


def test_X6_a_death_changes_nothing(killable: Executor) -> None:
    """The replica that takes over compiles its own, and makes the graph again."""
    module = net()
    model = DataParallel(module, executor=killable, options=Options(compile=BACKEND))
    found = []
    before = copy.deepcopy(module.state_dict())
    for dies in (False, True):
        module.load_state_dict(before)
        model.zero_grad()
        torch.manual_seed(5)
        out = model(torch.randn(8, 4, dtype=torch.double))
        if dies:
            os.kill(killable.replicas()[1].pid, signal.SIGKILL)
        out.square().sum().backward()
        found.append([out.detach(), *[p.grad.clone() for p in module.parameters()]])  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_X6_one_device_and_captures() -> None:
    """Captures run the module as it is, as compiled code would not see its hooks."""
    module = net().eval()
    model = DataParallel(module, ["cpu"], options=inside())
    x = torch.randn(8, 4, dtype=torch.double)
    torch.testing.assert_close(model(x), module(x))
    with model.capture("0") as captured:
        model(x)
    torch.testing.assert_close(captured["0"], module[0](x))  # type: ignore[index]
    module.append(nn.Tanh().double())  # type: ignore[operator]
    torch.testing.assert_close(model(x), module(x))


def test_X6_second_order_is_torchs() -> None:
    """A backend without AOT autograd has it; others raise torch's error."""
    x = torch.randn(6, 4, dtype=torch.double, requires_grad=True)
    module = net().eval()
    model = DataParallel(module, TWO, options=inside(backend="eager"))
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(slope, expected)
    slope.square().sum().backward()
    model = DataParallel(module, TWO, options=inside())
    with pytest.raises(RuntimeError, match=r"create_graph=False|double backward"):
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()


@pytest.mark.parametrize("bad", ["yes", 1, None])
def test_X6_bad_types(bad: Any) -> None:
    """True, False, or settings."""
    with pytest.raises(TypeError, match=r"compile=.*expected True, False, or a dict"):
        Options(compile=bad)


def test_X6_bad_settings(two: Executor) -> None:
    """Names that torch.compile has not, backends that are no names, and what cannot be compiled."""
    with pytest.raises(ValueError, match=r"'speed'.*torch.compile has the settings fullgraph"):
        Options(compile={"speed": 1})
    with pytest.raises(TypeError, match="expected the name of a backend"):
        Options(compile={"backend": print})
    with pytest.raises(ValueError, match="not row by row"):
        Options(compile=True, rng="per_sample")
    assert hash(Options(compile=BACKEND)) != hash(Options(compile=True))
    model = DataParallel(
        convert_sync_batchnorm(net()), executor=two, options=Options(compile=BACKEND)
    )
    with pytest.raises(ValueError, match="synchronised batch norm cannot be compiled"):
        model(torch.randn(8, 4, dtype=torch.double))


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_X6_the_default_backend(two: Executor) -> None:
    """Inductor's products may round otherwise."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    plain = DataParallel(copy.deepcopy(module), executor=two)
    model = DataParallel(module, executor=two, options=Options(compile=True))
    torch.testing.assert_close(train(model, 4), train(plain, 4))
    assert_same_grads(model, plain)


def test_X6_a_module_that_is_compiled_already(two: Executor) -> None:
    """It is sent as it is, and compiled once in each replica, also with changing weights; what the
    compiler keeps in its attributes is nothing to warn of.
    """
    warnings.simplefilter("error")
    module = net()
    plain = DataParallel(copy.deepcopy(module), executor=two)
    model = DataParallel(torch.compile(module, **BACKEND), executor=two)
    x = torch.zeros(2, 1)
    torch.testing.assert_close(train(model, 1), train(plain, 1))
    once = model.run(graphs, x).tolist()
    torch.testing.assert_close(train(model, 5), train(plain, 5))
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
        torch.testing.assert_close(ours, theirs)
    assert model.run(graphs, x).tolist() == once and min(once) > 0


def test_X6_a_hook_that_comes_later(two: Executor) -> None:
    """It runs, also where an equal module was compiled before."""
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    model = DataParallel(module, executor=two, options=Options(compile=BACKEND))
    x = torch.randn(4, 4)
    torch.testing.assert_close(model(x), module(x))
    module[0].register_forward_hook(double)
    torch.testing.assert_close(model(x), module(x))
    other = copy.deepcopy(module)
    torch.testing.assert_close(
        DataParallel(other, executor=two, options=Options(compile=BACKEND))(x), module(x)
    )


def test_X6_settings_that_are_dicts() -> None:
    """As torch has them."""
    options = [Options(compile={"options": {"max_autotune": False}}) for _ in range(2)]
    assert options[0] == options[1] and hash(options[0]) == hash(options[1])


def double(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """A hook."""
    return 2 * output
