"""Sums of the chunks' gradients, always in chunk order, so that the bits never depend on which
replica finished first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raydp_parallel.options import UnusedGrads
from raydp_parallel.state.lagging import plainly
from raydp_parallel.state.mirror import copies

_KEPT = 1 << 16
"""Bytes from which on the memory of a sum is used again, once nobody else looks at it: new pages
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

    grads: Sequence[Tensor | None]
    leaves: Sequence[int | None]


class _Recycled:
    """Memory of sums, by geometry. Threads may share it."""

    def __init__(self) -> None:
        self._runs: dict[tuple[int, ...], list[Tensor]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def take(self, like: Tensor, size: int) -> Tensor:
        """Return memory that nobody looks at, or new memory."""
        key = (hash(like.dtype), *like.shape, -1, *like.stride())
        with self._lock:
            for run in self._runs.get(key, ()):
                # One use by the list's tensor, one by the storage object that asks.
                if torch._C._storage_Use_Count(run.untyped_storage()._cdata) <= 2:
                    return run.detach()
            made = torch.empty_like(like)
            self._runs.setdefault(key, []).append(made)
            self._size += size
            return made.detach()

    def trim(self, used: int) -> None:
        """Forget all if most of it was not used by the last sums: its models are gone."""
        with self._lock:
            if used and self._size > _SLACK * used:
                self._runs.clear()
                self._size = 0


_recycled = _Recycled()


def total(
    shares: Sequence[Share], leaves: Sequence[Tensor], kinds: Sequence[str]
) -> list[Tensor | None]:
    """Sum over chunks for each leaf, in memory of its own; None where no chunk has a gradient.

    Args:
        shares: The chunks' gradients.
        leaves: The leaves.
        kinds: Their kinds: inputs come in ever new sizes, so their memory is not kept.
    """
    rows: list[list[Tensor]] = [[] for _ in leaves]
    for share in shares:
        for at, grad in zip(share.leaves, share.grads, strict=True):
            if at is not None and grad is not None:
                rows[at].append(grad)
    sums: list[Tensor | None] = [None] * len(leaves)
    near: list[int] = []
    used = 0
    for i, (row, leaf, kind) in enumerate(zip(rows, leaves, kinds, strict=True)):
        if not row:
            continue
        device, odd = leaf.device, False
        for g in row:  # no function for each
            odd = odd or type(g) is not Tensor or g.layout is not torch.strided or g.is_nested
            odd = odd or g.device != device
        size = row[0].numel() * row[0].element_size()
        into = None
        if odd:
            row = [grad.to(device) for grad in row]
        elif device.type != "cpu":
            near.append(i)
            continue
        elif kind == "parameter" and size >= _KEPT:
            into = _recycled.take(row[0], size)
            used += size
        sums[i] = _sum(row, into)
    _recycled.trim(used)
    if near:  # in one run of memory, of which each sum is a part
        found = copies([rows[i][0] for i in near])
        for n in range(1, max(len(rows[i]) for i in near)):
            having = [k for k, i in enumerate(near) if len(rows[i]) > n]
            torch._foreach_add_([found[k] for k in having], [rows[near[k]][n] for k in having])
        for i, tensor in zip(near, found, strict=True):
            sums[i] = tensor
    return sums


def _sum(row: list[Tensor], into: Tensor | None) -> Tensor:
    """Add in order, in memory of the sum's own."""
    if len(row) == 1:
        return row[0].detach().clone() if into is None else into.copy_(row[0])
    total = row[0]
    for grad in row[1:]:
        # Torch adds a sparse tensor to a dense one, not the other way.
        if grad.layout is torch.strided and total.layout is not torch.strided:
            total, grad = grad, total
        total = torch.add(total, grad, out=into)
    return total


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
