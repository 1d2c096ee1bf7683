"""`Options(gradient_dtype=...)`: gradients in a narrower dtype on their way from the replicas."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_grads
from mortal import Everything, Mortal, arm, armed, rows, same, state
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, Options

HALVES = (torch.bfloat16, torch.float16)


def narrow(dtype: torch.dtype) -> Options:
    """The option."""
    return Options(gradient_dtype=dtype)


def by_hand(net: nn.Module, parts: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The sum of the chunks' gradients, each rounded once."""
    total: dict[str, Tensor] = {}
    for part in parts:
        net.zero_grad()
        net(part).square().sum().backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            grad = parameter.grad.to(dtype).to(parameter.dtype)
            total[name] = total[name] + grad if name in total else grad
    return total


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("devices", [1, 2])
def test_X4_each_chunk_s_gradient_is_rounded_once(
    two: Executor, dtype: torch.dtype, devices: int
) -> None:
    """To the bit; the sum is made in float32. Gradients of inputs stay as they are."""
    net = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 1))
    plain = copy.deepcopy(net)
    model = DataParallel(net, ["cpu"] * devices, executor=two, options=narrow(dtype))
    x = torch.randn(8, 40, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    model(x).square().sum().backward()
    plain(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for name, expected in by_hand(plain, x.detach().chunk(devices), dtype).items():
        found = net.get_parameter(name).grad
        assert found is not None and found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_X4_half_the_bytes_travel(two: Executor) -> None:
    """As the replicas' statistics count them."""
    net = nn.Linear(300, 400, bias=False)
    size, sent = 300 * 400 * 4, {}
    for options in (Options(), narrow(torch.bfloat16)):
        model = DataParallel(net, executor=two, options=options)
        loss = model(torch.randn(4, 300)).sum()
        before = two.stats()
        loss.backward()
        after = two.stats()
        sent[options.gradient_dtype] = [
            late.bytes_out - early.bytes_out
            for early, late in zip(before.replicas, after.replicas, strict=True)
        ]
    assert sent == {None: [size, size], torch.bfloat16: [size // 2, size // 2]}


class Kinds(nn.Module):
    """Parameters of several dtypes, and one with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 3).double()
        self.small = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.imaginary = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.table = nn.Embedding(5, 3, sparse=True)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.wide(x) * self.small * self.imaginary.abs()
        return out + self.table(x[:, 0].abs().long() % 5)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_X4_other_dtypes_stay_as_they_are(two: Executor, dtype: torch.dtype) -> None:
    """Double precision too, unless float32 is asked for; unused parameters get zeros."""
    net = Kinds()
    even = DataParallel(copy.deepcopy(net), executor=two)
    model = DataParallel(net, executor=two, options=narrow(dtype))
    x = torch.randn(8, 3, dtype=torch.double)
    for one in (even, model):
        one(x).square().sum().backward()
    exact = dtype is not torch.float32
    for name, parameter in net.named_parameters():
        found, other = parameter.grad, even.module.get_parameter(name).grad
        assert found is not None and other is not None
        assert (found.dtype, found.layout) == (other.dtype, other.layout)
        if exact and not (name.startswith("table")):
            assert torch.equal(found, other), name
        one, two_ = found.to_dense(), other.to_dense()
        rounded = {} if parameter.is_floating_point() else {"rtol": 1e-6, "atol": 1e-6}
        close = {"rtol": 1e-2, "atol": 1e-2} if name.startswith("table") else rounded
        torch.testing.assert_close(one, two_, **(close or {"rtol": 1e-6, "atol": 1e-6}))
    if not exact:
        grad = net.wide.weight.grad
        assert grad is not None and not torch.equal(grad, even.module.wide.weight.grad)


def test_X4_second_order_is_exact_in_its_first(two: Executor) -> None:
    """What `create_graph` made is differentiated again, and so not rounded."""
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    even = DataParallel(copy.deepcopy(net), executor=two)
    model = DataParallel(net, executor=two, options=narrow(torch.bfloat16))
    found = []
    for one in (even, model):
        x = torch.linspace(-1, 1, 24).view(6, 4).requires_grad_()
        wanted = [x, *one.parameters()]
        grads = torch.autograd.grad(one(x).square().sum(), wanted, create_graph=True)
        found.append([grad.detach() for grad in grads])
        sum(grad.square().sum() for grad in grads).backward()
    assert same(*found)
    assert_same_grads(model, even, rtol=2e-2, atol=2e-2)


@pytest.mark.long
def test_X4_a_death_changes_nothing(killable: Executor, tmp_path: Path) -> None:
    """In forward and in backward, to the bit."""
    runs = []
    for moments in ((), ("forward 1",), ("backward 0",)):
        torch.manual_seed(5)
        arm(tmp_path, *moments)
        net = Mortal(Everything(), tmp_path)
        model = DataParallel(net, executor=killable, options=narrow(torch.bfloat16))
        model(rows(2, 0)).square().sum().backward()
        assert not armed(tmp_path)
        runs.append(state(model))
    assert same(runs[0], runs[1]) and same(runs[0], runs[2])


@pytest.mark.parametrize("bad", ["bfloat16", 16, float])
def test_X4_bad_types(bad: Any) -> None:
    """Dtypes of torch alone."""
    with pytest.raises(TypeError, match=r"gradient_dtype=.*expected one of torch\.bfloat16"):
        Options(gradient_dtype=bad)


def test_X4_bad_values() -> None:
    """Dtypes that gradients cannot have, and replicas that sum among themselves."""
    for bad in (torch.int8, torch.float64, torch.complex64, torch.bool):
        with pytest.raises(ValueError, match=r"gradient_dtype=.*expected one of"):
            Options(gradient_dtype=bad)
    with pytest.raises(ValueError, match="link='collective'"):
        Options(gradient_dtype=torch.bfloat16, link="collective")
