"""What forward stores in objects that it is given: with one device upstream gives the module the
caller's own (S10, F5).
"""

from __future__ import annotations

import array
import collections
import copy
import math
import random
import sys
import threading
import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor, nn

from raydp_parallel import DataParallel
from raydp_parallel.calls.executor import Executor

pytestmark = pytest.mark.usefixtures("cluster")


class Holder:
    """Any attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    """Slots, of which one may be empty."""

    __slots__ = ("state", "steps")

    def __init__(self, steps: int) -> None:
        self.steps = steps


@dataclass
class Memory:
    """A state of rows, which scatter splits over several devices."""

    hidden: Tensor
    seen: int = 0


class Ordered(collections.OrderedDict[str, Any]):
    """A dict with methods of its own."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("methods of the class are not called")


class Stores(nn.Module):
    """Stores what it computes where a function says."""

    def __init__(self, store: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.store = store

    def forward(self, x: Tensor, given: Any) -> Tensor:
        out: Tensor = self.inner(x)
        self.store(given, out)
        return out


def into_chain(given: Holder, out: Tensor) -> None:
    """Objects in objects, in a list of the first one's, and a new one that refers to the first."""
    given.layers[0].kept = out
    given.layers.append(Holder(root=given, out=given.layers[0].kept * 2, shared=given.settings))
    given.count += 1


def into_slots(given: Slotted, out: Tensor) -> None:
    """A slot that was empty, and one that was not."""
    given.state = out
    if hasattr(given, "steps"):
        del given.steps


def in_place(given: Holder, out: Tensor) -> None:
    """A tensor written in place, with its row that another attribute shows."""
    given.total.add_(out.detach().sum(0))
    given.rows += 1


def into_graph(given: Holder, out: Tensor) -> None:
    """A tensor that in-place addition makes part of the graph."""
    given.total += out.sum(0)


def anew(given: dict[str, Any], out: Tensor) -> None:
    """A dict that holds something is made anew for the call; the list in it is empty."""
    given["new"] = out
    given["list"].append(out)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], None], Callable[[Any], Any]]] = {
    "empty list": (list, lambda g, out: g.append(out), lambda g: g[0]),
    "empty dict": (dict, lambda g, out: g.update(out=out), lambda g: g["out"]),
    "dict of lists": (
        lambda: collections.defaultdict(list),
        lambda g, out: g["out"].append(out),
        lambda g: g["out"][0],
    ),
    "ordered": (
        Ordered,
        lambda g, out: collections.OrderedDict.__setitem__(g, "out", out),
        lambda g: g["out"],
    ),
    "deque": (
        lambda: collections.deque([1], maxlen=1),
        lambda g, out: g.append(out),
        lambda g: g[0],
    ),
    "set": (set, lambda g, out: g.add(out.shape[1]), lambda g: torch.tensor(float(*g))),
    "attribute": (Holder, lambda g, out: setattr(g, "out", out), lambda g: g.out),
    "objects": (
        lambda: Holder(layers=[Holder()], count=0, settings=Holder()),
        into_chain,
        lambda g: g.layers[0].kept + g.layers[1].out * g.count + (g.layers[1].root is g),
    ),
    "slots": (lambda: Slotted(1), into_slots, lambda g: g.state * (not hasattr(g, "steps"))),
    "dataclass": (
        lambda: Memory(torch.ones(4, 2)),
        lambda g, out: (setattr(g, "hidden", g.hidden + out), setattr(g, "seen", 4)),
        lambda g: g.hidden * g.seen,
    ),
    "UserDict": (
        lambda: UserDict(a=torch.ones(4, 2)),
        lambda g, out: g.update(b=g["a"] + out),
        lambda g: g["a"] + g["b"],
    ),
    "in place": (
        lambda: Holder(total=torch.zeros(2), rows=torch.zeros(2, dtype=torch.int64)),
        in_place,
        lambda g: g.total * g.rows,
    ),
    "into graph": (lambda: Holder(total=torch.zeros(2)), into_graph, lambda g: g.total),
    "array": (
        lambda: np.zeros(2, dtype=np.float32),
        lambda g, out: g.__iadd__(out.detach().numpy().sum(0)),
        torch.from_numpy,
    ),
    "generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda g, out: torch.rand(3, generator=g),
        lambda g: torch.rand(2, generator=g),
    ),
    "generator of numpy": (
        lambda: np.random.default_rng(1),
        lambda g, out: g.random(3),
        lambda g: torch.from_numpy(g.random(2)),
    ),
    "older generators": (
        lambda: Holder(numpy=np.random.RandomState(1), python=random.Random(1)),
        lambda g, out: (g.numpy.rand(3), g.python.random()),
        lambda g: torch.from_numpy(g.numpy.rand(2)) + g.python.random(),
    ),
    "made anew": (lambda: {"list": [], "old": 1}, anew, lambda g: g["list"][0] * len(g)),
    "nothing": (lambda: Holder(out=1), lambda g, out: None, lambda g: torch.tensor(float(g.out))),
}


