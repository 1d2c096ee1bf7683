"""Regressions that a reader found, each with its story."""

from __future__ import annotations

import enum
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raydp_parallel import (
    DataParallel,
    Options,
    ReplicaDied,
    TransferError,
    parallel_apply,
    replicate,
)

pytestmark = pytest.mark.usefixtures("cluster")
TWO = ["cpu", "cpu"]


def test_a_send_that_was_interrupted_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the weights were packed left replicas with memory that was never filled."""
    net = nn.Linear(3, 2)
    model, x = DataParallel(net, TWO), torch.ones(4, 3)
    from raydp_parallel.state.block_contents import BlockContents

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BlockContents, "_pack", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    torch.testing.assert_close(model(x), net(x))
    with torch.no_grad():
        net.weight.add_(1)
    with monkeypatch.context() as patch:
        patch.setattr(BlockContents, "_pack", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    torch.testing.assert_close(model(x), net(x))


class Boom(torch.autograd.Function):
    """Raises in backward when told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.fails:
            raise RuntimeError("boom")
        return grad, None


class Between(nn.Module):
    """Two layers, and between them something with a backward that may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fails = nn.Linear(2, 2), nn.Linear(2, 2), False

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Boom.apply(self.a(x), self.fails))


def test_a_backward_that_failed_leaves_no_gradients() -> None:
    """What it had accumulated by then was added to the next one's."""
    net = Between()
    model, x = DataParallel(net, TWO), torch.ones(4, 2)
    net.fails = True
    with pytest.raises(RuntimeError, match="boom"):
        model(x).sum().backward()
    net.fails = False
    model.zero_grad()
    model(x).sum().backward()
    ours = net.b.weight.grad.clone()
    net.zero_grad()
    net(x).sum().backward()
    torch.testing.assert_close(ours, net.b.weight.grad)


class Scales(nn.Module):
    """Takes its own parameter as an argument too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * self.scale * scale


def test_a_parameter_that_is_an_input_too() -> None:
    """It stands twice among a chunk's leaves; one gradient was lost."""
    net, x = Scales(), torch.arange(4.0)
    DataParallel(net, TWO)(x, net.scale).sum().backward()
    ours = net.scale.grad.clone()
    net.scale.grad = None
    net(x, net.scale).sum().backward()
    torch.testing.assert_close(ours, net.scale.grad)


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch's older interface only"
)
def test_the_newer_settings_of_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they are set, torch refuses to tell by the older ones; every forward raised."""
    model, x = DataParallel(nn.Linear(2, 2), TWO), torch.ones(2, 2)
    before = torch.get_float32_matmul_precision()
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert model(x).shape == (2, 2)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision(before)
    assert model(x).shape == (2, 2)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"link": "inline"}, {}])
def test_two_chunks_with_much_to_say_on_one_replica(
    options: dict[str, Any], executors: Any
) -> None:
    """The replica wrote its first answer while the driver wrote the second question;
    neither read.
    """
    executor = executors(1, **options)
    first, second = (replicate(nn.Identity(), ["cpu"], executor=executor)[0] for _ in range(2))
    x = torch.ones(1_500_000)
    for out in parallel_apply([first, second], [x, x]):
        assert torch.equal(out, x)


class Mode(enum.IntEnum):
    """An attribute that is an int, and more."""

    ONE = 1
    TWO = 2


class HasMode(nn.Module):
    """Tells its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = Mode.ONE

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mode.value


def test_attributes_that_are_more_than_a_number() -> None:
    """They travelled as plain numbers do, by a pickle that a script's own classes do not
    survive.
    """
    scope: dict[str, Any] = {"__name__": "nowhere", "enum": enum}
    exec("class Own(enum.IntEnum):\n    ONE = 1\n    THREE = 3\n", scope)
    model, x = DataParallel(HasMode(), TWO), torch.ones(4)
    assert torch.equal(model(x), x)
    model.module.mode = scope["Own"].THREE
    assert torch.equal(model(x), x * 3)


@pytest.mark.long
def test_a_replica_that_is_held_recovers(executors: Any) -> None:
    """A program with a replica of a process that died was told that the next call starts one, and
    it did not.
    """
    executor = executors(on_fault="raise")
    (replica,) = replicate(nn.Linear(2, 2), ["cpu"], executor=executor)
    x = torch.ones(1, 2)
    replica(x)
    executor.slots(["cpu"])[0].client.actor.__ray_terminate__.remote()
    with pytest.raises(ReplicaDied):
        while True:
            replica(x)
    assert replica(x).shape == (1, 2)


def test_a_failed_call_does_not_keep_the_model(executors: Any) -> None:
    """After an argument that cannot be sent, a dropped model stayed in its replicas."""
    executor = executors()
    gc.collect()
    before = executor.flush()
    model = DataParallel(nn.Linear(2, 2), executor=executor)
    model(torch.ones(2, 2))
    with pytest.raises(TransferError):
        model(torch.ones(2, 2), (i for i in range(3)))
    del model
    assert executor.flush() == before


def test_capture_belongs_to_its_wrapper() -> None:
    """A second wrapper inside the block was asked for the first one's submodules; in place nothing
    was captured.
    """
    a = DataParallel(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), TWO)
    b = DataParallel(nn.Identity(), TWO)
    with a.capture("0") as captured:
        b(a(torch.ones(4, 2)))
    assert captured["0"].shape == (4, 3)
    with pytest.raises(ValueError, match="at least one"), a.capture():
        pass


@pytest.mark.long
def test_the_next_wrapper_after_a_shared_executor_was_closed() -> None:
    """It got the closed one, with the advice to leave `executor` out, which it had."""
    options = Options(placement_timeout=61.0)
    model = DataParallel(nn.Identity(), ["cpu"], options=options)
    model(torch.ones(1))
    model.executor.close()
    again = DataParallel(nn.Identity(), ["cpu"], options=options)
    assert again(torch.ones(1)).shape == (1,)
    again.executor.close()
