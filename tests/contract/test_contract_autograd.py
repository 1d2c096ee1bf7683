"""Gradients through replicas are those of upstream and of the plain module: rows B1 to B14."""

from __future__ import annotations

import copy
import gc
import os
import warnings
import weakref
from collections import Counter, UserDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness import (
    Apply,
    Trio,
    assert_same_grads,
    assert_same_state,
    carried,
    kill,
    made_of,
    ones,
    raised,
    trio,
)
from random_nets import Clipped, Sometimes
from torch import Tensor, nn
from torch.autograd import Function
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import raydp_parallel
from raydp_parallel import DataParallel, Options, gather, scatter, scatter_kwargs
from raydp_parallel.errors import TransferError

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


def parity(
    module: nn.Module,
    use: Any,
    replicas: int = 2,
    *,
    plain: bool = True,
    upstream: bool = True,
    **kwargs: Any,
) -> Trio:
    """Do the same with each of the three models; results, gradients and state must agree."""
    models = trio(module, replicas, **kwargs)
    expected = [*([models.theirs] if upstream else []), *([models.plain] if plain else [])]
    _numbers.manual_seed(1)
    result = use(models.ours)
    for model in expected:
        _numbers.manual_seed(1)
        assert_close(result, use(model))
        assert_same_grads(models.ours, model)
    if upstream:
        assert_same_state(models.ours, models.theirs)
    return models


def alike(make: Callable[[], nn.Module], replicas: int | Sequence[int] = 2, **kwargs: Any) -> Any:
    """Make a test of a function that uses a model: `parity` says what holds."""
    counts = [replicas] if isinstance(replicas, int) else replicas

    def decorate(use: Any) -> Any:
        @pytest.mark.parametrize("count", counts)
        def test(count: int) -> None:
            parity(make(), use, count, **kwargs)

        test.__name__, test.__doc__ = use.__name__, use.__doc__
        return test

    return decorate


def wrap(module: nn.Module, replicas: int = 2, **options: Any) -> DataParallel[Any]:
    """The module under our wrapper, on CPU replicas."""
    return DataParallel(module, ["cpu"] * replicas, options=Options(**options) if options else None)


def graphs(model: DataParallel[Any]) -> list[int]:
    """How many graphs each replica of this process holds."""
    return [held for _, held in model.executor.flush()]


@pytest.mark.parametrize(("rows", "replicas"), [(7, 2), (7, 3), (7, 4), (2, 4), (0, 2)])
def test_B1_gradients_are_sums_over_replicas(rows, replicas):
    """Outputs, and gradients of inputs and parameters, also if some replicas have no chunk."""

    def use(model):
        x = leaf(rows, 3)
        out = model(x)
        (out * torch.arange(2.0 * rows).view(rows, 2)).sum().backward()
        return out.detach(), x.grad

    parity(mlp(), use, replicas)


@alike(mlp, [2, 3])
def test_B1_tensor_hook_fires_once_with_the_sum(model):
    """A parameter's hook sees the whole gradient once per backward, and may replace it."""
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


@alike(lambda: Apply(lambda _net, pair, *, extra: pair[0] * pair[1]["b"] + extra["scale"]))
def test_B1_gradients_of_nested_and_keyword_inputs(model):
    """Inputs anywhere in the arguments get their gradients."""
    a, b, scale = leaf(5, 3), leaf(5, 3), leaf(5, 1)
    model((a, {"b": b, "n": 3}), extra={"scale": scale}).square().sum().backward()
    return a.grad, b.grad, scale.grad


@alike(made_of(gain=ones())(lambda net, x, a, b: x * net.gain * a * b.exp()), upstream=False)
def test_B1_a_parameter_that_is_an_input_too(model):
    """It stands three times among a chunk's leaves, and gets the sum of its gradients."""
    (gain,) = model.parameters()
    model(data(4, 3), gain, gain).sum().backward()


