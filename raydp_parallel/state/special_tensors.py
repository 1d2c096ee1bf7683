"""Tensors that are no plain window on a storage. They are sent inside the structure, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from raydp_parallel.state import block_layout
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, InlineLink
from raydp_parallel.transport.messages import Parcel


class Specials:
    """The special ones of some tensors, by slot, as they are now.

    Args:
        found: All tensors.

    Attributes:
        tensors: The special ones.
    """

    def __init__(self, found: Mapping[int, Tensor]) -> None:
        self.tensors = {
            slot: t for slot, t in sorted(found.items()) if not block_layout.is_plain(t)
        }
        self._look, self._parcel = _look(self.tensors.values()), _encode(self.tensors.values())

    @property
    def message(self) -> tuple[tuple[int, ...], Parcel] | None:
        """What replicas need to build them; None if there are none."""
        return (tuple(self.tensors), self._parcel) if self._parcel else None

    def look_alike(self) -> bool:
        """Whether they are unchanged, as far as versions and flags show."""
        return not self.tensors or _look(self.tensors.values()) == self._look

    def are_alike(self) -> bool:
        """Whether their contents are unchanged."""
        return not self.tensors or _encode(self.tensors.values()) == self._parcel


def _look(tensors: Iterable[Tensor]) -> list[Any]:
    return [(t._version, t.requires_grad) for t in tensors]


def _encode(tensors: Iterable[Tensor]) -> Parcel | None:
    row = tuple(tensors)
    if not row:
        return None
    return codec.encode(row, Attachments(InlineLink()), "module", requires_grad=True)[0]
