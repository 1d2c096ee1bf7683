"""Messages become bytes and come back: the same fields, under the same names, however deep."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from raydp_parallel.devices import ambient_state
from raydp_parallel.devices.ranges import TensorSpec
from raydp_parallel.transport import codec
from raydp_parallel.transport.group_messages import HostStore
from raydp_parallel.transport.links import Attachments, InlineLink
from raydp_parallel.transport.message_bytes import pack, unpack
from raydp_parallel.transport.messages import (
    BackwardRequest,
    Blob,
    Failure,
    Forget,
    ForwardRequest,
    Parcel,
    Reply,
    StateUpdate,
    WriteBack,
)

BLOB = Blob((0,), (0,), (8,), b"12345678")


def parcel(value: Any) -> Parcel:
    """A value's."""
    return codec.encode(value, Attachments(InlineLink()), "value", requires_grad=True)[0]


SPARSE = torch.eye(3).to_sparse()
PARCELS = [
    parcel((torch.ones(2, 3, requires_grad=True), None, torch.zeros(1))),
    parcel({"mask": SPARSE, "rest": [1, "two"]}),
    parcel(()),
]
UPDATE = StateUpdate(
    1, 7, (3, 4), edits=((0, "training", True),), blobs=(Blob((1,), (0,), (8,), b"8bytes--"),)
)


def forward(inputs: Parcel, **changes: Any) -> ForwardRequest:
    """A forward's message."""
    plain = ForwardRequest(
        1,
        None,
        5,
        0,
        "in replica 0",
        inputs,
        ambient_state.capture(),
        1 << 62,
        1,
        True,
        (),
        False,
        False,
        (),
        None,
    )
    return plain._replace(**changes)


def backward(grads: Parcel) -> BackwardRequest:
    """A backward's."""
    return BackwardRequest(
        1,
        5,
        ((5, (0,)),),
        grads,
        (True, False),
        True,
        False,
        None,
        (),
        True,
        1,
        ambient_state.capture(),
        Forget((1, 2), ()),
    )


def reply(
    value: Parcel | None, written: WriteBack | None = None, failure: Failure | None = None
) -> Reply:
    """An answer."""
    return Reply(value, written, (), failure, 0.25, 3, 64, (), (1.0, 2.0, 3.0, 4.0, 5.0))


MESSAGES = [
    *map(forward, PARCELS),
    forward(PARCELS[0], update=UPDATE, forget=Forget((9,), (2,))),
    *map(backward, PARCELS),
    *map(reply, PARCELS),
    reply(PARCELS[0], WriteBack(7, ((0, True), (1, False)), BLOB, (1,), PARCELS[1])),
    reply(None, None, Failure(None, "KeyError", "text", None, None, False)),
    None,
    Forget((1,), (2,)),
    HostStore("group"),
    (1, 2),
]


def kinds(value: Any) -> Any:
    """The types of a value, and of all that it holds."""
    return (type(value), *map(kinds, value)) if isinstance(value, (tuple, list)) else type(value)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: Any) -> None:
    """Names too: a plain tuple is equal to one with names, and of no use to code that reads a
    field.
    """
    again = unpack(pack(message))
    assert again == message
    assert kinds(again) == kinds(message)


def test_specs_have_no_names_on_the_way() -> None:
    """Which is what it is for: a hundred tensors are a hundred specs, and each name is asked for in
    Python.
    """
    many = parcel(tuple(torch.zeros(2) for _ in range(100)))
    plain, named = pack(reply(many)), pickle.dumps(reply(many), protocol=pickle.HIGHEST_PROTOCOL)
    assert b"TensorSpec" not in plain
    assert b"TensorSpec" in named
    assert len(plain) < len(named)
    assert all(type(spec) is TensorSpec for spec in unpack(plain).value.specs)
