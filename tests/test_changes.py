"""Every edit of the master copy between two forwards is seen by the replicas; nothing changed, nothing is sent.

And the way back: what forward writes in place on chunk 0 reaches the master once, everything else is undone.
"""

from __future__ import annotations

import collections
import copy
import functools
import gc
import itertools
import random
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from harness import assert_same_grads, assert_same_state, trio
from raydp_parallel import DataParallel

pytestmark = pytest.mark.usefixtures("cluster")

CPUS = ["cpu", "cpu"]


# --- a module that depends on everything that can be edited ---


@dataclass
class Inner:
    """A config inside a config."""

    scale: float = 1.0
    table: dict[str, list[float]] = field(default_factory=lambda: {"a": [1.0]})


class Config:
    """A plain object that a module holds."""

    def __init__(self) -> None:
        self.inner = Inner()
        self.shift = torch.zeros(4)


@dataclass(slots=True)
class Slotted:
    """An object without a ``__dict__``."""

    scale: float = 1.0
    items: list[float] = field(default_factory=list)


class Half(Slotted):
    """One with slots and a ``__dict__``."""


class Sealed:
    """An object that says itself how it is pickled."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __reduce__(self) -> Any:
        return Sealed, (self.scale,)


class Mode(nn.Module):
    """Shows its ``training`` flag in its output."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


class Scaled(nn.Linear):
    """A linear layer that reads an attribute of its parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.weight, "gain", 1.0)


class Twice(nn.Linear):
    """What a layer's class is changed to."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def scaled_by(x: Tensor, factors: dict[str, float]) -> Tensor:
    """What a partial holds."""
    return x * factors["all"]


