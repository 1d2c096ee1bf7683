"""Parcels: a value's skeleton, and its tensors' bytes beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import Attachment, MemoryRange, SpecRow, TensorSpec
from raydp_parallel.transport.codec.tensor_bytes import (
    read_small,
    rebuild,
    write,
    write_row,
    write_small,
)
from raydp_parallel.transport.codec.values import load, take_apart
from raydp_parallel.transport.links.link import Attachments
from raydp_parallel.transport.messages import Parcel


def encode(
    value: Any,
    attachments: Attachments,
    root: str,
    requires_grad: bool = False,
    refs: dict[Any, int] | None = None,
) -> tuple[Parcel, list[Tensor]]:
    """Make a parcel of ``value``; its tensors' bytes go into ``attachments``.

    Args:
        value: Any picklable value, with tensors anywhere in it.
        attachments: Where the bytes go.
        root: The name of ``value`` in an error about an object inside it.
        requires_grad: Whether tensors that require a gradient do so on the other side too.
        refs: Takes references to objects of Ray's, see `take_apart`; None allows none.

    Returns:
        The parcel, and the tensors in the order of its specs.
    """
    skeleton, tensors = take_apart(value, root, refs)
    small = write_small(tensors, attachments, requires_grad)
    if small is not None:
        return Parcel(skeleton, *small), tensors
    plain = write_row(tensors)
    if plain is not None:
        layout, runs = plain
        packet = attachments.send(runs, layout.offsets, layout.end)
        return Parcel(skeleton, layout.specs, packet), tensors
    pieces: list[MemoryRange] = []
    offsets: list[int] = []
    specs = []
    end = 0
    for tensor in tensors:
        spec, end = write(tensor, pieces, offsets, end)
        if requires_grad and tensor.requires_grad:
            spec = spec._replace(requires_grad=True)
        specs.append(spec)
    packet = attachments.send(pieces, offsets, end) if pieces else b""
    return Parcel(skeleton, tuple(specs), packet), tensors


def encode_again(parcel: Parcel, tensors: Sequence[Tensor], attachments: Attachments) -> Parcel:
    """The same parcel for another message, given its tensors, which have not changed."""
    pieces: list[MemoryRange] = []
    offsets: list[int] = []
    end = 0
    for tensor in tensors:
        _, end = write(tensor, pieces, offsets, end)
    return parcel._replace(packet=attachments.send(pieces, offsets, end) if pieces else b"")


def row(
    value: tuple[Tensor | None, ...], specs: Sequence[TensorSpec], packet: Attachment
) -> Parcel:
    """The parcel of a row of tensors from a packet that holds its bytes already."""
    return Parcel(take_apart(value, "")[0], tuple(specs), packet)


def tensors_in(value: Any, root: str) -> list[Tensor]:
    """The tensors that `encode` would find, in its order."""
    return take_apart(value, root)[1]


def decode(
    parcel: Parcel, attachments: Attachments, device: torch.device
) -> tuple[Any, list[Tensor]]:
    """Rebuild a parcel's value on ``device``, in memory that the receiver may write to.

    Returns:
        The value, and its tensors in the order of the specs.
    """
    tensors = unpack(parcel, attachments, device)
    return load(parcel, tensors), tensors


def unpack(
    parcel: Parcel,
    attachments: Attachments,
    device: torch.device,
    rows: Sequence[int] | None = None,
) -> list[Tensor]:
    """The tensors of a parcel without the value around them: all, or those with the numbers
    ``rows``.
    """
    if rows is not None and isinstance(parcel.specs, SpecRow):
        parcel = parcel._replace(specs=parcel.specs.chosen(rows))
    elif rows is not None:
        parcel = parcel._replace(specs=tuple([parcel.specs[number] for number in rows]))
    if not parcel.specs:
        return []
    on_cpu = devices.is_cpu(device)
    if on_cpu and type(parcel.packet) is bytes:
        small = read_small(parcel)
        if small is not None:
            return small
    own = attachments.take(parcel.packet) if on_cpu else None
    plan = parcel.specs.plan if isinstance(parcel.specs, SpecRow) else None
    if on_cpu and plan is not None:
        if own is not None:
            return devices.row_in_place(own, plan)
        return devices.row_copied(attachments.open(parcel.packet), plan)
    if own is not None:
        read = devices.in_place(own)
    else:
        read = devices.reader(attachments.open(parcel.packet), device)
    tensors = [rebuild(spec, read, device) for spec in parcel.specs]
    for tensor, spec in zip(tensors, parcel.specs, strict=True):
        if spec.requires_grad:
            tensor.requires_grad_()
    return tensors
