"""The contract's section 1.4: what a replica is, and what of it comes back (rows R1 to R21)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from harness import (
    Apply,
    assert_same_grads,
    assert_same_state,
    copied,
    made_of,
    ones,
    raised,
    tiny_gpt2,
    trio,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import raydp_parallel
from raydp_parallel import DataParallel, parallel_apply, replicate

CPUS = ["cpu", "cpu"]


def train(x: Tensor, ours: Any, *others: Any, **tolerance: Any) -> Tensor:
    """One forward and backward of each: the others have our outputs and gradients."""
    outs = []
    for model in (ours, *others):
        model.zero_grad()
        outs.append(model(x))
        outs[-1].abs().square().sum().backward()
        torch.testing.assert_close(outs[-1], outs[0], **tolerance)
        assert_same_grads(ours, model, **tolerance)
    return outs[0].detach()


def report(find: Callable[[Any, Tensor], Any]) -> Any:
    """A module that gives what a function finds in it, as one row per row of its input."""

    def forward(net: Any, x: Tensor) -> Tensor:
        found = torch.as_tensor([float(value) for value in find(net, x)])
        return found.to(x.device).expand(len(x), -1) + 0 * x.sum()

    params, named = nn.ParameterList([ones(1), ones(2)]), nn.ParameterDict({"a": ones(3)})
    parts = {"weight": ones(2, 3), "child": nn.Linear(3, 2), "params": params, "named": named}
    return Apply(forward, **parts, buffer=nn.Buffer(torch.zeros(3)))


DTYPES = {
    f"{name}_": nn.Parameter(torch.rand(3).to(getattr(torch, name)))
    for name in ("double", "float", "half", "bfloat16")
}


@made_of(
    **DTYPES,
    scalar=nn.Parameter(torch.tensor(2.0, dtype=torch.float64)),
    empty=nn.Parameter(torch.empty(0, 3, dtype=torch.float64)),
    ints=nn.Buffer(torch.arange(3)),
    flags=nn.Buffer(torch.tensor([True, False, True])),
)
def mixed(net: Any, x: Tensor) -> Tensor:
    """Uses parameters of many kinds."""
    x = x * net.double_ * net.scalar + net.float_ + net.half_ + net.bfloat16_
    return x * net.ints + net.flags + net.empty.sum()


@made_of(
    weight=lambda: nn.Parameter(torch.randn(3, dtype=torch.complex64)),
    doubles=lambda: nn.Parameter(torch.randn(3, 3, dtype=torch.complex128)),
    mean=nn.Buffer(torch.zeros(3, dtype=torch.complex64)),
)
def complex_net(net: Any, x: Tensor) -> Tensor:
    """Complex weights and buffers."""
    net.mean.add_(x.detach().mean(0))
    return ((x * net.weight).to(torch.complex128) @ net.doubles) + net.mean


@pytest.mark.upstream
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("make", [mixed, complex_net])
def test_R1_R17_every_replica_computes_with_the_master_s_values(make: Any, replicas: int) -> None:
    """All dtypes at once, 0-dim and empty tensors among them, in as many replicas as there are."""
    ours, theirs, _ = trio(make(), replicas)
    for _ in range(2):
        train(torch.randn(8, 3, dtype=torch.float64), ours, theirs)
        assert_same_state(ours, theirs)


def look(net: Any, x: Tensor) -> list[Any]:
    """What there is of parameters, and what requires gradients."""
    first, parameters = next(net.parameters()), [*net.parameters()]
    real = [isinstance(p, nn.Parameter) and p.is_leaf for p in parameters]
    counts = [len(parameters), len(net.state_dict()), len([*net.named_buffers()])]
    named = [net.named["a"].numel(), [*net.named_parameters()][1][0] == "child.weight"]
    grads = [p.requires_grad for p in parameters]
    modes = [torch.is_grad_enabled(), (x @ net.weight.t()).requires_grad]
    return [*real, first is net.weight, len(net.params), *counts, *named, *grads, *modes]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_R2_R4_R9_replicas_have_real_parameters(mode: Any) -> None:
    """A deviation: upstream's replicas have none, so that next(self.parameters()) raises, or under
    no_grad replica 0 alone has them. Frozen ones are frozen in each.
    """
    net = report(look)
    net.child.requires_grad_(False)
    with mode():
        expected = net(torch.ones(1, 3))
        assert DataParallel(net, CPUS)(torch.ones(2, 3)).tolist() == expected.tolist() * 2
        error = raised(lambda: oracle.DataParallel(net, [0, 1])(torch.ones(2, 3)))
    assert expected[0, :6].tolist() == [1.0] * 6
    assert isinstance(error, (StopIteration, RuntimeError))


def test_R3_zero_grad_in_a_replica_warns_and_leaves_the_master_s_gradients() -> None:
    """As upstream's. The module is no replica afterwards, and was not changed."""

    def forward(net: Any, x: Tensor) -> Tensor:
        if getattr(net, "_is_replica", False):
            net.zero_grad()
        return x * net.weight

    ours, theirs, _ = trio(Apply(forward, weight=nn.Parameter(torch.ones(3))), 2)
    sends = ours.executor.stats().state_sends
    for model in (ours, theirs):
        model.module.weight.grad = torch.ones(3)
        for _ in range(2):
            with pytest.warns(UserWarning, match="created with nn.DataParallel.* has no effect"):
                out = model(torch.ones(4, 3))
        out.sum().backward()
        assert model.module.weight.grad.tolist() == [5.0] * 3
        assert not hasattr(model.module, "_is_replica")
    assert ours.executor.stats().state_sends == sends + 2