@alike(lambda: nn.Linear(3, 2, dtype=torch.complex64), upstream=False)  # it refuses such views
def test_B1_complex_parameters_and_inputs(model):
    """They get complex gradients, of both orders; the input is a conjugated view."""
    x = leaf(5, 3, dtype=torch.complex64)
    loss = model(x.conj()).abs().square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.abs().square().sum()).backward()
    return x.grad


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


@made_of(inner=(3, 2))
def doubling(net, x):
    """Lets the gradient of its weight be twice what it is, and leaves another one there."""
    assert net.inner.weight.grad is None
    net.inner.weight.grad = torch.ones(2, 3)
    net.inner.weight.register_hook(lambda grad: 2 * grad)
    return net.inner(x)


@alike(doubling, plain=False)
def test_B2_what_forward_leaves_at_a_parameter_is_of_its_graph(model):
    """The next forward has a parameter without hook and gradient, unlike the plain module."""
    for _ in range(3):
        model(data(4, 3)).square().sum().backward()


@made_of(one=(3, 2), two=(3, 2), frozen=ones(2, requires_grad=False))
def branches(net, x, which="one"):
    """Uses one of two layers, or none."""
    return x * 2 if which == "none" else getattr(net, which)(x) * net.frozen


@alike(lambda: Apply(lambda net, x, y, use: net.one(x) if use else x * 2, one=nn.Linear(3, 2)))
def test_B3_no_zeros_for_inputs_nor_where_no_parameter_is_used(model):
    """Then upstream's broadcast is not part of the graph; an unused input keeps None."""
    found = []
    for use in (False, True):
        x, y = leaf(4, 3), leaf(4, 3)
        model(x, y, use).sum().backward()
        found += [x.grad, y.grad, *(p.grad for p in model.parameters() if not use)]
    return found


@alike(
    lambda: Apply(
        lambda net, x: net.one(x) - net.kept[0](x).detach(),
        one=nn.Linear(3, 2),
        kept=[nn.Linear(3, 2)],
    )
)
def test_B3_no_zeros_for_parameters_that_are_not_the_module_s(model):
    """As those of a teacher in a list, which another optimizer may step."""
    model(data(4, 3)).square().sum().backward()
    return [p.grad for p in getattr(model, "module", model).kept[0].parameters()]


def test_B3_B4_option_none_is_the_plain_module(executors):
    """Gradients that no replica has stay None, however it is called, and their hooks are quiet."""
    x = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 2.0, 3.0]])

    def ask(model):
        out, wanted = model(x).sum(), [*model.parameters()][1:4]
        for p in wanted:
            p.register_hook(lambda grad: grad.clamp(-1, 1))
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))
        assert type(raised(lambda: torch.autograd.grad(out, wanted))) is RuntimeError
        found = torch.autograd.grad(model(x).sum(), wanted, allow_unused=True)
        model(x).sum().backward()
        return found

    option = Options(unused_grads="none")
    models = parity(branches(), ask, upstream=False, options=option)
    assert models.ours.module.two.weight.grad is None
    by_sign, signs = Sometimes(), torch.eye(4)[:2] - 0.5
    parity(by_sign, lambda model: model(signs).sum().backward(), plain=False, options=option)
    net, executor = branches(), executors(1, name="none", unused_grads="none")
    replicas = raydp_parallel.replicate(net, ["cpu"], executor=executor)
    raydp_parallel.parallel_apply(replicas, [x])[0].sum().backward()
    model = DataParallel(net, ["cpu"] * 2, options=option)
    model.call("forward", x, split=False).sum().backward()
    model.parallel_apply = raydp_parallel.parallel_apply  # as a subclass may override it
    model(x).sum().backward()
    assert net.two.weight.grad is None


@alike(branches, plain=False)
def test_B3_B4_unused_parameters_get_zeros(model):
    """In ``.grad``, and from `autograd.grad` without ``allow_unused``; frozen ones get none."""
    params = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(model(data(4, 3)).sum(), params)
    model(data(4, 3)).sum().backward()
    return found