@pytest.mark.parametrize("name", CASES)
def test_S10_with_one_device_what_forward_stores_is_the_callers(name: str) -> None:
    """The values, and the gradients that come back through them, after two forwards."""
    make, store, read = CASES[name]
    net, x = Stores(store), torch.linspace(-1, 1, 12).view(4, 3)
    found = []
    for wrapper in (oracle.DataParallel(copy.deepcopy(net), [0]), DataParallel(net, ["cpu"])):
        given = make()
        wrapper(x, make())  # what another call stored is not this one's
        loss = read(given).sum() if name == "nothing" else None
        out = wrapper(x, given=given)
        value = read(given)
        (out.square().sum() + value.square().sum() + (0 if loss is None else loss)).backward()
        found.append((value.detach(), wrapper.module.inner.weight.grad))
    torch.testing.assert_close(found[1], found[0])


class StoresInItself(nn.Module):
    """Stores what it computes in an object that an attribute holds, as a function says."""

    def __init__(self, given: Any, store: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.kept = [given]
        self.store = store

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.store(self.kept[0], out)
        return out


@pytest.mark.parametrize("name", [name for name in CASES if name != "ordered"])
def test_F5_with_one_device_what_forward_stores_in_attributes_is_the_modules(name: str) -> None:
    """The values, and the gradients that come back through them, after two forwards."""
    make, store, read = CASES[name]
    x = torch.linspace(-1, 1, 12).view(4, 3)
    found = []
    for upstream in (True, False):
        torch.manual_seed(1)
        given = make()
        net = StoresInItself(given, store)
        wrapper: Any = oracle.DataParallel(net, [0]) if upstream else DataParallel(net, ["cpu"])
        with torch.no_grad():
            wrapper(x)
        out = wrapper(x)
        assert net.kept[0] is given
        value = read(given)
        (out.square().sum() + value.square().sum()).backward()
        found.append((value.detach(), net.inner.weight.grad))
    torch.testing.assert_close(found[1], found[0])


def double(x: Tensor) -> Tensor:
    """A function that an attribute refers to."""
    return x * 2


class Counts(nn.Module):
    """Counts its rows, in an attribute of each kind, and computes with what it counted before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.mean = np.zeros(2)
        self.stats = Holder(rows=0, seen=bytearray(4), odd=np.array([0, "b"], dtype=object))
        self.runs = array.array("d", [1.0])
        self.named = {"inner": self.inner, "weights": [self.inner.weight], "doubled": double}
        self.named["teacher"] = [nn.Linear(3, 2)]  # no submodule

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * float(self.mean[0] + self.stats.rows + self.runs[0])
        self.mean += 1
        self.stats.rows += len(x)
        self.stats.seen[0] += 1
        self.runs[0] *= 2
        self.named["again"] = self.named["weights"][0]
        self.stats.chosen = self.inner
        return out

    def own(self) -> Any:
        """What is its own."""
        return self, self.inner, self.inner.weight, self.stats, [self.inner.bias]


def test_F5_objects_of_attributes_stay_the_modules_own() -> None:
    """Arrays and objects, and what they refer to: submodules and parameters are no copies."""
    net, plain = Counts(), Counts()
    plain.load_state_dict(net.state_dict())
    model, x = DataParallel(net, ["cpu"]), torch.ones(4, 3)
    mean, stats, named = net.mean, net.stats, net.named
    inside = {**named, "teacher": named["teacher"][0]}
    for number in range(3):
        assert torch.equal(model(x), plain(x))
        assert stats is net.stats
        assert stats.rows == 4 * number + 4
        assert stats.seen[0] == number + 1
    assert mean is net.mean
    assert mean.tolist() == [3.0, 3.0]
    assert net.runs[0] == 8.0
    assert named is net.named
    assert named["again"] is net.inner.weight is named["weights"][0]
    assert net.stats.chosen is net.inner
    assert named["doubled"] is inside["doubled"]
    assert named["teacher"][0] is inside["teacher"]
    found = model.call("own")
    assert [*map(id, found[:4])] == [id(net), id(net.inner), id(net.inner.weight), id(stats)]
    assert found[4][0] is net.inner.bias
    (found[2].sum() + model(x).sum() * 0).backward()
    assert net.inner.weight.grad is not None
    assert net.inner.weight.grad.tolist() == [[1.0] * 3] * 2


def test_F5_an_array_that_forward_changes_costs_no_second_run() -> None:
    """Identities do not show what it holds, and comparing contents would find it too late."""
    net = Counts()
    model = DataParallel(net, ["cpu"])
    for _ in range(3):
        model(torch.ones(4, 3))
    assert sum(replica.calls for replica in model.stats().replicas) == 3


def test_F5_a_forward_that_fails_stores_nothing_in_attributes() -> None:
    """The next one begins with what the master has."""

    def store(given: Holder, out: Tensor) -> None:
        given.count += 1
        if given.fails:
            raise ValueError("no")

    given = Holder(count=0, fails=True)
    model = DataParallel(StoresInItself(given, store), ["cpu"])
    with pytest.raises(ValueError, match="no"):
        model(torch.ones(4, 3))
    assert given.count == 0
    given.fails = False
    model(torch.ones(4, 3))
    assert given.count == 1


def test_F5_objects_of_attributes_with_an_optimizer_in_the_replica() -> None:
    """A parameter that is returned has the steps that were made there."""
    net = Counts()
    model = DataParallel(net, ["cpu"])
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    for number in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        assert net.stats.rows == 4 * number + 4
    returned = model.call("own")[2].detach().clone()
    model.sync()
    assert torch.equal(returned, net.inner.weight)


def test_F5_what_an_attribute_cannot_bring_back_is_told() -> None:
    """An iterator has no contents that can be set."""
    with pytest.warns(UserWarning, match=r"forward changed Draws\.numbers\. Replicas have copies"):
        model = DataParallel(Draws(), ["cpu"])
        for _ in range(2):
            assert model(torch.ones(2, 3)).item() == 1


class Draws(nn.Module):
    """Takes the next number of an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter([1, 2, 3])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor(next(self.numbers))


class Explains(nn.Module):
    """Keeps activations, and their gradients when they come, in attributes."""

    def __init__(self, appends: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.gradient: Any = None
        self.activation: Any = None
        self.gradients: list[Tensor] = []
        self.norms: list[float] = []
        self.appends = appends
        self.last.register_full_backward_hook(self.keep_norm)
        self.register_buffer("total", torch.zeros(4))

    def keep(self, gradient: Tensor) -> None:
        """The hook of the activations."""
        self.gradient = gradient
        self.gradients = [*self.gradients, gradient * 2]

    def keep_norm(self, _module: nn.Module, _before: Any, after: Any) -> None:
        """The hook of the last layer."""
        if self.appends:
            self.norms.append(after[0].norm().item())

    def forward(self, x: Tensor) -> Tensor:
        self.activation = self.first(x)
        self.total = torch.zeros(4)
        self.total += self.first.bias  # the buffer is part of the graph
        if self.activation.requires_grad:
            self.activation.register_hook(self.keep)
        return self.last(self.activation.relu())  # type: ignore[no-any-return]


def test_F5_attributes_that_hooks_set_in_backward_are_the_modules() -> None:
    """As where a class activation map is made of gradients that a hook kept."""
    x, found = torch.linspace(-1, 1, 12).view(4, 3), []
    plain, net = Explains(), Explains()
    net.load_state_dict(plain.state_dict())
    for module, runs in ((plain, plain), (net, DataParallel(net, ["cpu"]))):
        for number in range(3):
            out = runs(x)
            if number == 1:
                with torch.no_grad():
                    runs(x * 2)  # another forward before the backward
            else:
                assert module.total.grad_fn is not None
            out.square().sum().backward()
            activation, gradients = module.activation.detach(), module.gradients
            assert len(gradients) == number + 1
            found.append([module.gradient, activation, module.total.detach(), *gradients])
            if number != 1:
                assert module.total.grad_fn is not None  # backward leaves it as it is
    for one, other in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(other, one)


def test_F5_objects_that_hooks_change_in_backward_are_the_modules() -> None:
    """Also where the program changed them since the forward: appended is to what it left."""
    plain, net, x = Explains(appends=True), Explains(appends=True), torch.ones(4, 3)
    net.load_state_dict(plain.state_dict())
    norms = net.norms
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module, runs in ((plain, plain), (net, DataParallel(net, ["cpu"]))):
            for number in range(3):
                out = runs(x)
                if number == 1:
                    module.norms.clear()
                out.sum().backward()
    assert net.norms is norms
    assert len(norms) == 2
    assert norms == pytest.approx(plain.norms)


class Hooked(nn.Module):
    """Does something to an object in backward."""

    def __init__(self, given: Any, store: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.kept = given
        self.store = store

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        if isinstance(self.kept, Holder) and self.kept.fresh:
            self.kept.inside = [[]]  # what backward appends to is new
        if out.requires_grad:
            out.register_hook(self.hook)
        return out

    def hook(self, gradient: Tensor) -> None:
        """Of the output."""
        self.store(self.kept, gradient)


def into_objects(given: Holder, gradient: Tensor) -> None:
    """Counts, and appends to a list in a list, and to one that the program has, too."""
    given.count += 1
    given.inside[0].append(gradient)
    given.inside.append(given.inside[0])


def stacked(given: list[Any], gradient: Tensor) -> None:
    """Takes the last item of three, and appends two."""
    last = given.pop()
    given += [last + 1, gradient]


EDITS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], None]]] = {
    "list": (list, lambda g, grad: g.append(grad)),
    "positions": (lambda: [None] * 2, lambda g, grad: g.__setitem__(1, grad)),
    "stack": (lambda: [1, 2, 3], stacked),
    "deque": (lambda: collections.deque([1, 2], maxlen=3), lambda g, grad: g.extend([grad, 4])),
    "set": (lambda: {1, 2}, lambda g, grad: (g.discard(1), g.add(len(grad)))),
    "dict": (lambda: {"a": 1, "b": 2}, lambda g, grad: (g.pop("a", 0), g.update(b=grad, c=3))),
    "lists in a dict": (
        lambda: collections.defaultdict(list),
        lambda g, grad: g["grads"].append(grad),
    ),
    "attribute": (lambda: Holder(fresh=False), lambda g, grad: setattr(g, "grad", grad)),
    "slots": (lambda: Slotted(1), into_slots),
    "objects": (lambda: Holder(count=0, inside=[[]], fresh=False), into_objects),
    "made in forward": (lambda: Holder(count=0, inside=0, fresh=True), into_objects),
    "array": (lambda: np.zeros(2), lambda g, grad: g.__iadd__(grad.numpy().sum(0))),
    "generator": (lambda: np.random.default_rng(1), lambda g, grad: g.random(3)),
    "not a number": (lambda: {"norm": math.nan}, lambda g, grad: g.update(norm=len(grad))),
}


