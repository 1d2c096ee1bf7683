"""The record of accesses to memory that move no version: of several blocks and threads at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from threaded import together
from torch import Tensor

from raydp_parallel.state.versions import RawAccess


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """Afterwards torch's class is as it was."""
    before = dict(vars(Tensor))
    yield
    assert dict(vars(Tensor)) == before


def address(tensor: Tensor) -> int:
    """By which a storage is known."""
    return tensor.untyped_storage().data_ptr()


def test_each_kind_of_access_is_seen() -> None:
    """Inside of the block, and in no other."""
    tensors = [torch.zeros(2) for _ in range(4)]
    addresses = [address(tensor) for tensor in tensors]
    with RawAccess() as found:
        _ = tensors[0].data
        tensors[1].numpy()
        tensors[2].data = torch.ones(2)
    _ = tensors[3].data
    assert found == {*addresses[:3]}


def test_a_block_inside_another() -> None:
    """What the inner one sees, the outer one sees; and the outer one goes on."""
    one, other = torch.zeros(2), torch.zeros(2)
    with RawAccess() as outer:
        with RawAccess() as inner:
            _ = one.data
        _ = other.data
    assert inner == {address(one)} and outer == {address(one), address(other)}


def test_blocks_of_two_threads_that_overlap() -> None:
    """The end of one ended the other, and its module's writes were then lost."""
    first, second = threading.Event(), threading.Event()
    over = threading.Event()
    tensor = torch.zeros(2)

    def early() -> None:
        with RawAccess():
            first.set()
            assert second.wait(60)
        over.set()

    def late() -> None:
        assert first.wait(60)
        with RawAccess() as found:
            second.set()
            assert over.wait(60)
            _ = tensor.data
        assert found == {address(tensor)}

    together(early, late)


def test_threads_that_a_module_starts_count() -> None:
    """They write to the module's memory, too."""
    tensor = torch.zeros(2)
    with RawAccess() as found:
        together(tensor.numpy)
    assert found == {address(tensor)}