def test_R3_parameters_that_functional_call_swaps_are_used_in_a_replica() -> None:
    """What is shown besides is not what the module computes with."""

    def find(net: Any, x: Tensor) -> Any:
        swapped = {"weight": torch.full((2, 3), 5.0), "bias": torch.zeros(2)}
        return torch.func.functional_call(net.child, swapped, (x,)).flatten().tolist()

    assert DataParallel(report(find), CPUS)(torch.ones(2, 3)).tolist() == [[15.0, 15.0]] * 2


def replicated(
    verbs: Any, devices: list[Any], net: nn.Module, detach: bool
) -> tuple[list[bool], Any, Any]:
    """Which outputs have a graph of their own, and the weight's and the input's gradients."""
    net.zero_grad()
    x = torch.ones(2, 3, requires_grad=True)
    plain = verbs.parallel_apply(verbs.replicate(net, devices, detach), [torch.ones(2, 3)] * 2)
    outs = verbs.parallel_apply(verbs.replicate(net, devices, detach), [x, x])
    sum(out.sum() for out in outs).backward()
    return [o.requires_grad for o in plain], net.weight.grad, x.grad


@pytest.mark.parametrize("detach", [False, True])
def test_R4_replicate_is_differentiable_as_upstream_s_without_detach(detach: bool) -> None:
    """With detach no output leads to the module, and inputs get theirs."""
    net = nn.Linear(3, 2)
    ours = replicated(raydp_parallel, CPUS, net, detach)
    theirs = replicated(oracle, [0, 1], net, detach)
    assert ours[0] == [not detach] * 2
    torch.testing.assert_close(ours[1], None if detach else theirs[1])
    torch.testing.assert_close(ours[2], theirs[2])


@pytest.mark.upstream
@pytest.mark.parametrize("chosen", [(0,), (1,), (1, 0), (1, 2)])
def test_R6_only_the_first_replica_writes_back(chosen: tuple[int, ...]) -> None:
    """Wherever it stands among those that are called, which may be one alone."""
    found = []
    for verbs, devices in ((raydp_parallel, ["cpu"] * 3), (oracle, range(3))):
        net = Apply(lambda net, x: net.sum.add_(x.sum()) * 0, sum=nn.Buffer(torch.zeros(())))
        replicas, inputs = verbs.replicate(net, devices), [torch.ones(i + 1) for i in chosen]
        verbs.parallel_apply([replicas[i] for i in chosen], inputs)
        found.append(net.sum.item())
        replicas[chosen[0]](torch.ones(5))
        found.append(net.sum.item())
    assert found[:2] == found[2:]


