"""What of a module travels: blocks, images, contents, and a master copy with mirrors that follow it
whatever is edited.
"""

from __future__ import annotations

import collections
import collections.abc
import copy
import functools
import itertools
import pickle
import random
import struct
import types
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raydp_parallel import devices
from raydp_parallel.state import block_layout, structure
from raydp_parallel.state.python_state import PythonState
from raydp_parallel.state.replica_module import ReplicaModule
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, InlineLink, Link, ObjectStoreLink
from raydp_parallel.transport.messages import Blob, WriteBack

CPU = torch.device("cpu")


# --- blocks ---


def numbered(*tensors: Tensor) -> dict[int, Tensor]:
    """Tensors by slot."""
    return dict(enumerate(tensors))


def rebuilt(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    """The tensors as a replica builds them, from the blocks' bytes."""
    layout = block_layout.lay_out(tensors)
    storages = {}
    for block, members in layout.members.items():
        found = block_layout.read([tensors[slot] for slot in members])
        assert found.size == layout.sizes[block]
        data = devices.copied(found)
        storages[block] = (
            torch.frombuffer(bytearray(data.owner), dtype=torch.uint8)
            if data.size
            else torch.empty(0).byte()
        )
    return {
        slot: block_layout.build(spec, storages[spec.block]) for slot, spec in layout.specs.items()
    }


WHOLE = torch.arange(24.0)
GROUPS: dict[str, tuple[tuple[Tensor, ...], list[set[int]]]] = {
    "apart": ((torch.ones(3), torch.zeros(2, dtype=torch.int8)), [{0}, {1}]),
    "a view": ((WHOLE, WHOLE[3:7]), [{0, 1}]),
    "a view before its base": ((WHOLE[3:7], WHOLE), [{0, 1}]),
    "overlapping windows": ((WHOLE[:5], WHOLE[3:9]), [{0, 1}]),
    "disjoint windows": ((WHOLE[:5], WHOLE[5:9], WHOLE[20:]), [{0}, {1}, {2}]),
    "a chain of overlaps": ((WHOLE[:5], WHOLE[4:9], WHOLE[8:12], WHOLE[15:16]), [{0, 1, 2}, {3}]),
    "one inside another, then apart": (
        (WHOLE[:10], WHOLE[2:3], WHOLE[8:12], WHOLE[12:14]),
        [{0, 1, 2}, {3}],
    ),
    "the same window twice": ((WHOLE[2:4], WHOLE[2:4]), [{0, 1}]),
    "another shape": ((WHOLE, WHOLE.view(4, 6), WHOLE.view(4, 6).t()), [{0, 1, 2}]),
    "another dtype": ((WHOLE[:2], WHOLE.view(torch.uint8)[3:9]), [{0, 1}]),
    "sizes of zero": ((torch.empty(0), torch.empty(3, 0), WHOLE[2:2]), [{0}, {1}, {2}]),
    "a loose slice": ((torch.arange(1000.0).view(10, 100)[:, :2],), [{0}]),
    "expanded": ((torch.ones(3, 1).expand(3, 4),), [{0}]),
    "two loose slices, interleaved": (
        (torch.arange(90.0).view(30, 3)[:, 0], torch.arange(90.0).view(30, 3)[:, 1]),
        [{0}, {1}],
    ),
    "transposed": ((WHOLE.view(4, 6).t(),), [{0}]),
    "0-dim": ((torch.tensor(3.0), WHOLE[4]), [{0}, {1}]),
}


@pytest.mark.parametrize("name", [*GROUPS])
def test_tensors_that_overlap_share_a_block(name: str) -> None:
    """And no others do; each comes out as it went in."""
    tensors, groups = GROUPS[name]
    layout = block_layout.lay_out(numbered(*tensors))
    assert sorted(map(set, layout.members.values()), key=min) == groups
    assert all(block == min(members) for block, members in layout.members.items())
    for slot, tensor in rebuilt(numbered(*tensors)).items():
        assert torch.equal(tensor, tensors[slot])
        assert (tensor.shape, tensor.dtype) == (tensors[slot].shape, tensors[slot].dtype)


@pytest.mark.parametrize(
    "name",
    ("a view", "overlapping windows", "a chain of overlaps", "another shape", "another dtype"),
)
def test_shared_memory_is_shared_in_a_replica(name: str) -> None:
    """What is written through one of them shows in the others, as it does in the driver."""
    there = rebuilt(numbered(*GROUPS[name][0]))
    base = torch.arange(24.0)
    storage = GROUPS[name][0][0].untyped_storage()
    here = {
        slot: t.new_empty(0).set_(base.untyped_storage(), t.storage_offset(), t.shape, t.stride())
        for slot, t in enumerate(GROUPS[name][0])
        if t.untyped_storage().data_ptr() == storage.data_ptr()
    }
    here[0].fill_(7)
    there[0].fill_(7)
    for slot, tensor in here.items():
        assert torch.equal(there[slot], tensor)


def test_disjoint_windows_do_not_drag_their_storage_along() -> None:
    """Three small windows of a large storage weigh what they show."""
    large = torch.zeros(100_000)
    layout = block_layout.lay_out(numbered(large[:10], large[50_000:50_010], large[-5:]))
    assert sum(layout.sizes.values()) == 25 * 4


def test_loose_slices_travel_compact() -> None:
    """A column of a wide matrix weighs what it shows, not what it spans."""
    tensor = torch.arange(1000.0).view(10, 100)[:, :2]
    assert block_layout.is_loose(tensor)
    assert block_layout.lay_out(numbered(tensor)).sizes == {0: tensor.nbytes}
    assert not block_layout.is_loose(torch.ones(4, 4).t())
    assert not block_layout.is_loose(torch.empty(0))


def test_parameters_and_flags_are_rebuilt() -> None:
    """A Parameter is one again, with its ``requires_grad``."""
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    there = rebuilt(
        numbered(nn.Parameter(torch.ones(2)), frozen, torch.ones(2, requires_grad=True))
    )
    assert [type(t) for t in there.values()] == [nn.Parameter, nn.Parameter, Tensor]
    assert [t.requires_grad for t in there.values()] == [True, False, True]


def test_equal_compares_bytes() -> None:
    """NaN equals itself, 0.0 is not -0.0, sizes differ."""
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert devices.compare([(block_layout.read([nan]), block_layout.read([nan.clone()]))])() == [
        True
    ]
    assert devices.compare([(block_layout.read([zero]), block_layout.read([-zero]))])() == [False]
    assert devices.compare(
        [(block_layout.read([zero]), block_layout.read([torch.zeros(2)]))]
    )() == [False]
    assert devices.compare(
        [(block_layout.read([torch.empty(0)]), block_layout.read([torch.empty(0)]))]
    )() == [True]


def test_a_copy_of_a_block_is_its_own() -> None:
    """What was copied stays, whatever becomes of the source."""
    tensor = torch.ones(3)
    kept = devices.copied(block_layout.read([tensor]))
    tensor.zero_()
    assert devices.compare([(kept, block_layout.read([torch.ones(3)]))])() == [True]


def test_what_is_plain() -> None:
    """Sparse, quantized, meta and lazily conjugated tensors are not windows on a storage."""
    assert block_layout.is_plain(torch.ones(2).t())
    special = [
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.ones(2, dtype=torch.cfloat).conj(),
    ]
    assert not any(map(block_layout.is_plain, special))


# --- images ---


class Slotted:
    """State in slots, one of them private."""

    __slots__ = ("__private", "open")

    def __init__(self) -> None:
        self.open = 1
        self.__private = 1

    def hide(self, value: int) -> None:
        """Change the private one."""
        self.__private = value

    @property
    def hidden(self) -> int:
        """The private one."""
        return self.__private


class Thing:
    """An object with attributes, a property and a method."""

    def __init__(self) -> None:
        self.x = 1

    @property
    def double(self) -> int:
        """A value computed from an attribute."""
        return 2 * self.x

    @double.setter
    def double(self, value: int) -> None:
        self.x = value // 2

    def method(self) -> int:
        """For keeping as an attribute."""
        return self.x


class Dict(dict):  # type: ignore[type-arg]
    """A dict that can have attributes."""


class List(list):  # type: ignore[type-arg]
    """A list that can have attributes."""


def made_here() -> Any:
    """A function that travels by value, with a closure and defaults."""
    cell = [1]
    factor = 2

    def function(x: Any, power: int = 1, *, offset: int = 0) -> Any:
        return cell[0] * x**power * factor + offset

    def rebind(value: int) -> None:
        nonlocal factor
        factor = value

    function.rebind = rebind  # type: ignore[attr-defined]
    function.cell = cell  # type: ignore[attr-defined]
    return function


def made_class() -> type:
    """A class that travels by value."""

    class Made:
        level = 1
        table: list[int] = []  # noqa: RUF012

        def method(self) -> int:
            return self.level

    return Made


class Net(nn.Module):
    """Something of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.norm.weight.tag = "kept"  # type: ignore[attr-defined]
        self.register_buffer("square", torch.arange(16.0).view(4, 4))
        self.register_buffer("whole", torch.zeros(8))
        self.register_buffer("window", self.whole[2:6])  # type: ignore[index]
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.pair = (self.linear.weight, [self.norm.running_mean])
        self.slotted = Slotted()
        self.ordered = collections.OrderedDict(a=1, b=2)
        self.tagged, self.bare = Dict(a=1), Dict(a=1)
        self.tagged.tag = 1  # type: ignore[attr-defined]
        self.items = List([1, 2])
        self.default = collections.defaultdict(int, a=1)
        self.counter = collections.Counter("aab")
        self.queue, self.seen = collections.deque([1, 2], maxlen=3), {1, 2}
        self.array, self.raw = np.arange(4.0), bytearray(b"ab")
        self.generator, self.dice, self.numpy_dice = (
            torch.Generator(),
            random.Random(1),
            np.random.default_rng(1),
        )
        self.partial = functools.partial(max, [1, 2], key=None)
        self.space = types.SimpleNamespace(x=1)
        self.thing, self.empty = Thing(), Thing()
        del self.empty.x
        self.method = Thing().method
        self.config: Any = {"a": {"b": [1, {"c": 2}]}, "t": (1, [2])}
        self.function = made_here()
        self.back = weakref.ref(self.thing)
        self.number, self.text = 1000, "text"

    def forward(self, x: Tensor) -> Tensor:
        """Use a part of it."""
        return self.norm(self.linear(x))  # type: ignore[no-any-return]


def set_tag(net: Any) -> None:
    """An attribute on a parameter, as frameworks hang there."""
    net.linear.weight.tag = 5


Edit = Callable[[Any], Any]

ATTRIBUTES: dict[str, Edit] = {
    "attribute": lambda n: setattr(n, "number", 1001),
    "new attribute": lambda n: setattr(n, "other", 1),
    "removed attribute": lambda n: delattr(n, "text"),
    "attribute of a child": lambda n: setattr(n.norm, "momentum", 0.5),
    "training": lambda n: n.norm.eval(),
    "nested config": lambda n: n.config["a"]["b"][1].update(c=3),
    "list in a tuple": lambda n: n.config["t"][1].append(1),
    "new key": lambda n: n.config.update(new=1),
    "key renamed": lambda n: n.config.update(z=n.config.pop("a")),
    "order of keys": lambda n: n.config.update(a=n.config.pop("a")),
    "order of keys in an OrderedDict": lambda n: n.ordered.move_to_end("a"),
    "value in an OrderedDict": lambda n: n.ordered.update(a=3),
    "value in a dict subclass": lambda n: n.bare.update(a=2),
    "attribute of a dict subclass": lambda n: setattr(n.tagged, "tag", 2),
    "first attribute of a dict subclass": lambda n: setattr(n.bare, "tag", 2),
    "attribute of a list subclass": lambda n: setattr(n.items, "tag", 2),
    "element of a list subclass": lambda n: n.items.__setitem__(0, 5),
    "default factory": lambda n: setattr(n.default, "default_factory", list),
    "counter": lambda n: n.counter.update("a"),
    "deque": lambda n: n.queue.rotate(1),
    "set": lambda n: n.seen.add(3),
    "set of the same size": lambda n: (n.seen.add(3), n.seen.remove(1)),
    "slot": lambda n: setattr(n.slotted, "open", 2),
    "private slot": lambda n: n.slotted.hide(2),
    "object": lambda n: setattr(n.thing, "x", 2),
    "property": lambda n: setattr(n.thing, "double", 8),
    "namespace": lambda n: setattr(n.space, "x", 2),
    "replaced __dict__": lambda n: setattr(n.thing, "__dict__", {"x": 5}),
    "replaced __dict__ that was empty": lambda n: setattr(n.empty, "__dict__", {"x": 5}),
    "object behind a bound method": lambda n: setattr(n.method.__self__, "x", 2),
    "argument of a partial": lambda n: n.partial.args[0].append(3),
    "keyword of a partial": lambda n: n.partial.keywords.update(key=abs),
    "closure's contents": lambda n: n.function.cell.append(3),
    "closure's cell": lambda n: n.function.rebind(5),
    "function's defaults": lambda n: setattr(n.function, "__defaults__", (3,)),
    "function's keyword defaults": lambda n: n.function.__kwdefaults__.update(offset=1),
    "function's code": lambda n: setattr(n.function, "__code__", made_other().__code__),
    "attribute of a parameter": set_tag,
    "attribute of a parameter taken away": lambda n: delattr(n.norm.weight, "tag"),
    "instance forward": lambda n: setattr(n.linear, "forward", made_here()),
    "hook": lambda n: n.linear.register_forward_hook(made_here()),
    "submodule swapped": lambda n: setattr(n, "linear", nn.Linear(3, 3)),
    "submodule added": lambda n: n.add_module("more", nn.Linear(2, 2)),
    "submodule removed": lambda n: delattr(n, "norm"),
}
CONTENTS: dict[str, Edit] = {
    "array": lambda n: n.array.__setitem__(0, 9),
    "bytearray": lambda n: n.raw.__setitem__(0, 9),
    "torch generator": lambda n: n.generator.manual_seed(4),
    "Python generator": lambda n: n.dice.random(),
    "NumPy generator": lambda n: n.numpy_dice.random(),
}
TENSORS: dict[str, Edit] = {
    "in place": lambda n: torch.no_grad()(n.linear.weight.mul_)(2),
    "through .data": lambda n: n.linear.weight.data.mul_(2),
    "through NumPy": lambda n: n.linear.weight.detach().numpy().__setitem__((0, 0), 7),
    "p.data = q": lambda n: setattr(n.linear.weight, "data", torch.ones(3, 3)),
    "p.data = its transpose": lambda n: setattr(n.square, "data", n.square.data.t()),
    "p.data = another shape": lambda n: setattr(n.square, "data", n.square.data.view(2, 8)),
    "p.data = half of it": lambda n: setattr(n.square, "data", n.square.data[:2]),
    "p.data = another dtype": lambda n: setattr(n.square, "data", n.square.data.double()),
    "set_": lambda n: n.square.set_(torch.ones(5, 5)),
    "resize_": lambda n: n.square.resize_(3, 3),
    "transposed in place": lambda n: n.square.t_(),
    "requires_grad_": lambda n: n.linear.weight.requires_grad_(False),
    "half": lambda n: n.half(),
    "double": lambda n: n.double(),
    "load_state_dict": lambda n: n.load_state_dict(
        {k: v + 1 for k, v in n.state_dict().items() if k != "sparse"}, False
    ),
    "a view left its base": lambda n: setattr(n.window, "data", torch.ones(4)),
    "a view moved": lambda n: setattr(n.window, "data", n.whole.data[3:7]),
    "written through a view": lambda n: n.window.fill_(3),
    "tied by .data": lambda n: setattr(n.norm.running_mean, "data", n.norm.running_var.data),
    "tied parameters": lambda n: setattr(n.linear, "bias", n.norm.bias),
    "parameter replaced": lambda n: setattr(
        n.linear, "weight", nn.Parameter(n.linear.weight.detach().clone())
    ),
    "parameter removed": lambda n: setattr(n.linear, "bias", None),
    "buffer replaced by an equal one": lambda n: setattr(n, "square", n.square.clone()),
    "buffer made non-persistent": lambda n: n.register_buffer("square", n.square, persistent=False),
    "sparse buffer": lambda n: n.sparse._values().fill_(3),
    "memory that comes back": lambda n: come_back(n.linear.weight),
}
EDITS = {**ATTRIBUTES, **CONTENTS, **TENSORS}


def made_other() -> Any:
    """Another function with a closure of the same size."""
    cell, factor = [1], 2

    def function(x: Any, power: int = 1, *, offset: int = 0) -> Any:
        return -cell[0] * factor * x

    return function


def come_back(parameter: Tensor) -> None:
    """Let a parameter's memory be other memory for a moment, and then, with other numbers, what it
    was.
    """
    before = parameter.data
    parameter.data = torch.zeros(3, 3)
    before.fill_(5)
    parameter.data = before


class Far:
    """A replica's side of one model, with all that lies between."""

    def __init__(self, link: Link | None = None) -> None:
        self.link = link or InlineLink()
        self.replica_module = ReplicaModule(CPU)
        self.updates = 0

    def follow(self, tracker: ModuleTracker, graphs_alive: bool = False) -> None:
        """Adopt what is new."""
        update = tracker.update_from(self.replica_module.revision)
        attachments = Attachments(self.link)
        message = update.placed(attachments) if update is not None else None
        self.updates += update is not None
        crossed = cloudpickle.loads(cloudpickle.dumps(message))
        self.replica_module.prepare(
            crossed, Attachments(self.link, attachments.beside), graphs_alive
        )


def step(tracker: ModuleTracker, *fars: Far, graphs_alive: bool = False) -> int:
    """What a forward does about state; returns how many attempts it took."""
    tracker.sync()
    for attempt in (1, 2, 3):
        for far in fars:
            far.follow(tracker, graphs_alive)
        if tracker.verify():
            return attempt
    raise AssertionError("contents never come to rest")


_REPLICA_S = ("_is_replica", "parameter ")
"""How the attributes begin that a replica's modules have besides the master's."""


def look(value: Any, seen: dict[int, str], path: str) -> Any:
    """What there is to see of a value, as plain values; a thing met before is named by where that
    was.
    """
    if id(value) in seen and not isinstance(value, (int, float, str, bytes, bool, type(None))):
        return "as", seen[id(value)]
    seen[id(value)] = path
    inner = functools.partial(look_at_parts, seen=seen, path=path)
    if isinstance(value, Tensor):
        plain = value.detach().to_dense()
        grid = (
            plain.dtype,
            tuple(plain.shape),
            value.stride() if value.layout is torch.strided else value.layout,
        )
        return (
            type(value).__name__,
            grid,
            value.requires_grad,
            plain.tolist(),
            inner(vars(value).items()),
        )
    if isinstance(value, nn.Module):
        state = {k: v for k, v in vars(value).items() if not k.startswith(_REPLICA_S)}
        return type(value).__name__, inner(state.items())
    if isinstance(value, dict):
        rest = (
            [getattr(value, "default_factory", None), *vars(value).items()]
            if type(value) is not dict and hasattr(value, "__dict__")
            else [getattr(value, "default_factory", None)]
        )
        return type(value).__name__, inner(value.items()), inner(enumerate(rest))
    if isinstance(value, (list, tuple, collections.deque)):
        return (
            type(value).__name__,
            inner(enumerate(value)),
            inner(getattr(value, "__dict__", {}).items()),
        )
    if isinstance(value, (Slotted, Thing, types.SimpleNamespace)):
        state = getattr(value, "__dict__", None) or {
            "open": getattr(value, "open", 0),
            "hidden": getattr(value, "hidden", 0),
        }
        return type(value).__name__, inner(state.items())
    return look_at_rest(value, inner)


def look_at_rest(value: Any, inner: Callable[[Any], Any]) -> Any:
    """Functions, generators, arrays and what else a module may hold."""
    if isinstance(value, types.FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or ()]
        return value.__code__.co_code, inner(
            enumerate([value.__defaults__, value.__kwdefaults__, *cells, vars(value)])
        )
    if isinstance(value, types.MethodType):
        return value.__name__, inner([("self", value.__self__)])
    if isinstance(value, functools.partial):
        return inner([("args", value.args), ("keywords", value.keywords)])
    if isinstance(value, weakref.ref):
        return inner([("target", value())])
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    return value


def look_at_parts(parts: Any, seen: dict[int, str], path: str) -> list[Any]:
    """Every part, by name and in order."""
    return [(name, look(part, seen, f"{path}.{name}")) for name, part in parts]


def shared_memory(net: nn.Module) -> set[tuple[str, str, int]]:
    """Which tensors of the state share memory, and at what distance."""
    plain = {k: v for k, v in net.state_dict(keep_vars=True).items() if v.layout is torch.strided}
    return {
        (a, b, plain[b].data_ptr() - plain[a].data_ptr())
        for a, b in itertools.combinations(plain, 2)
        if block_layout.lay_out({0: plain[a], 1: plain[b]}).members == {0: (0, 1)}
    }


def assert_mirrors(net: nn.Module, far: Far) -> None:
    """A mirror holds exactly what the master copy is."""
    assert look(far.replica_module.module, {}, "net") == look(net, {}, "net")
    assert shared_memory(far.replica_module.module) == shared_memory(net)


@pytest.mark.parametrize("edit", [*EDITS])
def test_C11_every_edit_between_two_forwards_is_seen(edit: str) -> None:
    """Whatever is edited, the next forward's replicas have it; those that start later too; then
    nothing is sent.
    """
    net = Net()
    tracker, early = ModuleTracker(net, InlineLink()), Far()
    step(tracker, early)
    assert_mirrors(net, early)
    EDITS[edit](net)
    attempts = step(tracker, early)
    assert attempts <= 2
    late = Far()
    step(tracker, early, late)
    assert_mirrors(net, early)
    assert_mirrors(net, late)
    revision, updates = tracker.revision, early.updates
    assert step(tracker, early) == 1
    assert (tracker.revision, early.updates) == (revision, updates)


@pytest.mark.parametrize("edit", [*ATTRIBUTES])
def test_attributes_are_seen_before_the_replicas_start(edit: str) -> None:
    """Only contents wait for `verify`; an edit of structure never costs a second run."""
    net = Net()
    tracker, far = ModuleTracker(net, InlineLink()), Far()
    step(tracker, far)
    ATTRIBUTES[edit](net)
    assert step(tracker, far) == 1


class Levelled(nn.Module):
    """Reads an attribute of its class."""

    level = 1


def test_C11_an_edit_of_an_importable_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting an attribute, or a method, of a class of an installed package between two
    forwards.
    """
    tracker = ModuleTracker(Levelled(), InlineLink())
    step(tracker)
    for name, value in (("level", 2), ("forward", lambda self, x: x * 3)):
        revision = tracker.revision
        monkeypatch.setattr(Levelled, name, value)
        step(tracker)
        assert tracker.revision != revision


def test_nothing_changed_nothing_sent() -> None:
    """A second sync takes no revision, and a replica that is up to date gets no update."""
    tracker = ModuleTracker(Net(), InlineLink())
    step(tracker, Far())
    revision = tracker.revision
    for _ in range(3):
        assert step(tracker) == 1
    assert tracker.revision == revision
    assert tracker.update_from(revision) is None


def test_a_simple_edit_sends_neither_structure_nor_contents() -> None:
    """Numbers, flags and modes of modules travel alone."""
    net = Net()
    tracker = ModuleTracker(net, InlineLink())
    step(tracker)
    held = tracker.revision
    net.eval()
    net.number = 7
    net.linear.weight.requires_grad_(False)
    step(tracker)
    update = tracker.update_from(held)
    assert update is not None
    assert (update.message.structure, update.message.blobs, update.sent) == (None, (), 0)
    assert len(update.message.edits) == sum(1 for _ in net.modules()) + 1
    assert len(update.message.flags) == 1


def test_an_optimizers_step_sends_the_parameters_alone() -> None:
    """Neither structure nor the buffers that it left."""
    net = Net()
    tracker = ModuleTracker(net, InlineLink())
    step(tracker)
    held = tracker.revision
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    step(tracker)
    update = tracker.update_from(held)
    assert update is not None
    assert update.message.structure is None
    assert update.sent == sum(p.nbytes for p in net.parameters())


def test_a_swapped_submodule_sends_only_its_own_contents() -> None:
    """Structure travels anew, tensors that were there do not."""
    net = Net()
    tracker = ModuleTracker(net, InlineLink())
    step(tracker)
    held = tracker.revision
    net.linear = nn.Linear(3, 3, bias=False)
    net.pair = ()
    step(tracker)
    update = tracker.update_from(held)
    assert update is not None
    assert update.message.structure is not None
    # torch's generator is asked for its state each time, which is then new
    assert update.sent == net.linear.weight.nbytes + net.generator.get_state().nbytes


# --- what a forward leaves in a replica is undone ---


@pytest.mark.parametrize("graphs_alive", (False, True))
@pytest.mark.parametrize(
    "edit", [e for e in EDITS if e != "memory that comes back" and e != "sparse buffer"]
)
def test_R6_what_a_forward_does_to_its_replica_is_undone(edit: str, graphs_alive: bool) -> None:
    """Each forward starts from the driver's state, whatever the last one did to module, attributes
    or tensors.
    """
    net = Net()
    tracker, far = ModuleTracker(net, InlineLink()), Far()
    step(tracker, far)
    with far.replica_module.running():
        EDITS[edit](far.replica_module.module)
    far.follow(tracker, graphs_alive)
    assert_mirrors(net, far)
    far.follow(tracker, graphs_alive)
    assert_mirrors(net, far)


def test_R6_tensors_that_a_graph_saved_keep_what_it_saw() -> None:
    """With a graph alive, the next forward's buffers are new tensors, in tuples, closures and slots
    too.
    """
    net = Net()
    net.slotted.open = net.norm.running_mean
    net.function.cell.append(net.norm.running_mean)
    tracker, far = ModuleTracker(net, InlineLink()), Far()
    step(tracker, far)
    old = far.replica_module.module.norm.running_mean
    with far.replica_module.running():
        old.add_(1)
    far.follow(tracker, graphs_alive=True)
    new = far.replica_module.module
    assert old.tolist() == [1, 1, 1]
    assert new.norm.running_mean is not old
    assert new.norm.running_mean.tolist() == [0, 0, 0]
    assert new.slotted.open is new.pair[1][0] is new.function.cell[1] is new.norm.running_mean
    assert_mirrors(net, far)


def test_R6_without_graphs_tensors_stay() -> None:
    """Nothing is allocated anew where the old one cannot have been saved."""
    tracker, far = ModuleTracker(Net(), InlineLink()), Far()
    step(tracker, far)
    before = far.replica_module.module.norm.running_mean
    with far.replica_module.running():
        before.add_(1)
    far.follow(tracker)
    assert far.replica_module.module.norm.running_mean is before


def test_R6_written_reports_what_changed_in_place_once() -> None:
    """In-place changes, behind versions too; rebinding is not one; a second question has nothing to
    report.
    """
    tracker, far = ModuleTracker(Net(), InlineLink()), Far()
    step(tracker, far)
    module = far.replica_module.module
    with far.replica_module.running():
        module.norm.running_mean.add_(1)
        module.norm.running_var.data.mul_(3)
        module.square = torch.zeros(4, 4)
    found = far.replica_module.writes.written(lambda _: False)
    assert found is not None
    assert [moved for _, moved in found.slots] == [True, False]
    contents = b"".join(bytes(devices.view(piece).numpy()) for piece in found.contents.pieces)
    rows = zip(*found.contents.blob[1:3], strict=True)
    found_now = [struct.unpack("3f", contents[start : start + size]) for start, size in rows]
    assert found_now == [(1, 1, 1), (3, 3, 3)]
    assert far.replica_module.writes.written(lambda _: False) is None


def test_R6_a_write_that_changes_nothing_is_not_reported() -> None:
    """The bytes decide."""
    tracker, far = ModuleTracker(Net(), InlineLink()), Far()
    step(tracker, far)
    with far.replica_module.running():
        far.replica_module.module.norm.running_mean.add_(0)
    assert far.replica_module.writes.written(lambda _: False) is None


# --- images alone ---


def image_of(value: Any) -> PythonState:
    """The image of a module that holds a value."""
    holder = nn.Module()
    holder.value = value
    return structure.survey(holder)


def test_image_differences_are_attributes_or_unknown() -> None:
    """Changed attributes by owner and name; anything else is None."""
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))
    python_state = structure.survey(net)
    assert not python_state.changed()
    assert python_state.differences() == []
    net[0].p, net[1].training = 0.25, False
    assert python_state.changed()
    assert python_state.differences() == [(net[0], "p", 0.25), (net[1], "training", False)]
    net[0].more = 1
    assert python_state.differences() is None


def test_image_accepts_a_change() -> None:
    """From then on it is how things look, for `restore` too."""
    net = nn.Sequential(nn.Dropout(0.5))
    python_state = structure.survey(net)
    net[0].p = 0.25
    python_state.accept(net[0], "p", 0.25)
    python_state.settle()
    assert not python_state.changed()
    net[0].p = 0.75
    assert python_state.restore()
    assert net[0].p == 0.25


@pytest.mark.parametrize("value", [list[int], int | None, collections.abc.Callable[[int], str]])
def test_what_cannot_change_is_not_compared(value: Any) -> None:
    """Types in annotations, which each configuration of a model brings by the dozen."""
    assert image_of(value)._contents == []


PLAIN: dict[str, tuple[Callable[[], Any], Edit]] = {
    "dict": (lambda: {"a": 1, "b": 2}, lambda v: v.pop("a")),
    "dict order": (lambda: {"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),
    "ordered": (lambda: collections.OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    "empty dict": (dict, lambda v: v.update(a=1)),
    "list": (lambda: [1, [2]], lambda v: v[1].append(3)),
    "empty list": (list, lambda v: v.append(1)),
    "same length": (lambda: [1, 2], lambda v: v.reverse()),
    "deque": (lambda: collections.deque([1, 2]), lambda v: v.rotate(1)),
    "set": (lambda: {1, 2}, lambda v: v.discard(1)),
    "object": (Thing, lambda v: setattr(v, "y", 1)),
    "equal but not the same": (lambda: [torch.ones(1)], lambda v: v.__setitem__(0, torch.ones(1))),
}


@pytest.mark.parametrize("kind", [*PLAIN])
def test_image_puts_plain_things_back_in_place(kind: str) -> None:
    """The things themselves, not copies of them, hold again what they held."""
    make, edit = PLAIN[kind]
    value = make()
    python_state = image_of(value)
    before = look(value, {}, "")
    assert not python_state.changed()
    edit(value)
    assert python_state.changed()
    assert python_state.restore()
    assert not python_state.changed()
    assert look(value, {}, "") == before


@pytest.mark.parametrize(
    "name", ("slot", "closure's cell", "default factory", "array", "torch generator")
)
def test_image_says_what_it_cannot_put_back(name: str) -> None:
    """The caller then makes its module anew."""
    net = Net()
    python_state = structure.survey(net)
    EDITS[name](net)
    assert not python_state.restore()


def test_image_order_of_an_ordered_dict_that_was_moved_before() -> None:
    """Its order is its own, not that of the dict inside; at rest nothing has changed."""
    value = collections.OrderedDict(a=1, b=2)
    value.move_to_end("a")
    python_state = image_of(value)
    assert not python_state.changed()
    value.move_to_end("b")
    assert python_state.changed()


def test_image_does_not_take_attributes_names_for_globals() -> None:
    """A function by value is what its globals are, not what its attributes' namesakes in the module
    are.
    """
    source = "def function(thing):\n    return thing.namesake + used\n"
    scope: dict[str, Any] = {"namesake": 1, "used": 1, "__name__": "__main__"}
    exec(source, scope)
    python_state = image_of(scope["function"])
    scope["namesake"] = 1001
    assert not python_state.changed()
    scope["used"] = 1001
    assert python_state.changed()


@pytest.mark.parametrize(
    "edit",
    (
        lambda kind: setattr(kind, "level", 2),
        lambda kind: setattr(kind, "method", lambda self: 7),
        lambda kind: kind.table.append(1),
        lambda kind: setattr(kind, "more", 1),
        lambda kind: delattr(kind, "level"),
    ),
)
def test_C11_classes_that_travel_by_value_are_watched(edit: Edit) -> None:
    """A script's or a notebook's classes are edited between two forwards, too."""
    thing = made_class()()
    python_state = image_of(thing)
    assert not python_state.changed()
    edit(type(thing))
    assert python_state.changed()


def test_image_replaces_a_tensor_wherever_it_stands() -> None:
    """Attributes, dicts, lists; it says so where it cannot reach."""
    tensor, other = torch.ones(2), torch.zeros(2)
    net = nn.Module()
    net.register_buffer("buffer", tensor)
    net.value = [tensor, {"k": tensor}]
    python_state = structure.survey(net)
    assert python_state.replace({id(tensor): other})
    assert net.buffer is net.value[0] is net.value[1]["k"] is other
    assert not python_state.changed()
    net = nn.Module()
    net.value = [(tensor,)]
    assert not structure.survey(net).replace({id(tensor): other})


# --- a master copy and its mirrors, over time ---


class Small(nn.Module):
    """Something small to edit at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)])
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("base", torch.zeros(6))
        self.register_buffer("view", self.base[1:4])  # type: ignore[index]
        self.config = {"scale": 1.0, "names": ["a"]}
        self.rate = 0.5


