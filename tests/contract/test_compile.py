"""torch.compile around a wrapper, a step that calls it, and a model that contains it."""

from __future__ import annotations

import copy
import functools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import Apply
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from raydp_parallel import DataParallel

inductor = pytest.param(
    "inductor",
    marks=[
        pytest.mark.long,
        pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    ],
)


TWO = ["cpu", "cpu"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """A compiler that has seen nothing."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Forward and backward."""
    loss: Tensor = (model(x * 2) + 1).square().sum()
    loss.backward()
    return loss.detach()


Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def wrapper(model: nn.Module, _: nn.Module, compiled: Compile, x: Tensor) -> Tensor:
    """The wrapper itself is compiled."""
    return step(compiled(model), x)


def function(model: nn.Module, _: nn.Module, compiled: Compile, x: Tensor) -> Tensor:
    """A step function is compiled, backward included."""
    return compiled(step)(model, x)  # type: ignore[no-any-return]


def container(_: nn.Module, around: nn.Module, compiled: Compile, x: Tensor) -> Tensor:
    """A model that contains the wrapper is compiled."""
    return step(compiled(around), x)


@pytest.mark.parametrize("how", (wrapper, function, container))
@pytest.mark.parametrize("backend", ("eager", "aot_eager", inductor))
def test_a_graph_break_with_the_same_results(how: Callable[..., Tensor], backend: str) -> None:
    """Losses and gradients are those of the wrapper as it is, in the second step too."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    last = nn.Linear(2, 2)
    found: list[list[Tensor]] = []
    for compiled in (False, True):
        block = copy.deepcopy(net)
        model = DataParallel(block, TWO)
        model(torch.ones(4, 3))
        parts = {"block": model, "last": copy.deepcopy(last)}
        around = Apply(lambda net, x: net.last(net.block(x.sin()).relu()), **parts)
        x, losses = torch.linspace(-1, 1, 18).view(6, 3), []
        for shift in range(2):
            run = functools.partial(torch.compile, backend=backend) if compiled else lambda f: f
            losses.append(how(model, around, run, x + shift))
        found.append([*losses, *[p.grad for p in around.parameters() if p.grad is not None]])
    torch.testing.assert_close(found[0], found[1])


SCRIPT = """
class Net(Linear):
    def forward(self, x):
        return shifted(super().forward(x)).relu()

def shifted(x):
    return x + 1

net = Net(3, 3)
"""
SPACE: dict[str, Any] = {"__name__": "script", "Linear": nn.Linear}
INSIDE: dict[str, Callable[[], nn.Module]] = {
    "imported": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
    "of a script": lambda: exec(SCRIPT, SPACE) or SPACE["net"],  # type: ignore[func-returns-value]
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "traced": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU())),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_compiled_module_is_compiled_once_in_each_replica(name: str) -> None:
    """Though each forward has a module of its own."""
    model = DataParallel(torch.compile(INSIDE[name](), backend="eager"), TWO)

    def graphs(_net: nn.Module, x: Tensor) -> Tensor:
        return x * torch._dynamo.utils.counters["stats"]["unique_graphs"]

    counts = []
    for x in torch.randn(4, 4, 3):
        model(x).sum().backward()
        counts.append(model.run(graphs, torch.ones(2)))
    assert all(torch.equal(count, counts[0]) for count in counts)


@pytest.mark.upstream
def test_a_full_graph_is_refused_by_torch() -> None:
    """Its own error says that there is a graph break."""
    model = DataParallel(nn.Linear(3, 2), TWO)
    with pytest.raises(RuntimeError, match="no compiled frames"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 3))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="SignedForward"):
        torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)(torch.ones(2, 3))


@pytest.mark.long
def test_the_compiler_is_not_imported() -> None:
    """Its import takes seconds."""
    code = "import raydp_parallel.wrapper, sys; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
