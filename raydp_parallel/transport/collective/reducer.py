"""Sums of gradients among replicas, begun while backward still runs.

[Note: the order of buckets]
Gradients are packed into buckets, those of the last layers first, for backward comes to them first.
All members must begin the same operations in the same order, and backward may come to the leaves in
another order in each of them: so a bucket begins once all its gradients are there and all buckets
before it have begun. What backward never comes to is zeros, at its end.

[Note: gradients that come twice]
A leaf's gradient is taken when torch has added it up. If more is added afterwards (a reentrant
checkpoint runs a backward of its own inside, and a leaf may be used in two of them), the sum of
that bucket is of no use: the member says so, the driver sums what each kept, and does not ask for
an early beginning with this model any more.

[Note: copies that are not made]
A large gradient is a bucket of its own, and two members' need no packing: one sends it from where
it lies, the other adds it to its own, into the packet for the driver. On a GPU, where copies are
cheap, all are packed.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import MemoryRange, aligned
from raydp_parallel.transport import codec
from raydp_parallel.transport.collective.group import Group
from raydp_parallel.transport.collective.sums import Summation
from raydp_parallel.transport.group_messages import Reduce, SumOutcome
from raydp_parallel.transport.links.link import Attachments, ReservedMemory
from raydp_parallel.transport.messages import Parcel

_BUCKET = 4 << 20
"""Bytes after which a bucket is full. Smaller ones begin earlier, and cost more operations."""

_FIRST = 1 << 20
"""Bytes of the first one, which is small so that the network has something to do early."""

NOTHING, SUMMED, APART = 0, 1, 2
"""Marks of a leaf, see `Reduced.marks`."""


class Bucket(NamedTuple):
    """Some leaves whose gradients travel together.

    Attributes:
        rows: Which of the leaves that take part.
        offsets: Where each begins in the bucket, in elements.
        size: Elements of all.
        dtype: Their dtype.
    """

    rows: Sequence[int]
    offsets: Sequence[int]
    size: int
    dtype: torch.dtype


def plan(leaves: Sequence[Tensor]) -> list[Bucket]:
    """The buckets of some leaves: a function of their sizes and dtypes alone, so that all members
    find the same.
    """
    found: list[Bucket] = []
    rows: list[int] = []
    offsets: list[int] = []
    end = 0

    def close() -> None:
        nonlocal rows, offsets, end
        if rows:
            found.append(Bucket(rows, offsets, end, leaves[rows[0]].dtype))
        rows, offsets, end = [], [], 0

    for row in reversed(range(len(leaves))):
        leaf = leaves[row]
        full = end * leaf.element_size() >= (_BUCKET if found else _FIRST)
        if rows and (full or leaf.dtype != leaves[rows[0]].dtype):
            close()
        rows.append(row)
        offsets.append(end)
        end += leaf.numel()
    close()
    return found


def fits(grad: Tensor, leaf: Tensor) -> bool:
    """Whether a gradient can be summed with those of others by adding numbers in a row."""
    plain = type(grad) is Tensor and grad.layout is torch.strided and not grad.is_nested
    return plain and grad.dtype == leaf.dtype and grad.shape == leaf.shape


class _Shelf:
    """Where the root's sums are made: in the packet that takes them to the driver, where the link
    has room for one.

    Args:
        sizes: The bytes of each bucket.
        back: What the sums travel by; None for who is not the root, or has them elsewhere.
    """

    def __init__(self, sizes: Sequence[int], back: Attachments | None) -> None:
        self._sizes = sizes
        self.starts = [*itertools.accumulate(map(aligned, sizes), initial=0)]
        self.room: ReservedMemory | None = back.room(self.starts[-1]) if back is not None else None

    def place(self, bucket: Bucket, number: int) -> Tensor | None:
        """The memory for a bucket's sum; None if it may be anywhere."""
        if self.room is None:
            return None
        run = MemoryRange(self.room.address + self.starts[number], self._sizes[number], self.room)
        return devices.view(run).view(bucket.dtype)