@made_of(words=lambda: nn.Embedding(6, 3, sparse=True), scale=ones(3))
def words(net, ids):
    """A sparse embedding that chunks starting with word 0 do not use."""
    scale = net.scale.expand(len(ids), 3)
    return scale if ids[0, 0] == 0 else net.words(ids).sum(1) * scale


@pytest.mark.parametrize(
    "rows", [[[1, 2], [3, 3]], [[1, 2], [0, 3]], [[0, 2], [1, 3]], [[0, 1], [1, 2], [3, 3]]]
)
def test_B5_sparse_gradients_of_all_replicas_stay_sparse(rows):
    """They are dense if a replica has none, as it contributes zeros, unless zeros are unwanted."""

    def use(model):
        table = next(p for p in model.parameters() if p.dim() == 2)
        model(torch.tensor(rows)).square().sum().backward()
        is_sparse, table.grad = table.grad.is_sparse, table.grad.to_dense()
        return is_sparse

    parity(words(), use, len(rows), plain=False)
    assert use(wrap(words(), len(rows), unused_grads="none"))


@pytest.mark.parametrize("unused", ["zeros", "none"])
def test_B5_a_chunk_whose_words_the_loss_leaves_out(unused):
    """It contributes zeros, too, unless these are unwanted."""
    net = nn.Embedding(6, 3, sparse=True)
    model = wrap(net, 2, unused_grads=unused)
    two = model.run(lambda net, x: [net(x), net(x).detach()][:: 1 if x[0] else -1], torch.arange(2))
    two[0].sum().backward()
    assert net.weight.grad.is_sparse == (unused == "none")