def closure(scale: list[float], offset: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
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
        self.mode = Mode()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.named = nn.ParameterDict({"b": nn.Parameter(torch.ones(4))})
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("unkept", torch.ones(4), persistent=False)
        self.register_buffer("absent", None)
        self.plain = torch.ones(4)
        self.tensors = {"c": [torch.ones(4)]}
        self.config = Config()
        self.slotted = Slotted()
        self.half_slotted = Half()
        self.sealed = Sealed(1.0)
        self.list = [1.0, [1.0]]
        self.dict = {"a": {"b": 1.0}}
        self.ordered = collections.OrderedDict(a=2.0, b=1.0)
        self.set = {1}
        self.deque = collections.deque([1.0], maxlen=3)
        self.array = np.ones(4, dtype=np.float32)
        self.objects = np.array([1.0, [1.0]], dtype=object)
        self.bytes = bytearray(b"\1")
        self.random = random.Random(0)
        self.partial = functools.partial(scaled_by, factors={"all": 1.0})
        self.function, self.rebind = closure([1.0], 0.0)
        self.gate = 1.0
        self.text = "a"
        self.gate_of_nobody = 1
        self.paths: list[nn.Module] = [self.second]
        self.tail: Any = None
        self.mode.register_forward_hook(lambda _module, _args, out: out * 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(self.partial(self.second(self.mode(self.first(x)))))
        for block in self.blocks:
            x = block(x)
        for factor in (*self.extra, *self.named.values(), self.kept, self.unkept, self.plain, *self.tensors["c"]):
            x = x * factor
        x = x if self.absent is None else x + self.absent
        x = x * self.config.inner.scale * self.config.inner.table["a"][-1] + self.config.shift
        x = x * self.slotted.scale * (1 + len(self.slotted.items)) * self.half_slotted.scale * self.sealed.scale
        x = x * self.list[0] * self.list[1][-1] * self.dict["a"]["b"] * [*self.ordered.values()][0]
        x = x * len(self.set) * sum(self.deque) * torch.from_numpy(self.array.copy()) * self.objects[1][0]
        x = x * self.bytes[0] * self.random.getstate()[1][-1] * self.gate * len(self.text)
        x = x if self.tail is None else self.tail(x)
        return self.scale_last(x)

    def scale_last(self, x: Tensor) -> Tensor:
        return x


def step(net: Net) -> None:
    """What a training loop does."""
    net(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    net.zero_grad()


def load(net: Net) -> None:
    net.load_state_dict({name: t * 0.5 for name, t in net.state_dict().items()})


def data_assigned_again_and_again(net: Net) -> None:
    for i in range(50):  # the allocator hands the same addresses out again
        net.second.weight.data = torch.full((4, 4), float(i))


def memory_reused(net: Net) -> None:
    pointer = net.second.weight.data_ptr()
    net.second.weight.data = torch.empty(0)
    found = [torch.full((4, 4), 7.0) for _ in range(64)]
    net.second.weight.data = next((t for t in found if t.data_ptr() == pointer), found[0])


def other_shape(net: Net) -> None:
    net.first.weight.data = torch.randn(6, 4)
    net.first.bias.data = torch.randn(6)
    net.second.weight.data = torch.randn(4, 6)


def other_strides(net: Net) -> None:
    net.second.weight.data = net.second.weight.data.t().contiguous().t() * 2


def numpy_alias(net: Net) -> None:
    net.second.weight.detach().numpy()[:] *= 3


def numpy_shared(net: Net) -> None:
    net.kept.numpy()[0] = 9


def vector_to_parameters(net: Net) -> None:
    flat = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(flat * 0.5, net.parameters())


def swapped_tensors(net: Net) -> None:
    torch.utils.swap_tensors(net.second.weight, nn.Parameter(torch.full((4, 4), 0.3)))


def set_source(net: Net) -> None:
    with torch.no_grad():
        net.second.weight.set_(torch.full((4, 4), 0.3))


def inference_write(net: Net) -> None:
    with torch.inference_mode():
        net.second.weight.mul_(3)


def foreach(net: Net) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(net.parameters()), 0.5)


def bias_removed(net: Net) -> None:
    net.second.bias = None


def buffer_filled(net: Net) -> None:
    net.absent = torch.ones(4)


def plain_to_parameter(net: Net) -> None:
    del net.plain
    net.plain = nn.Parameter(torch.full((4,), 2.0))


def parameter_to_plain(net: Net) -> None:
    weight = net.second.weight.detach() * 2
    del net.second.weight
    net.second.weight = weight


def tied(net: Net) -> None:
    net.second.weight = net.first.weight


def memory_tied(net: Net) -> None:
    net.second.weight.data = net.first.weight.data


def child_added(net: Net) -> None:
    net.blocks.append(nn.Linear(4, 4))


def child_removed(net: Net) -> None:
    del net.blocks[0]


def child_swapped(net: Net) -> None:
    net.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def children_exchanged(net: Net) -> None:
    net.first, net.second = net.second, net.first


def shared_child(net: Net) -> None:
    net.blocks[0] = net.second


def class_changed(net: Net) -> None:
    net.second.__class__ = Twice


def method_patched(net: Net) -> None:
    net.scale_last = types.MethodType(lambda self, x: x * 5 * self.gate, net)


def function_patched(net: Net) -> None:
    net.scale_last = lambda x: x * 5


def forward_patched(net: Net) -> None:
    old = net.second.forward
    net.second.forward = lambda x: old(x) * 5


def hook_added(net: Net) -> None:
    net.second.register_forward_hook(lambda _module, _args, out: out * 2)


def pre_hook_added(net: Net) -> None:
    net.second.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))


def hook_exchanged(net: Net) -> None:
    for key in [*net.mode._forward_hooks]:
        net.mode._forward_hooks[key] = lambda _module, _args, out: out * 3


def parametrized(net: Net) -> None:
    parametrizations.weight_norm(net.second)
    net.second.parametrizations.weight.original0.data.mul_(2)


def pruned(net: Net) -> None:
    prune.l1_unstructured(net.second, "weight", amount=0.5)


def gain_given(net: Net) -> None:
    net.first.weight.gain = 3.0


def gain_of_parameter_in_an_object(net: Net) -> None:
    net.first.weight.gain = nn.Parameter(torch.full((4,), 2.0))


def attribute_deleted(net: Net) -> None:
    net.config.inner.scale = 3.0
    del net.config.inner.scale  # the class's default takes its place
    del net.gate_of_nobody