def random_edit(net: Any, dice: random.Random) -> str:
    """Edit something, and say what."""

    def weight() -> Tensor:
        return dice.choice([*net.parameters()])

    def layer() -> int:
        return dice.randrange(len(net.layers))

    def tie() -> None:
        net.layers[layer()].weight = net.layers[layer()].weight

    def untie() -> None:
        target = net.layers[layer()]
        target.weight = nn.Parameter(target.weight.detach().clone())

    edits: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "in place": lambda: torch.no_grad()(weight().add_)(dice.random()),
        "data": lambda: weight().data.add_(dice.random()),
        "rebind": lambda: setattr(p := weight(), "data", p.data + dice.random()),
        "flag": lambda: weight().requires_grad_(dice.random() < 0.5),
        "tie": tie,
        "untie": untie,
        "grow": lambda: net.layers.append(nn.Linear(2, 2)) if len(net.layers) < 5 else None,
        "shrink": lambda: net.layers.__delitem__(layer()) if len(net.layers) > 1 else None,
        "replace": lambda: net.layers.__setitem__(layer(), nn.Linear(2, 2)),
        "mode": lambda: net.norm.train(dice.random() < 0.5),
        "rate": lambda: setattr(net, "rate", dice.random()),
        "config": lambda: net.config.update(scale=dice.random()),
        "names": lambda: net.config["names"].append("b"),
        "view": lambda: net.view.add_(1),
        "unview": lambda: setattr(net, "view", net.view.clone()),
        "review": lambda: setattr(net, "view", net.base[(at := dice.randrange(3)) : at + 3]),
        "bias": lambda: setattr(
            net.layers[layer()], "bias", dice.choice([None, nn.Parameter(torch.ones(2))])
        ),
        "dtype": lambda: net.to(dice.choice([torch.float32, torch.float64])),
        "tag": lambda: setattr(weight(), "tag", dice.random()),
    }
    name = dice.choice([*edits])
    edits[name]()
    return name