@alike(mlp)
def test_B6_mixed_second_order(model):
    """The gradient of the input, differentiated by weights and back; ``.grad`` is left alone, but
    by a ``backward(create_graph=True)``, which leaves what can be differentiated.
    """
    x, params = leaf(5, 3), list(model.parameters())[:3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle that this makes
        model(data(5, 3)).square().sum().backward(create_graph=True)
    grads = [p.grad for p in params]
    for p in model.parameters():
        p.grad = None  # no cycle left behind
    again = torch.autograd.grad([g.square().sum() for g in grads], params)
    loss = model(x).square().sum()
    gx, *gp = torch.autograd.grad(loss, [x, *params], create_graph=True)
    by_params = torch.autograd.grad(gx.square().sum(), params, retain_graph=True)
    by_input = torch.autograd.grad([g.square().sum() for g in gp], x)
    assert all(p.grad is None for p in model.parameters())
    return [g.detach() for g in (gx, *gp)], by_params, by_input, again


@alike(lambda: Clipped().double(), [2, 3], plain=False)
def test_B6_a_hook_made_in_forward_sees_the_sum(model):
    """Two derivatives of one output, one of which is the other's incoming gradient."""
    x = leaf(6, 4, dtype=torch.double)
    out = model(x)
    (one,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
    (two,) = torch.autograd.grad(out, x, one, create_graph=True)
    (three,) = torch.autograd.grad((one * two).sum(), x, create_graph=True)
    last = torch.autograd.grad(three.sum(), out, retain_graph=True)
    (out.sum() + one.pow(2).sum() + two.sum() + three.pow(2).sum()).backward()
    return three.detach(), last, x.grad


class Doubled(Function):
    """Has a backward that torch cannot differentiate by its argument."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return torch.mul(grad, 2, out=torch.empty_like(grad))


@alike(made_of(inner=(3, 4))(lambda net, x: Doubled.apply(net.inner(x).tanh())))
def test_B6_create_graph_through_what_cannot_be_differentiated(model):
    """It need not be, as the gradient that it gets requires none."""
    x = leaf(6, 3)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return grad.detach(), x.grad


@made_of(trunk=(3, 4), one=(4, 2), two=(4, 2))
def two_heads(net, x):
    """A trunk and two heads."""
    h = net.trunk(x).tanh()
    return net.one(h).sin(), net.two(h).exp()


@alike(made_of(weight=ones(3))(lambda net, x, y: x * 3 + (y * net.weight).pow(2)), upstream=False)
def test_B6_second_order_with_a_constant_gradient(model):
    """A gradient that cannot be differentiated further, beside one that can."""
    x, y = leaf(4, 3), leaf(4, 3)
    gx, gy = torch.autograd.grad(model(x, y).sum(), [x, y], create_graph=True)
    assert gy.requires_grad and not gx.requires_grad
    (gx.sum() + gy.square().sum()).backward()
    return gx.detach(), gy.detach(), y.grad


def fails(_grad):
    """Is a hook."""
    raise KeyError("no gradient today")


@made_of(first=(3, 2), last=(2, 2))
def fails_in_backward(net, x):
    """Fails in backward below its last layer."""
    hidden = net.first(x)
    hidden.register_hook(fails)
    return net.last(hidden)


@pytest.mark.parametrize("create_graph", [False, True])
def test_B6_subset_computes_only_what_was_asked(create_graph):
    """`autograd.grad` of the last layer does not run backward below it."""

    def use(model):
        last = list(model.parameters())[2:]
        out = model(data(4, 3)).square().sum()
        found = torch.autograd.grad(out, last, retain_graph=True, create_graph=create_graph)
        assert "no gradient today" in str(raised(out.backward))
        model.zero_grad()
        return found

    parity(fails_in_backward(), use, upstream=False)  # upstream computes them all


def test_B6_subset_moves_only_what_was_asked():
    """And nothing of frozen parameters."""
    model = wrap(nn.Sequential(nn.Linear(8, 1000), nn.Linear(1000, 2)))
    bias, x, sizes = model.module[1].bias, leaf(4, 8), []
    for frozen in (True, False):
        model.module[0].requires_grad_(not frozen)
        out = model(x).sum()
        for run in (
            lambda out=out: torch.autograd.grad(out, bias, retain_graph=True),
            lambda out=out: torch.autograd.grad(out, x, retain_graph=True),
            out.backward,
        ):
            before = carried(model)
            run()
            sizes.append(carried(model) - before)
    assert all(size < 1000 for size in (*sizes[:2], *sizes[3:5]))
    assert sizes[2] < 2 * (4 * 2002 + 1000) and sizes[5] > 2 * 4 * 8 * 1000


def test_B6_one_trip_per_pass():
    """However many outputs; none where a backward stops at an output."""
    model = wrap(two_heads())
    a, b = model(leaf(4, 3))
    before = model.executor.stats().backwards
    (grad,) = torch.autograd.grad(a.square().sum(), a)
    assert_close(grad, 2 * a.detach())
    assert model.executor.stats().backwards == before
    (a.sum() + b.square().sum()).backward()
    assert model.executor.stats().backwards == before + 1


@pytest.mark.parametrize(
    "transform", ["vmap", "grad", "jacrev", "batched", "vectorize", "jvp", "dual"]
)
def test_B6_transforms_and_forward_mode_are_refused(two, transform):
    """Upstream fails there, too; a tangent must not be lost in silence."""
    model = DataParallel(nn.Linear(3, 2), executor=two)
    x = torch.randn(4, 3)

    def summed(x):
        return model(x).sum(0)

    def dual():
        with torch.autograd.forward_ad.dual_level():
            assert_close(model(x), model.module(x))
            model(torch.autograd.forward_ad.make_dual(x, torch.ones(4, 3)))

    calls = {
        "vmap": lambda: torch.func.vmap(model)(x.expand(5, 4, 3)),
        "grad": lambda: torch.func.grad(lambda x: model(x).sum())(x),
        "jacrev": lambda: torch.func.jacrev(summed)(x),
        "batched": lambda: torch.autograd.grad(
            model(x), [*model.parameters()], torch.ones(5, 4, 2), is_grads_batched=True
        ),
        "vectorize": lambda: torch.autograd.functional.jacobian(summed, x, vectorize=True),
        "jvp": lambda: torch.func.jvp(model, (x,), (x,)),
        "dual": dual,
    }
    with pytest.raises(NotImplementedError, match=r"torch\.func.*functional\.jacobian"):
        calls[transform]()
    # The way out that the error names.
    found = torch.autograd.functional.jacobian(summed, x)
    assert_close(found, torch.func.jacrev(lambda x: model.module(x).sum(0))(x))


@pytest.mark.xfail(strict=True, reason="the driver's side of a graph always saves something")
@alike(lambda: Apply(lambda net, x: x + net.weight, weight=nn.Parameter(torch.ones(3))))
def test_B7_backward_twice_through_a_graph_that_saves_nothing(model):
    """Plain torch and upstream let such a graph be used again without ``retain_graph``."""
    loss = model(data(4, 3)).sum()
    loss.backward()
    loss.backward()


@made_of(one=(3, 4), two=(3, 4), scale=ones(4))
def apart(net, x, y):
    """Two heads that share nothing but parameters."""
    return {"one": net.one(x).tanh() * net.scale, "two": [net.two(y).tanh() * net.scale]}


@alike(apart, [2, 3])
def test_B8_separate_backward_on_different_outputs(model):
    """Each output's graph is freed alone, so no ``retain_graph`` is needed."""
    x, y = leaf(6, 3), leaf(6, 3)
    out = model(x, y)
    out["one"].square().sum().backward()
    first = [None if p.grad is None else p.grad.clone() for p in (x, y)]
    out["two"][0].square().sum().backward()
    assert TWICE in str(raised(out["one"].square().sum().backward))
    return first, x.grad, y.grad


@alike(mlp, 3)
def test_B9_loss_on_a_slice(model):
    """Replicas with unused rows receive zero gradients."""
    x = leaf(6, 3)
    for rows in (slice(0, 2), slice(3, 4), slice(1, 5)):
        model(x)[rows].square().sum().backward()
    return x.grad


def _step(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


EDITS = {
    "first weight": lambda model: next(model.parameters()).mul_(2),
    "bias": lambda model: list(model.parameters())[1].add_(1),
    "last weight": lambda model: list(model.parameters())[2].add_(1),
    "zeroed": lambda model: nn.init.zeros_(list(model.parameters())[3]),
    "load": lambda model: model.load_state_dict({k: 2 * t for k, t in model.state_dict().items()}),
    "step": _step,
}


OF_INPUTS = "input", "second order"


def change(model, edit):
    """Change a parameter in place."""
    with torch.no_grad():
        EDITS[edit](model)


def outcome(loss, model, x):
    """The gradients that a backward gives; None if it is refused."""
    try:
        loss.backward()
    except RuntimeError as error:
        assert IN_PLACE in str(error)
        model.zero_grad()  # plain torch has done a part
        return None
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    "how", ["alone", "input", "another forward", "second order", "another net"]
)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("width", [5, 20_000])  # weights that are sent, and that are mapped
def test_B11_in_place_change_raises_where_plain_torch_raises(width, edit, how):
    """If a tensor was saved for backward; where not, gradients are those of the forward."""

    def use(model):
        net, x = getattr(model, "module", model), data(6, 3, requires_grad=how in OF_INPUTS)
        loss = model(x).square().sum()
        if how == "second order":
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = grad.square().sum()
        first = net[0]
        if how == "another net":  # a forward comes between, whose replicas lack a layer
            net[0] = nn.Linear(3, width).requires_grad_(False)
            model(x)
        change(model, edit)
        if how == "another forward":
            model(x)
        return outcome(loss, model, x), first.weight.grad

    parity(mlp(width), use, upstream=False)


@made_of(lin=(3, 3), frozen=ones(3, requires_grad=False))
def writes_frozen(net, x, before, after):
    """Multiplies by a frozen parameter, to which it writes before or afterwards."""
    if before:
        net.frozen.mul_(0.5)
    out = net.lin(x) * net.frozen
    if after:
        net.frozen.mul_(0.5)
    return out


@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (False, False)])
def test_B11_a_frozen_parameter_that_forward_overwrites(before, after, second):
    """Where plain torch and upstream raise, also if it was a second forward that wrote."""
    results = []
    for model in trio(writes_frozen(), 2):
        x = data(4, 3)
        outs = [model(x, before, after) for _ in range(2 if second else 1)]
        results.append([outcome(out.sum(), model, x) is None for out in outs])
        if second and before:
            assert results[-1] == [True, False]
    assert results[0] == results[1] == results[2]


