"""Bad input gets a clear error, and the executor stays usable: each test ends with a good call on
the same executor.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from harness import limited, raised
from torch import nn

from raydp_parallel import (
    ClusterError,
    DataParallel,
    Executor,
    ExecutorClosed,
    GraphLost,
    Options,
    ParallelError,
    PlacementError,
    ReplicaDied,
    ReplicaError,
    ReplicaExit,
    TransferError,
    data_parallel,
    parallel_apply,
    replicate,
)

pytestmark = pytest.mark.usefixtures("cluster", "usable_afterwards")

RAISE = Options(on_fault="raise")
"""What a death does to a call that is not to be run again; what happens else,
test_faults.py says.
"""

TWO = ["cpu", "cpu"]
THREE = ["cpu", "cpu", "cpu"]


@pytest.fixture
def usable_afterwards(cluster: None) -> Iterator[None]:
    """After the test the shared executor runs forward and backward, and, if no replica died, with
    the same processes.
    """
    executor = DataParallel(nn.Linear(4, 2), THREE).executor
    good_call(THREE)
    before = executor.replicas()
    deaths = [replica.deaths for replica in executor.stats().replicas]
    yield
    good_call(THREE)
    assert DataParallel(nn.Linear(4, 2), THREE).executor is executor
    for old, new, died in zip(before, executor.stats().replicas, deaths, strict=False):
        assert (old.pid == new.pid) == (new.deaths == died)


def good_call(ids: list[Any], executor: Executor | None = None) -> None:
    """A forward and a backward that must give what the plain module gives."""
    net = nn.Linear(4, 2)
    x = torch.randn(6, 4)
    out = DataParallel(net, ids, executor=executor)(x)
    torch.testing.assert_close(out, net(x))
    out.sum().backward()
    torch.testing.assert_close(net.weight.grad, x.sum(0).expand(2, 4))


class Raises(nn.Module):
    """Raises what it is told to where the row says so."""

    def __init__(self, error: Any) -> None:
        super().__init__()
        self.error = error

    def forward(self, bad: torch.Tensor) -> torch.Tensor:
        if bad.any():
            raise self.error() if isinstance(self.error, type) else self.error("told so")
        return bad * 1.0


class TwoArguments(Exception):
    """Cannot be made of one argument."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


def two_arguments(text: str) -> Exception:
    return TwoArguments(7, text)


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def locked(text: str) -> Exception:
    return Locked(text)


def with_cause(text: str) -> Exception:
    error = ValueError(text)
    error.__cause__ = KeyError("the cause")
    return error


def unpicklable_class(text: str) -> Exception:
    class Local(Exception):
        lock = threading.Lock()

    return Local(text)


class Exits(nn.Module):
    """Ends in one of the ways in which a process can end."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.way = way

    def forward(self, rank: torch.Tensor) -> torch.Tensor:
        if rank[0] == 1:
            if self.way == "os._exit":
                os._exit(3)
            if self.way == "segfault":
                with contextlib.suppress(Exception):
                    faulthandler.disable()  # no page of stacks in the log
                ctypes.string_at(0)
            raise {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}[self.way](4)
        return rank * self.weight


class ExitsInBackward(nn.Module):
    """Its process ends in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, rank: torch.Tensor) -> torch.Tensor:
        out = rank * self.weight
        out.register_hook(lambda grad: os._exit(3) if rank[0] == 1 else grad)
        return out


class RaisesInBackward(nn.Module):
    """Raises in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, rank: torch.Tensor) -> torch.Tensor:
        out = rank * self.weight

        def fail(grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("in backward")

        if rank[0] == 1:
            out.register_hook(fail)
        return out


class Returns(nn.Module):
    """Returns what a name stands for, for the chunk with the given first row."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def forward(self, rank: torch.Tensor) -> Any:
        return {
            "tensor": rank,
            "none": None,
            "pair": (rank, rank),
            "triple": [rank, rank, rank],
            "a": {"a": rank},
            "b": {"b": rank},
            "ab": {"a": rank, "b": rank},
            "generator": (i for i in range(3)),
            "lock": {"locks": [threading.Lock()]},
            "wide": torch.ones(2, 3),
            "narrow": torch.ones(2, 2),
        }[self.names[int(rank[0])]]


class Holder:
    """Holds something."""

    def __init__(self, content: Any) -> None:
        self.content = content


