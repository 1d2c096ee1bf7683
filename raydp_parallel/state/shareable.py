"""Which storages should be moved into shared memory, and may be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_CALM = 8
"""A storage is moved into shared memory if the one before it lasted this many revisions."""

_OFTEN = 8
"""A storage that was sent this many times is moved there, however small it is."""

_PATIENCE = 64
"""A small storage that could not be moved is tried again after being sent this many times."""


class Homes:
    """The storage that each block lies in, the revision that found it there first, and how often it
    was sent.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._sent: dict[int, int] = {}

    def settled(self, block: int, storage: Any, revision: int) -> bool:
        """Whether a block keeps its storage, which is about to be sent, for many revisions.

        If it does not, a move into shared memory costs several times what a copy of its bytes does.
        """
        home, since = self._known.get(block, (None, -_CALM))
        if home is None or home.cdata != storage._cdata:
            # The weak reference keeps the number from being given to another storage.
            self._known[block] = StorageWeakRef(storage), -_CALM if home is None else revision
            self._sent[block] = 0
        self._sent[block] += 1
        return revision - since >= _CALM

    def often(self, block: int) -> bool:
        """Whether a block was sent often without being moved. It is True once; then only after
        `_PATIENCE` more times.
        """
        often = self._sent[block] > _OFTEN
        if often:
            # if it could not be moved now, it is tried again, but not soon
            self._sent[block] -= _PATIENCE
        return often

    def written(self, blocks: Iterable[int]) -> None:
        """Note that replicas write to some blocks, and so need pages of their own in any case."""
        self._sent.update(dict.fromkeys(blocks, 0))


class Lookers:
    """How many tensors look at each storage. It is counted on demand: most blocks that change are
    too small to be moved.

    Args:
        row: All tensors.
    """

    def __init__(self, row: Iterable[Tensor]) -> None:
        self._row = row
        self._known: dict[int, set[int]] = defaultdict(set)

    @property
    def asked(self) -> bool:
        """Whether a count was asked for."""
        return bool(self._known)

    def of(self, storage: Any) -> int:
        """How many tensors of the row look at a storage."""
        if not self._known:
            for tensor in self._row:
                whole = tensor if tensor._base is None else tensor._base
                self._known[tensor.untyped_storage()._cdata] |= {id(tensor), id(whole)}
        return len(self._known[storage._cdata])