@made_of(frozen=ones(20_000, requires_grad=False))
def doubles(net, x):
    """Multiplies by a large parameter, which a chunk of ones doubles."""
    if x[0, 0] == 1:
        net.frozen.mul_(2)
    return x * net.frozen


@alike(doubles, plain=False)
def test_B11_what_chunk_0_writes_reaches_no_other_chunk(model):
    """Those have copies of their own."""
    x = torch.tensor([[1.0], [3.0]]).repeat(1, 20_000).requires_grad_()
    model(x).sum().backward()
    return x.grad


@pytest.mark.parametrize("what", ["input", "weight"])
def test_B11_what_no_version_shows_does_not_reach_the_graph(what):
    """An input, for which torch raises, or a weight by ``.data``."""
    models = trio(mlp(), 2)
    x = data(6, 3)
    models.plain(x).square().sum().backward()
    loss = models.ours(x).square().sum()
    (x if what == "input" else models.ours.module[2].weight.data).mul_(3)
    loss.backward()
    assert_same_grads(models.ours, models.plain)


@alike(made_of(weight=ones(3), scale=nn.Buffer(torch.ones(3)))(lambda net, x: net.scale * x))
def test_B11_buffer_changed_in_the_driver(model):
    """The check covers buffers too."""
    loss = model(leaf(4, 3)).sum()
    next(model.buffers()).add_(1)
    assert IN_PLACE in str(raised(loss.backward))


