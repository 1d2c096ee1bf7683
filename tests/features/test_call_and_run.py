"""`DataParallel.call` and `run`, compared with the plain module, on two replicas."""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import assert_same_grads, assert_same_state, raised
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from raydp_parallel import DataParallel, Executor, TransferError


class Net(nn.Module):
    """A module with more methods than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.decoder = nn.Linear(4, 2)
        self.calls = 0
        self.history: list[int] = []
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x).tanh())

    def generate(
        self, x: Tensor, shift: Tensor | None = None, *, steps: int = 1, method: str = "sum"
    ) -> Tensor:
        """Several forwards, one after the other."""
        for _ in range(steps):
            out = self(x)
            x = torch.cat([out, x[:, :1]], 1)
        x = x if shift is None else x + shift
        return x.sum(1, keepdim=True) if method == "sum" else x

    def count(self, x: Tensor) -> None:
        """Writes to a buffer in place, and rebinds and changes attributes."""
        self.total += self.encoder(x).detach().sum(0)
        self.calls += 1
        self.history.append(len(x))

    def size(self, x: Tensor) -> int:
        return len(x)

    def ragged(self, x: Tensor) -> Tensor:
        """As many columns as there are rows."""
        return self.encoder(x)[:, :1].expand(-1, len(x))

    def where(self) -> int:
        return os.getpid()

    def fail(self, x: Tensor) -> Tensor:
        raise ValueError(f"no {len(x)} rows")


@pytest.fixture
def pair(two: Executor) -> tuple[Any, Net]:
    """A wrapped net in double precision, and a plain copy of it."""
    net = Net().double()
    return DataParallel(net, executor=two), copy.deepcopy(net)


def batch(count: int = 6) -> Tensor:
    """Some rows."""
    return torch.randn(count, 3, dtype=torch.double)


def close(one: Any, other: Any) -> None:
    """Equal but for the order of sums."""
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_calling_forward_is_forward_without_hooks(pair: tuple[Any, Net]) -> None:
    """As in one process: hooks belong to the call of a module, and submodules have theirs."""
    model, plain = pair
    x = batch()
    for net in (model.module, plain):
        for part in (net, net.encoder):
            part.register_forward_hook(lambda _module, _args, output: 2 * output)
    close(model.call("forward", x), plain.forward(x))
    close(model(x), plain(x))
    close(model.call("__call__", x), plain(x))
    close(model.call("encoder", x), plain.encoder(x))
    assert not torch.allclose(plain(x), plain.forward(x))


@pytest.mark.parametrize("split", [True, False])
def test_a_method_gives_what_the_plain_one_gives(pair: tuple[Any, Net], split: bool) -> None:
    """Values and gradients, also if one replica computes all; what it writes in place stays."""
    model, plain = pair
    x, shift = batch(), batch()
    found = []
    for generate in (functools.partial(model.call, "generate", split=split), plain.generate):
        ours, moved = x.clone().requires_grad_(), shift.clone().requires_grad_()
        out = generate(ours, shift=moved, steps=3, method="none")
        out.square().sum().backward()
        found.append((out.detach(), ours.grad, moved.grad))
    close(*found)
    assert_same_grads(model, plain, rtol=1e-9, atol=1e-9)
    assert model.call("size", x, split=split, gather=False) == ([3, 3] if split else [6])
    assert os.getpid() not in model.call("where", split=False, gather=False)
    model.call("count", x, split=False)
    plain.count(x)
    assert (model.module.calls, model.module.history) == (0, [])
    assert_same_state(model, plain, rtol=1e-9, atol=1e-9)


def test_outputs_that_are_not_gathered(pair: tuple[Any, Net]) -> None:
    """A list with each chunk's, which may have shapes of their own; differentiable."""
    model, plain = pair
    x = batch(5)
    found = model.call("ragged", x, gather=False)
    expected = [plain.ragged(part) for part in x.chunk(len(model.device_ids))]
    assert type(found) is list and len(found) == len(model.device_ids)
    close(found, expected)
    for outs in (found, expected):
        sum(out.square().sum() for out in outs).backward()
    assert_same_grads(model.module.encoder, plain.encoder, rtol=1e-9, atol=1e-9)


def importable(net: Any, x: Tensor, power: int = 2) -> Any:
    """A function that replicas import."""
    return net.encoder(x) ** power