class Product(nn.Module):
    """Saves its weights for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


# --- device_ids and the other arguments of the constructor ---


@pytest.mark.parametrize(
    ("ids", "kind", "words"),
    [
        ([], ValueError, ["device_ids=[]", "every GPU", "'cpu'"]),
        ((), ValueError, ["names no device"]),
        ([0, 7], PlacementError, ["[7]", "GPUs 0 to 1", "'cpu'"]),
        (["cuda:9"], PlacementError, ["[9]"]),
        ([-1], ValueError, ["-1", "negative"]),
        ("cpu", TypeError, ["'cpu'", "list"]),
        (2, TypeError, ["2", "list"]),
        ([True], TypeError, ["True", "bool"]),
        ([0.0], TypeError, ["0.0", "float"]),
        ([None], TypeError, ["None"]),
        (["meta"], ValueError, ["'meta'"]),
        (["mps"], ValueError, ["'mps'"]),
        (["gpu"], ValueError, ["'gpu'", "cuda:N"]),
    ],
)
def test_device_ids_that_name_no_device(ids: Any, kind: type[Exception], words: list[str]) -> None:
    """Refused where they are given, by wrapper, function and executor, with what was seen and what
    to do (row C4).
    """
    uses: list[Callable[[], Any]] = [
        lambda: DataParallel(nn.Linear(4, 2), ids),
        lambda: data_parallel(nn.Linear(4, 2), torch.ones(2, 4), ids),
    ]
    if ids != ():
        uses.append(lambda: Executor(ids))
    for use in uses:
        error = raised(use)
        assert isinstance(error, kind), repr(error)
        assert all(word in str(error) for word in words), error


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"module": lambda x: x}, TypeError, "module must be a Module, got function"),
        ({"module": None}, TypeError, "module must be a Module, got NoneType"),
        ({"dim": "0"}, TypeError, "dim must be an int, got '0'"),
        ({"dim": True}, TypeError, "dim must be an int, got True"),
        ({"executor": "local"}, TypeError, "executor must be a Executor, got str"),
        ({"options": {"link": "inline"}}, TypeError, "options must be a Options, got dict"),
        ({"output_device": 7}, ValueError, "output_device=7"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    """Refused by the constructor, by name and with what was given."""
    with pytest.raises(kind, match=words):
        DataParallel(**{"module": nn.Linear(4, 2), "device_ids": TWO} | arguments)


@pytest.mark.parametrize(
    "wrong",
    [
        {"unused_grads": "zero"},
        {"scalars": "max"},
        {"link": "carrier pigeon"},
        {"placement_timeout": 0},
        {"call_timeout": -1.0},
        {"on_fault": "ignore"},
        {"max_restarts_per_hour": -1},
        {"cpus_per_replica": -1},
        {"gpus_per_replica": 2},
        {"threads": 0},
    ],
)
def test_wrong_options(wrong: dict[str, Any]) -> None:
    """Checked when they are made; the name is in the text."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Options(**wrong)


@pytest.mark.long
def test_more_gpus_than_are_free() -> None:
    """Within the deadline: what was asked for, what is free, and what to do; and nothing stays
    behind.
    """
    good_call([0, 1])  # the process's replicas hold both GPUs now
    error = raised(lambda: Executor([0, 1], options=Options(placement_timeout=1)))
    assert isinstance(error, PlacementError) and isinstance(error, ParallelError)
    for words in (
        "asked for 2 GPU and 0 CPU replicas",
        "after 1 s",
        "device_ids [0, 1]",
        "0 of 2 GPU",
        "close",
    ):
        assert words in str(error), error
    # Long enough for the CPU replica, too, which starts at the end.
    with Executor((), options=Options(placement_timeout=15)) as executor:
        model = DataParallel(nn.Linear(4, 2), [0, "cpu"], executor=executor)
        with pytest.raises(
            PlacementError,
            match=r"asked for 1 GPU and 1 CPU "
            r"replicas.*device_ids \[0",
        ):
            model(torch.ones(2, 4))
        assert all(info.state != "ready" for info in executor.replicas())
        good_call(["cpu"], executor)
    good_call([0, 1])


# --- modules ---


