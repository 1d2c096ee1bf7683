"""One device: upstream runs the master itself there, and what its forward does to it stays."""

from __future__ import annotations

import collections
import contextlib
import copy
import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn

import raydp_parallel
from raydp_parallel.replica.sync_batch_norm import SyncBatchNorm
from raydp_parallel.state import (
    container_copies,
    python_state,
    replica_module,
    write_record,
)

pytestmark = pytest.mark.usefixtures("cluster")


class Remembers(nn.Module):
    """Rebinds a number, a buffer and an attribute with a graph, and appends to a list, in each
    forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.calls = 0
        self.history: list[Any] = []
        self.seen = {"rows": 0}
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        self.calls += 1
        self.history.append(tuple(x.shape))
        self.seen["rows"] += len(x)
        self.total = self.total + out.detach().sum(0)
        self.penalty = out.square().mean()
        self.inner.last = len(x)
        return out


def run(wrapper: Any) -> Any:
    """Three forwards, each with a loss that uses an attribute."""
    x = torch.linspace(-1, 1, 12).view(4, 3)
    for _ in range(3):
        (wrapper(x).sum() + wrapper.module.penalty).backward()
    return wrapper.module


def test_F5_what_forward_rebinds_stays() -> None:
    """Counters, lists, dicts, buffers and losses kept as attributes are the master's afterwards,
    gradients included.
    """
    net = Remembers()
    theirs = run(oracle.DataParallel(copy.deepcopy(net), [0]))
    ours = run(raydp_parallel.DataParallel(net, ["cpu"]))
    assert ours.calls == theirs.calls == 3
    assert ours.history == theirs.history == [(4, 3)] * 3
    assert ours.seen == theirs.seen == {"rows": 12}
    assert ours.inner.last == theirs.inner.last == 4
    torch.testing.assert_close(ours.total, theirs.total)
    torch.testing.assert_close(ours.inner.weight.grad, theirs.inner.weight.grad)
    assert "total" in dict(ours.named_buffers())


class Heads(nn.Module):
    """Uses one of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        out: Tensor = self.heads[head](x)
        return out


class Recurs(nn.Module):
    """Keeps its state in a buffer with a graph, which the next forward detaches, or replaces."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.detaches = detaches
        self.register_buffer("state", None)

    def forward(self, x: Tensor) -> Tensor:
        unused = self.state is None or not self.detaches
        self.state = torch.zeros_like(x) if unused else self.state.detach()
        self.state = self.inner(x) + self.state
        return self.state


@pytest.mark.parametrize("detaches", [False, True])
def test_F5_a_buffer_with_a_graph_that_the_next_forward_does_not_use(detaches: bool) -> None:
    """Its graph ended with the first backward, and the second must not run it."""
    net = Recurs(detaches)
    other = copy.deepcopy(net)
    model = raydp_parallel.DataParallel(net, ["cpu"])
    x = torch.linspace(-1, 1, 12).view(4, 3)
    for _ in range(3):
        for one in (model, other):
            one(x).square().sum().backward()
    torch.testing.assert_close(net.state, other.state)
    torch.testing.assert_close(net.inner.weight.grad, other.inner.weight.grad)


@pytest.mark.parametrize("ids", [["cpu"], ["cpu", "cpu"]])
def test_F5_hooks_of_parameters_that_are_not_used_are_not_called(ids: list[str]) -> None:
    """As in the plain module. Torch would call them with None."""
    net = Heads()
    options = raydp_parallel.Options(in_process=True, unused_grads="none")
    plain, model = copy.deepcopy(net), raydp_parallel.DataParallel(net, ids, options=options)
    seen: dict[nn.Module, list[str]] = {net: [], plain: []}
    for one in (net, plain):
        for name, parameter in one.named_parameters():
            parameter.register_hook(lambda grad: grad.clamp(-1, 1))
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name, one=one: seen[one].append(f"{name} {p.grad.shape}")
            )
    x = torch.randn(4, 3)
    for number in (0, 1, 1):
        for run in (model, plain):
            run(x, number).square().sum().backward()
    assert sorted(seen[net]) == sorted(seen[plain]) and len(seen[net]) == 6
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_F6_with_two_devices_it_is_lost() -> None:
    """Also when there is one chunk only."""
    wrapper = raydp_parallel.DataParallel(Remembers(), ["cpu", "cpu"])
    wrapper(torch.ones(1, 3))
    assert wrapper.module.calls == 0
    assert wrapper.module.history == []
    assert not hasattr(wrapper.module, "penalty")


class Counter(nn.Module):
    """Counts its calls, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.counts = False
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.counts
        return self.inner(x)  # type: ignore[no-any-return]


