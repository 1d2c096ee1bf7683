"""Links: how bytes are sent between the driver and a replica.

A link turns memory ranges into a packet (``send``) that is part of a call to the other process, and
a packet back into memory that can be read (``open``). Between processes of one machine no bytes
have to be sent: see `shared`.
"""

from __future__ import annotations

from typing import Any

from raydp_parallel.devices.buffers import Arena
from raydp_parallel.transport.links.link import (
    INLINE_LIMIT,
    Attachments,
    BySize,
    InlineLink,
    Link,
    MappedBuffer,
    ReadAttachments,
    ReservedMemory,
)
from raydp_parallel.transport.links.object_store import Delivered, Deliveries, ObjectStoreLink
from raydp_parallel.transport.links.shared import (
    Exposed,
    ForeignMemory,
    Mappings,
    PassedOn,
    SharedLink,
)

__all__ = [
    "INLINE_LIMIT",
    "SHARE_LIMIT",
    "BySize",
    "Delivered",
    "Deliveries",
    "Exposed",
    "ForeignMemory",
    "InlineLink",
    "Link",
    "Attachments",
    "Mappings",
    "ObjectStoreLink",
    "PassedOn",
    "ReadAttachments",
    "ReservedMemory",
    "SharedLink",
    "MappedBuffer",
    "link_for",
    "shared_link",
]

SHARE_LIMIT = 32 * 1024 * 1024
"""Bytes up to which each replica gets its own copy over its direct connection. Larger packets are
put into the object store, once for all replicas, which takes at least 5 ms."""

_NAMES = ("auto", "shared", "inline", "object_store", "collective")
"""The values that `Options.link` may have."""


def link_for(name: str, put: Any = None, get: Any = None) -> Link:
    """The link that `Options.link` names, for one side. The driver passes its ``put`` and ``get``.

    Shared memory is used once both sides have agreed to it; until then, and for calls that are made
    through Ray, bytes are copied.
    """
    if name not in _NAMES:
        raise ValueError(f"link {name!r}: expected one of {', '.join(_NAMES)}")
    if name == "inline":
        return InlineLink()
    arrays = ObjectStoreLink()
    store = arrays if put is None else ObjectStoreLink(put, get)
    if name == "object_store":
        return store
    return BySize(InlineLink(), BySize(arrays, store, SHARE_LIMIT))


def shared_link(arena: Arena, exposes: bool, always: bool, promised: int = 0) -> Link:
    """The link between processes of one machine.

    Args:
        arena: The arena of shared memory.
        exposes: Whether storages may be moved into shared memory and shown without a copy.
        always: Whether also the smallest packets go into shared memory.
        promised: Bytes of ``/dev/shm`` that are reserved for others.
    """
    shared = SharedLink(arena, exposes, always, promised)
    return shared if always else BySize(InlineLink(), shared, name=shared.name)
