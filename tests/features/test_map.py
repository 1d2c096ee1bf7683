"""`DataParallel.map`: many batches, several at once, on real replicas."""

from __future__ import annotations

import itertools
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import Apply, dying, made_of, ones
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, StateChanged
from raydp_parallel.driver.dispatcher import Dispatcher

TWO = ["cpu", "cpu"]

on_each_number = pytest.mark.parametrize("ids", [TWO, ["cpu"]], ids=["two", "one"])
"""One is a replica, too: the executor is given."""


@pytest.fixture(scope="module")
def executor(executors: Any) -> Executor:
    """Two replicas for all tests."""
    return executors()  # type: ignore[no-any-return]


@made_of(weight=ones())
def picky(net: Any, x: Tensor) -> Tensor:
    """Adds its weight, unless the first number is negative."""
    if x[0] < 0:
        raise ValueError(f"cannot take {int(x[0])}")
    return x + net.weight  # type: ignore[no-any-return]


def nested(_net: Any, x: Tensor, *, scale: float = 1.0) -> Any:
    """Outputs of several kinds."""
    return {"sum": x.sum() * scale, "parts": [x * scale, (None, "text", 3)]}


def interrupting(_net: Any, pid: int) -> int:
    """Sends Ctrl-C to the process of which it gets the number, if it is not 0."""
    if pid:
        os.kill(pid, signal.SIGINT)
    return pid


def numbers(count: int) -> list[Tensor]:
    """Batches of two equal rows, each with its own number."""
    return [torch.full((2,), float(number)) for number in range(count)]


def firsts(outputs: Any) -> list[int]:
    """The first number of each output."""
    return [int(out[0]) for out in outputs]


def usable(model: DataParallel[Any]) -> bool:
    """Whether the next call is right."""
    return torch.equal(model(torch.tensor([1.0, 4.0])), torch.tensor([2.0, 5.0]))