class Balanced(nn.Module):
    """What forward counts and stores, a hook in backward takes back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count, self.stack = nn.Linear(3, 2), 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.stack.append(self.count)
        self.count += 1
        out.register_hook(self.back)
        return out

    def back(self, _gradient: Tensor) -> None:
        """The hook."""
        self.stack.pop()


def test_F5_what_hooks_take_back_is_gone() -> None:
    """Also where all is then as it was before the forward; and a backward of two forwards leaves
    numbers that only these counted.
    """
    plain, x = Balanced(), torch.ones(4, 3)
    net = copy.deepcopy(plain)
    model = DataParallel(net, ["cpu"])
    for _ in range(3):
        for module, runs in ((plain, plain), (net, model)):
            runs(x).sum().backward()
            assert module.stack == [0]
        assert net.count == plain.count

    class Counts(nn.Linear):
        """Counts its forwards."""

        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    counts = Counts(3, 2)
    counting = DataParallel(counts, ["cpu"])
    for number in range(3):
        (counting(x).sum() + counting(2 * x).sum()).backward()
        assert counts.calls == 2 * number + 2


def held(value: Any) -> Any:
    """What a container or an object holds, without identities."""
    if isinstance(value, Slotted):
        return [getattr(value, name, None) for name in Slotted.__slots__]
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value).random()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Holder):
        value = vars(value)
    if isinstance(value, dict):
        return [*value, *map(held, value.values())]
    return [*map(held, value)] if isinstance(value, (list, collections.deque, set)) else value


@pytest.mark.parametrize("name", EDITS)
def test_F5_what_hooks_do_in_backward_is_done_to_the_modules(name: str) -> None:
    """Whatever the object is, in each of three steps, of which one differentiates twice."""
    make, store = EDITS[name]
    x, found = torch.linspace(-1, 1, 12).view(4, 3), []
    for wraps in (False, True):
        torch.manual_seed(1)
        net = Hooked(make(), store)
        own, runs = net.kept, DataParallel(net, ["cpu"]) if wraps else net
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(3):
                loss = runs(x).square().sum()
                if number == 1:
                    loss.backward(retain_graph=True)
                loss.backward()
                found.append(repr(held(net.kept)))
        assert net.kept is own
    assert found[3:] == found[:3]


def test_F5_what_cannot_be_done_again_in_backward_is_told() -> None:
    """A number that the program counted on since the forward, items of a list that were moved, and
    objects of a forward that is not the last one: what the program has stays.
    """

    def count(given: Holder, gradient: Tensor) -> None:
        given.count += 1

    def told() -> Any:
        return pytest.warns(UserWarning, match=r"a hook changed (Hooked\.kept|store) in backward")

    x = torch.ones(4, 3)
    counts = Hooked(Holder(count=0, fresh=False), count)
    out = DataParallel(counts, ["cpu"])(x)
    counts.kept.count = 5
    with told():
        out.sum().backward()
    assert counts.kept.count == 5
    rebinds = Hooked([], lambda given, gradient: given.append(gradient))
    out = DataParallel(rebinds, ["cpu"])(x)
    rebinds.kept = []
    with told():
        out.sum().backward()
    assert rebinds.kept == []
    moves = Hooked([Holder()], lambda given, gradient: given.insert(0, gradient))
    out = DataParallel(moves, ["cpu"])(x)
    with told():
        out.sum().backward()
    assert len(moves.kept) == 1
    appends = Hooked([], lambda given, gradient: given.append(gradient))
    model = DataParallel(appends, ["cpu"])
    earlier = model(x)
    appends.kept.append(1)
    model(x).sum().backward()
    assert len(appends.kept) == 2
    with told():
        earlier.sum().backward()
    assert len(appends.kept) == 2


class Recurrent(nn.LSTM):
    """Has an attribute that unpickling moves behind its own, and one that it leaves out."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.calls: list[int] = []
        self.info = {"weight": self.weight_ih_l0, "calls": 0}
        self.stream = sys.stdout

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.calls.append(len(x))
        self.info["calls"] += 1
        return super().forward(x)[0] * self.info["weight"].sum()  # type: ignore[no-any-return]


