"""How messages become bytes.

Names cost: pickle asks each named tuple for its fields, in Python, and looks its type up by name at the other end. What
every message has goes as plain tuples, in a third of the time; with a hundred tensors that is a hundred specs. What is
rare goes as it is.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from raydp_parallel.context import CallContext
from raydp_parallel.messages import (
    BackwardRequest,
    ForwardRequest,
    Parcel,
    Reply,
    StateUpdate,
    TensorSpec,
    WriteBack,
)


def _plain(parcel: Parcel) -> Any:
    return parcel.skeleton, [spec if spec.parts else tuple(spec) for spec in parcel.specs], parcel.packet


def _parcel(found: Any) -> Parcel:
    skeleton, specs, packet = found
    return Parcel(skeleton, tuple([TensorSpec(*spec) for spec in specs]), packet)


def _plain_writes(written: WriteBack) -> Any:
    return written.slots, _plain(written.tensors)


def _writes(found: Any) -> WriteBack:
    return WriteBack(found[0], _parcel(found[1]))


_Part = tuple[int, Callable[[Any], Any], Callable[[Any], Any]]
"""A field of a message, and how to take it out of its names and put it back."""


def _parts(kind: Any, **ways: tuple[Callable[[Any], Any], Callable[[Any], Any]]) -> tuple[Any, tuple[_Part, ...]]:
    return kind, tuple((kind._fields.index(field), *way) for field, way in ways.items())


_TENSORS = _plain, _parcel
_STATE = tuple, CallContext._make

_KINDS = (
    _parts(ForwardRequest, update=(tuple, StateUpdate._make), inputs=_TENSORS, context=_STATE),
    _parts(BackwardRequest, grads=_TENSORS, context=_STATE),
    _parts(Reply, value=_TENSORS, written=(_plain_writes, _writes)),
)
_NUMBERS = {kind: number for number, (kind, _) in enumerate(_KINDS)}


def pack(message: Any) -> bytes:
    """A message as bytes."""
    number = _NUMBERS.get(type(message))
    if number is None:
        return pickle.dumps((None, message), protocol=pickle.HIGHEST_PROTOCOL)
    fields = [*message]
    for at, plain, _ in _KINDS[number][1]:
        if fields[at] is not None:
            fields[at] = plain(fields[at])
    return pickle.dumps((number, fields), protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """The message that `pack` made bytes of."""
    number, fields = pickle.loads(data)
    if number is None:
        return fields
    kind, parts = _KINDS[number]
    for at, _, named in parts:
        if fields[at] is not None:
            fields[at] = named(fields[at])
    return kind(*fields)
