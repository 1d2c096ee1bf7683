"""Section 1.7 of the contract: gradients through remote replicas are those of upstream and of the
plain module.
"""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from collections import Counter
from typing import Any

import oracle
import pytest
import torch
from harness import Trio, assert_same_grads, assert_same_state, raised, trio
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import raydp_parallel
from raydp_parallel import DataParallel, Options

pytestmark = pytest.mark.usefixtures("cluster")

TWICE = "Trying to backward through the graph a second time"
IN_PLACE = "modified by an inplace operation"


def mlp(width: int = 5) -> nn.Sequential:
    """A small smooth net, so that derivatives of every order are not zero."""
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


_numbers = torch.Generator()


@pytest.fixture(autouse=True)
def fixed_inputs() -> None:
    """Inputs have a generator of their own: every forward draws a seed from torch's."""
    _numbers.manual_seed(0)


def data(*shape: int, **kwargs: Any) -> Tensor:
    """An input."""
    return torch.randn(*shape, generator=_numbers, **kwargs)


def leaf(*shape: int, **kwargs: Any) -> Tensor:
    """An input that requires a gradient."""
    return data(*shape, **kwargs).requires_grad_()


def same(found: Any, expected: Any, path: str = "") -> None:
    """Both are equal, whatever they are made of; where one has None, so has the other."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, msg=lambda text: f"{path}: {text}")
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        same(list(found.values()), list(expected.values()), path)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, f"{path}[{i}]")
    else:
        assert found == expected, f"{path}: {found} and {expected}"


def parity(
    module: nn.Module,
    use: Any,
    replicas: int = 2,
    *,
    plain: bool = True,
    upstream: bool = True,
    **kwargs: Any,
) -> Trio:
    """Do the same with each of the three models; results, gradients and state must agree.

    Args:
        module: The module.
        use: Called with each model; what it returns is compared.
        replicas: How many.
        plain: Whether the plain module does so too.
        upstream: Whether upstream does.
        kwargs: For the wrappers.
    """
    models = trio(module, replicas, **kwargs)
    expected = [*([models.theirs] if upstream else []), *([models.plain] if plain else [])]
    _numbers.manual_seed(1)
    result = use(models.ours)
    for model in expected:
        _numbers.manual_seed(1)
        same(result, use(model), type(model).__module__)
        assert_same_grads(models.ours, model)
    if upstream:
        assert_same_state(models.ours, models.theirs)
    return models


def wrap(module: nn.Module, replicas: int = 2, **options: Any) -> DataParallel[Any]:
    """The module under our wrapper, on CPU replicas."""
    return DataParallel(module, ["cpu"] * replicas, options=Options(**options) if options else None)


def graphs(model: DataParallel[Any]) -> list[int]:
    """How many graphs each replica of this process holds."""
    return [held for _, held in model.executor.flush()]


def bytes_out(model: DataParallel[Any]) -> int:
    """How many bytes of tensors came from the replicas so far."""
    return sum(replica.bytes_out for replica in model.executor.stats().replicas)


# --- B1: sums, once ---


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_B1_gradients_are_sums_over_replicas(replicas):
    """Seven rows, on any number of replicas: output, input gradient and parameter gradients."""

    def use(model):
        x = leaf(7, 3)
        out = model(x)
        (out * torch.arange(14.0).view(7, 2)).sum().backward()
        return out.detach(), x.grad

    parity(mlp(), use, replicas)


def test_B1_gradients_accumulate_in_place():
    """A second backward adds to the same ``.grad`` tensors, as an optimizer expects."""
    model = wrap(mlp())
    x = data(4, 3)
    model(x).sum().backward()
    first = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    model(x).sum().backward()
    for name, p in model.named_parameters():
        kept, before = first[name]
        assert p.grad is kept
        torch.testing.assert_close(p.grad, 2 * before)


def test_B1_gradient_may_be_changed_by_its_owner():
    """Gradients lie in writable memory of their own, one apart from the other."""
    model = wrap(mlp())
    model(data(4, 3)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    before = [g.clone() for g in grads]
    grads[0].fill_(7)
    same(grads[1:], before[1:])
    assert torch.equal(grads[0], torch.full_like(grads[0], 7))
    assert len({g.untyped_storage().data_ptr() for g in grads}) == len(grads)


@pytest.mark.parametrize("replicas", [2, 3])
def test_B1_tensor_hook_fires_once_with_the_sum(replicas):
    """A parameter's hook sees the whole gradient once per backward, and may replace it."""

    def use(model):
        weight, bias = list(model.parameters())[:2]
        seen = []
        weight.register_hook(lambda grad: seen.append(grad.clone()))
        bias.register_hook(lambda grad: grad * 3)
        x = data(6, 3)
        model(x).square().sum().backward()
        assert len(seen) == 1
        model(x).sum().backward()
        assert len(seen) == 2
        return seen

    parity(mlp(), use, replicas)


def test_B1_post_accumulate_hook_fires_once():
    """So an optimizer that steps in the hook works."""

    def use(model):
        fired = Counter()

        def step(name):
            def hook(p):
                fired[name] += 1
                with torch.no_grad():
                    p -= 0.1 * p.grad
                p.grad = None

            return hook

        for i, p in enumerate(model.parameters()):
            p.register_post_accumulate_grad_hook(step(i))
        for _ in range(2):
            model(data(5, 3)).square().sum().backward()
        return sorted(fired.items()), [p.detach().clone() for p in model.parameters()]

    parity(mlp(), use)


def test_B1_multi_grad_hook_fires_once():
    """`register_multi_grad_hook` over all parameters."""

    def use(model):
        seen = []
        params = list(model.parameters())
        torch.autograd.graph.register_multi_grad_hook(
            params, lambda grads: seen.append([g.clone() for g in grads])
        )
        model(data(5, 3)).square().sum().backward()
        return seen

    parity(mlp(), use)


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(x).tanh())


def test_B1_tied_parameter_gets_one_gradient():
    """The gradient of both uses in all replicas, and one call of its hook."""

    def use(model):
        seen = []
        next(model.parameters()).register_hook(lambda grad: seen.append(grad.clone()))
        model(data(5, 3)).square().sum().backward()
        assert len(seen) == 1
        return seen

    parity(Tied(), use)


def test_B1_same_input_as_two_arguments():
    """A leaf that is passed twice gets both gradients."""

    def use(model):
        x = leaf(5, 3)
        model(x, x).sum().backward()
        return x.grad

    parity(nn.Bilinear(3, 3, 2), use)


def test_B1_leaf_shared_by_two_calls():
    """An input that goes through the model twice gets the sum."""

    def use(model):
        x = leaf(5, 3)
        (model(x).sum() + model(2 * x).square().sum()).backward()
        return x.grad

    parity(mlp(), use)


class Keyword(nn.Module):
    """Takes tensors deep in its arguments."""

    def forward(self, pair, *, extra):
        return pair[0] * pair[1]["b"] + extra["scale"]


def test_B1_gradients_of_nested_and_keyword_inputs():
    """Inputs anywhere in the arguments get their gradients."""

    def use(model):
        a, b, scale = leaf(5, 3), leaf(5, 3), leaf(5, 1)
        model((a, {"b": b, "n": 3}), extra={"scale": scale}).square().sum().backward()
        return a.grad, b.grad, scale.grad

    parity(Keyword(), use)


def test_B1_non_leaf_inputs():
    """Gradients flow on into what produced the input: a wrapped block in the middle of a model."""

    def use(model):
        torch.manual_seed(1)
        before, after = nn.Linear(4, 3), nn.Linear(2, 1)
        after(model(before(data(5, 4)).tanh())).sum().backward()
        return [p.grad for p in (*before.parameters(), *after.parameters())]

    parity(mlp(), use)


def test_B1_frozen_module_passes_the_input_gradient():
    """No parameter wants a gradient, an input does."""

    def use(model):
        x = leaf(5, 3)
        model.requires_grad_(False)
        model(x).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        return x.grad

    parity(mlp(), use)


class WithBuffer(nn.Module):
    """A buffer that takes part in differentiation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("shift", torch.randn(3, requires_grad=True))

    def forward(self, x):
        return (x + self.shift).square() * self.weight


def test_B1_buffer_that_requires_grad():
    """A buffer's gradient is the sum too."""

    def use(model):
        model(data(5, 3)).sum().backward()
        return [b.grad for b in model.buffers()]

    parity(WithBuffer(), use)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_B1_other_dtypes(dtype):
    """Gradients have their parameter's dtype."""

    def use(model):
        x = data(4, 3).to(dtype).requires_grad_()
        out = model(x)
        out.float().square().sum().backward()
        assert {p.grad.dtype for p in model.parameters()} == {dtype}
        return out.detach(), x.grad

    parity(mlp().to(dtype), use, plain=dtype is torch.float64)


def test_B1_mixed_dtypes():
    """A half frozen, half double module: each gradient as its parameter."""

    class_ = MixedDtypes()

    def use(model):
        x = leaf(5, 3)
        model(x).sum().backward()
        return x.grad

    parity(class_, use)


class MixedDtypes(nn.Module):
    """A float and a double layer."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 2).double()
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x):
        return self.two(self.one(x).tanh().double()).float() + self.empty.sum()


class ComplexNet(nn.Module):
    """A complex weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(2))

    def forward(self, x):
        return x.to(torch.complex64) @ self.weight + self.bias


