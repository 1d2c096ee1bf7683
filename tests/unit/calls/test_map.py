"""`DataParallel.map`: many batches, several at once, on real replicas."""

from __future__ import annotations

import gc
import inspect
import itertools
import linecache
import os
import signal
import sys
import threading
import types
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mortal import Mortal, arm, armed
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from raydp_parallel import (
    DataParallel,
    Executor,
    ExecutorClosed,
    Options,
    ReplicaExit,
    cluster,
    functional,
)
from raydp_parallel.calls import batch_inference, dispatcher, forward
from raydp_parallel.calls.batch_inference import arguments
from raydp_parallel.cluster import recorder
from raydp_parallel.transport import direct_connection

TWO = ["cpu", "cpu"]
Pair = namedtuple("Pair", "x y")

on_each_number = pytest.mark.parametrize("ids", [TWO, ["cpu"]], ids=["two", "one"])


@pytest.fixture(scope="module")
def executor(executors: Any) -> Executor:
    """Two replicas for all tests."""
    return executors()  # type: ignore[no-any-return]


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU anywhere, so that wrappers run their modules in place."""
    monkeypatch.setattr(cluster, "all_gpus", lambda options: [])


class Picky(nn.Module):
    """Adds its weight, unless the first number is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if x[0] < 0:
            raise ValueError(f"cannot take {int(x[0])}")
        return x + self.weight


class Gated(nn.Module):
    """A batch of zeros waits until something is written to a file, others do not.

    Args:
        gate: The file, a FIFO.
    """

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = str(gate)

    def forward(self, x: Tensor) -> Tensor:
        if x[0] == 0:
            open_gate(self.gate, os.O_RDONLY)
        return x


class Meeting(nn.Module):
    """Batches of zeros wait for a batch of ones, and the other way round.

    Args:
        gate: The file that they meet at, a FIFO.
    """

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = str(gate)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        open_gate(self.gate, os.O_RDONLY if x[0] == 0 else os.O_WRONLY)
        return x, os.getpid()


class Pids(nn.Module):
    """Says in which process each row was seen."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.full((len(x),), os.getpid())


class Effects(nn.Module):
    """Batch norm, dropout, a counter that is a buffer, and one that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        return torch.dropout(self.norm(x), 0.5, self.training) * (1 + self.seen + self.calls)


class Counting(nn.Module):
    """Adds one, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 1


class Mean(nn.Module):
    """One number for each chunk."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class Nested(nn.Module):
    """Outputs of several kinds."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        return {"sum": x.sum() * scale, "parts": [x * scale, (None, "text", 3)]}


class Interrupting(nn.Module):
    """Sends Ctrl-C to the process of which it gets the number, if it is not 0."""

    def forward(self, pid: int) -> int:
        if pid:
            os.kill(pid, signal.SIGINT)
        return pid


def open_gate(gate: Path | str, way: int) -> None:
    """Wait for the other end of a FIFO."""
    os.close(os.open(gate, way))


def gate_in(folder: Path) -> Path:
    """A FIFO."""
    gate = folder / "gate"
    os.mkfifo(gate)
    return gate


def numbers(count: int) -> list[Tensor]:
    """Batches of two equal rows, each with its own number."""
    return [torch.full((2,), float(number)) for number in range(count)]


def firsts(outputs: Any) -> list[int]:
    """The first number of each output."""
    return [int(out[0]) for out in outputs]


def usable(model: DataParallel[Any]) -> bool:
    """Whether the next call is right."""
    return torch.equal(model(torch.tensor([1.0, 4.0])), torch.tensor([2.0, 5.0]))


# --- what is given ---


@on_each_number
@pytest.mark.parametrize("split", [None, True, False])
def test_outputs_are_those_of_a_loop(
    executor: Executor, ids: list[str], split: bool | None
) -> None:
    """In the order of batches, and without gradients, whatever the caller's mode is."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model = DataParallel(net, ids, executor=executor)
    batches = [torch.randn(4 + number % 3, 6) for number in range(9)]
    found = []
    for out in model.map(iter(batches), split=split):
        assert torch.is_grad_enabled()
        assert not out.requires_grad
        found.append(out)
    assert len(found) == 9
    for out, x in zip(found, batches, strict=True):
        torch.testing.assert_close(out, net(x).detach())
    assert list(model.map([])) == []


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
    model = DataParallel(Nested(), ids, executor=executor)
    x = torch.arange(4.0)
    for batch, scale in ((x, 1), ((x,), 1), ([x], 1), ({"x": x, "scale": 2.0}, 2)):
        (out,) = model.map([batch])
        assert out["sum"].shape == ()
        assert out["sum"] == 6 * scale
        assert torch.equal(out["parts"][0], x * scale)
        assert out["parts"][1] == (None, "text", 3)


