"""Which storages are worth to be moved into shared memory, and may be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_CALM = 8
"""A storage that has come this many revisions after the one before it is worth to be moved into
shared memory.
"""

_OFTEN = 8
"""A storage that was sent so many times is worth to be moved there, however small."""

_PATIENCE = 64
"""After so many more times it is looked again whether a small one that had to stay still has to."""


class Homes:
    """The storage that each block lies in, the revision that found it there first, and how often it
    was sent.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._sent: dict[int, int] = {}

    def settled(self, block: int, storage: Any, revision: int) -> bool:
        """Whether a block's storage, which is about to be sent, is not replaced again and again.

        To move each into shared memory would cost several times what a copy of its bytes does.
        """
        home, since = self._known.get(block, (None, -_CALM))
        if home is None or home.cdata != storage._cdata:
            # As long as somebody holds a weak reference, no other storage gets the number.
            self._known[block] = StorageWeakRef(storage), -_CALM if home is None else revision
            self._sent[block] = 0
        self._sent[block] += 1
        return revision - since >= _CALM

    def often(self, block: int) -> bool:
        """Whether a block was sent from where it lies again and again. Says so once; after that it
        waits longer.
        """
        often = self._sent[block] > _OFTEN
        if often:
            # if it could not be moved now, it is tried again, but not soon
            self._sent[block] -= _PATIENCE
        return often

    def written(self, blocks: Iterable[int]) -> None:
        """Replicas write to some blocks, and so have pages of their own of them in any case."""
        self._sent.update(dict.fromkeys(blocks, 0))


class Lookers:
    """Who looks at a storage, worked out when that is asked: most blocks that change are too small
    to be moved.

    Args:
        row: All tensors.
    """

    def __init__(self, row: Iterable[Tensor]) -> None:
        self._row = row
        self._known: dict[int, set[int]] = defaultdict(set)

    @property
    def asked(self) -> bool:
        """Whether anybody wanted to know."""
        return bool(self._known)

    def of(self, storage: Any) -> int:
        """How many tensors of the row look at a storage."""
        if not self._known:
            for tensor in self._row:
                whole = tensor if tensor._base is None else tensor._base
                self._known[tensor.untyped_storage()._cdata] |= {id(tensor), id(whole)}
        return len(self._known[storage._cdata])