@pytest.mark.upstream
@pytest.mark.parametrize("order", [1, 2])
def test_B1_complex_parameters(order):
    """Complex parameters and outputs get complex gradients."""

    def use(model):
        x = leaf(5, 3)
        out = model(x)
        loss = (out * out.conj()).real.square().sum()
        if order == 2:
            loss = torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        loss.backward()
        return out.detach(), x.grad

    parity(ComplexNet(), use)


def test_B1_complex_inputs():
    """A conjugated view as input, and its gradient."""

    def use(model):
        x = leaf(5, 3, dtype=torch.complex64)
        model(x.conj()).abs().sum().backward()
        return x.grad

    parity(ComplexNet(), use, upstream=False)  # upstream refuses conjugated views


def test_B1_channels_last_gradients_keep_their_strides():
    """Gradients of channels_last weights are laid out as the weights (row R18)."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(
        memory_format=torch.channels_last
    )

    def use(model):
        x = data(4, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
        out = model(x)
        out.square().sum().backward()
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert x.grad.is_contiguous(memory_format=torch.channels_last)
        for p in model.parameters():
            assert p.grad.stride() == p.stride()
        return out.detach(), x.grad

    parity(net, use)


def test_B1_transposed_weight_keeps_its_strides():
    """A weight that is not contiguous, and the zeros of one that is unused."""

    def use(model):
        model(data(4, 3)).sum().backward()
        return [p.grad.stride() for p in model.parameters()]

    net = nn.Linear(3, 2)
    net.weight = nn.Parameter(torch.randn(3, 2).t())
    parity(net, use)


def test_B1_expanded_gradient():
    """The gradient of ``sum`` is an expanded tensor, and a transposed one arrives too."""

    def use(model):
        x = leaf(6, 3)
        out = model(x)
        torch.autograd.backward(out, data(2, 6).t(), retain_graph=True)
        out.sum().backward()
        return x.grad

    parity(mlp(), use)


def test_B1_batch_along_another_dimension():
    """With ``dim=1`` inputs and gradients are split along it."""

    def use(model):
        x = leaf(4, 7, 3)
        out = model(x)
        out.square().sum().backward()
        return out.detach(), x.grad

    parity(mlp(), use, 3, dim=1)


def test_B1_expanded_input():
    """An input with rows that share memory: its leaf gets the sum over rows."""

    def use(model):
        x = leaf(1, 3)
        model(x.expand(6, 3)).square().sum().backward()
        return x.grad

    parity(mlp(), use)


def test_B1_empty_batch():
    """No rows give zero gradients."""

    def use(model):
        x = leaf(0, 3)
        model(x).sum().backward()
        return x.grad

    parity(mlp(), use)


def test_B1_fewer_rows_than_replicas():
    """Replicas without a chunk contribute nothing."""

    def use(model):
        x = leaf(2, 3)
        model(x).square().sum().backward()
        return x.grad

    parity(mlp(), use, 4)


def test_B1_large_gradients():
    """Gradients too large to ride in the call, and writable as any."""

    def use(model):
        x = leaf(8, 300)
        model(x).square().mean().backward()
        for p in model.parameters():
            p.grad.mul_(2)
        return x.grad

    parity(nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 4)), use, 3)


def test_B1_autocast():
    """A forward under autocast, its backward outside."""

    def use(model):
        x = leaf(6, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        assert out.dtype is torch.bfloat16
        out.float().sum().backward()
        return out.detach(), x.grad

    # upstream knows no CPU autocast; more chunks round otherwise
    parity(nn.Linear(3, 2), use, 1, upstream=False)


# --- B2: hooks of modules ---


def marked(_module, _args, output):
    """A forward hook that adds a row."""
    return torch.cat([output, output.new_full((1, output.shape[1]), 5.0)])


def shifted(_module, args):
    """A forward pre-hook that changes the input."""
    return (args[0] + 1,)


def doubled(_module, grad_input, _grad_output):
    """A full backward hook that changes the gradient of the input."""
    return tuple(None if g is None else 2 * g for g in grad_input)


def halved(_module, grad_output):
    """A full backward pre-hook that changes the gradient of the output."""
    return tuple(None if g is None else g / 2 for g in grad_output)


def counting(module, *_):
    """A hook of any kind that counts in a buffer."""
    module.count += 1


@pytest.mark.parametrize("replicas", [2, 3])
def test_B2_forward_hooks_fire_once_per_replica(replicas):
    """Each replica's hook adds a row to its chunk's output."""
    net = mlp()
    net[0].register_forward_pre_hook(shifted)
    net.register_forward_hook(marked)

    def use(model):
        x = leaf(6, 3)
        out = model(x)
        assert len(out) == 6 + replicas
        out.sum().backward()
        return out.detach(), x.grad

    parity(net, use, replicas, plain=False)


def test_B2_backward_hooks_change_gradients_in_replicas():
    """Full backward hooks and pre-hooks change what flows below them, in every replica."""
    net = mlp()
    net[2].register_full_backward_hook(doubled)
    net[0].register_full_backward_pre_hook(halved)

    def use(model):
        x = leaf(6, 3)
        model(x).square().sum().backward()
        return x.grad

    models = parity(net, use)
    bare = mlp()
    bare.load_state_dict(net.state_dict())
    _numbers.manual_seed(1)
    bare(leaf(6, 3)).square().sum().backward()
    assert_same_grads(models.ours, bare)  # halving undoes doubling below the last layer
    net[2].register_full_backward_hook(doubled)
    parity(net, use)


def test_B2_hooks_fire_once_in_chunk_0():
    """Hooks that count in a buffer: the master sees those of chunk 0, one each per pass."""
    net = mlp()
    net.register_buffer("count", torch.zeros(()))
    net.register_forward_pre_hook(counting)
    net.register_forward_hook(counting)

    def use(model):
        for _ in range(3):
            model(data(4, 3)).sum().backward()
        return dict(model.named_buffers()).popitem()[1].clone()

    models = parity(net, use)
    assert models.ours.module.count == 6


def test_B2_wrapper_hooks_fire_once():
    """Hooks on the wrapper run in the driver, around the whole batch."""
    fired = Counter()

    def use(model):
        handles = [
            model.register_forward_pre_hook(lambda _m, args: fired.update(pre=len(args[0]))),
            model.register_forward_hook(lambda _m, _a, out: fired.update(forward=len(out))),
            model.register_full_backward_pre_hook(
                lambda _m, grads: fired.update(backward_pre=len(grads[0]))
            ),
            model.register_full_backward_hook(lambda _m, gi, _g: (gi[0] * 2,)),
        ]
        x = leaf(5, 3)
        model(x).sum().backward()
        for handle in handles:
            handle.remove()
        return x.grad

    parity(mlp(), use)
    assert fired == {"pre": 15, "forward": 15, "backward_pre": 15}


# --- B3, B4: parameters that are not used ---


class Branches(nn.Module):
    """Uses one of two layers, or none."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 2)
        self.two = nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x, which="one"):
        return x * 2 if which == "none" else getattr(self, which)(x) * self.frozen


class BySign(Branches):
    """Chunks that start with a positive number use one layer, others the other."""

    def forward(self, x):
        return self.one(x) if x[0, 0] > 0 else self.two(x)


def test_B3_unused_parameters_get_zeros():
    """As soon as any parameter gets a gradient, those that no replica used get zeros, and weight
    decay moves them.
    """

    def use(model):
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.5
        )
        model(data(4, 3)).sum().backward()
        optimizer.step()

    models = parity(Branches(), use, plain=False)
    net = models.ours.module
    assert torch.equal(net.two.weight.grad, torch.zeros(2, 3))
    assert net.frozen.grad is None


def test_B3_no_zeros_where_no_parameter_is_used():
    """Then upstream's broadcast is not part of the graph."""

    def use(model):
        x = leaf(4, 3)
        model(x, which="none").sum().backward()
        return x.grad

    models = parity(Branches(), use)
    assert models.ours.module.one.weight.grad is None


def test_B3_unused_in_one_call_only():
    """Zeros are added to what an earlier call gave."""

    def use(model):
        x = data(4, 3)
        model(x, which="two").sum().backward()
        before = [p.grad.clone() for p in model.parameters() if p.requires_grad]
        model(x).sum().backward()
        return before

    parity(Branches(), use, plain=False)


def test_B3_option_none_is_the_plain_module():
    """``Options(unused_grads="none")`` leaves the gradients of unused parameters None."""
    models = trio(Branches(), 2, options=Options(unused_grads="none"))
    x = data(4, 3)
    for model in (models.ours, models.plain):
        model(x).sum().backward()
    assert_same_grads(models.ours, models.plain)
    assert models.ours.module.two.weight.grad is None


def test_B3_option_none_still_gives_what_one_replica_used():
    """None is for what no replica used."""
    models = trio(BySign(), 2, options=Options(unused_grads="none"))
    x = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 2.0, 3.0]])
    models.ours(x).sum().backward()
    models.theirs(x).sum().backward()
    assert_same_grads(models.ours, models.theirs)


def test_B3_unused_input_gets_none():
    """Zeros are for parameters: an input that no replica used keeps None, as in the plain
    module.
    """

    def use(model):
        x, y = leaf(4, 3), leaf(4, 3)
        model(x, y).sum().backward()
        return x.grad, y.grad

    parity(FirstOnly(), use)


