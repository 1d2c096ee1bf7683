"""A relay: contents that one replica got from the driver, and passes on to other replicas.

They are sent in segments, in the same order everywhere: small blocks together, large blocks alone
and without a copy. A replica that is in two legs passes a segment on before it waits for the next.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import MemoryRange, aligned
from raydp_parallel.transport.collective.group import Groups, wait
from raydp_parallel.transport.group_messages import Leg, Relay
from raydp_parallel.transport.links.link import Attachments
from raydp_parallel.transport.messages import Blob, PassSnapshot, StateUpdate

_SEGMENT = 4 << 20
"""The most bytes of blocks that are sent together; a larger block is sent alone."""


class _RelaySegment(NamedTuple):
    """Blocks that are sent together, by number, and their range of bytes in a buffer of all
    blocks.
    """

    blocks: Sequence[int]
    start: int
    end: int


def offsets_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The offsets of blocks in a buffer of all blocks, and the buffer's size."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += aligned(size)
    return offsets, end


def placed(update: StateUpdate) -> tuple[StateUpdate, tuple[int, ...]]:
    """An update without contents, for replicas that get them from another replica, and the sizes of
    its blocks.
    """
    blocks = tuple(block for blob in update.blobs for block in blob.blocks)
    sizes = tuple(size for blob in update.blobs for size in blob.sizes)
    offsets, _ = offsets_of(sizes)
    return update._replace(blobs=(Blob(blocks, tuple(offsets), sizes, None),)), sizes


def _segments(sizes: Sequence[int]) -> Iterator[_RelaySegment]:
    offsets, _ = offsets_of(sizes)
    blocks: list[int] = []
    for i, size in enumerate(sizes):
        if blocks and offsets[i] + size - offsets[blocks[0]] > _SEGMENT:
            yield _RelaySegment(blocks, offsets[blocks[0]], offsets[blocks[-1]] + sizes[blocks[-1]])
            blocks = []
        if size:
            blocks.append(i)
    if blocks:
        yield _RelaySegment(blocks, offsets[blocks[0]], offsets[blocks[-1]] + sizes[blocks[-1]])


def pass_on(
    relay: Relay, update: StateUpdate, attachments: Attachments, groups: Groups
) -> tuple[StateUpdate, int] | None:
    """Do this replica's part of a relay.

    Returns:
        The update with its contents, and the bytes that were passed on; None if the contents did
        not arrive.
    """
    until = time.monotonic() + relay.patience
    try:
        if relay.source:
            return update, _give(relay, update, attachments, groups, until)
        return _get(relay, update, attachments, groups, until)
    except RuntimeError:
        return None


def pass_kept(
    passing: PassSnapshot, kept: dict[int, Sequence[Tensor | None]], groups: Groups
) -> bool:
    """Pass bytes on that are kept under a key, or keep those that come; returns whether that was
    done.
    """
    until = time.monotonic() + passing.patience
    group = groups.find(passing.group)
    if group is None:
        return False
    try:
        if group.rank == passing.root:
            whole = kept[passing.key][0]
            assert whole is not None
        else:
            whole = devices.recycled((passing.size,), torch.uint8)
        wait([group.broadcast(whole, passing.root, passing.patience)], until)
    except (RuntimeError, MemoryError):
        groups.leave(passing.group)
        return False
    kept[passing.key] = (whole,)
    return True


def _give(
    relay: Relay, update: StateUpdate, attachments: Attachments, groups: Groups, until: float
) -> int:
    """Send the contents that came from the driver; returns their size in bytes."""
    pieces = []
    for blob in update.blobs:
        whole = devices.on_host(attachments.open(blob.packet))
        pieces += [
            whole.part(offset, size) for offset, size in zip(blob.offsets, blob.sizes, strict=True)
        ]
    sent = [_packed(segment, pieces) for segment in _segments(relay.sizes)]
    wait([work for tensor in sent for work in _begin(relay.legs, tensor, groups, until)], until)
    return sum(tensor.nbytes for tensor in sent)


def _packed(segment: _RelaySegment, pieces: Sequence[MemoryRange]) -> Tensor:
    """The bytes of a segment: one block without a copy, several blocks in a row."""
    if len(segment.blocks) == 1:
        return devices.view(pieces[segment.blocks[0]])
    tensor = torch.empty(segment.end - segment.start, dtype=torch.uint8, device="cpu")
    at = 0
    for block in segment.blocks:
        piece = pieces[block]
        tensor[at : at + piece.size] = devices.view(piece)
        at += aligned(piece.size)
    return tensor


def _get(
    relay: Relay, update: StateUpdate, attachments: Attachments, groups: Groups, until: float
) -> tuple[StateUpdate, int]:
    """Receive the contents from another replica, and pass them on."""
    _, size = offsets_of(relay.sizes)
    # Recycled memory: with new pages from the system it would take twice as long.
    whole = devices.recycled((size,), torch.uint8)
    parts = [whole[segment.start : segment.end] for segment in _segments(relay.sizes)]
    receiving = [_begin(relay.legs[:1], part, groups, until) for part in parts]
    sending: list[Any] = []
    for part, works in zip(parts, receiving, strict=True):
        wait(works, until)
        sending += _begin(relay.legs[1:], part, groups, until)
    wait(sending, until)
    (blob,) = update.blobs
    passed = sum(part.nbytes for part in parts) if relay.legs[1:] else 0
    blob = blob._replace(packet=attachments.place(whole.numpy()))
    return update._replace(blobs=(blob,)), passed


def _begin(legs: Sequence[Leg], tensor: Tensor, groups: Groups, until: float) -> list[Any]:
    works = []
    for leg in legs:
        group = groups.find(leg.group)
        if group is None:
            raise RuntimeError(f"this process has left group {leg.group}")
        works.append(group.broadcast(tensor, leg.root, max(0.001, until - time.monotonic())))
    return works
