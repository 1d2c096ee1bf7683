"""`Options(buffers=...)`: what buffers are after a forward that several replicas wrote to."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import optimizer_of
from mortal import Mortal, arm, armed, rows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raydp_parallel import DataParallel, Executor, Options, convert_sync_batchnorm

MEAN = Options(buffers="mean")


OTHERS = [pytest.param(link, marks=pytest.mark.long) for link in ("inline", "collective")]


@pytest.fixture(params=["auto", "in_process", *OTHERS])
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A way to move bytes."""
    return {"in_process": True} if request.param == "in_process" else {"link": request.param}


@pytest.fixture
def two(way: dict[str, Any], executors: Any) -> Executor:
    """Two replicas, of several ways to move bytes."""
    return executors(**way)  # type: ignore[no-any-return]


class Counting(nn.Module):
    """Writes to buffers of several kinds and sizes, with and without a version's move."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.small: Tensor
        self.large: Tensor
        self.calls: Tensor
        self.some: Tensor
        self.narrow: Tensor
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("large", torch.ones(300, 400), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("some", torch.full((2,), 5.0))
        self.register_buffer("narrow", torch.zeros(2, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.linear(x))
        with torch.no_grad():
            self.small += x.sum()
            self.large.data.mul_(1 + float(x[0, 0]) ** 2)
            self.calls += len(x)
            self.narrow += 1
            if float(x[0, 0]) > 0:
                self.some.copy_(x[0, :2])
        return found


def batch(seed: int, size: int = 8) -> Tensor:
    """Rows, with a positive number first in the second half only."""
    x = torch.randn(size, 5, generator=torch.Generator().manual_seed(seed))
    x[:, 0] = x[:, 0].abs() * torch.where(torch.arange(size) < (size + 1) // 2, -1, 1)
    return x


def mean_of_copies(net: nn.Module, chunks: list[Tensor]) -> None:
    """Give a module the buffers that policy ``"mean"`` gives it, by hand."""
    copies = [copy.deepcopy(net) for _ in chunks]
    for one, chunk in zip(copies, chunks, strict=True):
        one(chunk)
    for name, buffer in net.named_buffers():
        each = [one.get_buffer(name) for one in copies]
        with torch.no_grad():
            buffer.copy_(
                torch.stack(each).mean(0) if buffer.is_floating_point() else each[0].clone()
            )


def assert_buffers(net: nn.Module, plain: nn.Module) -> None:
    """All buffers are alike."""
    for (name, one), other in zip(net.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=f"{name}: {one} {other}")


@pytest.mark.parametrize("size", [8, 7])
def test_X8_the_mean_over_the_chunks(two: Executor, size: int) -> None:
    """Of floating-point buffers, small and large, whether or not chunk 0 wrote to them; others are
    as chunk 0 left them.
    """
    net = Counting()
    plain, model = copy.deepcopy(net), DataParallel(net, executor=two, options=MEAN)
    versions = [buffer._version for buffer in net.buffers()]
    for number in range(3):
        x = batch(number, size)
        loss = model(x).square().sum()
        mean_of_copies(plain, [*x.chunk(2)])
        assert_buffers(net, plain)
        loss.backward()
    assert int(net.calls) == 3 * ((size + 1) // 2)
    moved = [one._version > then for one, then in zip(net.buffers(), versions, strict=True)]
    names = [name for name, _ in net.named_buffers()]
    assert dict(zip(names, moved, strict=True))["small"]
    assert not dict(zip(names, moved, strict=True))["large"]


def test_X8_by_default_the_first_chunk_s(two: Executor) -> None:
    """As upstream."""
    net = Counting()
    plain, model = copy.deepcopy(net), DataParallel(net, executor=two)
    for number in range(2):
        model(batch(number))
        plain(batch(number).chunk(2)[0])
    assert_buffers(net, plain)


@pytest.mark.parametrize("chunks", [1, 3])
def test_X8_other_numbers_of_chunks(way: dict[str, Any], chunks: int, executors: Any) -> None:
    """More of them, and one alone; two wrappers of a module may differ."""
    net = Counting()
    plain = copy.deepcopy(net)
    executor = executors(max(2, chunks), **way)
    model = DataParallel(net, ["cpu"] * chunks, executor=executor, options=MEAN)
    first = DataParallel(net, ["cpu"] * 2, executor=executor)
    for number in range(3):
        x = batch(number, 6)
        if number == 1:
            first(x)
            plain(x.chunk(2)[0])
        else:
            model(x)
            mean_of_copies(plain, [*x.chunk(chunks)])
        assert_buffers(net, plain)


def test_X8_an_edit_between_and_evaluation(two: Executor) -> None:
    """Each forward begins with what the master has; one that writes nothing changes nothing."""
    net = Counting()
    plain, model = copy.deepcopy(net), DataParallel(net, executor=two, options=MEAN)
    for number in range(2):
        for one in (net, plain):
            one.norm.running_mean.fill_(number)  # type: ignore[union-attr]
            one.small.data.fill_(number)
        model(batch(number))
        mean_of_copies(plain, [*batch(number).chunk(2)])
    assert_buffers(net, plain)
    norm = nn.Sequential(nn.BatchNorm1d(5)).eval()
    model = DataParallel(norm, executor=two, options=MEAN)
    before = copy.deepcopy(norm.state_dict())
    model(batch(0))
    assert all(torch.equal(norm.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("buffers", ["first", "mean"])
def test_X8_an_optimizer_in_the_replicas(two: Executor, buffers: Any) -> None:
    """Its weights do not travel; buffers are those of a driver's optimizer, to the bit."""
    found = []
    for remote in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        model = DataParallel(net, executor=two, options=Options(buffers=buffers))
        optimizer = optimizer_of(model, remote, torch.optim.SGD, lr=0.1)
        for number in range(4):
            optimizer.zero_grad()
            model(batch(number)).square().mean().backward()
            optimizer.step()
        found.append(copy.deepcopy(model.state_dict()))
        if remote:
            optimizer.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_X8_synchronised_batch_norm_has_one_value(two: Executor) -> None:
    """All chunks have the batch's statistics, and so has their mean."""
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
    plain = copy.deepcopy(net)
    model = DataParallel(convert_sync_batchnorm(net), executor=two, options=MEAN)
    if two.options.in_process:
        with pytest.raises(ValueError, match="a process of its own"):
            model(batch(0).double())
        return
    for number in range(2):
        model(batch(number, 7).double()).sum().backward()
        plain(batch(number, 7).double())
    assert_buffers(net, plain)


