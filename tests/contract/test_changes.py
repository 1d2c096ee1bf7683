"""Every edit of the master copy is seen, nothing else is sent, and chunk 0's writes come back."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Apply, assert_same_state, made_of, ones, trio
from random_nets import Checkpointed
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from raydp_parallel import DataParallel, Executor, data_parallel

CPUS = ["cpu", "cpu"]


# --- a module that depends on everything that can be edited ---


@dataclass
class Inner:
    """A config inside a config."""

    scale: float = 1.0


class Config:
    """A plain object that a module holds."""

    def __init__(self) -> None:
        self.inner = Inner()
        self.shift = torch.zeros(4)


class Scaled(nn.Linear):
    """A linear layer that reads an attribute of its parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.weight, "gain", 1.0)


def closure(
    scale: list[float], offset: float
) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    """A function over closed-over variables, and what rebinds one of them."""

    def apply(x: Tensor) -> Tensor:
        return x * scale[0] + offset

    def rebind(value: float) -> None:
        nonlocal offset
        offset = value

    return apply, rebind


class Net(nn.Module):
    """Reads every kind of state in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled(4, 4)
        self.second = nn.Linear(4, 4)
        self.mode = Apply(lambda net, x: x * 2 if net.training else x)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.named = nn.ParameterDict({"b": nn.Parameter(torch.ones(4))})
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("unkept", torch.ones(4), persistent=False)
        self.register_buffer("absent", None)
        self.register_buffer("sparse", torch.eye(4).to_sparse())
        self.register_buffer("conjugate", torch.ones(4, dtype=torch.cfloat).mul(1j).conj())
        self.plain = torch.ones(4)
        self.tensors = {"c": [torch.ones(4)]}
        self.config = Config()
        self.list = [1.0, [1.0]]
        self.dict = {"a": 2.0, "b": 1.0}
        self.array = np.ones(4, dtype=np.float32)
        self.function, self.rebind = closure([1.0], 0.0)
        self.gate = 1.0
        self.paths: list[nn.Module] = [self.second]
        self.tail: Any = None
        self.mode.register_forward_hook(lambda _module, _args, out: out * 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(self.second(self.mode(self.first(x))))
        for block in self.blocks:
            x = block(x)
        buffers = [self.kept, self.unkept, self.plain, *self.tensors["c"]]
        for factor in (*self.extra, *self.named.values(), *buffers):
            x = x * factor
        x = x if self.absent is None else x + self.absent
        x = torch.mm(self.sparse, x.t()).t() + self.conjugate.imag
        x = x * self.config.inner.scale + self.config.shift
        x = x * self.gate
        x = x * self.list[0] * self.list[1][-1] * next(iter(self.dict.values()))
        x = x * torch.from_numpy(self.array.copy()).to(x.device)
        x = x if self.tail is None else self.tail(x)
        return self.scale_last(x)

    def scale_last(self, x: Tensor) -> Tensor:
        return x


EDITS = {
    "data.mul_": "net.second.weight.data.mul_(2)",
    "one element of data": "net.second.weight.data[3, 3] = 8.0",
    "data of a buffer": "net.kept.data.mul_(2)",
    "data of a plain tensor": "net.plain.data.mul_(2)",
    "data of a tensor in containers": "net.tensors['c'][0].data.mul_(2)",
    "data of a tensor in a config": "net.config.shift.data.add_(2)",
    # The allocator hands the same addresses out again.
    "data = again and again": "for i in range(50): net.second.weight.data = torch.eye(4) + i",
    "data = other strides": "net.second.weight.data = net.second.weight.data.t().clone().t() * 2",
    "vector_to_parameters": "nn.utils.vector_to_parameters(torch.ones(68), net.parameters())",
    "set_": "with torch.no_grad(): net.second.weight.set_(torch.full((4, 4), 0.3))",
    "in place on a view": "net.second.weight.detach()[0].fill_(2)",
    "new parameter": "net.second.weight = nn.Parameter(torch.full((4, 4), 0.5))",
    "bias = None": "net.second.bias = None",
    "buffer replaced": "net.kept = twos",
    "buffer filled": "net.absent = torch.ones(4)",
    "sparse in place": "net.sparse.mul_(2)",
    "sparse values": "net.sparse._values().mul_(2)",
    "sparse replaced": "net.sparse = (torch.eye(4) * 3).to_sparse()",
    "sparse made dense": "net.sparse = torch.eye(4) * 3",
    "conjugate": "net.conjugate.mul_(2)",
    "plain tensor replaced": "net.plain = twos",
    "plain tensor in place": "net.plain.mul_(2)",
    "tensor in containers replaced": "net.tensors['c'][0] = twos",
    "plain to parameter": "del net.plain; net.plain = nn.Parameter(twos)",
    "parameter to plain": "del net.second.weight; net.second.weight = torch.eye(4)",
    "requires_grad_ of a parameter": "net.second.weight.requires_grad_(False)",
    "requires_grad_ of a buffer": "net.kept.requires_grad_()",
    "eval of a submodule": "net.mode.eval()",
    "double": "net.double()",
    "double, then float": "net.double().float()",
    "tied": "net.second.weight = net.first.weight",
    "memory tied": "net.second.weight.data = net.first.weight.data",
    "child added": "net.blocks.append(nn.Linear(4, 4))",
    "child removed": "del net.blocks[0]",
    "child shared": "net.blocks[0] = net.second",
    "class of a child": "net.second.__class__ = nn.Identity",
    "module in an attribute": "net.tail = nn.Linear(4, 4)",
    "method patched": "net.scale_last = types.MethodType(lambda self, x: x * 5 * self.gate, net)",
    "function patched": "net.scale_last = lambda x: x * 5",
    "forward of a child patched": "net.second.forward = five_times(net.second.forward)",
    "hook added": "net.second.register_forward_hook(lambda _net, _args, out: out * 2)",
    "hook exchanged": "for key in net.mode._forward_hooks: net.mode._forward_hooks[key] = triple",
    "parametrized": "parametrizations.weight_norm(net.second); net.second.weight *= 2",
    "pruned": "prune.l1_unstructured(net.second, 'weight', amount=0.5)",
    "parameter list appended": "net.extra.append(nn.Parameter(twos))",
    "parameter dict item": "net.named['z'] = nn.Parameter(twos)",
    "attribute of a parameter": "net.first.weight.gain = 3.0",
    "tensor attribute of a parameter": "net.first.weight.gain = nn.Parameter(torch.ones(4) * 2)",
    "number": "net.gate = 3.0",
    "nested config": "net.config.inner.scale = 3.0",
    # The class's default takes its place.
    "attribute deleted": "net.config.inner.scale = 3.0; del net.config.inner.scale",
    "list item": "net.list[0] = 3.0",
    "dict order": "net.dict['a'] = net.dict.pop('a')",
    "array": "net.array[1] = 3.0",
    "closure's variable": "net.rebind(3.0)",
    "data = other shape": """
