"""A step slice by slice gives the bits of the whole step, whatever the sizes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from raydp_parallel.devices.ranges import MemoryRange
from raydp_parallel.replica import replica_training
from raydp_parallel.replica.replica_training import KeptSum, SlicedOptimizer, TermSum
from raydp_parallel.transport.messages import GradientTerms

SHAPES = [(13, 17), (5,), (128,), (131,), (33, 31), ()]

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "nesterov": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "dampened": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "Adam": (optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {"lr": 0.01}),
    "lr is a tensor": (optim.AdamW, {"lr": torch.tensor(0.01)}),
    "Adamax": (optim.Adamax, {}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    "Adadelta": (optim.Adadelta, {}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (optim.Rprop, {}),
    "ASGD": (optim.ASGD, {"weight_decay": 0.1, "t0": 2}),
}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slices of 64 elements, three at once."""
    monkeypatch.setattr(replica_training, "SLICE", 64)
    monkeypatch.setattr(replica_training, "_TURN", 3)
    yield


def parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


def made(kind: str, tensors: list[Tensor]) -> Any:
    optimizer_class, keywords = KINDS[kind]
    return optimizer_class(
        [{"params": tensors[:2], "lr": 0.05}, {"params": tensors[2:]}], **keywords
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_a_whole_step(kind: str) -> None:
    """With gradients that are missing in some steps, an edited group, and the state taken out and
    put back in between.
    """
    plain, sliced = parameters(), parameters()
    one, other = made(kind, plain), made(kind, sliced)
    slices = None
    for step in range(25):
        generator = torch.Generator().manual_seed(step)
        grads = [
            torch.randn(shape, generator=generator) if step % 5 != number else None
            for number, shape in enumerate(SHAPES)
        ]
        for parameter, grad in zip(plain, grads, strict=True):
            parameter.grad = grad
        if kind != "lr is a tensor":
            one.param_groups[1]["lr"] = other.param_groups[1]["lr"] = 0.01 * (step + 1)
        one.step()
        assert SlicedOptimizer.fits(other, grads)
        slices = slices or SlicedOptimizer(other)
        slices.step(grads)
        if step in (7, 8, 15):
            slices.join()
            slices = None
    if slices is not None:
        slices.join()
    assert all(map(torch.equal, plain, sliced))
    expected, found = one.state_dict()["state"], other.state_dict()["state"]
    assert expected.keys() == found.keys()
    for number, values in expected.items():
        assert values.keys() == found[number].keys()
        for name, value in values.items():
            assert value is None or torch.equal(
                torch.as_tensor(value), torch.as_tensor(found[number][name])
            ), name


def test_a_parameter_in_other_memory_is_seen() -> None:
    """Its slices would be steps on memory that nothing uses."""
    tensors = parameters()
    optimizer = optim.SGD(tensors, lr=0.1)
    slices = SlicedOptimizer(optimizer)
    assert not slices.moved
    tensors[0].data = tensors[0].data.clone()
    assert slices.moved


def test_what_is_not_made_in_slices() -> None:
    """Other ways to compute, classes that look at a parameter as a whole or that are unknown, small
    and strange parameters, and sparse gradients.
    """

    class Own(optim.SGD):
        pass

    tensors = parameters()
    grads: list[Any] = [torch.ones_like(tensor) for tensor in tensors]
    assert SlicedOptimizer.fits(optim.SGD(tensors), grads)
    assert not SlicedOptimizer.fits(Own(tensors), grads)
    assert not SlicedOptimizer.fits(optim.Adafactor(tensors), grads)
    assert not SlicedOptimizer.fits(optim.SGD(tensors, foreach=True), grads)
    assert not SlicedOptimizer.fits(optim.Adam(tensors, fused=True), grads)
    assert not SlicedOptimizer.fits(optim.SGD([tensors[1]]), grads[1:2])
    strange = optim.Adam([{"params": tensors, "name": "all"}])
    assert SlicedOptimizer.fits(strange, grads)
    strange.param_groups[0]["weight_decay"] = "x"
    assert not SlicedOptimizer.fits(strange, grads)
    turned = torch.randn(32, 32).t().requires_grad_()
    assert not SlicedOptimizer.fits(optim.SGD([turned]), [torch.ones(32, 32)])
    sparse = torch.ones(13, 17).to_sparse()
    assert not SlicedOptimizer.fits(optim.SGD(tensors), [sparse, *grads[1:]])


class Broken(TermSum):
    """A gradient of ones, of which no slice can be read from some element on."""

    def __init__(self, end: int) -> None:
        super().__init__(GradientTerms(True, ()), {})
        self.end = end

    def part(self, begin: int, end: int, into: Tensor) -> None:
        if end > self.end:
            raise MemoryError("here")
        into.fill_(1)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", ["nesterov", "Adam", "Rprop", "ASGD", "Adagrad"])
def test_what_is_kept_after_a_step_that_fails_halfway(kind: str, first: bool) -> None:
    """It is of whole parameters, so that training can go on; one count of steps for each."""
    tensors = parameters()
    optimizer = made(kind, tensors)
    grads: list[Any] = [torch.ones_like(tensor) for tensor in tensors]
    slices = SlicedOptimizer(optimizer)
    if not first:
        slices.step(grads)
    with pytest.raises(MemoryError):
        slices.step([*grads[:4], Broken(256), grads[5]])
    slices.join()
    state = optimizer.state
    assert tensors[3] in state and (tensors[4] in state) == (not first or kind == "Adagrad")
    for parameter, values in state.items():
        for name, value in values.items():
            assert not isinstance(value, Tensor) or value.shape in (parameter.shape, ()), name
    slices = SlicedOptimizer(optimizer)
    slices.step(grads)
    slices.join()
    assert {*state} == {*tensors}
    assert all(value.isfinite().all() for value in tensors)


def kept(*chunks: Tensor) -> KeptSum:
    """The sum of some chunks' gradients of two parameters, which lie one behind the other."""
    ranges = [MemoryRange(chunk.data_ptr(), chunk.nbytes, chunk) for chunk in chunks]
    first = ("float32", (4, 8), (8, 1), 32, tuple((n, 0) for n in range(len(chunks))))
    second = ("float32", (8, 4), (1, 8), 32, ((0, 128),))
    return KeptSum(pickle.dumps([first, second]), ranges)


def test_a_kept_sum_is_in_the_order_of_chunks_and_leaves_them_as_they_are() -> None:
    """As a whole, in parts, and with strides."""
    chunks = [torch.randn(64) * 10**n for n in range(3)]
    before = [chunk.clone() for chunk in chunks]
    expected = (chunks[0][:32] + chunks[1][:32]) + chunks[2][:32]
    parts = torch.empty(20)
    kept(*chunks).part(0, 10, 30, parts)
    assert torch.equal(parts, expected[10:30])
    sums = kept(*chunks)
    assert len(sums) == 2 and torch.equal(sums[0], expected.view(4, 8))
    assert torch.equal(sums[1], chunks[0][32:].view(4, 8).t())
    sums[0].mul_(2)  # as an optimizer may do
    sums.part(0, 10, 30, parts)
    assert torch.equal(parts, 2 * expected[10:30])
    assert all(map(torch.equal, chunks, before))
    assert sums.in_a_run(0) and not sums.in_a_run(1)
    with pytest.raises(IndexError):
        sums[2]


@pytest.mark.parametrize("zeros", [False, True])
def test_terms_are_added_one_after_the_other(zeros: bool) -> None:
    """Accumulated gradients, some of them on zeros; -0 shows the difference."""
    one, other = torch.full((64,), -0.0), torch.randn(64)
    sums: dict[int, Any] = {1: kept(one), 2: (torch.full((4, 8), -0.0),), 3: kept(other)}
    for terms in (((1, 0),), ((2, 0),), ((1, 0), (2, 0)), ((1, 0), (3, 0), (2, 0)), ()):
        found = TermSum(GradientTerms(zeros or not terms, terms), sums)
        whole = found.whole()
        part = torch.empty(32)
        assert found.in_slices
        found.part(0, 32, part)
        expected = torch.zeros(32) if whole is None else whole.reshape(-1)
        assert torch.equal(part, expected)
        assert torch.equal(part.signbit(), expected.signbit())