def test_parameters_on_two_devices() -> None:
    """Upstream's RuntimeError, naming both (row F1)."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, device="meta"))
    for use in (
        lambda: DataParallel(net, TWO)(torch.ones(2, 4)),
        lambda: data_parallel(net, torch.ones(2, 4), TWO),
    ):
        with pytest.raises(
            RuntimeError,
            match=r"on device cpu .* but found one of them on "
            r"device: meta",
        ):
            use()


def test_uninitialised_lazy_modules() -> None:
    """Upstream's words; after a dummy forward the same wrapper works."""
    net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    model = DataParallel(net, TWO)
    for use in (lambda: model(torch.ones(4, 3)), lambda: replicate(net, TWO)):
        error = raised(use)
        assert type(error) is ValueError
        assert str(error).startswith("Attempted to use an uninitialized parameter")
    net(torch.randn(4, 3))
    assert model(torch.randn(4, 3)).shape == (4, 4)


@pytest.mark.parametrize("where", ["attribute", "config", "submodule", "buffer dict"])
def test_unpicklable_module(where: str) -> None:
    """A TypeError that names the path to what cannot travel; without it the same wrapper works."""
    net = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    model = DataParallel(net, TWO)
    model(torch.ones(2, 4))
    owner, generator = net[1] if where == "submodule" else net, (i for i in range(3))
    content = {
        "config": Holder({"files": [generator]}),
        "buffer dict": {"key": (0, generator)},
    }
    owner.thing = content.get(where, generator)
    error = raised(lambda: model(torch.ones(2, 4)))
    path = {
        "attribute": ["module", "thing"],
        "config": ["module", "thing", "content", "files", "[0]"],
        "submodule": ["module", "1", "thing"],
        "buffer dict": ["module", "thing", "key", "[1]"],
    }[where]
    assert isinstance(error, TransferError) and isinstance(error, TypeError)
    at = 0
    for part in path:
        at = str(error).index(part, at) + len(part)
    assert "generator" in str(error)
    del owner.thing
    assert model(torch.ones(2, 4)).shape == (2, 2)


# --- inputs ---


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda model: model(torch.ones(2, 4), threading.Lock()), ["inputs", "[1]"]),
        (lambda model: model(i for i in range(3)), ["inputs", "[0]"]),
        (
            lambda model: model(torch.ones(2, 4), key={"a": [0, threading.Lock()]}),
            ["kwargs", "key", "a", "[1]"],
        ),
        (lambda model: model(open(os.devnull, "w")), ["inputs", "[0]"]),  # noqa: SIM115
        (lambda model: model(Holder({"x": threading.Lock()})), ["inputs", "[0]", "content", "x"]),
    ],
)
@pytest.mark.parametrize("ids", [["cpu"], TWO])
def test_unpicklable_input(call: Callable[[Any], Any], path: list[str], ids: list[str]) -> None:
    """A TypeError that names the path to the argument (row S11)."""
    model = DataParallel(nn.Identity(), ids)
    error = raised(lambda: call(model))
    assert isinstance(error, TransferError) and isinstance(error, TypeError)
    at = 0
    for part in path:
        at = str(error).index(part, at) + len(part)
    assert torch.equal(model(torch.ones(2, 4)), torch.ones(2, 4))


class NotBack:
    """Pickles; loading it raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise state["error"]


@pytest.mark.parametrize("ids", [["cpu"], TWO])
def test_what_cannot_be_loaded_is_named(ids: list[str]) -> None:
    """The path to it, also when it is in the module or one of many; the cause is the replica's
    exception. Without it the same wrapper works.
    """
    net, bad = nn.Sequential(nn.Linear(4, 2)), NotBack(LookupError("gone"))
    model, x = DataParallel(net, ids), torch.ones(2, 4)
    expected = model(x)
    for call, path in (
        (lambda: model(x, [0, Holder({"a": bad})]), "inputs[1][1].content['a']"),
        (lambda: model(x, key=(0, bad)), "kwargs['key'][1]"),
    ):
        error = raised(call)
        assert isinstance(error, TransferError), error
        assert str(error).startswith(f"{path} is a test_bad_input.NotBack, which can be pickled")
        assert "LookupError: gone" in str(error) and isinstance(error.__cause__, LookupError)
    net[0].held = {"bad": bad}
    error = raised(lambda: model(x))
    assert isinstance(error, TransferError)
    assert "0.held['bad'] is a test_bad_input.NotBack" in str(error), error
    del net[0].held
    assert torch.equal(model(x), expected)


class OnlyHere:
    """Can be loaded in the process that made it, and nowhere else."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["process"] != os.getpid():
            raise LookupError("elsewhere")


