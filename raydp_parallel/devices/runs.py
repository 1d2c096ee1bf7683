"""Runs: tensors that lie one behind the other in memory, and are one tensor without a copy."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from raydp_parallel.devices.memory import in_place
from raydp_parallel.devices.raw import shaped
from raydp_parallel.links import Piece
from raydp_parallel.messages import TensorSpec


class Run:
    """Memory for tensors of one dtype, each with a storage of its own.

    Args:
        memory: The memory.
        kept: The bytes that stay as long as it does.
    """

    def __init__(self, memory: Piece, kept: int) -> None:
        self._memory = memory
        self.kept = kept

    def tensor(self, spec: TensorSpec, dtype: torch.dtype) -> Tensor:
        """The tensor of a spec, whose offset counts from where the memory begins."""
        _begun[self._memory.address + spec.offset] = self
        return in_place(self._memory._replace(owner=self))(spec, dtype)


_begun: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
"""The runs by the addresses where their tensors begin."""


def any_joined() -> bool:
    """Whether there are such tensors at all."""
    return bool(_begun)


def joined(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """The concatenation of contiguous tensors as the memory that they lie in; None where it is better a copy."""
    first = tensors[0]
    begin = end = first.data_ptr()
    run = _begun.get(begin)
    if run is None or dim not in (0, -first.dim()):
        return None
    for tensor in tensors:
        if tensor.data_ptr() != end or _begun.get(end) is not run or tensor.shape[1:] != first.shape[1:]:
            return None
        end += tensor.nbytes
    if 2 * (end - begin) < run.kept:
        return None
    rows = sum([tensor.shape[0] for tensor in tensors])
    return shaped(Piece(begin, end - begin, run), (rows, *first.shape[1:]), first.dtype)
