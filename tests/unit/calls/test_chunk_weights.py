"""`Options(chunk_weights=..., least_rows=...)`: chunks of chosen sizes, and chunks that follow the
measured speed (pytorch#34516, #46381, #35118, #18563).
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_grads
from mortal import Everything, Mortal, arm, armed, same, state
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from raydp_parallel import DataParallel, Executor, Options, scatter
from raydp_parallel.batch import register_batch_type, scatter_kwargs, weighted_sizes
from raydp_parallel.calls.chunk_balance import ChunkBalance, ChunkTimes
from raydp_parallel.calls.executor import shared
from raydp_parallel.cluster.replica_slots import ChunkAnswer
from raydp_parallel.transport.messages import Reply

TWO, THREE = ["cpu", "cpu"], ["cpu", "cpu", "cpu"]


class Net(nn.Module):
    """Says how many rows it got."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, int]:
        return self.net(x) * scale, len(x)


# --- sizes ---


@pytest.mark.parametrize(
    ("rows", "weights", "least", "expected"),
    [
        (10, (4, 1), 1, [8, 2]),
        (10, (1, 4), 1, [2, 8]),
        (11, (4, 1), 1, [9, 2]),
        (3, (100, 1), 1, [2, 1]),
        (2, (100, 1), 1, [1, 1]),
        (1, (1, 100), 1, [1]),
        (0, (4, 1), 1, [0, 0]),
        (10, (1, 1, 1), 1, [4, 3, 3]),
        (10, (8, 1, 1), 2, [6, 2, 2]),
        (5, (8, 1, 1), 2, [3, 2]),
        (3, (1, 1), 2, [3]),
        (1, (1, 1), 2, [1]),
        (10, None, 1, [5, 5]),
        (5, None, 1, [3, 2]),
        (5, None, 3, [5]),
        (6, None, 3, [3, 3]),
        (10, (1e300, 1e300), 1, [5, 5]),
        (10, (1e-320, 1e-320), 1, [5, 5]),
    ],
)
def test_X2_sizes(
    rows: int, weights: tuple[float, ...] | None, least: int, expected: list[int]
) -> None:
    """In proportion, at least the bound, and fewer chunks rather than smaller ones."""
    assert weighted_sizes(rows, len(weights or TWO), weights, least) == expected