def test_arguments_of_a_batch() -> None:
    """Named tuples and packed sequences are one argument each."""
    x, y = torch.ones(1), torch.zeros(1)
    assert arguments((x, y)) == ((x, y), {})
    assert arguments([x, 3]) == ((x, 3), {})
    assert arguments({"x": x}) == ((), {"x": x})
    assert arguments("text") == (("text",), {})
    assert arguments(Pair(x, y)) == ((Pair(x, y),), {})
    packed = pack_sequence([x])
    ((found,), _) = arguments(packed)
    assert type(found) is PackedSequence


def test_the_callers_inference_mode_and_autocast_go_along(executor: Executor) -> None:
    """As in a call of the model."""
    model = DataParallel(nn.Linear(3, 3), executor=executor)
    with torch.inference_mode():
        (out,) = model.map([torch.ones(2, 3)])
    assert out.is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        (out,) = model.map([torch.ones(2, 3)])
    assert out.dtype is torch.bfloat16


def test_captured_outputs_are_those_of_the_batch_that_was_given(executor: Executor) -> None:
    """Others are computed already."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model = DataParallel(net, executor=executor)
    batches = [torch.randn(2, 3) for _ in range(6)]
    with model.capture("0") as captured:
        for x, _ in zip(batches, model.map(batches), strict=True):
            torch.testing.assert_close(captured["0"], net[0](x))


def test_captured_numbers_are_weighed_by_the_rows_of_their_chunks(executor: Executor) -> None:
    """Of a batch that is split unevenly, with `Options(scalars="weighted_mean")`."""
    options = Options(scalars="weighted_mean")
    model = DataParallel(nn.Sequential(Mean()), executor=executor, options=options)
    x = torch.tensor([1.0, 2.0, 6.0])
    with model.capture("0") as captured:
        for out in model.map([x, 2 * x, 3 * x], split=True):
            torch.testing.assert_close(captured["0"], out)
    assert out == 9


def test_a_subclass_splits_and_joins_as_it_likes(executor: Executor) -> None:
    """A batch that is split goes through its methods, as in a call."""

    class Own(DataParallel[Any]):
        def gather(self, outputs: Any, output_device: Any) -> Any:
            return super().gather(outputs[::-1], output_device)

    class Applying(Own):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            return [-out for out in super().parallel_apply(replicas, inputs, kwargs)]

    class Calling(Own):
        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            return super().forward(*inputs, **kwargs) + 10

    x = torch.arange(2.0)
    for kind, expected in ((Own, [2, 1]), (Applying, [-2, -1]), (Calling, [12, 11])):
        net = Counting()
        model = kind(net, executor=executor)
        found = [*model.map([x] * 3, split=True)]
        assert [out.tolist() for out in found] == [expected] * 3
        assert net.calls == 0


def test_outputs_are_not_kept(executor: Executor) -> None:
    """Once the consumer let go of them."""
    model = DataParallel(Picky(), executor=executor)
    for out in model.map(numbers(6)):
        known = weakref.ref(out)
        del out
        assert known() is None


# --- what runs when ---


def test_batches_are_computed_at_the_same_time(executor: Executor, tmp_path: Path) -> None:
    """Each in a process of its own: the two wait for each other."""
    model = DataParallel(Meeting(gate_in(tmp_path)), executor=executor)
    for _ in range(3):
        found = list(model.map(numbers(2)))
        assert firsts(x for x, _ in found) == [0, 1]
        assert len({pid for _, pid in found}) == 2


@pytest.mark.parametrize("ordered", [True, False])
def test_the_driver_loads_while_replicas_compute(
    executor: Executor, tmp_path: Path, ordered: bool
) -> None:
    """The first batch cannot end before the fourth is loaded; the order is kept all the same."""
    gate = gate_in(tmp_path)

    def loader() -> Iterator[Tensor]:
        for number, batch in enumerate(numbers(8)):
            if number == 3:
                open_gate(gate, os.O_WRONLY)
            yield batch

    found = firsts(DataParallel(Gated(gate), executor=executor).map(loader(), ordered=ordered))
    assert (found if ordered else sorted(found)) == list(range(8))


def test_outputs_come_as_they_end(executor: Executor, tmp_path: Path) -> None:
    """With ``ordered=False`` those behind a slow batch are given first."""
    gate = gate_in(tmp_path)
    outputs = DataParallel(Gated(gate), executor=executor).map(numbers(4), ordered=False)
    assert firsts(itertools.islice(outputs, 1)) == [1]
    open_gate(gate, os.O_WRONLY)
    assert sorted(firsts(outputs)) == [0, 2, 3]


@pytest.mark.parametrize(
    ("in_flight", "split", "most"), [(None, None, 4), (None, True, 2), (1, None, 1), (3, None, 3)]
)
def test_no_more_batches_are_loaded_than_may_be_in_flight(
    executor: Executor, in_flight: int | None, split: bool | None, most: int
) -> None:
    """However slow the consumer is."""
    model = DataParallel(Picky(), executor=executor)
    given, waiting = 0, []

    def loader() -> Iterator[Tensor]:
        for number, batch in enumerate(numbers(10)):
            waiting.append(number + 1 - given)
            yield batch

    outputs = model.map(loader(), in_flight=in_flight, split=split)
    assert not waiting
    for _ in outputs:
        given += 1
    assert given == 10
    assert max(waiting) == most


@pytest.mark.parametrize(
    ("in_flight", "split", "processes"),
    [(None, None, 1), (None, True, 2), (None, False, 1), (1, None, 2), (1, False, 1), (2, None, 1)],
)
def test_whole_batches_or_split_ones(
    executor: Executor, in_flight: int | None, split: bool | None, processes: int
) -> None:
    """Without a wish they are split only if replicas would have nothing to do."""
    model = DataParallel(Pids(), executor=executor)
    for pids in model.map([torch.ones(4)] * 5, in_flight=in_flight, split=split):
        assert len(pids.unique()) == processes
    model(torch.ones(4))


def test_the_model_is_called_and_mapped_inside_a_map(executor: Executor) -> None:
    """All share the replicas."""
    model = DataParallel(Picky(), executor=executor)
    for number, (one, other) in enumerate(
        zip(model.map(numbers(5)), model.map(numbers(5)), strict=True)
    ):
        assert firsts([one, other]) == [number + 1, number + 1]
        assert usable(model)


# --- which thread reads answers ---


def test_the_callers_thread_does_all(executor: Executor) -> None:
    """Where a replica's next batch fits into its socket."""
    before = {*threading.enumerate()}
    for _ in DataParallel(Picky(), executor=executor).map(numbers(8)):
        started = {*threading.enumerate()} - before
        assert not any("raydp-answers" in thread.name for thread in started)


