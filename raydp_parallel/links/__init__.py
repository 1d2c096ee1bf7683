"""How bytes travel between the driver and a replica.

A link turns runs of memory into a packet (``send``) that rides in a call to the other process, and a packet back into
memory that can be read (``open``). Between processes of one machine nothing need travel at all: see `shared`.
"""

from __future__ import annotations

from raydp_parallel.links.base import Link, Mail, Origin, Packet, Piece, Room, Window, address_of, aligned, paged
from raydp_parallel.links.by_size import INLINE_LIMIT, SHARE_LIMIT, BySize, link_for, shared_link
from raydp_parallel.links.exposed import Exposed
from raydp_parallel.links.inline import InlineLink
from raydp_parallel.links.object_store import Delivered, Deliveries, ObjectStoreLink
from raydp_parallel.links.segments import Arena, Descriptor, Ledger, Slice, new_lease, new_token
from raydp_parallel.links.shared import SharedLink
from raydp_parallel.links.windows import Found, Mappings

__all__ = [
    "INLINE_LIMIT",
    "SHARE_LIMIT",
    "Arena",
    "BySize",
    "Delivered",
    "Deliveries",
    "Descriptor",
    "Exposed",
    "Found",
    "InlineLink",
    "Ledger",
    "Link",
    "Mail",
    "Mappings",
    "ObjectStoreLink",
    "Origin",
    "Packet",
    "Piece",
    "Room",
    "SharedLink",
    "Slice",
    "Window",
    "address_of",
    "aligned",
    "link_for",
    "new_lease",
    "new_token",
    "paged",
    "shared_link",
]
