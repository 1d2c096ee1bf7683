"""How rows of tensors lie in one run of memory."""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGN = 64


class Spec(NamedTuple):
    """The geometry of one tensor: its values are one run, in whatever order dimensions lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    grad: bool


def specs_of(tensors: Sequence[Tensor]) -> list[Spec]:
    """Describe dense tensors that require no gradient."""
    # Without Spec's own constructor, which is a function of Python.
    return [tuple.__new__(Spec, (t.dtype, t.shape, t.stride(), False)) for t in tensors]


def is_dense(tensor: Tensor) -> bool:
    """Tell if a strided tensor's elements fill one run of memory, each in a place of its own."""
    if tensor.is_contiguous():
        return True
    run = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != run:
                return False
            run *= size
    return True


Cuts = tuple[tuple[int, int], ...]
"""Rows among tensors, each as the numbers of its first one and of the one after its last."""


class Layout:
    """Offsets of tensors in memory; equal rows of specs have one layout.

    Args:
        specs: The tensors' geometry.
        align: Each begins at a multiple of so many bytes.
        cuts: Rows among them. A row's tensors lie together, sorted by dtype, so that those of each
            dtype are one run.

    Attributes:
        offsets: Where each tensor begins.
        size: The bytes of all.
        rows: The layout of each row alone, and where it begins.
    """

    def __init__(self, specs: Sequence[Spec], align: int = ALIGN, cuts: Cuts = ()) -> None:
        self.specs = tuple(specs)
        self.offsets = [0] * len(self.specs)
        self.rows: list[tuple[int, Layout]] = []
        self._runs: list[tuple[torch.dtype, int, int]] = []
        self.size = 0
        rest = {*range(len(self.specs))}
        for begin, after in cuts:
            row = alone(self.specs[begin:after])
            self.offsets[begin:after] = [self.size + offset for offset in row.offsets]
            self.rows.append((self.size, row))
            self.size += row.size
            rest -= {*range(begin, after)}
        for dtype in dict.fromkeys([self.specs[i].dtype for i in sorted(rest)]):
            begin = self.size
            for i in sorted(rest):
                if self.specs[i].dtype == dtype:
                    self.offsets[i] = self.size
                    end = self.size + dtype.itemsize * math.prod(self.specs[i].shape)
                    self.size = -(-end // align) * align
            self._runs.append((dtype, begin, self.size))

    def runs(self, memory: Tensor) -> list[Tensor]:
        """Show all tensors of each dtype as one, with what lies between them."""
        return [memory[begin:end].view(dtype) for dtype, begin, end in self._runs]

    def views(self, memory: Tensor) -> list[Tensor]:
        """Show the tensors in a flat run of bytes, on whatever device it lies."""
        whole = {}
        for dtype in {spec.dtype for spec in self.specs}:
            size = memory.numel() // dtype.itemsize * dtype.itemsize
            whole[dtype] = (memory if size == memory.numel() else memory[:size]).view(dtype)
        begin = memory.storage_offset()
        found = []
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            at = (begin + offset) // spec.dtype.itemsize
            found.append(whole[spec.dtype].as_strided(spec.shape, spec.stride, at))
        return found


@functools.lru_cache(maxsize=512)
def alone(specs: tuple[Spec, ...]) -> Layout:
    """Lay out one row: the same object for equal specs, whichever process or channel sent them."""
    return Layout(specs)


class Run:
    """Memory in which rows of tensors lie.

    Attributes:
        memory: All of it, as a flat tensor of bytes.
        map: Maps it into this process; None on a GPU.
        registered: True if CUDA knows it as memory of the host; None if that was not tried.
    """

    memory: Tensor
    map: mmap.mmap | None = None

    MOST = 256
    """Layouts that one sender uses: more are shapes that never come again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.registered: bool | None = None
        self._views: dict[int, tuple[Layout, list[Tensor]]] = {}

    def views(self, layout: Layout) -> list[Tensor]:
        """Show a row of tensors here; made once for each layout."""
        found = self._views.get(id(layout))
        if found is None:
            if len(self._views) >= 2 * self.MOST:
                self._views.clear()
            found = self._views[id(layout)] = layout, layout.views(self.memory)
        return found[1]