class Reducer:
    """One `Reduce`, in one member.

    Args:
        group: The group.
        word: What the driver asks for.
        leaves: The leaves of the graph.
        back: What the root's sums travel by.
    """

    def __init__(
        self, group: Group, word: Reduce, leaves: Sequence[Tensor], back: Attachments
    ) -> None:
        self._group = group
        self._word = word
        self._leaves = [leaves[i] for i in word.leaves]
        self._buckets = plan(self._leaves)
        self._marks = bytearray(len(self._leaves))
        self._waiting = [len(bucket.rows) for bucket in self._buckets]
        self._bucket_of = {row: k for k, bucket in enumerate(self._buckets) for row in bucket.rows}
        self._there: set[int] = set()
        device = self._leaves[0].device
        self._makers = devices.Makers(device)
        self._back = back
        sizes = [group.padded(bucket.size) * bucket.dtype.itemsize for bucket in self._buckets]
        self._is_root = group.rank == word.root
        self._shelf = _Shelf(sizes, back if self._is_root and devices.is_cpu(device) else None)
        self._lent: list[tuple[Tensor, int]] = []
        self._sums: list[Summation] = []
        self._flat: list[Tensor] = []
        self._spoiled = self._failed = False
        self.size = 0
        self.seconds = 0.0

    @property
    def marks(self) -> bytes:
        """See `Reduced.marks`."""
        return bytes(self._marks)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Begin with each bucket as soon as torch has added up its gradients."""
        hooks = []
        if self._word.overlap:
            hooks = [
                leaf.register_post_accumulate_grad_hook(self._hook(row))
                for row, leaf in enumerate(self._leaves)
                if leaf.is_leaf
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, row: int) -> Callable[[Tensor], None]:
        return lambda _leaf: self._arrived(row)

    def _arrived(self, row: int) -> None:
        if row in self._there:
            self._spoiled |= self._bucket_of[row] < len(self._sums)
            return
        self._there.add(row)
        self._makers.note()
        self._waiting[self._bucket_of[row]] -= 1
        try:
            while not self._failed and self._more() and not self._waiting[len(self._sums)]:
                self._begin(lambda row: self._leaves[row].grad)
        except RuntimeError:
            self._failed = True  # the group broke: backward goes on

    def _more(self) -> bool:
        return len(self._sums) < len(self._buckets)

    def _begin(self, grad_of: Callable[[int], Tensor | None]) -> None:
        """Begin to sum the next bucket."""
        number = len(self._sums)
        bucket = self._buckets[number]
        self._makers.catch_up()
        grads = [grad_of(row) for row in bucket.rows]
        for row, grad in zip(bucket.rows, grads, strict=True):
            self._marks[row] = (
                NOTHING if grad is None else SUMMED if fits(grad, self._leaves[row]) else APART
            )
        into = self._shelf.place(bucket, number)
        flat = self._lend(bucket, grads[0])
        if flat is None:
            flat = self._pack(bucket, grads, into)
        elif into is None and self._is_root:
            into = devices.scratch(flat)
        self.size += flat.nbytes
        word = self._word
        self._sums.append(self._group.sum(flat, word.root, word.order, word.patience, into))
        # In order, here too: what the first sum does next, it does before the second's.
        all(one.advance() for one in self._sums)

    def _lend(self, bucket: Bucket, grad: Tensor | None) -> Tensor | None:
        """A bucket that is one gradient, where that lies; None if it has to be packed."""
        (row, *others), length = bucket.rows, self._group.padded(bucket.size)
        apt = (
            self._group.spares
            and not others
            and length == bucket.size
            and self._marks[row] == SUMMED
        )
        if not apt or grad is None or not devices.is_cpu(grad.device) or grad.is_neg():
            return None
        if grad.stride() != self._strides(row):
            return None
        self._lent.append((grad, grad._version))
        return grad.detach().as_strided((length,), (1,))

    def _pack(self, bucket: Bucket, grads: Sequence[Tensor | None], into: Tensor | None) -> Tensor:
        """The gradients of a bucket in a row."""
        flat = into
        if flat is None:
            device = self._leaves[bucket.rows[0]].device
            flat = torch.empty(self._group.padded(bucket.size), dtype=bucket.dtype, device=device)
        with torch.no_grad():
            for row, grad, window in zip(
                bucket.rows, grads, self._windows(bucket, flat), strict=True
            ):
                if grad is not None and self._marks[row] == SUMMED:
                    window.copy_(grad)
                else:
                    window.zero_()
        return flat

    def _strides(self, row: int) -> tuple[int, ...]:
        """How a gradient lies: as its leaf, if that has no gaps."""
        return torch.empty_like(self._leaves[row], device="meta").stride()

    def _windows(self, bucket: Bucket, flat: Tensor) -> list[Tensor]:
        """A bucket as its gradients, which lie as their leaves do."""
        found = []
        for row, offset in zip(bucket.rows, bucket.offsets, strict=True):
            found.append(flat.as_strided(self._leaves[row].shape, self._strides(row), offset))
        return found

    def finish(self, found: Sequence[Tensor | None]) -> SumOutcome:
        """Sum what has not begun yet, and wait for all of it.

        Args:
            found: The gradients, by the leaves of the graph.
        """
        began = time.monotonic()
        try:
            while not self._failed and self._more():
                self._begin(lambda row: found[self._word.leaves[row]])
            self._flat = [one.finish(began + self._word.patience) for one in self._sums]
        except RuntimeError:
            self._failed = True
        finally:
            self._sums.clear()
            self.seconds = time.monotonic() - began
        if self._failed:
            return SumOutcome.FAILED
        written = any(grad._version != version for grad, version in self._lent)
        return SumOutcome.SPOILED if self._spoiled or written else SumOutcome.DONE

    def sums(self) -> tuple[Tensor, ...] | None:
        """In the root, the sums, by the leaves that take part."""
        if not self._is_root:
            return None
        found: dict[int, Tensor] = {}
        for bucket, flat in zip(self._buckets, self._flat, strict=True):
            found.update(zip(bucket.rows, self._windows(bucket, flat), strict=True))
        return tuple(found[row] for row in range(len(self._leaves)))

    def parcel(self) -> Parcel | None:
        """In the root, the sums on their way to the driver."""
        sums, shelf = self.sums(), self._shelf
        if sums is None or shelf.room is None:
            return codec.encode(sums, self._back, "gradients")[0] if sums is not None else None
        specs = [codec.spec_of(total, total.data_ptr() - shelf.room.address) for total in sums]
        return codec.row(sums, specs, self._back.filled(shelf.room, shelf.starts[-1]))