class Late(nn.Module):
    """Gives many numbers for each. A batch of zeros first waits until a FIFO is written to.

    Args:
        gate: The FIFO.
        size: How many numbers.
    """

    def __init__(self, gate: Path, size: int) -> None:
        super().__init__()
        self.gate = str(gate)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        if x[0] == 0:
            open_gate(self.gate, os.O_RDONLY)
        return x[:2].repeat(self.size)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("rows", "size"), [(100_000, 1), (2, 1_000_000)], ids=["in", "out"])
def test_the_next_batch_begins_while_the_consumer_runs(
    executors: Any, tmp_path: Path, rows: int, size: int, ordered: bool
) -> None:
    """Though an answer has to be read before: without shared memory, large batches and large
    outputs do not fit into a socket.
    """
    gate = gate_in(tmp_path)
    model = DataParallel(Late(gate, size), executor=executors(1, link="inline"))
    batches = [torch.full((rows,), float(number)) for number in (2, 1, 0)]
    outputs = model.map(batches, in_flight=3, ordered=ordered)
    assert firsts(itertools.islice(outputs, 1)) == [2]
    open_gate(gate, os.O_WRONLY)  # the third runs
    assert firsts(outputs) == [1, 0]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"direct_line": False}, pytest.param({"link": "object_store"}, marks=pytest.mark.long)],
    ids=str,
)
def test_calls_that_go_through_ray(executors: Any, options: dict[str, Any], ordered: bool) -> None:
    """Answers are Ray's objects."""
    model = DataParallel(Picky(), executor=executors(**options))
    found = firsts(model.map(numbers(9), ordered=ordered))
    assert (found if ordered else sorted(found)) == list(range(1, 10))