def test_X2_sizes_of_any_weights() -> None:
    """All rows, no chunk below the bound, none further than a row from its share where the bound
    does not matter; without weights upstream's sizes where they are large enough.
    """
    chance = random.Random(0)
    for _ in range(2000):
        rows, chunks, least = chance.randint(1, 80), chance.randint(1, 6), chance.randint(1, 5)
        weights = [chance.uniform(0.01, 10) for _ in range(chunks)]
        sizes = weighted_sizes(rows, chunks, weights, least)
        assert sum(sizes) == rows and len(sizes) == max(1, min(chunks, rows // least))
        assert min(sizes) >= min(least, rows)
        shares = [rows * weight / sum(weights[: len(sizes)]) for weight in weights[: len(sizes)]]
        if min(shares) >= least:
            assert all(abs(size - share) < 1 for size, share in zip(sizes, shares, strict=True))
        even = weighted_sizes(rows, chunks, None, least)
        upstream = [len(part) for part in torch.arange(rows).chunk(chunks)]
        assert even == upstream or min(upstream) < least
        assert min(even) >= min(least, rows) and sum(even) == rows
        assert max(even) - min(even) <= 1 or even == upstream


# --- scatter ---


def test_X2_all_tensors_of_a_call_are_split_alike() -> None:
    """Nested ones, packed sequences, and values with rules of their own that take sizes."""
    packed = pack_sequence([torch.full((i,), float(i)) for i in range(5, 0, -1)])
    inputs = {"x": torch.arange(5), "others": [torch.arange(10).view(5, 2), (packed, "setting")]}

    class Ragged(list[int]):
        """A value of the user's."""

    def cut(value: Ragged, chunks: int, dim: int, sizes: Any) -> list[Ragged]:
        rest = iter(value)
        return [Ragged(next(rest) for _ in range(size)) for size in sizes(len(value))]

    def sizes(rows: int) -> list[int]:
        return weighted_sizes(rows, 2, (4, 1))

    with register_batch_type(Ragged, scatter=cut, gather=lambda values, *_: values):
        (first, second), (left, right) = scatter_kwargs(
            (inputs,), {"ragged": Ragged(range(5))}, TWO, sizes=sizes
        )
        assert (left["ragged"], right["ragged"]) == ([0, 1, 2, 3], [4])
        assert scatter(Ragged(range(5)), TWO) == [[0, 1, 2], [3, 4]]  # those of upstream
    assert first[0]["x"].tolist() == [0, 1, 2, 3] and second[0]["x"].tolist() == [4]
    assert len(first[0]["others"][0]) == 4 and second[0]["others"][1][1] == "setting"
    assert isinstance(second[0]["others"][1][0], PackedSequence)
    assert second[0]["others"][1][0].data.tolist() == [1.0]


def test_X2_chunks_belong_to_the_graph_along_any_dimension() -> None:
    """As those of even chunks."""
    x = torch.randn(2, 5, dtype=torch.double, requires_grad=True)
    ((a,), (b,)), _ = scatter_kwargs((x,), None, TWO, 1, sizes=lambda _: [4, 1])
    assert a.shape == (2, 4) and b.shape == (2, 1)

    def split(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(c[0] for c in scatter_kwargs((x,), None, TWO, 1, sizes=lambda _: [4, 1])[0])

    assert torch.autograd.gradcheck(split, x) and torch.autograd.gradgradcheck(split, x)


def test_X2_sizes_that_differ_are_refused() -> None:
    """Rows would be paired that do not belong together; a rule without sizes cannot follow."""

    class Own:
        """A value that is split without sizes."""

        def __scatter__(self, chunks: int, dim: int) -> list[int]:
            return [*range(chunks)]

    model = DataParallel(
        Net(), TWO, options=Options(chunk_weights=(3, 1), in_process=True, threads=1)
    )
    with pytest.raises(ValueError, match=r"different sizes.*inputs\[0\]: size 8.*size 4"):
        model(torch.randn(8, 4), torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"inputs\[1\] is split by a rule of its class that takes"):
        model(torch.randn(8, 4), Own())


# --- what is refused at once ---


@pytest.mark.parametrize(
    "weights", [(), (0, 1), (-1, 2), (math.inf, 1), (math.nan, 1), ("1", 2), (True, 1), [None]]
)
def test_X2_bad_weights(weights: Any) -> None:
    """Numbers above 0."""
    with pytest.raises(ValueError, match=r"chunk_weights=.*expected finite numbers above 0"):
        Options(chunk_weights=weights)


@pytest.mark.parametrize("weights", ["even", 4, {1: 2}, torch.ones(2)])
def test_X2_weights_of_another_type(weights: Any) -> None:
    """A sequence, or ``"auto"``."""
    with pytest.raises(TypeError, match=r"chunk_weights=.*expected 'auto', or one number for each"):
        Options(chunk_weights=weights)


def test_X2_bad_bounds_and_counts() -> None:
    """Also where ``device_ids`` are edited later."""
    with pytest.raises(TypeError, match=r"least_rows=2\.0"):
        Options(least_rows=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="least_rows=0"):
        Options(least_rows=0)
    options = Options(chunk_weights=[3, 1], in_process=True, threads=1)
    assert options.chunk_weights == (3, 1) and hash(options)
    with pytest.raises(ValueError, match=r"2 weights for 3 devices \['cpu', 'cpu', 'cpu'\]"):
        DataParallel(Net(), THREE, options=options)
    model = DataParallel(Net(), TWO, options=options)
    model.device_ids = THREE
    with pytest.raises(ValueError, match="2 weights for 3 devices"):
        model(torch.randn(8, 4))


def test_X2_captured_scalars_are_weighted_as_outputs_are() -> None:
    """By the rows of their chunks, though they are put together later."""
    options = Options(chunk_weights=(4, 1), scalars="weighted_mean", in_process=True, threads=1)
    model = DataParallel(nn.Sequential(nn.Flatten(0), Mean()), ["cpu"] * 2, options=options)
    x = torch.arange(10.0).view(10, 1)
    with model.capture("1") as seen:
        out = model(x)
    torch.testing.assert_close(out, x.mean())
    torch.testing.assert_close(seen["1"], out)


class Mean(nn.Module):
    """One number of each chunk."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_X2_wrappers_of_other_weights_share_an_executor() -> None:
    """Only wrappers read them; in place there are no chunks."""
    plain = Options(in_process=True, threads=1)
    weighted = Options(chunk_weights=(1, 2), least_rows=2, in_process=True, threads=1)
    assert shared(plain) is shared(weighted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys.modules[DataParallel.__module__], "normalize", lambda *_: []
        )  # a cluster without GPUs
        model = DataParallel(Net(), options=weighted)
    assert not model.device_ids and model(torch.randn(3, 4))[1] == 3


# --- on replicas ---


@pytest.mark.parametrize("weights", [(4, 1), (1, 4), "auto"])
def test_X2_gradients_are_those_of_the_even_split(two: Executor, weights: Any) -> None:
    """Of weights and inputs, of first and second order, with a method too; rows stay in order."""
    net = Net().double()
    even = DataParallel(copy.deepcopy(net), executor=two)
    model = DataParallel(net, executor=two, options=Options(chunk_weights=weights))
    grads = []
    for one in (even, model):
        x = torch.linspace(-1, 1, 40, dtype=torch.double).view(10, 4).requires_grad_()
        out, rows = one(x, scale=2.0)
        assert (
            rows == [5, 5] if one is even or weights == "auto" else rows == [2 * w for w in weights]
        )
        torch.testing.assert_close(out, one.module(x, 2.0)[0])
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (out.mean() + slope.square().sum() + one.call("forward", x)[0].sum()).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)
    assert_same_grads(model, even, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[0], even(x)[0])
        split = [len(out[0]) for out in model.call("forward", x, gather=False)]
        assert sum(split) == 10 if weights == "auto" else split == rows


def test_X2_gradients_stay_those_of_the_even_split_as_auto_moves(
    two: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each of 20 steps, with a replica that is measured to take twice as long for a row; it gets
    half as many.
    """

    def note(self: ChunkTimes, method: str, numbers: Any, answers: Any) -> None:
        for number in numbers:
            self._balance.note(method, number, 1.0 + number)

    monkeypatch.setattr(ChunkTimes, "note", note)
    net = Net().double()
    even = DataParallel(copy.deepcopy(net), executor=two)
    model = DataParallel(net, executor=two, options=Options(chunk_weights="auto"))
    sizes = []
    for _ in range(20):
        x = torch.randn(30, 4, dtype=torch.double)
        for one in (even, model):
            one.zero_grad()
            out, rows = one(x)
            out.square().sum().backward()
        sizes.append(rows)
        assert_same_grads(model, even, rtol=1e-12, atol=1e-12)
    assert sizes[0] == [15, 15] and sizes[-1] == [20, 10]


def test_X2_a_bound_keeps_batch_norm_fed(two: Executor) -> None:
    """One row for the last chunk makes batch norm fail upstream; fewer chunks do not."""
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        DataParallel(net, executor=two)(x)
    model = DataParallel(net, executor=two, options=Options(least_rows=2))
    torch.testing.assert_close(model(x), copy.deepcopy(net)(x))
    assert model(torch.randn(5, 4)).shape == (5, 3)
    weighted = Options(least_rows=2, chunk_weights=(100, 1), scalars="weighted_mean")
    assert DataParallel(Rows(), executor=two, options=weighted)(x) == 3
    found = DataParallel(Rows(), executor=two, options=weighted)(torch.randn(6, 4))
    assert found.item() == pytest.approx(20 / 6)


class Rows(nn.Module):
    """The mean of as many numbers as it got rows, which is that number."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor(float(len(x)))


@pytest.mark.long
def test_X2_deaths_run_the_same_split_again(killable: Executor, tmp_path: Path) -> None:
    """In forward and in backward, to the bit, with dropout and batch norm."""
    runs = []
    for moments in ((), ("forward 1", "late forward 0"), ("backward 0",), ("second 1",)):
        torch.manual_seed(5)
        arm(tmp_path, *moments)
        options = Options(chunk_weights=(3, 2))
        model = DataParallel(Mortal(Everything(), tmp_path), executor=killable, options=options)
        # the first column says which chunk a row is in
        number = torch.tensor([0.0] * 6 + [1.0] * 4).unsqueeze(1)
        x = torch.cat([number, torch.linspace(-1, 1, 60).view(10, 6)], 1).requires_grad_()
        loss = model(x).square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        assert not armed(tmp_path)
        runs.append([loss.detach(), x.grad, *state(model)])
    assert all(same(run, runs[0]) for run in runs[1:])


# --- by measured speed ---


def simulate(
    cost: Any, devices: int, rows: int, steps: int, noise: float = 0.0, backward: bool = True
) -> list[list[int]]:
    """The sizes of chunks in each step, if a chunk of a device takes ``cost(device, rows)``."""
    chance = random.Random(1)
    balance = ChunkBalance(["cpu"] * devices)
    found = []
    for number in range(steps):
        sizes = weighted_sizes(rows, devices, balance.weights())
        found.append(sizes)
        for device, size in enumerate(sizes):
            seconds = cost(device, size) * (10 if number == 0 else 1) / size
            for method in ("forward", "backward") if backward else ("forward",):
                balance.note(method, device, seconds * chance.uniform(1 - noise, 1 + noise))
    return found


COSTS = {
    "in proportion": lambda device, rows: rows * (1 + device),
    "with overhead": lambda device, rows: 10 + rows * (1 + device),
    "square": lambda device, rows: rows**2 * (1 + device),
}


@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("backward", [True, False])
def test_X2_auto_finds_the_best_split(
    kind: str, devices: int, noise: float, backward: bool
) -> None:
    """At least 0.9 of the best one's speed within 20 steps, and no change of direction then."""
    cost, rows = COSTS[kind], 120

    def slowest(sizes: list[int]) -> float:
        return max(cost(device, size) for device, size in enumerate(sizes))

    best = slowest([rows])
    for first in range(1, rows - devices + 2):
        left = rows - first
        seconds = range(1, left) if devices == 3 else [left]
        best = min(
            best, *[slowest([first, s, *([left - s] if devices == 3 else [])]) for s in seconds]
        )
    found = simulate(cost, devices, rows, 60, noise, backward)
    assert found[0] == [rows // devices] * devices
    assert all(best / slowest(sizes) >= 0.9 for sizes in found[19:])
    assert len({tuple(sizes) for sizes in found[19:]}) <= 2


def test_X2_auto_knows_chunks_of_one_device() -> None:
    """They run one after the other, each at its own time: a device that is given twice gets as much
    for both as it would for one.
    """
    balance, rows = ChunkBalance([0, 0, 1]), 120
    for _ in range(3):
        sizes = weighted_sizes(rows, 3, balance.weights())
        for chunk, size in enumerate(sizes):
            for method in ("forward", "backward"):
                balance.note(method, chunk, 0.001 * size / size)
    assert weighted_sizes(rows, 3, balance.weights()) == [30, 30, 60]


def test_X2_each_chunk_of_a_device_has_its_own_time() -> None:
    """The same net in both: what is measured for one is not taken for the other."""
    seen: list[tuple[str, int, float]] = []

    class Noting(ChunkBalance):
        def note(self, method: str, device: int, seconds_per_row: float) -> None:
            seen.append((method, device, seconds_per_row))

    slot: Any = object()
    times = ChunkTimes(Noting([0, 0]), [(slot, 10), (slot, 10)])
    replies = [Reply(laps=(0.0, 0.0, 1.0, 2.0, 2.0)), Reply(laps=(0.0, 0.0, 1.0, 4.0, 4.0))]
    answers: list[Any] = [ChunkAnswer(reply, None, slot) for reply in replies]
    times.note("forward", range(2), answers)
    times.note("backward", [1], answers[1:])
    assert seen == [("forward", 0, 0.1), ("forward", 1, 0.3), ("backward", 1, 0.3)]


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.9, 0.1)])
def test_X2_what_runs_out_of_memory_gets_less(weights: Any) -> None:
    """And speed does not bring it back; where all ran out, nothing moves."""
    balance = ChunkBalance(["cpu", "cpu"])
    balance._weights = [*weights]
    balance.note_shortage(0)
    assert balance.weights() == pytest.approx([0.75 * weights[0], 1 - 0.75 * weights[0]])
    for _ in range(200):
        for method in ("forward", "backward"):
            balance.note(method, 0, 0.001)
            balance.note(method, 1, 0.003)
        assert balance.weights()[0] <= 0.75 * weights[0] + 1e-9
    both = ChunkBalance(["cpu", "cpu"])
    both.note_shortage(0)
    both.note_shortage(1)
    assert sum(both.weights()) == pytest.approx(1)


class Small(nn.Module):
    """Has memory for so many rows only, in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.limit, self.small = Net(), 1000, 0

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        if os.getpid() == self.small and len(x) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.body(x)  # type: ignore[no-any-return]


def test_X2_auto_balances_a_small_replica(two: Executor) -> None:
    """A loop that goes on after the error finds a split that fits."""
    net = Small()
    model = DataParallel(net, executor=two, options=Options(chunk_weights="auto"))
    x, failed = torch.randn(60, 4), 0
    model(x)
    net.small, net.limit = two.replicas()[0].pid, 20
    splits: list[list[int]] = []
    for _ in range(12):
        try:
            splits.append(model(x)[1])
        except torch.OutOfMemoryError:
            failed += 1
    assert 1 <= failed <= 2
    assert all(first <= 20 and first + second == 60 for first, second in splits)


def test_X2_auto_leaves_equal_devices_alone() -> None:
    """Noise moves nothing."""
    assert len({*map(tuple, simulate(lambda _, rows: rows, 4, 64, 100, noise=0.15))}) == 1


def test_X2_a_copy_of_a_balance_begins_anew() -> None:
    """And so a wrapper with one can be copied and pickled."""
    model = DataParallel(
        Net(), TWO, options=Options(chunk_weights="auto", in_process=True, threads=1)
    )
    for _ in range(5):
        model(torch.randn(4, 4))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again(torch.randn(4, 4))[0].shape == (4, 3)


class Uneven(nn.Module):
    """Takes twice as long for a row in one process as in the others, by the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.slow = 0

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        out, rows = self.body(x)
        out.register_hook(lambda _: self.spin(rows))
        self.spin(rows)
        return out, rows

    def spin(self, rows: int) -> None:
        """Compute until the clock says so: on a busy machine it takes no longer."""
        until = time.perf_counter() + rows * 0.003 * (2 if os.getpid() == self.slow else 1)
        while time.perf_counter() < until:
            pass


@pytest.mark.long
def test_X2_auto_balances_a_slow_replica(two: Executor) -> None:
    """At least 0.9 of the ideal split within 20 steps, gradients as those of the even one."""
    net = Uneven().double()
    even = DataParallel(copy.deepcopy(net), executor=two)
    model = DataParallel(net, executor=two, options=Options(chunk_weights="auto"))
    x, splits = torch.randn(60, 4, dtype=torch.double), []
    for _ in range(24):
        net.slow = two.replicas()[1].pid
        model.zero_grad()
        out, sizes = model(x)
        out.square().sum().backward()
        splits.append(sizes)
    assert splits[0] == [30, 30]
    for first, second in splits[19:]:
        assert first + second == 60
        assert (60 / 1.5) / max(first, 2 * second) >= 0.9, splits
    even(x)[0].square().sum().backward()
    assert_same_grads(model, even, rtol=1e-12, atol=1e-12)