def test_what_only_a_replica_cannot_load() -> None:
    """The replica's own exception: the driver cannot tell what it was."""
    model = DataParallel(nn.Identity(), TWO)
    error = raised(lambda: model(torch.ones(2, 4), OnlyHere()))
    assert type(error) is LookupError and "elsewhere" in str(error)


class Adds(nn.Module):
    """Takes two arguments."""

    def forward(self, x: torch.Tensor, y: Any, z: Any = 0) -> torch.Tensor:
        return x + y + z


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (((6,), (1,), {}), ["inputs[0]", "size 6", "inputs[1]", "size 1"]),
        (((5,), (4,), {}), ["inputs[0]", "size 5", "inputs[1]", "size 4"]),
        (((2,), (2,), {"z": (1,)}), ["size 2", "kwargs", "z", "size 1"]),
    ],
)
def test_arguments_of_different_batch_size(sizes: Any, words: list[str]) -> None:
    """No row is lost in silence: the arguments and their sizes are named (rows S6, K2, K3)."""
    model = DataParallel(Adds(), THREE)
    x, y, named = (
        torch.ones(sizes[0]),
        torch.ones(sizes[1]),
        {k: torch.ones(v) for k, v in sizes[2].items()},
    )
    error = raised(lambda: model(x, y, **named))
    assert isinstance(error, ValueError) and not isinstance(error, ParallelError)
    assert all(word in str(error) for word in words), error
    assert model(torch.ones(6), torch.ones(6), z=1).tolist() == [3.0] * 6


def test_a_dimension_that_is_not_there() -> None:
    """IndexError, naming argument, shape and dimension (row S5)."""
    model = DataParallel(Adds(), TWO, dim=1)
    with pytest.raises(
        IndexError,
        match=r"Dimension out of range.*inputs\[1\] has shape "
        r"\(2,\).*dim 1",
    ):
        model(torch.ones(2, 2), torch.ones(2))
    assert model(torch.ones(2, 2), torch.ones(2, 2)).shape == (2, 2)


def test_arguments_that_the_module_does_not_take() -> None:
    """The module's own TypeError, from the replica."""
    model = DataParallel(nn.Linear(4, 2), TWO)
    with pytest.raises(TypeError, match="Caught TypeError in replica 0 on device cpu"):
        model(torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        model()
    assert model(torch.ones(2, 4)).shape == (2, 2)


# --- exceptions of the module ---


@pytest.mark.parametrize("bad", [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1], [1, 1, 1]])
def test_raises_in_one_some_or_all_replicas(bad: list[int]) -> None:
    """The lowest failing replica's exception, with upstream's words and the original traceback
    (rows A4, A5).
    """
    first = bad.index(1)
    ours, theirs = (
        DataParallel(Raises(ValueError), THREE),
        oracle.DataParallel(Raises(ValueError), [0, 1, 2]),
    )
    errors = [raised(lambda m=model: m(torch.tensor(bad))) for model in (ours, theirs)]
    for error, device in zip(errors, ("cpu", first), strict=True):
        assert type(error) is ValueError
        assert str(error).startswith(
            f"Caught ValueError in replica {first} on device {device}.\nOriginal Traceback "
            "(most recent call last):\n"
        )
        assert "raise self.error()" in str(error)
    assert ours(torch.zeros(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "kind", [KeyError, ZeroDivisionError, StopIteration, AssertionError, UnicodeError, OSError]
)
def test_exceptions_keep_their_type(kind: type[Exception]) -> None:
    """Built-in exceptions arrive as what they are; a KeyError's text can be read."""
    ours, theirs = DataParallel(Raises(kind), TWO), oracle.DataParallel(Raises(kind), [0, 1])
    errors = [raised(lambda m=model: m(torch.tensor([0, 1]))) for model in (ours, theirs)]
    assert type(errors[0]) is type(errors[1]) is kind
    assert str(errors[0]).splitlines()[0] == f"Caught {kind.__name__} in replica 1 on device cpu."
    assert len(str(errors[0]).splitlines()) > 3


@pytest.mark.parametrize(
    ("error", "kind", "name"),
    [
        (two_arguments, RuntimeError, "TwoArguments"),
        (locked, Locked, "Locked"),
        (with_cause, ValueError, "ValueError"),
        (unpicklable_class, RuntimeError, "Local"),
    ],
)
def test_exceptions_that_do_not_round_trip(error: Any, kind: type[Exception], name: str) -> None:
    """Constructors of two arguments, exceptions and classes that cannot be pickled: type or at
    least text arrive.
    """
    model = DataParallel(Raises(error), TWO)
    found = raised(lambda: model(torch.tensor([1, 0])))
    assert type(found) is kind
    assert "Caught" in str(found) and name in str(found).splitlines()[0]
    assert "in replica 0 on device cpu" in str(found).splitlines()[0]
    assert "told so" in str(found)
    if error is with_cause:
        assert "the cause" in str(found)
    assert model(torch.zeros(2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError, ValueError), (locked, Locked), (two_arguments, TwoArguments)]
)
def test_one_device_raises_the_exception_itself(error: Any, kind: type[Exception]) -> None:
    """With one device, and from a replica called alone, exceptions are raw; the remote traceback is
    the cause (A6).
    """
    for model in (DataParallel(Raises(error), ["cpu"]), replicate(Raises(error), ["cpu"])[0]):
        found = raised(lambda model=model: model(torch.tensor([1])))
        assert type(found) is kind
        assert "Caught" not in str(found)
        assert "raise self.error" in str(found.__cause__)
        if kind is TwoArguments:
            assert (str(found), found.code) == ("7: told so", 7)  # type: ignore[attr-defined]
        assert model(torch.zeros(1)).tolist() == [0.0]