@pytest.fixture
def quiet_gc():
    """Nothing is collected but by counting references, and nothing that is older than the test."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def _second_order(model, failing=False):
    x = leaf(4, 3)
    loss = model(x).square().sum()
    torch.autograd.grad(loss, x, create_graph=True)
    if failing:
        loss.backward()
        with pytest.raises(RuntimeError):
            loss.backward()


def _checkpointed(model):
    checkpoint(model, leaf(4, 3), use_reentrant=True).sum().backward()


STEPS = {
    "dropped": lambda model: model(leaf(4, 3)),
    "retained": lambda model: model(leaf(4, 3)).square().sum().backward(retain_graph=True),
    "second order, dropped": _second_order,
    "second order, failed": lambda model: _second_order(model, failing=True),
    "checkpoint": _checkpointed,
}


LOOKS = range(20)
"""On a GPU torch's own thread lets go of a graph a little later."""


@pytest.mark.parametrize("step", STEPS)
def test_B12_no_reference_cycles_and_no_graphs_left(step, quiet_gc):
    """Without references replicas hold no graph, and there are no more cycles than torch's."""
    step, plain = STEPS[step], mlp()
    model = wrap(copy.deepcopy(plain))
    found = []
    for one in (model, plain):
        step(one)
        one.zero_grad()
        gc.collect()
        before = min(graphs(model) for _ in LOOKS)
        step(one)
        one.zero_grad()
        assert min(graphs(model) for _ in LOOKS) == before
        found.append(gc.collect())
    assert found[0] == found[1]
    # a reentrant checkpoint leaves a cycle of its own
    assert step is _checkpointed or found[0] == 0


def test_B12_no_reference_cycles_of_batches(quiet_gc):
    """What was split and joined is freed, of all kinds of containers."""
    value = [leaf(4), {"deep": (leaf(4), "leaf")}, UserDict(x=leaf(4))]
    gather(scatter(value, range(2)), "cpu")
    gather(scatter_kwargs((value,), {"k": value}, range(2))[1], "cpu")
    assert gc.collect() == 0