net.first.weight.data, net.first.bias.data = torch.randn(6, 4), torch.randn(6)
net.second.weight.data = torch.randn(4, 6)
""",
    "data = at the same address": """
pointer = net.second.weight.data_ptr()
net.second.weight.data = torch.empty(0)
found = [torch.full((4, 4), 7.0) for _ in range(64)]
net.second.weight.data = next((t for t in found if t.data_ptr() == pointer), found[0])
""",
}


def five_times(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x) * 5


def triple(_module: nn.Module, _args: object, out: Tensor) -> Tensor:
    return out * 3


def chunked(net: nn.Module, x: Tensor) -> Tensor:
    """What replicas would compute, bit for bit."""
    return torch.cat([net(chunk) for chunk in x.chunk(2)])


def grads_of(loss: Tensor, net: nn.Module) -> list[Tensor | None]:
    net.zero_grad()
    loss.backward()
    found = [p.grad for p in net.parameters()]
    net.zero_grad()
    return found


def assert_runs_as(model: DataParallel[Any], net: nn.Module) -> Tensor:
    """The wrapper's outputs and gradients are the plain module's."""
    x = torch.linspace(-1, 1, 16).view(4, 4).to(next(net.parameters()).dtype)
    ours, plain = model(x), chunked(net, x)
    assert torch.equal(ours, plain)
    assert ours.requires_grad == plain.requires_grad
    if plain.requires_grad:
        found = grads_of(ours.sum(), net), grads_of(plain.sum(), net)
        for parameter, one, other in zip(net.parameters(), *found, strict=True):
            if other is None:  # an unused parameter has zeros, as upstream's (row B3)
                assert one is None or (parameter.requires_grad and not one.any())
            else:
                assert one is not None
                size = float(other.abs().max())
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * size)
    return ours.detach()


NO_EFFECT_ON_OUTPUT = ("requires_grad_ ", "double, then float", "attribute deleted")


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_between_two_forwards_is_seen(name: str) -> None:
    """Whatever is edited, the next forward runs the module as it is now."""
    net = Net()
    model = DataParallel(net, CPUS)
    before = assert_runs_as(model, net)
    exec(EDITS[name], {**globals(), "net": net, "twos": torch.full((4,), 2.0)})
    after = assert_runs_as(model, net)
    if not name.startswith(NO_EFFECT_ON_OUTPUT):
        assert not torch.equal(before, after), "it does not show in the output: no proof"
    assert torch.equal(assert_runs_as(model, net), after)


# --- functions and classes that travel by value ---


SOURCE = """
from collections.abc import Callable
import torch
from torch import nn

