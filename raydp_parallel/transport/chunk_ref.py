"""`ChunkRef`: an argument of one chunk that does not pass through the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class ChunkRef:
    """Stands among a chunk's arguments for an object in Ray's object store.

    Args:
        ref: The reference; in a message the object's number in `ForwardRequest.stored`.
        prepare: What makes the argument of the object; None for the object itself.
    """

    __slots__ = ("prepare", "ref")

    def __init__(self, ref: Any, prepare: Callable[[Any], Any] | None) -> None:
        self.ref = ref
        self.prepare = prepare

    def __reduce__(self) -> Any:
        # Pickling a reference keeps its object for ever; a message does not pickle it.
        raise TypeError("a reference to an object of Ray's can only be an argument of a call")


class StoredObject(NamedTuple):
    """An object in Ray's object store that the receiver of a message gets by itself.

    Attributes:
        ref: The reference.
    """

    ref: Any
