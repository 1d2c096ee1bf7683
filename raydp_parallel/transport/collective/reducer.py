"""Sums of gradients among replicas, begun while backward still runs.

[Note: the order of buckets]
Gradients are packed into buckets, those of the last layers first, because backward computes them
first. All members must begin the same operations in the same order, but backward may compute the
gradients in another order in each member. So a bucket begins once all its gradients are computed
and all buckets before it have begun. A gradient that backward does not compute is zeros, at the end
of backward.

[Note: gradients that come twice]
A leaf's gradient is taken when torch has accumulated it. If more is added afterwards (a reentrant
checkpoint runs a backward of its own inside, and a leaf may be used in two of them), the sum of
that bucket is wrong: the member reports it, the driver sums the gradients that each member kept,
and requests no early beginning for this model any more.

[Note: copies that are not made]
A large gradient is a bucket of its own, and between two members it is not packed: one sends it
without a copy, the other adds it to its own, into the packet for the driver. On a GPU, where copies
are cheap, all gradients are packed.
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
"""Bytes after which a bucket is full. Smaller buckets begin earlier, and cost more operations."""

_FIRST = 1 << 20
"""Bytes of the first bucket, which is small so that the network is in use early."""

NOTHING, SUMMED, APART = 0, 1, 2
"""Marks of a leaf, see `Reduced.marks`."""


class Bucket(NamedTuple):
    """Leaves with gradients that are summed together.

    Attributes:
        rows: The numbers of these leaves among those that take part.
        offsets: The offset of each in the bucket, in elements.
        size: The number of elements of all.
        dtype: Their dtype.
    """

    rows: Sequence[int]
    offsets: Sequence[int]
    size: int
    dtype: torch.dtype


def plan(leaves: Sequence[Tensor]) -> list[Bucket]:
    """The buckets of some leaves. They depend on sizes and dtypes alone, so that all members have
    the same buckets.
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
    """Whether a gradient can be summed in a bucket: it is plain, and has its leaf's shape and
    dtype.
    """
    plain = type(grad) is Tensor and grad.layout is torch.strided and not grad.is_nested
    return plain and grad.dtype == leaf.dtype and grad.shape == leaf.shape


class _SumMemory:
    """Memory for the root's sums: the packet that is sent to the driver, where the link can reserve
    one.

    Args:
        sizes: The bytes of each bucket.
        back: The attachments of the answer.
        fits: Whether the sums may lie there: not those of another member, or of a GPU.
    """

    def __init__(self, sizes: Sequence[int], back: Attachments, fits: bool) -> None:
        self._sizes = sizes
        self._back = back
        self._starts = [*itertools.accumulate(map(aligned, sizes), initial=0)]
        self._reserved: ReservedMemory | None = back.room(self._starts[-1]) if fits else None

    def place(self, bucket: Bucket, number: int) -> Tensor | None:
        """The memory for a bucket's sum; None if none is reserved."""
        if self._reserved is None:
            return None
        address = self._reserved.address + self._starts[number]
        run = MemoryRange(address, self._sizes[number], self._reserved)
        return devices.view(run).view(bucket.dtype)

    def parcel(self, sums: tuple[Tensor, ...]) -> Parcel:
        """The parcel of the sums, which lie here if there is room."""
        reserved = self._reserved
        if reserved is None:
            return codec.encode(sums, self._back, "gradients")[0]
        specs = [codec.spec_of(total, total.data_ptr() - reserved.address) for total in sums]
        return codec.row(sums, specs, self._back.filled(reserved, self._starts[-1]))


