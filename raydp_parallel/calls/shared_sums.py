"""Gradients that stay where the replicas of this machine left them, for their optimizers.

Where the driver would sum gradients only to send the sums back, it says where each chunk's lie, and
each replica adds them up (`replica/kept_sums.py`). It has that memory mapped itself, so a death
loses none, and whatever uses ``.grad`` in the driver gets the sum that the driver makes then.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raydp_parallel.calls import gradients
from raydp_parallel.calls.gradients import GradientShare
from raydp_parallel.calls.group_reduction import ReductionPart
from raydp_parallel.calls.remote_gradients import (
    GradientSum,
    RemoteGradient,
    SharedGradients,
    Term,
)
from raydp_parallel.cluster.replica_slots import RemoteGraph
from raydp_parallel.devices.ranges import TensorSpec
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import ForeignMemory, PassedOn, ReadAttachments
from raydp_parallel.transport.messages import SumRow


class SharedShares(NamedTuple):
    """The gradients of one backward.

    Attributes:
        terms: What stands for the gradients that stay, by the call's leaves.
        shares: What the driver sums.
        counts: For each leaf that stays, how many chunks have a gradient of it.
    """

    terms: dict[int, Term]
    shares: list[GradientShare]
    counts: dict[int, int]


_MOST = 4
"""Backwards of which every chunk's gradients stay in shared memory, where programs accumulate."""


def wanted(parts: Sequence[ReductionPart]) -> bool:
    """Whether gradients of a model's leaves are to stay where these chunks' replicas leave them."""
    first = parts[0]
    training = first.tracker.training
    return (
        training is not None
        and not _many(first.tracker.owned.values())
        and first.gradient_dtype is None
        and all(part.tracker is first.tracker and part.own == first.own for part in parts)
        and training.reads()
    )


def _many(parameters: Iterable[Tensor]) -> bool:
    """Whether the gradients of so many backwards lie in shared memory that the next are added up in
    this process.
    """
    grads = [parameter.grad for parameter in parameters]
    return any(type(g) is RemoteGradient and g.state.count >= _MOST for g in grads)


def keep(
    parts: Sequence[ReductionPart],
    shares: Sequence[GradientShare],
    leaves: Sequence[Tensor],
) -> SharedShares | None:
    """Leave the gradients where they are; None if they do not lie where all replicas can read.

    Args:
        parts: The chunks.
        shares: Each chunk's gradients.
        leaves: The call's leaves.
    """
    training = parts[0].tracker.training
    packets = _passed_on(shares)
    if training is None or packets is None:
        return None
    trained = {id(p) for p in parts[0].tracker.owned.values()}
    found: dict[int, list[tuple[int, TensorSpec]]] = {}
    twice: set[int] = set()
    for chunk, one in enumerate(shares):
        present = gradients.rows_of(one)
        count = parts[chunk].own
        own = {*parts[chunk].leaves[:count]}
        twice.update(leaf for leaf in parts[chunk].leaves[count:] if leaf in own)
        for leaf, row in present:
            if leaf in own and id(leaves[leaf]) in trained:
                found.setdefault(leaf, []).append((chunk, one.parcel.specs[row]))
    rows: dict[int, SumRow] = {}
    for leaf, places in found.items():
        alike = _row(leaves[leaf], places)
        if alike is not None and leaf not in twice:
            rows[leaf] = alike
    if not rows:
        return None
    kept = [*rows]
    layout = _layout(tuple(rows.values()))
    sums = GradientSum(
        RemoteGraph().key,
        training.readers(),
        functools.partial(_total, shares, kept, leaves[kept[0]].device, len(leaves)),
        SharedGradients(layout, packets),
    )
    left = [
        one._replace(leaves=[None if leaf in rows else leaf for leaf in one.leaves])
        for one in shares
    ]
    counts = {leaf: len(row.places) for leaf, row in rows.items()}
    return SharedShares({leaf: Term(sums, at) for at, leaf in enumerate(kept)}, left, counts)


def _passed_on(shares: Sequence[GradientShare]) -> list[PassedOn] | None:
    """What lets other replicas read each chunk's gradients; None if one lies elsewhere, or its
    owner has just died.
    """
    found = []
    for one in shares:
        packet = one.attachments.find(one.parcel.packet)
        if not isinstance(packet, ForeignMemory) or packet.on_device:
            return None
        try:
            found.append(PassedOn(packet))
        except OSError:
            return None
    return found


def _row(leaf: Tensor, places: Sequence[tuple[int, TensorSpec]]) -> SumRow | None:
    """Where a gradient's summands lie; None if they are not plain, or not alike."""
    first = places[0][1]
    alike = all(
        spec.shape == first.shape
        and spec.stride == first.stride
        and spec.dtype == first.dtype
        and spec.layout == "strided"
        and spec.cls is None
        for _, spec in places
    )
    dtype = codec.DTYPES[first.dtype]
    if not alike or first.shape != tuple(leaf.shape) or dtype != leaf.dtype or not leaf.numel():
        return None
    spots = tuple([(chunk, spec.offset) for chunk, spec in places])
    return SumRow(first.dtype, tuple(first.shape), tuple(first.stride), leaf.numel(), spots)


@functools.lru_cache(maxsize=16)
def _layout(rows: tuple[SumRow, ...]) -> bytes:
    """The rows as bytes, the same object in each step."""
    return pickle.dumps([tuple(row) for row in rows], protocol=pickle.HIGHEST_PROTOCOL)


def _total(
    shares: Sequence[GradientShare],
    kept: Sequence[int],
    device: torch.device,
    count: int,
    _: GradientSum,
) -> list[Tensor]:
    """The sums, made in the driver."""
    read = [
        one._replace(attachments=ReadAttachments(one.attachments.link, one.attachments.beside))
        for one in shares
    ]
    sums = gradients.total(read, device, count)
    return [total for leaf in kept if (total := sums[leaf]) is not None]