class FirstOnly(nn.Module):
    """Ignores its second argument."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, y):
        return self.layer(x)


def test_B4_grad_of_unused_parameters_is_zeros():
    """`autograd.grad` with respect to them succeeds, without ``allow_unused``."""

    def use(model):
        unused = [p for name, p in model.named_parameters() if "two" in name]
        used = [p for name, p in model.named_parameters() if "one" in name]
        return torch.autograd.grad(model(data(4, 3)).sum(), [*unused, *used])

    parity(Branches(), use, plain=False)


@pytest.mark.parametrize("allow_unused", [False, True])
def test_B4_grad_of_unused_under_option_none(allow_unused):
    """With ``unused_grads="none"`` it is as in the plain module: an error, or None if allowed."""
    models = trio(Branches(), 2, options=Options(unused_grads="none"))
    results = []
    for model in (models.ours, models.plain):
        by_name = {name.removeprefix("module."): p for name, p in model.named_parameters()}
        out = model(torch.ones(4, 3)).sum()
        wanted = [by_name["one.weight"], by_name["two.weight"]]
        if allow_unused:
            results.append(torch.autograd.grad(out, wanted, allow_unused=True))
        else:
            results.append(
                type(raised(lambda out=out, wanted=wanted: torch.autograd.grad(out, wanted)))
            )
    same(*results)


def test_B4_allow_unused_for_strangers():
    """A tensor that has nothing to do with the call: an error, or None if allowed, and the rest is
    right.
    """

    def use(model):
        stranger, x = leaf(3), leaf(4, 3)
        out = model(x).sum()
        error = raised(lambda: torch.autograd.grad(out, [x, stranger], retain_graph=True))
        assert isinstance(error, RuntimeError)
        return torch.autograd.grad(out, [x, stranger], allow_unused=True)

    parity(mlp(), use)


# --- B5: parameters that some replicas use; sparse gradients ---


def test_B5_parameter_used_by_one_replica_only():
    """It gets the gradient of that replica."""

    def use(model):
        model(torch.tensor([[1.0, 2.0, 3.0], [-1.0, 2.0, 3.0]])).sum().backward()

    models = parity(BySign(), use, plain=False)
    assert models.ours.module.one.weight.grad.abs().sum() > 0
    assert models.ours.module.two.weight.grad.abs().sum() > 0


class Words(nn.Module):
    """A sparse embedding that chunks starting with word 0 do not use."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(6, 3, sparse=True)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, ids):
        if ids[0, 0] == 0:
            return self.scale.expand(len(ids), 3)
        return self.words(ids).sum(1) * self.scale


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_B5_sparse_gradients_in_all_replicas_stay_sparse(replicas):
    """The sum of sparse gradients is sparse, and SparseAdam takes it."""

    def use(model):
        words = next(p for p in model.parameters() if p.dim() == 2)
        model(
            torch.tensor([[1, 2], [2, 3], [3, 3], [5, 1], [1, 1], [4, 2]])
        ).square().sum().backward()
        assert words.grad.layout is torch.sparse_coo
        grad = words.grad.to_dense()
        torch.optim.SparseAdam([words], lr=0.1).step()
        result = grad, words.detach().clone()
        words.grad = grad  # the layout was looked at; compare as dense below
        return result

    parity(Words(), use, replicas)


def test_B5_sparse_gradients_in_some_replicas_are_dense():
    """A replica that did not use the embedding contributes dense zeros."""
    for rows in ([[1, 2], [0, 3]], [[0, 2], [1, 3]], [[0, 1], [1, 2], [3, 3]]):

        def use(model, rows=rows):
            words = next(p for p in model.parameters() if p.dim() == 2)
            model(torch.tensor(rows)).square().sum().backward()
            return str(words.grad.layout), words.grad.to_dense()

        parity(Words(), use, len(rows), plain=False)


def test_B5_sparse_gradients_accumulate():
    """Two backwards before a step; then one that does not use the embedding."""

    def use(model):
        words = next(p for p in model.parameters() if p.dim() == 2)
        for ids in ([[1, 2], [2, 3]], [[4, 2], [2, 2]], [[0, 0], [0, 1]]):
            model(torch.tensor(ids)).square().sum().backward()
        grad = words.grad.to_dense()
        words.grad = None
        return grad

    parity(Words(), use, plain=False)


def test_B5_sparse_gradient_through_autograd_grad():
    """`autograd.grad` gives the sparse tensor."""

    def use(model):
        words = next(p for p in model.parameters() if p.dim() == 2)
        (grad,) = torch.autograd.grad(model(torch.tensor([[1, 2], [2, 3]])).square().sum(), words)
        return str(grad.layout), grad.to_dense()

    parity(Words(), use)


def test_B5_sparse_under_option_none_stays_sparse():
    """Without zeros nothing makes the sum dense."""
    model = wrap(Words(), 2, unused_grads="none")
    model(torch.tensor([[1, 2], [0, 3]])).square().sum().backward()
    assert model.module.words.weight.grad.layout is torch.sparse_coo


# --- B6: higher orders, and autograd.grad ---


def test_B6_grad_of_inputs_and_weights():
    """`autograd.grad` gives the gradients and leaves ``.grad`` alone."""

    def use(model):
        x = leaf(5, 3)
        grads = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
        assert all(p.grad is None for p in model.parameters())
        return grads

    parity(mlp(), use)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_B6_gradient_penalty(replicas):
    """WGAN-GP: the norm of the input's gradient as a loss."""

    def use(model):
        x = leaf(6, 3)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = (grad.norm(dim=1) - 1).square().mean()
        (loss + model(data(6, 3)).mean()).backward()
        return grad.detach(), x.grad

    parity(mlp(), use, replicas, plain=False)


def test_B6_penalty_alone_gives_zeros_or_none_as_upstream():
    """The last bias has no second derivative: None in the plain module, zeros here as upstream."""

    def use(model):
        x = leaf(6, 3)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return x.grad

    models = parity(mlp(), use, plain=False)
    assert torch.equal(models.ours.module[2].bias.grad, torch.zeros(2))


@pytest.mark.parametrize("replicas", [1, 2])
def test_B6_third_order(replicas):
    """Three derivatives with respect to the input, then weights."""

    def use(model):
        x = leaf(4, 3)
        value = model(x).square().sum()
        found = []
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            found.append(grad.detach())
            value = grad.square().sum()
        value.backward()
        return found, x.grad

    parity(mlp().double(), lambda model: use(_on_doubles(model)), replicas, plain=False)


def _on_doubles(model):
    def call(x):
        return model(x.double())

    return call


def test_B6_second_order_in_the_weights():
    """A Hessian-vector product over all parameters."""

    def use(model):
        params = list(model.parameters())
        loss = model(data(5, 3)).square().sum()
        grads = torch.autograd.grad(loss, params, create_graph=True)
        vector = [data(*p.shape) for p in params]
        return torch.autograd.grad(grads, params, vector)

    parity(mlp(), use)


def test_B6_mixed_second_order():
    """The gradient of the input, differentiated by weights and back."""

    def use(model):
        x, params = leaf(5, 3), list(model.parameters())[:3]
        loss = model(x).square().sum()
        gx, *gp = torch.autograd.grad(loss, [x, *params], create_graph=True)
        by_params = torch.autograd.grad(gx.square().sum(), params, retain_graph=True)
        by_input = torch.autograd.grad([g.square().sum() for g in gp], x)
        return by_params, by_input

    parity(mlp(), use)


def test_B6_functional_hvp_and_jacobian():
    """torch's functional interface over the wrapped model."""

    def use(model):
        x, v = data(4, 3), data(4, 3)

        def loss(inputs):
            return model(inputs).pow(3).sum()

        return (
            torch.autograd.functional.hvp(loss, x, v),
            torch.autograd.functional.vhp(loss, x, v),
            torch.autograd.functional.jacobian(model, x[:2]),
            torch.autograd.functional.hessian(loss, x[:2]),
        )

    parity(mlp(), use)


def test_B6_gradcheck():
    """torch's own numerical check, first and second order."""
    model = wrap(mlp().double())
    x = data(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, x)
    assert torch.autograd.gradgradcheck(model, x)


def test_B6_create_graph_then_backward_twice():
    """A graph made by ``create_graph`` is kept only as long as torch keeps it."""

    def use(model):
        x = leaf(4, 3)
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        loss = grad.square().sum()
        loss.backward(retain_graph=True)
        once = x.grad.clone()
        loss.backward()
        torch.testing.assert_close(x.grad, 2 * once)
        error = raised(loss.backward)
        assert isinstance(error, RuntimeError)
        assert TWICE in str(error)
        return x.grad

    parity(mlp(), use, plain=False)