class Forgetful(nn.Module):
    """Its pickle leaves out a cache, which it makes anew elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = [[1]]
        self.inner = nn.Linear(3, 2)
        self.stats = [[0]]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cache"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, cache=[])

    def forward(self, x: Tensor) -> Tensor:
        self.stats[0].append(len(x))
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("optimizer", ["here", "in the replica"])
def test_F5_attributes_that_unpickling_moves(optimizer: str) -> None:
    """What is stored in one is not taken for another's, and its parameters stay the module's."""
    plain, net = Recurrent(), Recurrent()
    net.load_state_dict(plain.state_dict())
    x, found = torch.ones(4, 2, 3), []
    for module, runs in ((plain, plain), (net, DataParallel(net, ["cpu"]))):
        there = runs is not plain and optimizer == "in the replica"
        sgd: Any = torch.optim.SGD(module.parameters(), lr=0.1)
        if there:
            sgd = runs.optimizer(torch.optim.SGD, lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                sgd.zero_grad()
                runs(x).square().sum().backward()
                sgd.step()
        if there:
            runs.sync()
        assert module.calls == [4] * 3
        assert module.info["calls"] == 3
        assert module.info["weight"] is module.weight_ih_l0
        found.append([p.detach().clone() for p in module.parameters()])
    torch.testing.assert_close(found[1], found[0])
    other = Forgetful()
    model = DataParallel(other, ["cpu"])
    for _ in range(2):
        model(torch.ones(4, 3))
    assert other.stats == [[0, 4, 4]]
    assert other.cache == [[1]]


def test_F5_no_warning_where_all_came_back() -> None:
    """`map` between two calls, a module that is compiled, and one with a part of TorchScript."""

    class Holds(StoresInItself):
        """Has a script, too."""

        def __init__(self) -> None:
            super().__init__([], lambda given, out: given.append(1))
            self.script = torch.jit.script(nn.Linear(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.script(x)  # type: ignore[no-any-return]

    x, net = torch.ones(4, 3), StoresInItself([], lambda given, out: given.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = DataParallel(net, ["cpu"])
        model(x)
        model(x)
        compiled = DataParallel(torch.compile(copy.deepcopy(net), backend="eager"), ["cpu"])
        for _ in range(3):
            compiled(x)
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        scripted = Holds()
        with_script = DataParallel(scripted, ["cpu"])
        for _ in range(2):
            with_script(x)
    assert net.kept == [[1, 1]]
    assert scripted.kept == [[1, 1]]


class Builds(nn.Module):
    """Builds a layer and a parameter when it sees the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = None
        self.scale: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None:
            self.layer = nn.Linear(x.shape[1], 2)
            self.scale = nn.Parameter(torch.ones(2))
        return self.layer(x) * self.scale  # type: ignore[no-any-return]


