"""The CUDA code on a fake GPU: it has never been seen on a real one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpus, installed, near_replicas
from torch import nn

from raydp_parallel import DataParallel, Executor, Options
from raydp_parallel.cluster.clients import InProcessClient
from raydp_parallel.devices import cuda

HERE = Options(in_process=True)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    """Two GPUs, of which replicas in this process have one each."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # so that it is unset again
    with installed(2) as found:
        near_replicas(found, monkeypatch)
        yield found


def net(width: int = 8, layers: int = 2) -> nn.Module:
    """Layers with batch norm."""
    parts = [
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())
        for _ in range(layers)
    ]
    return nn.Sequential(*parts, nn.Linear(width, 3)).double()


def train(model: nn.Module, x: torch.Tensor, steps: int = 3) -> Iterator[float]:
    """Train, and yield each loss."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


@pytest.mark.parametrize("home", ["cpu", "cuda"])
@pytest.mark.parametrize("registers", [True, False])
def test_training_has_the_values_of_cpus(gpus: FakeGpus, home: str, registers: bool) -> None:
    """By registered windows and by staging, for a driver with a GPU and for one without."""
    gpus.registers = registers
    own, other = net().to(home), net()
    other.load_state_dict({k: v.cpu() for k, v in own.state_dict().items()})
    x = torch.randn(8, 8, dtype=torch.double)
    with Executor([0, 1], options=HERE) as executor:
        losses = [*train(DataParallel(own, executor=executor), x.to(home))]
        weight: Any = own.get_parameter("0.0.weight")
        assert weight.grad.device == weight.device
        assert weight.device.type == home
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raydp_parallel.cluster.start.InProcessClient", InProcessClient)
        with Executor(["cpu", "cpu"], options=HERE) as executor:
            found = [*train(DataParallel(other, executor=executor), x)]
    assert losses == pytest.approx(found, rel=1e-12)
    for a, b in zip(own.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a.cpu(), b)


@pytest.mark.parametrize("registers", [True, False])
def test_each_message_crosses_once_however_many_tensors(gpus: FakeGpus, registers: bool) -> None:
    """Tensors are gathered first, and nothing goes through pageable memory (N1, N2)."""
    gpus.registers = registers
    x, seen = torch.randn(8, 8, dtype=torch.double).cuda(), []
    for layers in (1, 6):
        with Executor([0, 1], options=HERE) as executor:
            steps = train(DataParallel(net(layers=layers).cuda(), executor=executor), x)
            next(steps)
            next(steps)
            gpus.counts.clear()
            next(steps)
        seen.append({k: n for k, n in gpus.counts.items() if "crossings" in k or "pageable" in k})
    # Two requests and two answers for each of two replicas; the loss's item() is not counted.
    assert seen[0] == seen[1] == {"driver crossings": 8, "replica crossings": 8}


def test_a_replica_with_a_gpu_copies_with_several_threads(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sets one where no CPU is booked (N3)."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(cuda, "cores", lambda: 16)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert cuda.take_given("gpu", ["1"]) == torch.device("cuda", 0)
    assert torch.get_num_threads() == 4
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(("visible", "index"), [("", 1), ("5,1", 1), ("1,5", 0)])
def test_gpus_stay_visible_if_the_user_says_so(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, visible: str, index: int
) -> None:
    """As Ray's own variable asks for (N5)."""
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    given: Any = cuda.take_given("gpu", ["1"])
    assert given == torch.device("cuda", index)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
