"""How messages become bytes.

Names cost: pickle asks each named tuple for its fields, in Python, and looks its type up by name at
the other end. What every message has goes as plain tuples, in a third of the time; with a hundred
tensors that is a hundred specs. What is rare goes as it is.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

from raydp_parallel.devices.ambient_state import CallContext
from raydp_parallel.devices.specs import TensorSpec
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
    """What makes a named tuple of all its fields, and nothing of it in Python."""
    return functools.partial(tuple.__new__, kind)


_new_spec, _new_parcel = _named(TensorSpec), _named(Parcel)


def _plain(parcel: Parcel) -> Any:
    return parcel.skeleton, [*map(tuple, parcel.specs)], parcel.packet


def _parcel(found: Any) -> Any:
    skeleton, specs, packet = found
    return _new_parcel((skeleton, tuple(map(_new_spec, specs)), packet))


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
"""A field of a message, and how to take it out of its names and put it back."""

_Kind = tuple[Any, Callable[[Any], Any], tuple[_Part, ...]]
"""A message's type, what makes one, and those of its fields that have names of their own."""


def _parts(kind: Any, **ways: tuple[Callable[[Any], Any], Callable[[Any], Any]]) -> _Kind:
    return (
        kind,
        _named(kind),
        tuple((kind._fields.index(field), *way) for field, way in ways.items()),
    )


_TENSORS = _plain, _parcel
_CONTEXT = tuple, _named(CallContext)
_FORGET = tuple, _named(Forget)

_KINDS = (
    _parts(
        ForwardRequest,
        update=(tuple, _named(StateUpdate)),
        inputs=_TENSORS,
        context=_CONTEXT,
        forget=_FORGET,
    ),
    _parts(BackwardRequest, grads=_TENSORS, context=_CONTEXT, forget=_FORGET),
    _parts(Reply, value=_TENSORS, written=(_plain_writes, _writes)),
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
    """The message that `pack` made bytes of."""
    number, fields = pickle.loads(data)
    if number is None:
        return fields
    _, named, parts = _KINDS[number]
    for at, _, back in parts:
        if fields[at] is not None:
            fields[at] = back(fields[at])
    return named(fields)