@contextlib.contextmanager
def counted_calls() -> Iterator[list[int]]:
    """How many functions that look for changes of Python state are called while the block runs."""
    modules = container_copies, python_state, replica_module
    files = {module.__file__ for module in modules}
    counts = [0]

    def count(frame: FrameType, event: str, _: object) -> None:
        counts[0] += event == "call" and frame.f_code.co_filename in files

    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(None)


def calls_of_a_forward(modules: int, counting: int) -> int:
    """How many functions look for changes in a forward, driver and replica together; some modules
    count their calls.
    """
    net = nn.Sequential(*(Counter() for _ in range(modules)))
    with (
        raydp_parallel.Executor(
            ["cpu"], options=raydp_parallel.Options(in_process=True)
        ) as executor,
        torch.no_grad(),
    ):
        model = raydp_parallel.DataParallel(net, executor=executor)
        for layer in list(net)[:counting]:
            layer.counts = True
        for _ in range(3):
            model(torch.ones(1, 2))
        with counted_calls() as counts:
            model(torch.ones(1, 2))
        assert [layer.calls for layer in net] == [4] * counting + [0] * (modules - counting)
    return counts[0]


def test_F5_modules_cost_nothing_where_nothing_is_rebound() -> None:
    """As many functions are called for 80 modules as for 20: what compares them runs in C, once
    over all.
    """
    assert calls_of_a_forward(80, 0) == calls_of_a_forward(20, 0) < 100


def test_F5_looking_for_what_was_rebound_is_linear() -> None:
    """Whether one module rebinds something or all do: four times the modules take four times the
    calls.
    """
    assert calls_of_a_forward(80, 1) < 5 * calls_of_a_forward(20, 1)
    assert calls_of_a_forward(80, 80) < 5 * calls_of_a_forward(20, 20)


@contextlib.contextmanager
def counted_package_calls() -> Iterator[collections.Counter[str]]:
    """How often each function of the package is called while the block runs, driver and replica
    together.
    """
    package = os.path.dirname(raydp_parallel.__file__)
    counts: collections.Counter[str] = collections.Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            counts[f"{os.path.basename(code.co_filename)}:{code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(None)


def calls_with_norms(norms: int, train: bool, link: str) -> int:
    """The calls of the package's functions in a forward, or a step, of a net of so many batch
    norms.
    """
    net = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(norms)))
    options = raydp_parallel.Options(in_process=True, link=link)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.randn(4, 3, requires_grad=train)
    with (
        raydp_parallel.Executor(["cpu"], options=options) as executor,
        torch.set_grad_enabled(train),
    ):
        model = raydp_parallel.DataParallel(net, executor=executor)

        def step() -> None:
            out = model(x)
            if train:
                out.sum().backward()
                optimizer.step()

        for _ in range(4):
            step()
        with counted_package_calls() as counts:
            step()
    return counts.total()


@pytest.mark.parametrize("link", ["inline", "auto"])
def test_a_buffer_more_costs_a_forward_few_calls(link: str) -> None:
    """Three buffers for each norm come back and are sent again: each by itself would take dozens of
    calls.
    """
    more = calls_with_norms(60, False, link) - calls_with_norms(20, False, link)
    assert more < 10 * 3 * 40


class Raises(nn.Module):
    """Raises if it is told to, behind batch norms that have counted."""

    def __init__(self) -> None:
        super().__init__()
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        if self.raises:
            raise ValueError("told to")
        return x


def normed() -> nn.Sequential:
    """Batch norms, the last of them with large buffers."""
    return nn.Sequential(
        *(nn.BatchNorm1d(3) for _ in range(4)), Raises(), nn.Linear(3, 20000), nn.BatchNorm1d(20000)
    )


