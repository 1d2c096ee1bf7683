"""How messages become bytes.

Names cost: pickle asks each named tuple for its fields, in Python, and looks its type up by name at the other end. What
every message has goes as plain tuples, in a third of the time; with a hundred tensors that is a hundred specs. What is
rare goes as it is.
"""

from __future__ import annotations

import pickle
from typing import Any

from raydp_parallel.context import CallContext
from raydp_parallel.messages import BackwardRequest, ForwardRequest, Parcel, Reply, TensorSpec, WriteBack


class _Shape:
    """Where in a message lies what is taken out of its names.

    Args:
        kind: The message's type.
        parcel: The field with the tensors.
        context: The field with the caller's state, if there is one.
        written: The field with changes of state, if there is one.
    """

    def __init__(self, kind: Any, parcel: str, context: str | None = None, written: str | None = None) -> None:
        self.kind = kind
        self.parcel: int = kind._fields.index(parcel)
        self.context: int | None = None if context is None else kind._fields.index(context)
        self.written: int | None = None if written is None else kind._fields.index(written)


_SHAPES = (
    _Shape(ForwardRequest, "inputs", context="context"),
    _Shape(BackwardRequest, "grads", context="context"),
    _Shape(Reply, "value", written="written"),
)
_NUMBERS = {shape.kind: number for number, shape in enumerate(_SHAPES)}


def pack(message: Any) -> bytes:
    """A message as bytes."""
    number = _NUMBERS.get(type(message))
    if number is None:
        return pickle.dumps((None, message), protocol=pickle.HIGHEST_PROTOCOL)
    shape, fields = _SHAPES[number], [*message]
    fields[shape.parcel] = _plain(fields[shape.parcel])
    if shape.context is not None:
        fields[shape.context] = tuple(fields[shape.context])
    if shape.written is not None and fields[shape.written] is not None:
        slots, tensors = fields[shape.written]
        fields[shape.written] = slots, _plain(tensors)
    return pickle.dumps((number, fields), protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """The message that `pack` made bytes of."""
    number, fields = pickle.loads(data)
    if number is None:
        return fields
    shape = _SHAPES[number]
    fields[shape.parcel] = _parcel(fields[shape.parcel])
    if shape.context is not None:
        fields[shape.context] = CallContext(*fields[shape.context])
    if shape.written is not None and fields[shape.written] is not None:
        slots, tensors = fields[shape.written]
        fields[shape.written] = WriteBack(slots, _parcel(tensors))
    return shape.kind(*fields)


def _plain(parcel: Parcel | None) -> Any:
    if parcel is None:
        return None
    specs = [spec if spec.parts else tuple(spec) for spec in parcel.specs]
    return parcel.skeleton, specs, parcel.packet


def _parcel(found: Any) -> Any:
    return None if found is None else Parcel(found[0], tuple([TensorSpec(*spec) for spec in found[1]]), found[2])