def test_F5_layers_that_forward_builds_are_told() -> None:
    """They stay in the replica, which makes others in each forward."""
    model = DataParallel(Builds(), ["cpu"])
    with pytest.warns(UserWarning, match=r"forward gave the module Builds\.layer, Builds\.scale: "):
        model(torch.ones(2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 3))
    assert not [*model.parameters()]


def test_R12_with_several_devices_the_second_forward_warns(two: Executor) -> None:
    """Of what forward stored in objects of attributes; once, and not of attributes that it rebinds,
    which are lost upstream, too.
    """
    net = Counts()
    model = DataParallel(net, ["cpu"] * 2, executor=two)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = model(torch.ones(4, 3))
    told = r"forward changed Counts\.mean, Counts\.stats, Counts\.runs, Counts\.named\. Replicas"
    with pytest.warns(UserWarning, match=told):
        assert torch.equal(model(torch.ones(4, 3)), first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(4, 3))
        rebinds = DataParallel(StoresInItself(Holder(), lambda g, out: None), ["cpu"] * 2)
        for _ in range(2):
            rebinds(torch.ones(4, 3))
    assert net.mean.tolist() == [0.0, 0.0]
    assert net.stats.rows == 0


def test_S10_objects_stay_the_callers_own() -> None:
    """Those that were there before: in other objects, in the output, and tensors of the caller."""
    weight = torch.ones(2, requires_grad=True)
    given = Holder(layers=[Holder(weight=weight)], count=0, settings=Holder())
    layers, first, settings = given.layers, given.layers[0], given.settings
    out, back, same = DataParallel(Returns(), ["cpu"])(torch.ones(4, 3), given)
    assert back is given
    assert given.layers is layers
    assert layers[0] is first
    assert layers[1].shared is settings
    assert same is weight is first.weight
    (out.sum() + (same * 3).sum()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]


