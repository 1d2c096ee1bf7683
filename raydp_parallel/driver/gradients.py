"""Sums of the chunks' gradients, always in chunk order, so that the bits never depend on which
replica finished first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raydp_parallel.devices.memory import is_used
from raydp_parallel.options import UnusedGrads
from raydp_parallel.state.lagging import plainly
from raydp_parallel.wire.codec import Row

_KEPT = 1 << 16
"""Bytes from which on the memory of sums is used again, once nobody else looks at it: new pages
cost more than the addition.
"""
_SLACK = 8
"""How many times the memory of one backward's sums is kept: for several models in turn."""


class Share(NamedTuple):
    """One chunk's gradients.

    Attributes:
        grads: A gradient or None for each of the chunk's leaves, in memory that is only lent.
        leaves: Which of the call's leaves they belong to; None for those to be left out.
    """

    grads: Row
    leaves: Sequence[int | None]

    def lies_as(self, other: Share) -> bool:
        """Tell if all of it lies in one run of memory, in the order of another one."""
        one, two = self.grads, other.grads
        alike = one.layout is not None and one.layout is two.layout and one.present == two.present
        return alike and (self.leaves is other.leaves or self.leaves == other.leaves)


class _Recycled:
    """Memory of sums on the host. Threads may share it."""

    def __init__(self) -> None:
        self._runs: dict[int, list[Tensor]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> Tensor:
        """Return memory that nobody looks at, or new memory."""
        if size < _KEPT:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        with self._lock:
            for run in self._runs.get(size, ()):
                if not is_used(run):
                    return run.detach()
            if self._size > _SLACK * size:  # of models that are gone
                self._runs.clear()
                self._size = 0
            made = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._runs.setdefault(size, []).append(made)
            self._size += size
            return made.detach()


_recycled = _Recycled()


class Sums:
    """Sums of gradients for each leaf, added chunk by chunk, in the order of chunks.

    As long as each chunk's gradients lie in one run of memory, in the same order, runs are added.
    From the first one on that lies otherwise, tensors are added one by one.

    Args:
        leaves: The leaves.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        self._sums: list[Tensor | None] = [None] * len(leaves)
        self._given = [0] * len(leaves)
        self._apart = False
        self._like: Share | None = None
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # in which the run lies
        self._lent = False  # True as long as that is the first chunk's
        self._chunks = 0  # of which the run is the sum

    def add(self, share: Share) -> None:
        """Add the next chunk."""
        layout = share.grads.layout
        if self._like is None and not self._apart and layout is not None:
            self._like, self._memory, self._lent = share, share.grads.memory, True
            self._chunks = 1
        elif layout is not None and self._like is not None and share.lies_as(self._like):
            into = self._new(layout.size) if self._lent else self._memory
            runs = map(layout.runs, (self._memory, share.grads.memory, into))
            for total, grads, out in zip(*runs, strict=True):
                torch.add(total, grads, out=out)
            self._memory, self._lent = into, False
            self._chunks += 1
        else:
            self._take_apart()
            self.add_apart(share)

    def _new(self, size: int) -> Tensor:
        device = self._memory.device
        if device.type == "cpu":
            return _recycled.take(size)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def own(self) -> None:
        """Copy what is only lent, before a replica writes there."""
        if self._lent:
            self._memory = self._new(self._memory.numel()).copy_(self._memory)
            self._lent = False

    def _take_apart(self) -> None:
        self._apart = True
        if self._like is None or self._like.grads.layout is None:
            return
        self.own()
        views = iter(self._like.grads.layout.views(self._memory))
        for at, grad in zip(self._like.leaves, self._like.grads, strict=True):
            if grad is not None:
                view = next(views)
                if at is not None:
                    view = view.to(self._leaves[at].device)
                    other = self._sums[at]  # of a parameter that is an input, too
                    self._sums[at] = view if other is None else view + other
                    self._given[at] += self._chunks
        self._like = None

    def add_apart(self, share: Share) -> None:
        """Add tensors one by one."""
        for at, grad in zip(share.leaves, share.grads, strict=True):
            if at is None or grad is None:
                continue
            self._given[at] += 1
            grad, total = grad.to(self._leaves[at].device), self._sums[at]
            if total is None:
                self._sums[at] = grad.detach().clone()
                continue
            # Torch adds a sparse tensor to a dense one, not the other way.
            if grad.layout is torch.strided and total.layout is not torch.strided:
                total, grad = grad, total
            self._sums[at] = torch.add(total, grad)

    def finish(self) -> list[Tensor | None]:
        """Return the sum for each leaf; None where no chunk has a gradient."""
        self._take_apart()
        return self._sums

    def whole(self, parts: Iterable[Sequence[int | None]]) -> list[bool]:
        """Tell for each leaf if every chunk that has it gave a gradient."""
        missing = [-count for count in self._given]
        for leaves in parts:
            for at in leaves:
                if at is not None:
                    missing[at] += 1
        return [count == 0 for count in missing]


def filled(sums: Sequence[Tensor | None], kinds: Sequence[str]) -> set[str]:
    """Return the kinds of which some tensor has a gradient."""
    return {kind for one, kind in zip(sums, kinds, strict=True) if one is not None}


@plainly
def settle(
    sums: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
    needed: Sequence[bool],
    whole: Sequence[bool],
    unused: UnusedGrads,
    filled: set[str],
    kinds: Sequence[str],
) -> list[Tensor | None]:
    """Give unused parameters what upstream gives them (row B3).

    Args:
        sums: The sums.
        leaves: The tensors that they belong to.
        needed: Which gradients were asked for.
        whole: True if every chunk contributed to a leaf; a sparse sum is dense otherwise, as zeros
            are (row B5).
        unused: The gradients of unused parameters.
        filled: The kinds of which some tensor has a gradient: a parameter gets zeros if another
            parameter has one, and a buffer if another buffer has one.
        kinds: The kind of each.
    """
    settled: list[Tensor | None] = []
    for found, leaf, kind, need, complete in zip(sums, leaves, kinds, needed, whole, strict=True):
        if found is None:
            fills = kind in ("parameter", "buffer") and kind in filled
            zeros = need and unused == "zeros" and fills
            settled.append(torch.zeros_like(leaf) if zeros else None)
            continue
        sparse = found.layout is not torch.strided and leaf.layout is torch.strided
        if sparse and not complete and unused != "none":
            found = found.to_dense()
        settled.append(found if found.device == leaf.device else found.to(leaf.device))
    return settled