def test_B6_backward_with_create_graph():
    """``backward(create_graph=True)`` leaves gradients that can be differentiated."""

    def use(model):
        params = list(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the cycle that this makes
            model(data(5, 3)).square().sum().backward(create_graph=True)
        grads = [p.grad for p in params]
        assert all(g.requires_grad for g in grads)
        second = torch.autograd.grad([g.square().sum() for g in grads], params)
        for p in params:
            p.grad = p.grad.detach()  # no cycle left behind
        return second

    parity(mlp(), use)


class Clipped(nn.Module):
    """Clips the gradient of what lies between its layers, once that is added up."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.one(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad.clamp(max=0.1) + grad.pow(2))
        return self.two(hidden).sigmoid()


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("order", [2, 3, 4])
def test_B6_a_hook_made_in_forward_sees_the_sum(replicas, order):
    """What comes from the output and from its derivatives is added up before the hook sees it, to
    any order.
    """

    def use(model):
        x = leaf(6, 3)
        value = model(x).pow(3).sum()
        total, found = value, []
        for _ in range(order - 1):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            found.append(grad.detach())
            value = grad.pow(2).sum()
            total = total + value
        total.backward()
        return found, x.grad

    parity(Clipped().double(), lambda model: use(_on_doubles(model)), replicas, plain=False)


class ClippedSquare(nn.Module):
    """The square of a product, with a gradient that is clipped by a hook."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.4], dtype=torch.float64))

    def forward(self, x):
        product = x * self.weight
        product.register_hook(lambda grad: grad.clamp(-1, 1))
        return product.square()


@pytest.mark.parametrize("replicas", [1, 2])
def test_B6_a_clipped_sum_in_numbers(replicas):
    """The product receives 0.8 from the output and 0.512 from the slope: 1 together, 1.312 if each
    were clipped.

    With w = 0.4 and x = 1: the slope is s = w * 2wx = 0.32, and the loss of a row is (wx)^2 + s^2.
    Directly the weight receives 2s * 0.8 = 0.512; through the product 2s * w * 2 = 0.512 and 2wx =
    0.8, of which the hook leaves 1.
    """
    for model in trio(ClippedSquare(), replicas):
        x = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.sum() + slope.square().sum()).backward()
        (weight,) = model.parameters()
        assert weight.grad.item() == pytest.approx(2 * 1.512)


def test_B6_a_hook_made_in_forward_sees_the_sum_of_siblings():
    """Two derivatives of one output, one of which is the other's incoming gradient."""

    def use(model):
        x = leaf(6, 3)
        out = model(x)
        (one,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        (two,) = torch.autograd.grad(out, x, one[:, :2].contiguous(), create_graph=True)
        (three,) = torch.autograd.grad((one * two).sum(), x, create_graph=True)
        incoming = torch.autograd.grad(three.sum(), out, retain_graph=True)
        (out.sum() + one.pow(2).sum() + two.sum() + three.pow(2).sum()).backward()
        return three.detach(), incoming, x.grad

    parity(Clipped().double(), lambda model: use(_on_doubles(model)), plain=False)


def test_B6_first_graph_still_usable_after_create_graph():
    """The loss itself may be differentiated after its gradient was."""

    def use(model):
        x = leaf(4, 3)
        loss = model(x).square().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward()
        return x.grad

    parity(mlp(), use)


def test_B6_second_order_over_separate_outputs():
    """Each output differentiated alone, then together."""

    def use(model):
        x = leaf(4, 3)
        a, b = model(x)
        (ga,) = torch.autograd.grad(a.sum(), x, create_graph=True)
        (gb,) = torch.autograd.grad(b.sum(), x, create_graph=True)
        (ga * gb).sum().backward()
        return ga.detach(), gb.detach(), x.grad

    parity(TwoHeads(), use)


class TwoHeads(nn.Module):
    """A trunk and two heads."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.one = nn.Linear(4, 2)
        self.two = nn.Linear(4, 2)

    def forward(self, x):
        h = self.trunk(x).tanh()
        return self.one(h).sin(), self.two(h).exp()


class Sign(Function):
    """Has a gradient that does not depend on anything that requires one."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return torch.ones_like(grad).detach()


class PartlyConstant(nn.Module):
    """One of its gradients is a constant."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x, y):
        return Sign.apply(x) + (y * self.weight).square()


def test_B6_second_order_with_a_constant_gradient():
    """A gradient that cannot be differentiated further, beside one that can."""

    def use(model):
        x, y = leaf(4, 3), leaf(4, 3)
        gx, gy = torch.autograd.grad(model(x, y).sum(), [x, y], create_graph=True)
        (gx.sum() + gy.square().sum()).backward()
        return gx.detach(), gy.detach(), y.grad

    parity(PartlyConstant(), use, plain=False)


def test_B6_batchnorm_double_backward():
    """Second order through batch norm, each replica with its own statistics."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))

    def use(model):
        x = leaf(8, 3)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return grad.detach(), x.grad

    parity(net, use, plain=False)


# --- B6: only what is asked for ---


class Trap(Function):
    """Must not be differentiated."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("nothing asked for this gradient")


class Trapped(nn.Module):
    """The gradient of everything below the last layer is a trap."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 64)
        self.last = nn.Linear(64, 2)

    def forward(self, x):
        return self.last(Trap.apply(self.first(x)))


@pytest.mark.parametrize("create_graph", [False, True])
def test_B6_subset_computes_only_what_was_asked(create_graph):
    """`autograd.grad` of the last layer does not run backward below it."""

    def use(model):
        last = list(model.parameters())[2:]
        out = model(data(4, 3)).square().sum()
        found = torch.autograd.grad(out, last, retain_graph=True, create_graph=create_graph)
        assert "nothing asked" in str(raised(out.backward))
        model.zero_grad()
        return found

    parity(Trapped(), use, upstream=False)  # upstream computes them all


def test_B6_backward_inputs_computes_only_what_was_asked():
    """``backward(inputs=...)`` likewise."""

    def use(model):
        last = list(model.parameters())[2:]
        model(data(4, 3)).square().sum().backward(inputs=last)
        assert next(model.parameters()).grad is None

    parity(Trapped(), use, upstream=False)  # upstream computes them all


def test_B6_subset_moves_only_what_was_asked():
    """The bytes that come back are those of the gradients asked for."""
    model = wrap(nn.Sequential(nn.Linear(8, 1000), nn.Linear(1000, 2)))
    x = leaf(4, 8)
    out = model(x).sum()
    before = bytes_out(model)
    torch.autograd.grad(out, model.module[1].bias, retain_graph=True)
    small = bytes_out(model)
    torch.autograd.grad(out, x, retain_graph=True)
    inputs = bytes_out(model)
    out.backward()
    everything = bytes_out(model)
    assert small - before < 1000
    assert inputs - small < 1000
    assert everything - inputs > 2 * 4 * 8 * 1000


def test_B6_frozen_parameters_are_not_moved():
    """Nothing comes back for parameters that want no gradient."""
    model = wrap(nn.Sequential(nn.Linear(8, 1000), nn.Linear(1000, 2)))
    model.module[0].requires_grad_(False)
    out = model(data(4, 8)).sum()
    before = bytes_out(model)
    out.backward()
    assert bytes_out(model) - before < 2 * (4 * 2002 + 1000)
    assert model.module[0].weight.grad is None


def test_B6_grad_of_a_non_leaf_input():
    """Captured in the middle of the graph: nothing beyond it is computed."""

    def use(model):
        x = leaf(4, 3)
        middle = x * 2
        (grad,) = torch.autograd.grad(model(middle).square().sum(), middle)
        assert x.grad is None
        return grad

    parity(mlp(), use)


def test_B6_unrelated_outputs_cost_nothing():
    """Nothing goes to the replicas where only something else is differentiated."""
    model = wrap(mlp())
    out, other = model(data(4, 3)), leaf(3)
    before = model.executor.stats().backwards
    (grad,) = torch.autograd.grad((other * 2).sum() + 0 * out.detach().sum(), other)
    assert model.executor.stats().backwards == before
    assert torch.equal(grad, torch.full((3,), 2.0))


def test_B6_one_trip_per_pass():
    """However many outputs and hooks, a backward goes to the replicas once."""
    model = wrap(TwoHeads())
    a, b = model(leaf(4, 3))
    before = model.executor.stats().backwards
    (a.sum() + b.square().sum()).backward()
    assert model.executor.stats().backwards == before + 1


def test_B6_forward_mode_is_refused(two):
    """Upstream raises torch's error; here the tangent was lost in silence where no gradient was
    wanted.
    """
    model = DataParallel(nn.Linear(3, 2).requires_grad_(False), executor=two)
    x = torch.randn(4, 3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(4, 3))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            model(dual)
        torch.testing.assert_close(model(x), model.module(x))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(model, (x,), (x,))


@pytest.mark.parametrize("transform", ["vmap", "grad", "jacrev", "batched", "vectorize"])
def test_B6_transforms_are_refused(two, transform):
    """Upstream fails there, too, as torch did here: with errors about data pointers, random
    operations and static methods.
    """
    model = DataParallel(nn.Linear(3, 2), executor=two)
    x = torch.randn(4, 3)

    def summed(x):
        return model(x).sum(0)

    calls = {
        "vmap": lambda: torch.func.vmap(model)(x.expand(5, 4, 3)),
        "grad": lambda: torch.func.grad(lambda x: model(x).sum())(x),
        "jacrev": lambda: torch.func.jacrev(summed)(x),
        "batched": lambda: torch.autograd.grad(
            model(x), [*model.parameters()], torch.ones(5, 4, 2), is_grads_batched=True
        ),
        "vectorize": lambda: torch.autograd.functional.jacobian(summed, x, vectorize=True),
    }
    with pytest.raises(NotImplementedError, match=r"torch\.func.*functional\.jacobian"):
        calls[transform]()
    # The way out that the error names.
    found = torch.autograd.functional.jacobian(summed, x)
    torch.testing.assert_close(found, torch.func.jacrev(lambda x: model.module(x).sum(0))(x))


# --- B7: backward twice ---


def test_B7_backward_twice_raises():
    """torch's own error, and nothing is added to gradients."""

    def use(model):
        loss = model(data(4, 3)).square().sum()
        loss.backward()
        error = raised(loss.backward)
        assert isinstance(error, RuntimeError)
        assert TWICE in str(error)

    parity(mlp(), use)


def test_B7_retain_graph():
    """Retained twice, then freed."""

    def use(model):
        x = leaf(4, 3)
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        assert TWICE in str(raised(loss.backward))
        return x.grad

    parity(mlp(), use)


def test_B7_two_losses_of_one_output():
    """The first keeps the graph for the second."""

    def use(model):
        x = leaf(4, 3)
        out = model(x)
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
        return x.grad

    parity(mlp(), use)


def test_B7_two_losses_without_retain_raise():
    """The shared part was freed by the first."""

    def use(model):
        out = model(data(4, 3))
        one, two = out.sum(), out.square().sum()
        one.backward()
        assert TWICE in str(raised(two.backward))

    parity(mlp(), use)


class Shift(nn.Module):
    """Its graph saves nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x + self.weight


@pytest.mark.xfail(
    strict=True,
    reason="a second backward raises also where the module's graph happens to save nothing",
)
def test_B7_backward_twice_through_a_graph_that_saves_nothing():
    """Plain torch and upstream let such a graph be used again without ``retain_graph``."""

    def use(model):
        loss = model(data(4, 3)).sum()
        loss.backward()
        loss.backward()

    parity(Shift(), use)


def test_B7_model_usable_after_the_error():
    """The next step is as if nothing had happened."""

    def use(model):
        loss = model(data(4, 3)).sum()
        loss.backward()
        raised(loss.backward)
        model.zero_grad()
        model(data(4, 3)).square().sum().backward()

    parity(mlp(), use)


# --- B8, B9: outputs one by one, or in part ---


class Apart(nn.Module):
    """Two heads that share nothing but parameters."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 4)
        self.two = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x, y):
        return {"one": self.one(x).tanh() * self.scale, "two": [self.two(y).tanh() * self.scale]}


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_B8_separate_backward_on_different_outputs(replicas):
    """Each output's graph is freed alone, so no ``retain_graph`` is needed."""

    def use(model):
        x, y = leaf(6, 3), leaf(6, 3)
        out = model(x, y)
        out["one"].square().sum().backward()
        first = [None if p.grad is None else p.grad.clone() for p in (x, y)]
        out["two"][0].square().sum().backward()
        assert TWICE in str(raised(out["one"].square().sum().backward))
        return first, x.grad, y.grad

    parity(Apart(), use, replicas)