SCALE = 1.0
TABLE = {"a": [1.0]}

def helper(x):
    try:
        return x * SCALE * LATER
    except NameError:
        return x * SCALE * TABLE["a"][-1]

class Base(nn.Module):
    factor = 1.0

class Net(Base):
    limit = [1.0]
    pairs = dict[str, int]  # which Python 3.10 takes for a class
    function = Callable[..., object]

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.add = lambda x: x + SHIFT

    def forward(self, x):
        factor = self.factor * self.limit[0] * len(self.pairs.__args__)
        return self.add(helper(x * self.weight)) * factor

SHIFT = 0.0
"""


@pytest.fixture
def script() -> types.ModuleType:
    """A module that no replica can import, as a script's `__main__` or a notebook is."""
    found = types.ModuleType("raydp_parallel_tests_no_such_module")
    exec(SOURCE, vars(found))
    return found


BY_VALUE = {
    "global number": "script.SCALE = 3.0",
    "global that was not there": "script.LATER = 3.0",
    "global that a lambda uses": "script.SHIFT = 3.0",
    "inside a global": "script.TABLE['a'].append(3.0)",
    "function": "script.helper = lambda x: x * 7",
    "method": "script.Net.forward = lambda self, x: self.add(x * 7)",
    "class attribute": "script.Net.factor = 3.0",
    "attribute of a base class": "script.Base.factor = 3.0",
    "inside a class attribute": "script.Net.limit[0] = 3.0",
    "generic alias": "script.Net.pairs = list[int]",
}


@pytest.mark.parametrize("name", BY_VALUE)
def test_edits_of_a_script_s_functions_and_classes_are_seen(script: Any, name: str) -> None:
    """What is defined in a script travels by value, and so do the globals that it uses."""
    net = script.Net()
    model = DataParallel(net, CPUS)
    before = model(torch.ones(4, 3))
    exec(BY_VALUE[name], {"script": script, "__name__": __name__})
    after = model(torch.ones(4, 3))
    assert torch.equal(after, net(torch.ones(4, 3)))
    assert not torch.equal(before, after)


def test_functions_that_are_gone_leave_nothing() -> None:
    """In a notebook each run of a cell makes them anew."""
    net, codes = Apply(lambda net, x: x), weakref.WeakSet[types.CodeType]()
    model = DataParallel(net, CPUS)
    for number in range(3):
        net.function = eval(f"lambda net, x: x * {number}")
        codes.add(net.function.__code__)
        assert model(torch.ones(4, 1)).tolist() == [[number]] * 4
    assert len(codes) == 1


# --- nothing changed, nothing is sent ---


def sent(model: DataParallel[Any]) -> tuple[int, int, int]:
    """What was sent and run again so far."""
    stats = model.executor.stats()
    return stats.state_sends, stats.state_bytes, stats.reruns


