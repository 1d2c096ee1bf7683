"""Outputs and inputs' gradients that replicas write side by side: joined without a copy, and what they always were."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mortal
import pytest
import torch
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, Options, abreast, batch, calling, devices
from raydp_parallel.batch import functions
from raydp_parallel.links import Arena, Ledger, Piece
from raydp_parallel.messages import TensorSpec

TWO = ["cpu", "cpu"]
WIDE = 1 << 17
"""Columns of a row that is large enough."""


class Copies:
    """Counts concatenations that copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = 0
        plain = torch.cat

        def cat(*args: Any, **kwargs: Any) -> Tensor:
            self.seen += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(functions.torch, "cat", cat)

    def during(self, work: Callable[[], Any]) -> tuple[Any, int]:
        """What came of some work, and how many copies it took."""
        self.seen = 0
        return work(), self.seen


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """The copies of one test."""
    return Copies(monkeypatch)


@pytest.fixture(scope="module")
def shared(cluster: None, request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Three replicas that share memory with this process, whatever the suite's link."""
    if request.config.getoption("--nodes"):
        pytest.skip("replicas on other nodes share no memory with this process")
    with Executor(["cpu"] * 3, options=Options(link="auto", threads=1)) as executor:
        executor.books.shown = False  # calls that Ray carries have their answers copied
        yield executor


class Apply(nn.Module):
    """A function of the input and one weight."""

    def __init__(self, work: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.work = work

    def forward(self, x: Tensor) -> Any:
        return self.work(x * self.weight)


def leaves_of(value: Any) -> list[Tensor]:
    """The tensors of an output."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for part in (value.values() if isinstance(value, dict) else value) for leaf in leaves_of(part)]


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": torch.tanh,
    "some": lambda x: (x.sin(), [x[:, :7].cos(), x.half()]),
    "named, of several dtypes": lambda x: {"logits": x.exp(), "rows": x.detach()[:, 0].long(), "sign": x.detach() > 0},
    "one more dimension": lambda x: x.view(len(x), 2, -1, 1).exp(),
    "other rows than the input": lambda x: x.repeat(3, 1),
}


@pytest.mark.parametrize("rows, chunks", [(2, 2), (5, 2), (7, 3)])
@pytest.mark.parametrize("work", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_outputs_are_joined_where_they_lie(
    shared: Executor, copies: Copies, work: Callable[[Tensor], Any], rows: int, chunks: int
) -> None:
    """From the second call of a size on; values and gradients are those of the chunks on their own."""
    net = Apply(work)
    model = DataParallel(net, ["cpu"] * chunks, executor=shared)
    for turn in range(3):
        x = torch.randn(rows, WIDE, requires_grad=True)
        out, copied = copies.during(lambda: model(x))  # noqa: B023  # called at once
        small = [leaf for leaf in leaves_of(out) if 2 * leaf.nbytes < sum(each.nbytes for each in leaves_of(out))]
        assert copied == len(leaves_of(out) if turn == 0 else small)
        expected = batch.gather([net(chunk) for chunk in x.chunk(chunks)], "cpu")
        for ours, theirs in zip(leaves_of(out), leaves_of(expected), strict=True):
            assert torch.equal(ours, theirs) and ours.requires_grad == theirs.requires_grad
            assert ours.untyped_storage().nbytes() == ours.nbytes, "saves what is beside it, too"
        loss, _ = (sum(t.float().sum() for t in leaves_of(o) if t.requires_grad) for o in (out, expected))
        (expected_grad,) = torch.autograd.grad(_, x)
        _, copied = copies.during(loss.backward)
        assert copied == (turn == 0)
        torch.testing.assert_close(x.grad, expected_grad)


def test_a_loss_of_each_chunk_lies_beside_its_logits(shared: Executor, copies: Copies) -> None:
    """As language models answer; scalars become a vector, as ever. Who keeps that does not keep the logits."""
    model = DataParallel(Apply(lambda x: {"loss": x.mean(), "logits": x}), TWO, executor=shared)
    x = torch.randn(2, WIDE)
    for turn in range(2):
        with torch.no_grad(), pytest.warns(UserWarning, match="scalars"):
            out, copied = copies.during(lambda: model(x))
        assert torch.equal(out["logits"], 2 * x) and out["loss"].shape == (2,)
        torch.testing.assert_close(out["loss"], 2 * x.mean(1))
        assert copied == (2 if turn == 0 else 1)


def test_sizes_may_alternate(shared: Executor, copies: Copies) -> None:
    """What is guessed is kept for several sizes, and small outputs change nothing."""
    model = DataParallel(Apply(torch.sin), TWO, executor=shared)
    sizes = [(2, WIDE), (4, WIDE), (2, 3), (2, 2 * WIDE)]
    for turn in range(3):
        for size in sizes:
            x = torch.randn(size)
            with torch.no_grad():
                out, copied = copies.during(lambda: model(x))  # noqa: B023
            assert torch.equal(out, (2 * x).sin())
            assert copied == (turn == 0 or size == (2, 3))


def test_outputs_that_are_kept_stay_what_they_were(shared: Executor) -> None:
    """Later calls, and what users write to them, are in other memory."""
    model = DataParallel(Apply(torch.sin), TWO, executor=shared)
    inputs = [torch.full((2, WIDE), float(i)) for i in range(6)]
    kept = [model(x) for x in inputs]
    kept[3].detach().zero_()
    for joined in (kept[0], kept[4]):  # the first took a copy
        joined.mul_(2).sum().backward()
    for i, (x, out) in enumerate(zip(inputs, kept, strict=True)):
        assert torch.equal(out, (2 * x).sin() * {3: 0, 4: 2}.get(i, 1))


def test_another_size_than_was_guessed_is_sent_as_ever(shared: Executor, copies: Copies) -> None:
    """Where the output's size is not a function of the input's."""
    model = DataParallel(Apply(lambda x: x[x[:, 0] > 0]), TWO, executor=shared)
    for signs, copy in (([1, 1, 1, 1], 1), ([1, 1, 1, -1], 1), ([1, 1, 1, -1], 0), ([-1, -1, 1, 1], 1)):
        x = torch.rand(4, WIDE) * torch.tensor(signs)[:, None]
        with torch.no_grad():
            out, copied = copies.during(lambda: model(x))  # noqa: B023
        assert torch.equal(out, 2 * x[x[:, 0] > 0])
        assert copied == copy


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.view(len(x), 4, -1).transpose(1, 2),
        lambda x: x.view(len(x), 2, 64, -1).contiguous(memory_format=torch.channels_last),
        lambda x: x.to_sparse(),
        lambda x: x[:0],
    ],
    ids=["transposed", "channels last", "sparse", "no rows"],
)
def test_what_is_not_one_run_is_copied(shared: Executor, work: Callable[[Tensor], Any]) -> None:
    """And has the values, and the order of memory, that it has without."""
    net = Apply(work)
    model = DataParallel(net, TWO, executor=shared)
    x = torch.randn(2, WIDE)
    with torch.no_grad():
        outs = [model(x) for _ in range(3)]
        expected = batch.gather([net(chunk) for chunk in x.chunk(2)], "cpu")
    assert all(torch.equal(out.to_dense(), expected.to_dense()) for out in outs)


class Keeps(DataParallel[Any]):
    """Keeps each chunk's output."""

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        self.parts = super().parallel_apply(replicas, inputs, kwargs)
        return self.parts


class Doubles(DataParallel[Any]):
    """Writes to the chunks' outputs after they are joined."""

    def gather(self, outputs: Any, output_device: Any) -> Any:
        joined = super().gather(outputs, output_device)
        for part in outputs:
            part.mul_(2)
        return joined


@pytest.mark.parametrize("wrapper", [Keeps, Doubles])
def test_whoever_sees_the_chunks_has_them_to_himself(shared: Executor, wrapper: type[DataParallel[Any]]) -> None:
    """A method of the user's own may keep and change them; the joined output is another's memory, as upstream."""
    model = wrapper(Apply(torch.sin), TWO, executor=shared)
    x = torch.randn(2, WIDE)
    with torch.no_grad():
        for _ in range(3):
            out = model(x)
            if isinstance(model, Keeps):
                assert torch.equal(torch.cat(model.parts), out)
                model.parts[0].zero_()
            assert torch.equal(out, (2 * x).sin())
        parts = model.parallel_apply(model.replicate(model.module, TWO), [(x[:1],), (x[1:],)], [{}, {}])
        joined = DataParallel.gather(model, parts, "cpu")
        parts[0].zero_()
        assert torch.equal(joined, (2 * x).sin())


def test_a_captured_output_is_not_the_returned_one(shared: Executor) -> None:
    """Each is joined on its own."""
    model = DataParallel(nn.Sequential(nn.Tanh(), nn.Sigmoid()), TWO, executor=shared)
    x = torch.randn(2, WIDE)
    for _ in range(3):
        with torch.no_grad(), model.capture("1") as captured:
            out = model(x)
            captured["1"].zero_()
        assert torch.equal(out, x.tanh().sigmoid())


def test_along_another_dimension_nothing_lies_side_by_side(shared: Executor) -> None:
    """Values are right all the same."""
    model = DataParallel(Apply(torch.sin), TWO, executor=shared, dim=1)
    x = torch.randn(2, WIDE, requires_grad=True)
    for _ in range(3):
        out = model(x)
        assert torch.equal(out, (2 * x).sin())
        (grad,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(grad, 2 * (2 * x).cos())


def test_a_graph_that_is_kept_gives_the_same_twice(shared: Executor) -> None:
    """The first gradients are not written over by the second ones."""
    model = DataParallel(Apply(torch.sin), TWO, executor=shared)
    x = torch.randn(2, WIDE, requires_grad=True)
    out = model(x)
    first, second, third = (
        torch.autograd.grad(out, x, torch.full_like(out, f), retain_graph=True)[0] for f in (1, 2, 3)
    )
    torch.testing.assert_close(first, 2 * (2 * x).cos())
    assert torch.equal(second, 2 * first)
    torch.testing.assert_close(third, 3 * first)


def test_gradients_of_some_chunks_only(shared: Executor) -> None:
    """A chunk without any counts as zeros."""
    model = DataParallel(Apply(torch.sin), TWO, executor=shared)
    plain = Apply(torch.sin)
    for rows in ([0], [0, 1], [1], [0, 1], [1]):
        x = torch.randn(2, WIDE, requires_grad=True)
        picked = model(x)[rows].sum()
        expected = torch.autograd.grad(plain(x)[rows].sum(), x)
        torch.testing.assert_close(torch.autograd.grad(picked, x), expected)


def test_a_replica_dies_in_the_midst(cluster: None, tmp_path: Path) -> None:
    """Whoever takes its chunk over writes to the same place; what the dead was lent is lent to nobody else."""
    with Executor(TWO, options=Options(link="auto", threads=1)) as executor:
        model = DataParallel(mortal.Mortal(nn.Tanh(), tmp_path), TWO, executor=executor)
        kept = []
        for turn in range(6):
            x = torch.cat([torch.tensor([[0.0], [1.0]]), torch.randn(2, WIDE)], 1).requires_grad_()
            mortal.arm(tmp_path, *{2: ["late forward 1"], 4: ["backward 0"]}.get(turn, []))
            out = model(x)
            kept.append((out, x))
            (grad,) = torch.autograd.grad(out.sum(), x)
            torch.testing.assert_close(grad[:, 1:], 1 - x[:, 1:].tanh() ** 2)
        assert mortal.armed(tmp_path) == []
        assert all(torch.equal(out, x[:, 1:].tanh()) for out, x in kept)


def test_in_this_process_nothing_is_lent() -> None:
    """Replicas in the driver's process have no memory to share."""
    with Executor(options=Options(in_process=True)) as executor:
        model = DataParallel(Apply(torch.sin), TWO, executor=executor)
        x = torch.randn(2, WIDE)
        assert all(torch.equal(model(x), (2 * x).sin()) for _ in range(3))


# --- the parts alone ---


def run_of(*sizes: int) -> tuple[list[Tensor], Tensor]:
    """Tensors of some rows of three floats, one behind the other in one memory."""
    memory = torch.arange(3.0 * sum(sizes))
    run = devices.Run(Piece(memory.data_ptr(), memory.nbytes, memory), memory.nbytes)
    starts = [12 * sum(sizes[:i]) for i in range(len(sizes))]
    specs = [TensorSpec("float32", (size, 3), (3, 1), at) for size, at in zip(sizes, starts, strict=True)]
    return [run.tensor(spec, torch.float32) for spec in specs], memory


def test_neighbours_are_one_tensor() -> None:
    """In their order, without a gap, along the first dimension."""
    parts, memory = run_of(2, 1, 4)
    whole = devices.joined(parts, 0)
    assert whole is not None and whole.data_ptr() == memory.data_ptr() and torch.equal(whole, memory.view(7, 3))
    last = devices.joined(parts[1:], -2)
    assert last is not None and torch.equal(last, memory.view(7, 3)[2:])
    for others, dim in ((parts, 1), (parts[::-1], 0), ([parts[0], parts[2]], 0), ([*parts, torch.ones(1, 3)], 0)):
        assert devices.joined(others, dim) is None
    assert devices.joined([memory.view(7, 3)[:2].clone(), parts[1]], 0) is None
    assert devices.joined(parts[:2], 0) is None, "less than half of what it would keep"
    other, _ = run_of(2, 2)
    assert devices.joined([parts[0], other[1]], 0) is None


def test_a_run_is_forgotten_with_its_tensors() -> None:
    """And what was joined of it keeps the memory."""
    parts, memory = run_of(2, 2)
    whole, kept = devices.joined(parts, 0), weakref.ref(memory)
    expected = memory.view(4, 3).clone()
    del parts, memory
    gc.collect()
    assert whole is not None and torch.equal(whole, expected) and kept() is not None
    del whole
    gc.collect()
    assert kept() is None


def test_what_the_dead_was_lent_is_not_lent_again() -> None:
    """He may not be quite dead."""
    arena, ledger = Arena(), Ledger()
    first, second = arena.take(1 << 20), arena.take(1 << 20)
    ledger.lend(first)
    lost, back = first.descriptor.token, second.descriptor.token
    ledger.end()
    del first, second
    gc.collect()
    tokens = {arena.take(1 << 20).descriptor.token, arena.take(1 << 20, blank=True).descriptor.token}
    assert back in tokens and lost not in tokens


def test_calls_of_many_kinds_are_forgotten(shared: Executor) -> None:
    """The oldest first."""
    model = DataParallel(Apply(torch.sin), TWO, executor=shared)
    with torch.no_grad():
        for columns in range(20):
            model(torch.ones(2, WIDE + columns))
    master = shared.master(model.module)
    assert abreast.ground(master, ((1, 1), ((1, WIDE),))) is None
    assert abreast.ground(master, ((1, 1), ((1, WIDE + 19),))) is not None
    assert not calling.joining.get()
