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

    def take(self, like: Tensor) -> Tensor:
        """Return memory that nobody looks at, or new memory."""
        size = like.numel() * like.element_size()
        if size < _KEPT:
            return torch.empty_like(like)
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
    plain: list[int] = []
    near: list[int] = []
    for i, (row, leaf) in enumerate(zip(rows, leaves, strict=True)):
        device, kind = leaf.device, plain if leaf.device.type == "cpu" else near
        for g in row:
            odd = type(g) is not Tensor or g.layout is not torch.strided or g.is_nested
            if odd or g.device != device:
                sums[i] = _sum([grad.to(device) for grad in row])
                break
        else:
            if row:
                kind.append(i)
    if near:  # in one run of memory, of which each sum is a part
        into = copies([rows[i][0] for i in near])
        _add_rest(into, [rows[i] for i in near])
        for i, tensor in zip(near, into, strict=True):
            sums[i] = tensor
    if plain:
        into = []
        used = 0
        for i in plain:
            like = rows[i][0]
            if kinds[i] == "parameter":
                used += like.numel() * like.element_size()
                into.append(_recycled.take(like))
            else:
                into.append(torch.empty_like(like))
        _recycled.trim(used)
        torch._foreach_copy_(into, [rows[i][0] for i in plain])
        _add_rest(into, [rows[i] for i in plain])
        for i, tensor in zip(plain, into, strict=True):
            sums[i] = tensor
    return sums


def _add_rest(into: list[Tensor], rows: Sequence[list[Tensor]]) -> None:
    """Add to the first tensors of rows the others, in order."""
    for n in range(1, max(map(len, rows))):
        having = [k for k, row in enumerate(rows) if len(row) > n]
        torch._foreach_add_([into[k] for k in having], [rows[k][n] for k in having])


def _sum(row: list[Tensor]) -> Tensor:
    total = row[0].detach().clone()
    for grad in row[1:]:
        # Torch adds a sparse tensor to a dense one, not the other way.
        dense = grad.layout is torch.strided and total.layout is not torch.strided
        total = grad + total if dense else total + grad
    return total


def settle(
    sums: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
    kinds: Sequence[str],
    needed: Sequence[bool],
    whole: Sequence[bool],
    unused: UnusedGrads,
) -> list[Tensor | None]:
    """Give unused parameters what upstream gives them (row B3).

    Args:
        sums: The sums.
        leaves: The tensors that they belong to.
        kinds: The kind of each. A parameter gets zeros if another parameter has a gradient, and a
            buffer if another buffer has one.
        needed: Which gradients were asked for.
        whole: Whether every chunk contributed to a leaf; a sparse sum is dense otherwise, as zeros
            are (row B5).
        unused: What unused parameters get.
    """
    filled = set()
    for one, kind in zip(sums, kinds, strict=True):
        if one is not None and kind in ("parameter", "buffer"):
            filled.add(kind)
    settled: list[Tensor | None] = []
    for found, leaf, kind, need, complete in zip(sums, leaves, kinds, needed, whole, strict=True):
        if found is None:
            zeros = need and unused == "zeros" and kind in filled
            settled.append(torch.zeros_like(leaf) if zeros else None)
            continue
        sparse = found.layout is not torch.strided and leaf.layout is torch.strided
        if sparse and not complete and unused != "none":
            found = found.to_dense()
        settled.append(found if found.device == leaf.device else found.to(leaf.device))
    return settled