class Recomputed(nn.Module):
    """Runs its norm again in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.body, x, use_reentrant=False)
        return found


@pytest.mark.long
@pytest.mark.parametrize("moment", ["forward 0", "forward 1", "backward 0", "late forward 1"])
@pytest.mark.parametrize("again", [False, True])
def test_X8_a_death_changes_no_bit(
    killable: Executor, tmp_path: Path, moment: str, again: bool
) -> None:
    """Of weights' gradients and buffers."""
    found = []
    for deadly in (False, True):
        net = Recomputed() if again else Recomputed().body
        model = DataParallel(Mortal(net, tmp_path), executor=killable, options=MEAN)
        for number in range(3):
            if deadly and number == 1:
                arm(tmp_path, moment)
            model(rows(2, number)).square().sum().backward()
        found.append([*[p.grad for p in net.parameters()], *net.buffers()])
        killable.grow()
    assert not armed(tmp_path)
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_X8_two_forwards_before_a_backward(two: Executor) -> None:
    """What the replicas saved is theirs: the mean that the buffers get is no edit."""
    found = []
    for options in (Options(), MEAN):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None))
        model = DataParallel(net, executor=two, options=options)
        (model(batch(0)).square().sum() + model(batch(1)).square().sum()).backward()
        found.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


def test_buffers_has_two_values() -> None:
    """All others are refused."""
    with pytest.raises(ValueError, match=r"buffers='last'.*first, mean"):
        Options(buffers="last")  # type: ignore[arg-type]


def test_X8_buffers_that_replicas_get_late_have_no_mean() -> None:
    """Each replica would write to those of another step."""
    with pytest.raises(ValueError, match="different times"):
        Options(buffers="mean", buffer_updates="evaluation")