@made_of(a=(4, 4), pair=lambda: nn.ParameterList(torch.eye(4).to_sparse() * n for n in (1, 2)))
def sparse(net: Any, x: Tensor) -> Tensor:
    """Reads, behind its version, one of two weights without an address."""
    return net.a(x) @ net.pair[0].data @ net.pair[1]  # type: ignore[no-any-return]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "sparse": lambda: Checkpointed(sparse(), False),
    "everything": Net,
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "lstm": lambda: nn.LSTM(4, 4, 2, bidirectional=True),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "old weight_norm": lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
    "script": lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))),
    "graph": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
    "no parameters": nn.Identity,
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
}


@pytest.mark.filterwarnings(
    "ignore:.*weight_norm.* is deprecated", "ignore:.*torch.jit.*is deprecated"
)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_nothing_changed_nothing_is_sent(name: str, grad: bool) -> None:
    """In eval, nothing runs twice either; nor in a loop of functional calls, or by a backward."""
    model = DataParallel(MODULES[name]().eval(), CPUS)
    x = torch.ones(4, 4, 4) if name in ("lstm", "transformer") else torch.ones(4, 4)
    with torch.set_grad_enabled(grad):
        model(x)
        before = sent(model)
        for rows in (4, 2, 3):
            out = model(x[:rows])
            if isinstance(out, Tensor) and out.requires_grad:
                out.sum().backward()
            data_parallel(model.module, x[:rows], CPUS)
    assert sent(model) == before


def test_training_sends_what_the_optimizer_changed() -> None:
    """A step moves the weights, and frozen ones stay where they are."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    net[0].requires_grad_(False)
    model = DataParallel(net, CPUS)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    sizes = []
    for _ in range(4):
        before = sent(model)[1]
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        sizes.append(sent(model)[1] - before)
    assert sizes[0] >= 4 * 64 * 64  # to each replica, or to one that passes them on
    assert max(sizes[1:]) < 2 * 4 * 65 * 2


def test_a_flag_costs_no_contents() -> None:
    """train(), eval() and requires_grad_() send no weights."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    model = DataParallel(net, CPUS)
    model(torch.ones(4, 64))
    before = sent(model)
    for change in (net.eval, lambda: net[0].requires_grad_(False), net.train, net.requires_grad_):
        change()
        model(torch.ones(4, 64))
    assert sent(model)[0] > before[0]
    assert sent(model)[1] == before[1]


@pytest.mark.parametrize(("edit", "cost"), [("net.weight.data.mul_(2)", 1), ("net.double()", 0)])
def test_an_edit_behind_versions_costs_one_rerun(edit: str, cost: int) -> None:
    """Contents are checked while the replicas run; only a difference runs the forward again."""
    net = nn.Linear(4, 4)
    model = DataParallel(net, CPUS)
    model(torch.ones(4, 4))
    reruns = sent(model)[2]
    exec(edit, {"net": net})
    for _ in range(2):
        x = torch.ones(4, 4, dtype=net.weight.dtype)
        assert torch.equal(model(x), chunked(net, x))
        assert sent(model)[2] == reruns + cost


def test_an_edit_is_found_between_a_new_layout_and_the_next_forward(two: Executor) -> None:
    """An optimizer in the replicas lays the contents of all others out anew, at once: later they
    would be compared with the edited ones. So does a step that finds another structure.
    """
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    model, x = DataParallel(net, executor=two), torch.randn(6, 4)
    model(x)
    optimizer = model.optimizer(torch.optim.SGD, [*net[2].parameters()], lr=0.1)
    net[0].weight.data.mul_(3)
    torch.testing.assert_close(model(x), net(x))
    model(x).sum().backward()
    net.register_buffer("new", torch.ones(1))
    optimizer.step()
    net[1].running_mean.data.add_(2)
    torch.testing.assert_close(model(x), net(x))