def test_maps_in_several_threads(executor: Executor) -> None:
    """Each has its outputs, in order."""
    found: dict[int, list[int]] = {}

    def work(first: int) -> None:
        net = Picky()
        net.weight.data.fill_(first)
        model = DataParallel(net, executor=executor)
        found[first] = firsts(model.map(numbers(20), ordered=first % 2 == 0))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    work(4)
    for thread in threads:
        thread.join()
    for first, outputs in found.items():
        assert sorted(outputs) == list(range(first, first + 20))
        assert first % 2 or outputs == sorted(outputs)


def test_a_map_goes_on_in_another_thread(executor: Executor) -> None:
    """One that the first thread began."""
    outputs = DataParallel(Picky(), executor=executor).map(numbers(8))
    found = firsts(itertools.islice(outputs, 2))
    thread = threading.Thread(target=lambda: found.extend(firsts(outputs)))
    thread.start()
    thread.join()
    assert found == list(range(1, 9))


# --- the module's state ---


@on_each_number
def test_weights_are_those_of_today(executor: Executor, ids: list[str]) -> None:
    """Changed in place, behind their version, and as a whole, between two maps."""
    net = Picky()
    model = DataParallel(net, ids, executor=executor)
    assert firsts(model.map(numbers(4))) == [1, 2, 3, 4]
    with torch.no_grad():
        net.weight += 1
    assert firsts(model.map(numbers(4))) == [2, 3, 4, 5]
    net.weight.data.fill_(5)
    assert firsts(model.map(numbers(4))) == [5, 6, 7, 8]
    net.weight = nn.Parameter(torch.full((), 7.0))
    assert firsts(model.map(numbers(4))) == [7, 8, 9, 10]


@on_each_number
@pytest.mark.parametrize("split", [None, True])
def test_effects_of_forward_on_the_module_are_dropped(
    executor: Executor, ids: list[str], split: bool | None
) -> None:
    """Each batch finds the module as it is, in training mode too."""
    net = Effects()
    model = DataParallel(net, ids, executor=executor)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    assert len(list(model.map([torch.randn(8, 3) for _ in range(6)], split=split))) == 6
    assert net.training
    assert net.calls == 0
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    net.eval()
    x = torch.randn(8, 3)
    with torch.no_grad():
        expected = net.norm(x) * 3
    for out in model.map([x] * 6, split=split):
        torch.testing.assert_close(out, expected)


# --- ends ---


@pytest.mark.parametrize("split", [None, True])
def test_a_batch_that_fails_raises_in_its_place(executor: Executor, split: bool | None) -> None:
    """After the outputs before it; then the map is at its end."""
    model = DataParallel(Picky(), executor=executor)
    batches = numbers(9)
    batches[5] = -batches[5]
    outputs = model.map(batches, split=split)
    assert firsts(itertools.islice(outputs, 5)) == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="cannot take -5"):
        next(outputs)
    assert list(outputs) == []
    assert usable(model)