def step_after(model: Any, net: nn.Sequential, event: str, x: Tensor) -> list[Tensor]:
    """What the master holds after a step, before which something happened to it, and its output."""
    mean: Any = net[1].running_mean
    if event == "written behind its version":
        mean.data.fill_(0.25)
    elif event == "written":
        mean.mul_(2)
    elif event == "other memory":
        mean.data = mean.data * 3
    elif event == "another buffer":
        net[1].running_mean = torch.full((3,), 0.75)
    elif event == "evaluated":
        net.eval()
        model(x)
        net.train()
    elif event == "raised":
        net[4].raises = True
        with pytest.raises(ValueError, match="told to"):
            model(x)
        net[4].raises = False
    graphs = [model(x + k) for k in range(3 if event == "three graphs" else 1)]
    for out in graphs:
        out.square().mean().backward()
    return [
        graphs[-1].detach(),
        *net.state_dict().values(),
        *[p.grad for p in net.parameters() if p.grad is not None],
    ]


@pytest.mark.long
@pytest.mark.parametrize("link", ["inline", "auto", "here"])
def test_buffers_are_the_plain_module_s_whatever_happens_between_steps(link: str) -> None:
    """Where a replica keeps what it reported itself, as where it is told."""
    torch.manual_seed(0)
    plain = normed()
    net = copy.deepcopy(plain)
    events = [
        "",
        "written",
        "",
        "written behind its version",
        "three graphs",
        "other memory",
        "evaluated",
        "raised",
    ]
    events += ["another buffer", "three graphs", "raised", "", ""]
    options = raydp_parallel.Options(
        in_process=link != "auto", link="auto" if link == "here" else link
    )
    with raydp_parallel.Executor(["cpu"], options=options) as executor:
        model = raydp_parallel.DataParallel(net, executor=executor)
        for event in events:
            x = torch.randn(8, 3)
            ours, theirs = step_after(model, net, event, x), step_after(plain, plain, event, x)
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other)


def test_a_replica_does_not_receive_what_it_reported() -> None:
    """Of 24 buffers in a forward, none is adopted; after one was edited, all that came with it are
    compared only.
    """
    net = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(8)))
    options = raydp_parallel.Options(in_process=True)
    with raydp_parallel.Executor(["cpu"], options=options) as executor, torch.no_grad():
        model = raydp_parallel.DataParallel(net, executor=executor)
        adopted: list[int] = []
        plain = write_record.Buffers.adopt

        def noted(self: write_record.Buffers, sources: Any) -> None:
            adopted.append(len(sources))
            plain(self, sources)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(write_record.Buffers, "adopt", noted)
            for _ in range(4):
                model(torch.randn(4, 3))
            net[2].running_mean.data.fill_(9)  # type: ignore[union-attr, operator]
            model(torch.randn(4, 3))
    assert sum(adopted[1:-1]) == 0
    assert adopted[-1] == 1


def calls_with_parameters(
    layers: int, places: list[str], link: str, monkeypatch: pytest.MonkeyPatch
) -> collections.Counter[str]:
    """The calls of the package's functions in a forward and backward of a net of so many layers, in
    a process that never had synchronised batch norm, for which modules are searched.
    """
    monkeypatch.setattr(SyncBatchNorm, "made", False)
    net = nn.Sequential(*(nn.Linear(72, 72) for _ in range(layers)))
    options = raydp_parallel.Options(in_process=True, link=link)
    x = torch.randn(4, 72)
    with raydp_parallel.Executor(places, options=options) as executor:
        model = raydp_parallel.DataParallel(net, executor=executor)
        for _ in range(4):
            model(x).sum().backward()
        net.zero_grad()
        with counted_package_calls() as counts:
            model(x).sum().backward()
        plain = copy.deepcopy(net)
        plain.zero_grad()
        plain(x).sum().backward()
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    return counts


@pytest.mark.parametrize("places", [["cpu"], ["cpu", "cpu"]])
@pytest.mark.parametrize("link", ["inline", "auto"])
def test_a_parameter_more_costs_a_forward_and_its_backward_no_call(
    places: list[str], link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves, gradients and their sums are handled as rows, with nothing called for each."""
    few = calls_with_parameters(10, places, link, monkeypatch)
    assert calls_with_parameters(40, places, link, monkeypatch) == few
