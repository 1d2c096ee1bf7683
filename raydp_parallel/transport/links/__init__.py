"""Links: how bytes are sent between the driver and a replica.

A link turns memory ranges into a packet (``send``) that is part of a call to the other process, and
a packet back into memory that can be read (``open``). Between processes of one machine no bytes
have to be sent: see `shared`.
"""

from __future__ import annotations

from raydp_parallel.transport.links.by_size import (
    INLINE_LIMIT,
    SHARE_LIMIT,
    BySize,
    link_for,
    shared_link,
)
from raydp_parallel.transport.links.exposed import Exposed, PassedOn
from raydp_parallel.transport.links.inline import InlineLink
from raydp_parallel.transport.links.link import (
    Attachments,
    Link,
    MappedBuffer,
    ReadAttachments,
    ReservedMemory,
)
from raydp_parallel.transport.links.mapped import ForeignMemory, Mappings
from raydp_parallel.transport.links.object_store import Delivered, Deliveries, ObjectStoreLink
from raydp_parallel.transport.links.shared import SharedLink

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