def test_B8_shared_trunk_needs_retain():
    """Heads with a trunk in common: as in the plain module the second backward finds it freed."""

    def use(model):
        a, b = model(data(4, 3))
        a.sum().backward()
        error = raised(b.sum().backward)
        assert isinstance(error, RuntimeError)
        assert TWICE in str(error)
        return str(type(error))

    parity(TwoHeads(), use, plain=False)


def test_B8_unused_output_costs_nothing():
    """No gradient is sent or computed for an output that the loss does not use."""

    def use(model):
        x, y = leaf(4, 3), leaf(4, 3)
        model(x, y)["two"][0].sum().backward()
        return x.grad, y.grad

    parity(Apart(), use, plain=False)


@pytest.mark.parametrize("rows", [slice(0, 2), slice(3, 4), slice(1, 5)])
def test_B9_loss_on_a_slice(rows):
    """Replicas with unused rows receive zero gradients."""

    def use(model):
        x = leaf(6, 3)
        model(x)[rows].square().sum().backward()
        return x.grad

    parity(mlp(), use, 3)


def test_B9_replica_without_gradient_where_gather_gives_a_list():
    """With outputs left per replica, only those in the loss are differentiated."""

    class Listing(DataParallel):
        def gather(self, outputs, output_device):
            return outputs

    net = mlp()
    model, plain = Listing(net, ["cpu"] * 3), copy.deepcopy(net)
    x = data(6, 3)
    outs = model(x)
    outs[1].square().sum().backward()
    plain(x[2:4]).square().sum().backward()
    assert_same_grads(model, plain)
    outs[2].square().sum().backward()
    plain(x[4:]).square().sum().backward()
    assert_same_grads(model, plain)


# --- B10: many calls, checkpoints ---


def test_B10_many_forwards_before_one_backward():
    """Micro-batches of different sizes, one loss."""

    def use(model):
        inputs = [leaf(n, 3) for n in (4, 1, 7, 2)]
        sum(model(x).square().sum() for x in inputs).backward()
        return [x.grad for x in inputs]

    parity(mlp(), use, 3)


def test_B10_backwards_in_another_order():
    """Forwards a, b, c; backwards b, a, c."""

    def use(model):
        inputs = [leaf(4, 3) for _ in range(3)]
        a, b, c = [model(x).square().sum() for x in inputs]
        b.backward()
        a.backward()
        c.backward()
        return [x.grad for x in inputs]

    parity(mlp(), use)


def test_B10_output_fed_back():
    """A recurrent use: the output of one call is the input of the next."""

    def use(model):
        x = state = leaf(5, 3)
        for _ in range(4):
            state = model(state).tanh()
        state.square().sum().backward()
        return x.grad

    parity(nn.Linear(3, 3), use)


