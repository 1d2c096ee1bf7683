"""Gradients that lie in the replicas: what needs no value, what fetches it, and what of changes is
noticed.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.dlpack
from torch import Tensor, nn

from raydp_parallel.calls.remote_gradients import (
    GradientState,
    GradientSum,
    RemoteGradient,
    Term,
    lies_remote,
    local,
)


class Store:
    """Keeps sums as replicas do, and counts how often they are fetched."""

    def __init__(self) -> None:
        self.fetched = 0

    def grad(self, like: Tensor, value: Tensor) -> RemoteGradient:
        """A gradient of which only this store has the value."""

        def fetch(_: GradientSum) -> list[Tensor]:
            self.fetched += 1
            return [value]

        return RemoteGradient(like, GradientState([Term(GradientSum(1, [], fetch), 0)]))


def arrive(leaf: Tensor, grad: Tensor) -> None:
    """Let torch's engine accumulate a gradient in a leaf, as a `Fork` gives it."""

    class Give(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, leaf: Tensor) -> Tensor:
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Tensor:
            return grad

    Give.apply(leaf).backward()


@pytest.mark.parametrize("shape", [(3, 4), (5,), ()])
def test_torch_accumulates_it_without_its_value(shape: tuple[int, ...]) -> None:
    """Also a second one, to the first; and zeros in place."""
    store, leaf, plain = Store(), nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(shape))
    values = [torch.randn(shape) for _ in range(3)]
    for value in values:
        arrive(leaf, store.grad(leaf, value))
        arrive(plain, value.clone())
    assert lies_remote(leaf.grad) and len(leaf.grad.state.terms) == 3
    assert store.fetched == 0
    assert torch.equal(local(leaf.grad), plain.grad)
    assert lies_remote(leaf.grad)
    torch.optim.SGD([leaf], lr=1.0).zero_grad(set_to_none=False)
    assert lies_remote(leaf.grad) and torch.equal(local(leaf.grad), torch.zeros(shape))
    arrive(leaf, store.grad(leaf, values[0]))
    assert lies_remote(leaf.grad) and leaf.grad.state.zeros
    assert torch.equal(local(leaf.grad), values[0])
    leaf.grad = None
    arrive(leaf, store.grad(leaf, values[1]))
    assert torch.equal(local(leaf.grad), values[1])


READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda grad: grad.norm(),
    "sum": lambda grad: (grad * 2 + 1).sum(),
    "item": lambda grad: grad[0, 0].item(),
    "numpy": lambda grad: grad.numpy().copy(),
    "tolist": lambda grad: grad.tolist(),
    "repr": repr,
    "deepcopy": copy.deepcopy,
    "pickle": lambda grad: pickle.loads(pickle.dumps(grad)),
    "isnan": lambda grad: grad.isnan().any(),
    "cat": lambda grad: torch.cat([grad, grad]),
    "equal": lambda grad: torch.equal(grad, grad),
    "data": lambda grad: grad.data.sum(),
    "total norm": lambda grad: torch.nn.utils.get_total_norm([grad]),
}


@pytest.mark.parametrize("read", READS)
def test_what_reads_it_fetches_it_once(read: str) -> None:
    """And gives what a plain tensor gives."""
    store, value = Store(), torch.randn(3, 4)
    grad = store.grad(value, value)
    found, expected = READS[read](grad), READS[read](value)
    assert str(found) == str(expected)
    READS[read](grad)
    assert store.fetched == 1


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda grad: grad.mul_(2),
    "add_": lambda grad: grad.add_(torch.ones(3, 4)),
    "foreach": lambda grad: torch._foreach_mul_([grad], 3.0),
    "data": lambda grad: grad.data.mul_(2),
    "detach": lambda grad: grad.detach().mul_(2),
    "view": lambda grad: grad[0].zero_(),
    "data of a view": lambda grad: grad.view(-1).data.mul_(2),
    "numpy": lambda grad: grad.numpy().fill(3),
    "dlpack": lambda grad: torch.from_dlpack(grad).mul_(2),
    "copy": lambda grad: copy.copy(grad).mul_(2),
    "apply_": lambda grad: grad.apply_(lambda value: 2 * value),
    "out": lambda grad: torch.mul(torch.ones(3, 4), 2, out=grad),
    "copy_": lambda grad: grad.copy_(torch.ones(3, 4)),
    "assigned": lambda grad: grad.__setitem__((0, 0), 7.0),
    "clip": lambda grad: torch.nn.utils.clip_grads_with_norm_(
        [given(grad)], 0.1, torch.tensor(3.0)
    ),
}


def given(grad: Tensor) -> nn.Parameter:
    """A parameter with a gradient."""
    parameter = nn.Parameter(torch.zeros(3, 4))
    parameter.grad = grad
    return parameter


@pytest.mark.parametrize("write", WRITES)
def test_what_changes_it_is_noticed(write: str) -> None:
    """It then is a value of this process, which travels with the step."""
    value = torch.randn(3, 4)
    plain, grad = value.clone(), Store().grad(value, value.clone())
    WRITES[write](plain)
    WRITES[write](grad)
    assert not lies_remote(grad)
    assert torch.equal(local(grad), plain)
    assert not torch.equal(plain, value)


def test_its_address_is_an_error() -> None:
    """Where torch is asked for it past its methods. Reading there ended the process."""
    value = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(Store().grad(value, value))


def test_its_data_can_be_replaced() -> None:
    """By other contents of its shape."""
    leaf = nn.Parameter(torch.zeros(3))
    leaf.grad = Store().grad(leaf, torch.ones(3))
    assert lies_remote(leaf.grad.data)
    leaf.grad.data = torch.full((3,), 7.0)
    assert not lies_remote(leaf.grad) and torch.equal(local(leaf.grad), torch.full((3,), 7.0))
    leaf.grad.data.mul_(2)
    assert torch.equal(leaf.grad + 0, torch.full((3,), 14.0))
    with pytest.raises(RuntimeError, match="grad instead"):
        leaf.grad.data = torch.zeros(4)