def assign(path: str, value: Any) -> Callable[[Net], None]:
    """An edit that sets an attribute."""

    def edit(net: Net) -> None:
        *owners, name = path.split(".")
        target: Any = functools.reduce(getattr, owners, net)
        setattr(target, name, copy.deepcopy(value))

    return edit


EDITS: dict[str, Callable[[Net], Any]] = {
    "optimizer step": step,
    "load_state_dict": load,
    "data.mul_": lambda net: net.second.weight.data.mul_(2),
    "data.copy_ of a bias": lambda net: net.second.bias.data.copy_(torch.ones(4)),
    "one element of data": lambda net: net.second.weight.data[3].__setitem__(3, 8.0),
    "data of a buffer": lambda net: net.kept.data.mul_(2),
    "data of an unkept buffer": lambda net: net.unkept.data.mul_(2),
    "data of a plain tensor": lambda net: net.plain.data.mul_(2),
    "data of a tensor in containers": lambda net: net.tensors["c"][0].data.mul_(2),
    "data of a tensor in a config": lambda net: net.config.shift.data.add_(2),
    "data = same shape": assign("second.weight.data", torch.full((4, 4), 0.5)),
    "data = again and again": data_assigned_again_and_again,
    "data = at the same address": memory_reused,
    "data = other shape": other_shape,
    "data = other strides": other_strides,
    "numpy alias of a parameter": numpy_alias,
    "numpy alias of a buffer": numpy_shared,
    "vector_to_parameters": vector_to_parameters,
    "swap_tensors": swapped_tensors,
    "set_": set_source,
    "in place in inference mode": inference_write,
    "foreach in place": foreach,
    "in place on a view": lambda net: net.second.weight.detach()[0].fill_(2),
    "new parameter": assign("second.weight", nn.Parameter(torch.full((4, 4), 0.5))),
    "bias = None": bias_removed,
    "buffer replaced": assign("kept", torch.full((4,), 2.0)),
    "buffer filled": buffer_filled,
    "unkept buffer replaced": assign("unkept", torch.full((4,), 2.0)),
    "plain tensor replaced": assign("plain", torch.full((4,), 2.0)),
    "plain tensor in place": lambda net: net.plain.mul_(2),
    "tensor in containers replaced": lambda net: net.tensors["c"].__setitem__(0, torch.full((4,), 2.0)),
    "tensor in a config replaced": assign("config.shift", torch.full((4,), 2.0)),
    "plain to parameter": plain_to_parameter,
    "parameter to plain": parameter_to_plain,
    "requires_grad_ of a parameter": lambda net: net.second.weight.requires_grad_(False),
    "requires_grad_ of a submodule": lambda net: net.first.requires_grad_(False),
    "requires_grad_ of a buffer": lambda net: net.kept.requires_grad_(),
    "eval of a submodule": lambda net: net.mode.eval(),
    "eval of all": lambda net: net.eval(),
    "double": lambda net: net.double(),
    "double, then float": lambda net: net.double().float(),
    "tied": tied,
    "memory tied": memory_tied,
    "child added": child_added,
    "child removed": child_removed,
    "child swapped": child_swapped,
    "children exchanged": children_exchanged,
    "child shared": shared_child,
    "class of a child": class_changed,
    "module in an attribute": assign("tail", nn.Linear(4, 4)),
    "method patched": method_patched,
    "function patched": function_patched,
    "forward of a child patched": forward_patched,
    "hook added": hook_added,
    "pre-hook added": pre_hook_added,
    "hook removed": lambda net: net.mode._forward_hooks.clear(),
    "hook exchanged": hook_exchanged,
    "parametrized": parametrized,
    "pruned": pruned,
    "parameter list appended": lambda net: net.extra.append(nn.Parameter(torch.full((4,), 2.0))),
    "parameter list item": lambda net: net.extra.__setitem__(0, nn.Parameter(torch.full((4,), 2.0))),
    "parameter dict item": lambda net: net.named.__setitem__("z", nn.Parameter(torch.full((4,), 2.0))),
    "attribute of a parameter": gain_given,
    "tensor attribute of a parameter": gain_of_parameter_in_an_object,
    "number": assign("gate", 3.0),
    "number of another type": assign("gate", 2),
    "numpy number": assign("gate", np.float32(2)),
    "text": assign("text", "abc"),
    "nested config": assign("config.inner.scale", 3.0),
    "nested config replaced": assign("config.inner", Inner(4.0)),
    "list in a dict in a config": lambda net: net.config.inner.table["a"].append(3.0),
    "attribute deleted": attribute_deleted,
    "slot": assign("slotted.scale", 3.0),
    "list in a slot": lambda net: net.slotted.items.append(1.0),
    "slot beside a dict": assign("half_slotted.scale", 3.0),
    "inside an object that reduces itself": assign("sealed.scale", 3.0),
    "list item": lambda net: net.list.__setitem__(0, 3.0),
    "list in a list": lambda net: net.list[1].append(3.0),
    "dict item": lambda net: net.dict["a"].__setitem__("b", 3.0),
    "dict order": lambda net: net.ordered.move_to_end("a"),
    "set": lambda net: net.set.add(2),
    "deque": lambda net: net.deque.append(2.0),
    "array": lambda net: net.array.__setitem__(1, 3.0),
    "array replaced": assign("array", np.full(4, 2.0, dtype=np.float32)),
    "array of objects": lambda net: net.objects[1].__setitem__(0, 3.0),
    "bytearray": lambda net: net.bytes.__setitem__(0, 3),
    "random state": lambda net: net.random.random(),
    "inside a partial": lambda net: net.partial.keywords["factors"].__setitem__("all", 3.0),
    "closure's list": lambda net: net.function.__closure__[1].cell_contents.__setitem__(0, 3.0),
    "closure's variable": lambda net: net.rebind(3.0),
}