def test_B12_output_holds_the_graph(quiet_gc):
    """In every replica that has one, until backward without ``retain_graph``."""
    model = wrap(two_heads())
    before = graphs(model)
    out, second = model(data(4, 3))
    other = model(data(1, 3))
    held = graphs(model)
    assert sorted(b - a for a, b in zip(before, held, strict=True))[-2:] == [1, 2]
    del out
    assert graphs(model) == held
    loss = second.sum()
    loss.backward(retain_graph=True)
    assert graphs(model) == held
    loss.backward()
    assert second.requires_grad and sum(graphs(model)) == sum(before) + 1
    kept = other[0].detach()
    del other
    assert graphs(model) == before and not kept.requires_grad


def test_B12_the_memory_of_gradients_goes_with_the_model(two):
    """Sums lie where earlier ones did, unless the program, or another process, has that memory."""
    model = DataParallel(nn.Linear(300, 300), executor=two)
    model(torch.ones(4, 300)).sum().backward()
    if not model.module.weight.is_cuda:
        kept = model.module.weight.grad.untyped_storage()
        model.zero_grad()
        model(torch.ones(4, 300)).mean().backward()
        assert torch.empty(0).set_(kept)[0] == 4
        lent, size = model.module.weight.grad.untyped_storage()._share_fd_cpu_()
        before = os.pread(lent, size, 0)
        model.zero_grad()
        model(torch.ones(4, 300)).mean().backward()
        assert os.pread(lent, size, 0) == before
    memory = model.module.weight.grad.untyped_storage()._weak_ref()
    del model
    gc.collect()
    assert torch.UntypedStorage._expired(memory)


def test_B12_inputs_are_not_kept_alive(quiet_gc):
    """The driver keeps no batch beyond the graph that needs it."""
    x = data(4, 3)
    alive = weakref.ref(x)
    out = wrap(mlp())(x)
    del x
    assert alive() is None and out.requires_grad


@alike(apart, plain=False)
def test_B12_failed_backward_leaves_nothing_behind(model):
    """A hook raises after some gradients arrived; the next backward has only its own."""
    x = leaf(4, 3)
    a, b = model(x, x).values()
    b = b[0]
    handle = b.register_hook(fails)
    for sums in ([b.sum(), a.sum()], [a.sum(), b.sum()]):
        error = raised(lambda sums=sums: torch.autograd.backward(sums, retain_graph=True))
        assert "no gradient today" in str(error)
    handle.remove()
    model.zero_grad()
    x.grad = None
    b.sum().backward()
    return x.grad


def test_B12_what_fails_keeps_neither_graph_nor_model(quiet_gc):
    """A differentiable pass before all outputs had gradients; an argument that cannot be sent."""
    model, x = wrap(mlp()), leaf(4, 3)
    alive, before = weakref.ref(model.module), graphs(model)
    first, second = model.call("forward", x, gather=False)
    first.register_hook(fails)
    with pytest.raises(KeyError, match="no gradient today"):
        torch.autograd.grad((first + second.square()).sum(), x, create_graph=True)
    del first, second
    torch.ones((), requires_grad=True).backward()  # torch drops what it still had to do
    gc.collect()
    assert graphs(model) == before
    with pytest.raises(TransferError):
        model(x, (i for i in range(3)))
    del model
    assert alive() is None


@alike(
    made_of(inner=mlp)(lambda net, x: net.inner(x).square().mean()),
    [2, 3],
    upstream=False,
    options=Options(scalars="mean"),
)
def test_B13_weighted_mean_is_the_batch_mean(model):
    """``Options(scalars="mean")`` weighs chunks by their rows, gradients too."""
    loss = model(data(7, 3))
    loss.backward()
    return loss.detach()


def test_B13_chunks_are_weighed_where_gather_is_overridden(two):
    """As one that asks the class's gives it what it was given."""
    net, x = made_of(inner=mlp)(lambda net, x: net.inner(x).square().mean())(), data(5, 3)
    model = DataParallel(net, executor=two, options=Options(scalars="mean"))
    model.gather = lambda outs, place: 2 * DataParallel.gather(model, [*outs], place)
    assert_close(model(x), 2 * net(x))
    # A rule that splits does not tell rows.
    own = type("Own", (), {"__scatter__": lambda self, chunks, _dim: [self] * chunks})
    assert "rows of chunks are not known" in str(raised(lambda: model(own())))


