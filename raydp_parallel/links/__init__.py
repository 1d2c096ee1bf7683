"""How bytes travel between the driver and a replica.

A link turns runs of memory into a packet (``send``) that rides in a call to the other process, and a packet back into
memory that can be read (``open``). A collective link will stand beside these.
"""

from __future__ import annotations

from raydp_parallel.links.base import Link, Mail, Packet, Piece, aligned
from raydp_parallel.links.by_size import BySize
from raydp_parallel.links.inline import InlineLink
from raydp_parallel.links.object_store import ObjectStoreLink
from raydp_parallel.links.shared import Arena, Descriptor, Mappings, SharedLink, Slice

__all__ = [
    "Arena",
    "BySize",
    "Descriptor",
    "InlineLink",
    "Link",
    "Mail",
    "Mappings",
    "ObjectStoreLink",
    "Packet",
    "Piece",
    "SharedLink",
    "Slice",
    "aligned",
]
