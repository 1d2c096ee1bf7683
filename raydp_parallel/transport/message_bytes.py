"""Messages as bytes, and what both ends of a call do with them: seal, open, and say which memory
is free again.

Named tuples are slow to pickle: pickle calls Python code for each, and looks its type up by name
when it unpickles. The fields of frequent messages are pickled as plain tuples, in a third of the
time; a message with a hundred tensors has a hundred specs. Rare messages are pickled as they are.
"""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from raydp_parallel import devices
from raydp_parallel.devices.ambient_state import CallContext
from raydp_parallel.devices.buffers import Arena, LeaseTable, SharedBuffer
from raydp_parallel.devices.ranges import SpecRow, TensorSpec
from raydp_parallel.transport.links import Attachments, ForeignMemory, Link, Mappings
from raydp_parallel.transport.messages import (
    BackwardRequest,
    Blob,
    Forget,
    ForwardRequest,
    Parcel,
    Reply,
    StateUpdate,
    WriteBack,
)


def _named(kind: Any) -> Callable[[Any], Any]:
    """A function that makes a named tuple from all its fields, without Python code."""
    return functools.partial(tuple.__new__, kind)


_new_spec, _new_parcel = _named(TensorSpec), _named(Parcel)


_load_row = functools.lru_cache(maxsize=64)(SpecRow.load)
"""Gives one object for the same bytes, so that what it has computed stays from step to step."""


def _plain(parcel: Parcel) -> Any:
    specs: Any = parcel.specs
    packed = specs.packed if isinstance(specs, SpecRow) else [*map(tuple, specs)]
    return parcel.skeleton, packed, parcel.packet


def _parcel(found: Any) -> Any:
    skeleton, specs, packet = found
    row = _load_row(specs) if type(specs) is bytes else tuple(map(_new_spec, specs))
    return _new_parcel((skeleton, row, packet))


def _plain_writes(written: WriteBack) -> Any:
    return (
        written.report,
        written.slots,
        tuple(written.blob),
        written.replaced,
        _plain(written.tensors),
    )


def _writes(found: Any) -> WriteBack:
    report, slots, blob, replaced, tensors = found
    return WriteBack(report, slots, Blob(*blob), replaced, _parcel(tensors))


_Part = tuple[int, Callable[[Any], Any], Callable[[Any], Any]]
"""A field of a message by its index, and functions from and to its named tuples."""

_Kind = tuple[Any, Callable[[Any], Any], tuple[_Part, ...]]
"""A message's type, a function that makes one, and its fields that contain named tuples."""


def _parts(kind: Any, **ways: tuple[Callable[[Any], Any], Callable[[Any], Any]]) -> _Kind:
    parts = [(kind._fields.index(field), plain, back) for field, (plain, back) in ways.items()]
    return kind, _named(kind), tuple(parts)


_TENSORS = _plain, _parcel
_CONTEXT = tuple, _named(CallContext)
_FORGET = tuple, _named(Forget)

_KINDS = (
    _parts(
        ForwardRequest,
        update=(tuple, _named(StateUpdate)),
        inputs=_TENSORS,
        played=_TENSORS,
        context=_CONTEXT,
        forget=_FORGET,
    ),
    _parts(BackwardRequest, grads=_TENSORS, context=_CONTEXT, forget=_FORGET),
    _parts(Reply, value=_TENSORS, written=(_plain_writes, _writes), gathered=_TENSORS),
)
_NUMBERS = {kind: number for number, (kind, _, _) in enumerate(_KINDS)}


def pack(message: Any) -> bytes:
    """A message as bytes."""
    number = _NUMBERS.get(type(message))
    if number is None:
        return pickle.dumps((None, message), protocol=pickle.HIGHEST_PROTOCOL)
    fields = [*message]
    for at, plain, _ in _KINDS[number][2]:
        if fields[at] is not None:
            fields[at] = plain(fields[at])
    return pickle.dumps((number, fields), protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """The message for the bytes that `pack` made."""
    number, fields = pickle.loads(data)
    if number is None:
        return fields
    _, named, parts = _KINDS[number]
    for at, _, back in parts:
        if fields[at] is not None:
            fields[at] = back(fields[at])
    return named(fields)


METHODS = {
    method: bytes([number])
    for number, method in enumerate(("forward", "backward", "forget", "group", "train"))
}
"""What stands for a method on a direct line."""


def sample(arena: Arena) -> tuple[SharedBuffer, bytes]:
    """Some shared memory to try, and what lies in it."""
    lent = arena.take(16)
    lent.array[:] = np.frombuffer(os.urandom(16), dtype=np.uint8)
    return lent, lent.array.tobytes()


def shows(found: ForeignMemory, expected: bytes) -> bool:
    """Whether another process's memory can be read, and is what it should be."""
    try:
        piece = found.piece()
    except (OSError, ValueError):
        return False
    return ctypes.string_at(piece.address, piece.size) == expected


def check_read(*parts: Any) -> None:
    """Raise the error of a part of a message that there was no memory for."""
    for part in parts:
        if isinstance(part, MemoryError):
            raise part


def give_back(mappings: Mappings) -> bytes:
    """The word which of the other's memory is no longer used, for the next message."""
    if devices.lent.kept:
        devices.lent.let_go()
    if not (mappings.ended or mappings.freed.ended):
        return b""
    return array.array("Q", itertools.chain.from_iterable(mappings.released())).tobytes()


def take_back(word: Any, ledger: LeaseTable) -> None:
    """Hear that word: bytes, or an array if there is much to tell."""
    numbers = iter(array.array("Q", bytes(word)))
    for lease, times in zip(numbers, numbers, strict=True):
        ledger.returned(lease, times)


def seal(message: Any, attachments: Attachments) -> Any:
    """A message and its packets as one return value of a Ray call: bytes alone if nothing lies
    beside them.
    """
    header = pack(message)
    return (header, *attachments.beside) if attachments.beside else header


def unseal(answer: Any, link: Link) -> tuple[Any, Attachments]:
    """The message of a return value, and the mail to open its packets with."""
    header, *beside = answer if isinstance(answer, tuple) else (answer,)
    return unpack(header), Attachments(link, beside)