class Returns(Stores):
    """Returns what it was given, too."""

    def __init__(self) -> None:
        super().__init__(into_chain)

    def forward(self, x: Tensor, given: Any) -> Any:
        return super().forward(x, given), given, given.layers[0].weight


def test_S10_with_several_devices_it_is_lost_with_a_warning(two: Executor) -> None:
    """The objects stay as they were; one that nothing is stored in brings no warning."""
    x = torch.ones(4, 3)
    model = DataParallel(Stores(into_chain), ["cpu"] * 2, executor=two)
    given = Holder(layers=[Holder()], count=0, settings=Holder())
    with pytest.warns(UserWarning, match="forward changed a Holder, which it was given"):
        model(x, given)
    assert given.count == 0
    assert len(given.layers) == 1
    assert not vars(given.layers[0])
    quiet = DataParallel(Stores(lambda given, out: None), ["cpu"] * 2, executor=two)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(x, Holder(out=1))
        takes = DataParallel(Stores(lambda given, out: given.pop("y")), ["cpu"] * 2, executor=two)
        batch = UserDict(y=torch.ones(4))
        takes(x, batch)
    assert "y" in batch


def test_S10_call_without_splitting_stores_too(two: Executor) -> None:
    """The whole call runs on one device, as the module's own method would."""
    model = DataParallel(Stores(into_slots), ["cpu"] * 2, executor=two)
    given = Slotted(3)
    out = model.call("forward", torch.ones(4, 3), given, split=False)
    assert torch.equal(given.state, out)
    assert not hasattr(given, "steps")