def test_exceptions_of_local_classes() -> None:
    """A class that only this function knows travels by value."""

    class Mine(Exception):
        pass

    class Local(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise Mine("here")

    error = raised(lambda: DataParallel(Local(), TWO)(torch.ones(2)))
    assert type(error).__name__ == "Mine"
    assert str(error).startswith("Caught Mine in replica 0 on device cpu.")


def test_errors_in_backward() -> None:
    """An exception in a replica's backward arrives as its type, and says in which."""
    model = DataParallel(RaisesInBackward(), TWO)
    out = model(torch.arange(2.0))
    with pytest.raises(ValueError, match="in backward"):
        out.sum().backward()
    assert model.module.weight.grad is None
    model(torch.zeros(2)).sum().backward()
    assert model.module.weight.grad.item() == 0


# --- ends of processes ---


@pytest.mark.parametrize("way", ["SystemExit", "KeyboardInterrupt"])
def test_exit_in_forward(way: str) -> None:
    """The process stays; the error names the replica and how it ended (row A7)."""
    model = DataParallel(Exits(way), THREE)
    before = model.executor.replicas()
    error = raised(lambda: model(torch.arange(3.0)))
    assert isinstance(error, ReplicaExit) and isinstance(error, ReplicaError)
    second = [info for info in before if info.device_id == "cpu"][1]
    assert (
        way in str(error)
        and f"replica {second.index}" in str(error)
        and str(second.pid) in str(error)
    )
    assert "Traceback" in str(error)
    assert model.executor.replicas() == before
    assert model(torch.tensor([0.0, 2.0, 3.0])).tolist() == [0.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("way", "devices"),
    [("os._exit", TWO), pytest.param("segfault", THREE, marks=pytest.mark.long)],
)
def test_death_in_forward(way: str, devices: list[str]) -> None:
    """The error names the replica that died; the next call has a new one, and the others are the
    old ones.
    """
    model = DataParallel(Exits(way), devices, options=RAISE)
    count, good = len(devices), torch.tensor([0.0, 2.0, 3.0])[: len(devices)]
    model(good)
    before = [info for info in model.executor.replicas() if info.device_id == "cpu"]
    error = raised(lambda: model(torch.arange(float(count))))
    assert isinstance(error, ReplicaDied) and isinstance(error, ReplicaError)
    assert (
        f"replica {before[1].index} " in str(error)
        and str(before[1].pid) in str(error)
        and "forward" in str(error)
    )
    states = {info.index: info.state for info in model.executor.replicas()}
    assert [states[info.index] for info in before[:count]] == ["ready", "dead", "ready"][:count]
    out = model(good)
    assert torch.equal(out, good)
    out.sum().backward()
    assert model.module.weight.grad.item() == good.sum()
    after = {info.index: info for info in model.executor.replicas()}
    stayed = [after[old.index].pid == old.pid for old in before[:count]]
    assert stayed == [True, False, True][:count]
    assert [after[old.index].state for old in before[:count]] == ["ready"] * count


@pytest.mark.long
def test_death_in_backward() -> None:
    """Named as well; no gradient is taken over in part."""
    model = DataParallel(ExitsInBackward(), TWO, options=RAISE)
    out = model(torch.arange(2.0))
    with pytest.raises(ReplicaDied, match="died in backward"):
        out.sum().backward()
    assert model.module.weight.grad is None
    model(torch.tensor([0.0, 2.0])).sum().backward()
    assert model.module.weight.grad.item() == 2


def test_graphs_of_a_dead_replica() -> None:
    """A forward from before the death cannot be differentiated; the error says what to do."""
    model = DataParallel(Exits("none"), TWO, options=RAISE)
    deadly = DataParallel(Exits("os._exit"), TWO, options=RAISE)
    out = model(torch.tensor([0.0, 2.0]))
    assert isinstance(raised(lambda: deadly(torch.arange(2.0))), ReplicaDied)
    for _ in range(2):  # while the slot is empty, and when it has a new replica
        with pytest.raises(GraphLost, match="run forward again"):
            out.sum().backward(retain_graph=True)
        assert model.module.weight.grad is None
        model(torch.tensor([0.0, 2.0]))


@pytest.mark.long
def test_killed_between_two_calls() -> None:
    """A process that was ended from outside is noticed by the next call, and replaced for the one
    after it.
    """
    model = DataParallel(nn.Linear(4, 2), TWO, options=RAISE)
    model(torch.ones(2, 4))
    second = [info for info in model.executor.replicas() if info.device_id == "cpu"][1]
    os.kill(second.pid, signal.SIGKILL)
    with pytest.raises(ReplicaDied, match=rf"replica {second.index} .*pid {second.pid}"):
        model(torch.ones(2, 4))
    assert model(torch.ones(2, 4)).shape == (2, 2)


class Waits(nn.Module):
    """Says that it began, and waits for a file."""

    def forward(self, rank: torch.Tensor, begun: str, until: str) -> torch.Tensor:
        if rank[0] == 1:
            Path(begun).touch()
            while not Path(until).exists():
                time.sleep(0.005)
        return rank * 2


@pytest.mark.long
def test_no_answer_in_time(tmp_path: Path, executors: Any) -> None:
    """A replica that does not answer within ``call_timeout`` counts as dead, and a new one takes
    its place.
    """
    executor = executors(on_fault="raise")
    good_call(TWO, executor)
    model = DataParallel(Waits(), executor=executor)
    known = tmp_path / "known"
    known.touch()
    begun = str(tmp_path / "begun")
    assert model(torch.arange(2.0), begun, str(known)).tolist() == [0.0, 2.0]
    died = pytest.raises(ReplicaDied, match=r"replica 1 .*no answer within call_timeout=3.0 s")
    with died, limited(executor, 3.0):
        model(torch.arange(2.0), begun, str(tmp_path / "never"))
    assert [info.state for info in executor.replicas()] == ["ready", "dead"]
    good_call(TWO, executor)


def test_ctrl_c_while_replicas_run(tmp_path: Path) -> None:
    """KeyboardInterrupt comes through at once; what the replicas answer later is dropped."""
    begun, until = tmp_path / "begun", tmp_path / "until"
    model = DataParallel(Waits(), TWO)

    def press() -> None:
        while not begun.exists():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        model(torch.arange(2.0), str(begun), str(until))
    presser.join()
    until.touch()
    assert model(torch.arange(2.0), str(begun), str(until)).tolist() == [0.0, 2.0]


# --- outputs ---


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [
        (("tensor", "none"), ValueError, ["replica 0 returned a Tensor", "replica 1 None"]),
        (("none", "tensor"), ValueError, ["replica 0 returned None", "replica 1 a Tensor"]),
        (("tensor", "pair"), ValueError, ["a Tensor", "a tuple"]),
        (("pair", "triple"), ValueError, ["2, 3"]),
        (("a", "ab"), ValueError, ["All dicts must have the same number of keys"]),
        (("a", "b"), KeyError, ["a"]),
        (("wide", "narrow"), RuntimeError, ["Input tensor at index 1 has invalid shape"]),
    ],
)
def test_outputs_of_different_structure(
    names: tuple[str, ...], kind: type[Exception], words: list[str]
) -> None:
    """Never one replica's structure for all in silence (rows G3 to G8)."""
    error = raised(lambda: DataParallel(Returns(*names), TWO)(torch.arange(2.0)))
    assert isinstance(error, kind), repr(error)
    assert all(word in str(error) for word in words), error
    assert DataParallel(Returns("tensor", "tensor"), TWO)(torch.arange(2.0)).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "words"), [("generator", ["generator"]), ("lock", ["['locks'][0]", "lock"])]
)
@pytest.mark.parametrize("ids", [["cpu"], TWO])
def test_outputs_that_cannot_travel(name: str, words: list[str], ids: list[str]) -> None:
    """A TypeError that says what of the output it was (row G7)."""
    error = raised(lambda: DataParallel(Returns(name, name), ids)(torch.arange(2.0)))
    assert isinstance(error, TypeError)
    assert "output" in str(error)
    assert all(word in str(error) for word in words), error