@made_of(layer=(3, 2), constant=lambda: nn.Parameter(torch.arange(2.0)))
def everything(net, x):
    """Returns what a module may return."""
    y = net.layer(x)
    nested = [{"square": y.square()}, (y.argmax(1), y > 0)]
    more = {"detached": y.detach(), "input": x, "constant": net.constant, "none": None}
    return {"y": y, "again": y, "nested": nested, **more}


@alike(everything, plain=False)
def test_B14_mixed_outputs(model):
    """Integers, masks, detached ones, the input, a parameter, one tensor twice, nested, None."""
    x = leaf(5, 3)
    out = model(x)
    square, (classes, mask) = out["nested"][0]["square"], out["nested"][1]
    assert all(t.requires_grad for t in (out["y"], out["again"], square))
    assert not out["detached"].requires_grad
    assert classes.dtype is torch.int64 and mask.dtype is torch.bool
    loss = out["y"].sum() + out["again"].square().sum() + square.sum()
    loss = loss + (out["input"] * 3).sum() + out["constant"].square().sum()
    loss.backward()
    return {key: value for key, value in out.items() if key != "nested"}, x.grad


@alike(nn.Identity, plain=False)
def test_B14_identity_module_returns_a_new_tensor(model):
    """Its output is not its input, and has the input's gradient, of both orders."""
    x = leaf(5, 3)
    out = model(x)
    assert out.data_ptr() != x.data_ptr()
    (grad,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert model(torch.ones(4, 2)).grad_fn is None
    return out.detach(), grad.detach(), x.grad


@alike(mlp)
def test_B14_outputs_can_be_changed_in_place(model):
    """Outputs are the caller's."""
    x = leaf(4, 3)
    out = model(x)
    out.mul_(2).add_(1)
    out[0] = 0
    out.square().sum().backward()
    return out.detach(), x.grad


def slope(net, x):
    """Differentiate in forward."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(net.inner(x).sum(), x, create_graph=True)
    return grad


@alike(lambda: Apply(slope, inner=mlp()), plain=False)
def test_B14_autograd_inside_forward(model):
    """An energy model: its output is a gradient, and trains."""
    out = model(data(6, 3))
    out.square().sum().backward()
    return out.detach()


def test_functional_data_parallel_of_a_temporary_module(killable):
    """The module may be gone before backward, unless its replicas are."""
    plain, x = mlp(), leaf(4, 3)
    out = raydp_parallel.data_parallel(copy.deepcopy(plain), x, ["cpu"] * 2)
    gc.collect()
    grads = [torch.autograd.grad(o.square().sum(), x) for o in (out, plain(x))]
    assert_close(*grads)
    out = DataParallel(mlp(), executor=killable)(x).sum()
    gc.collect()
    kill(killable, 0, 1)
    assert "because the module is gone" in str(raised(out.backward))


@made_of(inner=(3, 3))
def recurrent(net, x, state):
    """Detaches the state that it is given where its input is positive."""
    return torch.tanh(net.inner(x) + (state.detach() if x[0, 0] > 0 else state))


@alike(recurrent, [2, 3], upstream=False)
def test_B7_an_input_that_forward_detaches_is_in_no_graph(model):
    """So the graph that made it may be freed by then, as in truncated backpropagation in time."""
    state = torch.zeros(6, 3)
    for number in range(1, 4):
        state = model(torch.full((6, 3), float(number)), state)
        state.square().sum().backward()


@alike(recurrent, plain=False)
def test_B7_an_input_that_one_chunk_uses_gets_its_gradient(model):
    """And that of the chunk that detached it is zero, as in upstream."""
    start = torch.ones(4, 3, requires_grad=True)
    model(torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]).expand(4, 3), start * 2).sum().backward()
    assert start.grad[:2].tolist() == [[0.0] * 3] * 2
    return start.grad
