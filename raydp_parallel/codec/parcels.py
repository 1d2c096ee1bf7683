"""Parcels: a value's skeleton, and its tensors' bytes beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.codec.tensors import alike, read_small, rebuild, write, write_small
from raydp_parallel.codec.values import load, take_apart
from raydp_parallel.links import GIVEN, Found, Mail, Packet, Piece
from raydp_parallel.messages import Parcel, Site, TensorSpec


class Plot(NamedTuple):
    """Where the tensors of an answer are to lie, if they are what is expected.

    Attributes:
        memory: The memory.
        specs: What is expected, and where each is to lie in it.
    """

    memory: Piece
    specs: tuple[TensorSpec, ...]


def plot(site: Site | None, mail: Mail) -> Plot | None:
    """Where the sender of a message wants its answer, None where this process cannot reach that."""
    packet = mail.find(site.packet) if site is not None else None
    if site is None or not isinstance(packet, Found) or packet.on_device:
        return None
    return Plot(packet.piece(), site.specs)


def encode(
    value: Any, mail: Mail, root: str, requires_grad: bool = False, plot: Plot | None = None
) -> tuple[Parcel, list[Tensor]]:
    """Make a parcel of ``value``; its tensors' bytes go into ``mail``.

    Args:
        value: Any picklable value, with tensors anywhere in it.
        mail: Where the bytes go.
        root: What to call ``value`` in an error about something inside it.
        requires_grad: Whether the other side gets tensors that require a gradient as such.
        plot: Where the bytes are wanted.

    Returns:
        The parcel, and the tensors in the order of its specs.
    """
    skeleton, tensors = take_apart(value, root)
    small = write_small(tensors, mail, requires_grad) if plot is None else None
    if small is not None:
        return Parcel(skeleton, *small), tensors
    pieces: list[Piece] = []
    offsets: list[int] = []
    specs = []
    end = 0
    for tensor in tensors:
        spec, end = write(tensor, pieces, offsets, end)
        specs.append(spec._replace(requires_grad=True) if requires_grad and tensor.requires_grad else spec)
    if plot is not None and alike(specs, plot.specs):
        specs = [spec._replace(offset=place.offset) for spec, place in zip(specs, plot.specs, strict=True)]
        packet = mail.lay(plot.memory, pieces, [spec.offset for spec in specs])
    else:
        packet = mail.send(pieces, offsets, end) if pieces else b""
    return Parcel(skeleton, tuple(specs), packet), tensors


def encode_again(parcel: Parcel, tensors: Sequence[Tensor], mail: Mail) -> Parcel:
    """The same parcel for another message, given its tensors, which are as they were."""
    pieces: list[Piece] = []
    offsets: list[int] = []
    end = 0
    for tensor in tensors:
        _, end = write(tensor, pieces, offsets, end)
    return parcel._replace(packet=mail.send(pieces, offsets, end) if pieces else b"")


def row(value: tuple[Tensor | None, ...], specs: Sequence[TensorSpec], packet: Packet) -> Parcel:
    """The parcel of a row whose bytes lie in a packet already."""
    return Parcel(take_apart(value, "")[0], tuple(specs), packet)


def tensors_in(value: Any, root: str) -> list[Tensor]:
    """The tensors that `encode` would find, in its order."""
    return take_apart(value, root)[1]


def decode(parcel: Parcel, mail: Mail, device: torch.device) -> tuple[Any, list[Tensor]]:
    """Rebuild a parcel's value on ``device``, in memory that is the receiver's to write to.

    Returns:
        The value, and its tensors in the order of the specs.
    """
    tensors = unpack(parcel, mail, device)
    return load(parcel, tensors), tensors


def unpack(parcel: Parcel, mail: Mail, device: torch.device, rows: Sequence[int] | None = None) -> list[Tensor]:
    """The tensors of a parcel alone, without the value around them; by default all, else those of some rows."""
    if rows is not None and [*rows] != [*range(len(parcel.specs))]:
        parcel = parcel._replace(specs=tuple([parcel.specs[number] for number in rows]))
    if not parcel.specs:
        return []
    here = devices.is_cpu(device)
    if here and type(parcel.packet) is bytes and (small := read_small(parcel)) is not None:
        return small
    if here and mail.given is not None and parcel.packet == GIVEN:
        tensors = mail.given.read(parcel.specs)
    else:
        own = mail.take(parcel.packet) if here else None
        read = devices.in_place(own) if own is not None else devices.reader(mail.open(parcel.packet), device)
        tensors = [rebuild(spec, read, device) for spec in parcel.specs]
    for tensor, spec in zip(tensors, parcel.specs, strict=True):
        if spec.requires_grad:
            tensor.requires_grad_()
    return tensors