def random_forward(far: Far, dice: random.Random) -> None:
    """What a chunk's forward may do to its replica."""
    with far.replica_module.running():
        for _ in range(dice.randrange(3)):
            random_edit(far.replica_module.module, dice)


class RecordingStore:
    """An object store that knows which objects are still referred to."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.put_bytes: list[int] = []

    class Reference:
        """Stands for an object."""

        def __init__(self, data: np.ndarray) -> None:
            self.data = data

    def link(self) -> ObjectStoreLink:
        """A driver's link over this store."""

        def put(buffer: np.ndarray) -> Any:
            reference = self.Reference(buffer.copy())
            self.alive.add(reference)
            self.put_bytes.append(buffer.nbytes)
            return reference

        return ObjectStoreLink(put, lambda reference: reference.data)


@pytest.mark.parametrize(
    "seed", [*range(4), *[pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 12)]]
)
def test_C11_mirrors_follow_any_sequence_of_edits(seed: int) -> None:
    """Two mirrors that update at different moments, one that starts late, and forwards that leave
    traces.
    """
    dice = random.Random(seed)
    torch.manual_seed(seed)
    net = Small()
    link = RecordingStore().link() if seed % 2 else InlineLink()
    tracker, often, seldom = ModuleTracker(net, link), Far(link), Far(link)
    history = []
    for number in range(40):
        for _ in range(dice.randrange(3)):
            history.append(random_edit(net, dice))
        fars = [often, seldom] if dice.random() < 0.3 else [often]
        step(tracker, *fars, graphs_alive=dice.random() < 0.5)
        for far in fars:
            try:
                assert_mirrors(net, far)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, step {number}, after {history}") from error
        if dice.random() < 0.5:
            random_forward(dice.choice(fars), dice)
    late = Far(link)
    step(tracker, late)
    assert_mirrors(net, late)