def test_edits_of_weights_that_moved_to_a_common_window(two: Executor) -> None:
    """As too many lie in windows of their own: a replica keeps no mapping of before."""
    net = nn.Sequential()
    model = DataParallel(net, executor=two)

    def windows(_: nn.Module, x: Tensor) -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:raydp_parallel")

    for _ in range(20):
        net.append(nn.Linear(160, 160, bias=False))  # each fills more than a page
        with torch.no_grad():
            net[0].weight.neg_()
            torch.testing.assert_close(model(torch.ones(4, 160)), net(torch.ones(4, 160)))
        if len(net) == 2:
            also = net[1].weight.detach()  # which stays in this memory
    assert model.run(windows, torch.ones(4))[0] < 20
    assert also.data_ptr() == net[1].weight.data_ptr()


KINDS = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not torch.optim.Optimizer])
def test_no_optimizer_costs_a_rerun(kind: Any) -> None:
    """Torch's fused ones move no version. Weights of 300 columns are mapped, others sent."""
    x = torch.ones(4, 4)
    for keywords in ({}, {"foreach": True}, {"fused": True}, {"lr": torch.tensor(0.1)}):
        if not keywords.keys() <= inspect.signature(kind).parameters.keys():
            continue
        net = nn.Sequential(nn.Linear(4, 300, bias=False), nn.Linear(300, 300, bias=False))
        model = DataParallel(net, CPUS)
        optimizer = kind(net.parameters(), **{"lr": 0.1, **keywords})

        def closure(net: Any = net, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            if kind is torch.optim.SparseAdam:
                for p in net.parameters():
                    p.grad = p.grad.to_sparse()
            return loss

        before = sent(model)[2]
        for _ in range(3):
            optimizer.step(closure)
            torch.testing.assert_close(model(x), net(x))
        assert sent(model)[2] == before, keywords


@pytest.mark.filterwarnings("ignore:counted")
def test_a_rerun_shows_no_effect_of_the_run_that_was_wrong() -> None:
    """Buffers count once and warnings come once, though the forward ran twice."""
    net = counting()
    model = DataParallel(net, CPUS)
    model(torch.ones(4, 4))
    net.weight.data.mul_(2)
    with pytest.warns(UserWarning, match="counted") as caught:
        out = model(torch.ones(4, 4))
    assert torch.equal(out, torch.full((4, 4), 2.0))
    assert net.count.item() == 2
    assert len([w for w in caught if "counted" in str(w.message)]) == 2  # one per chunk


# --- forward's traces are undone ---


class Messy(nn.Module):
    """Leaves traces of every kind, and shows what it found."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("rebound", torch.zeros(()))
        self.number = 0
        self.list: list[int] = []
        self.config = Config()
        self.function, self.rebind = closure([1.0], 0.0)
        self.tail = nn.Identity()

    def forward(self, x: Tensor, fail: bool = False) -> tuple[Tensor, ...]:
        kept = [self.list, [*self.children()], [*self.parameters()], self.tail._forward_hooks]
        found = [len(each) for each in kept]
        found += [self.rebound, self.number, self.config.inner.scale, self.function(0.0)]
        found += [self.training, self.weight.requires_grad, getattr(self.weight, "tag", 0)]
        found += [type(self.tail) is nn.Identity, hasattr(self, "new"), "rebind" in vars(self)]
        self.rebound = self.rebound + 1
        self.number += 1
        self.list.append(1)
        self.config.inner.scale += 1
        self.rebind(self.function(0.0) + 1)
        self.add_module("more", nn.Linear(1, 1))
        self.tail.register_forward_hook(print)
        self.tail.__class__ = nn.Tanh
        self.training = not self.training
        self.weight.tag = 1
        self.weight.requires_grad_(False)
        self.new = 1
        del self.rebind
        if fail:
            raise ValueError("in the midst")
        return tuple(torch.full((len(x),), float(value)) for value in found)


def test_traces_of_a_forward_are_undone() -> None:
    """R6, R12: all edits in a replica are gone in the next call, also if one raised."""
    model = DataParallel(Messy(), CPUS)
    x = torch.ones(4, 4)
    first = [t.tolist() for t in model(x)]
    assert all(len({*values}) == 1 for values in first), "chunks see the same module"
    for _ in range(2):
        assert [t.tolist() for t in model(x)] == first
        with pytest.raises(ValueError, match="in the midst"):
            model(x, fail=True)
    assert model.module.number == 0
    assert model.module.list == []
    assert not model.module.tail._forward_hooks


# --- state back ---


@made_of(weight=ones(4), count=nn.Buffer(torch.zeros(())))
def counting(net: Any, x: Tensor) -> Tensor:
    """Counts its calls in place, and warns."""
    net.count += 1
    warnings.warn("counted", stacklevel=1)
    return x * net.weight


class Writer(nn.Module):
    """Changes its state in place, in a way of its own, by what is in its chunk."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("ema", torch.ones(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("unkept", torch.zeros(4), persistent=False)
        self.register_buffer("cut", torch.zeros(4, 4).t()[1:3])
        self.plain = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        exec(WAYS[self.way], {"net": self, "new": x.detach().mean(0), "torch": torch})
        return x * self.weight + self.ema + self.steps + self.unkept + self.plain + self.cut.sum(0)


WAYS = {
    "add_": "net.ema.add_(new)",
    "augmented": "net.ema += new",
    "data.mul_": "net.ema.data.mul_(0.9).add_(0.1 * new)",
    "data of a parameter": "net.weight.data.add_(new)",
    "detached": "net.weight.detach().add_(new)",
    "copy_": "net.ema.copy_(0.9 * net.ema + 0.1 * new); net.steps.add_(1)",
    "setitem": "net.ema[:2] = new[:2]",
    "no_grad": "with torch.no_grad(): net.weight.add_(new)",
    "inference mode": "with torch.inference_mode(): net.weight.add_(new)",
    "numpy": "net.ema.numpy()[:] += new.numpy()",
    "numpy of a parameter": "net.weight.detach().numpy()[:] += new.numpy()",
    "unkept": "net.unkept.add_(new)",
    "plain": "net.plain.add_(new)",
    "plain data": "net.plain.data.add_(new)",
    "view": "net.cut[0] += new",
    "foreach": "with torch.no_grad(): torch._foreach_add_([net.weight, net.ema], [new, new])",
    "rebound after writing": "net.ema.add_(new); net.ema = net.ema * 5",
    "data rebound": "net.weight.data = net.weight.data + new",
    "written and restored": "with torch.no_grad(): net.weight.add_(new).sub_(new)",
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_writes_of_chunk_0_reach_the_master_once(way: str, grad: bool) -> None:
    """R6: what chunk 0 writes in place persists; the rest, and rebinding, is lost each time. It is
    written into the master's own tensors, whose versions move as often.
    """
    ours, theirs, plain = trio(Writer(way), 3)
    kept = [
        (name, t, t.data_ptr()) for name, t in (*ours.named_parameters(), *ours.named_buffers())
    ]
    with torch.set_grad_enabled(grad):
        for i in range(4):
            x = torch.randn(6, 4) + i
            out = ours(x)
            torch.testing.assert_close(out, by_the_contract(plain, x))
            assert_same_state(ours, plain)
            if way not in NOT_UPSTREAM and not (grad and way in NOT_UPSTREAM_WITH_GRAD):
                torch.testing.assert_close(out, theirs(x))
                assert_same_state(ours, theirs)
    assert ours.module.unkept.equal(plain.unkept)
    assert ours.module.plain.equal(plain.plain)
    theirs = dict([*plain.named_parameters(prefix="module"), *plain.named_buffers(prefix="module")])
    now = dict([*ours.named_parameters(), *ours.named_buffers()])
    for name, tensor, pointer in kept:
        assert now[name] is tensor
        assert tensor._version == theirs[name]._version or way == "written and restored"
        if way != "data rebound" or grad:
            assert tensor.data_ptr() == pointer


NOT_UPSTREAM = ("plain", "plain data")
"""What threads share with the master: all replicas write to it, in any order."""

NOT_UPSTREAM_WITH_GRAD = (
    *("detached", "no_grad", "inference mode", "foreach", "written and restored"),
)
"""What torch refuses in upstream's replica 0, as its parameters are views."""


def by_the_contract(net: Any, x: Tensor) -> Tensor:
    """Three chunks from one state; in-place changes of the first stay, and its ``.data``."""
    others = [copy.deepcopy(net)(chunk) for chunk in x.chunk(3)[1:]]
    buffers, data = dict(net._buffers), net.weight.data
    first = net(x.chunk(3)[0])
    net._buffers.update(buffers)
    if torch.is_grad_enabled():
        net.weight.data = data
    return torch.cat([first, *others])


def test_the_master_sees_writes_before_forward_returns_to_gather() -> None:
    """Buffers are up to date when the wrapper's own gather runs."""
    seen = []

    class Looking(DataParallel[Any]):
        def gather(self, outputs: Any, output_device: Any) -> Any:
            seen.append(self.module.count.item())
            return super().gather(outputs, output_device)

    with pytest.warns(UserWarning, match="counted"):
        Looking(counting(), CPUS)(torch.ones(4, 4))
    assert seen == [1.0]


# --- modules that refuse pickling ---


def referring() -> nn.Module:
    """Weak references, one of them dead."""

    def forward(net: Any, x: Tensor) -> Tensor:
        assert net.reference() is net.child and net.dead() is None
        return net.call()(x)  # type: ignore[no-any-return]

    child = nn.Linear(3, 3)
    dead, call = weakref.ref(nn.Linear(1, 1)), weakref.WeakMethod(child.forward)
    return Apply(forward, child=child, reference=weakref.ref(child), dead=dead, call=call)


def around_script() -> nn.Module:
    """A Python module with a script module below."""
    script = torch.jit.script(nn.Linear(3, 4))

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(net.script(x) + net.again(x))  # type: ignore[no-any-return]

    return Apply(forward, script=script, again=script, last=nn.Linear(4, 2))


def recurrent() -> nn.Module:
    """A recurrent net with parametrized weights."""
    net = nn.LSTM(3, 3, batch_first=True)
    parametrizations.weight_norm(net, "weight_hh_l0")
    return Apply(lambda own, x: own.net(x.unsqueeze(1))[0], net=net)


def a_class() -> nn.Module:
    """A class of a script that uses caches, computed properties and operators."""

    @functools.cache
    def mask(size: int) -> Tensor:
        return torch.arange(float(size))

    class Script(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.act = torch.ops.aten.relu
            self.least = torch.finfo(torch.float32)
            self.call = weakref.WeakMethod(self.inner.forward)

        @functools.cached_property
        def scale(self) -> Tensor:
            return torch.full((3,), 2.0)

        @functools.cache  # noqa: B019
        def power(self, base: int) -> int:
            return base**2

        def forward(self, x: Tensor) -> Tensor:
            out = self.act(self.call()(x)) * mask(3) * self.scale + self.power(3)  # type: ignore[misc]
            return torch.ops.aten.clamp_min.default(out, self.least.eps)

    return Script()


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))


def traced() -> nn.Module:
    return torch.jit.trace(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(2, 3)
    )


SHARED = ContextVar("other name", default=3.0)


def variables() -> nn.Module:
    """A function that uses a context variable of a module, in an object, and one of its own."""
    config, own = Config(), ContextVar("own", default=2.0)
    config.variable = SHARED

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        assert config.variable is SHARED
        return x * net.weight * own.get() * SHARED.get()

    return Apply(forward, weight=nn.Parameter(torch.ones(3)))


def once_differentiable() -> nn.Module:
    """A function of a script, of which torch makes another one that uses modules of its own."""
    functions = torch._C._functions

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            assert functions is torch._C._functions
            return 2 * ctx.saved_tensors[0] * grad

    return Apply(lambda net, x: Square.apply(net.layer(x)), layer=nn.Linear(3, 2))


def hooked() -> nn.Module:
    """A graph with a hook."""
    net = torch.fx.symbolic_trace(nn.Linear(3, 4))
    net.register_forward_hook(lambda net, inputs, output: output * 3)
    return net


def exported() -> nn.Module:
    net, size = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), torch.export.Dim.DYNAMIC
    found = torch.export.export(net, (torch.ones(2, 3),), dynamic_shapes=({0: size},)).module()
    found.eval = lambda: found  # its own raises
    return found


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), torch.jit.freeze(scripted().eval()))
    net.eval = lambda: net  # torch's own gives back what freezing took
    return net