class _Progress:
    """Which gradients backward has computed so far.

    Args:
        buckets: The buckets that they go to.

    Attributes:
        spoiled: Whether one was added to after its bucket had begun.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._waiting = [len(bucket.rows) for bucket in buckets]
        self._bucket_of = {row: k for k, bucket in enumerate(buckets) for row in bucket.rows}
        self._computed: set[int] = set()
        self.spoiled = False

    def note(self, row: int, begun: int) -> bool:
        """Note that a leaf's gradient was computed, while so many buckets have begun; returns
        whether it is the first time.
        """
        if row in self._computed:
            self.spoiled |= self._bucket_of[row] < begun
            return False
        self._computed.add(row)
        self._waiting[self._bucket_of[row]] -= 1
        return True

    def has_all(self, number: int) -> bool:
        """Whether all gradients of a bucket are computed."""
        return not self._waiting[number]


class _Packing:
    """Gradients as buckets, and buckets as gradients.

    Args:
        group: The group, which says how long a bucket has to be.
        leaves: The leaves that take part.

    Attributes:
        leaves: As given.
        marks: See `Reduced.marks`.
    """

    def __init__(self, group: Group, leaves: Sequence[Tensor]) -> None:
        self._group = group
        self.leaves = leaves
        self.marks = bytearray(len(leaves))
        self._lent: list[tuple[Tensor, int]] = []

    def mark(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> None:
        """Mark which gradients of a bucket can be summed in it."""
        for row, grad in zip(bucket.rows, grads, strict=True):
            if grad is None:
                self.marks[row] = NOTHING
            elif fits(grad, self.leaves[row]):
                self.marks[row] = SUMMED
            else:
                self.marks[row] = APART

    def lend(self, bucket: Bucket, grad: Tensor | None) -> Tensor | None:
        """The one gradient of a bucket, without a copy; None if the bucket has to be packed."""
        row, *others = bucket.rows
        length = self._group.padded(bucket.size)
        if not self._group.spares or others or length != bucket.size:
            return None
        if grad is None or self.marks[row] != SUMMED:
            return None
        if not devices.is_cpu(grad.device) or grad.is_neg():
            return None
        if grad.stride() != self._strides(row):
            return None
        self._lent.append((grad, grad._version))
        return grad.detach().as_strided((length,), (1,))

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None], into: Tensor | None) -> Tensor:
        """The gradients of a bucket in a row."""
        flat = into
        if flat is None:
            device = self.leaves[bucket.rows[0]].device
            flat = torch.empty(self._group.padded(bucket.size), dtype=bucket.dtype, device=device)
        with torch.no_grad():
            windows = self._windows(bucket, flat)
            for row, grad, window in zip(bucket.rows, grads, windows, strict=True):
                if grad is not None and self.marks[row] == SUMMED:
                    window.copy_(grad)
                else:
                    window.zero_()
        return flat

    def _strides(self, row: int) -> tuple[int, ...]:
        """The strides of a gradient in a bucket: those of its leaf, without gaps."""
        return torch.empty_like(self.leaves[row], device="meta").stride()

    def _windows(self, bucket: Bucket, flat: Tensor) -> list[Tensor]:
        """A bucket's memory as its gradients, with the strides of their leaves."""
        found = []
        for row, offset in zip(bucket.rows, bucket.offsets, strict=True):
            found.append(flat.as_strided(self.leaves[row].shape, self._strides(row), offset))
        return found

    @property
    def written(self) -> bool:
        """Whether a gradient that was lent was written to since."""
        return any(grad._version != version for grad, version in self._lent)

    def unpack(self, buckets: Sequence[Bucket], flat: Sequence[Tensor]) -> list[Tensor]:
        """What lies in buckets, by the leaves that take part."""
        found: dict[int, Tensor] = {}
        for bucket, whole in zip(buckets, flat, strict=True):
            found.update(zip(bucket.rows, self._windows(bucket, whole), strict=True))
        return [found[row] for row in range(len(self.leaves))]


