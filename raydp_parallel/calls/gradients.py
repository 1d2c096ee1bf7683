"""Sums of the chunks' gradients, always in chunk order, so that the bits never depend on which
replica finished first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_, sub
from typing import NamedTuple

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.cluster.replica_slots import ChunkAnswer
from raydp_parallel.devices.ranges import SpecRow, TensorSpec
from raydp_parallel.options import UnusedGrads
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments
from raydp_parallel.transport.messages import Parcel

_SMALL = 1 << 16
"""Bytes up to which a sum is made in new memory. New memory for larger ones comes from the system,
page by page, which is slower than adding in place.
"""


class GradientShare(NamedTuple):
    """One chunk's gradients.

    Attributes:
        parcel: The parcel of a tuple: a gradient or None for each of the chunk's leaves.
        attachments: Opens its packets.
        leaves: Which of the call's leaves they belong to; None for those that are to be left out.
    """

    parcel: Parcel
    attachments: Attachments
    leaves: Sequence[int | None]


def share(answer: ChunkAnswer, leaves: Sequence[int | None]) -> GradientShare:
    """The share of a chunk that answered with its own gradients."""
    assert answer.reply.value is not None
    return GradientShare(answer.reply.value, answer.attachments, leaves)


def total(shares: Sequence[GradientShare], device: torch.device, count: int) -> list[Tensor | None]:
    """The sum over chunks for each of ``count`` leaves, in memory of its own; None where no chunk
    has any.
    """
    sums: list[Tensor | None] = [None] * count
    found = [rows_of(share) for share in shares]
    if len(shares) > 1 and devices.is_cpu(device):
        found[:2] = _add_small(
            shares[0], found[0], other=shares[1], others=found[1], sums=sums, device=device
        )
    for share, rows in zip(shares, found, strict=True):
        # A parameter that is also an input appears twice.
        first = dict(reversed(rows))
        fresh = [(leaf, row) for leaf, row in rows if sums[leaf] is None and first[leaf] == row]
        taken = {row for _, row in fresh}
        again = [(leaf, row) for leaf, row in rows if row not in taken]
        _take(share, fresh, sums, device)
        _add(share, again, sums, device)
    return sums


def total_of_narrow(
    shares: Sequence[GradientShare], device: torch.device, leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """As `total`, for gradients that may have travelled in narrower dtypes than their leaves':
    each is widened before it is added.
    """
    sums: list[Tensor | None] = [None] * len(leaves)
    for share in shares:
        rows = rows_of(share)
        chosen = [row for _, row in rows]
        found = codec.unpack(share.parcel, share.attachments, device, chosen)
        for (leaf, _), grad in zip(rows, found, strict=True):
            wide = grad.requires_grad_(False).to(leaves[leaf].dtype)
            one = sums[leaf]
            sums[leaf] = wide if one is None else _plus(one, wide)
    return sums


def rows_of(share: GradientShare) -> list[tuple[int, int]]:
    """The leaves that a share has gradients for, each with its row in the parcel."""
    present = codec.load(share.parcel, range(len(share.parcel.specs)))
    return [
        (leaf, row)
        for leaf, row in zip(share.leaves, present, strict=True)
        if row is not None and leaf is not None
    ]


def _add_small(
    one: GradientShare,
    rows: list[tuple[int, int]],
    other: GradientShare,
    others: list[tuple[int, int]],
    sums: list[Tensor | None],
    device: torch.device,
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Add the small gradients of the first two shares, all in one operation; returns the rows that
    are left.
    """
    mine, theirs = dict(rows), dict(others)
    if len(mine) != len(rows) or len(theirs) != len(others):
        return rows, others
    specs, other_specs = one.parcel.specs, other.parcel.specs
    plan = specs.plan if specs is other_specs and isinstance(specs, SpecRow) else None
    if plan is not None and mine == theirs:
        sizes = [*map(sub, plan.ends, plan.starts)]
        leaves = [leaf for leaf, row in rows if sizes[row] <= _SMALL]
    else:
        leaves = [
            leaf
            for leaf, row in rows
            if leaf in theirs and _small(specs[row], other_specs[theirs[leaf]])
        ]
    if leaves:
        added = torch._foreach_add(
            _read(one, [mine[leaf] for leaf in leaves], device),
            _read(other, [theirs[leaf] for leaf in leaves], device),
        )
        for leaf, tensor in zip(leaves, added, strict=True):
            sums[leaf] = tensor
            del mine[leaf], theirs[leaf]
    return [*mine.items()], [*theirs.items()]


