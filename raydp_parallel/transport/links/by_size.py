"""The default link: each packet is sent by the link that is fastest for its size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raydp_parallel.devices.buffers import Arena
from raydp_parallel.devices.ranges import Attachment, MemoryRange
from raydp_parallel.transport.links.inline import InlineLink
from raydp_parallel.transport.links.link import Link, MappedBuffer, ReservedMemory
from raydp_parallel.transport.links.object_store import ObjectStoreLink
from raydp_parallel.transport.links.shared import SharedLink

INLINE_LIMIT = 64 * 1024
"""Bytes up to which a packet lies in the call. Ray moves arguments over 100 KB through its object
store, so that a call of 120 KB takes four times as long as one of 80 KB (measured), and a call
holds more than one packet."""

SHARE_LIMIT = 32 * 1024 * 1024
"""Bytes up to which each replica gets its own copy over its direct connection. Larger packets are
put into the object store, once for all replicas, which takes at least 5 ms."""


class BySize(Link):
    """Small packets by one link, large ones by another.

    Attributes:
        name: The name of the large packets' link.
    """

    def __init__(
        self, small: Link, large: Link, limit: int = INLINE_LIMIT, name: str = "auto"
    ) -> None:
        self.name = name
        self._small = small
        self._large = large
        self._limit = limit
        self.inline = min(limit, small.inline)

    @property
    def exposes(self) -> bool:  # type: ignore[override]  # a constant in links that never do
        """Whether the large packets' link exposes storages."""
        return self._large.exposes

    def send(self, pieces: Sequence[MemoryRange], offsets: Sequence[int], size: int) -> Attachment:
        return (self._small if size <= self._limit else self._large).send(pieces, offsets, size)

    def room(self, size: int) -> ReservedMemory | None:
        return (self._small if size <= self._limit else self._large).room(size)

    def open(self, packet: Attachment) -> MemoryRange:
        return (self._small if isinstance(packet, bytes) else self._large).open(packet)

    def take(self, packet: Attachment) -> MemoryRange | None:
        return None if isinstance(packet, bytes) else self._large.take(packet)

    def show(self, packet: Attachment, offset: int, size: int) -> MappedBuffer | None:
        return None if isinstance(packet, bytes) else self._large.show(packet, offset, size)

    def expose(
        self, storage: Any, known: Callable[[], int], often: bool = False
    ) -> Attachment | None:
        return self._large.expose(storage, known, often)

    def withdraw(self) -> None:
        self._large.withdraw()

    def close(self) -> None:
        self._large.close()
        self._small.close()


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