class Reducer:
    """One `Reduce`, in one member.

    Args:
        group: The group.
        request: The driver's request.
        leaves: The leaves of the graph.
        back: The attachments of the answer, which the root's sums are sent with.
    """

    def __init__(
        self, group: Group, request: Reduce, leaves: Sequence[Tensor], back: Attachments
    ) -> None:
        self._group = group
        self._request = request
        taking = [leaves[i] for i in request.leaves]
        self._buckets = plan(taking)
        self._progress = _Progress(self._buckets)
        self._packing = _Packing(group, taking)
        device = taking[0].device
        self._makers = devices.Makers(device)
        sizes = [group.padded(bucket.size) * bucket.dtype.itemsize for bucket in self._buckets]
        in_packet = self._is_root and devices.is_cpu(device) and request.stays is None
        self._memory = _SumMemory(sizes, back, in_packet)
        self._sums: list[Summation] = []
        self._flat: list[Tensor] = []
        self._failed = False
        self.size = 0
        self.seconds = 0.0

    @property
    def _is_root(self) -> bool:
        return self._group.rank == self._request.root

    @property
    def marks(self) -> bytes:
        """See `Reduced.marks`."""
        return bytes(self._packing.marks)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within this block, begin each bucket as soon as torch has accumulated its gradients."""
        hooks = []
        if self._request.overlap:
            for row, leaf in enumerate(self._packing.leaves):
                if leaf.is_leaf:
                    hooks.append(leaf.register_post_accumulate_grad_hook(self._hook(row)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, row: int) -> Callable[[Tensor], None]:
        return lambda _leaf: self._arrived(row)

    def _arrived(self, row: int) -> None:
        if not self._progress.note(row, len(self._sums)):
            return
        self._makers.note()
        try:
            while not self._failed and self._more() and self._progress.has_all(len(self._sums)):
                self._begin(lambda row: self._packing.leaves[row].grad)
        except RuntimeError:
            self._failed = True  # the group is broken: backward continues

    def _more(self) -> bool:
        return len(self._sums) < len(self._buckets)

    def _begin(self, grad_of: Callable[[int], Tensor | None]) -> None:
        """Begin to sum the next bucket."""
        number, request = len(self._sums), self._request
        bucket = self._buckets[number]
        self._makers.catch_up()
        grads = [grad_of(row) for row in bucket.rows]
        self._packing.mark(bucket, grads)
        into = self._memory.place(bucket, number)
        flat = self._packing.lend(bucket, grads[0])
        if flat is None:
            flat = self._packing.pack(bucket, grads, into)
        elif into is None and self._is_root and request.stays is None:
            into = devices.scratch(flat)
        self.size += flat.nbytes
        root = request.root if request.stays is None else None
        self._sums.append(self._group.sum(flat, root, request.order, request.patience, into))
        # In order too: a sum advances only if all sums before it have.
        for one in self._sums:
            if not one.advance():
                break

    def finish(self, found: Sequence[Tensor | None]) -> SumOutcome:
        """Begin the sums that have not begun yet, and wait for all.

        Args:
            found: The gradients, by the leaves of the graph.
        """
        began = time.monotonic()
        try:
            while not self._failed and self._more():
                self._begin(lambda row: found[self._request.leaves[row]])
            self._flat = [one.finish(began + self._request.patience) for one in self._sums]
        except RuntimeError:
            self._failed = True
        finally:
            self._sums.clear()
            self.seconds = time.monotonic() - began
        if self._failed:
            return SumOutcome.FAILED
        spoiled = self._progress.spoiled or self._packing.written
        return SumOutcome.SPOILED if spoiled else SumOutcome.DONE

    def sums(self) -> tuple[Tensor, ...] | None:
        """In the root, the sums, by the leaves that take part."""
        if not self._is_root:
            return None
        return tuple(self._packing.unpack(self._buckets, self._flat))

    def shared(self) -> tuple[Tensor, ...]:
        """The sums that every member has, by the leaves that take part, on their devices."""
        leaves, sums = self._packing.leaves, self._packing.unpack(self._buckets, self._flat)
        return tuple([total.to(leaf.device) for leaf, total in zip(leaves, sums, strict=True)])

    def parcel(self) -> Parcel | None:
        """In the root, the parcel of the sums for the driver."""
        sums = self.sums()
        return None if sums is None else self._memory.parcel(sums)