def test_B10_graphs_outlive_batchnorm_updates():
    """Buffers that a later forward changes do not disturb the graphs of earlier ones."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def use(model):
        first, second = leaf(6, 3), leaf(6, 3)
        a, b = model(first), model(second)
        a.square().sum().backward()
        b.square().sum().backward()
        return first.grad, second.grad

    parity(net, use, plain=False)


class Checkpointed(nn.Module):
    """A net that checkpoints its middle."""

    def __init__(self, use_reentrant, drop=0.0, norm=True):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.middle = nn.Sequential(
            nn.Linear(4, 4),
            nn.BatchNorm1d(4) if norm else nn.Identity(),
            nn.Tanh(),
            nn.Dropout(drop),
        )
        self.last = nn.Linear(4, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        h = self.first(x)
        if self.use_reentrant is None:
            h = self.middle(h)
        else:
            h = checkpoint(self.middle, h, use_reentrant=self.use_reentrant)
        return self.last(h)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_B10_checkpoint_inside(use_reentrant, replicas):
    """Recomputed in the replica; batch norm inside sees its batch twice, and the master has both
    (as upstream).
    """

    def use(model):
        x = leaf(6, 3)
        for _ in range(2):
            model(x).square().sum().backward()
        return x.grad

    parity(Checkpointed(use_reentrant), use, replicas, plain=replicas == 1)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_B10_checkpoint_inside_counts_after_backward(use_reentrant):
    """The statistics of the second pass reach the master with backward."""

    def use(model):
        counts = []
        tracked = next(
            b for name, b in model.named_buffers() if name.endswith("num_batches_tracked")
        )
        loss = model(data(6, 3)).square().sum()
        counts.append(int(tracked))
        loss.backward()
        counts.append(int(tracked))
        return counts

    parity(Checkpointed(use_reentrant), use, plain=False)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_B10_checkpoint_inside_replays_dropout(use_reentrant):
    """The recomputed masks are those of the forward: the same gradients as without a checkpoint."""
    results = []
    for reentrant in (None, use_reentrant):
        torch.manual_seed(3)
        _numbers.manual_seed(1)
        model = wrap(Checkpointed(reentrant, drop=0.5))
        x = leaf(8, 3)
        model(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    same(*results)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_B10_checkpoint_outside(use_reentrant, replicas):
    """The wrapper inside a checkpoint of the driver."""
    net = mlp()

    def use(model):
        x = leaf(6, 3)
        h = checkpoint(model, x * 2, use_reentrant=use_reentrant)
        h.square().sum().backward()
        return h.detach(), x.grad

    parity(net, use, replicas)


class OldNorm(nn.Module):
    """A checkpoint over `torch.nn.utils.weight_norm`, which keeps a weight that is no leaf."""

    def __init__(self, use_reentrant):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.layer = nn.utils.weight_norm(nn.Linear(3, 4))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=self.use_reentrant).tanh()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_B10_checkpoint_over_weight_norm(use_reentrant, replicas):
    """The stale weight that no chunk reaches does not make the backward one of a subset."""
    for_oracle = oracle.DataParallel(OldNorm(use_reentrant), list(range(replicas)))
    model = wrap(OldNorm(use_reentrant), replicas)
    model.module.load_state_dict(for_oracle.module.state_dict())
    for _ in range(2):
        x = data(6, 3)
        for one in (model, for_oracle):
            one(x.clone().requires_grad_()).square().sum().backward()
    same(*[[p.grad for p in one.parameters()] for one in (model, for_oracle)])


def test_B10_checkpoint_outside_with_batchnorm():
    """Reentrant: the forward runs twice, and so do the statistics, as upstream."""

    def use(model):
        x = leaf(6, 3)
        checkpoint(model, x, use_reentrant=True).square().sum().backward()
        return x.grad

    parity(Checkpointed(None), use, plain=False)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_B10_checkpoint_outside_replays_dropout(use_reentrant):
    """The checkpoint restores the driver's generator, from which the replicas' masks follow."""
    results = []
    for outside in (False, True):
        torch.manual_seed(3)
        _numbers.manual_seed(1)
        model = wrap(Checkpointed(None, drop=0.5))
        x = leaf(8, 3)
        out = checkpoint(model, x, use_reentrant=use_reentrant) if outside else model(x)
        out.square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    same(*results)


def test_B10_checkpoint_inside_and_outside():
    """Both at once, twice in a row."""

    def use(model):
        x = leaf(6, 3)
        for _ in range(2):
            checkpoint(model, x, use_reentrant=True).square().sum().backward()
        return x.grad

    parity(Checkpointed(False), use, plain=False)


def test_B10_second_order_through_a_checkpoint():
    """Non-reentrant checkpoints can be differentiated twice."""

    def use(model):
        x = leaf(6, 3)
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return grad.detach(), x.grad

    parity(Checkpointed(False, norm=False), use, plain=False)


def test_B10_subset_under_a_checkpoint():
    """`autograd.grad` works through a non-reentrant checkpoint, and is refused by a reentrant one,
    as ever.
    """

    def use(model):
        return torch.autograd.grad(model(leaf(6, 3)).square().sum(), next(model.parameters()))

    parity(Checkpointed(False, norm=False), use)
    reentrant = trio(Checkpointed(True, norm=False), 2)
    errors = [raised(lambda model=model: use(model)) for model in reentrant]
    assert {type(error) for error in errors} == {RuntimeError}
    assert all("reentrant" in str(error).lower() for error in errors)


# --- B11: parameters changed between forward and backward ---


def _first_weight(model):
    with torch.no_grad():
        next(model.parameters()).mul_(2)


def _last_weight(model):
    with torch.no_grad():
        list(model.parameters())[2].add_(1)


def _bias(model):
    with torch.no_grad():
        list(model.parameters())[1].add_(1)


def _load(model):
    model.load_state_dict({name: 2 * t for name, t in model.state_dict().items()})


def _step(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def _zeroed(model):
    nn.init.zeros_(list(model.parameters())[3])


EDITS = (_first_weight, _last_weight, _bias, _load, _step, _zeroed)


@pytest.mark.parametrize("another_forward", [False, True])
@pytest.mark.parametrize("needs_input", [False, True])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("width", [5, 20_000])  # weights that are sent, and that are mapped
def test_B11_in_place_change_raises_where_plain_torch_raises(
    width, edit, needs_input, another_forward
):
    """Whether a tensor was saved for backward decides; where it was not, gradients are those of the
    forward.
    """
    results = []
    models = trio(mlp(width), 2)
    for model in (models.ours, models.plain):
        _numbers.manual_seed(1)
        x = data(6, 3, requires_grad=needs_input)
        loss = model(x).square().sum()
        edit(model)
        if another_forward:
            model(x)
        try:
            loss.backward()
        except RuntimeError as error:
            assert IN_PLACE in str(error)
            results.append("raised")
        else:
            results.append([x.grad, *(p.grad for p in model.parameters())])
    same(*results)


@pytest.mark.parametrize("edit", EDITS)
def test_B11_in_place_change_before_second_order(edit):
    """Between a derivative and the derivative of it, likewise."""
    results = []
    models = trio(mlp(), 2)
    for model in (models.ours, models.plain):
        _numbers.manual_seed(1)
        x = leaf(6, 3)
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        edit(model)
        try:
            grad.square().sum().backward()
        except RuntimeError as error:
            assert IN_PLACE in str(error)
            results.append("raised")
        else:
            results.append([x.grad, *(p.grad for p in model.parameters())])
    same(*results)


class WritesFrozen(nn.Module):
    """Multiplies by a frozen parameter, to which it writes before or afterwards."""

    def __init__(self, before: bool, after: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            self.frozen.mul_(0.5)
        out = self.lin(x) * self.frozen
        if self.after:
            self.frozen.mul_(0.5)
        return out


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (False, False)])
def test_B11_a_frozen_parameter_that_forward_overwrites(before, after, second, devices):
    """Backward raises where plain torch and upstream do, also if it was a second forward that
    overwrote it.
    """
    results = []
    for model in trio(WritesFrozen(before, after), devices):
        outs = [model(data(4, 3)) for _ in range(2 if second else 1)]
        results.append([isinstance(attempt(out.sum().backward), RuntimeError) for out in outs])
        if second and before:
            assert results[-1] == [True, False]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("devices", [1, 2])
def test_B11_a_change_of_structure_hides_no_change_of_a_weight(devices):
    """Another layer comes between forward and backward, and a weight that stays is overwritten
    after that.
    """
    models = trio(mlp(), devices)
    for model in (models.ours, models.plain):
        loss = model(data(4, 3)).sum()
        model.get_submodule("module" if hasattr(model, "module") else "").append(nn.Tanh())
        model(data(4, 3))
        _last_weight(model)
        assert IN_PLACE in str(raised(loss.backward))


def test_B11_backward_reaches_a_layer_that_was_swapped():
    """Another forward comes between, whose replicas do not have that layer."""
    models, x, gone = trio(mlp(), 2), data(4, 3), []
    for model, net in ((models.ours, models.ours.module), (models.plain, models.plain)):
        loss = model(x).sum()
        gone.append(net[0])
        net[0] = nn.Linear(3, 5)
        model(x)
        loss.backward()
    same(gone[0].weight.grad, gone[1].weight.grad)


def attempt(call: Any) -> BaseException | None:
    """What a call raises, if anything."""
    try:
        call()
    except RuntimeError as error:
        assert IN_PLACE in str(error)
        return error
    return None


def test_B11_input_changed_in_place_after_forward():
    """The replicas have copies of the input, so gradients are those of what forward saw; plain
    torch raises.
    """
    models = trio(mlp(), 2)
    for model in (models.ours, models.plain):
        _numbers.manual_seed(1)
        x = data(6, 3)
        loss = model(x).square().sum()
        if model is models.ours:
            x.zero_()
        loss.backward()
    assert_same_grads(models.ours, models.plain)


def test_B11_later_graph_is_not_blamed():
    """A change between two forwards: the older graph may fail, the newer is right."""

    def use(model):
        old = model(leaf(6, 3)).square().sum()
        _last_weight(model)
        x = leaf(6, 3)
        new = model(x).square().sum()
        assert IN_PLACE in str(raised(old.backward))
        model.zero_grad()
        new.backward()
        return x.grad

    models = trio(mlp(), 2)
    _numbers.manual_seed(1)
    ours = use(models.ours)
    _numbers.manual_seed(1)
    same(ours, use(models.plain))
    assert_same_grads(models.ours, models.plain)


def test_B11_older_graph_that_saved_nothing_does_not_spoil_a_newer():
    """A weight that the older graph did not save and the newer did."""

    def use(model):
        old = model(data(6, 3)).square().sum()
        _first_weight(model)
        x = leaf(6, 3)
        new = model(x).square().sum()
        old.backward()
        new.backward()
        return x.grad

    models = trio(nn.Linear(3, 2), 2)
    _numbers.manual_seed(1)
    ours = use(models.ours)
    _numbers.manual_seed(1)
    same(ours, use(models.plain))
    assert_same_grads(models.ours, models.plain)


def test_B11_buffer_changed_in_the_driver():
    """The check covers buffers too."""
    results = []
    models = trio(ScaledByBuffer(), 2)
    for model in (models.ours, models.plain):
        loss = model(torch.ones(4, 3)).sum()
        next(model.buffers()).add_(1)
        results.append(IN_PLACE in str(raised(loss.backward)))
    assert results == [True, True]


class ScaledByBuffer(nn.Module):
    """Saves a buffer for backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return x * self.weight * self.scale


def test_B11_edit_through_data_is_not_an_error():
    """``.data`` moves no version: no error, and the replicas' copies are those of the forward."""
    models = trio(mlp(), 2)
    x = data(6, 3)
    loss = models.ours(x).square().sum()
    models.ours.module[2].weight.data.mul_(3)
    loss.backward()
    models.plain(x).square().sum().backward()
    assert_same_grads(models.ours, models.plain)


