"""Sums of the chunks' gradients, always in chunk order, so that the bits never depend on which
replica finished first.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from raydp_parallel.devices.layout import Layout, Row
from raydp_parallel.devices.memory import is_used
from raydp_parallel.options import UnusedGrads
from raydp_parallel.state.mirror import Leaf, Master
from raydp_parallel.wire.messages import Answer

_REUSED = 1 << 16
"""Bytes from which on the memory of sums is used again, once nobody else looks at it: new pages
cost more than the addition.
"""
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_MOST = 4
"""Sums of one model whose memory is kept: some are still in ``.grad``, others of other sizes."""

Numbers = Sequence[int | None]
"""For each of a chunk's leaves, which of the call's leaves it is; None if it was not reached."""


_runs = weakref.WeakKeyDictionary[Master, list[Tensor]]()


def _memory(master: Master, size: int, device: torch.device) -> Tensor:
    """Return memory for a model's sums. On the host it is that of earlier ones, if nobody looks at
    these.
    """
    if size < _REUSED or device.type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    runs = _runs.setdefault(master, [])
    for run in runs:
        if run.numel() == size and not is_used(run):
            return run.detach()
    runs.append(torch.empty(size, dtype=torch.uint8, device="cpu"))
    del runs[:-_MOST]
    return runs[-1].detach()


@dataclass(eq=False)
class Sums:
    """Sums of gradients for each leaf, added chunk by chunk, in the order of chunks.

    As long as each chunk's gradients lie in one run of memory, in the same order, runs are added.
    From the first one on that lies otherwise, tensors are added one by one.
    """

    _master: Master  # whose memory the sums may have
    _leaves: Sequence[Leaf]  # the call's
    _chunks: Sequence[Numbers]  # of each chunk's leaves: those of the module, then inputs
    _sums: dict[int, Tensor] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)  # how many were added one by one
    _form: tuple[Layout | None, bytes | None, Numbers] | None = None  # how gradients lie in the run
    _run: Tensor = _NOTHING
    _lent: bool = False  # True as long as the run is the first chunk's

    def take(self, at: int, answer: Answer) -> None:
        """Add a chunk's gradients, in memory that is only lent."""
        if answer.failure is not None:
            return
        row, inputs = answer.rows
        numbers, others = self._chunks[at][: len(row)], self._chunks[at][len(row) :]
        layout = row.layout  # one object for all rows of equal specs
        form = layout, row.present, numbers
        if layout is not None and self._form is None and not self._sums:
            self._form, self._run, self._lent = form, row.memory, True
        elif layout is not None and form == self._form:
            size, device = layout.size, self._run.device
            into = _memory(self._master, size, device) if self._lent else self._run
            outs, grads = layout.runs(into), layout.runs(row.memory)
            totals = layout.runs(self._run) if self._lent else outs
            for total, grad, out in zip(totals, grads, outs, strict=True):
                torch.add(total, grad, out=out)  # [12] sum
            self._run, self._lent = into, False
        else:
            self._take_apart()
            self._add_apart(row, numbers)
        self._add_apart(inputs, others)

    def copy_lent(self) -> None:
        """Copy what is only lent, before a replica writes there."""
        if self._lent:
            into = _memory(self._master, self._run.numel(), self._run.device)
            self._run, self._lent = into.copy_(self._run), False

    def _take_apart(self) -> None:
        if self._form is None:
            return
        self.copy_lent()
        (layout, present, numbers), self._form = self._form, None
        assert layout is not None
        there = numbers if present is None else compress(numbers, present)
        for at, view in zip(there, layout.views(self._run), strict=True):
            if at is not None:
                self._sums[at] = view.to(self._leaves[at].tensor.device)

    def _add_apart(self, row: Row, numbers: Numbers) -> None:
        for at, grad in zip(numbers, row, strict=True):
            if at is None or grad is None:
                continue
            self._counts[at] = self._counts.get(at, 0) + 1
            grad, total = grad.to(self._leaves[at].tensor.device), self._sums.get(at)
            if total is None:
                self._sums[at] = grad.detach().clone()
                continue
            # Torch adds a sparse tensor to a dense one, not the other way.
            if grad.layout is torch.strided and total.layout is not torch.strided:
                total, grad = grad, total
            self._sums[at] = torch.add(total, grad)

    def finish(self, unused: UnusedGrads) -> dict[int, Tensor]:
        """Return the sums by leaf. A sparse one to which not all chunks gave is dense, as the zeros
        are that the others would have given (row B5).
        """
        self._take_apart()
        for at, given in self._counts.items() if unused == "zeros" else ():
            total, leaf = self._sums[at], self._leaves[at].tensor
            sparse = total.layout is not torch.strided and leaf.layout is torch.strided
            if sparse and given < sum([numbers.count(at) for numbers in self._chunks]):
                self._sums[at] = total.to_dense()
        return self._sums