def test_batches_that_fail_are_skipped_with_one_warning(executor: Executor) -> None:
    """It counts them, and names the first."""
    model = DataParallel(Picky(), executor=executor)
    batches = [batch * (-1) ** number for number, batch in enumerate(numbers(8))]
    text = r"4 of 8 batches failed.*number 1, with ValueError: cannot take -1"
    with pytest.warns(UserWarning, match=text) as said:
        assert firsts(model.map(batches, on_error="skip")) == [1, 3, 5, 7]
    assert [one.filename for one in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert firsts(model.map(numbers(3), on_error="skip")) == [1, 2, 3]


def test_what_no_batch_can_help_is_not_skipped(cluster: None) -> None:
    """A closed executor raises."""
    with Executor(["cpu"], options=Options(in_process=True)) as closed:
        model = DataParallel(Picky(), executor=closed)
        outputs = model.map(numbers(3), on_error="skip")
        assert firsts(itertools.islice(outputs, 1)) == [1]
    with pytest.raises(ExecutorClosed):
        next(outputs)


class Leaving(nn.Module):
    """Asks its process to end."""

    def forward(self, x: Tensor) -> Tensor:
        sys.exit(int(x[0]))


def test_a_module_that_exits_fails_its_batch(executor: Executor) -> None:
    """As in a call of the model."""
    with pytest.raises(ReplicaExit):
        next(DataParallel(Leaving(), executor=executor).map(numbers(3)))
    with pytest.warns(UserWarning, match="3 of 3 batches failed"):
        assert not list(DataParallel(Leaving(), executor=executor).map(numbers(3), on_error="skip"))


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_loader_that_fails_raises_after_the_outputs_before(
    executor: Executor, on_error: Any
) -> None:
    """Its own error, which is never skipped."""
    model = DataParallel(Picky(), executor=executor)

    def loader() -> Iterator[Tensor]:
        yield from numbers(3)
        raise OSError("the disk is gone")

    found = []
    with pytest.raises(OSError, match="the disk is gone"):
        found.extend(model.map(loader(), on_error=on_error))
    assert firsts(found) == [1, 2, 3]
    assert usable(model)


def test_leaving_the_loop_ends_the_map(executor: Executor) -> None:
    """Nothing more is loaded, and each batch that was sent has been computed."""
    model = DataParallel(Picky(), executor=executor)
    loaded = itertools.count()
    before = executor.stats().forwards
    for out in model.map(torch.full((2,), float(number)) for number in loaded):
        if out[0] == 3:
            break
    sent = next(loaded)
    assert sent == 3 - 1 + 4
    assert executor.stats().forwards == before + sent
    assert usable(model)
    outputs = model.map(numbers(8))
    next(outputs)
    outputs.close()
    assert list(outputs) == []
    model.map(numbers(8)).close()
    assert usable(model)


@on_each_number
def test_ctrl_c_ends_the_map(executor: Executor, ids: list[str]) -> None:
    """Wherever the driver is; here the fourth batch sends it."""
    model = DataParallel(Interrupting(), ids, executor=executor)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            # Again where it is lost: Python ignores it in finalizers, torch's and Ray's too.
            for _ in model.map(itertools.cycle([0, 0, 0, os.getpid(), *[0] * 200])):
                pass
        assert usable(DataParallel(Picky(), ids, executor=executor))


def owed(executor: Executor) -> int:
    """Calls that are waited for."""
    slots = executor.replica_set.slots.values()
    clients = [slot.client for slot in slots if slot.client.line.intact]  # others are replaced
    in_lines = sum(len(client.unanswered) + client.line.waits_for() for client in clients)
    return in_lines + len(executor.recorder.under_way)


def interrupted(work: Callable[[], object], lines: int) -> str:
    """Where a thread is that gets Ctrl-C after so many lines of these files; empty if its work was
    done before.
    """
    place = ""
    modules = (batch_inference, functional, dispatcher, recorder)
    files = {inspect.getfile(DataParallel), *[module.__file__ for module in modules]}

    def trace(frame: types.FrameType, event: str, argument: object) -> Any:
        nonlocal lines, place
        if frame.f_code.co_filename not in files:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        # Python looks for signals before a try, and not as it leaves a with.
        if event == "line" and line != "try:" and not line.startswith("with "):
            lines -= 1
            if lines < 0:
                sys.settrace(None)
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        assert place
    finally:
        sys.settrace(before)
    return place


@pytest.mark.parametrize(
    ("batches", "ordered"),
    [
        (2, True),
        pytest.param(4, True, marks=pytest.mark.long),
        pytest.param(4, False, marks=pytest.mark.long),
    ],
)
def test_ctrl_c_between_any_two_lines(
    executor: Executor, batches: int, ordered: bool, request: pytest.FixtureRequest
) -> None:
    """It leaves nothing that is waited for, and the next call is right. Two batches come to all
    lines that four do.
    """
    model = DataParallel(Picky(), executor=executor)
    assert usable(model)

    def work() -> None:
        for _ in model.map(numbers(batches), ordered=ordered):
            pass

    gc.disable()  # what an exception interrupts there is told and goes on
    request.addfinalizer(gc.enable)
    for lines in itertools.count():
        place = interrupted(work, lines)
        if not place:
            break
        assert not owed(executor), place
        assert torch.is_grad_enabled()
        assert forward.mapping.get() is None
    assert lines > 100
    assert usable(model)


def left_behind(model: DataParallel[Any]) -> weakref.ref[Any]:
    """A map that was begun, and that only the collector of garbage will find."""

    def loader(holder: Any) -> Iterator[Tensor]:
        yield from numbers(100)
        del holder

    holder = types.SimpleNamespace()
    holder.outputs = model.map(loader(holder))
    assert firsts(itertools.islice(holder.outputs, 2)) == [1, 2]
    return weakref.ref(holder.outputs)


def test_a_map_that_is_garbage_ends(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if that is found while this thread reads the answer of another call."""
    model = DataParallel(Picky(), executor=executor)
    assert usable(model)
    callbacks = [*gc.callbacks]
    gc.disable()
    try:
        known = left_behind(model)
        assert known() is not None
        read = direct_connection.read_frame

        def reading(*arguments: Any) -> Any:
            gc.collect()
            return read(*arguments)

        monkeypatch.setattr(direct_connection, "read_frame", reading)
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(usable(model)), daemon=True)
        thread.start()
        thread.join(60)
        assert found == [True]
        assert known() is None
    finally:
        gc.enable()
    for other in threading.enumerate():
        if other.name == "raydp-map":
            other.join(60)
    assert not owed(executor)
    assert gc.callbacks == callbacks


def test_ctrl_c_in_the_loader_ends_the_map_at_once(executor: Executor) -> None:
    """Outputs before it are not given any more."""
    model = DataParallel(Picky(), executor=executor)

    def loader() -> Iterator[Tensor]:
        yield from numbers(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(model.map(loader()))
    assert usable(model)


# --- where there are no processes ---


class Thread(nn.Module):
    """Says which thread it runs in, and whether gradients are made."""

    def forward(self, x: Tensor) -> tuple[int, bool]:
        return threading.get_ident(), torch.is_grad_enabled()


def test_in_the_drivers_process(cluster: None) -> None:
    """One batch at a time, in the caller's thread, with the same rules."""
    with Executor(TWO, options=Options(in_process=True)) as executor:
        seen = DataParallel(Thread(), executor=executor).map(numbers(2))
        assert [*seen] == [(threading.get_ident(), False)] * 2
        model = DataParallel(Picky(), executor=executor)
        for split in (None, True):
            assert firsts(model.map(numbers(4), split=split)) == [1, 2, 3, 4]
        with pytest.raises(ValueError, match="cannot take -1"):
            list(model.map([-torch.ones(2)]))
        net = Effects()
        list(DataParallel(net, executor=executor).map([torch.randn(4, 3)] * 3))
        assert net.calls == net.seen == 0


@pytest.mark.usefixtures("in_place")
def test_in_place() -> None:
    """The module itself runs, one batch at a time, and keeps what it does to itself."""
    net = Effects()
    model = DataParallel(net)
    assert model.device_ids == []
    found = list(model.map([torch.randn(4, 3)] * 3))
    assert [out.requires_grad for out in found] == [False] * 3
    assert net.calls == net.seen == 3
    picky = DataParallel(Picky())
    loaded = []

    def loader() -> Iterator[Any]:
        for batch in (torch.ones(2), {"x": -torch.ones(2)}, (torch.ones(2),)):
            loaded.append(batch)
            yield batch

    outputs = picky.map(loader(), on_error="skip", in_flight=7)
    assert firsts(itertools.islice(outputs, 1)) == [2]
    assert len(loaded) == 1
    with pytest.warns(UserWarning, match="1 of 3 batches failed"):
        assert firsts(outputs) == [2]
    with picky.capture("") as captured:
        (out,) = picky.map([torch.ones(2)])
    assert torch.equal(captured[""], out)


class Mapping(nn.Module):
    """Maps a wrapped part of itself over the rows that it gets."""

    def __init__(self, ids: Sequence[str]) -> None:
        super().__init__()
        self.part = DataParallel(Picky(), ids)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.part.map(x.split(1))))