def test_whole_batches_have_the_bits_and_the_seeds_of_a_loop_on_one_device(
    executor: Executor,
) -> None:
    """Dropout draws the same masks, and the loader the same numbers in between."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))

    def loader() -> Iterator[Tensor]:
        return (torch.randn(2, 3) for _ in range(8))

    torch.manual_seed(1)
    one = DataParallel(net, ["cpu"], executor=executor)
    with torch.no_grad():
        expected = [one(x) for x in loader()]
    torch.manual_seed(1)
    found = list(DataParallel(net, executor=executor).map(loader()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@on_each_number
def test_what_a_batch_is_called_with(executor: Executor, ids: list[str]) -> None:
    """A list is several arguments, a dict is keyword arguments, a string is one."""
    model = DataParallel(Apply(nested), ids, executor=executor)
    x = torch.arange(4.0)
    for batch, scale in ((x, 1), ((x,), 1), ([x], 1), ({"x": x, "scale": 2.0}, 2)):
        (out,) = model.map([batch])
        assert out["sum"].shape == () and out["sum"] == 6 * scale
        assert torch.equal(out["parts"][0].cpu(), x.cpu() * scale)
        assert out["parts"][1] == (None, "text", 3)


@pytest.mark.parametrize(
    ("in_flight", "split", "most"), [(None, False, 2), (None, True, 1), (1, False, 1)]
)
def test_no_more_batches_are_loaded_than_may_be_in_flight(
    executor: Executor, in_flight: int | None, split: bool, most: int
) -> None:
    """However slow the consumer is."""
    model = DataParallel(picky(), executor=executor)
    given, waiting = 0, []

    def loader() -> Iterator[Tensor]:
        for number, batch in enumerate(numbers(10)):
            waiting.append(number + 1 - given)
            yield batch

    outputs = model.map(loader(), in_flight=in_flight, split=split)
    assert not waiting
    for _ in outputs:
        given += 1
    assert given == 10 and max(waiting) == most


@pytest.mark.parametrize("split", [False, True])
def test_a_batch_that_fails_raises_in_its_place(executor: Executor, split: bool) -> None:
    """After the outputs before it; then the map is at its end."""
    model = DataParallel(picky(), executor=executor)
    batches = [-x if x[0] == 5 else x for x in numbers(9)]
    outputs = model.map(batches, split=split)
    assert firsts(itertools.islice(outputs, 5)) == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="cannot take -5"):
        next(outputs)
    assert list(outputs) == []
    assert usable(model)


def test_batches_that_fail_are_skipped_with_one_warning(executor: Executor) -> None:
    """It counts them, and names each."""
    model = DataParallel(picky(), executor=executor)
    batches = [batch * (-1) ** number for number, batch in enumerate(numbers(8))]
    text = "4 batches failed: batch 1: ValueError: cannot take -1; batch 3"
    with pytest.warns(UserWarning, match=text) as said:
        assert firsts(model.map(batches, on_error="skip")) == [1, 3, 5, 7]
    assert [one.filename for one in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert firsts(model.map(numbers(3), on_error="skip")) == [1, 2, 3]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_loader_that_fails_raises_after_the_outputs_before(
    executor: Executor, on_error: Any
) -> None:
    """Its own error, which is never skipped."""
    model = DataParallel(picky(), executor=executor)

    def loader() -> Iterator[Tensor]:
        yield from numbers(3)
        raise OSError("the disk is gone")

    found = []
    with pytest.raises(OSError, match="the disk is gone"):
        found.extend(model.map(loader(), on_error=on_error))
    assert firsts(found) == [1, 2, 3]
    assert usable(model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_death_changes_no_output(mode: Any, killable: Executor) -> None:
    """Batches may share memory; one that was in flight when weights changed cannot run again."""
    net = picky()
    model = DataParallel(net, executor=killable)

    def loader() -> Iterator[Tensor]:
        memory = torch.empty(2)
        for number in range(6):
            yield memory.fill_(number)

    with mode():
        with dying(killable, 1, "sent"):
            assert firsts(model.map(loader())) == [1, 2, 3, 4, 5, 6]
        with dying(killable, 1, "answered"), pytest.raises(StateChanged, match="'weight'"):
            for _ in model.map(loader()):
                net.weight += 1


def test_weights_of_a_batch_in_flight_stay(killable: Any, monkeypatch: Any) -> None:
    """In memory that its replica has not read yet, though one elsewhere gets newer ones."""
    net = picky()
    model = DataParallel(net, executor=killable)
    first, other = killable.slots(TWO)
    monkeypatch.setattr(first, "hello", first.hello._replace(device="cuda:0"))
    monkeypatch.setattr(other, "hello", other.hello._replace(near=False))
    receive, pid = Dispatcher.receive, first.info().pid

    def go_on(*args: Any) -> Any:
        os.kill(pid, signal.SIGCONT)
        return receive(*args)

    monkeypatch.setattr(Dispatcher, "receive", go_on)
    assert usable(model)

    def loader() -> Iterator[Tensor]:
        for batch in numbers(2):
            os.kill(pid, signal.SIGSTOP)
            with torch.no_grad():
                net.weight.add_(1)
            yield batch

    assert firsts(model.map(loader())) == [2, 4]


def test_leaving_the_loop_ends_the_map(executor: Executor) -> None:
    """Nothing more is loaded, and each batch that was sent has been computed."""
    model = DataParallel(picky(), executor=executor)
    loaded = itertools.count()
    before = executor.stats().forwards
    for out in model.map(torch.full((2,), float(number)) for number in loaded):
        if out[0] == 3:
            break
    assert (sent := next(loaded)) == 3 - 1 + 2
    assert executor.stats().forwards == before + sent
    assert usable(model)
    for begin in (next, iter):
        outputs = model.map(numbers(8))
        begin(outputs)
        outputs.close()
        assert list(outputs) == []
    assert usable(model)


@on_each_number
def test_ctrl_c_ends_the_map(executor: Executor, ids: list[str]) -> None:
    """Wherever the driver is; here the fourth batch sends it."""
    model = DataParallel(Apply(interrupting), ids, executor=executor)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            # Again where it is lost: Python ignores it in finalizers, torch's and Ray's too.
            for _ in model.map(itertools.cycle([0, 0, 0, os.getpid(), *[0] * 200])):
                pass
        assert usable(DataParallel(picky(), ids, executor=executor))


def test_in_place() -> None:
    """The module itself runs, one batch at a time, and keeps what it does to itself."""
    net = nn.BatchNorm1d(3)
    model = DataParallel(net, ["cpu"])
    found = list(model.map([torch.randn(4, 3)] * 3))
    assert [out.requires_grad for out in found] == [False] * 3
    assert net.num_batches_tracked == 3
    model = DataParallel(picky(), ["cpu"])
    loaded = []

    def loader() -> Iterator[Any]:
        for batch in (torch.ones(2), {"x": -torch.ones(2)}, (torch.ones(2),)):
            loaded.append(batch)
            yield batch

    outputs = model.map(loader(), on_error="skip", in_flight=7)
    assert firsts(itertools.islice(outputs, 1)) == [2]
    assert len(loaded) == 1
    with pytest.warns(UserWarning, match="1 batches failed"):
        assert firsts(outputs) == [2]


def test_wrong_settings_are_named_at_once(executor: Executor) -> None:
    """Before anything is loaded."""
    model = DataParallel(picky(), executor=executor)
    refused = [*(("in_flight", wrong) for wrong in (0, -1, True, 1.5, "2")), ("on_error", "ignore")]
    for name, wrong in refused:
        with pytest.raises(ValueError, match=f"map: {name}={wrong!r}, expected"):
            model.map([], **{name: wrong})
    model.forward = print
    with pytest.raises(TypeError, match="map: DataParallel changes forward, replicate or parallel"):
        model.map([])