# --- gradients ---


def test_backward_twice() -> None:
    """Torch's own error, and the gradients of the first pass stay (row B7)."""
    model = DataParallel(Product(), TWO)
    loss = model(torch.randn(4, 3)).sum()
    loss.backward()
    before = model.module.last.bias.grad.clone()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert torch.equal(model.module.last.bias.grad, before)
    model(torch.randn(4, 3)).sum().backward()


@pytest.mark.parametrize("how", ["in place", "optimizer"])
def test_parameter_changed_between_forward_and_backward(how: str) -> None:
    """Where torch raises because backward needs the old value, so do we (row B11)."""
    net = Product()
    model, plain = DataParallel(net, TWO), net
    errors = []
    for call in (model, plain):
        x = torch.randn(4, 3)
        net.zero_grad()
        call(x).sum().backward()
        loss = call(x).sum()
        if how == "in place":
            with torch.no_grad():
                net.last.weight.mul_(2)
        else:
            torch.optim.SGD(net.parameters(), lr=0.1).step()
        errors.append(raised(loss.backward))
    assert all(type(error) is RuntimeError for error in errors), errors
    assert all("modified by an inplace operation" in str(error) for error in errors), errors
    loss = model(torch.randn(4, 3)).sum()
    with torch.no_grad():
        net.last.bias.add_(1)  # no graph saved a bias
    loss.backward()