def _small(one: TensorSpec, other: TensorSpec) -> bool:
    """Whether two gradients of a leaf are small, plain, and alike."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and one.stride == other.stride
        and one.layout == other.layout == "strided"
        and one.cls is None
        and other.cls is None
        and math.prod(one.shape) * codec.DTYPES[one.dtype].itemsize <= _SMALL
    )


def _read(share: GradientShare, rows: Sequence[int], device: torch.device) -> list[Tensor]:
    """Some gradients of a share, where they lie; copies of a few that lie in the message, which
    cost less than a window on it.
    """
    specs, packet = share.parcel.specs, share.parcel.packet
    specs = specs.chosen(rows) if isinstance(specs, SpecRow) else tuple([specs[r] for r in rows])
    if isinstance(specs, SpecRow) and specs.plan is not None:
        return devices.row_windows(share.attachments.open(packet), specs.plan, device)
    if type(packet) is bytes:
        return codec.unpack(share.parcel, share.attachments, device, rows)
    dtypes = [codec.DTYPES[spec.dtype] for spec in specs]
    return devices.windows(share.attachments.open(packet), specs, dtypes, device)


def _take(
    share: GradientShare,
    rows: Sequence[tuple[int, int]],
    sums: list[Tensor | None],
    device: torch.device,
) -> None:
    if rows:
        found = codec.unpack(share.parcel, share.attachments, device, [row for _, row in rows])
        for (leaf, _), tensor in zip(rows, found, strict=True):
            sums[leaf] = tensor.requires_grad_(False)


def _add(
    share: GradientShare,
    rows: Sequence[tuple[int, int]],
    sums: list[Tensor | None],
    device: torch.device,
) -> None:
    if not rows:
        return
    dense = [
        (leaf, row)
        for leaf, row in rows
        if _dense(sums[leaf]) and share.parcel.specs[row].layout == "strided"
    ]
    # Each sum only once: a GPU adds to all of them at the same time.
    plain = [*dict(dense).items()]
    if plain:
        added = _read(share, [row for _, row in plain], device)
        into: list[Tensor] = [sums[leaf] for leaf, _ in plain]  # type: ignore[misc]  # `_dense` says that none is None
        torch._foreach_add_(into, added)
    done = {row for _, row in plain}
    for leaf, row in rows:
        if row not in done:
            (other,) = codec.unpack(share.parcel, share.attachments, device, [row])
            one = sums[leaf]
            assert one is not None
            sums[leaf] = _plus(one, other.requires_grad_(False))


def _plus(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients. Torch adds a sparse tensor to a dense one, not the other way."""
    return other + one if _dense(other) and not _dense(one) else one + other


def _dense(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.layout is torch.strided


_layout, _device = attrgetter("layout"), attrgetter("device")


def _settled(sums: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> bool:
    """Whether every leaf has a gradient, dense and on its device: nothing is left to do, which is
    found without Python code for each.
    """
    if any(map(is_, sums, repeat(None))) or {*map(_layout, sums)} != {torch.strided}:
        return False
    return len({*map(_device, sums), *map(_device, leaves)}) == 1


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
        kinds: The kind of each leaf. A parameter gets zeros if another parameter has a gradient,
            and a buffer if another buffer has one.
        needed: Which gradients were asked for.
        whole: Whether every chunk contributed to a leaf; a sparse sum is dense otherwise, as zeros
            are (row B5).
        unused: What unused parameters get.
    """
    if _settled(sums, leaves):
        return [*sums]
    filled = {
        kind
        for total, kind in zip(sums, kinds, strict=True)
        if total is not None and kind in ("parameter", "buffer")
    }
    settled: list[Tensor | None] = []
    for found, leaf, kind, need, complete in zip(sums, leaves, kinds, needed, whole, strict=True):
        if found is None:
            zeros = need and unused == "zeros" and kind in filled
            settled.append(torch.zeros_like(leaf) if zeros else None)
        else:
            sparse = found.layout is not torch.strided and leaf.layout is torch.strided
            if sparse and not complete and unused != "none":
                found = found.to_dense()
            settled.append(found.to(leaf.device))
    return settled