def test_packets_that_are_mostly_outdated_are_let_go() -> None:
    """The few blocks that alone keep a large packet alive move to one of their own, once."""
    net = nn.Module()
    for i in range(8):
        net.register_buffer(f"b{i}", torch.zeros(112))
    store = RecordingStore()
    link = store.link()
    tracker, late = ModuleTracker(net, link), Far(link)
    step(tracker)
    assert [*store.put_bytes] == [8 * 448]
    for i in range(4):
        getattr(net, f"b{i}").add_(1)
        step(tracker)
    assert len(store.put_bytes) == 5
    assert len(store.alive) == 5
    net.b4.add_(1)
    step(tracker)
    # Three of eight still lived in the first packet, less than half of it.
    assert store.put_bytes[5:] == [448, 3 * 448]
    assert sum(len(reference.data) for reference in store.alive) == 8 * 448
    step(tracker, late)
    assert late.replica_module.module.b3.tolist() == [1.0] * 112
    assert late.replica_module.module.b7.tolist() == [0.0] * 112
    assert len(store.put_bytes) == 7


def test_updates_serve_several_replicas_with_one_packet() -> None:
    """What one revision needs is put once, however many replicas hold it."""
    store = RecordingStore()
    net = Small()
    link = store.link()
    tracker = ModuleTracker(net, link)
    step(tracker, Far(link), Far(link), Far(link))
    assert len(store.put_bytes) == 1


