"""What is cheap to read of many tensors: versions, addresses, flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What `torch.autograd.graph.increment_version` calls; in a process that was idle its Python wrapper
# takes as long again.
_increment = torch._C._increment_version

_version = attrgetter("_version")
_flag = attrgetter("requires_grad")


_kind = attrgetter("shape", "dtype", "layout", "is_nested", "is_quantized", "is_meta")


class Look(NamedTuple):
    """The versions, addresses and flags of a row of tensors at one moment.

    Attributes:
        versions: How often each tensor was written to.
        pointers: The address of each.
        flags: Whether each requires a gradient.
    """

    versions: list[int]
    pointers: list[int]
    flags: list[bool]


def look(row: Sequence[Tensor]) -> Look:
    """Read them now."""
    return Look(versions(row), pointers(row), [*map(_flag, row)])


def versions(row: Sequence[Tensor]) -> list[int]:
    """The version of every tensor; 0 for inference tensors, which have none."""
    try:
        return [*map(_version, row)]
    except RuntimeError:
        return [0 if t.is_inference() else t._version for t in row]


def pointers(row: Sequence[Tensor]) -> list[int]:
    """The address of every tensor."""
    return [*map(Tensor.data_ptr, row)]


def geometry(row: Sequence[Tensor]) -> list[Any]:
    """All other properties of how tensors lie in memory; empty if some tensor lacks one of them."""
    try:
        found: list[Any] = [*map(type, row), *map(_kind, row), *map(Tensor.stride, row)]
        return [*found, *map(Tensor.is_conj, row), *map(Tensor.is_neg, row)]
    except RuntimeError:  # a layout without strides, or without a shape
        return []


def unlike(then: Sequence[Any], now: Sequence[Any]) -> list[int]:
    """The places in a row where two of its looks differ."""
    return [i for i, (a, b) in enumerate(zip(then, now, strict=True)) if a != b]


class TensorRow:
    """Tensors by slot, with the versions and addresses that were last read.

    Args:
        tensors: The tensors.
    """

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self._tensors = tensors
        self._row = [*tensors.values()]
        self._pointers = pointers(self._row)
        self._versions = versions(self._row)
        self._bumped: tuple[tuple[int, ...], list[Tensor]] = (), []

    def settle(self) -> None:
        """Let `moved` and `stirred` compare with the versions of now."""
        self._versions = versions(self._row)

    def stirred(self) -> bool:
        """Whether any version moved since the last call of `moved`."""
        return self._versions != versions(self._row)

    def moved(self) -> set[int]:
        """The slots with versions that moved since the last call."""
        then, self._versions = self._versions, versions(self._row)
        if then == self._versions:
            return set()
        slots = [*self._tensors]
        return {slots[i] for i in unlike(then, self._versions)}

    def elsewhere(self) -> set[int]:
        """The slots of tensors that have another address than at first."""
        now = pointers(self._row)
        if now == self._pointers:
            return set()
        slots = [*self._tensors]
        return {slots[i] for i in unlike(self._pointers, now)}

    def bump(self, slots: tuple[int, ...]) -> None:
        """Move the versions of some slots. Mostly they are the same with each step of an optimizer,
        so the tensors are kept.
        """
        if slots != self._bumped[0]:
            self._bumped = slots, [self._tensors[slot] for slot in slots if slot in self._tensors]
        bump(self._bumped[1])


def bump(tensors: Sequence[Tensor]) -> None:
    """Move versions, so that torch's check for in-place changes sees what the driver changed in the
    master.
    """
    if tensors:
        _increment(tensors)  # it skips inference tensors, which have no version
