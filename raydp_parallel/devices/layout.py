"""How rows of tensors lie in one run of memory."""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGN = 64


class Spec(NamedTuple):
    """The geometry of one tensor: its values are one run, in whatever order dimensions lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def specs_of(tensors: Sequence[Tensor]) -> list[Spec]:
    """Describe dense tensors."""
    # Without Spec's own constructor, which is a function of Python.
    return [tuple.__new__(Spec, (t.dtype, t.shape, t.stride())) for t in tensors]


def is_dense(tensor: Tensor) -> bool:
    """Tell if a strided tensor's elements fill one run of memory, each in a place of its own."""
    dense = torch.ops.aten.is_non_overlapping_and_dense
    return tensor.is_contiguous() or bool(dense(tensor))


class Layout:
    """Offsets of tensors in memory, one after the other.

    Args:
        specs: The tensors' geometry.
        align: Each begins at a multiple of so many bytes.
    """

    def __init__(self, specs: Sequence[Spec], align: int = ALIGN) -> None:
        self.specs = tuple(specs)
        self.offsets: list[int] = []  # where each begins
        self.size = 0  # the bytes of all
        self._runs: list[tuple[torch.dtype, int, int]] = []
        for spec in self.specs:
            begin = self.size
            self.offsets.append(begin)
            end = begin + spec.dtype.itemsize * math.prod(spec.shape)
            self.size = -(-end // align) * align
            if self._runs and self._runs[-1][0] == spec.dtype:
                begin = self._runs.pop()[1]
            self._runs.append((spec.dtype, begin, self.size))

    def runs(self, memory: Tensor) -> list[Tensor]:
        """Show neighbours of one dtype as one tensor, with what lies between them."""
        return [memory[begin:end].view(dtype) for dtype, begin, end in self._runs]

    def views(self, memory: Tensor) -> list[Tensor]:
        """Show the tensors in a flat run of bytes, on whatever device it lies."""
        whole = {dtype: memory.view(dtype) for dtype in {spec.dtype for spec in self.specs}}
        begin = memory.storage_offset()
        pairs = zip(self.specs, self.offsets, strict=True)
        rows = [(spec, (begin + offset) // spec.dtype.itemsize) for spec, offset in pairs]
        return [whole[spec.dtype].as_strided(spec.shape, spec.stride, at) for spec, at in rows]


@functools.lru_cache(maxsize=512)
def layout_of(specs: tuple[Spec, ...]) -> Layout:
    """Lay out one row: the same object for equal specs, whichever process or channel sent them."""
    return Layout(specs)


@functools.lru_cache(maxsize=512)
def part(layout: Layout, begin: int, after: int) -> Layout:
    """Return the layout of a row of others, alone."""
    return layout_of(layout.specs[begin:after])


class Row(list[Any]):
    """Tensors, and None, that travel without a look of pickle at each."""

    layout: Layout | None = None  # of those of a row that came; None if they lie apart
    memory: Tensor  # the bytes of all
    present: bytes | None = None  # which places have one; None if all do


class Run:
    """Memory in which rows of tensors lie."""

    map: mmap.mmap | None = None  # maps it into this process; None on a GPU

    MOST = 256
    """Layouts that one sender uses: more are shapes that never come again."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # all of it, as a flat tensor of bytes
        self.size = memory.numel()  # a multiple of `ALIGN`
        self.registered: bool | None = None  # as memory of the host with CUDA; None: not tried
        self._views: dict[int, tuple[Layout, list[Tensor]]] = {}

    def views(self, layout: Layout) -> list[Tensor]:
        """Show a row of tensors here; made once for each layout."""
        found = self._views.get(id(layout))
        if found is None:
            if len(self._views) >= 2 * self.MOST:
                self._views.clear()
            found = self._views[id(layout)] = layout, layout.views(self.memory)
        return found[1]