REFUSING: dict[str, Callable[[], nn.Module]] = {
    "context variables": variables,
    "once differentiable": once_differentiable,
    "graph with a hook": hooked,
    "exported": exported,
    "a class of a script": a_class,
    "weak references": referring,
    "scripted": scripted,
    "frozen": frozen,
    "traced": traced,
    "below python": around_script,
    "graph": lambda: torch.fx.symbolic_trace(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    ),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "weight_norm of a convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), parametrizations.weight_norm(nn.Conv1d(1, 2, 2)), nn.Flatten()
    ),
    "two parametrizations": lambda: parametrizations.spectral_norm(
        parametrizations.weight_norm(nn.Linear(3, 2))
    ),
    "parametrized lstm": recurrent,
    "old weight_norm": lambda: nn.utils.weight_norm(nn.Linear(3, 2)),  # keeps what is computed
    "lambda": lambda: Apply(lambda net, x: x * 2 * net.weight, weight=nn.Parameter(torch.ones(3))),
}


def copying(net: nn.Module) -> Any:
    """The class of the error that a deep copy raises."""
    try:
        copy.deepcopy(net)
    except Exception as error:
        return type(error)
    return None


@pytest.mark.filterwarnings("ignore:.*(torch.jit|weight_norm).*is deprecated")
@pytest.mark.parametrize("name", REFUSING)
def test_modules_that_refuse_pickling_train(name: str) -> None:
    """C13, R14, R20, R21: as the plain module, edits included; copies are made as before."""
    net = REFUSING[name]()
    model = DataParallel(net, CPUS)
    net.eval()
    for _ in range(3):
        x = torch.randn(6, 3)
        ours, plain = model(x), net(x)
        torch.testing.assert_close(ours, plain)
        for one, other in zip(
            grads_of(ours.square().sum(), net), grads_of(plain.square().sum(), net), strict=True
        ):
            torch.testing.assert_close(one, other)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.9)
        assert copying(model) is copying(net)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_a_script_module_follows_its_mode_and_writes_back() -> None:
    """train() and eval() of a script, and its running stats."""
    ours, theirs = (DataParallel(scripted(), CPUS), scripted())
    theirs.load_state_dict(ours.module.state_dict())
    x = torch.randn(6, 3)
    for training in (True, False, True):
        ours.train(training)
        theirs.train(training)
        torch.testing.assert_close(ours(x)[:3], theirs(x[:3]))
        assert_same_state(ours, theirs)


