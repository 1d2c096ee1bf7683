"""The autograd seam: one trip per pass, graphs that live as long as torch's, any order, no
cycles.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import cycles
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, ExecutorClosed, Options
from raydp_parallel.batch import register_batch_type

REPLICAS = (1, 2, 3)


@pytest.fixture(params=REPLICAS)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Replicas in this process, as many as asked for."""
    with Executor(["cpu"] * request.param, options=Options(in_process=True)) as found:
        yield found


def trips(executor: Executor) -> int:
    """How often backward went to the replicas."""
    return executor.stats().backwards


def graphs(executor: Executor) -> int:
    """How many graphs the replicas hold, once they heard of what was dropped."""
    return sum(held for _, held in executor.flush())


class TwoHeads(nn.Module):
    """Two outputs that share nothing, and a part that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Something that has derivatives of every order."""
        return torch.tanh(self.one(x)), torch.tanh(self.two(x))


def critic() -> nn.Module:
    """A small network with second derivatives that are not zero."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def rows() -> Tensor:
    """Six rows of input."""
    return torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)


def both(module: nn.Module, executor: Executor) -> tuple[nn.Module, nn.Module, DataParallel[Any]]:
    """A plain module, its twin, and the twin's wrapper."""
    twin = copy.deepcopy(module)
    return module, twin, DataParallel(twin, executor=executor)