def test_B11_gradient_step_in_place_after_backward():
    """The ordinary loop is not disturbed by the check."""

    def use(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(data(6, 3)).square().sum().backward()
            optimizer.step()

    parity(mlp(), use)


# --- B12: how long graphs live ---


@pytest.fixture
def quiet_gc():
    """Nothing is collected but by counting references."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _plain_step(model):
    x = leaf(4, 3)
    model(x).square().sum().backward()


def _penalty_step(model):
    x = leaf(4, 3)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()


def _dropped_forward(model):
    model(leaf(4, 3))


def _dropped_second_order(model):
    x = leaf(4, 3)
    torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def _failed_backward(model):
    loss = model(leaf(4, 3)).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError):
        loss.backward()


def _retained(model):
    loss = model(leaf(4, 3)).square().sum()
    loss.backward(retain_graph=True)


def _checkpointed(model):
    checkpoint(model, leaf(4, 3), use_reentrant=True).sum().backward()


def _without_grad(model):
    with torch.no_grad():
        model(leaf(4, 3))


@pytest.mark.parametrize(
    "step",
    [
        _plain_step,
        _penalty_step,
        _dropped_forward,
        _dropped_second_order,
        _failed_backward,
        _retained,
        _checkpointed,
        _without_grad,
    ],
)
def test_B12_no_reference_cycles_and_no_graphs_left(step, quiet_gc):
    """After the references are gone the replicas hold no graph, and the collector finds no more
    than torch leaves.
    """
    plain = mlp()
    model = wrap(copy.deepcopy(plain))
    found = []
    for one in (model, plain):
        step(one)
        one.zero_grad()
        gc.collect()
        before = graphs(model)
        step(one)
        one.zero_grad()
        assert graphs(model) == before
        found.append(gc.collect())
    assert found[0] == found[1]
    # a reentrant checkpoint leaves a cycle of its own
    assert step is _checkpointed or found[0] == 0


def test_B12_output_holds_the_graph(quiet_gc):
    """While an output lives, so do the graphs; with it they go, in every replica that has one."""
    model = wrap(mlp())
    before = graphs(model)
    out = model(data(4, 3))
    other = model(data(1, 3))
    held = graphs(model)
    assert sorted(b - a for a, b in zip(before, held, strict=True))[-2:] == [1, 2]
    del out
    assert sum(graphs(model)) == sum(before) + 1
    del other
    assert graphs(model) == before


def test_B12_backward_frees_graphs_though_outputs_live(quiet_gc):
    """As in torch, backward without ``retain_graph`` frees them at once."""
    model = wrap(mlp())
    before = graphs(model)
    out = model(data(4, 3))
    loss = out.square().sum()
    loss.backward(retain_graph=True)
    assert sum(graphs(model)) == sum(before) + 2
    loss.backward()
    assert graphs(model) == before
    assert out.requires_grad


def test_B12_one_output_of_two_holds_the_graph(quiet_gc):
    """Each output alone keeps what it needs."""
    model = wrap(TwoHeads())
    before = graphs(model)
    a, b = model(data(4, 3))
    del a
    assert sum(graphs(model)) == sum(before) + 2
    b.sum().backward()
    assert graphs(model) == before


def test_B12_detached_results_hold_nothing(quiet_gc):
    """``loss.item()`` and ``out.detach()`` keep no graph."""
    model = wrap(mlp())
    before = graphs(model)
    kept = model(data(4, 3)).detach()
    assert graphs(model) == before
    assert not kept.requires_grad


def test_B12_model_without_gradients_keeps_no_graph(quiet_gc):
    """Under ``no_grad``, under inference mode, and for a frozen model."""
    model = wrap(mlp())
    before = graphs(model)
    with torch.no_grad():
        one = model(leaf(4, 3))
    with torch.inference_mode():
        two = model(data(4, 3))
    three = model.requires_grad_(False)(data(4, 3))
    assert graphs(model) == before
    assert not any(out.requires_grad for out in (one, two, three))


def test_B12_inputs_are_not_kept_alive(quiet_gc):
    """The driver keeps no batch beyond the graph that needs it."""
    model = wrap(mlp())
    x = data(4, 3)
    alive = weakref.ref(x)
    out = model(x)
    del x
    assert alive() is None
    del out


def test_B12_failed_backward_leaves_nothing_behind():
    """A hook of the driver raises after some gradients arrived; the next backward has only
    its own.
    """

    def use(model):
        x = leaf(4, 3)
        a, b = model(x, x).values()
        b = b[0]
        handle = b.register_hook(_raising)
        error = raised(lambda: torch.autograd.backward([b.sum(), a.sum()], retain_graph=True))
        assert "hook of the driver" in str(error)
        error = raised(lambda: torch.autograd.backward([a.sum(), b.sum()], retain_graph=True))
        assert "hook of the driver" in str(error)
        handle.remove()
        model.zero_grad()
        x.grad = None
        b.sum().backward()
        return x.grad

    parity(Apart(), use, plain=False)


def test_B12_failed_pass_leaves_no_gradients_for_the_next():
    """One output's gradient had arrived when a hook on the other raised: it is not part of the next
    pass.
    """
    net = Apart()
    plain = copy.deepcopy(net)
    for call, module in ((raydp_parallel.replicate(net, ["cpu"])[0], net), (plain, plain)):
        _numbers.manual_seed(1)
        out = call(data(4, 3), data(4, 3))
        one, two = out["one"], out["two"][0]
        handle = one.register_hook(_raising)
        total = one.sum() + two.square().sum()
        assert "hook of the driver" in str(
            raised(lambda total=total: total.backward(retain_graph=True))
        )
        handle.remove()
        module.zero_grad()
        one.sum().backward()
    same(net.one.weight.grad, plain.one.weight.grad)
    same(net.two.weight.grad, torch.zeros(4, 3))


def _raising(_grad):
    raise ValueError("hook of the driver")


def test_B12_backward_in_another_thread():
    """The graph belongs to no thread."""

    def use(model):
        x = leaf(4, 3)
        loss = model(x).square().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return x.grad

    parity(mlp(), use)


# --- B13: losses inside ---


class WithLoss(nn.Module):
    """Returns its chunk's mean loss."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x).square().mean()


def test_B13_vector_of_losses():
    """One loss per replica; its mean is not the batch's for uneven chunks, as upstream."""

    def use(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = model(data(5, 3))
        losses.mean().backward()
        return losses.detach()

    models = parity(WithLoss(), use, plain=False)
    assert models.ours.device_ids == ["cpu", "cpu"]


@pytest.mark.parametrize("replicas", [2, 3])
def test_B13_weighted_mean_is_the_batch_mean(replicas):
    """``Options(scalars="mean")`` weighs chunks by their rows, gradients too."""
    models = trio(WithLoss(), replicas, options=Options(scalars="mean"))
    x = data(7, 3)
    loss, expected = models.ours(x), models.plain(x)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert_same_grads(models.ours, models.plain)


# --- B14: what comes back ---


class Everything(nn.Module):
    """Returns what a module may return."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.constant = nn.Parameter(torch.arange(2.0))

    def forward(self, x):
        y = self.layer(x)
        return {
            "y": y,
            "again": y,
            "nested": [{"square": y.square()}, (y.argmax(1), y > 0)],
            "detached": y.detach(),
            "input": x,
            "constant": self.constant,
            "none": None,
        }


def test_B14_mixed_outputs():
    """Integers, masks, detached tensors, the input, a parameter, the same tensor twice, nested,
    None.
    """

    def use(model):
        x = leaf(5, 3)
        out = model(x)
        flags = [
            out["y"].requires_grad,
            out["again"].requires_grad,
            out["nested"][0]["square"].requires_grad,
        ]
        assert flags == [True] * 3
        assert not out["detached"].requires_grad
        assert out["nested"][1][0].dtype is torch.int64
        assert out["nested"][1][1].dtype is torch.bool
        loss = out["y"].sum() + out["again"].square().sum() + out["nested"][0]["square"].sum()
        loss = loss + (out["input"] * 3).sum() + out["constant"].square().sum()
        loss.backward()
        return {key: value for key, value in out.items() if key != "nested"}, x.grad

    parity(Everything(), use, plain=False)


def test_B14_gradients_by_each_output_alone():
    """Every differentiable output leads back to what it depends on."""
    for name in ("y", "again", "input", "constant"):

        def use(model, name=name):
            x = leaf(5, 3)
            model(x)[name].square().sum().backward()
            return x.grad

        parity(Everything(), use, plain=False)


def test_B14_identity_module_returns_a_new_tensor():
    """Its output is not its input, and has the input's gradient."""

    def use(model):
        x = leaf(5, 3)
        out = model(x)
        assert out is not x
        assert out.data_ptr() != x.data_ptr()
        (out * 3).sum().backward()
        return out.detach(), x.grad

    models = trio(nn.Identity(), 2)
    ours, theirs = use(models.ours), use(models.theirs)
    same(ours[1], theirs[1])
    plain = models.ours(torch.ones(4, 2))
    assert not plain.requires_grad
    assert plain.grad_fn is None


def test_B14_identity_at_second_order():
    """A module that hands its input through, differentiated twice."""

    def use(model):
        x = leaf(5, 3)
        (grad,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return grad.detach(), x.grad

    parity(nn.Identity(), use)


class Constant(nn.Module):
    """Returns a parameter."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.arange(3.0))

    def forward(self, x):
        return self.value


def test_B14_returning_a_parameter():
    """Concatenated once per replica (row G13), gradients summed."""

    def use(model):
        out = model(data(4, 3))
        (out * torch.arange(float(len(out)))).sum().backward()
        return out.detach()

    models = parity(Constant(), use, 3, plain=False)
    assert models.ours(data(4, 3)).shape == (6,)


def test_B14_outputs_can_be_changed_in_place():
    """Outputs are the caller's, also where nothing is gathered."""

    def use(model):
        x = leaf(4, 3)
        out = model(x)
        out.mul_(2).add_(1)
        out[0] = 0
        out.square().sum().backward()
        return out.detach(), x.grad

    parity(mlp(), use)
    parity(mlp(), use, 1)


def test_B14_changing_an_output_in_place_does_not_reach_the_other():
    """With one device and raw outputs, each output is memory of its own."""
    model = wrap(TwoHeads(), 1)
    a, b = model(data(4, 3))
    before = b.detach().clone()
    a.fill_(0)
    assert torch.equal(b, before)
    (a.sum() + b.sum()).backward()


def test_B14_double_use_of_an_output():
    """Gradients from several uses add up before they travel."""

    def use(model):
        x = leaf(4, 3)
        out = model(x)
        (out.sum() + out.square().sum() + (out * out.detach()).sum()).backward()
        return x.grad

    parity(mlp(), use)


def test_B14_hooks_and_retain_grad_on_outputs():
    """The output is an ordinary tensor of the driver's graph."""

    def use(model):
        x = leaf(4, 3)
        out = model(x)
        seen = []
        out.register_hook(lambda grad: seen.append(grad.clone()))
        out.register_hook(lambda grad: grad * 2)
        out.retain_grad()
        out.square().sum().backward()
        return seen, out.grad, x.grad

    parity(mlp(), use)
    parity(mlp(), use, 1)


def test_B14_grad_with_respect_to_an_output():
    """`autograd.grad` that stops at the output goes to no replica."""
    model = wrap(mlp())
    out = model(data(4, 3))
    before = model.executor.stats().backwards
    (grad,) = torch.autograd.grad(out.square().sum(), out)
    assert model.executor.stats().backwards == before
    torch.testing.assert_close(grad, 2 * out.detach())


class Detaching(nn.Module):
    """Cuts its graph in the middle."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 2)

    def forward(self, x):
        return self.two(self.one(x).detach())


def test_B14_detach_inside():
    """What lies below the cut gets zeros (row B3), inputs None."""

    def use(model):
        x = leaf(4, 3)
        model(x).sum().backward()
        return x.grad

    models = parity(Detaching(), use, plain=False)
    assert torch.equal(models.ours.module.one.weight.grad, torch.zeros(3, 3))


class InPlace(nn.Module):
    """Changes its own tensors in place on the way."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        h = self.layer(x)
        h += 1
        h.relu_()
        first, second = h.split([1, 2], dim=1)
        return h, first, second.transpose(0, 1).contiguous().transpose(0, 1)


def test_B14_views_and_in_place_inside():
    """Outputs that are views of one another, or were written in place."""

    def use(model):
        x = leaf(4, 3)
        h, first, second = model(x)
        (h.sum() + first.square().sum() + second.pow(3).sum()).backward()
        return h.detach(), first.detach(), second.detach(), x.grad

    parity(InPlace(), use)


class GradInside(nn.Module):
    """Differentiates in its forward."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return grad


def test_B14_autograd_inside_forward():
    """An energy model: its output is a gradient, and trains."""

    def use(model):
        out = model(data(6, 3))
        out.square().sum().backward()
        return out.detach()

    parity(GradInside(), use, plain=False)


class Masked(Function):
    """Looks at which of its inputs need a gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        gx = grad * weight if ctx.needs_input_grad[0] else None
        gw = (grad * x).sum(0) if ctx.needs_input_grad[1] else None
        return gx, gw


class CustomFunction(nn.Module):
    """Uses a Function of the user's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return Masked.apply(x, self.weight)


@pytest.mark.parametrize("needs_input", [False, True])
def test_B14_custom_function_inside(needs_input):
    """A user's Function runs in the replicas, and sees which inputs need a gradient."""

    def use(model):
        x = data(4, 3, requires_grad=needs_input)
        model(x).square().sum().backward()
        return x.grad

    parity(CustomFunction(), use)


class Failing(Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("no gradient today")


class FailsInBackward(nn.Module):
    """Can be told to fail in backward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, fail=False):
        return Failing.apply(self.layer(x)) if fail else self.layer(x)


def test_B14_error_in_backward_keeps_its_type():
    """An exception in a replica's backward is raised in the driver, and the model works on."""
    models = trio(FailsInBackward(), 2)
    x = data(4, 3)
    errors = [raised(model(x, fail=True).sum().backward) for model in models]
    assert [type(error) for error in errors] == [KeyError] * 3
    assert "no gradient today" in str(errors[0])
    for model in models:
        model.zero_grad()
        model(x).sum().backward()
    assert_same_grads(models.ours, models.plain)


# --- the other entries: functional form, single replicas ---


def test_functional_data_parallel_is_differentiable():
    """`data_parallel` gives gradients to module and inputs, at second order too."""
    net = mlp()
    plain = copy.deepcopy(net)
    x, y = leaf(5, 3), leaf(5, 3)
    with torch.no_grad():
        y.copy_(x)
    for call, inputs in (
        (lambda t: raydp_parallel.data_parallel(net, t, ["cpu"] * 2), x),
        (plain, y),
    ):
        out = call(inputs)
        (grad,) = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        (grad.square().sum() + call(inputs).sum()).backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert_same_grads(net, plain)


def test_functional_data_parallel_of_a_temporary_module():
    """The module may be gone before backward."""
    plain = mlp()
    x, y = leaf(4, 3), leaf(4, 3)
    with torch.no_grad():
        y.copy_(x)
    out = raydp_parallel.data_parallel(copy.deepcopy(plain), x, ["cpu"] * 2)
    gc.collect()
    out.square().sum().backward()
    plain(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_single_replica_call_is_differentiable():
    """A remote replica is called like the module: raw outputs, gradients reach the module."""
    net = mlp()
    plain = copy.deepcopy(net)
    replicas = raydp_parallel.replicate(net, ["cpu", "cpu"])
    x = data(4, 3)
    a, b = replicas[0](x[:2]), replicas[1](x[2:] * 2)
    (a.square().sum() + b.sum()).backward()
    (plain(x[:2]).square().sum() + plain(x[2:] * 2).sum()).backward()
    assert_same_grads(net, plain)


def test_one_replica_called_many_times():
    """Several graphs in one replica, differentiated in any order."""
    net = mlp()
    plain = copy.deepcopy(net)
    (replica,) = raydp_parallel.replicate(net, ["cpu"])
    inputs = [data(2, 3) for _ in range(3)]
    losses = [replica(x).square().sum() for x in inputs]
    expected = [plain(x).square().sum() for x in inputs]
    for i in (1, 2, 0):
        losses[i].backward()
        expected[i].backward()
    assert_same_grads(net, plain)


def test_parallel_apply_of_different_modules():
    """Each module gets the gradient of its own chunk."""
    nets = [mlp(), nn.Linear(3, 2)]
    plain = copy.deepcopy(nets)
    x = leaf(4, 3)
    replicas = [raydp_parallel.replicate(net, ["cpu"] * 2)[i] for i, net in enumerate(nets)]
    outs = raydp_parallel.parallel_apply(replicas, [x[:2], x[2:]])
    sum(out.square().sum() for out in outs).backward()
    y = x.detach().clone().requires_grad_()
    sum(
        net(part).square().sum() for net, part in zip(plain, (y[:2], y[2:]), strict=True)
    ).backward()
    torch.testing.assert_close(x.grad, y.grad)
    for net, other in zip(nets, plain, strict=True):
        assert_same_grads(net, other)


def test_detached_replicas_take_no_gradients():
    """``replicate(net, ids, detach=True)``: inputs get gradients, parameters none."""
    net = mlp()
    x = leaf(4, 3)
    (replica,) = raydp_parallel.replicate(net, ["cpu"], detach=True)
    replica(x).sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in net.parameters())


def test_two_wrappers_of_one_module():
    """Calls through both, one backward: sums of both, hooks once."""
    net = mlp()
    plain = copy.deepcopy(net)
    one, two = wrap(net, 2), wrap(net, 3)
    seen = []
    net[0].weight.register_hook(lambda grad: seen.append(grad))
    x = data(6, 3)
    (one(x).square().sum() + two(x).sum()).backward()
    (plain(x).square().sum() + plain(x).sum()).backward()
    assert_same_grads(net, plain)
    assert len(seen) == 1


def test_two_wrapped_models_in_one_graph():
    """One model's output is the other's input, and both are differentiated in one pass."""

    def use(models):
        x = leaf(6, 3)
        models[1](models[0](x)).square().sum().backward()
        return x.grad

    first, second = trio(nn.Linear(3, 4), 2), trio(nn.Linear(4, 2), 3)
    _numbers.manual_seed(1)
    ours = use((first.ours, second.ours))
    _numbers.manual_seed(1)
    same(ours, use((first.plain, second.plain)))
    assert_same_grads(first.ours, first.plain)
    assert_same_grads(second.ours, second.plain)


class Block(nn.Module):
    """A model with a middle that may be wrapped."""

    def __init__(self, middle):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.middle = middle
        self.last = nn.Linear(2, 1)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def test_wrapped_block_at_second_order():
    """A penalty through a model with a wrapped middle block."""
    plain = Block(mlp())
    ours = copy.deepcopy(plain)
    ours.middle = wrap(ours.middle)
    results = []
    for model in (ours, plain):
        _numbers.manual_seed(1)
        x = leaf(5, 4)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (grad.square().sum() + model(x).sum()).backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    same(*results)


class Recurrent(nn.Module):
    """Detaches the state that it is given, or uses it in some of the chunks."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.detaches = detaches

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        if self.detaches or bool(x[0, 0] > 0):
            state = state.detach()
        out: Tensor = torch.tanh(self.inner(x) + state)
        return out


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_B7_an_input_that_forward_detaches_is_in_no_graph(devices: int) -> None:
    """So the graph that made it may be freed by then, as in truncated backpropagation in time."""
    found = []
    net = Recurrent(detaches=True)
    for model in (copy.deepcopy(net), DataParallel(copy.deepcopy(net), ["cpu"] * devices)):
        state = torch.zeros(6, 3)
        for number in range(3):
            state = model(torch.full((6, 3), float(number)), state)
            state.square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_B7_an_input_that_one_chunk_uses_gets_its_gradient() -> None:
    """And that of the chunk that detached it is zero, as in upstream."""
    found = []
    net = Recurrent(detaches=False)
    x = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]).expand(4, 3)
    for kind in (oracle.DataParallel, DataParallel):
        devices: Any = [0, 1] if kind is oracle.DataParallel else ["cpu"] * 2
        start = torch.ones(4, 3, requires_grad=True)
        model = kind(copy.deepcopy(net), devices)
        model(x, start * 2).sum().backward()
        found.append([start.grad, *[p.grad for p in model.parameters()]])
    torch.testing.assert_close(found[1], found[0])
    assert found[1][0][:2].tolist() == [[0.0] * 3] * 2