def test_R6_write_back_changes_the_master_in_place() -> None:
    """Versions move where they moved in the replica; the other replicas get the new contents."""
    net = Net()
    tracker, far = ModuleTracker(net, InlineLink()), Far()
    step(tracker, far)
    slots = {id(t): s for s, t in tracker._contents.master.tensors.items()}
    mean, var = net.norm.running_mean, net.norm.running_var
    versions = mean._version, var._version
    parcel = codec.encode((), Attachments(InlineLink()), "")[0]
    at, contents = (slots[id(mean)], slots[id(var)]), struct.pack("3f52x3f", *[1.0] * 3, *[2.0] * 3)
    blob = Blob(at, (0, 64), (12, 12), contents)
    written = WriteBack(5, ((at[0], True), (at[1], False)), blob, (), parcel)
    tracker.write_back(written, Attachments(InlineLink()))
    assert (mean.tolist(), var.tolist()) == ([1, 1, 1], [2, 2, 2])
    assert (mean._version, var._version) == (versions[0] + 1, versions[1])
    assert step(tracker, far) == 1
    assert_mirrors(net, far)


def test_F1_a_module_on_two_devices_is_refused() -> None:
    """With upstream's words."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(
        RuntimeError,
        match=r"module must have its parameters and buffers on device cpu .* "
        r"on device: meta",
    ):
        ModuleTracker(net, InlineLink()).sync()


def test_a_watch_is_not_copied() -> None:
    """A wrapper's copy or pickle gets a watch of its own."""
    tracker = ModuleTracker(Net(), InlineLink())
    assert copy.deepcopy(tracker) is None
    assert pickle.loads(pickle.dumps(tracker)) is None