def assert_grads(ours: nn.Module, plain: nn.Module) -> None:
    """The same gradients; where the plain module has none, zeros, or none on a single device (row
    B3).
    """
    for name, parameter in plain.named_parameters():
        grad = ours.get_parameter(name).grad
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if grad is None and parameter.grad is None:
            continue
        assert grad is not None, name
        torch.testing.assert_close(grad, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_B8_one_trip_per_pass(executor: Executor) -> None:
    """Both outputs in one pass are one trip; a pass for each, without retain_graph, is two, and
    frees everything.
    """
    plain, ours, model = both(TwoHeads().double(), executor)
    a, b = model(rows())
    (a.sum() + 2 * b.sum()).backward()
    assert trips(executor) == 1
    a, b = model(rows())
    a.sum().backward()
    b.sum().backward()
    assert trips(executor) == 3
    assert graphs(executor) == 0
    one, two = plain(rows())
    (2 * one.sum() + 3 * two.sum()).backward()
    assert_grads(ours, plain)


def test_several_losses_on_one_output_are_one_trip(executor: Executor) -> None:
    """However often and in whatever pieces an output is used."""
    _, _, model = both(critic(), executor)
    out = model(rows())
    (out[:1].sum() + out[-1:].square().sum() + (out * 2).mean()).backward()
    assert trips(executor) == 1


def test_outputs_that_receive_one_gradient(executor: Executor) -> None:
    """Both summands of a sum get the same tensor for a gradient, at every order."""
    plain, ours, model = both(TwoHeads().double(), executor)
    for net in (plain, model):
        x = rows().requires_grad_()
        one, two = net(x)
        value = (one + two).pow(3).sum()
        value.backward(retain_graph=True)
        for _ in range(2):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = grad.pow(2).sum()
        value.backward()
    assert_grads(ours, plain)


def test_leaves_that_receive_one_gradient(executor: Executor) -> None:
    """Two weights that the module adds: their gradients are summed over chunks once each."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.one + self.two)

    plain, _, model = both(Sum().double(), executor)
    x = rows()
    expected = torch.autograd.grad(plain(x).sum(), [*plain.parameters()])
    found = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    torch.testing.assert_close(found, expected)


def test_B10_one_trip_per_forward(executor: Executor) -> None:
    """Three forwards, one backward: three calls to differentiate."""
    plain, ours, model = both(critic(), executor)
    sum(model(rows() + i).sum() for i in range(3)).backward()
    assert trips(executor) == 3
    sum(plain(rows() + i).sum() for i in range(3)).backward()
    assert_grads(ours, plain)


def test_an_output_that_nobody_uses_costs_nothing(executor: Executor) -> None:
    """No trip for a pass that does not reach the module."""
    _, _, model = both(TwoHeads().double(), executor)
    x = rows().requires_grad_()
    model(x)
    x.sum().backward()
    assert trips(executor) == 0


def test_what_is_joined_has_one_node(executor: Executor) -> None:
    """Chunks of a tensor that is gathered are differentiated together; outputs that share nothing
    are not.
    """
    _, _, model = both(TwoHeads().double(), executor)
    a, b = model(rows())
    nodes = [{node for node, _ in joined.grad_fn.next_functions} for joined in (a, b)]
    if len(executor.device_ids) > 1:
        assert [*map(len, nodes)] == [1, 1]
    assert nodes[0] != nodes[1] or len(executor.device_ids) == 1
    a.sum().backward()
    b.sum().backward()  # without retain_graph, as in one process


class Parts:
    """What gather does not know, and leaves in chunks."""

    def __init__(self, a: Tensor) -> None:
        self.a = a


@pytest.mark.parametrize("way", ["unknown", "registered", "by hand"])
def test_what_is_not_joined_is_differentiated_apart(executor: Executor, way: str) -> None:
    """Each chunk's output in a pass of its own, without retain_graph."""

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return Parts(y) if way == "unknown" else (y, y * 2)

    plain, ours, model = both(Net(4, 2).double(), executor)
    rules: Any = contextlib.nullcontext()
    if way == "registered":
        rules = register_batch_type(tuple, scatter=split_rows, gather=lambda parts, *_: list(parts))
    with rules:
        if way == "by hand":
            replicas = model.replicate(ours, model.device_ids)
            outputs = model.parallel_apply(
                replicas, *model.scatter((rows(),), {}, model.device_ids)
            )
        else:
            outputs = model(rows())
    for output in outputs if isinstance(outputs, list) else [outputs]:
        (output.a if way == "unknown" else output[1]).sum().backward()
    whole = plain(rows())
    (whole.a if way == "unknown" else whole[1]).sum().backward()
    assert_grads(ours, plain)


def split_rows(value: tuple[Any, ...], chunks: int, dim: int) -> list[tuple[Any, ...]]:
    """A tuple's tensors cut, as it would be without rules."""
    return [*zip(*[part.chunk(chunks, dim) for part in value], strict=True)]


def test_a_chunk_may_lack_what_others_have(executor: Executor) -> None:
    """A gradient."""

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.detach() if x[0, 0] < -0.99 else y

    plain, ours, model = both(Net(4, 2).double(), executor)
    chunks = rows().chunk(len(executor.device_ids))
    output = model(rows())
    expected = torch.cat([plain(chunk) for chunk in chunks])
    torch.testing.assert_close(output, expected)
    if expected.requires_grad:
        output.sum().backward()
        expected.sum().backward()
        assert_grads(ours, plain)


def test_B7_a_freed_graph_raises_torchs_error(executor: Executor) -> None:
    """In torch's words, before any trip; a retained one may be used again."""
    _, _, model = both(TwoHeads().double(), executor)
    a, b = model(rows())
    a.sum().backward(retain_graph=True)
    a.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        a.sum().backward()
    assert trips(executor) == 2
    b.sum().backward()
    assert graphs(executor) == 0


def gradient_penalty(net: Callable[[Tensor], Tensor]) -> Tensor:
    """A WGAN's critic loss."""
    x = rows().requires_grad_()
    y = net(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (g.norm(dim=1) - 1).square().mean() + y.mean()


def test_B6_second_order_through_parameters(executor: Executor) -> None:
    """A gradient penalty, twice; afterwards the replicas hold no graph."""
    plain, ours, model = both(critic(), executor)
    for _ in range(2):
        gradient_penalty(model).backward()
        gradient_penalty(plain).backward()
    assert_grads(ours, plain)
    gc.collect()
    assert graphs(executor) == 0


def third_order(net: Callable[[Tensor], Tensor]) -> Tensor:
    """A derivative of a derivative of a derivative, with respect to the input."""
    x = rows().requires_grad_()
    (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.pow(2).sum(), x, create_graph=True)
    return torch.autograd.grad(h.pow(2).sum(), x)[0]


def test_B6_third_order(executor: Executor) -> None:
    """As the plain module's."""
    plain, _, model = both(critic(), executor)
    torch.testing.assert_close(third_order(model), third_order(plain))
    gc.collect()
    assert graphs(executor) == 0


def hessian_vector(net: Any, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    """A Hessian-vector product over the parameters."""
    grads = torch.autograd.grad(net(rows()).square().sum(), parameters, create_graph=True)
    return torch.autograd.grad(sum((g * (i + 1)).sum() for i, g in enumerate(grads)), parameters)


def test_B6_hessian_vector_products(executor: Executor) -> None:
    """Second order with respect to the parameters alone; the input has no gradient."""
    plain, ours, model = both(critic(), executor)
    found = hessian_vector(model, [*ours.parameters()])
    expected = hessian_vector(plain, [*plain.parameters()])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_B6_gradcheck(executor: Executor) -> None:
    """Against finite differences, first and second order, inputs and parameters."""
    _, ours, model = both(nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double(), executor)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    inputs = (x, *ours.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: model(x), inputs)
    assert torch.autograd.gradgradcheck(lambda x, *_: model(x), inputs)


def test_create_graph_and_first_order_on_one_graph(executor: Executor) -> None:
    """A derived graph may be dropped, and the first still be used."""
    plain, ours, model = both(critic(), executor)
    for net in (plain, model):
        x = rows().requires_grad_()
        y = net(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        del g
        y.sum().backward()
    assert_grads(ours, plain)
    gc.collect()
    assert graphs(executor) == 0


@pytest.mark.parametrize("wanted", ("0.weight", "2.bias"))
def test_autograd_grad_asks_for_what_is_asked(executor: Executor, wanted: str) -> None:
    """One parameter's gradient travels, not all of them."""
    plain, ours, model = both(critic(), executor)
    out = model(rows())
    before = sum(r.bytes_out for r in executor.stats().replicas)
    (found,) = torch.autograd.grad(out.sum(), ours.get_parameter(wanted))
    (expected,) = torch.autograd.grad(plain(rows()).sum(), plain.get_parameter(wanted))
    torch.testing.assert_close(found, expected)
    moved = sum(r.bytes_out for r in executor.stats().replicas) - before
    assert moved <= len(executor.replicas()) * (found.nbytes + 64)
    assert all(p.grad is None for p in ours.parameters())


def test_B12_a_dropped_output_frees_the_remote_graph(executor: Executor) -> None:
    """By its last reference alone: the collector has nothing to do."""
    _, _, model = both(critic(), executor)

    def dropped() -> None:
        y = model(rows().requires_grad_())
        assert graphs(executor) == len(executor.replicas())
        del y
        assert graphs(executor) == 0

    assert cycles(dropped) == []


@pytest.mark.parametrize(
    "loss", (lambda net: net(rows()).sum(), gradient_penalty), ids=("first order", "second order")
)
def test_B12_a_step_makes_no_cycles(executor: Executor, loss: Callable[[Any], Tensor]) -> None:
    """Forward and backward, of first and second order, leave nothing for the collector."""
    plain, _, model = both(critic(), executor)

    def left(net: Any) -> int:
        loss(net).backward()
        return len(cycles(lambda: loss(net).backward()))

    assert left(model) <= left(plain)
    assert graphs(executor) == 0


def test_B12_a_graph_lives_as_long_as_any_output(executor: Executor) -> None:
    """One of two outputs is enough."""
    _, _, model = both(TwoHeads().double(), executor)
    a, b = model(rows())
    del a
    assert graphs(executor) == len(executor.replicas())
    b.sum().backward()
    assert graphs(executor) == 0


def test_B1_hooks_see_the_sum_once(executor: Executor) -> None:
    """Tensor hooks and post-accumulate hooks of the master's parameters."""
    plain, ours, model = both(critic(), executor)
    seen: list[Tensor] = []
    after: list[str] = []
    weight = ours.get_parameter("0.weight")
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    weight.register_post_accumulate_grad_hook(lambda _: after.append("once"))
    model(rows()).sum().backward()
    plain(rows()).sum().backward()
    assert after == ["once"]
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], plain.get_parameter("0.weight").grad)


def test_an_output_may_be_written_to_in_place(executor: Executor) -> None:
    """It is a tensor of its own, not a view of one."""
    plain, ours, model = both(critic(), executor)
    for net in (plain, model):
        net(rows()).mul_(3).sum().backward()
    assert_grads(ours, plain)


def test_nothing_is_recorded_without_gradients(executor: Executor) -> None:
    """Under no_grad, and for a frozen module, there is no graph at either end."""
    _, ours, model = both(critic(), executor)
    with torch.no_grad():
        assert model(rows()).grad_fn is None
    ours.requires_grad_(False)
    assert model(rows()).grad_fn is None
    assert graphs(executor) == 0


@pytest.mark.parametrize("create_graph", (False, True))
def test_backward_after_close_says_what_happened(create_graph: bool, executor: Executor) -> None:
    """The graphs ended with the replicas."""
    model = DataParallel(critic(), executor=executor)
    loss = model(rows()).sum()
    executor.close()
    with pytest.raises(
        ExecutorClosed,
        match=r"backward: the executor was closed, by "
        r"close\(\) or shutdown\(\)",
    ):
        loss.backward(create_graph=create_graph)
