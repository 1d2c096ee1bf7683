"""Bad input gets a clear error, and the executor stays usable, as a good call then shows."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import raised
from torch import nn

from raydp_parallel import DataParallel, Executor, Options, data_parallel, errors
from raydp_parallel.errors import ParallelError, PlacementError, TransferError

pytestmark = pytest.mark.usefixtures("usable_afterwards")

TWO = ["cpu", "cpu"]
THREE = ["cpu", "cpu", "cpu"]


@pytest.fixture
def usable_afterwards() -> Iterator[None]:
    """After the test the shared executor works, with the same processes if none died."""
    executor = DataParallel(nn.Linear(4, 2), THREE).executor
    good_call(THREE)
    executor.grow()  # where one died in that
    before = executor.stats().replicas
    yield
    good_call(THREE)
    assert DataParallel(nn.Linear(4, 2), THREE).executor is executor
    for old, new in zip(before, executor.stats().replicas, strict=False):
        assert (old.pid == new.pid) == (old.deaths == new.deaths)


def good_call(ids: list[Any], executor: Executor | None = None) -> None:
    """A forward and a backward that must give what the plain module gives."""
    net = nn.Linear(4, 2)
    x = torch.randn(6, 4)
    out = DataParallel(net, ids, executor=executor)(x)
    torch.testing.assert_close(out, net(x))
    out.sum().backward()
    torch.testing.assert_close(net.weight.grad, x.sum(0).expand(2, 4))


class Holder:
    """Holds something."""

    def __init__(self, content: Any) -> None:
        self.content = content


# --- device_ids and the other arguments of the constructor ---


@pytest.mark.parametrize(
    ("ids", "kind", "words"),
    [
        ([], ValueError, ["device_ids=[]", "every GPU", "'cpu'"]),
        ((), ValueError, ["names no device"]),
        ([0, 7], PlacementError, ["[7]", "Use [0, 1]", "'cpu'"]),
        (["cuda:9"], PlacementError, ["cuda:9"]),
        ([-1], ValueError, ["-1", "ints from 0"]),
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
    """Refused by wrapper, function and executor, with what to do (row C4)."""
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
        ({"executor": "local"}, TypeError, "executor must be an Executor, got str"),
        ({"options": {"threads": 1}}, TypeError, "options must be an Options, got dict"),
        ({"output_device": 77}, ValueError, "output_device=77"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    """Refused by the constructor, by name and with what was given."""
    with pytest.raises(kind, match=words):
        DataParallel(**{"module": nn.Linear(4, 2), "device_ids": TWO} | arguments)


def test_settings_of_an_executor_beside_one() -> None:
    """They would do nothing. Those that the wrapper reads leave the executor's as they are."""
    executor = Executor((), options=Options(gpus_per_replica=0.5, metrics=False))
    with pytest.raises(ValueError, match=r"Options\(call_timeout=...\) is an executor's"):
        DataParallel(nn.Linear(4, 2), TWO, executor=executor, options=Options(call_timeout=1))
    mean = Options(scalars="mean", metrics=False)
    model = DataParallel(nn.Linear(4, 2), TWO, executor=executor, options=mean)
    assert model._options == mean and model.executor.options.gpus_per_replica == 0.5


@pytest.mark.long
@pytest.mark.ray
def test_more_gpus_than_are_free() -> None:
    """Within the deadline, with what is free; and nothing stays behind."""
    good_call([0, 1])  # the process's replicas hold both GPUs now
    error = raised(lambda: Executor([0, 1], options=Options(placement_timeout=1)))
    assert isinstance(error, PlacementError) and isinstance(error, ParallelError)
    for words in ("asked for 2 GPU and 0 CPU", "after 1 s", "[0, 1]", "0 of 2 GPU", "close"):
        assert words in str(error), error
    # Long enough for the CPU replica, too, which starts at the end.
    with Executor((), options=Options(placement_timeout=15)) as executor:
        model = DataParallel(nn.Linear(4, 2), [0, "cpu"], executor=executor)
        text = r"asked for 1 GPU and 1 CPU replicas.*device_ids \[0"
        with pytest.raises(PlacementError, match=text):
            model(torch.ones(2, 4))
        assert all(info.state != "ready" for info in executor.replicas())
        good_call(["cpu"], executor)
    good_call([0, 1])


# --- modules ---


def assert_names(error: BaseException, path: list[str]) -> None:
    """It is the error of what cannot travel, and names the parts of its path in order."""
    assert isinstance(error, TransferError) and isinstance(error, TypeError)
    at = 0
    for part in path:
        at = str(error).index(part, at) + len(part)


def test_unpicklable_module() -> None:
    """A TypeError that names the path to what cannot travel; without it the same wrapper works."""
    net = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    model = DataParallel(net, TWO)
    model(torch.ones(2, 4))
    net[1].thing = Holder({"files": [0, (None, (i for i in range(3)))]})
    error = raised(lambda: model(torch.ones(2, 4)))
    assert_names(error, ["module", "1", "thing", "content", "files", "[1]", "[1]"])
    assert "generator" in str(error)
    del net[1].thing
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
def test_unpicklable_input(call: Callable[[Any], Any], path: list[str]) -> None:
    """A TypeError that names the path to the argument (row S11)."""
    model = DataParallel(nn.Identity(), TWO)
    error = raised(lambda: call(model))
    assert_names(error, path)
    assert torch.equal(model(torch.ones(2, 4)), torch.ones(2, 4))


class NotBack:
    """Pickles; loading it raises, perhaps only in another process."""

    def __init__(self, error: Exception, process: int = 0) -> None:
        self.error, self.process = error, process

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["process"] != os.getpid():
            raise state["error"]

    def __call__(self, net: nn.Module, x: Any) -> Any:
        return net(x)


def test_what_cannot_be_loaded_is_named() -> None:
    """By its path; the cause, or where the driver cannot tell, the error is the replica's."""
    net, bad = nn.Sequential(nn.Linear(4, 2)), NotBack(LookupError("gone"))
    model, x = DataParallel(net, TWO), torch.ones(2, 4)
    expected = model(x)
    for call, path in (
        (lambda: model(x, [0, Holder({"a": bad})]), "inputs[1][1].content['a']"),
        (lambda: model(x, key=(0, bad)), "kwargs['key'][1]"),
        (lambda: model.run(bad, x), "function"),
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
    error = raised(lambda: model(x, NotBack(LookupError("elsewhere"), os.getpid())))
    assert type(error) is LookupError and "elsewhere" in str(error)
    assert torch.equal(model(x), expected)


# --- executors and clusters ---


def test_an_address_of_a_client_does_not_matter_once_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver that joined its cluster properly is not refused for what its environment says."""
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    good_call(TWO)
    assert DataParallel(nn.Linear(4, 2)).device_ids == [0, 1]


def test_the_error_tree() -> None:
    """One root for what the package raises on its own account, and each can be pickled."""
    for kind in [value for value in vars(errors).values() if isinstance(value, type)]:
        again = pickle.loads(pickle.dumps(kind("what")))
        assert issubclass(kind, ParallelError) and type(again) is kind and str(again) == "what"