# --- executors and clusters ---


@pytest.mark.long
def test_use_after_close() -> None:
    """Wrapper, primitives and executor say that it was closed, and what to do."""
    executor = Executor(["cpu"])
    model = DataParallel(nn.Linear(4, 2), executor=executor)
    replica = replicate(nn.Linear(4, 2), ["cpu"], executor=executor)[0]
    out = model(torch.ones(2, 4))
    executor.close()
    executor.close()
    uses: list[Callable[[], Any]] = [
        lambda: model(torch.ones(2, 4)),
        lambda: replica(torch.ones(2, 4)),
        lambda: parallel_apply([replica], [torch.ones(2, 4)]),
        lambda: replicate(nn.Linear(4, 2), ["cpu"], executor=executor),
        executor.flush,
    ]
    for use in uses:
        with pytest.raises(ExecutorClosed, match="make another, or leave `executor` out"):
            use()
    with pytest.raises(
        ExecutorClosed, match="run backward before closing it, or run forward again"
    ):
        out.sum().backward()
    assert [info.state for info in executor.replicas()] == ["closed"]
    assert executor.stats().forwards == 1


def test_an_address_of_a_client_does_not_matter_once_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver that joined its cluster properly is not refused for what its environment says."""
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    good_call(TWO)
    assert DataParallel(nn.Linear(4, 2)).device_ids == [0, 1]


def test_the_error_tree() -> None:
    """One root for what the package raises on its own account, and each can be pickled."""
    import pickle

    for kind in (
        PlacementError,
        ClusterError,
        ExecutorClosed,
        ReplicaDied,
        ReplicaExit,
        GraphLost,
        TransferError,
    ):
        assert issubclass(kind, ParallelError) and issubclass(kind, RuntimeError)
        again = pickle.loads(pickle.dumps(kind("what")))
        assert type(again) is kind and str(again) == "what"
