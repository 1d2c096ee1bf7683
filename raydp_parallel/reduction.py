"""Sums of the chunks' gradients, always in chunk order, so that the bits never depend on who finished first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raydp_parallel import codec, devices
from raydp_parallel.links import Mail
from raydp_parallel.messages import Parcel
from raydp_parallel.options import UnusedGrads


class Share(NamedTuple):
    """One chunk's gradients.

    Attributes:
        parcel: The parcel of a tuple: a gradient or None for each of the chunk's leaves.
        mail: Opens its packets.
        leaves: Which of the call's leaves they belong to; None for those that are to be left out.
    """

    parcel: Parcel
    mail: Mail
    leaves: Sequence[int | None]


def total(shares: Sequence[Share], device: torch.device, count: int) -> list[Tensor | None]:
    """The sum over chunks for each of ``count`` leaves, in memory of its own; None where no chunk has any."""
    sums: list[Tensor | None] = [None] * count
    for share in shares:
        present = codec.load(share.parcel, range(len(share.parcel.specs)))
        rows = [
            (leaf, row) for leaf, row in zip(share.leaves, present, strict=True) if row is not None and leaf is not None
        ]
        # A parameter that is an input too stands twice in a row.
        first = {leaf: row for leaf, row in reversed(rows) if sums[leaf] is None}
        fresh = [*first.items()]
        again = [(leaf, row) for leaf, row in rows if first.get(leaf) != row]
        _take(share, fresh, sums, device)
        _add(share, again, sums, device)
    return sums


def _take(share: Share, rows: Sequence[tuple[int, int]], sums: list[Tensor | None], device: torch.device) -> None:
    if rows:
        found = codec.unpack(share.parcel, share.mail, device, [row for _, row in rows])
        for (leaf, _), tensor in zip(rows, found, strict=True):
            sums[leaf] = tensor.requires_grad_(False)


def _add(share: Share, rows: Sequence[tuple[int, int]], sums: list[Tensor | None], device: torch.device) -> None:
    if not rows:
        return
    dense = [(leaf, row) for leaf, row in rows if _dense(sums[leaf]) and share.parcel.specs[row].layout == "strided"]
    # Each sum once: a GPU adds to all of them at the same time.
    plain = [*dict(dense).items()]
    if plain:
        if type(share.parcel.packet) is bytes:  # little: a copy takes less than a look
            added = codec.unpack(share.parcel, share.mail, device, [row for _, row in plain])
        else:
            specs = [share.parcel.specs[row] for _, row in plain]
            source = share.mail.open(share.parcel.packet)
            added = devices.windows(source, specs, [codec.DTYPES[spec.dtype] for spec in specs], device)
        into: list[Tensor] = [sums[leaf] for leaf, _ in plain]  # type: ignore[misc]  # `_dense` says that none is None
        torch._foreach_add_(into, added)
    done = {row for _, row in plain}
    for leaf, row in rows:
        if row not in done:
            (other,) = codec.unpack(share.parcel, share.mail, device, [row])
            one = sums[leaf]
            assert one is not None
            sums[leaf] = one + other.requires_grad_(False) if not _dense(other) or _dense(one) else other + one


def _dense(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.layout is torch.strided


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
        leaves: What they belong to.
        kinds: What each leaf is: only parameters, and among themselves buffers, are filled up.
        needed: Which gradients were asked for.
        whole: Whether every chunk contributed to a leaf; a sparse sum is dense otherwise, as zeros are (row B5).
        unused: What unused parameters get.
    """
    filled = {
        kind for total, kind in zip(sums, kinds, strict=True) if total is not None and kind in ("parameter", "buffer")
    }
    settled: list[Tensor | None] = []
    for found, leaf, kind, need, complete in zip(sums, leaves, kinds, needed, whole, strict=True):
        if found is None:
            zeros = need and unused == "zeros" and kind in filled
            settled.append(torch.zeros_like(leaf) if zeros else None)
        else:
            keeps = found.layout is torch.strided or complete or unused == "none" or leaf.layout is not torch.strided
            settled.append((found if keeps else found.to_dense()).to(leaf.device))
    return settled