@made_of(weight=ones(3), sum=nn.Buffer(torch.zeros(3)))
def accumulating(net: Any, x: Tensor) -> Tensor:
    """Writes to a buffer what requires a gradient, so that the buffer becomes part of the graph."""
    net.sum.add_((x * net.weight).sum(0))
    return x + net.sum


def test_a_buffer_that_became_part_of_a_graph_is_new_in_the_next_forward() -> None:
    """Values come back without the graph; the next step is not tied to a graph that is gone."""
    net = accumulating()
    model = DataParallel(net, CPUS)
    total = torch.zeros(3)
    for _ in range(3):
        x = torch.randn(4, 3)
        out = model(x)
        expected = [x[:2] + total + x[:2].sum(0), x[2:] + total + x[2:].sum(0)]
        total = total + x[:2].sum(0)
        torch.testing.assert_close(out, torch.cat(expected))
        torch.testing.assert_close(net.sum, total)
        out.sum().backward()
        torch.testing.assert_close(net.weight.grad, 2 * x.sum(0))
        assert net.sum.grad_fn is None
        net.weight.grad = None


class ScriptedState(nn.Module):
    """A module of which the script keeps plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.items = [1.0]
        self.calls = 0
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight * self.scale * self.items[0] * self.calls


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_a_script_s_attributes_are_seen_and_undone() -> None:
    """Edits of plain attributes arrive; what forward does to them is gone in the next."""
    net = torch.jit.script(ScriptedState())
    model = DataParallel(net, CPUS)
    x = torch.ones(4, 3)
    assert model(x).unique().tolist() == [1.0]
    assert model(x).unique().tolist() == [1.0]
    net.scale = 3.0
    assert model(x).unique().tolist() == [3.0]
    net.items = [2.0]
    assert model(x).unique().tolist() == [6.0]
    assert net.calls == 0
