"""Sums of gradients that lie in memory which several replicas of a machine read: each chunk's where
its replica left them, and each replica adds them up for itself, in the order of chunks.

So no replica waits for another one, and a replica that died has left its gradients behind. The
driver keeps that memory until all replicas have said that they made the step. Nothing is added
before it is used: an optimizer that works slice by slice adds up one slice at a time, which stays
in the cache.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import MemoryRange
from raydp_parallel.transport.codec import DTYPES
from raydp_parallel.transport.messages import GradientTerms, SumRow


@functools.lru_cache(maxsize=16)
def _rows(layout: bytes) -> tuple[tuple[SumRow, bool], ...]:
    """The rows of a layout, which is the same in each step, and whether each is contiguous."""
    rows = [SumRow(*row) for row in pickle.loads(layout)]
    return tuple([(row, _contiguous(row)) for row in rows])


def _contiguous(row: SumRow) -> bool:
    like = torch.empty(row.shape, device="meta")
    return like.as_strided(row.shape, row.stride).is_contiguous()


class KeptSum(Sequence[Tensor]):
    """The sums of one backward, in the order of its rows.

    Args:
        layout: Pickled `SumRow`s.
        chunks: Where the gradients of each chunk lie. They are read and never written.
    """

    def __init__(self, layout: bytes, chunks: Sequence[MemoryRange]) -> None:
        rows = _rows(layout)
        self._rows = [row for row, _ in rows]
        self._contiguous = [contiguous for _, contiguous in rows]
        self._chunks = [devices.view(chunk) if chunk.size else None for chunk in chunks]
        self._added: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> Tensor: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, row: int | slice) -> Tensor | Sequence[Tensor]:
        """A sum, in memory of this process, which is kept."""
        if isinstance(row, slice):
            return [self[number] for number in range(len(self))[row]]
        if not 0 <= row < len(self):
            raise IndexError(row)
        if row not in self._added:
            spec = self._rows[row]
            flat = torch.empty(spec.size, dtype=DTYPES[spec.dtype], device="cpu")
            self.part(row, 0, spec.size, flat)
            self._added[row] = flat.as_strided(spec.shape, spec.stride)
        return self._added[row]

    def in_a_run(self, row: int) -> bool:
        """Whether a row's elements lie in their own order."""
        return self._contiguous[row]

    def part(self, row: int, begin: int, end: int, into: Tensor) -> None:
        """Add up some elements of a row, in the order in which they lie."""
        spec = self._rows[row]
        if row in self._added:
            kept = self._added[row].as_strided((spec.size,), (1,))
            into.copy_(kept[begin:end])
            return
        first, *others = [self._window(spec, at, begin, end) for at in range(len(spec.places))]
        if not others:
            into.copy_(first)
            return
        torch.add(first, others[0], out=into)
        for other in others[1:]:
            into.add_(other)

    def _window(self, spec: SumRow, number: int, begin: int, end: int) -> Tensor:
        """Some elements of one chunk's gradient, where they lie."""
        chunk, offset = spec.places[number]
        dtype, whole = DTYPES[spec.dtype], self._chunks[chunk]
        assert whole is not None
        item = dtype.itemsize
        return whole[offset + begin * item : offset + end * item].view(dtype)


class TermSum:
    """A gradient that is a sum of terms which the replica keeps. See `GradientTerms`.

    Args:
        found: The terms.
        sums: What the replica keeps, by key.
    """

    def __init__(self, found: GradientTerms, sums: dict[int, Sequence[Tensor | None]]) -> None:
        self._zeros = found.zeros
        self._terms = [(sums[key], row) for key, row in found.terms]

    def whole(self) -> Tensor | None:
        """The gradient; None if it is zeros without any terms."""
        total: Tensor | None = None
        for sums, row in self._terms:
            term = sums[row]
            assert term is not None
            if total is None and len(self._terms) == 1 and not self._zeros:
                return term
            if total is None:
                total = torch.zeros_like(term) if self._zeros else term.clone()
                if not self._zeros:
                    continue
            total.add_(term)
        return total

    @property
    def in_slices(self) -> bool:
        """Whether `part` can be used."""
        return all(
            sums.in_a_run(row) if isinstance(sums, KeptSum) else _is_run(sums[row])
            for sums, row in self._terms
        )

    def part(self, begin: int, end: int, into: Tensor) -> None:
        """Add up some elements, in the order in which they lie."""
        if self._zeros or not self._terms:
            into.zero_()
        spare: Tensor | None = None
        for number, (sums, row) in enumerate(self._terms):
            if number == 0 and not self._zeros:
                _take(sums, row, (begin, end), into)
                continue
            spare = torch.empty_like(into) if spare is None else spare
            _take(sums, row, (begin, end), spare)
            into.add_(spare)


def _take(sums: Sequence[Tensor | None], row: int, run: tuple[int, int], into: Tensor) -> None:
    if isinstance(sums, KeptSum):
        sums.part(row, *run, into)
        return
    term = sums[row]
    assert term is not None
    into.copy_(term.view(-1)[run[0] : run[1]])


def _is_run(term: Tensor | None) -> bool:
    return term is not None and term.layout is torch.strided and term.is_contiguous()