def test_S10_map_does_not_store(two: Executor) -> None:
    """Its batches run at once, in any order."""
    model = DataParallel(Stores(lambda given, out: given.append(1)), ["cpu"] * 2, executor=two)
    kept: list[int] = []
    for split in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            batches = [(torch.ones(4, 3), kept)] * 3
            assert len([*model.map(batches, split=split)]) == 3
    assert kept == []


def test_S10_what_cannot_be_sent_back_is_told() -> None:
    """The output comes all the same."""

    def store(given: Holder, out: Tensor) -> None:
        given.lock, given.out = threading.Lock(), out

    given = Holder()
    model = DataParallel(Stores(store), ["cpu"])
    with pytest.warns(UserWarning, match="is not brought back.*lock.*cannot be sent"):
        out = model(torch.ones(4, 3), given)
    assert not vars(given)
    out.sum().backward()
    assert model.module.inner.weight.grad is not None


def same_list() -> list[Any]:
    """A list that holds itself."""
    found: list[Any] = [1]
    found.append(found)
    return found


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: np.array([print, {}], dtype=object),
        lambda: Holder(array=np.ones(2), frozen=np.frombuffer(b"12", np.uint8)),
        lambda: Sized(3),
        lambda: Holder(itself=same_list()),
    ],
)
def test_S10_arguments_of_odd_kinds(make: Callable[[], Any], devices: int, two: Executor) -> None:
    """They are given to the module as ever."""
    model = DataParallel(Stores(lambda given, out: None), ["cpu"] * devices, executor=two)
    assert len(model(torch.ones(4, 3), make())) == 4


def test_S10_a_list_that_holds_itself(two: Executor) -> None:
    """Python's own error, as from upstream."""
    model = DataParallel(Stores(lambda given, out: None), ["cpu"] * 2, executor=two)
    with pytest.raises(RecursionError):
        model.call("forward", torch.ones(4, 3), same_list(), split=False)


@dataclass(slots=True)
class Sized:
    """A dataclass without a dict."""

    size: int


class Fails(Stores):
    """Stores, and fails."""

    def forward(self, x: Tensor, given: Any) -> Tensor:
        super().forward(x, given)
        raise ValueError("no")


def test_S10_a_forward_that_fails_stores_nothing() -> None:
    """The object is as before the call, and the next call stores."""
    given: list[Tensor] = []
    with pytest.raises(ValueError, match="no"):
        DataParallel(Fails(lambda g, out: g.append(out)), ["cpu"])(torch.ones(4, 3), given)
    assert given == []