def test_a_map_inside_a_replica_runs_in_place(executor: Executor) -> None:
    """As a wrapper's call there does."""
    model = DataParallel(Mapping(TWO), executor=executor)
    assert model(torch.arange(4.0)).tolist() == [1, 2, 3, 4]
    assert [out.tolist() for out in model.map(numbers(2))] == [[1, 1], [2, 2]]


# --- what is asked for ---


def test_wrong_settings_are_named_at_once(executor: Executor) -> None:
    """Before anything is loaded."""
    model = DataParallel(Picky(), executor=executor)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"in_flight={wrong}"):
            model.map([], in_flight=wrong)
    for wrong in (True, 1.5, "2"):
        with pytest.raises(TypeError, match="in_flight must be an int"):
            model.map([], in_flight=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_error='ignore'"):
        model.map([], on_error="ignore")  # type: ignore[arg-type]


def test_progress_is_one_line(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error, where there is no tqdm; as a bar, if the number of batches is known."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    model = DataParallel(Picky(), executor=executor)
    list(model.map(numbers(5), progress=True))
    list(model.map(iter(numbers(3)), progress=True))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    list(model.map(numbers(1), progress=True))
    out, err = capsys.readouterr()
    assert out == ""
    whole = f"[{'#' * 30}] map:"
    assert err.splitlines()[:2] == [f"{whole} 5 of 5 batches", "map: 3 batches"]
    assert err.endswith(f"\r{whole} 1 of 1 batches\r{whole} 1 of 1 batches\n")


def test_progress_by_tqdm(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts the batches that fail, too, and is closed when the loop is left."""
    bars: list[Any] = []

    class Bar:
        def __init__(self, *, total: int | None, desc: str, unit: str, file: Any) -> None:
            self.made = total, desc, unit, file
            self.done: list[str] = []
            bars.append(self)

        def update(self) -> None:
            self.done.append("update")

        def close(self) -> None:
            self.done.append("close")

    module = types.SimpleNamespace(tqdm=Bar)
    monkeypatch.setitem(sys.modules, "tqdm", module)  # type: ignore[arg-type]
    model = DataParallel(Picky(), executor=executor)
    with pytest.warns(UserWarning, match="1 of 2"):
        list(model.map([torch.ones(2), -torch.ones(2)], on_error="skip", progress=True))
    for _ in model.map(iter(numbers(3)), progress=True):
        break
    first, second = bars
    assert first.made == (2, "map", "batch", sys.stderr)
    assert first.done == ["update", "update", "close"]
    assert second.made[0] is None
    assert second.done == ["update", "close"]


# --- deaths ---


@pytest.mark.parametrize(
    "moments",
    [
        ("late forward 5",),
        pytest.param(("forward 2", "late forward 3", "forward 9"), marks=pytest.mark.long),
    ],
    ids=["one", "three"],
)
def test_a_replica_that_dies_is_no_event(
    killable: Executor, tmp_path: Path, moments: Sequence[str]
) -> None:
    """Another one computes its batches, with the same bits."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    model = DataParallel(Mortal(net, tmp_path), executor=killable)
    batches = [torch.cat([torch.full((4, 1), float(n)), torch.randn(4, 6)], 1) for n in range(12)]
    torch.manual_seed(4)
    expected = list(model.map(batches))
    before = sum(tally.deaths for tally in killable.stats().replicas)
    arm(tmp_path, *moments)
    torch.manual_seed(4)
    found = list(model.map(batches))
    assert armed(tmp_path) == []
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    after = sum(tally.deaths for tally in killable.stats().replicas)
    assert after - before == len(moments)
    assert usable(DataParallel(Picky(), executor=killable))