def test_R8_buffers_that_require_grad_get_one() -> None:
    """The sum over replicas, and zeros where unused, as upstream's second broadcast gives."""
    weight = nn.Parameter(torch.ones(3))
    scale, unused = (nn.Buffer(torch.full((3,), n, requires_grad=True)) for n in (2.0, 1.0))
    net = Apply(
        lambda net, x: x * net.weight * net.scale, weight=weight, scale=scale, unused=unused
    )
    ours, theirs, _ = trio(net, 2)
    train(torch.randn(4, 3), ours, theirs)
    for name in ("scale", "unused"):
        torch.testing.assert_close(
            ours.module.get_buffer(name).grad, theirs.module.get_buffer(name).grad
        )
    with torch.no_grad():
        assert not ours(torch.ones(4, 3)).requires_grad
    torch.testing.assert_close(
        *(torch.autograd.grad(m(torch.ones(4, 3)).sum(), m.module.scale)[0] for m in (ours, theirs))
    )


@pytest.mark.parametrize("replicas", [2, 3])
def test_R10_a_tied_transformer_is_trained_to_the_bit(replicas: int) -> None:
    """With padded rows; decay would show parameters without a gradient."""
    ours, theirs, _ = trio(tiny_gpt2(), replicas)
    both = [(m, torch.optim.AdamW(m.parameters(), 3e-3, weight_decay=0.1)) for m in (ours, theirs)]
    mask = torch.ones(7, 12, dtype=torch.int64)
    mask[1::2, 9:] = 0
    for ids in torch.randint(48, (20, 7, 12)):
        losses = []
        for model, optimizer in both:
            optimizer.zero_grad()
            logits = model(input_ids=ids, attention_mask=mask)["logits"]
            losses.append(cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
            losses[-1].backward()
            optimizer.step()
        assert torch.equal(*losses)
        assert_same_grads(ours, theirs, rtol=0, atol=0)
    assert_same_state(ours, theirs, rtol=0, atol=0)
    assert ours.module.lm_head.weight is ours.module.transformer.wte.weight


class Indirect(nn.Module):
    """Reaches weights through unusual attributes; some entries are None, a buffer is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3, bias=False)
        self.listed = [self.linear, self.other]
        self.mapped = {"a": {"b": self.linear}}
        self.bound = self.helper
        self.tensor = torch.ones(3)
        self.tensors = [torch.ones(3), (torch.ones(3),)]
        self.weight_of = self.linear.weight
        self.forward = self.instead
        self.register_parameter("no_parameter", None)
        self.register_buffer("no_buffer", None)
        self.register_module("no_child", None)
        self.register_buffer("unkept", torch.ones(3), persistent=False)

    def helper(self, x: Tensor) -> Tensor:
        assert self.listed[0] is self.mapped["a"]["b"] is self.linear
        assert self.weight_of is self.linear.weight
        assert self.no_parameter is self.no_buffer is self.no_child is self.other.bias is None
        assert "unkept" not in self.state_dict()
        return self.linear(x) * self.unkept

    def instead(self, x: Tensor) -> Tensor:
        x = self.bound(x) * self.tensor * self.tensors[0] * self.tensors[1][0]
        for layer in self.listed:
            x = layer(x)
        return x


def test_R11_R13_what_is_in_other_attributes_follows_the_replica() -> None:
    """Upstream leaves it to the master; here it is the replica's own, gradients included."""
    ours, _, plain = trio(Indirect(), 2)
    for net in (ours.module, plain):
        net.tensor.requires_grad_()
        net.tensors[0].requires_grad_()
    for _ in range(2):
        train(torch.randn(4, 3), ours, plain)
        for name in ("tensor", "tensors"):
            pair = [getattr(net, name) for net in (ours.module, plain)]
            torch.testing.assert_close(*[t.grad if name == "tensor" else t[0].grad for t in pair])
        for net in (ours.module, plain):
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(0.5)
                net.tensor.mul_(2)


LAZY = {
    "linear": lambda: nn.LazyLinear(3),
    "below": lambda: nn.Sequential(nn.ReLU(), nn.LazyBatchNorm1d()),
}


@pytest.mark.parametrize("name", LAZY)
def test_R14_lazy_modules_are_refused_in_upstream_s_words(name: str) -> None:
    """From the wrapper and from `replicate`; after a dummy forward they run."""
    net = LAZY[name]()
    upstreams = raised(lambda: oracle.DataParallel(net, [0, 1])(torch.ones(4, 3)))
    assert type(upstreams) is ValueError
    assert str(upstreams).startswith("Attempted to use an uninitialized parameter")
    for call in (lambda: DataParallel(net, CPUS)(torch.ones(4, 3)), lambda: replicate(net, CPUS)):
        error = raised(call)
        assert type(error) is ValueError
        assert str(error) == str(upstreams)
    net(torch.randn(4, 3))
    assert DataParallel(net, CPUS)(torch.ones(4, 3)).shape == (4, 3)


@pytest.mark.upstream
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_R15_python_below_a_script_is_refused_in_upstream_s_words() -> None:
    """As `replicate` does there."""
    script = torch.jit.script(nn.Sequential(nn.Linear(3, 3)))
    vars(script._modules)["_python_modules"]["0"] = nn.Linear(3, 3)
    words = str(raised(lambda: oracle.replicate(script, [0, 1])))
    assert words == "Cannot replicate network where python modules are children of ScriptModule"
    for call in (
        lambda: replicate(script, CPUS),
        lambda: DataParallel(script, CPUS)(torch.ones(4, 3)),
    ):
        error = raised(call)
        assert type(error) is RuntimeError
        assert str(error) == words


def test_R16_replicate_for_no_device_is_empty() -> None:
    """`replicate(m, [])` is []."""
    assert replicate(nn.Linear(1, 1), []) == oracle.replicate(nn.Linear(1, 1), []) == []


@pytest.mark.parametrize(
    "devices", [{0, 1}, (0, 1), range(2), iter([0, 1]), ["cuda:0", torch.device("cuda", 1)]]
)
def test_R16_devices_may_be_any_collection(devices: Any) -> None:
    """Sets, ranges, iterators; torch devices and their names."""
    net = nn.Linear(3, 2)
    replicas = replicate(net, devices)
    x = torch.randn(4, 3)
    assert len(replicas) == 2
    torch.testing.assert_close(torch.cat(parallel_apply(replicas, x.chunk(2))), net(x))


@made_of(
    conv=lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    turned=lambda: nn.Parameter(torch.randn(4, 3).t()),
)
def strides(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Says how its weights lie."""
    found = torch.tensor([*net.conv.weight.stride(), *net.turned.stride(), *x.stride()])
    return net.conv(x) * net.turned.sum(), found.expand(len(x), -1)


def test_R18_strides_are_kept_in_replicas_and_in_gradients() -> None:
    """channels_last weights, transposed ones, and inputs; gradients lie as their parameters."""
    ours, theirs, plain = trio(strides(), 2)
    images = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    xs = [images.clone().requires_grad_() for _ in range(3)]
    results = [model(x) for model, x in zip((ours, theirs, plain), xs, strict=True)]
    for x, (out, found) in zip(xs, results, strict=True):
        out.sum().backward()
        assert x.grad.is_contiguous(memory_format=torch.channels_last)
        assert found[0].tolist() == results[2][1][0].tolist()
        assert out.is_contiguous(memory_format=torch.channels_last)
    assert_same_grads(ours, theirs)
    for model in (ours, theirs):
        weight = model.module.conv.weight
        assert weight.grad.stride() == weight.stride()
        assert model.module.turned.grad.stride() == model.module.turned.stride()


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("again", ["deepcopy", "pickle", "torch.save"])
def test_R19_replicas_can_be_pickled_and_copied(detach: bool, again: str) -> None:
    """After a forward too, with a module of its own; upstream only copies detached ones."""
    net = nn.Linear(3, 2)
    replica = replicate(net, CPUS, detach)[1]
    replica(torch.ones(2, 3))
    other = copied(again, replica)
    x = torch.randn(4, 3)
    before = net(x)
    torch.testing.assert_close(other(x), before, check_stride=False)
    assert other(x).requires_grad != detach
    with torch.no_grad():
        net.weight.zero_()
    torch.testing.assert_close(other(x), before)