def chunked(net: nn.Module, x: Tensor, chunks: int = 2) -> Tensor:
    """What replicas would compute, bit for bit."""
    return torch.cat([net(chunk) for chunk in x.chunk(chunks)])


def dtype_of(net: nn.Module) -> torch.dtype:
    return next(net.parameters()).dtype


def grads_of(loss: Tensor, net: nn.Module) -> list[Tensor | None]:
    net.zero_grad()
    loss.backward()
    found = [p.grad for p in net.parameters()]
    net.zero_grad()
    return found


def assert_runs_as(model: DataParallel[Any], net: nn.Module) -> Tensor:
    """The wrapper's outputs and gradients are the plain module's."""
    x = torch.linspace(-1, 1, 16).view(4, 4).to(dtype_of(net))
    ours, plain = model(x), chunked(net, x)
    assert torch.equal(ours, plain)
    assert ours.requires_grad == plain.requires_grad
    if plain.requires_grad:
        for one, other in zip(grads_of(ours.sum(), net), grads_of(plain.sum(), net), strict=True):
            assert (one is None) == (other is None)
            torch.testing.assert_close(one, other)
    return ours.detach()


NO_EFFECT_ON_OUTPUT = ("requires_grad_ ", "double, then float", "attribute deleted")


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_between_two_forwards_is_seen(name: str) -> None:
    """Issue, item 5: whatever is edited, the next forward runs the module as it is now."""
    net = Net()
    model = DataParallel(net, CPUS)
    before = assert_runs_as(model, net)
    EDITS[name](net)
    after = assert_runs_as(model, net)
    if not name.startswith(NO_EFFECT_ON_OUTPUT):
        assert not torch.equal(before, after), "the edit does not show in the output: it proves nothing"
    assert torch.equal(assert_runs_as(model, net), after)


@pytest.mark.parametrize("seed", range(4))
def test_edits_are_seen_in_any_order(seed: int) -> None:
    """One edit upon another, with and without a forward between them."""
    order = random.Random(seed)
    names = [*EDITS]
    order.shuffle(names)
    net = Net()
    model = DataParallel(net, CPUS)
    for name in names:
        try:
            EDITS[name](net)
            chunked(net, torch.ones(4, 4, dtype=dtype_of(net)))
        except Exception:  # this edit makes no sense after those before it
            net = Net()
            model = DataParallel(net, CPUS)
            continue
        if order.random() < 0.7:
            assert_runs_as(model, net)