def nested(factor: float) -> Callable[..., Tensor]:
    """A function inside of another one."""
    return lambda net, x: importable(net, x) * factor


@dataclass(eq=False)
class Loss:
    """An object that can be called."""

    factor: float

    def __call__(self, net: Any, x: Tensor) -> Any:
        return net(x).square() * self.factor


@pytest.mark.parametrize(
    "function",
    [
        importable,
        functools.partial(importable, power=3),
        lambda net, x: net(x).exp(),
        nested(2.5),
        Net.generate,
        Loss(0.5),
    ],
    ids=["importable", "partial", "lambda", "nested", "method", "object"],
)
def test_a_function_gives_what_it_gives_here(
    pair: tuple[Any, Net], function: Callable[..., Tensor]
) -> None:
    """By name and with its code; values and gradients."""
    model, plain = pair
    x = batch()
    outs = model.run(function, x), function(plain, x)
    close(*outs)
    for out in outs:
        out.square().sum().backward()
    for name, parameter in plain.named_parameters():
        grad = model.module.get_parameter(name).grad  # row B3: what was not used gets zeros
        close(torch.zeros_like(grad) if parameter.grad is None else parameter.grad, grad)


def test_a_function_registers_hooks_beside_the_program_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch numbers hooks in each process, and those of two would have the same numbers."""
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    net, x = nn.Linear(3, 2), torch.ones(4, 3)
    for _ in range(20):
        net.register_forward_hook(lambda _module, _args, out: out * 1.5)

    def run(net: nn.Module, x: Tensor) -> Tensor:
        with net.register_forward_hook(lambda _module, _args, out: out + 1):
            return net(x)  # type: ignore[no-any-return]

    with Executor(["cpu", "cpu"]) as executor:
        model = DataParallel(net, executor=executor)
        torch.testing.assert_close(model.run(run, x), net(x) + 1)
        torch.testing.assert_close(model(x), net(x))


def test_an_exception_of_a_method(pair: tuple[Any, Net]) -> None:
    """Upstream's words around it, and the traceback of the replica."""
    model, _ = pair
    for call in (
        lambda: model.call("fail", batch()),
        lambda: model.run(lambda net, x: net.fail(x), batch()),
    ):
        error = raised(call)
        assert isinstance(error, ValueError)
        assert str(error).startswith("Caught ValueError in replica 0 on device cpu.")
        assert "in fail" in str(error) and "no 3 rows" in str(error)
    close(model(batch(2)).shape, (2, 2))


def test_what_cannot_be_called(pair: tuple[Any, Net]) -> None:
    """It is named, before anything is sent."""
    model, _ = pair
    before = model.stats().forwards
    for call, bad, text in (
        (model.call, "absent", "'Net' object has no attribute 'absent'"),
        (model.call, "calls", r"Net\.calls is not a method"),
        (model.call, importable, "name of a method, got function"),
        (model.run, None, "takes the module first, got NoneType"),
        (model.run, "generate", "takes the module first, got str"),
        (model.run, model.module.generate, r"generate is bound .* call\(\)"),
    ):
        kind = AttributeError if bad == "absent" else TypeError
        with pytest.raises(kind, match=text):
            call(bad, batch())
    assert model.stats().forwards == before


def test_a_function_that_cannot_be_sent(two: Executor) -> None:
    """The error names it, and not the arguments."""
    model = DataParallel(Net(), executor=two)
    lock = threading.Lock()
    with pytest.raises(TransferError, match=r"^function is a builtins.function, which cannot"):
        model.run(lambda net, x: net(x) if lock else x, batch())
    with pytest.raises(TransferError, match=r"^inputs\[0\] is a _thread.lock, which cannot"):
        model.run(importable, lock)


def test_in_place() -> None:
    """With one device of this process the module itself runs, with the very objects."""
    model = DataParallel(Net(), ["cpu"])
    x = torch.randn(4, 3)
    seen: list[Any] = []
    assert model.run(lambda net, x: seen.append((net, x)), x) is None
    assert seen[0][0] is model.module and seen[0][1].data_ptr() == x.data_ptr()
    assert model.call("size", x) == model.call("size", x, split=False) == 4
    assert model.call("size", x, gather=False) == [4]
